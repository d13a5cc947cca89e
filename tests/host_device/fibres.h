// The interface between a kernel compiled for the host and the runtime that executes it.
//
// cuda_on_host.h maps CUDA's names to these calls; fibres.cpp implements them.  This file does not use the C++ standard
// library, because it is part of every kernel's translation unit, and that keeps compile times short.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
};

// The runtime sets these whenever it switches to another CUDA thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_host {

constexpr int lanes_per_warp = 32;

// A place in a kernel's source, for error messages.
struct Site {
    const char* file;
    int line;
};

// __syncthreads: returns when all threads of the block that have not exited have arrived.
void synchronise_block(Site site);

// Returns after other blocks have run as far as they could; only valid in a cooperative launch.
void wait_for_other_blocks(Site site);

// Must be called when a wait for other blocks has ended.  If no block ever calls it, there is a deadlock.
void found_other_blocks();

// Evaluates a warp operation after all its lanes have arrived: reads inputs[lane], writes outputs[lane].
using WarpFunction = void (*)(unsigned mask, const void* const* inputs, void* const* outputs);

// The lanes of `mask` meet.  The last lane to arrive calls `function` for all of them (unless it is null).
// `orders_memory` says whether the meeting is a memory barrier as well: __syncwarp is one, a shuffle is not.
void meet_warp(unsigned mask, const void* input, void* output, WarpFunction function, bool orders_memory, Site site);

// The same for operations of a whole warp; a warp with fewer than 32 lanes is an error.
void meet_whole_warp(const void* input, void* output, WarpFunction function, Site site);

// This thread's position in its warp.
int lane();

// The block's static array with this identity, initialized to 0xff.
void* static_shared_memory(const void* identity, size_t bytes, size_t alignment, Site site);

// The launch's dynamic shared memory, initialized to 0xff.
void* dynamic_shared_memory(Site site);

// Fails unless these bytes are inside one of the block's shared arrays, at an address that is a multiple of `bytes`.
void check_shared_access(const void* address, int bytes, Site site);

// A copy from global to shared memory that a thread has issued and has not waited for.
struct PendingCopy {
    void* shared;
    const void* global;
    int bytes;
    bool valid;  // otherwise zeros are written and nothing is read
    Site site;
};

// Checks the addresses and records the copy; does not access memory.
void issue_copy(const PendingCopy& copy);

// Forms a group, possibly an empty one, of the copies that this thread has issued since its last commit.
void commit_copies();

// Removes the oldest copy of this thread outside its `pending` newest groups; returns false if there is none.
bool take_arrived_copy(unsigned pending, PendingCopy& copy);

// The configuration of a launch; mirrored in build.py.
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    uint64_t dynamic_shared_bytes;
    uint64_t seed;
    int order;   // 0 ascending, 1 descending, 2 random: for threads and blocks
    int cooperative;  // all blocks are resident, so that they may wait for each other
    int strict;  // refuses what hardware tolerates: threads that exit before a barrier, lanes that do not exist
};

}  // namespace cuda_on_host
