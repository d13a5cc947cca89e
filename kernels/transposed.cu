// Direct transposed convolution: any kernel, stride, dilation, padding mode, groups, strides and list of inputs, no
// workspace.
//
//     y[n, c, i] = activation( sum over t, o and windows p that read i through t of  weight[o, c, t] * x[n, o, p]
//                              + bias[c] )
//
//     M = c (channels of a group, TILE per thread)    N = i (elements)    K = (t, o)
//
//     one thread          x  [. p p .]        the windows that read one element, and all channels of x there
//                            [. p p .]
//                               |
//                         y     i             TILE channels of one group at this element
//
// It is a gather: each sum has one owner and a fixed order.  The windows are computed once for all channels of a
// source.  Bound by loads from the cache: this is the method of last resort, for convolutions that need no columns or
// cannot have them.  Floor: 2 * M * N * K operations over the arithmetic rate, which it does not come near.
//
// -D: X_DTYPE, W_DTYPE, Y_DTYPE (types of x, weight, result; X or W may be real with a complex Y), TILE,
//     FOLDS (1 if padding repeats elements, 0 if it is zeros)
#include "adjoint.cuh"
#include "epilogue.cuh"

namespace cupyconv {

struct TransposedParams {
    Sources sources;
    Windows windows;
    Adjoint adjoint;
    Image weight;  // n is the channel of x, c the channel of the result within its group
    Image out;
    Epilogue epilogue;
    long long batch;
    int groups, group_channels, group_outputs;
    int first, channels;  // first channel and number of channels of this result
    int conjugated;       // whether the weight is conjugated
};

}  // namespace cupyconv

using namespace cupyconv;

using X = X_DTYPE;
using W = W_DTYPE;
using Y = Y_DTYPE;
constexpr int MAX_BLOCK = 128;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) transposed(const __grid_constant__ TransposedParams params) {
    const Windows& windows = params.windows;
    const Image& weight = params.weight;
    const long long elements = product_of(windows.size);
    const int tiles = (params.group_channels + TILE - 1) / TILE;  // per group
    const long long shares = params.batch * elements;
    const int g_first = params.first / params.group_channels;
    const int g_end = (params.first + params.channels - 1) / params.group_channels + 1;

    for (long long tile = blockIdx.y; tile < (long long)(g_end - g_first) * tiles; tile += gridDim.y) {
        const int g = g_first + tile / tiles, first = tile % tiles * TILE;  // first channel within the group
        const int o_first = g * params.group_outputs, o_end = o_first + params.group_outputs;
        const int y_first = g * params.group_channels + first - params.first;  // within this result
        const int end = min(params.group_channels - first, params.channels - y_first);
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, elements, 1);
            const Pixel in = pixel_at(share.pixel, windows.size);
            Accumulator<Y> sum[TILE] = {};
            for (int s = 0; s < params.sources.count; ++s) {
                const Source& source = params.sources.table[s];
                const int from = max(o_first, source.first), to = min(o_end, source.first + source.channels);
                if (from >= to) continue;
                const X* const x_no = static_cast<const X*>(source.image.data) + share.n * source.image.stride_n +
                                      (from - source.first) * source.image.stride_c;
                const W* const w_o =
                    static_cast<const W*>(weight.data) + from * weight.stride_n + first * weight.stride_c;
                for_each_reader<FOLDS>(
                    windows, params.adjoint, in, weight.stride, source.image.stride,
                    [&](long long tap, long long pixel) {
                        const X* x_nop = x_no + pixel;
                        const W* w_ot = w_o + tap;
                        for (int o = from; o < to; ++o, x_nop += source.image.stride_c, w_ot += weight.stride_n) {
                            const Accumulator<X> x = widen(*x_nop);
#pragma unroll
                            for (int j = 0; j < TILE; ++j)
                                if (y_first + j >= 0 && j < end) {
                                    const Accumulator<W> factor = widen(w_ot[j * weight.stride_c]);
                                    add_product(sum[j], x, params.conjugated ? conjugate(factor) : factor);
                                }
                        }
                    });
            }
            Y* const y_n = static_cast<Y*>(params.out.data) + share.n * params.out.stride_n;
#pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const long long c = y_first + j;
                if (c >= 0 && j < end)
                    y_n[c * params.out.stride_c + offset_of(in.at, params.out.stride)] =
                        finish<Y>(sum[j], params.epilogue, share.n, c, in, params.out);
            }
        }
    }
}
