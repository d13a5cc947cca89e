// Fused merge: a 1x1 convolution over the concatenation of many inputs that is never built.
//
//     y[n, o, p] = activation( sum_s sum_c weight[o, first_s + c] * x_s[n, c, p] + bias[o] + residual[n, o, p] )
//
//     M = o (outputs)    N = p (pixels)    K = (s, c) (channels of all inputs)
//
//                        pixels ->   one thread: WIDTH neighbours, 16 bytes
//     x_0  c ↓  [.............####.............]      every input element is read once per tile of
//     x_1  c ↓  [.............####.............]      TILE outputs, every output written once
//     ...                       |
//     y    o ↓  [.............####.............]      TILE x WIDTH sums in registers
//
// Weights of the tile lie in shared memory as [K][TILE], so that a warp reads them as one broadcast.
// The source is chosen in the outer loop, never per element.
//
// Bound by memory while K * M / (K + M) is small.  Floor: (K + M) * N elements over the bandwidth.
//
// -D: DTYPE (storage type), TILE (outputs a thread), WIDTH (pixels a thread: 16 bytes of T, or 1)
#include "epilogue.cuh"

namespace cupyconv {

struct MergeParams {
    Sources sources;
    const void* weight;
    long long weight_stride_o, weight_stride_c;
    Image out;
    Epilogue epilogue;
    long long batch, pixels;
    int in_channels, out_channels;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) merge(const __grid_constant__ MergeParams params) {
    using A = Accumulator<T>;
    constexpr int SHARED = TILE * sizeof(A) < 16 ? TILE : 16 / sizeof(A);  // weights a shared-memory access
    DYNAMIC_SHARED(A, weight);
    const int o_first = blockIdx.y * TILE;
    for (int i = threadIdx.x; i < params.in_channels * TILE; i += blockDim.x) {
        const int c = i / TILE, o = o_first + i % TILE;
        const T* w_oc = static_cast<const T*>(params.weight) + o * params.weight_stride_o + c * params.weight_stride_c;
        weight[i] = o < params.out_channels ? widen(*w_oc) : A(0);
    }
    __syncthreads();

    T* const y = static_cast<T*>(params.out.data);
    const long long step = (long long)gridDim.x * blockDim.x * WIDTH;
    for (long long n = blockIdx.z; n < params.batch; n += gridDim.z) {
        for (long long p = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH; p < params.pixels; p += step) {
            A sum[TILE][WIDTH] = {};
            for (int s = 0; s < params.sources.count; ++s) {
                const Source& source = params.sources.table[s];
                const T* const x_np = static_cast<const T*>(source.image.data) + n * source.image.stride_n + p;
                const A* const w_s = weight + source.first * TILE;
#pragma unroll 4
                for (int c = 0; c < source.channels; ++c) {
                    const Packet<T, WIDTH> x = load_packet<WIDTH>(x_np + c * source.image.stride_c);
#pragma unroll
                    for (int j = 0; j < TILE; j += SHARED) {
                        const Packet<A, SHARED> w = load_packet<SHARED>(w_s + c * TILE + j);
#pragma unroll
                        for (int k = 0; k < SHARED; ++k) {
#pragma unroll
                            for (int i = 0; i < WIDTH; ++i) add_product(sum[j + k][i], widen(x.lane[i]), w.lane[k]);
                        }
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const int o = o_first + j;
                if (o >= params.out_channels) break;
                Packet<T, WIDTH> result;
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
                    result.lane[i] = finish<T, true>(sum[j][i], params.epilogue, n, o, Pixel{{0, 0, p + i}});
                store_packet<WIDTH>(y + n * params.out.stride_n + o * params.out.stride_c + p, result);
            }
        }
    }
}
