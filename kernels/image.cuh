// Images (n, c, d, h, w) with any strides, lists of images, and the windows that slide over them.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

// The number of elements of a box, and the offset of one of them.
template <class I> __device__ __forceinline__ I product_of(const I (&size)[3]) { return size[0] * size[1] * size[2]; }
template <class I> __device__ __forceinline__ long long offset_of(const I (&at)[3], const long long (&stride)[3]) {
    return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2];
}

// One array.  Strides are in elements.  They are 64-bit, since an array may have more than 2^31 elements.
struct Image {
    void* data;
    long long stride_n, stride_c, stride[3];

    // The offset of an element; `pixel` is a Pixel.
    template <class P> __device__ __forceinline__ long long at(long long n, long long c, const P& pixel) const {
        return n * stride_n + c * stride_c + offset_of(pixel.at, stride);
    }
};

// One of several inputs that represent their concatenation along c:
//
//     concatenation   | x[0]      | x[1] | x[2]        |
//     channel         0           first  first + channels
struct Source {
    Image image;
    int first, channels;
};

// The most sources that fit, with the rest of a parameter struct, in the 4 KiB that every driver accepts.
constexpr int MAX_SOURCES = 60;

struct Sources {
    Source table[MAX_SOURCES];
    int count;
};

struct Windows {
    long long size[3], out[3];
    int kernel[3], stride[3], before[3], dilation[3];
    int padding_mode;
};

enum PaddingMode { CONSTANT, REFLECT, SYMMETRIC, EDGE, WRAP };

// The index in the modes REFLECT, SYMMETRIC and WRAP.  They repeat the image with a period, and the first two run
// backwards in its second half.  This function is not inlined, since few threads call it and its division is long.
static __device__ __noinline__ long long repeated_index(long long i, long long size, int mode) {
    const long long period = mode == WRAP ? size : mode == SYMMETRIC ? 2 * size : size > 1 ? 2 * (size - 1) : 1;
    long long j = i % period;
    if (j < 0) j += period;
    if (j < size) return j;
    return mode == SYMMETRIC ? period - 1 - j : period - j;
}

// The index of the element that a padded index refers to, or -1 for a zero.
__device__ __forceinline__ long long padded_index(long long i, long long size, int mode) {
    if (i >= 0 && i < size) return i;
    if (mode == CONSTANT) return -1;
    if (mode == EDGE) return i < 0 ? 0 : size - 1;
    return repeated_index(i, size, mode);
}

struct Pixel {
    long long at[3];
};

// A thread's share of the pixels of all samples: a run of `width` pixels of sample `n` that begins at `pixel`.
struct Share {
    long long n, pixel;
};

// The share with number q.  Shares are numbered across samples, so that small images fill a block as well as large
// ones.
__device__ __forceinline__ Share share_at(long long q, long long shares_per_row, int width) {
    return {q / shares_per_row, q % shares_per_row * width};
}

// The first share of this thread, and the distance to its next one.
__device__ __forceinline__ long long first_share() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long share_step() { return (long long)gridDim.x * blockDim.x; }

// Pixel number p of an image of this size.
template <class I> __device__ __forceinline__ Pixel pixel_at(long long p, const I (&size)[3]) {
    if (size[0] * size[1] == 1) return {{0, 0, p}};
    const long long row = p / size[2];
    return {{row / size[1], row % size[1], p % size[2]}};
}

// Advance to the next pixel, or tap, in row-major order.
template <class I> __device__ __forceinline__ void advance(I (&at)[3], const I (&size)[3]) {
    if (++at[2] < size[2]) return;
    at[2] = 0;
    if (++at[1] < size[1]) return;
    at[1] = 0;
    ++at[0];
}

// Compute the input position, along one axis, of the tap (kd, kh, kw) of the window at an output pixel.  Returns false
// if the tap reads a zero of the padding.  Only true taps are visited: the kernel is never widened to emulate dilation.
__device__ __forceinline__ bool tap_place(
    const Windows& w, const Pixel& out, const int (&tap)[3], Pixel& in, int axis) {
    const long long i = out.at[axis] * w.stride[axis] - w.before[axis] + (long long)tap[axis] * w.dilation[axis];
    in.at[axis] = padded_index(i, w.size[axis], w.padding_mode);
    return in.at[axis] >= 0;
}

// The same along all three axes.
__device__ __forceinline__ bool tap_pixel(const Windows& w, const Pixel& out, const int (&tap)[3], Pixel& in) {
    bool inside = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) inside = tap_place(w, out, tap, in, a) && inside;
    return inside;
}

// Tap number t of a kernel as (kd, kh, kw).  Element numbers of any other box are converted in the same way.
__device__ __forceinline__ void tap_at(int t, const int (&kernel)[3], int (&tap)[3]) {
    tap[2] = t % kernel[2];
    t /= kernel[2];
    tap[1] = t % kernel[1];
    tap[0] = t / kernel[1];
}

}  // namespace cupyconv
