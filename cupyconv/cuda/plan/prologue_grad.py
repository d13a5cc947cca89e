"""The gradient of a prologue on a GPU: the derivative of the transformed elements, and two sums per channel.

A block computes some channels of a part of the pixels, as in the gradient of an epilogue.
"""

from __future__ import annotations

from functools import partial
from math import prod

from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.epilogue_grad import cut, pass_and_sum
from cupyconv.cuda.plan.launches import bytes_of, collapse, image, prologue_params, variant, vector_width
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.passes import PrologueGradProblem
from cupyconv.problem.plan import Address, KernelLaunch, Plan


def plan_prologue_grad(problem: PrologueGradProblem) -> Plan:
    """Plan one pass over the gradient and the input."""
    problem, conversions = converted(problem, x=problem.grad.dtype, prologue=problem.grad.dtype)
    steps, workspace = pass_and_sum(problem, partial(_launch, problem))
    return problem.planned(steps, workspace=workspace, conversions=conversions)


def _launch(problem: PrologueGradProblem, sums: Address | None, most_parts: int) -> KernelLaunch:
    batch, channels = problem.grad.shape[:2]
    size, images = collapse(problem.images)
    along_channels = all(operand.stride_c == 1 for operand in images)  # `stride_c` of a single channel is 0
    width = 1 if along_channels else vector_width(images, prod(size))
    grid, threads, lanes = cut(problem, width, along_channels, most_parts)
    grad, x, *outs = images
    sums_bytes = 2 * grid[0] * channels * ITEMSIZE[accumulator(problem.grad.dtype)] * bool(sums)
    return KernelLaunch(
        variant("prologue_grad", DTYPE=problem.grad.dtype, WIDTH=width),
        grid,
        threads,
        (
            ("grad", image(grad)),
            ("x", image(x)),
            ("out", image(outs[0] if outs else None)),
            ("prologue", prologue_params(problem.prologue)),
            ("partial", sums),
            ("size", size),
            ("batch", batch),
            ("pixels", prod(size)),
            ("channels", channels),
            ("lanes", lanes),
        ),
        purpose=f"derivative of {problem.prologue}" + ", sums of channels" * bool(sums),
        bytes_moved=bytes_of((*images, *problem.prologue.vectors)) + sums_bytes,
    )
