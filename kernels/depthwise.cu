// Depthwise convolution: every input channel has its own kernels, `group_outputs` of them.
//
//     y[n, o, p] = activation( sum_{c, t} weight[o, c, t] * x[n, g(o) * group_channels + c, window(p, t)] + ... )
//
//     no M: a thread works on one output channel o of group g(o) = o / group_outputs
//     N = p (ROWS pixels per thread, one above the other)
//     K = (c, t): one channel, or with GROUPED those of a small group
//
//     x  w ->   ░ ░ ░ . . .       the windows of a thread's pixels overlap: each element is read once
//            h  ░ ░ ░ . . .       and used by every pixel of the column whose window contains it
//            ↓  ░ ░ ░ . . .
//               ░ ░ ░ . . .       neighbouring threads process neighbours in y: pixels along w or,
//     y           p               channels-last, 32 channels of one pixel
//                 p
//
// KERNEL = 0 is for any kernel, stride and dilation: one pixel per thread, tap by tap.
//
// Bound by memory; GROUPED by loads and by their addresses, which each channel computes again.
// Floor: (size + group_outputs * pixels) elements per plane over the bandwidth.
//
// -D: DTYPE (storage type), KERNEL (taps along h and along w, one along d, dilation 1; or 0), STRIDE (along h; or 0),
//     PROLOGUE (1: inputs are transformed as they are loaded, see prologue.cuh),
//     GROUPED (1: groups of more than one channel)
#include "epilogue.cuh"
#include "prologue.cuh"
#include "strip.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif

namespace cupyconv {

struct DepthwiseParams {
    Sources sources;
    Windows windows;
    Image weight;  // n is the output
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    long long batch;
    int outputs, group_outputs, group_channels, channel_lanes;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int MAX_BLOCK = 128;
// Blocks per multiprocessor that the registers allow.  They hold taps, sums and loads in flight.
constexpr int BLOCKS = GROUPED ? (sizeof(T) == 8 ? 2 : 3) : KERNEL > 5 ? 2 : KERNEL > 3 ? 3 : 4;

#if KERNEL
constexpr int ROWS = STRIDE == 1 ? 8 : 4;  // pixels per thread
using Index = int;                         // the host has checked that 32 bits suffice for planes and counts
#else
constexpr int ROWS = 1;
using Index = long long;
#endif

#if KERNEL
// Accumulate the sums of the pixels at (d, h, w), (d, h + 1, w), ... of one plane, whose elements `loaded` widens.
template <class Loaded>
__device__ __forceinline__ void convolve(
    A (&sum)[ROWS], const T* x, const long long (&step)[3], const T* w, const long long (&tap_step)[3],
    const Windows& windows, int d, int h, int w_, Loaded loaded) {
    constexpr int HEIGHT = (ROWS - 1) * STRIDE + KERNEL;
    int plane[1], row[HEIGHT], column[KERNEL];
    offsets<T>(plane, d * windows.stride[0] - windows.before[0], windows.size[0], step[0], windows.padding_mode);
    offsets<T>(row, h * STRIDE - windows.before[1], windows.size[1], step[1], windows.padding_mode);
    offsets<T>(column, w_ * windows.stride[2] - windows.before[2], windows.size[2], step[2], windows.padding_mode);

    A tap[KERNEL][KERNEL];
#pragma unroll
    for (int i = 0; i < KERNEL; ++i) {
#pragma unroll
        for (int j = 0; j < KERNEL; ++j) tap[i][j] = widen(w[i * int(tap_step[1]) + j * int(tap_step[2])]);
    }
#pragma unroll
    for (int j = 0; j < KERNEL; ++j) column[j] = plane[0] < 0 ? OUTSIDE : plane[0] + column[j];
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int j = 0; j < KERNEL; ++j) {
            const int at = row[i] + column[j];
            const A value = at >= 0 ? loaded(element(x, at)) : A(0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (i >= r * STRIDE && i < r * STRIDE + KERNEL) add_product(sum[r], value, tap[i - r * STRIDE][j]);
        }
    }
}
#else
// Accumulate the sum of the one pixel at (d, h, w) of a plane, whose elements `loaded` widens.
template <class Loaded>
__device__ __forceinline__ void convolve(
    A (&sum)[1], const T* x, const long long (&step)[3], const T* w, const long long (&tap_step)[3],
    const Windows& windows, long long d, long long h, long long w_, Loaded loaded) {
    const long long first[3] = {
        d * windows.stride[0] - windows.before[0], h * windows.stride[1] - windows.before[1],
        w_ * windows.stride[2] - windows.before[2]};
    const auto place = [&](int axis, long long tap) {
        return padded_index(first[axis] + tap * windows.dilation[axis], windows.size[axis], windows.padding_mode);
    };
    for (int i = 0; i < windows.kernel[0]; ++i) {
        const long long plane = place(0, i);
        if (plane < 0) continue;
        for (int j = 0; j < windows.kernel[1]; ++j) {
            const long long row = place(1, j);
            if (row < 0) continue;
            const T* const x_row = x + plane * step[0] + row * step[1];
            const T* const w_row = w + i * tap_step[0] + j * tap_step[1];
            for (int k = 0; k < windows.kernel[2]; ++k) {
                const long long column = place(2, k);
                if (column >= 0) add_product(sum[0], loaded(x_row[column * step[2]]), widen(w_row[k * tap_step[2]]));
            }
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, BLOCKS)
    depthwise(const __grid_constant__ DepthwiseParams params) {
    const Windows& windows = params.windows;
    const Image &out = params.out, &residual = params.epilogue.residual;
    const int lanes = params.channel_lanes;  // lanes of a warp along channels
    const Index strips = (windows.out[1] + ROWS - 1) / ROWS;
    const Index shares = params.batch * windows.out[0] * strips * windows.out[2];

    for (long long o = blockIdx.y * lanes + threadIdx.x % lanes; o < params.outputs; o += gridDim.y * lanes) {
        const int c_first = o / params.group_outputs * (GROUPED ? params.group_channels : 1);
        const T* const w_o = static_cast<const T*>(params.weight.data) + o * params.weight.stride_n;
        const A bias = bias_of<T>(params.epilogue, o);
        Factors<A> by = {};
        if constexpr (PROLOGUE) by = factors_of<A>(params.prologue, c_first);
        const auto loaded = [&](T value) {
            if constexpr (PROLOGUE)
                return transformed(widen(value), by, params.prologue);
            else
                return widen(value);
        };

        for (Index q = first_share() / lanes; q < shares; q += share_step() / lanes) {
            const Index column = q / Index(windows.out[2]), plane = column / strips, n = plane / Index(windows.out[0]);
            const Index d = plane % Index(windows.out[0]), h = column % strips * ROWS, w = q % Index(windows.out[2]);
            A sum[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = bias;
            int s = 0;
#pragma unroll 1
            for (int i = 0; i < (GROUPED ? params.group_channels : 1); ++i) {
                const int c = c_first + i;
                while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
                const Source& source = params.sources.table[s];
                const T* const x_nc = static_cast<const T*>(source.image.data) + n * source.image.stride_n +
                                      (c - source.first) * source.image.stride_c;
                convolve(
                    sum, x_nc, source.image.stride, w_o + i * params.weight.stride_c, params.weight.stride, windows, d,
                    h, w, loaded);
            }

            const Pixel pixel = {{d, h, w}};
            const int rows = min((long long)ROWS, windows.out[1] - h);
            if (residual.data) {
                const T* const r_o = static_cast<const T*>(residual.data) + residual.at(n, o, pixel);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    if (r < rows) sum[r] += widen(r_o[r * residual.stride[1]]);
            }
            activation_of<T>(params.epilogue).apply(sum);
            T* const y_o = static_cast<T*>(out.data) + out.at(n, o, pixel);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (r < rows) y_o[r * out.stride[1]] = narrow<T>(sum[r]);
        }
    }
}
