// The logits of one block: logsumexp over its tokens of the products of their keys with a few queries.
#pragma once

#include "rows.h"

#include <algorithm>
#include <limits>

namespace oasis::OASIS_ISA {

template <size_t... lane> OASIS_INLINE I32 key_numbers(std::index_sequence<lane...>) { return I32{static_cast<int32_t>(lane % kKeys)...}; }

// Over the lanes of the keys of one query.
OASIS_INLINE F32 largest_of_keys(F32 v) {
    v = larger(v, across<1>(v, std::make_index_sequence<kLanes>()));
    return larger(v, across<2>(v, std::make_index_sequence<kLanes>()));
}
OASIS_INLINE F32 sum_of_keys(F32 v) {
    v += across<1>(v, std::make_index_sequence<kLanes>());
    return v + across<2>(v, std::make_index_sequence<kLanes>());
}

// Logits of one block for kQueries queries, in the lanes of each query. Those of its tokens have a soft cap if it is above 0.
template <class T, class Shape>
OASIS_INLINE F32 block_logits(const T *block, int64_t tokens, const float *queries, F32 *logits, float scale, float softcap,
                              Shape shape) {
    const int64_t groups = (tokens + kKeys - 1) / kKeys;
    F32 most = broadcast(-std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < groups; ++i) {
        const T *keys[kKeys];
        for (int k = 0; k < kKeys; ++k) keys[k] = block + std::min(i * kKeys + k, tokens - 1) * shape.dim();
        F32 logit = products(keys, queries, shape) * scale;
        if (softcap > 0.0f) logit = soft_capped(logit, softcap);
        const auto left = static_cast<int32_t>(std::min<int64_t>(tokens - i * kKeys, kKeys));
        logit = key_numbers(std::make_index_sequence<kLanes>()) < broadcast(left) ? logit : broadcast(-std::numeric_limits<float>::infinity());
        most = larger(most, logit);
        logits[i] = logit;
    }
    most = largest_of_keys(most);
    const F32 base = most == -std::numeric_limits<float>::infinity() ? F32{} : most;
    F32 total = {};
    for (int64_t i = 0; i < groups; ++i) total += exp2_nonpositive((logits[i] - base) * 1.44269504f);
    return most + log_of(sum_of_keys(total));
}

} // namespace oasis::OASIS_ISA
