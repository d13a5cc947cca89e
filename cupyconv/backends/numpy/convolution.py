"""A convolution block by block: columns, product, epilogue, store, all while the block is in cache.

::

    x_0, x_1, ...   --read-->   columns           --BLAS-->   sums             --epilogue-->   block of y
    any strides,                [g, K_g, pixels]              [g, O_g, pixels]                 any strides,
    any dtype                   dtype of the sums             dtype of the sums                rounded once

Blocks are disjoint, so threads may take them in any order and every bit stays the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod

import numpy as np

from cupyconv.backends.numpy.activations import activate
from cupyconv.backends.numpy.windows import Region, read, tap_regions, tile_regions, windows_of_tile
from cupyconv.dtypes import dtype_from_name, is_complex
from cupyconv.geometry import ConvGeometry
from cupyconv.plan import BlockLoop

Ranges = tuple[range, range, range, range]  # samples, depth, height, width


class BlockedConvolution:
    """The arrays of one call, brought to five axes, and what its blocks share."""

    def __init__(
        self, loop: BlockLoop, xs: Sequence[np.ndarray], weight: np.ndarray, bias: np.ndarray | None,
        residual: np.ndarray | None, out: np.ndarray,
    ) -> None:  # fmt: skip
        geometry = loop.geometry
        assert isinstance(geometry, ConvGeometry)
        self.loop, self.geometry = loop, geometry
        self.inputs = list(zip(xs, geometry.channel_offsets))
        self.out, self.residual = out, residual
        self.sums_dtype = dtype_from_name(loop.dtype)
        self.x_dtype, weight_dtype = dtype_from_name(loop.x_dtype), dtype_from_name(loop.weight_dtype)
        complex_x, complex_weight = is_complex(loop.x_dtype), is_complex(loop.weight_dtype)
        #: Where one factor alone is complex, its parts are taken as twice as many real pixels or outputs.
        self.parts_as_pixels = complex_x and not complex_weight
        self.parts_as_outputs = complex_weight and not complex_x
        matrix = weight.reshape(geometry.groups, geometry.group_outputs, geometry.reduction)
        matrix = matrix.astype(weight_dtype, copy=False)
        self.weight = matrix  # (groups, group_outputs, K_g)
        self.matrix = np.concatenate([matrix.real, matrix.imag], axis=1) if self.parts_as_outputs else matrix
        if bias is not None:
            bias = bias.astype(out.dtype, copy=False).astype(self.sums_dtype, copy=False)
        self.bias = bias
        self._buffers = threading.local()

    def run(self) -> None:
        body: Callable[[Ranges], np.ndarray] = {
            "columns": self._columns_and_product, "view": self._product_of_view, "taps": self._product_a_tap,
            "scaled taps": self._scaled_taps,
        }[self.loop.body]  # fmt: skip

        def finish(block: Ranges) -> None:
            with np.errstate(all="ignore"):
                self._store(block, body(block))

        if self.loop.threads == 1:
            for block in self._blocks():
                finish(block)
        else:
            with ThreadPoolExecutor(self.loop.threads) as pool:
                list(pool.map(finish, self._blocks()))

    def _blocks(self) -> list[Ranges]:
        axes = [
            [range(first, min(first + part, extent)) for first in range(0, extent, part)]
            for extent, part in zip((self.geometry.batch, *self.geometry.out_size), self.loop.block)
        ]
        return list(product(*axes))  # type: ignore[arg-type]

    # Four ways to the sums of a block, each (groups, group_outputs, samples, depth, height, width).

    def _columns_and_product(self, block: Ranges) -> np.ndarray:
        geometry, (samples, *out_size) = self.geometry, map(len, block)
        columns = self._scratch("columns", (geometry.in_channels, *geometry.kernel, samples, *out_size))
        if geometry.taps == 1:
            (regions,) = tap_regions(geometry, block[1:])
            self._read(regions, block[0], columns[:, 0, 0, 0])
        else:
            size, regions = tile_regions(geometry, block[1:])
            tile = self._scratch("tile", (geometry.in_channels, samples, *size))
            self._read(regions, block[0], tile)
            columns[...] = windows_of_tile(geometry, tile, out_size)
        return self._product(self.matrix, columns, block)

    def _product_of_view(self, block: Ranges) -> np.ndarray:
        ((x, _),) = self.inputs
        if not self.loop.in_place:
            return self._product(self.matrix, _block_of(x, block)[0], block)
        geometry, samples = self.geometry, len(block[0])
        columns = _block_of(x, block).reshape(samples, geometry.groups, geometry.group_channels, -1)
        place = _block_of(self.out, block).reshape(samples, geometry.groups, geometry.group_outputs, -1)
        np.matmul(self.matrix, columns, out=place)
        return place.transpose(1, 2, 0, 3).reshape(self._sums_shape(block))

    def _product_a_tap(self, block: Ranges) -> np.ndarray:
        """A product for each tap: no columns but one tap's, and a sum that is gone through for every tap."""
        geometry = self.geometry
        by_tap = np.moveaxis(self.matrix.reshape(*self.matrix.shape[:2], geometry.group_channels, geometry.taps), 3, 0)
        sums = np.zeros(self._sums_shape(block), self.sums_dtype)
        columns = self._scratch("columns", (geometry.in_channels, *map(len, block)))
        for matrix, regions in zip(by_tap, tap_regions(geometry, block[1:])):
            self._read(regions, block[0], columns)
            sums += self._product(np.ascontiguousarray(matrix), columns, block)
        return sums

    def _scaled_taps(self, block: Ranges) -> np.ndarray:
        """Depthwise: what a tap reads, times a number a channel; a matrix product would be a vector's."""
        sums = np.zeros(self._sums_shape(block), self.sums_dtype)
        samples = slice(block[0].start, block[0].stop)
        for t, regions in enumerate(tap_regions(self.geometry, block[1:])):
            for at, elements in regions:
                if elements is None:
                    continue
                for x, first in self.inputs:
                    channels = slice(first, first + x.shape[1])
                    read_once = read(x[samples], elements).swapaxes(0, 1)[:, None]
                    factors = self.weight[channels, :, t, None, None, None, None]
                    sums[(channels, slice(None), slice(None), *at)] += read_once * factors
        return sums

    def _scratch(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """This thread's buffer of that name, uninitialised; one that is there serves again, its pages mapped."""
        buffers = self._buffers.__dict__
        if name not in buffers or buffers[name].size < prod(shape):
            buffers[name] = np.empty(prod(shape), self.x_dtype)
        return buffers[name][: prod(shape)].reshape(shape)

    def _read(self, regions: tuple[Region, ...], samples: range, target: np.ndarray) -> None:
        """Boxes of the inputs, their channels one after the other, into (channels, samples, d, h, w)."""
        sample = slice(samples.start, samples.stop)
        for at, elements in regions:
            for x, first in self.inputs:
                part = read(target[first : first + x.shape[1]], at)
                part[...] = 0 if elements is None else read(x[sample], elements).swapaxes(0, 1)

    def _product(self, matrix: np.ndarray, columns: np.ndarray, block: Ranges) -> np.ndarray:
        geometry = self.geometry
        columns = columns.reshape(geometry.groups, matrix.shape[2], prod(map(len, block)))
        if self.parts_as_pixels:
            sums = np.matmul(matrix, columns.view(matrix.dtype)).view(self.sums_dtype)
        elif self.parts_as_outputs:
            real, imaginary = np.split(np.matmul(matrix, columns), 2, axis=1)
            sums = np.empty(real.shape, self.sums_dtype)
            sums.real, sums.imag = real, imaginary
        elif self.loop.in_place:
            place = _block_of(self.out, block).reshape(geometry.groups, geometry.group_outputs, columns.shape[2])
            sums = np.matmul(matrix, columns, out=place)
        else:
            sums = np.matmul(matrix, columns)
        return sums.reshape(self._sums_shape(block))

    def _sums_shape(self, block: Ranges) -> tuple[int, ...]:
        return (self.geometry.groups, self.geometry.group_outputs, *map(len, block))

    # The epilogue.

    def _store(self, block: Ranges, sums: np.ndarray) -> None:
        sums = sums.reshape(self.geometry.out_channels, *sums.shape[2:]).swapaxes(0, 1)
        if self.bias is not None:
            sums += self.bias[:, None, None, None]
        if self.residual is not None:
            residual = _block_of(self.residual, block)
            # Rounded to the result's dtype first, as an argument of that dtype would have been.
            sums += residual if residual.dtype == self.out.dtype else residual.astype(self.out.dtype)
        activate(sums, self.loop.activation)
        if not self.loop.in_place:
            _block_of(self.out, block)[...] = sums


def _block_of(image: np.ndarray, block: Ranges) -> np.ndarray:
    samples, depth, height, width = (slice(r.start, r.stop) for r in block)
    return image[samples, :, depth, height, width]
