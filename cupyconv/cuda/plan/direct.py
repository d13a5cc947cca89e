"""Plan method "direct": the first kernel without columns that fits, of fused merge, depthwise and general kernel."""

from __future__ import annotations

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.depthwise import draft_depthwise
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import (
    convolution_params,
    epilogue_params,
    grid_and_block,
    groups_params,
    prologue_words,
    variant,
)
from cupyconv.cuda.plan.merge import draft_merge
from cupyconv.problem.plan import MAX_MERGED, MAX_SOURCES, KernelLaunch
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Outputs per thread of direct.cu and transposed.cu.
TILE = 4


def draft_direct(problem: ConvProblem) -> Draft:
    """Draft the most specialized kernel that applies, or raise `NotApplicable`."""
    merge = draft_merge(problem)
    if merge is not None:
        return merge
    if len(problem.xs) > MAX_SOURCES:
        most = f"{MAX_MERGED} for a merge, {MAX_SOURCES} for other kernels"
        raise NotApplicable(f"{len(problem.xs)} inputs; at most {most} are supported")
    return draft_depthwise(problem) or Draft("direct", (_launch(problem),), reason="general kernel")


def _launch(problem: ConvProblem) -> KernelLaunch:
    """Return the launch of the general kernel."""
    geometry, prologue, out = problem.geometry, problem.prologue, problem.out
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    tiles = geometry.groups * -(-geometry.group_outputs // TILE)
    launch = KernelLaunch(
        variant(
            "direct", prologue, X_DTYPE=problem.x_dtype, W_DTYPE=problem.weight_dtype, Y_DTYPE=out.dtype, TILE=TILE
        ),
        *grid_and_block(geometry.batch, geometry.pixels, 1, tiles, 128),
        (*convolution_params(problem, out, epilogue), *groups_params(geometry)),
        purpose=f"convolution{prologue_words(prologue)}, bias, residual, activation",
        bytes_moved=problem.minimal_bytes,
        flops=problem.flops,
    )
    return cost.priced(launch, cost.core_rate(out.dtype, problem.gpu) * cost.GENERAL, problem.gpu)
