// The natural logsumexp of one row of logits, as torch has it: -inf of nothing, NaN if any is.
#include "declarations.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oasis::OASIS_ISA {

float logsumexp(const float *logits, int64_t count) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const auto from = [&](int64_t i) {
        if (i + kLanes <= count) return load(logits + i);
        const auto left = static_cast<int32_t>(count - i);
        return lane_numbers() < broadcast(left) ? load_first(logits + i, left) : broadcast(-kInfinity);
    };
    F32 most = broadcast(-kInfinity);
    for (int64_t i = 0; i < count; i += kLanes) most = larger(most, from(i));
    const float largest_one = largest(most);
    // Beside an infinite maximum, or where a NaN hides the maximum, plain arithmetic gives what torch gives.
    if (!(std::abs(largest_one) < kInfinity) || std::any_of(logits, logits + count, [](float x) { return x != x; })) {
        float total = 0.0f;
        for (int64_t i = 0; i < count; ++i) total += std::exp(logits[i]);
        return std::log(total);
    }
    F32 total = {};
    for (int64_t i = 0; i < count; i += kLanes) total += exp2_nonpositive((from(i) - largest_one) * 1.44269504f);
    return largest_one + std::log(sum(total));
}

} // namespace oasis::OASIS_ISA
