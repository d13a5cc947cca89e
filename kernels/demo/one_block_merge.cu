// The first version of the merge: one block for the whole problem.  Only the demo runs it.
//
//     y[n, o, p] = sum_s sum_c weight[o, s * C + c] * x[s, n, c, p]
//
// Five fields of 4 channels on 10^6 points, a batch of 4, merged to 4 channels, took 315.9 ms.  The code and every
// result are correct.  It is slow for five reasons:
//
//   one block             one of a hundred multiprocessors works, the others are idle
//   sums in y             each of the S * C products reads and writes y in global memory
//   weight from memory    each product loads its weight from memory again
//   one element per load    4 or 8 bytes, although a thread can load 16
//   inputs stacked        x is one array (S, N, C, P), so the fields are first copied together
//
// kernels/merge.cu computes the same sum without these five faults.
//
// -D: DTYPE (float or double)
extern "C" __global__ void one_block_merge(const DTYPE* x, const DTYPE* weight, DTYPE* y, int inputs, int batch,
                                           int in_channels, int out_channels, long long points) {
    for (int n = 0; n < batch; ++n)
        for (int o = 0; o < out_channels; ++o) {
            DTYPE* const y_no = y + ((long long)n * out_channels + o) * points;
            for (long long p = threadIdx.x; p < points; p += blockDim.x) y_no[p] = 0;
            for (int s = 0; s < inputs; ++s)
                for (int c = 0; c < in_channels; ++c) {
                    const DTYPE* const x_snc = x + (((long long)s * batch + n) * in_channels + c) * points;
                    for (long long p = threadIdx.x; p < points; p += blockDim.x)
                        y_no[p] += weight[(o * inputs + s) * in_channels + c] * x_snc[p];
                }
        }
}
