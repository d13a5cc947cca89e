// Many steps of a recurrent layer in one launch.  Each block keeps its rows of the weight in shared memory.
//
//     y[t, n, (d, u)] = h'[d, n, u] = cell( x[d, t, n, (g, u)] + sum_k weight[d, (g, u), k] * h[d, n, k] )
//                                                                                         t = step, step + 1, ...
//
//     M = n (samples)    N = (g, u) (gates of hidden units)    K = k (hidden units)
//
//               units ->                   a block: UNITS units, all their gates, of every gridDim.y-th tile of samples
//      n    [ block | block | ... ]        (recurrent_tile.cuh); after each step of a tile the blocks of a row wait for
//      ↓    [ block | block | ... ]        each other (grid_barrier.cuh), since they share the state of its samples
//
// h is exchanged through memory, from one half of `states` to the other.  A block reads the state of step s after the
// barrier before that step, and overwrites it after the barrier that follows.  If a block has one tile, a thread keeps
// h and c of its own unit in registers.  A step of a tile has these phases:
//
//     load x  |  wait for the tile's h  |  fetch h  multiply  |  add up  activate  store h  |  arrive  |  store y, ...
//                                       ^                     ^                             ^: __syncthreads
//
// GATES = 2 is for a GRU that resets before the product: r and z, a barrier, then n.
//
// Bound by the barrier for few samples, then by reading h from L2, by arithmetic for many.
// Floor: T steps of 2 * M * N * K operations over the rate of CUDA cores, or of a round trip to L2.
//
// -D: DTYPE (storage type), ARITHMETIC (one of recurrent_products.cuh), GATES (rows of the weight per unit, in a
//     product), SAMPLES (per thread: 1 or 4), GIVEN_GATES (1: gates have the given activations and the given clip;
//     0: they are sigmoid and tanh, without any code for others)
#include "grid_barrier.cuh"
#include "recurrent_tile.cuh"

#ifndef GIVEN_GATES
#define GIVEN_GATES 0
#endif

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = ResidentTile<T, GATES, SAMPLES, ARITHMETIC>;
using Candidate = ResidentTile<T, 1, SAMPLES, ARITHMETIC>;  // the third gate if GATES = 2
constexpr bool TWO_PRODUCTS = GATES == 2;
constexpr int APART = 32;  // distance between counters, each of which has its own cache line

// The barrier counter of a tile of samples.
__device__ __forceinline__ unsigned* counter_of(const RecurrentParams& params, int n_first) {
    const int tiles = (params.batch + Tile::ROWS - 1) / Tile::ROWS;
    return params.counters + ((long long)blockIdx.z * tiles + n_first / Tile::ROWS) * APART;
}

// One step of all tiles of the block, as drawn above.  For each tile, it waits until the tile's counter has reached
// `arrivals`.  If the block `stays` with one tile, `tile` and `cell` are reused from the previous step.
template <class Part, int COUNT>
__device__ __forceinline__ void take_step(
    Part& tile, UnitCell<T, COUNT>& cell, typename Part::Shared& shared, const A* rows, const T* weight, int pitch,
    int step, unsigned arrivals, bool stays) {
    const RecurrentParams& params = tile.params;
    const bool begins = !stays || step == params.step, goes_on = stays && step + 1 < params.step + params.count;
    for (int n_first = blockIdx.y * Tile::ROWS; n_first < params.batch; n_first += gridDim.y * Tile::ROWS) {
        if (begins) {
            tile.move_to(n_first);
            cell.begin(params, tile.d, tile.sample(0), tile.unit(0), step);
        }
        unsigned* const counter = counter_of(params, n_first);
        cell.load(params);
        A sum[COUNT] = {};
        tile.multiply(shared, rows, weight, pitch, sum, [&] { await(counter, arrivals); });
        cell.add_bias();
        if constexpr (GIVEN_GATES)
            cell.finish(params, sum, GivenGates{params, tile.d});
        else
            cell.finish(params, sum, DefaultGates{});
        cell.publish(params);
        arrive(counter);
        cell.record(params, tile.d, tile.sample(0), tile.unit(0), step, goes_on);
        if (goes_on) cell.advance(params);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::THREADS, 1)
    recurrent_persistent(const __grid_constant__ RecurrentParams params) {
    DYNAMIC_SHARED(Tile::Shared, shared);
    T* const weight = reinterpret_cast<T*>(shared + 1);
    const int columns = (params.hidden + Tile::K - 1) / Tile::K * Tile::K, pitch = columns + Tile::CHUNK;
    const int d = blockIdx.z, u_first = blockIdx.x * Tile::UNITS;
    Tile tile(d, u_first, params);
    Candidate candidate(d, u_first, params);
    const auto keep_rows = [&](const auto& part, T* to, int first_gate) {
        part.fetch_weight(to, pitch, params.weight, params.weight_vector, params.hidden, 0, columns, first_gate);
    };
    keep_rows(tile, weight, 0);
    T* const weight_of_n = weight + GATES * Tile::UNITS * pitch;
    if constexpr (TWO_PRODUCTS) keep_rows(candidate, weight_of_n, 2);
    commit_copies();

    unsigned arrivals = 0;  // to wait for at each counter
    if (params.step == 0) {  // h0 becomes a state like any other
        for (int n_first = blockIdx.y * Tile::ROWS; n_first < params.batch; n_first += gridDim.y * Tile::ROWS) {
            tile.move_to(n_first);
            publish_first<T>(params, d, tile.sample(0), tile.unit(0));
            arrive(counter_of(params, n_first));
        }
        arrivals = gridDim.x;
    }
    wait_for_copies<0>();
    __syncthreads();

    UnitCell<T, GATES> cell;
    const bool stays = !TWO_PRODUCTS && params.batch <= int(gridDim.y) * Tile::ROWS;
    for (int step = params.step; step < params.step + params.count; ++step, arrivals += gridDim.x) {
        take_step(tile, cell, *shared, state_at<A>(params, step % 2, d, 0), weight, pitch, step, arrivals, stays);
        if constexpr (TWO_PRODUCTS) {
            arrivals += gridDim.x;
            auto& part = reinterpret_cast<Candidate::Shared&>(*shared);
            UnitCell<T, 1> cell_of_n;
            const A* const rows = reset_state_at<A>(params, d, step);
            take_step(candidate, cell_of_n, part, rows, weight_of_n, pitch, step, arrivals, false);
        }
    }
}
