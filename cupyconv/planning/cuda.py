"""The choice of a method on a GPU: every applicable one is drafted, the cost model picks.

"direct" is whichever kernel without columns fits: the fused merge, the depthwise kernel, or the
general one.  "gemm" is columns (or the inputs themselves) and batched GEMM.
"""

from __future__ import annotations

from dataclasses import replace

from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex
from cupyconv.machine import GpuModel
from cupyconv.plan import MAX_SOURCES, KernelLaunch, Plan
from cupyconv.planning.draft import Draft
from cupyconv.planning.gemm import draft_gemm
from cupyconv.planning.launches import (
    PACKET_BYTES,
    SHARED_BYTES,
    collapse,
    depthwise_launch,
    direct_launch,
    epilogue_launch,
    epilogue_params,
    merge_launch,
    merge_tile,
    packet_width,
)
from cupyconv.planning.request import (
    METHODS,
    ConvRequest,
    NotApplicable,
    converted,
    describe_result,
    without_empty_inputs,
)


def plan_conv(request: ConvRequest) -> Plan:
    """The plan for ``request.method``; ValueError where a named method does not apply."""
    gpu = request.machine
    assert isinstance(gpu, GpuModel)
    request = without_empty_inputs(request)
    _check_alignment(request)
    request, conversions = converted(request)
    if conversions:  # they take their share of the workspace first
        left = request.limit - sum(conversion.nbytes for conversion in conversions)
        request = replace(request, workspace_limit=max(0, left))
    drafts: list[Draft] = []
    rejected: list[tuple[str, str]] = []
    for method in METHODS:
        try:
            drafts.append(_draft(method, request))
        except NotApplicable as refusal:
            rejected.append((method, str(refusal)))
    if request.method != "auto":
        for method, reason in rejected:
            if method == request.method:
                raise ValueError(f"method {method!r} does not apply: {reason}")
        rejected += [(draft.method, f"method={request.method!r} was asked for") for draft in drafts]
        rejected = [entry for entry in rejected if entry[0] != request.method]
        chosen = next(draft for draft in drafts if draft.method == request.method)
    elif not drafts:
        raise ValueError("no method applies: " + "; ".join(f"{method}: {reason}" for method, reason in rejected))
    else:
        chosen = min(drafts, key=lambda draft: draft.cost(gpu).seconds)
        rejected += [(draft.method, str(draft.cost(gpu))) for draft in drafts if draft is not chosen]
    cost = chosen.cost(gpu)
    return Plan(
        method=chosen.method, backend="cuda", device=str(gpu), problem=str(request.geometry),
        result=describe_result(request), steps=chosen.steps, flops=request.flops, bytes_moved=chosen.bytes_moved,
        minimal_bytes=request.minimal_bytes, bound=cost.bound, rejected=tuple(rejected),
        reason=f"{chosen.reason}; {cost}", notes=request.notes + _lost(request), conversions=conversions,
        workspace=chosen.workspace,
    )  # fmt: skip


def _check_alignment(request: ConvRequest) -> None:
    for operand in (*request.xs, request.weight, request.out, request.bias, request.residual):
        if operand is not None and operand.alignment < operand.itemsize:
            raise ValueError(
                f"{operand.name} is not aligned to its elements of {operand.itemsize} bytes: copy it first"
            )


def _draft(method: str, request: ConvRequest) -> Draft:
    if 0 in (request.geometry.batch, request.geometry.out_channels, request.geometry.pixels):
        return Draft(method, (), reason="the result is empty")
    if request.geometry.reduction == 0:
        return Draft(method, (_only_epilogue(request),), reason="there are no input channels to sum over")
    return draft_gemm(request) if method == "gemm" else _draft_direct(request)


def _draft_direct(request: ConvRequest) -> Draft:
    """The best kernel that needs no columns."""
    geometry = request.geometry
    if len(request.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(request.xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    operands = (request.xs, request.weight, request.out)
    images = [*request.xs, request.out] + ([request.residual] if request.residual else [])
    same_real_type = not is_complex(request.out.dtype)
    size, flat = collapse(images, geometry.out_size)
    unit = all(image.pixel_stride == 1 for image in flat[: len(request.xs) + 1])
    if geometry.is_pointwise and geometry.groups == 1 and same_real_type and unit and size[:2] == (1, 1):
        if merge_tile(geometry, request.out.dtype) is not None:
            residual = flat[-1] if request.residual else None
            epilogue = epilogue_params(request.bias, residual, request.activation)
            return Draft("direct", (merge_launch(geometry, *operands, epilogue),), reason="fused merge")
    epilogue = epilogue_params(request.bias, request.residual, request.activation)
    tap_bytes = geometry.taps * ITEMSIZE[accumulator(request.out.dtype)]
    if geometry.is_depthwise and same_real_type and tap_bytes <= SHARED_BYTES:
        return Draft("direct", (depthwise_launch(geometry, *operands, epilogue),), reason="depthwise kernel")
    return Draft("direct", (direct_launch(geometry, *operands, epilogue),), reason="general kernel")


def _only_epilogue(request: ConvRequest) -> KernelLaunch:
    return epilogue_launch(
        request.geometry, request.out, sums=None, bias=request.bias, residual=request.residual, activation=request.activation,
    )  # fmt: skip


def _lost(request: ConvRequest) -> tuple[str, ...]:
    """What keeps an operand off the fast path."""
    notes = []
    for operand in (*request.xs, request.out):
        if operand.pixels > 1 and operand.pixel_stride is None:
            notes.append(f"{operand.name}: its pixels have no one stride, so no GEMM can read it in place")
        elif operand.pixels > 1 and operand.pixel_stride != 1 and operand.stride_c != 1:
            notes.append(f"{operand.name}: neither pixels nor channels have unit stride: scalar access")
        elif operand.alignment < PACKET_BYTES:
            notes.append(f"{operand.name}: not {PACKET_BYTES}-byte aligned: scalar access")
        elif operand.pixel_stride == 1 and packet_width((operand,), operand.pixels) * operand.itemsize < PACKET_BYTES:
            notes.append(f"{operand.name}: its rows are no whole number of {PACKET_BYTES}-byte packets: scalar access")
    return tuple(notes)
