// What happens to an element of the inputs as it is loaded:  f(scale[c] * x + shift[c]), c counts merged channels.
//
// Computed in the accumulator's type; where a kernel keeps elements in their own, rounded to that once.  Padding is
// zeros that are not transformed: kernels ask for this after they know that an element is there.  A variant of its
// own, PROLOGUE = 1: without a prologue no load pays for one.
#pragma once
#include "activation.cuh"

#ifndef PROLOGUE
#define PROLOGUE 0
#endif

namespace cupyconv {

struct Prologue {
    const void *scale, *shift;         // in the accumulator's type of what is loaded; or null
    long long scale_step, shift_step;  // elements from one channel's to the next
    double alpha, beta;
    int activation;
};

// The scale and shift of one channel.
template <class A>
struct Factors {
    A scale, shift;
};

template <class A> __device__ __forceinline__ Factors<A> factors_of(const Prologue& prologue, long long c) {
    return {prologue.scale ? static_cast<const A*>(prologue.scale)[c * prologue.scale_step] : A(1),
            prologue.shift ? static_cast<const A*>(prologue.shift)[c * prologue.shift_step] : A(0)};
}

// Elements of one channel, in place.
template <class A, int COUNT>
__device__ __forceinline__ void transform(A (&x)[COUNT], const Factors<A>& by, const Prologue& prologue) {
    using R = RealPart<A>;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        A value = by.shift;
        add_product(value, by.scale, x[i]);
        x[i] = value;
    }
    Activation<R>{prologue.activation, R(prologue.alpha), R(prologue.beta)}.apply(x);
}

template <class A> __device__ __forceinline__ A transformed(A x, const Factors<A>& by, const Prologue& prologue) {
    A value[1] = {x};
    transform(value, by, prologue);
    return value[0];
}

}  // namespace cupyconv
