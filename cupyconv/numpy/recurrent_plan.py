"""Recurrent layers on NumPy: one method, step by step, and how many steps' gates are in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.numpy.convolution_plan import BALANCE
from cupyconv.numpy.loops import RecurrentLoop
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import HostModel
from cupyconv.problem.recurrence import RecurrentProblem

#: Activations that have no temporaries.
IN_PLACE = ("none", "relu", "relu6", "clip", "sigmoid", "tanh", "affine", "scaled_tanh")
#: Why the other method is a GPU's.
NO_PERSISTENT = "it keeps the recurrent weight in the multiprocessors of a GPU from step to step"


def plan_recurrent(problem: RecurrentProblem) -> Plan:
    """The plan; ValueError for a method that does not apply, or where one step of one sample passes the limit."""
    if problem.method == "persistent":
        raise ValueError(f"method 'persistent' does not apply: {NO_PERSISTENT}")
    geometry = problem.geometry
    empty = not problem.out.nbytes and not prod((geometry.directions, geometry.batch, geometry.hidden))
    work = _fitting(problem)
    loop = RecurrentLoop(
        geometry=geometry, buffers=tuple((role, operand.name) for role, operand in problem.operands.items()),
        dtype=accumulator(problem.dtype), samples=work.samples, chunk=work.chunk, threads=work.threads,
        copied=work.copied, bias_column=_bias_column(problem), bytes_moved=problem.minimal_bytes, flops=problem.flops,
    )  # fmt: skip
    return Plan(
        method="step", backend="numpy", device=str(problem.machine), problem=str(geometry),
        result=f"{problem.dtype} {problem.out.shape}", steps=() if empty else (loop,), flops=problem.flops,
        bytes_moved=problem.minimal_bytes, minimal_bytes=problem.minimal_bytes,
        bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic",
        rejected=(("persistent", NO_PERSISTENT),), notes=problem.notes,
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


def _fitting(problem: RecurrentProblem) -> _Work:
    """All samples, or a part for each thread, and of these what fits the limit; then as many steps as fit."""
    geometry = problem.geometry
    assert isinstance(problem.machine, HostModel)
    threads = problem.machine.threads
    samples = even_part(geometry.batch, -(-geometry.batch // max(1, threads // geometry.directions)))
    while True:
        parts = -(-geometry.batch // samples)
        at_once = max(1, min(threads, geometry.directions * parts))
        copied = _copied(problem)
        fixed, per_step = _fixed(problem, copied, samples, at_once), at_once * _per_step(problem, copied, samples)
        limit = problem.limit_with(fixed["weights"])
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


def _copied(problem: RecurrentProblem) -> tuple[str, ...]:
    """Factors that are copied: what BLAS does not take as it lies."""
    x, dtype = problem.x, accumulator(problem.dtype)
    lies = {"x": x.dtype == dtype and x.strides[2] == 1 and x.strides[1] >= x.shape[2]}
    for role, weight in (("weight_ih", problem.weight_ih), ("weight_hh", problem.weight_hh)):
        lies[role] = weight.dtype == dtype and weight.strides[2] == 1 and weight.strides[1] >= weight.shape[2]
    if _bias_column(problem):
        lies |= {"x": False, "weight_ih": True}  # it is copied as the column is joined to it
    return tuple(role for role, as_it_is in lies.items() if not as_it_is)


def _bias_column(problem: RecurrentProblem) -> bool:
    """Whether biases are a column of the input's weight: where copies of both factors take less than a pass over all gates."""
    geometry = problem.geometry
    gates, samples = geometry.gates * geometry.hidden, geometry.steps * geometry.batch
    biased = problem.bias_ih is not None or problem.bias_hh is not None
    fits = 8 * gates * (geometry.inputs + 1) * ITEMSIZE[accumulator(problem.dtype)] <= problem.limit
    return biased and fits and samples * gates > geometry.inputs * (samples + gates)


def _per_step(problem: RecurrentProblem, copied: tuple[str, ...], samples: int) -> int:
    """Bytes for each step of a chunk: what its inputs add to the gates, and these where they are copied."""
    geometry, item = problem.geometry, ITEMSIZE[accumulator(problem.dtype)]
    inputs = geometry.inputs + _bias_column(problem) if "x" in copied else 0
    return samples * (geometry.gates * geometry.hidden + inputs) * item


def _fixed(problem: RecurrentProblem, copied: tuple[str, ...], samples: int, at_once: int) -> dict[str, int]:
    """Bytes that do not depend on the chunk, by purpose."""
    geometry, item = problem.geometry, ITEMSIZE[accumulator(problem.dtype)]
    state = at_once * samples * geometry.hidden * item
    weights = [prod(getattr(problem, role).shape) for role in copied if role != "x"]
    if _bias_column(problem):
        weights.append(at_once * geometry.gates * geometry.hidden * (geometry.inputs + 1))
    temporaries = any(activation.name not in IN_PLACE for group in geometry.activations for activation in group)
    return {
        "weights": sum(weights) * item,
        "gates": state * geometry.gates,
        "states": (6 if problem.peephole else 4) * state,
        "activations": 2 * temporaries * state * geometry.gates,
    }
