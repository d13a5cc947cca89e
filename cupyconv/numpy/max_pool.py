"""Max pooling: the largest element of every window, its position, and the gradient, which goes to this position.

Positions and gradients have two implementations each.  With few taps, all of them are visited:

- To find positions, every tap is compared with the maximum, the last tap first.  Earlier taps overwrite the positions of
  later taps, so the position of the first largest element remains.
- The gradient visits all taps in row-major order.  A tap whose element is its window's maximum receives what is left of
  the window's gradient, so the first such tap receives all of it.

With many taps, the first largest element of each window is searched (`Search`), and the gradient is added there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from operator import attrgetter
from typing import Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.pool_blocks import Adjoint, NewArray, PoolingStep, Reduction, in_dtype, windows_are_apart
from cupyconv.numpy.pool_search import Search, indices_along
from cupyconv.numpy.pool_windows import Elements, Outputs, everywhere, most_read, most_windows, pieces, windows_over
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ranges_of
from cupyconv.problem.passes import PoolingProblem

#: Most gradients that are added at once, and the bytes that each takes meanwhile.
_ADDED, _ADDED_BYTES = 4096, 120
#: Seconds to compare a window's tap, for its position and for its gradient; to reduce a window first; and to add a
#: window's gradient.
_COMPARED, _RECEIVED, _REDUCED, _ADDED_ONE = 1.3e-9, 3e-9, 15e-9, 60e-9
#: NumPy calls per compared tap, and to add gradients.
_TAP_CALLS, _ADD_CALLS = 8, 25


class MaxPool(Reduction):
    """The largest element of every window."""

    ufunc, of_nothing, many_in_one_call = np.maximum, -inf, 100

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


class _TapByTap(PoolingStep):
    """A loop over blocks that visits every tap."""

    def by_window(self, axis: int) -> bool:
        return False

    @property
    def turns(self) -> int:
        return self.blocks * self.problem.windows.taps

    @property
    def calls(self) -> float:
        return self.turns * _TAP_CALLS

    @property
    def seconds(self) -> float:
        of_block = self.problem.windows.taps * _TAP_CALLS * cost.CALL + self.block_seconds
        return -(-self.blocks // self.threads) * of_block

    @property
    def block_seconds(self) -> float:
        """Seconds that NumPy computes for a block."""
        raise NotImplementedError


class LargestPlaces(_TapByTap, MaxPool):
    """The largest element of every window, and its position, tap by tap."""

    @property
    def touched(self) -> int:
        return super().touched + prod(self.block) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def temporaries(self) -> tuple[int, int]:
        """Also flags of elements that are the largest, or NaN."""
        return super().temporaries[0], 2 * prod(self.block[2:])

    @property
    def shared(self) -> int:
        """Positions of the elements that a block reads, 8 bytes each."""
        return prod(most_read(self.problem.windows, self.block[2:])) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def block_seconds(self) -> float:
        return prod(self.block) * (_REDUCED + self.problem.windows.taps * _COMPARED)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        image, largest = self.largest(dtype, new, images, parts)
        places = new("places", (1, 1, *(part.read.stop - part.read.start for part in parts)), np.dtype(np.int64))
        places[...] = 0
        for axis, part in enumerate(parts):
            places += indices_along(self.problem.windows, axis, part.read)
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


@dataclass(frozen=True)
class Searching(PoolingStep):
    """A loop over blocks that searches the largest element of each window."""

    search: Search = field(kw_only=True)

    @classmethod
    def of(cls, problem: PoolingProblem) -> Self:
        """Plan the step with the least estimated time."""
        itemsize = ITEMSIZE[accumulator(problem.inputs[0].dtype)]
        strides = problem.inputs[0].strides
        planes = sorted((0, 1), key=lambda axis: abs(strides[axis]))
        steps: list[Self] = []
        refusals = []
        for search in Search.candidates(problem.windows, itemsize, cls.room(problem, itemsize)):
            step = cls(problem, search=search)
            try:
                steps.append(step.with_largest_block(step.largest_shape, (4, 3, 2, *planes)))
            except ValueError as refusal:  # a smaller box may fit
                refusals.append(str(refusal))
        if not steps:
            raise ValueError(refusals[-1])
        return min(steps, key=attrgetter("seconds"))

    @classmethod
    def room(cls, problem: PoolingProblem, itemsize: int) -> int:
        """Bytes of the workspace that a search may take."""
        return problem.limit

    @property
    def largest_shape(self) -> Sequence[int]:
        """The shape that no block exceeds."""
        raise NotImplementedError

    @property
    def boxes(self) -> int:
        """Most boxes that a block searches."""
        return 1

    @property
    def touched(self) -> int:
        """Elements that a block reads and writes; 0 if it is in one plane, whose cuts depend on the search alone."""
        windows = self.problem.windows
        planes = prod(self.block[:2])
        return planes * (prod(windows.size) + 3 * windows.pixels) if planes > 1 else 0

    @property
    def temporaries(self) -> tuple[int, int]:
        return 0, self.search.bytes

    @property
    def turns(self) -> int:
        return self.blocks * self.boxes * self.search.turns

    @property
    def calls(self) -> float:
        return self.blocks * self.boxes * self.search.calls

    @property
    def seconds(self) -> float:
        of_block = self.calls / self.blocks * cost.CALL + prod(self.block[:2]) * self.boxes * self.search.seconds
        return -(-self.blocks // self.threads) * of_block


class LargestPlacesBySearch(Searching):
    """The largest element of every window, and its position, by a search."""

    @classmethod
    def worth_waking(cls, problem: PoolingProblem) -> int:
        return Reduction.worth_waking(problem)

    @property
    def largest_shape(self) -> Sequence[int]:
        return (*self.problem.outs[0].shape[:2], *self.search.box)

    def part(self, axis: int, run: range) -> range:
        return run

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[range]) -> None:
        x = images[0]
        out, indices = (image[everywhere([slice(run.start, run.stop) for run in parts])] for image in images[1:])
        out[...], indices[...] = self.search.found(parts, x, dtype, new)


class MaxPoolGradient(_TapByTap, Adjoint):
    """The gradient of each window, added to its largest element tap by tap."""

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left of the gradient, what a tap receives, and flags of the elements that receive it.

        If widened, also copies of all that the block reads and writes.
        """
        elements, windows = self.block[2:], self.problem.windows
        over = most_windows(windows, elements)
        copies = prod(over) + prod(most_read(windows, over)) + prod(elements)
        return 2 * prod(over) + copies * self.widened, 2 * prod(over)

    @property
    def block_seconds(self) -> float:
        windows = self.problem.windows
        return prod(self.block[:2]) * prod(most_windows(windows, self.block[2:])) * windows.taps * _RECEIVED

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Elements]) -> None:
        x, y, grad, out = images
        over = everywhere([part.windows for part in parts])
        image, out = x[everywhere([part.read for part in parts])], out[everywhere([part.elements for part in parts])]
        sums = out if out.dtype == dtype else new("sums", out.shape, dtype)
        sums[...] = 0
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


class MaxPoolGradientBySearch(Searching):
    """The gradient of each window, added at the position of its largest element.

    A block is a whole plane, or several, so that no window is searched twice; parts of a plane if sums of all of it
    exceed the workspace.
    """

    @classmethod
    def room(cls, problem: PoolingProblem, itemsize: int) -> int:
        """All that sums and positions leave, or half if they need more."""
        step = cls(problem, search=Search(problem.windows, itemsize, (1, 1, 1), False, 0))
        sums = prod(problem.windows.size) * itemsize * step.sums
        return problem.limit - min(problem.limit // 2, sums + _ADDED * _ADDED_BYTES)

    @property
    def largest_shape(self) -> Sequence[int]:
        return self.problem.outs[0].shape

    @property
    def sums(self) -> bool:
        """Whether sums are in a wider dtype than the result."""
        return self.widened and not windows_are_apart(self.problem.windows)

    @property
    def over(self) -> list[int]:
        """Most windows along each axis over a block."""
        return most_windows(self.problem.windows, self.block[2:])

    @property
    def boxes(self) -> int:
        return prod(-(-count // part) for count, part in zip(self.over, self.search.box))

    @property
    def temporaries(self) -> tuple[int, int]:
        """Sums, if widened; what a search needs, and gradients that are added."""
        added = min(prod(self.search.box), _ADDED) * _ADDED_BYTES
        return prod(self.block[2:]) * self.sums, self.search.bytes + added

    @property
    def calls(self) -> float:
        added = -(-prod(self.search.box) * prod(self.block[:2]) // _ADDED)
        return super().calls + self.blocks * self.boxes * added * _ADD_CALLS

    @property
    def seconds(self) -> float:
        return super().seconds + -(-self.blocks // self.threads) * prod((*self.block[:2], *self.over)) * _ADDED_ONE

    def part(self, axis: int, run: range) -> tuple[range, range]:
        """A run of elements, and the windows over it."""
        return run, windows_over(self.problem.windows, axis, run)

    def finish(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[tuple[range, range]]
    ) -> None:
        x, _, grad, out = images
        elements, over = zip(*parts)
        out = out[everywhere([slice(run.start, run.stop) for run in elements])]
        sums = new("sums", out.shape, dtype) if self.sums else out
        sums[...] = 0
        # The last windows are the first ones, so that an element's sum has the same order as by taps.
        cuts = [ranges_of(windows, part)[::-1] for windows, part in zip(over, self.search.box)]
        for outputs in product(*cuts):
            _, indices = self.search.found(outputs, x, dtype, new)
            self._add(indices, grad[everywhere([slice(run.start, run.stop) for run in outputs])], elements, sums)
        if sums is not out:
            out[...] = sums

    def _add(self, indices: np.ndarray, grad: np.ndarray, elements: Sequence[range], sums: np.ndarray) -> None:
        _, height, width = self.problem.windows.size
        once, backwards = windows_are_apart(self.problem.windows), everywhere((slice(None, None, -1),) * 3)
        planes = np.ix_(*map(range, sums.shape[:2]), (0,), (0,), (0,))[:2]
        for box in reversed([*pieces(grad.shape[2:], max(1, _ADDED // prod(sums.shape[:2])))]):
            share, index = grad[everywhere(box)][backwards], indices[everywhere(box)][backwards]
            rows, column = np.divmod(index, width)
            places = [place - run.start for place, run in zip((*np.divmod(rows, height), column), elements)]
            is_own = np.ones(share.shape, bool)
            for place, run in zip(places, elements):
                is_own &= (place >= 0) & (place < len(run))
            at = (*planes, *places)
            if not is_own.all():
                share, at = share[is_own], tuple(np.broadcast_to(each, is_own.shape)[is_own] for each in at)
            if once:
                sums[at] = share
            else:
                np.add.at(sums, at, share)
