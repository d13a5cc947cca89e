"""Back through an epilogue on a GPU: the activation's derivative and each channel's sum, in one pass.

A block works on a part of the pixels of some channels; the parts' sums are added by a second launch.  The order of
additions is the plan's, so it is the same on every run.
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

#: Threads of a block, and those of them along the channels where these are neighbours in memory.
THREADS, LANES = 256, 32
#: Blocks per multiprocessor, as many as its registers hold at once: more would wait for a second round.
BLOCKS_PER_MULTIPROCESSOR = 4


def plan_epilogue_grad(problem: EpilogueGradProblem) -> Plan:
    """One pass over the gradient; nothing where there is neither a derivative nor a sum to take."""
    steps, workspace = pass_and_sum(problem, partial(_launch, problem))
    return problem.planned(steps, workspace=workspace)


def pass_and_sum(
    problem: ElementwiseGradProblem, launch: Callable[[Address | None, int], KernelLaunch]
) -> tuple[list[Step], tuple[Buffer, ...]]:
    """One pass; and another that adds the parts of the sums, where they come in parts.

    `launch` is given where the sums go, None where none are taken, and the most parts there may be.
    """
    sums = problem.sums
    if sums is None or not sums.nbytes:
        return ([launch(None, GRID_X)] if problem.grad.nbytes else []), ()
    most_parts = Buffer.parts_in(problem.limit, sums.nbytes)  # `cut` makes one of none
    whole = launch(address(sums), most_parts)
    if whole.grid[0] == 1:
        return [whole], ()
    shape = (whole.grid[0], *sums.shape[1:])
    parts = replace(sums, name="partial", shape=shape, strides=c_strides(shape), alignment=VECTOR_BYTES)
    steps: list[Step] = [launch(Address(parts.name), most_parts), sum_of_parts(parts, sums, problem.gpu)]
    return steps, (Buffer(parts.name, parts.nbytes),)


def sum_of_parts(parts: Operand, sums: Operand, gpu: GpuModel) -> KernelLaunch:
    """The sums of parts that lie as an image, whose samples are the parts and whose channels the sums."""
    together = EpilogueGradProblem(grad=parts, sums=sums, machine=gpu)
    return _launch(together, address(sums), most_parts=1)


def cut(
    problem: ElementwiseGradProblem, width: int, along_channels: bool, most_parts: int
) -> tuple[tuple[int, int, int], int, int]:
    """The grid, parts of the pixels by tiles of channels; threads of a block; and how many of them go along channels."""
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
    along_channels = all(operand.stride_c == 1 for operand in images)  # of a lone channel it is 0
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
    """Channels as pixels and pixels as channels: what is said of vectors along the one holds along the other."""
    stride = operand.pixel_stride
    pixels = operand.pixels
    if stride is None:  # then there are no vectors along pixels, nor here
        return operand
    shape = (operand.shape[0], pixels, 1, 1, operand.shape[1])
    return replace(operand, shape=shape, strides=(operand.stride_n, stride if pixels > 1 else 0, 0, 0, 1))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is no less than `n`."""
    return 1 << max(0, n - 1).bit_length()
