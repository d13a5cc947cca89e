// Depthwise convolution: every input channel has its own kernels, `multiplier` of them.
//
//     y[n, c * multiplier + j, p] = activation( sum_t weight[c * multiplier + j, 0, t] * x[n, c, window(p, t)] + ... )
//
//     no M: a block works on one channel c    N = (n, p) (pixels, PIXELS a thread)    K = t (taps)
//
//     x_s [n, c]  ░░░░░░░░░░   one channel, of one source, chosen once a block
//                 ttt          PIXELS neighbouring windows a thread: what one of them reads, the next
//     y           .pppp....    finds in the cache, and a tap's weight is read once for all of them
//
// Bound by memory: the plane is read from L2 or cache `taps` times, from memory once.
// Floor: (size + multiplier * pixels) elements a plane over the bandwidth.
//
// -D: DTYPE (storage type), PIXELS (pixels a thread)
#include "convolution.cuh"

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 128;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) depthwise(const __grid_constant__ ConvolutionParams params) {
    using A = Accumulator<T>;
    DYNAMIC_SHARED(A, weight);  // one output's taps
    const Windows& windows = params.windows;
    const long long pixels = windows.out[0] * windows.out[1] * windows.out[2];
    const int taps = windows.kernel[0] * windows.kernel[1] * windows.kernel[2];
    const long long a_row = (pixels + PIXELS - 1) / PIXELS, shares = params.batch * a_row;

    for (long long o = blockIdx.y; o < (long long)params.groups * params.group_outputs; o += gridDim.y) {
        const int c = o / params.group_outputs;
        int s = 0;
        while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
        const Source& source = params.sources.table[s];

        __syncthreads();  // the last output's weights have been used
        for (int t = threadIdx.x; t < taps; t += blockDim.x) {
            int tap[3];
            tap_at(t, windows.kernel, tap);
            const long long at = o * params.weight.stride_n + tap[0] * params.weight.stride[0] +
                                 tap[1] * params.weight.stride[1] + tap[2] * params.weight.stride[2];
            weight[t] = widen(static_cast<const T*>(params.weight.data)[at]);
        }
        __syncthreads();

        const T* const x_c =
            static_cast<const T*>(source.image.data) + (c - source.first) * source.image.stride_c;
        T* const y_o = static_cast<T*>(params.out.data) + o * params.out.stride_c;
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, a_row, PIXELS);
            const T* const x_nc = x_c + share.n * source.image.stride_n;
            const Pixel first = pixel_at(share.pixel, windows.out);
            A sum[PIXELS] = {};
            for (int t = 0; t < taps; ++t) {
                int tap[3];
                Pixel out = first, in;
                tap_at(t, windows.kernel, tap);
#pragma unroll
                for (int i = 0; i < PIXELS; ++i, advance(out, windows.out))
                    if (share.pixel + i < pixels && tap_pixel(windows, out, tap, in))
                        add_product(sum[i], widen(x_nc[offset_of(in, source.image.stride)]), weight[t]);
            }
            Pixel out = first;
#pragma unroll
            for (int i = 0; i < PIXELS; ++i, advance(out, windows.out))
                if (share.pixel + i < pixels)
                    y_o[share.n * params.out.stride_n + offset_of(out, params.out.stride)] =
                        finish<T>(sum[i], params.epilogue, share.n, o, out);
        }
    }
}
