"""A signal and one filter: products of a Toeplitz matrix with windows of the line where it lies, set up once for all calls.

Most of such a call is Python between NumPy's loops.  So what does not depend on addresses is worked out once: which windows
are rows of which product, and which outputs are left for NumPy's `correlate`, as those of a short line all are::

    x             0 0|. . . . . . . . . . . . . . . . . . . . . . .|0 0
    outputs       ---|=================|=================|------|---
                 edge  windows of L outputs, one after       edge
                       the other: rows of a product

An edge is copied beside its padding first; nothing else is copied.
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

#: Outputs of a window: as many as a vector has elements, twice as many of float32 where taps are many.
LENGTH, LONG, MANY_TAPS = 16, 32, 24
#: Outputs of a part.  One output of each of its windows is read to see whether all are finite: too few for BLAS's threads.
PART = 1 << 17
#: Outputs of one product, so that what it reads and writes stays in the innermost cache.
INNERMOST = 1 << 14
#: Parts up to which they are worked out once for all calls; of more, each call does so on its way.
KEPT_PARTS = 256
#: Taps for which NumPy's `correlate` has a loop of its own.
CORRELATED_TAPS = 11
#: Up to so many multiply-adds a part is correlated as a whole: of few taps, of many; and so are outputs left at its end.
SHORT_LINE, SHORT_LINE_OF_MANY_TAPS, SHORT_EDGE = 12_000, 4_000, 4_000


class Products(NamedTuple):
    """A product for each of several sets of windows: what it reads and writes, (offset, shape, strides) of an `ndarray`."""

    x: tuple[int, tuple[int, ...], tuple[int, ...]]
    y: tuple[int, tuple[int, ...], tuple[int, ...]]


class Correlated(NamedTuple):
    """Outputs that are correlated: of the part, what they read of the line, and zeros before and after that."""

    outputs: slice
    read: slice
    before: int
    after: int


class Part(NamedTuple):
    """Neighbouring outputs that one thread computes."""

    outputs: slice
    products: tuple[Products, ...]
    edges: tuple[Correlated, ...]
    #: One output of each window: if it is finite, so is all that the window reads.
    first_of_windows: slice
    whole: Correlated


class ToeplitzLine(ToeplitzRuns):
    """One line and one filter, of real numbers in the dtype that is computed in."""

    name = "Toeplitz line"
    words = "products of a Toeplitz matrix and of windows of the line where it lies"
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
        return 2 * elements * ITEMSIZE[accumulator(problem.weight_dtype)]  # block by block it is made by a copy

    @property
    def products_work(self) -> float:
        """Of windows; and of what is correlated."""
        taps, length, problem = self.geometry.kernel[2], self.outputs, self.problem
        work = cost.copied(self.geometry.pixels, INNERMOST, problem.dtype)
        # The first and the last, and all others as the one in the middle.
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
        return max(super().workspace, edge + 2 * sums)  # where the result does not lie as an array of its own

    def part_of_line(self, number: int) -> Part:
        """One of the line's parts."""
        first = number * self.block[3]
        end = min(first + self.block[3], self.geometry.out_size[2])
        geometry, length = self.geometry, self.outputs
        taps, before, size = geometry.kernel[2], geometry.before[2], geometry.size[2]
        begin = min(end, max(first, before))
        inside = min(end, size + before - taps + 1) - begin  # outputs whose windows lie in the line
        short = SHORT_LINE_OF_MANY_TAPS if taps > CORRELATED_TAPS else SHORT_LINE
        done, products = begin, []
        if inside >= length and (end - first) * taps > short:
            phases = ceil((length + taps - 1) / length)  # windows that do not overlap
            windows = inside // length
            most = min(cost.SAFELY_SMALL // (length * (length + taps - 1)), INNERMOST // (phases * length))
            most = max(1, min(most, windows // phases))
            left = windows
            # First sets of `most` windows a phase, then one of those left; of fewer windows than phases each is a product.
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
        """Windows from one output of the part, and one element of the line, on: (turns, products of each, rows of these)."""
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
    def kept_memory(self) -> int:
        return super().workspace  # that of the matrix, and more

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return LineRun(self).run


class LineRun:
    """What runs such a loop."""

    def __init__(self, loop: ToeplitzLine) -> None:
        self._loop, self._x, self._dtype = loop, loop.problem.xs[0].name, loop.x_dtype
        self._threads, self._activate = loop.threads, loop.activate
        self._numbers = range(loop.blocks)
        self._parts = [loop.part_of_line(number) for number in self._numbers] if loop.blocks <= KEPT_PARTS else []
        self._in_place = loop.in_place
        self._taps, self._length = loop.geometry.kernel[2], loop.outputs
        self._has_products = not self._parts or any(part.products for part in self._parts)
        #: The matrix that no call is using, and where the filter is in it; calls beside each other make their own.
        self._idle: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=1)
        #: The product with outputs of the windows is 0 if all are finite, NaN if one is not.
        self._zeros = np.zeros(loop.block[3] // self._length + 1 if self._has_products else 0, self._dtype)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and result are given by name."""
        x, out = arrays[self._x], arrays["out"]
        flags = x.flags
        if x.dtype != self._dtype or not (flags.c_contiguous and flags.aligned):
            # The other byte order, or an address that is no multiple of an element: block by block.
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
        """The Toeplitz matrix (elements, outputs), zero but for the filter; and where that is, for each output."""
        try:
            return self._idle.pop()
        except IndexError:  # the first call, or one beside another
            matrix = np.zeros((self._length + self._taps - 1, self._length), self._dtype)
            row, item = matrix.strides
            return matrix, ndarray((self._length, self._taps), self._dtype, matrix, 0, (row + item, row))

    def _compute(
        self, number: int, line: np.ndarray, kernel: np.ndarray, matrix: Any, y: np.ndarray, arrays: Mapping[str, Any]
    ) -> None:
        """A part of the result."""
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
            if first.dot(self._zeros[: len(first)]) != 0:  # it met the matrix's zeros, and spread over its window
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
