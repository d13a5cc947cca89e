// The parameters of every kernel in this folder.
#pragma once
#include "portable.cuh"

struct SampleParams {
    const float* x;
    float* y;
    int n;
};
