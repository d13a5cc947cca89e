// What a block does in a step of a recurrent layer: some hidden units of some samples, all gates of theirs.
//
//     sum[n, g, u] = sum_k h[n, k] * R[(g, u), k]
//
//                K-slab                UNIT_WARPS warps share the units, 8 each, and K_WARPS warps the products of a
//     R (g, u)  +-------+               K-slab, STEP of k each (recurrent_products.cuh);  then the sums of these are
//        rows   |       |               added, in their order, and each thread finishes pairs of a sample and a unit
//               +-------+
//     h n rows  |       |
//               +-------+
//
// Rows are an odd number of 16-byte chunks apart in shared memory: eight lanes read eight rows without conflicts.
// R is fetched K-slab by K-slab beside h, or it is RESIDENT: all of it stays where the block has put it.
#pragma once
#include "recurrent_cell.cuh"
#include "recurrent_products.cuh"

namespace cupyconv {

template <class T, int GATE_COUNT, int SAMPLE_COUNT, int ARITHMETIC_KIND, bool RESIDENT>
struct RecurrentTile {
    using A = Accumulator<T>;
    using Products = RecurrentProducts<T, GATE_COUNT, SAMPLE_COUNT, ARITHMETIC_KIND>;
    static constexpr int THREADS = 256, WARPS = THREADS / WARP;
    static constexpr int UNIT_WARPS = SAMPLE_COUNT == 8 ? 4 : 1, K_WARPS = WARPS / UNIT_WARPS;
    static constexpr int ROWS = 4 * SAMPLE_COUNT, UNITS = 8 * UNIT_WARPS, PAIRS = ROWS * UNITS;
    static constexpr int CHUNK = 16 / sizeof(T), STATE_CHUNK = 16 / sizeof(A);
    static constexpr int K = K_WARPS * Products::STEP;
    static constexpr int STAGES = RESIDENT ? 4 : 3;
    static constexpr int WEIGHT_PITCH = K + CHUNK, STATE_PITCH = K + Products::STATE_PAD;
    static constexpr int PAIRS_PER_THREAD = (PAIRS + THREADS - 1) / THREADS;

    struct Stage {
        alignas(16) T weight[RESIDENT ? CHUNK : GATE_COUNT * UNITS * WEIGHT_PITCH];
        alignas(16) A state[ROWS * STATE_PITCH];
    };
    union Shared {
        Stage stage[STAGES];
        A partial[K_WARPS * GATE_COUNT * PAIRS];
    };

    // Where the block's part begins.
    int d, n_first, u_first;
    const RecurrentParams& params;

    // Pairs of a sample and a unit are numbered so that 32 in a row are 4 samples x 8 units.
    static __device__ __forceinline__ int pair_of(int n, int u) {
        return (n / 4 * UNIT_WARPS + u / 8) * 32 + n % 4 * 8 + u % 8;
    }

    // The i-th pair that this thread finishes.
    __device__ __forceinline__ Unit unit(int i, int step) const {
        const int pair = i * THREADS + threadIdx.x;
        const int u = pair / 32 % UNIT_WARPS * 8 + pair % 8, n = pair / (32 * UNIT_WARPS) * 4 + pair / 8 % 4;
        Unit found = unit_at(params, d, n_first + n, u_first + u, step);
        if (pair >= PAIRS) found.inside = found.valid = false;
        return found;
    }

    // `columns` of some gates' rows of a weight, from k_first on, into rows `pitch` apart; zeros beyond its `length`.
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

    // A K-slab of the left operand: rows of sums, or where there are none, an array of T.
    __device__ __forceinline__ void fetch_state(
        A* to, const A* rows, const Strided& array, int length, int k_first) const {
        constexpr int CHUNKS = K / STATE_CHUNK;
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, k = k_first + i % CHUNKS * STATE_CHUNK, n = n_first + row;
            A* const at = to + row * STATE_PITCH + i % CHUNKS * STATE_CHUNK;
            const int valid = n < params.batch ? length - k : 0;
            if (rows) {
                const A* const from = rows + (long long)(valid > 0 ? n : 0) * length + k;
                fetch_chunk(at, from, 1, params.states_vectorized ? 16 : SMALL_VECTOR<A>, valid);
            } else {
#pragma unroll
                for (int e = 0; e < STATE_CHUNK; ++e) at[e] = e < valid ? value_at<T>(array, d, n, k + e) : A(0);
            }
        }
    }

    // R's product with these rows, or with h0 where they are null; then f(i, sums) for each pair of the thread.
    // `resident`: R's rows as fetch_weight has put them, `pitch` apart.
    template <class F>
    __device__ __forceinline__ void multiply_state(
        Shared& shared, const A* rows, const T* resident, int pitch, F f) const {
        multiply(shared, rows, params.h0, params.weight, params.weight_vector, params.hidden, resident, pitch, f);
    }

    // The input weight's product with the inputs of the one step.
    template <class F> __device__ __forceinline__ void multiply_inputs(Shared& shared, F f) const {
        multiply(shared, nullptr, params.x, params.weight_ih, params.weight_ih_vector, params.inputs, nullptr, 0, f);
    }

  private:
    // Bytes that rows of any length begin on boundaries of, and that can be copied asynchronously.
    template <class S> static constexpr int SMALL_VECTOR = sizeof(S) > 4 ? sizeof(S) : 4;

    // 16 bytes of which `valid` elements exist, `step` apart; zeros for the others.
    template <class S>
    static __device__ __forceinline__ void fetch_chunk(S* to, const S* from, long long step, int vector, int valid) {
        constexpr int COUNT = 16 / sizeof(S), SMALL = SMALL_VECTOR<S>;
        if (vector == 16) {
            copy_async<16>(to, from, valid > 0);
        } else if (vector == SMALL) {
#pragma unroll
            for (int e = 0; e < COUNT; e += SMALL / sizeof(S)) copy_async<SMALL>(to + e, from + e, e < valid);
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; ++e) to[e] = e < valid ? from[e * step] : S{};
        }
    }

    template <class F>
    __device__ __forceinline__ void multiply(
        Shared& shared, const A* rows, const Strided& array, const Strided& right, int vector, int length,
        const T* resident, int pitch, F f) const {
        const int slabs = (length + K - 1) / K;
        const auto fetch = [&](int i) {
            Stage& stage = shared.stage[i % STAGES];
            if (!RESIDENT)
                fetch_weight(stage.weight, WEIGHT_PITCH, right, vector, length, i * K, K,
                             CellStep<T, GATE_COUNT>::first_gate(params));
            fetch_state(stage.state, rows, array, length, i * K);
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i < slabs) fetch(i);
            commit_copies();
        }
        Products products;
        const int unit_warp = warp_index() % UNIT_WARPS, k_warp = warp_index() / UNIT_WARPS;
        const int weight_pitch = RESIDENT ? pitch : WEIGHT_PITCH;
#pragma unroll 1
        for (int i = 0; i < slabs; ++i) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // everyone's copies of slab i are there, and slab i - 1 has been used
            if (i + STAGES - 1 < slabs) fetch(i + STAGES - 1);
            commit_copies();
            const Stage& stage = shared.stage[i % STAGES];
            const T* const weight = RESIDENT ? resident + i * K : stage.weight;
            products.add(weight + unit_warp * 8 * weight_pitch + k_warp * Products::STEP, weight_pitch,
                         UNITS * weight_pitch, stage.state + k_warp * Products::STEP, STATE_PITCH);
        }
        wait_for_copies<0>();
        __syncthreads();  // the stages are free

        products.for_each([&](int n, int g, int u, A sum) {
            shared.partial[(k_warp * GATE_COUNT + g) * PAIRS + pair_of(n, unit_warp * 8 + u)] = sum;
        });
        __syncthreads();
#pragma unroll 1  // one pair's loads wait for the stores of the one before in any case
        for (int i = 0; i < PAIRS_PER_THREAD; ++i) {
            const int pair = i * THREADS + threadIdx.x;
            A total[GATE_COUNT] = {};
            if (pair < PAIRS) {
#pragma unroll
                for (int g = 0; g < GATE_COUNT; ++g)
#pragma unroll
                    for (int k = 0; k < K_WARPS; ++k) total[g] += shared.partial[(k * GATE_COUNT + g) * PAIRS + pair];
            }
            f(i, total);
        }
        __syncthreads();  // the partial sums have been read
    }
};

}  // namespace cupyconv
