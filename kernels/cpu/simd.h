// Vectors of floats as wide as the code path being compiled has them, in a namespace of that path.
//
// GCC's vector types bring arithmetic, comparisons and `mask ? a : b` for every width; what follows adds loads that widen, stores that
// narrow, exponentials and sums. Files of isa/ include this; nothing else does.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace oasis {
struct BF16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};
} // namespace oasis

namespace oasis::OASIS_ISA {

#if defined(__AVX512F__) || defined(OASIS_16_LANES)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4; // SSE2 and NEON are the baseline of their machines
#endif

using F32 = float __attribute__((vector_size(4 * kLanes)));
using I32 = int32_t __attribute__((vector_size(4 * kLanes)));
using U32 = uint32_t __attribute__((vector_size(4 * kLanes)));
using U16 = uint16_t __attribute__((vector_size(2 * kLanes)));

#define OASIS_INLINE [[gnu::always_inline]] inline

OASIS_INLINE F32 broadcast(float x) { return x - F32{}; } // not F32{} + x, which is no copy for -0
OASIS_INLINE I32 broadcast(int32_t x) { return I32{} + x; }

template <class V, class P> OASIS_INLINE V load_as(const P *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

OASIS_INLINE F32 load(const float *from) { return load_as<F32>(from); }

OASIS_INLINE F32 load(const BF16 *from) {
    return reinterpret_cast<F32>(__builtin_convertvector(load_as<U16>(from), U32) << 16);
}

OASIS_INLINE F32 load(const F16 *from) {
#if defined(__AVX512F__)
    return reinterpret_cast<F32>(_mm512_cvtph_ps(load_as<__m256i>(from)));
#elif defined(__F16C__) && !defined(OASIS_16_LANES)
    return reinterpret_cast<F32>(_mm256_cvtph_ps(load_as<__m128i>(from)));
#else
    // Put exponent and mantissa where a float has them, then correct the exponent's bias by a product, exact even for subnormals.
    const U32 half = __builtin_convertvector(load_as<U16>(from), U32);
    const F32 magnitude = reinterpret_cast<F32>((half & 0x7fffu) << 13) * 0x1p112f;
    const U32 special = reinterpret_cast<U32>((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return reinterpret_cast<F32>(reinterpret_cast<U32>(magnitude) | special | ((half & 0x8000u) << 16));
#endif
}

template <size_t... lane> OASIS_INLINE I32 numbers(std::index_sequence<lane...>) { return I32{static_cast<int32_t>(lane)...}; }

// 0, 1, 2, ...
OASIS_INLINE I32 lane_numbers() { return numbers(std::make_index_sequence<kLanes>()); }

// Bit i of the result is set where lane i of a comparison's result is.
OASIS_INLINE uint32_t bits_of(I32 mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX2__) && !defined(OASIS_16_LANES)
    return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
    return bits;
#endif
}

// The first `count` elements, zeros behind; nothing beyond them is read. count <= kLanes.
template <class T> OASIS_INLINE F32 load_first(const T *from, int64_t count) {
    if (count == kLanes) return load(from);
    T whole[kLanes] = {};
    std::memcpy(whole, from, static_cast<size_t>(count) * sizeof(T));
    return load(whole);
}

OASIS_INLINE void store(float *to, F32 v) { std::memcpy(to, &v, sizeof v); }
OASIS_INLINE void store(int32_t *to, I32 v) { std::memcpy(to, &v, sizeof v); }

// The bits of the nearest bf16, ties to even; every NaN becomes the one that torch writes.
OASIS_INLINE U32 rounded_to_bf16(F32 v) {
    const U32 bits = reinterpret_cast<U32>(v);
    const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const U32 nan = reinterpret_cast<U32>(v != v);
    return (rounded & ~nan) | (nan & 0x7fc0u);
}

OASIS_INLINE void store(BF16 *to, F32 v) {
    const U16 narrow = __builtin_convertvector(rounded_to_bf16(v), U16);
    std::memcpy(to, &narrow, sizeof narrow);
}

OASIS_INLINE void store(F16 *to, F32 v) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &half, sizeof half);
#elif defined(__F16C__) && !defined(OASIS_16_LANES)
    const __m128i half = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &half, sizeof half);
#else
    // Normal numbers: round the mantissa and correct the bias in integers. Smaller ones: adding a half lines up the bits.
    const U32 bits = reinterpret_cast<U32>(v), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    const U32 normal = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
    const U32 tiny = reinterpret_cast<U32>(reinterpret_cast<F32>(size) + 0.5f) - 0x3f000000u;
    const auto is_tiny = reinterpret_cast<U32>(size < 0x38800000u);
    const auto is_large = reinterpret_cast<U32>(size >= 0x47800000u), is_nan = reinterpret_cast<U32>(size > 0x7f800000u);
    U32 half = (tiny & is_tiny) | (normal & ~is_tiny);
    half = (half & ~is_large) | (is_large & 0x7c00u) | (is_nan & 0x7e00u);
    const U16 narrow = __builtin_convertvector(half | sign, U16);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

template <class T> OASIS_INLINE void store_first(T *to, F32 v, int64_t count) {
    if (count == kLanes) return store(to, v);
    T whole[kLanes];
    store(whole, v);
    std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(T));
}

// `b` where either is NaN, as the instruction has it: larger(sum, NaN) is NaN.
OASIS_INLINE F32 larger(F32 a, F32 b) {
#if defined(__AVX512F__)
    return reinterpret_cast<F32>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__) && !defined(OASIS_16_LANES)
    return reinterpret_cast<F32>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

// Lane i takes lane i ^ distance.
template <int distance, size_t... lane> OASIS_INLINE F32 across(F32 v, std::index_sequence<lane...>) {
    return __builtin_shufflevector(v, v, (lane ^ distance)...);
}

template <int distance = kLanes / 2> OASIS_INLINE float largest(F32 v) {
    v = larger(v, across<distance>(v, std::make_index_sequence<kLanes>()));
    if constexpr (distance > 1) return largest<distance / 2>(v);
    return v[0];
}

template <int distance = kLanes / 2> OASIS_INLINE float sum(F32 v) {
    v += across<distance>(v, std::make_index_sequence<kLanes>());
    if constexpr (distance > 1) return sum<distance / 2>(v);
    return v[0];
}

template <int width, size_t... lane> OASIS_INLINE F32 fold(F32 a, F32 b, std::index_sequence<lane...>) {
    const F32 near = __builtin_shufflevector(a, b, (lane % (2 * width) < width ? lane : kLanes + lane - width)...);
    const F32 far = __builtin_shufflevector(a, b, (lane % (2 * width) < width ? lane + width : kLanes + lane)...);
    return near + far;
}

template <int width> OASIS_INLINE void fold_all(F32 *v) {
    for (int i = 0; i < width; ++i) v[i] = fold<width>(v[i], v[i + width], std::make_index_sequence<kLanes>());
    if constexpr (width > 1) fold_all<width / 2>(v);
}

// kLanes vectors to one: lane i holds the sum over v[i]. Destroys v.
OASIS_INLINE F32 sums(F32 *v) {
    fold_all<kLanes / 2>(v);
    return v[0];
}

// 2^x for x <= 0, to 2 ulp; 0 for -inf and wherever the result would be subnormal; NaN stays NaN.
OASIS_INLINE F32 exp2_nonpositive(F32 x) {
    const F32 bounded = x < -126.0f ? broadcast(-126.0f) : x;
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const F32 shifted = bounded + 12582912.0f;
    const F32 rest = bounded - (shifted - 12582912.0f);
    F32 power = broadcast(1.535336188e-4f) * rest + 1.339887440e-3f;
    power = power * rest + 9.618437357e-3f;
    power = power * rest + 5.550332548e-2f;
    power = power * rest + 2.402264791e-1f;
    power = power * rest + 6.931472028e-1f;
    power = power * rest + 1.0f;
    const I32 exponent = (reinterpret_cast<I32>(shifted) - 0x4B400000) << 23;
    const F32 result = reinterpret_cast<F32>(reinterpret_cast<I32>(power) + exponent);
    const F32 zeroed = x < -126.0f ? F32{} : result;
    return x == x ? zeroed : x;
}

// The natural logarithm of a normal x > 0, to 2 ulp; NaN stays NaN, and any other x gives some finite number.
OASIS_INLINE F32 log_of(F32 x) {
    const I32 bits = reinterpret_cast<I32>(x);
    const I32 exponent = (bits - 0x3f3504f3) >> 23; // so that the mantissa is in sqrt(1/2) .. sqrt(2)
    const F32 mantissa = reinterpret_cast<F32>(bits - (exponent << 23));
    const F32 t = (mantissa - 1.0f) / (mantissa + 1.0f), t2 = t * t;
    F32 series = t2 * (1.0f / 9) + (1.0f / 7);
    series = series * t2 + (1.0f / 5);
    series = series * t2 + (1.0f / 3);
    series = series * t2 + 1.0f;
    const F32 result = __builtin_convertvector(exponent, F32) * 0.69314718f + (t + t) * series;
    return x == x ? result : x;
}

// tanh, to 4 ulp; NaN stays NaN.
OASIS_INLINE F32 tanh_of(F32 x) {
    const U32 sign = reinterpret_cast<U32>(x) & 0x80000000u;
    const F32 size = reinterpret_cast<F32>(reinterpret_cast<U32>(x) & 0x7fffffffu);
    // (1 - e) / (1 + e) loses digits near 0, where the series of tanh is short.
    const F32 e = exp2_nonpositive(size * -2.88539008f);
    const F32 x2 = size * size;
    F32 series = broadcast(62.0f / 2835) * x2 - 17.0f / 315;
    series = series * x2 + 2.0f / 15;
    series = series * x2 - 1.0f / 3;
    const F32 near = size + size * x2 * series, far = (1.0f - e) / (1.0f + e);
    return reinterpret_cast<F32>(reinterpret_cast<U32>(size < 0.25f ? near : far) | sign);
}

// A logit whose size stays below `cap`, which is above 0.
OASIS_INLINE F32 soft_capped(F32 logit, float cap) { return tanh_of(logit / cap) * cap; }

// Into the second-level cache: it can wait for more lines at once than the first level can. Measured on Zen 4 with scattered blocks of
// 8 KiB: 1.5 times the bandwidth of prefetching into the first level, 2.3 times with huge pages.
OASIS_INLINE void prefetch(const void *address) { __builtin_prefetch(address, 0, 2); }

} // namespace oasis::OASIS_ISA
