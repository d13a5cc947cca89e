"""Columns as shifts of the image: if its rows are as long as the result's, a tap reads all rows as one contiguous run.

A window moves along the width by one element, and from the end of a row to the beginning of the next.  If the rows of
the image are as long as those of the result, a tap reads all its pixels in one run.  At the ends of rows, this run has
elements of other rows.  These few elements are padding, and are overwritten by zeros in the columns::

    rows of the image, one after the other        a b c d | e f g h | i j k l
    columns of the tap in the middle              a b c d   e f g h   i j k l      one run each
                       to its left              . a b c   d e f g   h i j k        with d, h overwritten by zeros
                       to its right             b c d     e f g h   i j k l        with e, i

Copying a run takes a third of the time of copying its rows one by one.  The products of all pixels are written directly
to the result.  With a stride, the elements that a phase of taps reads are first copied to an image of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from math import ceil, prod
from typing import NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, whole_lines
from cupyconv.numpy.block_toeplitz import BlockToeplitz
from cupyconv.numpy.convolution import ConvLoop, ConvRun, temporaries, weight_copy
from cupyconv.numpy.gemm import IMPLEMENTATIONS as OTHER_PRODUCTS
from cupyconv.numpy.lines import MAX_TAPS
from cupyconv.numpy.mec import (
    COLUMNS_BLOCK,
    column_parts,
    multiply_parts,
    part_of,
    parts_of_columns,
    place_parts,
    row_parts,
)
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.windows import BareRow, Block, Blocks, BlockSize, Phase, bare_rows, phases_along
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import ConvProblem

#: Pixels from which a product is about as fast as with more pixels.
LONG_PRODUCT = 256
#: Calls for some groups of a block, and for each of their phases, without the calls that write zeros.
TURN_CALLS, PHASE_CALLS = 9, 2


class Shift(NamedTuple):
    """The elements that the taps of a phase read, their columns, and the parts of the columns that are padding."""

    image: np.ndarray  # (channels, samples, d, h, w)
    windows: np.ndarray  # (groups, channels, taps of 3 axes, samples, d, run)
    columns: np.ndarray
    padding: list[np.ndarray]


class Shifts(ConvLoop):
    """Columns of some groups, copied in long runs, and their products."""

    name = "shifted columns"
    description = "columns copied as shifts of the image, and matrix products"
    contention = cost.PRODUCTS_BESIDE

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        """Whether rows that a phase of taps reads are no longer than rows of the result, and row ends read zeros.

        It is not for a large kernel, whose rows would take long to plan.
        """
        geometry = problem.geometry
        has_zeros = geometry.padding_mode == "constant" or not (geometry.before[2] or geometry.after[2])
        has_rows = geometry.taps > 1 and prod(geometry.out_size[:2]) > 1
        if not problem.is_one_kind or not has_zeros or not has_rows or geometry.kernel[2] > MAX_TAPS:
            return False
        return all(row.elements <= geometry.out_size[2] for row in bare_rows(geometry))

    @property
    def work(self) -> float:
        geometry, problem, (samples, _, height, width) = self.geometry, self.problem, self.block
        one = self._parts.seconds if self._parts else cost.product(*self._sizes, problem)
        products = self.blocks * samples * geometry.groups * one
        per_pixel = geometry.batch * geometry.in_channels * prod(geometry.kernel[:2])
        left_out = sum(width - len(pixels) for row in self._rows for pixels in row.pixels)
        columns = cost.shifted(per_pixel * geometry.kernel[2] * geometry.pixels, height * width, problem.x_dtype)
        if self.part * self._columns_bytes > COLUMNS_BLOCK:
            columns *= cost.FARTHER
        columns += cost.left_out(per_pixel * prod(geometry.out_size[:2]) * left_out)
        extents = [sum(n + more for more in reach) for n, reach in zip(self.block[1:3], self._reaches)]
        elements = prod(extents) * sum(row.elements for row in self._rows)  # of all phases
        is_apart = geometry.stride[2] > 1
        run = width if is_apart or geometry.size[2] < width else height * width
        image = cost.copied(self.blocks * samples * geometry.in_channels * elements, run, problem.x_dtype, is_apart)
        return products + columns + image + self.store_work

    @property
    def calls(self) -> float:
        width = self.block[3]
        zeros = sum((pixels.start > 0) + (pixels.stop < width) for row in self._rows for pixels in row.pixels)
        phases = prod(map(len, self._reaches))
        return self.turns * (TURN_CALLS + phases * (PHASE_CALLS * len(self._rows) + zeros))

    @property
    def shares(self) -> int:
        return self.rounds

    @property
    def largest_product(self) -> int:
        rows, columns = self._part_of_product
        return rows * columns * self.geometry.reduction

    @classmethod
    def sharers(cls, problem: ConvProblem) -> int:
        # Threads share the groups if there are enough of them.
        threads = problem.host.threads
        return 1 if problem.geometry.groups >= 2 * threads else threads

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        pixels = COLUMNS_BLOCK // (geometry.reduction * ITEMSIZE[accumulator(problem.x_dtype)] or 1)
        # Several samples if all groups fit; of a large image, a part for one group.
        return max(pixels // geometry.groups, min(pixels, geometry.pixels), LONG_PRODUCT), geometry.batch

    @classmethod
    def fitted(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        return cls.of_whole_rows(super().fitted(problem, fixed, limit), fixed, limit)

    @cached_property
    def part(self) -> int:
        groups, threads = self.geometry.groups, self.problem.host.threads
        copied = weight_copy(self.problem)
        room = (self.problem.limit_with(copied) - copied - 2 * Plan.ALIGNMENT) // threads - self.index_bytes
        most = min(COLUMNS_BLOCK // (self._columns_bytes or 1), room // (self._group_bytes or 1))
        parts = ceil(groups / max(1, most))
        if self.blocks % threads:  # a multiple of the threads, so that their shares are about equal
            parts = ceil(parts / threads) * threads
        return ceil(groups / parts)

    @cached_property
    def each_block(self) -> Blocks:
        return Blocks(self.geometry, self.block, self.x_dtype.itemsize, self.part)

    # Memory

    @property
    def workspace(self) -> int:
        return self.part * self._group_bytes

    @property
    def _group_bytes(self) -> int:
        """Bytes of a group's columns, of the largest phase of its image, and of its sums."""
        tiles = 1 + temporaries(self.geometry, self.problem.prologue)
        image = tiles * self._image_elements(self.geometry.group_channels, self.block) * self.x_dtype.itemsize
        return image + self._columns_bytes + ceil(self.sums_bytes / self.geometry.groups)

    @property
    def extra_bytes(self) -> int:
        return self.part * self._image_elements(self.geometry.group_channels, self.block) * self.x_dtype.itemsize

    @property
    def _columns_bytes(self) -> int:
        """Bytes of the columns of one group."""
        samples, *size = self.block
        return samples * self.geometry.reduction * self._pitch(prod(size)) * self.x_dtype.itemsize

    def _pitch(self, pixels: int) -> int:
        """Return the elements from one row of columns to the next; rows at cache lines need half as many loads."""
        return whole_lines(pixels, self.x_dtype.itemsize)

    def _image_elements(self, channels: int, block: BlockSize) -> int:
        """Return the elements of the largest phase of `channels` channels, and of what is read before or after it."""
        samples, depth, height, width = block
        rows = prod(n + max(reach) for n, reach in zip((depth, height), self._reaches))
        beyond = max(max(-firsts[0], firsts[-1] - firsts[0]) for _, firsts, _ in self._rows)
        return channels * samples * rows * width + beyond

    @cached_property
    def _rows(self) -> list[BareRow]:
        """One row for each phase along the width."""
        return bare_rows(self.geometry)

    @cached_property
    def _reaches(self) -> list[list[int]]:
        """For each phase along the depth, and along the height: the elements that it has in addition to the pixels."""
        return [[(len(taps) - 1) * gap for taps, gap in phases_along(self.geometry, axis)] for axis in (0, 1)]

    # Products

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Outputs, reduction and pixels of a product of one sample and one group."""
        return self.geometry.group_outputs, self.geometry.reduction, prod(self.block[1:])

    @cached_property
    def _parts(self) -> cost.Parts | None:
        """Parts of a product, if they take less time than the whole; else None."""
        return parts_of_columns(self.problem, self._sizes)

    @cached_property
    def _part_of_product(self) -> tuple[int, int]:
        return part_of(*self._sizes, self.factor_dtype, self._parts)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry, images = self.geometry, run.images
        sums = self.place_of_sums(run, block)
        groups, phases = len(sums), block.bare_phases
        if groups < geometry.groups:
            first, last = (group * geometry.group_channels for group in (block.groups.start, block.groups.stop))
            images = images.some(slice(first, last))
        make = partial(self._steps, images.scratch, block, phases)
        shifts, matrices = images.scratch.views(self, (groups, *block.size), ("tile", "columns"), make)
        for phase, shift in zip(phases, shifts):
            images.read(phase.regions, block, shift.image)
            shift.columns[...] = shift.windows
            for zeros in shift.padding:
                zeros[...] = 0
        rows, columns = self._part_of_product
        place = sums.swapaxes(1, 2).reshape(groups, block.size[0], geometry.group_outputs, -1)
        weight = run.weight[block.groups, None]
        multiply_parts(row_parts(weight, rows), matrices, place_parts(place, rows, columns))
        return sums

    def _steps(self, scratch: Scratch, block: Block, phases: Sequence[Phase]) -> tuple[list[Shift], list[np.ndarray]]:
        """Return the phases of a block, and the columns as matrices."""
        geometry, (samples, depth, height, width) = self.geometry, block.size
        groups, per_group = block.groups.stop - block.groups.start, geometry.group_channels
        memory = scratch.array("tile", (self._image_elements(groups * per_group, block.size),))
        pixels, item = depth * height * width, memory.itemsize
        columns = scratch.array("columns", (groups, samples, geometry.reduction, self._pitch(pixels)))
        _, kh, kw = geometry.kernel
        g, n, k, _ = columns.strides
        taps = (geometry.taps * k, kh * kw * k, kw * k, k)
        all_columns = np.ndarray(
            (groups, per_group, *geometry.kernel, samples, depth, height * width),
            columns.dtype,
            columns,
            0,
            (g, *taps, n, height * width * item, item),
        )
        shifts = []
        for index, phase in enumerate(phases):
            row = self._rows[index % len(self._rows)]
            shape = groups * per_group, samples, *phase.size[:2], width
            image = np.ndarray(shape, memory.dtype, memory, -row.firsts[0] * item)
            c, m, d, h, _ = image.strides
            gaps = (gap * step for gap, step in zip(phase.gaps, (d, h, item)))
            own = all_columns[:, :, phase.taps[0], phase.taps[1], phase.taps[2]]
            windows = np.ndarray(own.shape, memory.dtype, memory, 0, (per_group * c, c, *gaps, m, d, item))
            by_pixel = own.reshape(*own.shape[:-1], height, width)
            padding: list[np.ndarray] = []
            for tap, there in enumerate(row.pixels):
                some = by_pixel[:, :, :, :, tap]
                padding += some[..., : there.start], some[..., max(there.start, there.stop) :]
            shifts.append(Shift(image[..., : row.elements], windows, own, [zeros for zeros in padding if zeros.size]))
        return shifts, column_parts(columns[..., :pixels], self._part_of_product[1])


IMPLEMENTATIONS = (Shifts, ShiftedRows, BlockToeplitz, *OTHER_PRODUCTS)
