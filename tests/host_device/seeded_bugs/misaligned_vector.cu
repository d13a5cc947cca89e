// Bug: a 16-byte load from a shared array of floats, which is aligned to 4 bytes.
#include "sample.cuh"

extern "C" __global__ void misaligned_vector(const SampleParams params) {
    SHARED_ARRAY(float, tile, 64);
    tile[threadIdx.x] = params.x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) params.y[0] = reinterpret_cast<const float4*>(tile)->y;
}
