// result[lane][i] = register i of load_matrices from rows of 16 bytes that begin where ROW says, for lanes < LANES.
//
// Right where all 32 lanes load and rows are aligned and in their array.
#include "sample.cuh"

extern "C" __global__ void load(const SampleParams params) {
    SHARED_ARRAY(uint4, memory, 32);
    copy_to_shared(memory, params.a);
    __syncthreads();
    const int lane = threadIdx.x;
    const char* const bytes = reinterpret_cast<const char*>(memory);
    unsigned fragment[4] = {};
    if (lane < LANES) cupyconv::LOAD(fragment, bytes + (ROW));
    for (int i = 0; i < 4; ++i) static_cast<unsigned*>(params.result)[4 * lane + i] = fragment[i];
}
