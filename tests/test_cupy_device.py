"""What of the CuPy device can be tested where CuPy is installed and no GPU is: everything but CUDA itself."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
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
from cupyconv.problem.plan import Kernel  # noqa: E402


@pytest.fixture
def device(monkeypatch) -> CupyDevice:
    """GPU 0 of a machine without one."""
    monkeypatch.setattr(CupyDevice, "__init__", lambda self: None)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    device = CupyDevice()
    device.ordinal, device._functions, device._lock = 0, {}, threading.Lock()
    return device


def array(address: int, shape=(1, 2, 5), dtype=np.float32, ordinal=0, strides=None):
    """An array of CuPy's own over memory that is not there."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def test_signatures_tell_apart_what_plans_depend_on(device):
    arrays = [
        array(1 << 20), array((1 << 20) + 4), array((1 << 20) + 8), array(1 << 20, dtype=np.float64),
        array(1 << 20, ordinal=1), array(1 << 20, shape=(1, 5, 2)), array(1 << 20, strides=(40, 4, 8)),
    ]  # fmt: skip
    assert len({device.signature([a]) for a in arrays}) == len(arrays)
    assert device.signature([arrays[0]]) == device.signature([array(1 << 21)])


def test_an_argument_points_at_the_parameters(device):
    params = np.zeros(1, np.dtype((np.void, 64)))
    (argument,) = device.argument(params)
    assert isinstance(argument, cupy.cuda.function.CPointer)
    assert argument.ptr == params.ctypes.data


def test_a_device_that_is_current_is_not_entered(device, monkeypatch):
    with device.current():
        pass  # to enter it would ask the driver, which is not there
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    assert isinstance(device.current(), cupy.cuda.Device) and device.current().id == 0


def test_shared_memory_is_asked_for_where_it_must_be_and_never_taken_back(device, monkeypatch):
    loaded = []

    class Module:
        def __init__(self, **given):
            pass

        def get_function(self, name):
            loaded.append(SimpleNamespace(kernel=f"function {name}"))
            return loaded[-1]

    monkeypatch.setattr(cupy, "RawModule", Module)
    kernel = Kernel("merge", (("DTYPE", "float32"),))
    assert device.load(kernel, 0) == device.load(kernel, 48 << 10) == "function merge"
    assert len(loaded) == 1 and not hasattr(loaded[0], "max_dynamic_shared_size_bytes")
    for asked, allowed in ((100_000, 100_000), (60_000, 100_000), (200_000, 200_000), (0, 200_000)):
        assert device.load(kernel, asked) == "function merge"
        assert loaded[0].max_dynamic_shared_size_bytes == allowed


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_says_whether_its_blocks_wait_for_each_other(device, cooperative):
    """By position, as `cupy.cuda.Function` takes it: grid, block, arguments, shared memory, stream."""
    calls = []
    device.launch(lambda *given: calls.append(given), (2, 1, 1), 64, "params", 512, cooperative)
    assert calls == [((2, 1, 1), (64, 1, 1), "params", 512, None, cooperative)]


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


def test_handles_are_destroyed_on_their_device_and_left_to_the_end_of_the_process(device, monkeypatch):
    done = []
    blas = SimpleNamespace(
        CUBLASError=cublas.CUBLASError, CUBLAS_POINTER_MODE_HOST=0, create=lambda: 77, destroy=done.append,
        **{name: lambda *arguments: None for name in ("setStream", "setMathMode", "setPointerMode")},
    )  # fmt: skip
    monkeypatch.setattr(cupy_device, "cublas", blas)
    monkeypatch.setattr(cupy.cuda, "Device", lambda ordinal: nullcontext(done.append(f"on {ordinal}")))
    device._local = threading.local()
    assert device._handle(5) == device._handle(5) == 77
    finalizers = [f for f in weakref.finalize._registry if f.peek() and f.peek()[1] is cupy_device._destroy_handle]
    assert finalizers and not any(f.atexit for f in finalizers)
    assert not done
    del device._local
    assert done == ["on 0", 77]
