// Activation functions behind one run-time switch.
//
// The code is uniform over a launch, so the switch costs a predictable branch per element and saves a
// compiled variant per function.  Codes are those of cupyconv/activations.py.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

enum ActivationCode {
    IDENTITY, RELU, RELU6, LEAKY_RELU, CLIP, ELU, SIGMOID, HARD_SIGMOID, HARDSWISH, TANH, GELU, GELU_TANH,
    SILU, MISH, SOFTPLUS
};

// Comparisons are written so that a NaN falls through to itself, as NumPy's maximum and minimum have it.
template <class R> __device__ __forceinline__ R at_least(R v, R low) { return v < low ? low : v; }
template <class R> __device__ __forceinline__ R at_most(R v, R high) { return v > high ? high : v; }

template <class R> __device__ __forceinline__ R sigmoid(R v) { return R(1) / (R(1) + exp(-v)); }

// log(1 + exp(v)) without overflow: exp only ever sees a number that is not positive.
template <class R> __device__ __forceinline__ R softplus(R v) {
    return at_least(v, R(0)) + log1p(exp(v < R(0) ? v : -v));
}

template <class R> __device__ R activate(R v, int code, R alpha, R beta) {
    switch (code) {
        case RELU: return at_least(v, R(0));
        case RELU6: return at_most(at_least(v, R(0)), R(6));
        case LEAKY_RELU: return v < R(0) ? alpha * v : v;
        case CLIP: return at_most(at_least(v, alpha), beta);
        case ELU: return v < R(0) ? alpha * expm1(v) : v;
        case SIGMOID: return sigmoid(v);
        case HARD_SIGMOID: return at_most(at_least(alpha * v + beta, R(0)), R(1));
        case HARDSWISH: return v * at_most(at_least(v / R(6) + R(0.5), R(0)), R(1));
        case TANH: return tanh(v);
        case GELU: return R(0.5) * v * (R(1) + erf(v * R(0.70710678118654752440)));
        case GELU_TANH:
            return R(0.5) * v * (R(1) + tanh(R(0.79788456080286535588) * (v + R(0.044715) * v * v * v)));
        case SILU: return v * sigmoid(v);
        case MISH: return v * tanh(softplus(v));
        case SOFTPLUS: return softplus(v);
        default: return v;
    }
}

// Complex numbers have no activation; the public functions refuse one.
template <class R> __device__ __forceinline__ Complex<R> activate(Complex<R> v, int, R, R) { return v; }

}  // namespace cupyconv
