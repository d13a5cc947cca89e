"""Choose the method of a convolution on a GPU: draft every applicable method, and let the cost model pick one.

"direct" is one of the kernels that need no columns.  "gemm" is a batched GEMM on columns, or on the inputs themselves.
"implicit_gemm" is one kernel that stores columns only as tiles in shared memory.  "fft" multiplies spectra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.direct import draft_direct
from cupyconv.cuda.plan.draft import Draft, cheapest, drafted
from cupyconv.cuda.plan.epilogue import finish
from cupyconv.cuda.plan.fft import draft_fft
from cupyconv.cuda.plan.gemm import draft_gemm
from cupyconv.cuda.plan.implicit_gemm import draft_implicit_gemm
from cupyconv.cuda.plan.launches import VECTOR_BYTES, vector_width
from cupyconv.problem.arrays import Operand
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Conversion, Plan
from cupyconv.problem.problems import (
    METHODS,
    NO_SUCH_METHOD,
    ConvProblem,
    NotApplicable,
    TransposedProblem,
    WeightGradientProblem,
    without_empty_inputs,
)
from cupyconv.problem.recurrence import RecurrentProblem

#: A class of problem that has several methods.
ChoiceT = TypeVar("ChoiceT", ConvProblem, TransposedProblem, WeightGradientProblem, RecurrentProblem)


def plan_conv(problem: ConvProblem) -> Plan:
    """Plan a convolution by ``problem.method``; raise ValueError if the method asked for does not apply."""
    problem = without_empty_inputs(problem)
    problem, conversions = converted_conv(problem)
    return plan_chosen(problem, draft_conv, conversions, access_notes((*problem.xs, problem.out)))


def converted_conv(problem: ConvProblem) -> tuple[ConvProblem, tuple[Conversion, ...]]:
    """Return the convolution in the dtypes that it is computed in, and the conversions that this requires."""
    x, out = problem.x_dtype, problem.out.dtype
    if problem.weight.dtype != problem.weight_dtype:  # the converted array is a new one in every call
        problem = replace(problem, weight_is_constant=False)
    return converted(problem, xs=x, weight=problem.weight_dtype, bias=out, residual=out, prologue=x)


def plan_chosen(
    problem: ChoiceT,
    draft_of: Callable[[str, ChoiceT], Draft],
    conversions: tuple[Conversion, ...],
    notes: tuple[str, ...] = (),
    methods: Sequence[str] | None = None,
) -> Plan:
    """Return the plan for the method that `choose` picks; `notes` are appended to the notes of the problem."""
    chosen, rejected = choose(problem, draft_of, methods)
    return chosen.plan(problem, rejected, conversions, problem.notes + notes)


def choose(
    problem: ChoiceT, draft_of: Callable[[str, ChoiceT], Draft], methods: Sequence[str] | None = None
) -> tuple[Draft, tuple[tuple[str, str], ...]]:
    """Return the draft of the method asked for, or the cheapest for "auto", and why each other method was rejected."""
    asked, gpu, methods = problem.method, problem.gpu, methods or METHODS
    if asked != "auto":
        others = tuple((method, f"method={asked!r} was asked for") for method in methods if method != asked)
        try:
            return draft_of(asked, problem), others
        except NotApplicable as refusal:
            raise ValueError(f"method {asked!r} does not apply: {refusal}") from None
    drafts, rejected = drafted(methods, lambda method: draft_of(method, problem))
    if not drafts:
        raise ValueError("no method applies: " + "; ".join(f"{method}: {reason}" for method, reason in rejected))
    chosen = cheapest(drafts, gpu)
    rejected += [(draft.method, _why_not(draft, gpu)) for draft in drafts if draft is not chosen]
    return chosen, tuple(rejected)


def _why_not(draft: Draft, gpu: GpuModel) -> str:
    doubt = f"; counted as {draft.doubt:g} times as long until measured on a GPU" if draft.doubt > 1 else ""
    return f"{draft.cost(gpu)}{doubt}"


def draft_conv(method: str, problem: ConvProblem) -> Draft:
    """Draft a convolution by one method, or raise `NotApplicable`."""
    if 0 in (problem.geometry.batch, problem.geometry.out_channels, problem.geometry.pixels):
        return Draft(method, (), reason="the result is empty")
    if problem.geometry.reduction == 0:
        return Draft(method, (finish(problem),), reason="there are no input channels to sum over")
    if method not in _METHODS:
        raise NotApplicable(NO_SUCH_METHOD)
    assert method == "implicit_gemm" or not problem.conjugate
    return _METHODS[method](problem)


_METHODS = {"direct": draft_direct, "gemm": draft_gemm, "implicit_gemm": draft_implicit_gemm, "fft": draft_fft}


def access_notes(images: Iterable[Operand]) -> tuple[str, ...]:
    """Return notes for `explain` that say why an image is not on the fast path."""
    notes = []
    for operand in images:
        if operand.pixels > 1 and operand.pixel_stride is None:
            notes.append(f"{operand.name}: pixels have no uniform stride, so a GEMM cannot read it in place")
        elif operand.pixels > 1 and operand.pixel_stride != 1 and operand.stride_c != 1:
            notes.append(f"{operand.name}: neither pixels nor channels have unit stride: scalar access")
        elif operand.alignment < VECTOR_BYTES:
            notes.append(f"{operand.name}: not {VECTOR_BYTES}-byte aligned: scalar access")
        elif operand.pixel_stride == 1 and vector_width((operand,), operand.pixels) * operand.itemsize < VECTOR_BYTES:
            notes.append(f"{operand.name}: rows are not a multiple of {VECTOR_BYTES} bytes: scalar access")
    return tuple(notes)
