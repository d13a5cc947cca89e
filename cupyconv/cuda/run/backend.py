"""CUDA's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cupyconv.cuda.plan import plan
from cupyconv.cuda.run.device import Device
from cupyconv.cuda.run.execution import PreparedPlan
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Problem


class CudaBackend:
    """Arrays of one CUDA device."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device

    def machine(self, threads: int | None) -> GpuModel:
        """The processor plans are made for."""
        return self.device.model

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the backend's device is the current one."""
        return self.device.current()

    def within(self, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Any:
        """What a function returns for these arrays in the `current` context."""
        with self.device.current():
            return function(arrays)

    def address(self, array: Any) -> int:
        """The address of the array's first element."""
        return self.device.pointer(array)

    def are_apart(self, arrays: Sequence[Any], outs: Sequence[int]) -> bool:
        """Whether owners say that no result shares memory with another array: here addresses tell."""
        return False

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """What a plan depends on of arrays of this class, addresses aside."""
        return self.device.signature(arrays)

    def plain(self, array: Any) -> Any:
        """The array: kernels see addresses, whatever its class is."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array."""
        return self.device.empty(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        """An array in the host's memory as one of this backend's, enqueued as any work is.

        A graph would read the host's memory again at every launch, when other numbers are there.
        """
        if self.device.is_capturing():
            raise RuntimeError(
                "numbers of the host cannot be captured in a graph: give lengths as an array of the device"
            )
        return self.device.from_host(array)

    def converted(self, array: Any, dtype: np.dtype) -> Any:
        """A C-ordered copy in `dtype`: of the real parts where that is real."""
        return self.device.convert(array if dtype.kind == "c" else array.real, dtype)

    def own_copy(self, array: Any) -> Any:
        """A C-ordered copy for nobody to change, complete when this returns: any stream may read it."""
        if self.device.is_capturing():
            raise RuntimeError("a layer cannot be packed while a graph is captured: pack it before")
        with self.current():
            copy = self.device.convert(array, array.dtype)
            self.device.synchronize()
        return copy

    def plan(self, problem: Problem) -> Plan:
        """How a problem runs here; ValueError where a named method does not apply."""
        return plan(problem)

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name; either may raise UnlikeItsModel."""
        return PreparedPlan(plan, self.device).run
