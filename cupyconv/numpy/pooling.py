"""Pooling and its gradients on NumPy: the plan, with one step per image that is written.

::

    max_pool   max_pool with indices   its gradient        avg_pool   its gradient
       |               |                    |                  |           |
    MaxPool      LargestPlaces       MaxPoolGradient        AvgPool   AvgPoolGradient      a block (max_pool, avg_pool)
       |      or ...BySearch      or ...BySearch               |           |
       +---------------+--------------------+------------------+-----------+
                                     PoolingStep                                           the loop over blocks (pool_blocks)
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from cupyconv.numpy.avg_pool import AvgPool, AvgPoolGradient
from cupyconv.numpy.choice import long_loop
from cupyconv.numpy.max_pool import (
    LargestPlaces,
    LargestPlacesBySearch,
    MaxPool,
    MaxPoolGradient,
    MaxPoolGradientBySearch,
)
from cupyconv.numpy.pool_blocks import PoolingStep
from cupyconv.problem.passes import (
    AvgPoolGradientProblem,
    AvgPoolProblem,
    MaxPoolGradientProblem,
    MaxPoolProblem,
    PoolingProblem,
)
from cupyconv.problem.plan import Plan

#: The steps that solve each kind of problem; the first is the fastest one for `FEW_TAPS` taps.
STEPS: dict[type[PoolingProblem], tuple[type[PoolingStep], ...]] = {
    MaxPoolProblem: (MaxPool,),
    MaxPoolGradientProblem: (MaxPoolGradient, MaxPoolGradientBySearch),
    AvgPoolProblem: (AvgPool,),
    AvgPoolGradientProblem: (AvgPoolGradient,),
}
#: The steps that find maxima and their positions.
PLACES: tuple[type[PoolingStep], ...] = (LargestPlaces, LargestPlacesBySearch)
#: Taps of a window up to which only the first kind of step is planned, if it fits the workspace.
FEW_TAPS = 16


def plan_pooling(problem: PoolingProblem) -> Plan:
    """Plan a pooling, which computes one number per window, or the gradient of a pooling."""
    finds_places = isinstance(problem, MaxPoolProblem) and problem.indices
    kinds = PLACES if finds_places else STEPS[type(problem)]
    steps = [_fastest(one, kinds) for one in problem.each]
    notes = problem.notes + long_loop(steps)
    return problem.planned(steps, {"blocks": max((one.workspace for one in steps), default=0)}, notes=notes)


def _fastest(problem: PoolingProblem, kinds: Sequence[type[PoolingStep]]) -> PoolingStep:
    """Plan the kind of step with the least estimated time, of those that fit the workspace."""
    steps: list[PoolingStep] = []
    refusals = []
    for kind in kinds:
        if steps and problem.windows.taps <= FEW_TAPS:
            break
        try:
            steps.append(kind.of(problem))
        except ValueError as refusal:
            refusals.append(str(refusal))
    if not steps:
        raise ValueError(refusals[-1])
    return min(steps, key=attrgetter("seconds"))
