// Right: result (16 x 8) = sum + A (16 x 4) B (4 x 8) by one warp, all in C order but B, whose k is contiguous.
#include "sample.cuh"

extern "C" __global__ void multiply_doubles(const SampleParams params) {
    const int row = threadIdx.x / 4, word = threadIdx.x % 4;
    double sum[4], a[2];
    for (int i = 0; i < 4; ++i)
        sum[i] = static_cast<const double*>(params.sum)[(row + i / 2 * 8) * 8 + word * 2 + i % 2];
    for (int i = 0; i < 2; ++i) a[i] = static_cast<const double*>(params.a)[(row + i * 8) * 4 + word];
    cupyconv::multiply_add(sum, a, static_cast<const double*>(params.b)[row * 4 + word]);
    for (int i = 0; i < 4; ++i)
        static_cast<double*>(params.result)[(row + i / 2 * 8) * 8 + word * 2 + i % 2] = sum[i];
}
