"""MEC lowering with long rows: the rows of several samples, and of bands of an image, form one long row.

A product of few channels is short along two of its sides, so the third must be long.  `MecRows` has one product per row
of the result, which is as long as that row.  Here a product is as long as that row of all samples, and of all bands of
an image:

::

    tile, of pixels with their padding      band 0  row 0  row 1  row 2 ...         pixels of all samples and bands
                                            band 1  row 0  row 1  row 2 ...         |
    columns of band rows                    row 0  [channels, taps of a row]  x  [samples, bands, width]
                                            row 1
                                            row 2
    row r of all bands  =  weight  x        rows r, r + 1, r + 2 of the columns, one matrix in place

The columns of a tap of a row are all pixels from the tap on, with padding.  They are copied in runs as long as a
product.  So a product has pixels after each row's end that are never read.  If rows of a tile are already adjacent, as
those of several samples are, one run covers them.  Neighbouring bands have rows in common, which are copied for both.

With a stride along the width, a tap does not read such a run.  `MecRows` or columns take less time then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import (
    CACHE_BLOCK,
    ConvLoop,
    ConvRun,
    copy_bytes,
    result_takes_sums,
    sums_per_pixel,
    temporaries,
    weight_copy,
)
from cupyconv.numpy.shifts import IMPLEMENTATIONS as SHIFTS
from cupyconv.numpy.windows import Block, BlockSize, parts_of, tile_size
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import ConvProblem

#: Pixels from which a product is about as fast as with more: for one sample; for several, whose rows are copied faster.
LONG_ROW = 100, 50
#: Pixels below which a small product is too short, because the weight is too large.
MIN_ROW = 32
#: Bytes that stay in cache together: columns of some groups, and all that is read and written with them.
PART = 2 * CACHE_BLOCK


def row_axis(geometry: ConvGeometry) -> int:
    """Return the axis along which taps share rows."""
    return 0 if geometry.kernel[0] > 1 else 1


def _most_pixels(geometry: ConvGeometry) -> int:
    """Return the largest number of pixels of a small product."""
    return cost.SAFELY_SMALL // (geometry.reduction * geometry.group_outputs or 1)


def _bands(geometry: ConvGeometry, samples: int, size: Sequence[int]) -> int:
    """Return the number of bands that a block is cut into: the fewest that make a product long."""
    axis = row_axis(geometry)
    rows, row = size[axis], samples * prod(size) // max(1, size[axis])
    if geometry.dilation[axis] > 1:
        return rows
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    small = [count for count in counts if count * row <= _most_pixels(geometry)] or counts[:1]
    return next((count for count in small if count * row >= LONG_ROW[samples > 1]), small[-1])


class LongRows(ConvLoop):
    """One product per row of a band, which covers the columns of all samples and bands."""

    name = "long MEC rows"
    description = "columns shared by {taps} taps, one matrix product per row of all samples and bands"
    thread_bytes = PART
    turn_calls = 18

    @property
    def work(self) -> float:
        geometry, problem, layout = self.geometry, self.problem, self.layout
        products = layout.rows * cost.product(geometry.group_outputs, geometry.reduction, layout.length, problem)
        columns = cost.copied(prod(layout.columns), layout.length, problem.x_dtype)
        tile = cost.copied(prod(layout.tile), layout.pitch, problem.x_dtype)
        work = self.blocks * geometry.groups * (products + columns + tile)
        if not layout.is_in_order:
            work += cost.added(prod(problem.out.shape), problem.dtype)
        return work + self.store_work

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        # Each group's channels belong to one input, so that several groups are read at once.
        per_group = geometry.group_channels
        is_whole = per_group > 0 and all(count % per_group == 0 for count in geometry.channels)
        return (
            problem.is_one_kind
            and geometry.taps > 1
            and geometry.stride[2] == 1
            and is_whole
            and _most_pixels(geometry) >= MIN_ROW
        )

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        axis = row_axis(geometry)
        other_taps = geometry.taps // geometry.kernel[axis]
        per_pixel = geometry.group_channels * (geometry.stride[axis] * other_taps + prod(geometry.stride))
        per_pixel = (per_pixel + geometry.group_outputs) * ITEMSIZE[accumulator(problem.dtype)]
        if not result_takes_sums(problem):
            per_pixel = max(per_pixel, sums_per_pixel(problem) // 2)
        most = _most_pixels(geometry) // max(1, geometry.pixels // max(1, geometry.out_size[axis]))
        return PART // (per_pixel or 1), max(1, min(geometry.batch, most))

    @cached_property
    def axis(self) -> int:
        return row_axis(self.geometry)

    @cached_property
    def part(self) -> int:
        beside = self.weight_bytes(self.problem) + weight_copy(self.problem) + 2 * Plan.ALIGNMENT
        left = (self.problem.limit - beside) // self.problem.host.threads - self.sums_bytes - self.index_bytes
        room = min(PART, left)
        return even_part(self.geometry.groups, room // (self._bytes_of_group or 1))

    @property
    def workspace(self) -> int:
        return self.part * self._bytes_of_group + self.sums_bytes

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        return copy_bytes(problem.weight, problem.weight_dtype)

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight in column order: (groups, 1, group outputs, row taps x other taps x channels x width)."""
        geometry = self.geometry
        kernels = weight.reshape(*weight.shape[:2], geometry.group_channels, *geometry.kernel)
        kernels = kernels.transpose(0, 1, 3 + self.axis, 4 - self.axis, 2, 5)
        return kernels.reshape(geometry.groups, 1, geometry.group_outputs, -1)

    # Memory

    @cached_property
    def _rows(self) -> int:
        """Rows of a band."""
        return self.block[1 + self.axis] // _bands(self.geometry, self.block[0], self.block[1:])

    @cached_property
    def layout(self) -> Layout:
        """Layout of a whole block."""
        return Layout(self.geometry, self.block, self.axis, self._rows)

    def layout_of(self, block: Block) -> Layout:
        """Return a block's layout; one that cannot be cut into these bands is one band, which needs no more memory."""
        if block.size == self.block:
            return self.layout
        rows = block.size[1 + self.axis]
        return Layout(self.geometry, block.size, self.axis, self._rows if rows % self._rows == 0 else rows)

    @cached_property
    def _bytes_of_group(self) -> int:
        """Bytes per group of a block's tile, columns and products."""
        geometry, layout = self.geometry, self.layout
        gathered = 1 + temporaries(geometry, self.problem.prologue)
        read = gathered * (prod(layout.tile) + layout.behind)
        product = 0 if layout.is_in_order else layout.rows * geometry.group_outputs * layout.length
        return (read + prod(layout.columns)) * self.x_dtype.itemsize + product * self.sums_dtype.itemsize

    # Sums

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = self.place_of_sums(run, block)
        axis, layout = self.axis, self.layout_of(block)
        # (groups, rows of a band, outputs, samples, d, h, w), with bands at the axis of the rows.
        bands = sums.reshape(*sums.shape[: 3 + axis], -1, layout.rows, *sums.shape[4 + axis :])
        bands = np.moveaxis(bands, 4 + axis, 1)
        tile, columns, windows, matrices = self._memory(run, block, layout)
        products = None
        if not layout.is_in_order:
            shape = (self.part, *bands.shape[1:3], layout.length)
            products = run.products.array("products", shape, self.sums_dtype)
            by_pixel = products.reshape(*shape[:3], *bands.shape[3:6], layout.pitch)[..., : block.size[3]]
        images = run.images.by_group(self.geometry.groups)
        regions = block.tile(self.geometry.in_channels).not_zeros
        for groups in parts_of(self.geometry.groups, self.part):
            some, own, place = images.some(groups), slice(groups.stop - groups.start), bands[groups]
            some.read(regions, block, tile[own])
            columns[own] = windows[own]
            if products is None:
                np.matmul(run.weight[groups], matrices[own], out=place[:, :, :, 0, 0, 0])
            else:
                np.matmul(run.weight[groups], matrices[own], out=products[own])
                place[...] = by_pixel[own]
        return sums

    def _memory(self, run: ConvRun, block: Block, layout: Layout) -> Memory:
        """Return the memory for the groups of a part."""
        geometry, scratch = self.geometry, run.images.scratch
        size = self.part * prod(layout.tile)
        memory = scratch.array("tile", (size + layout.behind,), self.x_dtype)
        # Elements that no input is copied to stay zero for all parts.
        memory[0 if block.tile(geometry.in_channels).has_zeros else size :] = 0
        tile = np.ndarray((self.part, *layout.tile), memory.dtype, memory)
        columns = scratch.array("columns", (self.part, *layout.columns), self.x_dtype)
        item = columns.itemsize
        windows_steps = (prod(layout.tile), *layout.steps[:3], geometry.dilation[2], *layout.steps[3:], 1)
        windows = np.ndarray(columns.shape, memory.dtype, memory, 0, tuple(step * item for step in windows_steps))
        group, row = columns.strides[:2]
        shape = self.part, layout.rows, geometry.reduction, layout.length
        strides = group, row * geometry.stride[self.axis], layout.length * item, item
        matrices = np.ndarray(shape, columns.dtype, columns, 0, strides)
        return Memory(np.moveaxis(tile, 1, 3 + self.axis) if layout.rows_first else tile, columns, windows, matrices)


class Memory(NamedTuple):
    """The tile and the columns of some groups of a block, and views of both."""

    tile: np.ndarray  # (groups, channels, samples, d, h, w)
    columns: np.ndarray  # (groups, *`Layout.columns`)
    windows: np.ndarray  # view of the tile with the shape of `columns`
    matrices: np.ndarray  # the columns of each row of a band: (groups, rows, taps and channels, pixels)


class Layout:
    """The memory of a block for one group, cut into bands of `rows` rows: its tile and its columns."""

    def __init__(self, geometry: ConvGeometry, block: BlockSize, axis: int, rows: int) -> None:
        self.rows, other = rows, 1 - axis
        tile = [geometry.group_channels, block[0], *tile_size(geometry, block[1:])]
        width = tile[4]
        order = [0, 1, 2, 3, 4]
        #: Whether rows are the tile's first axis, so that the rows of all samples are adjacent.
        self.rows_first = rows == block[1 + axis]
        if self.rows_first:
            order.insert(0, order.pop(2 + axis))
        self.tile = tuple(tile[i] for i in order)
        channel, sample, *moves = (prod(self.tile[order.index(i) + 1 :]) for i in range(4))
        pixels = [block[0], *block[1:3]]
        pixels[1 + axis] //= rows
        steps = [sample, *(move * stride for move, stride in zip(moves, geometry.stride))]
        steps[1 + axis] *= rows
        #: Steps in the tile, in elements, along the axes of `columns` except those of the width.
        self.steps = (moves[axis] * geometry.dilation[axis], moves[other] * geometry.dilation[other], channel, *steps)
        # If the rows of a product are adjacent, they are read as one, with padding.
        innermost = next((step for count, step in zip(pixels[::-1], steps[::-1]) if count > 1), 0)
        self.pitch = width if innermost == width else block[3]
        #: Elements after the tile that are read with its last row.
        self.behind = width if innermost == width else 0
        taps = geometry.kernel[axis]
        read = taps if rows == 1 else (rows - 1) * geometry.stride[axis] + taps
        columns = read, geometry.kernel[other], geometry.group_channels, geometry.kernel[2]
        #: Shape of the columns: (rows, taps, channels, taps of a row, samples, depth, height, width).
        self.columns = (*columns, *pixels, self.pitch)
        #: Pixels of a product.
        self.length = prod(pixels) * self.pitch
        #: Whether these pixels are one row of the result.
        self.is_in_order = self.length == block[3]


IMPLEMENTATIONS = (LongRows, *SHIFTS)
