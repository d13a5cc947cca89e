// Activation functions behind one run-time switch.
//
// The code is uniform over a launch, so the switch costs a predictable branch per element and saves a
// compiled variant per function.  Codes are those of cupyconv/activations.py: the piecewise linear
// functions first, then the smooth ones, which are long.  A kernel that finishes dozens of sums a thread
// calls the smooth ones: a copy for each sum would take seconds to compile.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

enum ActivationCode {
    IDENTITY, RELU, RELU6, LEAKY_RELU, CLIP, HARD_SIGMOID, HARDSWISH,  // piecewise
    ELU, SIGMOID, TANH, GELU, GELU_TANH, SILU, MISH, SOFTPLUS          // smooth
};

// Comparisons are written so that a NaN falls through to itself, as NumPy's maximum and minimum have it.
template <class R> __device__ __forceinline__ R at_least(R v, R low) { return v < low ? low : v; }
template <class R> __device__ __forceinline__ R at_most(R v, R high) { return v > high ? high : v; }

template <class R> __device__ __forceinline__ R piecewise(R v, int code, R alpha, R beta) {
    switch (code) {
        case RELU: return at_least(v, R(0));
        case RELU6: return at_most(at_least(v, R(0)), R(6));
        case LEAKY_RELU: return v < R(0) ? alpha * v : v;
        case CLIP: return at_most(at_least(v, alpha), beta);
        case HARD_SIGMOID: return at_most(at_least(alpha * v + beta, R(0)), R(1));
        case HARDSWISH: return v * at_most(at_least(v / R(6) + R(0.5), R(0)), R(1));
        default: return v;
    }
}

template <class R> __device__ __forceinline__ R sigmoid(R v) { return R(1) / (R(1) + exp(-v)); }

// log(1 + exp(v)) without overflow: exp only ever sees a number that is not positive.
template <class R> __device__ __forceinline__ R softplus(R v) {
    return at_least(v, R(0)) + log1p(exp(v < R(0) ? v : -v));
}

template <class R> __device__ __forceinline__ R smooth(R v, int code, R alpha) {
    switch (code) {
        case ELU: return v < R(0) ? alpha * expm1(v) : v;
        case SIGMOID: return sigmoid(v);
        case TANH: return tanh(v);
        case GELU: return R(0.5) * v * (R(1) + erf(v * R(0.70710678118654752440)));
        case GELU_TANH:
            return R(0.5) * v * (R(1) + tanh(R(0.79788456080286535588) * (v + R(0.044715) * v * v * v)));
        case SILU: return v * sigmoid(v);
        case MISH: return v * tanh(softplus(v));
        default: return softplus(v);
    }
}

template <class R> __device__ __noinline__ R smooth_called(R v, int code, R alpha) { return smooth(v, code, alpha); }

template <bool CALLED, class R> __device__ __forceinline__ R activate(R v, int code, R alpha, R beta) {
    if (code < ELU) return piecewise(v, code, alpha, beta);
    return CALLED ? smooth_called(v, code, alpha) : smooth(v, code, alpha);
}

// Complex numbers have no activation; the public functions refuse one.
template <bool CALLED, class R> __device__ __forceinline__ Complex<R> activate(Complex<R> v, int, R, R) { return v; }

}  // namespace cupyconv
