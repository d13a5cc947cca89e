// The image side of an implicit GEMM: one K-slab of columns, gathered straight from the inputs.
//
//     X[k, j] = x_s[n(j), c(k), window(p(j), t(k))]        k = (t, c) of one run    j = (n, p): pixels of all samples
//
// K comes in slabs, and a slab in K-chunks, channels of one tap (reduction.cuh).  A thread keeps its pixels for the
// whole sum, and of each slab takes the same K-chunks:
//
//     AlongPixels    neighbouring threads take neighbouring pixels of one K-chunk      any strides, coalesced for
//                                                                                      unit pixel stride
//     AlongChannels  neighbouring threads take neighbouring K-chunks of one pixel      for unit channel stride
//
// A TapCursor is where a thread has come to, and where that tap's elements lie.  Two classes copy what it points at:
//
//     ChunkGather    tiles [pixel][k], 16 bytes at a time: unit channel stride, K-chunks whole and aligned
//     ElementGather  tiles [k][pixel], element by element: any strides
//
// Both have `fetch`, which begins to copy the next slab, and `store`, which puts into the tile what `fetch` may still
// hold in registers; between the two the GEMM works on an earlier slab.
//
// Sizes, and strides but that of samples, are taken for int32.
#pragma once
#include "prologue.cuh"
#include "reduction.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// Where the window of an output pixel begins, before padding; sample -1 where there is no such pixel.
struct WindowOrigin {
    int sample, at[3];
};

// Pixel number j of all `pixels` of all samples.
__device__ __forceinline__ WindowOrigin origin_of(const Windows& windows, long long j, long long pixels) {
    if (j >= pixels) return {-1, {0, 0, 0}};
    const long long pixels_per_sample = product_of(windows.out);
    const Pixel out = pixel_at(j % pixels_per_sample, windows.out);
    WindowOrigin origin = {int(j / pixels_per_sample), {}};
#pragma unroll
    for (int a = 0; a < 3; ++a) origin.at[a] = int(out.at[a]) * windows.stride[a] - windows.before[a];
    return origin;
}

// The output pixel whose window begins there, where there is one.
__device__ __forceinline__ Pixel pixel_of(const Windows& windows, const WindowOrigin& origin) {
    Pixel out;
#pragma unroll
    for (int a = 0; a < 3; ++a) out.at[a] = (origin.at[a] + windows.before[a]) / windows.stride[a];
    return out;
}

// ---- how the threads of a block share a slab -----------------------------------------------------------------------

enum Direction { ALONG_PIXELS, ALONG_CHANNELS };

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

// ---- where a thread has come to ------------------------------------------------------------------------------------

// The thread's next K-chunk: its run, tap and channel; and where that tap lies for each of the thread's pixels, which
// is worked out when the tap or the input changes, not for every element.
template <class T, class Share>
class TapCursor {
public:
    // Of the group that reads channels c_first ... c_end - 1, from slab number `slab` on; a window origin for each of
    // the tile's pixels.
    __device__ TapCursor(
        const Sources& sources, const Windows& windows, int c_first, int c_end, const WindowOrigin* origins, int slab)
        : sources_(sources), windows_(windows), c_first_(c_first), c_end_(c_end),
          taps_(product_of(windows.kernel)), origins_(origins) {
        next_run();
        while (left_ <= slab) {
            slab -= left_;
            next_run();
        }
        left_ -= slab;
        advance(slab * (Share::SLAB / Share::K_CHUNK));
    }

    // A channel of the run's input.
    __device__ __forceinline__ int channel() const { return channel_; }

    // Counted through all inputs.
    __device__ __forceinline__ int merged(int channel) const {
        return sources_.table[run_.source].first + run_.first + channel;
    }

    // Whether the channel `further` on belongs to the same tap.
    __device__ __forceinline__ bool same_tap(int further) const { return channel_ + further < run_.padded; }

    // Before the elements of a tap are asked for.
    __device__ __forceinline__ void aim() {
        if (tap_ != aimed_) place();
    }

    // How many channels of the run there are at the thread's i-th pixel; none where the tap is on padding.
    __device__ __forceinline__ int channels(int i) const { return inside_[i] ? run_.channels : 0; }
    __device__ __forceinline__ bool exists(int i, int channel) const { return inside_[i] && channel < run_.channels; }

    // A channel there.  Counted in bytes, this is one multiplication and addition of 64 bits.
    __device__ __forceinline__ const T* element(int i, int channel) const {
        return reinterpret_cast<const T*>(at_[i] + wide_product(channel, step_c_));
    }

    // On by so many K-chunks: of this tap, and what is left over of the following ones.
    __device__ __forceinline__ void advance(int k_chunks) {
        channel_ += k_chunks * Share::K_CHUNK;
        for (; channel_ >= run_.padded; channel_ -= run_.padded) ++tap_;
    }

    // The thread's K-chunks of a slab are done, and `advance` has been told of them.
    __device__ __forceinline__ void end_slab() {
        if (--left_ == 0) next_run();
    }

private:
    __device__ void next_run() {
        left_ = 0x7fffffff;  // after the last run: nothing is fetched any more
        if (!run_.next(sources_, c_first_, c_end_, taps_, Share::K_CHUNK, Share::SLAB)) return;
        left_ = run_.slabs;
        step_c_ = int(sources_.table[run_.source].image.stride_c * (int)sizeof(T));
        tap_ = channel_ = 0;
        aimed_ = -1;
        advance(Share::k_chunk(0));
    }

    // Where this tap's window lies for each of the thread's pixels.
    __device__ __forceinline__ void place() {
        aimed_ = tap_;
        const Image& image = sources_.table[run_.source].image;
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) {
            const int sample = origins_[Share::pixel(i)].sample;
            inside_[i] = sample >= 0 && tap_ < taps_;
            at_[i] = static_cast<const char*>(image.data) +
                     (sample * image.stride_n + run_.first * image.stride_c) * (int)sizeof(T);
        }
        // The first axis with more than one place; divisions are long, and it needs none.
        const int outermost = !is_single(0) ? 0 : !is_single(1) ? 1 : 2;
        int rest = tap_;
#pragma unroll 1
        for (int a = 2; a >= outermost; --a) {  // w, h, d: the order in which a tap's number comes apart
            const int size = int(windows_.size[a]), step = int(image.stride[a] * (int)sizeof(T));
            int offset = rest;
            if (a > outermost) {
                rest /= windows_.kernel[a];
                offset -= rest * windows_.kernel[a];
            }
            offset *= windows_.dilation[a];
#pragma unroll
            for (int i = 0; i < Share::PIXELS; ++i) {
                int at = origins_[Share::pixel(i)].at[a] + offset;
                if ((unsigned)at >= (unsigned)size) at = int(padded_index(at, size, windows_.padding_mode));
                inside_[i] = inside_[i] && at >= 0;
                at_[i] += at * (long long)step;
            }
        }
    }

    // Whether along an axis all there is is one tap of one window, on element 0.
    __device__ __forceinline__ bool is_single(int a) const {
        return windows_.kernel[a] == 1 && windows_.out[a] == 1 && windows_.before[a] == 0;
    }

    const Sources& sources_;
    const Windows& windows_;
    const int c_first_, c_end_, taps_;
    const WindowOrigin* const origins_;  // in shared memory: read when the tap changes

    Run run_;
    int left_;           // slabs of the run
    int tap_, channel_;  // of the thread's next K-chunk
    int aimed_;          // the tap that the following are for
    int step_c_;         // bytes from one channel to the next: strides are below 2^28 elements
    const char* at_[Share::PIXELS];
    bool inside_[Share::PIXELS];
};

// ---- copies --------------------------------------------------------------------------------------------------------

// Whole K-chunks into a tile [pixel][k], asynchronously.
template <class T, class Tile, class Share>
class ChunkGather {
    // Of T only so that it is asked where the class is used.
    static_assert(!PROLOGUE || sizeof(T) == 0, "what is transformed passes through registers");

public:
    static constexpr int SLAB = Share::SLAB, K_CHUNK = Share::K_CHUNK;

    using Cursor = TapCursor<T, Share>;
    __device__ ChunkGather(const Cursor& from, const Prologue&) : cursor_(from) {}

    __device__ __forceinline__ void fetch(T* tile) {
        cursor_.aim();
        const int channel = cursor_.channel();
#pragma unroll
        for (int i = 0; i < Share::PIXELS; ++i) {
            T* const to = &tile[Tile::index(Share::pixel(i), Share::k_chunk(0) * K_CHUNK)];
            copy_async<16>(to, cursor_.element(i, channel), cursor_.exists(i, channel));
        }
        cursor_.advance(Share::STEP);
        cursor_.end_slab();
    }

    __device__ __forceinline__ void store(T*) {}

private:
    Cursor cursor_;
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
        cursor_.aim();
        const bool one_tap = cursor_.same_tap((Share::K_CHUNKS - 1) * APART);
        holds_ = HELD && one_tap;
        if constexpr (PROLOGUE) {
            held_channel_ = cursor_.merged(cursor_.channel());
            held_count_ = cursor_.channels(0) - cursor_.channel();
        }
        if (one_tap) {  // as nearly always
            const int channel = cursor_.channel();
#pragma unroll
            for (int i = 0; i < Share::K_CHUNKS; ++i) fetch_k_chunk<HELD>(tile, i, channel + i * APART);
            cursor_.advance(Share::K_CHUNKS * Share::STEP);
        } else {
#pragma unroll 1
            for (int i = 0; i < Share::K_CHUNKS; ++i) {
                cursor_.aim();
                fetch_k_chunk<false>(tile, i, cursor_.channel());
                cursor_.advance(Share::STEP);
            }
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

    // The thread's i-th K-chunk of this slab, from `channel` on, of all its pixels.
    template <bool HOLD>
    __device__ __forceinline__ void fetch_k_chunk(T* tile, int i, int channel) {
#pragma unroll
        for (int j = 0; j < Share::PIXELS; ++j) {
#pragma unroll
            for (int c = 0; c < K_CHUNK; ++c) {
                const bool exists = cursor_.exists(j, channel + c);
                const T* const x = cursor_.element(j, channel + c);
                if constexpr (HOLD)
                    held_[i][c] = exists ? *x : T{};
                else if constexpr (HELD)
                    tile[index(i, c, j)] = exists ? transformed_at(*x, cursor_.merged(channel + c)) : T{};
                else
                    copy_async<sizeof(T)>(&tile[index(i, c, j)], x, exists);
            }
        }
    }

    Cursor cursor_;
    const Prologue& prologue_;
    bool holds_;
    int held_channel_, held_count_;  // of what is held, with a prologue: its first channel, and how many there are
    T held_[HELD ? Share::K_CHUNKS : 1][K_CHUNK];
};

// ---- by name -------------------------------------------------------------------------------------------------------

template <class T, class Tile, int THREADS, Direction DIRECTION, bool CHUNKED> struct GatherOf;
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_PIXELS, false> {
    using type = ElementGather<T, Tile, AlongPixels<T, Tile::COLUMNS, Tile::ROWS, THREADS>>;
};
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_CHANNELS, false> {
    using type = ElementGather<T, Tile, AlongChannels<T, Tile::COLUMNS, Tile::ROWS, THREADS>>;
};
template <class T, class Tile, int THREADS> struct GatherOf<T, Tile, THREADS, ALONG_CHANNELS, true> {
    using type = ChunkGather<T, Tile, AlongChannels<T, Tile::ROWS, Tile::COLUMNS, THREADS>>;
};

}  // namespace cupyconv
