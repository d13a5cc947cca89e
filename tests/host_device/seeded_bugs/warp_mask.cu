// Bug: a shuffle whose MASK is not the set of lanes that take part; lanes from params.n on have exited.
#include "sample.cuh"

extern "C" __global__ void warp_mask(const SampleParams params) {
    if (int(threadIdx.x) >= params.n) return;
    params.y[threadIdx.x] = __shfl_xor_sync(MASK, params.x[threadIdx.x], 1);
}
