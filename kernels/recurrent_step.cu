// One step of a recurrent layer: the recurrent product, all gates and the new state, in one launch for all directions.
//
//     y[t, n, (d, u)] = h'[d, n, u] = cell( x[d, t, n, (g, u)] + sum_k weight[d, (g, u), k] * h[d, n, k] )
//
//     M = n (samples)    N = (g, u) (gates of hidden units)    K = k (hidden units)
//
//               units ->                   a block: ROWS samples x UNITS units, all their gates (recurrent_tile.cuh)
//      n    [ block | block | ... ]        grid: (units, samples, directions)
//      ↓    [ block | block | ... ]        t is `step`, or counted from the end
//
// x is the projection of all steps, which `gates` contains.  If there is a single step, the kernel projects its inputs
// itself, before the recurrent product.  Each step reads h from one half of `states` and writes it to the other.  A GRU
// that resets before the product needs two launches: GATES = 2 for r and z, then GATES = 1 for n.  A sequence of no
// steps is executed as one step past the end of every sample: the initial state becomes the last state.
//
// Bound by the launch for few samples, then by reading the weight from L2, then by arithmetic.
// Floor: G * H * H elements of weight over the bandwidth of L2, or 2 * M * N * K operations over the rate of CUDA
// cores.
//
// -D: DTYPE (storage type), ARITHMETIC (one of recurrent_products.cuh), GATES (rows of the weight
//     per unit, in this product), SAMPLES (per thread: 4 or 8)
#include "recurrent_tile.cuh"

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
using Tile = StreamedTile<T, GATES, SAMPLES, ARITHMETIC>;
// If a thread has one unit, its inputs are loaded before the product.  For several, there are not enough registers.
constexpr bool EARLY = Tile::PAIRS_PER_THREAD == 1;

extern "C" __global__ void __launch_bounds__(Tile::THREADS, sizeof(A) == 4 ? 2 : 1)
    recurrent_step(const __grid_constant__ RecurrentParams params) {
    DYNAMIC_SHARED(Tile::Shared, shared);
    const int d = blockIdx.z, step = params.step;
    const Tile tile(d, int(blockIdx.y) * Tile::ROWS, int(blockIdx.x) * Tile::UNITS, params);

    UnitCell<T, GATES> cell;
    const auto load = [&](int i) {
        cell.begin(params, d, tile.sample(i), tile.unit(i), step);
        cell.load(params);
        cell.add_bias();
    };
    if (EARLY) load(0);
    if constexpr (EARLY)
        if (params.x.data) tile.multiply_inputs(*shared, [&](int, const A(&sum)[GATES]) { cell.add_inputs(sum); });
    // The left operand is h; null stands for h0.  For a GRU's candidate it is the reset state that r and z left.
    const A* rows = step == 0 ? nullptr : state_at<A>(params, step % 2, d, 0);
    if (GATES == 1 && params.is_candidate) rows = reset_state_at<A>(params, d, step);
    tile.multiply_state(*shared, rows, [&](int i, const A(&sum)[GATES]) {
        if (!EARLY) load(i);
        if (params.default_gates)
            cell.finish(params, sum, DefaultGates{});
        else
            cell.finish(params, sum, GivenGates{params, d});
        cell.publish(params);
        cell.record(params, d, tile.sample(i), tile.unit(i), step, false);
    });
}
