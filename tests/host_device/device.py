"""`HostDevice`: a CUDA device made of host memory, the host compiler and NumPy.

It executes the same kernels and cuBLAS calls as a GPU, and is stricter than a GPU.  Memory is poisoned before it is
written and guarded on both sides.  Addresses must belong to it.  Threads and blocks run in an order that changes with
every launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.cuda.run.device import GemmArguments, TransformArguments, more_to_work_in, no_transforms, too_many_blocks
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch

from . import blas, build, fft

ALIGNMENT = 256
GUARD_BYTES = 256
GUARD = 0xA5
POISON = 0xFF  # NaN in every floating-point type, -1 in every integer

ORDERS = {"ascending": 0, "descending": 1, "random": 2}

_FLUSH_TO_ZERO, _DENORMALS_ARE_ZERO = 0x8000, 0x40  # of MXCSR

_one_launch_at_a_time = threading.Lock()  # the runtime's state is global to the process


class KernelError(RuntimeError):
    """A kernel was launched wrongly, misused a barrier, or wrote to memory outside its arrays."""


class HostArray(np.ndarray):
    """An array in a `HostDevice`'s memory: the counterpart of `cupy.ndarray` on a GPU.

    NumPy computes with it as with any array, but the result is a HostArray only by type: its memory is not the
    device's, and the device refuses it.  `HostDevice.asarray` copies it into the device's memory.
    """

    def get(self) -> np.ndarray:
        """Return a copy as a plain NumPy array."""
        return np.array(self, subok=False)


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch, as requested."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    cooperative: bool = False


@dataclass(frozen=True)
class GemmRecord:
    """One cuBLAS call, in cuBLAS's (column-major) terms."""

    m: int
    n: int
    k: int
    batch: int
    a_type: int
    c_type: int
    compute_type: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class TransformRecord:
    """One cuFFT call."""

    arguments: TransformArguments


@dataclass(frozen=True)
class _Allocation:
    """An allocation of device memory: guard zone, payload, guard zone."""

    memory: weakref.ref[np.ndarray]  # bytes; dead when no array uses them
    offset: int  # position of the payload in `memory`
    start: int  # the payload's address
    nbytes: int

    def payload(self) -> np.ndarray | None:
        memory = self.memory()
        return None if memory is None else memory[self.offset : self.offset + self.nbytes]

    def guards(self) -> tuple[np.ndarray, ...]:
        """Return the zones before and after the payload, or none if the memory is gone."""
        memory = self.memory()
        if memory is None:
            return ()
        after = self.offset + self.nbytes
        return memory[self.offset - GUARD_BYTES : self.offset], memory[after : after + GUARD_BYTES]


class HostDevice:
    """Implements `cupyconv.cuda.run.device.Device` on the host.

    Parameters
    ----------
    kernels : path
        Directory of the `.cu` files.
    order : {"random", "ascending", "descending"}
        Order of blocks, and of threads between two barriers.
    seed : int
        Seed of the random order; incremented at each launch.
    strict : bool
        Refuse kernels whose threads exit before a barrier that others reach.

    Attributes
    ----------
    log : list of LaunchRecord, GemmRecord and TransformRecord
        The enqueued work; may be cleared at any time.
    allocated_bytes, peak_bytes : int
        Memory in use now, and its peak; assign to `peak_bytes` to reset it.
    fail_allocations_over : int or None
        Allocations of more bytes than this raise MemoryError.
    flushes_subnormals : bool
        Whether kernels treat float32 subnormals as zero, on input and output, as with CuPy's ``-ftz=true``.  Kernels
        with a 64-bit type never flush.  Conversions from and to float16 use such numbers here, but not on a GPU.
    capturing : bool
        The value that `is_capturing` returns.
    waits : int
        How often the stream was synchronized.
    model : GpuModel
        The GPU that plans are made for.
    has_cufft : bool
        Whether transforms are available.
    transform_work : float
        Work area of a transform, in bytes per element of its images.
    room : int
        How many blocks of a cooperative launch are resident at once.  Larger launches are refused: when plans are
        prepared, or at the launch if `shows_room` is not set.
    """

    def __init__(
        self, kernels: Path = build.KERNELS, *, order: str = "random", seed: int = 0, strict: bool = False
    ) -> None:
        self.kernels = Path(kernels)
        self.order = order
        self.seed = seed
        self.strict = strict
        self.log: list[LaunchRecord | GemmRecord | TransformRecord] = []
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.fail_allocations_over: int | None = None
        self._allocated = 0
        self._failing = range(0)
        self.flushes_subnormals = False
        self.capturing = False
        self.waits = 0
        self.model = known_gpu("sm_90")
        self.room = self.model.multiprocessors
        self.shows_room = True
        self.has_cufft = True
        self.transform_work = 0.0
        self._allocations: dict[int, _Allocation] = {}
        self._mode = build.sanitizer()

    def current(self) -> AbstractContextManager[Any]:
        """Return an empty context: there is only one host."""
        return contextlib.nullcontext()

    # ---- memory -----------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> HostArray:
        """Return an array of 0xff bytes, C-ordered, aligned to 256 bytes, between two guard zones."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        self._allocated += 1
        if self._allocated - 1 in self._failing:
            raise MemoryError(f"{nbytes} bytes asked for, by an allocation that a test lets fail")
        if self.fail_allocations_over is not None and nbytes > self.fail_allocations_over:
            raise MemoryError(
                f"{nbytes} bytes asked for; this device fails allocations over {self.fail_allocations_over}"
            )
        memory, offset = self._registered(np.empty(_with_guards(nbytes), np.uint8), nbytes)
        memory[offset : offset + nbytes] = POISON
        return np.ndarray.__new__(HostArray, shape, dtype, memory, offset)

    def untouched(self, size: int, dtype: Any) -> HostArray:
        """Return a 1-D array of zeros that only uses memory where it is touched, so it may exceed the memory's size."""
        dtype = np.dtype(dtype)
        memory, offset = self._registered(
            np.zeros(_with_guards(size * dtype.itemsize), np.uint8), size * dtype.itemsize
        )
        return np.ndarray.__new__(HostArray, (size,), dtype, memory, offset)

    @contextlib.contextmanager
    def failing_allocations(self, number: int, times: int = 1) -> Iterator[Callable[[], int]]:
        """Let `times` allocations fail from this number on, or none if it is negative.  Yields their counter."""
        begin = self._allocated
        self._failing = range(begin + number, begin + number + times) if number >= 0 else range(0)
        try:
            yield lambda: self._allocated - begin
        finally:
            self._failing = range(0)

    def asarray(self, array: Any, dtype: Any = None) -> HostArray:
        """Return a C-ordered copy in this device's memory of anything that NumPy understands."""
        source = np.asarray(array, dtype)
        result = self.empty(source.shape, source.dtype)
        result[...] = source
        return result

    def from_host(self, array: np.ndarray) -> HostArray:
        return self.asarray(array)

    def convert(self, array: Any, dtype: Any) -> HostArray:
        """Return `array` in another dtype, C-ordered."""
        result = self.empty(array.shape, dtype)
        with np.errstate(all="ignore"):
            np.copyto(result, array, casting="unsafe")
        return result

    def pointer(self, array: Any) -> int:
        """Return the address of the first element, which must be in this device's memory, or 0 for an empty array."""
        if not isinstance(array, HostArray):
            raise TypeError(f"a HostArray is needed, not {type(array).__name__}")
        if not array.size:
            return 0
        address = array.ctypes.data
        self.allocation(address, address + array.itemsize)
        return address

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """Return dtypes, layouts and alignment; there is only one device."""
        return tuple([(a.dtype, a.shape, a.strides, a.ctypes.data & 15) for a in arrays])

    def allocation(self, start: int, end: int) -> tuple[np.ndarray, int]:
        """Return the allocation that contains the bytes [start, end), as bytes, and its first address."""
        for allocation in list(self._allocations.values()):
            if allocation.start <= start and end <= allocation.start + allocation.nbytes:
                payload = allocation.payload()
                if payload is not None:
                    return payload, allocation.start
        raise IndexError(f"the {end - start} bytes at {start:#x} do not lie in one allocation of this device")

    def _registered(self, memory: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """Write guard zones, register the memory, and return it with the payload's offset."""
        offset = GUARD_BYTES + -(memory.ctypes.data + GUARD_BYTES) % ALIGNMENT
        allocation = _Allocation(weakref.ref(memory), offset, memory.ctypes.data + offset, nbytes)
        for guard in allocation.guards():
            guard[...] = GUARD
            if self._mode == "asan":
                _address_sanitizer("poison", guard.ctypes.data, guard.nbytes)
        self._allocations[allocation.start] = allocation
        self.allocated_bytes += allocation.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        weakref.finalize(memory, self._forget, allocation.start, memory.ctypes.data, memory.nbytes).atexit = False
        return memory, offset

    def _forget(self, start: int, address: int, nbytes: int) -> None:
        """Unregister memory that is about to be freed."""
        self.allocated_bytes -= self._allocations.pop(start).nbytes
        if self._mode == "asan":
            _address_sanitizer("unpoison", address, nbytes)

    def _check_guards(self, kernel: Kernel) -> None:
        if self._mode == "asan":
            return  # AddressSanitizer checks every access
        damaged = []
        for allocation in list(self._allocations.values()):
            for where, guard in zip(("before", "after"), allocation.guards(), strict=False):
                wrong = np.flatnonzero(guard != GUARD)
                if wrong.size:
                    distance = GUARD_BYTES - wrong[0] if where == "before" else wrong[0]
                    damaged.append(f"{distance} bytes {where} an allocation of {allocation.nbytes} bytes")
                    guard[...] = GUARD  # so that later launches are not reported
        if damaged:
            raise KernelError(f"{kernel} wrote outside its arrays: {'; '.join(damaged)}")

    # ---- work -------------------------------------------------------------------------------------------

    def empty_in_graph(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """Return an array like any other, but without the limit of `fail_allocations_over`."""
        failing, self.fail_allocations_over = self.fail_allocations_over, None
        try:
            return self.empty(shape, dtype)
        finally:
            self.fail_allocations_over = failing

    def synchronize(self) -> None:
        """Count synchronizations for tests; all enqueued work is already done."""
        assert not self.capturing, "waiting for a stream ends its capture"
        self.waits += 1

    def is_capturing(self) -> bool:
        """Return `capturing`, which a test sets; there are no graphs."""
        return self.capturing

    def load(self, launch: KernelLaunch) -> Callable[[np.ndarray], None]:
        """Return a function that runs `launch`, which compiles the kernel."""
        is_too_large = launch.cooperative and launch.blocks > self.room
        if is_too_large and self.shows_room:
            raise too_many_blocks(self, launch, self.room)

        def enqueue(params: np.ndarray) -> None:
            if is_too_large:
                raise too_many_blocks(self, launch, launch.blocks // 2)
            self.launch(launch.kernel, launch.grid, launch.block, params, launch.shared_bytes, launch.cooperative)

        return enqueue

    def argument(self, params: np.ndarray) -> np.ndarray:
        """Return the parameter as it is: `launch` checks and copies it."""
        return params

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the function itself: there are no profiler ranges."""
        return function

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], block: int, params: np.ndarray, shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Run a kernel to completion; raise `KernelError` for any fault.

        `block` may also be a tuple, for kernels with multidimensional blocks.
        """
        compiled = build.load_kernel(kernel, self.kernels, self._mode)
        self._check_params(kernel, params, compiled.params_size)
        config = build.LaunchConfig(
            grid=_three(grid),
            block=_three(block),
            dynamic_shared_bytes=shared_bytes,
            seed=self.seed,
            order=ORDERS[self.order],
            cooperative=cooperative,
            strict=self.strict,
        )
        run = build.load_runtime(self._mode)
        value = params.copy()  # aligned, even if `params` is a part of another array
        has_64_bits = bool({"float64", "complex128"} & {value for _, value in kernel.macros})
        with _one_launch_at_a_time:
            self.seed += 1
            self.log.append(LaunchRecord(kernel, grid, block, shared_bytes, cooperative))
            flushing = subnormals_flushed(not has_64_bits) if self.flushes_subnormals else contextlib.nullcontext()
            with flushing:
                message = run(compiled.address, value.ctypes.data, ctypes.byref(config))
        if message is not None:
            raise KernelError(f"{kernel}: {message.decode()}")
        self._check_guards(kernel)

    @staticmethod
    def _check_params(kernel: Kernel, params: np.ndarray, size: int) -> None:
        if not isinstance(params, np.ndarray) or params.size != 1 or params.dtype.kind != "V":
            raise TypeError(f"{kernel}: params is not one structure or element of raw bytes, but {params!r}")
        if params.dtype.itemsize != size:
            raise KernelError(
                f"{kernel}: params has {params.dtype.itemsize} bytes, the kernel's struct {size}: {params.dtype}"
            )

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        """``cublasGemmStridedBatchedEx``; see `blas`."""
        self.log.append(
            GemmRecord(
                m=arguments.m,
                n=arguments.n,
                k=arguments.k,
                batch=arguments.batch,
                a_type=arguments.a_type,
                c_type=arguments.c_type,
                compute_type=arguments.compute_type,
                strides=(arguments.stride_a, arguments.stride_b, arguments.stride_c),
            )
        )
        blas.gemm_strided_batched(self.allocation, arguments)

    def check_captured(self, transforms: Sequence[TransformArguments]) -> None:
        """Do nothing: all transforms were created when they were loaded."""

    def load_transform(self, arguments: TransformArguments, work_bytes: int) -> Callable[[int, int], None]:
        """Return a function that runs ``cufftExecR2C`` and the like; see `fft`."""
        if not self.has_cufft:
            raise no_transforms(self, "this device has none")
        nbytes = int(self.transform_work * arguments.batch * prod(arguments.size))
        if nbytes > work_bytes:
            raise more_to_work_in(self, nbytes, work_bytes)
        fft.check(arguments)

        def enqueue(source: int, target: int) -> None:
            self.log.append(TransformRecord(arguments))
            fft.transform(self.allocation, arguments, source, target)

        return enqueue


@contextlib.contextmanager
def subnormals_flushed(flushes: bool) -> Iterator[None]:
    """Set the processor's "flush to zero" and "denormals are zero" for this thread, or leave them unchanged."""
    if platform.machine() != "x86_64":
        raise NotImplementedError("only for x86-64 it is known here where these bits are")
    if not flushes:
        yield
        return
    libm, before = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()  # fenv_t, whose last word is MXCSR
    libm.fegetenv(before)
    flushing = type(before)(*before)
    flushing[7] |= _FLUSH_TO_ZERO | _DENORMALS_ARE_ZERO
    libm.fesetenv(flushing)
    try:
        yield
    finally:
        libm.fesetenv(before)


def _with_guards(nbytes: int) -> int:
    """Return the bytes of memory for an aligned payload and its guard zones."""
    return nbytes + 2 * GUARD_BYTES + ALIGNMENT


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return a launch's size along x, y and z."""
    given = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(given) <= 3 or not all(1 <= value < 2**32 for value in given):
        raise KernelError(f"a size has one to three numbers from 1 to 2**32 - 1, not {size}")
    return tuple(int(value) for value in given) + (1,) * (3 - len(given))


def _address_sanitizer(action: str, address: int, nbytes: int) -> None:
    """Make AddressSanitizer report ("poison") or accept ("unpoison") every access to a region."""
    function = getattr(ctypes.CDLL(None), f"__asan_{action}_memory_region")
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    function(address, nbytes)
