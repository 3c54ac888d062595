// Keys of whole blocks, as summaries are written from them.
#pragma once

#include "rows.h"

#include <algorithm>

namespace oasis::OASIS_ISA {

// Keys of block `i` and one head: any of the write ops' arguments say where they are.
template <class T, class Args> OASIS_INLINE const T *keys_of(const Args &a, int64_t i, int64_t head) {
    return static_cast<const T *>(a.keys) + i * a.keys_block_stride + head * a.keys_head_stride;
}

template <class T, class Args> int64_t key_bytes(const Args &a) {
    return a.count * a.kv_heads * a.block_size * a.head_dim * static_cast<int64_t>(sizeof(T));
}

// Smallest and largest of `count` channels over the tokens, NaN where one is NaN. count <= kLanes.
template <class T>
OASIS_INLINE void channel_bounds(const T *keys, int64_t tokens, int64_t stride, int64_t count, F32 &low, F32 &high) {
    low = high = load_first(keys, count);
    I32 nan = low != low;
    for (int64_t t = 1; t < tokens; ++t) {
        const F32 key = load_first(keys + t * stride, count);
        low = key < low ? key : low;
        high = key > high ? key : high;
        nan |= key != key;
    }
    const F32 none = broadcast(__builtin_nanf(""));
    low = nan ? none : low;
    high = nan ? none : high;
}

// Distance of the four levels between two bounds; 0 for bounds that were rounded past each other.
OASIS_INLINE F32 step_between(F32 low, F32 high) {
    const F32 range = high - low;
    return (range < 0.0f ? F32{} : range) / 3.0f;
}

// x within 0 .. most, rounded to nearest, ties to even; 0 for NaN.
OASIS_INLINE I32 rounded(F32 x, float most) {
    x = x > 0.0f ? x : F32{};
    x = x < most ? x : broadcast(most);
    return reinterpret_cast<I32>(x + 12582912.0f) - 0x4B400000;
}

} // namespace oasis::OASIS_ISA
