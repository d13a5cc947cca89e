"""Pooling and its gradients on a GPU: one launch per image, one thread per pixel of `CHANNELS` channels."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from typing import Any

from cupyconv.cuda.plan.conversions import convert
from cupyconv.cuda.plan.launches import bytes_of, grid_and_block, image, variant, windows_params
from cupyconv.problem.arrays import Operand
from cupyconv.problem.passes import (
    AvgPoolGradientProblem,
    AvgPoolProblem,
    MaxPoolGradientProblem,
    MaxPoolProblem,
    PoolingProblem,
)
from cupyconv.problem.plan import Conversion, KernelLaunch, Plan

#: Channels per thread of pool.cu and pool_gradient.cu, which share the index arithmetic of the pixel.
CHANNELS = 4
#: Maximum number of neighbouring threads along the channels of a channels-last image.
LANES = 32
#: What a kernel computes for a window.
LARGEST, LARGEST_AND_PLACE, MEAN = "LARGEST", "LARGEST_AND_PLACE", "MEAN"

#: The fields of `Counted` for a launch that does not count taps.
_NO_COUNT = ((0, 0, 0), (0, 0, 0))


def plan_max_pool(problem: MaxPoolProblem) -> Plan:
    """Plan the largest element of every window, and its index."""
    return problem.planned([_max_pool(one) for one in problem.each])


def plan_avg_pool(problem: AvgPoolProblem) -> Plan:
    """Plan the mean of every window."""
    return problem.planned([_avg_pool(one) for one in problem.each])


def plan_max_pool_gradient(problem: MaxPoolGradientProblem) -> Plan:
    """Plan the gradient of max pooling: each window passes its gradient to its largest element."""
    conversions: list[Conversion] = []
    steps = [_max_pool_gradient(one, conversions) for one in problem.each]
    return problem.planned(steps, conversions=tuple(conversions))


def plan_avg_pool_gradient(problem: AvgPoolGradientProblem) -> Plan:
    """Plan the gradient of average pooling: each window divides its gradient equally among its elements."""
    return problem.planned([_avg_pool_gradient(one) for one in problem.each])


def _max_pool(problem: MaxPoolProblem) -> KernelLaunch:
    (x,), places = problem.xs, [*problem.indices, None]
    number = LARGEST_AND_PLACE if problem.indices else LARGEST
    written = ("indices", image(places[0])), ("counted", _NO_COUNT)
    return _launch("pool", number, problem, {"x": x}, "maximum of each window", written, ("nothing", -inf))


def _avg_pool(problem: AvgPoolProblem) -> KernelLaunch:
    (x,), counted = problem.xs, (("indices", image(None)), ("counted", problem.counted))
    return _launch("pool", MEAN, problem, {"x": x}, "mean of each window", counted, ("nothing", 0.0))


def _max_pool_gradient(problem: MaxPoolGradientProblem, conversions: list[Conversion]) -> KernelLaunch:
    (x,), (y,), (grad,) = problem.xs, problem.ys, problem.grads
    images = {"x": x, "y": y, "grad": convert(grad, x.dtype, conversions)}
    counted = (("counted", _NO_COUNT),)
    return _launch("pool_gradient", LARGEST, problem, images, "gradient of the maximum", counted)


def _avg_pool_gradient(problem: AvgPoolGradientProblem) -> KernelLaunch:
    (grad,), counted = problem.grads, (("counted", problem.counted),)
    images = {"x": None, "y": None, "grad": grad}
    return _launch("pool_gradient", MEAN, problem, images, "gradient of the mean", counted)


def _launch(
    kernel: str,
    number: str,
    problem: PoolingProblem,
    images: Mapping[str, Operand | None],
    purpose: str,
    before_batch: tuple[tuple[str, Any], ...],
    *after_batch: tuple[str, Any],
) -> KernelLaunch:
    """Return the launch that reads `images` and writes the results; the rest are parameters, by position."""
    windows, out = problem.windows, problem.outs[0]
    read = [operand for operand in images.values() if operand is not None]
    lanes = _lanes(read[0])
    groups = -(-windows.in_channels // (CHANNELS * lanes))
    return KernelLaunch(
        variant(kernel, DTYPE=out.dtype, CHANNELS=CHANNELS, NUMBER=number),
        *grid_and_block(windows.batch, prod(out.shape[2:]) * lanes, 1, groups, 256),
        (
            *((name, image(operand)) for name, operand in images.items()),
            ("windows", windows_params(windows)),
            ("out", image(out)),
            *before_batch,
            ("batch", windows.batch),
            *after_batch,
            ("channels", windows.in_channels),
            ("lanes", lanes),
        ),
        purpose=f"{purpose}, threads along {'channels' if lanes > 1 else 'pixels'}",
        bytes_moved=bytes_of(read) + bytes_of(problem.results),
        flops=problem.flops,
    )


def _lanes(x: Operand) -> int:
    """Return how many neighbouring threads compute neighbouring channels: 1 if pixels are contiguous instead."""
    pixel_steps = [abs(step) for extent, step in zip(x.shape[2:], x.strides[2:]) if extent > 1]
    if all(abs(x.stride_c) < step for step in pixel_steps):
        return max(1, min(LANES, -(-x.shape[1] // CHANNELS)))
    return 1
