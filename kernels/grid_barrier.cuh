// A barrier between blocks: each adds one to a counter and waits until all that share it have done so.
//
//     block 0   write h  ->  arrive  ->  await  ->  read h of all blocks
//     block 1   write h  ->  arrive  ->  await  ->  read h of all blocks
//
// The launch is cooperative: blocks that had not begun would be waited for in vain.  The counter begins at 0 and only
// grows, to `blocks` at the first barrier, 2 `blocks` at the second, so nothing is ever reset while someone reads it.
//
// Why every write before is seen by every read behind: __syncthreads orders the block's writes before its speaker's
// addition, which is a release at the scope of the GPU and so carries all that this thread has been ordered after; the
// load that sees the count is an acquire at the same scope, and the second __syncthreads orders it before what the
// other threads of that block read.
#pragma once
#include "portable.cuh"

namespace cupyconv {

#ifndef CUPYCONV_HOST
__device__ __forceinline__ void add_released(unsigned* counter, unsigned value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(value)
                 : "memory");
}

// Returns when the counter has come to `target`.
__device__ __forceinline__ void wait_acquired(const unsigned* counter, unsigned target) {
    unsigned seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(__cvta_generic_to_global(counter))
                     : "memory");
    } while (seen < target);
}
#endif

// Both are called by all threads of a block; what needs nothing of the other blocks may be done between them.  The one
// that speaks for the block is in the last warp, which has nothing else to do there where others have.
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
