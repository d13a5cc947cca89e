// The gradient of a convolution's weight as a GEMM over pixels: no columns, any list of channels-last inputs.
//
//     sums[part, o, t, c] = sum over the part's (n, p) of  grad[n, o, p] * x_s[n, c, window(p, t)]
//
//     M = o (outputs of a group)    N = (t, c) (taps, and channels of a group)    K = (n, p) (pixels), cut into parts
//
//                         N ->                    one block: a TILE_M x TILE_N part of one group's sums over one part
//                 x   K [K-slab]  ...             of the pixels, K-slab by K-slab through shared memory, in a
//                     ↓ +------+                  pipeline of STAGES stages
//     grad   K ->       |      |
//     M    [K-slab]'... | w  w |                  w: a warp's part, sums in registers
//     ↓                 +------+
//
// A row of either matrix is a pixel, with contiguous outputs or channels, and tiles in shared memory have the same
// order.  A row is copied 16 bytes at a time, and fragments are loaded transposed.  A thread copies the same 16 bytes
// of pixel after pixel.  In x these belong to one tap, which shifts the whole image by a constant.  Off the image there
// are zeros, or the elements that the padding mode repeats.
//
// The sums of a part are stored as they are.  The epilogue kernel adds the parts in a fixed order: no atomics.
//
// Bound by arithmetic for many outputs and channels.  Floor: 2 * M * N * K operations over the rate of the arithmetic;
// `grad` and x once over the bandwidth.  A block reads the two edges of its tile from L2 for each K-slab.  The sums are
// written and read once.
//
// -D: DTYPE (storage type), ARITHMETIC (one of warp_tile.cuh), TILE_M and TILE_N (of a tile: 64 x 128 or 128 x 128)
#include "image.cuh"
#include "warp_tile.cuh"

namespace cupyconv {

struct ImplicitWeightGradientParams {
    Sources sources;
    Windows windows;
    const void* grad;         // pixels of all samples in one row, with contiguous outputs
    long long pixel_stride;   // elements from one pixel of `grad` to the next
    void* sums;               // (parts, outputs, taps, group_channels) in C order, in the accumulator's type
    long long plane;          // elements of a part
    int pixels;               // of all samples
    int pixels_per_part;      // a multiple of SLAB
    int groups, group_channels, group_outputs;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using Arithmetic = ArithmeticOf<T, ARITHMETIC, TILE_M, TILE_N, true>::type;
using GradTile = Arithmetic::WeightTile;
using ImageTile = Arithmetic::template ImageTile<false>;

constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32, STAGES = 4;
constexpr int WARPS_DOWN = TILE_M / WARP_ROWS, THREADS = WARPS_DOWN * (TILE_N / WARP_COLUMNS) * WARP;
constexpr int SLAB = Arithmetic::K, CHUNK = GradTile::CHUNK;  // pixels of a K-slab; elements that are copied together

struct Stage {
    T grad[GradTile::ELEMENTS], x[ImageTile::ELEMENTS];
};

// How threads share a tile: each has one chunk of every APART-th pixel.
template <class Tile>
struct TileShare {
    static constexpr int APART = THREADS / Tile::CHUNKS, PIXELS = Tile::ROWS / APART;
    static_assert(APART * PIXELS == Tile::ROWS && (APART & (APART - 1)) == 0, "threads share a tile evenly");
    static __device__ __forceinline__ int pixel() { return threadIdx.x / Tile::CHUNKS; }
    static __device__ __forceinline__ int column() { return threadIdx.x % Tile::CHUNKS * CHUNK; }
    static __device__ __forceinline__ int place() { return Tile::index(pixel(), column()); }
    // Tile index of the thread's i-th pixel, from that of its first.  The order of the chunks is an exclusive or by the
    // row, and the row of the first pixel has no bits in common with i * APART.
    static __device__ __forceinline__ int place(int first, int i) {
        const int rows = i * APART * Tile::COLUMNS, turn = Tile::index(i * APART, 0) - rows;
        return (first ^ turn) + rows;
    }
};

// Copies a thread's part of the gradient, slab after slab of pixels.
class GradChunks {
    using Its = TileShare<GradTile>;

public:
    __device__ __forceinline__ GradChunks(const ImplicitWeightGradientParams& params, int group, int m, int first)
        : step_(Its::APART * params.pixel_stride), to_(opaque(Its::place())) {
        m += Its::column();
        m = min(m, params.group_outputs - CHUNK);  // sums of outputs that do not exist are not stored
        from_ = static_cast<const T*>(params.grad) + group * (long long)params.group_outputs + m +
                (first + Its::pixel()) * params.pixel_stride;
    }

    // Copy the next slab, of which `left` pixels exist.
    __device__ __forceinline__ void fetch(T* tile, int left) {
#pragma unroll
        for (int i = 0; i < Its::PIXELS; ++i, from_ += step_)
            copy_async<16>(tile + Its::place(to_, i), from_, Its::pixel() + i * Its::APART < left);
    }

private:
    const T* from_;
    const long long step_;
    const int to_;
};

// Copies a thread's part of the inputs: a chunk of channels of one input, at one tap of each window.
//
//     window's row   |  n, d, h  |     its address, and whether it is on the image, are computed once per row
//     along it          w -> w + APART strides
class TapChunks {
    using Its = TileShare<ImageTile>;

public:
    __device__ __forceinline__ TapChunks(const ImplicitWeightGradientParams& params, int group, int column, int first)
        : sources_(params.sources), windows_(params.windows), to_(opaque(Its::place())) {
        column += Its::column();
        column = min(column, params.group_channels * product_of(windows_.kernel) - CHUNK);  // as for outputs
        const int t = column / params.group_channels, c = group * params.group_channels + column % params.group_channels;
        source_ = 0;
        while (source_ + 1 < sources_.count && c >= sources_.table[source_ + 1].first) ++source_;
        const Source& source = sources_.table[source_];
        data_ = static_cast<const T*>(source.image.data) + (c - source.first);
        step_w_ = step(2);

        int tap[3];
        tap_at(t, windows_.kernel, tap);
#pragma unroll
        for (int a = 0; a < 3; ++a) offset_[a] = tap[a] * windows_.dilation[a] - windows_.before[a];
        unsigned p = first + Its::pixel();
        w_ = p % out(2);
        p /= out(2);
        h_ = p % out(1);
        p /= out(1);
        d_ = p % out(0);
        n_ = p / out(0);
        w_ = w_ * windows_.stride[2] + offset_[2];
        begin_row();
    }

    __device__ __forceinline__ void fetch(T* tile, int left) {
#pragma unroll
        for (int i = 0; i < Its::PIXELS; ++i) {
            int w = w_;
            const bool inside = find(w, 2) && on_image_ && Its::pixel() + i * Its::APART < left;
            const void* const from = reinterpret_cast<const void*>(row_ + wide_product(w, step_w_));
            // Through L1: neighbouring taps read the same bytes again, shifted.
            copy_async<16, true>(tile + Its::place(to_, i), from, inside);
            advance();
        }
    }

private:
    // Replace an index of the padded image by the index in the image; false if the element is a zero.
    __device__ __forceinline__ bool find(int& index, int a) const {
        if ((unsigned)index < (unsigned)windows_.size[a]) return true;
        if (windows_.padding_mode == CONSTANT) return false;
        index = padded_index(index, windows_.size[a], windows_.padding_mode);
        return true;
    }

    // Advance by APART pixels.
    __device__ __forceinline__ void advance() {
        const int width = out(2) * windows_.stride[2];
        w_ += Its::APART * windows_.stride[2];
        if (w_ - offset_[2] < width) return;
        do {
            w_ -= width;
            if (++h_ < out(1)) continue;
            h_ = 0;
            if (++d_ < out(0)) continue;
            d_ = 0;
            ++n_;
        } while (w_ - offset_[2] >= width);
        begin_row();
    }

    // Compute the address of the window's row at w = 0.
    __device__ __forceinline__ void begin_row() {
        const Image& image = sources_.table[source_].image;
        on_image_ = true;
        row_ = reinterpret_cast<long long>(data_) + n_ * image.stride_n * (int)sizeof(T);
#pragma unroll
        for (int a = 0; a < 2; ++a) {
            int i = (a == 0 ? d_ : h_) * windows_.stride[a] + offset_[a];
            on_image_ = find(i, a) && on_image_;
            row_ += wide_product(i, step(a));
        }
    }

    __device__ __forceinline__ int step(int a) const { return sources_.table[source_].image.stride[a] * (int)sizeof(T); }
    __device__ __forceinline__ int out(int a) const { return windows_.out[a]; }

    const Sources& sources_;
    const Windows& windows_;
    const int to_;
    const T* data_;  // the chunk at pixel 0 of sample 0
    int source_, step_w_;
    int offset_[3];      // of the tap in a window, minus the padding before the image
    int n_, d_, h_, w_;  // the window of the next pixel; w_ is the tap's position along w
    long long row_;      // an address; arbitrary if not `on_image_`
    bool on_image_;
};

// Blocks per multiprocessor, so that one block works while another waits: as many as the registers of the sums allow.
// A sum needs two registers if slabs are added separately, or if it is a double.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MIN_BLOCKS = 1;  // 64 KiB of shared memory hold no more
#else
constexpr bool TWO_REGISTERS = ARITHMETIC == TF32X3 || sizeof(DTYPE) == 8;
constexpr int MIN_BLOCKS = (THREADS == 256 ? 2 : 3) - TWO_REGISTERS;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_weight_gradient(const __grid_constant__ ImplicitWeightGradientParams params) {
    DYNAMIC_SHARED(Stage, stage);

    // Consecutive blocks read the same pixels, which they find in the L2 cache.
    const int columns = params.group_channels * product_of(params.windows.kernel);
    const int tiles_m = (params.group_outputs + TILE_M - 1) / TILE_M, tiles_n = (columns + TILE_N - 1) / TILE_N;
    const int m_first = blockIdx.x % tiles_m * TILE_M, n_first = blockIdx.x / tiles_m % tiles_n * TILE_N;
    const int g = blockIdx.x / tiles_m / tiles_n;
    const int first = blockIdx.y * params.pixels_per_part, end = first + min(params.pixels_per_part, params.pixels - first);
    const int slabs = (end - first + SLAB - 1) / SLAB;

    GradChunks grad(params, g, m_first, first);
    TapChunks x(params, g, n_first, first);

    const int warp_m = warp_index() % WARPS_DOWN * WARP_ROWS, warp_n = warp_index() / WARPS_DOWN * WARP_COLUMNS;
    Arithmetic::template WarpTile<WARP_ROWS, WARP_COLUMNS, false> tile(warp_m, warp_n);
    int at = 0;  // stage of slab i - 1, which the next copies overwrite
#pragma unroll 1
    for (int i = 1 - STAGES; i < slabs; ++i) {
        if (i >= 0) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // all copies of slab i have arrived, and slab i - 1 has been used
        }
        if (i + STAGES - 1 < slabs) {
            const int left = end - first - (i + STAGES - 1) * SLAB;
            grad.fetch(stage[at].grad, left);
            x.fetch(stage[at].x, left);
        }
        commit_copies();
        at = at == STAGES - 1 ? 0 : at + 1;
        if (i >= 0) tile.multiply(stage[at].grad, stage[at].x);
    }

    const int rows = params.group_outputs - m_first - warp_m, width = columns - n_first - warp_n;  // of the warp's part
    Arithmetic::Sum* const sums = static_cast<Arithmetic::Sum*>(params.sums) + blockIdx.y * params.plane +
                                  (g * (long long)params.group_outputs + m_first + warp_m) * columns + n_first + warp_n;
    tile.for_each([&](int m, int j, Arithmetic::Sum sum) {
        if (m < rows && j < width) sums[(long long)m * columns + j] = sum;
    });
}
