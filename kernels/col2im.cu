// Adjoint of columns (col2im): every image element is the sum of the column entries that im2col.cu copies from it.
//
//     image[n, c, i] = activation( sum over taps t and windows p that read i of columns[n, c * taps + t, p] + bias[c] )
//
//     no M, no N: one thread per image element, for CHANNELS channels      K = t (taps)
//
//     columns rows t   ----a-----b----
//                          \   /               a gather: one thread owns each sum, so there are no
//     image                  i                 atomics, and the order of additions is fixed
//
// Divisions find the windows that read an element.  They are done once for all channels of a thread.
//
// Complex columns may be stored in two planes: the imaginary parts are `imaginary` elements after the real parts.  A
// GEMM with a real factor produces them in this form.
//
// Bound by memory.  Floor: (rows * pixels + channels * size) elements per sample over the bandwidth.
//
// -D: SUM_DTYPE (type of the columns; real, with a complex Y, for two planes), Y_DTYPE (result type),
//     FOLDS (1 if padding repeats elements, 0 if it is zeros)
#include "adjoint.cuh"
#include "epilogue.cuh"

namespace cupyconv {

struct Col2imParams {
    Image columns;            // strides from channel to channel and from window to window
    long long tap_stride[3];  // strides from tap to tap; computed here, they would occupy registers
    Windows windows;
    Adjoint adjoint;
    Image out;
    Epilogue epilogue;
    long long batch, imaginary;
    int channels, conjugated;  // whether the result is the conjugate of the sums
};

}  // namespace cupyconv

using namespace cupyconv;

using S = SUM_DTYPE;
using Y = Y_DTYPE;
constexpr int MAX_BLOCK = 256, CHANNELS = 4;
// Blocks per multiprocessor.  With one more, or with the compiler's choice, registers spill: those for the copies of an
// index (FOLDS), those for complex numbers of 16 bytes, or else some bytes of an address.
constexpr int MIN_BLOCKS = FOLDS ? 2 : sizeof(Y) == 16 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, MIN_BLOCKS) col2im(const __grid_constant__ Col2imParams params) {
    using A = Accumulator<Y>;
    const Windows& windows = params.windows;
    const Image& columns = params.columns;
    const long long elements = product_of(windows.size);
    const long long shares = params.batch * elements;

    for (long long c = blockIdx.y * CHANNELS; c < params.channels; c += gridDim.y * CHANNELS)
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, elements, 1);
            const Pixel in = pixel_at(share.pixel, windows.size);
            const S* const columns_nc =
                static_cast<const S*>(columns.data) + share.n * columns.stride_n + c * columns.stride_c;
            const int channels = min((long long)CHANNELS, params.channels - c);
            A sum[CHANNELS] = {};
            for_each_reader<FOLDS>(
                windows, params.adjoint, in, params.tap_stride, columns.stride, [&](long long row, long long pixel) {
                    const S* at = columns_nc + row + pixel;
#pragma unroll
                    for (int i = 0; i < CHANNELS; ++i, at += columns.stride_c)
                        if (i < channels) sum[i] += load_sums<1>(at, 1, false, params.imaginary, A()).lane[0];
                });
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                if (i >= channels) break;
                if (params.conjugated) sum[i] = conjugate(sum[i]);
                static_cast<Y*>(params.out.data)[params.out.at(share.n, c + i, in)] =
                    finish<Y>(sum[i], params.epilogue, share.n, c + i, in, params.out);
            }
        }
}
