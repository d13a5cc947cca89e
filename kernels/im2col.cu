// Columns: every window of a list of images, written out as one column a pixel.
//
//     columns[n, c * taps + t, p] = x[n, c, window(p, t)]       c counts the channels of all inputs
//
//     no M, no K: a copy.      rows = (c, t)      N = p (pixels, WIDTH neighbours a thread)
//
//     x [n, c]   . a b c .        columns   t=0  . a b c     one row a block: channel, tap and source
//                . d e f .                  t=1  a b c .     are chosen once, threads run along p
//                                           ...
//
// Only bits move, so the type is just the element's size; zero is zero in all of them.
// Bound by memory.  Floor: (channels * size + rows * pixels) elements a sample over the bandwidth.
//
// -D: DTYPE (bits16 ... bits128), WIDTH (pixels a thread: 16 bytes of T, or 1)
#include "image.cuh"

namespace cupyconv {

struct Im2colParams {
    Sources sources;
    Windows windows;
    void* columns;
    long long stride_n, stride_row, stride_pixel;
    long long batch, first_pixel, pixels;  // the chunk: pixels first_pixel ... of every sample
    int channels;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) im2col(const __grid_constant__ Im2colParams params) {
    const Windows& windows = params.windows;
    const int taps = windows.kernel[0] * windows.kernel[1] * windows.kernel[2];
    const long long rows = (long long)params.channels * taps;
    const long long a_row = (params.pixels + WIDTH - 1) / WIDTH, shares = params.batch * a_row;

    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        const int c = row / taps;
        int tap[3], s = 0;
        tap_at(row % taps, windows.kernel, tap);
        while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
        const Source& source = params.sources.table[s];

        const T* const x_c = static_cast<const T*>(source.image.data) + (c - source.first) * source.image.stride_c;
        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, a_row, WIDTH);
            const long long p = share.pixel;
            const T* const x_nc = x_c + share.n * source.image.stride_n;
            T* const columns_nr =
                static_cast<T*>(params.columns) + share.n * params.stride_n + row * params.stride_row;
            Pixel out = pixel_at(params.first_pixel + p, windows.out), in;
            Packet<T, WIDTH> packet;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i, advance(out, windows.out))
                packet.lane[i] = p + i < params.pixels && tap_pixel(windows, out, tap, in)
                                     ? x_nc[offset_of(in, source.image.stride)]
                                     : T{};
            if (WIDTH == 1) {
                columns_nr[p * params.stride_pixel] = packet.lane[0];
            } else if (p + WIDTH <= params.pixels) {  // packets: stride_pixel is 1
                store_packet<WIDTH>(columns_nr + p, packet);
            } else {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
                    if (p + i < params.pixels) columns_nr[p + i] = packet.lane[i];
            }
        }
    }
}
