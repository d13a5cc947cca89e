// __half and __nv_bfloat16 on the host, with the bits of the real types, rounded to nearest even.
//
// All conversions are explicit.  CUDA's types also convert implicitly and have 16-bit arithmetic, which rounds after
// every operation.  A kernel that uses it by accident does not compile here.
#pragma once

#include <stdint.h>

namespace cuda_on_host {

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast between types of different sizes");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

constexpr uint32_t float_infinity = 0x7f800000u;
constexpr uint16_t canonical_nan = 0x7fffu;  // returned by the hardware's conversions in both 16-bit formats

// Half has 10 of float's 23 mantissa bits; its exponent bias is 15 instead of 127.
constexpr int half_mantissa_shift = 13;
constexpr uint32_t half_rebias = (127u - 15u) << 23;
constexpr uint32_t half_overflow = 0x477ff000u;         // 65520, the smallest value that rounds to infinity
constexpr uint32_t half_smallest_normal = 0x38800000u;  // 2^-14

inline uint16_t half_bits(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    if (magnitude > float_infinity) return canonical_nan;
    if (magnitude >= half_overflow) return uint16_t(sign | 0x7c00u);
    if (magnitude < half_smallest_normal) {
        // Subnormal: a multiple of 2^-24.  Near 2^23 floats are exactly the integers, so this addition rounds to one.
        const float units = bit_cast<float>(magnitude) * 0x1p24f;
        const volatile float rounded = units + 0x1p23f;
        return uint16_t(sign | uint16_t(rounded - 0x1p23f));
    }
    const uint32_t round_to_even = 0xfffu + ((magnitude >> half_mantissa_shift) & 1u);
    return uint16_t(sign | ((magnitude - half_rebias + round_to_even) >> half_mantissa_shift));
}

inline float half_value(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t magnitude = uint32_t(bits & 0x7fffu) << half_mantissa_shift;
    if ((bits & 0x7c00u) == 0x7c00u) return bit_cast<float>(sign | float_infinity | magnitude);
    // Read as a float, the exponent is 112 too small.  The product is exact and also corrects subnormals.
    return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f));
}

// bfloat16 is the upper half of a float.
inline uint16_t bfloat16_bits(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > float_infinity) return canonical_nan;
    const uint32_t round_to_even = 0x7fffu + ((bits >> 16) & 1u);
    return uint16_t((bits + round_to_even) >> 16);
}

inline float bfloat16_value(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

}  // namespace cuda_on_host

struct __half {
    uint16_t bits;
    __half() = default;
    explicit __half(float value) : bits(cuda_on_host::half_bits(value)) {}
    explicit operator float() const { return cuda_on_host::half_value(bits); }
};

struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float value) : bits(cuda_on_host::bfloat16_bits(value)) {}
    explicit operator float() const { return cuda_on_host::bfloat16_value(bits); }
};

using half = __half;

struct alignas(4) __half2 {
    __half x, y;
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __half2float(__half value) { return float(value); }
inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return cuda_on_host::bit_cast<__half>(bits); }

inline float __bfloat162float(__nv_bfloat16 value) { return float(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return cuda_on_host::bit_cast<__nv_bfloat16>(bits); }

inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float __low2float(__half2 pair) { return float(pair.x); }
inline float __high2float(__half2 pair) { return float(pair.y); }
inline float __low2float(__nv_bfloat162 pair) { return float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return float(pair.y); }
