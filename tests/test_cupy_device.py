"""The CuPy device without a GPU: everything except CUDA itself, if CuPy is installed."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", exc_type=ImportError)
try:
    from cupy_backends.cuda.libs import cublas
except ImportError as error:
    pytest.skip(f"CuPy without cuBLAS: {str(error).splitlines()[0]}", allow_module_level=True)

from cupyconv.cuda.run import cupy_device  # noqa: E402
from cupyconv.cuda.run.cupy_device import CupyDevice  # noqa: E402
from cupyconv.problem.machine import known_gpu  # noqa: E402
from cupyconv.problem.plan import Kernel, KernelLaunch  # noqa: E402
from cupyconv.problem.problems import TooManyBlocks  # noqa: E402


@pytest.fixture
def device(monkeypatch) -> CupyDevice:
    """Return a device for GPU 0 on a machine without a GPU."""
    monkeypatch.setattr(CupyDevice, "__init__", lambda self: None)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    device = CupyDevice()
    device.ordinal, device._functions, device._lock = 0, {}, threading.Lock()
    device._thread = SimpleNamespace(nothing_to_do=nullcontext(), handles=OrderedDict())
    device.model = replace(known_gpu("sm_90"), multiprocessors=4)
    return device


class Driver:
    """The functions of CUDA's driver that `load` calls, and a list of launches; three blocks of 100 threads fit."""

    CUDADriverError = cupy.cuda.driver.CUDADriverError

    def __init__(self, monkeypatch) -> None:
        self.asked: list[tuple] = []
        self.refusal: int | None = None
        monkeypatch.setattr(cupy_device, "driver", self)
        monkeypatch.setattr(cupy_device, "get_current_stream", lambda ordinal: SimpleNamespace(ptr=70 + ordinal))
        monkeypatch.setattr(cupy, "RawModule", self.module)
        self.functions: list[SimpleNamespace] = []

    def module(self, **given):
        return self

    def get_function(self, name):
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + len(self.functions)))
        self.functions.append(function)
        return function

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function, block, shared_bytes):
        return 300 // block

    def launchKernel(self, *given):
        self.asked.append(given)

    def launchCooperativeKernel(self, *given):
        if self.refusal is not None:
            error = self.CUDADriverError.__new__(self.CUDADriverError)  # the constructor asks a driver for the message
            error.status = self.refusal
            raise error
        self.asked.append(("cooperative", *given))


@pytest.fixture
def driver(monkeypatch) -> Driver:
    return Driver(monkeypatch)


def launch_of(**changed) -> KernelLaunch:
    return replace(KernelLaunch(Kernel("merge", (("DTYPE", "float32"),)), (2, 3, 1), 100, (), 512), **changed)


def array(address: int, shape=(1, 2, 5), dtype=np.float32, ordinal=0, strides=None):
    """Return a CuPy array over memory that does not exist."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def test_signatures_tell_apart_what_plans_depend_on(device):
    arrays = [
        array(1 << 20), array((1 << 20) + 4), array((1 << 20) + 8), array(1 << 20, dtype=np.float64),
        array(1 << 20, ordinal=1), array(1 << 20, shape=(1, 5, 2)), array(1 << 20, strides=(40, 4, 8)),
    ]  # fmt: skip
    assert len({device.signature([a]) for a in arrays}) == len(arrays)
    assert device.signature([arrays[0]]) == device.signature([array(1 << 21)])


def test_an_argument_is_a_list_of_one_pointer_to_the_parameters(device):
    params = np.zeros(1, np.dtype((np.void, 64)))
    address, *_ = argument = device.argument(params)
    assert ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] == params.ctypes.data
    del argument


def test_a_device_that_is_current_is_not_entered(device, monkeypatch):
    with device.current():
        pass  # entering it would call the driver, which is missing
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    assert isinstance(device.current(), cupy.cuda.Device) and device.current().id == 0


def test_a_thread_that_is_new_to_cuda_gets_a_context(device, monkeypatch):
    """A new thread gets a context on the device, once, because direct calls of the driver would find none."""
    asked = []
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", lambda: asked.append(threading.get_ident()))
    device._thread = cupy_device._Thread()

    def twice() -> None:
        for _ in range(2):
            with device.current():
                pass

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert asked == [threading.get_ident(), thread.ident]


def test_shared_memory_is_asked_for_where_it_must_be_and_never_taken_back(device, driver):
    for asked in (0, 48 << 10):
        device.load(launch_of(shared_bytes=asked))
    (function,) = driver.functions
    assert not hasattr(function, "max_dynamic_shared_size_bytes")
    for asked, allowed in ((100_000, 100_000), (60_000, 100_000), (200_000, 200_000), (0, 200_000)):
        device.load(launch_of(shared_bytes=asked))
        assert function.max_dynamic_shared_size_bytes == allowed
    assert len(driver.functions) == 1


def test_a_launch_is_the_drivers_on_the_current_stream(device, driver):
    device.load(launch_of())((5, "kept alive"))
    assert driver.asked == [(1000, 2, 3, 1, 100, 1, 1, 512, 70, 5, 0)]


def test_blocks_that_wait_for_each_other_are_launched_together_or_not_at_all(device, driver):
    """Cooperative blocks must all be resident: 4 multiprocessors hold 12 of them."""
    device.load(launch_of(grid=(12, 1, 1), cooperative=True))((5, "kept alive"))
    assert driver.asked == [("cooperative", 1000, 12, 1, 1, 100, 1, 1, 512, 70, 5)]
    with pytest.raises(
        TooManyBlocks, match=r"merge<float32>: 13 blocks must run at the same time, the GPU has room for 12"
    ):
        device.load(launch_of(grid=(13, 1, 1), cooperative=True))
    assert device.model.room == 12 and len(driver.asked) == 1
    device.load(launch_of(grid=(13, 1, 1)))


@pytest.mark.parametrize(("status", "error"), [(720, TooManyBlocks), (700, cupy.cuda.driver.CUDADriverError)])
def test_a_cooperative_launch_that_fails(device, driver, status, error):
    enqueue = device.load(launch_of(grid=(12, 1, 1), cooperative=True))
    driver.refusal = status
    with pytest.raises(error):
        enqueue((5, "kept alive"))
    assert device.model.room == (6 if error is TooManyBlocks else None)


@pytest.mark.parametrize("shown", [False, True])
def test_ranges_for_profilers(device, monkeypatch, shown):
    ranges = []
    monkeypatch.setattr(cupy_device, "_SHOWN_TO_PROFILERS", shown)
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePush", ranges.append)
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePop", lambda: ranges.append("pop"))

    def fails_on_zero(number: int) -> None:
        ranges.append(1 / number)

    annotated = device.annotated("direct: conv", fails_on_zero)
    annotated(1)
    with pytest.raises(ZeroDivisionError):
        annotated(0)
    assert ranges == (["cupyconv direct: conv", 1, "pop", "cupyconv direct: conv", "pop"] if shown else [1])
    assert (annotated is fails_on_zero) is not shown


def test_ranges_without_nvtx_are_a_warning(monkeypatch):
    monkeypatch.setattr(cupy.cuda, "nvtx", SimpleNamespace(available=False))
    assert not cupy_device._shows_ranges()
    monkeypatch.setenv("CUPYCONV_NVTX", "1")
    with pytest.warns(RuntimeWarning, match="CUPYCONV_NVTX=1 has no effect: this CuPy was built without NVTX"):
        assert not cupy_device._shows_ranges()
    monkeypatch.setattr(cupy.cuda, "nvtx", SimpleNamespace(available=True))
    assert cupy_device._shows_ranges()


@pytest.mark.parametrize(("status", "expected"), [(2, MemoryError), (1, cupy.cuda.runtime.CUDARuntimeError)])
@pytest.mark.parametrize("name", ["empty", "empty_in_graph", "from_host", "convert"])
def test_cudas_own_lack_of_memory_is_a_memory_error(device, monkeypatch, name, status, expected):
    """CUDA's own error, which `cupy.cuda.malloc_async` and `malloc_managed` raise, becomes a MemoryError."""

    def fails(*given, **settings):
        raise cupy.cuda.runtime.CUDARuntimeError(status)

    monkeypatch.setattr(cupy.cuda, "malloc_async", fails)
    monkeypatch.setattr(cupy, "asarray", fails)
    given = {"from_host": (np.ones(3),), "convert": (SimpleNamespace(astype=fails), np.dtype(np.float32))}.get(
        name, ((3,), np.dtype(np.float32))
    )
    allocator = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(fails)
    try:
        with pytest.raises(expected):
            getattr(device, name)(*given)
    finally:
        cupy.cuda.set_allocator(allocator)


def test_handles_are_destroyed_on_their_device_and_left_to_the_end_of_the_process(device, monkeypatch):
    done = []
    blas = SimpleNamespace(
        CUBLASError=cublas.CUBLASError, CUBLAS_POINTER_MODE_HOST=0, create=lambda: 77, destroy=done.append,
        **{name: lambda *arguments: None for name in ("setStream", "setMathMode", "setPointerMode")},
    )  # fmt: skip
    monkeypatch.setattr(cupy_device, "cublas", blas)
    monkeypatch.setattr(cupy.cuda, "Device", lambda ordinal: nullcontext(done.append(f"on {ordinal}")))
    assert device._handle(5) == device._handle(5) == 77
    finalizers = [f for f in weakref.finalize._registry if f.peek() and f.peek()[1] is cupy_device._destroy_handle]
    assert finalizers and not any(f.atexit for f in finalizers)
    assert not done
    device._thread.handles.clear()
    assert done == ["on 0", 77]
