// Bug: the two halves of a block wait at different barriers.
#include "sample.cuh"

extern "C" __global__ void divergent_barrier(const SampleParams params) {
    if (threadIdx.x < 10)
        __syncthreads();
    else
        __syncthreads();
    params.y[threadIdx.x] = params.x[threadIdx.x];
}
