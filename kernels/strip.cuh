// A strip of output pixels, one above the other, whose windows share what they read: where that lies in a plane.
//
//     row 0     ░ ░ ░        KERNEL columns, and (ROWS - 1) * STRIDE + KERNEL rows of them: an element's offset is the
//     row 1     ░ ░ ░        sum of its row's and its column's, and negative where either is outside
//     ...
#pragma once
#include "image.cuh"

namespace cupyconv {

constexpr int OUTSIDE = -(1 << 30);  // added to any offset of a plane, or to itself, it stays below 0

// Where COUNT taps of a window that begins at `first` lie along an axis, in bytes: what 64-bit addresses take least
// arithmetic to reach.
template <class T, int COUNT>
__device__ __forceinline__ void offsets(int (&at)[COUNT], int first, int size, long long stride, int mode) {
    const int step = int(stride) * int(sizeof(T));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) at[i] = unsigned(first + i) < unsigned(size) ? (first + i) * step : OUTSIDE;
    if (mode == CONSTANT) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (at[i] < 0) at[i] = padded_index(first + i, size, mode) * step;
}

template <class T> __device__ __forceinline__ T element(const T* x, unsigned bytes) {
    return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(x) + bytes);
}

}  // namespace cupyconv
