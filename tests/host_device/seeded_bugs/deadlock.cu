// Bug: one lane waits for its warp, which waits for the block.
#include "sample.cuh"

extern "C" __global__ void deadlock(const SampleParams params) {
    if (threadIdx.x == 5) __syncwarp();
    __syncthreads();
    params.y[threadIdx.x] = params.x[threadIdx.x];
}
