// The epilogue of a GEMM as a pass of its own: sums in, finished results out.
//
//     y[n, o, p] = activation( sums[n, o, p] + bias[o] + residual[n, o, p] )        sums absent: 0
//
//     no M, no K: elementwise.     N = p (pixels, WIDTH neighbours a thread)
//
//     sums  [o | ........####........]    in the accumulator's type, in workspace or in the result itself
//     y     [o | ........####........]    in the result's type, at any strides, rounded once
//
// A complex sum may lie in two planes, real parts `imaginary` elements before the imaginary ones: that
// is how a GEMM with real operands produces it.
//
// Bound by memory.  Floor: each operand once over the bandwidth.
//
// -D: SUM_DTYPE (type of the sums; real beside a complex Y for two planes), Y_DTYPE (result type), WIDTH (pixels a thread)
#include "epilogue.cuh"

namespace cupyconv {

struct EpilogueParams {
    const void* sums;  // or null
    long long sums_stride_n, sums_stride_o, sums_stride_p, imaginary;
    Image out;
    Epilogue epilogue;
    long long size[3];                     // of the result, axes collapsed where all operands allow it
    long long batch, first_pixel, pixels;  // the chunk: pixels first_pixel ... of every sample
    int channels;
};

// One sum; the last argument only names the type wanted.
template <class A> __device__ __forceinline__ A load_sum(const A* at, long long, A) { return *at; }
template <class R> __device__ __forceinline__ Complex<R> load_sum(const R* at, long long imaginary, Complex<R>) {
    return Complex<R>(*at, at[imaginary]);
}

}  // namespace cupyconv

using namespace cupyconv;

using S = SUM_DTYPE;
using Y = Y_DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) epilogue(const __grid_constant__ EpilogueParams params) {
    using A = Accumulator<Y>;
    const long long a_row = params.pixels / WIDTH, shares = params.batch * a_row;
    const Image& out = params.out;
    for (long long o = blockIdx.y; o < params.channels; o += gridDim.y) {
        const S* const sums_o = static_cast<const S*>(params.sums) + o * params.sums_stride_o;
        Y* const y_o = static_cast<Y*>(out.data) + o * out.stride_c;
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, a_row, WIDTH);
            const S* const sums_op = sums_o + share.n * params.sums_stride_n + share.pixel * params.sums_stride_p;
            Pixel pixel = pixel_at(params.first_pixel + share.pixel, params.size);
            Y* const y_op = y_o + share.n * out.stride_n + offset_of(pixel, out.stride);
            Packet<Y, WIDTH> result;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i, advance(pixel, params.size)) {
                const A sum = params.sums ? load_sum(sums_op + i * params.sums_stride_p, params.imaginary, A()) : A(0);
                result.lane[i] = finish<Y>(sum, params.epilogue, share.n, o, pixel);
            }
            store_packet<WIDTH>(y_op, result);
        }
    }
}
