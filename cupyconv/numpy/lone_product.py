"""A small convolution that is one product, whose setup is cached between calls.

Python code between NumPy's loops takes most of the time of such a call.  So views and their memory are created once:

::

    x    --copied-->  inside of a tile,   --copied-->  columns  --BLAS-->  sums  --epilogue-->  y
                      which keeps its     as windows                       or y itself
                      zeros; or x

At stride 1, the columns of a tap may be one run of the tile, with the elements between the rows of its pixels.  A long
run is copied in a third of the time of short ones.  The sums between rows are never read:

::

    windows of 2 x 3 taps,      . . . . . .     columns of tap (0, 0)    from 0 on     . . . . . . . . . .
    2 x 4 of them               . . . . . .     columns of tap (1, 2)    from 8 on     . . . . . . . . . .
                                . . . . . .     sums                                   y y y y - - y y y y

A signal and one filter need no columns: see `toeplitz_line`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import add
from numpy.lib.stride_tricks import as_strided

from cupyconv.numpy import cost
from cupyconv.numpy.backend import cached_scratch, product_of
from cupyconv.numpy.windows import Elements, five_axes, has_gathered, read
from cupyconv.problem.arrays import accumulator, c_strides

if TYPE_CHECKING:
    from cupyconv.numpy.gemm import Product

#: Bytes from which the system may map new memory for each call.
ALLOCATED = 64 << 10


def is_lone(loop: Product) -> bool:
    """Whether a loop of one block is one product of unconverted arrays, all in the compute dtype."""
    problem, geometry = loop.problem, loop.geometry
    arrays = (*problem.xs, problem.weight, problem.out, problem.bias, problem.residual, problem.pre)
    return (
        loop.block == (geometry.batch, *geometry.out_size)
        and geometry.groups == 1
        and loop.threads == loop.rows_on == 1
        and not loop.holds_blas
        and not problem.prologue
        and not has_gathered(geometry)
        and {array.dtype for array in arrays if array} == {accumulator(problem.dtype)}
        and problem.weight.strides == c_strides(problem.weight.shape)
    )


class _Memory(NamedTuple):
    """Memory that one call at a time writes."""

    columns_of: Callable[[Mapping[str, Any]], np.ndarray]
    sums: np.ndarray | None  # None if they are the result
    pixels: np.ndarray | None  # view of the sums as an image of five axes


class LoneProduct:
    """The runner of such a loop; if `is_view`, the image is used as columns in place."""

    def __init__(self, loop: Product, is_view: bool) -> None:
        problem, geometry = loop.problem, loop.geometry
        self._problem, self._geometry, self._dtype, self._is_view = problem, geometry, loop.sums_dtype, is_view
        self._activate, self._inputs = loop.activate, loop.inputs
        (block,) = loop.each_block
        self._tile = tile = block.tile(geometry.in_channels)
        pixels = (geometry.batch, *geometry.out_size)
        #: Whether windows are views of x in place; else they are views of the tile.
        x = problem.xs[0]
        in_image = tile.in_image if len(problem.xs) == 1 and x.strides == c_strides(x.shape) else None
        self._begin, strides = in_image or (0, tile.windows_strides)
        self._reads_image = in_image is not None
        #: Whether the tile is the columns: there is one tap, and no pixel is skipped.
        self._is_tile = in_image is None and tile.windows_shape == (*tile.shape[:1], 1, 1, 1, *tile.shape[1:])
        #: Length of a row of columns, and the steps in it to the next sample and pixels.
        self._length, self._steps = prod(pixels), c_strides(pixels)
        self._windows = tile.windows_shape, strides
        self.work = self._seconds(self._length, geometry.out_size[2])
        steps = tuple(step // self._dtype.itemsize for step in strides[4:])
        run = 1 + sum((extent - 1) * step for extent, step in zip(pixels, steps))
        has_runs = geometry.stride == (1, 1, 1) and not (self._reads_image and geometry.batch > 1)
        if not is_view and has_runs and run > self._length:
            copied = cost.copied(prod(problem.out.shape), geometry.out_size[2], problem.dtype)
            seconds = self._seconds(run, run) + copied
            if seconds < self.work:
                self.work, self._length, self._steps = seconds, run, steps
                self._windows = (*tile.windows_shape[:4], run), (*strides[:4], self._dtype.itemsize)
        self._multiply = product_of(geometry.reduction)
        self._weight_shape = geometry.out_channels, geometry.reduction
        self._columns_shape = geometry.reduction, self._length
        self._sums_shape = geometry.out_channels, self._length
        has_gaps = self._length > prod(pixels)
        self._in_place = loop.in_place and not has_gaps and problem.out.strides == c_strides(problem.out.shape)
        #: Memory that no call is using.
        self._idle: deque[_Memory] = deque(maxlen=1)

    def _seconds(self, length: int, run: int) -> float:
        """Estimated time of columns of `length` elements, copied in runs of `run` elements, and of their product."""
        geometry, problem = self._geometry, self._problem
        product = cost.product(geometry.out_channels, geometry.reduction, length, problem)
        if self._is_view:
            return product
        columns = 0.0 if self._is_tile else cost.shifted(geometry.reduction * length, run, problem.x_dtype)
        return self._tile_seconds + columns + product

    @property
    def _tile_seconds(self) -> float:
        """Estimated time to copy x to the tile."""
        shape = self._tile.shape
        return 0.0 if self._reads_image else cost.copied(prod(shape), shape[4], self._problem.x_dtype)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tile, columns and sums."""
        has_columns = not (self._is_view or self._is_tile)
        return self.kept_bytes + has_columns * prod(self._columns_shape) * self._dtype.itemsize

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the tile and the sums, which are kept between calls."""
        has_tile, has_sums = not (self._is_view or self._reads_image), not self._in_place
        elements = has_tile * prod(self._tile.shape) + has_sums * prod(self._sums_shape)
        return elements * self._dtype.itemsize

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and result are given by name."""
        out = arrays["out"]
        if self._in_place and not out.flags.carray:  # unaligned address or strides
            place = np.empty(out.shape, self._dtype)
            self.run({**arrays, "out": place})
            out[...] = place
            return
        try:
            memory = self._idle.pop()
        except IndexError:  # the first call, or a concurrent one
            memory = self._memory()
        columns_of, sums, pixels = memory
        if sums is None:
            sums = out.reshape(self._sums_shape)
        weight, columns = arrays["weight"].reshape(self._weight_shape), columns_of(arrays)
        self._multiply(weight, columns, sums)
        if "bias" in arrays:
            add(sums, arrays["bias"][:, None], sums)
        if pixels is not None:
            out = five_axes(out)
            if "residual" in arrays:
                add(pixels, five_axes(arrays["residual"]), out)
            else:
                out[...] = pixels
        if "pre" in arrays:
            five_axes(arrays["pre"])[...] = five_axes(out)
        if self._activate is not None:
            self._activate(out)
        self._idle.append(memory)

    def _memory(self) -> _Memory:
        if self._in_place:
            return _Memory(self._columns(), None, None)
        geometry = self._geometry
        sums = np.empty(self._sums_shape, self._dtype)
        outputs, (n, *steps) = sums.strides[0], (step * sums.itemsize for step in self._steps)
        shape = geometry.batch, geometry.out_channels, *geometry.out_size
        return _Memory(self._columns(), sums, as_strided(sums, shape, (n, outputs, *steps)))

    def _columns(self) -> Callable[[Mapping[str, Any]], np.ndarray]:
        """Return a function that makes columns of the inputs.

        Of its memory, it shares columns with other calls, because recently used memory is faster.
        """
        shape, dtype = self._columns_shape, self._dtype
        (name, _), *_ = self._inputs
        if self._is_view:
            return lambda arrays: arrays[name].reshape(shape)
        (windows_shape, strides), begin = self._windows, self._begin
        new: Callable[[], np.ndarray] = partial(np.empty, windows_shape, dtype)
        if prod(windows_shape) * dtype.itemsize > ALLOCATED:
            new = partial(cached_scratch(dtype).array, "columns", windows_shape)
        if self._reads_image:

            def of_image(arrays: Mapping[str, Any]) -> np.ndarray:
                x = arrays[name]
                if x.dtype != dtype or not x.flags.c_contiguous:  # other byte order, or strided elements
                    x = np.ascontiguousarray(x, dtype)
                columns = new()
                columns[...] = np.ndarray(windows_shape, dtype, x, begin, strides)
                return columns.reshape(shape)

            return of_image
        tile = np.zeros(self._tile.shape, dtype)
        windows = as_strided(tile, windows_shape, strides)
        images = tile.swapaxes(0, 1)
        #: For each input, boxes of the tile, and the elements of the input that fill them.
        inputs: list[tuple[str, list[tuple[np.ndarray, tuple[Elements, ...]]]]] = []
        for name, channels in self._inputs:
            parts = []
            for at, elements in self._tile.not_zeros:
                if elements is not None:
                    box: Any = (slice(None), channels, *at)
                    parts.append((images[box], elements))
            inputs.append((name, parts))

        def of_tile(arrays: Mapping[str, Any]) -> np.ndarray:
            for name, parts in inputs:
                image = five_axes(arrays[name])
                for inside, elements in parts:
                    inside[...] = read(image, elements)
            if self._is_tile:
                return tile.reshape(shape)
            columns = new()
            columns[...] = windows
            return columns.reshape(shape)

        return of_tile
