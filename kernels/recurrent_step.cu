// One step of a recurrent layer: the recurrent product, all gates, the new state, in one launch for all directions.
//
//     y[t, n, (d, u)] = h'[d, n, u] = cell( x[d, t, n, (g, u)] + sum_k weight[d, (g, u), k] * h[d, n, k] )
//
//     M = n (samples)    N = (g, u) (gates of hidden units)    K = k (hidden units)
//
//               units ->                   a block: ROWS samples x UNITS units, all their gates (recurrent_tile.cuh)
//      n    [ block | block | ... ]        grid: (units, samples, directions)
//      ↓    [ block | block | ... ]        t is `step`, or counted from the end
//
// x is what the projection of all steps has left in `gates`, or a single step's own product, before the other.  h goes
// from one half of `states` to the other, from step to step.  A gru that resets before the product takes two launches:
// GATES = 2, r and z, then GATES = 1, n.
// A sequence of no steps is one step that is past every sample's end: the initial state becomes the last.
//
// Bound by the launch for few samples, then by reading the weight from L2, then by arithmetic.
// Floor: G * H * H elements of weight over the bandwidth of L2, or 2 * M * N * K operations over the rate of CUDA
// cores.
//
// -D: DTYPE (storage type), ARITHMETIC (one of recurrent_products.cuh), GATES (rows of the weight
//     a unit, in this product), SAMPLES (of a thread: 4 or 8)
#include "recurrent_tile.cuh"

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = RecurrentTile<T, GATES, SAMPLES, ARITHMETIC, false>;
// One unit's inputs wait in registers while the product is on its way; where a thread has several, there are none left.
constexpr bool EARLY = Tile::PAIRS_PER_THREAD == 1;

extern "C" __global__ void __launch_bounds__(Tile::THREADS, 2)
    recurrent_step(const __grid_constant__ RecurrentParams params) {
    DYNAMIC_SHARED(Tile::Shared, shared);
    const int d = blockIdx.z, step = params.step;
    const Tile tile = {d, int(blockIdx.y) * Tile::ROWS, int(blockIdx.x) * Tile::UNITS, params};

    CellStep<T, GATES> cell;
    if (EARLY) cell.load(params, tile.unit(0, step));
    const A* const rows = cell.factor(params, d, step);
    if constexpr (EARLY)
        if (params.x.data) tile.multiply_inputs(*shared, [&](int, const A(&sum)[GATES]) { cell.add_sums(sum); });
    tile.multiply_state(*shared, rows, nullptr, 0, [&](int i, const A(&sum)[GATES]) {
        const Unit unit = tile.unit(i, step);
        if (!EARLY) cell.load(params, unit);
        cell.finish(params, unit, sum);
    });
}
