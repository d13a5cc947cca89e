// The gradient of depthwise weights: every output o has one kernel, for the one channel c(o) = o / group_outputs.
//
//     sums[part, o, t] = sum over the part's (n, p) of  grad[n, o, p] * x[n, c(o), window(p, t)]
//
//     M = o (by blocks, and channels-last by lanes)    N = t (all taps, sums in registers)    K = (n, p), cut into parts
//
//     x  w ->   ░ ░ ░ . . .       a thread processes ROWS pixels, one above the other, at a time: their windows overlap,
//            h  ░ ░ ░ . . .       so that each element is read once for all of them, and for all taps
//            ↓  ░ ░ ░ . . .
//     grad        p               neighbouring threads load neighbours in memory: pixels along w or, channels-last, 32
//                 p               channels of one pixel
//
// A block adds the sums of its threads in shared memory, and the epilogue kernel adds the parts.  Both orders are
// fixed.
//
// Bound by memory.  Floor: grad and x once over the bandwidth.
//
// -D: DTYPE (storage type), KERNEL (taps along h and along w, one along d, dilation 1), STRIDE (along h)
#include "strip.cuh"

namespace cupyconv {

struct DepthwiseWeightGradientParams {
    Sources sources;
    Windows windows;
    Image grad;
    void* sums;       // (parts, outputs, taps) in C order, in the accumulator's type
    long long plane;  // elements of a part
    int batch, outputs, group_outputs, channel_lanes;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int MAX_BLOCK = 128, WARPS = MAX_BLOCK / WARP, TAPS = KERNEL * KERNEL;
constexpr int ROWS = STRIDE == 1 ? 8 : 4, HEIGHT = (ROWS - 1) * STRIDE + KERNEL;

// sum[t] += grad * x for the pixels of a strip.  The last strip of a plane may have fewer than ROWS pixels: zeros stand
// for the others, and must not be multiplied by elements that are not finite.
template <bool WHOLE>
__device__ __forceinline__ void add_strip(
    A (&sum)[TAPS], const A (&grad)[ROWS], int rows, const T* x, const int (&row)[HEIGHT], const int (&column)[KERNEL]) {
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
#pragma unroll
        for (int j = 0; j < KERNEL; ++j) {
            const int at = row[i] + column[j];
            const A value = at >= 0 ? widen(element(x, at)) : A(0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (i >= r * STRIDE && i < r * STRIDE + KERNEL && (WHOLE || r < rows))
                    add_product(sum[(i - r * STRIDE) * KERNEL + j], value, grad[r]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(MAX_BLOCK)
    depthwise_weight_gradient(const __grid_constant__ DepthwiseWeightGradientParams params) {
    SHARED_ARRAY(A, warps_s, WARPS * TAPS * WARP);

    const Windows& windows = params.windows;
    const Image& grad = params.grad;
    const int lanes = params.channel_lanes, lane = threadIdx.x % lanes;  // lanes of a warp along channels
    const int depth = windows.out[0], height = windows.out[1], width = windows.out[2];
    const int strips = (height + ROWS - 1) / ROWS, shares = params.batch * depth * strips * width;

    for (long long first = blockIdx.y * lanes; first < params.outputs; first += gridDim.y * lanes) {
        const int o = int(first) + lane;
        A sum[TAPS] = {};
        if (o < params.outputs) {
            const int c = o / params.group_outputs;
            int s = 0;
            while (c >= params.sources.table[s].first + params.sources.table[s].channels) ++s;
            const Source& source = params.sources.table[s];
            const T* const x_c = static_cast<const T*>(source.image.data) + (c - source.first) * source.image.stride_c;

            for (int q = first_share() / lanes; q < shares; q += share_step() / lanes) {
                const int line = q / width, plane = line / strips, n = plane / depth;
                const int d = plane % depth, h = line % strips * ROWS, w = q % width, rows = min(ROWS, height - h);
                int at_d[1], row[HEIGHT], column[KERNEL];
                const long long(&step)[3] = source.image.stride;
                offsets<T>(at_d, d * windows.stride[0] - windows.before[0], windows.size[0], step[0], windows.padding_mode);
                offsets<T>(row, h * STRIDE - windows.before[1], windows.size[1], step[1], windows.padding_mode);
                offsets<T>(column, w * windows.stride[2] - windows.before[2], windows.size[2], step[2], windows.padding_mode);
#pragma unroll
                for (int j = 0; j < KERNEL; ++j) column[j] = at_d[0] < 0 ? OUTSIDE : at_d[0] + column[j];

                const T* grad_o = static_cast<const T*>(grad.data) + grad.at(n, o, Pixel{{d, h, w}});
                A grads[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) grads[r] = r < rows ? widen(grad_o[r * grad.stride[1]]) : A(0);
                const T* const x = x_c + n * source.image.stride_n;
                if (rows == ROWS)
                    add_strip<true>(sum, grads, rows, x, row, column);
                else
                    add_strip<false>(sum, grads, rows, x, row, column);
            }
        }

        __syncthreads();  // the sums of the previous outputs have been read
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
            A total = sum[t];
            for (int distance = WARP / 2; distance >= lanes; distance /= 2)
                total += __shfl_down_sync(0xffffffffu, total, distance);
            if (lane_index() < lanes) warps_s[(warp_index() * TAPS + t) * WARP + lane_index()] = total;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TAPS * lanes; i += blockDim.x) {
            const int t = i / lanes, l = i % lanes;
            if (first + l >= params.outputs) continue;
            A total = warps_s[t * WARP + l];
            for (int w = 1; w < blockDim.x / WARP; ++w) total += warps_s[(w * TAPS + t) * WARP + l];
            static_cast<A*>(params.sums)[blockIdx.x * params.plane + (first + l) * TAPS + t] = total;
        }
    }
}
