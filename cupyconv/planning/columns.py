"""Plans of im2col and col2im: one method each, a copy and its adjoint."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cupyconv.cuda.plan.column_launches import col2im_launch, im2col_launches
from cupyconv.cuda.plan.conversions import convert
from cupyconv.numpy.loops import BlockLoop
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import Windows
from cupyconv.problem.plan import Buffer, Conversion, Plan, Step
from cupyconv.problem.problems import ColumnsProblem, HostModel


def plan_im2col(problem: ColumnsProblem) -> Plan:
    """Columns of one or many inputs, written straight into the result."""
    windows, columns = problem.windows, problem.columns
    kept = [i for i, channels in enumerate(windows.channels) if channels]
    windows = replace(windows, channels=tuple(windows.channels[i] for i in kept))
    conversions: list[Conversion] = []
    xs = tuple(problem.xs[i] for i in kept)
    steps: list[Step] = []
    if columns.nbytes and isinstance(problem.machine, HostModel):
        steps = [_loop("im2col", windows, [x.name for x in xs], problem)]
    elif columns.nbytes:
        xs = tuple(convert(x, columns.dtype, conversions) for x in xs)
        steps = list(im2col_launches(windows, xs, columns))
    return _plan(problem, "im2col", f"{columns.dtype} {columns.shape[:2] + columns.shape[4:]}", steps, conversions)


def plan_col2im(problem: ColumnsProblem) -> Plan:
    """An image from columns: every element gathers what was read from it."""
    windows, out = problem.windows, problem.xs[0]
    steps: list[Step] = []
    workspace: tuple[Buffer, ...] = ()
    if out.nbytes and isinstance(problem.machine, HostModel):
        part = 0
        if accumulator(out.dtype) != out.dtype:
            channel = out.pixels * ITEMSIZE[accumulator(out.dtype)]
            part = max(1, min(windows.in_channels, (problem.limit - Plan.ALIGNMENT) // channel))
            workspace = (Buffer("sums", part * channel),)
        steps = [_loop("col2im", windows, [problem.columns.name], problem, part)]
    elif out.nbytes:
        steps = [col2im_launch(windows, problem.columns, out)]
    return _plan(
        problem, "col2im", f"{out.dtype} {out.shape[:2] + windows.spatial(out.shape[2:])}", steps, [], workspace
    )


def _loop(body: str, windows: Windows, inputs: list[str], problem: ColumnsProblem, part: int = 0) -> BlockLoop:
    dtype = problem.columns.dtype
    return BlockLoop(
        body=body, inputs=tuple(inputs), block=(1, *windows.out_size), blocks=windows.batch, threads=1,
        geometry=windows, dtype=accumulator(dtype), x_dtype=dtype, weight_dtype=dtype, activation=IDENTITY,
        in_place=False, bytes_moved=problem.minimal_bytes, flops=_additions(problem), part=part,
    )  # fmt: skip


def _plan(
    problem: ColumnsProblem, method: str, result: str, steps: list[Step], conversions: list[Conversion],
    workspace: tuple[Buffer, ...] = (),
) -> Plan:  # fmt: skip
    kernel = "x".join(map(str, problem.windows.spatial(problem.windows.kernel)))
    images = "x".join(map(str, problem.windows.spatial(problem.windows.size)))
    return Plan(
        method=method, backend="numpy" if isinstance(problem.machine, HostModel) else "cuda",
        device=str(problem.machine), result=result, steps=tuple(steps),
        problem=f"{method} {problem.windows.in_channels} channels, kernel {kernel} on {problem.windows.batch} x {images}",
        flops=_additions(problem) if method == "col2im" else 0, bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=problem.minimal_bytes, bound="memory", conversions=tuple(conversions),
        workspace=workspace,
    )  # fmt: skip


def _additions(problem: ColumnsProblem) -> int:
    return prod(problem.columns.shape)
