// Direct convolution: any kernel, stride, dilation, padding, groups, strides and list of inputs, no workspace.
//
//     y[n, o, p] = activation( sum_{t, c} weight[o, c, t] * x[n, g * group_channels + c, window(p, t)] + ... )
//
//     M = o (outputs of a group, TILE per thread)    N = p (pixels)    K = (t, c)
//
//     one thread          x  [. . t t t . .]
//                            [. . t t t . .]   one window, every tap and channel
//                            [. . t t t . .]
//                                 |
//                         y       p            TILE outputs of one group at this pixel
//
// The outer loop is over taps, so that window and padding are computed once per tap.  The source is chosen once per run
// of channels.  Bound by loads from the cache: this is the method of last resort, for convolutions that need no
// columns or cannot have them.  Floor: 2 * M * N * K operations over the arithmetic rate, which it does not come near.
//
// -D: X_DTYPE, W_DTYPE, Y_DTYPE (types of image, weight, result; X or W may be real with a complex Y), TILE,
//     PROLOGUE (1: inputs are transformed as they are loaded, see prologue.cuh)
#include "epilogue.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct DirectParams {
    Sources sources;
    Windows windows;
    Image weight;  // n is the output, c the channel of its group
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    long long batch;
    int groups, group_channels, group_outputs;
};

}  // namespace cupyconv

using namespace cupyconv;

using X = X_DTYPE;
using W = W_DTYPE;
using Y = Y_DTYPE;
constexpr int MAX_BLOCK = 128;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) direct(const __grid_constant__ DirectParams params) {
    const Windows& windows = params.windows;
    const long long pixels = product_of(windows.out);
    const int taps = product_of(windows.kernel);
    const int tiles = (params.group_outputs + TILE - 1) / TILE;  // per group
    const long long shares = params.batch * pixels;

    for (long long tile = blockIdx.y; tile < (long long)params.groups * tiles; tile += gridDim.y) {
        const int g = tile / tiles, first = tile % tiles * TILE;  // first output within the group
        const int c_first = g * params.group_channels, c_end = c_first + params.group_channels;
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, pixels, 1);
            const Pixel out = pixel_at(share.pixel, windows.out);
            Accumulator<Y> sum[TILE] = {};
            for (int t = 0; t < taps; ++t) {
                int tap[3];
                Pixel in;
                tap_at(t, windows.kernel, tap);
                if (!tap_pixel(windows, out, tap, in)) continue;
                const W* const w_t = static_cast<const W*>(params.weight.data) + offset_of(tap, params.weight.stride);
                for (int s = 0; s < params.sources.count; ++s) {
                    const Source& source = params.sources.table[s];
                    const int from = max(c_first, source.first), to = min(c_end, source.first + source.channels);
                    if (from >= to) continue;
                    const X* x_nc =
                        static_cast<const X*>(source.image.data) + source.image.at(share.n, from - source.first, in);
                    for (int c = from; c < to; ++c, x_nc += source.image.stride_c) {
                        Accumulator<X> x = widen(*x_nc);
                        if constexpr (PROLOGUE) {
                            const auto by = factors_of<Accumulator<X>>(params.prologue, c);
                            x = transformed(x, by, params.prologue);
                        }
                        const W* const w_tc = w_t + (c - c_first) * params.weight.stride_c;
#pragma unroll
                        for (int j = 0; j < TILE; ++j) {
                            const long long o = g * params.group_outputs + first + j;
                            if (first + j < params.group_outputs)
                                add_product(sum[j], x, widen(w_tc[o * params.weight.stride_n]));
                        }
                    }
                }
            }
            Y* const y_n = static_cast<Y*>(params.out.data) + share.n * params.out.stride_n;
#pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const long long o = g * params.group_outputs + first + j;
                if (first + j < params.group_outputs)
                    y_n[o * params.out.stride_c + offset_of(out.at, params.out.stride)] =
                        finish<Y>(sum[j], params.epilogue, share.n, o, out, params.out);
            }
        }
    }
}
