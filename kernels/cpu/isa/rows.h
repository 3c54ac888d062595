// Rows of head_dim elements as vectors of floats, and the products of queries with keys.
//
// The order of the elements in the vectors is whatever loads cheapest: bf16 comes in pairs of vectors, even elements and odd ones.
// Queries, keys, values and outputs all go through the functions here, so that the order is the same everywhere.
#pragma once

#include "oasiskv.h"
#include "simd.h"

#include <type_traits>

namespace oasis::OASIS_ISA {

OASIS_INLINE void load_pair(const float *from, F32 &a, F32 &b) { a = load(from), b = load(from + kLanes); }
OASIS_INLINE void load_pair(const F16 *from, F32 &a, F32 &b) { a = load(from), b = load(from + kLanes); }

OASIS_INLINE void load_pair(const BF16 *from, F32 &a, F32 &b) {
    const U32 both = load_as<U32>(from);
    a = reinterpret_cast<F32>(both << 16);
    b = reinterpret_cast<F32>(both & 0xffff0000u);
}

OASIS_INLINE void store_pair(float *to, F32 a, F32 b) { store(to, a), store(to + kLanes, b); }
OASIS_INLINE void store_pair(F16 *to, F32 a, F32 b) { store(to, a), store(to + kLanes, b); }

OASIS_INLINE void store_pair(BF16 *to, F32 a, F32 b) {
    BF16 even[kLanes], odd[kLanes];
    store(even, a), store(odd, b);
    for (int i = 0; i < kLanes; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
}

// The shape of a row: known to the compiler for usual head_dims (D > 0), a number at run time for others (D = 0).
template <int D> struct RowShape {
    explicit RowShape(int64_t head_dim) : dim_(head_dim) {}
    OASIS_INLINE int64_t dim() const { return D ? D : dim_; }
    OASIS_INLINE int64_t vectors() const { return (dim() + kLanes - 1) / kLanes; }
    OASIS_INLINE int64_t pairs() const { return dim() / (2 * kLanes); }
    OASIS_INLINE int64_t floats() const { return vectors() * kLanes; }

  private:
    int64_t dim_;
};

// Vector `v` of what lies behind the pairs: one or two, of which the last may be partial.
template <class T, class Shape> OASIS_INLINE F32 load_rest(const T *row, Shape shape, int64_t v) {
    const int64_t left = shape.dim() - v * kLanes;
    return load_first(row + v * kLanes, left < kLanes ? left : kLanes);
}

template <class T, class Shape> OASIS_INLINE void load_row(float *to, const T *row, Shape shape) {
    for (int64_t p = 0; p < shape.pairs(); ++p) {
        F32 a, b;
        load_pair(row + 2 * p * kLanes, a, b);
        store(to + 2 * p * kLanes, a), store(to + (2 * p + 1) * kLanes, b);
    }
    for (int64_t v = 2 * shape.pairs(); v < shape.vectors(); ++v) store(to + v * kLanes, load_rest(row, shape, v));
}

// As load_row, for floats that stand for a row of T.
template <class T, class Shape> OASIS_INLINE void arrange(float *to, const float *row, Shape shape) {
    std::memcpy(to, row, static_cast<size_t>(shape.dim()) * sizeof(float));
    for (int64_t d = shape.dim(); d < shape.floats(); ++d) to[d] = 0.0f;
    if constexpr (std::is_same_v<T, BF16>)
        for (int64_t p = 0; p < shape.pairs(); ++p)
            for (int i = 0; i < kLanes; ++i) {
                to[2 * p * kLanes + i] = row[2 * p * kLanes + 2 * i];
                to[(2 * p + 1) * kLanes + i] = row[2 * p * kLanes + 2 * i + 1];
            }
}

template <class T, class Shape> OASIS_INLINE void store_row(T *row, const float *from, float factor, Shape shape) {
    for (int64_t p = 0; p < shape.pairs(); ++p)
        store_pair(row + 2 * p * kLanes, load(from + 2 * p * kLanes) * factor, load(from + (2 * p + 1) * kLanes) * factor);
    for (int64_t v = 2 * shape.pairs(); v < shape.vectors(); ++v) {
        const int64_t left = shape.dim() - v * kLanes;
        store_first(row + v * kLanes, load(from + v * kLanes) * factor, left < kLanes ? left : kLanes);
    }
}

inline constexpr int kKeys = 4;                // keys taken at once
inline constexpr int kQueries = kLanes / kKeys; // queries taken at once: their products with the keys are the lanes of one vector

// Products of kQueries queries, `shape.floats()` apart, with kKeys keys: lane q * kKeys + k.
template <class T, class Shape> OASIS_INLINE F32 products(const T *const (&keys)[kKeys], const float *queries, Shape shape) {
    F32 sum[kLanes] = {};
    for (int64_t p = 0; p < shape.pairs(); ++p) {
        F32 first[kQueries], second[kQueries];
        for (int q = 0; q < kQueries; ++q) {
            first[q] = load(queries + q * shape.floats() + 2 * p * kLanes);
            second[q] = load(queries + q * shape.floats() + (2 * p + 1) * kLanes);
        }
        for (int k = 0; k < kKeys; ++k) {
            F32 a, b;
            load_pair(keys[k] + 2 * p * kLanes, a, b);
            for (int q = 0; q < kQueries; ++q) sum[q * kKeys + k] += a * first[q];
            for (int q = 0; q < kQueries; ++q) sum[q * kKeys + k] += b * second[q];
        }
    }
    for (int64_t v = 2 * shape.pairs(); v < shape.vectors(); ++v)
        for (int k = 0; k < kKeys; ++k) {
            const F32 key = load_rest(keys[k], shape, v);
            for (int q = 0; q < kQueries; ++q) sum[q * kKeys + k] += key * load(queries + q * shape.floats() + v * kLanes);
        }
    return sums(sum);
}

// Calls f(RowShape<D>) for the head_dims that have code of their own, and f(RowShape<0>) for the others.
template <class F> void with_row_shape(int64_t head_dim, F &&f) {
    switch (head_dim) {
    case 64: return f(RowShape<64>(64));
    case 80: return f(RowShape<80>(80));
    case 96: return f(RowShape<96>(96));
    case 128: return f(RowShape<128>(128));
    case 256: return f(RowShape<256>(256));
    default: return f(RowShape<0>(head_dim));
    }
}

// Calls f(T{}) for the element type that a dtype stands for.
template <class F> void with_element(int64_t dtype, F &&f) {
    switch (dtype) {
    case OASIS_BFLOAT16: return f(BF16{});
    case OASIS_FLOAT16: return f(F16{});
    default: return f(float{});
    }
}

} // namespace oasis::OASIS_ISA
