// The gradient of a convolution's weight without columns: any kernel, stride, padding, groups, strides, list of inputs.
//
//     sums[part, o, c, t] = sum over the part's (n, p) of
//                           grad[n, o, p] * conj(x[n, g * group_channels + c, window(p, t)])
//
//     M = o (OUTPUTS of a group)    N = (c, t) (ROWS of a group's rows)    K = (n, p), cut into parts
//
//     grad [o] ....pppppppp....        a block: one tile of M x N and one part of K; its threads run along p, each
//     x  [c,t] ....tttttttt....        with the sums of the whole tile, which the block adds at the end
//                   |      |
//     sums [part] [o x (c, t)]         the epilogue kernel adds the parts in a fixed order: no atomics
//
// Bound by index arithmetic, which OUTPUTS products share, and by loads.  Blocks that run side by side read `grad` once
// per ROWS rows, and an input once per OUTPUTS outputs.  The kernel is for few channels, for depthwise kernels, and for
// convolutions without memory for columns.  Floor: `grad` and the inputs once over the bandwidth.
//
// -D: X_DTYPE, G_DTYPE, Y_DTYPE (types of image, gradient, result; X or G may be real with a complex Y), OUTPUTS,
//     PROLOGUE (1: inputs are transformed as they are loaded, see prologue.cuh)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct WeightGradientParams {
    Sources sources;
    Windows windows;
    Prologue prologue;
    Image grad;
    void* sums;                        // (parts, outputs, rows) in C order, in the accumulator's type
    long long plane, batch;            // plane: elements of a part of `sums`
    long long pixels_per_part;         // pixels are numbered through all samples
    int groups, group_channels, group_outputs;
};

// The sum over a warp, in lane 0.
template <class R> __device__ __forceinline__ R warp_sum(R value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
    return value;
}
template <class R> __device__ __forceinline__ Complex<R> warp_sum(Complex<R> value) {
    return Complex<R>(warp_sum(value.re), warp_sum(value.im));
}

}  // namespace cupyconv

using namespace cupyconv;

using X = X_DTYPE;
using G = G_DTYPE;
using A = Accumulator<Y_DTYPE>;
constexpr int ROWS = 4, MAX_BLOCK = 128, WARPS = MAX_BLOCK / WARP;

// The elements of an input that form one row of columns.  `data` is null beyond the last row.
struct Row {
    const X* data;
    long long stride_n, stride[3], offset[3];
#if PROLOGUE
    Factors<Accumulator<X>> by;
#endif

    __device__ __forceinline__ Accumulator<X> loaded(long long at, const Prologue& prologue) const {
#if PROLOGUE
        return transformed(widen(data[at]), by, prologue);
#else
        return widen(data[at]);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(MAX_BLOCK)
    weight_gradient(const __grid_constant__ WeightGradientParams params) {
    SHARED_ARRAY(Row, rows_s, ROWS);
    SHARED_ARRAY(A, warps_s, WARPS * OUTPUTS * ROWS);

    const Windows& windows = params.windows;
    const long long pixels = product_of(windows.out);
    const int taps = product_of(windows.kernel);
    const int reduction = params.group_channels * taps;
    const int tiles_m = (params.group_outputs + OUTPUTS - 1) / OUTPUTS, tiles_n = (reduction + ROWS - 1) / ROWS;
    const long long tiles = (long long)params.groups * tiles_m * tiles_n;
    const long long begin = blockIdx.x * params.pixels_per_part, all = params.batch * pixels;
    const long long end = begin + params.pixels_per_part < all ? begin + params.pixels_per_part : all;

    for (long long tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
        const int first_row = tile % tiles_n * ROWS, first_output = tile / tiles_n % tiles_m * OUTPUTS;
        const int g = tile / tiles_n / tiles_m;
        const long long o = (long long)g * params.group_outputs + first_output;

        __syncthreads();  // the rows and sums of the previous tile have been read
        if (threadIdx.x < ROWS) {
            Row row = {};
            const int r = first_row + threadIdx.x;
            if (r < reduction) {
                const int c = g * params.group_channels + r / taps;
                int tap[3], s = 0;
                tap_at(r % taps, windows.kernel, tap);
                while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
                const Source& source = params.sources.table[s];
                row.data = static_cast<const X*>(source.image.data) + (c - source.first) * source.image.stride_c;
                row.stride_n = source.image.stride_n;
#if PROLOGUE
                row.by = factors_of<Accumulator<X>>(params.prologue, c);
#endif
                for (int a = 0; a < 3; ++a) {
                    row.stride[a] = source.image.stride[a];
                    row.offset[a] = (long long)tap[a] * windows.dilation[a] - windows.before[a];
                }
            }
            rows_s[threadIdx.x] = row;
        }
        __syncthreads();

        A sum[OUTPUTS][ROWS] = {};
        for (long long q = begin + threadIdx.x; q < end; q += blockDim.x) {
            const Share share = share_at(q, pixels, 1);
            const Pixel out = pixel_at(share.pixel, windows.out);
            const G* grad_no = static_cast<const G*>(params.grad.data) + params.grad.at(share.n, o, out);
            Accumulator<G> grad[OUTPUTS];
#pragma unroll
            for (int i = 0; i < OUTPUTS; ++i, grad_no += params.grad.stride_c)
                grad[i] = first_output + i < params.group_outputs ? widen(*grad_no) : Accumulator<G>(0);
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                const Row& row = rows_s[j];
                bool inside = row.data != nullptr;
                long long at = share.n * row.stride_n;
#pragma unroll
                for (int a = 0; a < 3; ++a) {
                    const long long i = padded_index(
                        out.at[a] * windows.stride[a] + row.offset[a], windows.size[a], windows.padding_mode);
                    inside = inside && i >= 0;
                    at += i * row.stride[a];
                }
                const Accumulator<X> x = inside ? conjugate(row.loaded(at, params.prologue)) : Accumulator<X>(0);
#pragma unroll
                for (int i = 0; i < OUTPUTS; ++i) add_product(sum[i][j], grad[i], x);
            }
        }

#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i)
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
                const A total = warp_sum(sum[i][j]);
                if (lane_index() == 0) warps_s[warp_index() * OUTPUTS * ROWS + i * ROWS + j] = total;
            }
        __syncthreads();
        const int i = threadIdx.x / ROWS, j = threadIdx.x % ROWS;
        if (i < OUTPUTS && first_output + i < params.group_outputs && first_row + j < reduction) {
            A total = warps_s[threadIdx.x];
            for (int w = 1; w < blockDim.x / WARP; ++w) total += warps_s[w * OUTPUTS * ROWS + threadIdx.x];
            static_cast<A*>(params.sums)[blockIdx.x * params.plane + (o + i) * reduction + first_row + j] = total;
        }
    }
}
