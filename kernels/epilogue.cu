// The epilogue of a GEMM as a pass of its own: sums in, finished results out.
//
//     y[n, o, p] = activation( sums[n, o, p] + bias[o] + residual[n, o, p] )        sums absent: 0
//
//     no M, no K: elementwise.     N = (n, o, p), WIDTH neighbours per thread
//
//     sums  [o | ........####........]    in the accumulator's type, in workspace or in the result itself
//     y     [o | ........####........]    in the result's type, rounded once
//             p ->
//
// Neighbours are neighbours in y: pixels of a channel or, channels-last, channels of a pixel.  Sums, bias and
// residual move in vectors too where they are contiguous and aligned along the same axis (`vectorized`); at any other
// strides, one by one.
//
// A complex sum may lie in two planes, real parts `imaginary` elements before the imaginary ones: that
// is how a GEMM with real operands produces it.  A sum that several blocks shared lies in `planes` parts,
// `plane` elements apart, and is added up in their order.
//
// Bound by memory.  Floor: each operand once over the bandwidth.
//
// -D: SUM_DTYPE (type of the sums; real beside a complex Y for two planes; narrower than Y to widen a chain's image),
//     Y_DTYPE (result type), WIDTH (neighbours per thread: 16 bytes of Y, or 1)
#include "epilogue.cuh"

namespace cupyconv {

struct EpilogueParams {
    const void* sums;  // or null
    long long sums_stride_n, sums_stride_o, sums_stride_p, imaginary, plane;
    Image out;
    Epilogue epilogue;
    long long size[3];                     // of the result, axes collapsed where all operands allow it
    long long batch, first_pixel, pixels;  // the chunk: pixels first_pixel ... of every sample
    int channels, planes;
    int along_channels;  // which axis neighbours are on
    int sums_vectorized, bias_vectorized, residual_vectorized;
};

}  // namespace cupyconv

using namespace cupyconv;

using S = SUM_DTYPE;
using Y = Y_DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) epilogue(const __grid_constant__ EpilogueParams params) {
    using A = Accumulator<Y>;
    const bool along_channels = params.along_channels;
    const Image &out = params.out, &residual = params.epilogue.residual;
    const auto activation = activation_of<Y>(params.epilogue);
    const long long shares_per_row = (along_channels ? params.channels : params.pixels) / WIDTH;  // vectors
    const long long shares = params.batch * shares_per_row * (along_channels ? params.pixels : 1);

    for (long long row = blockIdx.y; row < (along_channels ? 1 : params.channels); row += gridDim.y)
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, shares_per_row, WIDTH);
            long long n = share.n, o = row, p = share.pixel;
            if (along_channels) n = share.n / params.pixels, o = share.pixel, p = share.n % params.pixels;
            const Pixel pixel = pixel_at(params.first_pixel + p, params.size);

            Vector<A, WIDTH> sum = {};
            const S* at = static_cast<const S*>(params.sums) + n * params.sums_stride_n + o * params.sums_stride_o +
                          p * params.sums_stride_p;
            const long long step = along_channels ? params.sums_stride_o : params.sums_stride_p;
#pragma unroll WIDTH == 1 && sizeof(A) == 4 ? 4 : 1  // vectors are enough on their way by themselves
            for (int part = 0; part < params.planes; ++part, at += params.plane) {
                const auto sums = load_sums<WIDTH>(at, step, params.sums_vectorized, params.imaginary, A());
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sum.lane[i] += sums.lane[i];
            }
            if (params.epilogue.bias) {
                const Y* const at = static_cast<const Y*>(params.epilogue.bias) + o;
                const auto bias = gather_vector<WIDTH>(at, along_channels, params.bias_vectorized);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sum.lane[i] += widen(bias.lane[i]);
            }
            if (residual.data) {
                const Y* const at = static_cast<const Y*>(residual.data) + residual.at(n, o, pixel);
                const long long step = along_channels ? residual.stride_c : residual.stride[2];
                const auto addend = gather_vector<WIDTH>(at, step, params.residual_vectorized);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) sum.lane[i] += widen(addend.lane[i]);
            }
            const auto store = [&](Y* to) {
                Vector<Y, WIDTH> y;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) y.lane[i] = narrow<Y>(sum.lane[i]);
                store_vector<WIDTH>(to, y);
            };
            const long long y_at = out.at(n, o, pixel);
            if (Y* const pre = kept<Y>(params.epilogue, y_at)) store(pre);
            activation.apply(sum.lane);
            store(static_cast<Y*>(out.data) + y_at);
        }
}
