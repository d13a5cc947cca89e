// Sums per channel: how a thread block walks over the pixels of some channels and reduces the sums of its threads.  The
// order of additions is fixed: each thread adds the elements that it visits, then a tree adds over the block's rows of
// threads.
//
//         channels in rows, lanes = 1              pixels in rows (channels-last), lanes = 32
//
//     c   [ part 0  | part 1  | ...]           p   [lane 0, lane 1, ... | next tile  ]   part 0
//         a block is a part of a channel           [lane 0, lane 1, ... |            ]   part 1
//                                                  a block's rows of threads process pixels, its lanes channels
//
// The sums of the parts are stored in `partial`, as [part, sum].  A later launch of epilogue_grad.cu adds them: it
// reads `partial` as an image whose samples are the parts.
#pragma once
#include "image.cuh"

namespace cupyconv {

constexpr int MAX_BLOCK = 256;

// A thread's position in its block; `lanes` is a power of two.
struct ChannelThread {
    int lanes, lane, row, rows;
    __device__ __forceinline__ explicit ChannelThread(int lanes)
        : lanes(lanes), lane(threadIdx.x % lanes), row(threadIdx.x / lanes), rows(blockDim.x / lanes) {}

    // The first share of pixels of the thread, and the distance to its next one.
    __device__ __forceinline__ long long first() const { return (long long)blockIdx.x * rows + row; }
    __device__ __forceinline__ long long step() const { return (long long)gridDim.x * rows; }
};

// Add COUNT sums of each thread over the block's rows, and store them at `to`, the address for this lane, if `inside`.
// `shared` has COUNT * MAX_BLOCK elements.
template <int COUNT, class A>
__device__ __forceinline__ void add_over_rows(
    const A (&sum)[COUNT], A* shared, const ChannelThread& thread, bool inside, A* to) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) shared[i * MAX_BLOCK + threadIdx.x] = sum[i];
    for (int half = thread.rows / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread.row >= half) continue;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            shared[i * MAX_BLOCK + threadIdx.x] += shared[i * MAX_BLOCK + threadIdx.x + half * thread.lanes];
    }
    if (thread.row == 0 && inside)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = shared[i * MAX_BLOCK + threadIdx.x];
    __syncthreads();  // all reads precede the writes of the next tile
}

}  // namespace cupyconv
