// How the sum over inputs, taps and channels is cut into slabs, which a tiled GEMM steps through.
//
//     K = (run, block, tap, channel)       a run: what one group reads of one input; a block: a slab's worth of channels
//
//     | run 0                                                   | run 1    ...
//     | block 0               | block 1     ...  | last block   |
//     | tap 0 | tap 1 | ..    | tap 0 | tap 1    | tap 0 |..| 0 |    c: a K-chunk, a few channels of one tap that are
//     | c c c | c c c |       | c c c | c c c    | c c   |  |   |       copied together; the last of a run ends in zeros
//      \____/                                    \_______/              0: zeros up to a whole number of slabs
//      a K-slab                                  a K-slab
//
// A slab never spans two inputs, so the source is chosen once per slab.  A K-chunk never spans two taps, so the window
// position is computed once per K-chunk.  The taps of a block follow each other, so that elements shared by windows are
// read again while they are in the L1 cache: a block at a tile's pixels and their neighbours is a few KiB.  A kernel of
// one tap reads no neighbours; there a run is one block.
#pragma once
#include "image.cuh"

namespace cupyconv {

// Maximum number of convolutions of a grid: the phases of a transposed convolution of stride 2 along three axes.
constexpr int MAX_PHASES = 8;

// Channels of the next block, if `left` channels of its run remain.
__device__ __forceinline__ int block_channels(const int (&kernel)[3], int left, int slab) {
    return product_of(kernel) > 1 ? min(left, slab) : left;
}

struct Run {
    int source = -1;      // index in the table of sources
    int first, channels;  // channels of that source
    int padded;           // `channels`, rounded up to whole K-chunks
    int slabs;

    // Go to the next run of the group that reads channels c_first ... c_end - 1.  Returns false after the last run.
    __device__ bool next(const Sources& sources, int c_first, int c_end, int taps, int k_chunk, int slab) {
        while (++source < sources.count) {
            const Source& s = sources.table[source];
            const int from = max(c_first, s.first), to = min(c_end, s.first + s.channels);
            if (from >= to) continue;
            first = from - s.first;
            channels = to - from;
            padded = (channels + k_chunk - 1) / k_chunk * k_chunk;
            slabs = (padded * taps + slab - 1) / slab;
            return true;
        }
        return false;
    }
};

}  // namespace cupyconv
