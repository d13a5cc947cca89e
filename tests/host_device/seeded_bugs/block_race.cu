// Bug: several blocks add to the same elements without an atomic.
#include "sample.cuh"

extern "C" __global__ void block_race(const SampleParams params) {
    params.y[threadIdx.x] += params.x[threadIdx.x];
}
