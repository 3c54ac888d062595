// Numbers that sort as (mass, block) do: larger mass first, the lower block among equals.
#pragma once

#include <cstdint>
#include <cstring>

namespace oasis {

// An integer that compares as the float does, NaN above all, -0 equal to 0.
inline int32_t ordered(float mass) {
    if (mass != mass) return INT32_MAX;
    mass += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &mass, sizeof bits);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

// The mass that `ordered` made the number of.
inline float mass_of(int32_t order) {
    const int32_t bits = order ^ ((order >> 31) & INT32_MAX);
    float mass;
    std::memcpy(&mass, &bits, sizeof mass);
    return mass;
}

// A candidate of a ranking: the larger number is the better one.
using Candidate = uint64_t;

inline Candidate candidate(int32_t order, int64_t block) {
    return static_cast<Candidate>(static_cast<uint32_t>(order) ^ 0x80000000u) << 32 | (0xffffffffu - static_cast<uint32_t>(block));
}
inline int64_t block_of(Candidate c) { return 0xffffffffu - static_cast<uint32_t>(c); }

} // namespace oasis
