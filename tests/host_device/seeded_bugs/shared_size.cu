// COUNT floats of static shared memory: too many, from 48 KiB on.
#include "sample.cuh"

extern "C" __global__ void shared_size(const SampleParams params) {
    SHARED_ARRAY(float, tile, COUNT);
    tile[threadIdx.x] = params.x[threadIdx.x];
    params.y[threadIdx.x] = tile[threadIdx.x];
}
