// Two convolutions in one kernel: what lies between them is a tile in shared memory and never in global memory.
//
//     z[n, m, q] = activation( sum_{c, t} weight[m, c, t] * x[n, c, window(q, t)] + bias[m] )
//     y[n, o, p] = activation( sum_{m, t} weight[o, m, t] * z[n, m, window(p, t)] + bias[o] + residual[n, o, p] )
//
//     M = m, then o     N = q, then p: the pixels of a tile     K = (c, t), then (m, t)
//
//         x                        z                      y          one block of threads: a tile of y, and of z what
//      +-----------+                                                 its windows reach.  z at a tile's rim is computed
//      | +-------+ |   first    +-------+    second     +---+        by its neighbours too: that is the price.
//      | |       | |  ------->  |       |   ------->    |   |
//      | +-------+ |            +-------+               +---+        Channels come in chunks of 64 bytes.
//      +-----------+
//
// z is rounded to its storage type, and is zero beyond its own edge, where the second layer is padded: both as if it
// had been stored.  Each layer is either DENSE (every channel with every other: CUDA or tensor cores, sums in registers)
// or DEPTHWISE (every channel by itself).  Chunks of x belong to one input each: the input is chosen once a chunk.
// Both weights are in shared memory as a whole: a block loads them once and goes from tile to tile until all are done.
//
// Bound by memory for few channels, by arithmetic for many.  Floor: x and y once over the bandwidth, where the two
// layers one after the other have z twice more.
//
// -D: DTYPE (storage type), FIRST, SECOND (DENSE or DEPTHWISE)
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
    long long blocks;                 // tiles of all samples
    long long tiles[3];               // of a sample
    int source_count, middle, outputs;  // of x; channels of z and of y
    int outputs_a_block;                // those of blocks with one blockIdx.y: whole OUTPUTS
    Box tile, middle_tile, x_tile;    // pixels of y, z and x
    int x_packed;  // channels of x lie side by side, every chunk aligned to 16 bytes
    // Shared memory: the tables, the first weight, and from these bytes on the second weight, z's tile, x's, where x's
    // pixels lie.
    int second_at, middle_at, x_at, place_at;
    int x_chunks, middle_chunks;
    int first_plane, second_plane;  // bytes of the weight of a chunk, of OUTPUTS of a chunk
};

enum LayerKind { DENSE, DEPTHWISE };

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = WindowTile<T>;

constexpr int CHUNK = Tile::CHUNK, PITCH = Tile::PITCH, GRANULE = Tile::GRANULE;
constexpr int PIXELS = 256, MIDDLE_PIXELS = 384;  // of a tile, at the most
constexpr int PART = 16;                          // rows of y that leave at once
constexpr int LEAVING_PITCH = PIXELS + 8;        // fragments are stored without conflicts

constexpr int OUTPUTS = sizeof(T) == 8 ? 16 : 32;  // of y, whose sums are in registers at a time
constexpr int MIN_BLOCKS = FIRST == DEPTHWISE && sizeof(T) < 8 ? 3 : 2;
// Sums of y that a thread finishes at a time, as registers allow.
constexpr int FINISHED = MIN_BLOCKS == 2 ? (sizeof(T) == 8 ? 2 : 4) : sizeof(T) == 2 ? 2 : 1;

using FirstSums = TileSumsOf<T, CHUNK, MIDDLE_PIXELS>::type;
using SecondSums = TileSumsOf<T, OUTPUTS, PIXELS>::type;
constexpr int STEP = FirstSums::STEP;  // channels that a product takes at once

// Channels up to a whole step: those beyond the last are zeros in every tile.
__device__ __forceinline__ int padded(int channels) { return (channels + STEP - 1) / STEP * STEP; }

// Bytes of a tap's weight in shared memory: a matrix as the product takes it, or one number a channel, widened.
constexpr int A_DEPTHWISE_TAP = CHUNK * sizeof(A);
constexpr int FIRST_TAP = FIRST == DENSE ? FirstSums::WEIGHTS * sizeof(T) : A_DEPTHWISE_TAP;
constexpr int SECOND_TAP = SECOND == DENSE ? SecondSums::WEIGHTS * sizeof(T) : A_DEPTHWISE_TAP;

// What all threads look up rather than keep in registers.
struct Tables {
    int first_base[MIDDLE_PIXELS], second_base[PIXELS];  // where windows begin, in pixels of the tile before
    // Of the current tile:
    int inside[MIDDLE_PIXELS];  // whether a pixel of z's tile is one of z, not of its padding
    long long out_at[PIXELS], residual_at[PIXELS];  // of pixels of y
    long long sample;
    int y_corner[3], middle_corner[3], x_corner[3];
};

// Channels `channel` ... of x or of z, `count` of them; of x they are those of one input from `first` on.
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
        for (int c = 0; c < source.channels; c += CHUNK) f(i++, Chunk{source.first + c, min(CHUNK, source.channels - c), s, c});
    }
}

// The same for the chunks of z, which are those of x where every channel of z is made of one of x.
template <class F> __device__ __forceinline__ void for_each_middle_chunk(const ConvPairParams& params, F f) {
    if constexpr (FIRST == DENSE) {
        int i = 0;
#pragma unroll 1
        for (int m = 0; m < params.middle; m += CHUNK) f(i++, Chunk{m, min(CHUNK, params.middle - m), 0, 0});
    } else {
        for_each_x_chunk(params, f);
    }
}

__device__ __forceinline__ int taps_of(const Windows& windows) {
    return windows.kernel[0] * windows.kernel[1] * windows.kernel[2];
}

__device__ __forceinline__ long long tap_offset(int t, const Windows& windows, const Image& weight) {
    int tap[3];
    tap_at(t, windows.kernel, tap);
    return tap[0] * weight.stride[0] + tap[1] * weight.stride[1] + tap[2] * weight.stride[2];
}

// Outputs o ... of channels c ..., `outputs` and `channels` of them, the rest zeros; every tap.
template <class Sums>
__device__ void load_dense(unsigned char* at, const PairLayer& layer, int o, int outputs, int c, int channels) {
    T* const to = reinterpret_cast<T*>(at);
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

// The kernels of channels c ..., `channels` of them.
__device__ void load_depthwise(unsigned char* at, const PairLayer& layer, int c, int channels) {
    A* const to = reinterpret_cast<A*>(at);
    const int taps = taps_of(layer.windows);
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNK * taps; i += TILE_THREADS) {
        const int t = i % taps, k = i / taps;
        const T* const weight = static_cast<const T*>(layer.weight.data);
        to[t * CHUNK + k] = k < channels ? widen(weight[
            (long long)(c + k) * layer.weight.stride_n + tap_offset(t, layer.windows, layer.weight)]) : A(0);
    }
}

constexpr long long OUTSIDE = -0x7fffffffffffffffll - 1;

// Where each pixel of the tile lies in an input, in elements from its sample's first; OUTSIDE where it is a zero.
__device__ __forceinline__ void place_x(long long* place_of, const ConvPairParams& params, int source, const int (&corner)[3]) {
    const Windows& windows = params.first.windows;
#pragma unroll 1
    for (int pixel = threadIdx.x; pixel < params.x_tile.pixels(); pixel += TILE_THREADS) {
        int place[3];
        params.x_tile.at(pixel, place);
        long long offset = 0;
        bool inside = true;
#pragma unroll
        for (int a = 0; a < 3; ++a) {
            const long long at = padded_index(corner[a] + place[a], windows.size[a], windows.padding_mode);
            inside = inside && at >= 0;
            offset += at * params.sources[source].image.stride[a];
        }
        place_of[pixel] = inside ? offset : OUTSIDE;
    }
}

// A chunk of x into a tile.  Neighbouring threads take neighbours in memory: granules of a pixel, or pixels.
__device__ __forceinline__ void load_x(
    T* tile, const ConvPairParams& params, const Chunk& chunk, long long n, const long long* place_of) {
    constexpr int GRANULES = CHUNK / GRANULE;
    const Image& image = params.sources[chunk.source].image;
    const T* const x_n = static_cast<const T*>(image.data) + n * image.stride_n + chunk.first * image.stride_c;
    const bool packed = params.x_packed;
    const int step = packed ? TILE_THREADS / GRANULES : TILE_THREADS;
#pragma unroll 1
    for (int pixel = packed ? threadIdx.x / GRANULES : threadIdx.x; pixel < params.x_tile.pixels(); pixel += step) {
        const long long place = place_of[pixel];
#pragma unroll 1
        for (int k = packed ? threadIdx.x % GRANULES * GRANULE : 0; k < padded(chunk.count); k += packed ? CHUNK : GRANULE) {
            Packet<T, GRANULE> packet;
            const T* const x = x_n + (place == OUTSIDE ? 0 : place) + k * image.stride_c;
            if (place != OUTSIDE && k + GRANULE <= chunk.count) {
                packet = gather_packet<GRANULE>(x, image.stride_c, packed);
            } else {
#pragma unroll
                for (int e = 0; e < GRANULE; ++e)
                    packet.lane[e] = place != OUTSIDE && k + e < chunk.count ? x[e * image.stride_c] : narrow<T>(A(0));
            }
            *reinterpret_cast<Packet<T, GRANULE>*>(tile + pixel * PITCH + k) = packet;
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, MIN_BLOCKS) conv_pair(const __grid_constant__ ConvPairParams params) {
    DYNAMIC_SHARED(unsigned char, shared);
    const Windows &first = params.first.windows, &second = params.second.windows;
    const int pixels = params.tile.pixels(), middle_pixels = params.middle_tile.pixels();
    const int o_first = blockIdx.y * params.outputs_a_block;
    const int o_end = min(params.outputs, o_first + params.outputs_a_block);

    Tables& tables = *reinterpret_cast<Tables*>(shared);
    unsigned char* const first_weight = shared + sizeof(Tables);
    unsigned char* const second_weight = shared + params.second_at;
    T* const middle_tile = reinterpret_cast<T*>(shared + params.middle_at);
    T* const x_tile = reinterpret_cast<T*>(shared + params.x_at);
    long long* const place_of = reinterpret_cast<long long*>(shared + params.place_at);
    A* const leaving = reinterpret_cast<A*>(x_tile);  // when x has been used

    for_each_middle_chunk(params, [&](int q, const Chunk& z) {
        if constexpr (FIRST == DENSE)
            for_each_x_chunk(params, [&](int c, const Chunk& x) {
                load_dense<FirstSums>(
                    first_weight + (q * params.x_chunks + c) * params.first_plane, params.first, z.channel, z.count, x.channel, x.count);
            });
        else
            load_depthwise(first_weight + q * params.first_plane, params.first, z.channel, z.count);
        if constexpr (SECOND == DENSE)
            for (int o = o_first, i = q; o < o_end; o += OUTPUTS, i += params.middle_chunks)
                load_dense<SecondSums>(
                    second_weight + i * params.second_plane, params.second, o, min(OUTPUTS, o_end - o), z.channel, z.count);
        else
            load_depthwise(second_weight + q * params.second_plane, params.second, z.channel, z.count);
    });
#pragma unroll 1
    for (int i = threadIdx.x; i < MIDDLE_PIXELS; i += TILE_THREADS)
        tables.first_base[i] = i < middle_pixels ? window_base(i, params.middle_tile, params.x_tile, first.stride) : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < PIXELS; i += TILE_THREADS)
        tables.second_base[i] = i < pixels ? window_base(i, params.tile, params.middle_tile, second.stride) : 0;

#pragma unroll 1
    for (long long block = blockIdx.x; block < params.blocks; block += gridDim.x) {
        if (threadIdx.x == 0) {
            long long n = block;
#pragma unroll
            for (int a = 2; a >= 0; --a) {
                tables.y_corner[a] = int(n % params.tiles[a]) * params.tile.size[a];
                n /= params.tiles[a];
                tables.middle_corner[a] = tables.y_corner[a] * second.stride[a] - second.before[a];
                tables.x_corner[a] = tables.middle_corner[a] * first.stride[a] - first.before[a];
            }
            tables.sample = n;
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < MIDDLE_PIXELS; i += TILE_THREADS) {
            int place[3];
            params.middle_tile.at(i, place);
            bool inside = i < middle_pixels;
#pragma unroll
            for (int a = 0; a < 3; ++a) inside = inside && unsigned(tables.middle_corner[a] + place[a]) < second.size[a];
            tables.inside[i] = inside;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < PIXELS; i += TILE_THREADS) {
            const Image& residual = params.second.epilogue.residual;
            int place[3];
            params.tile.at(i, place);
            Pixel at;
            bool inside = i < pixels;
#pragma unroll
            for (int a = 0; a < 3; ++a) {
                at.at[a] = tables.y_corner[a] + place[a];
                inside = inside && at.at[a] < second.out[a];
            }
            tables.out_at[i] = inside ? tables.sample * params.out.stride_n + offset_of(at, params.out.stride) : NOWHERE;
            tables.residual_at[i] = tables.sample * residual.stride_n + offset_of(at, residual.stride);
        }
        const auto fetch = [&](T* tile, const Chunk& x) {
            if (x.first == 0) {  // another input
                __syncthreads();
                place_x(place_of, params, x.source, tables.x_corner);
                __syncthreads();
            }
            load_x(tile, params, x, tables.sample, place_of);
        };
        const auto make = [&](int q, const Chunk& z, T* middle_tile) {  // a chunk of z
            const auto bias = [&](int i) { return i < z.count ? bias_of<T>(params.first.epilogue, z.channel + i) : A(0); };
            if constexpr (FIRST == DENSE) {
                FirstSums sums;
                sums.begin(bias);
                sums.aim(tables.first_base, middle_pixels);
                for_each_x_chunk(params, [&](int c, const Chunk& x) {
                    const T* const tile = x_tile + c * params.x_tile.pixels() * PITCH;
                    const unsigned char* const weight = first_weight + (q * params.x_chunks + c) * params.first_plane;
                    for_each_tap(first, params.x_tile, [&](int t, int offset) {
                        sums.multiply(
                            tile + offset * PITCH, reinterpret_cast<const T*>(weight + t * FIRST_TAP), z.count, padded(x.count));
                    });
                });
                sums.apply(activation_of<T>(params.first.epilogue));
                sums.leave(
                    middle_tile, middle_pixels, [&](int i, int pixel) { return i < z.count && tables.inside[pixel]; });
            } else {
                fetch(x_tile, z);
                __syncthreads();
                convolve_each(
                    x_tile, reinterpret_cast<const A*>(first_weight + q * params.first_plane), first, params.x_tile,
                    tables.first_base, middle_pixels, padded(z.count), [&](int pixel, int k, A (&sum)[GRANULE]) {
#pragma unroll
                        for (int e = 0; e < GRANULE; ++e) sum[e] += bias(k + e);
                        activation_of<T>(params.first.epilogue).apply(sum);
                        Packet<T, GRANULE> packet;
#pragma unroll
                        for (int e = 0; e < GRANULE; ++e)
                            packet.lane[e] = narrow<T>(k + e < z.count && tables.inside[pixel] ? sum[e] : A(0));
                        *reinterpret_cast<Packet<T, GRANULE>*>(middle_tile + pixel * PITCH + k) = packet;
                    });
            }
            __syncthreads();
        };

        if constexpr (FIRST == DENSE) {  // every chunk of z takes all of x
            for_each_x_chunk(params, [&](int c, const Chunk& x) { fetch(x_tile + c * params.x_tile.pixels() * PITCH, x); });
            __syncthreads();
        }
        if constexpr (SECOND == DENSE) {  // every output takes all of z
            for_each_middle_chunk(params, [&](int q, const Chunk& z) { make(q, z, middle_tile + q * middle_pixels * PITCH); });
            const unsigned char* weight = second_weight;
#pragma unroll 1
            for (int o = o_first; o < o_end; o += OUTPUTS) {
                const int outputs = min(OUTPUTS, o_end - o);
                SecondSums sums;
                sums.begin([](int) { return A(0); });
                sums.aim(tables.second_base, pixels);
                for_each_middle_chunk(params, [&](int q, const Chunk& z) {
                    const T* const tile = middle_tile + q * middle_pixels * PITCH;
                    for_each_tap(second, params.middle_tile, [&](int, int offset) {
                        sums.multiply(tile + offset * PITCH, reinterpret_cast<const T*>(weight), outputs, padded(z.count));
                        weight += SECOND_TAP;
                    });
                });
#pragma unroll 1
                for (int part = 0; part < outputs; part += PART) {
                    __syncthreads();
                    sums.for_each([&](int i, int pixel, A& sum) {
                        if (i / PART * PART == part) leaving[i % PART * LEAVING_PITCH + pixel] = sum;
                    });
                    __syncthreads();
                    const int rows = min(PART, outputs - part);
                    const EpilogueTile<T> tile = {
                        leaving, LEAVING_PITCH, 1, o + part, tables.out_at, tables.residual_at};
                    const TileWalk walk = walk_along<PART, PIXELS, TILE_THREADS>(params.out.stride_c == 1, rows);
                    finish_tile<T, FINISHED>(tile, walk, params.out, params.second.epilogue, nullptr);
                }
            }
        } else {
            for_each_middle_chunk(params, [&](int q, const Chunk& z) {
                make(q, z, middle_tile);
                convolve_each(
                    middle_tile, reinterpret_cast<const A*>(second_weight + q * params.second_plane), second,
                    params.middle_tile, tables.second_base, pixels, z.count, [&](int pixel, int k, A (&sum)[GRANULE]) {
                        const long long out_at = tables.out_at[pixel], o_first = z.channel + k;
                        if (out_at == NOWHERE) return;
                        const auto valid = [&](int e) { return k + e < z.count; };
                        const auto at = [&](int e) { return out_at + (o_first + e) * params.out.stride_c; };
                        finish_all<T>(
                            sum, params.second.epilogue, activation_of<T>(params.second.epilogue), valid,
                            [&](int e) { return o_first + e; },
                            [&](int e) {
                                return tables.residual_at[pixel] + (o_first + e) * params.second.epilogue.residual.stride_c;
                            },
                            at);
#pragma unroll
                        for (int e = 0; e < GRANULE; ++e)
                            if (valid(e)) static_cast<T*>(params.out.data)[at(e)] = narrow<T>(sum[e]);
                    });
                __syncthreads();
            });
        }
        __syncthreads();  // the tiles may be overwritten
    }
}
