// What this code path offers.
#include "declarations.h"
#include "kernels.h"

namespace oasis::OASIS_ISA {

#define OASIS_TEXT_OF(x) #x
#define OASIS_TEXT(x) OASIS_TEXT_OF(x)

extern const Kernels table;
const Kernels table{
    .name = OASIS_TEXT(OASIS_ISA),
    .paged_attention = paged_attention,
    .exact_logits = exact_logits,
    .block_mass = block_mass,
    .logsumexp = logsumexp,
    .collect_best = collect_best,
    .kth_largest = kth_largest,
    .count_at_least = count_at_least,
    .minmax_write = minmax_write,
    .minmax_score = minmax_score,
    .minmax4_write = minmax4_write,
    .minmax4_read = minmax4_read,
    .bit2_write = bit2_write,
    .bit2_score = bit2_score,
    .transform_write = transform_write,
    .transform_score = transform_score,
    .read_slots = read_slots,
};

} // namespace oasis::OASIS_ISA
