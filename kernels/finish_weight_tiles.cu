// The last step of a weight gradient by transforms: reads the elements under the taps from each tile of sums.
//
//     out[o, c, k] = conj( sum over parts of sums[part, o, c, k * dilation] )
//
//     no M, no K: elementwise.      N = (o, c, k), one per thread
//
//     sums [part, o, c]    a ~ b ~ c ~ ~ ~ . . .      three taps, 2 apart; the elements after them are products of
//                          |   |   |                  pixels that no window combines
//     out  [o, c]          a   b   c
//
// A sum that is not finite is computed again by its definition, by all threads of the block together: an infinity or
// NaN anywhere spreads over the whole tile.  If all numbers are finite, a thread only reads the flags of its block.
//
// Bound by memory.  Floor: (sums under the taps + out) over the bandwidth.
//
// -D: X_DTYPE, G_DTYPE, Y_DTYPE (types of image, gradient, result; X or G may be real with a complex Y),
//     PROLOGUE (1: inputs are transformed, see prologue.cuh)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct FinishWeightTilesParams {
    Sources sources;
    Windows windows;
    Prologue prologue;
    Image grad;
    Image out;  // (o, c, taps)
    const void* sums;
    long long stride_part, stride_o, stride_c, stride_t;
    long long batch;
    int tile[3];
    int parts, outputs, group_channels, group_outputs;
    int computes_again;  // 0 leaves sums that are not finite as they are
};

}  // namespace cupyconv

using namespace cupyconv;

using X = X_DTYPE;
using G = G_DTYPE;
using Y = Y_DTYPE;
using A = Accumulator<Y>;
constexpr int MAX_BLOCK = 128;

// The indices of an element of the result.
struct Place {
    int o, c, tap[3];
};

__device__ __forceinline__ Place place_of(const FinishWeightTilesParams& params, long long e) {
    const int taps = product_of(params.windows.kernel);
    Place place;
    tap_at(e % taps, params.windows.kernel, place.tap);
    place.c = e / taps % params.group_channels;
    place.o = e / taps / params.group_channels;
    return place;
}

// This thread's share of the sum for one element.  Not inlined, since few threads get here.
static __device__ __noinline__ A share_of_sum(const FinishWeightTilesParams& params, const Place& place) {
    const Windows& windows = params.windows;
    const long long pixels = product_of(windows.out);
    const int c = place.o / params.group_outputs * params.group_channels + place.c;
    int s = 0;
    while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
    const Source& source = params.sources.table[s];
    A sum = A(0);
#pragma unroll 1
    for (long long q = threadIdx.x; q < params.batch * pixels; q += blockDim.x) {
        const long long n = q / pixels;
        const Pixel out = pixel_at(q - n * pixels, windows.out);
        Pixel in;
        if (!tap_pixel(windows, out, place.tap, in)) continue;
        Accumulator<X> x = widen(static_cast<const X*>(source.image.data)[source.image.at(n, c - source.first, in)]);
        if constexpr (PROLOGUE)
            x = transformed(x, factors_of<Accumulator<X>>(params.prologue, c), params.prologue);
        add_product(sum, widen(static_cast<const G*>(params.grad.data)[params.grad.at(n, place.o, out)]), conjugate(x));
    }
    return sum;
}

__device__ __forceinline__ void store(const FinishWeightTilesParams& params, const Place& place, A value) {
    const Image& out = params.out;
    static_cast<Y*>(out.data)[place.o * out.stride_n + place.c * out.stride_c + offset_of(place.tap, out.stride)] =
        narrow<Y>(value);
}

extern "C" __global__ void __launch_bounds__(MAX_BLOCK)
    finish_weight_tiles(const __grid_constant__ FinishWeightTilesParams params) {
    SHARED_ARRAY(int, others_s, MAX_BLOCK);
    SHARED_ARRAY(A, shares_s, MAX_BLOCK);
    const Windows& windows = params.windows;
    const long long elements = (long long)params.outputs * params.group_channels * product_of(windows.kernel);

    for (long long first = (long long)blockIdx.x * blockDim.x; first < elements; first += share_step()) {
        const long long e = first + threadIdx.x;
        bool is_other = false;
        if (e < elements) {
            const Place place = place_of(params, e);
            long long t = 0;
#pragma unroll
            for (int a = 0; a < 3; ++a) t = t * params.tile[a] + place.tap[a] * windows.dilation[a];
            const A* const sums = static_cast<const A*>(params.sums) + place.o * params.stride_o +
                                  place.c * params.stride_c + t * params.stride_t;
            A sum = sums[0];
            for (int part = 1; part < params.parts; ++part) sum += sums[part * params.stride_part];
            is_other = params.computes_again && !is_finite(sum);
            if (!is_other) store(params, place, conjugate(sum));
        }
        others_s[threadIdx.x] = is_other;
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < blockDim.x; ++i) {
            if (!others_s[i]) continue;  // the same for all threads
            const Place place = place_of(params, first + i);
            shares_s[threadIdx.x] = share_of_sum(params, place);
            __syncthreads();
            if (threadIdx.x == 0) {
                A sum = shares_s[0];
                for (int j = 1; j < blockDim.x; ++j) sum += shares_s[j];
                store(params, place, sum);
            }
            __syncthreads();
        }
        __syncthreads();  // the flags have been read
    }
}
