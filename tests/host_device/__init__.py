"""A CUDA device for machines without a GPU: kernels compiled for the host, cuBLAS calls in NumPy.

::

    device = HostDevice()
    x = device.asarray([1.0, 2.0])
    device.launch(kernel, grid, block, params, shared_bytes)

=====================  ===================================================================================
`device.py`            memory with guard zones, launches, the log of enqueued work
`blas.py`              cublasGemmStridedBatchedEx with cuBLAS's own argument checks
`build.py`             one shared library per kernel variant, cached
`cuda_on_host.h`       CUDA as ordinary C++, with `math_on_host.h` and `half_on_host.h`; `tensor_core_on_host.h`
                       has asynchronous copies and tensor cores
`fibres.cpp`           the runtime: threads are fibres that switch when they wait
`sanitize.py`          the command that runs the tests under a sanitizer
`seeded_bugs/`         kernels with deliberate bugs, and a few correct ones for comparison
`tensor_core/`         kernels that test `kernels/tensor_core.cuh`, correct unless a macro adds a bug
=====================  ===================================================================================

The host device detects wrong indices, missing or divergent barriers, reads of unwritten memory, wrong arguments, and
(under sanitizers) data races.  It cannot show the effects of memory bandwidth, bank conflicts, occupancy, weak memory
ordering or cuBLAS's own rounding: these need a GPU.
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
    """Skip the calling test module if kernels cannot be compiled for the host.

    With CUPYCONV_REQUIRE_HOST_DEVICE=1 this is a failure instead, for runs that must not skip these tests.
    """
    import pytest

    reason = unavailable()
    if reason is None:
        return
    if os.environ.get("CUPYCONV_REQUIRE_HOST_DEVICE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
