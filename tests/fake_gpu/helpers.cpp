// Fills cudaDeviceProp, whose layout Python does not know.
#include <cuda_runtime_api.h>

#include <cstring>

extern "C" void fill_properties(
    cudaDeviceProp* properties, const char* name, int capability, int multiprocessors, size_t memory, int shared_per_block,
    int shared_per_multiprocessor, int registers, int threads_per_block, int threads_per_multiprocessor) {
    std::memset(properties, 0, sizeof *properties);
    std::strncpy(properties->name, name, sizeof properties->name - 1);
    properties->major = capability / 10;
    properties->minor = capability % 10;
    properties->multiProcessorCount = multiprocessors;
    properties->totalGlobalMem = memory;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = shared_per_block;
    properties->sharedMemPerMultiprocessor = shared_per_multiprocessor;
    properties->regsPerBlock = properties->regsPerMultiprocessor = registers;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = threads_per_block;
    properties->maxThreadsPerMultiProcessor = threads_per_multiprocessor;
    properties->l2CacheSize = 1 << 20;
}
