// A tile of a matrix in shared memory, in a layout without bank conflicts.
//
// Rows are contiguous, in chunks of 16 bytes.  Eight chunks fill all 32 banks once.  The order of the chunks within a
// row is permuted by the row number (an exclusive or), so that a chunk read from eight neighbouring rows comes from
// eight different groups of banks:
//
//     row 0   0 1 2 3 4 5 6 7        SPREAD 1: one chunk of eight rows (ldmatrix)
//     row 1   1 0 3 2 5 4 7 6        SPREAD 2: two neighbouring chunks of four rows (one element per thread,
//     row 2   2 3 0 1 6 7 4 5                  32 or 64 bits, in the order of a matrix fragment)
//     ...                            SPREAD 0: no permutation (threads read along whole rows)
#pragma once
#include "portable.cuh"

namespace cupyconv {

template <class T, int ROWS_, int COLUMNS_, int SPREAD>
struct SharedTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, ELEMENTS = ROWS * COLUMNS;
    static constexpr int CHUNK = 16 / sizeof(T), CHUNKS = COLUMNS / CHUNK;  // elements per chunk, chunks per row
    static_assert(CHUNK * CHUNKS == COLUMNS && (CHUNKS & (CHUNKS - 1)) == 0, "rows are 2^i chunks");

    // Rows after which the order of the chunks repeats: index(row + PERIOD, column) is PERIOD * COLUMNS more.
    static constexpr int PERIOD = SPREAD ? 8 / SPREAD : 1;

    static __device__ __forceinline__ int index(int row, int column) {
        constexpr int ROWS_PER_LINE = CHUNKS < 8 ? 8 / CHUNKS : 1, MASK = (CHUNKS < 8 ? CHUNKS : 8) - 1;
        const int chunk = column / CHUNK ^ (row * SPREAD / ROWS_PER_LINE & MASK);
        return row * COLUMNS + chunk * CHUNK + column % CHUNK;
    }
};

}  // namespace cupyconv
