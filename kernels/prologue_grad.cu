// Gradient of a prologue: the product with its derivative, and two sums of each channel, in one pass.
//
//     du[n, c, p] = grad[n, c, p] * f'(scale[c] * x[n, c, p] + shift[c])
//     out[n, c, p] = du[n, c, p] * conj(scale[c])
//     partial[i, 2 c] = sum over the (n, p) of part i of  du[n, c, p] * conj(x[n, c, p])       gradient of scale
//     partial[i, 2 c + 1] = sum over the (n, p) of part i of  du[n, c, p]                      gradient of shift
//
//     no M, no K: elementwise.     N = p (WIDTH contiguous pixels per thread) or c (channels-last, lanes = 32)
//
//     grad, x, out   c | part 0 ....####.... | part 1 ............ |     a block is a part of some channels
//
// channel_sums.cuh explains how blocks divide the pixels and reduce the sums.  The transformed element is recomputed,
// since nothing stores it.
//
// Bound by memory.  Floor: grad, x and out once over the bandwidth.
//
// -D: DTYPE (storage type), WIDTH (elements that a thread moves at once: 16 bytes of them, or 1)
#include "channel_sums.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct PrologueGradParams {
    Image grad, x, out;  // the data of out may be null
    Prologue prologue;
    void* partial;      // [part, channel, 2] in the accumulator's type, or null
    long long size[3];  // axes are collapsed if all images allow it
    long long batch, pixels;
    int channels, lanes;  // lanes: threads of a block along the channels
};

// The argument of `back_through`: the result of f for sigmoid and tanh, else u.
template <class R> __device__ __forceinline__ R known_from(R u, int code) {
    return code == SIGMOID ? sigmoid(u) : code == TANH ? tanh(u) : u;
}
template <class R> __device__ __forceinline__ Complex<R> known_from(Complex<R> u, int) { return u; }

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) prologue_grad(
    const __grid_constant__ PrologueGradParams params) {
    using A = Accumulator<T>;
    using R = RealPart<A>;
    SHARED_ARRAY(A, shared, MAX_BLOCK * 2);  // [scale, shift][thread]
    const ChannelThread thread(params.lanes);
    const Prologue& prologue = params.prologue;
    const R alpha = R(prologue.alpha), beta = R(prologue.beta);
    A* const partial = static_cast<A*>(params.partial) + (long long)blockIdx.x * params.channels * 2;
    const long long shares_per_row = params.pixels / WIDTH, shares = params.batch * shares_per_row;

    for (long long c_tile = (long long)blockIdx.y * params.lanes; c_tile < params.channels;
         c_tile += (long long)gridDim.y * params.lanes) {
        const long long c = c_tile + thread.lane;
        const bool inside = c < params.channels;
        Factors<A> by = {};
        if (inside) by = factors_of<A>(prologue, c);
        A sum[2] = {};
        for (long long q = thread.first(); inside && q < shares; q += thread.step()) {
            const Share share = share_at(q, shares_per_row, WIDTH);
            const Pixel pixel = pixel_at(share.pixel, params.size);
            Vector<T, WIDTH> grad =
                load_vector<WIDTH>(static_cast<const T*>(params.grad.data) + params.grad.at(share.n, c, pixel));
            const Vector<T, WIDTH> at =
                load_vector<WIDTH>(static_cast<const T*>(params.x.data) + params.x.at(share.n, c, pixel));
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
                store_vector<WIDTH>(static_cast<T*>(params.out.data) + params.out.at(share.n, c, pixel), grad);
        }
        if (params.partial) add_over_rows(sum, shared, thread, inside, partial + 2 * c);
    }
}
