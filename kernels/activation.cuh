// Activation functions, selected by a switch at run time.
//
// The activation is the same for a whole launch.  The switch therefore costs only a predictable branch, and it saves a
// compiled variant per function.  The codes are those of cupyconv/problem/activations.py.  The first four functions are
// bounds (two comparisons), and are inlined.  All others are called: a copy of each of them for every sum that a thread
// finishes would take seconds to compile.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

enum ActivationCode {
    IDENTITY, RELU, RELU6, CLIP,                                       // bounds: the caller sets alpha and beta
    LEAKY_RELU, HARD_SIGMOID, HARDSWISH,                               // piecewise
    ELU, SIGMOID, TANH, GELU, GELU_TANH, SILU, MISH, SOFTPLUS,         // smooth
    AFFINE, THRESHOLDED_RELU, SCALED_TANH, SOFTSIGN                    // only of gates: gate_activation.cuh
};

// These comparisons return a NaN unchanged, as NumPy's maximum and minimum do.
template <class R> __device__ __forceinline__ R at_least(R v, R low) { return v < low ? low : v; }
template <class R> __device__ __forceinline__ R at_most(R v, R high) { return v > high ? high : v; }

template <class R> __device__ __forceinline__ R sigmoid(R v) { return R(1) / (R(1) + exp(-v)); }

// log(1 + exp(v)) without overflow: the argument of exp is never positive.
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

// One activation, with its parameters in the type of the arithmetic.
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

    // Complex numbers have no activation; the public functions reject one.
    template <int COUNT> __device__ __forceinline__ void apply(Complex<R> (&)[COUNT]) const {}
};

// f'(v) of the piecewise functions.  For relu, and for leaky_relu with alpha > 0, `v` may be f(v) instead, since both
// have the same sign.  At a kink, the derivative is the one on the flat side, else on the left; at 3, hardswish uses
// the right.
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

// f'(v) of the smooth functions.  For sigmoid and tanh, `v` is the result y, and the derivative is y (1 - y) or
// 1 - y^2.
template <class R> __device__ __noinline__ R smooth_derivative(R v, int code, R alpha) {
    switch (code) {
        case ELU: return v > R(0) ? R(1) : alpha * exp(v);
        case SIGMOID: return v * (R(1) - v);
        case TANH: return R(1) - v * v;
        case GELU:
            return R(0.5) * (R(1) + erf(v * R(0.70710678118654752440)))
                + v * R(0.39894228040143267794) * exp(R(-0.5) * v * v);
        case GELU_TANH: {
            const R w = at_most(at_least(v, R(-10)), R(10));  // beyond, f' is constant, and v^3 may overflow
            // With t = tanh(u / 2), sigmoid(u) is (1 + t) / 2 and stays accurate for t near -1.  sigmoid(-u) is
            // (1 - t) / 2 and stays accurate for t near 1.
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

// grad * f'(v): the gradient of an activation's argument, from the gradient of its result.
template <class R> __device__ __forceinline__ R back_through(R grad, R v, int code, R alpha, R beta) {
    return grad * (code < ELU ? piecewise_derivative(v, code, alpha, beta) : smooth_derivative(v, code, alpha));
}
template <class R> __device__ __forceinline__ Complex<R> back_through(Complex<R> grad, Complex<R>, int, R, R) {
    return grad;
}

}  // namespace cupyconv
