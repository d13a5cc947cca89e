// The last step of a convolution by transforms.  In each tile, it finishes every stride-th of the sums that did not
// wrap around.
//
//     y[n, o, p] = activation( sums[u, o, t] + bias[o] + residual[n, o, p] )      p = tile * block + i,  u = (n, tile)
//                                                                                t = i * stride + span - 1
//
//     no M, no K: elementwise.      N = (u, i), several outputs o per thread
//
//     sums [u, o]    ~ ~ ~ ~ a b c d e . .      span - 1 sums that wrapped around, then those of the block, then the
//                            |   |   |          rest of the tile; here block 3, stride 2
//     y              ... . . a   c   e . . ...
//
// A sum that is not finite is computed again from its window, after all others: an infinity or NaN anywhere in a tile
// spreads over the whole tile.  Threads need not wait for each other, and if all numbers are finite the cost is one
// comparison per sum.
//
// Neighbouring threads process neighbouring pixels.  If outputs are contiguous in `sums`, output_lanes neighbouring
// threads process neighbouring outputs instead.
// Bound by memory.  Floor: (wanted sums + y + residual) over the bandwidth.
//
// -D: X_DTYPE, W_DTYPE, Y_DTYPE (types of image, weight, result; X or W may be real with a complex Y),
//     PROLOGUE (1: inputs are transformed, see prologue.cuh)
#include "epilogue.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct FinishTilesParams {
    Sources sources;
    Windows windows;
    Image weight;
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    const void* sums;
    long long stride_u, stride_o, stride_t;
    long long first_unit;   // first unit of the chunk; units are numbered through all samples
    long long tiles[3];     // along each axis
    int tile[3], block[3];  // size of a tile; pixels of y that come from one tile
    int units, outputs, output_lanes;
    int group_channels, group_outputs;
    int computes_again;  // 0 leaves sums that are not finite as they are
};

}  // namespace cupyconv

using namespace cupyconv;

using X = X_DTYPE;
using W = W_DTYPE;
using Y = Y_DTYPE;
using A = Accumulator<Y>;
constexpr int MAX_BLOCK = 256;

// One sum, computed by its definition.
__device__ __forceinline__ A sum_of_window(const FinishTilesParams& params, long long n, int o, const Pixel& out) {
    const Windows& windows = params.windows;
    const int taps = product_of(windows.kernel);
    const int c_first = o / params.group_outputs * params.group_channels, c_end = c_first + params.group_channels;
    A sum = A(0);
#pragma unroll 1
    for (int t = 0; t < taps; ++t) {
        int tap[3];
        Pixel in;
        tap_at(t, windows.kernel, tap);
        if (!tap_pixel(windows, out, tap, in)) continue;
        const W* const w_t = static_cast<const W*>(params.weight.data) + o * params.weight.stride_n +
                             offset_of(tap, params.weight.stride);
#pragma unroll 1
        for (int s = 0; s < params.sources.count; ++s) {
            const Source& source = params.sources.table[s];
            const int from = max(c_first, source.first), to = min(c_end, source.first + source.channels);
#pragma unroll 1
            for (int c = from; c < to; ++c) {
                Accumulator<X> x =
                    widen(static_cast<const X*>(source.image.data)[source.image.at(n, c - source.first, in)]);
                if constexpr (PROLOGUE)
                    x = transformed(x, factors_of<Accumulator<X>>(params.prologue, c), params.prologue);
                add_product(sum, x, widen(w_t[(c - c_first) * params.weight.stride_c]));
            }
        }
    }
    return sum;
}

// Finish the finite sums or, if AGAIN, compute and finish those that are not.  Returns whether any sums were left out.
template <bool AGAIN> __device__ __forceinline__ bool finish_sums(const FinishTilesParams& params) {
    const Windows& windows = params.windows;
    const unsigned area = product_of(params.block), places = params.units * area;
    const unsigned lanes = params.output_lanes, lane = threadIdx.x % lanes;
    const long long count = product_of(params.tiles);
    bool others = false;

    const unsigned step = gridDim.x * blockDim.x / lanes;
    for (unsigned q = (blockIdx.x * blockDim.x + threadIdx.x) / lanes; q < places; q += step) {
        const unsigned u = q / area;
        const long long n = (params.first_unit + u) / count;
        const Pixel tile = pixel_at(params.first_unit + u - n * count, params.tiles);
        int at[3];
        tap_at(q % area, params.block, at);
        Pixel out;
        bool valid = true;
        long long t = 0;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            out.at[a] = tile.at[a] * params.block[a] + at[a];
            valid = valid && out.at[a] < windows.out[a];
            const int wrapped = (windows.kernel[a] - 1) * windows.dilation[a];
            t = t * params.tile[a] + at[a] * windows.stride[a] + wrapped;
        }
        if (!valid) continue;
        const A* const sums = static_cast<const A*>(params.sums) + u * params.stride_u + t * params.stride_t;
        for (int o = blockIdx.y * lanes + lane; o < params.outputs; o += gridDim.y * lanes) {
            A sum = sums[o * params.stride_o];
            const bool is_other = params.computes_again && is_finite(sum) == AGAIN;
            others = others || is_other;
            if (is_other) continue;
            if constexpr (AGAIN) sum = sum_of_window(params, n, o, out);
            static_cast<Y*>(params.out.data)[params.out.at(n, o, out)] =
                finish<Y>(sum, params.epilogue, n, o, out, params.out);
        }
    }
    return others;
}

// Not inlined: few threads get here, and its registers must not burden the others.
__device__ __noinline__ void compute_again(const FinishTilesParams& params) { finish_sums<true>(params); }

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, 4)
    finish_tiles(const __grid_constant__ FinishTilesParams params) {
    if (finish_sums<false>(params)) compute_again(params);
}
