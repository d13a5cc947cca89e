"""Depthwise convolution along the width: windows of neighbouring outputs, read in place, times Toeplitz matrices.

A window of m outputs is m + k - 1 elements of a row, and the next window begins m elements later.  The windows are rows
of an overlapping view.  BLAS accepts no matrix whose rows overlap, so overlapping windows belong to different products:

::

    row      |----window 0----|          |----window 2----|
                      |----window 1----|          |----window 3----|

    windows 0, 2, 4 ... are one matrix, windows 1, 3, 5 ... another; or windows of different image rows are a matrix

In a long row, only the windows at the two ends read padding.  These are copied; all others are read in place.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, prod

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.convolution import LONE_PIXELS, temporaries
from cupyconv.numpy.group_products import COPIES_BLOCK, GroupProducts, sum_is_finite
from cupyconv.numpy.toeplitz import reach, strided, toeplitz, within
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem

#: Most outputs of a window along the width.
LENGTH = 16
#: Outputs of a row from which only its two ends are copied with their padding, not the whole row.
LONG_ROW = 16 * LENGTH
#: Rows of an image up to which each window that is left over is a product of its own, not a copy.
FEW_ROWS = 16
#: Approximate elements of a row's windows that are copied at a time.
COPIED_ELEMENTS = 8192
#: Time of these products relative to other small ones, which have another shape; seconds to check one window.
OF_RUNS, CHECK = 1.5, 2.3e-9


class ToeplitzRuns(GroupProducts):
    """Compute neighbouring outputs along the width together: windows of the image, read in place, times matrices."""

    name = "Toeplitz runs"
    description = "products of Toeplitz matrices, several outputs of a row at a time"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        return (
            geometry.is_depthwise and problem.is_one_kind and geometry.kernel[:2] == (1, 1) and geometry.kernel[2] > 1
        )

    groups_bytes = 2 * COPIES_BLOCK

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = (1 + geometry.group_outputs) * ITEMSIZE[accumulator(problem.x_dtype)]
        share = -(-geometry.batch * geometry.pixels // cls.sharers(problem))
        return min(share, int(COPIES_BLOCK // per_pixel)), 1 if geometry.pixels >= LONE_PIXELS else geometry.batch

    @classmethod
    def rough_seconds(cls, problem: ConvProblem) -> float:
        geometry = problem.geometry
        length = min(LENGTH, geometry.out_size[2])
        outputs = geometry.batch * geometry.out_channels * geometry.pixels
        return outputs * reach(geometry, 2, length) * cost.MULTIPLY_ADD * cost.multiply_adds(problem) * OF_RUNS

    @property
    def products_work(self) -> float:
        geometry, length = self.geometry, self.outputs
        samples, depth, height, width = self.block
        reduction, windows = reach(geometry, 2, length), ceil(width / length)
        many = min(windows, ceil(reduction / (length * geometry.stride[2])))
        many, rows = (windows, height) if height * many >= windows else (many * height, ceil(windows / many))
        times = self.blocks * samples * geometry.out_channels * depth * many
        checked = CHECK * self.blocks * samples * geometry.out_channels * depth * height * windows
        return times * OF_RUNS * cost.product(rows, reduction, length, self.problem) + checked

    @property
    def tile_work(self) -> float:
        return 0.0 if self.is_in_place else super().tile_work

    @property
    def has_tile(self) -> bool:
        return not self.is_in_place

    @cached_property
    def is_in_place(self) -> bool:
        """Whether windows are read from the image in place, except at the ends of its rows."""
        geometry, (x, *more) = self.geometry, self.problem.xs
        is_plain = not more and not self.problem.prologue and x.dtype == self.x_dtype.name
        if any(geometry.before[:2] + geometry.after[:2]) or not is_plain:
            return False
        if geometry.before[2] or geometry.after[2]:
            if geometry.padding_mode != "constant" or self.block[3] < LONG_ROW:
                return False
        is_matrix = x.strides[3] >= geometry.size[2] or geometry.size[1] == 1  # no overlapping or reversed rows
        return is_matrix and x.strides[4] == 1

    @cached_property
    def outputs(self) -> int:
        """Neighbouring outputs per window."""
        return min(LENGTH, self.geometry.out_size[2])

    @property
    def together(self) -> int:
        return self.part

    @property
    def _calls(self) -> float:
        return super()._calls + 2 * self._windows_left

    @cached_property
    def _windows_left(self) -> int:
        """Most windows of a row that are copied: windows that read padding, and windows left over from the products."""
        geometry, length, width = self.geometry, max(1, min(self.outputs, self.block[3])), self.block[3]
        left = ceil(reach(geometry, 2, length) / (length * geometry.stride[2])) + 1
        if self.is_in_place:
            padding = (geometry.before[2], geometry.after[2])
            left += sum(ceil(min(width, ceil(zeros / geometry.stride[2])) / length) for zeros in padding)
        return left

    @property
    def _copied_windows(self) -> int:
        """Number of windows that are copied at a time."""
        length = max(1, min(self.outputs, self.block[3]))
        most = COPIED_ELEMENTS // (reach(self.geometry, 2, length) + length)
        return max(1, min(most, self._windows_left))

    @property
    def _group_bytes(self) -> int:
        """Bytes of one group's tile, and of the copied windows with their sums."""
        geometry, (samples, depth, height, width) = self.geometry, self.block
        length = max(1, min(self.outputs, width))
        tile = 0 if self.is_in_place else prod(tile_shape(geometry, 1, self.block))
        windows = samples * depth * height * self._copied_windows
        copies = (1 + temporaries(geometry, self.problem.prologue)) * tile
        return (
            copies + windows * (reach(geometry, 2, length) + geometry.group_outputs * length)
        ) * self.x_dtype.itemsize

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry = problem.geometry
        outputs = min(LENGTH, geometry.out_size[2])
        elements = geometry.out_channels * outputs * reach(geometry, 2, outputs)
        return 2 * elements * ITEMSIZE[accumulator(problem.weight_dtype)]

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return Toeplitz matrices (c, outputs per channel, elements, neighbouring outputs)."""
        matrices = toeplitz(weight, self.outputs, self.geometry.stride[2], self.geometry.dilation[2])
        return np.ascontiguousarray(matrices[:, :, :, 0].swapaxes(2, 3))

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        return weight[:, :, None, None, None, : self.geometry.span[2] : self.geometry.dilation[2], 0]

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        height, width = sums.shape[4:]
        length, stride = min(self.outputs, width), self.geometry.stride[2]
        reduction = reach(self.geometry, 2, length)
        matrices = weight[:, :, None, None, :reduction, :length]
        if self.is_in_place:
            image, (_, _, before) = block.read_in_place(images.inputs[0][0])
            image = image.swapaxes(0, 1)
        else:
            image, before = images.tile_or_view(block), 0
        inside = within(stride, -before, image.shape[4] - self.geometry.span[2] + 1, width)
        if image.dtype != images.scratch.dtype or not image.flags.aligned:
            inside = slice(0, 0)  # copy all windows in parts: a product would copy them too, all at once
        apart = ceil(reduction / (length * stride))  # windows this far apart do not overlap
        # The rows of a product's first matrix are windows of different image rows or, if these are few, of one row.
        by_rows = height * apart >= (inside.stop - inside.start) // length
        if by_rows:
            runs = [(begin, count, 1, 1) for begin, count in runs_of(inside.stop - inside.start, length)]
        else:
            most = max(1, cost.SAFELY_SMALL // (length * reduction))
            fewest = 1 if prod(image.shape[:4]) <= FEW_ROWS else apart
            runs = runs_apart(inside.stop - inside.start, length, apart, most, fewest)
        is_finite, done = True, inside.start
        for first, many, phases, count in runs:
            begin, done = inside.start + first, inside.start + first + many * phases * count * length
            windows = image[..., begin * stride - before :]
            run = many, phases, count
            is_finite = self._multiply(windows, run, by_rows, matrices, sums[..., begin:done]) and is_finite
        left = [min(first, width - length) for first in (*range(0, inside.start, length), *range(done, width, length))]
        for some in parts_of(len(left), self._copied_windows):
            is_finite = self._multiply_copied(images.scratch, image, before, left[some], matrices, sums) and is_finite
        return is_finite

    def _multiply(
        self, image: np.ndarray, run: tuple[int, int, int], by_rows: bool, matrices: np.ndarray, sums: np.ndarray
    ) -> bool:
        """Write the sums of a run of windows, the first at the start of `image`; return whether all are finite."""
        (c, outputs, n, depth, height, _), (many, phases, count) = sums.shape, run
        reduction, length = matrices.shape[4:]
        item, move = image.itemsize, length * self.geometry.stride[2] * image.itemsize
        strides = zip(image.strides, (1, 1, *self.geometry.stride[:2]))
        own, samples, deeper, lower = (step * stride for step, stride in strides)
        shape = [height, many, phases, count, reduction]
        steps = [lower, phases * count * move, move, phases * move, item]
        place = sums.reshape(c, outputs, n, depth, height, many, count, phases, length).swapaxes(6, 7)
        if by_rows:
            shape[0], shape[3], steps[0], steps[3], place = 1, height, 0, lower, place.swapaxes(4, 7)
        windows = strided(image, (0, 0, 0), (c, 1, n, depth, *shape), (own, 0, samples, deeper, *steps))
        np.matmul(windows, matrices[:, :, :, :, None, None, None], out=place)
        return sum_is_finite(place[..., 0])

    def _multiply_copied(
        self, scratch: Scratch, image: np.ndarray, before: int, left: list[int], matrices: np.ndarray, sums: np.ndarray
    ) -> bool:
        """Write the sums of windows at the outputs `left`, copied with their padding; return whether all are finite."""
        (c, outputs, n, depth, height, _), (reduction, length) = sums.shape, matrices.shape[4:]
        deeper, lower, stride = self.geometry.stride
        windows = scratch.array("windows", (c, n, depth, height, len(left), reduction))
        windows.fill(0)
        for number, first in enumerate(left):
            begin = first * stride - before
            low = min(max(begin, 0), image.shape[4])
            high = min(max(begin + reduction, low), image.shape[4])
            windows[..., number, low - begin : high - begin] = image[:, :, ::deeper, ::lower, low:high]
        products = scratch.array("products", (c, outputs, n, depth, height, len(left), length), sums.dtype)
        rows = height * len(left)
        np.matmul(
            windows.reshape(c, 1, n, depth, rows, reduction),
            matrices,
            out=products.reshape(c, outputs, n, depth, rows, length),
        )
        for number, first in enumerate(left):
            sums[..., first : first + length] = products[..., number, :]
        return sum_is_finite(products[..., 0])


def runs_of(extent: int, part: int) -> list[tuple[int, int]]:
    """Return runs of parts as (first, count): all whole parts, and one that ends with the axis and overlaps them."""
    if extent < part:
        return []
    whole = [(0, extent // part)]
    return whole if extent % part == 0 else [*whole, (extent - part, 1)]


def runs_apart(width: int, length: int, apart: int, most: int, fewest: int) -> list[tuple[int, int, int, int]]:
    """Return runs of windows of `length` outputs, until fewer than `fewest` windows are left.

    A run is (first, products, phases, count).  Overlapping windows are rows of different matrices: a phase of a product
    has every `phases`-th of its windows, `count` of them, at most `most`.
    """
    runs, done, left = [], 0, width // length
    while left >= fewest:
        phases = min(apart, left)
        count = min(most, left // phases)
        many = left // (phases * count)
        runs.append((done * length, many, phases, count))
        done += many * phases * count
        left -= many * phases * count
    return runs
