// Convolution as a GEMM whose right-hand matrix is gathered while it runs: no columns, any list of inputs.
//
//     y[n, o, p] = activation( sum_{s, t, c} weight[o, s, c, t] * x_s[n, c, window(p, t)]
//                              + bias[o] + residual[n, o, p] )
//
//     M = o (outputs of a group)    N = (n, p) (pixels of all samples)    K = (s, t, c), see reduction.cuh
//
//                       N ->                             one block: a TILE_M x TILE_N part of one group's result,
//                  x    | K-slab  |  ...                 K-slab by K-slab through shared memory, in a pipeline
//                       +----+----+                      of STAGES stages
//     weight  K ->      |    |    |
//     M  [K-slab ]...   | w  | w  |                      w: a warp's part, sums in registers
//     ↓                 +----+----+
//
// The source is chosen once per slab.  The epilogue stages sums in shared memory, so that the result is written along
// its unit stride.  If few tiles would leave the GPU idle, gridDim.y blocks share the K of a tile.  They store partial
// sums, which the epilogue kernel adds in order.
//
// Bound by arithmetic for many outputs.  Floor: 2 * M * N * K operations over the rate of the arithmetic.
//
// Memory traffic: a block reads the two edges of its tile from L2 for each K-slab, so a large tile reads fewer bytes
// per operation.  A warp reads the edges of its part from shared memory, so parts are 64 x 64 where possible.
//
// -D: DTYPE (storage type), ARITHMETIC (one of warp_tile.cuh), TILE_M and TILE_N (of a tile: 64 x 64, 128 x 128, 64 x 256
//     or 128 x 256), GATHER (what neighbouring threads gather: a direction of gather.cuh), PROLOGUE (1: inputs are
//     transformed as they are gathered, see prologue.cuh)
#include "epilogue.cuh"
#include "gather.cuh"
#include "warp_tile.cuh"

namespace cupyconv {

// The weight in K-slabs [m][k], or [k][m] for CUDA cores: packed by pack_weight.cu, or as the caller stores it.
struct WeightSlabs {
    const void* data;
    long long stride_g, stride_slab, stride_row;  // elements from one group, slab and row to the next
    int rows;                                     // rows of a slab; a tile may have more, which are not stored
};

struct ImplicitGemmParams {
    Sources sources;
    Steps steps;
    WeightSlabs weight;
    Image out;           // or, if the sum is split, the first plane of partial sums
    long long plane;     // elements from one split's plane to the next
    Epilogue epilogue;
    Prologue prologue;
    long long batch;
    PlaceBits place_bits;
    int groups, group_channels, group_outputs;
    int tiles_m;          // tiles along M
    int keeps_sums;       // stores the sums as they are, in the accumulator's type
    int slabs_per_split;  // K-slabs of a block's share of K
    int phases;           // convolutions of the grid
    Phase phase[MAX_PHASES];
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
using Arithmetic = ArithmeticOf<T, ARITHMETIC, TILE_M, TILE_N>::type;
using Sum = Arithmetic::Sum;

constexpr bool WIDE = TILE_N == 256;
constexpr int WARP_ROWS = WIDE ? 64 : TILE_M / 2, WARP_COLUMNS = WIDE ? 64 : 32;
constexpr int WARPS_DOWN = TILE_M / WARP_ROWS, THREADS = WARPS_DOWN * (TILE_N / WARP_COLUMNS) * WARP;
constexpr int STAGES = 3;
// Blocks per multiprocessor, so that one block works while another waits: as many as the registers of the sums allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MIN_BLOCKS = THREADS == 256 ? 1 : 2;  // 64 KiB of shared memory hold no more
#else
constexpr int MOST_BLOCKS = THREADS == 256 ? 2 : 4;
constexpr int PROLOGUE_BLOCKS = ARITHMETIC == TF32X3 || sizeof(DTYPE) == 8 ? 2 : 3;
// Three blocks keep the few units for doubles busy; a fourth caused register spills.
constexpr bool FEW_UNITS = sizeof(DTYPE) == 8 && ARITHMETIC == FMA;
// A thread of a large tile has 64 sums.  A sum needs two registers if it is a double, or if slabs are added separately.
constexpr bool ALONE = THREADS == 256 && (ARITHMETIC == TF32X3 || sizeof(DTYPE) == 8);
constexpr int MIN_BLOCKS = WIDE                    ? MOST_BLOCKS / 2
                           : PROLOGUE              ? PROLOGUE_BLOCKS
                           : ALONE                 ? 1
                           : ARITHMETIC == TF32X3 ? (sizeof(DTYPE) == 8 ? 2 : 3)
                                                  : MOST_BLOCKS - FEW_UNITS;
#endif
constexpr bool CHUNKED = GATHER == ALONG_CHANNELS && Arithmetic::PREFERS_CHUNKS;

using WeightTile = Arithmetic::WeightTile;
using ImageTile = Arithmetic::template ImageTile<CHUNKED>;
using Gather = GatherOf<T, ImageTile, THREADS, GATHER, CHUNKED>::type;

struct Stage {
    T weight[WeightTile::ELEMENTS], x[ImageTile::ELEMENTS];
};

// Sums on their way to the result, one part of the tile at a time, in the order in which they are written.  The pitches
// keep the lanes of a fragment, and the lanes that write a line, in different banks.
constexpr int PART_ROWS = WARP_ROWS, PART_COLUMNS = TILE_N < 128 ? TILE_N : 128;
constexpr int PARTS_ACROSS = TILE_N / PART_COLUMNS;
constexpr int PIXELS_PITCH = PART_COLUMNS + 8;  // [m][j], along pixels
constexpr int OUTPUTS_PITCH = PART_ROWS + 4;    // [j][m], along outputs
struct EpilogueShared {
    long long out_at[TILE_N], residual_at[TILE_N];  // see EpilogueTile
    Sum sums[PART_ROWS * PIXELS_PITCH];
};
static_assert(PART_COLUMNS * OUTPUTS_PITCH == PART_ROWS * PIXELS_PITCH, "either order fills the same");
constexpr int AT_A_TIME = ARITHMETIC == FMA || sizeof(Sum) == 8 ? 2 : 4;  // sums that a thread finishes together

struct Shared {
    TilePixel pixel[TILE_N];
    union {
        Stage stage[STAGES];
        EpilogueShared epilogue;
    };
};

// Copies the weight of a slab: two 16-byte chunks per thread, or four if the weight is stored in two parts.
class WeightFetch {
    static constexpr int ROWS_PER_PASS = THREADS / WeightTile::CHUNKS, PASSES = WeightTile::ROWS / ROWS_PER_PASS;
    static constexpr bool M_INSIDE = WeightTile::ROWS != TILE_M;  // [k][m]
    static_assert(WeightTile::ROWS == PASSES * ROWS_PER_PASS, "passes are a tile");
    static_assert(ROWS_PER_PASS % WeightTile::PERIOD == 0, "all meet the same order of chunks");

public:
    // Start at row `m_first` of group `g`, at slab number `slab`.
    __device__ __forceinline__ WeightFetch(const WeightSlabs& slabs, int g, int m_first, int slab)
        : stride_slab_(slabs.stride_slab) {
        const int row = threadIdx.x / WeightTile::CHUNKS, column = threadIdx.x % WeightTile::CHUNKS * WeightTile::CHUNK;
        const int first = existing(slabs, m_first, row), second = existing(slabs, m_first, row + ROWS_PER_PASS);
        to_ = WeightTile::index(row, column);
        if (CHUNKED) to_ = opaque(to_);  // otherwise it is recomputed, which leaves its register to the gather
        from_ = static_cast<const T*>(slabs.data) + g * slabs.stride_g + slab * slabs.stride_slab +
                first * slabs.stride_row + column + (M_INSIDE ? m_first : 0);
        step_ = int((second - first) * slabs.stride_row);
    }

    // Copy the next slab.
    __device__ __forceinline__ void fetch(T* tile) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
            copy_async<16>(tile + to_ + i * ROWS_PER_PASS * WeightTile::COLUMNS, from_ + i * step_, true);
        from_ += stride_slab_;
    }

private:
    // A row that does not exist is replaced by the last row that does.  Its sums are not stored.
    static __device__ __forceinline__ int existing(const WeightSlabs& slabs, int m_first, int row) {
        return M_INSIDE ? row : min(m_first + row, slabs.rows - 1);
    }

    const T* from_;
    const long long& stride_slab_;
    int step_, to_;  // elements from the first chunk to the second; index in the tile of the first
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    implicit_gemm(const __grid_constant__ ImplicitGemmParams params) {
    DYNAMIC_SHARED(Shared, shared);

    // Consecutive blocks share pixels, which they find in the L2 cache.  Stores of neighbouring phases to the same
    // lines meet there, too.
    const int m_first = blockIdx.x % params.tiles_m * TILE_M;
    const int g = blockIdx.x / params.tiles_m % params.groups, at = blockIdx.x / params.tiles_m / params.groups;
    const Phase& phase = params.phase[at % params.phases];
    const long long pixels = params.batch * phase.pixels(), j_first = (long long)(at / params.phases) * TILE_N;
    if (j_first >= pixels) return;  // other phases have more pixels
    const int c_first = g * params.group_channels;
    const int first = blockIdx.y * params.slabs_per_split;

    int slabs = -first;
    const int taps = product_of(phase.kernel);
    for (Run run; run.next(params.sources, c_first, c_first + params.group_channels, taps, Gather::K_CHUNK, Gather::SLAB);) slabs += run.slabs;
    slabs = max(0, min(slabs, params.slabs_per_split));

#pragma unroll 1
    for (int j = threadIdx.x; j < TILE_N; j += THREADS)
        shared->pixel[j] = tile_pixel(phase, params.place_bits, j_first + j, pixels);
    __syncthreads();
    Gather gather(
        {params.sources, params.steps, phase, params.place_bits, c_first, params.group_channels, shared->pixel, first}, params.prologue);

    WeightFetch weight(params.weight, g, m_first, phase.first_slab + first);

    const int warp_m = warp_index() % WARPS_DOWN * WARP_ROWS, warp_j = warp_index() / WARPS_DOWN * WARP_COLUMNS;
    Arithmetic::template WarpTile<WARP_ROWS, WARP_COLUMNS, CHUNKED> tile(warp_m, warp_j);
    int used = 0, next = 0;  // stage of slab i, and stage that is filled meanwhile
#pragma unroll 1
    for (int i = 1 - STAGES; i < slabs; ++i) {
        if (i >= 0) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // all copies of slab i have arrived, and slab i - 1 has been used
        }
        Stage& to = shared->stage[next];
        const bool more = i + STAGES - 1 < slabs;
        if (more) {
            weight.fetch(to.weight);
            gather.fetch(to.x);
            next = next == STAGES - 1 ? 0 : next + 1;
        }
        commit_copies();
        if (i >= 0) {
            const Stage& stage = shared->stage[used];
            tile.multiply(stage.weight, stage.x);
            used = used == STAGES - 1 ? 0 : used + 1;
        }
        if (more) gather.store(to.x);
    }
    wait_for_copies<0>();
    __syncthreads();  // the stages may be overwritten

    EpilogueShared& finished = shared->epilogue;
    const Image& out = params.out;
    const Image& residual = params.epilogue.residual;
    for (int j = threadIdx.x; j < TILE_N; j += THREADS) {
        const int sample = shared->pixel[j].sample;
        const Pixel pixel = params.place_bits.unpacked(shared->pixel[j].place);
        finished.out_at[j] = sample < 0 ? NOWHERE : phase.first_element + out.at(sample, 0, pixel);
        finished.residual_at[j] = residual.at(sample, 0, pixel);
    }
    const bool along_outputs = out.stride_c == 1;  // neighbouring threads write neighbouring outputs, else pixels
    Sum* const kept_sums = params.keeps_sums ? static_cast<Sum*>(out.data) + blockIdx.y * params.plane : nullptr;
#pragma unroll 1
    for (int part = 0; part < WARPS_DOWN * PARTS_ACROSS; ++part) {
        const int part_m = part / PARTS_ACROSS * PART_ROWS, part_j = part % PARTS_ACROSS * PART_COLUMNS;
        const int j_in_part = warp_j - part_j;
        if (warp_m == part_m && j_in_part >= 0 && j_in_part < PART_COLUMNS) {
            if (along_outputs)
                tile.for_each([&](int m, int j, Sum sum) { finished.sums[(j_in_part + j) * OUTPUTS_PITCH + m] = sum; });
            else
                tile.for_each([&](int m, int j, Sum sum) { finished.sums[m * PIXELS_PITCH + j_in_part + j] = sum; });
        }
        __syncthreads();
        const int o_first = m_first + part_m, rows = min(PART_ROWS, params.group_outputs - o_first);
        const EpilogueTile<T> epilogue_tile = {
            finished.sums, along_outputs ? 1 : PIXELS_PITCH, along_outputs ? OUTPUTS_PITCH : 1,
            (long long)g * params.group_outputs + o_first, finished.out_at + part_j, finished.residual_at + part_j};
        const TileWalk walk = walk_along<PART_ROWS, PART_COLUMNS, THREADS>(along_outputs, rows);
        finish_tile<T, AT_A_TIME>(epilogue_tile, walk, out, params.epilogue, kept_sums);
        __syncthreads();
    }
}
