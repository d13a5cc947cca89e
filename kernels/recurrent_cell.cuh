// The cells of recurrent layers: from the sums of one hidden unit's gates to its new state.
//
//     s = R h, a row of the weight per gate          x = W x_t, already in `gates`          b = b_ih + b_hh
//
//     RNN    h' = f(a)                a = x + b + s
//     LSTM   c' = f(a_f) c + f(a_i) g(a_g)           a = x + b + s, + p c in i and f, + p c' in o
//            h' = f(a_o) act(c')                     input_forget: 1 - f(a_i) for f(a_f)
//     GRU    h' = (1 - f(a_z)) g(a_n) + f(a_z) h     a_n = x + b_ih + f(a_r) q,  q = s + b_hh
//     or, reset before the product, in two parts:
//            q = f(a_r) h                            2 gates
//            h' as above, a_n = x + b + R q          the third
//
// Every a is bounded to [-clip, clip].  A sample past its length keeps its state, and its y is 0.  Gates come in
// PyTorch's order: i, f, g, o and r, z, n.
#pragma once
#include "gate_activation.cuh"

namespace cupyconv {

// An array (D, N, units) as it lies in memory; data is null where it is absent.
struct Strided {
    void* data;
    long long stride_d, stride_n, stride_u;
};

struct GateActivation {
    double alpha, beta;
    int code;
};

// What runs are made of.  T is what arguments and results are stored in, A what is computed with.
struct RecurrentParams {
    Strided weight;                       // T: n is a row, (gate, unit); u is k
    Strided x, weight_ih;                 // T: inputs that a single step multiplies itself, u is i; else null
    Strided bias_ih, bias_hh, peephole;   // T: u is (gate, unit)
    Strided h0, c0, h, c;                 // T: before the first step, after the last
    Strided y;                            // T
    long long y_step;                     // from one time to the next
    const void* lengths;                  // int32 or int64, or null: all are `steps`
    long long lengths_stride;
    void* gates;                          // A: (D, time, N, all gates' rows), from time first[d] on
    long long gates_d, gates_t;
    void* beside;                         // A: (D, time, N, H): c of an lstm, q of a gru; or null
    long long beside_d, beside_t;
    void* states;                         // A: two of (D, N, H); step s reads the one, s % 2, and writes the other
    void* cells;                          // A: (D, N, H), an lstm's c; both null where there is no other step
    unsigned* counters;                   // of kernels whose blocks wait for each other
    GateActivation activation[6];         // of each direction three: f, g, act
    int default_gates;                    // these are sigmoid and tanh, as they are by default, and there is no clip
    double clip;                          // infinity: none
    int steps, batch, inputs, hidden;
    int step, count;                      // the first, in the order of processing; steps of a launch that has many
    int first[2], backward[2];            // of each direction: the time `gates` begins with; from the last step on?
    int gates_per_unit;                   // of the cell
    int is_candidate;                     // of one gate: it is a gru's n, after the reset
    int keeps_gates, input_forget, lengths_wide;
    int weight_vector, weight_ih_vector;  // bytes, all aligned to that: 16; 4, or of float64 8; 0 is an element
    int states_vectorized;                // their rows begin on boundaries of 16 bytes
};

template <class T> __device__ __forceinline__ T* element_at(const Strided& array, int d, long long n, long long u) {
    return static_cast<T*>(array.data) + d * array.stride_d + n * array.stride_n + u * array.stride_u;
}

// 0 where there is no array.
template <class T>
__device__ __forceinline__ Accumulator<T> value_at(const Strided& array, int d, long long n, long long u) {
    return array.data ? widen(*element_at<T>(array, d, n, u)) : Accumulator<T>(0);
}

// The length of a sample among int32 or (`wide`) int64, `all` at the most; or null: `all`.
__device__ __forceinline__ long long length_of(
    const void* lengths, long long stride, bool wide, long long n, long long all) {
    if (!lengths) return all;
    const long long at = n * stride;
    const long long given = wide ? static_cast<const long long*>(lengths)[at] : static_cast<const int*>(lengths)[at];
    return given < all ? given : all;
}

// A state of all samples that step s reads where `plane` is s % 2, and writes where it is not.
template <class A>
__device__ __forceinline__ A* state_at(const RecurrentParams& params, int plane, int d, long long n) {
    const long long rows = (long long)params.batch * (gridDim.z * plane + d) + n;
    return static_cast<A*>(params.states) + rows * params.hidden;
}

// The state before the first step, where others read it as any.
template <class T>
__device__ __forceinline__ void publish_first(const RecurrentParams& params, int d, int n, int u) {
    using A = Accumulator<T>;
    if (n < params.batch && u < params.hidden)
        state_at<A>(params, 0, d, n)[u] = value_at<T>(params.h0, d, n, u);
}

// What r and z of a gru that resets before the product have left for n, of all samples.
template <class A>
__device__ __forceinline__ const A* reset_state_at(const RecurrentParams& params, int d, int step) {
    const int t = params.backward[d] ? params.steps - 1 - step : step;
    return static_cast<const A*>(params.beside) + d * params.beside_d + t * params.beside_t;
}

// The activations of a cell, by what they are applied to: all gates but the candidate, the candidate, an lstm's c.
struct DefaultGates {
    template <class A> __device__ __forceinline__ A bounded(A v) const { return v; }
    template <class A> __device__ __forceinline__ A gate(A v) const { return gate_sigmoid(v); }
    template <class A> __device__ __forceinline__ A candidate(A v) const { return gate_tanh(v); }
    template <class A> __device__ __forceinline__ A output(A v) const { return gate_tanh(v); }
    template <class A> __device__ __forceinline__ A only(A v) const { return gate_tanh(v); }  // an rnn's
};

struct GivenGates {
    const RecurrentParams& params;
    int d;

    template <class A> __device__ __forceinline__ A bounded(A v) const {
        return at_most(at_least(v, A(-params.clip)), A(params.clip));
    }
    template <class A> __device__ __forceinline__ A gate(A v) const { return activation(0, v); }
    template <class A> __device__ __forceinline__ A candidate(A v) const { return activation(1, v); }
    template <class A> __device__ __forceinline__ A output(A v) const { return activation(2, v); }
    template <class A> __device__ __forceinline__ A only(A v) const { return activation(0, v); }

  private:
    template <class A> __device__ __forceinline__ A activation(int which, A v) const {
        const GateActivation& given = params.activation[3 * d + which];
        return called_activation(v, given.code, A(given.alpha), A(given.beta));
    }
};

// One hidden unit of one sample, for a product of all its gates, or of GATE_COUNT = 2 and then 1 of a gru that resets
// before it.  `begin` finds it and all that is the same for every step; then for each step, in this order:
//
//     load        x, which needs no product: so it comes while others are waited for, or the product is on its way
//     finish      the sums of R h become the new state
//     publish     what the next product needs
//     record      what is only kept
//     advance     to the next step
template <class T, int GATE_COUNT>
struct UnitCell {
    using A = Accumulator<T>;
    A h, c;  // before the step, and from `finish` on after it

    // Unit u of sample n, which may lie outside; `step` is in the order of processing.
    __device__ __forceinline__ void begin(const RecurrentParams& params, int d, int n, int u, int step) {
        inside = n < params.batch && u < params.hidden;
        if (!inside) return;
        backward = params.backward[d];
        t = backward ? params.steps - 1 - step : step;
        length = length_of(params.lengths, params.lengths_stride, params.lengths_wide, n, params.steps);
        own_state = (long long)n * params.hidden + u;
        if (params.states) {
            written = state_at<A>(params, (step + 1) % 2, d, 0) + own_state;
            to_other_plane = (step % 2 ? 1 : -1) * (state_at<A>(params, 1, d, 0) - state_at<A>(params, 0, d, 0));
        }
        if (params.steps > 0) y = element_at<T>(params.y, d, n, u) + t * params.y_step;
        if (params.gates) {
            const long long row = (long long)n * params.gates_per_unit + first_gate(params);
            gates = static_cast<A*>(params.gates) + d * params.gates_d + (t - params.first[d]) * params.gates_t +
                    row * params.hidden + u;
        }
        if (params.beside && params.steps > 0)
            beside = static_cast<A*>(params.beside) + d * params.beside_d + t * params.beside_t + own_state;
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) {
            const long long row = (long long)(first_gate(params) + g) * params.hidden + u;
            bias[g] = value_at<T>(params.bias_ih, d, 0, row);
            const A beside_product = value_at<T>(params.bias_hh, d, 0, row);
            if (GATE_COUNT == 3 && g == 2)
                q_bias = beside_product;
            else
                bias[g] += beside_product;
        }
        h = step == 0 ? value_at<T>(params.h0, d, n, u) : written[to_other_plane];
        if constexpr (GATE_COUNT == 4) {
            c = step == 0 ? value_at<T>(params.c0, d, n, u) : *cell_at(params, d);
#pragma unroll
            for (int i = 0; i < 3; ++i) peephole[i] = value_at<T>(params.peephole, d, 0, (long long)i * params.hidden + u);
        }
    }

    __device__ __forceinline__ void load(const RecurrentParams& params) {
        if (!valid()) return;
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g)
            a[g] = params.x.data ? A(0) : gates[(long long)g * params.hidden];
    }

    // Apart from `load`, lest it be waited for.
    __device__ __forceinline__ void add_bias() {
        if (valid()) add_inputs(bias);
    }

    // The sums of W x, where these are not in `gates`.
    __device__ __forceinline__ void add_inputs(const A (&sum)[GATE_COUNT]) {
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) a[g] += sum[g];
    }

    // `f` is DefaultGates or GivenGates.
    template <class F>
    __device__ __forceinline__ void finish(const RecurrentParams& params, const A (&sum)[GATE_COUNT], F f) {
        if (!valid()) return;
        if constexpr (GATE_COUNT == 4) {
            add_inputs(sum);
            if (params.peephole.data) {
                a[0] += peephole[0] * c;
                a[1] += peephole[1] * c;
            }
#pragma unroll
            for (int g = 0; g < 3; ++g) a[g] = f.bounded(a[g]);
            const A i = f.gate(a[0]);
            const A open = f.gate(a[1]), forget = params.input_forget ? A(1) - i : open;
            c = forget * c + i * f.candidate(a[2]);
            if (params.peephole.data) a[3] += peephole[2] * c;
            a[3] = f.bounded(a[3]);
            h = f.gate(a[3]) * f.output(c);
        } else if constexpr (GATE_COUNT == 3) {
            a[0] = f.bounded(a[0] + sum[0]);
            a[1] = f.bounded(a[1] + sum[1]);
            q = sum[2] + q_bias;
            a[2] = f.bounded(a[2] + f.gate(a[0]) * q);
            mix(f.gate(a[1]), f.candidate(a[2]));
        } else if constexpr (GATE_COUNT == 2) {
            a[0] = f.bounded(a[0] + sum[0]);
            a[1] = f.bounded(a[1] + sum[1]);
            q = f.gate(a[0]) * h;
        } else {
            a[0] = f.bounded(a[0] + sum[0]);
            if (params.is_candidate)
                mix(f.gate(gates[-(long long)params.hidden]), f.candidate(a[0]));  // z was left there
            else
                h = f.only(a[0]);
        }
    }

    __device__ __forceinline__ void publish(const RecurrentParams& params) const {
        if (!inside) return;
        if constexpr (GATE_COUNT == 2) {
            if (valid()) *beside = q;
        } else if (params.states) {
            *written = h;
        }
    }

    // `keeps_cell`: this thread goes on with c itself.
    __device__ __forceinline__ void record(
        const RecurrentParams& params, int d, int n, int u, int step, bool keeps_cell) const {
        if (!inside) return;
        if (valid() && params.keeps_gates) {
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) gates[(long long)g * params.hidden] = a[g];
        }
        if constexpr (GATE_COUNT != 2) {
            const bool last = step + 1 >= params.steps;
            if (params.steps > 0) *y = valid() ? narrow<T>(h) : T{};
            if (last && params.h.data) *element_at<T>(params.h, d, n, u) = narrow<T>(h);
            if constexpr (GATE_COUNT == 3)
                if (valid() && params.beside) *beside = q;
            if constexpr (GATE_COUNT == 4) {
                if (valid() && params.beside) *beside = c;
                if (params.cells && !keeps_cell) *cell_at(params, d) = c;
                if (last && params.c.data) *element_at<T>(params.c, d, n, u) = narrow<T>(c);
            }
        }
    }

    __device__ __forceinline__ void advance(const RecurrentParams& params) {
        if (!inside) return;
        written += to_other_plane;
        to_other_plane = -to_other_plane;
        t += backward ? -1 : 1;
        y += backward ? -params.y_step : params.y_step;
        gates += backward ? -params.gates_t : params.gates_t;
        beside += backward ? -params.beside_t : params.beside_t;
    }

    static __device__ __forceinline__ int first_gate(const RecurrentParams& params) {
        return GATE_COUNT == 1 && params.is_candidate ? 2 : 0;
    }

  private:
    bool inside, backward;
    int t;
    long long length, own_state;       // in (N, H)
    A* written;                        // h after this step, among `states`
    long long to_other_plane;
    T* y;                              // of this step, as are
    A *gates, *beside;
    A bias[GATE_COUNT], q_bias, peephole[3];
    A a[GATE_COUNT];                   // what the activations are applied to, without the sums up to `finish`
    A q;                               // of a gru: R h + b, or r h

    __device__ __forceinline__ bool valid() const { return inside && t >= 0 && t < length; }

    __device__ __forceinline__ A* cell_at(const RecurrentParams& params, int d) const {
        return static_cast<A*>(params.cells) + (long long)params.batch * params.hidden * d + own_state;
    }

    __device__ __forceinline__ void mix(A z, A n) { h = (A(1) - z) * n + z * h; }
};

}  // namespace cupyconv
