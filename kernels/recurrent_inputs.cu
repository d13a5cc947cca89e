// Copies the inputs of a run of steps to one matrix, with zeros past the length of each sample.
//
//     inputs[(t, n), i] = t < length[n] ? x[t, n, i] : 0
//
//     no M, no K: elementwise.     N = ((t, n), i): adjacent threads process adjacent i
//
//          i ->
//     t,n  [ # # # # ]        a sample whose length is 1 ends here
//     t,n  [ 0 0 0 0 ]        x may be anything here, even NaN: it is part of no gradient
//
// The gradient of the input weight, a product over steps and samples, reads this matrix: a zero gradient times a NaN
// would be NaN.  The kernel is also used if cuBLAS cannot read x in place, or if the product is of wider numbers.
//
// Bound by memory.  Floor: x and the inputs once over the bandwidth.
//
// -D: DTYPE (type of x; the inputs have its accumulator type)
#include "image.cuh"

namespace cupyconv {

struct RecurrentInputsParams {
    const void* x;
    long long stride_t, stride_n, stride_i;
    const void* lengths;  // int32 or int64; null if all reach as far as x
    long long lengths_stride;
    void* inputs;
    long long first, steps, batch, columns;  // of the run; `first` is its earliest time
    int wide_lengths;
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using A = Accumulator<T>;

extern "C" __global__ void __launch_bounds__(256)
    recurrent_inputs(const __grid_constant__ RecurrentInputsParams params) {
    const long long elements = params.steps * params.batch * params.columns;
    for (long long q = first_share(); q < elements; q += share_step()) {
        const long long row = q / params.columns, i = q % params.columns;
        const long long t = params.first + row / params.batch, n = row % params.batch;
        bool reached = true;
        if (params.lengths) {
            const long long at = n * params.lengths_stride;
            reached = t < (params.wide_lengths ? static_cast<const long long*>(params.lengths)[at]
                                               : static_cast<const int*>(params.lengths)[at]);
        }
        const long long from = t * params.stride_t + n * params.stride_n + i * params.stride_i;
        static_cast<A*>(params.inputs)[q] = reached ? widen(static_cast<const T*>(params.x)[from]) : A(0);
    }
}
