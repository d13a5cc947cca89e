"""Slices along an axis for a run of pooling outputs or of elements, and the first largest element of a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy.windows import axis_segments
from cupyconv.problem.geometry import Windows

#: Elements of a window that are searched at once for its largest one.
PIECE = 1 << 16


class Outputs(NamedTuple):
    """A run of outputs along an axis, the elements that their windows read, and the part per tap or per window."""

    out: slice
    read: slice
    taps: tuple[tuple[slice, slice], ...] = ()  # per tap: positions of outputs, and elements
    each: tuple[slice, ...] = ()  # per window, if requested: elements

    @classmethod
    def of(cls, windows: Windows, axis: int, outputs: range, by_window: bool) -> Outputs:
        read = elements_read(windows, axis, outputs)
        out = slice(outputs.start, outputs.stop)
        if by_window:
            return cls(out, read, each=each_window(windows, axis, outputs, read))
        offsets = tap_offsets(windows, axis, read.start)
        taps = [elements_inside(outputs, read.stop - read.start, windows.stride[axis], offset) for offset in offsets]
        return cls(out, read, tuple(tap for tap in taps if tap is not None))

    @property
    def length(self) -> int:
        return self.out.stop - self.out.start

    @property
    def is_view(self) -> bool:
        """Whether there is nothing to reduce, because every output is an element."""
        return len(self.taps) == 1 and self.covered(self.taps[0])

    def covered(self, tap: tuple[slice, slice]) -> bool:
        return tap[0] == slice(0, self.length)


class Elements(NamedTuple):
    """A run of elements along an axis, the windows over it, and all elements that these windows read."""

    elements: slice
    windows: slice
    read: slice
    taps: tuple[tuple[slice, slice, slice, slice], ...] = ()  # windows, elements read; windows, elements of the run
    each: tuple[slice, ...] = ()  # per window, if requested: the elements that it reads

    @classmethod
    def of(cls, windows: Windows, axis: int, elements: range, by_window: bool) -> Elements:
        stride, over = windows.stride[axis], windows_over(windows, axis, elements)
        read = elements_read(windows, axis, over) if over else slice(0, 0)
        slices = slice(elements.start, elements.stop), slice(over.start, over.stop), read
        if by_window:
            return cls(*slices, each=each_window(windows, axis, over, read))
        taps = []
        for in_read, in_run in zip(tap_offsets(windows, axis, read.start), tap_offsets(windows, axis, elements.start)):
            reads = elements_inside(over, read.stop - read.start, stride, in_read)
            own = elements_inside(over, len(elements), stride, in_run) or (slice(0, 0), slice(0, 0))
            if reads is not None:
                taps.append((*reads, *own))
        return cls(*slices, tuple(taps))

    def own(self, read: slice) -> slice:
        """The elements of the run among those that a window reads, counted from the beginning of the run."""
        first, step = self.read.start + read.start - self.elements.start, read.step
        first += max(0, -(first // step)) * step
        return slice(
            first, max(first, min(self.read.start + read.stop, self.elements.stop) - self.elements.start), step
        )


def first_largest(elements: np.ndarray, dtype: np.dtype, piece_size: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The largest number per sample and channel, or NaN, and the position of its first occurrence along each axis.

    At most `piece_size` elements are searched at once.
    """
    best = place = np.zeros(elements.shape[:2], np.intp)
    before = 0
    for piece in pieces(elements.shape[2:], piece_size):
        flat = elements[everywhere(piece)].reshape(*elements.shape[:2], -1).astype(dtype, copy=False)
        first = flat.argmax(-1)
        largest = np.take_along_axis(flat, first[..., None], -1)[..., 0]
        better = (largest > best) | (np.isnan(largest) & ~np.isnan(best)) if before else True
        best, place = np.where(better, largest, best), np.where(better, first + before, place)
        before += flat.shape[-1]
    return best, np.unravel_index(place, elements.shape[2:])


def pieces(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of at most `most` elements that follow one another in C order."""
    inner = prod(shape[1:])
    if inner > most:
        for at in range(shape[0]):
            yield from ((slice(at, at + 1), *rest) for rest in pieces(shape[1:], most))
        return
    step = most // inner
    for at in range(0, shape[0], step):
        yield slice(at, at + step), *(slice(0, extent) for extent in shape[1:])


def most_read(windows: Windows, outputs: Sequence[int]) -> list[int]:
    """Most elements along each axis that the windows of this many outputs read."""
    return [
        min(size, (count - 1) * stride + span)
        for size, count, stride, span in zip(windows.size, outputs, windows.stride, windows.span)
    ]


def most_windows(windows: Windows, elements: Sequence[int]) -> list[int]:
    """Most windows along each axis that overlap this many elements."""
    return [
        min(out, (count + span - 2) // stride + 1)
        for out, count, span, stride in zip(windows.out_size, elements, windows.span, windows.stride)
    ]


def windows_over(windows: Windows, axis: int, elements: range) -> range:
    """The windows along an axis that overlap a run of elements."""
    stride, before = windows.stride[axis], windows.before[axis]
    first = max(0, -((windows.span[axis] - 1 - before - elements.start) // stride))
    return range(first, max(first, min(windows.out_size[axis], (elements[-1] + before) // stride + 1)))


def elements_read(windows: Windows, axis: int, outputs: range) -> slice:
    """The elements along an axis that the windows of `outputs` span."""
    stride, before, size = windows.stride[axis], windows.before[axis], windows.size[axis]
    first = min(max(0, outputs.start * stride - before), size)
    return slice(first, max(first, min(size, outputs[-1] * stride - before + windows.span[axis])))


def tap_offsets(windows: Windows, axis: int, origin: int) -> list[int]:
    """The element that each tap of the window at output 0 reads, counted from `origin`."""
    return [t * windows.dilation[axis] - windows.before[axis] - origin for t in range(windows.kernel[axis])]


def each_window(windows: Windows, axis: int, outputs: range, read: slice) -> tuple[slice, ...]:
    """For each output, the elements of its window among the elements `read` along an axis."""
    taps, size, nothing = range(windows.kernel[axis]), read.stop - read.start, (slice(0, 0), slice(0, 0, 1))
    starts = [output * windows.stride[axis] - windows.before[axis] - read.start for output in outputs]
    return tuple((elements_inside(taps, size, windows.dilation[axis], start) or nothing)[1] for start in starts)


def first_elements(windows: Windows, axis: int, outputs: range) -> np.ndarray:
    """The first element along an axis that each window reads; -1 if it reads nothing but padding."""
    start = np.arange(outputs.start, outputs.stop) * windows.stride[axis] - windows.before[axis]
    first = np.maximum(start, start % windows.dilation[axis])
    first[first >= np.minimum(start + windows.span[axis], windows.size[axis])] = -1
    return first


def elements_inside(outputs: range, size: int, stride: int, offset: int) -> tuple[slice, slice] | None:
    """Positions of the outputs for which a tap reads one of `size` elements, and those elements."""
    for at, elements in axis_segments(outputs, size, stride, offset, "constant"):
        if isinstance(elements, slice):
            return at, elements
    return None


def everywhere(slices: Sequence[slice | int]) -> Any:
    """An index of the last three axes."""
    return (..., *slices)


def on_axis(axis: int, elements: slice) -> Any:
    """An index of one of the last three axes."""
    return (..., elements, *(slice(None),) * (2 - axis))
