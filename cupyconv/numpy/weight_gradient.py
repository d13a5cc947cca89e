"""Weight gradient on NumPy: the methods, and the implementations that compute a block's products.

::

    dW [g, O_g, K_g]   +=   grad [g, O_g, pixels]   x   columns [g, K_g, pixels]'      for every block of pixels
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, seconds_of
from cupyconv.numpy.choice import FFT, WINOGRAD, Method, choose
from cupyconv.numpy.convolution import (
    LONE_PIXELS,
    PRODUCT_BLOCK,
    box_bytes,
    columns_bytes,
    inputs_are_columns,
    taps_at_a_time,
    temporaries,
)
from cupyconv.numpy.shared_columns import mec_bytes, mec_columns, mec_part, mec_shapes, taps_share
from cupyconv.numpy.strips import GradientStrips
from cupyconv.numpy.weight_channels import GradientChannels
from cupyconv.numpy.weight_exchanged import plan_exchanged
from cupyconv.numpy.weight_lines import GradientLines
from cupyconv.numpy.weight_rows import GradientRows
from cupyconv.numpy.weight_runs import GradientRuns
from cupyconv.numpy.weight_sums import Pairs, WeightGradientLoop, WeightRun, blas_divides, grad_is_factor, x_item
from cupyconv.numpy.windows import Block, Images, copy, parts_of
from cupyconv.numpy.winograd import MEMORY, TiledLoop, by_group
from cupyconv.numpy.winograd_tiles import (
    FLOAT32,
    Tiling,
    channels_first,
    in_turn,
    in_turn_bytes,
    in_turn_room,
    products_of,
    weight_transform,
)
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import WeightGradientProblem, without_empty_inputs

#: Bytes of a block's columns that stay in cache until they are multiplied, and pixels beyond which products get no
#: faster.
COLUMNS_BLOCK, LONG_SUM = 2 << 20, 768


def plan_weight_gradient(problem: WeightGradientProblem) -> Plan:
    """Return the plan for ``problem.method``; raise ValueError if a named method does not apply."""
    assert not (problem.prologue and problem.x_alone_is_complex), "a prologue is of complex numbers, not of their parts"
    problem = without_empty_inputs(problem)
    plan = _plan_as_it_is(problem)
    try:
        exchanged = plan_exchanged(problem, _plan_as_it_is)
    except ValueError:
        return plan
    return min(plan, exchanged, key=lambda plan: seconds_of(plan.steps))


def _plan_as_it_is(problem: WeightGradientProblem) -> Plan:
    return choose(problem, METHODS)


class GradientView(WeightGradientLoop):
    """Products read the inputs in place as columns: the kernel has one tap, and pixels or channels are contiguous."""

    name = "view"
    description = "matrix products on the inputs in place"
    turn_calls = 4
    columns_bytes = 0

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        has_views = len(problem.xs) == 1 or problem.geometry.groups == 1
        return has_views and not problem.x_alone_is_complex and inputs_are_columns(problem)

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        return problem.geometry.pixels if grad_is_factor(problem) else super().aim(problem)[0], 1

    @property
    def products_work(self) -> float:
        return self.product_work(self.geometry.reduction)

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        for x, channels in images.inputs:
            view = block.of(x)[0]
            if len(images.inputs) == 1:
                view, channels = view.reshape(self.geometry.groups, -1, block.area), slice(None)
            else:
                view = view.reshape(1, -1, block.area)
            for grad, sums in pairs:
                run.add_product(grad, view, sums[:, :, channels], is_first)


class GradientMecProducts(WeightGradientLoop):
    """One product per tap of the kernel's outermost axis, over columns that these taps share, some groups at a time."""

    name = "MEC columns"
    description = "columns shared by {taps} taps, and matrix products"
    shares_columns = True
    products_are_summed = False  # a tap's sums are not contiguous

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return taps_share(problem.geometry, x_item(problem))

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        columns = geometry.group_channels * (geometry.taps // geometry.kernel[geometry.outermost]) * x_item(problem)
        pixels = PRODUCT_BLOCK // (columns or 1)
        if geometry.groups > 1:  # a copy of the gradient has all groups
            grad = geometry.out_channels * ITEMSIZE[accumulator(problem.grad_dtype)]
            pixels = min(pixels, PRODUCT_BLOCK // (grad or 1))
        # Grouped products can read one sample's gradient in place; copying it would take as long as the products.
        is_lone = geometry.groups > 1 and geometry.pixels >= LONE_PIXELS and grad_is_factor(problem)
        return pixels, 1 if is_lone else geometry.batch

    @cached_property
    def part(self) -> int:
        return mec_part(self.problem, self.block, self.x_dtype.itemsize)

    @property
    def mec_work(self) -> float:
        """Estimated time to write the columns that taps share, in seconds."""
        geometry = self.geometry
        shapes = mec_shapes(geometry, geometry.in_channels, self.block)
        return self.tile_work + self.columns_work(self.blocks * sum(prod(shape) for _, shape in shapes))

    @property
    def columns_bytes(self) -> int:
        return self.part * mec_bytes(self.problem, self.block, self.x_dtype.itemsize)

    @property
    def products_work(self) -> float:
        taps = self.geometry.kernel[self.geometry.outermost]
        own = self.geometry.reduction // taps
        return self.mec_work + taps * self.product_work(own, own // self.geometry.group_channels)

    @property
    def calls(self) -> float:
        return self.turns * (10 + 8 * self.geometry.kernel[self.geometry.outermost])

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        # Move the axis of the taps that share columns to the front of the sums: (taps, groups, rows, c, other taps).
        by_tap = [
            np.moveaxis(
                sums.reshape(*sums.shape[:2], geometry.group_channels, *geometry.kernel), 3 + geometry.outermost, 0
            )
            for _, sums in pairs
        ]
        for groups, columns in mec_columns(images, block, self.part):
            for taps, views in columns:
                matrices = views.swapaxes(0, 1).reshape(views.shape[1], groups.stop - groups.start, -1, block.area)
                for t, matrix in zip(range(geometry.taps)[taps], matrices):
                    for (grad, _), sums in zip(pairs, by_tap):
                        run.add_product(grad[groups], matrix, sums[t, groups], is_first)


class GradientColumns(WeightGradientLoop):
    """Copies all windows of a block to columns."""

    name = "columns"
    description = "columns (im2col) and matrix products"
    turn_calls = 8

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return not GradientView.applies(problem)

    @property
    def products_work(self) -> float:
        geometry = self.geometry
        columns = geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps
        return self.tile_work + self.columns_work(columns) + self.product_work(geometry.reduction)

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = geometry.in_channels * geometry.taps * x_item(problem) or 1
        pixels = PRODUCT_BLOCK // per_pixel
        if not blas_divides(problem):
            pixels = min(pixels, max(COLUMNS_BLOCK // per_pixel, LONG_SUM))
        return pixels, geometry.batch

    @property
    def columns_bytes(self) -> int:
        return columns_bytes(self.problem, self.block, self.x_dtype.itemsize)

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        columns = images.columns(block).reshape(self.geometry.groups, self.geometry.reduction, block.area)
        for grad, sums in pairs:
            run.add_product(grad, columns, sums, is_first)


class GradientTaps(WeightGradientLoop):
    """One product per tap, or per few taps if these read little; only their columns are written."""

    name = "taps"
    description = "tap by tap, no columns"
    products_are_summed = False  # a tap's sums are not contiguous

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return True

    @cached_property
    def taps(self) -> int:
        """Most taps per product."""
        return taps_at_a_time(self.problem, self.block, self.x_dtype.itemsize)

    @cached_property
    def rounds(self) -> int:
        return super().rounds * -(-self.geometry.taps // self.taps)

    @classmethod
    def product_bytes(cls, problem: WeightGradientProblem) -> int:
        return super().product_bytes(problem) // problem.geometry.taps

    @property
    def products_work(self) -> float:
        geometry, rounds = self.geometry, -(-self.geometry.taps // self.taps)
        columns = geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps
        columns_work = self.columns_work(columns) + self.tile_work * (self.taps > 1)
        return columns_work + rounds * self.product_work(geometry.reduction / rounds)

    @property
    def calls(self) -> float:
        return self.turns * (35 if self.taps > 1 else 12)

    @property
    def columns_bytes(self) -> int:
        """Bytes of the columns of a product's taps; for several taps, `box_bytes` also counts the product."""
        return box_bytes(self.problem, self.block, self.x_dtype.itemsize, self.taps)

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        by_tap = [
            sums.reshape(*sums.shape[:2], geometry.group_channels, geometry.taps, copy=False) for _, sums in pairs
        ]
        for taps, columns in images.some_taps(block, self.taps):
            matrices = columns.reshape(geometry.groups, -1, block.area)
            for (grad, _), sums in zip(pairs, by_tap):
                run.add_product(grad, matrices, sums[..., taps], is_first)


class GradientWinograd(TiledLoop, WeightGradientLoop):
    """Products of transformed tiles of x and of the gradient; their sum over all tiles is then transformed to taps.

    ::

        dW [r]  =  G' [r, 6]  sum over tiles of ( (A [6, m] grad)  *  (B' [6, 6] x) )        along every axis of r taps
    """

    name = "Winograd"
    products_are_summed = False

    @property
    def products_work(self) -> float:
        geometry, products = self.geometry, products_of(self.geometry)
        sizes = geometry.group_outputs, self.block_tiles, geometry.group_channels
        multiplied = self.blocks * products * geometry.groups * cost.product(*sizes, self.problem)
        pairs = geometry.out_channels * geometry.group_channels
        taps = self.blocks * cost.transformed_weight(pairs, products, geometry.taps)
        return self.transforms_work + multiplied + taps

    @property
    def columns_bytes(self) -> int:
        """Bytes of the tiles of the inputs and of the gradient."""
        geometry = self.geometry
        inputs, grads = self._whole
        gathered = prod(inputs[0]) * temporaries(geometry, self.problem.prologue)
        return in_turn_bytes(inputs) + in_turn_bytes(grads) + gathered * FLOAT32.itemsize

    @classmethod
    def product_bytes(cls, problem: WeightGradientProblem) -> int:
        """Bytes of a product of transformed tiles, and of the taps that it is transformed to."""
        geometry = problem.geometry
        of_tiles = geometry.groups * geometry.group_channels * products_of(geometry) * FLOAT32.itemsize
        return super().product_bytes(problem) + of_tiles

    def _shapes(self, tiling: Tiling) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Shapes of the arrays that lead from the inputs to their tiles, and from the gradient to its tiles."""
        outputs = self.geometry.groups * (self.rows or self.geometry.group_outputs)
        return tiling.transformed(self.geometry.in_channels), tiling.transformed(outputs, overlap=False)

    @cached_property
    def _whole(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """`_shapes` of a whole block, with the columns that are needed if its sums are not finite."""
        inputs, grads = self._shapes(self.tiling)
        return inputs + self.columns_shapes, grads

    def images(self, arrays: Mapping[str, Any], scratch: Scratch) -> Images:
        return super().images(arrays, MEMORY)  # so that columns, if any, reuse the memory of the tiles

    @property
    def product_memory(self) -> Scratch:
        return MEMORY

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry, tiling = self.geometry, self.tiling_of(block)
        ((grad, sums),) = pairs
        inputs, grads = self._shapes(tiling)
        whole_inputs, whole_grads = self._whole
        memory = in_turn(MEMORY, inputs, whole_inputs)
        image = next(memory)
        images.read_tile(block, channels_first(image))
        x = by_group(tiling.transform(image, memory).computed(), geometry.groups)
        memory = in_turn(MEMORY, grads, whole_grads, ("grad", "grad tiles"))
        image = next(memory)
        if tiling.is_cut:
            image.fill(0)
        at: Any = (0, slice(None), *map(slice, block.size[1:]))
        copy(image[at].transpose(4, 0, 1, 2, 3), grad.reshape(prod(grad.shape[:2]), *block.size))
        factor = by_group(tiling.transform(image, memory, overlap=False).computed(), geometry.groups)
        for piece in parts_of(sums.shape[1], self.piece):
            shape = (len(x), geometry.groups, piece.stop - piece.start, geometry.group_channels)
            products = np.matmul(factor[..., piece].swapaxes(2, 3), x, out=MEMORY.array("products", shape))
            taps = run.scratch("product", (geometry.taps, prod(shape[1:])))  # the buffer of a product of columns
            np.matmul(weight_transform(geometry.kernel).T, products.reshape(len(x), -1), out=taps)
            if not np.isfinite(taps.sum()):
                rest = slice(piece.start, None)
                self._add_columns(run, block, images, grad[:, rest], sums[:, rest], is_first)
                return
            product = np.moveaxis(taps.reshape(geometry.taps, *shape[1:]), 0, -1)
            target = sums[:, piece].reshape(product.shape, copy=False)
            if is_first:
                target[...] = product
            else:
                target += product

    def _add_columns(
        self, run: WeightRun, block: Block, images: Images, grad: np.ndarray, sums: np.ndarray, is_first: bool
    ) -> None:
        """Add the same sums by the definition, with columns in the memory of the inputs' tiles."""
        by_pixel = grad.reshape(*grad.shape[:2], *block.size)
        for at, part in self.parts_by_columns(block, in_turn_room(self._whole[0])):
            columns = images.columns(part).reshape(self.geometry.groups, self.geometry.reduction, part.area)
            own: Any = (slice(None), slice(None), *at)
            run.add_product(by_pixel[own].reshape(*grad.shape[:2], part.area), columns, sums, is_first)
            is_first = False


METHODS = {
    "winograd": WINOGRAD._replace(implementations=(GradientWinograd,)),
    "fft": FFT._replace(implementations="cupyconv.numpy.fft_weight_gradient"),
    "gemm": Method(
        (
            GradientStrips,
            GradientView,
            GradientRows,
            GradientLines,
            GradientMecProducts,
            GradientColumns,
            GradientChannels,
        )
    ),
    "direct": Method((GradientRuns, GradientTaps)),
}
