"""What a run of pooling's outputs, or of elements, has of an image along an axis; and the first largest element of a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy.windows import axis_segments
from cupyconv.problem.geometry import Windows

#: Elements of a window that are looked through at once for its largest.
PIECE = 1 << 16


class Outputs(NamedTuple):
    """A run of outputs along an axis: what their windows read, and of these elements those of each tap or window."""

    out: slice
    read: slice
    taps: tuple[tuple[slice, slice], ...] = ()  # positions of outputs, elements
    each: tuple[slice, ...] = ()  # of each window, where it is asked for

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
        """Whether there is nothing to compare: every output is an element."""
        return len(self.taps) == 1 and self.covered(self.taps[0])

    def covered(self, tap: tuple[slice, slice]) -> bool:
        return tap[0] == slice(0, self.length)


class Elements(NamedTuple):
    """A run of elements along an axis, the windows over it, and all that those read."""

    elements: slice
    windows: slice
    read: slice
    taps: tuple[tuple[slice, slice, slice, slice], ...] = ()  # windows and elements read; of these, elements of the run
    each: tuple[slice, ...] = ()  # of the elements read, those of each window, where it is asked for

    @classmethod
    def of(cls, windows: Windows, axis: int, elements: range, by_window: bool) -> Elements:
        stride, before = windows.stride[axis], windows.before[axis]
        first = max(0, -((windows.span[axis] - 1 - before - elements.start) // stride))
        over = range(first, max(first, min(windows.out_size[axis], (elements[-1] + before) // stride + 1)))
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
        """Of the elements that a window reads, those of the run, counted from its beginning."""
        first, step = self.read.start + read.start - self.elements.start, read.step
        first += max(0, -(first // step)) * step
        return slice(
            first, max(first, min(self.read.start + read.stop, self.elements.stop) - self.elements.start), step
        )


def few(windows: int, taps: int) -> bool:
    """Whether to look for the largest element of each window takes less than to ask every tap."""
    return 4 * windows < taps


def first_largest(elements: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The largest number of each channel of each sample, or NaN, and where the first of them lies along each axis."""
    best = place = np.zeros(elements.shape[:2], np.intp)
    before = 0
    for piece in pieces(elements.shape[2:]):
        flat = elements[everywhere(piece)].reshape(*elements.shape[:2], -1).astype(dtype, copy=False)
        first = flat.argmax(-1)
        largest = np.take_along_axis(flat, first[..., None], -1)[..., 0]
        better = (largest > best) | (np.isnan(largest) & ~np.isnan(best)) if before else True
        best, place = np.where(better, largest, best), np.where(better, first + before, place)
        before += flat.shape[-1]
    return best, np.unravel_index(place, elements.shape[2:])


def pieces(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most `PIECE` elements that follow one another in C order."""
    inner = prod(shape[1:])
    if inner > PIECE:
        for at in range(shape[0]):
            yield from ((slice(at, at + 1), *rest) for rest in pieces(shape[1:]))
        return
    step = PIECE // inner
    for at in range(0, shape[0], step):
        yield slice(at, at + step), *(slice(0, extent) for extent in shape[1:])


def most_read(windows: Windows, outputs: Sequence[int]) -> list[int]:
    """Elements along each axis that windows of this many outputs read, at the most."""
    return [
        min(size, (count - 1) * stride + span)
        for size, count, stride, span in zip(windows.size, outputs, windows.stride, windows.span)
    ]


def most_windows(windows: Windows, elements: Sequence[int]) -> list[int]:
    """Windows along each axis that lie over this many elements, at the most."""
    return [
        min(out, (count + span - 2) // stride + 1)
        for out, count, span, stride in zip(windows.out_size, elements, windows.span, windows.stride)
    ]


def elements_read(windows: Windows, axis: int, outputs: range) -> slice:
    """The elements along an axis that the windows of outputs lie over."""
    stride, before, size = windows.stride[axis], windows.before[axis], windows.size[axis]
    first = min(max(0, outputs.start * stride - before), size)
    return slice(first, max(first, min(size, outputs[-1] * stride - before + windows.span[axis])))


def tap_offsets(windows: Windows, axis: int, origin: int) -> list[int]:
    """Where each tap of the window at output 0 reads, counted from `origin`."""
    return [t * windows.dilation[axis] - windows.before[axis] - origin for t in range(windows.kernel[axis])]


def each_window(windows: Windows, axis: int, outputs: range, read: slice) -> tuple[slice, ...]:
    """Of the elements that outputs read along an axis, those of each one's window."""
    taps, size, nothing = range(windows.kernel[axis]), read.stop - read.start, (slice(0, 0), slice(0, 0, 1))
    starts = [output * windows.stride[axis] - windows.before[axis] - read.start for output in outputs]
    return tuple((elements_inside(taps, size, windows.dilation[axis], start) or nothing)[1] for start in starts)


def elements_inside(outputs: range, size: int, stride: int, offset: int) -> tuple[slice, slice] | None:
    """The outputs for which a tap falls on one of `size` elements, by position, and those elements."""
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
