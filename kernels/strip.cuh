// A strip of output pixels, one above the other, whose windows share elements: the offsets of these in a plane.
//
//     row 0     ░ ░ ░        KERNEL columns, and (ROWS - 1) * STRIDE + KERNEL rows of them: the offset of an element
//     row 1     ░ ░ ░        is the sum of its row's and its column's, and negative if either is outside
//     ...
#pragma once
#include "image.cuh"

namespace cupyconv {

constexpr int OUTSIDE = -(1 << 30);  // stays negative if added to any offset of a plane, or to itself

// Byte offsets along an axis of COUNT taps of a window that begins at `first`.  Computing a 64-bit address from
// bytes needs the least arithmetic.
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
