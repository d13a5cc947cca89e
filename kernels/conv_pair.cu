// Two convolutions in one kernel: the image between them is a tile in shared memory and never in global memory.
//
//     z[n, m, q] = activation( sum_{c, t} weight[m, c, t] * x[n, c, window(q, t)] + bias[m] )
//     y[n, o, p] = activation( sum_{m, t} weight[o, m, t] * z[n, m, window(p, t)] + bias[o] + residual[n, o, p] )
//
//     M = m, then o     N = q, then p: the pixels of a tile     K = (c, t), then (m, t)
//
//         x                        z                      y          one block: a tile of y, and the part of z that
//      +-----------+                                                 its windows reach.  Neighbouring tiles compute
//      | +-------+ |   first    +-------+    second     +---+        the rim of this part again: that is the cost.
//      | |       | |  ------->  |       |   ------->    |   |
//      | +-------+ |            +-------+               +---+        Channels come in chunks of 64 bytes.
//      +-----------+
//
// z is rounded to its storage type, and it is zero beyond its own edge, where the second layer is padded.  Both are as
// if z had been stored.  Each layer is either DENSE (every channel with every other, on CUDA or tensor cores, sums in
// registers) or DEPTHWISE (every channel by itself).  A chunk of x belongs to one input, so the input is chosen once
// per chunk.
//
// A block loads both weights into shared memory once, and goes from tile to tile until all are done.  The first layer
// reads all chunks of x of a tile, or one at a time.  These are copied together (cp.async) and waited for once.
//
// Bound by memory for few channels, by arithmetic for many.  Floor: x and y once over the bandwidth.  Two kernels would
// also write z and read it again.
//
// -D: DTYPE (storage type), ARITHMETIC (of dense layers: one of tensor_core.cuh), FIRST, SECOND (DENSE or DEPTHWISE)
#include "epilogue.cuh"
#include "window_tile.cuh"

namespace cupyconv {

constexpr int MAX_PAIR_SOURCES = 32;

struct PairLayer {
    Windows windows;
    Image weight;  // n is the output, c the channel
    Epilogue epilogue;
};

struct ConvPairParams {
    Source sources[MAX_PAIR_SOURCES];
    PairLayer first, second;
    Image out;
    long long tile_count;               // tiles of all samples
    long long tiles[3];                 // tiles of one sample, along each axis
    int source_count, middle, outputs;  // inputs; channels of z and of y
    int outputs_per_block;              // outputs of the blocks with one blockIdx.y: a multiple of OUTPUTS
    Box tile, middle_tile, x_tile;      // pixels of y, z and x
    int x_vectorized;                   // channels of x are contiguous, every chunk aligned to 16 bytes
    int x_chunks, middle_chunks;
};

enum LayerKind { DENSE, DEPTHWISE };

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = WindowTile<T>;

constexpr int CHUNK = Tile::CHUNK, PITCH = Tile::PITCH, VECTOR = Tile::VECTOR;
constexpr int PIXELS = 256, MIDDLE_PIXELS = 384;  // maximum number of pixels of a tile
constexpr int PART = 16;                          // rows of y that are finished together
constexpr int EPILOGUE_PITCH = PIXELS + 8;        // pitch of their sums: fragments are stored without bank conflicts

constexpr int OUTPUTS = sizeof(T) == 8 ? 16 : 32;  // outputs whose sums are in registers at a time
// Blocks per multiprocessor that the registers allow.
constexpr int MIN_BLOCKS = FIRST == DENSE || sizeof(T) == 8 || ARITHMETIC == TF32X3 ? 2 : SECOND == DENSE ? 3 : 4;

using FirstSums = TileSumsOf<T, ARITHMETIC, CHUNK, MIDDLE_PIXELS>::type;
using SecondSums = TileSumsOf<T, ARITHMETIC, OUTPUTS, PIXELS>::type;
constexpr int STEP = FirstSums::STEP;  // channels per step of a product

// Channels rounded up to whole steps.  Channels beyond the last are zeros in every tile.
__device__ __forceinline__ int padded(int channels) { return (channels + STEP - 1) / STEP * STEP; }

// ---- shared memory -------------------------------------------------------------------------------------------------

// A layer's weight in shared memory.  DENSE has a matrix per tap in the layout of the product; DEPTHWISE has one
// widened number per tap and channel.
template <LayerKind KIND, class Sums> struct WeightOf;
template <class Sums> struct WeightOf<DENSE, Sums> {
    static constexpr LayerKind KIND = DENSE;
    using Element = T;
    static constexpr int TAP = Sums::WEIGHTS;  // elements per tap
};
template <class Sums> struct WeightOf<DEPTHWISE, Sums> {
    static constexpr LayerKind KIND = DEPTHWISE;
    using Element = A;
    static constexpr int TAP = CHUNK;
};
using FirstWeight = WeightOf<FIRST, FirstSums>;
using SecondWeight = WeightOf<SECOND, SecondSums>;

// Values that all threads look up, so that they occupy no registers.
struct Tables {
    int first_base[MIDDLE_PIXELS], second_base[PIXELS];  // where windows begin, in pixels of the tile that they read
    // For the current tile:
    int inside[MIDDLE_PIXELS];                      // whether a pixel of z's tile is inside z, not padding
    long long out_at[PIXELS], residual_at[PIXELS];  // offsets of pixels of y
    long long sample;
    int y_origin[3], middle_origin[3], x_origin[3];  // where the tiles begin
};

// Offsets of the parts, in bytes.  An image that a dense layer reads has all of its chunks here; one that a depthwise
// layer reads has one chunk.
//
//     | Tables | first weight | second weight | z | x       | offsets of the pixels of x |
//                                                 | PART rows of y's sums |               reuse x once it has been read
//
// A launch needs `end` bytes.  conv_pair.py computes them independently, and a test compares the two.
struct SharedLayout {
    int first_weight, second_weight, middle, x, x_place, end;

    __device__ constexpr SharedLayout(
        int first_taps, int second_taps, int x_chunks, int middle_chunks, int output_tiles, int x_pixels,
        int middle_pixels)
        : first_weight(sizeof(Tables)),
          second_weight(
              first_weight + bytes_of<FirstWeight>(first_taps) * middle_chunks * (FIRST == DENSE ? x_chunks : 1)),
          middle(
              second_weight +
              bytes_of<SecondWeight>(second_taps) * middle_chunks * (SECOND == DENSE ? output_tiles : 1)),
          x(middle + middle_pixels * PIXEL * (SECOND == DENSE ? middle_chunks : 1)),
          x_place(x + x_pixels * PIXEL * (FIRST == DENSE ? x_chunks : 1)),
          end(x_place + x_pixels * int(sizeof(long long))) {
        if (SECOND == DENSE && end < x + SUMS) end = x + SUMS;
    }

private:
    static constexpr int PIXEL = PITCH * sizeof(T), SUMS = PART * EPILOGUE_PITCH * sizeof(A);
    template <class Weight> static __device__ constexpr int bytes_of(int taps) {
        return taps * Weight::TAP * int(sizeof(typename Weight::Element));
    }
};

// ---- loads ---------------------------------------------------------------------------------------------------------

// Channels `channel` ... of x or of z, `count` of them.  Those of x belong to one input, in which the first is `first`.
struct Chunk {
    int channel, count, source, first;
};

// Calls f(number, chunk) for the chunks of x.
template <class F> __device__ __forceinline__ void for_each_x_chunk(const ConvPairParams& params, F f) {
    int i = 0;
#pragma unroll 1
    for (int s = 0; s < params.source_count; ++s) {
        const Source& source = params.sources[s];
#pragma unroll 1
        for (int c = 0; c < source.channels; c += CHUNK)
            f(i++, Chunk{source.first + c, min(CHUNK, source.channels - c), s, c});
    }
}

// Calls f(number, chunk) for the chunks of z.  They are those of x if each channel of z comes from one channel of x.
template <class F> __device__ __forceinline__ void for_each_middle_chunk(const ConvPairParams& params, F f) {
    if constexpr (FIRST == DENSE) {
        int i = 0;
#pragma unroll 1
        for (int m = 0; m < params.middle; m += CHUNK) f(i++, Chunk{m, min(CHUNK, params.middle - m), 0, 0});
    } else {
        for_each_x_chunk(params, f);
    }
}

__device__ __forceinline__ int taps_of(const Windows& windows) { return product_of(windows.kernel); }

__device__ __forceinline__ long long tap_offset(int t, const Windows& windows, const Image& weight) {
    int tap[3];
    tap_at(t, windows.kernel, tap);
    return offset_of(tap, weight.stride);
}

// Load all taps of the weight of outputs o ... and channels c ...  Beyond `outputs` and `channels` there are zeros.
template <class Sums>
__device__ void load_dense(T* to, const PairLayer& layer, int o, int outputs, int c, int channels) {
    const int taps = taps_of(layer.windows);
#pragma unroll 1
    for (int i = threadIdx.x; i < Sums::ROWS * CHUNK * taps; i += TILE_THREADS) {
        const int t = i % taps, k = i / taps % CHUNK, m = i / taps / CHUNK;
        T value = narrow<T>(A(0));
        if (m < outputs && k < channels)
            value = static_cast<const T*>(layer.weight.data)[
                (long long)(o + m) * layer.weight.stride_n + (long long)(c + k) * layer.weight.stride_c +
                tap_offset(t, layer.windows, layer.weight)];
        to[t * Sums::WEIGHTS + Sums::weight_index(m, k)] = value;
    }
}

// Load the kernels of channels c ...  Beyond `channels` there are zeros.
__device__ void load_depthwise(A* to, const PairLayer& layer, int c, int channels) {
    const int taps = taps_of(layer.windows);
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNK * taps; i += TILE_THREADS) {
        const int t = i % taps, k = i / taps;
        const T* const weight = static_cast<const T*>(layer.weight.data);
        to[t * CHUNK + k] = k < channels ? widen(weight[
            (long long)(c + k) * layer.weight.stride_n + tap_offset(t, layer.windows, layer.weight)]) : A(0);
    }
}

// Compute the offset of each pixel of the tile in an input, in elements from its sample's first; NOWHERE for a zero.
__device__ __forceinline__ void place_x(
    long long* x_place, const ConvPairParams& params, int source, const int (&origin)[3]) {
    const Windows& windows = params.first.windows;
#pragma unroll 1
    for (int pixel = threadIdx.x; pixel < params.x_tile.pixels(); pixel += TILE_THREADS) {
        int place[3];
        params.x_tile.at(pixel, place);
        long long offset = 0;
        bool inside = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            const long long at = padded_index(origin[a] + place[a], windows.size[a], windows.padding_mode);
            inside = inside && at >= 0;
            offset += at * params.sources[source].image.stride[a];
        }
        x_place[pixel] = inside ? offset : NOWHERE;
    }
}

// Load a chunk of x into a tile.  Neighbouring threads load neighbours in memory: vectors of a pixel, or pixels.  The
// copies are asynchronous and bypass the registers, so that all copies of a thread are in flight together.  Only for
// single 16-bit elements there is no such instruction.  The code that reads the tile waits for the copies.
__device__ __forceinline__ void load_x(
    T* tile, const ConvPairParams& params, const Chunk& chunk, long long n, const long long* x_place) {
    constexpr int VECTORS = CHUNK / VECTOR;
    const Image& image = params.sources[chunk.source].image;
    const T* const x_n = static_cast<const T*>(image.data) + n * image.stride_n + chunk.first * image.stride_c;
    const bool vectorized = params.x_vectorized;
    const int step = vectorized ? TILE_THREADS / VECTORS : TILE_THREADS;
#pragma unroll 1
    for (int pixel = vectorized ? threadIdx.x / VECTORS : threadIdx.x; pixel < params.x_tile.pixels(); pixel += step) {
        const long long place = x_place[pixel];
#pragma unroll 1
        for (int k = vectorized ? threadIdx.x % VECTORS * VECTOR : 0; k < padded(chunk.count);
             k += vectorized ? CHUNK : VECTOR) {
            T* const to = tile + pixel * PITCH + k;
            const T* const x = x_n + (place == NOWHERE ? 0 : place) + k * image.stride_c;
            if (vectorized && k + VECTOR <= chunk.count) {
                copy_async<16, true>(to, x, place != NOWHERE);
                continue;
            }
            if constexpr (sizeof(T) > 2) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    copy_async<sizeof(T)>(to + e, x + e * image.stride_c, place != NOWHERE && k + e < chunk.count);
            } else {
                Vector<T, VECTOR> vector;
                if (place != NOWHERE && k + VECTOR <= chunk.count) {
                    vector = gather_vector<VECTOR>(x, image.stride_c, false);
                } else {
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        vector.lane[e] =
                            place != NOWHERE && k + e < chunk.count ? x[e * image.stride_c] : narrow<T>(A(0));
                }
                *reinterpret_cast<Vector<T, VECTOR>*>(to) = vector;
            }
        }
    }
}

// ---- the work of a block -------------------------------------------------------------------------------------------

// First and Second are the `WeightOf` of the layers, and so give their kinds.
template <class First, class Second>
struct Block {
    const ConvPairParams& params;
    Tables& tables;
    typename First::Element* first_weight;
    typename Second::Element* second_weight;
    T *middle_tile, *x_tile;
    long long* x_place;
    A* sums;  // reuses x, once it has been read

    // The block's outputs.  They are recomputed, so that they occupy no registers.
    __device__ __forceinline__ int o_first() const { return blockIdx.y * params.outputs_per_block; }
    __device__ __forceinline__ int o_end() const { return min(params.outputs, o_first() + params.outputs_per_block); }

    // The weight of chunk q of z and chunk c of x; c is 0 for a depthwise layer.
    __device__ __forceinline__ typename First::Element* first_weight_of(int q, int c) const {
        const int chunk = First::KIND == DENSE ? q * params.x_chunks + c : q;
        return first_weight + chunk * taps_of(params.first.windows) * First::TAP;
    }

    // The weight of chunk q of z; for a dense layer, of the block's `tile`-th OUTPUTS outputs.
    __device__ __forceinline__ typename Second::Element* second_weight_of(int q, int tile) const {
        const int chunk = tile * params.middle_chunks + q;
        return second_weight + chunk * taps_of(params.second.windows) * Second::TAP;
    }

    // Load both weights and the window positions, which are the same for all tiles.
    __device__ __forceinline__ void load_weights() const {
        for_each_middle_chunk(params, [&](int q, const Chunk& z) {
            if constexpr (First::KIND == DENSE)
                for_each_x_chunk(params, [&](int c, const Chunk& x) {
                    load_dense<FirstSums>(first_weight_of(q, c), params.first, z.channel, z.count, x.channel, x.count);
                });
            else
                load_depthwise(first_weight_of(q, 0), params.first, z.channel, z.count);
            if constexpr (Second::KIND == DENSE)
                for (int o = o_first(), tile = 0; o < o_end(); o += OUTPUTS, ++tile)
                    load_dense<SecondSums>(
                        second_weight_of(q, tile), params.second, o, min(OUTPUTS, o_end() - o), z.channel, z.count);
            else
                load_depthwise(second_weight_of(q, 0), params.second, z.channel, z.count);
        });
        const int pixels = params.tile.pixels(), middle_pixels = params.middle_tile.pixels();
#pragma unroll 1
        for (int i = threadIdx.x; i < MIDDLE_PIXELS; i += TILE_THREADS)
            tables.first_base[i] =
                i < middle_pixels ? window_base(i, params.middle_tile, params.x_tile, params.first.windows.stride) : 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < PIXELS; i += TILE_THREADS)
            tables.second_base[i] =
                i < pixels ? window_base(i, params.tile, params.middle_tile, params.second.windows.stride) : 0;
    }

    // Fill the tables for the tile of this number.
    __device__ __forceinline__ void begin_tile(long long number) const {
        const Windows &first = params.first.windows, &second = params.second.windows;
        if (threadIdx.x == 0) {
            long long n = number;
#pragma unroll
            for (int a = 2; a >= 0; --a) {
                tables.y_origin[a] = int(n % params.tiles[a]) * params.tile.size[a];
                n /= params.tiles[a];
                tables.middle_origin[a] = tables.y_origin[a] * second.stride[a] - second.before[a];
                tables.x_origin[a] = tables.middle_origin[a] * first.stride[a] - first.before[a];
            }
            tables.sample = n;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < MIDDLE_PIXELS; i += TILE_THREADS) {
            int place[3];
            params.middle_tile.at(i, place);
            bool inside = i < params.middle_tile.pixels();
#pragma unroll
            for (int a = 0; a < 3; ++a)
                inside = inside && unsigned(tables.middle_origin[a] + place[a]) < second.size[a];
            tables.inside[i] = inside;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < PIXELS; i += TILE_THREADS) {
            const Image& residual = params.second.epilogue.residual;
            int place[3];
            params.tile.at(i, place);
            Pixel at;
            bool inside = i < params.tile.pixels();
#pragma unroll
            for (int a = 0; a < 3; ++a) {
                at.at[a] = tables.y_origin[a] + place[a];
                inside = inside && at.at[a] < second.out[a];
            }
            tables.out_at[i] = inside ? params.out.at(tables.sample, 0, at) : NOWHERE;
            tables.residual_at[i] = residual.at(tables.sample, 0, at);
        }
    }

    // Fetch a chunk of x into `tile`.
    __device__ __forceinline__ void fetch(T* tile, const Chunk& x) const {
        if (x.first == 0) {  // the first chunk of an input
            __syncthreads();
            place_x(x_place, params, x.source, tables.x_origin);
            __syncthreads();
        }
        load_x(tile, params, x, tables.sample, x_place);
    }

    // Wait until the copies of all threads have arrived.
    static __device__ __forceinline__ void arrived() {
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
    }

    // Compute chunk q of z.  A dense layer reads all of x, which has been fetched; a depthwise layer fetches its own
    // chunk.
    __device__ __forceinline__ void make(int q, const Chunk& z, T* tile) const {
        const Windows& windows = params.first.windows;
        const int pixels = params.middle_tile.pixels();
        const auto bias = [&](int i) { return i < z.count ? bias_of<T>(params.first.epilogue, z.channel + i) : A(0); };
        const auto kept = [&](int i, int pixel) { return i < z.count && tables.inside[pixel]; };
        if constexpr (First::KIND == DENSE) {
            FirstSums sums;
            sums.begin(bias);
            sums.aim(tables.first_base, pixels);
            for_each_x_chunk(params, [&](int c, const Chunk& x) {
                const T* const x_c = x_tile + c * params.x_tile.pixels() * PITCH;
                const T* const weight = first_weight_of(q, c);
                for_each_tap(windows, params.x_tile, [&](int t, int offset) {
                    sums.multiply(x_c + offset * PITCH, weight + t * First::TAP, z.count, padded(x.count));
                });
            });
            sums.apply(activation_of<T>(params.first.epilogue));
            sums.leave(tile, pixels, kept);
        } else {
            fetch(x_tile, z);
            arrived();
            const auto store = [&](int pixel, int k, A (&sum)[VECTOR]) {
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum[e] += bias(k + e);
                activation_of<T>(params.first.epilogue).apply(sum);
                Vector<T, VECTOR> vector;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) vector.lane[e] = narrow<T>(kept(k + e, pixel) ? sum[e] : A(0));
                *reinterpret_cast<Vector<T, VECTOR>*>(tile + pixel * PITCH + k) = vector;
            };
            convolve_each(
                x_tile, first_weight_of(q, 0), windows, params.x_tile, tables.first_base, pixels, padded(z.count),
                store);
        }
        __syncthreads();
    }

    // Compute y by a dense second layer, from all of z, OUTPUTS outputs at a time.
    __device__ __forceinline__ void finish_dense() const {
        // Sums that a thread finishes together, as the registers allow.
        constexpr int AT_A_TIME = MIN_BLOCKS == 2 ? (sizeof(T) == 8 ? 2 : 4) : sizeof(T) == 2 ? 2 : 1;
        const int pixels = params.tile.pixels(), middle_pixels = params.middle_tile.pixels();
        const T* weight = second_weight;
#pragma unroll 1
        for (int o = o_first(); o < o_end(); o += OUTPUTS) {
            const int outputs = min(OUTPUTS, o_end() - o);
            SecondSums registers;
            registers.begin([](int) { return A(0); });
            registers.aim(tables.second_base, pixels);
            for_each_middle_chunk(params, [&](int q, const Chunk& z) {
                const T* const z_q = middle_tile + q * middle_pixels * PITCH;
                for_each_tap(params.second.windows, params.middle_tile, [&](int, int offset) {
                    registers.multiply(z_q + offset * PITCH, weight, outputs, padded(z.count));
                    weight += Second::TAP;
                });
            });
#pragma unroll 1
            for (int part = 0; part < outputs; part += PART) {
                __syncthreads();
                registers.for_each([&](int i, int pixel, A& sum) {
                    if (i / PART * PART == part) sums[i % PART * EPILOGUE_PITCH + pixel] = sum;
                });
                __syncthreads();
                const EpilogueTile<T> tile = {sums, EPILOGUE_PITCH, 1, o + part, tables.out_at, tables.residual_at};
                const TileWalk walk =
                    walk_along<PART, PIXELS, TILE_THREADS>(params.out.stride_c == 1, min(PART, outputs - part));
                finish_tile<T, AT_A_TIME>(tile, walk, params.out, params.second.epilogue, nullptr);
            }
        }
    }

    // Compute y by a depthwise second layer, from chunk q of z.
    __device__ __forceinline__ void finish_depthwise(int q, const Chunk& z) const {
        const Epilogue& epilogue = params.second.epilogue;
        const auto store = [&](int pixel, int k, A (&sum)[VECTOR]) {
            const long long out_at = tables.out_at[pixel], first = z.channel + k;
            if (out_at == NOWHERE) return;
            const auto valid = [&](int e) { return k + e < z.count; };
            const auto at = [&](int e) { return out_at + (first + e) * params.out.stride_c; };
            const auto residual_at = [&](int e) {
                return tables.residual_at[pixel] + (first + e) * epilogue.residual.stride_c;
            };
            finish_all<T>(
                sum, epilogue, activation_of<T>(epilogue), valid, [&](int e) { return first + e; }, residual_at, at);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (valid(e)) static_cast<T*>(params.out.data)[at(e)] = narrow<T>(sum[e]);
        };
        convolve_each(
            middle_tile, second_weight_of(q, 0), params.second.windows, params.middle_tile, tables.second_base,
            params.tile.pixels(), z.count, store);
        __syncthreads();
    }

    // Compute the tile of this number, from x to y.
    __device__ __forceinline__ void compute(long long number) const {
        const int x_size = params.x_tile.pixels() * PITCH, middle_size = params.middle_tile.pixels() * PITCH;
        begin_tile(number);
        if constexpr (First::KIND == DENSE) {  // every chunk of z needs all of x
            for_each_x_chunk(params, [&](int c, const Chunk& x) { fetch(x_tile + c * x_size, x); });
            arrived();
        }
        if constexpr (Second::KIND == DENSE) {  // every output needs all of z
            for_each_middle_chunk(params, [&](int q, const Chunk& z) { make(q, z, middle_tile + q * middle_size); });
            finish_dense();
        } else {
            for_each_middle_chunk(params, [&](int q, const Chunk& z) {
                make(q, z, middle_tile);
                finish_depthwise(q, z);
            });
        }
        __syncthreads();  // the tiles may be overwritten
    }
};

extern "C" __global__ void __launch_bounds__(TILE_THREADS, MIN_BLOCKS)
    conv_pair(const __grid_constant__ ConvPairParams params) {
    DYNAMIC_SHARED(unsigned char, shared);
    const SharedLayout layout(
        taps_of(params.first.windows), taps_of(params.second.windows), params.x_chunks, params.middle_chunks,
        params.outputs_per_block / OUTPUTS, params.x_tile.pixels(), params.middle_tile.pixels());
    const Block<FirstWeight, SecondWeight> block = {
        params, *reinterpret_cast<Tables*>(shared),
        reinterpret_cast<FirstWeight::Element*>(shared + layout.first_weight),
        reinterpret_cast<SecondWeight::Element*>(shared + layout.second_weight),
        reinterpret_cast<T*>(shared + layout.middle), reinterpret_cast<T*>(shared + layout.x),
        reinterpret_cast<long long*>(shared + layout.x_place), reinterpret_cast<A*>(shared + layout.x)};
    block.load_weights();
#pragma unroll 1
    for (long long tile = blockIdx.x; tile < params.tile_count; tile += gridDim.x) block.compute(tile);
}
