"""Gradients of recurrent layers on NumPy: back through time in runs of as many steps as the workspace holds."""

from __future__ import annotations

from math import prod

from cupyconv.dtypes import ITEMSIZE
from cupyconv.machine import HostModel
from cupyconv.plan import Buffer, Plan, RecurrentGradientLoop
from cupyconv.planning.numpy import BALANCE
from cupyconv.planning.request import RecurrentGradientRequest

#: Arrays of (N, H) for each step of a run beside its gates' gradients: states before the steps, and what the
#: gradients are multiplied with; then those that this is worked out in.
_ARRAYS = {"rnn": 1 + 5, "lstm": 4 + 9, "gru": 3 + 9}
#: The same that last from step to step: states' gradients, copies of them, products.
_STATES = {"rnn": 2, "lstm": 4, "gru": 3}


def plan_recurrent_gradient(request: RecurrentGradientRequest) -> Plan:
    """The plan; ValueError where one step's gates pass the limit."""
    assert isinstance(request.machine, HostModel)
    geometry, item = request.geometry, ITEMSIZE[request.dtype]
    rows, hidden, inputs = geometry.gates * geometry.hidden, geometry.hidden, geometry.inputs
    arrays, operands = _ARRAYS[geometry.cell], request.operands
    x_copies = 1 + (geometry.directions == 2)  # what is beyond a length left out; a product to be added
    per_step = geometry.batch * (rows + arrays * hidden + x_copies * inputs) * item
    weights = sum(prod(operands[name].shape) for name in ("weight_ih", "weight_hh")) // geometry.directions * item
    fixed = {"weights": 2 * weights, "states": _STATES[geometry.cell] * geometry.batch * hidden * item}
    left = request.limit - sum(fixed.values()) - Plan.ALIGNMENT * (len(fixed) + 1)
    most = min(geometry.steps, left // per_step) if per_step else geometry.steps
    if most < min(1, geometry.steps):
        least = request.limit - left + per_step
        raise ValueError(f"one step needs {least:,} bytes of workspace, the limit is {request.limit:,}")
    steps = -(-geometry.steps // -(-geometry.steps // most)) if most else 0
    loop = RecurrentGradientLoop(
        geometry=geometry, run=steps, dtype=request.dtype, bytes_moved=request.minimal_bytes, flops=request.flops
    )
    sizes = {**fixed, "run of steps": steps * per_step}
    return Plan(
        method="step", backend="numpy", device=str(request.machine), problem=request.problem, result=request.result,
        steps=(loop,), flops=request.flops, bytes_moved=request.minimal_bytes, minimal_bytes=request.minimal_bytes,
        bound="memory" if request.flops < BALANCE * request.minimal_bytes else "arithmetic",
        reason="activations and their derivatives of many steps at once, then back step by step",
        workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip
