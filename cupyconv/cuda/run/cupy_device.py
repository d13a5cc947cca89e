"""`Device` on a GPU, implemented with CuPy.

cuBLAS is deterministic only while a handle, which owns its workspace, serves one stream at a time.  So
each device, thread and stream has its own, kept in a small cache.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import cupy
import numpy as np
from cupy.cuda.function import CPointer
from cupy_backends.cuda.libs import cublas

from cupyconv.cuda.run.device import GemmArguments
from cupyconv.cuda.run.kernel_sources import compile_options, kernel_source
from cupyconv.problem.machine import GpuModel, nearest_gpu
from cupyconv.problem.plan import Kernel

#: Handles kept for the streams of one thread.  One takes megabytes, up to 32 on Hopper, and destroying
#: one waits for the GPU, so a thread that cycles through more streams than this pays for it.
_HANDLES = 16
#: Compute in the type asked for: no 16-bit reductions in split products.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_DEFAULT_ALGORITHM = -1
#: Dynamic shared memory in bytes that a launch may have on every GPU without the function being told.
_WITHOUT_ASKING = 48 << 10
#: NVTX ranges around every call, for Nsight and its like.
_SHOWN_TO_PROFILERS = os.environ.get("CUPYCONV_NVTX") == "1"

_NOTHING_TO_DO = nullcontext()


class CupyDevice:
    """One GPU."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.capability = int(cupy.cuda.Device(ordinal).compute_capability)
        self._functions: dict[Kernel, _LoadedKernel] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.model = self._model()

    def _model(self) -> GpuModel:
        """The class's rates with this GPU's own name and multiprocessors."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.ordinal)
        known = nearest_gpu(self.capability)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else name
        multiprocessors = properties["multiProcessorCount"]
        return replace(known, name=name, arch=f"sm_{self.capability}", multiprocessors=multiprocessors)

    def current(self) -> Any:
        # To enter a device's context costs more than to ask, and most often there is nothing to change.
        return _NOTHING_TO_DO if cupy.cuda.runtime.getDevice() == self.ordinal else cupy.cuda.Device(self.ordinal)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return cupy.ndarray(shape, dtype)

    def empty_in_graph(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        # Not of the pool, which would give the same memory to others while the graph still writes to it.
        return cupy.ndarray(shape, dtype, cupy.cuda.malloc_async(prod(shape) * dtype.itemsize))

    def from_host(self, array: np.ndarray) -> Any:
        return cupy.asarray(array)

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        return array.astype(dtype, order="C")

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        return tuple([(a.dtype, a.shape, a.strides, a.data.ptr & 15, a.data.device_id) for a in arrays])

    def is_capturing(self) -> bool:
        return cupy.cuda.get_current_stream().is_capturing()

    def load(self, kernel: Kernel, shared_bytes: int) -> Any:
        with self._lock, self.current():
            if kernel not in self._functions:
                module = cupy.RawModule(
                    code=kernel_source(kernel.name), options=compile_options(kernel.macros), backend="nvrtc"
                )
                self._functions[kernel] = _LoadedKernel(module.get_function(kernel.name))
            return self._functions[kernel].allow(shared_bytes)

    def argument(self, params: np.ndarray) -> Any:
        # What CuPy makes of a NumPy array at each launch; `params` outlives it.
        return (CPointer(params.ctypes.data),)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], block: int, params: Any, shared_bytes: int, cooperative: bool
    ) -> None:
        kernel(grid, (block, 1, 1), params, shared_bytes, None, cooperative)

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        cublas.gemmStridedBatchedEx(self._handle(stream), *arguments, _DEFAULT_ALGORITHM)

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        if not _SHOWN_TO_PROFILERS:
            return function

        def in_range(argument: Any) -> None:
            cupy.cuda.nvtx.RangePush(f"cupyconv {label}")
            try:
                function(argument)
            finally:
                cupy.cuda.nvtx.RangePop()

        return in_range

    def _handle(self, stream: int) -> int:
        """The current thread's handle for a stream of this device."""
        handles: OrderedDict[int, _Handle] | None = getattr(self._local, "handles", None)
        if handles is None:
            handles = self._local.handles = OrderedDict()
        if stream in handles:
            handles.move_to_end(stream)
        else:
            handles[stream] = _Handle(stream)
            if len(handles) > _HANDLES:
                handles.popitem(last=False)
        return handles[stream].handle


class _LoadedKernel:
    """One compiled variant, and the most dynamic shared memory that a launch of it was allowed."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._allowed = _WITHOUT_ASKING

    def allow(self, shared_bytes: int) -> Any:
        """The function itself, without the wrapper that looks for the current device's at every launch."""
        if shared_bytes > self._allowed:  # never lowered: other plans launch the same function
            self._raw.max_dynamic_shared_size_bytes = shared_bytes
            self._allowed = shared_bytes
        return self._raw.kernel


class _Handle:
    """A cuBLAS handle, and the workspace it owns, bound to one stream for good."""

    def __init__(self, stream: int) -> None:
        self.handle = _create_handle()
        # At the interpreter's end nothing is destroyed: the process gives back all of it, and CuPy may be gone.
        weakref.finalize(self, _destroy_handle, self.handle, cupy.cuda.runtime.getDevice()).atexit = False
        cublas.setStream(self.handle, stream)
        cublas.setMathMode(self.handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
        cublas.setPointerMode(self.handle, cublas.CUBLAS_POINTER_MODE_HOST)


def _destroy_handle(handle: int, ordinal: int) -> None:
    with cupy.cuda.Device(ordinal):
        cublas.destroy(handle)


def _create_handle() -> int:
    """A new handle; where CuPy's pool has left cuBLAS no memory for it, what the pool does not use is freed."""
    try:
        return cublas.create()
    except cublas.CUBLASError:
        cupy.get_default_memory_pool().free_all_blocks()
    try:
        return cublas.create()
    except cublas.CUBLASError as error:
        raise MemoryError(f"cuBLAS could not make a handle: {error}") from error
