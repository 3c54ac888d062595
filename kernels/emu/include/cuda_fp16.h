// fp16 as CUDA has it, by the compiler's own _Float16.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half value) {
    _Float16 narrow;
    std::memcpy(&narrow, &value, sizeof narrow);
    return static_cast<float>(narrow);
}

inline __half __float2half_rn(float value) {
    const auto narrow = static_cast<_Float16>(value);
    __half result;
    std::memcpy(&result, &narrow, sizeof result);
    return result;
}

inline uint16_t __half_as_ushort(__half value) { return value.bits; }
