"""A pass before a product: copy all images into one channels-last image in workspace.

The kernel after it can then copy 16 bytes of neighbouring channels at a time instead of gathering element by element.
The pass also applies a prologue.  The cost model decides whether the pass is worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Address, Buffer, KernelLaunch
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, NotApplicable, Prologue

#: Maximum number of threads that store the channels of one pixel; vectors of channels times vectors of pixels per tile.
CHANNEL_LANES, TILE_VECTORS = 8, 64
#: Threads per block; each moves one or two vectors of a tile.
THREADS = 256


@dataclass(frozen=True)
class MovedImage:
    """The moved image, the launch that writes it, and its buffer."""

    image: Operand
    launch: KernelLaunch
    buffer: Buffer

    @property
    def with_zeros(self) -> Operand:
        """The image including the zeros that pad the channels of a pixel to whole vectors."""
        batch, _, *size = self.image.shape
        return replace(self.image, shape=(batch, self.image.strides[4], *size))


@dataclass(frozen=True)
class Moved:
    """The convolution of the moved image, the launch that writes the image, and its buffer."""

    problem: ConvProblem
    launch: KernelLaunch
    buffer: Buffer


def channels_last(problem: ConvProblem) -> Moved:
    """Return the problem with its inputs moved, or raise `NotApplicable`."""
    geometry, vector = problem.geometry, VECTOR_BYTES // ITEMSIZE[problem.x_dtype]
    if vector < 4:
        raise NotApplicable("a 16-byte chunk has fewer than four elements")
    if geometry.groups > 1 and geometry.group_channels % vector:
        raise NotApplicable(f"channels of a group are not a multiple of {vector}")
    moved = moved_image("channels_last", problem.xs, problem.limit, problem.gpu, problem.prologue)
    without = replace(
        problem, xs=(moved.image,), geometry=replace(geometry, channels=(geometry.in_channels,)), prologue=NO_PROLOGUE
    )
    return Moved(without, moved.launch, moved.buffer)


def moved_image(
    name: str, xs: Sequence[Operand], limit: int, gpu: GpuModel, prologue: Prologue = NO_PROLOGUE
) -> MovedImage:
    """Return the channels-last concatenation of images, in a buffer of this name, or raise `NotApplicable`."""
    dtype, itemsize, batch, size = xs[0].dtype, xs[0].itemsize, xs[0].shape[0], xs[0].shape[2:]
    vector, pixels, channels = VECTOR_BYTES // itemsize, xs[0].pixels, sum(x.shape[1] for x in xs)
    if not batch * pixels * channels:
        raise NotApplicable("the inputs are empty")
    padded = -(-channels // vector) * vector
    buffer = Buffer(name, batch * pixels * padded * itemsize)
    if buffer.space >= limit:
        raise NotApplicable(
            f"a channels-last copy of the inputs needs {buffer.nbytes:,} bytes of workspace, the limit is {limit:,}"
        )
    _, height, width = size
    strides = (pixels * padded, 1, height * width * padded, width * padded, padded)
    image = Operand(buffer.name, dtype, (batch, channels, *size), strides)
    lanes = min(CHANNEL_LANES, 1 << (padded // vector - 1).bit_length())
    tiles = -(-pixels // (max(TILE_VECTORS * vector, THREADS) // lanes)), -(-padded // (lanes * vector))
    flat_size, flat = collapse(xs)
    launch = KernelLaunch(
        variant("channels_last", prologue, DTYPE=dtype if prologue else f"bits{8 * itemsize}"),
        (min(tiles[0], GRID_X), min(tiles[1], GRID_Y), min(batch, GRID_Y)),
        THREADS,
        (
            ("sources", sources_params(flat)),
            ("prologue", prologue_params(prologue)),
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
        purpose="copy to channels-last" + prologue_words(prologue),
        bytes_moved=bytes_of(xs) + buffer.nbytes,
    )
    lines = sum(-(-x.nbytes // (x.itemsize * WARP)) * cost.lines_of(x) for x in xs)
    launch = replace(launch, arithmetic_seconds=cost.shared_memory_seconds(lines, gpu))
    return MovedImage(image, launch, buffer)
