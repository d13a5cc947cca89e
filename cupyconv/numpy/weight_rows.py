"""Weight gradient by rows: one product per row of the output gradient, and the sum of these products.

::

    L = columns of       row 0   row 1   row 2   row 3   ...       each row (channels, other taps, pixels)
    row 0 of grad  x   [ row 0   row 1   row 2 ]                   (outputs, pixels) x (kh x channels x other taps, pixels)'
        1          x           [ row 1   row 2   row 3 ]           each is a product of the whole weight's size

Taps along the outermost axis share rows, as in a MEC convolution (`mec`), so columns are written once for all these
taps.  Each product is so small that BLAS does not pack its operands.  If channels are few, the products to be summed
are small too.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import CACHE_BLOCK, temporaries
from cupyconv.numpy.weight_sums import Pairs, WeightGradientLoop, WeightRun, grad_is_factor, x_item
from cupyconv.numpy.windows import Block, BlockSize, Images, tile_shape
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import WeightGradientProblem


class GradientRows(WeightGradientLoop):
    """One product per row of the gradient, with rows of columns that taps share, and the sum of all products."""

    name = "MEC rows"
    description = "columns shared by {taps} taps, one matrix product per row, summed over the rows"
    turn_calls = 20
    runs_bytes = 0

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        geometry, axis = problem.geometry, problem.geometry.outermost
        return (
            axis < 2
            and geometry.stride[axis] < geometry.kernel[axis]
            and geometry.dilation[axis] == 1
            and grad_is_factor(problem)
            and problem.grad.pixel_stride == 1
        )

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry, axis = problem.geometry, problem.geometry.outermost
        columns = geometry.in_channels * geometry.taps // geometry.kernel[axis] * geometry.stride[axis]
        products = geometry.out_channels * geometry.reduction // _pixels_beside(geometry, geometry.out_size)
        return CACHE_BLOCK // (x_item(problem) * (columns + products) or 1), 1

    @property
    def largest_product(self) -> int:
        geometry = self.geometry
        return geometry.group_outputs * geometry.reduction * _pixels_beside(geometry, self.block[1:])

    @cached_property
    def _rows(self) -> int:
        """Products per group in a block."""
        return prod(self.block[: 2 + self.geometry.outermost])

    @property
    def products_work(self) -> float:
        geometry, problem = self.geometry, self.problem
        pixels = _pixels_beside(geometry, self.block[1:])
        each = cost.product_of_rows(geometry.group_outputs, geometry.reduction, pixels, problem)
        each += cost.added(geometry.group_outputs * geometry.reduction, problem.dtype)
        products = self.blocks * self._rows * geometry.groups * each
        return products + self.tile_work + self.columns_work(self.blocks * prod(self._shape(self.block)))

    @property
    def columns_bytes(self) -> int:
        """Bytes of the tile, its columns, the products, and their sum."""
        geometry, item = self.geometry, self.x_dtype.itemsize
        tile = prod(tile_shape(geometry, geometry.in_channels, self.block)) * (
            1 + temporaries(geometry, self.problem.prologue)
        )
        products = (1 + self._rows) * (self.rows or geometry.group_outputs) * geometry.groups * geometry.reduction
        return (tile + prod(self._shape(self.block))) * item + products * self.sums_dtype.itemsize

    def _shape(self, block: BlockSize) -> tuple[int, ...]:
        """Shape of columns: (groups, samples, axes before the rows, rows, channels, other taps, other pixels)."""
        geometry, axis = self.geometry, self.geometry.outermost
        rows = (block[1 + axis] - 1) * geometry.stride[axis] + geometry.kernel[axis]
        taps, pixels = geometry.kernel[axis + 1 :], block[2 + axis :]
        return (geometry.groups, *block[: 1 + axis], rows, geometry.group_channels, *taps, *pixels)

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry, axis = self.geometry, self.geometry.outermost
        image, tile = images.tile(block), block.tile(geometry.in_channels)
        c, *others = tile.windows_strides
        taps, n, moves = others[:3], others[3], others[4:]
        before, after = slice(0, axis), slice(axis + 1, 3)
        strides = (c * geometry.group_channels, n, *moves[before], taps[axis], c, *taps[after], *moves[after])
        shape = self._shape(block.size)
        columns = images.scratch.array("columns", shape)
        columns[...] = np.ndarray(shape, image.dtype, image, 0, strides)
        pixels, item = _pixels_beside(geometry, block.size[1:]), columns.itemsize
        *outer, row = columns.strides[: 3 + axis]
        # (groups, samples, axes before, rows of the gradient, reduction, pixels)
        matrices = np.ndarray(
            (*shape[: 2 + axis], block.size[1 + axis], geometry.reduction, pixels),
            columns.dtype,
            columns,
            0,
            (*outer, row * geometry.stride[axis], pixels * item, item),
        )
        for grad, sums in pairs:
            rows = grad.reshape(*grad.shape[:2], *matrices.shape[1:-2], pixels)
            factor = np.moveaxis(rows, 1, -1)
            products = run.scratch("rows", (*matrices.shape[:-1], grad.shape[1]))
            np.matmul(matrices, factor, out=products)
            total = run.scratch("sum of rows", (len(grad), *products.shape[-2:]))
            flat = products.reshape(len(grad), -1, prod(products.shape[-2:]))
            np.einsum("grp->gp", flat, out=total.reshape(len(grad), -1))
            by_tap = total.reshape(len(grad), geometry.kernel[axis], geometry.group_channels, -1, grad.shape[1])
            place: Any = sums.reshape(*sums.shape[:2], geometry.group_channels, geometry.kernel[axis], -1)
            if is_first:
                place[...] = by_tap.transpose(0, 4, 2, 1, 3)
            else:
                place += by_tap.transpose(0, 4, 2, 1, 3)


def _pixels_beside(geometry: ConvGeometry, size: tuple[int, ...]) -> int:
    """Pixels of one row."""
    return prod(size[1 + geometry.outermost :])
