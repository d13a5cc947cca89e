// Fused merge: a 1x1 convolution over the concatenation of many inputs, which is never built.
//
//     y[n, o, p] = activation( sum_s sum_c weight[o, first_s + c] * x_s[n, c, p] + bias[o] + residual[n, o, p] )
//
//     M = o (output channels)    N = p (pixels)    K = (s, c) (channels of all inputs)
//
//                        pixels ->   one thread: WIDTH pixels, 16 bytes
//     x_0  c ↓  [.............####.............]      every input element is read once per tile of TILE
//     x_1  c ↓  [.............####.............]      output channels, every output element is written once
//     ...                       |
//     y    o ↓  [.............####.............]      TILE x WIDTH sums in registers
//
// A thread walks over the channels of all inputs as if they were one input, and loads DEPTH channels before it uses the
// first one.  Many inputs of one channel therefore keep as many bytes in flight as one input of many channels.  The
// pixels of a thread are
//
//     VECTOR = WIDTH   contiguous, moved by one access                  ####............
//     VECTOR = 1       LANES apart, if rows are not aligned, so that    #...#...#...#...
//                      the accesses of a warp are contiguous
//
// 16-bit types are multiplied on tensor cores.  There, four threads share the same pixels.  Each of them loads four
// channels of a slab of 16 and owns a quarter of the sums.  Lanes exchange no data to form operand A, since pixels may
// come in any order within a product, and channels in any order that the weight follows too:
//
//     loads of a warp  8 vectors of pixels         operand A: pixel 2 j of row r of the warp's vectors     (m = r)
//     channels 0-3     0 4  8 ...  (lanes)                    pixel 2 j + 1                                (m = r + 8)
//     channels 4-7     1 5  9 ...                  operand B: weight of channel 4 w + e at k = 2 w + e % 2 + 8 (e / 2)
//     channels 8-11    2 6 10 ...                  sums:      two outputs of each eight, all pixels of the thread
//     channels 12-15   3 7 11 ...
//
// The blocks are persistent: at most as many are launched as fit on the GPU at once, and each loops over the pixels.
// The copy of the weight to shared memory, and the barrier after it, are therefore executed once per block.  The loads
// of the first channels are issued before them.  The weight of a tile is stored in shared memory as [TILE][K], as in
// the array; on tensor cores, the channels of each slab are permuted as above.  Consecutive blocks process the same
// pixels for different tiles, so all but one of them find the inputs in L2.
//
// Bound by memory while K * M / (K + M) <= 16.  Floor: (K + M) * N elements over the bandwidth.
// BLOCKS * BLOCK * DEPTH * 16 bytes are in flight per multiprocessor: 48 KiB for float64 and 4 output channels.  A
// bandwidth of 4.8 TB/s at a latency of 700 ns needs 25 KB in flight on each of 132 multiprocessors.
//
// -D: DTYPE (storage type), TILE (output channels of a block), VECTOR (elements that an access moves: 16 bytes of T, or 1),
//     BLOCKS (resident blocks per multiprocessor; planning launches at most as many),
//     PROLOGUE (1: inputs are transformed in registers, once per tile of output channels, see prologue.cuh)
#include "epilogue.cuh"
#include "prologue.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// One input.  Its pixels have unit stride.
struct MergeSource {
    const void* data;
    long long stride_n, stride_c;
    int channels;  // at least 1
};

// The most inputs that fit, with the other parameters, in the 4 KiB that every driver accepts.
constexpr int MAX_MERGED = 120;

struct MergeParams {
    MergeSource sources[MAX_MERGED];
    const void* weight;
    long long weight_stride_o, weight_stride_c;
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    long long batch, pixels;
    long long shares;         // shares of one sample's pixels; a thread processes one share at a time
    int step_n, step_share;  // from a thread's share to its next share
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
constexpr int LANES = ON_TENSOR_CORES ? 8 : WARP, SHARING = WARP / LANES;  // pixel vectors per warp; threads per vector
constexpr int SLAB = DEPTH * SHARING, OUTPUTS = TILE / SHARING;  // channels per load of a warp; outputs of a thread
constexpr int APART = VECTOR == 1 ? LANES : 1;                   // distance between two pixels of a thread
constexpr int SHARED = 16 / sizeof(A);                           // weights per shared-memory access
constexpr int GAP = ON_TENSOR_CORES ? 8 : 0;                     // between rows of weights: no ldmatrix bank conflicts

using Slab = Vector<T, WIDTH>[DEPTH];
using Sums = A[OUTPUTS][WIDTH];

// A thread's walk over the pixels of all samples, which are divided into shares.
struct PixelWalk {
    long long n, share;  // sample, and share within the sample

    __device__ __forceinline__ PixelWalk(const MergeParams& params, int block) {
        const long long first = block * (long long)(BLOCK / SHARING) + threadIdx.x / SHARING;
        n = first / params.shares, share = first % params.shares;
    }

    __device__ __forceinline__ void advance(const MergeParams& params) {
        n += params.step_n, share += params.step_share;
        if (share >= params.shares) share -= params.shares, ++n;
    }

    __device__ __forceinline__ bool exists(const MergeParams& params) const { return n < params.batch; }

    // Whether the loop continues.  On tensor cores, where a warp multiplies as a whole, it continues while any thread
    // has pixels.
    __device__ __forceinline__ bool goes_on(const MergeParams& params) const {
        return ON_TENSOR_CORES ? __any_sync(~0u, exists(params)) : exists(params);
    }

    // The first pixel of the thread's share, and the number of pixels in it.
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

// A thread's walk over the channels of its pixels, in the order of the concatenation.
struct ChannelWalk {
    const MergeSource* ahead;  // the input after the current one
    const T* next;
    long long stride;
    int left;  // remaining channels of the current input

    // Skip `distance` channels.  The channel after them must exist.
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

    // Load DEPTH channels from channel c on, which is `distance` channels ahead.  Channels past the last one, and
    // pixels that do not exist, are loaded as zeros.
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

// The contents of a block's shared memory, in this order: one bias per output channel, the weight, and, with a
// prologue, the factors of each channel.
struct Resident {
    A* bias;
    T* weight;
    Factors<A>* factors;
    int pitch;

    __device__ __forceinline__ Resident(A* shared, int depth)
        : bias(shared), weight(reinterpret_cast<T*>(shared + TILE)),
          factors(reinterpret_cast<Factors<A>*>(weight + TILE * (depth + GAP))), pitch(depth + GAP) {}

    // Channels past the last one have weight 0.
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

    // sum += weight * x for the channels from k on.  This thread holds x for the channels from c on.
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
        const int apart = opaque(pitch);  // otherwise the address of every row occupies a register
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
                for (int half = 0; half < 2; ++half) {  // halves of k
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

// The index, within the tile, of the thread's j-th output channel.
__device__ __forceinline__ int output_of(int j) {
    return ON_TENSOR_CORES ? j / 2 * 8 + lane_index() % SHARING * 2 + j % 2 : j;
}

// Add the residual to a thread's sums, apply the activation and write the results.
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
    const int depth = (params.in_channels + SLAB - 1) / SLAB * SLAB;  // K, padded to whole slabs; padding has weight 0
    const int first = threadIdx.x % SHARING * DEPTH;                  // this thread's first channel in a slab

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
