// Right: y = FUNCTION(x); a float stays a float in every overload, and NaN loses against a number.
#include "sample.cuh"

static_assert(sizeof(exp(1.0f)) == 4 && sizeof(exp(1.0)) == 8, "exp");
static_assert(sizeof(tanh(1.0f)) == 4 && sizeof(erf(1.0f)) == 4 && sizeof(log1p(1.0f)) == 4, "overloads for float");
static_assert(sizeof(max(1.0f, 2.0f)) == 4 && sizeof(fma(1.0f, 2.0f, 3.0f)) == 4, "overloads for float");
static_assert(alignof(float4) == 16 && alignof(double2) == 16 && alignof(int2) == 8 && alignof(uchar4) == 4, "vectors");
static_assert(sizeof(float3) == 12 && sizeof(__half2) == 4 && alignof(__nv_bfloat162) == 4, "vectors");

extern "C" __global__ void mathematics(const __grid_constant__ SampleParams params) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < params.n) params.y[i] = FUNCTION(params.x[i]);
}
