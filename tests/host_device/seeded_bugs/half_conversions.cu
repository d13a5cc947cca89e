// Right: y = x rounded to HALF and back (TO, FROM), one element a thread.
#include "sample.cuh"

extern "C" __global__ void half_conversions(const SampleParams params) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < params.n) params.y[i] = FROM(TO(params.x[i]));
}
