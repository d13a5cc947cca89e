// Bug, though one the hardware forgives: some threads return before a barrier.
#include "sample.cuh"

extern "C" __global__ void early_exit(const SampleParams params) {
    SHARED_ARRAY(float, tile, 64);
    if (int(threadIdx.x) >= params.n) return;
    tile[threadIdx.x] = params.x[threadIdx.x];
    __syncthreads();
    params.y[threadIdx.x] = tile[threadIdx.x];
}
