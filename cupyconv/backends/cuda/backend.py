"""CUDA's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cupyconv.backends.cuda.device import Device
from cupyconv.backends.cuda.execution import PreparedPlan
from cupyconv.machine import GpuModel
from cupyconv.plan import Plan

#: Plans kept with their parameter structs packed.
_PREPARED = 1024


class CudaBackend:
    """Arrays of one CUDA device."""

    name = "cuda"

    def __init__(self, device: Device, model: GpuModel) -> None:
        self.device = device
        self.model = model
        self._prepared: OrderedDict[int, PreparedPlan] = OrderedDict()

    def machine(self, threads: int | None) -> GpuModel:
        """The processor plans are made for."""
        return self.model

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the backend's device is the current one."""
        return self.device.current()

    def address(self, array: Any) -> int:
        """The address of the array's first element."""
        return self.device.pointer(array)

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """What a plan depends on of arrays of this class, addresses aside."""
        return self.device.signature(arrays)

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

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name."""
        # Plans are cached by planning, so identity stands for equality; the entry keeps its plan alive.
        prepared = self._prepared.get(id(plan))
        if prepared is None or prepared.plan is not plan:
            prepared = self._prepared[id(plan)] = PreparedPlan(plan, self.device)
            while len(self._prepared) > _PREPARED:
                self._prepared.popitem(last=False)
        return prepared.run
