// Right where BARRIER is 1 and AWAITED the number of blocks: each block doubles what the next one wrote.
//
// y has a row a block, another row a block, and a counter that is 0.
#include "grid_barrier.cuh"
#include "sample.cuh"

extern "C" __global__ void block_exchange(const SampleParams params) {
    const int first = blockIdx.x * params.n, other = (blockIdx.x + 1) % gridDim.x * params.n;
    float* const second = params.y + gridDim.x * params.n;
    unsigned* const counter = reinterpret_cast<unsigned*>(second + gridDim.x * params.n);
    for (int i = threadIdx.x; i < params.n; i += blockDim.x) params.y[first + i] = params.x[i] + blockIdx.x;
    if (BARRIER) cupyconv::arrive(counter);
    if (BARRIER) cupyconv::await(counter, AWAITED);
    for (int i = threadIdx.x; i < params.n; i += blockDim.x) second[first + i] = 2 * params.y[other + i];
}
