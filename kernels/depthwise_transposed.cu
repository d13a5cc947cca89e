// Depthwise transposed convolution at stride 2, the input gradient of a depthwise one: every channel has its own
// kernel.
//
//     y[n, c, i] = activation( sum over o of c's group, t, and windows p that read i through t of  weight[o, c, t] * x[n, o, p]
//                              + bias[c] )
//
//     no M: a thread works on one channel c
//     N = i (ROWS elements per thread, one above the other)
//     K = (o, t): one output, or those of a small group
//
//     x   p p       the windows that read a thread's elements: each p is loaded once, and used by every element it reads
//         p p
//                   Every other tap of a kernel reads an element, down and across:
//     y    i        taps 0 2 ..   a strip begins at an element that tap 0 reads, so that the taps of a row are
//          i        taps 1 3 ..   known at compile time; a thread's column has the even taps or the odd ones
//          i        taps 0 2 ..
//                                 neighbouring threads process neighbours in y: elements along w or, channels-last, 32
//                                 channels of one element
//
// Bound by memory.  Floor: (pixels * group_outputs + size) elements per plane over the bandwidth.
//
// -D: DTYPE (storage type), KERNEL (taps along h and along w, one along d, dilation 1)
#include "epilogue.cuh"
#include "strip.cuh"

namespace cupyconv {

struct DepthwiseTransposedParams {
    Sources sources;
    Windows windows;
    Image weight;  // n is the channel of x, c the channel of the result within its group
    Image out;
    Epilogue epilogue;
    long long batch;
    int group_channels, group_outputs;
    int first, channels;  // first channel and number of channels of this result
    int channel_lanes;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int MAX_BLOCK = 128, STRIDE = 2, ROWS = 8;
// HEIGHT and WIDTH are the windows, down and across, that read a thread's elements.
constexpr int REACH = (KERNEL - 1) / STRIDE, HEIGHT = REACH + ROWS / STRIDE, WIDTH = REACH + 1;
// Blocks per multiprocessor that the registers allow.  They hold taps, sums and loads in flight.
constexpr int BLOCKS = KERNEL > 5 ? 2 : KERNEL > 3 ? 3 : 4;

// Accumulate the sums of the elements at (d, h, w), (d, h + 1, w), ... of one plane of the padded result; h is even.
__device__ __forceinline__ void convolve(
    A (&sum)[ROWS], const T* x, const long long (&step)[3], const T* w, const long long (&tap_step)[3],
    const Windows& windows, int d, int h, int w_) {
    int plane[1], row[HEIGHT], column[WIDTH];
    offsets<T>(plane, d, windows.out[0], step[0], CONSTANT);
    offsets<T>(row, h / STRIDE - REACH, windows.out[1], step[1], CONSTANT);
    offsets<T>(column, w_ / STRIDE - REACH, windows.out[2], step[2], CONSTANT);

    // The last window of a column reads it through its first tap.
    A tap[KERNEL][WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        const int k = w_ % STRIDE + (REACH - j) * STRIDE;
        const bool exists = k < KERNEL && plane[0] >= 0;
        column[j] = exists ? plane[0] + column[j] : OUTSIDE;
#pragma unroll
        for (int i = 0; i < KERNEL; ++i) tap[i][j] = k < KERNEL ? widen(w[i * int(tap_step[1]) + k * int(tap_step[2])]) : A(0);
    }
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            const int at = row[i] + column[j];
            const A value = at >= 0 ? widen(element(x, at)) : A(0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int k = r + (REACH - i) * STRIDE;
                if (at >= 0 && k >= 0 && k < KERNEL) add_product(sum[r], value, tap[k][j]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, BLOCKS)
    depthwise_transposed(const __grid_constant__ DepthwiseTransposedParams params) {
    const Windows& windows = params.windows;
    const Image &out = params.out, &weight = params.weight;
    const int lanes = params.channel_lanes;  // lanes of a warp along channels
    const int depth = windows.size[0], height = windows.size[1], width = windows.size[2];
    const int above = windows.before[1] % STRIDE;  // rows of the first strip that do not exist
    const int strips = (height + above + ROWS - 1) / ROWS;
    const int shares = params.batch * depth * strips * width;

    for (long long i = blockIdx.y * lanes + threadIdx.x % lanes; i < params.channels; i += gridDim.y * lanes) {
        const int c = params.first + i, o_first = c / params.group_channels * params.group_outputs;
        const T* const w_c = static_cast<const T*>(weight.data) + c % params.group_channels * weight.stride_c;
        const A bias = bias_of<T>(params.epilogue, i);

        for (int q = first_share() / lanes; q < shares; q += share_step() / lanes) {
            const int column = q / width, plane = column / strips, n = plane / depth;
            const int d = plane % depth, h = column % strips * ROWS - above, w = q % width;
            A sum[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = bias;
            int s = 0;
#pragma unroll 1
            for (int o = o_first; o < o_first + params.group_outputs; ++o) {
                while (o >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
                const Source& source = params.sources.table[s];
                const T* const x_no = static_cast<const T*>(source.image.data) + n * source.image.stride_n +
                                      (o - source.first) * source.image.stride_c;
                convolve(
                    sum, x_no, source.image.stride, w_c + o * weight.stride_n, weight.stride, windows,
                    d + windows.before[0], h + windows.before[1], w + windows.before[2]);
            }

            activation_of<T>(params.epilogue).apply(sum);
            T* const y_c = static_cast<T*>(out.data) + out.at(n, i, Pixel{{d, h, w}});
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (unsigned(h + r) < unsigned(height)) y_c[r * out.stride[1]] = narrow<T>(sum[r]);
        }
    }
}
