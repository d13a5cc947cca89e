"""Loops over blocks: the base of every implementation of a method, and how blocks are cut.

A block is a run of samples or of pixels whose columns, products and epilogue stay in cache.  A loop states the size of
its blocks, the memory of one block, the estimated time of all blocks (see `cost`) and the number of threads that share
them.  Blocks are disjoint, so threads may compute them in any order and every bit stays the same.

The block sizes were measured on machines with 1 and 2 MiB of L2 cache per core (``tests/benchmarks``).  A product needs
as many columns as the cache holds.  Memory-bound work needs a block that stays in L2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, Scratch
from cupyconv.numpy.windows import (
    INDEX_ARRAYS,
    INDEX_BYTES,
    Blocks,
    BlockSize,
    Images,
    block_words,
    five_axes,
    has_gathered,
    tile_shape,
    tile_size,
)
from cupyconv.problem.arrays import accumulator, dtype_from_name
from cupyconv.problem.geometry import ConvGeometry, box_within, even_part
from cupyconv.problem.problems import ConvProblem, NotApplicable, ProductsProblem, WeightGradientProblem

if TYPE_CHECKING:
    from cupyconv.numpy.prologue import Transform

#: Pixels below which a block of columns is not cut, because the products would be vectors.
MIN_BLOCK = 32


@dataclass(frozen=True)
class BlockLoop(NumpyStep):
    """A loop over blocks of a problem, each computed while in cache; a subclass is an implementation of a method."""

    name: ClassVar[str]
    #: What the loop does; "{taps}" stands for the number of taps along the kernel's outermost axis.
    description: ClassVar[str]

    problem: ProductsProblem
    block: BlockSize

    @classmethod
    @abstractmethod
    def applies(cls, problem: Any) -> bool:
        """Whether this implementation supports the problem."""

    @classmethod
    @abstractmethod
    def loops(cls, problem: Any) -> tuple[Sequence[Self], Mapping[str, int]]:
        """Return the loops and workspace bytes by name; raise NotApplicable if the smallest block exceeds the limit."""

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        """Describe in words what the loop does."""
        return cls.description.format(taps=geometry.kernel[geometry.outermost])

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def work(self) -> float:
        """Seconds of one thread for all blocks, in NumPy's and BLAS's own loops; all times are estimates of `cost`."""

    #: NumPy calls per turn of the loop, or Python code that takes as long.
    turn_calls: ClassVar[float] = 10
    #: Factor by which a thread's work slows down while other threads work.
    contention: ClassVar[float] = cost.CONTENTION

    @classmethod
    def least_calls(cls, problem: Any) -> float:
        """Lower bound of `calls` for a problem."""
        return cls.turn_calls

    @property
    def calls(self) -> float:
        return self.turns * self.turn_calls

    @property
    def shares(self) -> int:
        """Number of parts that threads compute one after another."""
        return self.blocks

    @cached_property
    def seconds(self) -> float:
        return self.seconds_on(self.threads)

    def seconds_on(self, threads: int) -> float:
        """Estimated time if `threads` threads share the blocks."""
        work, calls = self._price
        return self.first_work + cost.shared(work - self.first_work, calls, self.shares, threads, self.contention)

    @property
    def first_work(self) -> float:
        """Part of the work that one thread does before all blocks."""
        return 0.0

    @cached_property
    def _price(self) -> tuple[float, float]:
        """Estimated seconds of one thread, and number of calls."""
        return self.work + self.fresh_work, self.calls

    @property
    def fresh_work(self) -> float:
        """Estimated time of the first touch of all threads' workspace, which is newly allocated or not in cache."""
        return cost.touched(self.threads * self.workspace)

    @property
    @abstractmethod
    def workspace(self) -> int:
        """Bytes of workspace for one block."""

    @cached_property
    def threads(self) -> int:
        return max(1, min(self.problem.host.threads, self.shares))

    @cached_property
    def holds_blas(self) -> bool:
        """Whether BLAS is held at one thread during products, because the loop has one thread."""
        problem = self.problem
        return cost.holds_blas(self.threads, problem.host, self.largest_product, cost.divided_from(problem))

    @property
    def largest_product(self) -> int:
        """Upper bound of the multiply-adds of one matrix product."""
        return self.geometry.products

    @cached_property
    def geometry(self) -> ConvGeometry:
        return self.problem.geometry

    @cached_property
    def sums_dtype(self) -> np.dtype:
        return dtype_from_name(accumulator(self.problem.dtype))

    @cached_property
    def x_dtype(self) -> np.dtype:
        """Dtype of the images in products."""
        return dtype_from_name(accumulator(self.problem.x_dtype))

    @cached_property
    def factor_dtype(self) -> np.dtype:
        """Dtype of the factor that images are multiplied with."""
        return dtype_from_name(accumulator(self.problem.factor_dtype))


class PixelLoop(BlockLoop):
    """A loop over blocks of samples and pixels.

    `block` cuts the (sample, depth, height, width) axes of the convolution's result: inner axes are whole, one axis is
    cut, and outer axes have length 1.  So a block is one run of samples or of pixels.
    """

    #: Pixels below which a block is not cut.
    smallest: ClassVar[int] = MIN_BLOCK

    problem: ConvProblem | WeightGradientProblem

    @classmethod
    @abstractmethod
    def aim(cls, problem: Any) -> tuple[int, int]:
        """Return the number of pixels that a block should have, and the largest number of samples."""

    @cached_property
    @abstractmethod
    def in_place(self) -> bool:
        """Whether the sums are computed in the result itself."""

    @property
    def index_bytes(self) -> int:
        """Bytes of the index arrays through which a block reads the borders of a padding mode, with temporaries."""
        if not has_gathered(self.geometry):
            return 0
        return INDEX_ARRAYS * INDEX_BYTES * max(tile_size(self.geometry, self.block[1:]))

    @cached_property
    def part(self) -> int:
        """Number of groups computed at a time, so that they stay in cache."""
        return self.geometry.groups

    @classmethod
    def sharers(cls, problem: Any) -> int:
        """Return the number of threads that share the pixels."""
        return int(problem.host.threads)

    @classmethod
    def fitted(cls, problem: Any, fixed: int, limit: int) -> Self:
        """Return a loop with blocks of about the target size, or the largest that fit the limit after `fixed` bytes."""

        def needed(block: BlockSize) -> int:
            loop = cls(problem, block)
            return fixed + problem.host.threads * (loop.workspace + loop.index_bytes)

        pixels, most_samples = cls.aim(problem)
        pixels = share_of_pixels(problem.geometry, cls.sharers(problem), pixels)
        on_top = limit - problem.limit
        return cls(problem, largest_block(problem.geometry, needed, limit, pixels, cls.smallest, most_samples, on_top))

    @classmethod
    def of_whole_rows(cls, loop: Self, fixed: int, limit: int) -> Self:
        """Return a loop whose blocks have whole rows: `loop`, or one with a row per block if these fit the limit."""
        problem, width = loop.problem, loop.geometry.out_size[2]
        if loop.block[3] < width:
            loop = cls(problem, (1, 1, 1, width))
            needed = fixed + problem.host.threads * (loop.workspace + loop.index_bytes)
            if needed > limit:
                raise problem.does_not_fit("a row", needed, limit)
        return loop

    @cached_property
    def inputs(self) -> list[tuple[str, slice]]:
        """Name of each input, and its slice of the concatenated channels."""
        geometry = self.geometry
        starts = zip(self.problem.xs, geometry.channel_offsets, geometry.channels)
        return [(x.name, slice(first, first + count)) for x, first, count in starts]

    @cached_property
    def blocks(self) -> int:
        axes = (self.geometry.batch, *self.geometry.out_size)
        is_empty = 0 in axes or self.geometry.out_channels == 0
        return 0 if is_empty else prod(-(-extent // part) for extent, part in zip(axes, self.block))

    @cached_property
    def rounds(self) -> int:
        """Number of times that scratch memory is filled."""
        return self.blocks * -(-self.geometry.groups // self.part)

    @property
    def turns(self) -> int:
        return self.rounds

    @property
    def tile_work(self) -> float:
        """Estimated time to copy all tiles; none is copied without padding and without a change of dtype."""
        geometry, x = self.geometry, self.problem.xs[0] if self.problem.xs else None
        if not any(geometry.before + geometry.after) and x is not None and x.dtype == self.x_dtype.name:
            return 0.0
        shape = tile_shape(geometry, geometry.in_channels, self.block)
        return cost.copied(self.blocks * prod(shape), shape[4], self.problem.x_dtype)

    def columns_work(self, elements: float) -> float:
        """Estimated time to write this number of elements of columns."""
        return cost.copied(elements, self.block[3], self.problem.x_dtype, self.geometry.stride[2] > 1)

    @cached_property
    def each_block(self) -> Blocks:
        return Blocks(self.geometry, self.block, self.x_dtype.itemsize)

    @cached_property
    def transform_of(self) -> Callable[[Mapping[str, Any]], Transform] | None:
        if not self.problem.prologue:
            return None
        from cupyconv.numpy.prologue import transform_of  # imported only if there is a prologue

        return partial(transform_of, self.problem.prologue, dtype=self.x_dtype)

    def images(self, arrays: Mapping[str, Any], scratch: Scratch) -> Images:
        """Return the inputs of a run."""
        transform = self.transform_of(arrays) if self.transform_of else None
        return Images([(five_axes(arrays[name]), channels) for name, channels in self.inputs], scratch, transform)

    def __str__(self) -> str:
        prologue = f" of {self.problem.prologue}" if self.problem.prologue else ""
        sums = "the result" if self.in_place else self.sums_dtype
        blocks = block_words(self.blocks, self.block, "n, d, h, w", self.threads)
        return f"loop     {self.name}{prologue}, accumulates in {sums}: {blocks}"


# --- how a result is cut --------------------------------------------------------------------------------------


def largest_block(
    geometry: ConvGeometry,
    needed: Callable[[BlockSize], int],
    limit: int,
    target: int,
    smallest: int,
    most_samples: int,
    on_top: int = 0,
) -> BlockSize:
    """Return a block of about `target` pixels, or the largest below it that needs no more than `limit` bytes.

    `on_top` of these bytes exceed the caller's limit (see `Problem.limit_with`).  A refusal does not count them.
    """
    smallest = max(1, min(smallest, geometry.pixels))
    pixels = max(smallest, target)
    while True:
        block = block_of_pixels(geometry, pixels, most_samples)
        nbytes = needed(block)
        if nbytes <= limit:
            return block
        if pixels == smallest:
            least, known = nbytes - on_top, limit - on_top
            description = f"the smallest block needs {least:,} bytes of workspace, the limit is {known:,}"
            raise NotApplicable(description, least)
        pixels = max(smallest, min(pixels - 1 - pixels // 16, pixels * limit // nbytes))


def share_of_pixels(geometry: ConvGeometry, threads: int, most: int) -> int:
    """Return pixels per block, about `most`, so that threads have equally many blocks: whole steps of the cut axis."""
    _, height, width = geometry.out_size
    pixels = geometry.batch * geometry.pixels
    blocks = threads * -(-pixels // (threads * max(1, most)))
    steps = (geometry.pixels, height * width, width, 1)
    unit = next(step for step in steps if 0 < step * blocks <= pixels or step == 1)
    return unit * -(-pixels // (blocks * unit or 1))


def block_of_pixels(geometry: ConvGeometry, pixels: int, most_samples: int) -> BlockSize:
    """Return a block of at most `pixels` pixels: whole samples, or part of one along the outermost axis to be cut."""
    depth, height, width = geometry.out_size
    if pixels >= geometry.pixels:
        samples = min(most_samples, max(1, pixels // max(1, geometry.pixels)))
        return (even_part(geometry.batch, samples), max(1, depth), max(1, height), max(1, width))
    return (1, *box_within(geometry.out_size, pixels))


def even_channels(geometry: ConvGeometry, most: int) -> int:
    """Return at most `most` channels that divide all channels evenly: whole groups, or part of one group."""
    if most < geometry.group_channels:
        return even_part(geometry.group_channels, most)
    return even_part(geometry.groups, most // max(1, geometry.group_channels)) * geometry.group_channels
