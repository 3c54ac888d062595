// Bounds of every key channel in 4 bits: minmax4_write and minmax4_read. Every operation rounds as the reference's does: nothing is
// contracted into an FMA, so that the codes are the same.
#include "common.cuh"

namespace oasis {
namespace {

constexpr int kThreads = 128;
constexpr float kLargest = 60000.0f;             // bounds are clipped to this, so that fp16 holds them and what rounding adds
constexpr float kSlack = 0.0009765625f;          // 2^-10, relative: twice what rounding to fp16 can move a number
constexpr float kTiny = 5.9604644775390625e-08f; // 2^-24: twice what rounding can move a number close to 0

__device__ __forceinline__ float clipped(float x) { return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x; }

__device__ float block_max(float x, float *partial) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) x = not_below(x, partial[warp]);
    return x;
}

template <class T> __global__ void __launch_bounds__(kThreads) minmax4_write_kernel(oasis_minmax4_write_args a) {
    const int64_t index = blockIdx.x, head = blockIdx.y, page = entry_within(a.pages[index], a.num_pages);
    if (page < 0) return; // all threads alike
    Carver carver;
    float *partial = carver.take<float>(32);
    float *bounds = carver.take<float>(2 * a.head_dim);
    const auto *keys = static_cast<const T *>(a.keys) + index * a.keys_block_stride + head * a.keys_head_stride;
    float most[2] = {-INFINITY, -INFINITY}, least[2] = {INFINITY, INFINITY};
    for (int64_t dim = threadIdx.x; dim < a.head_dim; dim += kThreads) {
        float low = to_float(keys[dim]), high = low;
        for (int64_t token = 1; token < a.block_size; ++token) {
            const float key = to_float(keys[token * a.keys_token_stride + dim]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        const float both[2] = {clipped(low), clipped(high)};
        for (int bound = 0; bound < 2; ++bound) {
            bounds[bound * a.head_dim + dim] = both[bound];
            most[bound] = not_below(both[bound], most[bound]);
            least[bound] = both[bound] < least[bound] ? both[bound] : least[bound];
        }
    }
    const int64_t kept = page * a.kv_heads + head, half = a.head_dim / 2;
    for (int bound = 0; bound < 2; ++bound) {
        const float high = block_max(most[bound], partial), low = -block_max(-least[bound], partial);
        const __half zero = __float2half_rn(__fadd_rn(__fadd_rn(low, -__fmul_rn(kSlack, fabsf(low))), -kTiny));
        const float spread = __fadd_rn(high, -__half2float(zero)) / 15.0f;
        const __half step = __float2half_rn(__fadd_rn(__fmul_rn(spread, 1.0f + 2.0f * kSlack), kTiny));
        if (threadIdx.x == 0) {
            auto *ranges = static_cast<__half *>(a.ranges) + (kept * 2 + bound) * 2;
            ranges[0] = zero;
            ranges[1] = step;
        }
        // Each thread packs channels that lie apart, and may be those of other threads: the barriers of block_max are between.
        for (int64_t dim = threadIdx.x; dim < half; dim += kThreads) {
            uint32_t packed = 0;
            for (int part = 0; part < 2; ++part) {
                float level = __fadd_rn(bounds[bound * a.head_dim + dim + part * half], -__half2float(zero)) / __half2float(step);
                if (a.outward) level = bound == 0 ? floorf(level) : ceilf(level);
                level = rintf(level);
                packed |= static_cast<uint32_t>(level >= 15.0f ? 15.0f : level > 0.0f ? level : 0.0f) << (4 * part);
            }
            a.codes[(kept * 2 + bound) * half + dim] = static_cast<uint8_t>(packed);
        }
    }
}

// Grid: rows of the result, their inner heads times two bounds.
__global__ void __launch_bounds__(kThreads) minmax4_read_kernel(oasis_minmax4_read_args a) {
    const int64_t index = blockIdx.x, inner = blockIdx.y, width = 2 * a.inner, half = a.head_dim / 2;
    const int64_t row = entry_within(a.rows[index], a.num_rows);
    float *bounds = a.bounds + (index * width + inner) * a.head_dim;
    const int64_t kept = (row < 0 ? 0 : row) * width + inner;
    const auto *range = static_cast<const __half *>(a.ranges) + kept * 2;
    const float zero = row < 0 ? 0.0f : __half2float(range[0]), step = row < 0 ? 0.0f : __half2float(range[1]);
    for (int64_t dim = threadIdx.x; dim < half; dim += kThreads) {
        const uint32_t packed = row < 0 ? 0u : a.codes[kept * half + dim];
        bounds[dim] = __fadd_rn(zero, __fmul_rn(step, static_cast<float>(packed & 15u)));
        bounds[dim + half] = __fadd_rn(zero, __fmul_rn(step, static_cast<float>(packed >> 4)));
    }
}

} // namespace
} // namespace oasis

using namespace oasis;

extern "C" int32_t oasis_minmax4_write(const oasis_minmax4_write_args *args) {
    const auto &a = *args;
    if (a.count == 0 || a.kv_heads == 0) return OASIS_OK;
    if (a.block_size < 1 || a.head_dim % 2 || a.head_dim > 4096)
        return fail(OASIS_UNSUPPORTED, "block_size is %lld and head_dim %lld", static_cast<long long>(a.block_size),
                    static_cast<long long>(a.head_dim));
    if (a.kv_heads > kMaxGridYZ || a.count > kMaxGridX)
        return fail(OASIS_UNSUPPORTED, "%lld blocks at once", static_cast<long long>(a.count));
    const dim3 grid(static_cast<unsigned>(a.count), static_cast<unsigned>(a.kv_heads));
    const size_t shared = carved(32 * sizeof(float), 2 * a.head_dim * static_cast<int64_t>(sizeof(float)));
    return with_dtype(a.dtype, [&](auto type) {
        return launch("minmax4_write", minmax4_write_kernel<decltype(type)>, grid, kThreads, shared, a.stream, a);
    });
}

extern "C" int32_t oasis_minmax4_read(const oasis_minmax4_read_args *args) {
    const auto &a = *args;
    if (a.count == 0 || a.inner == 0) return OASIS_OK;
    if (a.head_dim % 2) return fail(OASIS_INVALID, "head_dim is %lld", static_cast<long long>(a.head_dim));
    if (2 * a.inner > kMaxGridYZ || a.count > kMaxGridX)
        return fail(OASIS_UNSUPPORTED, "%lld rows at once", static_cast<long long>(a.count));
    const dim3 grid(static_cast<unsigned>(a.count), static_cast<unsigned>(2 * a.inner));
    return launch("minmax4_read", minmax4_read_kernel, grid, kThreads, 0, a.stream, a);
}
