// Right: result (8 x 8) = sum + A (8 x 4) B (4 x 8) by one warp, all in C order but B, whose k is contiguous.
#include "sample.cuh"

extern "C" __global__ void multiply_doubles(const SampleParams params) {
    const int lane = threadIdx.x;
    double sum[2];
    for (int i = 0; i < 2; ++i) sum[i] = static_cast<const double*>(params.sum)[lane / 4 * 8 + lane % 4 * 2 + i];
    const double a = static_cast<const double*>(params.a)[lane / 4 * 4 + lane % 4];
    const double b = static_cast<const double*>(params.b)[lane / 4 * 4 + lane % 4];
    cupyconv::multiply_add(sum, a, b);
    for (int i = 0; i < 2; ++i) static_cast<double*>(params.result)[lane / 4 * 8 + lane % 4 * 2 + i] = sum[i];
}
