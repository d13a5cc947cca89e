// Right: result (16 x 16) = sum + A (16 x K) B (K x 16) by one warp, fragments drawn from shared memory in four ways.
//
// -D: TYPE float16, bfloat16 or tf32; A_LOAD and B_LOAD, how A and B become fragments:
//     SCALAR    element by element, k contiguous
//     ROWS      load_matrices, k contiguous
//     COLUMNS   load_matrices_transposed, m or n contiguous
#include "sample.cuh"

using namespace cupyconv;

enum Load { SCALAR, ROWS, COLUMNS };

template <class T> struct ElementOf { using type = bits16; };
template <> struct ElementOf<tf32> { using type = bits32; };
using Element = ElementOf<TYPE>::type;

constexpr int E = 16 / sizeof(Element);  // elements in 16 bytes
constexpr int K = 2 * E;

// The register that begins with the element at `from`.
__device__ unsigned register_at(const Element* from) { return word_of(from, 0); }

extern "C" __global__ void multiply(const SampleParams params) {
    SHARED_ARRAY(uint4, a_memory, 16 * K / E);
    SHARED_ARRAY(uint4, b_memory, 16 * K / E);
    copy_to_shared(a_memory, params.a);
    copy_to_shared(b_memory, params.b);
    __syncthreads();
    const Element* const a_shared = reinterpret_cast<const Element*>(a_memory);
    const Element* const b_shared = reinterpret_cast<const Element*>(b_memory);
    const int lane = threadIdx.x;

    unsigned a[4], b[4];
    if (A_LOAD == SCALAR)
        for (int i = 0; i < 4; ++i)
            a[i] = register_at(a_shared + (lane / 4 + 8 * (i % 2)) * K + i / 2 * E + lane % 4 * (E / 4));
    if (A_LOAD == ROWS) load_matrices(a, a_shared + lane % 16 * K + E * (lane / 16));
    if (A_LOAD == COLUMNS)
        load_matrices_transposed(a, a_shared + (lane % 8 + 8 * (lane / 16)) * 16 + 8 * (lane / 8 % 2));
    if (B_LOAD == SCALAR)
        for (int i = 0; i < 4; ++i)
            b[i] = register_at(b_shared + (lane / 4 + 8 * (i / 2)) * K + i % 2 * E + lane % 4 * (E / 4));
    if (B_LOAD == ROWS) load_matrices(b, b_shared + (lane % 8 + 8 * (lane / 16)) * K + E * (lane / 8 % 2));
    if (B_LOAD == COLUMNS) load_matrices_transposed(b, b_shared + lane % 16 * 16 + 8 * (lane / 16));

    for (int half = 0; half < 2; ++half) {  // of n
        const auto position = [=](int i) { return (lane / 4 + 8 * (i / 2)) * 16 + 8 * half + lane % 4 * 2 + i % 2; };
        float sum[4];
        for (int i = 0; i < 4; ++i) sum[i] = static_cast<const float*>(params.sum)[position(i)];
        multiply_add<TYPE>(sum, a, {b[2 * half], b[2 * half + 1]});
        for (int i = 0; i < 4; ++i) static_cast<float*>(params.result)[position(i)] = sum[i];
    }
}
