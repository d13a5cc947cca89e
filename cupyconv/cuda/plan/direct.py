"""Method "direct": whichever kernel without columns fits, the fused merge, the depthwise kernel, or the general one."""

from __future__ import annotations

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.depthwise import draft_depthwise
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import (
    bytes_of,
    convolution_params,
    epilogue_params,
    grid_and_block,
    prologue_words,
    with_prologue,
)
from cupyconv.cuda.plan.merge import draft_merge
from cupyconv.problem.arrays import product_flops
from cupyconv.problem.plan import MAX_MERGED, MAX_SOURCES, KernelLaunch
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Outputs per thread of direct.cu and of transposed.cu.
TILE = 4


def draft_direct(problem: ConvProblem) -> Draft:
    """The best kernel that needs no columns."""
    merge = draft_merge(problem)
    if merge is not None:
        return merge
    if len(problem.xs) > MAX_SOURCES:
        most = f"{MAX_MERGED} of a merge, {MAX_SOURCES} of other kernels"
        raise NotApplicable(f"{len(problem.xs)} inputs; the parameters hold {most}")
    return draft_depthwise(problem) or Draft("direct", (_launch(problem),), reason="general kernel")


def _launch(problem: ConvProblem) -> KernelLaunch:
    """Direct convolution, for everything."""
    geometry, prologue, out = problem.geometry, problem.prologue, problem.out
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    macros = (
        ("X_DTYPE", problem.x_dtype),
        ("W_DTYPE", problem.weight_dtype),
        ("Y_DTYPE", out.dtype),
        ("TILE", str(TILE)),
    )
    tiles = geometry.groups * -(-geometry.group_outputs // TILE)
    flops = geometry.products * product_flops(problem.x_dtype, problem.weight_dtype)
    return KernelLaunch(
        with_prologue("direct", macros, prologue),
        *grid_and_block(geometry.batch, geometry.pixels, 1, tiles, 128),
        (
            *convolution_params(problem, out, epilogue),
            ("groups", geometry.groups),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
        ),
        purpose=f"convolution{prologue_words(prologue)}, bias, residual, activation",
        bytes_moved=bytes_of(problem.xs) + problem.weight.nbytes + out.nbytes,
        flops=flops,
        arithmetic_seconds=flops / (cost.core_rate(out.dtype, problem.gpu) * cost.GENERAL),
    )
