// Look-ups in tables of 16 bytes, as many at once as a register of the path holds, and what becomes of their sums.
//
// A unit is 16 tokens: a row of 8 code bytes per nibble. Two units are taken together, because then their rows fill whole registers:
// of the registers of one unit and of the other, the even 8-byte words make one register of rows and the odd ones a second. So every
// 16-byte lane holds rows of another nibble, and the lanes of a register of sums are partial sums, added only at the end.
#pragma once

#include "simd.h"

namespace oasis::OASIS_ISA {

inline constexpr int kByteLanes = kLanes / 4; // of 16 bytes
inline constexpr int kBytes = 16 * kByteLanes;
inline constexpr int kPairs = kLanes / 2; // pairs of units taken at once: their sums are the lanes of one vector of floats
inline constexpr int kPairWords = 4 / kByteLanes;

using Bytes = uint8_t __attribute__((vector_size(kBytes)));
using Words = uint16_t __attribute__((vector_size(kBytes)));
using Long = uint64_t __attribute__((vector_size(kBytes)));

OASIS_INLINE Bytes low_nibbles(Bytes packed) { return packed & 15; }
OASIS_INLINE Bytes high_nibbles(Bytes packed) { return packed >> 4; }

// In each 16-byte lane: the first 8 bytes of a, then those of b; with `odd` the last 8.
template <int odd, size_t... word> OASIS_INLINE Bytes rows_of(Bytes a, Bytes b, std::index_sequence<word...>) {
    constexpr size_t words = 2 * kByteLanes;
    return reinterpret_cast<Bytes>(__builtin_shufflevector(reinterpret_cast<Long>(a), reinterpret_cast<Long>(b),
                                                           (word % 2 ? words + word - 1 + odd : word + odd)...));
}
template <int odd> OASIS_INLINE Bytes rows_of(Bytes a, Bytes b) {
    return rows_of<odd>(a, b, std::make_index_sequence<2 * kByteLanes>());
}

// table[index] in each 16-byte lane. Indices are below 16.
OASIS_INLINE Bytes look_up(Bytes table, Bytes index) {
#if defined(__AVX512BW__)
    return reinterpret_cast<Bytes>(_mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(index)));
#elif defined(__AVX2__) && !defined(OASIS_16_LANES)
    return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(index)));
#else
    alignas(16) uint8_t entries[kBytes], indices[kBytes], found[kBytes];
    std::memcpy(entries, &table, kBytes), std::memcpy(indices, &index, kBytes);
    for (int i = 0; i < kBytes; ++i) found[i] = entries[i / 16 * 16 + indices[i]];
    return load_as<Bytes>(found);
#endif
}

// 16-bit numbers of two units, in the order: first tokens of a, last tokens of a, first of b, last of b, 8 each.
struct Pair {
    Words part[kPairWords];
};

// `factor` times the sums over the lanes, where `low` and `high` have the partial sums of the first and of the last 8 tokens. A factor is
// below 128, and no sum of two lanes times it exceeds 32767.
OASIS_INLINE Pair add_lanes(Bytes low, Bytes high, int factor) {
#if defined(__AVX512BW__)
    const __m512i l = reinterpret_cast<__m512i>(low), h = reinterpret_cast<__m512i>(high);
    const __m512i even = _mm512_shuffle_i64x2(l, h, 0x88), odd = _mm512_shuffle_i64x2(l, h, 0xdd), factors = _mm512_set1_epi8(static_cast<char>(factor));
    const __m512i a = _mm512_maddubs_epi16(_mm512_unpacklo_epi8(even, odd), factors);
    const __m512i b = _mm512_maddubs_epi16(_mm512_unpackhi_epi8(even, odd), factors);
    return {{reinterpret_cast<Words>(_mm512_add_epi16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd)))}};
#elif defined(__AVX2__) && !defined(OASIS_16_LANES)
    const __m256i l = reinterpret_cast<__m256i>(low), h = reinterpret_cast<__m256i>(high);
    const __m256i even = _mm256_permute2x128_si256(l, h, 0x20), odd = _mm256_permute2x128_si256(l, h, 0x31);
    const __m256i factors = _mm256_set1_epi8(static_cast<char>(factor));
    return {{reinterpret_cast<Words>(_mm256_maddubs_epi16(_mm256_unpacklo_epi8(even, odd), factors)),
             reinterpret_cast<Words>(_mm256_maddubs_epi16(_mm256_unpackhi_epi8(even, odd), factors))}};
#else
    uint8_t sums[2][kBytes];
    std::memcpy(sums[0], &low, kBytes), std::memcpy(sums[1], &high, kBytes);
    uint16_t words[4][8] = {};
    for (int lane = 0; lane < kByteLanes; ++lane)
        for (int part = 0; part < 4; ++part)
            for (int i = 0; i < 8; ++i)
                words[part][i] = static_cast<uint16_t>(words[part][i] + factor * sums[part % 2][16 * lane + 8 * (part / 2) + i]);
    Pair pair;
    std::memcpy(&pair, words, sizeof pair);
    return pair;
#endif
}

OASIS_INLINE void operator+=(Pair &a, const Pair &b) {
    for (int i = 0; i < kPairWords; ++i) a.part[i] += b.part[i];
}

// The numbers where `mask` has ones, elsewhere 0.
OASIS_INLINE Pair masked(const Pair &pair, const uint16_t (&mask)[32]) {
    Pair result;
    for (int i = 0; i < kPairWords; ++i) result.part[i] = pair.part[i] & load_as<Words>(mask + i * (kBytes / 2));
    return result;
}

// Sums of neighbouring lanes of about 2^(w / 128 - 127), 0 for w = 0: w is read as the upper half of a float, whose exponent it fills,
// and whose mantissa grows linearly where the power grows exponentially, so that it is too large by 0 to 6.2%. Of two neighbours, the
// second keeps the first as the lower half of its mantissa, which makes it too large by at most 2^-7 more and saves an instruction.
OASIS_INLINE F32 powers(Words w) {
    const U32 both = reinterpret_cast<U32>(w);
    return reinterpret_cast<F32>(both << 16) + reinterpret_cast<F32>(both);
}

// Partial sums of the powers of each unit: of the first in the first half of the lanes, of the second in the other half.
OASIS_INLINE F32 powers(const Pair &pair) {
    if constexpr (kPairWords == 1) {
        return powers(pair.part[0]);
    } else {
        constexpr int parts = kPairWords / 2;
        F32 sum[2] = {powers(pair.part[0]), powers(pair.part[parts])};
        for (int i = 1; i < parts; ++i) sum[0] += powers(pair.part[i]), sum[1] += powers(pair.part[parts + i]);
        return fold<kLanes / 2>(sum[0], sum[1], std::make_index_sequence<kLanes>());
    }
}

} // namespace oasis::OASIS_ISA
