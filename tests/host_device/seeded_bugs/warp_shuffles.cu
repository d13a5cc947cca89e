// Right: y = x as seen by the lane that SHUFFLE names; halves of a warp shuffle at the same time where HALVES.
#include "sample.cuh"

extern "C" __global__ void warp_shuffles(const SampleParams params) {
    const unsigned mask = HALVES ? (threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u) : 0xffffffffu;
    params.y[threadIdx.x] = SHUFFLE(mask, params.x[threadIdx.x], params.n, HALVES ? 16 : 32);
    __syncwarp();
}
