// Bug where SYNCHRONISE is empty: lanes read what others write; a warp does not run in step.
#include "sample.cuh"

extern "C" __global__ void warp_race(const SampleParams params) {
    SHARED_ARRAY(float, tile, 32);
    tile[threadIdx.x] = params.x[threadIdx.x];
    SYNCHRONISE;
    params.y[threadIdx.x] = tile[31 - threadIdx.x];
}
