"""Lines: all rows of an image one after the other, as one run of memory, for each tap along the height.

::

    image       a b c     lines of    . . . a b c d e f     the row above each pixel; zeros above the first row
                d e f     3 taps      a b c d e f g h i     the row of each pixel
                g h i                 d e f g h i . . .     the row below

A tap along the width reads all pixels of a line as one run that begins some elements earlier or later: the line is
*shifted* for it.  At the ends of rows this run has elements of other rows, where the tap reads zeros of the padding.
They must be left out.  With a stride along the width, every phase of the elements has lines of its own.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple, Self

import numpy as np

from cupyconv.numpy.windows import Block, Images, LineRegions
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import ConvProblem, WeightGradientProblem

#: Most lines of a channel, and most taps that shift a line: with more, other products or transforms take less time, and
#: there would be millions of views to plan.
MAX_LINES, MAX_TAPS = 64, 1024
#: Bytes of the lines of some groups, which stay in cache.
LINES_BLOCK = 640 << 10
#: Time of a call whose views already exist, relative to other calls; calls to read a line of an input by its regions.
QUICK, REGION_CALLS = 0.4, 3


class Taps(NamedTuple):
    """The taps along the width: how far each shifts a line, as the number of a shift, and the phase that it reads."""

    numbers: tuple[int, ...]
    phases: tuple[int, ...]
    shifts: range  # the element of a row that the first pixel reads, for each number

    @property
    def reach(self) -> int:
        """Most elements that a shifted line has before the first element of a line, or after its last."""
        return max(0, -self.shifts[0], self.shifts[-1])


def has_lines(geometry: ConvGeometry) -> bool:
    """Whether taps read zeros beyond the ends of rows, and lines and taps are few."""
    has_zeros = geometry.padding_mode == "constant" or not any(geometry.before + geometry.after)
    return has_zeros and lines_of(geometry) <= MAX_LINES and geometry.kernel[2] <= MAX_TAPS


def lines_of(geometry: ConvGeometry) -> int:
    """Return the number of lines of a channel: one for each tap along depth and height and each phase of the width."""
    return prod(geometry.kernel[:2]) * geometry.stride[2]


def row_of(geometry: ConvGeometry) -> int:
    """Return the elements of a line from one row of pixels to the next."""
    return max(geometry.out_size[2], -(-geometry.size[2] // geometry.stride[2]))


def calls_to_read(problem: ConvProblem | WeightGradientProblem) -> float:
    """Return the calls to read lines of several inputs, or of one that is transformed: some for each region."""
    is_plain = len(problem.xs) == 1 and not problem.prologue
    return 0.0 if is_plain else float(REGION_CALLS * lines_of(problem.geometry) * len(problem.xs))


@lru_cache(maxsize=512)
def taps_of(taps: int, stride: int, gap: int, before: int) -> Taps:
    """Return how taps along the width shift lines, `gap` elements apart, behind `before` elements of padding."""
    reads = [divmod(tap * gap - before, stride) for tap in range(taps)]
    first = min(element for element, _ in reads)
    step = gcd(*(element - first for element, _ in reads)) or 1
    numbers = tuple((element - first) // step for element, _ in reads)
    shifts = range(first, first + max(numbers) * step + 1, step)
    return Taps(numbers, tuple(phase for _, phase in reads), shifts)


def along_width(geometry: ConvGeometry) -> Taps:
    """Return the taps along the width of a convolution."""
    return taps_of(geometry.kernel[2], geometry.stride[2], geometry.dilation[2], geometry.before[2])


class Reading(NamedTuple):
    """Views of lines of some channels, by what is written there; made once for all blocks of the same layout."""

    lines: list[np.ndarray]  # each (channels, n, d, h, w)
    places: list[np.ndarray]  # parts of the lines that elements of the image are copied to
    zeros: list[np.ndarray]  # the other parts, which are padding

    @classmethod
    def of(cls, lines: np.ndarray, regions: LineRegions) -> Self:
        """Make the views of lines (channels, lines, n, d, h, w) that read these regions."""
        every: list[np.ndarray] = [lines[:, number] for number in range(len(regions.of_lines))]
        places: list[np.ndarray] = []
        zeros: list[np.ndarray] = []
        for line, own in zip(every, regions.of_lines):
            for at, elements in own:
                index: Any = (..., *at)
                (zeros if elements is None else places).append(line[index])
        return cls(every, places, zeros)

    def first(self, channels: int) -> Self:
        """Return the views of the first channels alone."""
        lines, places, zeros = ([view[:channels] for view in views] for views in self)
        return type(self)(lines, places, zeros)

    def read(
        self, images: Images, image: np.ndarray | None, channels: slice, block: Block, regions: LineRegions
    ) -> None:
        """Copy some channels of a block to the lines: of the only input, `image`, if that needs no transformation.

        Padding of such a copy is not written: it must be zeros already.
        """
        if image is None:
            some = images.some(channels)
            for own, line in zip(regions.of_lines, self.lines):
                some.read(own, block, line)
            return
        some_channels = image[channels]
        for place, elements in zip(self.places, regions.elements):
            place[...] = some_channels[elements]


def only_image(images: Images, block: Block) -> np.ndarray | None:
    """Return the only input (c, n, d, h, w) of a block's samples; None if there are several or they are transformed."""
    return block.samples_of(images.inputs[0][0]).swapaxes(0, 1) if images.is_plain else None
