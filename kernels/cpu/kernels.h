// What each code path offers. The exported functions check their arguments once and call the path that was chosen.
#pragma once

#include "oasiskv.h"

namespace oasis {

struct Kernels {
    const char *name;
    void (*paged_attention)(const oasis_paged_attention_args &);
    void (*exact_logits)(const oasis_exact_logits_args &);
    void (*block_mass)(const oasis_block_mass_args &);
    float (*logsumexp)(const float *logits, int64_t count);
    int64_t (*collect_best)(const float *mass, int64_t first, int64_t last, int64_t count, int32_t *orders, int32_t *blocks,
                            int32_t *room);
    int32_t (*kth_largest)(const int32_t *keys, int64_t count, int64_t k, int64_t slack);
    int64_t (*count_at_least)(const int32_t *keys, int64_t count, int32_t bound);
    void (*minmax_write)(const oasis_minmax_write_args &);
    void (*minmax_score)(const oasis_minmax_score_args &);
    void (*minmax4_write)(const oasis_minmax4_write_args &);
    void (*minmax4_read)(const oasis_minmax4_read_args &);
    void (*bit2_write)(const oasis_bit2_write_args &);
    void (*bit2_score)(const oasis_bit2_score_args &);
    void (*transform_write)(const oasis_transform_write_args &);
    void (*transform_score)(const oasis_transform_score_args &);
    float (*read_slots)(const oasis_read_slots_args &);
};

// The path in use: the best that this processor runs, or what OASISKV_ISA or oasis_set_isa() says.
const Kernels &kernels();

} // namespace oasis
