"""What a chunk of the result reads along each axis, to the element: of a convolution, a transposed one, and pooling.

::

    axis of x       |   . . . . . . . .   |       `need` of a part of the result: the elements of x that a call on it takes,
    of the result         [ - - - ]               and what that call pads; `cut` into parts: where chunks of x end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import dask.array as da

import cupyconv
from cupyconv.call.operation import CheckedCall
from cupyconv.problem.passes import PoolingProblem
from cupyconv.problem.problems import ProductsProblem

Range = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True)
class Need:
    """What a call on one block takes along an axis: elements of x, and what it pads and adds."""

    first: int
    stop: int
    padding: Range = (0, 0)
    output_padding: int = 0


@dataclass(frozen=True)
class Axis:
    """An axis of x, of `size` elements, and of the result, of `out`: the windows of a convolution or of pooling.

    Element p of the result reads `span` elements of x from ``p * stride - before`` on.
    """

    size: int
    out: int
    stride: int = 1
    span: int = 1
    before: int = 0
    mode: str = "constant"

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """The chunks of the result for these borders of chunks of x: windows go by their middle."""
        left_over = self.size - (self.out - 1) * self.stride - 1
        return _ranges(self.out, [-((left_over // 2 - border) // self.stride) for border in borders])

    def need(self, first: int, stop: int) -> Need:
        """What this range of the result needs.  Zeros are padded by the call, other elements are read where they are."""
        begin = first * self.stride - self.before
        end = max(begin, (stop - 1) * self.stride - self.before + self.span)
        if self.mode != "constant":
            return Need(begin, end)
        inside = min(max(0, begin), self.size), max(0, min(end, self.size))
        if inside[0] >= inside[1]:
            return Need(0, 0, (end - begin, 0))
        return Need(*inside, (inside[0] - begin, end - inside[1]))


@dataclass(frozen=True)
class StampedAxis(Axis):
    """The same of a transposed convolution: element p of x is stamped on `span` elements of the result."""

    dilation: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        left_over = self.out - self.size * self.stride
        return _ranges(self.out, [border * self.stride + left_over // 2 for border in borders])

    def need(self, first: int, stop: int) -> Need:
        """The stamps that reach into this range.  What they cover before it is cut off, what they do not cover is added."""
        earliest = -((self.span - 1 - first - self.before) // self.stride)
        begin = max(0, min(earliest, (first + self.before) // self.stride))  # not past `first`, where stamps leave gaps
        end = (stop - 1 + self.before) // self.stride + 1  # zeros where that is past the last
        if begin < self.size < end and self._added(first, stop, begin, self.size) < max(self.stride, self.dilation):
            end = self.size
        covered = (end - 1 - begin) * self.stride + self.span
        cut, added = first + self.before - begin * self.stride, self._added(first, stop, begin, end)
        return Need(begin, end, (cut, covered + added - cut - (stop - first)), added)

    def _added(self, first: int, stop: int, begin: int, end: int) -> int:
        """How many elements of the result are past what these stamps cover."""
        return max(0, stop + self.before - (end - 1) * self.stride - self.span)


@dataclass(frozen=True)
class ChannelAxis(Axis):
    """The channels of all x, merged, and of the result: a group of these needs a group of those."""

    groups: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """Where a chunk of x ends with a group: that may be nowhere, and is nowhere if there is one group."""
        size = self.size // self.groups
        ends = [border // size for border in borders if self.groups > 1 and size and border % size == 0]
        return _ranges(self.out, [end * (self.out // self.groups) for end in ends])

    def need(self, first: int, stop: int) -> Need:
        if self.groups == 1 or first == stop:
            return Need(0, self.size)
        outputs, size = self.out // self.groups, self.size // self.groups
        return Need(first // outputs * size, stop // outputs * size)

    def groups_in(self, part: Range) -> int:
        """How many groups make this part of the result."""
        return (part[1] - part[0]) // (self.out // self.groups)


def _ranges(size: int, points: Sequence[int]) -> list[Range]:
    """The parts of an axis between these points, those outside left out; one empty part of an empty axis."""
    return [*pairwise(sorted({0, size, *(point for point in points if 0 < point < size)}))] or [(0, 0)]


def axes_of(function: Callable[..., Any], checked: CheckedCall, which: int, xs: Sequence[da.Array]) -> list[Any]:
    """The axes of the images and of the result number `which` of a checked call."""
    problem, channel = checked.problem, int(checked.axes.batched)
    channels = sum(x.shape[channel] for x in xs)
    out_channels = checked.results[which].shape[channel]
    if isinstance(problem, PoolingProblem):
        windows, groups = problem.windows, max(1, channels)
    else:
        assert isinstance(problem, ProductsProblem)
        windows, groups = problem.geometry, problem.geometry.groups
    if function is cupyconv.linmerge:  # its geometry has at most three spatial axes
        spatial: list[Axis] = [Axis(n, n) for n in xs[0].shape[2:]]
    else:
        triples = windows.size, windows.out_size, windows.stride, windows.span, windows.before, windows.dilation
        spatial = [
            StampedAxis(out, size, stride, span, before, dilation=dilation)
            if function is cupyconv.conv_transpose
            else Axis(size, out, stride, span, before, windows.padding_mode)
            for size, out, stride, span, before, dilation in zip(*map(windows.spatial, triples))
        ]
    samples = [Axis(n, n) for n in xs[0].shape[:channel]]
    return [*samples, ChannelAxis(channels, out_channels, groups=groups), *spatial]
