// Thread t copies 16 bytes from FROM to TO, byte offsets into a and into shared memory, or zeros where not VALID.
//
// Right where both offsets are multiples of 16 inside their array; FROM may be anywhere where not VALID.
#include "sample.cuh"

extern "C" __global__ void copy(const SampleParams params) {
    SHARED_ARRAY(uint4, memory, 32);
    const int t = threadIdx.x;
    char* const to = reinterpret_cast<char*>(memory);
    cupyconv::copy_async<16>(to + (TO), static_cast<const char*>(params.a) + (FROM), VALID);
    cupyconv::commit_copies();
    cupyconv::wait_for_copies<0>();
    static_cast<uint4*>(params.result)[t] = memory[t];
}
