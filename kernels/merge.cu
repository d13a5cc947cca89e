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
//     VECTOR = 1       LANES apart, so that a warp's accesses     #...#...#...#...
//                      are neighbours where rows are not aligned
//
// Types of 16 bits are multiplied on tensor cores.  There four threads share their pixels: each loads four channels of
// a slab of 16, has a fourth of the sums, and its vectors are operands as they lie, since pixels may be in any order
// within a product and channels in any that the weight has too:
//
//     of a warp        8 vectors of pixels         operand A: pixel 2 j of row r of the warp's vectors     (m = r)
//     channels 0-3     0 4  8 ...  (lanes)                    pixel 2 j + 1                                (m = r + 8)
//     channels 4-7     1 5  9 ...                  operand B: the weight of channel 4 w + e at k = 2 w + e % 2 + 8 (e / 2)
//     channels 8-11    2 6 10 ...                  sums:      two outputs of each eight, all pixels of the thread
//     channels 12-15   3 7 11 ...
//
// Blocks stay, as many as the GPU has room for, and go from pixels to pixels: what comes before the first load, the
// weights on their way to shared memory and the barrier behind them, is done once.  The first channels are loaded before
// that.  The weights of a tile lie in shared memory, [TILE][K] as in the array.  Blocks of one share of pixels follow
// each other, tile by tile: all but one of them find the inputs in L2.
//
// Bound by memory while K * M / (K + M) <= 16.  Floor: (K + M) * N elements over the bandwidth.  Memory is kept busy by
// BLOCKS * BLOCK * DEPTH * 16 bytes on their way to a multiprocessor: 48 KiB of float64 to 4 outputs, where 4.8 TB/s that
// come 700 ns after they were asked for are 25 KB for each of 132.
//
// -D: DTYPE (storage type), TILE (outputs of a block), VECTOR (elements that an access moves: 16 bytes of T, or 1),
//     BLOCKS (that share a multiprocessor; planning launches as many),
//     PROLOGUE (1: inputs are transformed, in registers, see prologue.cuh; once for each tile of outputs)
#include "epilogue.cuh"
#include "prologue.cuh"
#include "tensor_core.cuh"

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
    long long shares;         // of a sample's pixels, a thread's
    int step_n, step_share;  // from one that a thread has to its next
    int in_channels, out_channels;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int BLOCK = 128;
constexpr int WIDTH = 16 / sizeof(T);
constexpr int DEPTH = 4;
constexpr bool ON_TENSOR_CORES = sizeof(T) == 2;
constexpr int LANES = ON_TENSOR_CORES ? 8 : WARP, SHARING = WARP / LANES;  // that have pixels of their own; that share them
constexpr int SLAB = DEPTH * SHARING, OUTPUTS = TILE / SHARING;  // channels of a warp at a time; outputs of a thread
constexpr int APART = VECTOR == 1 ? LANES : 1;                   // from one of a thread's pixels to the next
constexpr int SHARED = 16 / sizeof(A);                           // weights per shared-memory access
constexpr int GAP = ON_TENSOR_CORES ? 8 : 0;                     // between rows of weights: ldmatrix without conflicts

using Slab = Vector<T, WIDTH>[DEPTH];
using Sums = A[OUTPUTS][WIDTH];

// The pixels of all samples, in shares of a thread, and those that a thread goes through.
struct PixelWalk {
    long long n, share;  // of the sample

    __device__ __forceinline__ PixelWalk(const MergeParams& params, int block) {
        const long long first = block * (long long)(BLOCK / SHARING) + threadIdx.x / SHARING;
        n = first / params.shares, share = first % params.shares;
    }

    __device__ __forceinline__ void advance(const MergeParams& params) {
        n += params.step_n, share += params.step_share;
        if (share >= params.shares) share -= params.shares, ++n;
    }

    __device__ __forceinline__ bool exists(const MergeParams& params) const { return n < params.batch; }

    // Whether any thread of the warp has pixels: it multiplies as a whole on tensor cores.
    __device__ __forceinline__ bool goes_on(const MergeParams& params) const {
        return ON_TENSOR_CORES ? __any_sync(~0u, exists(params)) : exists(params);
    }

    // The first of the thread's pixels, and how many of them there are.
    __device__ __forceinline__ long long pixel() const {
        return VECTOR == 1 ? share / LANES * (LANES * WIDTH) + share % LANES : share * WIDTH;
    }
    __device__ __forceinline__ int count(const MergeParams& params) const {
        if constexpr (VECTOR > 1) return WIDTH;
        return min((params.pixels - pixel() + LANES - 1) / LANES, (long long)WIDTH);
    }
};

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

    // On by `distance` channels, to one that exists.
    __device__ __forceinline__ void skip(int distance, long long n, long long p) {
        while (distance >= left) {
            distance -= left;
            next = static_cast<const T*>(ahead->data) + n * ahead->stride_n + p;
            stride = ahead->stride_c;
            left = ahead->channels;
            ++ahead;
        }
        next += distance * stride;
        left -= distance;
    }

    __device__ __forceinline__ Vector<T, WIDTH> load(int count) {
        const T* const from = next;
        next += stride;
        --left;
        return load_pixels(from, count);
    }

    // Channels c ..., which lie `distance` on from here; zeros beyond the last and where there are no pixels.
    __device__ __forceinline__ void load(
        Slab& x, int c, int distance, const PixelWalk& at, const MergeParams& params) {
        const int channels = at.exists(params) ? params.in_channels : 0;
        const int count = at.count(params);
        if (c < channels) skip(distance, at.n, at.pixel());
        if (left >= DEPTH && c + DEPTH <= channels) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) x[d] = load(count);
        } else {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const bool exists = c + d < channels;
                if (exists) skip(0, at.n, at.pixel());
                x[d] = exists ? load(count) : Vector<T, WIDTH>{};
            }
        }
    }
};

// What a block has in shared memory, in this order: one bias per output, the weights, a prologue's factors of each channel.
struct Resident {
    A* bias;
    T* weight;
    Factors<A>* factors;
    int pitch;

    __device__ __forceinline__ Resident(A* shared, int depth)
        : bias(shared), weight(reinterpret_cast<T*>(shared + TILE)),
          factors(reinterpret_cast<Factors<A>*>(weight + TILE * (depth + GAP))), pitch(depth + GAP) {}

    // Zeros weigh channels beyond the last.
    __device__ __forceinline__ void load(const MergeParams& params, int o_first, int depth) const {
#pragma unroll 1
        for (int j = warp_index(); j < TILE; j += BLOCK / WARP) {
            const T* const w_j = static_cast<const T*>(params.weight) + (o_first + j) * params.weight_stride_o;
#pragma unroll 1
            for (int c = lane_index(); c < depth; c += WARP) {
                const bool inside = o_first + j < params.out_channels && c < params.in_channels;
                const int k = ON_TENSOR_CORES ? c / SLAB * SLAB + c % SLAB / 4 * 2 + c % 2 + c % 4 / 2 * 8 : c;
                weight[j * pitch + k] = inside ? w_j[c * params.weight_stride_c] : narrow<T>(A(0));
            }
            if (lane_index() == 0) bias[j] = o_first + j < params.out_channels ? bias_of<T>(params.epilogue, o_first + j) : A(0);
        }
        if constexpr (PROLOGUE)
            for (int c = threadIdx.x; c < params.in_channels; c += BLOCK) factors[c] = factors_of<A>(params.prologue, c);
    }

    // sum += weight * x, of channels k ..., of which this thread has x from channel c on.
    __device__ __forceinline__ void multiply(Sums& sum, Slab& x, int k, int c, const MergeParams& params) const {
        if constexpr (ON_TENSOR_CORES) {
            if constexpr (PROLOGUE) transform_slab(x, c, params);
            multiply_matrices<T>(sum, x, k);
        } else {
            multiply_vectors(sum, x, k, params);
        }
    }

  private:
    __device__ __forceinline__ void multiply_vectors(Sums& sum, const Slab& x, int k, const MergeParams& params) const {
        const int apart = opaque(pitch);  // else every row's address is kept in a register
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
            for (int j = 0; j < OUTPUTS; ++j) {
                const auto w = load_vector<SHARED>(weight + j * apart + k + d);
#pragma unroll
                for (int e = 0; e < SHARED; ++e) {
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) add_product(sum[j][i], value[e][i], widen(w.lane[e]));
                }
            }
        }
    }

    template <class E> __device__ __forceinline__ void multiply_matrices(Sums& sum, const Slab& x, int k) const {
#pragma unroll
        for (int o = 0; o < TILE; o += 16) {
            unsigned b[4];
            const int lane = lane_index(), row = (lane % 8 + lane / 16 * 8) % TILE;
            load_matrices(b, weight + (o + row) * pitch + k + lane / 8 % 2 * 8);
#pragma unroll
            for (int j = 0; j < WIDTH; j += 2) {
                unsigned a[4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {  // of k
                    const unsigned even = word_of(x[2 * half].lane, j / 2), odd = word_of(x[2 * half + 1].lane, j / 2);
                    a[2 * half] = (even & 0xffff) | odd << 16;
                    a[2 * half + 1] = even >> 16 | (odd & 0xffff0000);
                }
#pragma unroll
                for (int i = 0; i < 16 && o + i < TILE; i += 8) {
                    A(&first)[WIDTH] = sum[(o + i) / SHARING], (&second)[WIDTH] = sum[(o + i) / SHARING + 1];
                    float part[4] = {first[j], second[j], first[j + 1], second[j + 1]};
                    multiply_add<E>(part, a, {b[i / 4], b[i / 4 + 1]});
                    first[j] = part[0], second[j] = part[1], first[j + 1] = part[2], second[j + 1] = part[3];
                }
            }
        }
    }

    __device__ __forceinline__ void transform_slab(Slab& x, int c, const MergeParams& params) const {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (c + d >= params.in_channels) break;
            A value[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) value[i] = widen(x[d].lane[i]);
            transform(value, factors[c + d], params.prologue);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) x[d].lane[i] = narrow<T>(value[i]);
        }
    }
};

// The j-th of a thread's outputs, in its tile.
__device__ __forceinline__ int output_of(int j) {
    return ON_TENSOR_CORES ? j / 2 * 8 + lane_index() % SHARING * 2 + j % 2 : j;
}

// Finish a thread's sums and write them.
__device__ __forceinline__ void finish(Sums& sum, const MergeParams& params, const PixelWalk& at, int o_first) {
    const Image& out = params.out;
    const Image& residual = params.epilogue.residual;
    const long long p = at.pixel();
    const int count = at.count(params);
    T* const y = static_cast<T*>(out.data) + at.n * out.stride_n + p;
    const T* const r = static_cast<const T*>(residual.data) + at.n * residual.stride_n + p * residual.stride[2];
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) {
        const long long o = o_first + output_of(j);
        if (o >= params.out_channels) break;
        if (residual.data) {
            const Vector<T, WIDTH> addend = load_pixels(r + o * residual.stride_c, count, residual.stride[2]);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum[j][i] += widen(addend.lane[i]);
        }
        activation_of<T>(params.epilogue).apply(sum[j]);
        Vector<T, WIDTH> result;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) result.lane[i] = narrow<T>(sum[j][i]);
        T* const y_o = y + o * out.stride_c;
        if constexpr (VECTOR > 1) {
            store_vector<WIDTH>(y_o, result);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < count) y_o[i * APART] = result.lane[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS) merge(const __grid_constant__ MergeParams params) {
    const int tiles = (params.out_channels + TILE - 1) / TILE, o_first = blockIdx.x % tiles * TILE;
    const int depth = (params.in_channels + SLAB - 1) / SLAB * SLAB;  // K; channels beyond the last weigh 0
    const int first = threadIdx.x % SHARING * DEPTH;                  // of a slab's channels, those of this thread

    PixelWalk at(params, blockIdx.x / tiles);
    ChannelWalk channels{params.sources};
    Slab x;
    channels.load(x, first, first, at, params);

    DYNAMIC_SHARED(A, shared);
    const Resident resident(shared, depth);
    resident.load(params, o_first, depth);
    __syncthreads();

    Sums sum;
    const auto begin = [&] {
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum[j][i] = resident.bias[output_of(j)];
        }
    };
    begin();
    for (int k = 0; at.goes_on(params);) {
        resident.multiply(sum, x, k, k + first, params);
        k += SLAB;
        if (k == depth) {
            if (at.exists(params)) finish(sum, params, at, o_first);
            begin();
            k = 0;
            at.advance(params);
            channels = {params.sources};
        }
        channels.load(x, k + first, k ? SLAB - DEPTH : first, at, params);
    }
}
