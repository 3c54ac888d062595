// What the caller asks at load, and the message of a failure.
#include "common.cuh"
#include "scratch.cuh"

#include <cstdarg>
#include <cstdio>

namespace oasis {
namespace {
thread_local char message[512] = "";
}

int32_t fail(oasis_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

} // namespace oasis

using namespace oasis;

extern "C" const char *oasis_last_error(void) { return message; }

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
    default: return 0;
    }
}

extern "C" int64_t oasis_scratch_bytes(int32_t op, const void *args) {
    switch (op) {
    case OASIS_PAGED_ATTENTION: return attention_scratch_bytes(*static_cast<const oasis_paged_attention_args *>(args));
    case OASIS_BLOCK_MASS: return mass_scratch_bytes(*static_cast<const oasis_block_mass_args *>(args));
    case OASIS_TOP_MISSING: return missing_scratch_bytes(*static_cast<const oasis_top_missing_args *>(args));
    case OASIS_SELECT: return select_scratch_bytes(*static_cast<const oasis_select_args *>(args));
    case OASIS_TRANSFORM_SCORE: return transform_scratch_bytes(*static_cast<const oasis_transform_score_args *>(args));
    default: return oasis_struct_size(op) ? 0 : -1;
    }
}

extern "C" const char *oasis_build_info(void) {
    static thread_local char text[128];
    std::snprintf(text, sizeof text, "cuda, %s, head_dim 64 80 96 128 256", kCompiler);
    return text;
}

extern "C" int32_t oasis_set_isa(const char *name) {
    return fail(OASIS_UNSUPPORTED, "the CUDA library has no code path %s: the driver chooses", name);
}
