// The part of a recurrent step that one block computes: some hidden units of some samples, with all their gates.
//
//     sum[n, g, u] = sum_k h[n, k] * R[(g, u), k]
//
//                K-slab                UNIT_WARPS warps divide the units, 8 each, and K_WARPS warps divide the
//     R (g, u)  +-------+               products of a K-slab, STEP of k each (recurrent_products.cuh);  then their sums
//        rows   |       |               are added, in order, and each thread finishes pairs of a sample and a unit
//               +-------+
//     h n rows  |       |
//               +-------+
//
// A StreamedTile fetches both R and h slab by slab, and its warps step through the slabs together.  In a ResidentTile,
// all of R stays in shared memory.  Each warp fetches the part of h that it alone multiplies.  It waits for no other
// warp until the sums are added, where the block synchronizes once.
//
// In shared memory, rows are an odd number of 16-byte chunks apart: eight lanes read eight rows without bank conflicts.
#pragma once
#include "recurrent_cell.cuh"
#include "recurrent_products.cuh"

namespace cupyconv {

// The sums of all gates of one sample and unit.  One access moves them, unless there are three.
template <class A, int COUNT>
struct alignas(COUNT == 3 ? sizeof(A) : COUNT * sizeof(A)) GateSums {
    A of[COUNT];
};

// The base of both kinds of tiles: it assigns the work to threads, and copies rows to shared memory.
template <class T, int GATE_COUNT, int SAMPLE_COUNT, int ARITHMETIC_KIND>
struct RecurrentTile {
    using A = Accumulator<T>;
    using Sums = GateSums<A, GATE_COUNT>;
    using Products = RecurrentProducts<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND>;
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int UNIT_WARPS = SAMPLE_COUNT == 8 ? 4 : 1, K_WARPS = WARPS / UNIT_WARPS;
    static constexpr int ROWS = 4 * SAMPLE_COUNT, UNITS = 8 * UNIT_WARPS, PAIRS = ROWS * UNITS;
    static constexpr int CHUNK = 16 / sizeof(T), STATE_CHUNK = 16 / sizeof(A), STEP = Products::STEP;
    static constexpr int K = K_WARPS * STEP;
    static constexpr int PAIRS_PER_THREAD = (PAIRS + THREADS - 1) / THREADS;

    // The direction of the block, and its first sample and unit.
    int d, n_first, u_first;
    const RecurrentParams& params;

    // Pairs of a sample and a unit are numbered so that 32 consecutive ones are 4 samples x 8 units.
    static __device__ __forceinline__ int pair_of(int n, int u) {
        return (n / 4 * UNIT_WARPS + u / 8) * 32 + n % 4 * 8 + u % 8;
    }

    // The i-th pair that this thread finishes.  If there is none left, the sample does not exist.
    static __device__ __forceinline__ int pair(int i) { return i * THREADS + threadIdx.x; }
    __device__ __forceinline__ int sample(int i) const {
        return pair(i) < PAIRS ? n_first + pair(i) / (32 * UNIT_WARPS) * 4 + pair(i) / 8 % 4 : params.batch;
    }
    __device__ __forceinline__ int unit(int i) const {
        return u_first + pair(i) / 32 % UNIT_WARPS * 8 + pair(i) % 8;
    }

    // Copy `columns` columns, from k_first on, of some gates' rows of a weight to rows that are `pitch` apart.
    // Elements past `length` become zeros.
    __device__ __forceinline__ void fetch_weight(
        T* to, int pitch, const Strided& weight, int vector, int length, int k_first, int columns,
        int first_gate) const {
        const int chunks = columns / CHUNK;
        for (int i = threadIdx.x; i < GATE_COUNT * UNITS * chunks; i += THREADS) {
            const int row = i / chunks, k = k_first + i % chunks * CHUNK, u = u_first + row % UNITS;
            const bool exists = u < params.hidden;
            const long long gate_row = (long long)(first_gate + row / UNITS) * params.hidden + u;
            const T* const from = element_at<T>(weight, d, exists ? gate_row : 0, k);
            fetch_chunk(to + row * pitch + i % chunks * CHUNK, from, weight.stride_u, vector, exists ? length - k : 0);
        }
    }

    // Bytes of the smallest asynchronous copy of whole elements.  Rows of A are aligned to it, whatever their length.
    template <class S> static constexpr int SMALL_VECTOR = sizeof(S) > 4 ? sizeof(S) : 4;

    // Copy 16 bytes of elements that are `step` apart.  The first `valid` ones exist, the others become zeros.
    template <class S>
    static __device__ __forceinline__ void fetch_chunk(S* to, const S* from, long long step, int vector, int valid) {
        constexpr int COUNT = 16 / sizeof(S), SMALL = SMALL_VECTOR<S>;
        if (vector == 16) {
            copy_async<16>(to, from, valid > 0);
        } else if (vector == SMALL) {
#pragma unroll 1  // not unrolled, so that it does not slow down the other cases
            for (int e = 0; e < COUNT; e += SMALL / sizeof(S)) copy_async<SMALL>(to + e, from + e, e < valid);
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) to[e] = e < valid ? from[e * step] : S{};
        }
    }

    // Add a pair's sums from the K_WARPS warps that share its products to `total`.  part_of(k) is warp k's part.
    template <class F>
    static __device__ __forceinline__ void add_parts(F part_of, A (&total)[GATE_COUNT]) {
#pragma unroll
        for (int k = 0; k < K_WARPS; ++k) {
            const Sums sums = part_of(k);
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) total[g] += sums.of[g];
        }
    }

    static __device__ __forceinline__ Sums packed(const A (&sum)[GATE_COUNT]) {
        Sums sums;
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) sums.of[g] = sum[g];
        return sums;
    }
};

template <class T, int GATE_COUNT, int SAMPLE_COUNT, int ARITHMETIC_KIND>
struct StreamedTile : RecurrentTile<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND> {
    using Base = RecurrentTile<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND>;
    using typename Base::A, typename Base::Sums, typename Base::Products;
    using Base::params, Base::K, Base::PAIRS, Base::UNITS, Base::ROWS, Base::STEP;
    static constexpr int STAGES = 3;
    static constexpr int WEIGHT_PITCH = K + Base::CHUNK, STATE_PITCH = K + Products::STATE_PAD;

    struct Stage {
        alignas(16) T weight[GATE_COUNT * UNITS * WEIGHT_PITCH];
        alignas(16) A state[ROWS * STATE_PITCH];
    };
    union Shared {
        Stage stage[STAGES];
        Sums partial[Base::K_WARPS * PAIRS];
    };

    __device__ __forceinline__ StreamedTile(int d, int n_first, int u_first, const RecurrentParams& params)
        : Base{d, n_first, u_first, params} {}

    // Multiply R by `rows`, or by h0 if they are null.  Then call f(i, sums) for each pair of the thread.
    template <class F> __device__ __forceinline__ void multiply_state(Shared& shared, const A* rows, F f) const {
        multiply(shared, rows, params.h0, params.weight, params.weight_vector, params.hidden, f);
    }

    // Multiply the input weight by the inputs of the single step.
    template <class F> __device__ __forceinline__ void multiply_inputs(Shared& shared, F f) const {
        multiply(shared, nullptr, params.x, params.weight_ih, params.weight_ih_vector, params.inputs, f);
    }

  private:
    // Copy a K-slab of the left operand: from `rows` of type A, or, if they are null, from `array` of type T.
    __device__ __forceinline__ void fetch_state(
        A* to, const A* rows, const Strided& array, int length, int k_first) const {
        constexpr int STATE_CHUNK = Base::STATE_CHUNK, CHUNKS = K / STATE_CHUNK;
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += Base::THREADS) {
            const int row = i / CHUNKS, k = k_first + i % CHUNKS * STATE_CHUNK, n = this->n_first + row;
            A* const at = to + row * STATE_PITCH + i % CHUNKS * STATE_CHUNK;
            const int valid = n < params.batch ? length - k : 0;
            if (rows) {
                const A* const from = rows + (long long)(valid > 0 ? n : 0) * length + k;
                this->fetch_chunk(at, from, 1, params.states_vectorized ? 16 : Base::template SMALL_VECTOR<A>, valid);
            } else {
#pragma unroll
                for (int e = 0; e < STATE_CHUNK; ++e) at[e] = e < valid ? value_at<T>(array, this->d, n, k + e) : A(0);
            }
        }
    }

    template <class F>
    __device__ __forceinline__ void multiply(
        Shared& shared, const A* rows, const Strided& array, const Strided& right, int vector, int length, F f) const {
        const int slabs = (length + K - 1) / K, first_gate = UnitCell<T, GATE_COUNT>::first_gate(params);
        const auto fetch = [&](int i) {
            Stage& stage = shared.stage[i % STAGES];
            this->fetch_weight(stage.weight, WEIGHT_PITCH, right, vector, length, i * K, K, first_gate);
            fetch_state(stage.state, rows, array, length, i * K);
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i < slabs) fetch(i);
            commit_copies();
        }
        Products products;
        const int unit_warp = warp_index() % Base::UNIT_WARPS, k_warp = warp_index() / Base::UNIT_WARPS;
#pragma unroll 1
        for (int i = 0; i < slabs; ++i) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // all copies of slab i have arrived, and slab i - 1 has been used
            if (i + STAGES - 1 < slabs) fetch(i + STAGES - 1);
            commit_copies();
            const Stage& stage = shared.stage[i % STAGES];
            products.add(stage.weight + unit_warp * 8 * WEIGHT_PITCH + k_warp * STEP, WEIGHT_PITCH,
                         UNITS * WEIGHT_PITCH, stage.state + k_warp * STEP, STATE_PITCH);
        }
        wait_for_copies<0>();
        __syncthreads();  // the stages may be overwritten

        products.for_each([&](int n, int u, const A(&sum)[GATE_COUNT]) {
            shared.partial[k_warp * PAIRS + this->pair_of(n, unit_warp * 8 + u)] = this->packed(sum);
        });
        __syncthreads();
#pragma unroll 1  // the loads of a pair wait for the previous pair's stores in any case
        for (int i = 0; i < Base::PAIRS_PER_THREAD; ++i) {
            A total[GATE_COUNT] = {};
            const auto part_of = [&](int k) { return shared.partial[k * PAIRS + this->pair(i)]; };
            if (this->pair(i) < PAIRS) this->add_parts(part_of, total);
            f(i, total);
        }
        __syncthreads();  // the partial sums have been read
    }
};

template <class T, int GATE_COUNT, int SAMPLE_COUNT, int ARITHMETIC_KIND>
struct ResidentTile : RecurrentTile<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND> {
    using Base = RecurrentTile<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND>;
    using typename Base::A, typename Base::Sums, typename Base::Products;
    using Base::params, Base::K, Base::PAIRS, Base::UNITS, Base::ROWS, Base::STEP;
    static constexpr int STAGES = 4, STATE_PITCH = STEP + Products::STATE_PAD;
    static_assert(Base::UNIT_WARPS == 1 && Base::PAIRS_PER_THREAD == 1, "what a warp fetches, it alone multiplies");

    union OfWarp {  // its part of h, later its part of the sums
        alignas(16) A state[STAGES][ROWS * STATE_PITCH];
        Sums partial[PAIRS];
    };
    using Shared = OfWarp[Base::WARPS];

    __device__ __forceinline__ ResidentTile(int d, int u_first, const RecurrentParams& params)
        : Base{d, 0, u_first, params} {}

    // Switch to the tile of samples that begins with n_first.
    __device__ __forceinline__ void move_to(int n_first) {
        this->n_first = n_first;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int n = n_first + row() + pass * PASS_ROWS;
            const bool exists = row() + pass * PASS_ROWS < ROWS && n < params.batch;
            length[pass] = exists ? params.hidden - k_first() : 0;
            from[pass] = (long long)(exists ? n : 0) * params.hidden + k_first();
        }
    }

    // Compute the sums of the thread's pair.  `weight` points to the rows of R as fetch_weight has stored them, `pitch`
    // apart.  The rows of h are ready when `wait` returns.  The block has to synchronize before the next call, since
    // other warps may still read this warp's sums.
    template <class F>
    __device__ __forceinline__ void multiply(
        Shared& shared, const A* rows, const T* weight, int pitch, A (&total)[GATE_COUNT], F wait) const {
        OfWarp& own = shared[warp_index()];
        const int slabs = (params.hidden + K - 1) / K;
        wait();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) {
            if (i < slabs) fetch(own, rows, i);
            commit_copies();
        }
        Products products;
#pragma unroll 1
        for (int i = 0; i < slabs; ++i) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            products.add(weight + i * K + warp_index() * STEP, pitch, UNITS * pitch, own.state[i % STAGES], STATE_PITCH);
            __syncwarp();  // the slab has been used
            if (i + STAGES < slabs) fetch(own, rows, i + STAGES);
            commit_copies();
        }
        products.for_each([&](int n, int u, const A(&sum)[GATE_COUNT]) {
            own.partial[this->pair_of(n, u)] = this->packed(sum);
        });
        __syncthreads();
        const auto part_of = [&](int k) { return shared[k].partial[this->pair(0)]; };
        if (this->pair(0) < PAIRS) this->add_parts(part_of, total);
    }

  private:
    // In every slab, a lane fetches the same 16 bytes of every PASS_ROWS-th row.
    static constexpr int CHUNKS = STEP / Base::STATE_CHUNK, PASS_ROWS = WARP / CHUNKS;
    static constexpr int PASSES = (ROWS + PASS_ROWS - 1) / PASS_ROWS;
    long long from[PASSES];
    int length[PASSES];  // elements from there to the end of the row

    static __device__ __forceinline__ int row() { return lane_index() / CHUNKS; }
    static __device__ __forceinline__ int chunk() { return lane_index() % CHUNKS * Base::STATE_CHUNK; }
    static __device__ __forceinline__ int k_first() { return warp_index() * STEP + chunk(); }

    __device__ __forceinline__ void fetch(OfWarp& own, const A* rows, int slab) const {
        const int vector = params.states_vectorized ? 16 : Base::template SMALL_VECTOR<A>;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            if (PASSES * PASS_ROWS == ROWS || row() + pass * PASS_ROWS < ROWS)
                this->fetch_chunk(own.state[slab % STAGES] + (row() + pass * PASS_ROWS) * STATE_PITCH + chunk(),
                                  rows + from[pass] + slab * K, 1, vector, length[pass] - slab * K);
    }
};

}  // namespace cupyconv
