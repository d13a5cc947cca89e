"""The largest element of every window, where it lies, and the gradient that goes there.

Where it lies is asked of every tap, the last one first: the answer of the first stays.

The gradient goes over all taps in row-major order.  A tap whose element is its window's maximum takes what is left of the
window's gradient, so the first one takes all of it.

Where a block has fewer windows than taps, both look for the first largest element of each window, a piece at a time.
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

#: Bytes of the places that a plane's largest element has, in a piece and in its window.
PLACE_BYTES = 128


class MaxPool(Reduction):
    """The largest element of every window."""

    ufunc, of_nothing = np.maximum, -np.inf

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        self.largest(dtype, new, images, parts)

    def largest(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the block reads, and the largest of each window, which are written too."""
        x, out = images[:2]
        image = self.image(x, dtype, new, parts)
        out = out[everywhere([part.out for part in parts])]
        largest = self.reduced(dtype, new, image, out, parts)
        if largest is not out:
            out[...] = largest
        return image, largest


class LargestPlaces(MaxPool):
    """The largest element of every window, and where it lies."""

    def by_window(self, axis: int) -> bool:
        """All axes or none."""
        return few(prod(self.block[2:]), self.problem.windows.taps)

    @property
    def touched(self) -> int:
        return super().touched + prod(self.block) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def temporaries(self) -> tuple[int, int]:
        """And which elements are the largest, or NaN; of few windows a piece of one, and where its largest is."""
        if self.by_window(0):
            return 2 * min(self.problem.windows.taps, PIECE), PLACE_BYTES
        return super().temporaries[0], 2 * prod(self.block[2:])

    @property
    def shared(self) -> int:
        """Places of the elements that a block reads, of 8 bytes each."""
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
    """Each window's gradient, at the element that was its largest."""

    def by_window(self, axis: int) -> bool:
        """All axes or none."""
        windows = self.problem.windows
        return few(prod(most_windows(windows, self.block[2:])), windows.taps)

    @property
    def touched(self) -> int:
        """A plane is never cut where each of its parts would look for the largest of the same windows again."""
        return 0 if self.by_window(0) and prod(self.block[:2]) == 1 else super().touched

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left of the gradient, what a tap takes, and which do; widened: all that the block reads and writes."""
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
        # Taken and left as bits: a mask splits them exactly, infinities and NaNs too.
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
            np.subtract(0, mask, out=mask)  # np.negative into itself is wrong for some strides (NumPy 2.4)
            mask &= rest
            rest ^= mask
            if once:
                sums[own] = taken_numbers[own_at]
            else:
                sums[own] += taken_numbers[own_at]


def _add_by_window(parts: Sequence[Elements], image: np.ndarray, grad: np.ndarray, sums: np.ndarray) -> None:
    """The last window first: an element's sum has the order that going over the taps gives it."""
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
