// Many steps of a recurrent layer in one launch: each block keeps its rows of the weight in shared memory.
//
//     y[t, n, (d, u)] = h'[d, n, u] = cell( x[d, t, n, (g, u)] + sum_k weight[d, (g, u), k] * h[d, n, k] )
//                                                                                         t = step, step + 1, ...
//
//     M = n (samples)    N = (g, u) (gates of hidden units)    K = k (hidden units)
//
//               units ->                   a block: UNITS units, all their gates, of every gridDim.y-th tile of samples
//      n    [ block | block | ... ]        (recurrent_tile.cuh); after each step the blocks of a row wait for each
//      ↓    [ block | block | ... ]        other (grid_barrier.cuh): the state of their samples is what they share
//
// h goes through memory, from one half of `states` to the other: who reads step s's is past the barrier before it,
// and who writes over it is past the one behind.  A unit's own state and inputs are loaded before the wait.
// GATES = 2 is a gru that resets before the product: r and z, a barrier, then n.
//
// Bound by the barrier for few samples, by reading h from L2, by arithmetic for many.
// Floor: T steps of 2 * M * N * K operations over the rate of CUDA cores, or of a round trip to L2.
//
// -D: DTYPE (storage type), ARITHMETIC (one of recurrent_products.cuh), GATES (rows of the weight per unit, in a
//     product), SAMPLES (of a thread: 1 or 4)
#include "grid_barrier.cuh"
#include "recurrent_tile.cuh"

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = RecurrentTile<T, GATES, SAMPLES, ARITHMETIC, true>;
using Candidate = RecurrentTile<T, 1, SAMPLES, ARITHMETIC, true>;  // the third gate of GATES = 2
constexpr bool TWO_PRODUCTS = GATES == 2;
constexpr int APART = 32;  // counters, so that each has a line of its own

// A step of the block's samples, one tile after the other; `loaded` is called between the loads of the first one and
// its product.
template <class Part, int COUNT, class F>
__device__ __forceinline__ void advance(
    const RecurrentParams& params, typename Part::Shared& shared, const T* weight, int pitch, int step, F loaded) {
    const int d = blockIdx.z, u_first = blockIdx.x * Part::UNITS;
    for (int n_first = blockIdx.y * Part::ROWS; n_first < params.batch; n_first += gridDim.y * Part::ROWS) {
        const Part tile = {d, n_first, u_first, params};
        static_assert(Part::PAIRS_PER_THREAD == 1, "one unit per thread, whose inputs wait in registers");
        const Unit unit = tile.unit(0, step);
        CellStep<T, COUNT> cell;
        cell.load(params, unit);
        if (n_first == int(blockIdx.y) * Part::ROWS) loaded();
        const A* const rows = cell.factor(params, d, step);
        const auto finish = [&](int, const A(&sum)[COUNT]) { cell.finish(params, unit, sum); };
        tile.multiply_state(shared, rows, weight, pitch, finish);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::THREADS, 1)
    recurrent_persistent(const __grid_constant__ RecurrentParams params) {
    DYNAMIC_SHARED(Tile::Shared, shared);
    T* const weight = reinterpret_cast<T*>(shared + 1);
    const int columns = (params.hidden + Tile::K - 1) / Tile::K * Tile::K, pitch = columns + Tile::CHUNK;
    const int d = blockIdx.z, u_first = blockIdx.x * Tile::UNITS;
    const auto keep_rows = [&](const auto& tile, T* to, int first_gate) {
        tile.fetch_weight(to, pitch, params.weight, params.weight_vector, params.hidden, 0, columns, first_gate);
    };
    keep_rows(Tile{d, 0, u_first, params}, weight, 0);
    T* const weight_of_n = weight + GATES * Tile::UNITS * pitch;
    if constexpr (TWO_PRODUCTS) keep_rows(Candidate{d, 0, u_first, params}, weight_of_n, 2);
    commit_copies();  // waited for before the first product, as any group

    unsigned* const counter = params.counters + (d * gridDim.y + blockIdx.y) * APART;
    unsigned arrivals = 0;  // of all blocks of the row, at the barriers up to here
    const auto pass_barrier = [&] {
        if (arrivals) await(counter, arrivals);
    };
    const auto reach_barrier = [&] {
        arrive(counter);
        arrivals += gridDim.x;
    };
    const int end = params.step + params.count;
    for (int step = params.step; step < end; ++step) {
        advance<Tile, GATES>(params, *shared, weight, pitch, step, pass_barrier);
        if constexpr (TWO_PRODUCTS) {
            reach_barrier();
            auto& part = reinterpret_cast<Candidate::Shared&>(*shared);
            advance<Candidate, 1>(params, part, weight_of_n, pitch, step, pass_barrier);
        }
        if (step + 1 < end) reach_barrier();
    }
}
