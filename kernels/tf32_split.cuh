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

}  // namespace cupyconv
