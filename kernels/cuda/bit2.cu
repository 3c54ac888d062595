// Two bits of every key channel: bit2_write and bit2_score.
#include "block_scores.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128;
constexpr float kTiny = 5.9604644775390625e-08f; // 2^-24: the smallest fp16 number above 0

__device__ __forceinline__ float level_step(float low, float high) { return not_below(high - low, 0.0f) / 3.0f; }

template <class T> __global__ void __launch_bounds__(kThreads) bit2_write_kernel(oasis_bit2_write_args a) {
    const int64_t index = blockIdx.x, head = blockIdx.y, quarter = a.head_dim / 4;
    const int64_t page = entry_within(a.pages[index], a.num_pages);
    if (page < 0) return;
    const auto *keys = static_cast<const T *>(a.keys) + index * a.keys_block_stride + head * a.keys_head_stride;
    const float *lows = a.bounds + (index * a.kv_heads + head) * 2 * a.head_dim, *highs = lows + a.head_dim;
    uint8_t *codes = a.codes + (page * a.kv_heads + head) * a.block_size * quarter;
    for (int64_t i = threadIdx.x; i < a.block_size * quarter; i += kThreads) {
        const int64_t token = i / quarter, byte = i % quarter;
        uint32_t packed = 0;
        for (int part = 0; part < 4; ++part) {
            const int64_t dim = byte + part * quarter;
            const float step = not_below(level_step(lows[dim], highs[dim]), kTiny);
            const float level = rintf((to_float(keys[token * a.keys_token_stride + dim]) - lows[dim]) / step);
            packed |= static_cast<uint32_t>(level >= 3.0f ? 3.0f : level > 0.0f ? level : 0.0f) << (2 * part);
        }
        codes[i] = static_cast<uint8_t>(packed);
    }
}

struct Codes {
    const uint8_t *codes;
    const int64_t *slots;
    const float *bounds;
    int64_t blocks, num_slots, kv_heads, block_size, head_dim;
    const uint8_t *found = nullptr;
    const float *lows = nullptr;

    __device__ bool find(int64_t sequence, int64_t head, int64_t block) {
        const int64_t entry = (sequence * kv_heads + head) * blocks + block, slot = entry_within(slots[entry], num_slots);
        if (slot < 0) return false;
        found = codes + slot * block_size * (head_dim / 4);
        lows = bounds + entry * 2 * head_dim;
        return true;
    }
    __device__ float key(int token, int dim) const {
        const int quarter = static_cast<int>(head_dim / 4);
        const uint32_t code = found[token * quarter + dim % quarter] >> (2 * (dim / quarter)) & 3u;
        return lows[dim] + level_step(lows[dim], lows[head_dim + dim]) * static_cast<float>(code);
    }
};

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_bit2_write(const oasis_bit2_write_args *args) {
    const auto &a = *args;
    if (a.count == 0 || a.kv_heads == 0) return OASIS_OK;
    if (a.kv_heads > kMaxGridYZ || a.count > kMaxGridX)
        return fail(OASIS_UNSUPPORTED, "%lld blocks at once", static_cast<long long>(a.count));
    const dim3 grid(static_cast<unsigned>(a.count), static_cast<unsigned>(a.kv_heads));
    return with_dtype(a.dtype, [&](auto type) {
        return launch("bit2_write", bit2_write_kernel<decltype(type)>, grid, kThreads, 0, a.stream, a);
    });
}

extern "C" int32_t oasis_bit2_score(const oasis_bit2_score_args *args) {
    const auto &a = *args;
    const Codes codes{a.codes, a.slots, a.bounds, a.blocks, a.num_slots, a.kv_heads, a.block_size, a.head_dim};
    return score_blocks("bit2_score", query_view(a), codes, a.dtype, a.blocks, a.block_size, a.scale, 0.0f, a.logits, a.stream);
}
