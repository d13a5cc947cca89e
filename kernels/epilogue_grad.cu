// Gradient of an epilogue: the product with the derivative of the activation, and the sum of each channel, in one pass.
//
//     dz[n, o, p] = grad[n, o, p] * f'(saved[n, o, p])          no activation: dz is grad, and is not written
//     partial[i, o] = sum over the (n, p) of part i of  dz[n, o, p]
//
//     no M, no K: elementwise.     N = p (pixels) or o (channels): WIDTH contiguous elements per thread
//
//     grad, saved, dz   o | part 0 ....####.... | part 1 ............ |     a block is a part of some channels
//
// channel_sums.cuh explains how blocks divide the pixels and reduce the sums.  A thread adds the values that it
// computed, before dz is rounded.
//
// Bound by memory.  Floor: grad, saved and dz once over the bandwidth.
//
// -D: DTYPE (storage type), WIDTH (elements that a thread moves at once: 16 bytes of them, or 1),
//     ALONG_CHANNELS (1 if these elements are channels, 0 if they are pixels)
#include "activation.cuh"
#include "channel_sums.cuh"

namespace cupyconv {

struct EpilogueGradParams {
    Image grad, saved, out;  // the data of saved and of out may be null
    void* partial;           // [part, channel] in the accumulator's type, or null
    double alpha, beta;
    long long size[3];  // axes are collapsed if all images allow it
    long long batch, pixels;
    int activation, channels, lanes;  // lanes: threads of a block along the channels
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int CHANNELS = ALONG_CHANNELS ? WIDTH : 1, PIXELS = ALONG_CHANNELS ? 1 : WIDTH;  // per thread
// Blocks per multiprocessor, or 0 for the compiler's choice.  For two channels of float64, its choice is one block
// more, with a register spill.
constexpr int MIN_BLOCKS = sizeof(T) == 8 && CHANNELS == 2 ? 3 : 0;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK, MIN_BLOCKS) epilogue_grad(
    const __grid_constant__ EpilogueGradParams params) {
    using A = Accumulator<T>;
    using R = RealPart<A>;
    SHARED_ARRAY(A, shared, MAX_BLOCK * CHANNELS);  // [channel of the thread][thread]
    const ChannelThread thread(params.lanes);
    const R alpha = R(params.alpha), beta = R(params.beta);
    const T* const grad = static_cast<const T*>(params.grad.data);
    const T* const saved = static_cast<const T*>(params.saved.data);
    T* const out = static_cast<T*>(params.out.data);
    A* const partial = static_cast<A*>(params.partial) + (long long)blockIdx.x * params.channels;
    const long long shares_per_row = params.pixels / PIXELS, shares = params.batch * shares_per_row;
    const int tile = params.lanes * CHANNELS;

    for (long long o_tile = (long long)blockIdx.y * tile; o_tile < params.channels;
         o_tile += (long long)gridDim.y * tile) {
        const long long o = o_tile + thread.lane * CHANNELS;
        const bool inside = o < params.channels;
        A sum[CHANNELS] = {};
        for (long long q = thread.first(); inside && q < shares; q += thread.step()) {
            const Share share = share_at(q, shares_per_row, PIXELS);
            const Pixel pixel = pixel_at(share.pixel, params.size);
            Vector<T, WIDTH> dz = load_vector<WIDTH>(grad + params.grad.at(share.n, o, pixel));
            Vector<T, WIDTH> at;
            if (saved) at = load_vector<WIDTH>(saved + params.saved.at(share.n, o, pixel));
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                A value = widen(dz.lane[i]);
                if (saved) value = back_through(value, widen(at.lane[i]), params.activation, alpha, beta);
                dz.lane[i] = narrow<T>(value);
                sum[ALONG_CHANNELS ? i : 0] += value;
            }
            if (out) store_vector<WIDTH>(out + params.out.at(share.n, o, pixel), dz);
        }
        if (params.partial) add_over_rows(sum, shared, thread, inside, partial + o);
    }
}
