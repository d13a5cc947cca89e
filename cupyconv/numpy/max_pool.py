"""Max pooling: the largest element of every window, its position, and the gradient, which goes to this position.

To find positions, every tap is compared with the maximum, the last tap first.  Earlier taps overwrite the positions of
later taps, so the position of the first largest element remains.

The gradient visits all taps in row-major order.  A tap whose element is its window's maximum receives what is left of
the window's gradient, so the first such tap receives all of it.

If a block has few windows and many taps, both search each window for its first largest element, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from cupyconv.numpy.pool_blocks import Adjoint, NewArray, Reduction, in_dtype, windows_are_apart
from cupyconv.numpy.pool_windows import (
    PIECE,
    Elements,
    Outputs,
    everywhere,
    few,
    first_largest,
    most_read,
    most_windows,
)
from cupyconv.problem.arrays import ITEMSIZE

#: Bytes of the positions of a plane's largest element, in a piece and in its window.
PLACE_BYTES = 128


class MaxPool(Reduction):
    """The largest element of every window."""

    ufunc, of_nothing, many_in_one_call = np.maximum, -np.inf, 100

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        self.largest(dtype, new, images, parts)

    def largest(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write the largest element of each window; return the elements that the block reads, and the largest ones."""
        x, out = images[:2]
        image = self.image(x, dtype, new, parts)
        out = out[everywhere([part.out for part in parts])]
        largest = self.reduced(dtype, new, image, out, parts)
        if largest is not out:
            out[...] = largest
        return image, largest


class LargestPlaces(MaxPool):
    """The largest element of every window, and its position."""

    def by_window(self, axis: int) -> bool:
        """Whether the block visits windows instead of taps; the same for all axes."""
        return few(prod(self.block[2:]), self.problem.windows.taps)

    @property
    def touched(self) -> int:
        return super().touched + prod(self.block) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def temporaries(self) -> tuple[int, int]:
        """Also flags of elements that are the largest, or NaN; by windows, a piece and the positions of its largest."""
        if self.by_window(0):
            return 2 * min(self.problem.windows.taps, PIECE), PLACE_BYTES
        return super().temporaries[0], 2 * prod(self.block[2:])

    @property
    def shared(self) -> int:
        """Positions of the elements that a block reads, 8 bytes each."""
        if self.by_window(0):
            return 0
        return prod(most_read(self.problem.windows, self.block[2:])) * -(-8 // ITEMSIZE[self.dtype])

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        if self.by_window(0):
            self._finish_each(dtype, images, parts)
        else:
            self._finish_by_tap(dtype, new, images, parts)

    def _finish_each(self, dtype: np.dtype, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        height, width = images[0].shape[3:]
        x = images[0][everywhere([part.read for part in parts])]
        out, indices = (image[everywhere([part.out for part in parts])] for image in images[1:])
        for window in product(*(range(part.length) for part in parts)):
            read = [part.each[at] for part, at in zip(parts, window)]
            here = everywhere(window)
            elements = x[everywhere(read)]
            if elements[0, 0].size == 0:
                out[here], indices[here] = self.of_nothing, -1
                continue
            out[here], places = first_largest(elements, dtype)
            index = np.zeros(elements.shape[:2], np.int64)
            for part, along, place, step in zip(parts, read, places, (height * width, width, 1)):
                index += (place * along.step + (along.start + part.read.start)) * step
            indices[here] = index

    def _finish_by_tap(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]
    ) -> None:
        image, largest = self.largest(dtype, new, images, parts)
        height, width = images[0].shape[3:]
        places = new("places", (1, 1, *(part.read.stop - part.read.start for part in parts)), np.dtype(np.int64))
        places[...] = 0
        for axis, (run, step) in enumerate(zip([part.read for part in parts], (height * width, width, 1))):
            along = np.arange(run.start * step, run.stop * step, step).reshape(-1, *(1,) * (2 - axis))
            places += along
        indices = images[2][everywhere([part.out for part in parts])]
        indices.fill(-1)
        hit = new("hit", largest.shape, np.dtype(bool))
        some_are_nan = bool(np.isnan(largest).any())
        for tap in product(*(part.taps[::-1] for part in parts)):
            at, elements = (everywhere(slices) for slices in zip(*tap))
            hits = hit[at]
            np.equal(image[elements], largest[at], out=hits)
            if some_are_nan:
                hits |= np.isnan(image[elements])
            np.copyto(indices[at], places[elements], where=hits)


class MaxPoolGradient(Adjoint):
    """The gradient of each window, added to its largest element."""

    def by_window(self, axis: int) -> bool:
        """Whether the block visits windows instead of taps; the same for all axes."""
        windows = self.problem.windows
        return few(prod(most_windows(windows, self.block[2:])), windows.taps)

    @property
    def touched(self) -> int:
        """Elements that a block reads and writes; 0 if it visits windows and is in one plane, so that no plane is cut.

        Otherwise each part of a plane would search the same windows again.
        """
        return 0 if self.by_window(0) and prod(self.block[:2]) == 1 else super().touched

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left of the gradient, what a tap receives, and flags of the elements that receive it.

        If widened, also copies of all that the block reads and writes.
        """
        elements, windows = self.block[2:], self.problem.windows
        over = most_windows(windows, elements)
        if self.by_window(0):
            return 2 * min(windows.taps, PIECE) + prod(elements) * self.widened, PLACE_BYTES
        copies = prod(over) + prod(most_read(windows, over)) + prod(elements)
        return 2 * prod(over) + copies * self.widened, 2 * prod(over)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Elements]) -> None:
        x, y, grad, out = images
        over = everywhere([part.windows for part in parts])
        image, out = x[everywhere([part.read for part in parts])], out[everywhere([part.elements for part in parts])]
        sums = out if out.dtype == dtype else new("sums", out.shape, dtype)
        sums[...] = 0
        if self.by_window(0):
            _add_by_window(parts, image, grad[over], sums)
        else:
            image, largest = in_dtype("image", image, dtype, new), in_dtype("largest", y[over], dtype, new)
            left = new("left", largest.shape, dtype)
            left[...] = grad[over]
            self._add_by_tap(new, parts, image, largest, left, sums)
        if sums is not out:
            out[...] = sums

    def _add_by_tap(
        self,
        new: NewArray,
        parts: Sequence[Elements],
        image: np.ndarray,
        largest: np.ndarray,
        left: np.ndarray,
        sums: np.ndarray,
    ) -> None:
        windows, dtype = self.problem.windows, left.dtype
        some_are_nan = bool(np.isnan(largest).any())
        # Gradients are split as bits, because a mask splits them exactly, including infinities and NaNs.
        bits = np.dtype(f"i{dtype.itemsize}")
        taken, hit = new("taken", left.shape, bits), new("hit", left.shape, np.dtype(bool))
        left_bits, taken_numbers = left.view(bits), taken.view(dtype)
        once = windows_are_apart(windows)
        for tap in product(*(part.taps for part in parts)):
            at, elements, own_at, own = (everywhere(slices) for slices in zip(*tap))
            hits, mask, rest = hit[at], taken[at], left_bits[at]
            np.equal(image[elements], largest[at], out=hits)
            if some_are_nan:
                hits |= np.isnan(image[elements])
            np.copyto(mask, hits)
            np.subtract(0, mask, out=mask)  # np.negative in place is wrong for some strides (NumPy 2.4)
            mask &= rest
            rest ^= mask
            if once:
                sums[own] = taken_numbers[own_at]
            else:
                sums[own] += taken_numbers[own_at]


def _add_by_window(parts: Sequence[Elements], image: np.ndarray, grad: np.ndarray, sums: np.ndarray) -> None:
    """Add window by window, the last one first, so that an element's sum has the same order as by taps."""
    for window in product(*(reversed(range(len(part.each))) for part in parts)):
        read = [part.each[at] for part, at in zip(parts, window)]
        elements = image[everywhere(read)]
        if elements[0, 0].size == 0:
            continue
        is_own, places = np.ones(elements.shape[:2], bool), []
        for part, along, place in zip(parts, read, first_largest(elements, sums.dtype)[1]):
            place = place * along.step + (along.start + part.read.start - part.elements.start)
            is_own &= (place >= 0) & (place < part.elements.stop - part.elements.start)
            places.append(place)
        sums[(*np.nonzero(is_own), *(place[is_own] for place in places))] += grad[everywhere(window)][is_own]
