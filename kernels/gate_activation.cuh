// Activation functions of gates: all of activation.cuh, and those that recurrent layers alone have.
//
// Apart from the others, whose callers would pay in registers for what they are never asked for.
#pragma once
#include "activation.cuh"

namespace cupyconv {

template <class R> __device__ __forceinline__ R magnitude(R v) { return v < R(0) ? -v : v; }

// What gates have unless told otherwise.  In line and without a branch, so that those of several gates run side by
// side; of float a reciprocal of 1 ulp takes the place of a division.  The result is off by a few ulp.
__device__ __forceinline__ float gate_sigmoid(float v) { return __fdividef(1.0f, 1.0f + exp(-v)); }

// v + v^3 p(v^2) near 0, where 1 - 2 / (exp(2 |v|) + 1) would lose what it subtracts.
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

// Called, since a copy of each at every gate would be long.
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

// The same, called.
template <class R> __device__ __noinline__ R called_activation(R v, int code, R alpha, R beta) {
    return gate_activation(v, code, alpha, beta);
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
