"""Recurrent layers on NumPy: one method, step by step, and how many steps' gates are in memory at a time."""

from __future__ import annotations

from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.machine import HostModel
from cupyconv.operands import collapsed_stride
from cupyconv.plan import Buffer, Plan, RecurrentLoop
from cupyconv.planning.numpy import BALANCE
from cupyconv.planning.request import RecurrentRequest

#: Steps from which the weight of the state is copied, so that products read it in the order they work in.
COPIED_STEPS = 4
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
    sizes = {**fixed, "inputs": chunk * per_step}
    loop = RecurrentLoop(
        geometry=geometry, buffers=tuple((role, operand.name) for role, operand in request.operands.items()),
        dtype=accumulator(request.dtype), chunk=chunk, copied=_copied(request), bytes_moved=request.minimal_bytes,
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


def _copied(request: RecurrentRequest) -> tuple[str, ...]:
    """Factors that are copied: what BLAS does not take as it lies, and a state's weight that is used often."""
    x, dtype = request.x, accumulator(request.dtype)
    rows = collapsed_stride(x.shape[:2], x.strides[:2])
    x_lies = x.dtype == dtype and x.strides[2] == 1 and rows is not None and rows >= x.shape[2]
    lies = {
        role: weight.dtype == dtype and weight.strides[2] == 1 and weight.strides[1] >= weight.shape[2]
        for role, weight in (("weight_ih", request.weight_ih), ("weight_hh", request.weight_hh))
    }
    lies["weight_hh"] &= request.geometry.steps < COPIED_STEPS
    return tuple(role for role, as_it_is in {"x": x_lies, **lies}.items() if not as_it_is)


def _per_step(request: RecurrentRequest) -> int:
    """Bytes for each step of a chunk: what its inputs add to the gates, and these where they are copied."""
    geometry, item = request.geometry, ITEMSIZE[accumulator(request.dtype)]
    inputs = geometry.inputs if "x" in _copied(request) else 0
    return geometry.batch * (geometry.gates * geometry.hidden + inputs) * item


def _fixed(request: RecurrentRequest) -> dict[str, int]:
    """Bytes that do not depend on the chunk, by purpose."""
    geometry, item = request.geometry, ITEMSIZE[accumulator(request.dtype)]
    state = geometry.batch * geometry.hidden * item
    weights = [getattr(request, role) for role in _copied(request) if role != "x"]
    return {
        "weights": sum(prod(weight.shape[1:]) * item for weight in weights),
        "gates": state * geometry.gates,
        "states": (6 if request.peephole else 4) * state,
    }
