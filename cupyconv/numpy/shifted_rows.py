"""Depthwise convolution by shifted rows: one product for all taps along the height, one sum for those along the width.

All rows of pixels of a channel are one long line.  For each tap along the height (or depth), the line that it reads is
copied: the image, some rows further.  A product with the kernel makes a line for each tap along the width: what this
tap contributes to all pixels.  These lines are added, each from its first pixel on::

    kernel,        lines that the     lines of the
    turned         taps of the        taps of the width
                   height read
    | w w w |      | row - 1 ... |    | p0 p1 p2 p3 ... |    result  =  . p0 p1 p2 ...  of tap 0
    | w w w |  x   | row     ... | =  | p0 p1 p2 p3 ... |            +  p0 p1 p2 p3 ...  of tap 1
    | w w w |      | row + 1 ... |    | p0 p1 p2 p3 ... |            +  p1 p2 p3 p4 ...  of tap 2

The sum is a product too: a row of ones times a view whose rows are these lines.  A line continues from the end of one
row of pixels to the beginning of the next.  Padding is zeros, so the few elements that a tap would read there are
overwritten by zeros.

With a stride along the width, each phase of the elements has lines of its own.  A tap reads one of the phases, and the
matrix has zeros for the others.
"""

from __future__ import annotations

from cmath import isfinite
from functools import cached_property, partial
from math import ceil, gcd, prod
from typing import Any, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, whole_lines
from cupyconv.numpy.convolution import CACHE_BLOCK, temporaries
from cupyconv.numpy.mec import column_parts, multiply_parts, place_parts
from cupyconv.numpy.toeplitz import ChannelProducts, sum_is_finite
from cupyconv.numpy.windows import Block, Images, Region, parts_of
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import ConvProblem

#: Bytes of the lines of some channels, which stay in cache.
LINES_BLOCK = 640 << 10
#: Most lines that a product reads.
MAX_LINES = 64
#: Most elements of a matrix that OpenBLAS multiplies with a vector on one thread.
ONE_THREAD = 9_000
#: Pixels of a product are a multiple of this number: four vectors.
WHOLE = 64
#: Seconds per element that is copied, copied from a strided place, computed by a product, read by a product for each
#: line that it computes, and added.  Seconds to begin a product.
COPY, APART, PRODUCT, READ, ADD, BEGIN = 80e-12, 300e-12, 80e-12, 10e-12, 80e-12, 45e-9
#: Time of a call whose views already exist, relative to other calls.
QUICK = 0.4
#: Names of the scratch buffers.  The last one is used only if sums are copied to the result.
BUFFERS = "lines read", "lines", "line sums"


class Taps(NamedTuple):
    """The taps along the width: the line that each of them has, and the phase of elements that it reads."""

    lines: tuple[int, ...]
    phases: tuple[int, ...]
    first: int  # element of the first line that the first pixel adds
    step: int  # elements by which each line is added from further on


class Turn(NamedTuple):
    """Views of the scratch memory of the channels that are computed together."""

    read: list[np.ndarray]  # the lines that are read, each (c, n, d, h, w)
    copies: list[tuple[np.ndarray, tuple[Any, ...]]]  # parts of these lines, and the elements of an image copied there
    matrices: list[np.ndarray]  # these lines as matrices, in parts
    places: list[list[np.ndarray]]  # where the parts of the product are written
    zeros: list[np.ndarray]  # elements of the product that would be added to pixels of other rows
    runs: list[np.ndarray]  # the lines to add, in pieces
    sums: list[np.ndarray]  # their sums; empty if they are the result
    pixels: np.ndarray | None  # the part of the sums that is copied to the result


class Steps(NamedTuple):
    """Views that calls share, made once: Python makes a dozen views in the time of a product of some channels."""

    regions: tuple[tuple[Region, ...], ...]  # what the lines read
    zeros: list[np.ndarray]  # padding, and ends of lines; nothing else writes these elements
    turns: dict[int, Turn]  # by the number of channels
    pieces: list[slice]  # pieces of a line that are added at a time


class ShiftedRows(ChannelProducts):
    """Products of a channel's kernel and of its image, shifted by rows; and sums of these, shifted along the rows."""

    name = "shifted rows"
    description = "products of the image shifted by rows, summed over the taps of the width"
    is_in_place = True

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        has_zeros = geometry.padding_mode == "constant" or not any(geometry.before + geometry.after)
        has_taps = geometry.kernel[2] > 1 and 1 < prod(geometry.kernel[:2]) * geometry.stride[2] <= MAX_LINES
        return geometry.is_depthwise and problem.is_one_kind and has_zeros and has_taps

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        lines = prod(geometry.kernel[:2]) * geometry.stride[2] + geometry.group_outputs * geometry.kernel[2]
        # Two channels at least: blocks begin with slow calls, which others follow.
        return LINES_BLOCK // (2 * lines * ITEMSIZE[accumulator(problem.x_dtype)]), geometry.batch

    @classmethod
    def fitted(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        return cls.of_whole_rows(super().fitted(problem, fixed, limit), fixed, limit)

    @property
    def products_work(self) -> float:
        geometry, problem, (samples, *rows, width) = self.geometry, self.problem, self.block
        outputs, one = geometry.group_outputs, prod(rows) * self._row
        copy = APART if geometry.stride[2] > 1 else COPY
        own = self._reads * copy + outputs * self._lines * (PRODUCT + self._reads * READ + ADD)
        own *= samples * one * max(cost.width(problem.dtype), cost.multiply_adds(problem))
        zeros = outputs * samples * prod(rows) * sum(some.stop - some.start for _, some in self._of_other_rows)
        begun = BEGIN * (1 + outputs * samples * ceil(self._lines * one / ONE_THREAD))
        work = self.blocks * geometry.groups * (own + cost.left_out(zeros) + begun)
        if self._row > width:
            work += cost.copied(prod(problem.out.shape), width, problem.dtype)
        return work

    @property
    def tile_work(self) -> float:
        return 0.0

    @property
    def _calls(self) -> float:
        quick = self._reads + len(self._of_other_rows) + 3
        return 10.0 + QUICK * quick * ceil(self.part / self.several)

    # Lines

    @cached_property
    def _taps(self) -> Taps:
        geometry = self.geometry
        gap, before = geometry.dilation[2], geometry.before[2]
        reads = [divmod(tap * gap - before, geometry.stride[2]) for tap in range(geometry.kernel[2])]
        first = min(element for element, _ in reads)
        step = gcd(*(element - first for element, _ in reads)) or 1
        return Taps(
            tuple((element - first) // step for element, _ in reads), tuple(phase for _, phase in reads), first, step
        )

    @property
    def _lines(self) -> int:
        """Number of lines that are added for an output channel."""
        return 1 + max(self._taps.lines)

    @property
    def _reads(self) -> int:
        """Number of lines that a product reads."""
        return prod(self.geometry.kernel[:2]) * self.geometry.stride[2]

    @property
    def _has_gaps(self) -> bool:
        """Whether elements are multiplied by zeros of the matrix.  These would spread an infinity as NaN."""
        return self._lines * self.geometry.stride[2] > self.geometry.kernel[2]

    @cached_property
    def _row(self) -> int:
        """Elements of a line from one row of pixels to the next."""
        geometry = self.geometry
        return max(geometry.out_size[2], -(-geometry.size[2] // geometry.stride[2]))

    @cached_property
    def _of_other_rows(self) -> list[tuple[int, slice]]:
        """The lines with elements that pixels of other rows would add, and these elements of each row."""
        (_, _, first, step), row, width, found = self._taps, self._row, self.geometry.out_size[2], []
        for line in range(self._lines):
            shift = first + line * step
            if shift < 0:
                found.append((line, slice(max(0, row + shift), row)))
            elif width + shift > row:
                found.append((line, slice(0, min(row, width + shift - row))))
        return found

    @cached_property
    def _ends(self) -> int:
        """Number of elements that sums read before the first and after the last of a line."""
        shifts = self._taps.first, self._taps.first + (self._lines - 1) * self._taps.step
        return max(0, -shifts[0], shifts[1])

    # Memory

    @cached_property
    def part(self) -> int:
        groups = self.geometry.groups
        return groups if self.in_place else even_part(groups, CACHE_BLOCK * groups // (self.sums_bytes or 1))

    @cached_property
    def several(self) -> int:
        """Number of channels whose lines are in cache together."""
        room = min(LINES_BLOCK, self.problem.limit // (2 * self.problem.host.threads))
        return even_part(self.part, room // (sum(self._channel_bytes) or 1))

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
    def _channel_bytes(self) -> tuple[int, int]:
        """Bytes of the lines that one channel reads, with what a prologue writes besides; and of the other lines."""
        elements, outputs = prod(self.block[:3]) * self._row, self.geometry.group_outputs
        read, added = self._pitches(elements)
        read = self._reads * read + temporaries(self.geometry, self.problem.prologue) * elements
        return read * self.x_dtype.itemsize, outputs * (self._lines * added + elements) * self.x_dtype.itemsize

    @property
    def extra_bytes(self) -> int:
        ends = 2 * whole_lines(self._ends, self.x_dtype.itemsize) * self.x_dtype.itemsize
        return super().workspace + ends + self.several * self._channel_bytes[1]

    @property
    def workspace(self) -> int:
        return self.extra_bytes + self.several * self._channel_bytes[0]

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        loop = cls(problem, (1, 1, 1, 1))
        elements = problem.geometry.out_channels * loop._lines * loop._reads
        return elements * ITEMSIZE[accumulator(problem.weight_dtype)]

    # Sums

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the matrices (c, lines of all outputs, lines read)."""
        kernels = weight.reshape(*weight.shape[:2], *self.geometry.kernel)
        matrices = (np.zeros if self._has_gaps else np.empty)(self._by_tap(weight), weight.dtype)
        if self.geometry.stride[2] == 1 and not self._has_gaps:
            matrices[..., 0] = kernels.transpose(0, 1, 4, 2, 3)
        else:
            for tap, (line, phase) in enumerate(zip(self._taps.lines, self._taps.phases)):
                matrices[:, :, line, :, :, phase] = kernels[..., tap]
        return matrices.reshape(len(weight), -1, self._reads)

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        matrices = weight.reshape(self._by_tap(weight))
        taps = zip(self._taps.lines, self._taps.phases)
        return np.stack([matrices[:, :, line, :, :, phase] for line, phase in taps], axis=-1)

    def _by_tap(self, weight: np.ndarray) -> tuple[int, ...]:
        """Return the shape of matrices: (c, outputs per channel, lines, taps of depth and of height, phases)."""
        geometry = self.geometry
        return len(weight), geometry.group_outputs, self._lines, *geometry.kernel[:2], geometry.stride[2]

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        is_result, regions = self._is_result(sums), block.lines(self._row)
        make = partial(self._steps, images.scratch, regions, sums.shape, is_result)
        key = id(regions), sums.shape, is_result
        steps = images.scratch.views(self, key, BUFFERS[: 3 - is_result], make)
        for zeros in steps.zeros:
            zeros.fill(0)
        matrices, ones = weight[:, None, None], self._ones
        image = block.samples_of(images.inputs[0][0]).swapaxes(0, 1) if images.is_plain else None
        lines = sums.reshape(*sums.shape[:3], 1, -1) if is_result else None
        for groups in parts_of(len(sums), self.several):
            turn = steps.turns[groups.stop - groups.start]
            if image is None:
                some = images.some(groups)
                for own, line in zip(regions, turn.read):
                    some.read(own, block, line)
            else:
                channels = image[groups]
                for place, elements in turn.copies:
                    place[...] = channels[elements]
            multiply_parts([matrices[groups]], turn.matrices, turn.places)
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
        return is_finite(weight) and (not self._has_gaps or sum_is_finite(sums))

    def _is_result(self, sums: np.ndarray) -> bool:
        """Whether the rows of the result lie one after the other, as in a line."""
        depth, height, width = sums.shape[3:]
        d, h, w = sums.strides[3:]
        is_line = w == sums.itemsize and (height == 1 or h == width * w) and (depth == 1 or d == height * h)
        return is_line and self._row == width

    @cached_property
    def _ones(self) -> np.ndarray:
        return np.ones((1, self._lines), self.sums_dtype)

    def _steps(
        self, scratch: Scratch, regions: tuple[tuple[Region, ...], ...], shape: tuple[int, ...], is_result: bool
    ) -> Steps:
        """Make the views for a block that reads these regions, and whose sums have this shape."""
        (c, outputs, samples, *size, width), row = shape, self._row
        several, reads, lines, item = min(self.several, c), self._reads, self._lines, self.x_dtype.itemsize
        one = prod(size) * row
        length, ends = samples * one, whole_lines(self._ends, item)
        pitch, line = self._pitches(length)
        read = scratch.array(BUFFERS[0], (several, reads, pitch))[..., :length]
        by_pixel = read.reshape(several, reads, samples, *size, row)
        reading: list[tuple[np.ndarray, Any]] = []
        for number, own in enumerate(regions):
            for at, elements in own:
                place: Any = (slice(None), number, slice(None), *at)
                reading.append((by_pixel[place], None if elements is None else (..., *elements)))
        memory = scratch.array(BUFFERS[1], (several * outputs * lines * line + 2 * ends,), self.sums_dtype)
        written = memory[ends : memory.size - ends].reshape(several, outputs * lines, line)
        products, between = written[..., :length], written[..., length:]
        by_row = products.reshape(several, outputs, lines, -1, row)
        of_other_rows = [by_row[:, :, number, :, some] for number, some in self._of_other_rows]
        steps = outputs * lines * line, lines * line, one, line + self._taps.step, 1
        runs = np.ndarray(
            (several, outputs, samples, lines, one),
            memory.dtype,
            memory,
            (ends + self._taps.first) * item,
            [step * item for step in steps],
        )
        pieces = list(parts_of(one, even_part(one, ONE_THREAD // lines)))
        most = cost.SAFELY_SMALL // (outputs * lines * reads)
        most = most // WHOLE * WHOLE or max(1, most)
        of_lines = None
        if not is_result:
            of_lines = scratch.array(BUFFERS[2], (several, outputs, samples, 1, one), self.sums_dtype)
        turns = {}
        for count in {several, c % several} - {0}:
            sums, pixels = [], None
            if of_lines is not None:
                sums = [of_lines[:count, ..., piece] for piece in pieces]
                pixels = of_lines[:count].reshape(count, outputs, samples, *size, row)[..., :width]
            turns[count] = Turn(
                [by_pixel[:count, number] for number in range(reads)],
                [(place[:count], elements) for place, elements in reading if elements is not None],
                column_parts(read[:count], most),
                place_parts(products[:count], outputs * lines, most),
                [some[:count] for some in of_other_rows],
                [runs[:count, ..., piece] for piece in pieces],
                sums,
                pixels,
            )
        padding = [place for place, elements in reading if elements is None]
        return Steps(regions, [*padding, between, memory[:ends], memory[memory.size - ends :]], turns, pieces)


def is_finite(weight: np.ndarray) -> bool:
    """Whether all elements are finite; False too if the sum of their squares is not.

    After other products, BLAS's product of vectors is in cache.  A function of NumPy that is not takes up to ten times
    as long.
    """
    elements = weight.reshape(-1)
    return isfinite(np.matmul(elements, elements))
