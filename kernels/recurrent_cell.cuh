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

// One hidden unit of one sample at one step.
struct Unit {
    int d, n, u, step, t;
    bool inside;  // there is such a one
    bool valid;   // and the sample has not ended
};

__device__ __forceinline__ Unit unit_at(const RecurrentParams& params, int d, int n, int u, int step) {
    Unit unit = {d, n, u, step, params.backward[d] ? params.steps - 1 - step : step, false, false};
    unit.inside = n < params.batch && u < params.hidden;
    const void* const lengths = unit.inside ? params.lengths : nullptr;
    const long long length = length_of(lengths, params.lengths_stride, params.lengths_wide, n, params.steps);
    unit.valid = unit.inside && unit.t >= 0 && unit.t < length;
    return unit;
}

template <class A>
__device__ __forceinline__ A* state_at(const RecurrentParams& params, int plane, int d, long long n) {
    const long long rows = (long long)params.batch * (gridDim.z * plane + d) + n;
    return static_cast<A*>(params.states) + rows * params.hidden;
}

template <class A>
__device__ __forceinline__ A* beside_at(const RecurrentParams& params, const Unit& unit) {
    return static_cast<A*>(params.beside) + unit.d * params.beside_d + unit.t * params.beside_t +
           (long long)unit.n * params.hidden + unit.u;
}

template <class A> __device__ __forceinline__ A activate(const RecurrentParams& params, int d, int which, A v) {
    const GateActivation& given = params.activation[3 * d + which];
    return gate_activation(v, given.code, A(given.alpha), A(given.beta));
}

template <class A> __device__ __forceinline__ A bounded(const RecurrentParams& params, A v) {
    return at_most(at_least(v, A(-params.clip)), A(params.clip));
}

// A step of one unit, for a product of all its gates, or of GATE_COUNT = 2 and then 1 of a gru that resets before it.
// What needs no product is loaded early, so that it comes while the product is on its way.
template <class T, int GATE_COUNT>
struct CellStep {
    using A = Accumulator<T>;
    A a[GATE_COUNT], q_bias, h, c;

    static __device__ __forceinline__ int first_gate(const RecurrentParams& params) {
        return GATE_COUNT == 1 && params.is_candidate ? 2 : 0;
    }

    __device__ __forceinline__ A* gates_at(const RecurrentParams& params, const Unit& unit) const {
        const long long row = (long long)unit.n * params.gates_per_unit + first_gate(params);
        return static_cast<A*>(params.gates) + unit.d * params.gates_d +
               (unit.t - params.first[unit.d]) * params.gates_t + row * params.hidden + unit.u;
    }

    // The state that the product takes at this step of all samples; null: h0.  A candidate's is what the gates before
    // it have left.
    static __device__ __forceinline__ const A* factor(const RecurrentParams& params, int d, int step) {
        const A* rows = step == 0 ? nullptr : state_at<A>(params, step % 2, d, 0);
        if (GATE_COUNT == 1 && params.is_candidate) rows = beside_at<A>(params, unit_at(params, d, 0, 0, step));
        return rows;
    }

    __device__ __forceinline__ void load(const RecurrentParams& params, const Unit& unit) {
        if (!unit.inside) return;
        const int d = unit.d, n = unit.n, u = unit.u;
        h = unit.step == 0 ? value_at<T>(params.h0, d, n, u) : state_at<A>(params, unit.step % 2, d, n)[u];
        if (GATE_COUNT == 4)
            c = unit.step == 0 ? value_at<T>(params.c0, d, n, u) : *cell_at(params, unit);
        if (!unit.valid) return;
        const A* const x = params.x.data ? nullptr : gates_at(params, unit);
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) {
            const long long row = (long long)(first_gate(params) + g) * params.hidden + u;
            a[g] = (x ? x[(long long)g * params.hidden] : A(0)) + value_at<T>(params.bias_ih, d, 0, row);
            const A bias = value_at<T>(params.bias_hh, d, 0, row);
            if (GATE_COUNT == 3 && g == 2)
                q_bias = bias;
            else
                a[g] += bias;
        }
    }

    // Those of W x, where these are not in `gates`.
    __device__ __forceinline__ void add_sums(const A (&sum)[GATE_COUNT]) {
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) a[g] += sum[g];
    }

    // Finish with the sums of R h.
    __device__ __forceinline__ void finish(
        const RecurrentParams& params, const Unit& unit, const A (&sum)[GATE_COUNT]) {
        if (!unit.inside) return;
        if (unit.valid) {
            if constexpr (GATE_COUNT == 4)
                lstm(params, unit, sum);
            else if constexpr (GATE_COUNT == 3)
                gru(params, unit, sum);
            else if constexpr (GATE_COUNT == 2)
                gru_reset(params, unit, sum);
            else
                rnn_or_candidate(params, unit, sum);
            if (params.keeps_gates) {
                A* const kept = gates_at(params, unit);
#pragma unroll
                for (int g = 0; g < GATE_COUNT; ++g) kept[(long long)g * params.hidden] = a[g];
            }
        }
        if (GATE_COUNT != 2) store(params, unit);
    }

  private:
    static __device__ __forceinline__ A* cell_at(const RecurrentParams& params, const Unit& unit) {
        return static_cast<A*>(params.cells) + ((long long)params.batch * unit.d + unit.n) * params.hidden + unit.u;
    }

    __device__ __forceinline__ A peephole(const RecurrentParams& params, const Unit& unit, int which) const {
        return value_at<T>(params.peephole, unit.d, 0, (long long)which * params.hidden + unit.u);
    }

    __device__ __forceinline__ void lstm(const RecurrentParams& params, const Unit& unit, const A (&sum)[GATE_COUNT]) {
        const int d = unit.d;
        add_sums(sum);
        if (params.peephole.data) {
            a[0] += peephole(params, unit, 0) * c;
            a[1] += peephole(params, unit, 1) * c;
        }
#pragma unroll
        for (int g = 0; g < 3; ++g) a[g] = bounded(params, a[g]);
        const A i = activate(params, d, 0, a[0]);
        const A f = params.input_forget ? A(1) - i : activate(params, d, 0, a[1]);
        c = f * c + i * activate(params, d, 1, a[2]);
        if (params.peephole.data) a[3] += peephole(params, unit, 2) * c;
        a[3] = bounded(params, a[3]);
        h = activate(params, d, 0, a[3]) * activate(params, d, 2, c);
        if (params.beside) *beside_at<A>(params, unit) = c;
    }

    __device__ __forceinline__ void gru(const RecurrentParams& params, const Unit& unit, const A (&sum)[GATE_COUNT]) {
        const int d = unit.d;
#pragma unroll
        for (int g = 0; g < 2; ++g) a[g] = bounded(params, a[g] + sum[g]);
        const A q = sum[2] + q_bias;
        a[2] = bounded(params, a[2] + activate(params, d, 0, a[0]) * q);
        mix(activate(params, d, 0, a[1]), activate(params, d, 1, a[2]));
        if (params.beside) *beside_at<A>(params, unit) = q;
    }

    __device__ __forceinline__ void gru_reset(
        const RecurrentParams& params, const Unit& unit, const A (&sum)[GATE_COUNT]) {
#pragma unroll
        for (int g = 0; g < 2; ++g) a[g] = bounded(params, a[g] + sum[g]);
        *beside_at<A>(params, unit) = activate(params, unit.d, 0, a[0]) * h;
    }

    __device__ __forceinline__ void rnn_or_candidate(
        const RecurrentParams& params, const Unit& unit, const A (&sum)[GATE_COUNT]) {
        a[0] = bounded(params, a[0] + sum[0]);
        if (params.is_candidate) {
            const A a_z = gates_at(params, unit)[-(long long)params.hidden];
            mix(activate(params, unit.d, 0, a_z), activate(params, unit.d, 1, a[0]));
        } else {
            h = activate(params, unit.d, 0, a[0]);
        }
    }

    __device__ __forceinline__ void mix(A z, A n) { h = (A(1) - z) * n + z * h; }

    __device__ __forceinline__ void store(const RecurrentParams& params, const Unit& unit) const {
        const int d = unit.d, n = unit.n, u = unit.u;
        const bool last = unit.step + 1 >= params.steps;
        if (params.states) state_at<A>(params, (unit.step + 1) % 2, d, n)[u] = h;
        if (params.steps > 0)
            element_at<T>(params.y, d, n, u)[unit.t * params.y_step] = unit.valid ? narrow<T>(h) : T{};
        if (last && params.h.data) *element_at<T>(params.h, d, n, u) = narrow<T>(h);
        if constexpr (GATE_COUNT == 4) {
            if (params.cells) *cell_at(params, unit) = c;
            if (last && params.c.data) *element_at<T>(params.c, d, n, u) = narrow<T>(c);
        }
    }
};

}  // namespace cupyconv
