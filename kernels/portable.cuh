// Everything that differs between a GPU compiler and a host compiler.
//
// NVRTC compiles the kernels for GPUs.  In the tests, a host C++ compiler compiles them against cuda_on_host.h, which
// defines __global__, threadIdx, __syncthreads and so on as ordinary C++.  For shared memory and explicit PTX
// instructions, it is not enough to define CUDA's own names: this file has macros and functions for them.
#pragma once

#ifdef CUPYCONV_HOST
#include "cuda_on_host.h"  // defines SHARED_ARRAY and DYNAMIC_SHARED too

inline long long wide_product(int a, int b) { return (long long)a * b; }
inline float select_by_sign(float by, float a, float b) { return by >= 0.0f ? a : b; }
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// T name[count] in static shared memory.
#define SHARED_ARRAY(T, name, count) __shared__ T name[count]

// T* name: the launch's dynamic shared memory, 16-byte aligned.
#define DYNAMIC_SHARED(T, name)                                              \
    extern __shared__ __align__(16) unsigned char name##_dynamic_shared_[];  \
    T* const name = reinterpret_cast<T*>(name##_dynamic_shared_)

// a * b as a 64-bit product, by one instruction.  Otherwise the compiler may widen both and multiply 64 by 64 bits.
__device__ __forceinline__ long long wide_product(int a, int b) {
    long long product;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// `a` if `by` is 0 or more, else `b`, also if `by` is NaN.  Both are computed; otherwise the compiler might branch.
__device__ __forceinline__ float select_by_sign(float by, float a, float b) {
    float chosen;
    asm("slct.f32.f32 %0, %1, %2, %3;" : "=f"(chosen) : "f"(a), "f"(b), "f"(by));
    return chosen;
}
#endif
