"""Recurrent layers on NumPy: one method, step by step, and how many steps' gates are in memory at a time."""

from __future__ import annotations

from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.machine import HostModel
from cupyconv.operands import Operand, collapsed_stride
from cupyconv.plan import Buffer, Plan, RecurrentLoop
from cupyconv.planning.numpy import BALANCE
from cupyconv.planning.request import RecurrentRequest

#: Why the other method is a GPU's.
NO_PERSISTENT = "it keeps the recurrent weight in the multiprocessors of a GPU from step to step"


def plan_recurrent(request: RecurrentRequest) -> Plan:
    """The plan; ValueError for a method that does not apply, or where one step's gates pass the limit."""
    if request.method == "persistent":
        raise ValueError(f"method 'persistent' does not apply: {NO_PERSISTENT}")
    assert isinstance(request.machine, HostModel)
    geometry = request.geometry
    empty = not request.out.nbytes and not prod((geometry.directions, geometry.batch, geometry.hidden))
    fixed, per_step = _fixed(request), _per_step(request)
    slack = Plan.ALIGNMENT * (len(fixed) + 2)
    left = request.limit - sum(fixed.values()) - slack
    chunk = min(geometry.steps, left // per_step) if per_step else geometry.steps
    if chunk < min(1, geometry.steps) and not empty:
        least = request.limit - left + per_step
        raise ValueError(f"one step needs {least:,} bytes of workspace, the limit is {request.limit:,}")
    chunk = -(-geometry.steps // -(-geometry.steps // chunk)) if chunk > 0 else 1
    sizes = {**fixed, "gates": chunk * per_step}
    loop = RecurrentLoop(
        geometry=geometry, buffers=tuple((role, operand.name) for role, operand in request.operands.items()),
        dtype=accumulator(request.dtype), chunk=chunk, copies_x=_copies_x(request), bytes_moved=request.minimal_bytes,
        flops=request.flops,
    )  # fmt: skip
    return Plan(
        method="step", backend="numpy", device=str(request.machine), problem=str(geometry),
        result=f"{request.dtype} {request.out.shape}", steps=() if empty else (loop,), flops=request.flops,
        bytes_moved=request.minimal_bytes, minimal_bytes=request.minimal_bytes,
        bound="memory" if request.flops < BALANCE * request.minimal_bytes else "arithmetic",
        rejected=(("persistent", NO_PERSISTENT),), notes=request.notes,
        reason="the inputs of many steps in one product, then step by step",
        workspace=() if empty else tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip


def _copies_x(request: RecurrentRequest) -> bool:
    """Whether x is no matrix (T * N, I) that BLAS takes as it lies."""
    x = request.x
    rows = collapsed_stride(x.shape[:2], x.strides[:2])
    by_row = x.strides[2] == 1 or x.shape[2] == 1
    return x.dtype != accumulator(request.dtype) or not by_row or rows is None or rows < x.shape[2]


def _per_step(request: RecurrentRequest) -> int:
    """Bytes for each step of a chunk: its gates, where they are not kept, and its inputs, where they are copied."""
    geometry, item = request.geometry, ITEMSIZE[accumulator(request.dtype)]
    gates = 0 if request.kept else geometry.gates * geometry.hidden
    return geometry.batch * (gates + geometry.inputs * _copies_x(request)) * item


def _fixed(request: RecurrentRequest) -> dict[str, int]:
    """Bytes that do not depend on the chunk, by purpose."""
    geometry, dtype = request.geometry, accumulator(request.dtype)
    state = geometry.batch * geometry.hidden * ITEMSIZE[dtype]
    weights = (
        sum(_converted(operand, dtype) for operand in (request.weight_ih, request.weight_hh)) // geometry.directions
    )
    return {"weights": weights, "products": state * geometry.gates, "states": 5 * state}


def _converted(operand: Operand, dtype: str) -> int:
    return 0 if operand.dtype == dtype else prod(operand.shape) * ITEMSIZE[dtype]
