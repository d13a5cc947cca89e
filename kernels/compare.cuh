// Comparisons that tell subnormal numbers apart.
//
// CuPy compiles with -ftz=true: float32 comparisons take subnormal numbers for zeros, and of those the first would be
// the largest.  PTX has both kinds, so the one that does not flush is named; float64 never flushes.  Else as > and ==:
// NaN is neither above nor equal, -0.0 equals 0.0.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

__device__ __forceinline__ bool is_above(double a, double b) { return a > b; }
__device__ __forceinline__ bool is_equal(double a, double b) { return a == b; }

#ifdef CUPYCONV_HOST
// Numbers in the order of these integers.
inline int ordered(float value) {
    int bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits < 0 ? -(bits & 0x7fffffff) : bits;
}

inline bool is_above(float a, float b) { return !isnan(a) && !isnan(b) && ordered(a) > ordered(b); }
inline bool is_equal(float a, float b) { return !isnan(a) && !isnan(b) && ordered(a) == ordered(b); }
#else
__device__ __forceinline__ bool is_above(float a, float b) {
    int result;
    asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ bool is_equal(float a, float b) {
    int result;
    asm("{ .reg .pred p; setp.eq.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(result) : "f"(a), "f"(b));
    return result;
}
#endif

}  // namespace cupyconv
