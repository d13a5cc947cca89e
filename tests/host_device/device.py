"""`HostDevice`: a CUDA device made of host memory, the host compiler and NumPy.

It executes the very kernels and cuBLAS calls that a GPU would get, and is stricter than one: memory is
poisoned before it is written and guarded on both sides, addresses must belong to it, threads and blocks run
in an order that changes with every launch.
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

_one_launch_at_a_time = threading.Lock()  # the runtime's state is the process's


class KernelError(RuntimeError):
    """A kernel was launched wrongly, misused a barrier, or wrote where it must not."""


class HostArray(np.ndarray):
    """An array in a `HostDevice`'s memory: what `cupy.ndarray` is to a GPU.

    NumPy computes with it as with any array, but such a result is a HostArray only by type: it lies
    outside the device's memory, and the device refuses it.  `HostDevice.asarray` brings it in.
    """

    def get(self) -> np.ndarray:
        """A copy as a plain NumPy array."""
        return np.array(self, subok=False)


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch, as it was asked for."""

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
    """A piece of device memory: guard zone, payload, guard zone."""

    memory: weakref.ref[np.ndarray]  # bytes; dead once no array uses them
    offset: int  # of the payload in `memory`
    start: int  # the payload's address
    nbytes: int

    def payload(self) -> np.ndarray | None:
        memory = self.memory()
        return None if memory is None else memory[self.offset : self.offset + self.nbytes]

    def guards(self) -> tuple[np.ndarray, ...]:
        """The zone before the payload and the one after it; none where the memory is gone."""
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
        Where the `.cu` files are.
    order : {"random", "ascending", "descending"}
        In which order blocks run, and threads between two barriers.
    seed : int
        Of the random order; counts up with each launch.
    strict : bool
        Refuse kernels whose threads exit before a barrier that others reach.

    Attributes
    ----------
    log : list of LaunchRecord, GemmRecord and TransformRecord
        What has been enqueued; clear it at will.
    allocated_bytes, peak_bytes : int
        Memory in use now, and the most there was; assign to `peak_bytes` to start again.
    fail_allocations_over : int or None
        Allocations of more bytes than this raise MemoryError.
    flushes_subnormals : bool
        Whether float32 subnormals are zeros to kernels, going in and coming out, as with CuPy's ``-ftz=true``; kernels
        with a 64-bit type never flush.  float16's conversions here go through such numbers, which a GPU's do not.
    capturing : bool
        What `is_capturing` says.
    waits : int
        How often somebody waited for the stream.
    model : GpuModel
        The GPU that plans are made for.
    has_cufft : bool
        Whether there are transforms.
    transform_work : float
        Bytes that a transform works in, for each element of its images.
    room : int
        How many blocks of a cooperative launch fit at once.  More are refused, as plans are made ready or, where
        `shows_room` is not set, as they are launched.
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
        """There is one host: nothing to make current."""
        return contextlib.nullcontext()

    # ---- memory -----------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> HostArray:
        """An array of 0xff bytes, C-ordered, aligned to 256 bytes, between two guard zones."""
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
        """A line of zeros, of which only what is touched takes memory: it may be longer than there is memory for."""
        dtype = np.dtype(dtype)
        memory, offset = self._registered(
            np.zeros(_with_guards(size * dtype.itemsize), np.uint8), size * dtype.itemsize
        )
        return np.ndarray.__new__(HostArray, (size,), dtype, memory, offset)

    @contextlib.contextmanager
    def failing_allocations(self, number: int, times: int = 1) -> Iterator[Callable[[], int]]:
        """So many allocations fail, from that number on; none if it is negative.  Gives a function that counts them."""
        begin = self._allocated
        self._failing = range(begin + number, begin + number + times) if number >= 0 else range(0)
        try:
            yield lambda: self._allocated - begin
        finally:
            self._failing = range(0)

    def asarray(self, array: Any, dtype: Any = None) -> HostArray:
        """A copy of anything NumPy understands in this device's memory, C-ordered."""
        source = np.asarray(array, dtype)
        result = self.empty(source.shape, source.dtype)
        result[...] = source
        return result

    def from_host(self, array: np.ndarray) -> HostArray:
        return self.asarray(array)

    def convert(self, array: Any, dtype: Any) -> HostArray:
        """`array` in another dtype, C-ordered."""
        result = self.empty(array.shape, dtype)
        with np.errstate(all="ignore"):
            np.copyto(result, array, casting="unsafe")
        return result

    def pointer(self, array: Any) -> int:
        """The address of the first element, which has to lie in this device's memory; null where there is none."""
        if not isinstance(array, HostArray):
            raise TypeError(f"a HostArray is needed, not {type(array).__name__}")
        if not array.size:
            return 0
        address = array.ctypes.data
        self.allocation(address, address + array.itemsize)
        return address

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """Dtypes, layouts and alignment; there is one device."""
        return tuple([(a.dtype, a.shape, a.strides, a.ctypes.data & 15) for a in arrays])

    def allocation(self, start: int, end: int) -> tuple[np.ndarray, int]:
        """The allocation that holds the bytes [start, end), as bytes, and its first address."""
        for allocation in list(self._allocations.values()):
            if allocation.start <= start and end <= allocation.start + allocation.nbytes:
                payload = allocation.payload()
                if payload is not None:
                    return payload, allocation.start
        raise IndexError(f"the {end - start} bytes at {start:#x} do not lie in one allocation of this device")

    def _registered(self, memory: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """Memory with its guard zones written, known to the device, and where in it the payload begins."""
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
        """The memory is about to be freed."""
        self.allocated_bytes -= self._allocations.pop(start).nbytes
        if self._mode == "asan":
            _address_sanitizer("unpoison", address, nbytes)

    def _check_guards(self, kernel: Kernel) -> None:
        if self._mode == "asan":
            return  # it has watched every access
        damaged = []
        for allocation in list(self._allocations.values()):
            for where, guard in zip(("before", "after"), allocation.guards(), strict=False):
                wrong = np.flatnonzero(guard != GUARD)
                if wrong.size:
                    distance = GUARD_BYTES - wrong[0] if where == "before" else wrong[0]
                    damaged.append(f"{distance} bytes {where} an allocation of {allocation.nbytes} bytes")
                    guard[...] = GUARD  # so that later launches are not blamed
        if damaged:
            raise KernelError(f"{kernel} wrote outside its arrays: {'; '.join(damaged)}")

    # ---- work -------------------------------------------------------------------------------------------

    def empty_in_graph(self, shape: tuple[int, ...], dtype: Any) -> HostArray:
        """An array like any other, allowed where `capturing` forbids them."""
        failing, self.fail_allocations_over = self.fail_allocations_over, None
        try:
            return self.empty(shape, dtype)
        finally:
            self.fail_allocations_over = failing

    def synchronize(self) -> None:
        """Nothing is enqueued here that is not done; it is counted, so that a test sees who waits."""
        assert not self.capturing, "waiting for a stream ends its capture"
        self.waits += 1

    def is_capturing(self) -> bool:
        """As a test has set `capturing`; there are no graphs."""
        return self.capturing

    def load(self, launch: KernelLaunch) -> Callable[[np.ndarray], None]:
        """What calls `launch`, which compiles the kernel."""
        is_too_large = launch.cooperative and launch.blocks > self.room
        if is_too_large and self.shows_room:
            raise too_many_blocks(self, launch, self.room)

        def enqueue(params: np.ndarray) -> None:
            if is_too_large:
                raise too_many_blocks(self, launch, launch.blocks // 2)
            self.launch(launch.kernel, launch.grid, launch.block, params, launch.shared_bytes, launch.cooperative)

        return enqueue

    def argument(self, params: np.ndarray) -> np.ndarray:
        """The parameter as it is: `launch` looks at it before it copies it."""
        return params

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """No profiler, no ranges."""
        return function

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], block: int, params: np.ndarray, shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:  # fmt: skip
        """Run a kernel to its end; raises `KernelError` where anything about it is wrong.

        `block` may be a tuple too, for kernels with blocks of more than one dimension.
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
        value = params.copy()  # aligned, whatever `params` is a part of
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
        """All were made when they were loaded."""

    def load_transform(self, arguments: TransformArguments, work_bytes: int) -> Callable[[int, int], None]:
        """What calls ``cufftExecR2C`` and its like; see `fft`."""
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
    """This thread with the processor's own "flush to zero" and "denormals are zero" set, or as it is."""
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
    """Bytes of memory for a payload that can be aligned in it, between its guard zones."""
    return nbytes + 2 * GUARD_BYTES + ALIGNMENT


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """A launch's size along x, y and z."""
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
