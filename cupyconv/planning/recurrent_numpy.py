"""Recurrent layers on NumPy: one method, step by step, and how many steps' gates are in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.loops import RecurrentLoop
from cupyconv.machine import HostModel
from cupyconv.plan import Buffer, Plan
from cupyconv.planning.even_parts import even_part
from cupyconv.planning.numpy import BALANCE
from cupyconv.planning.request import RecurrentRequest

#: Activations that have no temporaries.
IN_PLACE = ("none", "relu", "relu6", "clip", "sigmoid", "tanh", "affine", "scaled_tanh")
#: Why the other method is a GPU's.
NO_PERSISTENT = "it keeps the recurrent weight in the multiprocessors of a GPU from step to step"


def plan_recurrent(request: RecurrentRequest) -> Plan:
    """The plan; ValueError for a method that does not apply, or where one step of one sample passes the limit."""
    if request.method == "persistent":
        raise ValueError(f"method 'persistent' does not apply: {NO_PERSISTENT}")
    geometry = request.geometry
    empty = not request.out.nbytes and not prod((geometry.directions, geometry.batch, geometry.hidden))
    work = _fitting(request)
    loop = RecurrentLoop(
        geometry=geometry, buffers=tuple((role, operand.name) for role, operand in request.operands.items()),
        dtype=accumulator(request.dtype), samples=work.samples, chunk=work.chunk, threads=work.threads,
        copied=work.copied, bias_column=_bias_column(request), bytes_moved=request.minimal_bytes, flops=request.flops,
    )  # fmt: skip
    return Plan(
        method="step", backend="numpy", device=str(request.machine), problem=str(geometry),
        result=f"{request.dtype} {request.out.shape}", steps=() if empty else (loop,), flops=request.flops,
        bytes_moved=request.minimal_bytes, minimal_bytes=request.minimal_bytes,
        bound="memory" if request.flops < BALANCE * request.minimal_bytes else "arithmetic",
        rejected=(("persistent", NO_PERSISTENT),), notes=request.notes,
        reason="the inputs of many steps in one product, then step by step",
        workspace=() if empty else tuple(Buffer(name, nbytes) for name, nbytes in work.sizes.items() if nbytes),
    )  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """How many samples and steps are worked on by how many threads, and the bytes of that by purpose."""

    samples: int
    chunk: int
    threads: int
    copied: tuple[str, ...]
    sizes: dict[str, int]


def _fitting(request: RecurrentRequest) -> _Work:
    """All samples, or a part for each thread, and of these what fits the limit; then as many steps as fit."""
    geometry = request.geometry
    assert isinstance(request.machine, HostModel)
    threads = request.machine.threads
    samples = even_part(geometry.batch, -(-geometry.batch // max(1, threads // geometry.directions)))
    while True:
        parts = -(-geometry.batch // samples)
        at_once = max(1, min(threads, geometry.directions * parts))
        copied = _copied(request)
        fixed, per_step = _fixed(request, copied, samples, at_once), at_once * _per_step(request, copied, samples)
        limit = request.limit_with(fixed["weights"])
        left = limit - sum(fixed.values()) - Plan.ALIGNMENT * (len(fixed) + 2)
        chunk = min(geometry.steps, left // per_step) if per_step else geometry.steps
        if chunk >= min(1, geometry.steps):
            chunk = even_part(geometry.steps, chunk)
            return _Work(samples, chunk, at_once, copied, {**fixed, "inputs": chunk * per_step})
        if samples > 1:
            samples = even_part(geometry.batch, samples // 2)
        elif at_once > 1:
            threads = at_once // 2
        else:
            least = limit - left + per_step
            raise ValueError(f"one step of one sample needs {least:,} bytes of workspace, the limit is {limit:,}")


def _copied(request: RecurrentRequest) -> tuple[str, ...]:
    """Factors that are copied: what BLAS does not take as it lies."""
    x, dtype = request.x, accumulator(request.dtype)
    lies = {"x": x.dtype == dtype and x.strides[2] == 1 and x.strides[1] >= x.shape[2]}
    for role, weight in (("weight_ih", request.weight_ih), ("weight_hh", request.weight_hh)):
        lies[role] = weight.dtype == dtype and weight.strides[2] == 1 and weight.strides[1] >= weight.shape[2]
    if _bias_column(request):
        lies |= {"x": False, "weight_ih": True}  # it is copied as the column is joined to it
    return tuple(role for role, as_it_is in lies.items() if not as_it_is)


def _bias_column(request: RecurrentRequest) -> bool:
    """Whether biases are a column of the input's weight: where copies of both factors take less than a pass over all gates."""
    geometry = request.geometry
    gates, samples = geometry.gates * geometry.hidden, geometry.steps * geometry.batch
    biased = request.bias_ih is not None or request.bias_hh is not None
    fits = 8 * gates * (geometry.inputs + 1) * ITEMSIZE[accumulator(request.dtype)] <= request.limit
    return biased and fits and samples * gates > geometry.inputs * (samples + gates)


def _per_step(request: RecurrentRequest, copied: tuple[str, ...], samples: int) -> int:
    """Bytes for each step of a chunk: what its inputs add to the gates, and these where they are copied."""
    geometry, item = request.geometry, ITEMSIZE[accumulator(request.dtype)]
    inputs = geometry.inputs + _bias_column(request) if "x" in copied else 0
    return samples * (geometry.gates * geometry.hidden + inputs) * item


def _fixed(request: RecurrentRequest, copied: tuple[str, ...], samples: int, at_once: int) -> dict[str, int]:
    """Bytes that do not depend on the chunk, by purpose."""
    geometry, item = request.geometry, ITEMSIZE[accumulator(request.dtype)]
    state = at_once * samples * geometry.hidden * item
    weights = [prod(getattr(request, role).shape) for role in copied if role != "x"]
    if _bias_column(request):
        weights.append(at_once * geometry.gates * geometry.hidden * (geometry.inputs + 1))
    temporaries = any(activation.name not in IN_PLACE for group in geometry.activations for activation in group)
    return {
        "weights": sum(weights) * item,
        "gates": state * geometry.gates,
        "states": (6 if request.peephole else 4) * state,
        "activations": 2 * temporaries * state * geometry.gates,
    }
