// The part of the CUDA runtime that the kernels use, for g++: words of the language, built-in variables, warp functions, atomics.
#pragma once

#include "emulator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__

using cudaError_t = int;
using cudaStream_t = void *;
constexpr cudaError_t cudaSuccess = 0;

using dim3 = emu::Dim;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())

inline void __syncthreads() { emu::sync_threads(); }
inline void __syncwarp(uint32_t mask = emu::kFullWarp) { emu::sync_warp(mask); }

template <class T> T __shfl_sync(uint32_t mask, T value, int lane) { return emu::shuffle(mask, value, lane & 31); }
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int flip) {
    return emu::shuffle(mask, value, (emu::lane() ^ flip) & 31);
}
// A lane below the first one keeps its own value.
template <class T> T __shfl_up_sync(uint32_t mask, T value, unsigned delta) {
    const int source = emu::lane() - static_cast<int>(delta);
    return emu::shuffle(mask, value, source < 0 ? emu::lane() : source);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) { return emu::ballot(mask, predicate != 0); }
inline int __any_sync(uint32_t mask, int predicate) { return emu::ballot(mask, predicate != 0) != 0; }

inline int __popc(uint32_t value) { return __builtin_popcount(value); }

template <class T> [[gnu::no_sanitize("thread")]] T atomicAdd(T *where, T value) {
    emu::note_atomic(where, sizeof(T));
    const T before = *where;
    *where = before + value;
    return before;
}
template <class T> [[gnu::no_sanitize("thread")]] T atomicOr(T *where, T value) {
    emu::note_atomic(where, sizeof(T));
    const T before = *where;
    *where = before | value;
    return before;
}

inline float __fmul_rn(float a, float b) { return a * b; } // the build switches contraction off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float x) { return std::exp(x); }
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
