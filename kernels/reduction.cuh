// How the sum over inputs, taps and channels is cut into slabs that tiles of a GEMM can step through.
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
// A slab never spans two inputs, so that the source is chosen once per slab, and a K-chunk never two taps, so that
// the window is worked out once per K-chunk.  Taps follow each other within a block, so that what windows share is
// read again while it is in the L1 cache: a block at a tile's pixels and their neighbours is a few KiB.  Without
// neighbours, a kernel of one tap, a run is one block.
#pragma once
#include "image.cuh"

namespace cupyconv {

// Convolutions of one grid: as many phases as a transposed convolution of stride 2 has along three axes.
constexpr int MAX_PHASES = 8;

// Channels of the block that begins with `left` channels of a run to come.
__device__ __forceinline__ int block_channels(const int (&kernel)[3], int left, int slab) {
    return product_of(kernel) > 1 ? min(left, slab) : left;
}

struct Run {
    int source = -1;      // index in the table
    int first, channels;  // of that source
    int padded;           // channels, up to whole K-chunks
    int slabs;

    // Step to the next run of the group that reads channels c_first ... c_end - 1; false after the last.
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
