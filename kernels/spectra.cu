// Products of spectra, frequency by frequency, added over the channels of a group.
//
//     y[u, o, f] = sum_c x[u, g * group_channels + c, f] * weight[o, c, f]        g = o / group_outputs
//
//     M = (u, o)      N = f (frequencies)      K = c
//
//     x      [u, c | f f f f ....]     each element times
//     weight [o, c | f f f f ....]     the one below it; a thread has one f of one row
//     y      [u, o | f f f f ....]
//
// For few channels: with many of them each frequency is a matrix product, and cuBLAS does them all.
// Bound by memory.  Floor: (x + weight + y) once over the bandwidth; x comes again for each output, most often from L2.
//
// -D: DTYPE (complex64 or complex128)
#include "image.cuh"

namespace cupyconv {

struct SpectraParams {
    const void *x, *weight;  // (units, channels, frequencies) and (outputs, group_channels, frequencies)
    void* y;                 // (units, outputs, frequencies)
    long long frequencies, units;
    int groups, group_channels, group_outputs;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) spectra(const __grid_constant__ SpectraParams params) {
    const long long frequencies = params.frequencies;
    const int channels = params.group_channels, outputs = params.groups * params.group_outputs;

    for (long long row = blockIdx.y; row < params.units * outputs; row += gridDim.y) {
        const long long u = row / outputs;
        const int o = row % outputs, g = o / params.group_outputs;
        const T* const x =
            static_cast<const T*>(params.x) + (u * params.groups + g) * channels * frequencies;
        const T* const weight = static_cast<const T*>(params.weight) + (long long)o * channels * frequencies;
        T* const y = static_cast<T*>(params.y) + row * frequencies;
        for (long long f = first_share(); f < frequencies; f += share_step()) {
            T sum = T(0);
            for (int c = 0; c < channels; ++c) add_product(sum, x[c * frequencies + f], weight[c * frequencies + f]);
            y[f] = sum;
        }
    }
}
