// Fused merge: a 1x1 convolution over the concatenation of many inputs that is never built.
//
//     y[n, o, p] = activation( sum_s sum_c weight[o, first_s + c] * x_s[n, c, p] + bias[o] + residual[n, o, p] )
//
//     M = o (outputs)    N = p (pixels)    K = (s, c) (channels of all inputs)
//
//                        pixels ->   one thread: WIDTH pixels, 16 bytes
//     x_0  c ↓  [.............####.............]      every input element is read once per tile of
//     x_1  c ↓  [.............####.............]      TILE outputs, every output written once
//     ...                       |
//     y    o ↓  [.............####.............]      TILE x WIDTH sums in registers
//
// The walk over the channels goes through all inputs as through one, and loads DEPTH channels before it uses the
// first: inputs of one channel keep as many bytes in flight as one input of many.  A thread's pixels are
//
//     VECTOR = WIDTH   neighbours, moved by one access            ####............
//     VECTOR = 1       32 apart, so that a warp's accesses are    #...#...#...#...
//                      whole lines where rows are not aligned
//
// Weights of the tile lie in shared memory as [TILE][K], as in the array, so that a warp reads DEPTH of an
// output's at once, all lanes the same.  Blocks of one share of pixels follow each other, tile by tile: the
// second and later ones find the inputs in L2.
//
// Bound by memory while K * M / (K + M) <= 16.  Floor: (K + M) * N elements over the bandwidth.
//
// -D: DTYPE (storage type), TILE (outputs per thread), VECTOR (elements that an access moves: 16 bytes of T, or 1),
//     PROLOGUE (1: inputs are transformed, in registers, see prologue.cuh; once for each tile of outputs)
#include "epilogue.cuh"
#include "prologue.cuh"

namespace cupyconv {

// One input: its pixels have unit stride.
struct MergeSource {
    const void* data;
    long long stride_n, stride_c;
    int channels;  // at least 1
};

// As many as fit beside the rest in the 4 KiB that every driver accepts.
constexpr int MAX_MERGED = 120;

struct MergeParams {
    MergeSource sources[MAX_MERGED];
    const void* weight;
    long long weight_stride_o, weight_stride_c;
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    long long batch, pixels;
    int in_channels, out_channels;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int BLOCK = 128;
constexpr int WIDTH = 16 / sizeof(T);
constexpr int DEPTH = 4;
constexpr int SUM_WORDS = TILE * WIDTH * sizeof(A) / 4;
// Blocks that a multiprocessor has registers for: sums, and what is loaded ahead of them.
constexpr int BLOCKS = VECTOR == 1 && TILE * WIDTH >= (sizeof(A) == 8 ? 32 : 128) ? 2 : SUM_WORDS >= 64 ? 3 : 4;
constexpr int APART = VECTOR == 1 ? WARP : 1;                // from one of a thread's pixels to the next
constexpr int SHARED = sizeof(T) == 2 ? 2 : 16 / sizeof(A);  // weights per shared-memory access

// Of a thread's pixels, `count` lie within the row.  Vectors have unit stride.
__device__ __forceinline__ Vector<T, WIDTH> load_pixels(const T* from, int count, long long stride = 1) {
    if constexpr (VECTOR > 1) {
        return load_vector<WIDTH>(from);
    } else {
        Vector<T, WIDTH> x;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x.lane[i] = i < count ? from[i * APART * stride] : T{};
        return x;
    }
}

// The channels of one thread's pixels, in the order of the concatenation.
struct ChannelWalk {
    const MergeSource* ahead;  // the input after the one that the walk is in
    const T* next;
    long long stride;
    int left;  // channels of this input

    __device__ __forceinline__ void enter(long long n, long long p) {
        next = static_cast<const T*>(ahead->data) + n * ahead->stride_n + p;
        stride = ahead->stride_c;
        left = ahead->channels;
        ++ahead;
    }

    __device__ __forceinline__ Vector<T, WIDTH> load(int count) {
        const T* const from = next;
        next += stride;
        --left;
        return load_pixels(from, count);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) merge(const __grid_constant__ MergeParams params) {
    const int tiles = (params.out_channels + TILE - 1) / TILE, o_first = blockIdx.x % tiles * TILE;
    const int outputs = min(TILE, params.out_channels - o_first);
    const int depth = (params.in_channels + DEPTH - 1) / DEPTH * DEPTH;  // K; channels beyond the last weigh 0

    DYNAMIC_SHARED(A, weight);  // [TILE][depth], then one bias per output, then a prologue's factors of each channel
    for (int j = threadIdx.x / WARP; j < TILE; j += blockDim.x / WARP) {
        const T* const w_j = static_cast<const T*>(params.weight) + (o_first + j) * params.weight_stride_o;
        for (int c = threadIdx.x % WARP; c < depth; c += WARP) {
            const bool inside = j < outputs && c < params.in_channels;
            weight[j * depth + c] = inside ? widen(w_j[c * params.weight_stride_c]) : A(0);
        }
        if (threadIdx.x % WARP == 0)
            weight[TILE * depth + j] = j < outputs ? bias_of<T>(params.epilogue, o_first + j) : A(0);
    }
    Factors<A>* const factors = reinterpret_cast<Factors<A>*>(weight + TILE * (depth + 1));
    if constexpr (PROLOGUE)
        for (int c = threadIdx.x; c < params.in_channels; c += blockDim.x)
            factors[c] = factors_of<A>(params.prologue, c);
    __syncthreads();

    constexpr int CHUNK = WARP * WIDTH;  // pixels of a warp
    const long long shares_per_row = VECTOR == 1 ? (params.pixels + CHUNK - 1) / CHUNK * WARP : params.pixels / WIDTH;
    const long long q = blockIdx.x / tiles * (long long)BLOCK + threadIdx.x;
    const long long n = q / shares_per_row, r = q % shares_per_row;
    if (n >= params.batch) return;
    const long long p = VECTOR == 1 ? r / WARP * CHUNK + r % WARP : r * WIDTH;
    const int count = VECTOR == 1 ? min((params.pixels - p + WARP - 1) / WARP, (long long)WIDTH) : WIDTH;

    A sum[TILE][WIDTH];
#pragma unroll
    for (int j = 0; j < TILE; ++j) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[j][i] = weight[TILE * depth + j];
    }
    ChannelWalk channels{params.sources};
    for (int k = 0; k < depth; k += DEPTH) {
        Vector<T, WIDTH> x[DEPTH];
        if (channels.left == 0) channels.enter(n, p);
        if (channels.left >= DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) x[d] = channels.load(count);
        } else {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const bool exists = k + d < params.in_channels;
                if (exists && channels.left == 0) channels.enter(n, p);
                x[d] = exists ? channels.load(count) : Vector<T, WIDTH>{};
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d += SHARED) {
            A value[SHARED][WIDTH];
#pragma unroll
            for (int e = 0; e < SHARED; ++e) {
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) value[e][i] = widen(x[d + e].lane[i]);
                if constexpr (PROLOGUE)
                    if (k + d + e < params.in_channels) transform(value[e], factors[k + d + e], params.prologue);
            }
#pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const Vector<A, SHARED> w = load_vector<SHARED>(weight + j * depth + k + d);
#pragma unroll
                for (int e = 0; e < SHARED; ++e) {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) add_product(sum[j][i], value[e][i], w.lane[e]);
                }
            }
        }
    }

    const Image& out = params.out;
    const Image& residual = params.epilogue.residual;
    T* y_o = static_cast<T*>(out.data) + n * out.stride_n + o_first * out.stride_c + p;
    const T* r_o = static_cast<const T*>(residual.data) + n * residual.stride_n +
                   o_first * residual.stride_c + p * residual.stride[2];
#pragma unroll
    for (int j = 0; j < TILE; ++j, y_o += out.stride_c, r_o += residual.stride_c) {
        if (j == outputs) break;
        if (residual.data) {
            const Vector<T, WIDTH> r = load_pixels(r_o, count, residual.stride[2]);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum[j][i] += widen(r.lane[i]);
        }
        activation_of<T>(params.epilogue).apply(sum[j]);
        Vector<T, WIDTH> y;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) y.lane[i] = narrow<T>(sum[j][i]);
        if constexpr (VECTOR > 1) {
            store_vector<WIDTH>(y_o, y);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < count) y_o[i * APART] = y.lane[i];
        }
    }
}
