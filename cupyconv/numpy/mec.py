"""MEC lowering: columns that the taps along one axis of the kernel share (Cho and Brand, "MEC", ICML 2017).

Along the outermost axis of the kernel, the taps' columns are the same rows of pixels, each beginning further on, so
they are written once for all of these taps: a fraction of all columns, and a product for each tap.

::

    columns for kh = 0      row 0   row 1   row 2   row 3          with pixels in the order (h, samples, d, w)
                    1               row 1   row 2   row 3   row 4  a tap's columns are one matrix, rows apart;
                    2                       row 2   row 3   ...    with a stride, rows of one phase are
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import gcd, prod

import numpy as np

from cupyconv.numpy.convolution import (
    LONE_PIXELS,
    MEMORY_BLOCK,
    PRODUCT_BLOCK,
    ConvLoop,
    ConvRun,
    copy_bytes,
    result_takes_sums,
    temporaries,
)
from cupyconv.numpy.windows import Block, BlockSize, Images, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem, WeightGradientProblem

#: Pixels per output from which a copy of the weight takes much less than its products, and pixels of a row from
#: which columns of all taps are written as quickly as one tap's products are added to another's.
PIXELS_PER_OUTPUT, LONG_ROW = 8, 128
#: Rows of columns from which taps share them: with fewer, the products of one tap would be thin.  In groups they are
#: thin anyway, and writing columns takes longer.
LEAST_SHARED = 32

# --- the lowering ---------------------------------------------------------------------------------------------


def taps_share(geometry: ConvGeometry, item: int) -> bool:
    """Whether taps along the kernel's outermost axis can share columns, and products of one tap are worth it."""
    taps = geometry.kernel[geometry.outermost]
    enough = geometry.groups > 1 or geometry.reduction >= LEAST_SHARED * taps
    return taps > 1 and enough and _columns_leave_cache(geometry, item)


def _columns_leave_cache(geometry: ConvGeometry, item: int) -> bool:
    """Whether writing the columns of all taps takes long: with few channels per group, longer than their products."""
    return geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps * item > MEMORY_BLOCK


def mec_shapes(geometry: ConvGeometry, channels: int, block: BlockSize) -> Iterator[tuple[range, tuple[int, ...]]]:
    """The columns of some channels that a block's taps share: (c, other taps, rows, samples, other pixels).

    Where the stride keeps taps from meeting the same rows, there is one array for every phase, beside its taps.
    """
    axis = geometry.outermost
    taps, stride, gap, rows = (t[axis] for t in (geometry.kernel, geometry.stride, geometry.dilation, block[1:]))
    others = [a for a in range(3) if a != axis]
    period = stride // gcd(stride, gap)
    for first in range(min(period, taps)):
        own = range(first, taps, period)
        rows_of_all = rows + (len(own) - 1) * (period * gap // stride)
        kernel, pixels = ([t[a] for a in others] for t in (geometry.kernel, block[1:]))
        yield own, (channels, *kernel, rows_of_all, block[0], *pixels)


def mec_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Bytes, for one group, of the columns that a block's taps share, and of the tile they are taken from."""
    geometry = problem.geometry
    columns = sum(prod(shape) for _, shape in mec_shapes(geometry, geometry.group_channels, block))
    tile = prod(tile_shape(geometry, geometry.group_channels, block))
    return (columns + tile * (1 + temporaries(geometry, problem.prologue))) * item


def mec_part(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Groups whose MEC columns stay in cache together."""
    return even_part(problem.geometry.groups, MEMORY_BLOCK // (mec_bytes(problem, block, item) or 1))


def is_in_order(geometry: ConvGeometry, block: BlockSize) -> bool:
    """Whether the pixels of MEC columns, the outermost axis of the kernel before all others, are in their own order."""
    return prod(block[: 1 + geometry.outermost]) == 1


def mec_columns(images: Images, block: Block, part: int) -> Iterator[tuple[slice, list[tuple[slice, np.ndarray]]]]:
    """For `part` groups at a time, so that they stay in cache: the groups, and the columns that taps share.

    Columns are arrays (c, tap, other taps, pixels), beside the taps of each: views in which a tap's pixels begin
    further on than those of the one before.
    """
    per_group = block.geometry.group_channels
    for groups in parts_of(block.geometry.groups, part):
        yield groups, _columns(images.some(slice(groups.start * per_group, groups.stop * per_group)), block)


def _columns(images: Images, block: Block) -> list[tuple[slice, np.ndarray]]:
    geometry, axis = block.geometry, block.geometry.outermost
    image, tile = images.tile(block), block.tile(images.channels)
    pixels_per_row = block.area // block.size[1 + axis]
    # Axes of all windows, (c, kd, kh, kw, n, d, h, w), in the order of MEC columns.
    order = [0, *(1 + a for a in range(3) if a != axis), 5 + axis, 4, *(5 + a for a in range(3) if a != axis)]
    strides = tuple(tile.windows_strides[a] for a in order)
    columns = []
    for taps, shape in mec_shapes(geometry, images.channels, block.size):
        begin = taps.start * geometry.dilation[axis] * image.strides[2 + axis]
        source = np.ndarray(shape, image.dtype, image, begin, strides)
        if source[0].size == source[0, 0, 0].size and source[0, 0, 0].flags.c_contiguous:
            memory, c_stride = image, image.strides[0]
        else:
            memory, begin = images.scratch.array(f"columns {taps.start}", shape), 0
            memory[...] = source
            c_stride = memory.strides[0]
        item, others = image.itemsize, shape[1] * shape[2]
        step = taps.step * geometry.dilation[axis] // geometry.stride[axis] * pixels_per_row
        views = np.ndarray(
            (len(image), len(taps), others, block.area),
            image.dtype,
            memory,
            begin,
            (c_stride, step * item, c_stride // others, item),
        )
        columns.append((slice(taps.start, taps.stop, taps.step), views))
    return columns


# --- the method -----------------------------------------------------------------------------------------------


class MecLoop(ConvLoop):
    """Sums of columns that taps share; subclasses are products, and for depthwise convolutions scaled elements."""

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        # Samples of a block come between rows and pixels: the result can take the sums of one only.
        is_lone = geometry.pixels >= LONE_PIXELS and result_takes_sums(problem)
        other_taps = geometry.taps // geometry.kernel[geometry.outermost]
        columns = geometry.group_channels * other_taps * ITEMSIZE[accumulator(problem.x_dtype)]
        sums = geometry.out_channels * ITEMSIZE[accumulator(problem.out.dtype)]
        return PRODUCT_BLOCK // (max(columns, sums) or 1), 1 if is_lone else geometry.batch

    @cached_property
    def part(self) -> int:
        return mec_part(self.problem, self.block, self.x_dtype.itemsize)

    @cached_property
    def in_place(self) -> bool:
        return self.block[0] == 1 and is_in_order(self.geometry, self.block) and result_takes_sums(self.problem)

    @property
    def workspace(self) -> int:
        columns = mec_bytes(self.problem, self.block, self.x_dtype.itemsize)
        products = self.geometry.group_outputs * prod(self.block) * self.sums_dtype.itemsize
        return self.part * (columns + products) + self.sums_bytes

    def empty_sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """Where a block's sums go, (groups, outputs per group, pixels): the result, or memory of its own."""
        shape = (self.geometry.groups, self.geometry.group_outputs, block.area)
        return block.of(run.out).reshape(shape) if self.in_place else np.empty(shape, self.sums_dtype)

    def in_order(self, sums: np.ndarray, block: Block) -> np.ndarray:
        """Sums of pixels in the order of MEC columns, as a view in the order of pixels."""
        samples_and_size, axis = list(block.size), 1 + self.geometry.outermost
        samples_and_size.insert(0, samples_and_size.pop(axis))
        return np.moveaxis(sums.reshape(*sums.shape[:2], *samples_and_size), 2, 2 + axis)


class MecProducts(MecLoop):
    """A product for each tap of the kernel's outermost axis."""

    name = "MEC columns"
    words = "columns that {taps} taps share, and products"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        """Whether columns that taps share, and a sum of products, take less than all columns and one product."""
        geometry = problem.geometry
        # The weight is copied, a matrix for each tap.
        worth_a_copy = geometry.batch * geometry.pixels >= PIXELS_PER_OUTPUT * geometry.group_outputs
        slow_columns = geometry.groups > 1 or geometry.out_size[2] < LONG_ROW
        item = ITEMSIZE[accumulator(problem.x_dtype)]
        return worth_a_copy and slow_columns and problem.is_one_kind and taps_share(geometry, item)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        return copy_bytes(problem.weight, problem.weight_dtype)

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """The matrix of each tap: (taps, groups, outputs per group, channels and other taps)."""
        geometry = self.geometry
        outer = geometry.kernel[geometry.outermost]
        taps = weight.reshape(*weight.shape[:2], geometry.group_channels, outer, -1)
        return np.moveaxis(taps, 3, 0).reshape(outer, *weight.shape[:2], -1)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = self.empty_sums(run, block)
        for groups, columns in mec_columns(run.images, block, self.part):
            target = sums[groups]
            product = run.products.array("product", target.shape, target.dtype)
            for taps, views in columns:
                matrices = views.swapaxes(0, 1).reshape(views.shape[1], len(target), -1, block.area)
                for t, matrix in zip(range(self.geometry.taps)[taps], matrices):
                    place = product if t else target
                    np.matmul(run.weight[t, groups], matrix, out=place)
                    if t:
                        target += product
        return self.in_order(sums, block)
