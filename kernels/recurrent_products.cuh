// A warp's part of a recurrent product, accumulated in registers, on CUDA cores or on tensor cores.
//
//     sum[n, g, u] += sum_k  h[n, k] * R[(g, u), k]
//
//     per call: 4 * SAMPLES samples x 8 units x GATES gates, STEP of k
//
// Both operands are contiguous along k in shared memory: R in its type T, h in the type of the sums.  In all variants,
// one thread has all gates of a unit.  `for_each` calls f(n, u, sums of all gates) for each pair (n, u) of the lane.
#pragma once
#include "numeric.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

namespace cupyconv {

// CUDA cores: 4 x 8 lanes.  Each lane has SAMPLES samples, 4 apart, of one unit, and loads 16 bytes of k at a time.
template <class T, int GATE_COUNT, int SAMPLE_COUNT, int ARITHMETIC_KIND>
struct RecurrentProducts {
    using A = Accumulator<T>;
    static constexpr int CHUNK = 16 / sizeof(T), STATE_CHUNK = 16 / sizeof(A), STEP = 2 * CHUNK;
    static constexpr int STATE_PAD = STATE_CHUNK;  // padding after a row: lanes read four rows, each broadcast
    A sum[SAMPLE_COUNT][GATE_COUNT] = {};

    static __device__ __forceinline__ int sample() { return threadIdx.x / 8 % 4; }
    static __device__ __forceinline__ int unit() { return threadIdx.x % 8; }

    // `weight` and `state` begin with the warp's first unit and sample.  Rows of gates are `gate_pitch` elements apart.
    __device__ __forceinline__ void add(const T* weight, int pitch, int gate_pitch, const A* state, int state_pitch) {
        weight += unit() * pitch;
        state += sample() * state_pitch;
#pragma unroll
        for (int k = 0; k < STEP; k += CHUNK) {
            Vector<T, CHUNK> w[GATE_COUNT];
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) w[g] = load_vector<CHUNK>(weight + g * gate_pitch + k);
#pragma unroll
            for (int s = 0; s < SAMPLE_COUNT; ++s) {
#pragma unroll
                for (int part = 0; part < CHUNK; part += STATE_CHUNK) {
                    const Vector<A, STATE_CHUNK> h = load_vector<STATE_CHUNK>(state + s * 4 * state_pitch + k + part);
#pragma unroll
                    for (int e = 0; e < STATE_CHUNK; ++e)
#pragma unroll
                        for (int g = 0; g < GATE_COUNT; ++g)
                            add_product(sum[s][g], h.lane[e], widen(w[g].lane[part + e]));
                }
            }
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int s = 0; s < SAMPLE_COUNT; ++s) f(s * 4 + sample(), unit(), sum[s]);
    }
};

// Tensor cores: 16 samples x 8 units of a gate x 32 bytes of k per instruction.
template <class T, int GATE_COUNT, int SAMPLE_COUNT>
struct TensorProducts {
    static_assert(SAMPLE_COUNT % 4 == 0, "instructions of 16 samples");
    static constexpr int CHUNK = 16 / sizeof(T), STEP = 2 * CHUNK, TILES = SAMPLE_COUNT / 4;
    float sum[TILES][GATE_COUNT][4] = {};

    static __device__ __forceinline__ void load_weight(
        unsigned (&w)[GATE_COUNT][2], const T* weight, int pitch, int gate_pitch) {
#pragma unroll
        for (int g = 0; g < GATE_COUNT; g += 2) {  // two gates per load; an odd last gate is loaded twice
            unsigned four[4];
            const int gate = min(g + lane_index() / 16, GATE_COUNT - 1);
            load_matrices(four, weight + gate * gate_pitch + lane_index() % 8 * pitch + lane_index() / 8 % 2 * CHUNK);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (g + i / 2 < GATE_COUNT) w[g + i / 2][i % 2] = four[i];
        }
    }

    template <class F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float gates[GATE_COUNT];
#pragma unroll
                for (int g = 0; g < GATE_COUNT; ++g) gates[g] = sum[tile][g][e];
                f(tile * 16 + lane_index() / 4 + e / 2 * 8, lane_index() % 4 * 2 + e % 2, gates);
            }
    }
};

// For 16-bit weights.  h is a float32 and is split into two parts:
//
//     h = high + low,   high: h rounded to 16 bits,   low: the rest, rounded       h * w ~ low * w + high * w
//
// The part of h that is lost is 2^-22 in float16 and 2^-16 in bfloat16.  If high is infinite (in float16 from 65520
// on), low is 0, since inf - inf would be NaN.
template <class T, int GATE_COUNT, int SAMPLE_COUNT>
struct RecurrentProducts<T, GATE_COUNT, SAMPLE_COUNT, MMA> : TensorProducts<T, GATE_COUNT, SAMPLE_COUNT> {
    using Base = TensorProducts<T, GATE_COUNT, SAMPLE_COUNT>;
    static constexpr int STATE_PAD = 8;  // half a warp reads pairs of floats of four rows, which fill all banks once

    __device__ __forceinline__ void add(
        const T* weight, int pitch, int gate_pitch, const float* state, int state_pitch) {
        unsigned w[GATE_COUNT][2];
        Base::load_weight(w, weight, pitch, gate_pitch);
        state += lane_index() / 4 * state_pitch + lane_index() % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < Base::TILES; ++tile) {
            Vector<float, 2> h[4];
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) h[i] = load_vector<2>(state + (tile * 16 + i % 2 * 8) * state_pitch + i / 2 * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) split(h[i], high[i], low[i]);
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) {
                multiply_add<T>(this->sum[tile][g], low, w[g]);
                multiply_add<T>(this->sum[tile][g], high, w[g]);
            }
        }
    }

  private:
    static __device__ __forceinline__ void split(const Vector<float, 2>& h, unsigned& high, unsigned& low) {
        T rounded[2], rest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rounded[i] = narrow<T>(h.lane[i]);
            const float back = widen(rounded[i]);
            rest[i] = narrow<T>(back - back == 0.0f ? h.lane[i] - back : 0.0f);
        }
        high = word_of(rounded, 0);
        low = word_of(rest, 0);
    }
};

// For float32, if it may be rounded to TF32: 11 significant bits of either factor.
template <int GATE_COUNT, int SAMPLE_COUNT>
struct RecurrentProducts<float32, GATE_COUNT, SAMPLE_COUNT, TF32> : TensorProducts<float32, GATE_COUNT, SAMPLE_COUNT> {
    using Base = TensorProducts<float32, GATE_COUNT, SAMPLE_COUNT>;
    static constexpr int STATE_PAD = 4;

    __device__ __forceinline__ void add(
        const float* weight, int pitch, int gate_pitch, const float* state, int state_pitch) {
        unsigned w[GATE_COUNT][2];
        Base::load_weight(w, weight, pitch, gate_pitch);
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g)
#pragma unroll
            for (int i = 0; i < 2; ++i) w[g][i] = round_to_tf32(w[g][i]);
#pragma unroll
        for (int tile = 0; tile < Base::TILES; ++tile) {
            unsigned h[4];
            load_matrices(h, state + (tile * 16 + lane_index() % 16) * state_pitch + lane_index() / 16 * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) h[i] = round_to_tf32(h[i]);
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g) multiply_add<tf32>(this->sum[tile][g], h, w[g]);
        }
    }
};

// For float32, as three products of its parts, nearly as accurate as on CUDA cores.
template <int GATE_COUNT, int SAMPLE_COUNT>
struct RecurrentProducts<float32, GATE_COUNT, SAMPLE_COUNT, TF32X3> : TensorProducts<float32, GATE_COUNT, SAMPLE_COUNT> {
    using Base = TensorProducts<float32, GATE_COUNT, SAMPLE_COUNT>;
    static constexpr int STATE_PAD = 4;

    __device__ __forceinline__ void add(
        const float* weight, int pitch, int gate_pitch, const float* state, int state_pitch) {
        unsigned w[GATE_COUNT][2];
        Base::load_weight(w, weight, pitch, gate_pitch);
        SplitFragment<true, 2> w_parts[GATE_COUNT];
#pragma unroll
        for (int g = 0; g < GATE_COUNT; ++g) w_parts[g].take(w[g]);
#pragma unroll
        for (int tile = 0; tile < Base::TILES; ++tile) {
            unsigned h[4];
            load_matrices(h, state + (tile * 16 + lane_index() % 16) * state_pitch + lane_index() / 16 * 4);
            SplitFragment<true, 4> h_parts;
            h_parts.take(h);
            float partial[GATE_COUNT][4] = {};
#pragma unroll
            for (int p = 0; p < 3; ++p)
#pragma unroll
                for (int g = 0; g < GATE_COUNT; ++g) multiply_add<tf32>(partial[g], h_parts.part(p), w_parts[g].part(p));
#pragma unroll
            for (int g = 0; g < GATE_COUNT; ++g)
#pragma unroll
                for (int e = 0; e < 4; ++e) this->sum[tile][g][e] += partial[g][e];
        }
    }
};

}  // namespace cupyconv
