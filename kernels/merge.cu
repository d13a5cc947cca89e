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
    T* const y = static_cast<T*>(params.out.data);
    const long long a_row = params.pixels / WIDTH, shares = params.batch * a_row;

    for (int o_first = blockIdx.y * TILE; o_first < params.out_channels; o_first += gridDim.y * TILE) {
        __syncthreads();  // the last tile's weights have been used
        for (int i = threadIdx.x; i < params.in_channels * TILE; i += blockDim.x) {
            const int c = i / TILE, o = o_first + i % TILE;
            const T* const w = static_cast<const T*>(params.weight);
            weight[i] = o < params.out_channels ? widen(w[o * params.weight_stride_o + c * params.weight_stride_c]) : A(0);
        }
        __syncthreads();

        for (long long q = first_share(); q < shares; q += share_step()) {
            const Share share = share_at(q, a_row, WIDTH);
            A sum[TILE][WIDTH] = {};
            for (int s = 0; s < params.sources.count; ++s) {
                const Source& source = params.sources.table[s];
                const T* const x_np =
                    static_cast<const T*>(source.image.data) + share.n * source.image.stride_n + share.pixel;
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
                    result.lane[i] =
                        finish<T, true>(sum[j][i], params.epilogue, share.n, o, Pixel{{0, 0, share.pixel + i}});
                store_packet<WIDTH>(y + share.n * params.out.stride_n + o * params.out.stride_c + share.pixel, result);
            }
        }
    }
}
