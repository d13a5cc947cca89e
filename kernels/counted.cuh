// How many taps of a window count for a mean: those within a box, which is the image, or the padded image.
//
//     box             first |<----------->| end
//     taps      x   x   x   x                      2 count, of windows that begin before the box; so along each axis
#pragma once
#include "image.cuh"

namespace cupyconv {

struct Counted {
    long long first[3], end[3];
};

// Taps of a window, `step` apart from `start` on, that lie before a place.
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
