"""Plans for a GPU that keep the pre-activation beside the result: one more pass, from the one to the other."""

from __future__ import annotations

from dataclasses import replace

from cupyconv.activations import Activation
from cupyconv.geometry import pointwise_geometry
from cupyconv.operands import Operand
from cupyconv.plan import Plan
from cupyconv.planning.launches import epilogue_launch


def with_activation(plan: Plan, pre: Operand, out: Operand, activation: Activation) -> Plan:
    """A plan whose result is `pre`, and the activation of that in `out`."""
    if not plan.steps:
        return plan
    channels = pre.shape[1]
    elements = pointwise_geometry({"pre": pre.shape}, (channels, channels))
    launch = epilogue_launch(elements, out, sums=None, bias=None, residual=pre, activation=activation)
    launch = replace(launch, purpose=f"{activation} of the pre-activation, which is kept")
    return replace(
        plan, steps=(*plan.steps, launch), bytes_moved=plan.bytes_moved + launch.bytes_moved,
        minimal_bytes=plan.minimal_bytes + out.nbytes,
    )  # fmt: skip
