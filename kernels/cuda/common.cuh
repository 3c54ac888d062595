// What every kernel file uses: launching with an error message, numbers of all dtypes, and sums over warps and blocks.
#pragma once

#include "device.cuh"
#include "oasiskv.h"

namespace oasis {

constexpr uint32_t kWarp = 0xffffffffu;

// Keeps the message for oasis_last_error() and returns `status`. printf-like.
[[gnu::format(printf, 2, 3)]] int32_t fail(oasis_status status, const char *format, ...);

// Grids of more than 65535 in y or z do not exist; what is so large goes to x.
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kMaxGridX = 2147483647;

template <class... Parameters, class... Arguments>
int32_t launch(const char *name, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, void *stream,
               Arguments... arguments) {
    const cudaError_t error = launch_kernel(name, kernel, grid, dim3(static_cast<unsigned>(threads)), shared_bytes,
                                            static_cast<cudaStream_t>(stream), arguments...);
    return error == cudaSuccess ? OASIS_OK : fail(OASIS_FAILED, "launching %s: %s", name, error_text(error));
}

template <class T> constexpr __host__ __device__ T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T> constexpr __host__ __device__ T at_most(T a, T b) { return a < b ? a : b; }
template <class T> constexpr __host__ __device__ T at_least(T a, T b) { return a > b ? a : b; }
constexpr __host__ __device__ int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// A table entry that points nowhere counts as EMPTY: nobody can be told of it without waiting for the device.
__device__ __forceinline__ int64_t entry_within(int64_t entry, int64_t limit) {
    return entry >= 0 && entry < limit ? entry : OASIS_EMPTY;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }

// Calls `function(T{})` with the type of a dtype.
template <class Function> int32_t with_dtype(int64_t dtype, Function &&function) {
    switch (dtype) {
    case OASIS_FLOAT32: return function(float{});
    case OASIS_BFLOAT16: return function(__nv_bfloat16{});
    case OASIS_FLOAT16: return function(__half{});
    default: return fail(OASIS_INVALID, "dtype is %lld", static_cast<long long>(dtype));
    }
}

__device__ __forceinline__ float not_below(float a, float b) { return a > b ? a : b; }

// A logit whose size stays below `cap`; as it is if that is 0.
__device__ __forceinline__ float soft_capped(float logit, float cap) { return cap > 0.0f ? cap * tanhf(logit / cap) : logit; }

__device__ __forceinline__ float warp_max(float x) {
    for (int flip = 16; flip > 0; flip /= 2) x = not_below(x, __shfl_xor_sync(kWarp, x, flip));
    return x;
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
    for (int flip = 16; flip > 0; flip /= 2) x += __shfl_xor_sync(kWarp, x, flip);
    return x;
}

// Sum over the threads of a block, the same for all of them. `partial` has room for 32. Barriers before and after its use.
template <class T> __device__ __forceinline__ T block_sum(T x, T *partial) {
    const int tid = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (tid % 32 == 0) partial[tid / 32] = x;
    __syncthreads();
    T sum = partial[0];
    for (int warp = 1; warp < warps; ++warp) sum += partial[warp];
    return sum;
}

// The sum of the counts of the threads before this one, and of all of them. `partial` has room for 32.
__device__ __forceinline__ int count_before(int count, int *partial, int &total) {
    const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warps = static_cast<int>(blockDim.x) / 32;
    int upto = count;
    for (int delta = 1; delta < 32; delta *= 2) {
        const int other = __shfl_up_sync(kWarp, upto, static_cast<unsigned>(delta));
        if (lane >= delta) upto += other;
    }
    __syncthreads();
    if (lane == 31) partial[tid / 32] = upto;
    __syncthreads();
    int before = upto - count;
    total = 0;
    for (int warp = 0; warp < warps; ++warp) {
        if (warp < tid / 32) before += partial[warp];
        total += partial[warp];
    }
    return before;
}

// Unsigned numbers that are ordered as the floats are; -0 is 0, and none is 0 but that of a NaN.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Parts of shared memory, one after the other, each aligned to 16 bytes.
class Carver {
  public:
    template <class T> __device__ T *take(int64_t count) {
        auto *part = reinterpret_cast<T *>(shared_memory() + used_);
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
        return part;
    }

  private:
    int64_t used_ = 0;
};

// What Carver needs for parts of these byte counts.
template <class... Bytes> size_t carved(Bytes... bytes) {
    return static_cast<size_t>((((static_cast<int64_t>(bytes) + 15) / 16 * 16) + ... + 0));
}

} // namespace oasis
