// Pooling: the largest element of every window, optionally with its position, or the mean.
//
//     y[n, c, p] = max over taps t of x[n, c, window(p, t)]        padding is ignored; NaN is larger than any number
//     y[n, c, p] = sum over taps t of x[n, c, window(p, t)] / taps that count
//
//     no M, no N: one thread per pixel p, for CHANNELS channels      K = t (taps)
//
//     x [n, c]   . 1 3 .      y    5       the position of a window is computed once for all channels of a
//                . 5 2 .                   thread, and the loads of its channels are independent
//
// Adjacent threads process adjacent elements: pixels (`lanes` is 1), or channels of a channels-last image:
//
//     thread     0          1          ...  lanes - 1      | lanes          ...
//     pixel      p          p               p              | p + 1
//     channels   0, lanes,  1, lanes + 1,                  | 0, lanes, 2 lanes, ...
//
// Bound by memory.  Floor: x, y and the indices once over the bandwidth.
//
// -D: DTYPE (storage type), CHANNELS (per thread), NUMBER (LARGEST, LARGEST_AND_PLACE or MEAN)
#include "compare.cuh"
#include "counted.cuh"
#include "image.cuh"

namespace cupyconv {

enum Number { LARGEST, LARGEST_AND_PLACE, MEAN };

struct PoolParams {
    Image x;
    Windows windows;
    Image out;
    Image indices;  // for LARGEST_AND_PLACE; 64-bit
    Counted counted;  // for MEAN
    long long batch;
    double nothing;  // the result for no elements: -infinity, or 0 for a sum
    int channels, lanes;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;  // exact: a 16-bit number that is widened and narrowed is unchanged
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) pool(const __grid_constant__ PoolParams params) {
    const Windows& windows = params.windows;
    const Image &x = params.x, &out = params.out;
    const int lanes = params.lanes;
    const long long x_step = lanes * x.stride_c;
    const long long shares_per_row = product_of(windows.out) * lanes;
    const long long shares = params.batch * shares_per_row;

    for (long long first = (long long)blockIdx.y * CHANNELS * lanes; first < params.channels;
         first += (long long)gridDim.y * CHANNELS * lanes)
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, shares_per_row, 1);
            const Share lane = share_at(share.pixel, lanes, 1);  // `n` is the pixel, `pixel` the lane
            const long long c = first + lane.pixel;
            const int channels = (params.channels - c + lanes - 1) / lanes;  // of this thread, if fewer than CHANNELS
            const Pixel pixel = pixel_at(lane.n, windows.out);
            const T* const x_nc = static_cast<const T*>(x.data) + share.n * x.stride_n + c * x.stride_c;
            A number[CHANNELS];
            long long place[CHANNELS];  // index in the image; occupies no registers without LARGEST_AND_PLACE
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                number[i] = A(params.nothing);
                place[i] = -1;
            }

            // The loops are not unrolled: the loads of several channels are enough in flight, and registers are scarce.
            long long start[3];
#pragma unroll
            for (int a = 0; a < 3; ++a) start[a] = pixel.at[a] * windows.stride[a] - windows.before[a];
            long long d = start[0];
#pragma unroll 1
            for (int kd = 0; kd < windows.kernel[0]; ++kd, d += windows.dilation[0]) {
                if (d < 0 || d >= windows.size[0]) continue;
                long long h = start[1];
#pragma unroll 1
                for (int kh = 0; kh < windows.kernel[1]; ++kh, h += windows.dilation[1]) {
                    if (h < 0 || h >= windows.size[1]) continue;
                    const T* const row = x_nc + d * x.stride[0] + h * x.stride[1];
                    const long long row_place = (d * windows.size[1] + h) * windows.size[2];
                    long long w = start[2];
#pragma unroll 1
                    for (int kw = 0; kw < windows.kernel[2]; ++kw, w += windows.dilation[2]) {
                        if (w < 0 || w >= windows.size[2]) continue;
                        const T* const element = row + w * x.stride[2];
#pragma unroll
                        for (int i = 0; i < CHANNELS; ++i)
                            if (i < channels) {
                                const A value = widen(element[i * x_step]);
                                if constexpr (NUMBER == MEAN) {
                                    number[i] += value;
                                } else if constexpr (NUMBER == LARGEST) {
                                    if (is_above(value, number[i]) || isnan(value)) number[i] = value;
                                } else if (place[i] < 0 || is_above(value, number[i]) || (isnan(value) && !isnan(number[i]))) {
                                    number[i] = value;
                                    place[i] = row_place + w;
                                }
                            }
                    }
                }
            }
            if constexpr (NUMBER == MEAN) {
                const A taps = A(taps_counted(windows, params.counted, pixel));
#pragma unroll
                for (int i = 0; i < CHANNELS; ++i) number[i] /= taps;
            }
            T* const y = static_cast<T*>(out.data) + out.at(share.n, c, pixel);
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i)
                if (i < channels) y[i * lanes * out.stride_c] = narrow<T>(number[i]);
            if constexpr (NUMBER == LARGEST_AND_PLACE) {
                const Image& indices = params.indices;
                long long* const places = static_cast<long long*>(indices.data) + indices.at(share.n, c, pixel);
#pragma unroll
                for (int i = 0; i < CHANNELS; ++i)
                    if (i < channels) places[i * lanes * indices.stride_c] = place[i];
            }
        }
}
