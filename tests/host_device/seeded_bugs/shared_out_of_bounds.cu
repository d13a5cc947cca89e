// Bug: the last thread writes behind the shared array.
#include "sample.cuh"

extern "C" __global__ void shared_out_of_bounds(const SampleParams params) {
    SHARED_ARRAY(float, tile, 64);
    tile[threadIdx.x + 1] = params.x[threadIdx.x];
    __syncthreads();
    params.y[threadIdx.x] = tile[threadIdx.x];
}
