"""Run a plan on a device: allocate the workspace, then enqueue all launches and GEMM calls in order, without waiting.

Preparing a plan does once what does not change between calls: it loads the kernels, packs the parameter structs and
lists the GEMM arguments.  A run only looks up the addresses of its buffers and writes them in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from math import prod
from operator import mul
from typing import Any, cast

import numpy as np

from cupyconv.cuda.run.device import Device, GemmArguments, TransformArguments
from cupyconv.cuda.run.parameters import PackedParameters
from cupyconv.problem.arrays import dtype_from_name, is_complex
from cupyconv.problem.caches import forms_of
from cupyconv.problem.plan import (
    Address,
    Buffer,
    GemmCall,
    KernelLaunch,
    LaunchLoop,
    Matrix,
    Plan,
    Rounds,
    Step,
    Transform,
    every_step,
)

#: Values of cudaDataType_t.
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
#: Values of cublasComputeType_t, which also determines the host type of alpha and beta.
_COMPUTE_TYPE = {"float32": 68, "tf32": 77, "float64": 70}

#: Values of cufftType: from real images to spectra, from spectra to real images, and for complex numbers both ways.
_FORWARD_TYPE = {"float32": 0x2A, "float64": 0x6A, "complex64": 0x29, "complex128": 0x69}
_INVERSE_TYPE = _FORWARD_TYPE | {"float32": 0x2C, "float64": 0x6C}
_FORWARD, _INVERSE = -1, 1

_NO_TRANSPOSE, _TRANSPOSE, _CONJUGATE_TRANSPOSE = 0, 1, 2

_BYTES = np.dtype(np.uint8)

#: Stands for the address of an array without elements, which is null in CuPy.  To a kernel, null means that there is no
#: array.
_NOWHERE = 256


class PreparedPlan:
    """A plan with all the work done that is the same in every call."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self._device = device
        #: Buffer name -> its index among the addresses of a run.
        slots: defaultdict[str, int] = defaultdict(lambda: len(slots))
        self._steps = [_prepared_step(step, (), slots, device) for step in plan.steps]
        self._buffers = tuple(slots)
        self._conversions = tuple((c.buffer, dtype_from_name(c.target)) for c in plan.conversions)
        self._workspace = tuple((buffer.name, (buffer.nbytes,)) for buffer in plan.workspace if not buffer.is_kept)
        self._forms = tuple(_PreparedForm(buffer, device) for buffer in plan.workspace if buffer.of)
        self._not_in_a_graph = _why_not_in_a_graph(plan)
        self._transforms = [
            _transform_arguments(step) for step in every_step(plan.steps) if isinstance(step, Transform)
        ]
        self._asks_for_capture = bool(self._not_in_a_graph or plan.workspace)
        #: Enqueues every step; its argument is a mapping from names to the plan's arguments and result.
        self.run = device.annotated(f"{plan.method}: {plan.problem}", self._run)

    def _run(self, arrays: Mapping[str, Any]) -> None:
        device = self._device
        if self._asks_for_capture:
            allocate = device.empty
            if device.is_capturing():
                if self._not_in_a_graph:
                    raise RuntimeError(self._not_in_a_graph)
                device.check_captured(self._transforms)
                allocate = device.empty_in_graph
            forms = {form.name: form.found(arrays) for form in self._forms}
            converted = {name: device.convert(arrays[name], dtype) for name, dtype in self._conversions}
            workspace = {name: allocate(shape, _BYTES) for name, shape in self._workspace}
            arrays = {**arrays, **converted, **workspace, **forms}
        addresses = [device.pointer(arrays[name]) or _NOWHERE for name in self._buffers]
        for step in self._steps:
            step.run(device, addresses, ())


def _why_not_in_a_graph(plan: Plan) -> str:
    """Return why a CUDA graph cannot capture a run of this plan, or an empty string if it can."""
    if any(isinstance(step, GemmCall) for step in every_step(plan.steps)):
        return "CuPy cannot capture cuBLAS calls in a CUDA graph: use a method without cuBLAS"
    if plan.conversions:
        names = ", ".join(conversion.buffer for conversion in plan.conversions)
        return f"a call that converts an argument ({names}) cannot be captured in a CUDA graph: convert it before the capture"
    return ""


#: The index of the current round in each `Rounds` around a step, outermost first.
At = tuple[int, ...]


class _PreparedLaunch:
    """A kernel launch whose parameter struct is packed except for the addresses.

    `seconds` has one launch for each `Rounds` around this one, outermost first: this launch in the second round.
    """

    def __init__(
        self, launch: KernelLaunch, seconds: Sequence[KernelLaunch], slots: Mapping[str, int], device: Device
    ) -> None:
        #: Enqueues the launch; its argument is `BoundParameters.argument`.
        self.enqueue = device.load(launch)
        self.parameters = PackedParameters(launch, slots, device.argument, seconds)

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        bound = self.parameters.bind(addresses, at)
        self.enqueue(bound.argument)
        self.parameters.give_back(bound)


class _PreparedLoop:
    """Repeated launches: packed once, bound once per run; only the counter is written before each launch."""

    def __init__(
        self, loop: LaunchLoop, seconds: Sequence[LaunchLoop], slots: Mapping[str, int], device: Device
    ) -> None:
        self._rounds = range(loop.first, loop.first + loop.times)
        self._gaps = [second.first - loop.first for second in seconds]
        each = zip(loop.launches, zip(*(second.launches for second in seconds)) if seconds else repeat(()))
        self._launches = [_PreparedLaunch(launch, others, slots, device) for launch, others in each]
        self._counters = [(prepared, prepared.parameters.place(loop.counter)) for prepared in self._launches]

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        bound = [(prepared, prepared.parameters.bind(addresses, at), place) for prepared, place in self._counters]
        gone_on = sum(number * gap for number, gap in zip(at, self._gaps))
        for number in self._rounds:
            for prepared, parameters, place in bound:
                parameters.integers[place] = number + gone_on
                prepared.enqueue(parameters.argument)
        for prepared, parameters, _ in bound:
            prepared.parameters.give_back(parameters)


class _PreparedForm:
    """A form of an argument, such as a packed weight, that is made once and cached if the argument is constant."""

    def __init__(self, buffer: Buffer, device: Device) -> None:
        assert buffer.made_by is not None
        self.name = buffer.name
        self._of, self._shape, self._device = buffer.of, (buffer.nbytes,), device
        #: Equal for equal launches, even from different plans.  Python computes the hash of a string only once.
        self._key = repr(buffer.made_by)
        self._slots = {buffer.of: 0, buffer.name: 1}
        self._launch = _PreparedLaunch(buffer.made_by, (), self._slots, device)

    def found(self, arrays: Mapping[str, Any]) -> Any:
        """Return the cached form, or make it; during a capture it is not cached, as the graph makes it per launch."""
        argument, device = arrays[self._of], self._device
        forms = forms_of(argument)
        kept = forms and forms.get(self._key)
        if kept is None and forms and not device.is_capturing():
            kept = forms.keep(self._key, lambda: self._made_for_all_streams(argument))
        if kept is not None:
            return kept
        return self._made(argument, device.empty_in_graph if device.is_capturing() else device.empty)

    def _made(self, argument: Any, allocate: Callable[..., Any]) -> Any:
        made = allocate(self._shape, _BYTES)
        self._launch.run(self._device, [self._device.pointer(argument), self._device.pointer(made)], ())
        return made

    def _made_for_all_streams(self, argument: Any) -> Any:
        made = self._made(argument, self._device.empty)
        self._device.synchronize()
        return made


class _PreparedRounds:
    """Steps that are repeated for every chunk: prepared once; offsets advance with each round."""

    def __init__(self, rounds: Rounds, seconds: Sequence[Rounds], slots: Mapping[str, int], device: Device) -> None:
        self._numbers = range(rounds.times)
        others = zip(*(second.first for second in seconds), rounds.second)
        self._steps = [_prepared_step(step, own, slots, device) for step, own in zip(rounds.first, others)]

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        for number in self._numbers:
            for step in self._steps:
                step.run(device, addresses, (*at, number))


class _PreparedGemm:
    """The arguments of a GEMM call except for the addresses; cuBLAS reads alpha and beta from host memory.

    cuBLAS is column-major, so a row-major call swaps its operands:

    ::

        row-major  C[m, n] = A[m, k] B[k, n]      is, in column-major order,      C'[n, m] = B'[n, k] A'[k, m]
    """

    def __init__(self, call: GemmCall, seconds: Sequence[GemmCall], slots: Mapping[str, int]) -> None:
        real = np.float64 if call.compute == "float64" else np.float32
        dtype = np.result_type(real, np.complex64) if is_complex(call.dtype) else np.dtype(real)
        self._scalars = np.array([call.alpha, call.beta], dtype)
        alpha = self._scalars.ctypes.data
        a, b, c = call.b, call.a, call.c
        self._arguments = GemmArguments(
            *(_operation(a), _operation(b)),
            *(call.n, call.m, call.k),
            *(alpha, *_described(a, call.dtype), *_described(b, call.dtype)),
            *(alpha + dtype.itemsize, *_described(c, call.c_dtype)),
            *(call.batch, _COMPUTE_TYPE[call.compute]),
        )
        self._holes = []
        for name, operand in (("a", "b"), ("b", "a"), ("c", "c")):
            address = getattr(call, operand).at
            gaps = [getattr(second, operand).at.offset - address.offset for second in seconds]
            self._holes.append((GemmArguments._fields.index(name), slots[address.buffer], address.offset, gaps))

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        arguments = list(self._arguments)
        for place, slot, offset, gaps in self._holes:
            arguments[place] = addresses[slot] + offset + sum(map(mul, at, gaps))
        device.gemm_strided_batched(GemmArguments._make(arguments))


class _PreparedTransform:
    """A cuFFT call with everything but its addresses."""

    def __init__(
        self, transform: Transform, seconds: Sequence[Transform], slots: Mapping[str, int], device: Device
    ) -> None:
        self._enqueue = device.load_transform(_transform_arguments(transform), transform.work_bytes)
        self._ends = []
        for end in ("source", "target"):
            address: Address = getattr(transform, end)
            gaps = [getattr(second, end).offset - address.offset for second in seconds]
            self._ends.append((slots[address.buffer], address.offset, gaps))

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        self._enqueue(*(addresses[slot] + offset + sum(map(mul, at, gaps)) for slot, offset, gaps in self._ends))


def _transform_arguments(transform: Transform) -> TransformArguments:
    """Return a transform as cuFFT's arguments."""
    size, spectrum = transform.size, transform.frequencies
    sides = (spectrum, size) if transform.inverse else (size, spectrum)

    def layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        return (shape, transform.batch, 1) if transform.interleaved else (shape, 1, prod(shape))

    kinds, direction = (_INVERSE_TYPE, _INVERSE) if transform.inverse else (_FORWARD_TYPE, _FORWARD)
    numbers = kinds[transform.dtype], transform.batch, direction
    return TransformArguments(size, *layout(sides[0]), *layout(sides[1]), *numbers)


_Prepared = _PreparedLaunch | _PreparedLoop | _PreparedRounds | _PreparedGemm | _PreparedTransform
_PREPARED: dict[type, Callable[..., _Prepared]] = {
    KernelLaunch: _PreparedLaunch,
    LaunchLoop: _PreparedLoop,
    Rounds: _PreparedRounds,
    Transform: _PreparedTransform,
}


def _prepared_step(step: Step, seconds: Sequence[Step], slots: Mapping[str, int], device: Device) -> _Prepared:
    if isinstance(step, GemmCall):
        return _PreparedGemm(step, cast("Sequence[GemmCall]", seconds), slots)
    return _PREPARED[type(step)](step, seconds, slots, device)


def _described(matrix: Matrix, dtype: str) -> tuple[int, int, int, int]:
    """Return address (0, as it is not known yet), type, leading dimension and stride."""
    return 0, _DATA_TYPE[dtype], matrix.ld, matrix.stride


def _operation(matrix: Matrix) -> int:
    if matrix.conjugated:
        assert matrix.transposed
        return _CONJUGATE_TRANSPOSE
    return _TRANSPOSE if matrix.transposed else _NO_TRANSPOSE
