"""A CUDA device for machines that have none: kernels compiled for the host, cuBLAS calls in NumPy.

::

    device = HostDevice()
    x = device.asarray([1.0, 2.0])
    device.launch(kernel, grid, block, params, shared_bytes)

=====================  ===================================================================================
`device.py`            memory with guard zones, launches, the log of what was enqueued
`blas.py`              cublasGemmStridedBatchedEx with cuBLAS's own argument checks
`build.py`             one shared library for each kernel variant, cached
`cuda_on_host.h`       CUDA as ordinary C++, with `math_on_host.h` and `half_on_host.h`; `tensor_core_on_host.h`
                       has asynchronous copies and tensor cores
`fibres.cpp`           the runtime: threads as fibres that switch where they wait
`sanitize.py`          the command that runs the tests under a sanitizer
`seeded_bugs/`         kernels that are wrong on purpose, and the few right ones beside them
`tensor_core/`         kernels that try `kernels/tensor_core.cuh`, right unless a macro makes them wrong
=====================  ===================================================================================

It shows wrong indices, missing or divergent barriers, reads of memory nobody wrote, wrong arguments, and
(under sanitizers) data races.  It cannot show what memory bandwidth, bank conflicts, occupancy, weak memory
ordering or cuBLAS's own rounding do: that takes a GPU.
"""

from __future__ import annotations

import os

from .build import CompileError, unavailable
from .device import GemmRecord, HostArray, HostDevice, KernelError, LaunchRecord

__all__ = [
    "CompileError",
    "GemmRecord",
    "HostArray",
    "HostDevice",
    "KernelError",
    "LaunchRecord",
    "require",
    "unavailable",
]


def require() -> None:
    """Skip the calling test module where kernels cannot be compiled for the host.

    With CUPYCONV_REQUIRE_HOST_DEVICE=1 that is a failure: a run that must not skip them says so.
    """
    import pytest

    reason = unavailable()
    if reason is None:
        return
    if os.environ.get("CUPYCONV_REQUIRE_HOST_DEVICE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
