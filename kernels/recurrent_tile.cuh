// What a block does in a step of a recurrent layer: some hidden units of some samples, all gates of theirs.
//
//     sum[n, g, u] = sum_k h[n, k] * R[(g, u), k]
//
//                K-block                one warp: 4 x 8 lanes, each SAMPLE_COUNT samples x 1 unit x GATE_COUNT gates, so that the
//     R (g, u)  +-------+               gates of a unit meet in one thread;  both operands lie along k, and are read
//        rows   |       |               16 bytes at a time;  K_WARPS warps share the products of a K-block, UNIT_WARPS
//               +-------+               the units
//     h n rows  |       |
//               +-------+               then the sums of the K_WARPS warps are added, in their order
//
// Rows are an odd number of 16-byte chunks apart in shared memory: eight lanes read eight rows without conflicts.
// R is fetched K-block by K-block beside h, or it is RESIDENT: all of it stays where the block has put it.
#pragma once
#include "recurrent_cell.cuh"
#include "tensor_core.cuh"

namespace cupyconv {

template <class T, int GATE_COUNT, int SAMPLE_COUNT, bool RESIDENT>
struct RecurrentTile {
    using A = Accumulator<T>;
    static constexpr int THREADS = 256, WARPS = THREADS / 32;
    static constexpr int UNIT_WARPS = SAMPLE_COUNT == 8 ? 4 : 1, K_WARPS = WARPS / UNIT_WARPS;
    static constexpr int ROWS = 4 * SAMPLE_COUNT, UNITS = 8 * UNIT_WARPS, PAIRS = ROWS * UNITS;
    static constexpr int CHUNK = 16 / sizeof(T), STATE_CHUNK = 16 / sizeof(A);
    static constexpr int CHUNKS_A_WARP = 2, K = K_WARPS * CHUNKS_A_WARP * CHUNK;
    static constexpr int STAGES = RESIDENT ? 4 : 3;
    static constexpr int WEIGHT_PITCH = K + CHUNK, STATE_PITCH = K + STATE_CHUNK;
    static constexpr int PAIRS_A_THREAD = (PAIRS + THREADS - 1) / THREADS;

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

    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int lane_unit() { return threadIdx.x % 8; }
    static __device__ __forceinline__ int lane_sample() { return threadIdx.x / 8 % 4; }

    // The i-th pair of a sample and a unit that this thread finishes; pairs are numbered as the lanes hold them.
    __device__ __forceinline__ Unit unit(int i, int step) const {
        const int pair = i * THREADS + threadIdx.x;
        const int u = pair / 32 % UNIT_WARPS * 8 + pair % 8, n = pair / (32 * UNIT_WARPS) * 4 + pair / 8 % 4;
        Unit found = unit_at(params, d, n_first + n, u_first + u, step);
        if (pair >= PAIRS) found.inside = found.valid = false;
        return found;
    }

    // `columns` of some gates' rows of R, from k_first on, into rows `pitch` apart; zeros beyond its end.
    __device__ __forceinline__ void fetch_weight(T* to, int pitch, int k_first, int columns, int first_gate) const {
        const int chunks = columns / CHUNK;
        for (int i = threadIdx.x; i < GATE_COUNT * UNITS * chunks; i += THREADS) {
            const int row = i / chunks, k = k_first + i % chunks * CHUNK, u = u_first + row % UNITS;
            T* const at = to + row * pitch + i % chunks * CHUNK;
            const long long gate_row = (long long)(first_gate + row / UNITS) * params.hidden + u;
            const T* const from = element_at<T>(params.weight, d, u < params.hidden ? gate_row : 0, 0);
            if (params.weight_packed) {
                copy_async<16>(at, from + k, u < params.hidden && k < params.hidden);
            } else {
#pragma unroll
                for (int e = 0; e < CHUNK; ++e)
                    at[e] = u < params.hidden && k + e < params.hidden ? from[(k + e) * params.weight.stride_u] : T{};
            }
        }
    }

    // A K-block of the state before a step, or, of a gru that resets before the product, of q.
    __device__ __forceinline__ void fetch_state(A* to, const A* rows, int k_first) const {
        constexpr int CHUNKS = K / STATE_CHUNK;
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, k = k_first + i % CHUNKS * STATE_CHUNK, n = n_first + row;
            A* const at = to + row * STATE_PITCH + i % CHUNKS * STATE_CHUNK;
            const bool exists = n < params.batch;
            if (rows && params.states_packed) {
                copy_async<16>(at, rows + (long long)(exists ? n : 0) * params.hidden + k, exists && k < params.hidden);
                continue;
            }
#pragma unroll
            for (int e = 0; e < STATE_CHUNK; ++e) {
                const bool inside = exists && k + e < params.hidden;
                at[e] = !inside ? A(0) : rows ? rows[(long long)n * params.hidden + k + e] : value_at<T>(params.h0, d, n, k + e);
            }
        }
    }

    // The product with these rows, or with h0 where they are null; then f(i, sums) for each pair of the thread.
    // `resident`: R's rows as fetch_weight has put them, `pitch` apart.
    template <class F>
    __device__ __forceinline__ void multiply(Shared& shared, const A* rows, const T* resident, int pitch, F f) const {
        const int blocks = (params.hidden + K - 1) / K;
        const auto fetch = [&](int i) {
            Stage& stage = shared.stage[i % STAGES];
            if (!RESIDENT) fetch_weight(stage.weight, WEIGHT_PITCH, i * K, K, CellStep<T, GATE_COUNT>::first_gate(params));
            fetch_state(stage.state, rows, i * K);
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i < blocks) fetch(i);
            commit_copies();
        }
        A sum[SAMPLE_COUNT][GATE_COUNT] = {};
        const int unit_row = warp() % UNIT_WARPS * 8 + lane_unit(), k_warp = warp() / UNIT_WARPS;
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();  // everyone's copies of block i are there, and block i - 1 has been used
            if (i + STAGES - 1 < blocks) fetch(i + STAGES - 1);
            commit_copies();
            const Stage& stage = shared.stage[i % STAGES];
            const T* const weight = RESIDENT ? resident + i * K : stage.weight;
            add_products(sum, weight + unit_row * (RESIDENT ? pitch : WEIGHT_PITCH), RESIDENT ? pitch : WEIGHT_PITCH,
                         stage.state + lane_sample() * STATE_PITCH, k_warp * CHUNK);
        }
        wait_for_copies<0>();
        __syncthreads();  // the stages are free

        const int unit_warp = warp() % UNIT_WARPS, lane = threadIdx.x % 32;
#pragma unroll
        for (int s = 0; s < SAMPLE_COUNT; ++s)
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g)
                shared.partial[(k_warp * GATE_COUNT + g) * PAIRS + (s * UNIT_WARPS + unit_warp) * 32 + lane] = sum[s][g];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PAIRS_A_THREAD; ++i) {
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

  private:
    // A warp's chunks of a K-block; `weight` and `state` begin with the thread's unit and first sample.
    static __device__ __forceinline__ void add_products(
        A (&sum)[SAMPLE_COUNT][GATE_COUNT], const T* weight, int pitch, const A* state, int k_first) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS_A_WARP; ++chunk) {
            const int k = k_first + chunk * K_WARPS * CHUNK;
            Packet<T, CHUNK> w[GATE_COUNT];
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) w[g] = load_packet<CHUNK>(weight + g * UNITS * pitch + k);
#pragma unroll
            for (int s = 0; s < SAMPLE_COUNT; ++s) {
#pragma unroll
                for (int part = 0; part < CHUNK; part += STATE_CHUNK) {
                    const Packet<A, STATE_CHUNK> h = load_packet<STATE_CHUNK>(state + s * 4 * STATE_PITCH + k + part);
#pragma unroll
                    for (int e = 0; e < STATE_CHUNK; ++e)
#pragma unroll
                        for (int g = 0; g < GATE_COUNT; ++g) add_product(sum[s][g], h.lane[e], widen(w[g].lane[part + e]));
                }
            }
        }
    }
};

}  // namespace cupyconv
