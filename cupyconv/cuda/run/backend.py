"""The backend interface for CUDA: allocate and describe arrays, make and run plans."""

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
        """Return the model of the GPU that plans are made for."""
        return self.device.model

    def current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the backend's device the current one."""
        return self.device.current()

    def within(self, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Any:
        """Return ``function(arrays)``, called in the `current` context."""
        with self.device.current():
            return function(arrays)

    def address(self, array: Any) -> int:
        """Return the address of the array's first element."""
        return self.device.pointer(array)

    def are_apart(self, arrays: Sequence[Any], outs: Sequence[int]) -> bool:
        """Return False: ownership does not prove here that results overlap no other array, so addresses decide."""
        return False

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """Return a key of everything about these arrays that a plan depends on, except their addresses."""
        return self.device.signature(arrays)

    def plain(self, array: Any) -> Any:
        """Return the array unchanged: kernels see only addresses, whatever its class is."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an uninitialised C-ordered array."""
        return self.device.empty(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        """Copy an array from host memory to the device, enqueued like any other work.

        Raises RuntimeError during a capture: the graph would read the host memory, which may change, at every launch.
        """
        if self.device.is_capturing():
            raise RuntimeError("host memory cannot be captured in a CUDA graph: give lengths as a CuPy array")
        return self.device.from_host(array)

    def converted(self, array: Any, dtype: np.dtype) -> Any:
        """Return a C-ordered copy in `dtype`; a real `dtype` copies only the real parts."""
        return self.device.convert(array if dtype.kind == "c" else array.real, dtype)

    def own_copy(self, array: Any) -> Any:
        """Return a C-ordered copy that nobody may change.  It is complete on return, so that any stream may read it."""
        if self.device.is_capturing():
            raise RuntimeError("a layer cannot be packed while a CUDA graph is captured: pack it before")
        with self.current():
            copy = self.device.convert(array, array.dtype)
            self.device.synchronize()
        return copy

    def plan(self, problem: Problem) -> Plan:
        """Plan a problem for this device; raise ValueError if the method asked for does not apply."""
        return plan(problem)

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that executes the plan on arrays by name; both may raise `UnlikeItsModel`."""
        return PreparedPlan(plan, self.device).run
