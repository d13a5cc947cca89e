// A convolution over a tile of an image in shared memory.  Windows are read in place, without columns.
//
//     sum[m, p] += sum_{t, k}  weight[t, m, k] * tile[base(p) + offset(t), k]
//
//     tile       pixel 0   [k k k k .. k | . .]      CHUNK contiguous channels of a pixel, 64 bytes, and 16 bytes of
//                pixel 1   [k k k k .. k | . .]      padding, so that neighbouring pixels are in different banks: eight
//                 ...                                are read at once without conflict, 16 bytes of each
//
//     base(p)    the pixel of the tile where the window of p begins; offset(t): pixels from there to tap t
//
// Only `base` and `offset` depend on stride and dilation.  Warps share the pixels in small groups, so that a tile of
// fewer pixels skips whole groups.  Rows (m) are skipped likewise.
#pragma once
#include "image.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

namespace cupyconv {

constexpr int TILE_THREADS = 256, TILE_WARPS = TILE_THREADS / WARP;

template <class T>
struct WindowTile {
    static constexpr int CHUNK = 64 / sizeof(T), PITCH = 80 / sizeof(T), VECTOR = 16 / sizeof(T);
};

// A box of pixels, numbered along w first.
struct Box {
    int size[3];
    __device__ __forceinline__ int pixels() const { return product_of(size); }
    __device__ __forceinline__ void at(int pixel, int (&place)[3]) const { tap_at(pixel, size, place); }
};

// The pixel of `inner` where the window of `pixel` of `outer` begins.
__device__ __forceinline__ int window_base(int pixel, const Box& outer, const Box& inner, const int (&stride)[3]) {
    int at[3];
    outer.at(pixel, at);
    return (at[0] * stride[0] * inner.size[1] + at[1] * stride[1]) * inner.size[2] + at[2] * stride[2];
}

// Calls f(t, offset) for each tap of the windows in `inner`, `offset` in pixels.
template <class F> __device__ __forceinline__ void for_each_tap(const Windows& windows, const Box& inner, F f) {
    int t = 0;
#pragma unroll 1
    for (int i = 0; i < windows.kernel[0]; ++i)
#pragma unroll 1
        for (int j = 0; j < windows.kernel[1]; ++j) {
            int offset = (i * windows.dilation[0] * inner.size[1] + j * windows.dilation[1]) * inner.size[2];
#pragma unroll 1
            for (int k = 0; k < windows.kernel[2]; ++k, ++t, offset += windows.dilation[2]) f(t, offset);
        }
}

// ---- dense: every channel with every other, ROWS x PIXELS sums per block in registers ------------------------------

// On CUDA cores.  A lane has every eighth pixel and every fourth vector of rows of its warp.
template <class T, int ROWS_, int PIXELS>
class TileSums {
    using Tile = WindowTile<T>;
    static constexpr int VECTOR = Tile::VECTOR, ITS_ROWS = ROWS_ / 4;

public:
    static constexpr int ROWS = ROWS_, STEP = VECTOR;   // channels per step: `depth` is a multiple of it
    static constexpr int WEIGHTS = Tile::CHUNK * ROWS;  // elements per tap
    static __device__ __forceinline__ int weight_index(int m, int k) { return k * ROWS + m; }

    // Set every sum of row m to start(m).
    template <class F> __device__ __forceinline__ void begin(F start) {
        const int lane = opaque(lane_index());
#pragma unroll
        for (int i = 0; i < ITS_ROWS; ++i) {
            const T value = start(row(i, lane));
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) sum_[i][j] = value;
        }
    }

    // Called before the products: looks up where the windows of the lane's pixels begin, in a table of PIXELS entries.
    __device__ __forceinline__ void aim(const int* base, int pixels) {
        const int lane = opaque(lane_index());
        groups_ = (pixels + GROUP - 1) / GROUP;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) at_[j] = base[pixel(j, lane)] * Tile::PITCH;
    }

    // Accumulate one tap.  `tile` begins at the tap's offset, and `depth` of its channels take part.
    __device__ __forceinline__ void multiply(const T* tile, const T* weight, int rows, int depth) {
        const int lane = lane_index();
#pragma unroll 1
        for (int k = 0; k < depth; k += STEP) {
            Vector<T, VECTOR> x[GROUPS];
#pragma unroll
            for (int j = 0; j < GROUPS; ++j)
                if (j < groups_) x[j] = load_vector<VECTOR>(tile + at_[j] + k);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
#pragma unroll
                for (int i = 0; i < ITS_ROWS; i += VECTOR) {
                    if (i * 4 >= rows) break;
                    const Vector<T, VECTOR> w = load_vector<VECTOR>(weight + weight_index(row(i, lane), k + e));
#pragma unroll
                    for (int j = 0; j < GROUPS; ++j)
                        if (j < groups_)
#pragma unroll
                            for (int r = 0; r < VECTOR; ++r) add_product(sum_[i + r][j], w.lane[r], x[j].lane[e]);
                }
        }
    }

    // Calls f(m, pixel, sum), which may change the sum.
    template <class F> __device__ __forceinline__ void for_each(F f) {
        const int lane = opaque(lane_index());
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            if (j < groups_)
#pragma unroll
                for (int i = 0; i < ITS_ROWS; ++i) f(row(i, lane), pixel(j, lane), sum_[i][j]);
    }

    template <class Activation> __device__ __forceinline__ void apply(const Activation& activation) {
#pragma unroll
        for (int i = 0; i < ITS_ROWS; ++i) activation.apply(sum_[i]);
    }

    // Round the sums into a tile of `pixels` pixels, as its channels.  Zero is stored where keep(m, pixel) is false.
    template <class F> __device__ __forceinline__ void leave(T* tile, int pixels, F keep) const {
        const int lane = opaque(lane_index());
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            if (pixel(j, lane) < pixels)
#pragma unroll
                for (int i = 0; i < ITS_ROWS; i += VECTOR) {
                    Vector<T, VECTOR> vector;
#pragma unroll
                    for (int r = 0; r < VECTOR; ++r)
                        vector.lane[r] = keep(row(i, lane) + r, pixel(j, lane)) ? sum_[i + r][j] : T(0);
                    *reinterpret_cast<Vector<T, VECTOR>*>(tile + pixel(j, lane) * Tile::PITCH + row(i, lane)) = vector;
                }
    }

private:
    static constexpr int GROUP = TILE_WARPS * 8, GROUPS = PIXELS / GROUP;
    static_assert(GROUPS * GROUP == PIXELS && ITS_ROWS % VECTOR == 0, "lanes share the sums evenly");

    static __device__ __forceinline__ int pixel(int j, int lane) {
        return (j * TILE_WARPS + warp_index()) * 8 + lane % 8;
    }
    static __device__ __forceinline__ int row(int i, int lane) {
        return (i / VECTOR * 4 + lane / 8) * VECTOR + i % VECTOR;
    }

    T sum_[ITS_ROWS][GROUPS];
    int at_[GROUPS], groups_;
};

// On tensor cores.  A warp multiplies 16 rows by 16 pixels at a time, with fragments loaded straight from the tile.
// float32 is rounded to TF32 as it is loaded, or split (tf32_split.cuh): then each tap is summed separately.
template <class T, int ARITHMETIC_KIND, int ROWS_, int PIXELS>
class MatrixTileSums {
    using Tile = WindowTile<T>;

public:
    static constexpr int ROWS = ROWS_, STEP = 32 / sizeof(T);  // channels per instruction
    static constexpr int WEIGHTS = ROWS * Tile::PITCH;
    static __device__ __forceinline__ int weight_index(int m, int k) { return m * Tile::PITCH + k; }

    template <class F> __device__ __forceinline__ void begin(F start) {
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) {
            const int row = i * 16 + opaque(lane_index()) / 4;
            const float value[2] = {start(row), start(row + 8)};
#pragma unroll
            for (int j = 0; j < GROUPS * 2; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum_[i][j][e] = value[e / 2];
        }
    }

    __device__ __forceinline__ void aim(const int* base, int pixels) {
        const int lane = opaque(lane_index());
        groups_ = (pixels + GROUP - 1) / GROUP;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
            at_[j] = base[first_pixel(j) + lane % 8 + lane / 16 * 8] * Tile::PITCH + lane / 8 % 2 * (STEP / 2);
    }

    __device__ __forceinline__ void multiply(const T* tile, const T* weight, int rows, int depth) {
        if constexpr (ARITHMETIC_KIND == TF32X3) {
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) {  // 16 rows at a time: registers hold their sums twice
                if (i * 16 >= rows) break;
                add_apart<1>(sum_ + i, [&](auto checked, auto& partial) {
                    add_split_products<decltype(checked)::value>(
                        partial, tile, weight + weight_index(i * 16, 0), depth);
                });
            }
        } else {
            add_products(sum_, tile, weight, rows, depth);
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) {
        const int lane = opaque(lane_index()), row = lane / 4, column = lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < GROUPS * 2; ++j)
            if (j / 2 < groups_)
#pragma unroll
                for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        f(i * 16 + row + e / 2 * 8, first_pixel(j / 2) + j % 2 * 8 + column + e % 2, sum_[i][j][e]);
    }

    template <class Activation> __device__ __forceinline__ void apply(const Activation& activation) {
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < GROUPS * 2; ++j) activation.apply(sum_[i][j]);
    }

    template <class F> __device__ __forceinline__ void leave(T* tile, int pixels, F keep) {
        for_each([&](int m, int pixel, float sum) {
            if (pixel < pixels) tile[pixel * Tile::PITCH + m] = narrow<T>(keep(m, pixel) ? sum : 0);
        });
    }

private:
    static constexpr int GROUP = TILE_WARPS * 16, GROUPS = PIXELS / GROUP;
    static_assert(GROUPS * GROUP == PIXELS && ROWS % 16 == 0, "warps share the sums evenly");

    using Tag = OperandTag<T>;

    static __device__ __forceinline__ int first_pixel(int j) { return (j * TILE_WARPS + warp_index()) * 16; }

    // A fragment as the instruction reads it: rounded if it has to be TF32.
    template <int COUNT> struct Fragment {
        unsigned bits[COUNT];

        __device__ __forceinline__ void take(const unsigned (&loaded)[COUNT]) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if constexpr (ARITHMETIC_KIND == TF32)
                    bits[i] = round_to_tf32(loaded[i]);
                else
                    bits[i] = loaded[i];
            }
        }
    };

    __device__ __forceinline__ void add_products(
        float (*sum)[GROUPS * 2][4], const T* tile, const T* weight, int rows, int depth) const {
        const T* const a_row = weight + weight_index(lane_index() % 16, lane_index() / 16 * (STEP / 2));
#pragma unroll 1
        for (int k = 0; k < depth; k += STEP) {
            Fragment<2> b[GROUPS][2];
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                if (j >= groups_) continue;
                unsigned four[4];
                load_matrices(four, tile + at_[j] + k);
#pragma unroll
                for (int c = 0; c < 2; ++c) b[j][c].take({four[2 * c], four[2 * c + 1]});
            }
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) {
                if (i * 16 >= rows) break;
                unsigned four[4];
                load_matrices(four, a_row + weight_index(i * 16, k));
                Fragment<4> a;
                a.take(four);
#pragma unroll
                for (int j = 0; j < GROUPS; ++j)
                    if (j < groups_)
#pragma unroll
                        for (int c = 0; c < 2; ++c) multiply_add<Tag>(sum[i][2 * j + c], a.bits, b[j][c].bits);
            }
        }
    }

    // Accumulate 16 rows.  Registers hold the split parts of one group of pixels at a time, which is all they allow.
    template <bool CHECKED>
    __device__ __forceinline__ void add_split_products(
        float (*sum)[GROUPS * 2][4], const T* tile, const T* weight, int depth) const {
        const T* const a_row = weight + weight_index(lane_index() % 16, lane_index() / 16 * (STEP / 2));
#pragma unroll 1
        for (int k = 0; k < depth; k += STEP) {
            unsigned four[4];
            load_matrices(four, a_row + k);
            SplitFragment<CHECKED, 4> a;
            a.take(four);
#pragma unroll
            for (int j = 0; j < GROUPS; ++j) {
                if (j >= groups_) break;
                load_matrices(four, tile + at_[j] + k);
                SplitFragment<CHECKED, 2> b[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) b[c].take({four[2 * c], four[2 * c + 1]});
#pragma unroll
                for (int p = 0; p < a.PRODUCTS; ++p)
#pragma unroll
                    for (int c = 0; c < 2; ++c) multiply_add<tf32>(sum[0][2 * j + c], a.part(p), b[c].part(p));
            }
        }
    }

    float sum_[ROWS / 16][GROUPS * 2][4];
    int at_[GROUPS], groups_;
};

template <class T, int ARITHMETIC_KIND, int ROWS, int PIXELS> struct TileSumsOf {
    using type = MatrixTileSums<T, ARITHMETIC_KIND, ROWS, PIXELS>;
};
template <class T, int ROWS, int PIXELS> struct TileSumsOf<T, FMA, ROWS, PIXELS> {
    using type = TileSums<T, ROWS, PIXELS>;
};

// ---- depthwise: every channel by itself ----------------------------------------------------------------------------

// Calls f(pixel, k, sums) for each pixel and each vector of channels, k ... k + VECTOR - 1.  `weight` is [t][k].
template <class T, class F>
__device__ __forceinline__ void convolve_each(
    const T* tile, const Accumulator<T>* weight, const Windows& windows, const Box& inner, const int* base, int pixels,
    int channels, F f) {
    using Tile = WindowTile<T>;
    constexpr int VECTOR = Tile::VECTOR;
    const int rows = (pixels + WARP - 1) / WARP * WARP;  // neighbouring threads process neighbouring pixels
#pragma unroll 1
    for (int u = threadIdx.x; u < (channels + VECTOR - 1) / VECTOR * rows; u += TILE_THREADS) {
        const int k = u / rows * VECTOR, pixel = u % rows;
        if (pixel >= pixels) continue;
        const T* const window = tile + base[pixel] * Tile::PITCH + k;
        Accumulator<T> sum[VECTOR] = {};
        for_each_tap(windows, inner, [&](int t, int offset) {
            const auto x = load_vector<VECTOR>(window + offset * Tile::PITCH);
            const auto w = gather_vector<VECTOR>(weight + t * Tile::CHUNK + k, 1, true);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) add_product(sum[e], widen(x.lane[e]), w.lane[e]);
        });
        f(pixel, k, sum);
    }
}

}  // namespace cupyconv
