"""Decisions for CUDA: which method, which launches, how much workspace, and why.

Ints in, a printable `Plan` out; no array is touched here, and no GPU is needed.
"""

from __future__ import annotations

from importlib import import_module

from cupyconv.problem import passes, problems, recurrence
from cupyconv.problem.plan import Plan

#: Problem -> the module and function that plan it, imported when first asked for: most programs have a few kinds.
_PLANNERS: dict[type[problems.Problem], tuple[str, str]] = {
    problems.ConvProblem: ("cupyconv.cuda.plan.conv", "plan_conv"),
    problems.ChainProblem: ("cupyconv.cuda.plan.chain", "plan_chain"),
    problems.TransposedProblem: ("cupyconv.cuda.plan.transposed", "plan_transposed"),
    problems.WeightGradientProblem: ("cupyconv.cuda.plan.weight_gradient", "plan_weight_gradient"),
    recurrence.RecurrentProblem: ("cupyconv.cuda.plan.recurrence", "plan_recurrent"),
    recurrence.RecurrentGradientProblem: ("cupyconv.cuda.plan.recurrent_gradient", "plan_recurrent_gradient"),
    passes.Im2colProblem: ("cupyconv.cuda.plan.im2col", "plan_im2col"),
    passes.Col2imProblem: ("cupyconv.cuda.plan.im2col", "plan_col2im"),
    passes.EpilogueGradProblem: ("cupyconv.cuda.plan.epilogue_grad", "plan_epilogue_grad"),
    passes.PrologueGradProblem: ("cupyconv.cuda.plan.prologue_grad", "plan_prologue_grad"),
    passes.PoolingProblem: ("cupyconv.cuda.plan.max_pool", "plan_max_pool"),
    passes.PoolingGradientProblem: ("cupyconv.cuda.plan.max_pool", "plan_max_pool_gradient"),
}


def plan(problem: problems.Problem) -> Plan:
    """How a problem runs on ``problem.machine``; ValueError where a named method does not apply."""
    module, function = _PLANNERS[type(problem)]
    planned: Plan = getattr(import_module(module), function)(problem)
    return planned
