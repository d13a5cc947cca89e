// Columns (im2col): every window of a list of inputs, written out as one column per pixel.
//
//     columns[n, c * taps + t, p] = x[n, c, window(p, t)]       c counts the channels of all inputs
//
//     no M, no K: a copy.      rows = (c, t)      N = p (pixels)
//
//     x [n, c]   . a b c .        columns   t=0  . a b c     one tap per thread, for WIDTH channels of one input
//                . d e f .                  t=1  a b c .     and WIDTH adjacent pixels: a square in registers
//                                           ...
//
//     square     c ↓  # # # #      read along p element by element, or along c as vectors if channels are
//                     # # # #      contiguous; written along p as vectors.  The offsets of its pixels in x are
//                     # # # #      computed once for all channels.
//                     # # # #
//                p ->
//
// Adjacent threads process adjacent pixels.  If the inputs are channels-last, up to 4 threads share the same pixels and
// process adjacent channels, so that both reads and writes cover whole sectors.
//
// Without a prologue only bits are copied, so the type just states the element's size.  Zero has the same bits in all
// types.
// Bound by memory.  Floor: (channels * size + rows * pixels) elements per sample over the bandwidth.
//
// -D: DTYPE (bits16 ... bits128, or with a prologue the storage type), WIDTH (side of the square: 16 bytes of T, or 1),
//     PROLOGUE (1: inputs are transformed, see prologue.cuh)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct Im2colParams {
    Sources sources;
    Windows windows;
    Prologue prologue;
    void* columns;
    long long stride_n, stride_row, stride_pixel;
    long long batch, first_pixel, pixels;  // the chunk: `pixels` pixels of every sample, from first_pixel on
    int squares, channel_lanes;  // runs of at most WIDTH channels of one input; threads of a warp along the channels
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

// Whether WIDTH channels of a pixel are contiguous and 16-byte aligned.
__device__ __forceinline__ bool channels_vectorized(const Image& x) {
    const long long steps = x.stride_n | x.stride[0] | x.stride[1] | x.stride[2];
    return WIDTH > 1 && x.stride_c == 1 && (reinterpret_cast<unsigned long long>(x.data) | steps * sizeof(T)) % 16 == 0;
}

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, WIDTH > 4 ? 2 : 3)
    im2col(const __grid_constant__ Im2colParams params) {
    const Windows& windows = params.windows;
    const int taps = product_of(windows.kernel);
    const int lanes = params.channel_lanes, apart = WARP / lanes;  // threads of a warp along c and along p
    const long long shares_per_row = (params.pixels + WIDTH - 1) / WIDTH, shares = params.batch * shares_per_row;
    const long long rows = (long long)((params.squares + lanes - 1) / lanes) * taps;

    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        int tap[3], s = 0;
        const int t = row % taps;
        tap_at(t, windows.kernel, tap);
        int square = row / taps * lanes + threadIdx.x % WARP / apart;
        if (square >= params.squares) continue;
        for (int here; square >= (here = (params.sources.table[s].channels + WIDTH - 1) / WIDTH); ++s) square -= here;
        const Source& source = params.sources.table[s];
        const Image& x = source.image;
        const int c_first = square * WIDTH, channels = min(WIDTH, source.channels - c_first);
        const bool vectorized = channels_vectorized(x) && channels == WIDTH;

        for (long long q = first_share() / WARP * apart + threadIdx.x % apart; q < shares;
             q += share_step() / lanes) {
            const Share share = share_at(q, shares_per_row, WIDTH);
            const long long p = share.pixel;
            const T* const x_n = static_cast<const T*>(x.data) + share.n * x.stride_n + c_first * x.stride_c;

            // The offsets of the pixels in x.
            Pixel out = pixel_at(params.first_pixel + p, windows.out), in;
            long long offset[WIDTH];
            bool inside[WIDTH];
            bool row_inside = tap_place(windows, out, tap, in, 0) & tap_place(windows, out, tap, in, 1);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                inside[i] = tap_place(windows, out, tap, in, 2) && row_inside && p + i < params.pixels;
                offset[i] = offset_of(in.at, x.stride);
                advance(out.at, windows.out);
                if (i + 1 < WIDTH && out.at[2] == 0)  // the first pixel of another row
                    row_inside = tap_place(windows, out, tap, in, 0) & tap_place(windows, out, tap, in, 1);
            }

            Vector<T, WIDTH> square_of[WIDTH];
            if (vectorized) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) {
                    const Vector<T, WIDTH> from = inside[i] ? load_vector<WIDTH>(x_n + offset[i]) : Vector<T, WIDTH>{};
#pragma unroll
                    for (int j = 0; j < WIDTH; ++j) square_of[j].lane[i] = from.lane[j];
                }
            } else {
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i)
                        square_of[j].lane[i] = inside[i] && j < channels ? x_n[j * x.stride_c + offset[i]] : T{};
                }
            }

#if PROLOGUE
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                if (j >= channels) break;
                Accumulator<T> value[WIDTH];
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) value[i] = widen(square_of[j].lane[i]);
                const auto by = factors_of<Accumulator<T>>(params.prologue, source.first + c_first + j);
                transform(value, by, params.prologue);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) square_of[j].lane[i] = inside[i] ? narrow<T>(value[i]) : T{};
            }
#endif

            T* to = static_cast<T*>(params.columns) + share.n * params.stride_n +
                    ((source.first + c_first) * (long long)taps + t) * params.stride_row + p * params.stride_pixel;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j, to += taps * params.stride_row) {
                if (j >= channels) break;
                if (p + WIDTH <= params.pixels) {  // vectors; their stride_pixel is 1
                    store_vector<WIDTH>(to, square_of[j]);
                } else {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i)
                        if (p + i < params.pixels) to[i] = square_of[j].lane[i];
                }
            }
        }
    }
}
