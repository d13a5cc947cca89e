// Asynchronous copies and tensor cores as ordinary C++.  These are the functions of kernels/tensor_core.cuh, which
// includes this file if CUPYCONV_HOST is defined, and which draws the fragments that are used here.
//
//     copies      are as late as possible: a copy is performed when its thread waits for it.  Until then its
//                 destination holds 0xff.  A copy that is never waited for is an error when its thread exits.
//     fragments   as in the PTX ISA.  Products are exact.  Products of one element are summed in double, added to the
//                 sum and rounded to float once (hardware does not define order and rounding).  Doubles: fma, k ascending.
//
// Code that sanitizers instrument reads and writes memory here, in the same thread as in CUDA.  The exchange between
// lanes happens in registers and is hidden from race detectors, as in cuda_on_host.h.
#pragma once

#include "fibres.h"
#include "half_on_host.h"

namespace cuda_on_host {

// As a default argument, this is the place of the call to the function that has it.  (A macro for the whole function,
// as for shuffles, could not be qualified by a namespace.)
constexpr Site caller(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// ---- asynchronous copies --------------------------------------------------------------------------------

// Fills 4-byte words, the unit of copies here.
inline void fill_words(void* to, int bytes, unsigned value) {
    for (int i = 0; i < bytes / 4; ++i) static_cast<unsigned*>(to)[i] = value;
}

inline void perform_copy(const PendingCopy& copy) {
    if (!copy.valid) return fill_words(copy.shared, copy.bytes, 0);
    for (int i = 0; i < copy.bytes / 4; ++i)
        static_cast<unsigned*>(copy.shared)[i] = static_cast<const unsigned*>(copy.global)[i];
}

// ---- data that lanes exchange ---------------------------------------------------------------------------

struct MatrixRows {
    const unsigned short* of_lane[lanes_per_warp];
};

__attribute__((no_sanitize("thread"))) inline void gather_rows(
    unsigned, const void* const* inputs, void* const* outputs) {
    MatrixRows rows;
    for (int lane = 0; lane < lanes_per_warp; ++lane)
        rows.of_lane[lane] = *static_cast<const unsigned short* const*>(inputs[lane]);
    for (int lane = 0; lane < lanes_per_warp; ++lane) *static_cast<MatrixRows*>(outputs[lane]) = rows;
}

inline MatrixRows exchange_rows(const void* row, Site site) {
    check_shared_access(row, 16, site);
    MatrixRows rows;
    meet_whole_warp(&row, &rows, gather_rows, site);
    return rows;
}

// The number of elements in a register of an operand, and their values.
template <class T>
struct Operand;

template <>
struct Operand<cupyconv::float16> {
    static constexpr int per_register = 2;
    static float value(unsigned bits, int i) { return half_value(uint16_t(bits >> 16 * i)); }
};

template <>
struct Operand<cupyconv::bfloat16> {
    static constexpr int per_register = 2;
    static float value(unsigned bits, int i) { return bfloat16_value(uint16_t(bits >> 16 * i)); }
};

template <>
struct Operand<cupyconv::tf32> {
    static constexpr int per_register = 1;
    static float value(unsigned bits, int) { return bit_cast<float>(bits & ~0x1fffu); }
};

struct Fragments {
    unsigned a[4], b[2];
    float sum[4];
};

template <class T>
__attribute__((no_sanitize("thread"))) void evaluate_multiply_add(
    unsigned, const void* const* inputs, void* const* outputs) {
    constexpr int tile_k = 4 * Operand<T>::per_register;
    float a_mk[16][2 * tile_k], b_nk[8][2 * tile_k];
    for (int lane = 0; lane < lanes_per_warp; ++lane) {
        const Fragments& own = *static_cast<const Fragments*>(inputs[lane]);
        for (int i = 0; i < Operand<T>::per_register; ++i) {
            const int row = lane / 4, column = lane % 4 * Operand<T>::per_register + i;
            for (int tile = 0; tile < 4; ++tile)
                a_mk[tile % 2 * 8 + row][tile / 2 * tile_k + column] = Operand<T>::value(own.a[tile], i);
            for (int tile = 0; tile < 2; ++tile) b_nk[row][tile * tile_k + column] = Operand<T>::value(own.b[tile], i);
        }
    }
    for (int lane = 0; lane < lanes_per_warp; ++lane)
        for (int i = 0; i < 4; ++i) {
            const float *a_k = a_mk[lane / 4 + 8 * (i / 2)], *b_k = b_nk[lane % 4 * 2 + i % 2];
            double products = 0;
            for (int k = 0; k < 2 * tile_k; ++k) products += double(a_k[k]) * b_k[k];
            const double sum = static_cast<const Fragments*>(inputs[lane])->sum[i];
            static_cast<float*>(outputs[lane])[i] = float(sum + products);
        }
}

struct DoubleFragments {
    double a, b, sum[2];
};

__attribute__((no_sanitize("thread"))) inline void evaluate_multiply_add_doubles(
    unsigned, const void* const* inputs, void* const* outputs) {
    const auto of_lane = [inputs](int lane) { return static_cast<const DoubleFragments*>(inputs[lane]); };
    for (int lane = 0; lane < lanes_per_warp; ++lane)
        for (int i = 0; i < 2; ++i) {
            const int m = lane / 4, n = lane % 4 * 2 + i;
            double sum = of_lane(lane)->sum[i];
            for (int k = 0; k < 4; ++k) sum = __builtin_fma(of_lane(4 * m + k)->a, of_lane(4 * n + k)->b, sum);
            static_cast<double*>(outputs[lane])[i] = sum;
        }
}

}  // namespace cuda_on_host

// ---- functions that kernels call ------------------------------------------------------------------------

namespace cupyconv {

template <int BYTES, bool THROUGH_L1 = BYTES < 16>
void copy_async(void* shared, const void* global, bool valid, cuda_on_host::Site site = cuda_on_host::caller()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    static_assert(THROUGH_L1 || BYTES == 16, "cp.async.cg copies 16 bytes");
    cuda_on_host::issue_copy({shared, global, BYTES, valid, site});
    // The source is already read here, and the values discarded, so that a sanitizer reports this place, not the wait.
    for (int i = 0; valid && i < BYTES / 4; ++i) static_cast<void>(static_cast<const volatile unsigned*>(global)[i]);
    cuda_on_host::fill_words(shared, BYTES, 0xffffffffu);
}

inline void commit_copies() { cuda_on_host::commit_copies(); }

template <int PENDING>
void wait_for_copies() {
    static_assert(PENDING >= 0, "a number of groups");
    cuda_on_host::PendingCopy copy;
    while (cuda_on_host::take_arrived_copy(PENDING, copy)) cuda_on_host::perform_copy(copy);
}

inline void load_matrices(
    unsigned (&fragment)[4], const void* row, cuda_on_host::Site site = cuda_on_host::caller()) {
    const cuda_on_host::MatrixRows rows = cuda_on_host::exchange_rows(row, site);
    const int lane = cuda_on_host::lane();
    for (int tile = 0; tile < 4; ++tile) {
        const unsigned short* elements = rows.of_lane[8 * tile + lane / 4] + lane % 4 * 2;
        fragment[tile] = elements[0] | unsigned(elements[1]) << 16;
    }
}

inline void load_matrices_transposed(
    unsigned (&fragment)[4], const void* row, cuda_on_host::Site site = cuda_on_host::caller()) {
    const cuda_on_host::MatrixRows rows = cuda_on_host::exchange_rows(row, site);
    const int lane = cuda_on_host::lane();
    for (int tile = 0; tile < 4; ++tile) {
        const unsigned short* const* row_pair = &rows.of_lane[8 * tile + lane % 4 * 2];
        fragment[tile] = row_pair[0][lane / 4] | unsigned(row_pair[1][lane / 4]) << 16;
    }
}

inline unsigned round_to_tf32(unsigned bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
    return (bits + 0x1000u) & ~0x1fffu;  // also for infinity: the added bit is cut off again
}

template <class T>
void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                  cuda_on_host::Site site = cuda_on_host::caller()) {
    const cuda_on_host::Fragments own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {sum[0], sum[1], sum[2], sum[3]}};
    cuda_on_host::meet_whole_warp(&own, sum, cuda_on_host::evaluate_multiply_add<T>, site);
}

inline void multiply_add(double (&sum)[4], const double (&a)[2], double b,
                         cuda_on_host::Site site = cuda_on_host::caller()) {
    for (int half = 0; half < 2; ++half) {  // of m
        double* const sums = sum + 2 * half;
        const cuda_on_host::DoubleFragments own{a[half], b, {sums[0], sums[1]}};
        cuda_on_host::meet_whole_warp(&own, sums, cuda_on_host::evaluate_multiply_add_doubles, site);
    }
}

}  // namespace cupyconv
