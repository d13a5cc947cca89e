// CuPy's own kernels as ordinary C++: the parts of CUDA that their sources use, on the host device's fibres.
//
// If a kernel is a loop over the whole grid, one thread does all of its work.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __builtin_align__(bytes) alignas(bytes)
#define __shared__ static /* blocks run one after another */
#define __CUDACC_VER_MAJOR__ 13

#include <cuda_fp16.h>
#include <cuda_bf16.h>

using std::max;
using std::min;

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_host {
struct Site {
    const char* file;
    int line;
};
void synchronise_block(Site site);

inline long long nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

template <class... Parameters, size_t... places>
void call(void (*kernel)(Parameters...), void* const* values, std::index_sequence<places...>) {
    kernel(*static_cast<std::remove_reference_t<Parameters>*>(values[places])...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), void* const* values) {
    call(kernel, values, std::index_sequence_for<Parameters...>{});
}

// Sizes of the parameters in bytes, followed by 0.
template <class... Parameters>
const size_t* sizes_of(void (*)(Parameters...)) {
    static const size_t sizes[] = {sizeof(Parameters)..., 0};
    return sizes;
}
}  // namespace cuda_on_host

#define EXPORT_CUPY_KERNEL(kernel)                                                                          \
    extern "C" void cuda_on_host_kernel(const void* values) {                                               \
        cuda_on_host::call(&kernel, static_cast<void* const*>(values));                                     \
    }                                                                                                       \
    extern "C" const size_t* cuda_on_host_parameter_sizes() { return cuda_on_host::sizes_of(&kernel); }

inline void __syncthreads() { cuda_on_host::synchronise_block({"a kernel of CuPy's", 0}); }
inline void __syncwarp(unsigned = 0) { __syncthreads(); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }

// One CUDA thread runs at a time.
#define ATOMIC(name, expression)                    \
    template <class T, class V>                     \
    inline T atomic##name(T* address, V given) {    \
        const T old = *address, value = T(given);   \
        *address = expression;                      \
        return old;                                 \
    }
ATOMIC(Add, old + value)
ATOMIC(Sub, old - value)
ATOMIC(Min, value < old ? value : old)
ATOMIC(Max, old < value ? value : old)
ATOMIC(Exch, value)
ATOMIC(And, old & value)
ATOMIC(Or, old | value)
ATOMIC(Xor, old ^ value)
#undef ATOMIC
template <class T>
inline T atomicCAS(T* address, T expected, T value) {
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

template <class To, class From>
inline To with_bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline float __int_as_float(int x) { return with_bits_of<float>(x); }
inline int __float_as_int(float x) { return with_bits_of<int>(x); }
inline double __longlong_as_double(long long x) { return with_bits_of<double>(x); }
inline long long __double_as_longlong(double x) { return with_bits_of<long long>(x); }
