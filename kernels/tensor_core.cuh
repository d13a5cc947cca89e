// Asynchronous copies and tensor cores: one PTX instruction a function, and which lane holds what.
//
//     copy_async<16>(stage + i, x + j, inside);    global to shared memory, past the registers (cp.async)
//     commit_copies();                             what was issued since the last commit is a group
//     wait_for_copies<1>();                        all but the newest group have arrived: this thread's own ones,
//     __syncthreads();                             and with the barrier those of the whole block
//     load_matrices(a, row);                       shared memory to fragments (ldmatrix)
//     round_to_tf32(bits);                         a float32 as an operand, where truncating it is not good enough
//     multiply_add<float16>(sum, a, {b[0], b[1]}); sum += a b (mma.sync); also <bfloat16>, <tf32>, and doubles
//
// load_matrices and multiply_add are done by a whole warp together: no lane may be missing.
//
// One drawing is behind every fragment.  A tile is 8 rows of 16 bytes; its 32 words are one register of the 32 lanes.
// A word holds one 32-bit element or two 16-bit ones, the first in the lower half.
//
//              16-bit:   0  1   2  3   4  5   6  7        row  = lane / 4
//              32-bit:    0      1      2      3          word = lane % 4
//             row 0   [lane 0|lane 1|lane 2|lane 3]
//             row 1   [lane 4|lane 5|lane 6|lane 7]
//              ...
//             row 7   [ l 28 | l 29 | l 30 | l 31 ]
//
// multiply_add puts together sum (16 x 8) += a (16 x K) b (K x 8) of such tiles, where a row of A is an m and a row
// of B is an n: both run along k.  E = 8 elements of 16 bits or 4 of 32 fill a row, and K = 2 E.
//
//     A      k < E   k >= E        B      k < E   k >= E        sum       n = 2 word  and 2 word + 1
//     m < 8  [ a0  |  a2 ]         n      [ b0  |  b1 ]         m = row      [ sum[0]  sum[1] ]
//     m >= 8 [ a1  |  a3 ]                                      m = row + 8  [ sum[2]  sum[3] ]
//
//     sum[i] is the element m = lane / 4 + 8 (i / 2),  n = 2 (lane % 4) + i % 2.
//
// load_matrices fills four registers with four tiles: lane l says where row l % 8 of tile l / 8 begins.
// load_matrices_transposed (16-bit elements only) reads tiles whose rows run along m or n, and exchanges rows and
// columns.  All of A, or B for two neighbouring sums (n < 8: b0 and b1 are registers 0 and 1; n >= 8: 2 and 3):
//
//     stored              load with                 the row of lane l begins at
//     A, k contiguous     load_matrices             m = l % 16,              k = E (l / 16)
//     A, m contiguous     load_matrices_transposed  k = l % 8 + 8 (l / 16),  m = 8 (l / 8 % 2)
//     B, k contiguous     load_matrices             n = l % 8 + 8 (l / 16),  k = E (l / 8 % 2)
//     B, n contiguous     load_matrices_transposed  k = l % 16,              n = 8 (l / 16)
//
// Rows are 16-byte aligned, anywhere in shared memory; the 8 rows of a tile are read without bank conflicts where
// their addresses differ modulo 128.  (An array of a 16-bit type is aligned to 2 bytes only: declare vectors.)
//
// Doubles: sum (8 x 8) += a (8 x 4) b (4 x 8), a: m = lane / 4, k = lane % 4; b: n = lane / 4, k = lane % 4;
// sum[i]: m = lane / 4, n = 2 (lane % 4) + i.
//
// Needed: sm_80; sm_75 has float16 and load_matrices, and copies there are plain ones that are done at once.
// The rest traps on sm_75, where planning never asks for it.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

// As an operand: the bits of a float32, of which the lowest 13 are ignored.
struct tf32 {};

// What the instruction is told its operands are, by their type in memory.
template <class T> struct OperandTagOf { using type = T; };
template <> struct OperandTagOf<float32> { using type = tf32; };
template <class T> using OperandTag = typename OperandTagOf<T>::type;

// What a kernel may compute products with: CUDA cores; tensor cores, by the type in memory; float32 as one product of TF32,
// or as three (tf32_split.cuh).
enum ArithmeticKind { FMA, MMA, TF32, TF32X3 };

}  // namespace cupyconv

#ifdef CUPYCONV_HOST
#include "tensor_core_on_host.h"  // the same functions as ordinary C++
#else

namespace cupyconv {

// What the compiler is told of each instruction.  volatile: it is neither dropped nor moved past another volatile
// one, which keeps copies, commits and waits in order.  "memory": it reads or writes memory that is not among its
// operands, so no access in the source is moved past it.  multiply_add touches registers only; it is volatile since
// the whole warp has to execute it, so that it must not follow its sum into the branch that alone may use it.

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies BYTES bytes, of which both addresses are multiples; where not `valid` it writes zeros and reads nothing.
// THROUGH_L1 leaves them in the L1 cache for whoever reads them again; to leave it to others there are 16 bytes alone.
template <int BYTES, bool THROUGH_L1 = BYTES < 16>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    static_assert(THROUGH_L1 || BYTES == 16, "cp.async.cg copies 16 bytes");
#if __CUDA_ARCH__ >= 800
    const int bytes_read = valid ? BYTES : 0;
    if constexpr (THROUGH_L1)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                     "l"(__cvta_generic_to_global(global)), "n"(BYTES), "r"(bytes_read) : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                     "l"(__cvta_generic_to_global(global)), "n"(BYTES), "r"(bytes_read) : "memory");
#else
    using Words = Vector<unsigned, BYTES / 4>;
    Words words = {};
    if (valid) words = *static_cast<const Words*>(global);
    *static_cast<Words*>(shared) = words;
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}

// Returns when all groups but the PENDING newest have arrived; copies that were not committed may still be under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

__device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&fragment)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared_address(row)) : "memory");
}

// The nearest tf32 of a float32, ties away from zero; any NaN becomes one that multiply_add knows for a NaN.
__device__ __forceinline__ unsigned round_to_tf32(unsigned bits) {
#if __CUDA_ARCH__ >= 800
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
#else
    __trap();
    return bits;
#endif
}

// sum += a b, where T says what the operands' registers hold.
template <class T>
__device__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) = delete;

#define MULTIPLY_ADD_FRAGMENTS(instruction)                                                                   \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

template <>
__device__ __forceinline__ void multiply_add<float16>(
    float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    MULTIPLY_ADD_FRAGMENTS("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32");
#else
#pragma unroll
    for (int half = 0; half < 2; ++half)  // of k
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
                     " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

template <>
__device__ __forceinline__ void multiply_add<bfloat16>(
    float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    MULTIPLY_ADD_FRAGMENTS("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32");
#else
    __trap();
#endif
}

template <>
__device__ __forceinline__ void multiply_add<tf32>(
    float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    MULTIPLY_ADD_FRAGMENTS("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32");
#else
    __trap();
#endif
}

#undef MULTIPLY_ADD_FRAGMENTS

// Doubles: sum (16 x 8) += a (16 x 4) b (4 x 8), an element of each tile a lane, drawn as above.
__device__ __forceinline__ void multiply_add(double (&sum)[4], const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3]) : "d"(a[0]), "d"(a[1]), "d"(b));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
    for (int half = 0; half < 2; ++half)  // of m
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(sum[2 * half]), "+d"(sum[2 * half + 1]) : "d"(a[half]), "d"(b));
#else
    __trap();
#endif
}

}  // namespace cupyconv

#endif
