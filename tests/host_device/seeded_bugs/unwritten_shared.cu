// Bug: half of the shared array is read without having been written.
#include "sample.cuh"

extern "C" __global__ void unwritten_shared(const SampleParams params) {
    SHARED_ARRAY(float, tile, 64);
    if (threadIdx.x < 32) tile[threadIdx.x] = params.x[threadIdx.x];
    __syncthreads();
    params.y[blockIdx.x * 64 + threadIdx.x] = tile[threadIdx.x];
}
