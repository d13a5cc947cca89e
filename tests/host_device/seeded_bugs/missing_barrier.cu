// Bug: a thread reads what another one writes, with no barrier between.
#include "sample.cuh"

extern "C" __global__ void missing_barrier(const SampleParams params) {
    SHARED_ARRAY(float, tile, 64);
    tile[threadIdx.x] = params.x[threadIdx.x];
    params.y[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
