// Right: each block of 64 writes its part of x backwards, through static or dynamic shared memory.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(64) block_reverse(const SampleParams params) {
#if DYNAMIC
    DYNAMIC_SHARED(float, tile);
#else
    SHARED_ARRAY(float, tile, 64);
#endif
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    tile[threadIdx.x] = __ldg(params.x + i);
    __syncthreads();
    params.y[i] = tile[blockDim.x - 1 - threadIdx.x];
}
