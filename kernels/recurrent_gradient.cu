// One step back through time of a recurrent layer: the state's gradient, then its gates', for all samples and units.
//
//     dh[n, j] = carried[n, j] + sum over k of  dgates[next][n, k] * weight_hh[k, j]  + grad_y[t, n, j]
//     dgates[t][n, gate, j] = dh[n, j] * ...      of the cell (below); dc goes on in `carried_c`
//
//     M = n (samples), TILE per block     N = j (units), TILE per block     K = k (gates of the step that came before)
//
//     t:      ... | t | t+1 | ...        forward direction: t+1 came before, t-1 is next; reverse: the other way round
//
//        TILE of j                a block adds up its tile, its warps each a share of K;
//     n [#######]                 then every thread finishes outputs of its own: each gate of (n, j) needs dh[n, j]
//                                 only, so that no other block waits for it
//
// Both directions are one launch, blockIdx.y.  A run of `count` steps is count + 1 launches, each of one LaunchKind:
//
//     steps_done    0             1 ... count - 1        count
//                   FIRST_STEP    LATER_STEP             HAND_ON: the product alone; what it leaves in `carried` is the
//                                                        initial state's gradient, or where the next run begins
//
// Steps beyond a sample's length leave its state's gradient as it is, and zeros for their gates, whatever was kept.
//
//     rnn     da = dh f'
//     lstm    da_o = dh act(c) f'      dc += dh o act'(c) + da_o p_o
//             da_i = dc g f'           da_f = dc c_before f'             da_g = dc i g'     dc of before = dc f + ...
//     gru     da_n = dh (1 - z) g'     da_z = dh (h_before - n) f'       dh of before = dh z + ...
//             linear before reset:     da_r = da_n q f'                  dq = da_n r           (q = R h + b)
//             else, in a second launch, RESET:       drh = da_n R     da_r = drh h_before f'     dh of before += drh r
//
// The sums over samples for the biases and peepholes are begun here, each block's over its own samples, step by step.
//
// Bound by memory (weight_hh, from the L2 cache) or launches.
// Floor: weight_hh and what is kept of a step once over the bandwidth.
//
// -D: DTYPE (type of arguments and of y; what is kept, and gradients of states and gates, are in its accumulator's),
//     CELL (RNN, LSTM or GRU)
#include "recurrent_cell.cuh"

namespace cupyconv {

enum Cell { RNN, LSTM, GRU };

struct RecurrentGradientParams {
    const void *gates, *beside;  // kept of the forward pass: (D, T, N, gates' rows); c of an lstm, q or r * h of a gru
    const void *weight_hh, *y, *h0, *c0, *peephole;  // T, C-ordered; the last three may be null
    const void* lengths;                             // int32 or int64, or null: all are `steps`
    long long lengths_stride;
    const void* grad_y;  // T, or null
    long long grad_y_t, grad_y_n, grad_y_u;
    const void *begin_h, *begin_c;  // where the states' gradients come from at the first step of a run; null: zeros
    void *carried_h, *carried_c;
    void *dgates, *dcandidate, *previous, *reset;  // of the steps of a run; reset: r * h_before
    void* sums;                                    // (tile of samples, direction, row, unit)
    GateActivation activation[6];  // of each direction three: f, g, act
    double clip;  // or infinity
    long long first[2];  // time of the run's first step, by direction
    long long steps, batch, count;
    int hidden, directions;
    int sign[2];          // of each direction: 1 forward, -1 reverse
    int first_direction;  // of the launch, at blockIdx.y = 0
    int is_reset;         // the launch is a RESET
    int input_forget, reset_first, wide_lengths;
    int begins;           // no run comes before in these directions: sums over samples begin with this one
    int sum_rows;         // of `sums`
    int steps_done;       // of the run
};

// What a launch does, as drawn above.  FIRST_STEP has no product; that of RESET is with n of the same step.
enum LaunchKind { FIRST_STEP, LATER_STEP, HAND_ON, RESET };

// f(a) and f'(a).
template <class A> struct Activated {
    A value, slope;
    __device__ __forceinline__ Activated(A a, const GateActivation& activation) {
        const A alpha = A(activation.alpha), beta = A(activation.beta);
        const int code = activation.code;
        value = gate_activation(a, code, alpha, beta);
        // The rule of derivative_from_result in cupyconv/problem/activations.py.
        const bool tells = code == RELU || code == SIGMOID || code == TANH || (code == LEAKY_RELU && alpha > A(0));
        slope = gate_derivative(tells ? value : a, code, alpha, beta);
    }
};

// f(a) and f'(a) of a gate: f' is 0 where `a` was clipped.
template <class A> struct Gate : Activated<A> {
    __device__ __forceinline__ Gate(A a, const GateActivation& activation, A clip) : Activated<A>(a, activation) {
        if (a >= clip || a <= -clip) this->slope = A(0);
    }
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int BLOCK = 256, WARPS = BLOCK / WARP, TILE = 16;
constexpr int DEPTH = 256 / sizeof(A), SHARE = DEPTH / WARPS;  // of K at a time, in all and of one warp
constexpr int ROWS = 2, COLUMNS = 4;                            // of the tile, of one lane: 8 x 4 lanes
constexpr int LOADS = TILE * DEPTH / BLOCK;
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int MOST_ROWS = CELL == LSTM ? 7 : CELL == GRU ? 4 : 1;  // of sums
constexpr int A_PITCH = TILE + 1;
constexpr int TILES_SIZE = DEPTH * (A_PITCH + TILE), SUMS_SIZE = WARPS * TILE * TILE;

// The factors of the product: rows of samples, whose columns from `split` on lie in an array of their own.
struct Factors {
    const A *left, *beyond;
    const T* weight;
    long long batch;
    int ld, split, depth, hidden;

    __device__ __forceinline__ A at_left(long long n, int k) const {
        if (n >= batch || k >= depth) return A(0);
        return k < split ? left[n * ld + k] : beyond[n * hidden + (k - split)];
    }
    __device__ __forceinline__ A at_weight(int k, int j) const {
        return k < depth && j < hidden ? widen(weight[(long long)k * hidden + j]) : A(0);
    }
};

// The tile of the product, left in `shared` as so many parts of a sum as share K.
__device__ __forceinline__ void multiply(const Factors& f, long long n_tile, int j_tile, A* shared) {
    const int thread = threadIdx.x, warp = warp_index(), lane = lane_index();
    const int row = lane / 4 * ROWS, column = lane % 4 * COLUMNS;
    A* const a_tile = shared;
    A* const b_tile = shared + DEPTH * A_PITCH;
    A sum[ROWS][COLUMNS] = {}, a_next[LOADS], b_next[LOADS];
    const auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int e = thread + i * BLOCK;
            a_next[i] = f.at_left(n_tile + e / DEPTH, k + e % DEPTH);
            b_next[i] = f.at_weight(k + e / TILE, j_tile + e % TILE);
        }
    };
    load(0);
    for (int k = 0; k < f.depth; k += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int e = thread + i * BLOCK;
            a_tile[e % DEPTH * A_PITCH + e / DEPTH] = a_next[i];
            b_tile[e] = b_next[i];
        }
        __syncthreads();
        if (k + DEPTH < f.depth) load(k + DEPTH);
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int kk = warp * SHARE + i;
            A a[ROWS], b[COLUMNS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) a[r] = a_tile[kk * A_PITCH + row + r];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) b[c] = b_tile[kk * TILE + column + c];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sum[r][c] += a[r] * b[c];
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) shared[(warp * TILE + row + r) * TILE + column + c] = sum[r][c];
    __syncthreads();
}

// This thread's output of it; parts are added in their order.
__device__ __forceinline__ A product_at(const A* shared) {
    A sum = A(0);
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += shared[part * TILE * TILE + threadIdx.x];
    return sum;
}

__device__ __forceinline__ const A* read(const void* array, long long at) { return static_cast<const A*>(array) + at; }
__device__ __forceinline__ const T* stored(const void* array, long long at) {
    return static_cast<const T*>(array) + at;
}
__device__ __forceinline__ A* write(void* array, long long at) { return static_cast<A*>(array) + at; }

// One unit of one sample at a step, and where it lies.
struct Place {
    const RecurrentGradientParams& p;
    int d, j;
    long long n, t, length;
    long long state;   // in (D, N, H)
    long long kept;    // (D, T, N), of the step
    long long in_run;  // (direction of the launch, step of the run, N)

    __device__ __forceinline__ bool reached() const { return t < length; }
    __device__ __forceinline__ long long earlier() const { return p.sign[d] > 0 ? t - 1 : t + 1; }
    // Whether the step was the sample's first.
    __device__ __forceinline__ bool starts() const { return p.sign[d] > 0 ? t == 0 : t + 1 == length; }
    __device__ __forceinline__ A h_before() const {
        if (starts()) return p.h0 ? widen(*stored(p.h0, state)) : A(0);
        return widen(*stored(p.y, ((earlier() * p.batch + n) * p.directions + d) * p.hidden + j));
    }
    __device__ __forceinline__ A c_before() const {
        if (starts()) return p.c0 ? widen(*stored(p.c0, state)) : A(0);
        return *read(p.beside, (((long long)d * p.steps + earlier()) * p.batch + n) * p.hidden + j);
    }
    __device__ __forceinline__ A gate(int which) const {
        return *read(p.gates, (kept * GATES + which) * p.hidden + j);
    }
    __device__ __forceinline__ A beside() const { return *read(p.beside, kept * p.hidden + j); }
    __device__ __forceinline__ A* dgate(int which) const {
        return write(p.dgates, (in_run * GATES + which) * p.hidden + j);
    }
    __device__ __forceinline__ A* of_run(void* array) const { return write(array, in_run * p.hidden + j); }
    __device__ __forceinline__ Gate<A> activated(int which, int activation) const {
        return Gate<A>(gate(which), p.activation[3 * d + activation], A(p.clip));
    }
};

// The gates' gradients from that of the state, dh; what goes on to the state before is returned, the product aside.
__device__ __forceinline__ A back_through_rnn(const Place& at, A dh, A (&sums)[MOST_ROWS]) {
    sums[0] = *at.dgate(0) = dh * at.activated(0, 0).slope;
    return A(0);
}

__device__ __forceinline__ A back_through_lstm(const Place& at, A dh, A (&sums)[MOST_ROWS]) {
    const RecurrentGradientParams& p = at.p;
    const A c = at.beside(), c_before = at.c_before();
    A* const carried_c = write(p.carried_c, at.state);
    const T* const peephole = p.peephole ? stored(p.peephole, (long long)at.d * 3 * p.hidden + at.j) : nullptr;
    A dc = *carried_c;
    {
        const Gate<A> o = at.activated(3, 0);
        const Activated<A> act_c(c, p.activation[3 * at.d + 2]);
        sums[3] = *at.dgate(3) = dh * act_c.value * o.slope;
        dc += dh * o.value * act_c.slope;
    }
    if (peephole) dc += sums[3] * widen(peephole[2 * p.hidden]);
    const Gate<A> i = at.activated(0, 0);
    const Gate<A> g = at.activated(2, 1);
    sums[2] = *at.dgate(2) = dc * i.value * g.slope;
    A di = dc * g.value, df = dc * c_before, forget;
    if (p.input_forget) {
        forget = A(1) - i.value, di -= df, df = A(0);
    } else {
        const Gate<A> f = at.activated(1, 0);
        forget = f.value, df *= f.slope;
    }
    sums[0] = *at.dgate(0) = di * i.slope;
    sums[1] = *at.dgate(1) = df;
    dc *= forget;
    if (peephole) {
        dc += sums[0] * widen(peephole[0]) + sums[1] * widen(peephole[p.hidden]);
        sums[4] = sums[0] * c_before, sums[5] = sums[1] * c_before, sums[6] = sums[3] * c;
    }
    *carried_c = dc;
    return A(0);
}

__device__ __forceinline__ A back_through_gru(const Place& at, A dh, A h_before, A (&sums)[MOST_ROWS]) {
    const RecurrentGradientParams& p = at.p;
    const A q = at.beside();
    const Gate<A> z = at.activated(1, 0);
    const Gate<A> n = at.activated(2, 1);
    sums[1] = *at.dgate(1) = dh * (h_before - n.value) * z.slope;
    sums[2] = *at.dgate(2) = dh * (A(1) - z.value) * n.slope;
    if (p.reset_first) {
        *at.of_run(p.reset) = q;
    } else {
        const Gate<A> r = at.activated(0, 0);
        sums[3] = *at.of_run(p.dcandidate) = sums[2] * r.value;
        sums[0] = *at.dgate(0) = sums[2] * q * r.slope;
    }
    return dh * z.value;
}

// The second launch of a gru that resets before the product, which is the gradient of r * h_before.
__device__ __forceinline__ void back_through_reset(const Place& at, A product, A (&sums)[MOST_ROWS]) {
    const Gate<A> r = at.activated(0, 0);
    sums[0] = *at.dgate(0) = product * at.h_before() * r.slope;
    *write(at.p.carried_h, at.state) += product * r.value;
}

// ---- a launch ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ LaunchKind kind_of(const RecurrentGradientParams& p) {
    if (CELL == GRU && p.is_reset) return RESET;
    return p.steps_done == p.count ? HAND_ON : p.steps_done == 0 ? FIRST_STEP : LATER_STEP;
}

// The product with the gates of a step; `row` is the first of its rows in the run.
__device__ __forceinline__ Factors product_of(
    LaunchKind kind, const RecurrentGradientParams& p, int d, long long row) {
    const int hidden = p.hidden, rows = GATES * hidden;
    const T* const weight = stored(p.weight_hh, (long long)d * rows * hidden);
    Factors f = {read(p.dgates, row * rows), nullptr, weight, p.batch, rows, rows, rows, hidden};
    if (CELL == GRU) {
        f.split = 2 * hidden;  // behind r and z
        if (kind == RESET) {   // n alone
            f.left += 2 * hidden, f.weight += 2LL * hidden * hidden;
            f.split = f.depth = hidden;
        } else if (p.reset_first) {  // n has had its launch
            f.depth = 2 * hidden;
        } else {  // n's product is with q
            f.beyond = read(p.dcandidate, row * hidden);
        }
    }
    return f;
}

// The gradient of the state after this step, of the product what reached the sample.
__device__ __forceinline__ A state_gradient(const Place& at, long long t_before, const A* shared) {
    const RecurrentGradientParams& p = at.p;
    const void* const begun = p.steps_done ? p.carried_h : p.begin_h;
    A dh = begun ? *read(begun, at.state) : A(0);
    if (p.steps_done > 0 && t_before < at.length) dh += product_at(shared);
    if (CELL == LSTM && p.steps_done == 0)
        *write(p.carried_c, at.state) = p.begin_c ? *read(p.begin_c, at.state) : A(0);
    return dh;
}

// The gates of a step that the sample has; what goes on to the state before is returned, the product aside.
__device__ __forceinline__ A back_through_step(const Place& at, A dh, A (&sums)[MOST_ROWS]) {
    const RecurrentGradientParams& p = at.p;
    if (p.grad_y)
        dh += widen(*stored(p.grad_y, at.t * p.grad_y_t + at.n * p.grad_y_n + (at.d * p.hidden + at.j) * p.grad_y_u));
    const A h_before = at.h_before();
    *at.of_run(p.previous) = h_before;
    if constexpr (CELL == RNN) return back_through_rnn(at, dh, sums);
    if constexpr (CELL == LSTM) return back_through_lstm(at, dh, sums);
    if constexpr (CELL == GRU) return back_through_gru(at, dh, h_before, sums);
}

// The gates of a step that the sample does not have: zeros.
__device__ __forceinline__ void skip_step(const Place& at) {
    const RecurrentGradientParams& p = at.p;
    for (int gate = 0; gate < GATES; ++gate) *at.dgate(gate) = A(0);
    *at.of_run(p.previous) = A(0);
    if (CELL == GRU) *at.of_run(p.reset_first ? p.reset : p.dcandidate) = A(0);
}

// Add each row of `sums` over the tile's samples, one after the other, to what the steps before have left; or begin.
__device__ __forceinline__ void add_over_samples(
    const RecurrentGradientParams& p, long long first_row, int rows, bool begins, int j, const A (&sums)[MOST_ROWS],
    A* shared) {
    for (int row = 0; row < rows; ++row) {
        A value = A(0);
#pragma unroll
        for (int r = 0; r < MOST_ROWS; ++r) value = r == row ? sums[r] : value;  // registers have no index
        __syncthreads();
        shared[threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.x >= TILE || j >= p.hidden) continue;
        A sum = A(0);
#pragma unroll
        for (int i = 0; i < TILE; ++i) sum += shared[i * TILE + threadIdx.x];
        A* const to = write(p.sums, (first_row + row) * p.hidden + j);
        *to = begins ? sum : *to + sum;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, sizeof(A) == 4 ? 2 : 1) recurrent_gradient(
    const __grid_constant__ RecurrentGradientParams params) {
    SHARED_ARRAY(A, shared, (TILES_SIZE > SUMS_SIZE ? TILES_SIZE : SUMS_SIZE));
    const RecurrentGradientParams& p = params;
    const LaunchKind kind = kind_of(p);
    if (kind == RESET && p.steps_done == p.count) return;  // no step is left to reset

    const int tiles_j = (p.hidden + TILE - 1) / TILE, slot = blockIdx.y, d = p.first_direction + slot;
    const int tile_n = blockIdx.x / tiles_j, j_tile = blockIdx.x % tiles_j * TILE;
    const long long n_tile = (long long)tile_n * TILE;
    // Within the run: this step, and the one that came before it.
    const long long step = p.sign[d] > 0 ? p.count - 1 - p.steps_done : p.steps_done, before = step + p.sign[d];

    if (kind == RESET || p.steps_done > 0) {
        const long long row = (slot * p.count + (kind == RESET ? step : before)) * p.batch;
        multiply(product_of(kind, p, d, row), n_tile, j_tile, shared);
    }

    A sums[MOST_ROWS] = {};
    const int j = j_tile + threadIdx.x % TILE;
    const long long n = n_tile + threadIdx.x / TILE;
    if (j < p.hidden && n < p.batch) {
        const long long t = p.first[d] + step;
        const long long length = length_of(p.lengths, p.lengths_stride, p.wide_lengths, n, p.steps);
        const Place at = {p, d, j, n, t, length, ((long long)d * p.batch + n) * p.hidden + j,
                          ((long long)d * p.steps + t) * p.batch + n, (slot * p.count + step) * p.batch + n};
        if (kind == RESET) {
            if (at.reached()) back_through_reset(at, product_at(shared), sums);
        } else {
            A dh = state_gradient(at, p.first[d] + before, shared);
            if (kind != HAND_ON) {
                if (at.reached())
                    dh = back_through_step(at, dh, sums);
                else
                    skip_step(at);
            }
            *write(p.carried_h, at.state) = dh;
        }
    }
    if (kind == HAND_ON) return;
    const long long first_row = ((long long)tile_n * p.directions + d) * p.sum_rows;
    add_over_samples(p, first_row, kind == RESET ? 1 : p.sum_rows, p.begins && kind == FIRST_STEP, j, sums, shared);
}
