// The best few of many masses without a sort: a bound that at least `count` of them reach, then all that reach it.
//
// The bound is the count-th largest of the maxima of disjoint groups: each of those maxima is one mass that reaches it.
#include "declarations.h"
#include "ranking.h"
#include "simd.h"
#include "workspace.h"

#include <algorithm>
#include <functional>

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kGroupsPerCandidate = 4; // more groups give a closer bound, and take longer to rank

OASIS_INLINE I32 ordered(F32 mass) {
    const I32 bits = reinterpret_cast<I32>(mass + 0.0f);
    const I32 order = bits ^ ((bits >> 31) & INT32_MAX);
    return mass == mass ? order : broadcast(INT32_MAX);
}

} // namespace

// Appends the candidates among mass[first .. last) to `found`, at least the best `count` of them; returns how many it appended. `found`
// has room for all of them, `room` for (last - first) / kLanes + 1 vectors of integers.
int64_t collect_best(const float *mass, int64_t first, int64_t last, int64_t count, uint64_t *found, int32_t *room) {
    const int64_t vectors = (last - first) / kLanes;
    const int64_t per_group = vectors * kLanes / (kGroupsPerCandidate * std::max<int64_t>(count, 1));
    int64_t number = 0;
    int32_t bound = INT32_MIN;
    if (per_group > 1) {
        int64_t groups = 0;
        for (int64_t v = 0; v + per_group <= vectors; v += per_group, groups += kLanes) {
            I32 most = broadcast(INT32_MIN);
            for (int64_t i = 0; i < per_group; ++i) {
                const I32 order = ordered(load(mass + first + (v + i) * kLanes));
                most = order > most ? order : most;
            }
            store(room + groups, most);
        }
        std::nth_element(room, room + count - 1, room + groups, std::greater<>());
        bound = room[count - 1];
    }
    const I32 least = broadcast(bound);
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
        const I32 order = ordered(load(mass + i));
        uint32_t bits = bits_of(order >= least);
        if (!bits) continue;
        int32_t orders[kLanes];
        store(orders, order);
        for (; bits; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            found[number++] = candidate(orders[lane], i + lane);
        }
    }
    for (; i < last; ++i)
        if (const int32_t order = oasis::ordered(mass[i]); order >= bound) found[number++] = candidate(order, i);
    return number;
}

} // namespace oasis::OASIS_ISA
