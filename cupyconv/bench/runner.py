"""Runs the implementations of one participant, one case at a time.

A GPU session has all runners in its own process, on the same arrays.  A CPU session has each runner in a separate
process (`processes.py`): threads of one library's BLAS or OpenMP spin on the cores that the next library's call needs,
and two OpenMP runtimes in a process disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from cupyconv.bench.array_peers import ArrayLibrary
from cupyconv.bench.clock import Sample
from cupyconv.bench.filter_peers import OpenCV, SciPy
from cupyconv.bench.floors import copy_rate, fastest, square_product
from cupyconv.bench.jax_peer import Jax
from cupyconv.bench.machines import Machine
from cupyconv.bench.onnxruntime_peer import OnnxRuntime
from cupyconv.bench.peers import Participant, Way, installed
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.torch_peers import Torch
from cupyconv.demo.libraries import Call

#: The peers on the CPU, in the order of the page: constructors, given a machine and a number of threads.
PEERS: Mapping[str, Callable[[Machine, int], Participant]] = {
    "numpy": lambda machine, threads: ArrayLibrary(machine),
    "torch": lambda machine, threads: Torch(installed("torch"), machine.xp, threads),
    "onnxruntime": lambda machine, threads: OnnxRuntime(threads),
    "jax": lambda machine, threads: Jax(),
    "scipy": lambda machine, threads: SciPy(threads),
    "opencv": lambda machine, threads: OpenCV(threads),
}


def torch_on_gpu(machine: Machine) -> Participant:
    """Return torch on the stream that is timed."""
    torch = Torch(installed("torch"), machine.xp)
    torch.check_stream(machine.stream())
    return torch


#: The peers on a GPU.
GPU_PEERS: Mapping[str, Callable[[Machine], Participant]] = {"cupy": ArrayLibrary, "torch": torch_on_gpu}


class Offer(NamedTuple):
    """The properties of an implementation that are needed before it is prepared; see `Way`."""

    name: str
    transform: bool
    allocates: bool
    patience: float


class AnyRunner(Protocol):
    """Runs the implementations of one participant, in this process or in another one."""

    def properties(self) -> dict[str, Any]: ...

    def set_up(self, case: AnyCase) -> tuple[list[Offer], dict[str, Any]]:
        """Create a case's arrays; return the implementations offered for it, and notes on it."""
        ...

    def result(self, way: str) -> Any:
        """Prepare an implementation and return the array that its call returns."""
        ...

    def sample(self, way: str, host: float) -> Sample: ...

    def row(self, way: str, count: int) -> float | None: ...

    def peak_bytes(self, way: str) -> int: ...

    def clear(self) -> None:
        """Release the case."""
        ...

    def close(self) -> None:
        """End the runner."""
        ...

    def copy_rate(self) -> float: ...

    def product_rate(self, case: AnyCase) -> float | None:
        """Return operations per second of a large product in the case's precision, or None if unsupported."""
        ...


class SharedArrays:
    """The arrays of the current case, created once for all runners of a process."""

    def __init__(self, machine: Machine) -> None:
        self.of = lru_cache(maxsize=1)(lambda case: case.arrays(machine.fill))


class Runner:
    """`AnyRunner` in this process."""

    def __init__(self, machine: Machine, participant: Participant, arrays: SharedArrays | None = None) -> None:
        self._machine, self._participant = machine, participant
        self._arrays = arrays or SharedArrays(machine)
        self._during = ExitStack()
        self._ways: dict[str, Way] = {}
        self._calls: dict[str, Call] = {}

    def properties(self) -> dict[str, Any]:
        return self._participant.properties()

    def set_up(self, case: AnyCase) -> tuple[list[Offer], dict[str, Any]]:
        self._during.enter_context(self._participant.during(case))
        arrays = self._arrays.of(case)
        ways = self._participant.ways(case, *arrays)
        self._ways = {way.name: way for way in ways}
        offers = [Offer(way.name, way.transform, way.allocates, way.patience) for way in ways]
        return offers, self._participant.notes(case, *arrays) if ways else {}

    def result(self, way: str) -> Any:
        call = self._calls[way] = self._ways[way].prepare()
        return self._ways[way].as_array(call())

    def sample(self, way: str, host: float) -> Sample:
        return self._machine.clock.sample(self._calls[way], host)

    def row(self, way: str, count: int) -> float | None:
        return self._machine.clock.row(self._calls[way], count)

    def peak_bytes(self, way: str) -> int:
        return self._machine.library.peak_bytes(self._calls[way])

    def clear(self) -> None:
        self._ways, self._calls = {}, {}
        self._during.close()
        self._arrays.of.cache_clear()
        self._participant.release()
        self._machine.release()

    def close(self) -> None:
        self.clear()

    def copy_rate(self) -> float:
        return copy_rate(self._machine)

    def product_rate(self, case: AnyCase) -> float | None:
        square = square_product(self._machine, case)
        (x,), (weight,) = square.arrays(self._machine.fill)
        with self._participant.during(square):
            call = self._participant.product(square, x, weight)
            return square.flops / fastest(self._machine, call) if call else None
