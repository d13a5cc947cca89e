"""One signal and one filter: products of a Toeplitz matrix with windows of the line, set up once for all calls.

Such a call spends most of its time in Python, between NumPy's loops.  Everything that does not depend on addresses is
planned once: which windows, read in place, are rows of which product, and which outputs (in a short line, all) are left
to NumPy's `correlate`::

    x             0 0|. . . . . . . . . . . . . . . . . . . . . . .|0 0
    outputs       ---|=================|=================|------|---
                 edge  windows of L outputs, one after       edge
                       the other: rows of a product

An edge is first copied together with its padding.  Nothing else is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy import add, correlate, matmul, ndarray

from cupyconv.numpy import cost
from cupyconv.numpy.toeplitz_runs import ToeplitzRuns
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, is_complex
from cupyconv.problem.problems import ConvProblem

#: Outputs of a window: the elements of a vector, or twice as many for float32 with at least `MANY_TAPS` taps.
LENGTH, LONG, MANY_TAPS = 16, 32, 24
#: Outputs of a part.  The check for finite sums reads one output per window, too few for BLAS to use threads.
PART = 1 << 17
#: Most outputs of one product, so that its operands and its result stay in the innermost cache.
INNERMOST = 1 << 14
#: Number of parts up to which they are planned once for all calls.  If there are more, each call plans them as it goes.
CACHED_PARTS = 256
#: Most taps for which NumPy's `correlate` has a specialized loop.
CORRELATED_TAPS = 11
#: Multiply-adds up to which a whole part is correlated, for few and many taps, and up to which its last outputs are.
SHORT_LINE, SHORT_LINE_OF_MANY_TAPS, SHORT_EDGE = 12_000, 4_000, 4_000


class Products(NamedTuple):
    """A batch of products, one per set of windows: (offset, shape, strides) of the arrays that it reads and writes."""

    x: tuple[int, tuple[int, ...], tuple[int, ...]]
    y: tuple[int, tuple[int, ...], tuple[int, ...]]


class Correlated(NamedTuple):
    """Outputs of a part that are correlated, the slice of the line that they read, and the zeros around that slice."""

    outputs: slice
    read: slice
    before: int
    after: int


class Part(NamedTuple):
    """Neighbouring outputs that one thread computes."""

    outputs: slice
    products: tuple[Products, ...]
    edges: tuple[Correlated, ...]
    #: One output of each window.  If it is finite, so are all elements that the window reads.
    first_of_windows: slice
    whole: Correlated


class ToeplitzLine(ToeplitzRuns):
    """One line and one filter of real numbers, in the dtype of the computation."""

    name = "Toeplitz line"
    description = "products of a Toeplitz matrix and windows of the line, read in place"
    turn_calls = 4

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        arrays = (*problem.xs, problem.weight, problem.out, problem.bias, problem.residual, problem.pre)
        return (
            super().applies(problem)
            and geometry.batch == geometry.in_channels == geometry.out_channels == 1
            and geometry.size[:2] == geometry.out_size[:2] == (1, 1)
            and geometry.size[2] > 0
            and geometry.stride == geometry.dilation == (1, 1, 1)
            and geometry.padding_mode == "constant"
            and not problem.prologue
            and not is_complex(problem.dtype)
            and {array.dtype for array in arrays if array} == {accumulator(problem.dtype)}
            and all(array.strides == c_strides(array.shape) for array in (*problem.xs, problem.weight))
        )

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        return PART, 1

    @cached_property
    def outputs(self) -> int:
        is_long = self.problem.dtype == "float32" and self.geometry.kernel[2] >= MANY_TAPS
        return min(LONG if is_long else LENGTH, self.geometry.out_size[2])

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        elements = LONG * (LONG + problem.geometry.kernel[2])
        return 2 * elements * ITEMSIZE[accumulator(problem.weight_dtype)]  # the block-by-block path also copies

    @property
    def products_work(self) -> float:
        """Estimated time of the products of windows, and of the outputs that are correlated."""
        taps, length, problem = self.geometry.kernel[2], self.outputs, self.problem
        work = cost.copied(self.geometry.pixels, INNERMOST, problem.dtype)
        # Estimate the first and the last part, and use the middle one for all others.
        blocks = self.blocks
        for number, times in ((0, blocks > 0), (blocks // 2, blocks - 2), (blocks - 1, blocks > 1)):
            if times <= 0:
                continue
            part = self.part_of_line(number)
            for _, (_, (many, sets, count, _), _) in part.products:
                work += times * many * sets * cost.product(count, length + taps - 1, length, problem)
            for edge in part.edges:
                work += times * cost.correlated(edge.outputs.stop - edge.outputs.start, problem)
        return work

    @property
    def work(self) -> float:
        return self.products_work + self.store_work

    @property
    def calls(self) -> float:
        return 2.0 + self.blocks * self.turn_calls

    @property
    def workspace(self) -> int:
        taps, sums = self.geometry.kernel[2], self.block[3] * self.sums_dtype.itemsize
        edge = sums + (taps - 1) * self.x_dtype.itemsize
        return max(super().workspace, edge + 2 * sums)  # if the result is not a contiguous array

    def part_of_line(self, number: int) -> Part:
        """Plan one part of the line."""
        first = number * self.block[3]
        end = min(first + self.block[3], self.geometry.out_size[2])
        geometry, length = self.geometry, self.outputs
        taps, before, size = geometry.kernel[2], geometry.before[2], geometry.size[2]
        begin = min(end, max(first, before))
        inside = min(end, size + before - taps + 1) - begin  # outputs whose windows are in the line
        short = SHORT_LINE_OF_MANY_TAPS if taps > CORRELATED_TAPS else SHORT_LINE
        done, products = begin, []
        if inside >= length and (end - first) * taps > short:
            phases = ceil((length + taps - 1) / length)  # windows this far apart do not overlap
            windows = inside // length
            most = min(cost.SAFELY_SMALL // (length * (length + taps - 1)), INNERMOST // (phases * length))
            most = max(1, min(most, windows // phases))
            left = windows
            # First come sets of `most` windows per phase, then a set of the windows left.  If fewer windows than phases
            # are left, each of them is a product.
            for count in (most, windows // phases % most):
                many = left // (phases * count) if count else 0
                if many:
                    products.append(self._products(done - first, done - before, (many, phases, count)))
                    left -= many * phases * count
                    done += many * phases * count * length
            if left * length * taps > SHORT_EDGE:
                products.append(self._products(done - first, done - before, (1, left, 1)))
                done += left * length
        if done == begin:
            edges = [(first, end)]
        else:
            edges = [(low, high) for low, high in ((first, begin), (done, end)) if low < high]
        return Part(
            slice(first, end),
            tuple(products),
            tuple(self._edge(first, low, high) for low, high in edges),
            slice(begin - first, done - first, length),
            self._edge(first, first, end),
        )

    def _products(self, output: int, element: int, sets: tuple[int, int, int]) -> Products:
        """Return the products of windows from an output on; `sets` is (turns, products per turn, rows per product)."""
        length, item = self.outputs, self.x_dtype.itemsize
        _, phases, count = sets
        steps = tuple(step * length * item for step in (phases * count, 1, phases)) + (item,)
        reach = length + self.geometry.kernel[2] - 1
        return Products((element * item, (*sets, reach), steps), (output * item, (*sets, length), steps))

    def _edge(self, first: int, low: int, high: int) -> Correlated:
        geometry = self.geometry
        begin = low - geometry.before[2]
        end = high + geometry.kernel[2] - 1 - geometry.before[2]
        inside = slice(min(max(begin, 0), geometry.size[2]), max(min(end, geometry.size[2]), 0))
        inside = slice(inside.start, max(inside.start, inside.stop))
        before = min(max(0, -begin), end - begin)
        after = end - begin - before - (inside.stop - inside.start)
        return Correlated(slice(low - first, high - first), inside, before, after)

    @property
    def cached_memory(self) -> int:
        return super().workspace  # at least the bytes of the matrix

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return LineRun(self).run


class LineRun:
    """The executable of a `ToeplitzLine`, with the data that all calls share."""

    def __init__(self, loop: ToeplitzLine) -> None:
        self._loop, self._x, self._dtype = loop, loop.problem.xs[0].name, loop.x_dtype
        self._threads, self._activate = loop.threads, loop.activate
        self._numbers = range(loop.blocks)
        self._parts = [loop.part_of_line(number) for number in self._numbers] if loop.blocks <= CACHED_PARTS else []
        self._in_place = loop.in_place
        self._taps, self._length = loop.geometry.kernel[2], loop.outputs
        self._has_products = not self._parts or any(part.products for part in self._parts)
        #: A matrix that no call is using, and the view of its filter elements.  Concurrent calls make their own.
        self._idle: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=1)
        #: The dot product with one output per window is 0 if all are finite, and NaN otherwise.
        self._zeros = np.zeros(loop.block[3] // self._length + 1 if self._has_products else 0, self._dtype)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and result are given by name."""
        x, out = arrays[self._x], arrays["out"]
        flags = x.flags
        if x.dtype != self._dtype or not (flags.c_contiguous and flags.aligned):
            # Another byte order, strides or an unaligned address: compute block by block.
            self._loop.run(arrays)
            return
        kernel, line = arrays["weight"].reshape(-1), x.reshape(-1)
        place = out.reshape(-1) if out.flags.c_contiguous else five_axes(out)[0, 0, 0, 0]
        matrix: Any = None
        if self._has_products:
            matrix, band = self._matrix()
            band[...] = kernel
        if self._threads > 1:
            from cupyconv.numpy.threads import in_threads

            in_threads(
                self._threads, lambda number: self._compute(number, line, kernel, matrix, place, arrays), self._numbers
            )
        else:
            for number in self._numbers:
                self._compute(number, line, kernel, matrix, place, arrays)
        if self._has_products:
            self._idle.append((matrix, band))

    def _matrix(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a Toeplitz matrix (elements, outputs), zero except for the filter, and its view (outputs, taps)."""
        try:
            return self._idle.pop()
        except IndexError:  # the first call, or a concurrent one
            matrix = np.zeros((self._length + self._taps - 1, self._length), self._dtype)
            row, item = matrix.strides
            return matrix, ndarray((self._length, self._taps), self._dtype, matrix, 0, (row + item, row))

    def _compute(
        self, number: int, line: np.ndarray, kernel: np.ndarray, matrix: Any, y: np.ndarray, arrays: Mapping[str, Any]
    ) -> None:
        """Compute one part of the result."""
        part = self._parts[number] if self._parts else self._loop.part_of_line(number)
        own = part.outputs
        place = y[own]
        sums = place if self._in_place and place.flags.carray else np.empty(own.stop - own.start, self._dtype)
        for (begin, shape, steps), (at, place_shape, place_steps) in part.products:
            windows = ndarray(shape, self._dtype, line, begin, steps)
            matmul(windows, matrix, out=ndarray(place_shape, self._dtype, sums, at, place_steps))
        for edge in part.edges:
            self._correlate(edge, line, kernel, sums)
        if part.products:
            first = sums[part.first_of_windows]
            if first.dot(self._zeros[: len(first)]) != 0:  # a non-finite element times 0 is NaN
                self._correlate(part.whole, line, kernel, sums)
        if "bias" in arrays:
            sums += arrays["bias"]
        if "residual" in arrays:
            add(sums, five_axes(arrays["residual"])[0, 0, 0, 0, own], place)
        elif sums is not place:
            place[...] = sums
        if "pre" in arrays:
            five_axes(arrays["pre"])[0, 0, 0, 0, own] = place
        if self._activate is not None:
            self._activate(place)

    def _correlate(self, edge: Correlated, line: np.ndarray, kernel: np.ndarray, sums: np.ndarray) -> None:
        read = line[edge.read]
        if edge.before or edge.after:
            padded = np.zeros(edge.before + len(read) + edge.after, self._dtype)
            padded[edge.before : edge.before + len(read)] = read
            read = padded
        sums[edge.outputs] = correlate(read, kernel)
