// Back through a prologue: the derivative where an element was transformed, and two sums of each channel, in one pass.
//
//     du[n, c, p] = grad[n, c, p] * f'(scale[c] * x[n, c, p] + shift[c])
//     out[n, c, p] = du[n, c, p] * conj(scale[c])
//     partial[i, 2 c] = sum over the (n, p) of part i of  du[n, c, p] * conj(x[n, c, p])       of scale's gradient
//     partial[i, 2 c + 1] = sum over the (n, p) of part i of  du[n, c, p]                      of shift's
//
//     no M, no K: elementwise.     N = p (WIDTH neighbouring pixels per thread) or c (channels-last, lanes = 32)
//
//         lanes = 1                                lanes = 32
//
//     c   [ part 0  | part 1  | ...]           p   [lane 0, lane 1, ... | next tile  ]   part 0
//         a block is a part of a channel           [lane 0, lane 1, ... |            ]   part 1
//
// The transformed element is worked out anew: nothing of it was kept.  Each thread adds what it meets, then a tree
// the block's rows of threads, always in one order; the parts are added by epilogue_grad.cu, over `partial` as an
// image whose samples are the parts.
//
// Bound by memory.  Floor: grad, x and out once over the bandwidth.
//
// -D: DTYPE (storage type), WIDTH (elements that a thread moves at once: 16 bytes of them, or 1)
#include "image.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct PrologueGradParams {
    Image grad, x, out;  // data of out may be null
    Prologue prologue;
    void* partial;      // [part, channel, 2] in the accumulator's type, or null
    long long size[3];  // axes collapsed where all images allow it
    long long batch, pixels;
    int channels, lanes;  // lanes: threads of a block along the channels, a power of two
};

// What `back_through` asks for: the result where that tells the derivative.
template <class R> __device__ __forceinline__ R known_from(R u, int code) {
    return code == SIGMOID ? sigmoid(u) : code == TANH ? tanh(u) : u;
}
template <class R> __device__ __forceinline__ Complex<R> known_from(Complex<R> u, int) { return u; }

__device__ __forceinline__ long long at_pixel(const Image& image, const Share& share, const Pixel& pixel, long long c) {
    return share.n * image.stride_n + c * image.stride_c + offset_of(pixel, image.stride);
}

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) prologue_grad(
    const __grid_constant__ PrologueGradParams params) {
    using A = Accumulator<T>;
    using R = RealPart<A>;
    SHARED_ARRAY(A, shared, MAX_BLOCK * 2);  // [of scale, of shift][thread]
    const int lane = threadIdx.x % params.lanes, row = threadIdx.x / params.lanes, rows = blockDim.x / params.lanes;
    const Prologue& prologue = params.prologue;
    const R alpha = R(prologue.alpha), beta = R(prologue.beta);
    A* const partial = static_cast<A*>(params.partial) + (long long)blockIdx.x * params.channels * 2;
    const long long shares_per_row = params.pixels / WIDTH, shares = params.batch * shares_per_row;

    for (long long c_tile = (long long)blockIdx.y * params.lanes; c_tile < params.channels;
         c_tile += (long long)gridDim.y * params.lanes) {
        const long long c = c_tile + lane;
        const bool inside = c < params.channels;
        Factors<A> by = {};
        if (inside) by = factors_of<A>(prologue, c);
        A sum[2] = {};
        for (long long q = (long long)blockIdx.x * rows + row; inside && q < shares; q += (long long)gridDim.x * rows) {
            const Share share = share_at(q, shares_per_row, WIDTH);
            const Pixel pixel = pixel_at(share.pixel, params.size);
            Vector<T, WIDTH> grad =
                load_vector<WIDTH>(static_cast<const T*>(params.grad.data) + at_pixel(params.grad, share, pixel, c));
            const Vector<T, WIDTH> at =
                load_vector<WIDTH>(static_cast<const T*>(params.x.data) + at_pixel(params.x, share, pixel, c));
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                const A x = widen(at.lane[i]);
                A u = by.shift;
                add_product(u, by.scale, x);
                const int code = prologue.activation;
                const A du = back_through(A(widen(grad.lane[i])), known_from(u, code), code, alpha, beta);
                add_product(sum[0], du, conjugate(x));
                sum[1] += du;
                A dx(0);
                add_product(dx, du, conjugate(by.scale));
                grad.lane[i] = narrow<T>(dx);
            }
            if (params.out.data)
                store_vector<WIDTH>(static_cast<T*>(params.out.data) + at_pixel(params.out, share, pixel, c), grad);
        }
        if (!params.partial) continue;
        for (int k = 0; k < 2; ++k) shared[k * MAX_BLOCK + threadIdx.x] = sum[k];
        for (int half = rows / 2; half > 0; half /= 2) {
            __syncthreads();
            if (row >= half) continue;
            for (int k = 0; k < 2; ++k)
                shared[k * MAX_BLOCK + threadIdx.x] += shared[k * MAX_BLOCK + threadIdx.x + half * params.lanes];
        }
        if (row == 0 && inside)
            for (int k = 0; k < 2; ++k) partial[2 * c + k] = shared[k * MAX_BLOCK + threadIdx.x];
        __syncthreads();  // read before the next tile's sums are written
    }
}
