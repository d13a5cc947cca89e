"""A pass before a convolution: its inputs into workspace with the channels of a pixel side by side, as one image.

A kernel that copies 16 bytes of neighbouring channels at a time then reads them, where it would gather element by element;
a prologue is done on the way.  What that is worth, the cost model says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    VECTOR_BYTES,
    WARP,
    bytes_of,
    collapse,
    prologue_params,
    prologue_words,
    sources_params,
    variant,
    vector_width,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand
from cupyconv.problem.plan import Address, Buffer, KernelLaunch
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, NotApplicable

#: Threads that store the channels of one pixel, at the most; pixels that one of them stores of a tile.
CHANNEL_LANES, TILE_VECTORS = 8, 64
#: Threads of a block: each moves a vector of a tile, or two.
THREADS = 256


@dataclass(frozen=True)
class Moved:
    """The convolution of the moved image, the launch before it, and where the image is kept."""

    problem: ConvProblem
    launch: KernelLaunch
    buffer: Buffer


def channels_last(problem: ConvProblem) -> Moved:
    """The problem with its inputs moved, or raise `NotApplicable`."""
    geometry, xs, itemsize = problem.geometry, problem.xs, ITEMSIZE[problem.x_dtype]
    vector = VECTOR_BYTES // itemsize
    if itemsize > 4:
        raise NotApplicable("a chunk of 16 bytes is hardly more than an element")
    if geometry.groups > 1 and geometry.group_channels % vector:
        raise NotApplicable(f"channels of a group are no multiple of {vector}")
    batch, (depth, height, width) = geometry.batch, geometry.size
    pixels, channels = depth * height * width, geometry.in_channels
    if not batch * pixels * channels:
        raise NotApplicable("nothing is there to be moved")
    padded = -(-channels // vector) * vector
    buffer = Buffer("channels_last", batch * pixels * padded * itemsize)
    if buffer.space >= problem.limit:
        raise NotApplicable(
            f"the inputs once more take {buffer.nbytes:,} bytes of workspace, the limit is {problem.limit:,}"
        )
    strides = (pixels * padded, 1, height * width * padded, width * padded, padded)
    image = Operand(buffer.name, problem.x_dtype, (batch, channels, *geometry.size), strides)
    lanes = min(CHANNEL_LANES, 1 << (padded // vector - 1).bit_length())
    tiles = -(-pixels // (TILE_VECTORS * vector // lanes)), -(-padded // (lanes * vector))
    flat_size, flat = collapse(xs)
    launch = KernelLaunch(
        variant(
            "channels_last", problem.prologue, DTYPE=problem.x_dtype if problem.prologue else f"bits{8 * itemsize}"
        ),
        (min(tiles[0], GRID_X), min(tiles[1], GRID_Y), min(batch, GRID_Y)),
        THREADS,
        (
            ("sources", sources_params(flat)),
            ("prologue", prologue_params(problem.prologue)),
            ("moved", Address(buffer.name)),
            ("stride_n", pixels * padded),
            ("size", flat_size),
            ("batch", batch),
            ("pixels", pixels),
            ("channels", channels),
            ("padded", padded),
            ("lanes_shift", lanes.bit_length() - 1),
            ("vectorized", int(vector_width(flat, pixels) > 1)),
        ),
        purpose="channels side by side" + prologue_words(problem.prologue),
        bytes_moved=bytes_of(xs) + buffer.nbytes,
    )
    lines = sum(x.nbytes // x.itemsize // WARP * cost.lines_of(x) for x in xs)
    launch = replace(launch, arithmetic_seconds=cost.shared_memory_seconds(lines, problem.gpu))
    moved = replace(
        problem,
        xs=(image,),
        geometry=replace(geometry, channels=(channels,)),
        prologue=NO_PROLOGUE,
        workspace_limit=problem.limit - buffer.space,
    )
    return Moved(moved, launch, buffer)
