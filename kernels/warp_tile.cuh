// A warp's part of a matrix product, with the sums in registers.  There is one class per arithmetic.
//
//     sum[m, j] += sum_k  weight[m, k] * x[k, j]        ROWS x COLUMNS sums per warp, one K-slab per call
//
//            j ->                          both tiles are in shared memory:
//        m  +-------------+                weight   [k][m]  for CUDA cores, which read along m
//        ↓  |    lane's   |                         [m][k]  for tensor cores, which read along k; WEIGHT_ALONG_M: [k][m]
//           |   ##  ##    |                x        [k][j]  or, chunked, [j][k]
//           |   ##  ##    |
//           +-------------+
//
// `for_each` calls f(m, j, sum) for each of the lane's sums.
#pragma once
#include "complex_tile.cuh"
#include "numeric.cuh"
#include "shared_tile.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

namespace cupyconv {

// Bytes of a K-slab in one row of either matrix: four 16-byte chunks.
constexpr int SLAB_BYTES = 64;

// Calls f(m, j, sum) for each of the lane's sums in fragments of 16 x 8 (tensor_core.cuh).
template <class S, int R, int C, class F>
__device__ __forceinline__ void for_each_sum(const S (&sum)[R][C][4], F f) {
    const int row = lane_index() / 4, column = lane_index() % 4 * 2;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) f(r * 16 + row + e / 2 * 8, c * 8 + column + e % 2, sum[r][c][e]);
}

// ---- CUDA cores: an outer product of registers per step of K ----------------------------------------------------

template <class T, int M, int J>  // M x J is the block's tile
struct CudaCores {
    static constexpr bool PREFERS_CHUNKS = false;
    static constexpr int K = SLAB_BYTES / sizeof(T);
    using Sum = T;
    using WeightTile = SharedTile<T, K, M, 0>;
    template <bool CHUNKED> using ImageTile = SharedTile<T, K, J, 0>;

    template <int ROWS, int COLUMNS, bool CHUNKED>
    struct WarpTile {
        // The lanes are 8 x 4 or 4 x 8.  Each reads its rows and columns in vectors of 16 bytes.
        static constexpr int HIGH = ROWS / 8, WIDE = 32 / HIGH, VECTOR = 16 / sizeof(T);
        static constexpr int ITS_ROWS = ROWS / HIGH, ITS_COLUMNS = COLUMNS / WIDE;
        const int m_, j_;
        T sum[ITS_ROWS][ITS_COLUMNS] = {};

        __device__ __forceinline__ WarpTile(int m, int j) : m_(m + row(0)), j_(j + column(0)) {}

        static __device__ __forceinline__ int row(int i) {
            return (i / VECTOR * HIGH + lane_index() / WIDE) * VECTOR + i % VECTOR;
        }
        static __device__ __forceinline__ int column(int j) {
            return (j / VECTOR * WIDE + lane_index() % WIDE) * VECTOR + j % VECTOR;
        }

        __device__ __forceinline__ void multiply(const T* weight, const T* x) {
#pragma unroll
            for (int k = 0; k < K; ++k) {
                T a[ITS_ROWS], b[ITS_COLUMNS];
                load<ITS_ROWS>(a, weight + k * M + m_, HIGH);
                load<ITS_COLUMNS>(b, x + k * J + j_, WIDE);
#pragma unroll
                for (int r = 0; r < ITS_ROWS; ++r)
#pragma unroll
                    for (int c = 0; c < ITS_COLUMNS; ++c) add_product(sum[r][c], a[r], b[c]);
            }
        }

        template <int COUNT>
        static __device__ __forceinline__ void load(T (&values)[COUNT], const T* from, int lanes) {
#pragma unroll
            for (int i = 0; i < COUNT; i += VECTOR) {
                const Vector<T, VECTOR> vector = load_vector<VECTOR>(from + i * lanes);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) values[i + e] = vector.lane[e];
            }
        }

        template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
            for (int i = 0; i < ITS_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < ITS_COLUMNS; ++j) f(row(i), column(j), sum[i][j]);
        }
    };
};

// ---- tensor cores: fragments of 16 x 32 bytes and 8 x 32 bytes per step of K ----------------------------------------

// The fragments of both operands for one step of K, in registers.  A lane stores the tile index of its own element of
// row m, and of column j, at k = 0.  Along a row of the tile, an exclusive or gives all other indices, because the
// chunks are permuted by an exclusive or (shared_tile.cuh).  Down a column, they are whole rows apart.
template <class T, class WeightTile, class ImageTile, bool CHUNKED, bool WEIGHT_ALONG_M>
class Fragments {
public:
    static constexpr int STEP = 32 / sizeof(T);  // K of one instruction
    static constexpr bool TRANSPOSED = !CHUNKED && sizeof(T) == 2;

    __device__ __forceinline__ Fragments(int m, int j) {
        const int lane = lane_index();
        weight_ = !WEIGHT_ALONG_M  ? WeightTile::index(m + lane % 16, lane / 16 * (STEP / 2))
                  : sizeof(T) == 2 ? WeightTile::index(lane % 8 + lane / 16 * 8, m + lane / 8 % 2 * 8)
                                   : WeightTile::index(lane % 4, m + lane / 4);
        image_ = CHUNKED      ? ImageTile::index(j + lane / 16 * 8 + lane % 8, lane / 8 % 2 * (STEP / 2))
                 : TRANSPOSED ? ImageTile::index(lane % 16, j + lane / 16 * 8)
                              : ImageTile::index(lane % 4, j + lane / 4);
        if (!TRANSPOSED || WEIGHT_ALONG_M) {  // otherwise they are recomputed: held K-chunks leave no registers for them
            weight_ = opaque(weight_);
            image_ = opaque(image_);
        }
    }

    // Load 16 rows of the weight, from m + `rows` on.
    __device__ __forceinline__ void load_weight(unsigned (&a)[4], const T* tile, int rows, int k) const {
        if constexpr (!WEIGHT_ALONG_M) {
            load_matrices(a, tile + (weight_ ^ k) + rows * WeightTile::COLUMNS);
        } else if constexpr (sizeof(T) == 2) {
            load_matrices_transposed(a, tile + (weight_ ^ rows) + k * WeightTile::COLUMNS);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[i] = word_of(tile + (weight_ ^ (rows + i % 2 * 8)) + (k + i / 2 * 4) * WeightTile::COLUMNS, 0);
        }
    }

    // Load 16 columns of the image, from j + `columns` on, as two fragments.
    __device__ __forceinline__ void load_image(unsigned (&b)[2][2], const T* tile, int columns, int k) const {
        if constexpr (CHUNKED || TRANSPOSED) {
            unsigned four[4];
            if constexpr (CHUNKED)
                load_matrices(four, tile + (image_ ^ k) + columns * ImageTile::COLUMNS);
            else
                load_matrices_transposed(four, tile + (image_ ^ columns) + k * ImageTile::COLUMNS);
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = four[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                b[i / 2][i % 2] =
                    word_of(tile + (image_ ^ (columns + i / 2 * 8)) + (k + i % 2 * 4) * ImageTile::COLUMNS, 0);
        }
    }

private:
    int weight_, image_;
};

// TAG is the operand type of the instruction: float16, bfloat16 or tf32.  WEIGHT_PARTS is the number of parts that an
// element of the weight is stored in: a row of a slab has all first parts, then all second parts.
template <class T, class TAG, int M, int J, bool WEIGHT_ALONG_M = false, int WEIGHT_PARTS = 1>
struct TensorCores {
    static constexpr bool PREFERS_CHUNKS = true;
    static constexpr int K = SLAB_BYTES / sizeof(T);
    using Sum = float;
    using WeightTile =
        SharedTile<T, WEIGHT_ALONG_M ? K : M, WEIGHT_ALONG_M ? M : WEIGHT_PARTS * K, WEIGHT_ALONG_M && sizeof(T) == 4 ? 2 : 1>;
    template <bool CHUNKED>
    using ImageTile = SharedTile<T, CHUNKED ? J : K, CHUNKED ? K : J, CHUNKED || sizeof(T) == 2 ? 1 : 2>;

    template <int ROWS, int COLUMNS, bool CHUNKED>
    struct WarpTile {
        using F = Fragments<T, WeightTile, ImageTile<CHUNKED>, CHUNKED, WEIGHT_ALONG_M>;
        F fragments;
        float sum[ROWS / 16][COLUMNS / 8][4] = {};

        __device__ __forceinline__ WarpTile(int m, int j) : fragments(m, j) {}

        __device__ __forceinline__ void multiply(const T* weight, const T* x) {
#pragma unroll F::TRANSPOSED && M > 64 && !WEIGHT_ALONG_M ? 1 : K / F::STEP  // a held K-chunk leaves no registers for two steps
            for (int k = 0; k < K; k += F::STEP) {
                unsigned b[COLUMNS / 16][2][2];
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; ++c) {
                    fragments.load_image(b[c], x, c * 16, k);
                    as_operands(b[c][0]);
                    as_operands(b[c][1]);
                }
#pragma unroll
                for (int r = 0; r < ROWS / 16; ++r) {
                    unsigned a[4];
                    fragments.load_weight(a, weight, r * 16, k);
                    if (WEIGHT_ALONG_M) as_operands(a);  // it was not packed, so it is not rounded yet
#pragma unroll
                    for (int c = 0; c < COLUMNS / 8; ++c) multiply_add<TAG>(sum[r][c], a, b[c / 2][c % 2]);
                }
            }
        }

        template <class F> __device__ __forceinline__ void for_each(F f) const { for_each_sum(sum, f); }
    };

    // Round float32 to TF32: the instruction by itself would truncate, with all errors towards zero.  A packed weight
    // is already rounded (pack_weight.cu).
    template <int COUNT>
    static __device__ __forceinline__ void as_operands(unsigned (&fragment)[COUNT]) {
        if constexpr (sizeof(T) == 4)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) fragment[i] = round_to_tf32(fragment[i]);
    }
};

// float32 as three products of its parts (tf32_split.cuh).  The weight of a large tile is packed in two parts, high and
// low, because four warps would otherwise split each element.  In a small tile only two warps do, which costs less than
// loading twice the bytes from L2.
template <int M, bool WEIGHT_ALONG_M>
constexpr int SPLIT_WEIGHT_PARTS = M > 64 && !WEIGHT_ALONG_M ? 2 : 1;

template <int M, int J, bool WEIGHT_ALONG_M = false>
struct SplitTensorCores : TensorCores<float32, tf32, M, J, WEIGHT_ALONG_M, SPLIT_WEIGHT_PARTS<M, WEIGHT_ALONG_M>> {
    static constexpr bool IN_PARTS = SPLIT_WEIGHT_PARTS<M, WEIGHT_ALONG_M> == 2;
    using Base = TensorCores<float32, tf32, M, J, WEIGHT_ALONG_M, SPLIT_WEIGHT_PARTS<M, WEIGHT_ALONG_M>>;
    using WeightTile = typename Base::WeightTile;

    template <int ROWS, int COLUMNS, bool CHUNKED>
    struct WarpTile {
        using F = Fragments<float, WeightTile, typename Base::template ImageTile<CHUNKED>, CHUNKED, WEIGHT_ALONG_M>;
        F fragments;
        float sum[ROWS / 16][COLUMNS / 8][4] = {};

        __device__ __forceinline__ WarpTile(int m, int j) : fragments(m, j) {}

        __device__ __forceinline__ void multiply(const float* weight, const float* x) {
            add_apart<ROWS / 16>(sum, [&](auto checked, auto& partial) {
                add_products<decltype(checked)::value>(partial, weight, x);
            });
        }

        template <bool CHECKED>
        __device__ __forceinline__ void add_products(
            float (&partial)[ROWS / 16][COLUMNS / 8][4], const float* weight, const float* x) const {
#pragma unroll 1
            for (int k = 0; k < Base::K; k += F::STEP) {
                unsigned b_high[COLUMNS / 8][2], b_low[COLUMNS / 8][2], b_finite[COLUMNS / 8][2];
#pragma unroll
                for (int c = 0; c < COLUMNS / 16; ++c) {
                    unsigned b[2][2];
                    fragments.load_image(b, x, c * 16, k);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const Split<CHECKED> split(b[i / 2][i % 2]);
                        b_high[c * 2 + i / 2][i % 2] = split.high;
                        b_low[c * 2 + i / 2][i % 2] = split.low;
                        b_finite[c * 2 + i / 2][i % 2] = split.finite_high;
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS / 16; ++r) {
                    unsigned a_high[4], a_low[4], a_finite[4];
                    fragments.load_weight(a_high, weight, r * 16, k);
                    if (IN_PARTS) fragments.load_weight(a_low, weight, r * 16, Base::K + k);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (IN_PARTS) {
                            a_finite[i] = CHECKED ? finite_part(a_high[i]) : a_high[i];
                            continue;
                        }
                        const Split<CHECKED> split(a_high[i]);
                        a_high[i] = split.high;
                        a_low[i] = split.low;
                        a_finite[i] = split.finite_high;
                    }
#pragma unroll
                    for (int c = 0; c < COLUMNS / 8; ++c) {
                        multiply_add<tf32>(partial[r][c], a_low, b_finite[c]);
                        multiply_add<tf32>(partial[r][c], a_finite, b_low[c]);
                        multiply_add<tf32>(partial[r][c], a_high, b_high[c]);
                    }
                }
            }
        }

        template <class F> __device__ __forceinline__ void for_each(F f) const { for_each_sum(sum, f); }
    };
};

// float64: fragments of 16 x 4 (two elements per lane) and of 4 x 8 (one element per lane).
template <int M, int J, bool WEIGHT_ALONG_M>
struct DoubleTensorCores {
    static constexpr bool PREFERS_CHUNKS = true;
    static constexpr int K = SLAB_BYTES / sizeof(double), STEP = 4;
    using Sum = double;
    using WeightTile = SharedTile<double, WEIGHT_ALONG_M ? K : M, WEIGHT_ALONG_M ? M : K, 2>;
    template <bool CHUNKED> using ImageTile = SharedTile<double, CHUNKED ? J : K, CHUNKED ? K : J, 2>;

    template <int ROWS, int COLUMNS, bool CHUNKED>
    struct WarpTile {
        using Tile = ImageTile<CHUNKED>;
        int weight_, image_;  // tile indices of the lane's elements of row m and column j at k = 0, see Fragments
        double sum[ROWS / 16][COLUMNS / 8][4] = {};

        __device__ __forceinline__ WarpTile(int m, int j) {
            const int across = lane_index() / 4, along = lane_index() % 4;
            weight_ = opaque(WEIGHT_ALONG_M ? WeightTile::index(along, m + across) : WeightTile::index(m + across, along));
            image_ = opaque(CHUNKED ? Tile::index(j + across, along) : Tile::index(along, j + across));
        }

        __device__ __forceinline__ void multiply(const double* weight, const double* x) {
#pragma unroll
            for (int k = 0; k < K; k += STEP) {
                double b[COLUMNS / 8];
#pragma unroll
                for (int c = 0; c < COLUMNS / 8; ++c) b[c] = x[place<Tile, CHUNKED>(image_, c * 8, k)];
#pragma unroll
                for (int r = 0; r < ROWS / 16; ++r) {
                    double a[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) a[i] = weight[place<WeightTile, !WEIGHT_ALONG_M>(weight_, r * 16 + i * 8, k)];
#pragma unroll
                    for (int c = 0; c < COLUMNS / 8; ++c) multiply_add(sum[r][c], a, b[c]);
                }
            }
        }

        template <class F> __device__ __forceinline__ void for_each(F f) const { for_each_sum(sum, f); }

    private:
        // Index of the element that is `across` rows or columns, and `k` along K, from a lane's first element.
        template <class Its, bool ALONG_K>
        static __device__ __forceinline__ int place(int first, int across, int k) {
            return ALONG_K ? (first ^ k) + across * Its::COLUMNS : (first ^ across) + k * Its::COLUMNS;
        }
    };
};

// ---- choice of an arithmetic ---------------------------------------------------------------------------------------

// The class for a block's tile of M x J.  WEIGHT_ALONG_M is the layout of its weight: CUDA cores have only [k][m];
// complex64 on tensor cores has only [m][k].
template <class T, int KIND, int M, int J, bool WEIGHT_ALONG_M = KIND == FMA> struct ArithmeticOf;
template <class T, int M, int J> struct ArithmeticOf<T, FMA, M, J, true> { using type = CudaCores<T, M, J>; };
template <class T, int M, int J, bool ALONG_M>
struct ArithmeticOf<T, MMA, M, J, ALONG_M> { using type = TensorCores<T, T, M, J, ALONG_M>; };
template <int M, int J, bool ALONG_M>
struct ArithmeticOf<float64, MMA, M, J, ALONG_M> { using type = DoubleTensorCores<M, J, ALONG_M>; };
template <int M, int J, bool ALONG_M>
struct ArithmeticOf<float32, TF32, M, J, ALONG_M> { using type = TensorCores<float32, tf32, M, J, ALONG_M>; };
template <int M, int J> struct ArithmeticOf<complex64, TF32X3, M, J, false> { using type = ComplexTensorCores<M, J>; };
template <int M, int J, bool ALONG_M>
struct ArithmeticOf<float32, TF32X3, M, J, ALONG_M> { using type = SplitTensorCores<M, J, ALONG_M>; };

}  // namespace cupyconv
