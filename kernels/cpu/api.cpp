// What the caller asks once, at load: which ABI, which ops.
#include "kernels.h"
#include "status.h"

using namespace oasis;

extern "C" int32_t oasis_abi_version(void) { return OASIS_ABI_VERSION; }

extern "C" size_t oasis_struct_size(int32_t op) {
    switch (op) {
    case OASIS_APPEND_ROWS: return sizeof(oasis_append_rows_args);
    case OASIS_COPY_BLOCKS: return sizeof(oasis_copy_blocks_args);
    case OASIS_PAGED_ATTENTION: return sizeof(oasis_paged_attention_args);
    case OASIS_EXACT_LOGITS: return sizeof(oasis_exact_logits_args);
    case OASIS_BLOCK_MASS: return sizeof(oasis_block_mass_args);
    case OASIS_TOP_MISSING: return sizeof(oasis_top_missing_args);
    case OASIS_SELECT: return sizeof(oasis_select_args);
    case OASIS_EXCHANGE_SLOTS: return sizeof(oasis_exchange_slots_args);
    case OASIS_MINMAX_WRITE: return sizeof(oasis_minmax_write_args);
    case OASIS_MINMAX_SCORE: return sizeof(oasis_minmax_score_args);
    case OASIS_MINMAX4_WRITE: return sizeof(oasis_minmax4_write_args);
    case OASIS_MINMAX4_READ: return sizeof(oasis_minmax4_read_args);
    case OASIS_BIT2_WRITE: return sizeof(oasis_bit2_write_args);
    case OASIS_BIT2_SCORE: return sizeof(oasis_bit2_score_args);
    case OASIS_TRANSFORM_WRITE: return sizeof(oasis_transform_write_args);
    case OASIS_TRANSFORM_SCORE: return sizeof(oasis_transform_score_args);
    case OASIS_READ_SLOTS: return sizeof(oasis_read_slots_args);
    case OASIS_CORRECTED_ATTENTION: return sizeof(oasis_corrected_attention_args);
    case OASIS_MARK_PLACES: return sizeof(oasis_mark_places_args);
    case OASIS_LOAD_BLOCKS: return sizeof(oasis_load_blocks_args);
    case OASIS_PUBLISH_BLOCKS: return sizeof(oasis_publish_blocks_args);
    case OASIS_GUESS_QUERIES: return sizeof(oasis_guess_queries_args);
    case OASIS_LEARN_ERRORS: return sizeof(oasis_learn_errors_args);
    default: return 0;
    }
}

extern "C" int64_t oasis_scratch_bytes(int32_t op, const void *) { return oasis_struct_size(op) ? 0 : -1; }

extern "C" int32_t oasis_read_slots(const oasis_read_slots_args *args) {
    if (!entries_within("slots", args->slots, args->count, args->num_slots)) return OASIS_OUT_OF_RANGE;
    if (args->slot_bytes % 64) return fail(OASIS_INVALID, "slot_bytes is %lld, no multiple of 64", (long long)args->slot_bytes);
    *args->sum = kernels().read_slots(*args);
    return OASIS_OK;
}
