// Bug: writes one element more than there is, on the side that SIDE says.
#include "sample.cuh"

extern "C" __global__ void out_of_bounds_write(const SampleParams params) {
    if (threadIdx.x == 0) params.y[SIDE < 0 ? -1 : params.n] = 1.0f;
}
