// Packs the weight into the order, and the K-slabs, in which implicit_gemm.cu reads it.
//
//     packed[g, slab, m, k] = weight[g * group_outputs + m, c(slab, k), t(slab, k)]       or packed[g, slab, k, m]
//
//     M = m (output channels of a group, padded to whole tiles)    no N    K = (run, t, c), see reduction.cuh
//
//     weight  m | c0t0 c0t1 c0t2 c1t0 ... |      packed  slab 0 | m0: c0t0 c1t0 c2t0 c3t0 ...
//               |                         |                     | m1: ...
//               any strides                              slab 1 | ...          zeros where K or M is padded
//
// A thread writes all taps of one (m, c).  Their elements are close together in most weights: the loads of one tap
// bring the next taps into the cache.  Without a conversion only bits are copied, so the type is only the size of an
// element.  float32 may be converted to operands of TF32 products, once here instead of in every warp that loads them:
// rounded, or split into two parts, of which the low one is stored one slab's K after the high one (tf32_split.cuh).
// complex64 may be conjugated, for the gradient of an input.
//
// Bound by memory.  Floor: twice the weight over the bandwidth.
//
// -D: DTYPE (bits16, bits32 or bits64)
#include "reduction.cuh"
#include "tensor_core.cuh"
#include "tf32_split.cuh"

namespace cupyconv {

// The conversion of an element.  ROUNDED and TWO_PARTS are for float32, CONJUGATED is for complex64.
enum PackedAs { AS_IT_IS, ROUNDED, TWO_PARTS, CONJUGATED };

// The part of the weight that one convolution of the grid uses: the same output and input channels, but other taps.
struct PhaseWeight {
    long long at;    // offset of its first element in the weight
    int kernel[3];
    int first_slab;  // within a group
};

struct PackWeightParams {
    Sources sources;  // only their `first` and `channels` are used
    Image weight;
    void* packed;
    long long stride_m, stride_k;  // within a slab; one of them is 1
    int groups, group_channels, group_outputs;
    int k_chunk, slab;   // channels that are copied together; K of a slab
    int slabs;           // of a group: for each phase the most of any group, added up
    int rows, channels;  // M and channels of a group, padded
    int packed_as;
    PhaseWeight phase[MAX_PHASES];  // indexed by blockIdx.z
};

}  // namespace cupyconv

using namespace cupyconv;

using T = DTYPE;
constexpr int MAX_BLOCK = 256;

extern "C" __global__ void __launch_bounds__(MAX_BLOCK) pack_weight(const __grid_constant__ PackWeightParams params) {
    const PhaseWeight& phase = params.phase[blockIdx.z];
    const int taps = product_of(phase.kernel);
    const Image& weight = params.weight;
    for (int g = blockIdx.y; g < params.groups; g += gridDim.y) {
        for (long long i = first_share(); i < (long long)params.rows * params.channels; i += share_step()) {
            const bool along_k = params.stride_k == 1;  // adjacent threads write adjacent elements
            const int m = along_k ? i / params.channels : i % params.rows;
            int c = along_k ? i % params.channels : i / params.rows;

            const int c_first = g * params.group_channels;
            Run run;
            int slab = phase.first_slab;  // first slab of the run
            const auto next_run = [&] {
                return run.next(
                    params.sources, c_first, c_first + params.group_channels, taps, params.k_chunk, params.slab);
            };
            bool found = next_run();
            while (found && c >= run.padded) {
                c -= run.padded;
                slab += run.slabs;
                found = next_run();
            }
            if (!found) continue;  // groups may have different padding

            const bool inside = m < params.group_outputs && c < run.channels;
            const T* const w_mc = static_cast<const T*>(weight.data) + phase.at +
                                  ((long long)g * params.group_outputs + m) * weight.stride_n +
                                  (params.sources.table[run.source].first + run.first + c - c_first) * weight.stride_c;
            const int block = block_channels(phase.kernel, run.padded, params.slab);  // of every block but the last
            const int before = c / block * block;
            const int channels = block_channels(phase.kernel, run.padded - before, params.slab);  // of this block
            c -= before;

            // A tap's positions in the weight and in the packed array follow from the previous tap's, without
            // divisions.
            const long long next_row = weight.stride[1] - phase.kernel[2] * weight.stride[2];
            const long long next_plane = weight.stride[0] - phase.kernel[1] * weight.stride[1];
            const long long slab_size = (long long)params.rows * params.slab * (params.packed_as == TWO_PARTS ? 2 : 1);
            const int whole = channels / params.slab, rest = channels % params.slab;
            const long long step = whole * slab_size + rest * params.stride_k;
            const long long next_slab = slab_size - params.slab * params.stride_k;
            const int slabs = (channels * taps + params.slab - 1) / params.slab;  // of the block
            int k = c % params.slab, left = slabs - c / params.slab, h = 0, w = 0;
            slab += before / params.slab * taps + c / params.slab;
            const T* from = w_mc;
            T* to = static_cast<T*>(params.packed) + ((long long)g * params.slabs + slab) * slab_size +
                    m * params.stride_m + k * params.stride_k;
            for (int t = 0; left > 0; ++t) {
                T value = inside && t < taps ? *from : T{};
                if constexpr (sizeof(T) == 4) {
                    if (params.packed_as == ROUNDED) value = round_to_tf32(value);
                    if (params.packed_as == TWO_PARTS) {
                        const Split<true> split(value);
                        value = split.high;
                        to[params.slab] = split.low;
                    }
                }
                if constexpr (sizeof(T) == 8)
                    // Flip the sign of the imaginary part.
                    if (params.packed_as == CONJUGATED) value ^= T(1) << (8 * sizeof(T) - 1);
                *to = value;
                from += weight.stride[2];
                if (++w == phase.kernel[2]) {
                    w = 0;
                    from += next_row;
                    if (++h == phase.kernel[1]) {
                        h = 0;
                        from += next_plane;
                    }
                }
                to += step;
                left -= whole;
                k += rest;
                if (k >= params.slab) {
                    k -= params.slab;
                    to += next_slab;
                    --left;
                }
            }
        }
    }
}
