// What differs between a GPU compiler and a host compiler, and nothing else.
//
// The kernels are compiled by NVRTC for GPUs and, in the tests, by a host C++ compiler against
// cuda_on_host.h, which defines __global__, threadIdx, __syncthreads and the rest as ordinary C++.
// Shared memory, and an instruction named outright, are what no macro of CUDA's own can give a host compiler.
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

// a * b in 64 bits, by one instruction; left to itself the compiler may widen both and multiply 64 bits by 64.
__device__ __forceinline__ long long wide_product(int a, int b) {
    long long product;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// `a` where `by` is 0 or more, else `b`, of NaN too; both are computed, where the compiler might branch.
__device__ __forceinline__ float select_by_sign(float by, float a, float b) {
    float chosen;
    asm("slct.f32.f32 %0, %1, %2, %3;" : "=f"(chosen) : "f"(a), "f"(b), "f"(by));
    return chosen;
}
#endif
