// float32 on tensor cores to nearly its own accuracy, although their operands have 11 significant bits.
//
//     x = high + low,   high: x rounded to 11 bits            low: the rest, 12 bits, the last of them truncated
//     a * b ~ high_a * low_b + low_a * high_b + high_a * high_b         low_a * low_b <= 2^-22 a b is left out
//
// The instruction itself truncates, so rounding just adds half a unit of the 11th bit.  Without it `low` would be twice
// as large, and the part left out would be four times as large and always of one sign.  Tensor cores, whose additions
// truncate, sum only a few products.  CUDA cores, which round, add these to the other sums.
//
// CHECKED is for operands that are infinite or become infinite when rounded.  If x is infinite, the two small products
// must not see it: inf * 0 would be NaN where inf * 1 is meant.  A NaN reaches them through `low`, even if truncation
// turns its payload into infinity.  Unchecked, `low` of such an operand is infinite or NaN, and so is every sum of its
// row or column, whatever the other factors are.  A weight that is packed in parts was split CHECKED.  There the high
// part of an infinite element has the same effect: times 0 it is NaN, times anything else infinite.
#pragma once
#include "numeric.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// The high part, or 0 if that is infinite.
__device__ __forceinline__ unsigned finite_part(unsigned high) {
    return (high & 0x7fffffffu) == 0x7f800000u ? 0u : high;
}

template <bool CHECKED>
struct Split {
    unsigned high, low, finite_high;

    __device__ __forceinline__ explicit Split(unsigned bits) : high(bits + 0x1000u) {
        const float x = __uint_as_float(bits);
        if (CHECKED && !(fabsf(x) < __uint_as_float(0x7f7ff000u))) high = bits;  // a larger x would become infinite
        low = __float_as_uint(x - __uint_as_float(high & 0xffffe000u));
        finite_high = high;
        if (CHECKED && fabsf(x) == __uint_as_float(0x7f800000u)) low = finite_high = 0u;
    }
};

// The parts of a fragment (tensor_core.cuh): of A, with 4 registers, or of B, with 2.
template <bool CHECKED, int COUNT>
struct SplitFragment {
    static constexpr int PRODUCTS = 3;
    unsigned high[COUNT], low[COUNT], finite_high[COUNT];

    __device__ __forceinline__ void take(const unsigned (&bits)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Split<CHECKED> split(bits[i]);
            high[i] = split.high, low[i] = split.low, finite_high[i] = split.finite_high;
        }
    }

    // The operand of each of the three products.  The small products come first.
    __device__ __forceinline__ const unsigned (&part(int product) const)[COUNT] {
        return product == 2 ? high : (product == 0) == (COUNT == 4) ? low : finite_high;
    }
};

// CHECKED as an argument of a function.
template <bool CHECKED> struct Checked {
    static constexpr bool value = CHECKED;
};

// sum += a few products, which add(Checked<false>, partial) adds to zeros on tensor cores.  One sum per row and per
// column of a 16 x 8 fragment tells whether an operand has to be checked.  If so, all products are computed again.
// Finite sums that add up to infinity do no harm.

template <int ROWS, int COLUMNS, class Add>
__device__ __forceinline__ void add_apart(float (*sum)[COLUMNS][4], Add add) {
    float partial[ROWS][COLUMNS][4] = {};
    add(Checked<false>(), partial);
    float all = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) all += partial[r][0][0] + partial[r][0][2];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) all += partial[0][c][0] + partial[0][c][1];
    if (__any_sync(0xffffffffu, !(fabsf(all) < __uint_as_float(0x7f800000u)))) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) partial[r][c][e] = 0;
        add(Checked<true>(), partial);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[r][c][e] += partial[r][c][e];
}

}  // namespace cupyconv
