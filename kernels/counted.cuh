// The number of taps of a window that count for a mean: the taps within a box, which is the image or the padded image.
//
//     box             first |<----------->| end
//     taps          x   x   x   x                  2 taps count: the window begins before the box (so on each axis)
#pragma once
#include "image.cuh"

namespace cupyconv {

struct Counted {
    long long first[3], end[3];
};

// The number of taps before `place`, if taps are `step` apart and begin at `start`.
__device__ __forceinline__ long long taps_before(long long start, long long place, long long step) {
    return place > start ? (place - start + step - 1) / step : 0;
}

__device__ __forceinline__ long long taps_counted(const Windows& windows, const Counted& counted, const Pixel& window) {
    long long taps = 1;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        const long long start = window.at[a] * windows.stride[a] - windows.before[a], step = windows.dilation[a];
        const long long before = taps_before(start, counted.first[a], step);
        long long upto = taps_before(start, counted.end[a], step);
        if (upto > windows.kernel[a]) upto = windows.kernel[a];
        taps *= upto > before ? upto - before : 0;
    }
    return taps;
}

}  // namespace cupyconv
