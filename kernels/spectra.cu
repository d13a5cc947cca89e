// Products of spectra at each frequency, added over the channels that one of several inputs has in a group.
//
//     y[u, o, f] = [y[u, o, f] +] sum_c x[u, c, f] * weight[o, first + c - g * group_channels, f]
//
//     M = (u, o)      N = f (frequencies)      K = c          g = o / group_outputs
//
//     x      [u, c | f f f f ....]     each element times
//     weight [o, c | f f f f ....]     the one below it; a thread computes one f of one row
//     y      [u, o | f f f f ....]
//
// There is one launch per input.  If a group begins before `first`, its sums of the previous inputs are already in y.
// The kernel is for few channels.  With many, each frequency is a matrix product, and cuBLAS computes them all.
// Bound by memory.  Floor: (x + weight + y) once over the bandwidth.  Each output reads x again, mostly from L2.
//
// -D: DTYPE (complex64 or complex128)
#include "image.cuh"

namespace cupyconv {

struct SpectraParams {
    const void *x, *weight;  // (units, channels, frequencies) and (outputs, group_channels, frequencies)
    void* y;                 // (units, outputs, frequencies)
    long long frequencies, units;
    int first, channels;  // of the input; `first` counts the channels of all inputs
    int groups, group_channels, group_outputs;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) spectra(const __grid_constant__ SpectraParams params) {
    const long long frequencies = params.frequencies;
    const int outputs = params.groups * params.group_outputs;

    for (long long row = blockIdx.y; row < params.units * outputs; row += gridDim.y) {
        const long long u = row / outputs;
        const int o = row % outputs, g_first = o / params.group_outputs * params.group_channels;
        const int from = max(params.first, g_first);
        const int count = min(params.first + params.channels, g_first + params.group_channels) - from;
        const bool begins = from == g_first;
        if (count <= 0) continue;
        const T* const x =
            static_cast<const T*>(params.x) + (u * params.channels + from - params.first) * frequencies;
        const T* const weight = static_cast<const T*>(params.weight) +
                                ((long long)o * params.group_channels + from - g_first) * frequencies;
        T* const y = static_cast<T*>(params.y) + row * frequencies;
        for (long long f = first_share(); f < frequencies; f += share_step()) {
            T sum = begins ? T(0) : y[f];
            for (int c = 0; c < count; ++c) add_product(sum, x[c * frequencies + f], weight[c * frequencies + f]);
            y[f] = sum;
        }
    }
}
