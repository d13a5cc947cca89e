// CUDA as ordinary C++17: the parts of the language that the kernels use, for a host compiler.
//
// portable.cuh includes this file if CUPYCONV_HOST is defined.  A CUDA thread is a fibre that runs until it must wait
// for other threads (fibres.cpp).  Therefore the built-in variables are plain globals, and every wait is a function
// call that passes its place in the source.
//
//     keywords        empty, except for the inlining ones
//     shared memory   SHARED_ARRAY and DYNAMIC_SHARED; `__shared__` stays undefined, because it would have no effect
//     barriers        __syncthreads, __syncwarp, and counters that blocks wait for
//     warp            shuffles and votes
//     atomics         real ones, so that a race detector recognizes them
//
// Asynchronous copies and tensor cores are in tensor_core_on_host.h.
// Not included: clusters, textures, 16-bit arithmetic.
#pragma once

#include "fibres.h"
#include "half_on_host.h"
#include "math_on_host.h"

// ---- keywords -------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)

constexpr int warpSize = cuda_on_host::lanes_per_warp;

#define CUDA_ON_HOST_SITE (cuda_on_host::Site{__FILE__, __LINE__})

// ---- vector types: CUDA's sizes and alignments ------------------------------------------------------------

#define VECTOR_TYPES(T, name)                                                             \
    struct name##1 { T x; };                                                              \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                    \
    struct name##3 { T x, y, z; };                                                        \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };    \
    inline name##1 make_##name##1(T x) { return {x}; }                                    \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                            \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                    \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

VECTOR_TYPES(signed char, char)
VECTOR_TYPES(unsigned char, uchar)
VECTOR_TYPES(short, short)
VECTOR_TYPES(unsigned short, ushort)
VECTOR_TYPES(int, int)
VECTOR_TYPES(long long, longlong)
VECTOR_TYPES(unsigned long long, ulonglong)
VECTOR_TYPES(float, float)
VECTOR_TYPES(double, double)

#undef VECTOR_TYPES

// uint3 is the type of threadIdx, so fibres.h defines it.
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- shared memory --------------------------------------------------------------------------------------

// T name[count] in static shared memory.  The address of the static byte identifies the array.
#define SHARED_ARRAY(T, name, count)                                                                      \
    static char name##_identity_;                                                                         \
    T(&name)[count] = *static_cast<T(*)[count]>(cuda_on_host::static_shared_memory(                       \
        &name##_identity_, sizeof(T) * (count), alignof(T), CUDA_ON_HOST_SITE))

// T* name: the launch's dynamic shared memory, 16-byte aligned.
#define DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(cuda_on_host::dynamic_shared_memory(CUDA_ON_HOST_SITE))

// ---- barriers -------------------------------------------------------------------------------------------

#define __syncthreads() cuda_on_host::synchronise_block(CUDA_ON_HOST_SITE)
#define __syncwarp(...) cuda_on_host::synchronise_warp(CUDA_ON_HOST_SITE, ##__VA_ARGS__)

inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- blocks that wait for each other (grid_barrier.cuh) ---------------------------------------------------

inline void add_released(unsigned* counter, unsigned value) { __atomic_fetch_add(counter, value, __ATOMIC_RELEASE); }

// Returns when the counter has reached `target`.
#define wait_acquired(counter, target)                                                    \
    do {                                                                                  \
        while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < (target))                     \
            cuda_on_host::wait_for_other_blocks(CUDA_ON_HOST_SITE);                       \
        cuda_on_host::found_other_blocks();                                               \
    } while (false)

// ---- warp operations ------------------------------------------------------------------------------------

namespace cuda_on_host {

constexpr unsigned full_mask = 0xffffffffu;

inline void synchronise_warp(Site site, unsigned mask = full_mask) {
    meet_warp(mask, nullptr, nullptr, nullptr, true, site);
}

template <class T>
struct ShuffleInput {
    T value;
    int source;  // the lane whose value this lane requests
};

// The value of a lane outside the mask is undefined and is returned as 0xff, a NaN.  Not instrumented: the exchange
// happens in registers, but a race detector would consider it unordered access to shared memory.
template <class T>
__attribute__((no_sanitize("thread"))) void evaluate_shuffle(
    unsigned mask, const void* const* inputs, void* const* outputs) {
    for (int lane = 0; lane < lanes_per_warp; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const int source = static_cast<const ShuffleInput<T>*>(inputs[lane])->source;
        if (mask >> source & 1)
            *static_cast<T*>(outputs[lane]) = static_cast<const ShuffleInput<T>*>(inputs[source])->value;
        else
            __builtin_memset(outputs[lane], 0xff, sizeof(T));
    }
}

template <class T>
T shuffle_from(Site site, unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes a lane");
    const ShuffleInput<T> input{value, source};
    T output;
    meet_warp(mask, &input, &output, evaluate_shuffle<T>, false, site);
    return output;
}

// A warp is divided into segments of `width` lanes; a lane that would read beyond its segment reads its own value.

template <class T>
T shuffle(Site site, unsigned mask, T value, int source, int width = warpSize) {
    const int segment = lane() & ~(width - 1);
    return shuffle_from(site, mask, value, segment | (source & (width - 1)));
}

template <class T>
T shuffle_xor(Site site, unsigned mask, T value, int bits, int width = warpSize) {
    const int source = lane() ^ bits;
    const int segment_end = (lane() | (width - 1)) + 1;
    return shuffle_from(site, mask, value, source < segment_end ? source : lane());
}

template <class T>
T shuffle_down(Site site, unsigned mask, T value, unsigned distance, int width = warpSize) {
    const unsigned position = unsigned(lane() & (width - 1)) + distance;
    return shuffle_from(site, mask, value, position < unsigned(width) ? lane() + int(distance) : lane());
}

template <class T>
T shuffle_up(Site site, unsigned mask, T value, unsigned distance, int width = warpSize) {
    const unsigned position = unsigned(lane() & (width - 1));
    return shuffle_from(site, mask, value, distance <= position ? lane() - int(distance) : lane());
}

__attribute__((no_sanitize("thread"))) inline void evaluate_ballot(
    unsigned mask, const void* const* inputs, void* const* outputs) {
    unsigned votes = 0;
    for (int lane = 0; lane < lanes_per_warp; ++lane)
        if (mask >> lane & 1) votes |= unsigned(*static_cast<const bool*>(inputs[lane])) << lane;
    for (int lane = 0; lane < lanes_per_warp; ++lane)
        if (mask >> lane & 1) *static_cast<unsigned*>(outputs[lane]) = votes;
}

inline unsigned ballot(Site site, unsigned mask, bool vote) {
    unsigned votes;
    meet_warp(mask, &vote, &votes, evaluate_ballot, false, site);
    return votes;
}

}  // namespace cuda_on_host

#define __shfl_sync(mask, ...) cuda_on_host::shuffle(CUDA_ON_HOST_SITE, mask, __VA_ARGS__)
#define __shfl_xor_sync(mask, ...) cuda_on_host::shuffle_xor(CUDA_ON_HOST_SITE, mask, __VA_ARGS__)
#define __shfl_down_sync(mask, ...) cuda_on_host::shuffle_down(CUDA_ON_HOST_SITE, mask, __VA_ARGS__)
#define __shfl_up_sync(mask, ...) cuda_on_host::shuffle_up(CUDA_ON_HOST_SITE, mask, __VA_ARGS__)
#define __ballot_sync(mask, vote) cuda_on_host::ballot(CUDA_ON_HOST_SITE, mask, vote)
#define __any_sync(mask, vote) (cuda_on_host::ballot(CUDA_ON_HOST_SITE, mask, vote) != 0)
#define __all_sync(mask, vote) (cuda_on_host::ballot(CUDA_ON_HOST_SITE, mask, !(vote)) == 0)

// ---- memory ---------------------------------------------------------------------------------------------

extern "C" void* memcpy(void* to, const void* from, __SIZE_TYPE__ bytes) noexcept;

template <class T>
inline T __ldg(const T* address) { return *address; }

template <class T>
inline void __stwb(T* address, T value) { *address = value; }

namespace cuda_on_host {

// Replaces *address by change(*address) atomically; returns the previous value.
template <class T, class Change>
inline T update_atomically(T* address, Change change) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do {
        after = change(before);
    } while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

// Excludes a parameter from template argument deduction: atomicAdd(float*, int) deduces T from the pointer.
template <class T>
struct Exactly {
    using type = T;
};
template <class T>
using exactly_t = typename Exactly<T>::type;

}  // namespace cuda_on_host

template <class T>
inline T atomicAdd(T* address, cuda_on_host::exactly_t<T> value) {
    return cuda_on_host::update_atomically(address, [value](T old) { return T(old + value); });
}
template <class T>
inline T atomicMax(T* address, cuda_on_host::exactly_t<T> value) {
    return cuda_on_host::update_atomically(address, [value](T old) { return old < value ? value : old; });
}
template <class T>
inline T atomicMin(T* address, cuda_on_host::exactly_t<T> value) {
    return cuda_on_host::update_atomically(address, [value](T old) { return value < old ? value : old; });
}
template <class T>
inline T atomicExch(T* address, cuda_on_host::exactly_t<T> value) {
    return cuda_on_host::update_atomically(address, [value](T) { return value; });
}
template <class T>
inline T atomicCAS(T* address, cuda_on_host::exactly_t<T> expected, cuda_on_host::exactly_t<T> value) {
    return cuda_on_host::update_atomically(address, [=](T old) { return old == expected ? value : old; });
}
