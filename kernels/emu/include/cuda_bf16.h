// bfloat16 as CUDA has it: a type that converts by function, rounding to the nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return {0x7fff}; // any NaN
    return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
