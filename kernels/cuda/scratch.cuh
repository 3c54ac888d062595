// How much scratch the ops need; each function lies beside its op.
#pragma once

#include "oasiskv.h"

namespace oasis {

int64_t attention_scratch_bytes(const oasis_paged_attention_args &a);
int64_t mass_scratch_bytes(const oasis_block_mass_args &a);
int64_t missing_scratch_bytes(const oasis_top_missing_args &a);
int64_t select_scratch_bytes(const oasis_select_args &a);
int64_t transform_scratch_bytes(const oasis_transform_score_args &a);

} // namespace oasis
