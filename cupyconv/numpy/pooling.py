"""Pooling and its gradients on NumPy: the plan, with one step per image that is written.

::

    max_pool   max_pool with indices   its gradient        avg_pool   its gradient
       |               |                    |                  |           |
    MaxPool      LargestPlaces       MaxPoolGradient        AvgPool   AvgPoolGradient      a block (max_pool, avg_pool)
       +---------------+--------------------+------------------+-----------+
                                     PoolingStep                                           the loop over blocks (pool_blocks)
"""

from __future__ import annotations

from cupyconv.numpy.avg_pool import AvgPool, AvgPoolGradient
from cupyconv.numpy.choice import long_loop
from cupyconv.numpy.max_pool import LargestPlaces, MaxPool, MaxPoolGradient
from cupyconv.numpy.pool_blocks import PoolingStep
from cupyconv.problem.passes import (
    AvgPoolGradientProblem,
    AvgPoolProblem,
    MaxPoolGradientProblem,
    MaxPoolProblem,
    PoolingProblem,
)
from cupyconv.problem.plan import Plan

#: The step that solves each kind of problem.
STEPS: dict[type[PoolingProblem], type[PoolingStep]] = {
    MaxPoolProblem: MaxPool,
    MaxPoolGradientProblem: MaxPoolGradient,
    AvgPoolProblem: AvgPool,
    AvgPoolGradientProblem: AvgPoolGradient,
}


def plan_pooling(problem: PoolingProblem) -> Plan:
    """Plan a pooling, which computes one number per window, or the gradient of a pooling."""
    step = LargestPlaces if isinstance(problem, MaxPoolProblem) and problem.indices else STEPS[type(problem)]
    steps = [step.of(one) for one in problem.each]
    notes = problem.notes + long_loop(steps)
    return problem.planned(steps, {"blocks": max((one.workspace for one in steps), default=0)}, notes=notes)
