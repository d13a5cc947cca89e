// CUDA's math functions on the host: the C functions, with CUDA's overloads for float in the global namespace.
//
// Without these overloads, `exp(x)` of a float would be computed in double here and in float on a GPU.  The last bits
// may still differ from CUDA's, because another library computes them.
#pragma once

#include <math.h>
#include <stdlib.h>

#include "half_on_host.h"

// In C these are macros; in CUDA they are functions.
#undef isnan
#undef isinf
#undef isfinite
#undef signbit

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

#define OVERLOAD_1(function) inline float function(float x) { return function##f(x); }
#define OVERLOAD_2(function) inline float function(float x, float y) { return function##f(x, y); }

OVERLOAD_1(exp) OVERLOAD_1(exp2) OVERLOAD_1(expm1) OVERLOAD_1(log) OVERLOAD_1(log2) OVERLOAD_1(log10) OVERLOAD_1(log1p)
OVERLOAD_1(sqrt) OVERLOAD_1(cbrt) OVERLOAD_1(erf) OVERLOAD_1(erfc) OVERLOAD_1(sin) OVERLOAD_1(cos) OVERLOAD_1(tan)
OVERLOAD_1(asin) OVERLOAD_1(acos) OVERLOAD_1(atan) OVERLOAD_1(sinh) OVERLOAD_1(cosh) OVERLOAD_1(tanh)
OVERLOAD_1(floor) OVERLOAD_1(ceil) OVERLOAD_1(trunc) OVERLOAD_1(round) OVERLOAD_1(rint) OVERLOAD_1(fabs)
OVERLOAD_2(pow) OVERLOAD_2(fmod) OVERLOAD_2(atan2) OVERLOAD_2(hypot) OVERLOAD_2(copysign)
OVERLOAD_2(fmin) OVERLOAD_2(fmax)

#undef OVERLOAD_1
#undef OVERLOAD_2

inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline long long abs(long long x) { return llabs(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// For two floating-point numbers, CUDA's min and max return the one that is not NaN.
template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Intrinsics.  The fast variants are as accurate here as the others.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }

inline unsigned __float_as_uint(float x) { return cuda_on_host::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_host::bit_cast<float>(x); }
inline int __float_as_int(float x) { return cuda_on_host::bit_cast<int>(x); }
inline float __int_as_float(int x) { return cuda_on_host::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_host::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_host::bit_cast<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((uint64_t(x) * y) >> 32); }
inline int __mulhi(int x, int y) { return int((int64_t(x) * y) >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)(((unsigned __int128)x * y) >> 64);
}
