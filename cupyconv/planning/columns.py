"""Plans of im2col and col2im: one method each, a copy and its adjoint."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cupyconv.activations import IDENTITY
from cupyconv.dtypes import ITEMSIZE, accumulator
from cupyconv.geometry import Windows
from cupyconv.loops import BlockLoop
from cupyconv.machine import HostModel
from cupyconv.plan import Buffer, Conversion, Plan, Step
from cupyconv.planning.launches import col2im_launch, im2col_launches
from cupyconv.planning.request import ColumnsRequest, convert


def plan_im2col(request: ColumnsRequest) -> Plan:
    """Columns of one or many inputs, written straight into the result."""
    windows, columns = request.windows, request.columns
    kept = [i for i, channels in enumerate(windows.channels) if channels]
    windows = replace(windows, channels=tuple(windows.channels[i] for i in kept))
    conversions: list[Conversion] = []
    xs = tuple(request.xs[i] for i in kept)
    steps: list[Step] = []
    if columns.nbytes and isinstance(request.machine, HostModel):
        steps = [_loop("im2col", windows, [x.name for x in xs], request)]
    elif columns.nbytes:
        xs = tuple(convert(x, columns.dtype, conversions) for x in xs)
        steps = list(im2col_launches(windows, xs, columns))
    return _plan(request, "im2col", f"{columns.dtype} {columns.shape[:2] + columns.shape[4:]}", steps, conversions)


def plan_col2im(request: ColumnsRequest) -> Plan:
    """An image from columns: every element gathers what was read from it."""
    windows, out = request.windows, request.xs[0]
    steps: list[Step] = []
    workspace: tuple[Buffer, ...] = ()
    if out.nbytes and isinstance(request.machine, HostModel):
        part = 0
        if accumulator(out.dtype) != out.dtype:
            channel = out.pixels * ITEMSIZE[accumulator(out.dtype)]
            part = max(1, min(windows.in_channels, (request.limit - Plan.ALIGNMENT) // channel))
            workspace = (Buffer("sums", part * channel),)
        steps = [_loop("col2im", windows, [request.columns.name], request, part)]
    elif out.nbytes:
        steps = [col2im_launch(windows, request.columns, out)]
    return _plan(
        request, "col2im", f"{out.dtype} {out.shape[:2] + windows.spatial(out.shape[2:])}", steps, [], workspace
    )


def _loop(body: str, windows: Windows, inputs: list[str], request: ColumnsRequest, part: int = 0) -> BlockLoop:
    dtype = request.columns.dtype
    return BlockLoop(
        body=body, inputs=tuple(inputs), block=(1, *windows.out_size), blocks=windows.batch, threads=1,
        geometry=windows, dtype=accumulator(dtype), x_dtype=dtype, weight_dtype=dtype, activation=IDENTITY,
        in_place=False, bytes_moved=request.minimal_bytes, flops=_additions(request), part=part,
    )  # fmt: skip


def _plan(
    request: ColumnsRequest, method: str, result: str, steps: list[Step], conversions: list[Conversion],
    workspace: tuple[Buffer, ...] = (),
) -> Plan:  # fmt: skip
    kernel = "x".join(map(str, request.windows.spatial(request.windows.kernel)))
    images = "x".join(map(str, request.windows.spatial(request.windows.size)))
    return Plan(
        method=method, backend="numpy" if isinstance(request.machine, HostModel) else "cuda",
        device=str(request.machine), result=result, steps=tuple(steps),
        problem=f"{method} {request.windows.in_channels} channels, kernel {kernel} on {request.windows.batch} x {images}",
        flops=_additions(request) if method == "col2im" else 0, bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=request.minimal_bytes, bound="memory", conversions=tuple(conversions),
        workspace=workspace,
    )  # fmt: skip


def _additions(request: ColumnsRequest) -> int:
    return prod(request.columns.shape)
