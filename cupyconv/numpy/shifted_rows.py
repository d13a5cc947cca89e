"""Convolution by shifted rows: one product for the taps along the height, one sum for those along the width.

All rows of pixels of a channel are one long line.  For each tap along the height (or depth), the line that it reads is
copied: the image, some rows further.  For each group, a product with its kernels makes a line for each tap along the
width: what this tap contributes to all pixels.  These lines are added, each from its first pixel on::

    kernel,        lines that the     lines of the
    turned         taps of the        taps of the width
                   height read
    | w w w |      | row - 1 ... |    | p0 p1 p2 p3 ... |    result  =  . p0 p1 p2 ...  of tap 0
    | w w w |  x   | row     ... | =  | p0 p1 p2 p3 ... |            +  p0 p1 p2 p3 ...  of tap 1
    | w w w |      | row + 1 ... |    | p0 p1 p2 p3 ... |            +  p1 p2 p3 p4 ...  of tap 2

So only a third of the columns of a 3x3 kernel are copied, and the products are as large as those of all columns.  With
few channels per group, or few outputs, copies take longer than products.  The sum is a product too: a row of ones times
a view whose rows are the lines.

A line continues from the end of one row of pixels to the beginning of the next.  Padding is zeros, so the few elements
of a computed line that would be added to pixels of another row are overwritten by zeros.  A line of a single row, or of
a part of one, has its padding instead.  With a stride along the width, each phase of the elements has lines of its own.  A tap reads one of the
phases, and the matrix has zeros for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import ceil, prod
from typing import NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, whole_lines
from cupyconv.numpy.convolution import CACHE_BLOCK, temporaries
from cupyconv.numpy.group_products import ONE_THREAD, GroupProducts, is_finite, sum_is_finite
from cupyconv.numpy.lines import (
    LINES_BLOCK,
    QUICK,
    Reading,
    Taps,
    along_width,
    calls_to_read,
    has_lines,
    lines_of,
    only_image,
    row_of,
)
from cupyconv.numpy.mec import column_parts, multiply_parts, part_of, parts_of_columns, place_parts, row_parts
from cupyconv.numpy.windows import Block, Images, LineRegions, parts_of
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import ConvProblem

#: Seconds per element that is copied, copied from a strided place, written by a product, and added; to begin a sum; and
#: to arrange an element of the weight.
COPY, APART, WRITE, ADD, BEGIN, ARRANGE = 75e-12, 300e-12, 55e-12, 75e-12, 45e-9, 500e-12
#: Pixels from which a product is about as fast as with more.
LONG_PRODUCT = 768
#: Names of the scratch buffers.  The last one is used only if sums are copied to the result.
BUFFERS = "lines read", "lines", "line sums"


class Turn(NamedTuple):
    """Views of the scratch memory of the groups that are computed together."""

    reading: Reading  # the lines that are read
    matrices: list[np.ndarray]  # these lines as matrices, in parts
    places: list[list[np.ndarray]]  # where the parts of the product are written
    zeros: list[np.ndarray]  # elements of the product that would be added to pixels of other rows
    runs: list[np.ndarray]  # the lines to add, in pieces
    sums: list[np.ndarray]  # their sums; empty if they are the result
    pixels: np.ndarray | None  # the part of the sums that is copied to the result


class Steps(NamedTuple):
    """Views that calls share, made once: Python makes a dozen views in the time of a product of some channels."""

    zeros: list[np.ndarray]  # padding, and ends of lines: set to zero once per block, since turns do not write there
    turns: dict[int, Turn]  # by the number of groups
    pieces: list[slice]  # pieces of a line that are added at a time


class ShiftedRows(GroupProducts):
    """Products of each group's kernels and its image, shifted by rows; and sums of these, shifted along the rows."""

    name = "shifted rows"
    description = "products of the image shifted by rows, summed over the taps of the width"
    turn_calls = 8
    has_tile = False

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        return problem.is_one_kind and geometry.kernel[2] > 1 and has_lines(geometry)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        lines = geometry.group_channels * lines_of(geometry) + geometry.group_outputs * geometry.kernel[2]
        # Half of the bytes, so that a turn has two groups: the first calls of a block are slow.
        pixels = LINES_BLOCK // (2 * lines * ITEMSIZE[accumulator(problem.x_dtype)] or 1)
        return max(pixels, LONG_PRODUCT), geometry.batch

    @classmethod
    def loops(cls, problem: ConvProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if problem.geometry.groups > 1:
            # Threads would mostly wait for each other between the short calls of few channels.
            problem = replace(problem, machine=replace(problem.host, threads=1))
        return super().loops(problem)

    @classmethod
    def workers(cls, problem: ConvProblem) -> int:
        return problem.host.threads  # all, if there is one group (see `loops`)

    @property
    def products_work(self) -> float:
        geometry, problem, (samples, *rows, width) = self.geometry, self.problem, self.block
        outputs, one = geometry.group_outputs, prod(rows) * self._row(width)
        product = self._parts.seconds if self._parts else cost.product(*self._sizes, problem)
        copy = APART if geometry.stride[2] > 1 else COPY
        if sum(self._lines_bytes) > CACHE_BLOCK:
            copy *= cost.FARTHER
        moved = samples * one * (self._reads * copy + outputs * self._lines * (WRITE + ADD))
        moved *= max(cost.width(problem.dtype), cost.multiply_adds(problem))
        zeros = outputs * samples * prod(rows) * sum(some.stop - some.start for _, some in self._of_other_rows)
        begun = BEGIN * outputs * samples * ceil(self._lines * one / ONE_THREAD)
        work = self.blocks * geometry.groups * (product + moved + cost.left_out(zeros) + begun)
        if not problem.weight_is_constant:
            work += ARRANGE * prod(problem.weight.shape)
        if not self._is_single and self._row(width) > width:
            work += cost.copied(prod(problem.out.shape), width, problem.dtype)
        return work

    @property
    def tile_work(self) -> float:
        return 0.0

    @property
    def _calls(self) -> float:
        calls = QUICK * (lines_of(self.geometry) + len(self._of_other_rows) + 3) + calls_to_read(self.problem)
        return (8.0 if self._is_single else 14.0) + calls * ceil(self.part / self.several)

    # Lines

    @cached_property
    def _taps(self) -> Taps:
        return along_width(self.geometry)

    @property
    def _lines(self) -> int:
        """Number of lines that are added for an output."""
        return len(self._taps.shifts)

    @property
    def _reads(self) -> int:
        """Number of lines that a group's product reads."""
        return self.geometry.group_channels * lines_of(self.geometry)

    @property
    def _has_gaps(self) -> bool:
        """Whether elements are multiplied by zeros of the matrix.  These would spread an infinity as NaN."""
        return self._lines * self.geometry.stride[2] > self.geometry.kernel[2]

    @property
    def _is_single(self) -> bool:
        """Whether a line has a single row, or a part of one, with its padding."""
        return prod(self.block[1:3]) == 1

    def _row(self, width: int) -> int:
        """Elements of a line from one row of `width` pixels to the next."""
        if not self._is_single:
            return row_of(self.geometry)
        return width + self._taps.shifts[-1] - self._taps.shifts[0]

    @cached_property
    def _of_other_rows(self) -> list[tuple[int, slice]]:
        """The lines with elements that pixels of other rows would add, and these elements of each row."""
        width, found = self.block[3], []
        if self._is_single:
            return []
        row = self._row(width)
        for number, shift in enumerate(self._taps.shifts):
            if shift < 0:
                found.append((number, slice(max(0, row + shift), row)))
            elif width + shift > row:
                found.append((number, slice(0, min(row, width + shift - row))))
        return found

    @property
    def _ends(self) -> int:
        """Number of elements before and after a line that shifted lines have."""
        return 0 if self._is_single else self._taps.reach

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Lines computed, lines read, and elements of a line, of a group's product."""
        return self.geometry.group_outputs * self._lines, self._reads, prod(self.block[:3]) * self._row(self.block[3])

    @cached_property
    def _parts(self) -> cost.Parts | None:
        """Parts of a product, if they take less time than the whole; else None."""
        return parts_of_columns(self.problem, self._sizes)

    @cached_property
    def _part_of_product(self) -> tuple[int, int]:
        return part_of(*self._sizes, self.factor_dtype, self._parts)

    @property
    def largest_product(self) -> int:
        rows, columns = self._part_of_product
        return rows * columns * self._reads

    # Memory

    @cached_property
    def part(self) -> int:
        groups = self.geometry.groups
        return groups if self.in_place else even_part(groups, CACHE_BLOCK * groups // (self.sums_bytes or 1))

    @cached_property
    def several(self) -> int:
        """Number of groups whose lines are in cache together."""
        room = min(LINES_BLOCK, self.problem.limit // 2)
        return even_part(self.part, room // (sum(self._lines_bytes) or 1))

    @property
    def together(self) -> int:
        return self.several

    @property
    def _group_bytes(self) -> int:
        return 0

    def _pitches(self, elements: int) -> tuple[int, int]:
        """Return the elements from one line of `elements` elements to the next: of those read, and of those added."""
        item = self.x_dtype.itemsize
        return whole_lines(elements, item), whole_lines(elements + self._ends, item)

    @cached_property
    def _lines_bytes(self) -> tuple[int, int]:
        """Bytes of the lines that one group reads, with what a prologue writes besides; and of its other lines."""
        elements, outputs = self._sizes[2], self.geometry.group_outputs
        sums = 0 if self._sums_are_lines else elements
        read, added = self._pitches(elements)
        besides = temporaries(self.geometry, self.problem.prologue) * self.geometry.group_channels * elements
        read = self._reads * read + besides
        return read * self.x_dtype.itemsize, outputs * (self._lines * added + sums) * self.x_dtype.itemsize

    @property
    def _alone_bytes(self) -> int:
        kernels = self._alone[0] * self.geometry.group_outputs * self.geometry.reduction
        return super()._alone_bytes + kernels * self.factor_dtype.itemsize

    @property
    def extra_bytes(self) -> int:
        ends = whole_lines(self._ends, self.x_dtype.itemsize) * self.x_dtype.itemsize
        return super().workspace + ends + self.several * self._lines_bytes[1]

    @property
    def workspace(self) -> int:
        return self.extra_bytes + self.several * self._lines_bytes[0]

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        loop = cls(problem, (1, 1, 1, 1))
        elements = problem.geometry.out_channels * loop._lines * loop._reads
        return elements * ITEMSIZE[accumulator(problem.weight_dtype)]

    # Sums

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the matrices (groups, lines of all outputs, lines read)."""
        geometry = self.geometry
        kernels = weight.reshape(*weight.shape[:2], geometry.group_channels, *geometry.kernel)
        matrices = (np.zeros if self._has_gaps else np.empty)(self._by_tap(weight), weight.dtype)
        if geometry.stride[2] == 1:
            matrices[..., 0] = kernels.transpose(0, 1, 5, 2, 3, 4)
        else:
            for tap, (line, phase) in enumerate(zip(self._taps.numbers, self._taps.phases)):
                matrices[:, :, line, ..., phase] = kernels[..., tap]
        return matrices.reshape(len(weight), -1, self._reads)

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        matrices = weight.reshape(self._by_tap(weight))
        taps = zip(self._taps.numbers, self._taps.phases)
        return np.stack([matrices[:, :, line, ..., phase] for line, phase in taps], axis=-1)

    def _by_tap(self, weight: np.ndarray) -> tuple[int, ...]:
        """Return the shape of matrices: (groups, outputs, lines, channels, taps of depth and of height, phases)."""
        geometry = self.geometry
        outputs, channels = geometry.group_outputs, geometry.group_channels
        return len(weight), outputs, self._lines, channels, *geometry.kernel[:2], geometry.stride[2]

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        regions = block.lines(self._row(block.size[3]), self._taps.shifts[0] if self._is_single else None)
        make = partial(self._steps, images.scratch, regions, sums.shape)
        names = BUFFERS[:2] if self._sums_are_lines else BUFFERS
        steps = images.scratch.views(self, (regions.layout, sums.shape), names, make)
        for zeros in steps.zeros:
            zeros.fill(0)
        matrices, ones = row_parts(weight, self._part_of_product[0]), self._ones
        image = only_image(images, block)
        lines = sums.reshape(*sums.shape[:3], 1, -1, copy=False) if self._sums_are_lines else None
        for groups in parts_of(len(sums), self.several):
            turn = steps.turns[groups.stop - groups.start]
            turn.reading.read(images, image, self.channels(groups), block, regions)
            multiply_parts([rows[groups] for rows in matrices], turn.matrices, turn.places)
            for zeros in turn.zeros:
                zeros.fill(0)
            if lines is not None:
                result = lines[groups]
                for run, piece in zip(turn.runs, steps.pieces):
                    np.matmul(ones, run, out=result[..., piece])
            else:
                for run, place in zip(turn.runs, turn.sums):
                    np.matmul(ones, run, out=place)
                sums[groups] = turn.pixels
        # Where zeros were written, an infinite weight times padding would be NaN.
        is_exact = self._is_single or is_finite(weight)
        return is_exact and (not self._has_gaps or sum_is_finite(sums))

    @cached_property
    def _sums_are_lines(self) -> bool:
        """Whether the rows of the sums lie one after the other, as in a line."""
        return self._is_single or self._row(self.block[3]) == self.block[3]

    @cached_property
    def _ones(self) -> np.ndarray:
        return np.ones((1, self._lines), self.sums_dtype)

    def _steps(self, scratch: Scratch, regions: LineRegions, shape: tuple[int, ...]) -> Steps:
        """Make the views for a block that reads these regions, and whose sums have this shape."""
        c, outputs, samples, *size, width = shape
        row = self._row(width)
        several, reads, lines, item = min(self.several, c), self._reads, self._lines, self.x_dtype.itemsize
        one, (rows, columns) = prod(size) * row, self._part_of_product
        length, ends = samples * one, whole_lines(self._ends, item)
        pitch, line = self._pitches(length)
        channels, taps = self.geometry.group_channels, len(regions.of_lines)
        read = scratch.array(BUFFERS[0], (several * channels, taps, pitch))[..., :length]
        matrices = read.reshape(several, reads, length)
        reading = Reading.of(read.reshape(-1, taps, samples, *size, row), regions)
        memory = scratch.array(BUFFERS[1], (ends + several * outputs * lines * line,), self.sums_dtype)
        written = memory[ends:].reshape(several, outputs * lines, line)
        products, between = written[..., :length], written[..., length:]
        by_row = products.reshape(several, outputs, lines, -1, row)
        of_other_rows = [by_row[:, :, number, :, some] for number, some in self._of_other_rows]
        steps = outputs * lines * line, lines * line, one, line + self._taps.shifts.step, 1
        first, one = (0, width) if self._is_single else (self._taps.shifts[0], one)
        runs = np.ndarray(
            (several, outputs, samples, lines, one),
            memory.dtype,
            memory,
            (ends + first) * item,
            [step * item for step in steps],
        )
        pieces = list(parts_of(one, even_part(one, ONE_THREAD // lines)))
        of_lines = None
        if not self._sums_are_lines:
            of_lines = scratch.array(BUFFERS[2], (several, outputs, samples, 1, one), self.sums_dtype)
        turns = {}
        for count in {several, c % several} - {0}:
            sums, pixels = [], None
            if of_lines is not None:
                sums = [of_lines[:count, ..., piece] for piece in pieces]
                pixels = of_lines[:count].reshape(count, outputs, samples, *size, -1)[..., :width]
            turns[count] = Turn(
                reading.first(count * channels),
                column_parts(matrices[:count], columns),
                place_parts(products[:count], rows, columns),
                [some[:count] for some in of_other_rows],
                [runs[:count, ..., piece] for piece in pieces],
                sums,
                pixels,
            )
        zeros = [between, memory[:ends]] if of_other_rows else []
        return Steps(reading.zeros + zeros, turns, pieces)
