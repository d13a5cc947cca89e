// Exports the two symbols of a kernel that build.py looks up: a plain call, and the size of its parameter struct.
#pragma once

#include "fibres.h"

namespace cuda_on_host {

template <class Params>
Params parameter_of(void (*kernel)(Params));  // only declared, to name the struct in decltype

}  // namespace cuda_on_host

#define EXPORT_KERNEL(kernel)                                                                            \
    using KernelParams_ = decltype(cuda_on_host::parameter_of(&kernel));                                 \
    extern "C" __attribute__((visibility("default"))) void cuda_on_host_kernel(const void* params) {     \
        kernel(*static_cast<const KernelParams_*>(params));                                              \
    }                                                                                                    \
    extern "C" __attribute__((visibility("default"))) const size_t cuda_on_host_params_size = sizeof(KernelParams_);
