// The adjoint of columns: every image element is the sum of the column entries that were read from it.
//
//     image[n, c, i] = sum over taps t and windows p with  p * stride - before + t * dilation == i
//                      of columns[n, c * taps + t, p]
//
//     no M, no N: one thread an image element      K = t (taps)
//
//     columns rows t   ----a-----b----
//                          \   /               a gather: each sum has one owner, so there are no
//     image                  i                 atomics and the order of adding is always the same
//
// Bound by memory.  Floor: (rows * pixels + channels * size) elements a sample over the bandwidth.
//
// -D: DTYPE (storage type)
#include "image.cuh"

namespace cupyconv {

struct Col2imParams {
    Image columns;  // c is the row; stride[2] steps from pixel to pixel
    Windows windows;
    Image out;
    long long batch;
    int channels;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) col2im(const __grid_constant__ Col2imParams params) {
    const Windows& windows = params.windows;
    const long long elements = windows.size[0] * windows.size[1] * windows.size[2];
    const int taps = windows.kernel[0] * windows.kernel[1] * windows.kernel[2];
    const long long shares = params.batch * elements;

    for (long long c = blockIdx.y; c < params.channels; c += gridDim.y)
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, elements, 1);
            const Pixel in = pixel_at(share.pixel, windows.size);
            const T* const columns_nc = static_cast<const T*>(params.columns.data) +
                                        share.n * params.columns.stride_n + c * taps * params.columns.stride_c;
            Accumulator<T> sum = Accumulator<T>(0);
            for (int t = 0; t < taps; ++t) {
                int tap[3];
                tap_at(t, windows.kernel, tap);
                long long p = 0;
                bool hit = true;
#pragma unroll
                for (int a = 0; a < 3; ++a) {
                    const long long start = in.at[a] + windows.before[a] - (long long)tap[a] * windows.dilation[a];
                    const long long window = start / windows.stride[a];
                    hit = hit && start >= 0 && start % windows.stride[a] == 0 && window < windows.out[a];
                    p = p * windows.out[a] + window;
                }
                if (hit) sum += widen(columns_nc[t * params.columns.stride_c + p * params.columns.stride[2]]);
            }
            static_cast<T*>(params.out.data)[share.n * params.out.stride_n + c * params.out.stride_c +
                                             offset_of(in, params.out.stride)] = narrow<T>(sum);
        }
}
