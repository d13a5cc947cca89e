// The parameters of every kernel in this folder.
#pragma once
#include "tensor_core.cuh"

struct SampleParams {
    const void *a, *b;
    const void* sum;
    void* result;
};

// Copies as many elements as TO has from FROM, by all threads of the block.
template <class T, int COUNT>
__device__ void copy_to_shared(T (&to)[COUNT], const void* from) {
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) to[i] = static_cast<const T*>(from)[i];
}
