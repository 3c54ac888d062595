// exact_logits: block logits by the keys themselves, read where they lie.
#include "block_scores.cuh"

namespace oasis {
namespace {

template <class T> struct Keys {
    const T *arena;
    const int64_t *pages;
    int64_t blocks, num_pages, kv_heads, block_size, head_dim;
    const T *found = nullptr;

    __device__ bool find(int64_t sequence, int64_t head, int64_t block) {
        const int64_t page = entry_within(pages[sequence * blocks + block], num_pages);
        if (page < 0) return false;
        found = arena + (page * kv_heads + head) * 2 * block_size * head_dim;
        return true;
    }
    __device__ float key(int token, int dim) const { return to_float(found[token * head_dim + dim]); }
};

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_exact_logits(const oasis_exact_logits_args *args) {
    const auto &a = *args;
    if (!(a.softcap >= 0.0f)) return fail(OASIS_INVALID, "softcap is %g", static_cast<double>(a.softcap));
    return with_dtype(a.dtype, [&](auto type) {
        using T = decltype(type);
        const Keys<T> keys{static_cast<const T *>(a.arena), a.pages, a.blocks, a.num_pages, a.kv_heads, a.block_size, a.head_dim};
        return score_blocks("exact_logits", query_view(a), keys, a.dtype, a.blocks, a.block_size, a.scale, a.softcap, a.logits,
                            a.stream);
    });
}
