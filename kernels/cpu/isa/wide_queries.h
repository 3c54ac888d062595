// Sixteen bf16 queries at once, one per lane: what attention does where the processor multiplies pairs of bf16.
//
// A lane per query needs no sums across lanes, and each word of a key serves sixteen queries. Products take pairs of elements of a key,
// values pairs of tokens; weights are rounded to bf16 for the latter, as the output will be.
#pragma once

#include "rows.h"

#include <algorithm>
#include <limits>

namespace oasis::OASIS_ISA {

#if defined(__AVX512BF16__) || defined(OASIS_16_LANES)
inline constexpr bool kPairsOfBf16 = true;
#else
inline constexpr bool kPairsOfBf16 = false;
#endif

// sum + the products of both bf16 of each lane.
OASIS_INLINE F32 add_products(F32 sum, U32 a, U32 b) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<F32>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#else
    const F32 odd = reinterpret_cast<F32>(a & 0xffff0000u) * reinterpret_cast<F32>(b & 0xffff0000u);
    return sum + odd + reinterpret_cast<F32>(a << 16) * reinterpret_cast<F32>(b << 16);
#endif
}

OASIS_INLINE U32 broadcast_pair(const void *from) {
    uint32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return U32{} + pair;
}

// Tokens of one block: `count` rows of keys and of values. Their columns in a tile begin at a multiple of kKeys.
struct WideRun {
    const BF16 *keys, *values;
    int count;
};

// The state of kLanes queries. Memory is the caller's; `outputs` are rows as in rows.h, one per query.
template <class Shape> struct WideQueries {
    static constexpr int kQueriesAtOnce = kLanes;

    Shape shape;
    uint32_t *pairs;  // (D / 2, kLanes): elements 2 i and 2 i + 1 of each query
    float *weights;   // (columns, kLanes)
    uint32_t *packed; // (columns / 2, kLanes): the weights of two tokens, in bf16
    float *outputs, *largest, *totals;
    const int32_t *lags;

    void take_query(int lane, const BF16 *query) const {
        for (int64_t i = 0; i < shape.dim() / 2; ++i) std::memcpy(pairs + i * kLanes + lane, query + 2 * i, sizeof *pairs);
    }

    // Products with the keys of a run, from `column` on. `between` is called once for every kKeys tokens.
    template <class F> OASIS_INLINE void take_products(const WideRun &run, int64_t column, F &&between) const {
        constexpr int kAtOnce = 2 * kKeys;
        for (int token = 0; token < run.count; token += kAtOnce) {
            const BF16 *keys[kAtOnce];
            for (int k = 0; k < kAtOnce; ++k) keys[k] = run.keys + std::min(token + k, run.count - 1) * shape.dim();
            between(), between();
            F32 sum[kAtOnce] = {};
            for (int64_t i = 0; i < shape.dim() / 2; ++i) {
                const auto query = load_as<U32>(pairs + i * kLanes);
                for (int k = 0; k < kAtOnce; ++k) sum[k] = add_products(sum[k], broadcast_pair(keys[k] + 2 * i), query);
            }
            const int columns = std::min(kAtOnce, (run.count - token + kKeys - 1) / kKeys * kKeys);
            for (int k = 0; k < columns; ++k) store(weights + (column + token + k) * kLanes, sum[k]);
        }
    }

    // From products to weights, as in the narrow case.
    void take_weights(const int32_t *column_lags, int64_t columns, float factor) const {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        const I32 query_lags = load_as<I32>(lags);
        F32 most = broadcast(-kInfinity);
        for (int64_t c = 0; c < columns; ++c) {
            const F32 product = load(weights + c * kLanes) * factor;
            const F32 logit = broadcast(column_lags[c]) >= query_lags ? product : broadcast(-kInfinity);
            most = larger(most, logit);
            store(weights + c * kLanes, logit);
        }
        const F32 before = load(largest), now = larger(most, before);
        const F32 base = now == -kInfinity ? F32{} : now;
        if (bits_of(now > before)) {
            const F32 shrink = exp2_nonpositive(before - base);
            for (int q = 0; q < kLanes; ++q)
                for (int64_t v = 0; v < shape.vectors(); ++v) {
                    float *at = outputs + q * shape.floats() + v * kLanes;
                    store(at, load(at) * shrink[q]);
                }
            store(totals, load(totals) * shrink);
            store(largest, now);
        }
        F32 total = load(totals);
        for (int64_t c = 0; c < columns; c += 2) {
            const F32 first = exp2_nonpositive(load(weights + c * kLanes) - base);
            const F32 second = exp2_nonpositive(load(weights + (c + 1) * kLanes) - base);
            total += first + second;
            store(weights + c * kLanes, first), store(weights + (c + 1) * kLanes, second);
            const U32 pair = rounded_to_bf16(first) | rounded_to_bf16(second) << 16;
            std::memcpy(packed + c / 2 * kLanes, &pair, sizeof pair);
        }
        store(totals, total);
    }

    // Adds the values of a run, weighted, to the outputs.
    template <class F> OASIS_INLINE void add_values(const WideRun &run, int64_t column, F &&between) const {
        constexpr int kRows = 8; // queries whose sums stay in registers
        for (int64_t p = 0; p < shape.pairs(); ++p)
            for (int first = 0; first < kLanes; first += kRows) {
                float *output = outputs + first * shape.floats() + 2 * p * kLanes;
                F32 even[kRows], odd[kRows];
                for (int q = 0; q < kRows; ++q) {
                    even[q] = load(output + q * shape.floats());
                    odd[q] = load(output + q * shape.floats() + kLanes);
                }
                for (int token = 0; token < run.count; token += 2) {
                    if (token % kKeys == 0) between();
                    const BF16 *value = run.values + token * shape.dim() + 2 * p * kLanes;
                    const auto one = load_as<U32>(value);
                    const auto two = token + 1 < run.count ? load_as<U32>(value + shape.dim()) : U32{};
                    const U32 evens = (one & 0xffffu) | two << 16, odds = one >> 16 | (two & 0xffff0000u);
                    const uint32_t *weight = packed + (column + token) / 2 * kLanes + first;
                    for (int q = 0; q < kRows; ++q) {
                        const U32 both = U32{} + weight[q];
                        even[q] = add_products(even[q], both, evens);
                        odd[q] = add_products(odd[q], both, odds);
                    }
                }
                for (int q = 0; q < kRows; ++q) {
                    store(output + q * shape.floats(), even[q]);
                    store(output + q * shape.floats() + kLanes, odd[q]);
                }
            }
        for (int64_t v = 2 * shape.pairs(); v < shape.vectors(); ++v)
            for (int token = 0; token < run.count; ++token) {
                const F32 value = load_rest(run.values + token * shape.dim(), shape, v);
                for (int q = 0; q < kLanes; ++q) {
                    float *at = outputs + q * shape.floats() + v * kLanes;
                    store(at, load(at) + weights[(column + token) * kLanes + q] * value);
                }
            }
    }
};

} // namespace oasis::OASIS_ISA
