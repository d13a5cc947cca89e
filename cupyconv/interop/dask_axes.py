"""Which elements a chunk of the result reads along each axis, for convolution, transposed convolution and pooling.

::

    axis of x       |   . . . . . . . .   |       `need` of a part of the result: the elements of x that its call reads,
    axis of result        [ - - - ]               and its padding; `cut` splits the axis at x's chunk borders
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
    """The elements of x that a call on one block reads along an axis, and the padding of that call."""

    first: int
    stop: int
    padding: Range = (0, 0)
    output_padding: int = 0


@dataclass(frozen=True)
class Axis:
    """An axis with `size` elements in x and `out` elements in the result, for convolution or pooling windows.

    Element p of the result reads `span` elements of x, starting at ``p * stride - before``.
    """

    size: int
    out: int
    stride: int = 1
    span: int = 1
    before: int = 0
    mode: str = "constant"

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """Return the chunks of the result for these chunk borders of x: a window is in the chunk with its center."""
        left_over = self.size - (self.out - 1) * self.stride - 1
        return _ranges(self.out, [-((left_over // 2 - border) // self.stride) for border in borders])

    def need(self, first: int, stop: int) -> Need:
        """Return what this range of the result needs.  The call pads zeros; other padded elements are read from x."""
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
    """The axis of a transposed convolution: element p of x is stamped on `span` elements of the result."""

    dilation: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        left_over = self.out - self.size * self.stride
        return _ranges(self.out, [border * self.stride + left_over // 2 for border in borders])

    def need(self, first: int, stop: int) -> Need:
        """Return the stamps that reach into this range.  Elements before it are cut off, uncovered ones are added."""
        earliest = -((self.span - 1 - first - self.before) // self.stride)
        begin = max(0, min(earliest, (first + self.before) // self.stride))  # not past `first` if stamps leave gaps
        end = (stop - 1 + self.before) // self.stride + 1  # zeros past the last element
        if begin < self.size < end and self._added(first, stop, begin, self.size) < max(self.stride, self.dilation):
            end = self.size
        covered = (end - 1 - begin) * self.stride + self.span
        cut, added = first + self.before - begin * self.stride, self._added(first, stop, begin, end)
        return Need(begin, end, (cut, covered + added - cut - (stop - first)), added)

    def _added(self, first: int, stop: int, begin: int, end: int) -> int:
        """Return how many elements of the result are past the last of these stamps."""
        return max(0, stop + self.before - (end - 1) * self.stride - self.span)


@dataclass(frozen=True)
class ChannelAxis(Axis):
    """The channels of all x, merged, and those of the result: a group of outputs needs one group of inputs."""

    groups: int = 1

    def cut(self, borders: Sequence[int]) -> list[Range]:
        """Cut where a chunk of x ends at a group boundary.  With one group there is no cut."""
        size = self.size // self.groups
        ends = [border // size for border in borders if self.groups > 1 and size and border % size == 0]
        return _ranges(self.out, [end * (self.out // self.groups) for end in ends])

    def need(self, first: int, stop: int) -> Need:
        if self.groups == 1 or first == stop:
            return Need(0, self.size)
        outputs, size = self.out // self.groups, self.size // self.groups
        return Need(first // outputs * size, stop // outputs * size)

    def groups_in(self, part: Range) -> int:
        """Return how many groups this part of the result has."""
        return (part[1] - part[0]) // (self.out // self.groups)


def _ranges(size: int, points: Sequence[int]) -> list[Range]:
    """Return the parts of an axis between the points inside it.  An empty axis has one empty part."""
    return [*pairwise(sorted({0, size, *(point for point in points if 0 < point < size)}))] or [(0, 0)]


def axes_of(function: Callable[..., Any], checked: CheckedCall, which: int, xs: Sequence[da.Array]) -> list[Any]:
    """Return the axes of the images and of result number `which` of a checked call."""
    problem, channel = checked.problem, int(checked.axes.batched)
    channels = sum(x.shape[channel] for x in xs)
    out_channels = checked.results[which].shape[channel]
    if isinstance(problem, PoolingProblem):
        windows, groups = problem.windows, max(1, channels)
    else:
        assert isinstance(problem, ProductsProblem)
        windows, groups = problem.geometry, problem.geometry.groups
    if function is cupyconv.linmerge:  # its geometry has at most three spatial axes, x may have more
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
