// The image side of an implicit GEMM: it gathers one K-slab of columns at a time, straight from the inputs.
//
//     X[k, j] = x_s[n(j), c(k), window(p(j), t(k))]    k = (block, t, c) of one run    j = (n, p): pixels of all samples
//
// K is cut into slabs, and a slab into K-chunks: a few channels of one tap (reduction.cuh).  A thread keeps its pixels
// for the whole sum, and it copies the same K-chunks of every slab:
//
//     AlongPixels    neighbouring threads gather neighbouring pixels of one K-chunk     any strides; coalesced for
//                                                                                       unit pixel stride
//     AlongChannels  neighbouring threads gather neighbouring K-chunks of one pixel     unit channel stride
//
//     PixelChunks    a thread copies 16 bytes of neighbouring pixels of one channel     one tap, contiguous pixels
//
// The first two serve as the `Share` of three layers.  Each layer builds on the one above it:
//
//     KWalk                        the thread's position in K: run, block of channels, tap, channel
//     TapCursor                    the address of that position for each of the thread's pixels, or that it is padding
//     ChunkGather, ElementGather   the copies: of 16 bytes into tiles [pixel][k], if channels have unit stride and
//                                  K-chunks are whole and aligned; or of elements into tiles [k][pixel]
//
// A gather has two functions.  `fetch` starts to copy the next slab.  `store` writes to the tile what `fetch` may still
// hold in registers.  Between the two calls the GEMM multiplies an earlier slab.
//
// Sizes and strides are assumed to fit in int32, except the strides between samples.
#pragma once
#include "prologue.cuh"
#include "reduction.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// ---- convolutions of a grid ----------------------------------------------------------------------------------------

// Parameters that all convolutions of a grid share.
struct Steps {
    long long size[3];
    int stride[3], dilation[3];
    int padding_mode;
    int is_mapped;  // the index map is needed: padding is not zeros, or there are more taps than bits (TapCursor)
};

// One convolution of a grid.  All of them read the same inputs, and their results are interleaved, as the phases of a
// transposed convolution are (polyphase.py).  Most grids have one.
struct Phase {
    long long first_element;  // offset of its first element in the result, in elements
    int out[3];      // size of its result
    int kernel[3], before[3];  // `before` is negative if windows begin inside the image
    int first_slab;  // its first slab in the packed weight of a group

    __device__ __forceinline__ long long pixels() const { return (long long)out[0] * out[1] * out[2]; }
};

// ---- output pixels -------------------------------------------------------------------------------------------------

// An output pixel in 8 bytes.  Its indices are bit fields of one word, so that no division is needed to unpack them.
struct TilePixel {
    int sample;      // -1 if there is no such pixel
    unsigned place;  // d << shift_d | h << shift_h | w
};

struct PlaceBits {
    int shift_d, shift_h;  // 32 if no bits are used above

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

// Pixel number `j` of all samples together, of which there are `pixels`.
__device__ __forceinline__ TilePixel tile_pixel(const Phase& phase, const PlaceBits& bits, long long j, long long pixels) {
    if (j >= pixels) return {-1, 0};
    const long long pixels_per_sample = phase.pixels();
    return {int(j / pixels_per_sample), bits.packed(pixel_at(j % pixels_per_sample, phase.out))};
}

// ---- how the threads of a block share a slab -----------------------------------------------------------------------

enum Direction { ALONG_PIXELS, ALONG_CHANNELS, PIXEL_CHUNKS };

// A thread gathers one pixel, and K-chunks of it that are STEP apart.
template <class T, int SLAB_PIXELS, int SLAB_, int THREADS>
struct AlongPixels {
    static constexpr int SLAB = SLAB_, K_CHUNK = 4;
    static constexpr int PIXELS = 1, STEP = THREADS / SLAB_PIXELS, K_CHUNKS = SLAB / K_CHUNK / STEP;
    static_assert(STEP * SLAB_PIXELS == THREADS && K_CHUNKS * STEP * K_CHUNK == SLAB, "threads share a slab evenly");
    static __device__ __forceinline__ int pixel(int) { return threadIdx.x % SLAB_PIXELS; }
    static __device__ __forceinline__ int k_chunk(int i) { return threadIdx.x / SLAB_PIXELS + i * STEP; }
};

// A thread gathers one K-chunk of 16 bytes of several pixels.  Its next K-chunk is in the next slab.
template <class T, int SLAB_PIXELS, int SLAB_, int THREADS>
struct AlongChannels {
    static constexpr int SLAB = SLAB_, K_CHUNK = 16 / sizeof(T);
    static constexpr int K_CHUNKS = 1, STEP = SLAB / K_CHUNK, APART = THREADS / STEP, PIXELS = SLAB_PIXELS / APART;
    static_assert(APART * STEP == THREADS && PIXELS * APART == SLAB_PIXELS, "threads share a slab evenly");
    static __device__ __forceinline__ int pixel(int i) { return threadIdx.x / STEP + i * APART; }
    static __device__ __forceinline__ int k_chunk(int) { return threadIdx.x % STEP; }
};

// ---- the position of a thread in K ---------------------------------------------------------------------------------

// The position consists of counters only, so that no step needs a division.
template <int SLAB, int K_CHUNK>
struct KWalk {
    Run run;
    int block, channel;  // first channel of the block in the run; channel within the block
    int tap[3];

    // Go to the start of the next run of the group that reads channels c_first ... c_end - 1.  Returns false after the
    // last.
    __device__ __forceinline__ bool next_run(
        const Sources& sources, const Phase& phase, int c_first, int c_end) {
        if (!run.next(sources, c_first, c_end, product_of(phase.kernel), K_CHUNK, SLAB)) return false;
        channel = tap[0] = tap[1] = tap[2] = 0;
        begin_block(0, phase);
        return true;
    }

    // Skip whole blocks from the start of a run: with several taps, each tap of a whole block fills one slab.  Returns
    // how many of `slabs` remain to be skipped.
    __device__ __forceinline__ int skip_blocks(int slabs, const Phase& phase) {
        const int taps = product_of(phase.kernel), blocks = taps > 1 ? min(slabs / taps, padded() / SLAB) : 0;
        begin_block(blocks * SLAB, phase);
        return slabs - blocks * taps;
    }

    // Whether the channel that is `further` channels ahead belongs to a later tap.
    __device__ __forceinline__ bool is_past_tap(int further = 0) const { return channel + further >= channels_; }

    // Go to the next tap of the row.  Returns false if there is none.
    __device__ __forceinline__ bool next_in_row(const Phase& phase) {
        if (tap[2] + 1 == phase.kernel[2]) return false;
        ++tap[2];
        channel -= channels_;
        return true;
    }

    // Go to the first tap of the next row.  Returns the axis whose tap index grew; those of later axes restart at 0.
    // Returns -1 if the next row is the first row of the next block.  The block after the last one never ends.
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

    // The run's channels, rounded up to whole K-chunks.  They are recomputed, so that they occupy no register.
    __device__ __forceinline__ int padded() const { return (run.channels + K_CHUNK - 1) / K_CHUNK * K_CHUNK; }

    __device__ __forceinline__ void begin_block(int first, const Phase& phase) {
        block = first;
        channels_ = block_channels(phase.kernel, padded() - first, SLAB);
        if (channels_ <= 0) channels_ = NO_END;
    }

    int channels_;  // channels of the block, or NO_END after the last block
};

// ---- the address of that position ----------------------------------------------------------------------------------

// Elements of consecutive channels at one pixel.
template <class T>
struct TapElements {
    long long at;  // an address; arbitrary if not `inside`
    int step_c;    // bytes from one channel to the next: strides are below 2^28 elements
    int count;     // channels that exist from here on
    bool inside;   // false for padding and for pixels that do not exist: `count` is 0

    // Because strides are in bytes, this is one multiplication and one 64-bit addition.
    __device__ __forceinline__ const T* operator+(int channel) const {
        return reinterpret_cast<const T*>(at + wide_product(channel, step_c));
    }
};

// The address of the thread's next K-chunk at each of its pixels.  A step from tap to tap moves all of them by the same
// number of bytes, on and off the image.  Which taps are off the image is determined once per pixel, for each axis by
// itself, and stored as bits:
//
//     bits    | d d | h h h | w w w |     outside_: the taps at which a pixel reads padding     one tap: three bits
//
// An element outside is zero or, with the other padding modes, an element elsewhere that an index map finds.
template <class T, class Share>
class TapCursor {
public:
    // Start at slab number `slab` of the group that reads `channels` channels from `c_first` on.  `pixels` has an entry
    // for each pixel of the tile.
    __device__ TapCursor(
        const Sources& sources, const Steps& steps, const Phase& phase, const PlaceBits& bits, int c_first,
        const int& channels, const TilePixel* pixels, int slab)
        : sources_(sources), steps_(steps), phase_(phase), bits_(bits), c_first_(c_first), channels_(channels),
          pixels_(pixels) {
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) outside_[i] = outside_of(pixels_[Share::pixel(i)]);
        next_run(slab);
    }

    // The first channel of the next K-chunk, counted through all inputs.
    __device__ __forceinline__ int merged_channel() const {
        return max(c_first_, sources_.table[walk_.run.source].first) + walk_.block + walk_.channel;
    }

    // Whether the channel that is `further` channels ahead belongs to the same tap.
    __device__ __forceinline__ bool same_tap(int further) const { return !walk_.is_past_tap(further); }

    // Whether a neighbouring pixel reads the same elements through the next tap.
    __device__ __forceinline__ bool has_neighbours() const { return phase_.kernel[2] > 1; }

    // Whether elements that are outside need the index map.
    __device__ __forceinline__ bool is_mapped() const { return steps_.is_mapped; }

    // The elements at the thread's i-th pixel, from the first channel of the next K-chunk on.
    template <bool MAPPED> __device__ __forceinline__ TapElements<T> elements(int i) const {
        TapElements<T> x = {at_[i], step_c_, 0, (outside_[i] & (row_ | bit(walk_.tap[2]))) == 0};
        if (MAPPED && !x.inside) map(i, x);
        x.count = x.inside ? walk_.run.channels - walk_.block - walk_.channel : 0;
        return x;
    }

    // Advance by `k_chunks` K-chunks: to the end of this tap, then into the taps that follow.
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

    // Called when `advance` has passed all of the thread's K-chunks of a slab.
    __device__ __forceinline__ void end_slab() {
        if (--left_ == 0) next_run(0);
    }

private:
    static constexpr int NEVER = 31;  // this bit stands for no tap and is set for every pixel

    // Go to the thread's first K-chunk of slab number `slab`, counted from the start of the next run.
    __device__ __forceinline__ void next_run(int slab) {
        left_ = 0x7fffffff;  // after the last run nothing is fetched
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

    // The position along an axis where a pixel's window begins; negative in the padding.
    __device__ __forceinline__ int window_begin(const TilePixel& pixel, int a) const {
        return bits_.index(pixel.place, a) * steps_.stride[a] - phase_.before[a];
    }

    // The address of a channel at pixel 0 of a sample.
    __device__ __forceinline__ long long channel_address(const Image& image, int sample, int channel) const {
        return reinterpret_cast<long long>(image.data) +
               (sample * image.stride_n + (first_channel() + channel) * image.stride_c) * (int)sizeof(T);
    }

    // The first channel of the run in its input.  It is recomputed, so that it occupies no register.
    __device__ __forceinline__ int first_channel() const {
        return max(0, c_first_ - sources_.table[walk_.run.source].first);
    }

    // Bytes from one tap to the next along an axis.
    __device__ __forceinline__ int step(int a) const {
        return int(sources_.table[walk_.run.source].image.stride[a]) * steps_.dilation[a] * (int)sizeof(T);
    }

    // Bytes from the last tap of a row to the first tap of the row that `KWalk` has moved to: the next row along
    // `axis`, or, for -1, the first row of the next block.  Values read from the parameters would save 12 of about 58
    // instructions per new row.  But they differ between inputs and between phases, and the 4,096 bytes of parameters
    // have no space for so many values.
    __device__ __forceinline__ long long bytes_to_row(int axis) const {
        long long bytes = axis < 0 ? wide_product(Share::SLAB, step_c_) : step(axis);
        bytes -= wide_product(phase_.kernel[2] - 1, step_w_);
#pragma unroll 1
        for (int a = 1; a > axis; --a) bytes -= wide_product(phase_.kernel[a] - 1, step(a));
        return bytes;
    }

    // The bits of the current tap along d and h; `elements` adds the bit along w.
    __device__ __forceinline__ unsigned row_bits() const {
        if (walk_.has_ended()) return 1u << NEVER;
        const int h = phase_.kernel[2], d = h + phase_.kernel[1];
        return bit(h + walk_.tap[1]) | bit(d + walk_.tap[0]);
    }
    static __device__ __forceinline__ unsigned bit(int i) { return 1u << (i & 31); }

    // The bits of the taps at which a pixel reads padding.  All bits are set if there is no pixel, or if there are more
    // taps than bits.
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

    // Replace `x` by the element that the index map of the padding mode finds.
    __device__ __forceinline__ void map(int i, TapElements<T>& x) const {
        const Image& image = sources_.table[walk_.run.source].image;
        const TilePixel& pixel = pixels_[Share::pixel(i)];
        x.inside = pixel.sample >= 0 && !walk_.has_ended();
        x.at = channel_address(image, pixel.sample, walk_.block + walk_.channel);
#pragma unroll 1
        for (int a = 0; a < 3; ++a) {
            const int tap = a == 0 ? walk_.tap[0] : a == 1 ? walk_.tap[1] : walk_.tap[2];  // keeps them in registers
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
    const int& channels_;  // refers to the parameters, so that it occupies no register
    const TilePixel* const pixels_;  // in shared memory

    KWalk<Share::SLAB, Share::K_CHUNK> walk_;
    int left_;    // slabs of the run that remain
    int step_c_;  // bytes from one channel to the next
    int step_w_;  // bytes from one tap to the next along w
    unsigned row_;  // row_bits() of the current tap
    unsigned outside_[Share::PIXELS];
    long long at_[Share::PIXELS];
};

// ---- copies --------------------------------------------------------------------------------------------------------

// Copies whole K-chunks into a tile [pixel][k], asynchronously.
template <class T, class Tile, class Share>
class ChunkGather {
    // The condition depends on T, so that it is checked only if the class is used.
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
    const int to_;  // index in the tile of the thread's first K-chunk
};

// Copies elements into a tile [k][pixel].  Elements of four bytes and more are copied asynchronously.  No instruction
// copies smaller ones that way, and none can apply a prologue: such elements are HELD in registers between `fetch` and
// `store`, if a thread's K-chunks of a slab belong to one tap.  A tile holds transformed elements in the storage type,
// so 16-bit elements are rounded once more.
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
    static constexpr int APART = Share::STEP * K_CHUNK;  // channels from one K-chunk of the thread to its next

    // The index in the tile of channel c of the thread's i-th K-chunk, at its j-th pixel.
    static __device__ __forceinline__ int index(int i, int c, int j) {
        return Tile::index(Share::k_chunk(i) * K_CHUNK + c, Share::pixel(j));
    }

    // An element of a merged channel after the prologue.
    __device__ __forceinline__ T transformed_at(T x, int channel) const {
        if constexpr (PROLOGUE)
            return narrow<T>(transformed(widen(x), factors_of<Accumulator<T>>(prologue_, channel), prologue_));
        else
            return x;
    }

    __device__ __forceinline__ TapElements<T> elements(int j) const {
        return cursor_.is_mapped() ? cursor_.template elements<true>(j) : cursor_.template elements<false>(j);
    }

    // Fetch the thread's i-th K-chunk of this slab at its j-th pixel: the elements of `x` from `channel` on.
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
    int held_channel_, held_count_;  // with a prologue: first merged channel and number of channels of `held_`
    T held_[HELD ? Share::K_CHUNKS : 1][K_CHUNK];
};

// Copies 16 bytes of neighbouring pixels of one channel into a tile [k][pixel], asynchronously.  It is for a kernel of
// one tap, no padding, and inputs with contiguous pixels.  A thread copies the same pixels for the whole sum, and
// channels that are STEP apart in each slab.
template <class T, class Tile, int THREADS>
class PixelChunks {
    static constexpr int STEP = THREADS / Tile::CHUNKS, CHUNKS = Tile::ROWS / STEP;
    static_assert(STEP * Tile::CHUNKS == THREADS && CHUNKS * STEP == Tile::ROWS, "threads share a slab evenly");
    static_assert(Tile::CHUNKS >= 8 && (STEP & (STEP - 1)) == 0, "rows that are STEP apart differ in one exclusive or");
    static_assert(!PROLOGUE || sizeof(T) == 0, "what is transformed passes through registers");

public:
    static constexpr int SLAB = Tile::ROWS, K_CHUNK = 4;

    // Where to start: at slab number `slab` of the group that reads `channels` channels from `c_first` on.
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
    // Go to slab number `slab`, counted from the start of the next run.
    __device__ __forceinline__ void next_run(int slab) {
        slabs_ = 0x7fffffff;  // after the last run nothing is fetched
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
    const int to_;  // index in the tile of the thread's first chunk
    int sample_;    // -1 if there is no such pixel
    unsigned place_;
    Run run_;
    int slabs_, left_in_run_;  // of the run: remaining slabs, and channels from the thread's first on
    const char* at_;
    long long step_;  // bytes from one of the thread's channels to its next
};

// ---- choice of a gather --------------------------------------------------------------------------------------------

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
