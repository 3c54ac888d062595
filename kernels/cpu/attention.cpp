// The exported attention ops: arguments are checked here, before any memory that a table points into is read.
#include "kernels.h"
#include "status.h"

using namespace oasis;

namespace {

bool sizes_fit(int64_t query_heads, int64_t kv_heads, int64_t dtype, int64_t block_size, int64_t head_dim, float softcap) {
    if (kv_heads < 1 || query_heads < 1 || query_heads % kv_heads)
        return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", static_cast<long long>(query_heads),
                    static_cast<long long>(kv_heads)) == OASIS_OK;
    if (dtype < OASIS_FLOAT32 || dtype > OASIS_FLOAT16)
        return fail(OASIS_INVALID, "dtype is %lld", static_cast<long long>(dtype)) == OASIS_OK;
    if (block_size < 1 || head_dim < 1)
        return fail(OASIS_INVALID, "block_size is %lld and head_dim %lld", static_cast<long long>(block_size),
                    static_cast<long long>(head_dim)) == OASIS_OK;
    if (!(softcap >= 0.0f)) return fail(OASIS_INVALID, "softcap is %g", static_cast<double>(softcap)) == OASIS_OK;
    return true;
}

} // namespace

extern "C" int32_t oasis_paged_attention(const oasis_paged_attention_args *args) {
    const auto &a = *args;
    if (!sizes_fit(a.query_heads, a.kv_heads, a.dtype, a.block_size, a.head_dim, a.softcap)) return OASIS_INVALID;
    const int64_t heads = a.sequences * a.kv_heads;
    if (!entries_within("slots", a.slots, heads * a.places, a.num_slots)) return OASIS_OUT_OF_RANGE;
    if (!entries_within("arena_slots", a.arena_slots, heads * a.arena_places, a.num_arena_slots)) return OASIS_OUT_OF_RANGE;
    kernels().paged_attention(a);
    return OASIS_OK;
}

extern "C" int32_t oasis_exact_logits(const oasis_exact_logits_args *args) {
    const auto &a = *args;
    if (!sizes_fit(a.query_heads, a.kv_heads, a.dtype, a.block_size, a.head_dim, a.softcap)) return OASIS_INVALID;
    if (!entries_within("pages", a.pages, a.sequences * a.blocks, a.num_pages)) return OASIS_OUT_OF_RANGE;
    kernels().exact_logits(a);
    return OASIS_OK;
}

extern "C" int32_t oasis_block_mass(const oasis_block_mass_args *args) {
    if (args->kv_heads < 1 || args->query_heads % args->kv_heads)
        return fail(OASIS_INVALID, "query_heads is %lld, no multiple of kv_heads %lld", static_cast<long long>(args->query_heads),
                    static_cast<long long>(args->kv_heads));
    kernels().block_mass(*args);
    return OASIS_OK;
}
