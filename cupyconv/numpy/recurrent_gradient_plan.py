"""Gradients of recurrent layers on NumPy: back through time in runs of as many steps as the workspace holds."""

from __future__ import annotations

from math import prod

from cupyconv.numpy.convolution_plan import BALANCE
from cupyconv.numpy.loops import RecurrentGradientLoop
from cupyconv.problem.arrays import ITEMSIZE, c_strides
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import HostModel
from cupyconv.problem.recurrence import RecurrentGradientProblem

#: Arrays of (N, H) for each step of a run beside its gates' gradients: states before the steps, and what the
#: gradients are multiplied with; then those that this is worked out in.
_ARRAYS = {"rnn": 1 + 5, "lstm": 4 + 9, "gru": 3 + 9}
#: The same that last from step to step: states' gradients, copies of them, products.
_STATES = {"rnn": 2, "lstm": 4, "gru": 3}
#: Bytes of a product that is added to a weight's gradient.
BLOCK_BYTES = 1 << 19


def plan_recurrent_gradient(problem: RecurrentGradientProblem) -> Plan:
    """The plan; ValueError where one step of one sample passes the limit."""
    assert isinstance(problem.machine, HostModel)
    geometry = problem.geometry
    samples, run, sizes = _fitting(problem)
    width = max(1, geometry.inputs, geometry.hidden) * ITEMSIZE[problem.dtype]
    loop = RecurrentGradientLoop(
        geometry=geometry, run=run, samples=samples, block=max(1, BLOCK_BYTES // width), dtype=problem.dtype,
        bytes_moved=problem.minimal_bytes, flops=problem.flops,
    )  # fmt: skip
    return Plan(
        method="step", backend="numpy", device=str(problem.machine), problem=problem.title, result=problem.result,
        steps=(loop,), flops=problem.flops, bytes_moved=problem.minimal_bytes, minimal_bytes=problem.minimal_bytes,
        bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic",
        reason="activations and their derivatives of many steps at once, then back step by step",
        workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip


def _fitting(problem: RecurrentGradientProblem) -> tuple[int, int, dict[str, int]]:
    """All samples, or a part of them of which a step fits the limit; as many steps as fit; and the bytes by purpose."""
    geometry, item = problem.geometry, ITEMSIZE[problem.dtype]
    rows, hidden, inputs = geometry.gates * geometry.hidden, geometry.hidden, geometry.inputs
    x_copies = 1 + (geometry.directions == 2)  # what is beyond a length left out; a product to be added
    width = max(inputs, hidden) * item
    fixed = {"weights": _copied_weights(problem), "product": min(rows * width, max(BLOCK_BYTES, width))}
    samples = geometry.batch
    while True:
        per_step = samples * (rows + _ARRAYS[geometry.cell] * hidden + x_copies * inputs) * item
        fixed["states"] = _STATES[geometry.cell] * samples * hidden * item
        limit = problem.limit_with(fixed["weights"])
        left = limit - sum(fixed.values()) - Plan.ALIGNMENT * (len(fixed) + 1)
        run = min(geometry.steps, left // per_step) if per_step else geometry.steps
        if run >= min(1, geometry.steps):
            run = even_part(geometry.steps, run)
            return samples, run, {**fixed, "run of steps": run * per_step}
        if samples <= 1:
            least = limit - left + per_step
            raise ValueError(f"one step of one sample needs {least:,} bytes of workspace, the limit is {limit:,}")
        samples = even_part(geometry.batch, samples // 2)


def _copied_weights(problem: RecurrentGradientProblem) -> int:
    """Bytes of one direction's weights that are copied: of another dtype, or not in C order."""
    weights = (problem.operands[name] for name in ("weight_ih", "weight_hh"))
    return sum(
        prod(weight.shape[1:]) * ITEMSIZE[problem.dtype]
        for weight in weights
        if weight.dtype != problem.dtype or weight.strides != c_strides(weight.shape)
    )
