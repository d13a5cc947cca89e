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
// Or one launch does what all of these do, its blocks all on the GPU at once: those of the same samples wait for each
// other (grid_barrier.cuh), since the product needs the gates of all units; the rest is every thread's own.
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
// Bound by memory (weight_hh and the gates, from the L2 cache), by launches or by waiting.
// Floor: weight_hh and what is kept of a step once over the bandwidth.
//
// -D: DTYPE (type of arguments and of y; what is kept, and gradients of states and gates, are in its accumulator's),
//     CELL (RNN, LSTM or GRU)
#include "grid_barrier.cuh"
#include "recurrent_cell.cuh"
#include "tensor_core.cuh"

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
    int default_gates;             // these are sigmoid and tanh, as they are by default, and there is no clip
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
    unsigned* counters;   // of one launch that does what all of a run do; else null
};

// What a launch does, as drawn above.  FIRST_STEP has no product; that of RESET is with n of the same step.
enum LaunchKind { FIRST_STEP, LATER_STEP, HAND_ON, RESET };

// f(a) and f'(a).
template <class A> struct Activated {
    A value, slope;
};

// The activations of a cell, by what they are applied to: all gates but the candidate, the candidate, an lstm's c.
struct DefaultSlopes {
    template <class A> __device__ __forceinline__ Activated<A> gate(A a) const {
        const A y = gate_sigmoid(a);
        return {y, y * (A(1) - y)};
    }
    template <class A> __device__ __forceinline__ Activated<A> candidate(A a) const { return output(a); }
    template <class A> __device__ __forceinline__ Activated<A> only(A a) const { return output(a); }  // an rnn's
    template <class A> __device__ __forceinline__ Activated<A> output(A a) const {
        const A y = gate_tanh(a);
        return {y, A(1) - y * y};
    }
};

struct GivenSlopes {
    const RecurrentGradientParams& params;
    int d;

    template <class A> __device__ __forceinline__ Activated<A> gate(A a) const { return bounded(a, 0); }
    template <class A> __device__ __forceinline__ Activated<A> candidate(A a) const { return bounded(a, 1); }
    template <class A> __device__ __forceinline__ Activated<A> only(A a) const { return bounded(a, 0); }
    template <class A> __device__ __forceinline__ Activated<A> output(A a) const {
        const GateActivation& activation = params.activation[3 * d + 2];
        return activated(a, activation.code, A(activation.alpha), A(activation.beta));
    }

  private:
    // Called, since a copy of each at every gate would be long.
    template <class A> static __device__ __noinline__ Activated<A> activated(A a, int code, A alpha, A beta) {
        const A value = gate_activation(a, code, alpha, beta);
        // The rule of derivative_from_result in cupyconv/problem/activations.py.
        const bool tells = code == RELU || code == SIGMOID || code == TANH || (code == LEAKY_RELU && alpha > A(0));
        return {value, gate_derivative(tells ? value : a, code, alpha, beta)};
    }

    // Where `a` was clipped, f' is 0.
    template <class A> __device__ __forceinline__ Activated<A> bounded(A a, int which) const {
        const GateActivation& activation = params.activation[3 * d + which];
        Activated<A> found = activated(a, activation.code, A(activation.alpha), A(activation.beta));
        if (a >= A(params.clip) || a <= -A(params.clip)) found.slope = A(0);
        return found;
    }
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;
constexpr int BLOCK = 256, WARPS = BLOCK / WARP, TILE = 16;
constexpr int DEPTH = 256 / sizeof(A), SHARE = DEPTH / WARPS;  // of K at a time, in all and of one warp
constexpr int ROWS = 2, COLUMNS = 4;                            // of the tile, of one lane: 8 x 4 lanes
constexpr int LEFT_CHUNK = 16 / sizeof(A), WEIGHT_CHUNK = 16 / sizeof(T);
constexpr int LEFT_PITCH = DEPTH + LEFT_CHUNK;
constexpr int APART = 32;  // counters, so that each has a line of its own
constexpr int STAGES = 4;  // DEPTHs on their way or in use
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int MOST_ROWS = CELL == LSTM ? 7 : CELL == GRU ? 4 : 1;  // of sums

struct Stage {
    alignas(16) A left[TILE * LEFT_PITCH];  // n, k
    alignas(16) T weight[DEPTH * TILE];     // k, j
};
union Shared {
    Stage stage[STAGES];
    A parts[WARPS * TILE * TILE];  // of the product, by the warps that share K
    A sums[MOST_ROWS * BLOCK];     // each thread's, to be added over samples
};

// The factors of the product: rows of samples, whose columns from `split` on lie in an array of their own.
struct Factors {
    const A *left, *beyond;
    const T* weight;
    long long batch;
    int ld, split, depth, hidden;

    // Whether rows, and parts of rows, begin on boundaries of 16 bytes.
    __device__ __forceinline__ bool left_vectorized() const { return hidden % LEFT_CHUNK == 0; }
    __device__ __forceinline__ bool weight_vectorized() const {
        return hidden % WEIGHT_CHUNK == 0 && reinterpret_cast<unsigned long long>(weight) % 16 == 0;
    }

    __device__ __forceinline__ const A* at_left(long long n, int k) const {
        return k < split ? left + n * ld + k : beyond + n * hidden + (k - split);
    }

    // DEPTH of K, from k_first on; zeros beyond the end and for samples and units that there are not.
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

// The tile of the product, left in `shared` as so many parts of a sum as share K.
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
        __syncthreads();  // everyone's copies of slab i are there, and slab i - 1 has been used
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
    __syncthreads();  // the stages are free
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) shared.parts[(warp * TILE + row + r) * TILE + column + c] = sum[r][c];
    __syncthreads();
}

// This thread's output of it; parts are added in their order.
__device__ __forceinline__ A product_at(const Shared& shared) {
    A sum = A(0);
#pragma unroll
    for (int part = 0; part < WARPS; ++part) sum += shared.parts[part * TILE * TILE + threadIdx.x];
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
    __device__ __forceinline__ A grad_y() const {
        return p.grad_y ? widen(*stored(p.grad_y, t * p.grad_y_t + n * p.grad_y_n + (d * p.hidden + j) * p.grad_y_u))
                        : A(0);
    }
    __device__ __forceinline__ A* dgate(int which) const {
        return write(p.dgates, (in_run * GATES + which) * p.hidden + j);
    }
    __device__ __forceinline__ A* of_run(void* array) const { return write(array, in_run * p.hidden + j); }
};

// What a step needs beside the state's gradient, loaded before the product is waited for.
struct Kept {
    A dh, dc;  // what has come through the steps done, the product aside
    A gate[GATES], beside, h_before, c_before, grad_y;

    __device__ __forceinline__ void load_state(const Place& at, int steps_done) {
        const void* const h = steps_done ? at.p.carried_h : at.p.begin_h;
        const void* const c = steps_done ? at.p.carried_c : at.p.begin_c;
        dh = h ? *read(h, at.state) : A(0);
        if (CELL == LSTM) dc = c ? *read(c, at.state) : A(0);
    }
    __device__ __forceinline__ void load(const Place& at) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) gate[g] = at.gate(g);
        if (CELL != RNN) beside = at.beside();
        if (CELL == LSTM) c_before = at.c_before();
        h_before = at.h_before();
        grad_y = at.grad_y();
    }
};

// The gates' gradients from that of the state, dh; what goes on to the state before is returned, the product aside.
template <class F>
__device__ __forceinline__ A back_through_rnn(const Place& at, const Kept& kept, F f, A dh, A (&sums)[MOST_ROWS]) {
    sums[0] = *at.dgate(0) = dh * f.only(kept.gate[0]).slope;
    return A(0);
}

template <class F>
__device__ __forceinline__ A back_through_lstm(const Place& at, const Kept& kept, F f, A dh, A (&sums)[MOST_ROWS]) {
    const RecurrentGradientParams& p = at.p;
    const A c = kept.beside, c_before = kept.c_before;
    A* const carried_c = write(p.carried_c, at.state);
    const T* const peephole = p.peephole ? stored(p.peephole, (long long)at.d * 3 * p.hidden + at.j) : nullptr;
    A dc = kept.dc;
    const Activated<A> i = f.gate(kept.gate[0]), g = f.candidate(kept.gate[2]), o = f.gate(kept.gate[3]);
    const Activated<A> act_c = f.output(c);
    sums[3] = *at.dgate(3) = dh * act_c.value * o.slope;
    dc += dh * o.value * act_c.slope;
    if (peephole) dc += sums[3] * widen(peephole[2 * p.hidden]);
    sums[2] = *at.dgate(2) = dc * i.value * g.slope;
    A di = dc * g.value, df = dc * c_before, forget;
    if (p.input_forget) {
        forget = A(1) - i.value, di -= df, df = A(0);
    } else {
        const Activated<A> opened = f.gate(kept.gate[1]);
        forget = opened.value, df *= opened.slope;
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

template <class F>
__device__ __forceinline__ A back_through_gru(const Place& at, const Kept& kept, F f, A dh, A (&sums)[MOST_ROWS]) {
    const RecurrentGradientParams& p = at.p;
    const A q = kept.beside;
    const Activated<A> z = f.gate(kept.gate[1]), n = f.candidate(kept.gate[2]);
    sums[1] = *at.dgate(1) = dh * (kept.h_before - n.value) * z.slope;
    sums[2] = *at.dgate(2) = dh * (A(1) - z.value) * n.slope;
    if (p.reset_first) {
        *at.of_run(p.reset) = q;
    } else {
        const Activated<A> r = f.gate(kept.gate[0]);
        sums[3] = *at.of_run(p.dcandidate) = sums[2] * r.value;
        sums[0] = *at.dgate(0) = sums[2] * q * r.slope;
    }
    return dh * z.value;
}

// The second launch of a gru that resets before the product, which is the gradient of r * h_before.
template <class F>
__device__ __forceinline__ void back_through_reset(const Place& at, F f, A product, A (&sums)[MOST_ROWS]) {
    const Activated<A> r = f.gate(at.gate(0));
    sums[0] = *at.dgate(0) = product * at.h_before() * r.slope;
    *write(at.p.carried_h, at.state) += product * r.value;
}

// ---- a launch ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ LaunchKind kind_of(const RecurrentGradientParams& p, int steps_done, bool is_reset) {
    if (CELL == GRU && is_reset) return RESET;
    return steps_done == p.count ? HAND_ON : steps_done == 0 ? FIRST_STEP : LATER_STEP;
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

// The gates of a step that the sample has; what goes on to the state before is returned, the product aside.
template <class F>
__device__ __forceinline__ A back_through_step(const Place& at, const Kept& kept, F f, A dh, A (&sums)[MOST_ROWS]) {
    dh += kept.grad_y;
    *at.of_run(at.p.previous) = kept.h_before;
    if constexpr (CELL == RNN) return back_through_rnn(at, kept, f, dh, sums);
    if constexpr (CELL == LSTM) return back_through_lstm(at, kept, f, dh, sums);
    if constexpr (CELL == GRU) return back_through_gru(at, kept, f, dh, sums);
}

// The gates of a step that the sample does not have: zeros.
__device__ __forceinline__ void skip_step(const Place& at) {
    const RecurrentGradientParams& p = at.p;
    for (int gate = 0; gate < GATES; ++gate) *at.dgate(gate) = A(0);
    *at.of_run(p.previous) = A(0);
    if (CELL == GRU) *at.of_run(p.reset_first ? p.reset : p.dcandidate) = A(0);
}

// Add each row of `sums` over the tile's samples, one after the other, to what the steps before have left; or begin.
// The block has met since the product was read.
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

// What one launch does of those drawn above; or, of a launch that does all, one of its turns.
__device__ __forceinline__ void take_turn(
    const RecurrentGradientParams& p, Shared& shared, int steps_done, bool is_reset, unsigned& arrivals) {
    const LaunchKind kind = kind_of(p, steps_done, is_reset);
    if (kind == RESET && steps_done == p.count) return;  // no step is left to reset

    const int tiles_j = (p.hidden + TILE - 1) / TILE, slot = blockIdx.y, d = p.first_direction + slot;
    const int tile_n = blockIdx.x / tiles_j, j_tile = blockIdx.x % tiles_j * TILE;
    const long long n_tile = (long long)tile_n * TILE;
    // Within the run: this step, and the one that came before it.
    const long long step = p.sign[d] > 0 ? p.count - 1 - steps_done : steps_done, before = step + p.sign[d];

    const int j = j_tile + threadIdx.x % TILE;
    const long long n = n_tile + threadIdx.x / TILE, t = p.first[d] + step;
    const bool inside = j < p.hidden && n < p.batch;
    const long long length = inside ? length_of(p.lengths, p.lengths_stride, p.wide_lengths, n, p.steps) : 0;
    const Place at = {p, d, j, n, t, length, ((long long)d * p.batch + n) * p.hidden + j,
                      ((long long)d * p.steps + t) * p.batch + n, (slot * p.count + step) * p.batch + n};
    const bool takes_step = inside && kind != RESET && kind != HAND_ON && at.reached();
    Kept kept;
    if (inside && kind != RESET) kept.load_state(at, steps_done);
    if (takes_step) kept.load(at);

    unsigned* const counter = p.counters ? p.counters + (long long)(slot * (gridDim.x / tiles_j) + tile_n) * APART : nullptr;
    if (kind == RESET || steps_done > 0) {
        if (counter) await(counter, arrivals);
        const long long row = (slot * p.count + (kind == RESET ? step : before)) * p.batch;
        multiply(product_of(kind, p, d, row), n_tile, j_tile, shared);
    }

    A sums[MOST_ROWS] = {};
    const auto finish = [&](auto gates) {
        if (kind == RESET) {
            if (at.reached()) back_through_reset(at, gates, product_at(shared), sums);
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
    if (counter)
        arrive(counter);
    else
        __syncthreads();
    arrivals += tiles_j;
    const long long first_row = ((long long)tile_n * p.directions + d) * p.sum_rows;
    add_over_samples(p, first_row, kind == RESET ? 1 : p.sum_rows, p.begins && kind == FIRST_STEP, j_tile, sums, shared);
}

extern "C" __global__ void __launch_bounds__(BLOCK, sizeof(A) == 4 ? 2 : 1) recurrent_gradient(
    const __grid_constant__ RecurrentGradientParams params) {
    SHARED_ARRAY(Shared, shared, 1);
    const bool all = params.counters;
    unsigned arrivals = 0;  // at each counter
    for (int steps_done = params.steps_done; steps_done <= (all ? params.count : params.steps_done); ++steps_done)
        for (int turn = params.is_reset; turn <= (all ? params.reset_first : params.is_reset); ++turn)
            take_turn(params, *shared, steps_done, turn, arrivals);
}
