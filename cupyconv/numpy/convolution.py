"""A convolution block by block: columns, product, epilogue, store, all while the block is in cache.

::

    x_0, x_1, ...   --read-->   columns           --BLAS-->   sums             --epilogue-->   block of y
    any strides,                [g, K_g, pixels]              [g, O_g, pixels]                 any strides,
    any dtype                   dtype of the sums             dtype of the sums                rounded once

A prologue is applied as columns are read.  Blocks are disjoint, so threads may take them in any order and every bit
stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate
from cupyconv.numpy.blocks import (
    Block,
    are_kept,
    columns_of,
    cut_into_blocks,
    parts_of,
    read_regions,
    runs_of,
    shared_columns,
)
from cupyconv.numpy.loops import BlockLoop
from cupyconv.numpy.prologue import transform_of
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import dtype_from_name, is_complex
from cupyconv.problem.geometry import ConvGeometry


class ConvolutionLoop:
    """What all runs of a plan have in common."""

    def __init__(self, loop: BlockLoop) -> None:
        geometry = loop.geometry
        assert isinstance(geometry, ConvGeometry)
        self.plan, self.geometry = loop, geometry
        self.sums_dtype = dtype_from_name(loop.dtype)
        self.x_dtype, self.weight_dtype = dtype_from_name(loop.x_dtype), dtype_from_name(loop.weight_dtype)
        complex_x, complex_weight = is_complex(loop.x_dtype), is_complex(loop.weight_dtype)
        #: Where one factor alone is complex, its parts are taken as twice as many real pixels or outputs.
        self.parts_as_pixels = complex_x and not complex_weight
        self.parts_as_outputs = complex_weight and not complex_x
        self.body = {
            "columns": BlockedConvolution.columns_and_product, "view": BlockedConvolution.product_of_view,
            "shared columns": BlockedConvolution.products_of_shared_columns,
            "taps": BlockedConvolution.product_a_tap, "scaled taps": BlockedConvolution.scaled_taps,
            "scaled runs": BlockedConvolution.scaled_runs,
        }[loop.body]  # fmt: skip
        itemsize = self.x_dtype.itemsize
        self._kept = tuple(cut_into_blocks(loop, itemsize)) if are_kept(loop) else None

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None) -> None:
        """Compute the result; arguments and result are given by name, and memory that other loops use too."""
        convolution = BlockedConvolution(self, arrays, scratch or Scratch(self.x_dtype, self.plan.rounds))
        blocks = cut_into_blocks(self.plan, self.x_dtype.itemsize) if self._kept is None else self._kept
        if self.plan.threads == 1:
            for block in blocks:
                convolution.finish(block)
        else:
            with ThreadPoolExecutor(self.plan.threads) as pool:
                list(pool.map(convolution.finish_in_thread, blocks))


class BlockedConvolution:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, loop: ConvolutionLoop, arrays: Mapping[str, Any], scratch: Scratch) -> None:
        geometry = loop.geometry
        self.loop, self.geometry = loop, geometry
        self.inputs = [
            (five_axes(arrays[name]), slice(first, first + channels))
            for name, first, channels in zip(loop.plan.inputs, geometry.channel_offsets, geometry.channels)
        ]
        self.out = five_axes(arrays["out"])
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        residual, bias = arrays.get("residual"), arrays.get("bias")
        self.residual = None if residual is None else five_axes(residual)
        matrix = arrays["weight"].reshape(geometry.groups, geometry.group_outputs, geometry.reduction)
        if matrix.dtype != loop.weight_dtype:
            matrix = matrix.astype(loop.weight_dtype)
        self.weight = matrix  # (groups, group_outputs, K_g)
        self.matrix = np.concatenate([matrix.real, matrix.imag], axis=1) if loop.parts_as_outputs else matrix
        if loop.plan.body == "shared columns":
            self.by_tap = _by_outermost_tap(matrix, geometry)
        if bias is not None:
            bias = bias.astype(self.out.dtype, copy=False).astype(loop.sums_dtype, copy=False)[:, None, None, None]
        self.bias = bias
        self._products_are_result = (
            loop.plan.in_place and bias is None and residual is None and not loop.plan.activation
        )
        self._scratch, self._products = scratch, Scratch(loop.sums_dtype, loop.plan.rounds)
        self._transform = transform_of(loop.plan.prologue, arrays, loop.x_dtype)

    def finish(self, block: Block) -> None:
        self._store(block, self.loop.body(self, block))

    def finish_in_thread(self, block: Block) -> None:
        with np.errstate(all="ignore"):  # of the thread
            self.finish(block)

    # Six ways to the sums of a block, each (groups, group_outputs, samples, depth, height, width).

    def columns_and_product(self, block: Block) -> np.ndarray:
        return self._product(self.matrix, columns_of(self.inputs, block, self._scratch, self._transform), block)

    def product_of_view(self, block: Block) -> np.ndarray:
        ((x, _),) = self.inputs
        if not self.loop.plan.in_place:
            return self._product(self.matrix, block.of(x)[0], block)
        geometry, samples = self.geometry, block.size[0]
        columns = block.of(x).reshape(samples, geometry.groups, geometry.group_channels, -1)
        place = block.of(self.out).reshape(samples, geometry.groups, geometry.group_outputs, -1)
        np.matmul(self.matrix, columns, out=place)
        return place.transpose(1, 2, 0, 3).reshape(block.sums_shape)

    def product_a_tap(self, block: Block) -> np.ndarray:
        """A product for each tap: no columns but one tap's, and a sum that is gone through for every tap."""
        geometry = self.geometry
        by_tap = np.moveaxis(self.matrix.reshape(*self.matrix.shape[:2], geometry.group_channels, geometry.taps), 3, 0)
        sums = np.zeros(block.sums_shape, self.loop.sums_dtype)
        columns = self._scratch.array("columns", (geometry.in_channels, *block.size))
        for matrix, regions in zip(by_tap, block.taps):
            read_regions(self.inputs, regions, block, columns, self._transform)
            sums += self._product(np.ascontiguousarray(matrix), columns, block)
        return sums

    def products_of_shared_columns(self, block: Block) -> np.ndarray:
        """A product for each tap of the kernel's outermost axis, whose columns the others share."""
        geometry = self.geometry
        sums = self._empty_sums(block)
        for groups, columns in self._shared_columns(block):
            target = sums[groups]
            product = self._products.array("product", target.shape)
            for taps, views in columns:
                matrices = views.swapaxes(0, 1).reshape(views.shape[1], len(target), -1, block.area)
                for t, matrix in zip(range(geometry.taps)[taps], matrices):
                    place = product if t else target
                    np.matmul(self.by_tap[t, groups], matrix, out=place)
                    if t:
                        target += product
        return self._in_order(sums, block)

    def scaled_taps(self, block: Block) -> np.ndarray:
        """Depthwise: what each tap reads, times a number a channel, summed; a matrix product would be a vector's."""
        sums = self._empty_sums(block)
        weight = self.weight.reshape(*self.weight.shape[:2], self.geometry.kernel[self.geometry.outermost], -1)
        for groups, columns in self._shared_columns(block):
            for taps, views in columns:
                # In Fortran's order the innermost loop is over pixels, whichever axis has the smallest stride.
                target = sums[groups].T
                if taps.start:
                    target += np.einsum("cmtk,ctkp->pmc", weight[groups, :, taps], views, order="F")
                else:
                    np.einsum("cmtk,ctkp->pmc", weight[groups, :, taps], views, out=target, order="F")
        return self._in_order(sums, block)

    def scaled_runs(self, block: Block) -> np.ndarray:
        """Depthwise at stride 1: a tap's run of the tile times a number a channel; what lies between rows is left out."""
        geometry = self.geometry
        size = (geometry.groups, geometry.group_outputs, *block.size)
        if self.loop.plan.in_place:
            sums = block.of(self.out).swapaxes(0, 1).reshape(size)
        else:
            sums = np.empty(size, self.loop.sums_dtype)
        weight = self.weight.reshape(*self.weight.shape[:2], *geometry.kernel)
        for groups in parts_of(geometry.groups, self.loop.plan.part):
            runs, pixels = runs_of(self.inputs, block, groups, self._scratch, self._transform)
            shape = (len(runs), geometry.group_outputs, runs.shape[-1])
            is_row = block.size[0] == 1 and shape[-1] == block.area  # nothing lies between
            products = sums[groups].reshape(shape) if is_row else self._products.array("runs", shape)
            np.einsum("cmdhw,cdhwp->pmc", weight[groups], runs, out=products.T, order="F")
            if not is_row:
                sums[groups] = pixels(products)
        return sums

    def _shared_columns(self, block: Block) -> Iterator[tuple[slice, list[tuple[slice, np.ndarray]]]]:
        """For some groups at a time, so that they stay in cache, the columns that taps share."""
        per_group = self.geometry.group_channels
        for groups in parts_of(self.geometry.groups, self.loop.plan.part):
            channels = slice(groups.start * per_group, groups.stop * per_group)
            yield groups, shared_columns(self.inputs, block, channels, self._scratch, self._transform)

    def _empty_sums(self, block: Block) -> np.ndarray:
        """Where a block's sums go, (groups, group_outputs, pixels): the result, or memory of its own."""
        shape = (self.geometry.groups, self.geometry.group_outputs, block.area)
        return block.of(self.out).reshape(shape) if self.loop.plan.in_place else np.empty(shape, self.loop.sums_dtype)

    def _in_order(self, sums: np.ndarray, block: Block) -> np.ndarray:
        """Sums of pixels in the order of shared columns, as a view in the order of pixels."""
        samples_and_size, axis = list(block.size), 1 + self.geometry.outermost
        samples_and_size.insert(0, samples_and_size.pop(axis))
        return np.moveaxis(sums.reshape(*sums.shape[:2], *samples_and_size), 2, 2 + axis)

    def _product(self, matrix: np.ndarray, columns: np.ndarray, block: Block) -> np.ndarray:
        geometry, loop = self.geometry, self.loop
        columns = columns.reshape(geometry.groups, matrix.shape[2], block.area)
        if loop.parts_as_pixels:
            sums = np.matmul(matrix, columns.view(matrix.dtype)).view(loop.sums_dtype)
        elif loop.parts_as_outputs:
            real, imaginary = np.split(np.matmul(matrix, columns), 2, axis=1)
            sums = np.empty(real.shape, loop.sums_dtype)
            sums.real, sums.imag = real, imaginary
        elif loop.plan.in_place:
            place = block.of(self.out).reshape(geometry.groups, geometry.group_outputs, block.area)
            sums = np.matmul(matrix, columns, out=place)
        else:
            sums = np.matmul(matrix, columns)
        return sums.reshape(block.sums_shape)

    # The epilogue.

    def _store(self, block: Block, sums: np.ndarray) -> None:
        if self._products_are_result:
            return
        sums = sums.reshape(self.geometry.out_channels, *block.size).swapaxes(0, 1)
        if self.bias is not None:
            sums += self.bias
        if self.residual is not None:
            residual = block.of(self.residual)
            # Rounded to the result's dtype first, as an argument of that dtype would have been.
            sums += residual if residual.dtype == self.out.dtype else residual.astype(self.out.dtype)
        if self.pre is not None:
            block.of(self.pre)[...] = sums
        activate(sums, self.loop.plan.activation)
        if not self.loop.plan.in_place:
            block.of(self.out)[...] = sums


def _by_outermost_tap(weight: np.ndarray, geometry: ConvGeometry) -> np.ndarray:
    """The matrix of each tap of the kernel's outermost axis: (taps, groups, group_outputs, channels and other taps)."""
    outer = geometry.kernel[geometry.outermost]
    taps = weight.reshape(*weight.shape[:2], geometry.group_channels, outer, -1)
    return np.moveaxis(taps, 3, 0).reshape(outer, *weight.shape[:2], -1)
