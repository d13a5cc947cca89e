// Backward pass of recurrent cells: from the gradient of one unit's state, dh, to the gradients of its gates.
//
//     rnn     da = dh f'
//     lstm    da_o = dh act(c) f'      dc += dh o act'(c) + da_o p_o
//             da_i = dc g f'           da_f = dc c_before f'             da_g = dc i g'     previous dc = dc f + ...
//     gru     da_n = dh (1 - z) g'     da_z = dh (h_before - n) f'       previous dh = dh z + ...
//             linear before reset:     da_r = da_n q f'                  dq = da_n r           (q = R h + b)
//             else, after a product:   drh = da_n R     da_r = drh h_before f'     previous dh += drh r
//
// A step past a sample's length leaves the gradient of the sample's state unchanged.  The gradients of its gates are
// zeros, whatever the forward pass stored.
//
// -D: DTYPE (type of arguments and of y; stored gates and cells, and all gradients that are computed here, have the
//     accumulator type), CELL (RNN, LSTM or GRU)
#pragma once
#include "recurrent_cell.cuh"

namespace cupyconv {

enum Cell { RNN, LSTM, GRU };

struct RecurrentGradientParams {
    // Stored by the forward pass: gates (D, T, N, gates' rows); beside is c of an LSTM, q or r * h of a GRU.
    const void *gates, *beside;
    const void *weight_hh, *y, *h0, *c0, *peephole;  // type T, C-contiguous; the last three may be null
    const void* lengths;                             // int32 or int64; null if all are `steps`
    long long lengths_stride;
    const void* grad_y;  // type T, or null
    long long grad_y_t, grad_y_n, grad_y_u;
    const void *begin_h, *begin_c;  // gradients of the states at the first step of a run; null: zeros
    void *carried_h, *carried_c;
    void *dgates, *dcandidate, *previous, *reset;  // of the steps of a run; `reset` is r * h_before
    void* sums;                                    // (tile of samples, direction, row, unit)
    GateActivation activation[6];  // three per direction: f, g, act
    int default_gates;             // 1: these are the defaults, sigmoid and tanh, and there is no clip
    double clip;  // infinity if absent
    long long first[2];  // earliest time of the run, per direction
    long long steps, batch, count;
    int hidden, directions;
    int sign[2];          // per direction: 1 forward, -1 reverse
    int first_direction;  // the first direction of the launch
    int is_reset;         // the launch is a RESET
    int input_forget, reset_first, wide_lengths;
    int begins;           // 1: first run of these directions, whose sums over samples begin at 0
    int sum_rows;         // rows of `sums`
    int steps_done;       // steps of the run that are done
    unsigned* counters;   // for the persistent kernel, whose blocks wait for each other
    void* parts;          // parts of the state's gradient that these blocks exchange
};

// f(a) and f'(a).
template <class A> struct Activated {
    A value, slope;
};

// The activations of a cell, by their arguments: `gate` for all gates but the candidate, `candidate`, `output` for c of
// an LSTM, and `only` for the one gate of an RNN.
struct DefaultSlopes {
    template <class A> __device__ __forceinline__ Activated<A> gate(A a) const {
        const A y = gate_sigmoid(a);
        return {y, y * (A(1) - y)};
    }
    template <class A> __device__ __forceinline__ Activated<A> candidate(A a) const { return output(a); }
    template <class A> __device__ __forceinline__ Activated<A> only(A a) const { return output(a); }
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
    // Not inlined, since a copy for every gate would be long.
    template <class A> static __device__ __noinline__ Activated<A> activated(A a, int code, A alpha, A beta) {
        const A value = gate_activation(a, code, alpha, beta);
        // The same rule as derivative_from_result in cupyconv/problem/activations.py.
        const bool tells = code == RELU || code == SIGMOID || code == TANH || (code == LEAKY_RELU && alpha > A(0));
        return {value, gate_derivative(tells ? value : a, code, alpha, beta)};
    }

    // If `a` was clipped, f' is 0.
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
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int MOST_ROWS = CELL == LSTM ? 7 : CELL == GRU ? 4 : 1;  // rows of `sums`, at most

__device__ __forceinline__ const A* read(const void* array, long long at) { return static_cast<const A*>(array) + at; }
__device__ __forceinline__ const T* stored(const void* array, long long at) {
    return static_cast<const T*>(array) + at;
}
__device__ __forceinline__ A* write(void* array, long long at) { return static_cast<A*>(array) + at; }

// One unit of one sample at one step, and the offsets of its data.
struct Place {
    const RecurrentGradientParams& p;
    int d, j;
    long long n, t, length;
    long long state;   // in (D, N, H)
    long long kept;    // in (D, T, N)
    long long in_run;  // in (direction of the launch, step of the run, N)

    // `slot`: direction within the launch; `step`: step within the run; `inside`: whether the unit and the sample
    // exist.
    __device__ __forceinline__ Place(
        const RecurrentGradientParams& p, int slot, int j, long long n, long long step, bool inside)
        : p(p), d(p.first_direction + slot), j(j), n(n), t(p.first[d] + step),
          length(inside ? length_of(p.lengths, p.lengths_stride, p.wide_lengths, n, p.steps) : 0),
          state(((long long)d * p.batch + n) * p.hidden + j), kept(((long long)d * p.steps + t) * p.batch + n),
          in_run((slot * p.count + step) * p.batch + n) {}

    __device__ __forceinline__ bool reached() const { return t < length; }
    __device__ __forceinline__ long long earlier() const { return p.sign[d] > 0 ? t - 1 : t + 1; }
    // Whether the forward pass began the sample with this step.
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

// The data that a step needs in addition to the product.  A thread loads them before it waits for the product.
struct Kept {
    A dh, dc;  // from the steps that are done, without the product
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

// Compute the gates' gradients from the state's, dh.  Returns the previous state's gradient without the product's part.
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

// For a GRU that resets before the product: compute the gradient of r from `product`, the gradient of r * h_before,
// which is a product with da_n.  Returns a further part of the previous state's gradient.  `gate` and `h_before` are
// the stored values.
template <class F>
__device__ __forceinline__ A back_through_reset(
    const Place& at, F f, A gate, A h_before, A product, A (&sums)[MOST_ROWS]) {
    const Activated<A> r = f.gate(gate);
    sums[0] = *at.dgate(0) = product * h_before * r.slope;
    return product * r.value;
}

// Compute the gates' gradients of a step within the sample's length.  Returns the same as back_through_rnn.
template <class F>
__device__ __forceinline__ A back_through_step(const Place& at, const Kept& kept, F f, A dh, A (&sums)[MOST_ROWS]) {
    dh += kept.grad_y;
    *at.of_run(at.p.previous) = kept.h_before;
    if constexpr (CELL == RNN) return back_through_rnn(at, kept, f, dh, sums);
    if constexpr (CELL == LSTM) return back_through_lstm(at, kept, f, dh, sums);
    if constexpr (CELL == GRU) return back_through_gru(at, kept, f, dh, sums);
}

// Write zeros as the gates' gradients of a step past the sample's length.
__device__ __forceinline__ void skip_step(const Place& at) {
    const RecurrentGradientParams& p = at.p;
    for (int gate = 0; gate < GATES; ++gate) *at.dgate(gate) = A(0);
    *at.of_run(p.previous) = A(0);
    if (CELL == GRU) *at.of_run(p.reset_first ? p.reset : p.dcandidate) = A(0);
}
