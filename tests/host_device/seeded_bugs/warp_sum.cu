// Right: y[0] += sum of x, and y[1] the number of negative elements; each warp adds with shuffles.
#include "sample.cuh"

extern "C" __global__ void warp_sum(const SampleParams params) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    float value = i < params.n ? params.x[i] : 0.0f;
    const unsigned negative = __ballot_sync(0xffffffffu, value < 0.0f);
    for (int distance = warpSize / 2; distance > 0; distance /= 2)
        value += __shfl_down_sync(0xffffffffu, value, distance);
    if (threadIdx.x % warpSize == 0) {
        atomicAdd(&params.y[0], value);
        atomicAdd(&params.y[1], float(__popc(negative)));
    }
}
