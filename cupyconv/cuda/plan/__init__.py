"""Planning for CUDA: which method, which launches, how much workspace, and why.

The planners map sizes and strides to a printable `Plan`.  They touch no array and need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyconv.cuda.plan.chain import plan_chain
from cupyconv.cuda.plan.conv import plan_conv
from cupyconv.cuda.plan.conversions import check_alignment
from cupyconv.cuda.plan.epilogue_grad import plan_epilogue_grad
from cupyconv.cuda.plan.im2col import plan_col2im, plan_im2col
from cupyconv.cuda.plan.pool import plan_avg_pool, plan_avg_pool_gradient, plan_max_pool, plan_max_pool_gradient
from cupyconv.cuda.plan.prologue_grad import plan_prologue_grad
from cupyconv.cuda.plan.recurrence import plan_recurrent
from cupyconv.cuda.plan.recurrent_gradient import plan_recurrent_gradient
from cupyconv.cuda.plan.transposed import plan_transposed
from cupyconv.cuda.plan.weight_gradient import plan_weight_gradient
from cupyconv.problem import passes, problems
from cupyconv.problem.plan import Plan
from cupyconv.problem.recurrence import RecurrentGradientProblem, RecurrentProblem

#: Problem class -> its planner.
PLANNERS: dict[type[problems.Problem], Callable[[Any], Plan]] = {
    problems.ConvProblem: plan_conv,
    problems.ChainProblem: plan_chain,
    problems.TransposedProblem: plan_transposed,
    problems.WeightGradientProblem: plan_weight_gradient,
    RecurrentProblem: plan_recurrent,
    RecurrentGradientProblem: plan_recurrent_gradient,
    passes.Im2colProblem: plan_im2col,
    passes.Col2imProblem: plan_col2im,
    passes.EpilogueGradProblem: plan_epilogue_grad,
    passes.PrologueGradProblem: plan_prologue_grad,
    passes.MaxPoolProblem: plan_max_pool,
    passes.MaxPoolGradientProblem: plan_max_pool_gradient,
    passes.AvgPoolProblem: plan_avg_pool,
    passes.AvgPoolGradientProblem: plan_avg_pool_gradient,
}


def plan(problem: problems.Problem) -> Plan:
    """Plan a problem for ``problem.machine``; raise ValueError if the method asked for does not apply."""
    check_alignment(problem.arrays)
    return PLANNERS[type(problem)](problem)
