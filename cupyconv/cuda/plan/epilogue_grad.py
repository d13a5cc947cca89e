"""The gradient of an epilogue on a GPU: the derivative of the activation and one sum per channel, in one pass.

A block computes some channels of a part of the pixels.  A second launch adds the sums of all parts.  The plan fixes the
order of additions, so that it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    VECTOR_BYTES,
    address,
    bytes_of,
    collapse,
    image,
    variant,
    vector_width,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.passes import ElementwiseGradProblem, EpilogueGradProblem
from cupyconv.problem.plan import Address, Buffer, KernelLaunch, Plan, Step

#: Maximum number of threads per block, and of threads along the channels if these are contiguous.
THREADS, LANES = 256, 32
#: Blocks that fit the registers of a multiprocessor at once: more would wait for a second round.
BLOCKS_PER_MULTIPROCESSOR = 4


def plan_epilogue_grad(problem: EpilogueGradProblem) -> Plan:
    """Plan one pass over the gradient, or nothing if there is neither a derivative nor a sum to compute."""
    steps, workspace = pass_and_sum(problem, partial(_launch, problem))
    return problem.planned(steps, workspace=workspace)


def pass_and_sum(
    problem: ElementwiseGradProblem, launch: Callable[[Address | None, int], KernelLaunch]
) -> tuple[list[Step], tuple[Buffer, ...]]:
    """Return one pass, and a second one that adds the sums of the parts if there are several parts.

    `launch` gets the address of the sums, or None if there are no sums, and the maximum number of parts.
    """
    sums = problem.sums
    if sums is None or not sums.nbytes:
        return ([launch(None, GRID_X)] if problem.grad.nbytes else []), ()
    most_parts = Buffer.parts_in(problem.limit, sums.nbytes)  # `cut` turns 0 into 1
    whole = launch(address(sums), most_parts)
    if whole.grid[0] == 1:
        return [whole], ()
    shape = (whole.grid[0], *sums.shape[1:])
    parts = replace(sums, name="partial", shape=shape, strides=c_strides(shape), alignment=VECTOR_BYTES)
    steps: list[Step] = [launch(Address(parts.name), most_parts), sum_of_parts(parts, sums, problem.gpu)]
    return steps, (Buffer(parts.name, parts.nbytes),)


def sum_of_parts(parts: Operand, sums: Operand, gpu: GpuModel) -> KernelLaunch:
    """Return the launch that adds parts stored as an image: its samples are the parts, its channels the sums."""
    together = EpilogueGradProblem(grad=parts, sums=sums, machine=gpu)
    return _launch(together, address(sums), most_parts=1)


def cut(
    problem: ElementwiseGradProblem, width: int, along_channels: bool, most_parts: int
) -> tuple[tuple[int, int, int], int, int]:
    """Return the grid (parts of the pixels, tiles of channels), the threads per block, and those along the channels."""
    batch, channels, *extents = problem.grad.shape
    lanes = min(LANES, _power_of_two(-(-channels // width))) if along_channels else 1
    shares = batch * prod(extents) // (1 if along_channels else width)
    threads = min(THREADS, max(32, lanes * _power_of_two(shares)))
    tiles = -(-channels // (lanes * (width if along_channels else 1)))
    parts = min(
        -(-shares * lanes // threads), -(-problem.gpu.multiprocessors * BLOCKS_PER_MULTIPROCESSOR // tiles), most_parts
    )
    return (max(1, parts), min(tiles, GRID_Y), 1), threads, lanes


def _launch(problem: EpilogueGradProblem, sums: Address | None, most_parts: int) -> KernelLaunch:
    batch, channels = problem.grad.shape[:2]
    size, images = collapse(problem.images)
    along_channels = all(operand.stride_c == 1 for operand in images)  # `stride_c` of a single channel is 0
    if along_channels:
        width = vector_width([_turned(operand) for operand in images], channels)
    else:
        width = vector_width(images, prod(size))
    wide_channels = along_channels and width > 1
    grid, threads, lanes = cut(problem, width, along_channels, most_parts)
    given = {operand.name: operand for operand in images}
    grad, saved, out = (
        given.get(operand.name) if operand else None for operand in (problem.grad, problem.saved, problem.out)
    )
    return KernelLaunch(
        variant("epilogue_grad", DTYPE=problem.grad.dtype, WIDTH=width, ALONG_CHANNELS=int(wide_channels)),
        grid,
        threads,
        (
            ("grad", image(grad)),
            ("saved", image(saved)),
            ("out", image(out)),
            ("partial", sums),
            ("alpha", problem.activation.alpha),
            ("beta", problem.activation.beta),
            ("size", size),
            ("batch", batch),
            ("pixels", prod(size)),
            ("activation", problem.activation.code),
            ("channels", channels),
            ("lanes", lanes),
        ),
        purpose=", ".join(problem.does),
        bytes_moved=bytes_of(images) + (grid[0] * channels * ITEMSIZE[accumulator(problem.grad.dtype)] if sums else 0),
    )


def _turned(operand: Operand) -> Operand:
    """Exchange channels and pixels, so that `vector_width` checks vectors along the channels."""
    stride = operand.pixel_stride
    pixels = operand.pixels
    if stride is None:  # without vectors along pixels, there are none along channels
        return operand
    shape = (operand.shape[0], pixels, 1, 1, operand.shape[1])
    return replace(operand, shape=shape, strides=(operand.stride_n, stride if pixels > 1 else 0, 0, 0, 1))


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is not less than `n`."""
    return 1 << max(0, n - 1).bit_length()
