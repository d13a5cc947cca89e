"""The kernel for depthwise transposed convolutions of stride 2, which computes all phases of a result in one grid."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.depthwise import PLANE_EXTENT, listed_kernel
from cupyconv.cuda.plan.launches import (
    GRID_Y,
    WARP,
    bytes_of,
    epilogue_params,
    grid_and_block,
    image,
    is_along_channels,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.problem.arrays import Operand, is_complex, product_flops
from cupyconv.problem.plan import KernelLaunch
from cupyconv.problem.problems import TransposedProblem

#: Square kernels, with their stride along h, that depthwise_transposed.cu is compiled for.
KERNELS = ((2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2))
#: Elements per thread, one above the other.
ROWS = 8


def depthwise_launches(problem: TransposedProblem) -> list[KernelLaunch]:
    """Return one launch per result, or an empty list if the kernel does not apply."""
    geometry = problem.geometry
    if geometry.groups == 1 or is_complex(problem.dtype) or geometry.padding_mode != "constant":
        return []
    weight = replace(problem.weight, strides=tuple(map(abs, problem.weight.strides)))
    kernel = listed_kernel(geometry, problem.xs, (weight,), KERNELS)
    elements = geometry.batch * prod(geometry.size)
    if kernel not in KERNELS or geometry.stride != (1, 2, 2) or elements >= PLANE_EXTENT:
        return []
    return [_launch(problem, kernel[0], out, first) for out, first in zip(problem.outs, geometry.channel_offsets)]


def _launch(problem: TransposedProblem, kernel: int, out: Operand, first: int) -> KernelLaunch:
    geometry, channels = problem.geometry, out.shape[1]
    depth, height, width = geometry.size
    strips = geometry.batch * depth * -(-(height + geometry.before[1] % 2) // ROWS) * width
    lanes = min(WARP, 1 << (channels - 1).bit_length()) if is_along_channels(out) else 1
    (blocks, _, _), block = grid_and_block(strips, lanes, 1, 1, 128)
    products = geometry.products * channels // geometry.in_channels
    launch = KernelLaunch(
        variant("depthwise_transposed", DTYPE=out.dtype, KERNEL=kernel),
        (blocks, min(-(-channels // lanes), GRID_Y), 1),
        block,
        (
            ("sources", sources_params(problem.xs)),
            ("windows", windows_params(geometry)),
            ("weight", image(problem.weight)),
            ("out", image(out)),
            ("epilogue", epilogue_params(problem.bias, None, problem.activation)),
            ("batch", geometry.batch),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
            ("first", first),
            ("channels", channels),
            ("channel_lanes", lanes),
        ),
        purpose="transposed convolution, bias, activation",
        bytes_moved=bytes_of(problem.xs) + problem.weight.nbytes + out.nbytes,
        flops=products * product_flops(problem.x_dtype, problem.weight_dtype),
    )
    return cost.priced(launch, cost.core_rate(out.dtype, problem.gpu) * cost.DEPTHWISE, problem.gpu)
