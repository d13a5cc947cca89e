"""cuFFT: transforms in the advanced layout, enqueued on the stream of their plan, which has a work area."""

from __future__ import annotations

from ctypes import POINTER, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Any

import numpy as np

from cupyconv.cuda.run.device import TransformArguments
from tests.fake_gpu.calls import exported
from tests.fake_gpu.machine import MACHINE, UNWRITTEN, CudaError
from tests.host_device import fft

CUFFT: dict[str, Any] = {}

_VERSION = 12000
#: cufftResult
_INVALID_PLAN, _INVALID_VALUE, _EXECUTION_FAILED, _NOT_SUPPORTED = 1, 4, 6, 16
_FORWARD, _INVERSE = -1, 1


@dataclass
class Plan:
    """The state of a cuFFT plan."""

    arguments: TransformArguments | None = None
    stream: int | None = None
    work_area: int = 0
    work_bytes: int = 0
    is_destroyed: bool = False


def cufft(*types: Any) -> Any:
    return exported(CUFFT, *types)


@cufft(POINTER(c_int))
def cufftCreate(plan: Any) -> None:
    plan[0] = MACHINE.handle(Plan())


@cufft(c_int)
def cufftDestroy(plan: int) -> None:
    MACHINE.wait_for_all()
    MACHINE.find(plan, Plan).is_destroyed = True
    MACHINE.forget(plan, Plan)


@cufft(c_int, c_int)
def cufftSetAutoAllocation(plan: int, allocates: int) -> None:
    if allocates:
        raise CudaError(_NOT_SUPPORTED, "work areas of cuFFT's own")


@cufft(c_int, c_void_p)
def cufftSetWorkArea(plan: int, memory: int | None) -> None:
    MACHINE.find(plan, Plan).work_area = memory or 0


@cufft(c_int, c_void_p)
def cufftSetStream(plan: int, stream: int | None) -> None:
    MACHINE.find(plan, Plan).stream = stream


@cufft(POINTER(c_int))
def cufftGetVersion(version: Any) -> None:
    version[0] = _VERSION


_INTS = POINTER(c_int)


@cufft(c_int, c_int, _INTS, _INTS, c_int, c_int, _INTS, c_int, c_int, c_int, c_int, POINTER(c_size_t))
def cufftMakePlanMany(plan: int, rank: int, size: Any, inembed: Any, *rest: Any) -> None:
    istride, idist, onembed, ostride, odist, kind, batch, work = rest
    MACHINE.refuse_in_capture()
    if not inembed or not onembed:
        raise CudaError(_NOT_SUPPORTED, "the basic layout")
    direction = _INVERSE if fft.TYPES[kind].target.startswith("float") else _FORWARD
    sizes, within, results = (tuple(numbers[:rank]) for numbers in (size, inembed, onembed))
    arguments = TransformArguments(sizes, within, istride, idist, results, ostride, odist, kind, batch, direction)
    try:
        fft.check(arguments)
    except ValueError as error:
        raise CudaError(_INVALID_VALUE, str(error)) from error
    found = MACHINE.find(plan, Plan)
    found.arguments = arguments
    work[0] = found.work_bytes = 8 * prod(sizes) * batch


@exported(CUFFT, c_int, c_void_p, c_void_p, names=("cufftExecR2C", "cufftExecC2R", "cufftExecD2Z", "cufftExecZ2D"))
def execute_real(plan: int, source: int, target: int) -> None:
    found = MACHINE.find(plan, Plan)
    assert found.arguments is not None
    _enqueue(found, found.arguments, source, target)


@exported(CUFFT, c_int, c_void_p, c_void_p, c_int, names=("cufftExecC2C", "cufftExecZ2Z"))
def execute_complex(plan: int, source: int, target: int, direction: int) -> None:
    found = MACHINE.find(plan, Plan)
    assert found.arguments is not None
    _enqueue(found, found.arguments._replace(direction=direction), source, target)


def _enqueue(plan: Plan, arguments: TransformArguments, source: int, target: int) -> None:
    area, nbytes = plan.work_area, plan.work_bytes
    mark = next(_marks)

    def begin() -> None:
        _memory(area, nbytes).fill(mark)

    def end() -> None:
        if plan.is_destroyed:
            raise CudaError(_INVALID_PLAN, "a graph outlives its plan")
        if (_memory(area, nbytes) != mark).any():
            raise CudaError(_EXECUTION_FAILED, "somebody else has worked in the memory of this transform")
        fft.transform(MACHINE.allocation, arguments, source, target)
        _memory(area, nbytes).fill(UNWRITTEN)

    for work in (begin, end):
        MACHINE.enqueue(MACHINE.stream(plan.stream), work)


#: The byte that a transform writes to its work area while it runs.
_marks = cycle(range(1, UNWRITTEN))


def _memory(start: int, nbytes: int) -> np.ndarray:
    """Return device memory, which must still be allocated."""
    memory, first = MACHINE.allocation(start, start + nbytes)
    return memory[start - first : start - first + nbytes]
