"""Plans of the way back through a prologue: the derivative where elements were transformed, and two sums a channel.

As the way back through an epilogue: on CUDA a block works on a part of the pixels of some channels, and the parts'
sums are added by a second launch; on NumPy block by block.  The order of additions is the plan's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from cupyconv.cuda.plan.conversions import check_alignment, convert, converted_prologue
from cupyconv.cuda.plan.launches import collapse, image, prologue_params, vector_width
from cupyconv.planning.epilogue_grad import cut, on_cuda, on_numpy
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.plan import Address, Conversion, Kernel, KernelLaunch, Plan
from cupyconv.problem.problems import HostModel, PrologueGradProblem

#: Arrays of a block's size on NumPy: x, the transformed, its derivative, what that is worked out in, the products.
TEMPORARIES = 6


def plan_prologue_grad(problem: PrologueGradProblem) -> Plan:
    """One pass over the gradient and the input."""
    conversions: list[Conversion] = []
    if isinstance(problem.machine, HostModel):
        activation = problem.prologue.activation
        steps, workspace = on_numpy(problem, "prologue_grad", activation, TEMPORARIES, flops=4)
    else:
        check_alignment((*problem.images, *problem.prologue.vectors))
        problem = replace(
            problem,
            x=convert(problem.x, problem.grad.dtype, conversions),
            prologue=converted_prologue(problem.prologue, problem.grad.dtype, conversions),
        ).sharing_with(conversions)
        steps, workspace = on_cuda(problem, partial(_launch, problem))
    grad = problem.grad
    return Plan(
        method="prologue_grad", backend="numpy" if isinstance(problem.machine, HostModel) else "cuda",
        device=str(problem.machine),
        problem=f"gradient of {problem.prologue}, {grad.dtype} {grad.shape}", result=f"{grad.dtype} {grad.shape}",
        steps=tuple(steps), flops=4 * prod(grad.shape), bytes_moved=sum(step.bytes_moved for step in steps),
        minimal_bytes=sum(operand.nbytes for operand in problem.images), bound="memory",
        conversions=tuple(conversions), workspace=tuple(workspace),
    )  # fmt: skip


def _launch(problem: PrologueGradProblem, sums: Address | None, most_parts: int) -> KernelLaunch:
    batch, channels = problem.grad.shape[:2]
    size, images = collapse(problem.images)
    along_channels = channels > 1 and all(operand.stride_c == 1 for operand in images)
    width = 1 if along_channels else vector_width(images, prod(size))
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
