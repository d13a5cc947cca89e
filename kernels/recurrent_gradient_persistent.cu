// Backpropagation through all steps of a run of a recurrent layer in one launch.  Each block keeps its rows of the
// weight in shared memory.
//
//     part[b, n, j] = sum over block b's k of  dgates[n, k] * weight_hh[k, j]
//     dh[n, j]      = carried[n, j] + sum over b of part[b, n, j] + grad_y[t, n, j]         t = the next step
//
//     M = n (samples), ROWS of a tile     N = j (all units)     K = k (the gates of a block's UNITS units)
//
//                 j ->                        a block: UNITS units, all their gates, of every gridDim.y-th tile of
//     block 0   [ part | part | part ]        samples. It computes the gates' gradients from those of the states,
//     block 1   [ part | part | part ]        without other blocks, multiplies them by its rows of the weight, and
//     block 2   [ part | part | part ]        stores for each block the part that belongs to that block's units.
//                  |      |      |            Then the blocks of a tile wait for each other, and each adds the
//                  v      v      v            parts that all blocks have stored for it. The order is fixed, so that
//     adds up    bl. 0  bl. 1  bl. 2          results are bitwise reproducible.
//
// A step of a tile has the following phases.  For a GRU that resets before the product, n has them first, then r and z:
//
//     load stored data  |  wait  |  add up parts  |  gates' gradients  |  multiply, store parts  |  arrive
//                                ^       ^                             ^                         ^: __syncthreads
//
// Blocks store parts in one half of `parts` while others may still read the other half.  A block overwrites a half only
// after a barrier that follows all reads of it.  Within a part, the pairs (sample, unit) are stored in the order in
// which a warp holds them, so that accesses cover whole cache lines (on CUDA cores, stores cover whole sectors).
//
// Blocks exchange parts instead of gates for the following reason.  With the columns of its units instead of their
// rows, a block would read the gradients of the gates of all blocks, N x 4H for an LSTM, and would split each of them
// for the tensor cores.  With rows, it writes N x H, reads N x H, and splits only its own.  Both variants wait once per
// step.  The table is for an LSTM in float32: bytes of a block through L2, and cycles in which it issues its products,
// per step, by the machine code for sm_90.  The cycles for gates assume the loop of recurrent_persistent.cu, which runs
// about 80 instructions for 8 of K.  At N = 32 there are two rows of blocks for H = 256, and one for H = 1024.
//
//                  N = 1                 N = 8                 N = 32
//     H = 256      2 KB, 1,030 cycles    16 KB, 1,030          32 KB, 1,030     parts
//                  4 KB, 2,560           32 KB, 2,560          64 KB, 2,560     gates
//     H = 1024     8 KB, 4,130           64 KB, 4,130         256 KB, 8,260     parts
//                 16 KB, 10,240         128 KB, 10,240        512 KB, 20,480    gates
//
// With parts, a GRU moves 2 numbers instead of 3, and an RNN moves 2 instead of 1.  For an RNN at H = 1024 and N = 8,
// these are 32 KB more, less than a microsecond, but 1,500 cycles instead of 2,560.  If CUDA cores read the weight from
// L2 at every step, an LSTM needs 4,350 cycles (H = 256) and 17,400 cycles (H = 1024).
//
// Bound by the barrier for few samples; by parts through L2, or by tensor cores, for many.
// Floor: T steps of 2 * N * H numbers of each block over the bandwidth of L2, or of a round trip to it.
//
// -D: those of recurrent_back.cuh, and ARITHMETIC (TF32X3, which is two products for 16-bit weights; or the kind of
//     tensor_core.cuh for CUDA cores)
#include "grid_barrier.cuh"
#include "recurrent_back.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

using namespace cupyconv;

constexpr int BLOCK = 256, WARPS = BLOCK / WARP, ROWS = 16, UNITS = 8, PAIRS = ROWS * UNITS;
constexpr int PITCH = UNITS + 4;  // of a row of gates' gradients: eight rows, read at once, are in different banks
constexpr int APART = 32;         // distance between counters, each of which has its own cache line

struct Shared {
    union {
        alignas(16) A parts[WARPS][PAIRS];  // of the state's gradient, one per warp: each the sum over some blocks
        A sums[MOST_ROWS][PAIRS];           // of all steps, to be added over samples
    };
    alignas(16) A gates[GATES][ROWS * PITCH];  // n, unit
};
static_assert(MOST_ROWS <= WARPS && MOST_ROWS * UNITS <= BLOCK && PAIRS <= BLOCK, "of a pair, or a sum, there is a thread");

// The data of a block that stay the same for the whole launch.
struct Block {
    const RecurrentGradientParams& p;
    Shared& shared;
    T* weight;         // in shared memory: (gate, unit), j
    int pitch;         // an odd multiple of UNITS, so that the rows of a fragment are in different banks
    long long tiles;   // of samples

    __device__ __forceinline__ Block(const RecurrentGradientParams& p, Shared* shared)
        : p(p), shared(*shared), weight(reinterpret_cast<T*>(shared + 1)), pitch((gridDim.x | 1) * UNITS),
          tiles((p.batch + ROWS - 1) / ROWS) {}

    __device__ __forceinline__ int direction() const { return p.first_direction + blockIdx.z; }

    // Copy the block's rows of the weight, with zeros for units that do not exist.
    __device__ __forceinline__ void fetch_weight() const {
        constexpr int CHUNK = 16 / sizeof(T);
        const int hidden = p.hidden, chunks = pitch / CHUNK;
        const T* const first = stored(p.weight_hh, (long long)direction() * GATES * hidden * hidden);
        const bool vectorized = hidden % CHUNK == 0 && reinterpret_cast<unsigned long long>(first) % 16 == 0;
        for (int i = threadIdx.x; i < GATES * UNITS * chunks; i += BLOCK) {
            const int row = i / chunks, j = i % chunks * CHUNK, u = blockIdx.x * UNITS + row % UNITS;
            const int columns = u < hidden ? hidden - j : 0;
            const T* const from = first + ((long long)(row / UNITS) * hidden + u) * hidden + j;
            T* const to = weight + row * pitch + j;
            if (vectorized) {
                copy_async<16>(to, columns > 0 ? from : first, columns > 0);
            } else {
                for (int e = 0; e < CHUNK; ++e) to[e] = e < columns ? from[e] : T{};
            }
        }
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
    }

    // The part of a tile that block `source` stores for block `target`, in the half that this exchange uses.
    __device__ __forceinline__ A* part(unsigned exchange, long long tile, int target, int source) const {
        const long long half = exchange % 2 * gridDim.z + blockIdx.z;
        return write(p.parts, (((half * tiles + tile) * gridDim.x + target) * gridDim.x + source) * PAIRS);
    }

    __device__ __forceinline__ unsigned* counter(long long tile) const {
        return p.counters + (blockIdx.z * tiles + tile) * APART;
    }

    // Multiply the gates from `first` to before `end`, which are in shared memory, and store the parts for all blocks.
    __device__ __forceinline__ void multiply(unsigned exchange, long long tile, int rows, int first, int end) const {
        A* const parts = part(exchange, tile, 0, blockIdx.x);
        if constexpr (ARITHMETIC == TF32X3)
            multiply_on_tensor_cores(parts, rows, first, end);
        else
            multiply_on_cuda_cores(parts, rows, first, end);
    }

    // The sum over all blocks of the parts for this thread's pair.  The block has to synchronize before the next call.
    __device__ __forceinline__ A gathered(unsigned exchange, long long tile, int rows) const {
        constexpr int CHUNK = 16 / sizeof(A);
        const int blocks = gridDim.x;
        const A* const parts = part(exchange, tile, blockIdx.x, 0);
        for (int place = lane_index() * CHUNK; place < PAIRS; place += WARP * CHUNK) {
            Vector<A, CHUNK> sum = {};
            if (place / UNITS < rows) {
#pragma unroll 8
                for (int source = warp_index(); source < blocks; source += WARPS) {
                    const auto more = load_vector<CHUNK>(parts + source * PAIRS + place);
#pragma unroll
                    for (int e = 0; e < CHUNK; ++e) sum.lane[e] += more.lane[e];
                }
            }
            *reinterpret_cast<Vector<A, CHUNK>*>(shared.parts[warp_index()] + place) = sum;
        }
        __syncthreads();
        A total = A(0);
        if (threadIdx.x < PAIRS) {
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) total += shared.parts[warp][threadIdx.x];
        }
        return total;
    }

  private:
    // Elements from the part for one block to the part for the next.
    __device__ __forceinline__ int apart() const { return gridDim.x * PAIRS; }

    // A thread computes columns j for all samples, and adds over the gates.
    __device__ __forceinline__ void multiply_on_cuda_cores(A* parts, int rows, int first, int end) const {
        constexpr int CHUNK = 16 / sizeof(A);
        for (int j = threadIdx.x; j < int(gridDim.x) * UNITS; j += BLOCK) {
            A sum[ROWS] = {};
#pragma unroll 1
            for (int g = first; g < end; ++g) {
                A w[UNITS];
#pragma unroll
                for (int u = 0; u < UNITS; ++u) w[u] = widen(weight[(g * UNITS + u) * pitch + j]);
#pragma unroll
                for (int n = 0; n < ROWS; ++n) {
                    if (n >= rows) break;
#pragma unroll
                    for (int u = 0; u < UNITS; u += CHUNK) {
                        const auto gates = load_vector<CHUNK>(shared.gates[g] + n * PITCH + u);
#pragma unroll
                        for (int e = 0; e < CHUNK; ++e) sum[n] += gates.lane[e] * w[u + e];
                    }
                }
            }
            A* const to = parts + (long long)(j / UNITS) * apart() + j % UNITS;
#pragma unroll
            for (int n = 0; n < ROWS; ++n)
                if (n < rows) to[n * UNITS] = sum[n];
        }
    }

    // A warp computes the columns of one block's units at a time.  The UNITS of a gate are K of one instruction.
    __device__ __forceinline__ void multiply_on_tensor_cores(A* parts, int rows, int first, int end) const {
        constexpr bool WIDE = sizeof(T) == 4;  // TF32 represents a 16-bit weight exactly
        unsigned high[GATES][4], low[GATES][4], finite_high[GATES][4];
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
            load_matrices(high[g], shared.gates[g] + lane_index() % 16 * PITCH + lane_index() / 16 * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Split<true> split(high[g][i]);
                high[g][i] = split.high, low[g][i] = split.low, finite_high[g][i] = split.finite_high;
            }
        }
        const int row = lane_index() / 4, word = lane_index() % 4;
#pragma unroll 1
        for (int target = warp_index(); target < int(gridDim.x); target += WARPS) {
            float sum[GATES][4] = {};
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                if (g < first || g >= end) continue;
                unsigned w[2], w_low[2], w_finite[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float value = widen(weight[(g * UNITS + i * 4 + word) * pitch + target * UNITS + row]);
                    w[i] = __float_as_uint(value);
                    if (WIDE) {
                        const Split<true> split(w[i]);
                        w[i] = split.high, w_low[i] = split.low, w_finite[i] = split.finite_high;
                    } else {
                        w_finite[i] = finite_part(w[i]);
                    }
                }
                multiply_add<tf32>(sum[g], low[g], w_finite);
                if (WIDE) multiply_add<tf32>(sum[g], finite_high[g], w_low);
                multiply_add<tf32>(sum[g], high[g], w);
            }
            A* const to = parts + (long long)target * apart() + 2 * word;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Vector<float, 2> two = {};
#pragma unroll
                for (int g = 0; g < GATES; ++g)
#pragma unroll
                    for (int e = 0; e < 2; ++e) two.lane[e] += sum[g][2 * half + e];
                const int n = row + 8 * half;
                if (n < rows) *reinterpret_cast<Vector<float, 2>*>(to + n * UNITS) = two;
            }
        }
    }
};

// One step of a tile, as drawn above, after `exchanges` exchanges of each tile.  If all steps of the run are done, it
// only hands on the gradient of the state.  The contribution of the thread's pair to the sums over samples is added to
// `totals`.
__device__ __forceinline__ void take_step(
    const Block& block, long long tile, int steps_done, unsigned exchanges, A (&totals)[MOST_ROWS]) {
    const RecurrentGradientParams& p = block.p;
    const int d = block.direction();
    const bool hands_on = steps_done == p.count;
    // Within the run: this step, and the step done before it.
    const long long step = p.sign[d] > 0 ? p.count - 1 - steps_done : steps_done, before = step + p.sign[d];

    const int j = blockIdx.x * UNITS + threadIdx.x % UNITS;
    const long long n = tile * ROWS + threadIdx.x / UNITS, left = p.batch - tile * ROWS;
    const int rows = left < ROWS ? int(left) : ROWS;
    const bool inside = threadIdx.x < PAIRS && j < p.hidden && n < p.batch;
    const Place at(p, blockIdx.z, j, n, step, inside);
    const bool takes_step = inside && !hands_on && at.reached();
    Kept kept;
    if (inside) kept.load_state(at, steps_done);
    if (takes_step) kept.load(at);

    A product = A(0);
    const auto receive = [&] {
        await(block.counter(tile), exchanges * gridDim.x);
        product = block.gathered(exchanges - 1, tile, rows);
    };
    if (steps_done > 0) receive();

    A dh = A(0), sums[MOST_ROWS] = {};
    const auto take = [&](auto gates) {
        dh = kept.dh;
        if (steps_done > 0 && p.first[d] + before < at.length) dh += product;
        if (takes_step) {
            dh = back_through_step(at, kept, gates, dh, sums);
        } else {
            if (!hands_on) skip_step(at);
            if (CELL == LSTM && steps_done == 0) *write(p.carried_c, at.state) = kept.dc;
        }
    };
    if (inside) {
        if (p.default_gates)
            take(DefaultSlopes{});
        else
            take(GivenSlopes{p, d});
    }
    const auto send = [&](int first, int end) {
        if (threadIdx.x < PAIRS) {
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                const bool of_q = CELL == GRU && g == 2 && !p.reset_first;
                block.shared.gates[g][threadIdx.x / UNITS * PITCH + threadIdx.x % UNITS] = of_q ? sums[MOST_ROWS - 1] : sums[g];
            }
        }
        __syncthreads();
        block.multiply(exchanges, tile, rows, first, end);
        arrive(block.counter(tile));
        ++exchanges;
    };
    if (CELL == GRU && p.reset_first && !hands_on) {
        send(2, 3);
        receive();
        if (takes_step) {
            if (p.default_gates)
                dh += back_through_reset(at, DefaultSlopes{}, kept.gate[0], kept.h_before, product, sums);
            else
                dh += back_through_reset(at, GivenSlopes{p, d}, kept.gate[0], kept.h_before, product, sums);
        }
        if (inside) *write(p.carried_h, at.state) = dh;
        send(0, 2);
    } else {
        if (inside) *write(p.carried_h, at.state) = dh;
        if (!hands_on) send(0, GATES);
    }
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) totals[row] += sums[row];
}

// Add each row of the totals over the block's samples, in order, to the sums of previous runs, or to 0 in the first.
__device__ __forceinline__ void add_over_samples(const Block& block, const A (&totals)[MOST_ROWS]) {
    const RecurrentGradientParams& p = block.p;
    __syncthreads();  // the last parts have been read
    if (threadIdx.x < PAIRS) {
#pragma unroll
        for (int row = 0; row < MOST_ROWS; ++row) block.shared.sums[row][threadIdx.x] = totals[row];
    }
    __syncthreads();
    const int row = threadIdx.x / UNITS, unit = threadIdx.x % UNITS, j = blockIdx.x * UNITS + unit;
    if (row >= p.sum_rows || j >= p.hidden) return;
    const long long first_row = ((long long)blockIdx.y * p.directions + block.direction()) * p.sum_rows;
    A* const to = write(p.sums, (first_row + row) * p.hidden + j);
    A sum = p.begins ? A(0) : *to;
#pragma unroll
    for (int n = 0; n < ROWS; ++n) sum += block.shared.sums[row][n * UNITS + unit];
    *to = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    recurrent_gradient_persistent(const __grid_constant__ RecurrentGradientParams params) {
    DYNAMIC_SHARED(Shared, shared);
    const Block block(params, shared);
    block.fetch_weight();
    A totals[MOST_ROWS] = {};
    unsigned exchanges = 0;  // of each tile, so far
    for (int steps_done = 0; steps_done <= params.count; ++steps_done) {
        for (long long tile = blockIdx.y; tile < block.tiles; tile += gridDim.y)
            take_step(block, tile, steps_done, exchanges, totals);
        exchanges += CELL == GRU && params.reset_first ? 2 : 1;
    }
    add_over_samples(block, totals);
}
