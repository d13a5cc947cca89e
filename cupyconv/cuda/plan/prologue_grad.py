"""Back through a prologue on a GPU: the derivative where elements were transformed, and two sums per channel.

A block works on a part of the pixels of some channels, as on the way back through an epilogue.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from cupyconv.cuda.plan.epilogue_grad import cut, pass_and_sum
from cupyconv.cuda.plan.launches import collapse, image, packet_width, prologue_params
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.passes import PrologueGradProblem
from cupyconv.problem.plan import Address, Conversion, Kernel, KernelLaunch, Plan
from cupyconv.problem.problems import check_alignment, convert, converted_prologue


def plan_prologue_grad(problem: PrologueGradProblem) -> Plan:
    """One pass over the gradient and the input."""
    check_alignment((*problem.images, *problem.prologue.vectors))
    conversions: list[Conversion] = []
    problem = replace(
        problem,
        x=convert(problem.x, problem.grad.dtype, conversions),
        prologue=converted_prologue(problem.prologue, problem.grad.dtype, conversions),
    ).sharing_with(conversions)
    steps, workspace = pass_and_sum(problem, partial(_launch, problem))
    return problem.planned(steps, workspace=workspace, conversions=tuple(conversions))


def _launch(problem: PrologueGradProblem, sums: Address | None, most_parts: int) -> KernelLaunch:
    batch, channels = problem.grad.shape[:2]
    size, images = collapse(problem.images)
    along_channels = channels > 1 and all(operand.stride_c == 1 for operand in images)
    width = 1 if along_channels else packet_width(images, prod(size))
    grid, threads, lanes = cut(problem, width, along_channels, most_parts)
    out = image(images[2]) if problem.out else (None, 0, 0, (0, 0, 0))
    sums_bytes = 2 * grid[0] * channels * ITEMSIZE[accumulator(problem.grad.dtype)] * bool(sums)
    return KernelLaunch(
        Kernel("prologue_grad", (("DTYPE", problem.grad.dtype), ("WIDTH", str(width)))),
        grid,
        threads,
        (
            ("grad", image(images[0])),
            ("x", image(images[1])),
            ("out", out),
            ("prologue", prologue_params(problem.prologue)),
            ("partial", sums),
            ("size", size),
            ("batch", batch),
            ("pixels", prod(size)),
            ("channels", channels),
            ("lanes", lanes),
        ),
        purpose=f"derivative of {problem.prologue}" + ", sums of channels" * bool(sums),
        bytes_moved=sum(operand.nbytes for operand in images) + sums_bytes,
    )
