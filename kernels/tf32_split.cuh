// float32 to nearly its own accuracy on tensor cores, whose operands have 11 significant bits.
//
//     x = high + low,   high: x rounded to 11 bits            low: the rest, 12 bits, the last of them truncated
//     a * b ~ high_a * low_b + low_a * high_b + high_a * high_b         low_a * low_b <= 2^-22 a b is left out
//
// The instruction truncates by itself, so half a unit of the 11th bit is all that rounding has to add.  Without it
// `low` would be twice as large, the part left out four times, and all of one sign.  Few products are
// summed by the tensor cores, whose additions truncate, before CUDA cores, which round, add them to the others.
//
// CHECKED is for operands that are infinite or would be if rounded.  Where x is infinite the two small products must
// not see it: inf * 0 would be NaN where inf * 1 is meant.  A NaN reaches them by `low`, also one whose payload
// truncation takes for infinity.  Unchecked, `low` of such an operand is infinite or NaN, and so is every sum of its
// row or column, whatever the other factors are.  A weight that was packed in its parts was split CHECKED: there an infinite
// one's high part does the same, which times 0 is NaN and times all else infinite.
#pragma once
#include "numeric.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

// The high part, but 0 for an infinite one.
__device__ __forceinline__ unsigned finite_part(unsigned high) {
    return (high & 0x7fffffffu) == 0x7f800000u ? 0u : high;
}

template <bool CHECKED>
struct Split {
    unsigned high, low, finite_high;

    __device__ __forceinline__ explicit Split(unsigned bits) : high(bits + 0x1000u) {
        const float x = __uint_as_float(bits);
        if (CHECKED && !(fabsf(x) < __uint_as_float(0x7f7ff000u))) high = bits;  // what is larger would become infinite
        low = __float_as_uint(x - __uint_as_float(high & 0xffffe000u));
        finite_high = high;
        if (CHECKED && fabsf(x) == __uint_as_float(0x7f800000u)) low = finite_high = 0u;
    }
};

// A fragment (tensor_core.cuh) in its parts: of A, with 4 registers, or of B, with 2.
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

    // What takes part in each of the products, the small ones first.
    __device__ __forceinline__ const unsigned (&part(int product) const)[COUNT] {
        return product == 2 ? high : (product == 0) == (COUNT == 4) ? low : finite_high;
    }
};

// Whether operands are CHECKED, as an argument.
template <bool CHECKED> struct Checked {
    static constexpr bool value = CHECKED;
};

// sum += a few products, which add(Checked<false>, partial) adds to zeros on tensor cores.  Of the 16 x 8 sums of a fragment
// one of each row and each column tells whether an operand has to be checked, for which all is done again; finite sums
// that add up to an infinite one do no harm.

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
