// The best few of many masses without a sort: a bound that at least `count` of them reach, then all that reach it.
//
// The bound is the count-th largest of the maxima of disjoint groups: each of those maxima is one mass that reaches it.
#include "declarations.h"
#include "ranking.h"
#include "simd.h"

#include <algorithm>
#include <limits>

namespace oasis::OASIS_ISA {
namespace {

constexpr int64_t kGroupsPerCandidate = 2; // more groups give a closer bound, and take longer to rank

OASIS_INLINE I32 ordered(F32 mass) {
    const I32 bits = reinterpret_cast<I32>(mass + 0.0f);
    const I32 order = bits ^ ((bits >> 31) & INT32_MAX);
    return mass == mass ? order : broadcast(INT32_MAX);
}

} // namespace

// Writes the candidates among mass[first .. last), at least the best `count` of them (count > 0), and returns how many it has written:
// what `ordered` makes of the mass, and the block. The three arrays have room for all candidates.
int64_t collect_best(const float *mass, int64_t first, int64_t last, int64_t count, int32_t *orders, int32_t *blocks,
                     int32_t *room) {
    const int64_t vectors = (last - first) / kLanes;
    const int64_t per_group = vectors * kLanes / (kGroupsPerCandidate * count), groups = per_group ? vectors / per_group * kLanes : 0;
    float bound = -std::numeric_limits<float>::infinity();
    if (per_group > 1 && groups >= count) {
        for (int64_t g = 0; g < groups; g += kLanes) {
            const float *group = mass + first + g * per_group;
            F32 most = load(group);
            // A NaN may get lost here: then some other mass of its group stands for the group, which is as true.
            for (int64_t i = 1; i < per_group; ++i) most = larger(most, load(group + i * kLanes));
            store(room + g, ordered(most));
        }
        bound = mass_of(kth_largest(room, groups, count, count / 8));
    }
    int64_t number = 0, i = first;
    for (; i + kLanes <= last; i += kLanes) {
        const F32 masses = load(mass + i);
        for (uint32_t bits = bits_of(~(masses < bound)); bits; bits &= bits - 1) { // NaN is not below
            const int64_t block = i + __builtin_ctz(bits);
            orders[number] = oasis::ordered(mass[block]);
            blocks[number++] = static_cast<int32_t>(block);
        }
    }
    for (; i < last; ++i)
        if (!(mass[i] < bound)) {
            orders[number] = oasis::ordered(mass[i]);
            blocks[number++] = static_cast<int32_t>(i);
        }
    return number;
}

} // namespace oasis::OASIS_ISA
