// The image side of an implicit GEMM: one K-block of columns, gathered straight from the inputs.
//
//     X[k, j] = x_s[n(j), c(k), window(p(j), t(k))]        k = (t, c) of one run    j = (n, p): pixels of all samples
//
// Every thread keeps the same pixels for the whole sum, and of each block the same granules.  Where its window
// lies is worked out when the tap or the input changes, not for every element.  Two ways to share the work out:
//
//     along pixels     neighbouring threads take neighbouring pixels of one channel    any strides, coalesced
//                                                                                      for unit pixel stride
//     along channels   neighbouring threads take neighbouring granules of one pixel    for unit channel stride
//
// A tile is [k][pixel], filled element by element, or [pixel][k], filled by 16-byte chunks: then channels
// have unit stride, and chunks are whole and aligned.
//
// Elements of four bytes and more are copied asynchronously; smaller ones have no such instruction, and with a
// prologue none can be: they are held in registers between `fetch` and `store`, while the GEMM works on an earlier
// block.  Tiles hold transformed elements in their own type: of 16 bits they are rounded once more.
//
// Sizes, and strides but that of samples, are taken for int32.
#pragma once
#include "prologue.cuh"
#include "reduction.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// Where the window of an output pixel begins, before padding; sample -1 where there is no such pixel.
struct Corner {
    int sample, at[3];
};

// Pixel number j of all `pixels` of all samples.
__device__ __forceinline__ Corner corner_of(const Windows& windows, long long j, long long pixels) {
    if (j >= pixels) return {-1, {0, 0, 0}};
    const long long a_sample = windows.out[0] * windows.out[1] * windows.out[2];
    const Pixel out = pixel_at(j % a_sample, windows.out);
    Corner corner = {int(j / a_sample), {}};
#pragma unroll
    for (int a = 0; a < 3; ++a) corner.at[a] = int(out.at[a]) * windows.stride[a] - windows.before[a];
    return corner;
}

// The output pixel that a corner belongs to, where there is one.
__device__ __forceinline__ Pixel pixel_of(const Windows& windows, const Corner& corner) {
    Pixel out;
#pragma unroll
    for (int a = 0; a < 3; ++a) out.at[a] = (corner.at[a] + windows.before[a]) / windows.stride[a];
    return out;
}

enum Direction { ALONG_PIXELS, ALONG_CHANNELS };

template <class T, class Tile, int THREADS, Direction DIRECTION, bool CHUNKED>
class Gather {
    static constexpr bool OVER_CHANNELS = DIRECTION == ALONG_CHANNELS;
    static constexpr int PIXELS = CHUNKED ? Tile::ROWS : Tile::COLUMNS;
    static constexpr int GRANULE_ = OVER_CHANNELS ? 16 / sizeof(T) : 4;
    static constexpr int BLOCK_ = CHUNKED ? Tile::COLUMNS : Tile::ROWS;
    static constexpr int GRANULES = BLOCK_ / GRANULE_;
    static constexpr bool HELD = !CHUNKED && (sizeof(T) < 4 || PROLOGUE);
    static_assert(HELD || !PROLOGUE, "what is transformed passes through registers");
    static_assert(!HELD || !OVER_CHANNELS, "what is held is of one pixel");
    // A thread's share of a block: so many of its pixels, and of each so many granules.
    static constexpr int ITS_PIXELS = OVER_CHANNELS ? PIXELS * GRANULES / THREADS : 1;
    static constexpr int ITS_GRANULES = OVER_CHANNELS ? 1 : PIXELS * GRANULES / THREADS;
    static_assert(OVER_CHANNELS ? THREADS % GRANULES == 0 : THREADS % PIXELS == 0, "threads share a block evenly");

public:
    static constexpr int GRANULE = GRANULE_, BLOCK = BLOCK_;

    // The group that reads channels c_first ... c_end - 1, from K-block `block` on; a corner for each of the tile's pixels.
    __device__ Gather(
        const Sources& sources, const Windows& windows, const Prologue& prologue, int c_first, int c_end,
        const Corner* corners, int block)
        : sources_(sources), windows_(windows), prologue_(prologue), c_first_(c_first), c_end_(c_end),
          taps_(windows.kernel[0] * windows.kernel[1] * windows.kernel[2]), corners_(corners) {
        next_run();
        while (left_ <= block) {
            block -= left_;
            next_run();
        }
        left_ -= block;
        advance(block * GRANULES);
    }

    // Copy the next block into `tile`, or begin to.
    __device__ __forceinline__ void fetch(T* tile) {
        constexpr int LAST = (ITS_GRANULES - 1) * STEP * GRANULE;
        if (tap_ != placed_) place();
        holds_ = HELD && channel_ + LAST < run_.padded;
        if constexpr (PROLOGUE) {
            held_channel_ = merged(channel_);
            held_count_ = inside_[0] ? run_.channels - channel_ : 0;
        }
        if (channel_ + LAST < run_.padded) {  // all of one tap, as nearly always
#pragma unroll
            for (int i = 0; i < ITS_GRANULES; ++i) fetch_granule<HELD>(tile, i, channel_ + i * STEP * GRANULE);
            advance(ITS_GRANULES * STEP);
        } else {
#pragma unroll 1
            for (int i = 0; i < ITS_GRANULES; ++i) {
                if (tap_ != placed_) place();
                fetch_granule<false>(tile, i, channel_);
                advance(STEP);
            }
        }
        if (--left_ == 0) next_run();
    }

    // Put into `tile` what the last `fetch` still holds.
    __device__ __forceinline__ void store(T* tile) {
        if constexpr (HELD) {
            if (!holds_) return;
#pragma unroll
            for (int i = 0; i < ITS_GRANULES; ++i)
#pragma unroll
                for (int c = 0; c < GRANULE; ++c) {
                    const int k = i * STEP * GRANULE + c;
                    if constexpr (PROLOGUE)
                        held_[i][c] = k < held_count_ ? loaded(held_[i][c], held_channel_ + k) : T{};
                    tile[Tile::index(row(i) + c, pixel(0))] = held_[i][c];
                }
        }
    }

private:
    static constexpr int STEP = OVER_CHANNELS ? GRANULES : THREADS / PIXELS;  // from one of its granules to the next

    // The tile's pixel that is the thread's i-th, and the first row of k of its i-th granule.
    static __device__ __forceinline__ int pixel(int i) {
        return OVER_CHANNELS ? threadIdx.x / GRANULES + i * (THREADS / GRANULES) : threadIdx.x % PIXELS;
    }
    static __device__ __forceinline__ int first_granule() {
        return OVER_CHANNELS ? threadIdx.x % GRANULES : threadIdx.x / PIXELS;
    }
    static __device__ __forceinline__ int row(int i) { return (first_granule() + i * STEP) * GRANULE; }

    // A channel of this run, counted through all inputs.
    __device__ __forceinline__ int merged(int channel) const {
        return sources_.table[run_.source].first + run_.first + channel;
    }

    // An element of the inputs as it enters the product.
    __device__ __forceinline__ T loaded(T x, int channel) const {
        if constexpr (PROLOGUE)
            return narrow<T>(transformed(widen(x), factors_of<Accumulator<T>>(prologue_, channel), prologue_));
        else
            return x;
    }

    // Where a channel of the thread's j-th pixel lies: by bytes, one multiplication and addition of 64 bits.
    __device__ __forceinline__ const T* element(int j, int channel) const {
        return reinterpret_cast<const T*>(at_[j] + wide_product(channel, step_c_));
    }

    // The thread's i-th granule of this block, from channel `channel` on, of all its pixels.
    template <bool HOLD>
    __device__ __forceinline__ void fetch_granule(T* tile, int i, int channel) {
#pragma unroll
        for (int j = 0; j < ITS_PIXELS; ++j) {
            if constexpr (CHUNKED) {
                copy_async<16>(
                    &tile[Tile::index(pixel(j), row(i))], element(j, channel), inside_[j] && channel < run_.channels);
            } else {
#pragma unroll
                for (int c = 0; c < GRANULE; ++c) {
                    const bool valid = inside_[j] && channel + c < run_.channels;
                    const T* const x = element(j, channel + c);
                    if constexpr (HOLD)
                        held_[i][c] = valid ? *x : T{};
                    else if constexpr (HELD)
                        tile[Tile::index(row(i) + c, pixel(j))] = valid ? loaded(*x, merged(channel + c)) : T{};
                    else
                        copy_async<sizeof(T)>(&tile[Tile::index(row(i) + c, pixel(j))], x, valid);
                }
            }
        }
    }

    __device__ void next_run() {
        left_ = 0x7fffffff;  // after the last run: nothing is fetched any more
        if (!run_.next(sources_, c_first_, c_end_, taps_, GRANULE, BLOCK)) return;
        left_ = run_.blocks;
        step_c_ = int(sources_.table[run_.source].image.stride_c * (int)sizeof(T));
        tap_ = channel_ = 0;
        placed_ = -1;
        advance(first_granule());
    }

    // On by so many granules: of this tap, and what is left over of the following ones.
    __device__ __forceinline__ void advance(int granules) {
        channel_ += granules * GRANULE;
        for (; channel_ >= run_.padded; channel_ -= run_.padded) ++tap_;
    }

    // Where this tap's window lies for each of the thread's pixels.
    __device__ __forceinline__ void place() {
        placed_ = tap_;
        const Image& image = sources_.table[run_.source].image;
#pragma unroll
        for (int i = 0; i < ITS_PIXELS; ++i) {
            const int sample = corners_[pixel(i)].sample;
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
            for (int i = 0; i < ITS_PIXELS; ++i) {
                int at = corners_[pixel(i)].at[a] + offset;
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
    const Prologue& prologue_;
    const int c_first_, c_end_, taps_;
    const Corner* const corners_;  // in shared memory: read when the tap changes

    Run run_;
    int left_;           // blocks of the run
    int tap_, channel_;  // of the thread's next granule
    int placed_;         // the tap that the following are for
    int step_c_;         // bytes from one channel to the next: strides are below 2^28 elements
    const char* at_[ITS_PIXELS];
    bool inside_[ITS_PIXELS];
    bool holds_;
    int held_channel_, held_count_;  // of what is held, with a prologue: its first channel, and how many there are
    T held_[HELD ? ITS_GRANULES : 1][GRANULE];
};

}  // namespace cupyconv
