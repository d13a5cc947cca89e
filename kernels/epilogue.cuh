// What happens to a finished sum before it is stored:  y = activation(sum + bias[o] + residual[n, o, p])
#pragma once
#include "activation.cuh"
#include "image.cuh"

namespace cupyconv {

struct Epilogue {
    const void* bias;  // or null
    Image residual;    // data may be null
    double alpha, beta;
    int activation;
};

// CALLED: smooth activations as a function call, for kernels that finish many sums a thread.
template <class Y, bool CALLED = false>
__device__ __forceinline__ Y finish(
    Accumulator<Y> sum, const Epilogue& epilogue, long long n, long long o, const Pixel& pixel) {
    if (epilogue.bias) sum += widen(static_cast<const Y*>(epilogue.bias)[o]);
    if (epilogue.residual.data) {
        const Image& r = epilogue.residual;
        sum += widen(static_cast<const Y*>(r.data)[n * r.stride_n + o * r.stride_c + offset_of(pixel, r.stride)]);
    }
    if (epilogue.activation != IDENTITY) {
        using R = RealPart<Accumulator<Y>>;
        sum = activate<CALLED>(sum, epilogue.activation, R(epilogue.alpha), R(epilogue.beta));
    }
    return narrow<Y>(sum);
}

}  // namespace cupyconv
