"""The depthwise kernel: one small kernel per channel, or groups of a few channels, which it adds one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import kept_apart
from cupyconv.cuda.plan.launches import (
    GRID_Y,
    WARP,
    convolution_params,
    epilogue_params,
    grid_and_block,
    is_along_channels,
    prologue_words,
    variant,
)
from cupyconv.problem.arrays import Operand, is_complex
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import KernelLaunch
from cupyconv.problem.problems import ConvProblem

#: Square kernels, with their stride along h, that depthwise.cu is compiled for: without a prologue, with one, and for
#: groups of more than one channel.  (0, 0) stands for any other kernel.
KERNELS = ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1))
PROLOGUE_KERNELS = ((3, 1), (3, 2))
GROUPED_KERNELS = ((3, 1), (3, 2))
ANY_KERNEL = (0, 0)
#: Pixels per thread, by stride; 0 stands for any other stride.
ROWS = {0: 1, 1: 8, 2: 4}
#: Limit for the bytes of a plane and for pixels, which depthwise.cu counts in 32 bits.
PLANE_EXTENT = 2**30


def draft_depthwise(problem: ConvProblem) -> Draft | None:
    """Draft the depthwise kernel, for any number of outputs per channel; None if the general kernel is better."""
    if is_complex(problem.out.dtype) or problem.geometry.groups == 1:
        return None
    kernel = _kernel(problem)
    # Groups of several channels need a kernel compiled for them, without a prologue; otherwise the general kernel is
    # faster.
    is_grouped = problem.geometry.group_channels > 1
    if is_grouped and (problem.prologue or kernel == ANY_KERNEL):
        return None
    result, activation, after = kept_apart(problem)
    epilogue = epilogue_params(problem.bias, problem.residual, activation)
    geometry, out, (size, stride) = problem.geometry, problem.out, kernel
    depth, height, width = geometry.out_size
    strips = geometry.batch * depth * -(-height // ROWS[stride]) * width
    lanes = min(WARP, 1 << (out.shape[1] - 1).bit_length()) if is_along_channels(out) else 1
    (blocks, _, _), block = grid_and_block(strips, lanes, 1, 1, 128)
    grouped = {"GROUPED": 1} if is_grouped else {}
    launch = KernelLaunch(
        variant("depthwise", problem.prologue, DTYPE=out.dtype, KERNEL=size, STRIDE=stride, **grouped),
        (blocks, min(-(-geometry.out_channels // lanes), GRID_Y), 1),
        block,
        (
            *convolution_params(problem, result, epilogue),
            ("outputs", geometry.out_channels),
            ("group_outputs", geometry.group_outputs),
            ("group_channels", geometry.group_channels),
            ("channel_lanes", lanes),
        ),
        purpose=f"convolution{prologue_words(problem.prologue)}, bias, residual, activation",
        bytes_moved=problem.minimal_bytes - out.nbytes * len(after),
        flops=problem.flops,
    )
    launch = cost.priced(launch, cost.core_rate(out.dtype, problem.gpu) * cost.DEPTHWISE, problem.gpu)
    return Draft("direct", (launch, *after), reason="depthwise kernel" + ", channel by channel" * is_grouped)


def _kernel(problem: ConvProblem) -> tuple[int, int]:
    """Return the listed kernel and stride to compile for, if 32 bits suffice for all its counts; else `ANY_KERNEL`."""
    geometry, weight = problem.geometry, problem.weight
    kernels = GROUPED_KERNELS if geometry.group_channels > 1 else PROLOGUE_KERNELS if problem.prologue else KERNELS
    return listed_kernel(geometry, problem.xs, (replace(weight, strides=tuple(map(abs, weight.strides))),), kernels)


def listed_kernel(
    geometry: ConvGeometry, xs: Sequence[Operand], others: Sequence[Operand], kernels: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return kernel and stride if listed and served by strips of pixels (kernels/strip.cuh), else `ANY_KERNEL`."""
    depth, height, width = geometry.kernel
    listed = depth == 1 and height == width and (height, geometry.stride[1]) in kernels
    images = (*xs, *others)
    planes = (op.itemsize * sum((n - 1) * step for n, step in zip(op.shape[2:], op.strides[2:])) for op in images)
    extents = map(sum, zip(geometry.size, geometry.before, geometry.after))
    counts = [*extents, geometry.batch * geometry.pixels, *planes]
    forward = all(min(x.strides[2:]) >= 0 for x in xs)
    if listed and geometry.dilation[1:] == (1, 1) and forward and max(counts) < PLANE_EXTENT:
        return height, geometry.stride[1]
    return ANY_KERNEL
