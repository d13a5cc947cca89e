// Activation functions of gates: all of activation.cuh, and those that recurrent layers alone have.
//
// Apart from the others, whose callers would pay in registers for what they are never asked for.
#pragma once
#include "activation.cuh"

namespace cupyconv {

template <class R> __device__ __forceinline__ R magnitude(R v) { return v < R(0) ? -v : v; }

template <class R> __device__ __forceinline__ R gate_activation(R v, int code, R alpha, R beta) {
    switch (code) {
        case AFFINE: return alpha * v + beta;
        case THRESHOLDED_RELU: return v < alpha ? R(0) : v;
        case SCALED_TANH: return alpha * tanh(beta * v);
        case SOFTSIGN: return v / (R(1) + magnitude(v));
        default: {
            R value[1] = {v};
            Activation<R>{code, alpha, beta}.apply(value);
            return value[0];
        }
    }
}

// f'(v), as `back_through` knows it: from the result where that tells it.
template <class R> __device__ __forceinline__ R gate_derivative(R v, int code, R alpha, R beta) {
    switch (code) {
        case AFFINE: return alpha;
        case THRESHOLDED_RELU: return v > alpha ? R(1) : R(0);
        case SCALED_TANH: {
            const R t = tanh(beta * v);
            return alpha * beta * (R(1) - t * t);
        }
        case SOFTSIGN: {
            const R w = R(1) + magnitude(v);
            return R(1) / (w * w);
        }
        default: return back_through(R(1), v, code, alpha, beta);
    }
}

}  // namespace cupyconv
