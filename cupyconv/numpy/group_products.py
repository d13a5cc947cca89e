"""Products of each group's channels and kernels: the base of implementations for few channels per group or few outputs.

A turn computes some groups, whose copies stay in cache.  Its products multiply zeros too, or leave out what a border
would multiply, and zero times infinity is NaN.  Sums that are not finite are therefore recomputed from each window
alone, for a few pixels at a time, so that the copies are small.
"""

from __future__ import annotations

from abc import abstractmethod
from cmath import isfinite
from functools import cached_property
from math import ceil, prod
from typing import ClassVar

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import MEMORY_BLOCK, ConvLoop, ConvRun, temporaries
from cupyconv.numpy.windows import Block, Blocks, BlockSize, Images, parts_of, tile_shape
from cupyconv.problem.geometry import ConvGeometry, box_within
from cupyconv.problem.problems import ConvProblem

#: Bytes that one group copies for a block.
COPIES_BLOCK = 4 * MEMORY_BLOCK
#: Most elements of a matrix that OpenBLAS multiplies with a vector on one thread.
ONE_THREAD = 9_000
#: Pixels that are recomputed at a time, each from its window alone, if sums are not finite.
PIXELS_ALONE = 4096


class GroupProducts(ConvLoop):
    """Multiply the channels of each group by matrices of its kernels, some groups at a time."""

    smallest = 1
    turn_calls = 20
    thread_bytes = COPIES_BLOCK

    @classmethod
    def rough_seconds(cls, problem: ConvProblem) -> float:
        """Return a rough estimate of one thread's time, independent of the block size; only `workers` needs it."""
        return 0.0

    @property
    @abstractmethod
    def products_work(self) -> float:
        """Estimated time of the products and of the copies that they need."""

    @property
    def work(self) -> float:
        return self.products_work + self.tile_work + self.store_work + cost.channels_moved(self.problem)

    @property
    def calls(self) -> float:
        return self.turns * (self.turn_calls + self._calls)

    @property
    def _calls(self) -> float:
        """Calls per part of a block's groups, to copy, multiply and check."""
        return 6.0

    @classmethod
    def share(cls) -> float:
        """Return the seconds of work that make another thread worth waking."""
        return cost.TOEPLITZ_SHARE

    @classmethod
    def workers(cls, problem: ConvProblem) -> int:
        """Return the number of threads that have enough work."""
        return cost.worth_waking(problem.host.threads, cls.rough_seconds(problem), cls.share())

    @classmethod
    def sharers(cls, problem: ConvProblem) -> int:
        # If there are enough groups, threads share groups instead of pixels.
        workers = cls.workers(problem)
        return 1 if problem.geometry.groups >= 4 * workers else workers

    @cached_property
    def threads(self) -> int:
        return max(1, min(self.workers(self.problem), self.shares))

    @property
    def shares(self) -> int:
        return self.rounds

    @cached_property
    def part(self) -> int:
        room = min(self.groups_bytes, self.problem.limit * 3 // (4 * self.problem.host.threads))
        groups = self.geometry.groups
        parts = ceil(groups / max(1, room // (self._group_bytes or 1)))
        workers = self.workers(self.problem)
        if self.blocks % workers:  # give all threads the same number of parts
            parts = ceil(parts / workers) * workers
        return ceil(groups / parts)

    @cached_property
    def each_block(self) -> Blocks:
        return Blocks(self.geometry, self.block, self.x_dtype.itemsize, self.part)

    @property
    def workspace(self) -> int:
        sums = ceil(self.sums_bytes / self.geometry.groups)
        return self.part * (self._group_bytes + sums) + self._alone_bytes

    @cached_property
    def _alone(self) -> tuple[int, BlockSize]:
        """The number of groups and the block size that are recomputed at a time, from each window alone."""
        samples, *size = self.block
        samples = min(samples, max(1, PIXELS_ALONE // prod(size)))
        block = samples, *box_within(size, PIXELS_ALONE)
        return min(self.together, PIXELS_ALONE // prod(block)), block

    @property
    def _alone_bytes(self) -> int:
        """Bytes of the tile of these windows; 0 if a tile that is already counted contains it."""
        groups, block = self._alone
        if self.has_tile:
            return 0
        tiles = 1 + temporaries(self.geometry, self.problem.prologue)
        tile = prod(tile_shape(self.geometry, groups * self.geometry.group_channels, block))
        return tiles * tile * self.x_dtype.itemsize

    @property
    @abstractmethod
    def together(self) -> int:
        """Number of groups whose tile is copied together, unless the image is read in place."""

    @property
    @abstractmethod
    def has_tile(self) -> bool:
        """Whether products read a tile.  It is counted, and has room for the windows that are recomputed."""

    #: Bytes that one turn may copy and compute for its groups.
    groups_bytes: ClassVar[int] = 0

    @property
    @abstractmethod
    def _group_bytes(self) -> int:
        """Bytes that a turn copies and computes per group."""

    @abstractmethod
    def kernels(self, weight: np.ndarray) -> np.ndarray:
        """Return the kernels (groups, outputs per group, channels per group, *kernel) of an arranged weight."""

    @abstractmethod
    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        """Write a block's sums (groups, outputs per group, n, d, h, w) for some groups; return whether all are finite.

        It is enough to check one of the outputs that share elements.  Through the zeros of the matrix, each of them
        depends on all elements that any of them reads.
        """

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = self.place_of_sums(run, block)
        images, weight = run.images.some(self.channels(block.groups)), run.weight[block.groups]
        if not self.multiply(images, block, weight, sums):
            self._sum_alone(run, block, weight, sums)
        return sums

    def channels(self, groups: slice) -> slice:
        """Return the input channels of some groups."""
        per_group = self.geometry.group_channels
        return slice(groups.start * per_group, groups.stop * per_group)

    def _sum_alone(self, run: ConvRun, block: Block, weight: np.ndarray, sums: np.ndarray) -> None:
        groups, size = self._alone
        for own in parts_of(len(sums), groups):
            some = slice(block.groups.start + own.start, block.groups.start + own.stop)
            images, kernels = run.images.some(self.channels(some)), self.kernels(weight[own])
            for at, part in block.parts(size):
                sum_windows(self.geometry, images.tile(part), kernels, sums[(own, slice(None), *at)])


def sum_is_finite(sums: np.ndarray) -> bool:
    # einsum adds strided rows three times as fast as np.sum.
    return bool(np.isfinite(np.einsum("abcdefgh"[: sums.ndim] + "->", sums)))


def sum_windows(geometry: ConvGeometry, image: np.ndarray, weight: np.ndarray, sums: np.ndarray) -> None:
    """Write the sums (groups, outputs per group, n, d, h, w) of a tile (channels, n, d, h, w), window by window."""
    c, n, *pixels = image.strides
    taps = [step * gap for step, gap in zip(pixels, geometry.dilation)]
    moves = [step * stride for step, stride in zip(pixels, geometry.stride)]
    groups, _, per_group, *_ = weight.shape
    shape = (groups, per_group, *geometry.kernel, *sums.shape[2:])
    windows = np.ndarray(shape, image.dtype, image, 0, (per_group * c, c, *taps, n, *moves))
    np.einsum("gocijk,gcijkndhw->gondhw", weight, windows, out=sums)


def is_finite(array: np.ndarray) -> bool:
    """Whether all elements are finite; False too if the sum of their squares is not.

    The code of BLAS's product of vectors is in cache after other products.  NumPy's functions, whose code is not, take
    up to ten times as long.
    """
    elements = array.reshape(-1)
    return isfinite(np.matmul(elements, elements))
