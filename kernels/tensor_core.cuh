// Asynchronous copies and tensor cores: one function per PTX instruction, and which elements each lane holds.
//
//     copy_async<16>(stage + i, x + j, inside);    global to shared memory, past the registers (cp.async)
//     commit_copies();                             the copies issued since the last commit become a group
//     wait_for_copies<1>();                        all but the newest group have arrived: those of this thread,
//     __syncthreads();                             and after the barrier those of the whole block
//     load_matrices(a, row);                       shared memory to fragments (ldmatrix)
//     round_to_tf32(bits);                         a float32 as an operand, if truncation is not accurate enough
//     multiply_add<float16>(sum, a, {b[0], b[1]}); sum += a b (mma.sync); also <bfloat16>, <tf32>, and doubles
//
// A whole warp executes load_matrices and multiply_add together: no lane may be missing.
//
// All fragments consist of the same tiles.  A tile is 8 rows of 16 bytes; its 32 words are one register of the 32
// lanes.  A word holds one 32-bit element or two 16-bit elements, the first in the lower half.
//
//              16-bit:   0  1   2  3   4  5   6  7        row  = lane / 4
//              32-bit:    0      1      2      3          word = lane % 4
//             row 0   [lane 0|lane 1|lane 2|lane 3]
//             row 1   [lane 4|lane 5|lane 6|lane 7]
//              ...
//             row 7   [ l 28 | l 29 | l 30 | l 31 ]
//
// multiply_add computes sum (16 x 8) += a (16 x K) b (K x 8) from such tiles.  A row of A is an m and a row of B is an
// n; both run along k.  E = 8 elements of 16 bits, or 4 of 32 bits, fill a row, and K = 2 E.
//
//     A      k < E   k >= E        B      k < E   k >= E        sum       n = 2 word  and 2 word + 1
//     m < 8  [ a0  |  a2 ]         n      [ b0  |  b1 ]         m = row      [ sum[0]  sum[1] ]
//     m >= 8 [ a1  |  a3 ]                                      m = row + 8  [ sum[2]  sum[3] ]
//
//     sum[i] is the element m = lane / 4 + 8 (i / 2),  n = 2 (lane % 4) + i % 2.
//
// load_matrices fills four registers with four tiles: lane l passes the address of row l % 8 of tile l / 8.
// load_matrices_transposed (16-bit elements only) reads tiles whose rows run along m or n, and exchanges rows and
// columns.  One call loads all of A, or B for two neighbouring sums (n < 8: b0 and b1 are registers 0 and 1; n >= 8: 2
// and 3):
//
//     stored              load with                 the row of lane l begins at
//     A, k contiguous     load_matrices             m = l % 16,              k = E (l / 16)
//     A, m contiguous     load_matrices_transposed  k = l % 8 + 8 (l / 16),  m = 8 (l / 8 % 2)
//     B, k contiguous     load_matrices             n = l % 8 + 8 (l / 16),  k = E (l / 8 % 2)
//     B, n contiguous     load_matrices_transposed  k = l % 16,              n = 8 (l / 16)
//
// Rows are 16-byte aligned, anywhere in shared memory.  The 8 rows of a tile are read without bank conflicts if their
// addresses differ modulo 128.  (An array of a 16-bit type is aligned to 2 bytes only: declare vectors.)
//
// Doubles: sum (8 x 8) += a (8 x 4) b (4 x 8), a: m = lane / 4, k = lane % 4; b: n = lane / 4, k = lane % 4;
// sum[i]: m = lane / 4, n = 2 (lane % 4) + i.
//
// The functions need sm_80.  sm_75 has float16 and load_matrices, and its copies are plain ones that complete at once.
// The rest traps on sm_75, where planning never chooses it.
#pragma once
#include "numeric.cuh"

namespace cupyconv {

// Operand type: the bits of a float32, of which the instruction ignores the lowest 13.
struct tf32 {};

// The operand type of the instruction for a type in memory.
template <class T> struct OperandTagOf { using type = T; };
template <> struct OperandTagOf<float32> { using type = tf32; };
template <class T> using OperandTag = typename OperandTagOf<T>::type;

// The arithmetic of a kernel's products: CUDA cores; tensor cores, in the type in memory; float32 as one product of
// TF32, or as three (tf32_split.cuh).
enum ArithmeticKind { FMA, MMA, TF32, TF32X3 };

}  // namespace cupyconv

#ifdef CUPYCONV_HOST
#include "tensor_core_on_host.h"  // the same functions as ordinary C++
#else

namespace cupyconv {

// How the asm statements are declared.  volatile: the compiler neither drops an instruction nor moves it past another
// volatile one, which keeps copies, commits and waits in order.  "memory": the instruction accesses memory that is not
// among its operands, so no access in the source is moved past it.  multiply_add touches registers only.  It is
// volatile because the whole warp has to execute it: it must not follow its sum into a branch that alone uses the sum.

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies BYTES bytes; both addresses are multiples of BYTES.  If not `valid`, it writes zeros and reads nothing.
// THROUGH_L1 leaves the bytes in the L1 cache for later reads.  Only copies of 16 bytes can bypass it.
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

// Returns when all groups but the PENDING newest have arrived.  Uncommitted copies may still be in flight.
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

// The nearest TF32 number to a float32, ties away from zero.  Any NaN becomes one that multiply_add treats as NaN.
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

// sum += a b.  T is the type of the elements in the operands' registers.
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
    for (int half = 0; half < 2; ++half)  // halves of k
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

// Doubles: sum (16 x 8) += a (16 x 4) b (4 x 8).  A lane has one element of each tile, as described above.
__device__ __forceinline__ void multiply_add(double (&sum)[4], const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3]) : "d"(a[0]), "d"(a[1]), "d"(b));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
    for (int half = 0; half < 2; ++half)  // halves of m
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(sum[2 * half]), "+d"(sum[2 * half + 1]) : "d"(a[half]), "d"(b));
#else
    __trap();
#endif
}

}  // namespace cupyconv

#endif
