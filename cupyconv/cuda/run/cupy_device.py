"""`Device` on a GPU, implemented with CuPy.

A cuBLAS handle owns its workspace, and cuBLAS is deterministic only while a handle serves one stream at a time.  So
each device, thread and stream has its own handle, in a small cache.  It also has its own cuFFT plans, which share one
work area.  (The plans that CuPy caches for `cupy.fft` move from stream to stream.)  In a graph, each transform works in
memory that the graph allocates.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial, wraps
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import cupy
import numpy as np
from cupy.cuda import driver, get_current_stream
from cupy_backends.cuda.libs import cublas

from cupyconv.cuda.run.device import GemmArguments, TransformArguments, more_to_work_in, no_transforms, too_many_blocks
from cupyconv.cuda.run.kernel_sources import compile_options, kernel_source
from cupyconv.problem.machine import GpuModel, nearest_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch

#: Handles cached for the streams of one thread.  A handle takes megabytes, up to 32 on Hopper.  Destroying one waits
#: for the GPU, so a thread that cycles through more streams than this waits often.
_HANDLES = 16
#: cuFFT plans cached per stream of one thread.
_TRANSFORMS = 64
#: Compute in the requested type: split products are not reduced in 16 bits.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_DEFAULT_ALGORITHM = -1
#: Bytes of dynamic shared memory that a launch may use on every GPU without a function attribute.
_WITHOUT_ASKING = 48 << 10
#: CUresult: the blocks of a cooperative launch do not all fit on the GPU at once.
_COOPERATIVE_LAUNCH_TOO_LARGE = 720
#: cudaError_t: out of memory.
_MEMORY_ALLOCATION = 2


def _shows_ranges() -> bool:
    """Return whether every call is an NVTX range for Nsight and other profilers: it is asked for, and CuPy has NVTX."""
    asked = os.environ.get("CUPYCONV_NVTX") == "1"
    if asked and not cupy.cuda.nvtx.available:
        warnings.warn("CUPYCONV_NVTX=1 has no effect: this CuPy was built without NVTX", RuntimeWarning, stacklevel=2)
        return False
    return asked


_SHOWN_TO_PROFILERS = _shows_ranges()

AllocatorT = TypeVar("AllocatorT", bound=Callable[..., Any])
#: An object that belongs to one stream of one thread.
OwnedT = TypeVar("OwnedT")


def _with_memory_errors(allocate: AllocatorT) -> AllocatorT:
    """Wrap `allocate` to raise MemoryError with every allocator of CuPy, so that a plan with less memory is tried.

    CuPy's memory pools raise a subclass of MemoryError.  ``cupy.cuda.malloc_async`` and ``malloc_managed`` raise the
    error of the CUDA runtime.
    """

    @wraps(allocate)
    def allocating(*arguments: Any) -> Any:
        try:
            return allocate(*arguments)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status != _MEMORY_ALLOCATION:
                raise
            raise MemoryError(str(error)) from error

    return cast(AllocatorT, allocating)


class CupyDevice:
    """One GPU."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.capability = int(cupy.cuda.Device(ordinal).compute_capability)
        self._functions: dict[Kernel, _LoadedKernel] = {}
        self._lock = threading.RLock()  # reentrant: a finalizer may call us while a kernel is loaded
        self._thread = _Thread()
        self.model = self._model()

    def _model(self) -> GpuModel:
        """Return the rates of the nearest known GPU with the name and multiprocessor count of this one."""
        properties = cupy.cuda.runtime.getDeviceProperties(self.ordinal)
        known = nearest_gpu(self.capability)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else name
        multiprocessors = properties["multiProcessorCount"]
        return replace(known, name=name, arch=f"sm_{self.capability}", multiprocessors=multiprocessors)

    def current(self) -> Any:
        # Entering a device's context takes longer than this test, and usually the device is current already.
        if cupy.cuda.runtime.getDevice() != self.ordinal:
            return cupy.cuda.Device(self.ordinal)
        return self._thread.nothing_to_do

    @_with_memory_errors
    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return cupy.ndarray(shape, dtype)

    @_with_memory_errors
    def empty_in_graph(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        # Not from the pool, which would give the same memory to other arrays while the graph still writes to it.
        return cupy.ndarray(shape, dtype, cupy.cuda.malloc_async(prod(shape) * dtype.itemsize))

    @_with_memory_errors
    def from_host(self, array: np.ndarray) -> Any:
        return cupy.asarray(array)

    @_with_memory_errors
    def convert(self, array: Any, dtype: np.dtype) -> Any:
        return array.astype(dtype, order="C")

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        return tuple([(a.dtype, a.shape, a.strides, a.data.ptr & 15, a.data.device_id) for a in arrays])

    def synchronize(self) -> None:
        get_current_stream(self.ordinal).synchronize()

    def is_capturing(self) -> bool:
        return get_current_stream(self.ordinal).is_capturing()

    def argument(self, params: np.ndarray) -> Any:
        # The driver takes an array of pointers to parameters, here just one.  `params` lives longer than this array.
        pointers = np.array([params.ctypes.data], np.uintp)
        return pointers.ctypes.data, pointers

    def load(self, launch: KernelLaunch) -> Callable[[Any], None]:
        # Call the driver directly: CuPy's `Function` takes three times as long.  It also shrinks a cooperative grid
        # that does not fit, with only a warning.
        ordinal, shared_bytes = self.ordinal, launch.shared_bytes
        with self._lock, self.current():
            function = self._function(launch.kernel, shared_bytes)
            if launch.cooperative:
                fitting = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, launch.block, shared_bytes)
                if launch.blocks > fitting * self.model.multiprocessors:
                    raise too_many_blocks(self, launch, fitting * self.model.multiprocessors)
        shape = (function, *launch.grid, launch.block, 1, 1, shared_bytes)
        launch_kernel = partial(driver.launchKernel, *shape)
        launch_together = partial(driver.launchCooperativeKernel, *shape)

        def enqueue(argument: Any) -> None:
            launch_kernel(get_current_stream(ordinal).ptr, argument[0], 0)

        def enqueue_together(argument: Any) -> None:
            try:
                launch_together(get_current_stream(ordinal).ptr, argument[0])
            except driver.CUDADriverError as error:
                if error.status != _COOPERATIVE_LAUNCH_TOO_LARGE:
                    raise
                # We have less of the GPU than it reports.  Nothing tells how much less, so half of the blocks is tried.
                raise too_many_blocks(self, launch, launch.blocks // 2) from error

        return enqueue_together if launch.cooperative else enqueue

    def _function(self, kernel: Kernel, shared_bytes: int) -> int:
        """Return the handle of the compiled function, with this much dynamic shared memory allowed."""
        if kernel not in self._functions:
            module = cupy.RawModule(
                code=kernel_source(kernel.name), options=compile_options(kernel.macros), backend="nvrtc"
            )
            self._functions[kernel] = _LoadedKernel(module.get_function(kernel.name))
        return self._functions[kernel].allow(shared_bytes)

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        stream = get_current_stream(self.ordinal).ptr
        cublas.gemmStridedBatchedEx(self._handle(stream), *arguments, _DEFAULT_ALGORITHM)

    def load_transform(self, arguments: TransformArguments, work_bytes: int) -> Callable[[int, int], None]:
        try:
            from cupy.cuda import cufft  # loads the library on its first import
        except ImportError as error:
            raise no_transforms(self, str(error)) from error

        def transforms() -> _Transforms:
            """Return the transforms of the current stream and thread."""
            return self._kept(self._thread.transforms, get_current_stream(self.ordinal).ptr, _Transforms)

        def plan() -> Any:
            return transforms().plan(arguments, cufft.PlanNd, partial(self._check_work_area, counted=work_bytes))

        def enqueue(source: int, target: int) -> None:
            if self.is_capturing():
                transforms().capture(arguments, source, target)
            else:
                plan().fft(_Place(source), _Place(target), arguments.direction)

        with self.current():
            if not self.is_capturing():
                plan()  # if it needs more memory than counted, the whole call is planned again before any step runs
        return enqueue

    def check_captured(self, transforms: Sequence[TransformArguments]) -> None:
        of_stream = self._thread.transforms.get(get_current_stream(self.ordinal).ptr, _NO_TRANSFORMS)
        if any(arguments not in of_stream for arguments in transforms):
            raise RuntimeError(
                "cuFFT cannot create a plan during a capture: make the same call once before, in this thread and on this stream"
            )

    def _check_work_area(self, nbytes: int, *, counted: int) -> None:
        if nbytes > counted:
            raise more_to_work_in(self, nbytes, counted)

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
        """Return the handle of the current thread for a stream of this device."""
        return self._kept(self._thread.handles, stream, lambda: _Handle(stream)).handle

    @staticmethod
    def _kept(of_streams: OrderedDict[int, OwnedT], stream: int, make: Callable[[], OwnedT]) -> OwnedT:
        """Return the current thread's object for a stream of this device, made on first use."""
        if stream in of_streams:
            of_streams.move_to_end(stream)
        else:
            of_streams[stream] = make()
            if len(of_streams) > _HANDLES:
                of_streams.popitem(last=False)
        return of_streams[stream]


class _LoadedKernel:
    """One compiled variant, and the most dynamic shared memory that its launches have been allowed so far."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._allowed = _WITHOUT_ASKING

    def allow(self, shared_bytes: int) -> int:
        """Allow this much dynamic shared memory, and return the driver's handle of the function."""
        if shared_bytes > self._allowed:  # never lowered, since other plans launch the same function
            self._raw.max_dynamic_shared_size_bytes = shared_bytes
            self._allowed = shared_bytes
        return self._raw.kernel.ptr


class _Thread(threading.local):
    """The state of a device per thread, made when a thread first uses the device, which is current then."""

    def __init__(self) -> None:
        self.handles: OrderedDict[int, _Handle] = OrderedDict()
        self.transforms: OrderedDict[int, _Transforms] = OrderedDict()
        self.nothing_to_do = nullcontext()
        # A thread that has not called the CUDA runtime has no context.  Driver calls need one and do not create it.
        cupy.cuda.runtime.memGetInfo()


class _Handle:
    """A cuBLAS handle with its workspace, bound to one stream for its whole life."""

    def __init__(self, stream: int) -> None:
        self.handle = _create_handle()
        # Nothing is destroyed at interpreter exit: the process frees everything, and CuPy may be gone already.
        weakref.finalize(self, _destroy_handle, self.handle, cupy.cuda.runtime.getDevice()).atexit = False
        cublas.setStream(self.handle, stream)
        cublas.setMathMode(self.handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
        cublas.setPointerMode(self.handle, cublas.CUBLAS_POINTER_MODE_HOST)


class _Place:
    """An address with the attributes of an array that CuPy's cuFFT plans read."""

    __slots__ = ("ptr",)

    def __init__(self, address: int) -> None:
        self.ptr = address

    @property
    def data(self) -> _Place:
        return self


class _Transform(NamedTuple):
    """A cuFFT plan of CuPy, and the size of its work area."""

    plan: Any
    nbytes: int

    def work_in(self, area: Any) -> None:
        """Set the work area of the plan, by a cuFFT function that CuPy does not expose."""
        if status := _cufft().cufftSetWorkArea(ctypes.c_int(self.plan.handle), ctypes.c_void_p(area.ptr)):
            raise RuntimeError(f"cufftSetWorkArea failed with cufftResult {status}")


class _Transforms:
    """The cuFFT plans of one stream; they run one after the other, so that all share one work area."""

    def __init__(self) -> None:
        self._plans: OrderedDict[TransformArguments, _Transform] = OrderedDict()
        self._work_area: Any = None

    def __contains__(self, arguments: TransformArguments) -> bool:
        return arguments in self._plans

    def plan(self, arguments: TransformArguments, make: Callable[..., Any], check: Callable[[int], None]) -> Any:
        """Return the plan for a transform, or raise MemoryError; `check` gets the size of its work area first."""
        if arguments in self._plans:
            self._plans.move_to_end(arguments)
            return self._plans[arguments].plan
        *layout, _direction = arguments
        allocate = cupy.cuda.get_allocator()
        asked: int | None = None

        def allocated(nbytes: int) -> Any:
            nonlocal asked
            if asked is not None:  # a finalizer allocates meanwhile: not for the plan
                return allocate(nbytes)
            asked = nbytes
            check(nbytes)
            return self._lent(nbytes, allocate)

        with cupy.cuda.using_allocator(allocated):
            plan = make(*layout, "C", len(arguments.size) - 1, None)
        self._plans[arguments] = _Transform(plan, asked or 0)
        if len(self._plans) > _TRANSFORMS:
            self._plans.popitem(last=False)
        return plan

    def capture(self, arguments: TransformArguments, source: int, target: int) -> None:
        """Capture the transform; the graph allocates and frees a work area per launch, and the plan is never freed."""
        transform = self._plans[arguments]
        area = cupy.cuda.malloc_async(transform.nbytes)
        transform.work_in(area)
        _IN_GRAPHS[transform.plan.handle] = transform.plan
        transform.plan.fft(_Place(source), _Place(target), arguments.direction)
        transform.work_in(self._work_area)

    @_with_memory_errors
    def _lent(self, nbytes: int, allocate: Callable[[int], Any]) -> Any:
        """Return the shared work area for a new plan; if it is too small, replace it and drop all other plans."""
        if self._work_area is None or self._work_area.mem.size < nbytes:
            self._plans.clear()
            self._work_area = None
            self._work_area = allocate(nbytes)
        # The plan does not own the area, since a plan in a graph lives longer.
        mem = self._work_area.mem
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(self._work_area.ptr, nbytes, None, mem.device_id), 0)


#: For a stream without transforms.
_NO_TRANSFORMS = _Transforms()
#: Plans in graphs, by handle.  They are never removed, because nothing tells when a graph is destroyed.
_IN_GRAPHS: dict[int, Any] = {}


@lru_cache(maxsize=1)
def _cufft() -> ctypes.CDLL:
    """Return the cuFFT library that CuPy has loaded."""
    from cuda import pathfinder

    return ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cufft").abs_path)


def _destroy_handle(handle: int, ordinal: int) -> None:
    with cupy.cuda.Device(ordinal):
        cublas.destroy(handle)


def _create_handle() -> int:
    """Return a new handle; if there is no memory for it, first free the unused memory of CuPy's pool."""
    try:
        return cublas.create()
    except cublas.CUBLASError:
        cupy.get_default_memory_pool().free_all_blocks()
    try:
        return cublas.create()
    except cublas.CUBLASError as error:
        raise MemoryError(f"cuBLAS could not create a handle: {error}") from error
