"""Weight gradient with few outputs: the input and the output gradient exchange their roles.

::

    dW[o, c, t]   =   sum over p of   grad[o, p] x[c, p + t]   =   sum over q of   x[c, q] grad[o, q - t]

The right side uses columns of the reversed `grad`, and reads x in place.  With few outputs and many channels, `grad`
has fewer columns than x.  The right side is the weight gradient of another convolution, and is planned like any other.

Zero padding around `grad` replaces that around x.  The two differ only if a factor is not finite, and then the sums are
not finite either.  In this case they are recomputed by the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, seconds_of
from cupyconv.numpy.choice import by_another
from cupyconv.numpy.weight_sums import WeightGradientLoop
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import accumulator, c_strides, dtype_from_name, is_complex
from cupyconv.problem.geometry import Triple
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import NotApplicable, WeightGradientProblem

#: Smallest ratio of channels to outputs for which the roles are exchanged.
FEWER = 2
#: NumPy calls in addition to those of the loops.
CALLS = 10

Planner = Callable[[WeightGradientProblem], Plan]


@dataclass(frozen=True)
class ExchangedLoops(NumpyStep):
    """Compute the exchanged gradient and copy it to the result; if it is not finite, recompute it by the definition."""

    problem: WeightGradientProblem
    exchanged: WeightGradientProblem
    loops: tuple[WeightGradientLoop, ...]
    planner: Planner
    workspace: int

    @property
    def turns(self) -> int:
        return sum(loop.turns for loop in self.loops)

    @property
    def calls(self) -> float:
        return CALLS + sum(loop.calls for loop in self.loops)

    @property
    def seconds(self) -> float:
        return seconds_of(self.loops) + CALLS * cost.CALL

    def __str__(self) -> str:
        return "\n".join(f"{loop}, roles of x and the gradient exchanged" for loop in self.loops)

    @cached_property
    def _others(self) -> tuple[NumpyStep, ...]:
        """Steps that compute the gradient by the definition, within the same workspace if that is possible."""
        try:
            plan = self.planner(replace(self.problem, workspace_limit=self.workspace))
        except ValueError:
            plan = self.planner(self.problem)
        return cast("tuple[NumpyStep, ...]", plan.steps)

    def run(self, arrays: Mapping[str, Any]) -> None:
        problem, own = self.problem, self.exchanged.out
        geometry = problem.geometry
        gradient = np.empty(own.shape, dtype_from_name(own.dtype))
        (x,) = problem.xs
        parts = {x.name: arrays["grad"], "grad": arrays[x.name], "out": gradient}
        for loop in self.loops:
            loop.run(parts)
        if not np.isfinite(gradient.sum()):
            del gradient, parts
            for step in self._others:
                step.run(arrays)
            return
        by_group = gradient.reshape(geometry.groups, geometry.group_channels, geometry.group_outputs, *geometry.kernel)
        out = five_axes(arrays["out"])
        place = out.reshape(geometry.groups, geometry.group_outputs, *out.shape[1:])
        place[...] = by_group.swapaxes(1, 2)[..., ::-1, ::-1, ::-1]


def plan_exchanged(problem: WeightGradientProblem, planner: Planner) -> Plan:
    """Plan the problem with x and `grad` exchanged; raises NotApplicable if that is impossible or gains nothing.

    `planner` plans a problem without exchanging anything.
    """
    geometry = problem.geometry
    pads = list(zip(geometry.span, geometry.before, geometry.after))
    before = cast("Triple", tuple(span - 1 - pad for span, pad, _ in pads))
    after = cast("Triple", tuple(span - 1 - pad for span, _, pad in pads))
    is_like = (
        len(problem.xs) == 1
        and geometry.stride == (1, 1, 1)
        and geometry.padding_mode == "constant"
        and not problem.prologue
        and problem.dtype == accumulator(problem.dtype)
        and not (is_complex(problem.x_dtype) or is_complex(problem.grad_dtype))
        and min(before + after) >= 0
        # Otherwise an element of the gradient might be multiplied by padding only, which the sums do not reveal.
        and all(size >= gap for size, gap in zip(geometry.size, geometry.dilation))
    )
    if not is_like or geometry.group_channels < FEWER * geometry.group_outputs or not problem.out.nbytes:
        raise NotApplicable("exchanging x and the gradient is not possible or gains nothing")
    (x,) = problem.xs
    shape = (geometry.in_channels, geometry.group_outputs, *geometry.kernel)
    exchanged = replace(
        problem,
        geometry=replace(
            geometry,
            channels=(geometry.out_channels,),
            out_channels=geometry.in_channels,
            size=geometry.out_size,
            before=before,
            after=after,
        ),
        xs=(replace(problem.grad, name=x.name),),
        grad=replace(x, name="grad"),
        out=replace(problem.out, shape=shape, strides=c_strides(shape), offset=0, alignment=16),
        x_dtype=problem.grad_dtype,
        grad_dtype=problem.x_dtype,
        workspace_limit=problem.limit - problem.out.nbytes,
    )
    assert exchanged.geometry.out_size == geometry.size
    plan = planner(exchanged)
    loops = cast("tuple[WeightGradientLoop, ...]", plan.steps)
    step = ExchangedLoops(problem, exchanged, loops, planner, plan.workspace_bytes + problem.out.nbytes)
    return by_another(
        problem,
        plan,
        [step],
        reason=f"roles of x and the gradient exchanged, {plan.reason}",
        workspace=(*plan.workspace, Buffer("exchanged", problem.out.nbytes)),
    )
