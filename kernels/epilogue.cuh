// The epilogue of a sum, applied before the result is stored:  y = activation(sum + bias[o] + residual[n, o, p])
#pragma once
#include "activation.cuh"
#include "image.cuh"

namespace cupyconv {

struct Epilogue {
    const void* bias;  // null if absent
    Image residual;    // its data is null if absent
    void* pre;         // pre-activations are stored here, at the offsets of the result; or null
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

// The address of the pre-activation of the result element at offset `at`, or null if pre-activations are not stored.
// Complex results have no activation, so they need no code for this.
template <class Y> __device__ __forceinline__ Y* kept(const Epilogue& epilogue, long long at) {
    return sizeof(RealPart<Y>) == sizeof(Y) && epilogue.pre ? static_cast<Y*>(epilogue.pre) + at : nullptr;
}

// Apply the epilogue in place to the sums that are `valid`.  For sum i, `output(i)` is the output channel, and
// `residual_at(i)` and `at(i)` are its offsets in the residual and in the result.  They are called only if needed.  The
// loads of several sums are in flight at the same time.
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

// Apply the epilogue to one sum, in kernels whose threads finish single pixels.
template <class Y>
__device__ __forceinline__ Y finish(
    Accumulator<Y> sum, const Epilogue& epilogue, long long n, long long o, const Pixel& pixel, const Image& out) {
    Accumulator<Y> value[1] = {sum};
    finish_all<Y>(
        value, epilogue, activation_of<Y>(epilogue), [](int) { return true; }, [&](int) { return o; },
        [&](int) { return epilogue.residual.at(n, o, pixel); }, [&](int) { return out.at(n, o, pixel); });
    return narrow<Y>(value[0]);
}

// ---- the epilogue of a tile of sums, by a thread block --------------------------------------------------------------

// The offset of a pixel that does not exist.  Any offset can be added to it without overflow.
constexpr long long NOWHERE = -(1LL << 62);

// A tile of sums in shared memory.  Rows are output channels, from `o_first` on.  Columns are pixels at any positions:
// two tables hold their offsets, for output channel 0, in the result and in the residual.
template <class Y>
struct EpilogueTile {
    const Accumulator<Y>* sums;
    int row_pitch, column_pitch;  // elements between two rows, and between two columns
    long long o_first;
    const long long *out_at, *residual_at;  // by column; `out_at` is NOWHERE if the pixel does not exist
};

// The `count` sums that a thread finishes.  Sum i is at row(i) and column(i).
struct TileWalk {
    int first_row, first_column, row_step, column_step, count;
    __device__ __forceinline__ int row(int i) const { return first_row + i * row_step; }
    __device__ __forceinline__ int column(int i) const { return first_column + i * column_step; }
};

// A thread's walk over a tile of ROWS x COLUMNS sums, of which the first `rows` rows exist.  Adjacent threads finish
// elements that are adjacent in the result:
//
//     along pixels, a thread in one column         along output channels, a thread in one row
//
//         0 1 2 3                                      0 4 0 4
//         4 5 6 7                                      1 5 1 5
//         0 1 2 3                                      2 6 2 6
//         4 5 6 7                                      3 7 3 7
//
// Each member is selected separately: a branch between two walks needs more registers.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ TileWalk walk_along(bool outputs, int rows) {
    static_assert(THREADS % ROWS == 0 && THREADS % COLUMNS == 0, "threads share the tile evenly");
    constexpr int ROW_STEP = THREADS / COLUMNS, COLUMN_STEP = THREADS / ROWS;
    const int row = outputs ? threadIdx.x % ROWS : threadIdx.x / COLUMNS;
    const int column = outputs ? threadIdx.x / ROWS : threadIdx.x % COLUMNS;
    const int count = outputs ? (COLUMNS - 1 - column) / COLUMN_STEP + 1 : (rows - 1 - row) / ROW_STEP + 1;
    return {row, column, outputs ? 0 : ROW_STEP, outputs ? COLUMN_STEP : 0, row < rows ? count : 0};
}

// Apply the epilogue to a thread's part of a tile, COUNT sums at a time, and write the results.  If `kept_sums` is not
// null, the sums are written there unchanged instead, at the offsets of the result.
template <class Y, int COUNT>
__device__ __forceinline__ void finish_tile(
    const EpilogueTile<Y>& tile, const TileWalk& walk, const Image& out, const Epilogue& epilogue,
    Accumulator<Y>* kept_sums) {
    const auto activation = activation_of<Y>(epilogue);
    const int step = walk.row_step * tile.row_pitch + walk.column_step * tile.column_pitch;
    const Accumulator<Y>* sums = tile.sums + walk.first_row * tile.row_pitch + walk.first_column * tile.column_pitch;
    const long long at_step = walk.row_step * out.stride_c;
    long long row_at = (tile.o_first + walk.first_row) * out.stride_c;
#pragma unroll 1
    for (int first = 0; first < walk.count; first += COUNT, sums += COUNT * step) {
        Accumulator<Y> sum[COUNT] = {};
        long long column_at = NOWHERE, at[COUNT];
        bool valid[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i, row_at += at_step) {
            const bool exists = first + i < walk.count;
            if (exists) {
                sum[i] = sums[i * step];
                if (i == 0 || walk.column_step) column_at = tile.out_at[walk.column(first + i)];
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
        const auto output = [&](int i) { return tile.o_first + walk.row(first + i); };
        const auto residual_at = [&](int i) {
            return tile.residual_at[walk.column(first + i)] + output(i) * epilogue.residual.stride_c;
        };
        finish_all<Y>(
            sum, epilogue, activation, [&](int i) { return valid[i]; }, output, residual_at,
            [&](int i) { return at[i]; });
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (valid[i]) static_cast<Y*>(out.data)[at[i]] = narrow<Y>(sum[i]);
    }
}

}  // namespace cupyconv
