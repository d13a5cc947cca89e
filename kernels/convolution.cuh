// The parameters of a convolution computed without columns.
#pragma once
#include "epilogue.cuh"
#include "prologue.cuh"

namespace cupyconv {

struct ConvolutionParams {
    Sources sources;
    Windows windows;
    Image weight;  // n is the output, c the channel of its group
    Image out;
    Epilogue epilogue;
    Prologue prologue;
    long long batch;
    int groups, group_channels, group_outputs;
};

}  // namespace cupyconv
