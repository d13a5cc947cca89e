"""Run a plan on a device: workspace, launches and GEMM calls, enqueued in order, nothing waited for.

What does not change from call to call is done once, when a plan is prepared: kernels are loaded, parameter
structs packed, GEMM arguments listed.  A run looks up where its buffers are and writes the addresses in.
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
from cupyconv.problem.kept import forms_of
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

#: cudaDataType_t
_DATA_TYPE = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
#: cublasComputeType_t, and the host type of alpha and beta
_COMPUTE_TYPE = {"float32": 68, "tf32": 77, "float64": 70}

#: cufftType: of real images into spectra, of spectra into real images, of complex numbers either way.
_FORWARD_TYPE = {"float32": 0x2A, "float64": 0x6A, "complex64": 0x29, "complex128": 0x69}
_INVERSE_TYPE = _FORWARD_TYPE | {"float32": 0x2C, "float64": 0x6C}
_FORWARD, _INVERSE = -1, 1

_NO_TRANSPOSE, _TRANSPOSE, _CONJUGATE_TRANSPOSE = 0, 1, 2

_BYTES = np.dtype(np.uint8)

#: The address of an array without elements, which CuPy gives no memory: null says to a kernel that there is no array.
_NOWHERE = 256


class PreparedPlan:
    """A plan with all done that a repeated call need not do again."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self._device = device
        #: A buffer's place among the addresses of a run.
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
        #: Enqueues every step, given the plan's arguments and result by name.
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
    """Why a CUDA graph cannot capture a run of this plan; empty where it can."""
    if any(isinstance(step, GemmCall) for step in every_step(plan.steps)):
        return "cuBLAS calls cannot be captured in a graph through CuPy: use a method without one"
    if plan.conversions:
        names = ", ".join(conversion.buffer for conversion in plan.conversions)
        return (
            f"a call that converts an argument ({names}) cannot be captured in a graph: convert it to one dtype before"
        )
    return ""


#: Of the rounds that a step is in, outermost first: which one it is.
At = tuple[int, ...]


class _PreparedLaunch:
    """A kernel launch with its parameter struct packed but for the addresses.

    `seconds` are what the launch is in the second round of each of the rounds that it is in, outermost first.
    """

    def __init__(
        self, launch: KernelLaunch, seconds: Sequence[KernelLaunch], slots: Mapping[str, int], device: Device
    ) -> None:
        #: Enqueues the launch, given the `argument` of bound parameters.
        self.enqueue = device.load(launch)
        self.parameters = PackedParameters(launch, slots, device.argument, seconds)

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        bound = self.parameters.bind(addresses, at)
        self.enqueue(bound.argument)
        self.parameters.give_back(bound)


class _PreparedLoop:
    """Launches that are repeated: packed once, bound once a run, and only the counter written between them."""

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
    """What a launch makes of an argument once, where the argument's elements stay as they are."""

    def __init__(self, buffer: Buffer, device: Device) -> None:
        assert buffer.made_by is not None
        self.name = buffer.name
        self._of, self._shape, self._device = buffer.of, (buffer.nbytes,), device
        #: Equal where equal launches make it, whichever plan they are of; of a string the hash is worked out once.
        self._key = repr(buffer.made_by)
        self._slots = {buffer.of: 0, buffer.name: 1}
        self._launch = _PreparedLaunch(buffer.made_by, (), self._slots, device)

    def found(self, arrays: Mapping[str, Any]) -> Any:
        """Where it is kept, or else made now, with nothing kept of it where a graph makes it at every launch."""
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
    """Steps that are repeated for one chunk after the other: prepared once, going on with each round."""

    def __init__(self, rounds: Rounds, seconds: Sequence[Rounds], slots: Mapping[str, int], device: Device) -> None:
        self._numbers = range(rounds.times)
        others = zip(*(second.first for second in seconds), rounds.second)
        self._steps = [_prepared_step(step, own, slots, device) for step, own in zip(rounds.first, others)]

    def run(self, device: Device, addresses: Sequence[int], at: At) -> None:
        for number in self._numbers:
            for step in self._steps:
                step.run(device, addresses, (*at, number))


class _PreparedGemm:
    """A GEMM call listed but for its addresses; alpha and beta stay on the host, where cuBLAS reads them.

    A row-major call as cuBLAS, which is column-major, has it: operands swapped.

    ::

        row-major  C[m, n] = A[m, k] B[k, n]      is, read by columns,      C'[n, m] = B'[n, k] A'[k, m]
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
    """A cuFFT call described but for its addresses."""

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
    """A transform as cuFFT is told of it."""
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
    """Address, which is not known yet, type, leading dimension and stride."""
    return 0, _DATA_TYPE[dtype], matrix.ld, matrix.stride


def _operation(matrix: Matrix) -> int:
    if matrix.conjugated:
        assert matrix.transposed
        return _CONJUGATE_TRANSPOSE
    return _TRANSPOSE if matrix.transposed else _NO_TRANSPOSE
