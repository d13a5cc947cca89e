// Tiles for transforms: overlapping boxes that are cut out of an image.  An index map supplies the padding.
//
//     tiles[u, c, t] = scale * x[n, c, tile * stride - before + t]        u = (n, tile)
//
//     no M, no K: a copy.      N = (u, t), several channels c per thread
//
//     x [n, c]   . a b c d e f g .        tiles   u=0   . a b c d       of 5 elements, 3 apart, before 1
//                                                 u=1   c d e f g
//
// A kernel is one tile, as long as a tile of the image.  If `dilation` exceeds 1, its elements are that far apart, with
// zeros between and behind them.  The same holds for the gradients of a tile's windows, which are a stride apart: a
// tile has `read` of them along each axis, and those that follow belong to the next tile.
//
// Neighbouring threads process neighbouring elements.  If channels are contiguous in the tiles, channel_lanes
// neighbouring threads process neighbouring channels instead.  The position of an element in x is computed once for all
// channels of a thread.
// Bound by memory, and for one channel by the divisions that compute this position.
// Floor: each element read and written over the bandwidth.
//
// -D: DTYPE (storage type of the inputs), TILE_DTYPE (of the tiles: the type of their sums, or complex with real inputs),
//     PROLOGUE (1: inputs are transformed, see prologue.cuh)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct TilesParams {
    Image x;
    Windows windows;  // a window is a tile: `kernel` is its size, `out` the number of tiles, `stride` their distance
    Prologue prologue;
    void* tiles;
    long long stride_u, stride_c, stride_t;
    long long first_unit;  // first unit of the chunk; units are numbered through all samples
    double scale;
    int read[3];
    int units, channels, channel_lanes;  // units * elements of a tile are below 2^31
};

}  // namespace cupyconv

using namespace cupyconv;

using X = DTYPE;
using A = TILE_DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) tiles(const __grid_constant__ TilesParams params) {
    const Windows& windows = params.windows;
    const unsigned elements = product_of(windows.kernel), places = params.units * elements;
    const unsigned lanes = params.channel_lanes, lane = threadIdx.x % lanes;
    const long long count = product_of(windows.out);
    const auto scale = RealPart<A>(params.scale);

    const unsigned step = gridDim.x * blockDim.x / lanes;
    for (unsigned q = (blockIdx.x * blockDim.x + threadIdx.x) / lanes; q < places; q += step) {
        const unsigned u = q / elements, t = q % elements;
        const long long n = (params.first_unit + u) / count;
        const Pixel tile = pixel_at(params.first_unit + u - n * count, windows.out);
        int at[3];
        tap_at(t, windows.kernel, at);
        Pixel in;
        bool inside = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            const int i = at[a] / windows.dilation[a];
            in.at[a] = padded_index(
                tile.at[a] * windows.stride[a] - windows.before[a] + i, windows.size[a], windows.padding_mode);
            inside = inside && in.at[a] >= 0 && i < params.read[a] && i * windows.dilation[a] == at[a];
        }
        A* const to = static_cast<A*>(params.tiles) + u * params.stride_u + t * params.stride_t;
        for (int c = blockIdx.y * lanes + lane; c < params.channels; c += gridDim.y * lanes) {
            A value = A(0);
            if (inside) {
                Accumulator<X> element = widen(static_cast<const X*>(params.x.data)[params.x.at(n, c, in)]);
                if constexpr (PROLOGUE)
                    element = transformed(element, factors_of<Accumulator<X>>(params.prologue, c), params.prologue);
                add_product(value, A(element), scale);
            }
            to[c * params.stride_c] = value;
        }
    }
}
