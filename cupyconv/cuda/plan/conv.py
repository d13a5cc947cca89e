"""The choice of a convolution's method on a GPU: every applicable one is drafted, the cost model picks.

"direct" is whichever kernel without columns fits: the fused merge, the depthwise kernel, or the
general one.  "gemm" is columns (or the inputs themselves) and batched GEMM, "implicit_gemm" one kernel
whose columns are only ever tiles in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.gemm import draft_gemm
from cupyconv.cuda.plan.implicit_gemm import draft_implicit_gemm
from cupyconv.cuda.plan.launches import (
    PACKET_BYTES,
    activation_launch,
    collapse,
    depthwise_launch,
    direct_launch,
    epilogue_launch,
    epilogue_params,
    is_grouped_depthwise,
    merge_launch,
    merge_tile,
    packet_width,
)
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import Operand, is_complex
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_MERGED, MAX_SOURCES, KernelLaunch, Plan
from cupyconv.problem.problems import (
    METHODS,
    ConvProblem,
    NotApplicable,
    check_alignment,
    converted,
    without_empty_inputs,
)


def plan_conv(problem: ConvProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    problem = without_empty_inputs(problem)
    check_alignment(problem.arrays)
    problem, conversions = converted(problem)
    problem = problem.sharing_with(conversions)
    chosen, rejected = choose(problem.method, lambda method: draft_conv(method, problem), problem.gpu)
    notes = problem.notes + access_notes((*problem.xs, problem.out))
    return chosen.plan(problem, str(problem.geometry), problem.result, rejected, conversions, notes)


def choose(
    asked: str, draft_of: Callable[[str], Draft], gpu: GpuModel, methods: Sequence[str] = METHODS
) -> tuple[Draft, tuple[tuple[str, str], ...]]:
    """The draft of the method asked for, or for "auto" the cheapest; and why not the others."""
    if asked != "auto":
        others = tuple((method, f"method={asked!r} was asked for") for method in methods if method != asked)
        try:
            return draft_of(asked), others
        except NotApplicable as refusal:
            raise ValueError(f"method {asked!r} does not apply: {refusal}") from None
    drafts: list[Draft] = []
    rejected: list[tuple[str, str]] = []
    for method in methods:
        try:
            drafts.append(draft_of(method))
        except NotApplicable as refusal:
            rejected.append((method, str(refusal)))
    if not drafts:
        raise ValueError("no method applies: " + "; ".join(f"{method}: {reason}" for method, reason in rejected))
    chosen = min(drafts, key=lambda draft: draft.cost(gpu).seconds)
    rejected += [(draft.method, str(draft.cost(gpu))) for draft in drafts if draft is not chosen]
    return chosen, tuple(rejected)


def draft_conv(method: str, problem: ConvProblem) -> Draft:
    """A convolution by one method, or NotApplicable."""
    if 0 in (problem.geometry.batch, problem.geometry.out_channels, problem.geometry.pixels):
        return Draft(method, (), reason="the result is empty")
    if problem.geometry.reduction == 0:
        return Draft(method, (_only_epilogue(problem),), reason="there are no input channels to sum over")
    return _METHODS[method](problem)


def _draft_direct(problem: ConvProblem) -> Draft:
    """The best kernel that needs no columns."""
    geometry = problem.geometry
    images = [*problem.xs, problem.out] + ([problem.residual] if problem.residual else [])
    same_real_type = not is_complex(problem.out.dtype)
    prologue = problem.prologue
    size, flat = collapse(images)
    unit = all(image.pixel_stride == 1 for image in flat[: len(problem.xs) + 1])
    merges = geometry.is_pointwise and geometry.groups == 1 and same_real_type and unit and size[:2] == (1, 1)
    if merges and len(problem.xs) <= MAX_MERGED and merge_tile(geometry, problem.out.dtype, prologue) is not None:
        residual = flat[-1] if problem.residual else None
        result, activation = _kept_apart(problem)
        epilogue = epilogue_params(problem.bias, residual, IDENTITY if activation else problem.activation)
        launch = merge_launch(geometry, problem.xs, problem.weight, result, residual, epilogue, prologue)
        return Draft("direct", (launch, *activation), reason="fused merge")
    if len(problem.xs) > MAX_SOURCES:
        most = f"{MAX_MERGED} of a merge, {MAX_SOURCES} of other kernels"
        raise NotApplicable(f"{len(problem.xs)} inputs; the parameters hold {most}")
    grouped = is_grouped_depthwise(geometry, problem.xs, problem.weight, prologue)
    if same_real_type and (geometry.is_depthwise or grouped):
        result, activation = _kept_apart(problem)
        epilogue = epilogue_params(problem.bias, problem.residual, IDENTITY if activation else problem.activation)
        launch = depthwise_launch(geometry, problem.xs, problem.weight, result, epilogue, prologue)
        return Draft("direct", (launch, *activation), reason="depthwise kernel" + ", channel by channel" * grouped)
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    launch = direct_launch(geometry, problem.xs, problem.weight, problem.out, epilogue, prologue)
    return Draft("direct", (launch,), reason="general kernel")


def _kept_apart(problem: ConvProblem) -> tuple[Operand, tuple[KernelLaunch, ...]]:
    """What a kernel writes whose registers are full of sums, and, where that is a pre-activation to keep, the pass
    from there to the result."""
    if problem.pre is None:
        return problem.out, ()
    return problem.pre, (activation_launch(problem.pre, problem.out, problem.activation),)


_METHODS = {"direct": _draft_direct, "gemm": draft_gemm, "implicit_gemm": draft_implicit_gemm}


def _only_epilogue(problem: ConvProblem) -> KernelLaunch:
    return epilogue_launch(
        problem.out, bias=problem.bias, residual=problem.residual, activation=problem.activation, pre=problem.pre
    )


def access_notes(images: Iterable[Operand]) -> tuple[str, ...]:
    """What keeps an image off the fast path."""
    notes = []
    for operand in images:
        if operand.pixels > 1 and operand.pixel_stride is None:
            notes.append(f"{operand.name}: its pixels have no one stride, so no GEMM can read it in place")
        elif operand.pixels > 1 and operand.pixel_stride != 1 and operand.stride_c != 1:
            notes.append(f"{operand.name}: neither pixels nor channels have unit stride: scalar access")
        elif operand.alignment < PACKET_BYTES:
            notes.append(f"{operand.name}: not {PACKET_BYTES}-byte aligned: scalar access")
        elif operand.pixel_stride == 1 and packet_width((operand,), operand.pixels) * operand.itemsize < PACKET_BYTES:
            notes.append(f"{operand.name}: its rows are no whole number of {PACKET_BYTES}-byte packets: scalar access")
    return tuple(notes)
