// What happens to a finished sum before it is stored:  y = activation(sum + bias[o] + residual[n, o, p])
#pragma once
#include "activation.cuh"
#include "image.cuh"

namespace cupyconv {

struct Epilogue {
    const void* bias;  // or null
    Image residual;    // data may be null
    void* pre;         // where sums are kept before the activation, laid out as the result is; or null
    double alpha, beta;
    int activation;
};

template <class Y> using ActivationOf = Activation<RealPart<Accumulator<Y>>>;

template <class Y> __device__ __forceinline__ ActivationOf<Y> activation_of(const Epilogue& epilogue) {
    using R = RealPart<Accumulator<Y>>;
    return {epilogue.activation, R(epilogue.alpha), R(epilogue.beta)};
}

template <class Y> __device__ __forceinline__ Accumulator<Y> bias_of(const Epilogue& epilogue, long long o) {
    return epilogue.bias ? widen(static_cast<const Y*>(epilogue.bias)[o]) : Accumulator<Y>(0);
}

// Where the pre-activation is kept of what is stored `at` elements into the result; null where it is not kept.
// A complex result has no activation, and no code for this.
template <class Y> __device__ __forceinline__ Y* kept(const Epilogue& epilogue, long long at) {
    return sizeof(RealPart<Y>) == sizeof(Y) && epilogue.pre ? static_cast<Y*>(epilogue.pre) + at : nullptr;
}

// Finish the sum of output o; `residual_at()` and `at()` are where in the residual and in the result its element
// lies, asked where that is needed.
template <class Y, class Place, class PlaceInResult>
__device__ __forceinline__ Y finish_at(
    Accumulator<Y> sum, const Epilogue& epilogue, long long o, Place residual_at, PlaceInResult at) {
    Accumulator<Y> value[1] = {sum};
    value[0] += bias_of<Y>(epilogue, o);
    if (epilogue.residual.data) value[0] += widen(static_cast<const Y*>(epilogue.residual.data)[residual_at()]);
    if (epilogue.pre)
        if (Y* const pre = kept<Y>(epilogue, at())) *pre = narrow<Y>(value[0]);
    activation_of<Y>(epilogue).apply(value);
    return narrow<Y>(value[0]);
}

// One sum of a kernel whose threads finish single pixels.
template <class Y>
__device__ __forceinline__ Y finish(
    Accumulator<Y> sum, const Epilogue& epilogue, long long n, long long o, const Pixel& pixel,
    const Image& out) {
    const auto place = [&](const Image& image) {
        return n * image.stride_n + o * image.stride_c + offset_of(pixel, image.stride);
    };
    return finish_at<Y>(sum, epilogue, o, [&] { return place(epilogue.residual); }, [&] { return place(out); });
}

}  // namespace cupyconv
