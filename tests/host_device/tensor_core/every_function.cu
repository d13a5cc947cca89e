// Calls every function of tensor_core.cuh, to be compiled rather than run.
#include "sample.cuh"

using namespace cupyconv;

extern "C" __global__ void every_function(const SampleParams params) {
    SHARED_ARRAY(uint4, memory, 128);
    const int lane = threadIdx.x;
    const char* const from = static_cast<const char*>(params.a) + 16 * lane;
    copy_async<16>(memory + lane, from, lane < 30);
    copy_async<8>(memory + 32 + lane, from, lane < 30);
    copy_async<4>(memory + 64 + lane, from, lane < 30);
    copy_async<16, true>(memory + 96 + lane, from, lane < 30);
    commit_copies();
    wait_for_copies<1>();
    wait_for_copies<0>();
    __syncthreads();
    unsigned a[4], b[4];
    load_matrices(a, memory + lane);
    load_matrices_transposed(b, memory + 32 + lane);
    float sum[4] = {};
    multiply_add<float16>(sum, a, {b[0], b[1]});
#ifdef ALL
    multiply_add<bfloat16>(sum, a, {b[0], b[1]});
    multiply_add<tf32>(sum, a, {round_to_tf32(b[0]), b[1]});
    double doubles[4] = {};
    multiply_add(doubles, {sum[0], sum[1]}, sum[2]);
    sum[0] += float(doubles[0]);
    sum[1] += float(doubles[1]);
#endif
    for (int i = 0; i < 4; ++i) static_cast<float*>(params.result)[4 * lane + i] = sum[i];
}
