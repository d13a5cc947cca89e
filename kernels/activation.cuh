// Activation functions behind one run-time switch.
//
// The code is uniform over a launch, so the switch costs a predictable branch and saves a compiled variant
// per function.  Codes are those of cupyconv/problem/activations.py.  The first four are bounds, two comparisons,
// and stand in line; every other is called, since a copy of each at each sum that a thread finishes would take
// seconds to compile.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

enum ActivationCode {
    IDENTITY, RELU, RELU6, CLIP,                                       // bounds: alpha and beta, given by the caller
    LEAKY_RELU, HARD_SIGMOID, HARDSWISH,                               // piecewise
    ELU, SIGMOID, TANH, GELU, GELU_TANH, SILU, MISH, SOFTPLUS,         // smooth
    AFFINE, THRESHOLDED_RELU, SCALED_TANH, SOFTSIGN                    // of gates: gate_activation.cuh
};

// Comparisons are written so that a NaN falls through to itself, as NumPy's maximum and minimum have it.
template <class R> __device__ __forceinline__ R at_least(R v, R low) { return v < low ? low : v; }
template <class R> __device__ __forceinline__ R at_most(R v, R high) { return v > high ? high : v; }

template <class R> __device__ __forceinline__ R sigmoid(R v) { return R(1) / (R(1) + exp(-v)); }

// log(1 + exp(v)) without overflow: exp only ever sees a number that is not positive.
template <class R> __device__ __forceinline__ R softplus(R v) {
    return at_least(v, R(0)) + log1p(exp(v < R(0) ? v : -v));
}

template <class R> __device__ __noinline__ R curve(R v, int code, R alpha, R beta) {
    switch (code) {
        case LEAKY_RELU: return v < R(0) ? alpha * v : v;
        case HARD_SIGMOID: return at_most(at_least(alpha * v + beta, R(0)), R(1));
        case HARDSWISH: return v * at_most(at_least(v / R(6) + R(0.5), R(0)), R(1));
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

// One activation with its parameters in the type computed with.
template <class R>
struct Activation {
    int code;
    R alpha, beta;

    template <int COUNT> __device__ __forceinline__ void apply(R (&v)[COUNT]) const {
        if (code <= CLIP) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) v[i] = at_most(at_least(v[i], alpha), beta);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) v[i] = curve(v[i], code, alpha, beta);
        }
    }

    // Complex numbers have no activation; the public functions refuse one.
    template <int COUNT> __device__ __forceinline__ void apply(Complex<R> (&)[COUNT]) const {}
};

// f'(v), for the piecewise functions that need no more than v, or than f(v) where that tells it: the sign of
// relu's and leaky_relu's results (alpha > 0) is that of their arguments.  Where a function bends, the flat or
// the left side counts.
template <class R> __device__ __forceinline__ R piecewise_derivative(R v, int code, R alpha, R beta) {
    switch (code) {
        case RELU: return v > R(0) ? R(1) : R(0);
        case RELU6: return v > R(0) && v < R(6) ? R(1) : R(0);
        case LEAKY_RELU: return v > R(0) ? R(1) : alpha;
        case CLIP: return v > alpha && v < beta ? R(1) : R(0);
        case HARD_SIGMOID: {
            const R gate = alpha * v + beta;
            return gate > R(0) && gate < R(1) ? alpha : R(0);
        }
        case HARDSWISH: {
            const R gate = at_most(at_least(v / R(6) + R(0.5), R(0)), R(1));
            return v > R(-3) && v < R(3) ? gate + v / R(6) : gate;
        }
        default: return R(1);
    }
}

// f'(v) of the others; of sigmoid and tanh v is the result, y (1 - y) and 1 - y^2.
template <class R> __device__ __noinline__ R smooth_derivative(R v, int code, R alpha) {
    switch (code) {
        case ELU: return v > R(0) ? R(1) : alpha * exp(v);
        case SIGMOID: return v * (R(1) - v);
        case TANH: return R(1) - v * v;
        case GELU:
            return R(0.5) * (R(1) + erf(v * R(0.70710678118654752440)))
                + v * R(0.39894228040143267794) * exp(R(-0.5) * v * v);
        case GELU_TANH: {
            const R w = at_most(at_least(v, R(-10)), R(10));  // flat beyond, where the cube would overflow
            // (1 + tanh u) / 2 is sigmoid(2 u), which keeps its digits where tanh nears -1, and sigmoid(-2 u) at 1.
            const R u = R(1.59576912160573071176) * (w + R(0.044715) * w * w * w);
            return sigmoid(u) * (R(1) + w * sigmoid(-u) * R(1.59576912160573071176) * (R(1) + R(0.134145) * w * w));
        }
        case SILU: {
            const R s = sigmoid(v);
            return s * (R(1) + v * (R(1) - s));
        }
        case MISH: {
            const R t = tanh(softplus(v));
            return t + v * (R(1) - t * t) * sigmoid(v);
        }
        default: return sigmoid(v);
    }
}

// grad * f'(v): what a gradient becomes on its way back through an activation.
template <class R> __device__ __forceinline__ R back_through(R grad, R v, int code, R alpha, R beta) {
    return grad * (code < ELU ? piecewise_derivative(v, code, alpha, beta) : smooth_derivative(v, code, alpha));
}
template <class R> __device__ __forceinline__ Complex<R> back_through(Complex<R> grad, Complex<R>, int, R, R) {
    return grad;
}

}  // namespace cupyconv
