// The parameters of every kernel in this folder.
#pragma once
#include "tensor_core.cuh"

struct SampleParams {
    const void *a, *b;
    const void* sum;
    void* result;
};

// TO[i] = FROM[i] for as many elements as TO has, by all threads of the block.
template <class T, int COUNT>
__device__ void copy_to_shared(T (&to)[COUNT], const void* from) {
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) to[i] = static_cast<const T*>(from)[i];
}
