// The prologue of an input element, applied on load:  f(scale[c] * x + shift[c]), c counts the channels of all inputs.
//
// The arithmetic is in the accumulator type.  A kernel that stores elements in their own type rounds the result to it
// once.  Padding is zeros that are not transformed: a kernel applies the prologue only to elements that exist.  A
// prologue has a kernel variant of its own, PROLOGUE = 1, so that loads without a prologue have no overhead.
#pragma once
#include "activation.cuh"

#ifndef PROLOGUE
#define PROLOGUE 0
#endif

namespace cupyconv {

struct Prologue {
    const void *scale, *shift;         // in the accumulator type of the inputs; null if absent
    long long scale_step, shift_step;  // elements between the values of two channels
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

// Transform elements of one channel in place.
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
