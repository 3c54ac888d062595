// The k-th largest of a few hundred integers by halving the range it can be in. A pass over them is short, and unlike a partial sort
// it has next to no branches to mispredict, which is what takes the time on masses that were never seen before.
#include "declarations.h"
#include "simd.h"

#include <algorithm>

namespace oasis::OASIS_ISA {
namespace {

template <class F> OASIS_INLINE int32_t reduce(I32 v, F &&f) {
    int32_t result = v[0];
    for (int i = 1; i < kLanes; ++i) result = f(result, v[i]);
    return result;
}

int64_t count_from(const int32_t *keys, int64_t count, int32_t bound) {
    I32 found = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) found -= load_as<I32>(keys + i) >= broadcast(bound); // true is -1
    int64_t total = reduce(found, [](int32_t a, int32_t b) { return a + b; });
    for (; i < count; ++i) total += keys[i] >= bound;
    return total;
}

// The least of the keys that are `bound` or more, of which there is one.
int32_t least_from(const int32_t *keys, int64_t count, int32_t bound) {
    I32 least = broadcast(INT32_MAX);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const I32 key = load_as<I32>(keys + i);
        least = (key >= broadcast(bound)) & (key < least) ? key : least;
    }
    int32_t result = reduce(least, [](int32_t a, int32_t b) { return std::min(a, b); });
    for (; i < count; ++i) result = keys[i] >= bound ? std::min(result, keys[i]) : result;
    return result;
}

} // namespace

int64_t count_at_least(const int32_t *keys, int64_t count, int32_t bound) { return count_from(keys, count, bound); }

// 1 <= k <= count. With slack, any bound that k to k + slack of the keys reach is good enough.
int32_t kth_largest(const int32_t *keys, int64_t count, int64_t k, int64_t slack) {
    I32 most = broadcast(keys[0]);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const I32 key = load_as<I32>(keys + i);
        most = key > most ? key : most;
    }
    int32_t high = reduce(most, [](int32_t a, int32_t b) { return std::max(a, b); });
    for (; i < count; ++i) high = std::max(high, keys[i]);
    int32_t low = least_from(keys, count, INT32_MIN);
    while (low < high) {
        const auto middle = static_cast<int32_t>(low + (int64_t{high} - low + 1) / 2);
        const int64_t reached = count_from(keys, count, middle);
        if (reached >= k && reached <= k + slack) return slack ? middle : least_from(keys, count, middle);
        if (reached >= k)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

} // namespace oasis::OASIS_ISA
