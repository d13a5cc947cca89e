// Comparisons that distinguish subnormal numbers.
//
// CuPy compiles with -ftz=true.  A float32 comparison then treats subnormal numbers as zeros, so that the first of them
// would be their maximum.  PTX has comparisons with and without flushing; these functions use the latter explicitly.
// float64 is never flushed.  Otherwise they behave as > and ==: NaN is neither above nor equal, and -0.0 equals 0.0.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

__device__ __forceinline__ bool is_above(double a, double b) { return a > b; }
__device__ __forceinline__ bool is_equal(double a, double b) { return a == b; }

#ifdef CUPYCONV_HOST
// An integer for each number, in the same order.
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
