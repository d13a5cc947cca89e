"""A transposed convolution block by block: product, columns added tap by tap, epilogue, store.

::

    x of a run of pixels   --BLAS-->   columns                    --add-->   sums                 --epilogue-->   results
    any strides,                       [channels, taps, pixels]              [channels, elements]                 any strides,
    any dtype                          dtype of the sums                     or the results themselves            rounded once

Where the stride is 1 and rows are short, a tap need not add row by row.  With rows of x as long as those of the
padded result, zeros between, all elements lie behind their pixel by as much::

    x, flat         a b c 0 0 d e f 0 0 ...          a tap of offset 1 adds one run of memory,
    result, flat    . a b c 0 0 d e f 0 ...          whatever rows are in it

Blocks are disjoint and runs of a block are added in order, so threads may take blocks in any order and every
bit stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate
from cupyconv.numpy.loops import TransposedLoop
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import Region, add, five_axes, read, tap_regions
from cupyconv.problem.arrays import dtype_from_name, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry

#: Sums of a block's channels in one array: (array [channels, samples, d, h, w], which of the block's channels).
Piece = tuple[np.ndarray, slice]


class TransposedConvolution:
    """What all runs of a plan's step have in common."""

    def __init__(self, loop: TransposedLoop) -> None:
        geometry = loop.geometry
        assert isinstance(geometry, ConvGeometry)
        self.plan, self.geometry = loop, geometry
        self.sums_dtype = dtype_from_name(loop.dtype)
        self.x_dtype, self.weight_dtype = dtype_from_name(loop.x_dtype), dtype_from_name(loop.weight_dtype)
        self.real_dtype = dtype_from_name(real_part(loop.dtype))
        #: Where one factor alone is complex: its parts are twice as many real pixels, or two products.
        self.parts_as_pixels = is_complex(loop.x_dtype) and not is_complex(loop.weight_dtype)
        self.parts_as_products = is_complex(loop.weight_dtype) and not is_complex(loop.x_dtype)
        self.body = {
            "columns": _Run.add_columns, "view": _Run.product_into_results, "taps": _Run.add_a_product_a_tap,
            "scaled taps": _Run.add_scaled_taps,
        }[loop.body]  # fmt: skip

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        run, loop = _Run(self, arrays), self.plan
        samples = [
            range(n, min(n + loop.block[0], self.geometry.batch)) for n in range(0, self.geometry.batch, loop.block[0])
        ]
        blocks = product(samples, loop.channel_ranges)
        if loop.threads == 1:
            for block in blocks:
                run.finish(*block)
        else:
            with ThreadPoolExecutor(loop.threads) as pool:
                list(pool.map(lambda block: run.finish_in_thread(*block), blocks))

    def run_size(self, pixels: tuple[range, ...]) -> tuple[int, int, int]:
        """The axes of a run's products: those of its pixels, or one."""
        depth, height, width = map(len, pixels)
        return (1, 1, prod(self.padded_run(pixels))) if self.plan.flat else (depth, height, width)

    def padded_run(self, pixels: tuple[range, ...]) -> tuple[int, int, int]:
        """The axes of a run's pixels, the inner ones as long as the result's."""
        depth, height, width = map(len, pixels)
        _, rows, columns = self.geometry.reached
        return depth, rows if depth > 1 else height, columns if depth * height > 1 else width

    def regions(self, pixels: tuple[range, ...]) -> Sequence[tuple[Region, ...]]:
        """For every tap, what of a run's products it adds to which sums."""
        if not self.plan.flat:
            return tap_regions(self.geometry, pixels)
        _, rows, columns = self.geometry.reached

        def place(depth: int, height: int, width: int) -> int:
            return (depth * rows + height) * columns + width

        length = place(*(len(run) - 1 for run in pixels)) + 1
        first, one = place(*(run.start for run in pixels)), slice(0, 1)
        taps = product(*([t * d for t in range(k)] for k, d in zip(self.geometry.kernel, self.geometry.dilation)))
        offsets = [first + place(*tap) for tap in taps]
        return [(((one, one, slice(0, length)), (one, one, slice(at, at + length))),) for at in offsets]

    def pixel_runs(self) -> list[tuple[range, ...]]:
        """The runs of x's pixels that products are over."""
        axes = [
            [range(first, min(first + part, extent)) for first in range(0, extent, part)]
            for extent, part in zip(self.geometry.out_size, self.plan.block[1:])
        ]
        return list(product(*axes))


class _Run:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, loop: TransposedConvolution, arrays: Mapping[str, Any]) -> None:
        geometry = loop.geometry
        self.loop, self.geometry = loop, geometry
        self.xs = [five_axes(arrays[name]) for name in loop.plan.inputs]
        self.outs = [five_axes(arrays[name]) for name in loop.plan.outputs]
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        weight = arrays["weight"]
        taps_first = loop.plan.body == "taps"
        if taps_first:
            weight = np.moveaxis(weight, (0, 1), (-2, -1))
        weight = np.ascontiguousarray(weight, loop.weight_dtype)
        if loop.plan.conjugate:  # the argument stays as it is, a copy need not
            is_copy = not np.may_share_memory(weight, arrays["weight"])
            weight = np.conjugate(weight, out=weight if is_copy else None)
        per_group = (geometry.groups, geometry.group_outputs, geometry.group_channels)
        self.weight = weight.reshape((geometry.taps, *per_group) if taps_first else (*per_group, geometry.taps))
        bias = arrays.get("bias")
        if bias is not None:
            bias = bias.astype(self.outs[0].dtype, copy=False).astype(loop.sums_dtype, copy=False)
        self.bias = bias
        #: Whether one product is all there is to an element; scaled taps are a product for every output of a group.
        self.written_once = geometry.is_pointwise and loop.plan.body != "scaled taps"
        self.pixel_runs = loop.pixel_runs()
        self._sums, self._x = Scratch(loop.sums_dtype, loop.plan.blocks), Scratch(loop.x_dtype, loop.plan.blocks)
        self._real = Scratch(loop.real_dtype, loop.plan.blocks)

    def finish_in_thread(self, samples: range, channels: range) -> None:
        with np.errstate(all="ignore"):  # of the thread
            self.finish(samples, channels)

    def finish(self, samples: range, channels: range) -> None:
        """Compute some channels of some samples."""
        geometry = self.geometry
        results = self._pieces(samples, channels)
        axes = (len(channels), len(samples))
        if self.loop.plan.in_place:
            reached = sums = results
        elif self.loop.plan.flat:
            flat = self._sums.array("sums", (*axes, 1, 1, prod(geometry.reached)))
            inside: Any = (..., *(slice(before, before + n) for before, n in zip(geometry.before, geometry.size)))
            image = flat.reshape(*axes, *geometry.reached)[inside]
            reached, sums = [(flat, slice(None))], [(image[part], part) for _, part in results]
        else:
            image = self._sums.array("sums", (*axes, *geometry.size))
            reached = sums = [(image[part], part) for _, part in results]
        if not self.written_once:
            for piece, _ in reached:
                piece[...] = 0
        for pixels in self.pixel_runs:
            self.loop.body(self, reached, samples, channels, pixels)
        for (piece, part), (result, _) in zip(sums, results):
            if self.bias is not None:
                piece += self.bias[channels.start : channels.stop][part, None, None, None, None]
            if self.pre is not None:
                self.pre[samples.start : samples.stop, channels.start : channels.stop].swapaxes(0, 1)[part] = piece
            activate(piece, self.loop.plan.activation)
            if piece is not result:
                result[...] = piece

    def _pieces(self, samples: range, channels: range) -> list[Piece]:
        """What of the results a block is."""
        pieces = []
        for out, first in zip(self.outs, self.geometry.channel_offsets):
            begin, end = max(channels.start, first), min(channels.stop, first + out.shape[1])
            if begin < end:
                part = out[samples.start : samples.stop, begin - first : end - first].swapaxes(0, 1)
                pieces.append((part, slice(begin - channels.start, end - channels.start)))
        return pieces

    # Four ways to add what a run of pixels brings.

    def product_into_results(
        self, sums: list[Piece], samples: range, channels: range, pixels: tuple[range, ...]
    ) -> None:
        matrix, x = self._factors(samples, channels, pixels)
        at: Any = (..., *(slice(run.start, run.stop) for run in pixels))
        for piece, part in sums:
            place = piece[at].reshape(len(matrix), len(piece) // len(matrix), x.shape[2])
            np.matmul(matrix[:, part] if len(sums) > 1 else matrix, x, out=place)

    def add_columns(self, sums: list[Piece], samples: range, channels: range, pixels: tuple[range, ...]) -> None:
        matrix, x = self._factors(samples, channels, pixels)
        shape = (len(channels), self.geometry.taps, len(samples), *self.loop.run_size(pixels))
        columns = self._product(matrix, x, shape)
        for t, regions in enumerate(self.loop.regions(pixels)):
            self._add(sums, regions, columns[:, t])

    def add_a_product_a_tap(
        self, sums: list[Piece], samples: range, channels: range, pixels: tuple[range, ...]
    ) -> None:
        shape = (len(channels), len(samples), *self.loop.run_size(pixels))
        groups, within = self._groups(channels)
        x = self._x_of(groups, samples, pixels)
        for weight, regions in zip(self.weight, self.loop.regions(pixels)):
            self._add(sums, regions, self._product(weight[groups, :, within].swapaxes(1, 2), x, shape))

    def add_scaled_taps(self, sums: list[Piece], samples: range, channels: range, pixels: tuple[range, ...]) -> None:
        """Depthwise: x times a number a channel; a matrix product would be a vector's."""
        geometry = self.geometry
        shape = (geometry.group_outputs, len(samples), *self.loop.run_size(pixels))
        x = self._x_of(slice(channels.start, channels.stop), samples, pixels).reshape(len(channels), *shape)
        factors = self.weight[channels.start : channels.stop, :, 0, :, None, None, None, None]  # [c, o, t]
        values = self._sums.array("values", (len(channels), *shape[1:]))
        for t, regions in enumerate(self.loop.regions(pixels)):
            for o in range(geometry.group_outputs):
                np.multiply(x[:, o], factors[:, o, t], out=values)
                self._add(sums, regions, values)

    def _add(self, sums: list[Piece], regions: tuple[Region, ...], values: np.ndarray) -> None:
        """Add values [channels, samples, pixels of the run] to the elements that a tap reads for them."""
        for at, elements in regions:
            if elements is None:  # what fell on padding is dropped
                continue
            for piece, part in sums:
                columns = read(values[part], at)
                if self.written_once:
                    read(piece, elements)[...] = columns
                else:
                    add(piece, elements, columns)

    # Products.

    def _groups(self, channels: range) -> tuple[slice, slice]:
        """The groups that a block's channels belong to, and which channels of each."""
        per_group = self.geometry.group_channels
        first, last = channels.start // per_group, (channels.stop - 1) // per_group
        begin = channels.start - first * per_group
        return slice(first, last + 1), slice(begin, begin + min(per_group, len(channels)))

    def _factors(self, samples: range, channels: range, pixels: tuple[range, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The factors of columns: the weight [groups, channels * taps, outputs], and x [groups, outputs, pixels]."""
        groups, within = self._groups(channels)
        weight = self.weight[groups, :, within]
        matrix = weight.reshape(*weight.shape[:2], weight.shape[2] * weight.shape[3]).swapaxes(1, 2)
        return matrix, self._x_of(groups, samples, pixels)

    def _x_of(self, groups: slice, samples: range, pixels: tuple[range, ...]) -> np.ndarray:
        """The part of x [groups, outputs of one, pixels of all samples] that a product takes."""
        geometry = self.geometry
        count, rows = groups.stop - groups.start, geometry.group_outputs
        first, last = groups.start * rows, groups.stop * rows
        at = tuple(slice(run.start, run.stop) for run in pixels)
        xs = [read(x[samples.start : samples.stop], at) for x in self.xs]
        size = self.loop.padded_run(pixels) if self.loop.plan.flat else tuple(map(len, pixels))
        as_it_lies = len(xs) == 1 and len(samples) == 1 and xs[0].dtype == self.loop.x_dtype
        if as_it_lies and not self.loop.parts_as_pixels and xs[0].shape[2:] == size:
            return xs[0][0, first:last].reshape(count, rows, prod(size))
        whole = self._x.array("x", (count * rows, len(samples), *size))
        if self.loop.plan.flat:
            whole[...] = 0
        gathered = read(whole, tuple(slice(0, len(run)) for run in pixels))
        offset = 0
        for x in xs:
            begin, end = max(first, offset), min(last, offset + x.shape[1])
            if begin < end:
                gathered[begin - first : end - first] = x[:, begin - offset : end - offset].swapaxes(0, 1)
            offset += x.shape[1]
        return whole.reshape(count, rows, len(samples) * prod(size))

    def _product(self, matrix: np.ndarray, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Rows of the weight times x, in scratch memory of this shape."""
        columns = self._sums.array("columns", shape)
        place = columns.reshape(*matrix.shape[:2], x.shape[2])
        if self.loop.parts_as_pixels:
            np.matmul(matrix, x.view(self.loop.real_dtype), out=place.view(self.loop.real_dtype))
        elif self.loop.parts_as_products:
            part = self._real.array("part", place.shape)
            place.real = np.matmul(matrix.real, x, out=part)
            place.imag = np.matmul(matrix.imag, x, out=part)
        else:
            np.matmul(matrix, x, out=place)
        return columns
