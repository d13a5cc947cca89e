// The gradient of pool.cu.  For a maximum, each element adds the gradients of the windows whose maximum it is.  For a
// mean, it adds its shares of the gradients of all windows that read it.
//
//     dx[n, c, i] = sum over taps t and windows p with  p * stride - before + t * dilation == i  of
//         LARGEST   grad[n, c, p]  if x[n, c, i] == y[n, c, p] and no tap before t is equal
//         MEAN      grad[n, c, p] / taps that count
//
//     no M, no N: one thread per element i, for CHANNELS channels       K = t (taps)
//
//     y       ----5-----7----
//                  \   /            a gather: one thread owns each sum, so there are no atomics and no stored
//     x              5              indices, and the order of additions is fixed
//
// The tap of the maximum is searched for again.  Few elements equal the maximum of their window, and only for these
// does the thread read the taps before them.  NaN counts as the largest, and as equal to NaN.  Adjacent threads process
// adjacent elements, as in pool.cu.
//
// Bound by memory.  Floor: the arrays that are read, and dx, once over the bandwidth.
//
// -D: DTYPE (storage type), CHANNELS (per thread), NUMBER (LARGEST or MEAN)
#include "compare.cuh"
#include "counted.cuh"
#include "image.cuh"

namespace cupyconv {

enum Number { LARGEST, MEAN };

struct PoolGradientParams {
    Image x, y;  // for LARGEST
    Image grad;
    Windows windows;
    Image out;
    Counted counted;  // for MEAN
    long long batch;
    int channels, lanes;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
// Two blocks per multiprocessor as a minimum.  By its own choice, the compiler spills some registers to fit three.
constexpr int MAX_BLOCK = 256, MIN_BLOCKS = 2;

__device__ __forceinline__ bool same(A a, A b) { return is_equal(a, b) || (isnan(a) && isnan(b)); }

// Whether window p reaches the element that is `end` elements after the start of window 0, along axis a.
__device__ __forceinline__ bool is_over(const Windows& windows, int a, long long p, long long end) {
    return p >= 0 && end - p * windows.stride[a] <= (windows.kernel[a] - 1LL) * windows.dilation[a];
}

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, MIN_BLOCKS)
    pool_gradient(const __grid_constant__ PoolGradientParams params) {
    const Windows& windows = params.windows;
    const Image &x = params.x, &y = params.y, &grad = params.grad, &out = params.out;
    const int lanes = params.lanes;
    const long long x_step = lanes * x.stride_c, y_step = lanes * y.stride_c, grad_step = lanes * grad.stride_c;
    const long long shares_per_row = product_of(windows.size) * lanes;
    const long long shares = params.batch * shares_per_row;

    for (long long first = (long long)blockIdx.y * CHANNELS * lanes; first < params.channels;
         first += (long long)gridDim.y * CHANNELS * lanes)
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, shares_per_row, 1);
            const Share lane = share_at(share.pixel, lanes, 1);  // `n` is the pixel, `pixel` the lane
            const long long c = first + lane.pixel;
            const int channels = (params.channels - c + lanes - 1) / lanes;  // of this thread, if fewer than CHANNELS
            const Pixel in = pixel_at(lane.n, windows.size);
            const T* const x_nc = static_cast<const T*>(x.data) + share.n * x.stride_n + c * x.stride_c;
            const T* const y_nc = static_cast<const T*>(y.data) + share.n * y.stride_n + c * y.stride_c;
            const T* const grad_nc = static_cast<const T*>(grad.data) + share.n * grad.stride_n + c * grad.stride_c;
            T* const dx = static_cast<T*>(out.data) + out.at(share.n, c, in);
            A value[CHANNELS], sum[CHANNELS];
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                sum[i] = A(0);
                value[i] = NUMBER == LARGEST && i < channels ? widen(x_nc[i * x_step + offset_of(in.at, x.stride)]) : A(0);
            }

            // Along each axis, from the last window that may read the element to the first, so that taps increase.
            long long end[3], last[3];
#pragma unroll
            for (int a = 0; a < 3; ++a) {
                end[a] = in.at[a] + windows.before[a];
                last[a] = end[a] / windows.stride[a];
            }
            Pixel p;
#pragma unroll 1
            for (p.at[0] = last[0]; is_over(windows, 0, p.at[0], end[0]); --p.at[0])
#pragma unroll 1
                for (p.at[1] = last[1]; is_over(windows, 1, p.at[1], end[1]); --p.at[1])
#pragma unroll 1
                    for (p.at[2] = last[2]; is_over(windows, 2, p.at[2], end[2]); --p.at[2]) {
                        int tap[3];
                        bool hit = true;
#pragma unroll
                        for (int a = 0; a < 3; ++a) {
                            const long long after = end[a] - p.at[a] * windows.stride[a];
                            tap[a] = after / windows.dilation[a];
                            hit = hit && p.at[a] < windows.out[a] && tap[a] * (long long)windows.dilation[a] == after;
                        }
                        if (!hit) continue;
                        const T* const received = grad_nc + offset_of(p.at, grad.stride);
                        if constexpr (NUMBER == MEAN) {
                            const A taps = A(taps_counted(windows, params.counted, p));
#pragma unroll
                            for (int i = 0; i < CHANNELS; ++i)
                                if (i < channels) sum[i] += widen(received[i * grad_step]) / taps;
                            continue;
                        }
                        unsigned winners = 0;  // bit i: channel i
                        const T* const largest = y_nc + offset_of(p.at, y.stride);
#pragma unroll
                        for (int i = 0; i < CHANNELS; ++i)
                            if (i < channels && same(value[i], widen(largest[i * y_step]))) winners |= 1u << i;

                        int earlier[3] = {0, 0, 0};
#pragma unroll 1
                        while (winners && (earlier[0] != tap[0] || earlier[1] != tap[1] || earlier[2] != tap[2])) {
                            Pixel other;
                            if (tap_pixel(windows, p, earlier, other)) {
                                const T* const element = x_nc + offset_of(other.at, x.stride);
#pragma unroll
                                for (int i = 0; i < CHANNELS; ++i)
                                    if (winners >> i & 1 && same(value[i], widen(element[i * x_step])))
                                        winners &= ~(1u << i);
                            }
                            advance(earlier, windows.kernel);
                        }

#pragma unroll
                        for (int i = 0; i < CHANNELS; ++i)
                            if (winners >> i & 1) sum[i] += widen(received[i * grad_step]);
                    }
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i)
                if (i < channels) dx[i * lanes * out.stride_c] = narrow<T>(sum[i]);
        }
}
