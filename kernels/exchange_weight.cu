// Copies a weight for the gradient of an input: the outputs and channels of each group are exchanged.
//
//     exchanged[g * group_channels + c, o, t] = weight[g * group_outputs + o, c, t]      complex numbers are conjugated
//
//     no M, no K: a copy.      N = (g, c, o, t), one per thread
//
//     weight     o ↓  | c0t0 c0t1 | c1t0 c1t1 |      exchanged  c ↓  | o0t0 o0t1 | o1t0 o1t1 |
//                     | c0t0 c0t1 | c1t0 c1t1 |                      | o0t0 o0t1 | o1t0 o1t1 |
//
// With one group and nothing to conjugate, a view suffices and no kernel runs.  Unless numbers are conjugated, only
// bits are moved, so the type just states the element's size.
// Bound by memory.  Floor: twice the weight over the bandwidth.
//
// -D: DTYPE (bits16 ... bits128; complex64 or complex128 to conjugate)
#include "image.cuh"

namespace cupyconv {

struct ExchangeWeightParams {
    Image weight;
    void* exchanged;  // its elements are contiguous
    long long elements;
    int kernel[3];
    int group_channels, group_outputs;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK)
    exchange_weight(const __grid_constant__ ExchangeWeightParams params) {
    const int taps = product_of(params.kernel);
    for (long long i = first_share(); i < params.elements; i += share_step()) {
        const Pixel tap = pixel_at(i % taps, params.kernel);
        const long long row = i / taps, group = row / params.group_outputs / params.group_channels;
        const long long o = group * params.group_outputs + row % params.group_outputs;
        const long long c = row / params.group_outputs % params.group_channels;
        const T* const from = static_cast<const T*>(params.weight.data) + params.weight.at(o, c, tap);
        static_cast<T*>(params.exchanged)[i] = conjugate(*from);
    }
}
