// Recurrent cells: from the sums of one hidden unit's gates to its new state.
//
//     s = R h, a row of the weight per gate          x = W x_t, already in `gates`          b = b_ih + b_hh
//
//     RNN    h' = f(a)                a = x + b + s
//     LSTM   c' = f(a_f) c + f(a_i) g(a_g)           a = x + b + s, + p c in i and f, + p c' in o
//            h' = f(a_o) act(c')                     input_forget: 1 - f(a_i) replaces f(a_f)
//     GRU    h' = (1 - f(a_z)) g(a_n) + f(a_z) h     a_n = x + b_ih + f(a_r) q,  q = s + b_hh
//     or, if the reset precedes the product, in two parts:
//            q = f(a_r) h                            for 2 gates
//            h' as above, a_n = x + b + R q          for the third gate
//
// Every a is clipped to [-clip, clip].  A sample past its length keeps its state, and its y is 0.  Gates are in the
// order of PyTorch: i, f, g, o and r, z, n.
#pragma once
#include "gate_activation.cuh"

namespace cupyconv {

// A strided array (D, N, units).  `data` is null if it is absent.
struct Strided {
    void* data;
    long long stride_d, stride_n, stride_u;
};

struct GateActivation {
    double alpha, beta;
    int code;
};

// The parameters of a launch.  T is the storage type of arguments and results, A the type of the arithmetic.
struct RecurrentParams {
    Strided weight;                       // T: n is the row (gate, unit), u is k
    Strided x, weight_ih;                 // T: u is i; null unless a single step multiplies its own inputs
    Strided bias_ih, bias_hh, peephole;   // T: u is (gate, unit)
    Strided h0, c0, h, c;                 // T: states before the first step, and after the last
    Strided y;                            // T
    long long y_step;                     // distance between two times
    const void* lengths;                  // int32 or int64; null if all are `steps`
    long long lengths_stride;
    void* gates;                          // A: (D, time, N, all gates' rows), beginning at time first[d]
    long long gates_d, gates_t;
    void* beside;                         // A: (D, time, N, H): c of an LSTM, q of a GRU; or null
    long long beside_d, beside_t;
    void* states;                         // A: two arrays (D, N, H); step s reads array s % 2 and writes the other
    void* cells;                          // A: (D, N, H), c of an LSTM; null, as `states`, if no other step needs it
    unsigned* counters;                   // for kernels whose blocks wait for each other
    GateActivation activation[6];         // three per direction: f, g, act
    int default_gates;                    // 1: these are the defaults, sigmoid and tanh, and there is no clip
    double clip;                          // infinity if absent
    int steps, batch, inputs, hidden;
    int step, count;                      // first step in processing order; steps of a launch that has many
    int first[2], backward[2];            // per direction: first time of `gates`; whether time runs backward
    int gates_per_unit;                   // gates of the cell
    int is_candidate;                     // for one gate: it is n of a GRU, after the reset
    int keeps_gates, input_forget, lengths_wide;
    int weight_vector, weight_ih_vector;  // bytes per access to their rows: 16; 4, or 8 for float64; 0: one element
    int states_vectorized;                // 1: their rows are 16-byte aligned
};

template <class T> __device__ __forceinline__ T* element_at(const Strided& array, int d, long long n, long long u) {
    return static_cast<T*>(array.data) + d * array.stride_d + n * array.stride_n + u * array.stride_u;
}

// The value of an element, or 0 if there is no array.
template <class T>
__device__ __forceinline__ Accumulator<T> value_at(const Strided& array, int d, long long n, long long u) {
    return array.data ? widen(*element_at<T>(array, d, n, u)) : Accumulator<T>(0);
}

// The length of a sample, at most `all`.  `lengths` is int32, or int64 if `wide`.  If it is null, the length is `all`.
__device__ __forceinline__ long long length_of(
    const void* lengths, long long stride, bool wide, long long n, long long all) {
    if (!lengths) return all;
    const long long at = n * stride;
    const long long given = wide ? static_cast<const long long*>(lengths)[at] : static_cast<const int*>(lengths)[at];
    return given < all ? given : all;
}

// The state of sample n in a plane.  Step s reads plane s % 2 and writes the other one.
template <class A>
__device__ __forceinline__ A* state_at(const RecurrentParams& params, int plane, int d, long long n) {
    const long long rows = (long long)params.batch * (gridDim.z * plane + d) + n;
    return static_cast<A*>(params.states) + rows * params.hidden;
}

// Store the initial state as the state that step 0 reads.
template <class T>
__device__ __forceinline__ void publish_first(const RecurrentParams& params, int d, int n, int u) {
    using A = Accumulator<T>;
    if (n < params.batch && u < params.hidden)
        state_at<A>(params, 0, d, n)[u] = value_at<T>(params.h0, d, n, u);
}

// The reset states r * h of all samples, for a GRU that resets before the product.  The step of r and z stores them for
// that of n.
template <class A>
__device__ __forceinline__ const A* reset_state_at(const RecurrentParams& params, int d, int step) {
    const int t = params.backward[d] ? params.steps - 1 - step : step;
    return static_cast<const A*>(params.beside) + d * params.beside_d + t * params.beside_t;
}

// The activations of a cell, by their arguments: `gate` for all gates but the candidate, `candidate`, `output` for c of
// an LSTM, and `only` for the one gate of an RNN.
struct DefaultGates {
    template <class A> __device__ __forceinline__ A bounded(A v) const { return v; }
    template <class A> __device__ __forceinline__ A gate(A v) const { return gate_sigmoid(v); }
    template <class A> __device__ __forceinline__ A candidate(A v) const { return gate_tanh(v); }
    template <class A> __device__ __forceinline__ A output(A v) const { return gate_tanh(v); }
    template <class A> __device__ __forceinline__ A only(A v) const { return gate_tanh(v); }
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

// One hidden unit of one sample.  GATE_COUNT is the number of gates of one product: all of them, or, for a GRU that
// resets before the product, first 2 and then 1.  `begin` locates the unit, and loads what is the same for all steps.
// Then each step calls, in this order:
//
//     load        loads x. It needs no product, so it overlaps with waiting for other blocks or with the product
//     finish      computes the new state from the sums of R h
//     publish     stores the data that the next product needs
//     record      stores all other data
//     advance     goes to the next step
template <class T, int GATE_COUNT>
struct UnitCell {
    using A = Accumulator<T>;
    A h, c;  // before the step; `finish` replaces them by the new ones

    // Unit u of sample n, which may not exist.  `step` is in processing order.
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

    // Separate from `load`, so that `load` does not wait for its data.
    __device__ __forceinline__ void add_bias() {
        if (valid()) add_inputs(bias);
    }

    // Add the sums of W x, if `gates` does not contain them.
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
                mix(f.gate(gates[-(long long)params.hidden]), f.candidate(a[0]));  // z is stored there
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

    // If `keeps_cell`, this thread keeps c for the next step itself.
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
    long long length, own_state;       // own_state: offset in (N, H)
    A* written;                        // address in `states` of h after this step
    long long to_other_plane;
    T* y;                              // of this step, as are gates and beside
    A *gates, *beside;
    A bias[GATE_COUNT], q_bias, peephole[3];
    A a[GATE_COUNT];                   // arguments of the activations; before `finish`, without the sums
    A q;                               // for a GRU: R h + b, or r h

    __device__ __forceinline__ bool valid() const { return inside && t >= 0 && t < length; }

    __device__ __forceinline__ A* cell_at(const RecurrentParams& params, int d) const {
        return static_cast<A*>(params.cells) + (long long)params.batch * params.hidden * d + own_state;
    }

    __device__ __forceinline__ void mix(A z, A n) { h = (A(1) - z) * n + z * h; }
};

}  // namespace cupyconv
