// Activation functions of gates: those of activation.cuh, and the ones that only recurrent layers have.
//
// The latter are not in activation.cuh, whose callers would otherwise spend registers on functions they never use.
#pragma once
#include "activation.cuh"

namespace cupyconv {

template <class R> __device__ __forceinline__ R magnitude(R v) { return v < R(0) ? -v : v; }

// The default activations of gates.  For float they are inlined and have no branch, so that those of several gates are
// computed in parallel.  A reciprocal with an error of 1 ulp replaces the division.  The result is accurate to a few
// ulp.
__device__ __forceinline__ float gate_sigmoid(float v) { return __fdividef(1.0f, 1.0f + exp(-v)); }

// Near 0 it is v + v^3 p(v^2), since 1 - 2 / (exp(2 |v|) + 1) would lose digits by cancellation.
__device__ __forceinline__ float gate_tanh(float v) {
    const float size = fabsf(v), square = v * v;
    const float far = 1.0f - __fdividef(2.0f, exp(2.0f * size) + 1.0f);
    float p = -0.00659894431f;  // (tanh(v) / v - 1) / v^2, fitted on |v| < 0.55
    p = fmaf(p, square, 0.0213038046f);
    p = fmaf(p, square, -0.0539086126f);
    p = fmaf(p, square, 0.133331105f);
    p = fmaf(p, square, -0.333333313f);
    return select_by_sign(0.55f - size, fmaf(v * square, p, v), copysignf(far, v));
}

// Not inlined, since a copy of each for every gate would be long.
__device__ __noinline__ double gate_sigmoid(double v) { return sigmoid(v); }
__device__ __noinline__ double gate_tanh(double v) { return tanh(v); }

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

// The same, not inlined.
template <class R> __device__ __noinline__ R called_activation(R v, int code, R alpha, R beta) {
    return gate_activation(v, code, alpha, beta);
}

// f'(v).  As in `back_through`, `v` is the result for sigmoid and tanh, and may be the result for relu and leaky_relu.
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
