"""MEC lowering: columns that the taps along one axis of the kernel share (Cho and Brand, "MEC", ICML 2017).

Along the outermost axis of the kernel, the columns of all taps are the same rows of pixels, and each tap starts at a
later row.  These rows are written once for all of these taps: a fraction of all columns.  Each row of the result is a
product of the rows that it reads.  Products in parts that BLAS does not pack, which `gemm` uses too, are also here.
"""

from __future__ import annotations

from functools import cached_property, partial
from math import gcd, prod
from operator import attrgetter, mul
from typing import Any, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, whole_lines
from cupyconv.numpy.block_loops import MIN_BLOCK
from cupyconv.numpy.convolution import ConvLoop, ConvRun, copy_bytes, result_takes_sums, temporaries
from cupyconv.numpy.windows import Block, BlockSize, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Bytes of a block's columns.  Fewer, longer calls gain more than columns that leave free space in the cache.
COLUMNS_BLOCK = 2 << 20
#: Largest weight, in bytes, that is multiplied in parts.  Each part reads the weight, or strided columns, again.
WEIGHT_OF_PARTS = 256 << 10
#: Names of a block's scratch buffers.
BUFFERS = "tile", "columns", "products"

# --- products ----------------------------------------------------------------------------------------------------


def in_runs(
    weight: np.ndarray, columns: np.ndarray, place: np.ndarray | None, parts: cost.Parts | None = None
) -> np.ndarray:
    """Multiply matrices in parts; without `parts`, split columns for a small weight so that BLAS does not pack them."""
    (height, reduction), length = weight.shape[-2:], columns.shape[-1]
    rows, run = part_of(height, reduction, length, weight.dtype, parts)
    if rows >= height and run >= length:
        return np.matmul(weight, columns, out=place)
    if place is None:
        batch = np.broadcast_shapes(weight.shape[:-2], columns.shape[:-2])
        place = np.empty((*batch, height, length), np.result_type(weight, columns))
    multiply_parts(row_parts(weight, rows), column_parts(columns, run), place_parts(place, rows, run))
    return place


def part_of(height: int, reduction: int, length: int, dtype: np.dtype, parts: cost.Parts | None) -> tuple[int, int]:
    """Return the number of rows of the weight, and of columns, that are multiplied at a time."""
    if parts:
        return parts.rows, parts.columns
    return height, cost.run_of(height, reduction, length, dtype == np.float32) or length


def parts_of_columns(problem: ConvProblem, sizes: tuple[int, int, int]) -> cost.Parts | None:
    """Return the parts of a product of a weight and columns if they take less time than the whole; else None."""
    (outputs, reduction, _), dtype = sizes, accumulator(problem.x_dtype)
    if dtype != accumulator(problem.factor_dtype) or outputs * reduction * ITEMSIZE[dtype] > WEIGHT_OF_PARTS:
        return None
    parts = cost.parts_of_product(*sizes, dtype)
    return parts if parts and parts.seconds < cost.product(*sizes, problem) else None


def row_parts(weight: np.ndarray, rows: int) -> list[np.ndarray]:
    """Split a weight into parts of `rows` rows, (..., parts, 1, rows, elements); equal parts share one view."""
    *batch, height, reduction = weight.shape
    if rows >= height:
        return [weight[..., None, None, :, :]]
    whole = height - height % rows
    parts = [weight[..., :whole, :].reshape(*batch, -1, 1, rows, reduction)]
    return parts if whole == height else [*parts, weight[..., None, None, whole:, :]]


def column_parts(columns: np.ndarray, run: int) -> list[np.ndarray]:
    """Split columns into runs of `run` columns, (..., 1, runs, elements, columns); equal runs share one view."""
    *batch, reduction, length = columns.shape
    if run >= length:
        return [columns[..., None, None, :, :]]
    whole = length - length % run
    runs = columns[..., :whole].reshape(*batch, 1, reduction, -1, run).swapaxes(-2, -3)
    return [runs] if whole == length else [runs, columns[..., None, None, :, whole:]]


def place_parts(place: np.ndarray, rows: int, run: int) -> list[list[np.ndarray]]:
    """Return where the products of these parts are written: for each part of rows, one view per run of columns."""
    if rows >= place.shape[-2]:
        return [column_parts(place, run)]
    return [
        [some[..., 0, :, :, :] for some in column_parts(part[..., 0, :, :], run)] for part in row_parts(place, rows)
    ]


def multiply_parts(weights: list[np.ndarray], columns: list[np.ndarray], places: list[list[np.ndarray]]) -> None:
    """Multiply the parts; one call computes all equal parts."""
    for weight, row in zip(weights, places):
        for some, place in zip(columns, row):
            np.matmul(weight, some, place)


# --- the method -----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The product of one row of the result, and its estimated time."""

    pixels: int
    parts: cost.Parts | None  # None: one whole product
    seconds: float
    part: tuple[int, int]  # rows of the weight, and columns, that are multiplied at a time

    @property
    def length(self) -> int:
        """Columns of the product; those beyond `pixels` are never read."""
        return self.parts.length if self.parts else self.pixels

    @property
    def is_longer(self) -> bool:
        return self.length > self.pixels


class Phase(NamedTuple):
    """Rows of columns that neighbouring outputs share; a dilated kernel has several phases of rows."""

    columns: np.ndarray
    windows: np.ndarray  # view of the tile with the same elements
    matrices: list[np.ndarray]  # one matrix per row of the result, split by `column_parts`
    products: np.ndarray | None  # the pixels of products that are longer than rows; else None
    places: list[list[np.ndarray]]  # where the parts of the products are written


class Steps(NamedTuple):
    """The arrays and views that computing a block uses."""

    row: Row
    image: np.ndarray
    phases: list[Phase]


class Arrangement(NamedTuple):
    """An order of the weight: the product of a row of the result with it, and the time to arrange the weight."""

    row: Row
    seconds: float
    is_turned: bool


class MecRows(ConvLoop):
    """One product per row of the result: the rows of columns that its taps share are one matrix in place.

    ::

        L = columns of     row 0   row 1   row 2   row 3   ...         each row (channels, other taps, pixels)
        output row 0     [ row 0   row 1   row 2 ]                     (kh x channels x other taps, pixels)
                   1             [ row 1   row 2   row 3 ]             rows of a dilated kernel are separated first

    All rows of a block are one batched product, which writes to the result with any distance between its rows.  The
    product has parts of some outputs each, so that BLAS packs no operand.  A row may have additional columns, so that
    it fills whole vectors.  This is faster even though the pixels of the row must then be copied.
    """

    name = "MEC rows"
    prepares_late = True
    description = "columns shared by {taps} taps, one matrix product per row"
    turn_calls = 10
    contention = cost.PRODUCTS_BESIDE

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        """Whether taps share rows."""
        geometry, axis = problem.geometry, problem.geometry.outermost
        step = geometry.stride[axis] // gcd(geometry.stride[axis], geometry.dilation[axis])
        return problem.is_one_kind and geometry.kernel[axis] > step

    @property
    def _row(self) -> Row:
        """The product of a row of a whole block."""
        return self._arrangement.row

    @property
    def turns_weight(self) -> bool:
        """Whether the columns of the weight, not its rows, are contiguous: most weights are copied faster this way."""
        return self._arrangement.is_turned

    @cached_property
    def _arrangement(self) -> Arrangement:
        """The order of the weight, turned or not, with the least estimated time."""
        problem, geometry = self.problem, self.geometry
        elements, run = prod(problem.weight.shape), geometry.taps // geometry.kernel[geometry.outermost]
        as_it_is = turned = 0.0
        if not problem.weight_is_constant:
            as_it_is = cost.copied(elements, run, problem.weight_dtype)
            turned = cost.copied(elements, elements, problem.weight_dtype, apart=True)
        nbytes = geometry.group_outputs * geometry.reduction * self.factor_dtype.itemsize
        implementations = [
            Arrangement(self._row_of(self.block, is_turned), seconds, is_turned)
            for is_turned, seconds in ((False, as_it_is), (True, turned))
            if not is_turned or nbytes < cost.TURNED_LEAVES
        ]
        return min(
            implementations, key=lambda implementation: self._rows * implementation.row.seconds + implementation.seconds
        )

    def _row_of(self, block: BlockSize, turned: bool) -> Row:
        axis, pixels, dtype = self.geometry.outermost, prod(block[2 + self.geometry.outermost :]), self._dtype
        sizes = self.geometry.group_outputs, self.geometry.reduction, pixels
        seconds, parts = cost.product(*sizes, self.problem), None
        if dtype:
            seconds = max(seconds, cost.product_of_few(*sizes, dtype))
            if prod(sizes) <= cost.SMALL_PRODUCT:
                seconds *= cost.ANYWHERE
        if dtype and axis < 2:
            parts = cost.parts_of_product(*sizes, dtype, axis == 1, turned)
        if parts and parts.seconds >= seconds:
            parts = None
        part = part_of(*sizes, self.factor_dtype, parts)
        return Row(pixels, parts, parts.seconds if parts else seconds, part)

    @cached_property
    def _dtype(self) -> str | None:
        """The dtype of both factors; None if they differ."""
        dtype = accumulator(self.problem.x_dtype)
        return dtype if dtype == accumulator(self.problem.factor_dtype) else None

    @property
    def _rows(self) -> int:
        """Number of products of all blocks."""
        return self.blocks * prod(self.block[: 2 + self.geometry.outermost]) * self.geometry.groups

    def _read_size(self, block: BlockSize, row: Row) -> BlockSize:
        """Return the number of samples and pixels whose windows are read."""
        return (*block[:3], row.length) if row.is_longer else block

    def _pitch(self, row: Row) -> int:
        """Return the elements from one row of columns to the next; with parts, each row starts at a cache line."""
        return whole_lines(row.length, self.x_dtype.itemsize) if row.parts else row.length

    @property
    def largest_product(self) -> int:
        row, reduction = self._row, self.geometry.reduction
        if row.parts is None:
            return self.geometry.group_outputs * reduction * row.pixels
        return row.parts.rows * reduction * row.parts.columns

    @property
    def work(self) -> float:
        axis = self.geometry.outermost
        phases = min(self._period, self.block[1 + axis])
        products = self._rows * self._row.seconds + self._arrangement.seconds
        columns = self.columns_work(self.blocks * phases * prod(self._rows_shape(self.block)) * self._row.pixels)
        return products + columns + self.tile_work + self.store_work

    @property
    def first_work(self) -> float:
        return self._arrangement.seconds

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry, axis = problem.geometry, problem.geometry.outermost
        taps, stride = geometry.kernel[axis], geometry.stride[axis]
        per_pixel = geometry.in_channels * geometry.taps // taps * ITEMSIZE[accumulator(problem.x_dtype)]
        row = prod(geometry.out_size[axis + 1 :])
        rows = COLUMNS_BLOCK // (per_pixel * row or 1)  # rows of columns; outputs share all but the first `stride`
        outputs = (rows - taps) // stride + 1
        if outputs < 1:
            return COLUMNS_BLOCK // (per_pixel * taps or 1), 1
        if outputs >= geometry.out_size[axis]:
            return rows // ((geometry.out_size[axis] - 1) * stride + taps) * geometry.pixels, geometry.batch
        return outputs * row, 1

    @classmethod
    def fitted(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        """Return the faster loop: blocks of whole rows, or of parts of all rows; none writes a row of columns twice."""
        loops, refusals = [], []
        for fit in (super().fitted, cls._of_parts):
            try:
                loops.append(fit(problem, fixed, limit))
            except NotApplicable as reason:
                refusals.append((reason.needed, str(reason)))
        if not loops:
            raise NotApplicable.of_the_least(refusals)
        return min(loops, key=attrgetter("seconds"))

    @classmethod
    def _of_parts(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        """Return a loop with blocks of all rows and a part of each; if these do not fit the limit, of fewer rows."""
        geometry, axis = problem.geometry, problem.geometry.outermost
        if axis == 2 or geometry.out_size[axis] == 1:
            raise NotApplicable("rows cannot be divided")
        rows, extent, inner = geometry.out_size[axis], geometry.out_size[axis + 1], geometry.out_size[axis + 2 :]
        count = -(-cls.sharers(problem) // (geometry.batch or 1))
        while True:
            part = even_part(extent, -(-extent // count))
            size: Any = [1] * (1 + axis) + [rows, part, *inner]
            loop = cls(problem, tuple(size))
            is_least = rows == part == 1
            if is_least or loop.columns_bytes <= COLUMNS_BLOCK:
                needed = fixed + problem.host.threads * (loop.workspace + loop.index_bytes)
                if needed <= limit:
                    return loop
            if is_least:
                raise problem.does_not_fit("the smallest block", needed, limit)
            if rows == 1 or (part > 1 and part * prod(inner) > MIN_BLOCK):
                count = min(extent, 2 * count)
            else:
                rows = -(-rows // 2)

    @cached_property
    def in_place(self) -> bool:
        return result_takes_sums(self.problem) and self._is_whole_rows

    @cached_property
    def _is_whole_rows(self) -> bool:
        """Whether the pixels of a row are contiguous in the result."""
        after = 1 + self.geometry.outermost + 1
        return len(self.block[after:]) <= 1 or self.block[after + 1 :] == self.geometry.out_size[after:]

    @property
    def tile_bytes(self) -> int:
        size = self._read_size(self.block, self._row)
        return prod(tile_shape(self.geometry, self.geometry.in_channels, size)) * self.x_dtype.itemsize

    @property
    def extra_bytes(self) -> int:
        return self.tile_bytes + self._products_bytes

    @property
    def workspace(self) -> int:
        tiles = 1 + temporaries(self.geometry, self.problem.prologue)
        return tiles * self.tile_bytes + self.columns_bytes + self._products_bytes + self.sums_bytes

    @property
    def columns_bytes(self) -> int:
        return prod(self._rows_shape(self.block)) * self._pitch(self._row) * self.x_dtype.itemsize

    @property
    def _products_bytes(self) -> int:
        """Bytes of a block's products if they are longer than rows; else 0."""
        rows = prod(self.block[: 2 + self.geometry.outermost]) * self.geometry.out_channels
        return rows * self._row.length * self.sums_dtype.itemsize if self._row.is_longer else 0

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        return copy_bytes(problem.weight, problem.weight_dtype)

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight with the taps that share rows first: (groups, outputs per group, taps x channels x others).

        A turned weight is stored so that its columns are contiguous.
        """
        geometry = self.geometry
        taps = weight.reshape(*weight.shape[:2], geometry.group_channels, geometry.kernel[geometry.outermost], -1)
        if not self.turns_weight:
            return taps.swapaxes(2, 3).reshape(weight.shape)
        columns = np.ascontiguousarray(taps.transpose(0, 3, 2, 4, 1))
        return columns.reshape(len(weight), -1, weight.shape[1]).swapaxes(1, 2)

    @cached_property
    def _period(self) -> int:
        """Number of output rows after which a row reads rows of the same phase again."""
        axis = self.geometry.outermost
        gap = self.geometry.dilation[axis]
        return gap // gcd(gap, self.geometry.stride[axis])

    def _rows_shape(self, block: BlockSize) -> tuple[int, ...]:
        """Return the shape of a phase's rows: (groups, samples, axes before the rows, rows, channels, other taps)."""
        geometry, axis = self.geometry, self.geometry.outermost
        stride, gap = geometry.stride[axis], geometry.dilation[axis]
        outputs = -(-block[1 + axis] // self._period)
        rows = (outputs - 1) * (stride * self._period // gap) + geometry.kernel[axis]
        channels = geometry.groups, geometry.group_channels
        return channels[0], *block[: 1 + axis], rows, channels[1], *geometry.kernel[axis + 1 :]

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        axis, period, scratch = self.geometry.outermost, self._period, run.images.scratch
        row, image, phases = scratch.views(self, block.size, BUFFERS, partial(self._steps, scratch, block.size))
        sums = self.place_of_sums(run, block)
        run.images.read_tile(block, image)
        rows, columns_at_once = row.part
        weights = row_parts(run.weight.reshape(self._weight_shape), rows)
        # The product of a row: (groups, samples, axes before, rows, outputs, pixels), in the result.
        target = sums.transpose(self._rows_before_outputs)
        for first, phase in enumerate(phases):
            place = target[(slice(None),) * (2 + axis) + (slice(first, None, period),)] if period > 1 else target
            place = place.reshape(*place.shape[: 4 + axis], row.pixels)
            places = phase.places or place_parts(place, rows, columns_at_once)
            phase.columns[...] = phase.windows
            multiply_parts(weights, phase.matrices, places)
            if phase.products is not None:
                place[...] = phase.products
        return sums

    @cached_property
    def _weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight that broadcasts with the matrices of all rows."""
        geometry = self.geometry
        ones = (1,) * (2 + geometry.outermost)
        return geometry.groups, *ones, geometry.group_outputs, geometry.reduction

    @cached_property
    def _rows_before_outputs(self) -> tuple[int, ...]:
        """The axes of sums in an order with outputs right after rows."""
        axes = [0, 2, 3, 4, 5]
        axes.insert(3 + self.geometry.outermost, 1)
        return tuple(axes)

    def _steps(self, scratch: Scratch, block: BlockSize) -> Steps:
        geometry, axis, period = self.geometry, self.geometry.outermost, self._period
        row = self._row if block == self.block else self._row_of(block, self.turns_weight)
        size, pitch = self._read_size(block, row), self._pitch(row)
        image = scratch.array("tile", tile_shape(geometry, geometry.in_channels, size))
        c, n, *steps = image.strides
        taps, moves = (tuple(map(mul, steps, factors)) for factors in (geometry.dilation, geometry.stride))
        before, after, item = slice(0, axis), slice(axis + 1, 3), image.itemsize
        strides = (c * geometry.group_channels, n, *moves[before], taps[axis], c, *taps[after], *moves[after])
        step = geometry.stride[axis] * period // geometry.dilation[axis]
        samples, outputs = (geometry.groups, *block[: 1 + axis]), geometry.group_outputs
        memory = scratch.array("columns", (*self._rows_shape(block), pitch))
        products_shape = (*samples, -(-block[1 + axis] // period), outputs, row.length)
        all_products = scratch.array("products", products_shape if row.is_longer else (0,), self.sums_dtype)
        phases = []
        for first in range(min(period, block[1 + axis])):
            rows = -(-(block[1 + axis] - first) // period)
            shape = list(self._rows_shape(block))
            shape[2 + axis] = (rows - 1) * step + geometry.kernel[axis]
            columns = np.ndarray((*shape, pitch), memory.dtype, memory)
            windows_shape = *shape, *size[2 + axis :]
            windows = np.ndarray(windows_shape, image.dtype, image, first * moves[axis], strides)
            matrices = np.ndarray(
                (*samples, rows, geometry.reduction, row.length),
                columns.dtype,
                columns,
                0,
                (*columns.strides[: 2 + axis], columns.strides[2 + axis] * step, pitch * item, item),
            )
            products, places = None, []
            if row.is_longer:
                some = np.ndarray((*samples, rows, outputs, row.length), self.sums_dtype, all_products)
                products, places = some[..., : row.pixels], place_parts(some, *row.part)
            own = columns[..., : row.length].reshape(windows_shape)
            phases.append(Phase(own, windows, column_parts(matrices, row.part[1]), products, places))
        return Steps(row, image, phases)
