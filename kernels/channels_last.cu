// Copies images to channels-last order: the channels of a pixel, merged over all inputs, become contiguous.
//
//     moved[n, p, c] = x_s[n, c, p]        c counts the channels of all inputs; zeros up to a whole vector
//
//     no M, no K: a copy.      N = (n, p) (pixels of all samples)
//
//     x  c | . . # # # # . .  |      a block loads a tile of some channels and pixels along p, and stores it along c,
//          | . . # # # # . .  |      both in vectors of 16 bytes.  In between the tile is in shared memory, with rows
//            p ->                    one element longer than the tile, so that a column is spread over the banks
//
//     tile   8 vectors of channels x 8 of pixels, or for few channels 4 x 16, 2 x 32 or 1 x 64; twice the pixels for
//            8-byte elements.  The first number is that of the lanes: neighbouring threads that store one pixel
//
// If rows are not whole aligned vectors (see `vectorized`), neighbouring threads load neighbouring elements.
//
// Without a prologue only bits are moved, so the type just states the element's size.  Zero has the same bits in all
// types.
// Bound by memory.  Floor: (channels + channels of whole vectors) * pixels elements over the bandwidth.
//
// -D: DTYPE (bits16, bits32 or bits64, or with a prologue the storage type),
//     PROLOGUE (1: inputs are transformed, see prologue.cuh)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct ChannelsLastParams {
    Sources sources;
    Prologue prologue;
    void* moved;
    long long stride_n;  // of the result; its pixels are contiguous
    long long size[3];   // of the images, with axes collapsed if all images allow it
    long long batch, pixels;  // pixels of one sample
    int channels, padded;     // channels of all inputs; the same, rounded up to whole vectors
    int lanes_shift, vectorized;  // binary logarithm of the lanes; whether rows are whole aligned vectors
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int THREADS = 256, VECTOR_SHIFT = sizeof(T) == 2 ? 3 : sizeof(T) == 4 ? 2 : 1;
constexpr int VECTORS_SHIFT = VECTOR_SHIFT == 1 ? 8 : 6 + VECTOR_SHIFT;  // at least one per thread
constexpr int VECTOR = 1 << VECTOR_SHIFT, VECTORS = 1 << VECTORS_SHIFT;  // elements of a vector; vectors of a tile
static_assert(VECTOR * sizeof(T) == 16 && VECTORS % THREADS == 0, "threads share a tile evenly");
constexpr int MIN_BLOCKS = PROLOGUE && sizeof(T) == 8 ? 4 : 0;  // by itself, the compiler aims at 5 here and spills
constexpr int PLACES = VECTORS * VECTOR + 8 * VECTOR;  // a row has one element more than it has pixels

// Apply the prologue to elements of a merged channel, in place.
template <int COUNT> __device__ __forceinline__ void prepare(T (&x)[COUNT], const Prologue& prologue, int channel) {
#if PROLOGUE
    Accumulator<T> value[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = widen(x[i]);
    transform(value, factors_of<Accumulator<T>>(prologue, channel), prologue);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = narrow<T>(value[i]);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) channels_last(const __grid_constant__ ChannelsLastParams params) {
    SHARED_ARRAY(T, tile, PLACES);
    const int rows = VECTOR << params.lanes_shift, columns = VECTORS >> params.lanes_shift, pitch = columns + 1;
    const int columns_shift = VECTORS_SHIFT - params.lanes_shift;
    const long long tiles = (params.pixels + columns - 1) >> columns_shift;

    for (long long n = blockIdx.z; n < params.batch; n += gridDim.z)
      for (long long number = blockIdx.x; number < tiles; number += gridDim.x) {
        const long long p_first = number << columns_shift;
        const int pixels = int(min((long long)columns, params.pixels - p_first));
        for (int c_first = blockIdx.y * rows; c_first < params.padded; c_first += gridDim.y * rows) {
            // Return where channel c of the sample begins, and set `s` to its input; null if there is no such channel.
            const auto channel_of = [&](int c, int& s) -> const T* {
                s = 0;
                if (c >= params.channels) return nullptr;
                while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
                const Image& x = params.sources.table[s].image;
                return static_cast<const T*>(x.data) + n * x.stride_n + (c - params.sources.table[s].first) * x.stride_c;
            };
            int s;
            if (params.vectorized) {
#pragma unroll VECTORS / THREADS
                for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
                    const int row = i >> (columns_shift - VECTOR_SHIFT), column = i * VECTOR & (columns - 1);
                    const T* const from = channel_of(c_first + row, s);
                    Vector<T, VECTOR> vector = {};
                    if (from && column < pixels) {
                        vector = load_vector<VECTOR>(from + p_first + column);
                        prepare(vector.lane, params.prologue, c_first + row);
                    }
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) tile[row * pitch + column + e] = vector.lane[e];
                }
            } else {
                for (int column = threadIdx.x & (columns - 1); column < columns; column += THREADS) {
                    const Pixel pixel = pixel_at(p_first + min(column, pixels - 1), params.size);
#pragma unroll PROLOGUE ? 1 : 4
                    for (int row = threadIdx.x >> columns_shift; row < rows; row += max(1, THREADS >> columns_shift)) {
                        const T* const from = channel_of(c_first + row, s);
                        T element[1] = {};
                        if (from) {
                            element[0] = from[offset_of(pixel.at, params.sources.table[s].image.stride)];
                            prepare(element, params.prologue, c_first + row);
                        }
                        tile[row * pitch + column] = element[0];
                    }
                }
            }
            __syncthreads();
            T* const to = static_cast<T*>(params.moved) + n * params.stride_n + p_first * params.padded + c_first;
#pragma unroll VECTORS / THREADS
            for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
                const int row = i * VECTOR & (rows - 1), column = i >> params.lanes_shift;
                if (column >= pixels || c_first + row >= params.padded) continue;
                Vector<T, VECTOR> vector;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) vector.lane[e] = tile[(row + e) * pitch + column];
                store_vector<VECTOR>(to + (long long)column * params.padded + row, vector);
            }
            __syncthreads();  // the tile may be overwritten
        }
    }
}
