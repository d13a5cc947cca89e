// What a kernel compiled for the host asks of the runtime that executes it, and nothing else.
//
// cuda_on_host.h spells these calls the way CUDA does; fibres.cpp implements them.  No C++ standard
// library here: this file is part of every kernel's translation unit, whose compile time it keeps short.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
};

// Set by the runtime whenever another CUDA thread goes on.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_host {

constexpr int lanes_per_warp = 32;

// A place in a kernel's source, for error messages.
struct Site {
    const char* file;
    int line;
};

// __syncthreads: returns when every thread of the block that has not exited is here.
void synchronise_block(Site site);

// Returns when other blocks have run, as far as they could; only in a cooperative launch.
void wait_for_other_blocks(Site site);

// To be called when what was waited for has come: where no block ever says so, there is a deadlock.
void found_other_blocks();

// Evaluates a warp operation once all its lanes have arrived: reads inputs[lane], writes outputs[lane].
using WarpFunction = void (*)(unsigned mask, const void* const* inputs, void* const* outputs);

// The lanes of `mask` meet; the last to arrive calls `function` for all of them (a null one does nothing).
// `orders_memory` says whether the meeting is a memory barrier too: __syncwarp is, a shuffle is not.
void meet_warp(unsigned mask, const void* input, void* output, WarpFunction function, bool orders_memory, Site site);

// The same for what takes a whole warp; a warp with fewer than 32 lanes is an error.
void meet_whole_warp(const void* input, void* output, WarpFunction function, Site site);

// This thread's position in its warp.
int lane();

// The block's static array with this identity; it comes filled with 0xff.
void* static_shared_memory(const void* identity, size_t bytes, size_t alignment, Site site);

// The launch's dynamic shared memory; it comes filled with 0xff.
void* dynamic_shared_memory(Site site);

// Fails unless these bytes lie in one of the block's shared arrays, at an address that is a multiple of `bytes`.
void check_shared_access(const void* address, int bytes, Site site);

// A copy from global to shared memory that a thread has issued and not yet waited for.
struct PendingCopy {
    void* shared;
    const void* global;
    int bytes;
    bool valid;  // else zeros are written, and nothing is read
    Site site;
};

// Checks the addresses and remembers the copy; memory is not touched.
void issue_copy(const PendingCopy& copy);

// Makes a group, possibly an empty one, of what this thread has issued since its last commit.
void commit_copies();

// Takes the oldest copy of this thread that is in none of its `pending` newest groups; false where there is none.
bool take_arrived_copy(unsigned pending, PendingCopy& copy);

// How to run a kernel; mirrored in build.py.
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    uint64_t dynamic_shared_bytes;
    uint64_t seed;
    int order;   // 0 ascending, 1 descending, 2 random: of threads and of blocks
    int cooperative;  // all blocks at once, so that they may wait for each other
    int strict;  // refuse what the hardware tolerates: threads that exit before a barrier, lanes that do not exist
};

}  // namespace cuda_on_host
