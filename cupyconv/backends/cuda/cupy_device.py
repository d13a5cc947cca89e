"""The device seam on a real GPU, through CuPy.

cuBLAS is deterministic only while a handle, which owns its workspace, serves one stream at a time.  So
each device, thread and stream has its own, kept in a small cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.libs import cublas

from cupyconv.backends.cuda.device import GemmArguments
from cupyconv.backends.cuda.kernel_sources import compile_options, kernel_source
from cupyconv.machine import GpuModel, nearest_gpu
from cupyconv.plan import Kernel

#: Handles kept for the streams of one thread.  One takes megabytes, up to 32 on Hopper, and destroying
#: one waits for the GPU, so a thread that cycles through more streams than this pays for it.
_HANDLES = 16
#: Compute in the type asked for: no 16-bit reductions in split products.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_DEFAULT_ALGORITHM = -1


class CupyDevice:
    """One GPU."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.capability = int(cupy.cuda.Device(ordinal).compute_capability)
        self._functions: dict[Kernel, Any] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self.model = self._model()

    def _model(self) -> GpuModel:
        """The class's rates with this GPU's own name and multiprocessors."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.ordinal)
        known = nearest_gpu(self.capability)
        name = properties["name"]
        return GpuModel(
            **{
                **vars(known),
                "name": name.decode() if isinstance(name, bytes) else name,
                "arch": f"sm_{self.capability}",
                "multiprocessors": properties["multiProcessorCount"],
            }
        )

    def current(self) -> Any:
        return cupy.cuda.Device(self.ordinal)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return cupy.empty(shape, dtype)

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        return array.astype(dtype, order="C")

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], block: int, params: np.ndarray, shared_bytes: int
    ) -> None:
        self._function(kernel)(grid, (block, 1, 1), (params,), shared_mem=shared_bytes)

    def _function(self, kernel: Kernel) -> Any:
        function = self._functions.get(kernel)
        if function is None:
            with self._lock:
                if kernel not in self._functions:
                    module = cupy.RawModule(
                        code=kernel_source(kernel.name), options=compile_options(kernel.macros), backend="nvrtc"
                    )
                    self._functions[kernel] = module.get_function(kernel.name)
                function = self._functions[kernel]
        return function

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        stream = cupy.cuda.get_current_stream()
        if cupy.cuda.runtime.streamIsCapturing(stream.ptr):
            raise RuntimeError("cuBLAS calls cannot be captured in a graph through CuPy: use a method without one")
        cublas.gemmStridedBatchedEx(self._handle(stream.ptr), *arguments, _DEFAULT_ALGORITHM)

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


class _Handle:
    """A cuBLAS handle, and the workspace it owns, bound to one stream for good."""

    def __init__(self, stream: int) -> None:
        self.ordinal = cupy.cuda.runtime.getDevice()
        self.handle = _create_handle()
        cublas.setStream(self.handle, stream)
        cublas.setMathMode(self.handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
        cublas.setPointerMode(self.handle, cublas.CUBLAS_POINTER_MODE_HOST)

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", 0), 0
        if handle:
            with cupy.cuda.Device(self.ordinal):
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
