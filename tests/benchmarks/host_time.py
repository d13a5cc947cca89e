"""Host time per call, in microseconds, for arrays so small that nothing else counts::

    python -m tests.benchmarks.host_time [--rounds 25] [--calls 400] [--json FILE]

**CUDA, without a GPU.**  The calls run on a null device.  All of the library's code runs, from the public function to
the launch.  The device accepts and drops what it is given (kernel, grid, packed parameters; cuBLAS's arguments).  If
CuPy is installed, the arrays are CuPy's own, made over addresses without memory.  Reading their shapes, strides and
pointers and creating the result's array then costs what it costs on a GPU.  Otherwise, the arrays are stand-ins with
the same attributes.  **Not included**, because it needs a driver: per launch, asking CuPy for the stream, its wrapper
and ``cuLaunchKernel``; per GEMM, CuPy's wrapper and cuBLAS; the memory pool, once for the result and once per
workspace buffer; asking CUDA for the current device.  All of these belong to CuPy and the driver.

**CUDA, CuPy on a driver that does nothing**, with ``python -m tests.fake_gpu tests/benchmarks/host_time.py``: the real
CuPy runs, and every call of CUDA and cuBLAS returns at once.  The times include what the null device leaves out,
except the time inside the driver and cuBLAS.

**CUDA, on a GPU**, if there is one: the same calls until they return, everything included.  Between rounds, outside
the clock, the script waits for the GPU.

**NumPy.**  The call and the bare `np.matmul` of its products alternate.  Their difference is the time for columns,
epilogue and the library's own overhead.  If torch is installed, its ``conv2d`` on the CPU with one thread is timed as
a peer on the smallest shape.

The minimum of all rounds is the cost of the code.  The median also contains the load of the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv.call.dispatch import register_backend
from cupyconv.cuda.run import CudaBackend
from cupyconv.cuda.run.device import GemmArguments
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.plan import KernelLaunch
from tests import fake_gpu

_NULL_CONTEXT = nullcontext()
#: Names of the table of CuPy's own calls: on a GPU, or on an emulated GPU after `fake_gpu.let_go`.
REAL = ("cuda, on the GPU", "cuda, CuPy on a driver that does nothing")


class NullArray:
    """The attributes of an array that a call reads, without memory."""

    __slots__ = ("address", "dtype", "ndim", "shape", "size", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int) -> None:
        like = np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape)
        self.shape, self.dtype, self.ndim, self.size = shape, like.dtype, like.ndim, like.size
        self.strides = tuple(like.itemsize * prod(shape[axis + 1 :]) for axis in range(like.ndim))
        self.address = address


class NullDevice:
    """An implementation of `cupyconv.cuda.run.device.Device` that accepts everything, counts it, and does nothing."""

    arrays_are = "stand-ins for CuPy's"
    array_class: type = NullArray
    model = known_gpu("sm_90")

    def __init__(self) -> None:
        self.loads = self.arguments = self.allocations = self.launches = self.gemms = 0
        self._addresses = count(1 << 40, 1 << 30)

    def array(self, *shape: int, dtype: Any = np.float32) -> Any:
        """Return a C-ordered array at an address of its own."""
        return NullArray(shape, dtype, next(self._addresses))

    def current(self) -> AbstractContextManager[Any]:
        return _NULL_CONTEXT

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        self.allocations += 1
        return self.array(*shape, dtype=dtype)

    def empty_in_graph(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return self.empty(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        return self.empty(array.shape, array.dtype)

    def convert(self, array: Any, dtype: np.dtype) -> Any:
        return self.empty(array.shape, dtype)

    def pointer(self, array: Any) -> int:
        return array.address

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        return tuple([(a.dtype, a.shape, a.strides, a.address & 15) for a in arrays])

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def argument(self, params: np.ndarray) -> Any:
        self.arguments += 1
        return params

    def load(self, launch: KernelLaunch) -> Callable[[Any], None]:
        self.loads += 1

        def enqueue(argument: Any) -> None:
            self.launches += 1

        return enqueue

    def gemm_strided_batched(self, arguments: GemmArguments) -> None:
        self.gemms += 1

    def annotated(self, label: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
        return function


def null_device() -> NullDevice:
    """Return a device whose arrays have a backend: CuPy's own arrays without memory, or stand-ins without CuPy."""
    device = NullDevice() if importlib.util.find_spec("cupy") is None else _null_cupy_device()
    backend = CudaBackend(device)
    register_backend(device.array_class, lambda array: backend)
    return device


def _null_cupy_device() -> NullDevice:
    import cupy

    from cupyconv.cuda.run.cupy_device import CupyDevice

    class NullCupyDevice(NullDevice):
        """A null device that reads CuPy's arrays with the methods of the real device."""

        arrays_are = f"CuPy {cupy.__version__}'s own, over no memory"
        array_class = cupy.ndarray
        pointer = CupyDevice.pointer
        signature = CupyDevice.signature

        def __init__(self) -> None:
            super().__init__()
            self._memory = cupy.cuda.UnownedMemory(1 << 40, 1 << 60, None, 0)

        def array(self, *shape: int, dtype: Any = np.float32) -> Any:
            offset = next(self._addresses) - (1 << 40)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(self._memory, offset))

        def argument(self, params: np.ndarray) -> Any:
            self.arguments += 1
            return CupyDevice.argument(self, params)  # type: ignore[arg-type]

    return NullCupyDevice()


def cuda_calls(array: Callable[..., Any]) -> Iterator[tuple[str, Callable[[Any], Any], tuple[int, ...]]]:
    """Yield names, calls that accept `out`, and shapes of results: methods of one launch, then columns and GEMM."""
    xs, merge = [array(1, 4, 64) for _ in range(5)], array(4, 20)
    x, pointwise, depthwise, weight = array(1, 16, 8, 8), array(16, 16, 1, 1), array(16, 1, 3, 3), array(16, 16, 3, 3)
    bias = array(16)
    conv, linmerge = cupyconv.conv, cupyconv.linmerge
    yield "linmerge of 5, one launch", lambda out: linmerge(xs, merge, out=out), (1, 4, 64)
    yield "conv 1x1, one launch", lambda out: conv(x, pointwise, method="direct", out=out), (1, 16, 8, 8)
    yield "conv 3x3 depthwise, one launch", lambda out: conv(x, depthwise, padding=1, groups=16, out=out), (1, 16, 8, 8)
    yield "conv 3x3, one launch", lambda out: conv(x, weight, padding=1, method="direct", out=out), (1, 16, 8, 8)
    yield ("conv 3x3, columns + GEMM", lambda out: conv(x, weight, padding=1, method="gemm", out=out), (1, 16, 8, 8))
    yield (
        "conv 3x3, columns + GEMM + bias, relu",
        lambda out: conv(x, weight, bias, padding=1, activation="relu", method="gemm", out=out),
        (1, 16, 8, 8),
    )


def numpy_calls() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield names, calls, and the bare products of each call."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    xs, merge = [array(1, 4, 64) for _ in range(5)], array(4, 20)
    x, pointwise, weight, bias = array(1, 16, 8, 8), array(16, 16, 1, 1), array(16, 16, 3, 3), array(16)
    out = np.empty((1, 16, 8, 8), np.float32)
    merged, columns = array(20, 64), array(144, 64)
    conv = cupyconv.conv
    yield "linmerge of 5", lambda: cupyconv.linmerge(xs, merge), lambda: np.matmul(merge, merged)
    yield ("conv 1x1", lambda: conv(x, pointwise), lambda: np.matmul(pointwise.reshape(16, 16), x.reshape(16, 64)))
    product = partial(np.matmul, weight.reshape(16, 144), columns)
    yield "conv 3x3", lambda: conv(x, weight, padding=1), product
    yield "conv 3x3, out=", lambda: conv(x, weight, padding=1, out=out), product
    yield "conv 3x3, bias, relu", lambda: conv(x, weight, bias, padding=1, activation="relu"), product


def torch_call() -> Callable[[], Any] | None:
    """Return the NumPy table's "conv 3x3" by torch on the CPU, or None if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(1)
    x, weight = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)

    def call() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.conv2d(x, weight, padding=1)

    return call


def gpu() -> Any:
    """Return CuPy if it has a GPU to run on, else None."""
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    return cupy if cupy.cuda.is_available() else None


def in_turns(
    calls: Sequence[Callable[[], Any]], rounds: int, repeats: int, finish: Callable[[], Any] = lambda: None
) -> list[list[float]]:
    """Return microseconds per call, for each call and each round; the calls alternate within a round.

    `finish` runs after each turn, untimed.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    finish()
    for _ in range(rounds):
        for call, mine in zip(calls, times):
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            mine.append((time.perf_counter() - begin) / repeats * 1e6)
            finish()
    return times


def measure(rounds: int, repeats: int) -> dict[str, Any]:
    """Return all tables as (minimum, median) microseconds by name."""

    def summary(times: list[float]) -> tuple[float, float]:
        return min(times), statistics.median(times)

    def sides(array: Callable[..., Any]) -> dict[str, list[Callable[[], Any]]]:
        return {name: [partial(call, None), partial(call, array(*shape))] for name, call, shape in cuda_calls(array)}

    def table(calls: dict[str, list[Callable[[], Any]]], repeats: int, finish: Callable[[], Any]) -> dict[str, Any]:
        rows = {}
        for name, of_name in calls.items():
            fresh, given = in_turns(of_name, rounds, repeats, finish)
            rows[name], rows[name + ", out="] = summary(fresh), summary(given)
        return rows

    cupy, real = gpu(), None
    if cupy is not None:  # before the null device gets CuPy's arrays; few calls, so that the queue does not fill
        finish = cupy.cuda.runtime.deviceSynchronize
        calls = sides(lambda *shape: cupy.ones(shape, np.float32))
        if fake_gpu.is_installed():
            for of_name in calls.values():
                in_turns(of_name, 1, 1, finish)
            fake_gpu.let_go()
        real = table(calls, min(repeats, 200), finish)
    device = null_device()
    cuda = table(sides(device.array), repeats, lambda: None)
    host = {}
    for name, ours, bare in numpy_calls():
        times, products = in_turns([ours, bare], rounds, repeats)
        host[name] = {
            "call": summary(times),
            "products": summary(products),
            "difference": (min(times) - min(products), statistics.median([a - b for a, b in zip(times, products)])),
        }
    peer = torch_call()
    return {
        "cupyconv": cupyconv.__version__, "python": sys.version.split()[0], "arrays of the null device": device.arrays_are, "cuda, null device": cuda, REAL[fake_gpu.is_installed()]: real, "numpy": host,
        "torch conv2d 3x3, CPU, one thread": None if peer is None else summary(in_turns([peer], rounds, repeats)[0]),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.host_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=400, help="calls a round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    record = measure(given.rounds, given.calls)
    print(f"the null device's arrays are {record['arrays of the null device']}")
    for table in ("cuda, null device", *(name for name in REAL if name in record)):
        if record[table] is None:
            print(f"\n{table}: there is none")
            continue
        print(f"\n{table + ', µs a call':<46}{'least':>8}{'median':>8}")
        for name, (least, median) in record[table].items():
            print(f"{name:<46}{least:>8.1f}{median:>8.1f}")
    print(f"\n{'NumPy, µs a call: least (median)':<46}{'call':>16}{'np.matmul':>16}{'difference':>16}")
    for name, row in record["numpy"].items():
        print(f"{name:<46}" + "".join(f"{f'{least:.1f} ({median:.1f})':>16}" for least, median in row.values()))
    peer = record["torch conv2d 3x3, CPU, one thread"]
    print(
        f"\ntorch conv2d 3x3, CPU, one thread: {'not installed' if peer is None else f'{peer[0]:.1f} ({peer[1]:.1f})'}"
    )
    if given.json:
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
