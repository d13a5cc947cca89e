"""Decisions for CUDA: which method, which launches, how much workspace, and why.

Ints in, a printable `Plan` out; no array is touched here, and no GPU is needed.
"""

from __future__ import annotations

from cupyconv.problem import passes, problems
from cupyconv.problem.plan import Plan
from cupyconv.problem.recurrence import RecurrentGradientProblem, RecurrentProblem


def plan(problem: problems.Problem) -> Plan:
    """How a problem runs on ``problem.machine``; ValueError where a named method does not apply."""
    # Imported when first asked for: most programs have a few kinds of problem.
    match problem:
        case problems.ConvProblem():
            from cupyconv.cuda.plan.conv import plan_conv

            return plan_conv(problem)
        case problems.ChainProblem():
            from cupyconv.cuda.plan.chain import plan_chain

            return plan_chain(problem)
        case problems.TransposedProblem():
            from cupyconv.cuda.plan.transposed import plan_transposed

            return plan_transposed(problem)
        case problems.WeightGradientProblem():
            from cupyconv.cuda.plan.weight_gradient import plan_weight_gradient

            return plan_weight_gradient(problem)
        case RecurrentProblem():
            from cupyconv.cuda.plan.recurrence import plan_recurrent

            return plan_recurrent(problem)
        case RecurrentGradientProblem():
            from cupyconv.cuda.plan.recurrent_gradient import plan_recurrent_gradient

            return plan_recurrent_gradient(problem)
        case passes.Im2colProblem():
            from cupyconv.cuda.plan.im2col import plan_im2col

            return plan_im2col(problem)
        case passes.Col2imProblem():
            from cupyconv.cuda.plan.im2col import plan_col2im

            return plan_col2im(problem)
        case passes.EpilogueGradProblem():
            from cupyconv.cuda.plan.epilogue_grad import plan_epilogue_grad

            return plan_epilogue_grad(problem)
        case passes.PrologueGradProblem():
            from cupyconv.cuda.plan.prologue_grad import plan_prologue_grad

            return plan_prologue_grad(problem)
        case passes.PoolingGradientProblem():
            from cupyconv.cuda.plan.max_pool import plan_max_pool_gradient

            return plan_max_pool_gradient(problem)
        case passes.PoolingProblem():
            from cupyconv.cuda.plan.max_pool import plan_max_pool

            return plan_max_pool(problem)
    raise AssertionError(problem)
