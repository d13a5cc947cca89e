// Right: y[linear index of the thread in the grid] = that index, from all the built-in variables.
#include "sample.cuh"

extern "C" __global__ void indices(const SampleParams params) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    params.y[i] = float(i) + params.x[0];
}
