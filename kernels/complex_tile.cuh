// A warp's part of a product of complex matrices on tensor cores, with three real products per complex one (Gauss).
//
//     sum[m, j] += sum_k  weight[m, k] * x[k, j]        ROWS x COLUMNS sums per warp, one K-slab per call
//
//     (a + bi) (c + di):    p = a (c + d)      q = (b - a) c      r = -(a + b) d
//                           real part p + r    imaginary part p + q
//
//          weight, x: numbers                   operands                     products          sums
//          +------+------+          +-----+-----+-------+
//          | a  b | a  b |   --->   |  a  | b-a | -a-b  |   a lane's        p   q   r    ->   p + r
//          +------+------+          +-----+-----+-------+   own, in                           p + q
//          | c  d | c  d |   --->   | c+d |  c  |   d   |   registers
//          +------+------+          +-----+-----+-------+
//
// Each real product is three of TF32 (tf32_split.cuh): 9 instructions, where four real products need 12.  A slab is one
// step of K, so that CUDA cores, which round, add the parts of 16 rows to the sums as soon as they are computed.
//
// The cost is accuracy, if parts cancel.  |p| + |r| and |p| + |q| are at most (1 + sqrt 2) |a + bi| |c + di|.  With
// four products, |a c| + |b d| and |a d| + |b c| are at most |a + bi| |c + di|.  So the error bound is 2.42 times that
// of four products.  It is relative to the absolute values of the factors: an imaginary part near 0 has an error of the
// size of the real part's (N. Higham, "Stability of a method for multiplying complex matrices with three real matrix
// multiplications", SIAM J. Matrix Anal. Appl. 13, 1992).
//
// If an element is infinite or NaN, or if a sum of parts overflows, the products are computed again as four checked
// products.  Their parts are infinite or NaN where the definition says so.
#pragma once
#include "numeric.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

namespace cupyconv {

template <int M, int J>  // M x J is the block's tile
struct ComplexTensorCores {
    static constexpr bool PREFERS_CHUNKS = true;
    static constexpr int K = 8;  // K of one instruction
    using Sum = complex64;
    using WeightTile = SharedTile<complex64, M, K, 2>;
    template <bool CHUNKED>
    using ImageTile = SharedTile<complex64, CHUNKED ? J : K, CHUNKED ? K : J, 2>;

    template <int ROWS, int COLUMNS, bool CHUNKED>
    struct WarpTile {
        using Tile = ImageTile<CHUNKED>;
        static constexpr int ACROSS = COLUMNS / 8;
        int weight_, image_;  // tile indices of the lane's elements of row m and column j at k = 0
        complex64 sum[ROWS / 16][ACROSS][4] = {};

        __device__ __forceinline__ WarpTile(int m, int j) {
            const int across = lane_index() / 4, along = lane_index() % 4;
            weight_ = opaque(WeightTile::index(m + across, along));
            image_ = opaque(CHUNKED ? Tile::index(j + across, along) : Tile::index(along, j + across));
        }

        __device__ __forceinline__ void multiply(const complex64* weight, const complex64* x) {
            SplitFragment<false, 2> both[ACROSS], re[ACROSS], im[ACROSS];
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) {
                complex64 b[2];
                load_image(b, x, c);
                both[c].take({bits(b[0].re + b[0].im), bits(b[1].re + b[1].im)});
                re[c].take({bits(b[0].re), bits(b[1].re)});
                im[c].take({bits(b[0].im), bits(b[1].im)});
            }
            float all = 0;  // infinite or NaN once a row or a column is
#pragma unroll
            for (int r = 0; r < ROWS / 16; ++r) {
                complex64 a[4];
                load_weight(a, weight, r);
                unsigned real[4], difference[4], opposite[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    real[i] = bits(a[i].re);
                    difference[i] = bits(a[i].im - a[i].re);
                    opposite[i] = bits(-a[i].re - a[i].im);
                }
                SplitFragment<false, 4> for_p, for_q, for_r;
                for_p.take(real);
                for_q.take(difference);
                for_r.take(opposite);
                complex64 part[ACROSS][4];
#pragma unroll
                for (int c = 0; c < ACROSS; ++c) {
                    float real[4] = {}, imaginary[4];
#pragma unroll
                    for (int i = 0; i < for_p.PRODUCTS; ++i) multiply_add<tf32>(real, for_p.part(i), both[c].part(i));
#pragma unroll
                    for (int e = 0; e < 4; ++e) imaginary[e] = real[e];  // both parts contain p
#pragma unroll
                    for (int i = 0; i < for_p.PRODUCTS; ++i) {
                        multiply_add<tf32>(imaginary, for_q.part(i), re[c].part(i));
                        multiply_add<tf32>(real, for_r.part(i), im[c].part(i));
                    }
#pragma unroll
                    for (int e = 0; e < 4; ++e) part[c][e] = complex64(real[e], imaginary[e]);
                }
                add(all, part[0][0]);
                add(all, part[0][2]);
#pragma unroll
                for (int c = 0; r == 0 && c < ACROSS; ++c)
#pragma unroll
                    for (int e = 0; e < 2; ++e) add(all, part[c][e]);
                if (__any_sync(0xffffffffu, !(fabsf(all) < __uint_as_float(0x7f800000u)))) by_four(part, weight, x, r);
#pragma unroll
                for (int c = 0; c < ACROSS; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[r][c][e] += part[c][e];
            }
        }

        // Calls f(m, j, sum), see for_each_sum of warp_tile.cuh.
        template <class F> __device__ __forceinline__ void for_each(F f) const { for_each_sum(sum, f); }

    private:
        static __device__ __forceinline__ unsigned bits(float value) { return __float_as_uint(value); }
        static __device__ __forceinline__ void add(float& all, const complex64& value) { all += value.re + value.im; }

        // Load the lane's elements of 16 rows, and of 8 columns, in the order of a fragment.
        __device__ __forceinline__ void load_weight(complex64 (&a)[4], const complex64* weight, int r) const {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = weight[(weight_ ^ i / 2 * 4) + (r * 16 + i % 2 * 8) * WeightTile::COLUMNS];
        }
        __device__ __forceinline__ void load_image(complex64 (&b)[2], const complex64* x, int c) const {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                b[i] = x[CHUNKED ? (image_ ^ i * 4) + c * 8 * Tile::COLUMNS : (image_ ^ c * 8) + i * 4 * Tile::COLUMNS];
        }

        // Compute 16 rows again, by four products.
        __device__ __forceinline__ void by_four(
            complex64 (&part)[ACROSS][4], const complex64* weight, const complex64* x, int r) const {
            complex64 a[4];
            load_weight(a, weight, r);
            SplitFragment<true, 4> re, im, opposite;
            re.take({bits(a[0].re), bits(a[1].re), bits(a[2].re), bits(a[3].re)});
            im.take({bits(a[0].im), bits(a[1].im), bits(a[2].im), bits(a[3].im)});
            opposite.take({bits(-a[0].im), bits(-a[1].im), bits(-a[2].im), bits(-a[3].im)});
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) {
                complex64 b[2];
                load_image(b, x, c);
                SplitFragment<true, 2> b_re, b_im;
                b_re.take({bits(b[0].re), bits(b[1].re)});
                b_im.take({bits(b[0].im), bits(b[1].im)});
                float real[4] = {}, imaginary[4] = {};
#pragma unroll
                for (int i = 0; i < re.PRODUCTS; ++i) {
                    multiply_add<tf32>(real, re.part(i), b_re.part(i));
                    multiply_add<tf32>(imaginary, re.part(i), b_im.part(i));
                    multiply_add<tf32>(real, opposite.part(i), b_im.part(i));
                    multiply_add<tf32>(imaginary, im.part(i), b_re.part(i));
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) part[c][e] = complex64(real[e], imaginary[e]);
            }
        }
    };
};

}  // namespace cupyconv
