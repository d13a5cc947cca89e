"""im2col and col2im on a GPU: a copy of windows, in launches of up to MAX_SOURCES inputs, and its adjoint in one."""

from __future__ import annotations

from cupyconv.cuda.plan.launches import col2im_launch, im2col_launches
from cupyconv.problem.passes import Col2imProblem, Im2colProblem
from cupyconv.problem.plan import Conversion, Plan
from cupyconv.problem.problems import convert, inputs_with_channels


def plan_im2col(problem: Im2colProblem) -> Plan:
    """Columns of one or many inputs, written straight into the result."""
    columns = problem.columns
    if not columns.nbytes:
        return problem.planned([])
    kept, windows = inputs_with_channels(problem.windows)
    conversions: list[Conversion] = []
    xs = tuple(convert(problem.xs[i], columns.dtype, conversions) for i in kept)
    return problem.planned(im2col_launches(windows, xs, columns), conversions=tuple(conversions))


def plan_col2im(problem: Col2imProblem) -> Plan:
    """An image from columns: every element gathers what was read from it."""
    (out,) = problem.xs
    return problem.planned([col2im_launch(problem.windows, problem.columns, out)] if out.nbytes else [])
