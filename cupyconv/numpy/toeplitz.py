"""Depthwise convolution as products of Toeplitz matrices: several neighbouring outputs of a channel at a time.

One output of a channel is a vector by a vector, which no BLAS is quick at.  But m neighbouring outputs read nearly
the same elements, and what they are of these is a matrix with the kernel on each row, one step further on:

::

    m outputs         | w0 w1 w2          |   m + k - 1 elements, with as many columns as there are
    of a channel  =   |    w0 w1 w2       | x  pixels beside them: (m, n) = (m, m + k - 1) x (m + k - 1, n)
                      |       w0 w1 w2    |

Along the height (or depth) the columns are the rows of the image (`toeplitz_rows`); along the width, the windows of m
outputs are the rows of an overlapping view (`toeplitz_runs`).  Both are read where they lie, and nothing is copied.

The zeros are multiplied too, and zero times infinity is NaN: where sums are not finite they are computed again, from
each window alone, of some pixels at a time, so that little is copied for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod
from operator import mul
from typing import Any, ClassVar

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import MEMORY_BLOCK, ConvLoop, ConvRun
from cupyconv.numpy.windows import Block, Blocks, BlockSize, Images, parts_of, tile_shape
from cupyconv.problem.geometry import ConvGeometry, box_within
from cupyconv.problem.problems import ConvProblem

#: Bytes of what a group copies for a block.
COPIES_BLOCK = 4 * MEMORY_BLOCK
#: Pixels whose windows are summed alone at a time, where sums are not finite.
PIXELS_ALONE = 4096


def reach(geometry: ConvGeometry, axis: int, outputs: int) -> int:
    """Elements along an axis that so many neighbouring outputs read."""
    return (outputs - 1) * geometry.stride[axis] + geometry.span[axis]


def within(stride: int, offset: int, size: int, outputs: int) -> slice:
    """Of so many outputs those whose tap, at ``output * stride + offset``, lies in an image of this size."""
    start = min(max(0, -(offset // stride)), outputs)
    return slice(start, max(start, min(outputs, -((offset - size) // stride))))


class ToeplitzLoop(ConvLoop):
    """Products of the image and of matrices that have a channel's kernel on their diagonals: some channels at a time."""

    smallest = 1
    turn_calls = 20
    thread_bytes = COPIES_BLOCK

    @classmethod
    @abstractmethod
    def rough_seconds(cls, problem: ConvProblem) -> float:
        """About what one thread takes, however it is cut."""

    @property
    @abstractmethod
    def products_work(self) -> float:
        """What products take, and the copies that they are of."""

    @property
    def work(self) -> float:
        return self.products_work + self.tile_work + self.store_work + cost.channels_moved(self.problem)

    @property
    def calls(self) -> float:
        return self.turns * (self.turn_calls + self._calls)

    @property
    def _calls(self) -> float:
        """Calls for some groups of a block: they copy, multiply and check."""
        return 6.0

    @classmethod
    def share(cls) -> float:
        """Seconds of work for which another thread is worth waking."""
        return cost.TOEPLITZ_SHARE

    @classmethod
    def workers(cls, problem: ConvProblem) -> int:
        """Threads that have enough to do."""
        return cost.worth_waking(problem.host.threads, cls.rough_seconds(problem), cls.share())

    @classmethod
    def sharers(cls, problem: ConvProblem) -> int:
        # Groups are divided among threads where there are enough of them.
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
        parts = ceil(groups / max(1, room // (self._group_bytes or 1))) or 1
        workers = self.workers(self.problem)
        if self.blocks % workers:  # all threads have as many parts
            parts = ceil(parts / workers) * workers
        return ceil(groups / max(1, parts)) or 1

    @cached_property
    def each_block(self) -> Blocks:
        return Blocks(self.geometry, self.block, self.x_dtype.itemsize, self.part)

    @property
    def workspace(self) -> int:
        sums = ceil(self.sums_bytes / max(1, self.geometry.groups))
        return self.part * (self._group_bytes + sums) + self._alone_bytes

    @cached_property
    def _alone(self) -> tuple[int, BlockSize]:
        """Of how many groups, and of how much of a block, windows are summed alone at a time."""
        samples, *size = self.block
        samples = min(samples, max(1, PIXELS_ALONE // (prod(size) or 1)))
        block = samples, *box_within(size, PIXELS_ALONE)
        return min(self.together, max(1, PIXELS_ALONE // (prod(block) or 1))), block

    @property
    def _alone_bytes(self) -> int:
        """Bytes of the tile that these windows lie in, where it is not a part of one that is counted."""
        groups, block = self._alone
        return prod(tile_shape(self.geometry, groups, block)) * self.x_dtype.itemsize if self.is_in_place else 0

    @property
    @abstractmethod
    def together(self) -> int:
        """Groups of which a block's tile is copied together, unless it is read in place."""

    @property
    @abstractmethod
    def is_in_place(self) -> bool:
        """Whether products read the image where it lies."""

    #: Bytes of what is copied and computed for the groups of a turn.
    groups_bytes: ClassVar[int]

    @property
    @abstractmethod
    def _group_bytes(self) -> int:
        """The same of a group."""

    @abstractmethod
    def kernels(self, weight: np.ndarray) -> np.ndarray:
        """The kernels (c, outputs of each, *kernel) of a weight that is arranged."""

    @abstractmethod
    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        """Write a block's sums (c, outputs of each, n, d, h, w) of some channels; whether all are finite.

        One output of each product says so: the zeros bring all that the product reads to every one of them.
        """

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = self.place_of_sums(run, block)
        images, weight = run.images.some(block.groups), run.weight[block.groups]
        if not self.multiply(images, block, weight, sums):
            self._sum_alone(run, block, self.kernels(weight), sums)
        return sums

    def _sum_alone(self, run: ConvRun, block: Block, kernels: np.ndarray, sums: np.ndarray) -> None:
        groups, size = self._alone
        for own in parts_of(len(sums), groups):
            images = run.images.some(slice(block.groups.start + own.start, block.groups.start + own.stop))
            for at, part in block.parts(size):
                scale_windows(self.geometry, images.tile(part), kernels[own], sums[(own, slice(None), *at)])


def sum_is_finite(sums: np.ndarray) -> bool:
    # einsum adds strided rows three times as quickly as np.sum does.
    return bool(np.isfinite(np.einsum("abcdefgh"[: sums.ndim] + "->", sums)))


def scale_windows(geometry: ConvGeometry, image: np.ndarray, weight: np.ndarray, sums: np.ndarray) -> None:
    """The sums (c, outputs of each, n, d, h, w) of windows of a tile (c, n, d, h, w), each by itself."""
    c, n, *pixels = image.strides
    taps = [step * gap for step, gap in zip(pixels, geometry.dilation)]
    moves = [step * stride for step, stride in zip(pixels, geometry.stride)]
    shape = (len(image), *geometry.kernel, *sums.shape[2:])
    windows = np.ndarray(shape, image.dtype, image, 0, (c, *taps, n, *moves))
    np.einsum("coijk,cijkndhw->condhw", weight, windows, out=sums)


def strided(image: np.ndarray, first: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """A view of an image's elements from the pixel `first` on."""
    if image.flags.c_contiguous:
        return np.ndarray(shape, image.dtype, image, sum(map(mul, first, image.strides[2:])), strides)
    from_first: Any = (..., *(slice(index, None) for index in first))
    return np.lib.stride_tricks.as_strided(image[from_first], shape, strides)


def toeplitz(weight: np.ndarray, outputs: int, stride: int, dilation: int) -> np.ndarray:
    """Matrices (c, o, outputs, other taps, reach) with the taps, the last axis of a weight (c, o, ..., taps), on diagonals."""
    c, o, *_, taps = weight.shape
    weight = weight.reshape(c, o, -1, taps)
    reach = (outputs - 1) * stride + dilation * (taps - 1) + 1
    matrices = np.zeros((c, o, outputs, weight.shape[2], reach), weight.dtype)
    of_c, of_o, of_output, of_other, item = matrices.strides
    strides = (of_c, of_o, of_output + stride * item, of_other, dilation * item)
    band = np.ndarray((c, o, outputs, *weight.shape[2:]), weight.dtype, matrices, 0, strides)
    band[...] = weight[:, :, None]
    return matrices
