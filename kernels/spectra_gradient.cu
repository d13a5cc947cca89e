// Products of spectra at each frequency for the gradient of a weight, added over the units.
//
//     y[part, o, c, f] = [y[part, o, c, f] +] sum over the part's u of conj(grad[u, o, f]) * x[u, c, f]
//
//     M = (o, c of the group's channels that the input has)      N = f (frequencies)      K = u, cut into parts
//
//     grad [u, o | f f f f ....]     each element, conjugated, times
//     x    [u, c | f f f f ....]     the one below it; a thread computes one f of one row and loops over the units
//     y    [o, c | f f f f ....]
//
// There is one launch per input, each with rows of its own.  Chunks of units add to the same rows.  The kernel is for
// few channels.  With many channels, each frequency is a matrix product, and cuBLAS computes them all.
// Bound by memory.  Floor: (grad + x + y) once over the bandwidth.  Each row reads grad and x again, mostly from L2.
//
// -D: DTYPE (complex64 or complex128)
#include "image.cuh"

namespace cupyconv {

struct SpectraGradientParams {
    const void *grad, *x;  // (units, outputs, frequencies) and (units, channels, frequencies)
    void* y;               // (parts, outputs, group_channels, frequencies)
    long long frequencies, units, units_per_part;
    int first, channels;  // of the input; `first` counts the channels of all inputs
    int groups, group_channels, group_outputs;
    int adds;  // 0 for the first chunk of units
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK)
    spectra_gradient(const __grid_constant__ SpectraGradientParams params) {
    const long long frequencies = params.frequencies;
    const long long outputs = (long long)params.groups * params.group_outputs;
    const long long grad_step = outputs * frequencies, x_step = params.channels * frequencies;  // from unit to unit
    const int most = min(params.channels, params.group_channels);
    const long long begin = blockIdx.z * params.units_per_part;
    const long long end = begin + params.units_per_part < params.units ? begin + params.units_per_part : params.units;

    for (long long row = blockIdx.y; row < outputs * most; row += gridDim.y) {
        const long long o = row / most, g_first = o / params.group_outputs * params.group_channels;
        const long long c = (params.first > g_first ? params.first : g_first) + row % most;
        if (c >= params.first + params.channels || c >= g_first + params.group_channels) continue;
        const T* const grad = static_cast<const T*>(params.grad) + o * frequencies;
        const T* const x = static_cast<const T*>(params.x) + (c - params.first) * frequencies;
        T* const y = static_cast<T*>(params.y) +
                     ((blockIdx.z * outputs + o) * params.group_channels + c - g_first) * frequencies;
        for (long long f = first_share(); f < frequencies; f += share_step()) {
            T sum = params.adds ? y[f] : T(0);
            const T *g_u = grad + begin * grad_step + f, *x_u = x + begin * x_step + f;
#pragma unroll 4
            for (long long u = begin; u < end; ++u, g_u += grad_step, x_u += x_step)
                add_product(sum, conjugate(*g_u), *x_u);
            y[f] = sum;
        }
    }
}
