// The image side of an implicit GEMM: one K-slab of columns, gathered straight from the inputs.
//
//     X[k, j] = x_s[n(j), c(k), window(p(j), t(k))]    k = (block, t, c) of one run    j = (n, p): pixels of all samples
//
// K comes in slabs, and a slab in K-chunks, channels of one tap (reduction.cuh).  A thread keeps its pixels for the
// whole sum, and of each slab takes the same K-chunks:
//
//     AlongPixels    neighbouring threads take neighbouring pixels of one K-chunk      any strides, coalesced for
//                                                                                      unit pixel stride
//     AlongChannels  neighbouring threads take neighbouring K-chunks of one pixel      for unit channel stride
//
//     PixelChunks    16 bytes of neighbouring pixels of one channel at a time          for one tap, pixels as they lie
//
// Of the first two there are three layers, each on the one above it:
//
//     KWalk                        where in K a thread has come to: run, block of channels, tap, channel
//     TapCursor                    where that lies in memory for each of the thread's pixels, and where it is padding
//     ChunkGather, ElementGather   copy it: 16 bytes at a time into tiles [pixel][k], where channels have unit stride
//                                  and K-chunks are whole and aligned; or element by element into tiles [k][pixel]
//
// A gather has `fetch`, which begins to copy the next slab, and `store`, which puts into the tile what `fetch` may still
// hold in registers; between the two the GEMM works on an earlier slab.
//
// Sizes, and strides but that of samples, are taken for int32.
#pragma once
#include "prologue.cuh"
#include "reduction.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// ---- what is convolved ----------------------------------------------------------------------------------------------

// What the convolutions of a grid have in common.
struct Steps {
    long long size[3];
    int stride[3], dilation[3];
    int padding_mode;
    int is_mapped;  // padding may have to be looked up elsewhere in the image, or some taps have no bit (TapCursor)
};

// One of the convolutions of a grid: of the same inputs, into elements of the result that others lie between, as phases of
// a transposed convolution are (polyphase.py).  Most grids have one.
struct Phase {
    long long first_element;  // of the result, elements from the first of all
    int out[3];      // size
    int kernel[3], before[3];  // windows may begin inside the image: then it is negative
    int first_slab;  // of the packed weight of a group

    __device__ __forceinline__ long long pixels() const { return (long long)out[0] * out[1] * out[2]; }
};

// ---- output pixels -------------------------------------------------------------------------------------------------

// An output pixel in 8 bytes: its indices side by side in one word, so that they come apart without a division.
struct TilePixel {
    int sample;      // -1 where there is no such pixel
    unsigned place;  // d << shift_d | h << shift_h | w
};

struct PlaceBits {
    int shift_d, shift_h;  // up to 32, where nothing is above

    __device__ __forceinline__ unsigned packed(const Pixel& pixel) const {
        return unsigned(pixel.at[0] << shift_d | pixel.at[1] << shift_h | pixel.at[2]);
    }
    __device__ __forceinline__ int index(unsigned place, int a) const {
        const int first = a == 0 ? shift_d : a == 1 ? shift_h : 0, end = a == 0 ? 32 : a == 1 ? shift_d : shift_h;
        return int((long long)place >> first & ((1LL << (end - first)) - 1));
    }
    __device__ __forceinline__ Pixel unpacked(unsigned place) const {
        return {{index(place, 0), index(place, 1), index(place, 2)}};
    }
};

// Pixel number j of all `pixels` of all samples.
__device__ __forceinline__ TilePixel tile_pixel(const Phase& phase, const PlaceBits& bits, long long j, long long pixels) {
    if (j >= pixels) return {-1, 0};
    const long long pixels_per_sample = phase.pixels();
    return {int(j / pixels_per_sample), bits.packed(pixel_at(j % pixels_per_sample, phase.out))};
}

// ---- how the threads of a block share a slab -----------------------------------------------------------------------

enum Direction { ALONG_PIXELS, ALONG_CHANNELS, PIXEL_CHUNKS };

// A thread has one pixel, and K-chunks of it that are STEP apart.
template <class T, int SLAB_PIXELS, int SLAB_, int THREADS>
struct AlongPixels {
    static constexpr int SLAB = SLAB_, K_CHUNK = 4;
    static constexpr int PIXELS = 1, STEP = THREADS / SLAB_PIXELS, K_CHUNKS = SLAB / K_CHUNK / STEP;
    static_assert(STEP * SLAB_PIXELS == THREADS && K_CHUNKS * STEP * K_CHUNK == SLAB, "threads share a slab evenly");
    static __device__ __forceinline__ int pixel(int) { return threadIdx.x % SLAB_PIXELS; }
    static __device__ __forceinline__ int k_chunk(int i) { return threadIdx.x / SLAB_PIXELS + i * STEP; }
};

// A thread has one K-chunk, 16 bytes of each of several pixels; its next one is in the next slab.
template <class T, int SLAB_PIXELS, int SLAB_, int THREADS>
struct AlongChannels {
    static constexpr int SLAB = SLAB_, K_CHUNK = 16 / sizeof(T);
    static constexpr int K_CHUNKS = 1, STEP = SLAB / K_CHUNK, APART = THREADS / STEP, PIXELS = SLAB_PIXELS / APART;
    static_assert(APART * STEP == THREADS && PIXELS * APART == SLAB_PIXELS, "threads share a slab evenly");
    static __device__ __forceinline__ int pixel(int i) { return threadIdx.x / STEP + i * APART; }
    static __device__ __forceinline__ int k_chunk(int) { return threadIdx.x % STEP; }
};

// ---- where in K a thread has come to -------------------------------------------------------------------------------

// Counters and nothing else; no step of theirs takes a division.
template <int SLAB, int K_CHUNK>
struct KWalk {
    Run run;
    int block, channel;  // a block's first channel, of the run; a channel of the block
    int tap[3];

    // To the beginning of the next run of the group that reads channels c_first ... c_end - 1; false after the last.
    __device__ __forceinline__ bool next_run(
        const Sources& sources, const Phase& phase, int c_first, int c_end) {
        if (!run.next(sources, c_first, c_end, product_of(phase.kernel), K_CHUNK, SLAB)) return false;
        channel = tap[0] = tap[1] = tap[2] = 0;
        begin_block(0, phase);
        return true;
    }

    // From the beginning of a run over whole blocks, whose taps fill a slab each; returns how many of `slabs` are left.
    __device__ __forceinline__ int skip_blocks(int slabs, const Phase& phase) {
        const int taps = product_of(phase.kernel), blocks = taps > 1 ? min(slabs / taps, padded() / SLAB) : 0;
        begin_block(blocks * SLAB, phase);
        return slabs - blocks * taps;
    }

    // Whether the channel that is so many further on belongs to a later tap.
    __device__ __forceinline__ bool is_past_tap(int further = 0) const { return channel + further >= channels_; }

    // To the next tap of the row, if there is one.
    __device__ __forceinline__ bool next_in_row(const Phase& phase) {
        if (tap[2] + 1 == phase.kernel[2]) return false;
        ++tap[2];
        channel -= channels_;
        return true;
    }

    // To the first tap of the next row.  Returns the axis along which it is the next one, having gone back to the first
    // along later axes; or -1, having gone to the first tap of the next block.  Behind the last block there is no end.
    __device__ __forceinline__ int next_row(const Phase& phase) {
        channel -= channels_;
        tap[2] = 0;
#pragma unroll
        for (int a = 1; a >= 0; --a) {
            if (++tap[a] < phase.kernel[a]) return a;
            tap[a] = 0;
        }
        begin_block(block + SLAB, phase);
        return -1;
    }
    __device__ __forceinline__ bool has_ended() const { return channels_ == NO_END; }

private:
    static constexpr int NO_END = 0x7fffffff;

    // The run's channels, up to whole K-chunks: worked out again, it takes no register.
    __device__ __forceinline__ int padded() const { return (run.channels + K_CHUNK - 1) / K_CHUNK * K_CHUNK; }

    __device__ __forceinline__ void begin_block(int first, const Phase& phase) {
        block = first;
        channels_ = block_channels(phase.kernel, padded() - first, SLAB);
        if (channels_ <= 0) channels_ = NO_END;
    }

    int channels_;  // of the block
};

// ---- where that lies in memory -------------------------------------------------------------------------------------

// Elements of consecutive channels at one pixel.
template <class T>
struct TapElements {
    long long at;  // an address; whatever it is, where not `inside`
    int step_c;    // bytes from one channel to the next: strides are below 2^28 elements
    int count;     // of channels that there are
    bool inside;   // else padding or nothing at all, and no channels

    // Counted in bytes, this is one multiplication and addition of 64 bits.
    __device__ __forceinline__ const T* operator+(int channel) const {
        return reinterpret_cast<const T*>(at + wide_product(channel, step_c));
    }
};

// The address of the thread's next K-chunk at each of its pixels.  From tap to tap all of them move by as many bytes,
// on and off the image: which taps are off it is asked once a pixel, of each axis by itself, and kept as bits.
//
//     bits    | d d | h h h | w w w |     outside: those of a pixel's taps that read padding       of a tap: three
//
// What is outside is a zero, or in the other padding modes an element elsewhere, which an index map finds.
template <class T, class Share>
class TapCursor {
public:
    // Of the group that reads `channels` channels from c_first on, from slab number `slab` on; a place for each of the
    // tile's pixels.
    __device__ TapCursor(
        const Sources& sources, const Steps& steps, const Phase& phase, const PlaceBits& bits, int c_first,
        const int& channels, const TilePixel* pixels, int slab)
        : sources_(sources), steps_(steps), phase_(phase), bits_(bits), c_first_(c_first), channels_(channels),
          pixels_(pixels) {
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) outside_[i] = outside_of(pixels_[Share::pixel(i)]);
        next_run(slab);
    }

    // The next K-chunk's first channel, counted through all inputs.
    __device__ __forceinline__ int merged_channel() const {
        return max(c_first_, sources_.table[walk_.run.source].first) + walk_.block + walk_.channel;
    }

    // Whether the channel `further` on belongs to the same tap.
    __device__ __forceinline__ bool same_tap(int further) const { return !walk_.is_past_tap(further); }

    // Whether a pixel's neighbour reads the same elements for the next tap.
    __device__ __forceinline__ bool has_neighbours() const { return phase_.kernel[2] > 1; }

    // Whether padding may have to be looked up elsewhere in the image.
    __device__ __forceinline__ bool is_mapped() const { return steps_.is_mapped; }

    // At the thread's i-th pixel, from the next K-chunk's first channel on.
    template <bool MAPPED> __device__ __forceinline__ TapElements<T> elements(int i) const {
        TapElements<T> x = {at_[i], step_c_, 0, (outside_[i] & (row_ | bit(walk_.tap[2]))) == 0};
        if (MAPPED && !x.inside) map(i, x);
        x.count = x.inside ? walk_.run.channels - walk_.block - walk_.channel : 0;
        return x;
    }

    // On by so many K-chunks: of this tap, and what is left over of the following ones.
    __device__ __forceinline__ void advance(int k_chunks) {
        const int channel = walk_.channel;
        long long move = 0;
        walk_.channel += k_chunks * Share::K_CHUNK;
        while (walk_.is_past_tap()) {
            if (walk_.next_in_row(phase_)) {
                move += step_w_;
            } else {
                move += bytes_to_row(walk_.next_row(phase_));
                row_ = row_bits();
            }
        }
        move += wide_product(walk_.channel - channel, step_c_);
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) at_[i] += move;
    }

    // The thread's K-chunks of a slab are done, and `advance` has been told of them.
    __device__ __forceinline__ void end_slab() {
        if (--left_ == 0) next_run(0);
    }

private:
    static constexpr int NEVER = 31;  // the bit of no tap: set in every pixel's

    // To a slab of the runs to come, at the thread's first K-chunk of it.
    __device__ __forceinline__ void next_run(int slab) {
        left_ = 0x7fffffff;  // after the last run: nothing is fetched any more
        do {
            if (!walk_.next_run(sources_, phase_, c_first_, c_first_ + channels_)) return;
            slab -= walk_.run.slabs;
        } while (slab >= 0);
        left_ = -slab;
        slab = walk_.skip_blocks(walk_.run.slabs - left_, phase_);

        const Image& image = sources_.table[walk_.run.source].image;
        step_c_ = int(image.stride_c * (int)sizeof(T));
        step_w_ = step(2);
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) {
            const TilePixel& pixel = pixels_[Share::pixel(i)];
            at_[i] = channel_address(image, pixel.sample, walk_.block);
#pragma unroll 1
            for (int a = 0; a < 3; ++a)
                at_[i] += wide_product(window_begin(pixel, a), int(image.stride[a] * (int)sizeof(T)));
        }
        row_ = row_bits();
        advance(slab * (Share::SLAB / Share::K_CHUNK) + Share::k_chunk(0));
    }

    // Where a pixel's window begins along an axis, before padding.
    __device__ __forceinline__ int window_begin(const TilePixel& pixel, int a) const {
        return bits_.index(pixel.place, a) * steps_.stride[a] - phase_.before[a];
    }

    // Of pixel 0 of a sample.
    __device__ __forceinline__ long long channel_address(const Image& image, int sample, int channel) const {
        return reinterpret_cast<long long>(image.data) +
               (sample * image.stride_n + (first_channel() + channel) * image.stride_c) * (int)sizeof(T);
    }

    // Of the run, in its input: worked out again, it takes no register.
    __device__ __forceinline__ int first_channel() const {
        return max(0, c_first_ - sources_.table[walk_.run.source].first);
    }

    // Bytes from one tap to the next along an axis.
    __device__ __forceinline__ int step(int a) const {
        return int(sources_.table[walk_.run.source].image.stride[a]) * steps_.dilation[a] * (int)sizeof(T);
    }

    // Bytes from the last tap of a row to the first of the one that KWalk has gone to, along an axis or to a block.  Read from
    // the parameters, they would save 12 of about 58 instructions that a new row takes; but they differ from input to input
    // and from phase to phase, and of the 4,096 bytes that parameters may have none is left for so many.
    __device__ __forceinline__ long long bytes_to_row(int axis) const {
        long long bytes = axis < 0 ? wide_product(Share::SLAB, step_c_) : step(axis);
        bytes -= wide_product(phase_.kernel[2] - 1, step_w_);
#pragma unroll 1
        for (int a = 1; a > axis; --a) bytes -= wide_product(phase_.kernel[a] - 1, step(a));
        return bytes;
    }

    // A tap's bits but that along w.
    __device__ __forceinline__ unsigned row_bits() const {
        if (walk_.has_ended()) return 1u << NEVER;
        const int h = phase_.kernel[2], d = h + phase_.kernel[1];
        return bit(h + walk_.tap[1]) | bit(d + walk_.tap[0]);
    }
    static __device__ __forceinline__ unsigned bit(int i) { return 1u << (i & 31); }

    // Of which taps a pixel reads padding; of all where there is no pixel, or are more taps than bits.
    __device__ __forceinline__ unsigned outside_of(const TilePixel& pixel) const {
        if (pixel.sample < 0 || phase_.kernel[0] + phase_.kernel[1] + phase_.kernel[2] > NEVER) return ~0u;
        unsigned outside = 1u << NEVER, tap = 1;
#pragma unroll 1
        for (int a = 2; a >= 0; --a) {
            int at = window_begin(pixel, a);
#pragma unroll 1
            for (int k = 0; k < phase_.kernel[a]; ++k, at += steps_.dilation[a], tap <<= 1)
                if ((unsigned)at >= (unsigned)steps_.size[a]) outside |= tap;
        }
        return outside;
    }

    // What the padding mode puts in the place of padding.
    __device__ __forceinline__ void map(int i, TapElements<T>& x) const {
        const Image& image = sources_.table[walk_.run.source].image;
        const TilePixel& pixel = pixels_[Share::pixel(i)];
        x.inside = pixel.sample >= 0 && !walk_.has_ended();
        x.at = channel_address(image, pixel.sample, walk_.block + walk_.channel);
#pragma unroll 1
        for (int a = 0; a < 3; ++a) {
            const int tap = a == 0 ? walk_.tap[0] : a == 1 ? walk_.tap[1] : walk_.tap[2];  // they stay in registers
            const int at = window_begin(pixel, a) + tap * steps_.dilation[a];
            const int in = int(padded_index(at, steps_.size[a], steps_.padding_mode));
            x.inside = x.inside && in >= 0;
            x.at += wide_product(in, int(image.stride[a] * (int)sizeof(T)));
        }
    }

    const Sources& sources_;
    const Steps& steps_;
    const Phase& phase_;
    const PlaceBits& bits_;
    const int c_first_;
    const int& channels_;  // in the parameters, where it takes no register
    const TilePixel* const pixels_;  // in shared memory

    KWalk<Share::SLAB, Share::K_CHUNK> walk_;
    int left_;    // slabs of the run
    int step_c_;  // bytes from one channel to the next
    int step_w_;  // and from one tap to the next along w
    unsigned row_;  // bits
    unsigned outside_[Share::PIXELS];
    long long at_[Share::PIXELS];
};

// ---- copies --------------------------------------------------------------------------------------------------------

// Whole K-chunks into a tile [pixel][k], asynchronously.
template <class T, class Tile, class Share>
class ChunkGather {
    // Of T only so that it is asked where the class is used.
    static_assert(!PROLOGUE || sizeof(T) == 0, "what is transformed passes through registers");
    static_assert(Share::APART % Tile::PERIOD == 0, "every pixel of a thread meets the same order of chunks");

public:
    static constexpr int SLAB = Share::SLAB, K_CHUNK = Share::K_CHUNK;

    using Cursor = TapCursor<T, Share>;
    __device__ ChunkGather(const Cursor& from, const Prologue&)
        : cursor_(from), to_(opaque(Tile::index(Share::pixel(0), Share::k_chunk(0) * K_CHUNK))) {}

    __device__ __forceinline__ void fetch(T* tile) {
        if (cursor_.is_mapped())
            copy<true, true>(tile + to_);
        else if (cursor_.has_neighbours())
            copy<false, true>(tile + to_);
        else
            copy<false, false>(tile + to_);
        cursor_.advance(Share::STEP);
        cursor_.end_slab();
    }

    __device__ __forceinline__ void store(T*) {}

private:
    template <bool MAPPED, bool THROUGH_L1> __device__ __forceinline__ void copy(T* to) const {
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) {
            const TapElements<T> x = cursor_.template elements<MAPPED>(i);
            copy_async<16, THROUGH_L1>(to + i * Share::APART * Tile::COLUMNS, x + 0, x.inside);
        }
    }

    Cursor cursor_;
    const int to_;  // where in the tile the thread's first K-chunk goes
};

// Elements into a tile [k][pixel].  Those of four bytes and more are copied asynchronously; smaller ones have no such
// instruction, and with a prologue none can be: they are HELD in registers between `fetch` and `store`.  Tiles hold
// transformed elements in their own type: of 16 bits they are rounded once more.
template <class T, class Tile, class Share>
class ElementGather {
    static constexpr bool HELD = sizeof(T) < 4 || PROLOGUE;
    static_assert(!HELD || Share::PIXELS == 1, "what is held is of one pixel");

public:
    static constexpr int SLAB = Share::SLAB, K_CHUNK = Share::K_CHUNK;

    using Cursor = TapCursor<T, Share>;
    __device__ ElementGather(const Cursor& from, const Prologue& prologue) : cursor_(from), prologue_(prologue) {}

    __device__ __forceinline__ void fetch(T* tile) {
        holds_ = HELD && cursor_.same_tap((Share::K_CHUNKS - 1) * APART);
        const bool same = cursor_.same_tap((Share::K_CHUNKS - 1) * APART);
#pragma unroll 1
        for (int k = 0; k < (same ? 1 : Share::K_CHUNKS); ++k) {
#pragma unroll
            for (int j = 0; j < Share::PIXELS; ++j) {
                const TapElements<T> x = elements(j);
                if (same) {
                    if constexpr (PROLOGUE) held_channel_ = cursor_.merged_channel();
                    held_count_ = x.count;
#pragma unroll
                    for (int i = 0; i < Share::K_CHUNKS; ++i) fetch_k_chunk<HELD>(tile, i, j, x, i * APART);
                } else {
                    fetch_k_chunk<false>(tile, k, j, x, 0);
                }
            }
            cursor_.advance(same ? Share::K_CHUNKS * Share::STEP : Share::STEP);
        }
        cursor_.end_slab();
    }

    __device__ __forceinline__ void store(T* tile) {
        if constexpr (HELD) {
            if (!holds_) return;
#pragma unroll
            for (int i = 0; i < Share::K_CHUNKS; ++i)
#pragma unroll
                for (int c = 0; c < K_CHUNK; ++c) {
                    const int further = i * APART + c;
                    if constexpr (PROLOGUE)
                        held_[i][c] =
                            further < held_count_ ? transformed_at(held_[i][c], held_channel_ + further) : T{};
                    tile[index(i, c, 0)] = held_[i][c];
                }
        }
    }

private:
    static constexpr int APART = Share::STEP * K_CHUNK;  // channels from one K-chunk of the thread's to its next

    // Where channel c of the thread's i-th K-chunk goes, of its j-th pixel.
    static __device__ __forceinline__ int index(int i, int c, int j) {
        return Tile::index(Share::k_chunk(i) * K_CHUNK + c, Share::pixel(j));
    }

    // An element of a merged channel as it enters the product.
    __device__ __forceinline__ T transformed_at(T x, int channel) const {
        if constexpr (PROLOGUE)
            return narrow<T>(transformed(widen(x), factors_of<Accumulator<T>>(prologue_, channel), prologue_));
        else
            return x;
    }

    __device__ __forceinline__ TapElements<T> elements(int j) const {
        return cursor_.is_mapped() ? cursor_.template elements<true>(j) : cursor_.template elements<false>(j);
    }

    // The thread's i-th K-chunk of this slab at its j-th pixel: elements x from `channel` on.
    template <bool HOLD>
    __device__ __forceinline__ void fetch_k_chunk(T* tile, int i, int j, const TapElements<T>& x, int channel) {
#pragma unroll
        for (int c = 0; c < K_CHUNK; ++c) {
            const bool exists = channel + c < x.count;
            const T* const from = x + (channel + c);
            if constexpr (HOLD)
                held_[i][c] = exists ? *from : T{};
            else if constexpr (HELD)
                tile[index(i, c, j)] = exists ? transformed_at(*from, cursor_.merged_channel() + channel + c) : T{};
            else
                copy_async<sizeof(T)>(&tile[index(i, c, j)], from, exists);
        }
    }

    Cursor cursor_;
    const Prologue& prologue_;
    bool holds_;
    int held_channel_, held_count_;  // of what is held, with a prologue: its first channel, and how many there are
    T held_[HELD ? Share::K_CHUNKS : 1][K_CHUNK];
};

// Pixels as they lie, of one tap and no padding: 16 bytes of one channel's into a tile [k][pixel], asynchronously.  A
// thread has the same pixels for the whole sum, and of each slab channels that are STEP apart.
template <class T, class Tile, int THREADS>
class PixelChunks {
    static constexpr int STEP = THREADS / Tile::CHUNKS, CHUNKS = Tile::ROWS / STEP;
    static_assert(STEP * Tile::CHUNKS == THREADS && CHUNKS * STEP == Tile::ROWS, "threads share a slab evenly");
    static_assert(Tile::CHUNKS >= 8 && (STEP & (STEP - 1)) == 0, "rows that are STEP apart differ in one exclusive or");
    static_assert(!PROLOGUE || sizeof(T) == 0, "what is transformed passes through registers");

public:
    static constexpr int SLAB = Tile::ROWS, K_CHUNK = 4;

    // Of the group that reads `channels` channels from c_first on, from slab number `slab` on.
    struct Cursor {
        const Sources& sources;
        const Steps& steps;
        const Phase& phase;
        const PlaceBits& bits;
        int c_first;
        const int& channels;
        const TilePixel* pixels;
        int slab;
    };

    __device__ PixelChunks(const Cursor& from, const Prologue&)
        : sources_(from.sources), bits_(from.bits), c_first_(from.c_first), channels_(from.channels),
          to_(opaque(Tile::index(threadIdx.x / Tile::CHUNKS, threadIdx.x % Tile::CHUNKS * Tile::CHUNK))) {
        const TilePixel& pixel = from.pixels[threadIdx.x % Tile::CHUNKS * Tile::CHUNK];
        sample_ = pixel.sample;
        place_ = pixel.place;
        next_run(from.slab);
    }

    __device__ __forceinline__ void fetch(T* tile) {
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            constexpr int PERIOD = Tile::PERIOD;
            const int to = (to_ ^ i * STEP % PERIOD * (8 / PERIOD) * Tile::CHUNK) + i * STEP * Tile::COLUMNS;
            copy_async<16>(tile + to, reinterpret_cast<const T*>(at_ + i * step_), i * STEP < left_in_run_);
        }
        at_ += CHUNKS * step_;
        left_in_run_ -= SLAB;
        if (--slabs_ == 0) next_run(0);
    }

    __device__ __forceinline__ void store(T*) {}

private:
    // To a slab of the runs to come.
    __device__ __forceinline__ void next_run(int slab) {
        slabs_ = 0x7fffffff;  // after the last run: nothing is fetched any more
        left_in_run_ = 0;
        do {
            if (!run_.next(sources_, c_first_, c_first_ + channels_, 1, K_CHUNK, SLAB)) return;
            slab -= run_.slabs;
        } while (slab >= 0);
        slabs_ = -slab;
        const int channel = (run_.slabs - slabs_) * SLAB + threadIdx.x / Tile::CHUNKS;
        if (sample_ >= 0) left_in_run_ = run_.channels - channel;
        const Image& image = sources_.table[run_.source].image;
        step_ = image.stride_c * (STEP * (int)sizeof(T));
        at_ = reinterpret_cast<const char*>(image.data) +
              image.at(max(sample_, 0), run_.first + channel, bits_.unpacked(place_)) * (int)sizeof(T);
    }

    const Sources& sources_;
    const PlaceBits& bits_;
    const int c_first_;
    const int& channels_;
    const int to_;  // where in the tile the thread's first chunk goes
    int sample_;    // -1 where there is no such pixel
    unsigned place_;
    Run run_;
    int slabs_, left_in_run_;  // of the run: slabs, and channels from the thread's first on
    const char* at_;
    long long step_;  // bytes from one of its channels to the next
};

// ---- by name -------------------------------------------------------------------------------------------------------

template <class T, class Tile, int THREADS, Direction DIRECTION, bool CHUNKED> struct GatherOf;
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_PIXELS, false> {
    using type = ElementGather<T, Tile, AlongPixels<T, Tile::COLUMNS, Tile::ROWS, THREADS>>;
};
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_CHANNELS, false> {
    using type = ElementGather<T, Tile, AlongChannels<T, Tile::COLUMNS, Tile::ROWS, THREADS>>;
};
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, PIXEL_CHUNKS, false> {
    using type = PixelChunks<T, Tile, THREADS>;
};
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_CHANNELS, true> {
    using type = ChunkGather<T, Tile, AlongChannels<T, Tile::ROWS, Tile::COLUMNS, THREADS>>;
};

}  // namespace cupyconv
