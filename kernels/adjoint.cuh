// The windows that read a pixel, and the tap through which each reads it: the adjoint of `tap_pixel` in image.cuh.
//
// Along an axis, window p reads the padded element v = i + before through tap t if
//
//     p * stride + t * dilation = v
//
//     v         . . . . . V . . .
//     p = 0     t   t   t |             the solutions are one run: from one to the next the tap grows by `tap_step` and
//     p = 1       t   t   t   t         the window shrinks by `window_step`; with g = gcd(stride, dilation) these are
//     p = 2           t   t   t         stride / g and dilation / g
//
// In a padding mode other than zeros, several padded elements are copies of one pixel.  A window that reads any of them
// reads the pixel.
#pragma once
#include "image.cuh"

namespace cupyconv {

struct Adjoint {
    long long end[3];  // one past the last padded index that a window reads
    int tap_step[3], window_step[3];
};

// Along one axis: taps tap, tap + tap_step ... with windows window, window - window_step ..., `count` of them.
struct Readers {
    long long window;
    int tap, count;
};

// a / b for a >= 0.  A 64-bit division costs some seventy instructions, and is hardly ever needed.
__device__ __forceinline__ long long quotient(long long a, int b) {
    if (b == 1) return a;
    return a >> 31 ? a / b : (long long)((unsigned)a / (unsigned)b);
}

__device__ __forceinline__ Readers readers_of(const Windows& w, const Adjoint& adjoint, int axis, long long index) {
    const long long v = index + w.before[axis], last = w.out[axis] - 1;
    const int taps = min(w.kernel[axis], adjoint.tap_step[axis]);
    for (int tap = 0; tap < taps; ++tap) {
        const long long rest = v - (long long)tap * w.dilation[axis];
        if (rest < 0) break;
        const long long window = quotient(rest, w.stride[axis]);
        if (window * w.stride[axis] != rest) continue;
        const int steps = adjoint.window_step[axis];
        const long long skipped = window > last ? quotient(window - last + steps - 1, steps) : 0;
        const long long by_tap = quotient(w.kernel[axis] - 1 - tap, adjoint.tap_step[axis]);
        const long long count = min(by_tap, quotient(window, steps)) + 1 - skipped;
        const int first_tap = tap + int(min(skipped, by_tap)) * adjoint.tap_step[axis];
        return {window - skipped * steps, first_tap, int(max(count, 0LL))};
    }
    return {0, 0, 0};
}

// The padded indices that are copies of an index, the index included: from `at` on, with two alternating steps.
struct Copies {
    long long at, step, next_step, end;
    __device__ __forceinline__ bool valid() const { return at < end; }
    __device__ __forceinline__ void advance() {
        at += step;
        const long long taken = step;
        step = next_step;
        next_step = taken;
    }
};

// MAY_FOLD: whether an index may have copies other than itself.  With zeros as padding it has none.
template <bool MAY_FOLD>
__device__ __forceinline__ Copies copies_of(const Windows& w, const Adjoint& adjoint, int axis, long long i) {
    if (!MAY_FOLD) return {i, 1, 1, i + 1};
    const long long size = w.size[axis], first = -(long long)w.before[axis], end = adjoint.end[axis];
    if (w.padding_mode == EDGE) return {i == 0 ? first : i, 1, 1, i == size - 1 ? max(end, size) : i + 1};
    // In the other modes, copies repeat with a period.  In two of them, each period has a second, mirrored copy.
    const long long period =
        w.padding_mode == WRAP ? size : w.padding_mode == SYMMETRIC ? 2 * size : size > 1 ? 2 * (size - 1) : 1;
    const long long mirrored = w.padding_mode == WRAP ? i : w.padding_mode == SYMMETRIC ? period - 1 - i : period - i;
    const long long to_copy = (i - first) % period, to_mirrored = (mirrored - first) % period;
    const long long between = to_mirrored - to_copy;
    if (between == 0) return {first + to_copy, period, period, end};
    const long long near = between > 0 ? between : -between;
    return {first + min(to_copy, to_mirrored), near, period - near, end};
}

// Offsets of the readers along one axis in two arrays: one is indexed by taps, the other by windows.
struct Walk {
    long long tap, window, tap_step, window_step;
    int count;
};

__device__ __forceinline__ Walk walk_over(
    const Readers& readers, const Adjoint& adjoint, int axis, long long tap_stride, long long window_stride) {
    return {readers.tap * tap_stride, readers.window * window_stride, adjoint.tap_step[axis] * tap_stride,
            -adjoint.window_step[axis] * window_stride, readers.count};
}

// Call visit(tap offset, window offset) for every window that reads a pixel, always in the same order.  The strides are
// what a tap and a window along each axis add to these offsets.
template <bool MAY_FOLD, class F>
__device__ __forceinline__ void for_each_reader(
    const Windows& w, const Adjoint& adjoint, const Pixel& pixel, const long long (&tap_stride)[3],
    const long long (&window_stride)[3], const F& visit) {
    // The loops are not unrolled: three nested ones would need all registers.
#pragma unroll 1
    for (Copies a = copies_of<MAY_FOLD>(w, adjoint, 0, pixel.at[0]); a.valid(); a.advance()) {
        const Walk d = walk_over(readers_of(w, adjoint, 0, a.at), adjoint, 0, tap_stride[0], window_stride[0]);
#pragma unroll 1
        for (Copies b = copies_of<MAY_FOLD>(w, adjoint, 1, pixel.at[1]); b.valid(); b.advance()) {
            const Walk h = walk_over(readers_of(w, adjoint, 1, b.at), adjoint, 1, tap_stride[1], window_stride[1]);
#pragma unroll 1
            for (Copies c = copies_of<MAY_FOLD>(w, adjoint, 2, pixel.at[2]); c.valid(); c.advance()) {
                const Walk r = walk_over(readers_of(w, adjoint, 2, c.at), adjoint, 2, tap_stride[2], window_stride[2]);
                long long tap_d = d.tap + h.tap + r.tap, window_d = d.window + h.window + r.window;
#pragma unroll 1
                for (int i = 0; i < d.count; ++i, tap_d += d.tap_step, window_d += d.window_step) {
                    long long tap_h = tap_d, window_h = window_d;
#pragma unroll 1
                    for (int j = 0; j < h.count; ++j, tap_h += h.tap_step, window_h += h.window_step) {
                        long long tap_r = tap_h, window_r = window_h;
#pragma unroll 1
                        for (int k = 0; k < r.count; ++k, tap_r += r.tap_step, window_r += r.window_step)
                            visit(tap_r, window_r);
                    }
                }
            }
        }
    }
}

}  // namespace cupyconv
