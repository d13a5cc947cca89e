"""The search for the first largest element of each window, which max pooling with indices and its gradient need.

A box of windows is searched at once: in as many passes as the number of taps has binary digits, or window by window if
there are few windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy.pool_blocks import NewArray, largest_block
from cupyconv.numpy.pool_windows import (
    PIECE,
    each_window,
    elements_read,
    everywhere,
    first_elements,
    first_largest,
    most_read,
    on_axis,
    pieces,
)
from cupyconv.problem.geometry import Triple, Windows

#: Bytes of the positions of a plane's largest element, in a piece and in its window.
PLACE_BYTES = 128
#: Bytes per window of its largest element, its position, and the first element that it reads.
FOUND_BYTES = 24
#: Elements that are joined in one call, so that they and their positions stay in a core's L2 cache.
SLAB = 1 << 15
#: Most windows that are searched one by one before their results are used.
_ONE_BY_ONE = 256
#: Shares of the workspace, as powers of two, that boxes are made for: small ones leave space for other threads, large
#: ones read less again.
_SHARES = (6, 4, 2, 1, 0)
#: Seconds to search an element of a window, and to join an element to its neighbour.
_SEARCHED, _JOINED = 0.6e-9, 4e-9
#: NumPy calls per piece of a window, per window, per join, and per slab.
_PIECE_CALLS, _WINDOW_CALLS, _JOIN_CALLS, _SLAB_CALLS = 9, 8, 10, 20


@dataclass(frozen=True)
class Search:
    """How the first largest element of each window is found, for a box of windows at once.

    If it `joins`, it reduces along one axis after the other, the last one first.  Two runs of taps are joined to a
    longer one, and the earlier run wins a tie::

        elements     3 7 7 1 5 2
        of 2 taps    7 7 7 5 5        each element and its neighbour
        of 4 taps    7 7 7            each of these, and the one two elements further
        of 5 taps    7 7              and the one one element further: runs may overlap

    This takes about log2(taps) passes over all elements, and copies of them.  If it does not join, it searches one
    window after the other, a piece at a time, which needs little memory.
    """

    windows: Windows
    itemsize: int
    box: Triple
    joins: bool
    room: int  # bytes that pieces of a window may take

    @classmethod
    def candidates(cls, windows: Windows, itemsize: int, room: int) -> Iterator[Search]:
        """Yield searches that may be the fastest one within `room` bytes; at least one."""

        def largest(joins: bool, room: int, most: int) -> Search:
            """The search of the largest box, whose runs follow one another in C order."""

            def of(box: Sequence[int]) -> Search:
                return cls(windows, itemsize, (box[0], box[1], box[2]), joins, room)

            def fits(block: Sequence[int]) -> bool:
                return prod(block) <= most and (of(block[2:]).bytes <= room or not joins)

            return of(largest_block((1, 1, *windows.out_size), (4, 3, 2), fits)[2:])

        yield largest(False, room, max(1, min(_ONE_BY_ONE, room // (8 * FOUND_BYTES))))
        before: Triple | None = None
        for share in _SHARES:
            search = largest(True, room >> share, windows.pixels)
            if search.bytes <= room >> share and search.box != before:
                yield search
                before = search.box
            if before == windows.out_size:
                return

    @property
    def piece(self) -> int:
        """Elements of a window that are searched at once."""
        left = self.room - PLACE_BYTES - prod(self.box) * FOUND_BYTES
        return min(self.windows.taps, PIECE, max(1, left // (2 * self.itemsize)))

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """Each axis that is joined, its length with padding, and how many such lines there are."""
        windows, box, read = self.windows, self.box, most_read(self.windows, self.box)
        lengths = [(count - 1) * stride + span for count, stride, span in zip(box, windows.stride, windows.span)]
        return [
            (axis, lengths[axis], prod((*read[:axis], *box[axis + 1 :])))
            for axis in range(3)
            if is_joined(windows, axis)
        ]

    @property
    def bytes(self) -> int:
        """Bytes of a plane's temporaries."""
        found = prod(self.box) * FOUND_BYTES
        if not self.joins:
            return found + 2 * self.piece * self.itemsize + PLACE_BYTES
        each, slab = self.itemsize + 8, 0  # the largest element, and its index
        for axis, length, lines in self.stages:
            found += lines * self.box[axis] * each
            slab = max(slab, length, min(length * lines, SLAB))
        return found + slab * (2 * each + 3)  # before and after a join; which of them are NaN and win

    @property
    def turns(self) -> int:
        """Slabs or windows of a box that are searched one after the other."""
        if self.joins:
            return sum(-(-lines // max(1, SLAB // length)) for _, length, lines in self.stages)
        return prod(self.box)

    @property
    def calls(self) -> int:
        """NumPy calls for a box."""
        if self.joins:
            passes = max(map(passes_of, self.windows.kernel))
            return self.turns * (_JOIN_CALLS * passes + _SLAB_CALLS)
        return self.turns * (_PIECE_CALLS * -(-self.windows.taps // self.piece) + _WINDOW_CALLS)

    @property
    def seconds(self) -> float:
        """Seconds that NumPy computes for a plane's box."""
        if not self.joins:
            return prod(self.box) * self.windows.taps * _SEARCHED
        kernel = self.windows.kernel
        return sum(length * lines * (1 + passes_of(kernel[axis])) for axis, length, lines in self.stages) * _JOINED

    def found(
        self, outputs: Sequence[range], x: np.ndarray, dtype: np.dtype, new: NewArray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The largest number of each window, or NaN, and its index in its plane; of no elements, -inf and -1."""
        return (self._joined if self.joins else self._one_by_one)(outputs, x, dtype, new)

    def _one_by_one(
        self, outputs: Sequence[range], x: np.ndarray, dtype: np.dtype, new: NewArray
    ) -> tuple[np.ndarray, np.ndarray]:
        windows, shape = self.windows, (*x.shape[:2], *map(len, outputs))
        largest, indices = new("largest", shape, dtype), new("indices", shape, np.dtype(np.int64))
        each = [each_window(windows, axis, run, slice(0, windows.size[axis])) for axis, run in enumerate(outputs)]
        for at in product(*map(range, shape[2:])):
            read = [reads[i] for reads, i in zip(each, at)]
            elements, here = x[everywhere(read)], everywhere(at)
            if elements[0, 0].size == 0:
                largest[here], indices[here] = -inf, -1
                continue
            largest[here], places = first_largest(elements, dtype, self.piece)
            indices[here] = sum(
                (place * along.step + along.start) * step
                for place, along, step in zip(places, read, _index_steps(windows))
            )
        return largest, indices

    def _joined(
        self, outputs: Sequence[range], x: np.ndarray, dtype: np.dtype, new: NewArray
    ) -> tuple[np.ndarray, np.ndarray]:
        windows = self.windows
        reads = [elements_read(windows, axis, run) for axis, run in enumerate(outputs)]
        largest = x[everywhere(reads)]
        indices = np.broadcast_to(np.int64(0), largest.shape)
        for axis in (axis for axis in (2, 1, 0) if is_joined(windows, axis)):
            shape = (*largest.shape[: 2 + axis], len(outputs[axis]), *largest.shape[3 + axis :])
            found = new(f"largest {axis}", shape, dtype), new(f"indices {axis}", shape, np.dtype(np.int64))
            start = outputs[axis].start * windows.stride[axis] - windows.before[axis]
            length = (len(outputs[axis]) - 1) * windows.stride[axis] + windows.span[axis]
            line, lines = _Line(windows, axis, start, length, reads[axis]), SLAB // (length * prod(shape[:2]))
            for slab in _slabs(largest.shape[2:], axis, max(1, lines)):
                line.join(largest[slab], indices[slab], (found[0][slab], found[1][slab]), new)
            largest, indices = found
        lowest = largest == -inf
        if lowest.any():  # padding may have won
            indices = np.where(lowest, _first_indices(windows, outputs), indices)
        return largest, indices


class _Line(NamedTuple):
    """An axis of which runs of taps are joined: windows from element `start` on, with padding `length` elements."""

    windows: Windows
    axis: int
    start: int
    length: int
    read: slice

    def join(
        self, largest: np.ndarray, indices: np.ndarray, found: tuple[np.ndarray, np.ndarray], new: NewArray
    ) -> None:
        """Write the largest element of each window along the axis, and its index in its plane."""
        axis, length, dtype = self.axis, self.length, found[0].dtype
        stride, dilation, taps = (
            each[axis] for each in (self.windows.stride, self.windows.dilation, self.windows.kernel)
        )
        largest, indices = self._padded(largest, indices, dtype, new)
        if taps == 1:
            for each, of_windows in zip(found, (largest, indices)):
                each[...] = of_windows[on_axis(axis, slice(None, None, stride))]
        some_are_nan = bool(np.isnan(largest).any())
        covered = turn = 1
        while covered < taps:
            more = min(covered, taps - covered)
            covered, length, turn = covered + more, length - more * dilation, 1 - turn
            is_last = covered == taps
            places = (slice(at, at + length, stride if is_last else 1) for at in (0, more * dilation))
            earlier, later = (on_axis(axis, place) for place in places)
            of_earlier = largest[earlier]
            larger, chosen = found if is_last else self._arrays(turn, of_earlier.shape, dtype, new)
            np.maximum(of_earlier, largest[later], out=larger)
            wins = new("wins", larger.shape, np.dtype(bool))
            np.not_equal(larger, of_earlier, out=wins)
            if some_are_nan:
                wins &= ~np.isnan(of_earlier)
            chosen[...] = indices[earlier]
            np.copyto(chosen, indices[later], where=wins)
            largest, indices = larger, chosen

    def _padded(
        self, largest: np.ndarray, indices: np.ndarray, dtype: np.dtype, new: NewArray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers with -inf for the padding, and indices with that along this axis."""
        axis = self.axis
        count, before = largest.shape[2 + axis], max(0, min(self.read.start - self.start, self.length))
        padded, places = self._arrays(
            1, (*largest.shape[: 2 + axis], self.length, *largest.shape[3 + axis :]), dtype, new
        )
        inside, after = on_axis(axis, slice(before, before + count)), on_axis(axis, slice(before + count, None))
        padded[on_axis(axis, slice(0, before))] = padded[after] = -inf
        padded[inside] = largest
        np.add(
            indices, indices_along(self.windows, axis, self.read), out=places[inside]
        )  # those of padding stay unused
        return padded, places

    @staticmethod
    def _arrays(turn: int, shape: Sequence[int], dtype: np.dtype, new: NewArray) -> tuple[np.ndarray, np.ndarray]:
        return new(f"joined {turn}", shape, dtype), new(f"places {turn}", shape, np.dtype(np.int64))


def is_joined(windows: Windows, axis: int) -> bool:
    """Whether there is more than one element along an axis, padding included."""
    return windows.size[axis] + windows.before[axis] > 1 or windows.reached[axis] > 1


def passes_of(taps: int) -> int:
    """How many joins of two runs of taps make one run of all."""
    return (taps - 1).bit_length()


def _index_steps(windows: Windows) -> Triple:
    """How far neighbours along each axis are apart in a plane."""
    _, height, width = windows.size
    return height * width, width, 1


def indices_along(windows: Windows, axis: int, run: slice) -> np.ndarray:
    """What the position along an axis adds to the index of an element in its plane, to broadcast with three axes."""
    step = _index_steps(windows)[axis]
    return np.arange(run.start * step, run.stop * step, step).reshape(-1, *(1,) * (2 - axis))


def _slabs(shape: Sequence[int], axis: int, lines: int) -> Iterator[Any]:
    """Cut three axes into slabs of at most this many lines along one of them."""
    others = [extent for other, extent in enumerate(shape) if other != axis]
    if 0 not in others:
        for piece in pieces(others, lines):
            yield everywhere([*piece[:axis], slice(None), *piece[axis:]])


def _first_indices(windows: Windows, outputs: Sequence[range]) -> np.ndarray:
    """The index in its plane of the first element that each window reads; -1 if it reads nothing but padding."""
    firsts = np.ix_(*(first_elements(windows, axis, run) for axis, run in enumerate(outputs)))
    index: np.ndarray = sum(first * step for first, step in zip(firsts, _index_steps(windows)))  # type: ignore[assignment]
    for first in firsts:
        index[np.broadcast_to(first < 0, index.shape)] = -1
    return index
