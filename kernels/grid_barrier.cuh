// A barrier between thread blocks: each adds one to a counter and waits until all blocks that share it have done so.
//
//     block 0   write h  ->  arrive  ->  await  ->  read h of all blocks
//     block 1   write h  ->  arrive  ->  await  ->  read h of all blocks
//
// The launch has to be cooperative: otherwise blocks may wait for blocks that never start.  The counter begins at 0 and
// only grows: to `blocks` at the first barrier, to 2 `blocks` at the second.  It is never reset while a block reads it.
//
// Every read after the barrier sees every write before it, for the following reasons.  __syncthreads orders the writes
// of the block before the addition, which one thread does.  The addition is a release at the scope of the GPU, so it
// also publishes the writes that are ordered before it.  The load that sees the count is an acquire at the same scope.
// The second __syncthreads orders this load before the reads of the other threads of that block.
#pragma once
#include "portable.cuh"

namespace cupyconv {

#ifndef CUPYCONV_HOST
__device__ __forceinline__ void add_released(unsigned* counter, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(value)
                 : "memory");
}

// Returns when the counter has reached `target`.
__device__ __forceinline__ void wait_acquired(const unsigned* counter, unsigned target) {
    unsigned seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(__cvta_generic_to_global(counter))
                     : "memory");
    } while (seen < target);
}
#endif

// All threads of a block call both functions.  Work that does not depend on other blocks may be done between them.  The
// thread that speaks for the block is in the last warp, which is idle at places where other warps have work.
__device__ __forceinline__ bool speaks() { return threadIdx.x == blockDim.x - 1; }

__device__ __forceinline__ void arrive(unsigned* counter) {
    __syncthreads();
    if (speaks()) add_released(counter, 1);
}

__device__ __forceinline__ void await(const unsigned* counter, unsigned target) {
    if (speaks()) wait_acquired(counter, target);
    __syncthreads();
}

}  // namespace cupyconv
