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

// Finish those of these sums that are `valid`, in place.  Of the i-th, `output(i)` is the output, `residual_at(i)` and
// `at(i)` are where in the residual and in the result it lies, asked where that is needed.  What several of them load
// is on its way at a time.
template <class Y, int COUNT, class Valid, class Output, class PlaceInResidual, class PlaceInResult>
__device__ __forceinline__ void finish_all(
    Accumulator<Y> (&value)[COUNT], const Epilogue& epilogue, const ActivationOf<Y>& activation, Valid valid,
    Output output, PlaceInResidual residual_at, PlaceInResult at) {
    if (epilogue.bias) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (valid(i)) value[i] += widen(static_cast<const Y*>(epilogue.bias)[output(i)]);
    }
    if (epilogue.residual.data) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (valid(i)) value[i] += widen(static_cast<const Y*>(epilogue.residual.data)[residual_at(i)]);
    }
    if (epilogue.pre) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (valid(i))
                if (Y* const pre = kept<Y>(epilogue, at(i))) *pre = narrow<Y>(value[i]);
    }
    activation.apply(value);
}

// One sum of a kernel whose threads finish single pixels.
template <class Y>
__device__ __forceinline__ Y finish(
    Accumulator<Y> sum, const Epilogue& epilogue, long long n, long long o, const Pixel& pixel,
    const Image& out) {
    const auto place = [&](const Image& image) {
        return n * image.stride_n + o * image.stride_c + offset_of(pixel, image.stride);
    };
    Accumulator<Y> value[1] = {sum};
    finish_all<Y>(
        value, epilogue, activation_of<Y>(epilogue), [](int) { return true; }, [&](int) { return o; },
        [&](int) { return place(epilogue.residual); }, [&](int) { return place(out); });
    return narrow<Y>(value[0]);
}

// Where a column of a tile of sums lies in the result and in the residual, at output 0.
constexpr long long NOWHERE = -0x7fffffffffffffffLL - 1;  // there is no such pixel

// A tile of sums in shared memory, from output `o_first` on, finished and written by all threads of a block: COUNT at a
// time by each of them, neighbours in memory by neighbouring threads.
//
//     along pixels      a thread stays in its column      along outputs     in its row
//
// Where there are `kept_sums`, the sums go there as they are instead.
template <class Y, int ROWS, int COLUMNS, int THREADS, int COUNT>
__device__ __forceinline__ void finish_tile(
    const Accumulator<Y>* sums, int row_pitch, int column_pitch, int rows, long long o_first, bool along_outputs,
    const long long* out_at, const long long* residual_at, const Image& out, const Epilogue& epilogue,
    Accumulator<Y>* kept_sums) {
    static_assert(THREADS % ROWS == 0 && THREADS % COLUMNS == 0, "threads share the tile evenly");
    const auto activation = activation_of<Y>(epilogue);
    const int row = along_outputs ? threadIdx.x % ROWS : threadIdx.x / COLUMNS;
    const int column = along_outputs ? threadIdx.x / ROWS : threadIdx.x % COLUMNS;
    const int row_step = along_outputs ? 0 : THREADS / COLUMNS, column_step = along_outputs ? THREADS / ROWS : 0;
    if (row >= rows) return;
    const int count = along_outputs ? (COLUMNS - 1 - column) / (THREADS / ROWS) + 1
                                    : (rows - 1 - row) / (THREADS / COLUMNS) + 1;  // of the thread
    const int sum_step = row_step * row_pitch + column_step * column_pitch;
    const long long at_step = row_step * out.stride_c;
    sums += row * row_pitch + column * column_pitch;
    long long row_at = (o_first + row) * out.stride_c;
#pragma unroll 1
    for (int first = 0; first < count; first += COUNT, sums += COUNT * sum_step) {
        Accumulator<Y> sum[COUNT] = {};
        long long column_at = NOWHERE, at[COUNT];
        bool valid[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i, row_at += at_step) {
            const bool exists = first + i < count;
            if (exists) {
                sum[i] = sums[i * sum_step];
                if (i == 0 || along_outputs) column_at = out_at[column + (first + i) * column_step];
            }
            valid[i] = exists && column_at != NOWHERE;
            at[i] = column_at + row_at;
        }
        if (kept_sums) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (valid[i]) kept_sums[at[i]] = sum[i];
            continue;
        }
        const auto output = [&](int i) { return o_first + row + (first + i) * row_step; };
        finish_all<Y>(
            sum, epilogue, activation, [&](int i) { return valid[i]; }, output,
            [&](int i) { return residual_at[column + (first + i) * column_step] + output(i) * epilogue.residual.stride_c; },
            [&](int i) { return at[i]; });
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (valid[i]) static_cast<Y*>(out.data)[at[i]] = narrow<Y>(sum[i]);
    }
}

}  // namespace cupyconv
