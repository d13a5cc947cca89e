// The cells of recurrent layers, backwards: from the gradient of one unit's state, dh, to those of its gates.
//
//     rnn     da = dh f'
//     lstm    da_o = dh act(c) f'      dc += dh o act'(c) + da_o p_o
//             da_i = dc g f'           da_f = dc c_before f'             da_g = dc i g'     dc of before = dc f + ...
//     gru     da_n = dh (1 - z) g'     da_z = dh (h_before - n) f'       dh of before = dh z + ...
//             linear before reset:     da_r = da_n q f'                  dq = da_n r           (q = R h + b)
//             else, behind a product:  drh = da_n R     da_r = drh h_before f'     dh of before += drh r
//
// Steps beyond a sample's length leave its state's gradient as it is, and zeros for their gates, whatever was kept.
//
// -D: DTYPE (type of arguments and of y; what is kept, and gradients of states and gates, are in its accumulator's),
//     CELL (RNN, LSTM or GRU)
#pragma once
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
    unsigned* counters;   // of a launch that does what all of a run do: its blocks wait for each other
    void* parts;          // and of the state's gradient, they leave parts for each other
};

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
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
constexpr int MOST_ROWS = CELL == LSTM ? 7 : CELL == GRU ? 4 : 1;  // of sums

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

    // The `slot`-th direction of the launch, and a step of the run; `inside` is whether there are such a unit and sample.
    __device__ __forceinline__ Place(
        const RecurrentGradientParams& p, int slot, int j, long long n, long long step, bool inside)
        : p(p), d(p.first_direction + slot), j(j), n(n), t(p.first[d] + step),
          length(inside ? length_of(p.lengths, p.lengths_stride, p.wide_lengths, n, p.steps) : 0),
          state(((long long)d * p.batch + n) * p.hidden + j), kept(((long long)d * p.steps + t) * p.batch + n),
          in_run((slot * p.count + step) * p.batch + n) {}

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

// Of a gru that resets before the product, from the gradient of r * h_before, which is a product with da_n; what more goes on
// to the state before is returned.  `gate` and `h_before` are those that were kept.
template <class F>
__device__ __forceinline__ A back_through_reset(
    const Place& at, F f, A gate, A h_before, A product, A (&sums)[MOST_ROWS]) {
    const Activated<A> r = f.gate(gate);
    sums[0] = *at.dgate(0) = product * h_before * r.slope;
    return product * r.value;
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
