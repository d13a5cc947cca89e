// One step back through time of a recurrent layer: the state's gradient, then its gates', for all samples and units.
//
//     dh[n, j] = carried[n, j] + sum over k of  dgates[next][n, k] * weight_hh[k, j]  + grad_y[t, n, j]
//     dgates[t][n, gate, j] = dh[n, j] * ...      of the cell (below); dc goes on in `carried_c`
//
//     M = n (samples), TILE a block     N = j (units), TILE a block     K = k (gates of the step that came before, backwards)
//
//     t:      ... | t | t+1 | ...        forward direction: t+1 came before, t-1 is next; reverse: the other way round
//
//        TILE of j                a block adds up its tile, its warps each a share of K;
//     n [#######]                 then every thread finishes outputs of its own: each gate of (n, j) needs dh[n, j] only,
//                                 so that no other block waits for it
//
// Both directions are one launch, blockIdx.y; step `k` of a run of `count` steps, and after the last a launch that only
// adds the product, k = count: what it leaves in `carried` is the initial state's gradient, or where the next run begins.
// Steps beyond a sample's length leave its state's gradient as it is, and zeros for their gates, whatever was kept there.
//
//     rnn     da = dh f'
//     lstm    da_o = dh act(c) f'      dc += dh o act'(c) + da_o p_o
//             da_i = dc g f'           da_f = dc c_before f'             da_g = dc i g'        dc of before = dc f + ...
//     gru     da_n = dh (1 - z) g'     da_z = dh (h_before - n) f'       dh of before = dh z + ...
//             linear before reset:     da_r = da_n q f'                  dq = da_n r           (q = R h + b)
//             else, in a second launch (`phase` 1):  drh = da_n R        da_r = drh h_before f'     dh of before += drh r
//
// The sums over samples for the biases and peepholes are begun here, each block's over its own samples, step after step.
//
// Bound by memory (weight_hh, from the L2 cache) or launches.  Floor: weight_hh and what is kept of a step once over the
// bandwidth.
//
// -D: DTYPE (computed in, and stored: float32 or float64), CELL (RNN, LSTM or GRU), TILE (samples, and units, of a block)
#include "activation.cuh"

namespace cupyconv {

enum Cell { RNN, LSTM, GRU };

struct GateActivation {
    double alpha, beta;
    int code, from_result;  // from_result: the derivative is worked out from f(a)
};

struct RecurrentGradientParams {
    const void *gates, *cells, *candidate;  // kept of the forward pass
    const void *y, *h0, *c0, *peephole, *weight_hh, *lengths;
    const void* grad_y;  // or null
    long long grad_y_t, grad_y_n, grad_y_j;
    const void *begin_h, *begin_c;  // where the states' gradients come from at the first step of a run; null: zeros
    void *carried_h, *carried_c;
    void *dgates, *dcandidate, *previous, *reset;  // of the steps of a run; reset: r * h_before
    void* sums;                                    // (tile of samples, direction, row, unit)
    GateActivation activation[2][3];
    double clip;  // or infinity
    long long first[2];  // time of the run's first step, by direction
    long long steps, batch, count;
    int hidden, directions, sign[2], first_direction, phase, input_forget, reset_first, wide_lengths, begins, rows, k;
};

// f(a) and f'(a).
template <class A> struct Activated {
    A value, slope;
    __device__ __forceinline__ Activated(A a, const GateActivation& activation) {
        const A alpha = A(activation.alpha), beta = A(activation.beta);
        A v[1] = {a};
        Activation<A>{activation.code, alpha, beta}.apply(v);
        value = v[0];
        slope = back_through(A(1), activation.from_result ? value : a, activation.code, alpha, beta);
    }
};

// The same of a gate, flat where `a` was clipped.
template <class A> struct Gate : Activated<A> {
    __device__ __forceinline__ Gate(A a, const GateActivation& activation, A clip) : Activated<A>(a, activation) {
        if (a >= clip || a <= -clip) this->slope = A(0);
    }
};

}  // namespace cupyconv

using namespace cupyconv;

using A = DTYPE;
constexpr int BLOCK = 256, WARPS = BLOCK / 32, DEPTH = 64;  // of K at a time
constexpr int PARTS = TILE / 16, SPLITS = WARPS / PARTS, ROWS = TILE / 8;
constexpr int A_LOADS = TILE * DEPTH / BLOCK;
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int MOST_ROWS = CELL == LSTM ? 7 : CELL == GRU ? 4 : 1;  // of sums
constexpr int A_PITCH = TILE + 1;
constexpr int TILES_SIZE = DEPTH * (A_PITCH + TILE), SUMS_SIZE = SPLITS * TILE * TILE;

// Where the factors of the product lie: rows of samples in one array, or from column `split` on in a second.
struct Factors {
    const A *left, *right_left, *weight;
    long long batch;
    int ld, split, second_ld, depth, hidden;

    __device__ __forceinline__ A at_left(long long n, int k) const {
        if (n >= batch || k >= depth) return A(0);
        return k < split ? left[n * ld + k] : right_left[n * second_ld + (k - split)];
    }
    __device__ __forceinline__ A at_weight(int k, int j) const {
        return k < depth && j < hidden ? weight[(long long)k * hidden + j] : A(0);
    }
};

// The tile of the product, left in `shared` as so many parts of a sum as share K.
__device__ __forceinline__ void multiply(const Factors& f, long long n_tile, int j_tile, A* shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int part = warp % PARTS, split = warp / PARTS;
    const int row = lane / 4 * ROWS, column = part * 16 + lane % 4 * 4;
    A* const a_tile = shared;
    A* const b_tile = shared + DEPTH * A_PITCH;
    A sum[ROWS][4] = {}, a_next[A_LOADS], b_next[A_LOADS];
    const auto load = [&](int k) {
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i) {
            const int e = thread + i * BLOCK;
            a_next[i] = f.at_left(n_tile + e / DEPTH, k + e % DEPTH);
            b_next[i] = f.at_weight(k + e / TILE, j_tile + e % TILE);
        }
    };
    load(0);
    for (int k = 0; k < f.depth; k += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i) {
            const int e = thread + i * BLOCK;
            a_tile[e % DEPTH * A_PITCH + e / DEPTH] = a_next[i];
            b_tile[e] = b_next[i];
        }
        __syncthreads();
        if (k + DEPTH < f.depth) load(k + DEPTH);
#pragma unroll
        for (int i = 0; i < DEPTH / SPLITS; ++i) {
            const int kk = split * (DEPTH / SPLITS) + i;
            A a[ROWS], b[4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) a[r] = a_tile[kk * A_PITCH + row + r];
#pragma unroll
            for (int c = 0; c < 4; ++c) b[c] = b_tile[kk * TILE + column + c];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) sum[r][c] += a[r] * b[c];
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) shared[(split * TILE + row + r) * TILE + column + c] = sum[r][c];
    __syncthreads();
}

// One output of it; parts are added in their order.
__device__ __forceinline__ A product_at(const A* shared, int e) {
    A sum = A(0);
#pragma unroll
    for (int part = 0; part < SPLITS; ++part) sum += shared[part * TILE * TILE + e];
    return sum;
}

__device__ __forceinline__ const A* read(const void* array, long long at) { return static_cast<const A*>(array) + at; }
__device__ __forceinline__ A* write(void* array, long long at) { return static_cast<A*>(array) + at; }

__device__ __forceinline__ long long length_of(const RecurrentGradientParams& p, long long n) {
    if (!p.lengths) return p.steps;
    const long long length =
        p.wide_lengths ? static_cast<const long long*>(p.lengths)[n] : static_cast<const int*>(p.lengths)[n];
    return length < 0 ? 0 : length > p.steps ? p.steps : length;
}

// What one sample's unit finds in the arrays of states at the step at time t.
struct Cells {
    const RecurrentGradientParams& p;
    int d;
    long long n;
    int j;
    long long length, t;
    bool forward;

    // Whether the step was the sample's first.
    __device__ __forceinline__ bool starts() const { return forward ? t == 0 : t + 1 == length; }
    __device__ __forceinline__ A initial(const void* state) const {
        return state ? *read(state, ((long long)d * p.batch + n) * p.hidden + j) : A(0);
    }
    __device__ __forceinline__ long long earlier() const { return forward ? t - 1 : t + 1; }
    __device__ __forceinline__ A state_before(const void* y, const void* h0) const {
        if (starts()) return initial(h0);
        return *read(y, ((earlier() * p.batch + n) * p.directions + d) * p.hidden + j);
    }
    __device__ __forceinline__ A cell_before() const {
        if (starts()) return initial(p.c0);
        return *read(p.cells, (((long long)d * p.steps + earlier()) * p.batch + n) * p.hidden + j);
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK) recurrent_gradient(
    const __grid_constant__ RecurrentGradientParams params) {
    SHARED_ARRAY(A, shared, (TILES_SIZE > SUMS_SIZE ? TILES_SIZE : SUMS_SIZE));
    const RecurrentGradientParams& p = params;
    const int hidden = p.hidden, tiles_j = (hidden + TILE - 1) / TILE;
    const int slot = blockIdx.y, d = p.first_direction + slot;
    const bool forward = p.sign[d] > 0;
    const long long n_tile = (long long)(blockIdx.x / tiles_j) * TILE;
    const int j_tile = blockIdx.x % tiles_j * TILE;
    const bool only_adds = p.k == p.count;
    // Places within the run: of this step, and of the one that came before.
    const long long place = forward ? p.count - 1 - p.k : p.k, before = forward ? place + 1 : place - 1;
    const long long t = p.first[d] + place, t_before = p.first[d] + before;
    const long long run = slot * p.count;

    Factors f;
    f.batch = p.batch, f.hidden = hidden, f.ld = GATES * hidden, f.second_ld = hidden, f.right_left = nullptr;
    f.weight = read(p.weight_hh, (long long)d * GATES * hidden * hidden);
    if (CELL == GRU && p.phase == 1) {
        f.left = read(p.dgates, (run + place) * p.batch * f.ld) + 2 * hidden;
        f.weight += (long long)2 * hidden * hidden;
        f.split = f.depth = hidden;
    } else {
        f.left = read(p.dgates, (run + before) * p.batch * f.ld);
        f.split = CELL == GRU ? 2 * hidden : GATES * hidden;
        f.depth = CELL == GRU && p.reset_first ? f.split : GATES * hidden;
        if (CELL == GRU && !p.reset_first) f.right_left = read(p.dcandidate, (run + before) * p.batch * hidden);
    }
    if (p.k > 0 || p.phase == 1) multiply(f, n_tile, j_tile, shared);


    const A clip = A(p.clip);
    A sums[MOST_ROWS] = {};  // of this thread's samples: all its outputs are of one unit
    const int j = j_tile + threadIdx.x % TILE;
#pragma unroll 1
    for (int e = threadIdx.x; e < TILE * TILE; e += BLOCK) {
        const long long n = n_tile + e / TILE;
        if (j >= hidden || n >= p.batch) continue;
        const long long length = length_of(p, n), state = ((long long)d * p.batch + n) * hidden + j;
        const long long in_run = (run + place) * p.batch + n, kept = ((long long)d * p.steps + t) * p.batch + n;
        const bool reached = t < length;
        A* const carried_h = write(p.carried_h, state);
        A* const dgates = write(p.dgates, in_run * GATES * hidden + j);
        const Cells cells{p, d, n, j, length, t, forward};

        if (CELL == GRU && p.phase == 1) {
            if (only_adds || !reached) continue;
            const Gate<A> r(*read(p.gates, kept * GATES * hidden + j), p.activation[d][0], clip);
            const A of_reset = product_at(shared, e);  // of r * h_before
            sums[0] += *dgates = of_reset * cells.state_before(p.y, p.h0) * r.slope;
            *carried_h += of_reset * r.value;
            continue;
        }
        // What reaches the state after this step: of the next one, backwards, where that reached the sample.
        const void* const begun = p.k ? p.carried_h : p.begin_h;
        A dh = begun ? *read(begun, state) : A(0);
        if (p.k > 0 && t_before < length) dh += product_at(shared, e);
        if (CELL == LSTM && p.k == 0) *write(p.carried_c, state) = p.begin_c ? *read(p.begin_c, state) : A(0);
        if (only_adds || !reached) {
            *carried_h = dh;
            if (only_adds) continue;
            for (int gate = 0; gate < GATES; ++gate) dgates[gate * hidden] = A(0);
            *write(p.previous, in_run * hidden + j) = A(0);
            if (CELL == GRU) *write(p.reset_first ? p.reset : p.dcandidate, in_run * hidden + j) = A(0);
            continue;
        }
        if (p.grad_y) dh += *read(p.grad_y, t * p.grad_y_t + n * p.grad_y_n + (d * hidden + j) * p.grad_y_j);
        const A h_before = cells.state_before(p.y, p.h0);
        *write(p.previous, in_run * hidden + j) = h_before;
        const A* const a = read(p.gates, kept * GATES * hidden + j);
        const GateActivation(&f)[3] = p.activation[d];
        A of[GATES], carried = A(0);
        if constexpr (CELL == RNN) {
            of[0] = dh * Gate<A>(a[0], f[0], clip).slope;
        } else if constexpr (CELL == LSTM) {
            const A c = *read(p.cells, kept * hidden + j), c_before = cells.cell_before();
            A* const carried_c = write(p.carried_c, state);
            const A* const peephole = p.peephole ? read(p.peephole, (long long)d * 3 * hidden + j) : nullptr;
            const Gate<A> i_gate(a[0], f[0], clip), g(a[2 * hidden], f[1], clip), o(a[3 * hidden], f[0], clip);
            const Gate<A> f_gate(a[hidden], f[0], clip);
            const Activated<A> at_c(c, f[2]);
            of[3] = dh * at_c.value * o.slope;
            A dc = *carried_c + dh * o.value * at_c.slope;
            if (peephole) dc += of[3] * peephole[2 * hidden];
            const A df = dc * c_before;
            of[0] = (dc * g.value - (p.input_forget ? df : A(0))) * i_gate.slope;
            of[1] = p.input_forget ? A(0) : df * f_gate.slope;
            of[2] = dc * i_gate.value * g.slope;
            dc *= p.input_forget ? A(1) - i_gate.value : f_gate.value;
            if (peephole) {
                dc += of[0] * peephole[0] + of[1] * peephole[hidden];
                sums[4] += of[0] * c_before, sums[5] += of[1] * c_before, sums[6] += of[3] * c;
            }
            *carried_c = dc;
        } else {
            const Gate<A> r(a[0], f[0], clip), z(a[hidden], f[0], clip), candidate(a[2 * hidden], f[1], clip);
            of[2] = dh * (A(1) - z.value) * candidate.slope;
            of[1] = dh * (h_before - candidate.value) * z.slope;
            const A q = *read(p.candidate, kept * hidden + j);
            if (p.reset_first) {
                of[0] = A(0);  // in the second launch
                *write(p.reset, in_run * hidden + j) = q;
            } else {
                of[0] = of[2] * q * r.slope;
                sums[3] += *write(p.dcandidate, in_run * hidden + j) = of[2] * r.value;
            }
            carried = dh * z.value;
        }
        *carried_h = carried;
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) sums[gate] += dgates[gate * hidden] = of[gate];
    }
    if (only_adds) return;

    // Over the tile's samples, row after row; the first step of all begins the sums.
    const long long tile_row = ((blockIdx.x / tiles_j) * (long long)p.directions + d) * p.rows;
    for (int row = 0; row < (CELL == GRU && p.phase == 1 ? 1 : p.rows); ++row) {
        A value = A(0);
#pragma unroll
        for (int r = 0; r < MOST_ROWS; ++r) value = r == row ? sums[r] : value;  // registers have no index
        __syncthreads();
        shared[threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.x >= TILE || j >= hidden) continue;
        A sum = A(0);
#pragma unroll
        for (int i = 0; i < BLOCK / TILE; ++i) sum += shared[i * TILE + threadIdx.x];
        A* const at = write(p.sums, (tile_row + row) * hidden + j);
        *at = p.begins && p.k == 0 && p.phase == 0 ? sum : *at + sum;
    }
}
