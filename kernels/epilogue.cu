// The epilogue of a GEMM as a separate kernel: it reads sums and writes finished results.
//
//     y[n, o, p] = activation( sums[n, o, p] + bias[o] + residual[n, o, p] )        sums absent: 0
//
//     no M, no K: elementwise.     N = (n, o, p), WIDTH contiguous elements per thread
//
//     sums  [o | ........####........]    in the accumulator type, in the workspace or in the result itself
//     y     [o | ........####........]    in the result type, rounded once
//             p ->
//
// The elements of a thread are contiguous in y: pixels of a channel or, channels-last, channels of a pixel.  Sums, bias
// and residual are also read as vectors if they are contiguous and aligned along the same axis (`vectorized`).  With
// any other strides, they are read element by element.
//
// Complex sums may be stored in two planes: the imaginary parts are `imaginary` elements after the real parts.  A GEMM
// with real operands produces them in this form.  A sum that several blocks shared is stored as `planes` parts, which
// are `plane` elements apart and are added in order.
//
// Bound by memory.  Floor: each operand once over the bandwidth.
//
// -D: SUM_DTYPE (type of the sums; real, with a complex Y, for two planes; narrower than Y to widen a chain's image),
//     Y_DTYPE (result type), WIDTH (elements per thread: 16 bytes of Y, or 1)
#include "epilogue.cuh"

namespace cupyconv {

struct EpilogueParams {
    const void* sums;  // null if absent
    long long sums_stride_n, sums_stride_o, sums_stride_p, imaginary, plane;
    Image out;
    Epilogue epilogue;
    long long size[3];                     // of the result; axes are collapsed if all operands allow it
    long long batch, first_pixel, pixels;  // the chunk: `pixels` pixels of every sample, from first_pixel on
    int channels, planes;
    int along_channels;  // whether the elements of a thread are channels
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
    const long long shares_per_row = (along_channels ? params.channels : params.pixels) / WIDTH;  // in vectors
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
#pragma unroll WIDTH == 1 && sizeof(A) == 4 ? 4 : 1  // vectors keep enough bytes in flight without unrolling
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
