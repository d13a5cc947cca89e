"""max_pool and its gradient on a GPU: one launch for each image, one thread for a pixel of CHANNELS channels."""

from __future__ import annotations

from math import inf, prod
from typing import Any

from cupyconv.cuda.plan.conversions import check_alignment, convert
from cupyconv.cuda.plan.launches import bytes_of, grid_and_block, image, variant, windows_params
from cupyconv.problem.arrays import Operand
from cupyconv.problem.passes import PoolingGradientProblem, PoolingProblem
from cupyconv.problem.plan import Conversion, KernelLaunch, Plan

#: Channels per thread of max_pool.cu and max_pool_gradient.cu: what it works out for a pixel serves them all.
CHANNELS = 4
#: Threads that go along the channels of a channels-last image, at most.
LANES = 32


def plan_max_pool(problem: PoolingProblem) -> Plan:
    """The largest element of every window."""
    return problem.planned([_max_pool(one) for one in problem.each])


def plan_max_pool_gradient(problem: PoolingGradientProblem) -> Plan:
    """Each window's gradient, at the element that was its largest."""
    conversions: list[Conversion] = []
    return problem.planned([_gradient(one, conversions) for one in problem.each], conversions=tuple(conversions))


def _max_pool(problem: PoolingProblem) -> KernelLaunch:
    images = {"x": problem.xs[0]}
    return _launch("max_pool", problem, images, problem.windows.pixels, "the largest of each window", ("nothing", -inf))


def _gradient(problem: PoolingGradientProblem, conversions: list[Conversion]) -> KernelLaunch:
    (x,), (y,), (grad,) = problem.xs, problem.ys, problem.grads
    images = {"x": x, "y": y, "grad": convert(grad, x.dtype, conversions)}
    pixels = prod(problem.windows.size)
    return _launch("max_pool_gradient", problem, images, pixels, "gradients of the largest")


def _launch(
    kernel: str,
    problem: PoolingProblem,
    images: dict[str, Operand],
    pixels: int,
    purpose: str,
    *constants: tuple[str, Any],
) -> KernelLaunch:
    """The launch that reads `images` of one problem and writes so many pixels."""
    windows, (out,) = problem.windows, problem.outs
    check_alignment(problem.arrays)
    lanes = _lanes(images["x"])
    groups = -(-windows.in_channels // (CHANNELS * lanes))
    return KernelLaunch(
        variant(kernel, DTYPE=out.dtype, CHANNELS=CHANNELS),
        *grid_and_block(windows.batch, pixels * lanes, 1, groups, 256),
        (
            *((name, image(operand)) for name, operand in images.items()),
            ("windows", windows_params(windows)),
            ("out", image(out)),
            ("batch", windows.batch),
            *constants,
            ("channels", windows.in_channels),
            ("lanes", lanes),
        ),
        purpose=f"{purpose}, threads along {'channels' if lanes > 1 else 'pixels'}",
        bytes_moved=bytes_of(images.values()) + out.nbytes,
        flops=problem.flops,
    )


def _lanes(x: Operand) -> int:
    """Neighbouring threads that take neighbouring channels: 1 where it is pixels that lie side by side."""
    pixel_steps = [abs(step) for extent, step in zip(x.shape[2:], x.strides[2:]) if extent > 1]
    if all(abs(x.stride_c) < step for step in pixel_steps):
        return max(1, min(LANES, -(-x.shape[1] // CHANNELS)))
    return 1
