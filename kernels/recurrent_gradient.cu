// One step of backpropagation through time in a recurrent layer: the gradients of the state, then of the gates, for all
// samples and units.
//
//     dh[n, j] = carried[n, j] + sum over k of  dgates[next][n, k] * weight_hh[k, j]  + grad_y[t, n, j]
//     dgates[t][n, gate, j] = dh[n, j] * ...      by the cell, see below; dc is passed on in `carried_c`
//
//     M = n (samples), TILE per block     N = j (units), TILE per block     K = k (gates of the step done before)
//
//     t:      ... | t | t+1 | ...        forward direction: t+1 was done before, t-1 is next; reverse: vice versa
//
//        TILE of j                a block computes its tile, each of its warps a share of K;
//     n [#######]                 then every thread finishes outputs of its own: each gate of (n, j) needs only
//                                 dh[n, j], so that no block waits for another
//
// Both directions may share one launch, as blockIdx.y.  A run of `count` steps has count + 1 launches, each of one
// LaunchKind.  For a GRU that resets before the product, each step has a second launch, RESET:
//
//     steps_done    0             1 ... count - 1        count
//                   FIRST_STEP    LATER_STEP             HAND_ON: the product alone; `carried` then has the gradient
//                                                        of the initial state, or the one the next run begins with
//
// recurrent_back.cuh computes the gradients of the gates from dh.  recurrent_gradient_persistent.cu does the same as
// this kernel in one launch.
//
// This kernel begins the sums over samples for the biases and peepholes: each block adds over its own samples, step by
// step.
//
// Bound by memory (weight_hh and the gates, from the L2 cache), by arithmetic or by launches.
// Floor: weight_hh, and the stored data of a step, once over the bandwidth.
//
// -D: those of recurrent_back.cuh
#include "recurrent_back.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// The kind of a launch, as drawn above.  FIRST_STEP has no product.  The product of RESET is with n of the same step.
enum LaunchKind { FIRST_STEP, LATER_STEP, HAND_ON, RESET };

}  // namespace cupyconv

using namespace cupyconv;

constexpr int BLOCK = 256, WARPS = BLOCK / WARP, TILE = 16;
constexpr int DEPTH = 256 / sizeof(A), SHARE = DEPTH / WARPS;  // of K at a time, per block and per warp
constexpr int ROWS = 2, COLUMNS = 4;                            // of the tile, per lane; a warp has 8 x 4 lanes
constexpr int LEFT_CHUNK = 16 / sizeof(A), WEIGHT_CHUNK = 16 / sizeof(T);
constexpr int LEFT_PITCH = DEPTH + LEFT_CHUNK;
constexpr int STAGES = 4;  // slabs of DEPTH in flight or in use

struct Stage {
    alignas(16) A left[TILE * LEFT_PITCH];  // n, k
    alignas(16) T weight[DEPTH * TILE];     // k, j
};
union Shared {
    Stage stage[STAGES];
    A parts[WARPS * TILE * TILE];  // of the product, one per warp; the warps share K
    A sums[MOST_ROWS * BLOCK];     // of each thread, to be added over samples
};

// The factors of the product.  Rows of the left one are samples; its columns from `split` on are in the array `beyond`.
struct Factors {
    const A *left, *beyond;
    const T* weight;
    long long batch;
    int ld, split, depth, hidden;

    // Whether rows, and chunks of rows, are 16-byte aligned.
    __device__ __forceinline__ bool left_vectorized() const { return hidden % LEFT_CHUNK == 0; }
    __device__ __forceinline__ bool weight_vectorized() const {
        return hidden % WEIGHT_CHUNK == 0 && reinterpret_cast<unsigned long long>(weight) % 16 == 0;
    }

    __device__ __forceinline__ const A* at_left(long long n, int k) const {
        return k < split ? left + n * ld + k : beyond + n * hidden + (k - split);
    }

    // Copy DEPTH of K, from k_first on, with zeros past the end of K and for samples and units that do not exist.
    __device__ __forceinline__ void fetch(Stage& stage, long long n_tile, int j_tile, int k_first) const {
        constexpr int CHUNKS = DEPTH / LEFT_CHUNK, PER_ROW = TILE / WEIGHT_CHUNK;
        static_assert(TILE * CHUNKS == BLOCK && DEPTH * PER_ROW <= BLOCK, "a thread fetches one chunk of each");
        {
            const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS * LEFT_CHUNK, k = k_first + chunk;
            const long long n = n_tile + row;
            A* const to = stage.left + row * LEFT_PITCH + chunk;
            if (left_vectorized()) {
                const bool exists = n < batch && k < depth;
                copy_async<16>(to, exists ? at_left(n, k) : left, exists);
            } else {
                for (int e = 0; e < LEFT_CHUNK; ++e) to[e] = n < batch && k + e < depth ? *at_left(n, k + e) : A(0);
            }
        }
        if (threadIdx.x < DEPTH * PER_ROW) {
            const int row = threadIdx.x / PER_ROW, chunk = threadIdx.x % PER_ROW * WEIGHT_CHUNK;
            const int k = k_first + row, j = j_tile + chunk;
            T* const to = stage.weight + row * TILE + chunk;
            const T* const from = weight + (long long)k * hidden + j;
            if (weight_vectorized()) {
                const bool exists = k < depth && j < hidden;
                copy_async<16>(to, exists ? from : weight, exists);
            } else {
                for (int e = 0; e < WEIGHT_CHUNK; ++e) to[e] = k < depth && j + e < hidden ? from[e] : T{};
            }
        }
    }
};

// Compute the tile of the product.  It is left in `shared` as one partial sum for each of the warps, which share K.
__device__ __forceinline__ void multiply(const Factors& f, long long n_tile, int j_tile, Shared& shared) {
    constexpr int PIECE = WEIGHT_CHUNK < COLUMNS ? WEIGHT_CHUNK : COLUMNS;
    const int warp = warp_index(), row = lane_index() / 4 * ROWS, column = lane_index() % 4 * COLUMNS;
    const int slabs = (f.depth + DEPTH - 1) / DEPTH;
    A sum[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < slabs) f.fetch(shared.stage[i], n_tile, j_tile, i * DEPTH);
        commit_copies();
    }
#pragma unroll 1
    for (int i = 0; i < slabs; ++i) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // all copies of slab i have arrived, and slab i - 1 has been used
        const int next = i + STAGES - 1;
        if (next < slabs) f.fetch(shared.stage[next % STAGES], n_tile, j_tile, next * DEPTH);
        commit_copies();
        const Stage& stage = shared.stage[i % STAGES];
#pragma unroll
        for (int k = 0; k < SHARE; k += LEFT_CHUNK) {
            Vector<A, LEFT_CHUNK> a[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                a[r] = load_vector<LEFT_CHUNK>(stage.left + (row + r) * LEFT_PITCH + warp * SHARE + k);
#pragma unroll
            for (int e = 0; e < LEFT_CHUNK; ++e)
#pragma unroll
                for (int c = 0; c < COLUMNS; c += PIECE) {
                    const auto w = load_vector<PIECE>(stage.weight + (warp * SHARE + k + e) * TILE + column + c);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int p = 0; p < PIECE; ++p) sum[r][c + p] += a[r].lane[e] * widen(w.lane[p]);
                }
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // the stages may be overwritten
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) shared.parts[(warp * TILE + row + r) * TILE + column + c] = sum[r][c];
    __syncthreads();
}

// This thread's element of the product.  The parts are added in order.
__device__ __forceinline__ A product_at(const Shared& shared) {
    A sum = A(0);
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += shared.parts[part * TILE * TILE + threadIdx.x];
    return sum;
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ LaunchKind kind_of(const RecurrentGradientParams& p) {
    if (CELL == GRU && p.is_reset) return RESET;
    return p.steps_done == p.count ? HAND_ON : p.steps_done == 0 ? FIRST_STEP : LATER_STEP;
}

// The factors of the product with the gates of a step.  `row` is the step's first row in the run.
__device__ __forceinline__ Factors product_of(
    LaunchKind kind, const RecurrentGradientParams& p, int d, long long row) {
    const int hidden = p.hidden, rows = GATES * hidden;
    const T* const weight = stored(p.weight_hh, (long long)d * rows * hidden);
    Factors f = {read(p.dgates, row * rows), nullptr, weight, p.batch, rows, rows, rows, hidden};
    if (CELL == GRU) {
        f.split = 2 * hidden;  // after r and z
        if (kind == RESET) {   // n alone
            f.left += 2 * hidden, f.weight += 2LL * hidden * hidden;
            f.split = f.depth = hidden;
        } else if (p.reset_first) {  // RESET has multiplied n
            f.depth = 2 * hidden;
        } else {  // for n, the gradient of q takes part
            f.beyond = read(p.dcandidate, row * hidden);
        }
    }
    return f;
}

// Add each row of `sums` over the tile's samples, in order, to the sums of the previous steps, or to 0 if `begins`.
__device__ __forceinline__ void add_over_samples(
    const RecurrentGradientParams& p, long long first_row, int rows, bool begins, int j_tile,
    const A (&sums)[MOST_ROWS], Shared& shared) {
#pragma unroll
    for (int row = 0; row < MOST_ROWS; ++row) shared.sums[row * BLOCK + threadIdx.x] = sums[row];
    __syncthreads();
    const int row = threadIdx.x / TILE, j = j_tile + threadIdx.x % TILE;
    static_assert(MOST_ROWS * TILE <= BLOCK, "a thread adds one of them up");
    if (row >= rows || j >= p.hidden) return;
    A* const to = write(p.sums, (first_row + row) * p.hidden + j);
    A sum = begins ? A(0) : *to;
#pragma unroll
    for (int i = 0; i < TILE; ++i) sum += shared.sums[row * BLOCK + i * TILE + threadIdx.x % TILE];
    *to = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK, sizeof(A) == 4 ? 2 : 1) recurrent_gradient(
    const __grid_constant__ RecurrentGradientParams params) {
    SHARED_ARRAY(Shared, array, 1);
    Shared& shared = array[0];
    const RecurrentGradientParams& p = params;
    const int steps_done = p.steps_done;
    const LaunchKind kind = kind_of(p);
    if (kind == RESET && steps_done == p.count) return;  // no step is left to reset

    const int tiles_j = (p.hidden + TILE - 1) / TILE, slot = blockIdx.y, d = p.first_direction + slot;
    const int tile_n = blockIdx.x / tiles_j, j_tile = blockIdx.x % tiles_j * TILE;
    const long long n_tile = (long long)tile_n * TILE;
    // Within the run: this step, and the step done before it.
    const long long step = p.sign[d] > 0 ? p.count - 1 - steps_done : steps_done, before = step + p.sign[d];

    const int j = j_tile + threadIdx.x % TILE;
    const long long n = n_tile + threadIdx.x / TILE;
    const bool inside = j < p.hidden && n < p.batch;
    const Place at(p, slot, j, n, step, inside);
    const bool takes_step = inside && kind != RESET && kind != HAND_ON && at.reached();
    Kept kept;
    if (inside && kind != RESET) kept.load_state(at, steps_done);
    if (takes_step) kept.load(at);

    if (kind == RESET || steps_done > 0) {
        const long long row = (slot * p.count + (kind == RESET ? step : before)) * p.batch;
        multiply(product_of(kind, p, d, row), n_tile, j_tile, shared);
    }

    A sums[MOST_ROWS] = {};
    const auto finish = [&](auto gates) {
        if (kind == RESET) {
            if (!at.reached()) return;
            *write(p.carried_h, at.state) += back_through_reset(at, gates, at.gate(0), at.h_before(), product_at(shared), sums);
            return;
        }
        A dh = kept.dh;
        if (steps_done > 0 && p.first[d] + before < at.length) dh += product_at(shared);
        if (takes_step) {
            dh = back_through_step(at, kept, gates, dh, sums);
        } else {
            if (kind != HAND_ON) skip_step(at);
            if (CELL == LSTM && steps_done == 0) *write(p.carried_c, at.state) = kept.dc;
        }
        *write(p.carried_h, at.state) = dh;
    };
    if (inside) {
        if (p.default_gates)
            finish(DefaultSlopes{});
        else
            finish(GivenSlopes{p, d});
    }
    if (kind == HAND_ON) return;
    __syncthreads();  // the product has been read
    const long long first_row = ((long long)tile_n * p.directions + d) * p.sum_rows;
    add_over_samples(p, first_row, kind == RESET ? 1 : p.sum_rows, p.begins && kind == FIRST_STEP, j_tile, sums, shared);
}
