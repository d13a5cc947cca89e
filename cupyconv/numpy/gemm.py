"""Matrix products of columns, which are copied first, or of the input in place.

::

    columns [g, K_g, pixels]   --BLAS-->   sums [g, O_g, pixels]  =  weight [g, O_g, K_g]  x  columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import lines_apart
from cupyconv.numpy.block_loops import block_of_pixels, share_of_pixels
from cupyconv.numpy.convolution import (
    CACHE_BLOCK,
    CACHED_MEMORY,
    LONE_PIXELS,
    MEMORY_BLOCK,
    PRODUCT_BLOCK,
    ConvLoop,
    ConvRun,
    columns_bytes,
    inputs_are_columns,
    result_takes_sums,
    sums_per_pixel,
)
from cupyconv.numpy.mec import (
    COLUMNS_BLOCK,
    MecRows,
    column_parts,
    in_runs,
    multiply_parts,
    part_of,
    parts_of_columns,
    place_parts,
    row_parts,
)
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem, NotApplicable

if TYPE_CHECKING:
    from cupyconv.numpy.lone_product import LoneProduct

#: Outputs from which a 1x1 product is compute-bound: each element that is read is used this many times.
PRODUCT_OUTPUTS = 32
#: Pixels from which longer products are not faster.  Every product reads, and packs, the whole weight.
LONG_PRODUCT = 256
#: Bytes of columns up to which setup dominates the time of a lone product; and calls of one whose setup is cached.
SMALL, LONE_CALLS = 512 << 10, 2


def has_few_columns(problem: ConvProblem) -> bool:
    """Whether setup dominates the time of a product of all columns."""
    geometry, item = problem.geometry, ITEMSIZE[accumulator(problem.x_dtype)]
    elements = geometry.batch * geometry.pixels * max(1, geometry.reduction)
    return geometry.groups == 1 and elements * item <= SMALL


@dataclass(frozen=True)
class Product(ConvLoop):
    """One product per block and group; threads may share a lone product."""

    problem: ConvProblem
    #: Number of threads that share each product.
    divided: int = 1

    @classmethod
    def may_be_whole(cls, problem: ConvProblem) -> bool:
        """Whether one product for all pixels, divided by rows of the weight, may take less time than blocks."""
        return is_undivided(problem)

    @classmethod
    def fitted(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        if not cls.may_be_whole(problem):
            return super().fitted(problem, fixed, limit)
        lone = replace(problem, machine=replace(problem.host, threads=1))
        whole = cls(lone, (problem.geometry.batch, *problem.geometry.out_size), problem.host.threads)
        has_room = fixed + whole.workspace + whole.index_bytes <= limit
        if has_room and problem.host.threads > 1 and not problem.host.most:  # BLAS divides it
            return whole
        try:
            blocks = super().fitted(problem, fixed, limit)
        except NotApplicable:
            if has_room:
                return whole
            raise
        return whole if has_room and whole.seconds <= blocks.seconds else blocks

    @property
    def rows_on(self) -> int:
        """Threads of this library that share a product's rows; 1 if the caller set their number: BLAS then divides."""
        return self.divided if self.problem.host.most else 1

    @cached_property
    def lone(self) -> LoneProduct | None:
        """The runner of a loop that is one small product; else None."""
        return None

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return self.run if self.lone is None else self.lone.run

    @classmethod
    def least_calls(cls, problem: Any) -> float:
        return LONE_CALLS if has_few_columns(problem) else super().least_calls(problem)

    @property
    def calls(self) -> float:
        return super().calls if self.lone is None else LONE_CALLS

    @property
    def cached_memory(self) -> int:
        return 0 if self.lone is None else self.lone.kept_bytes

    def lone_product(self, is_view: bool) -> LoneProduct | None:
        if self.blocks != 1 or not has_few_columns(self.problem):
            return None
        from cupyconv.numpy.lone_product import LoneProduct, is_lone  # imported only for small products

        if not is_lone(self):
            return None
        lone = LoneProduct(self, is_view)
        return lone if lone.nbytes <= CACHED_MEMORY else None  # None for large strides or many outputs

    @cached_property
    def products_work(self) -> float:
        """Estimated time of all products on one thread."""
        one = self.parts.seconds if self.parts else cost.product(*self._sizes, self.problem)
        return self.blocks * self.geometry.groups * one

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Outputs, reduction and pixels of a block's product."""
        return self.geometry.group_outputs, self.geometry.reduction, prod(self.block)

    @cached_property
    def parts(self) -> cost.Parts | None:
        """Parts of a block's product, if they take less time than the whole; else None."""
        return None

    @property
    def largest_product(self) -> int:
        return self.parts.rows * self.parts.columns * self.geometry.reduction if self.parts else prod(self._sizes)

    @property
    def work(self) -> float:
        return self.divided_work + self.columns_written + self.store_work

    @property
    def divided_work(self) -> float:
        """Estimated time of products that threads share; with few groups, each has some rows and packs all columns."""
        groups, (rows, reduction, columns) = self.geometry.groups, self._sizes
        if self.rows_on == 1 or groups >= self.rows_on or self.parts:
            return self.products_work / self.divided * (cost.CONTENTION if self.rows_on > 1 else 1)
        own = cost.product(-(-rows // self.rows_on), reduction, columns, self.problem)
        return cost.CONTENTION * self.blocks * groups * own

    def seconds_on(self, threads: int) -> float:
        return super().seconds_on(threads) + (cost.WAKE if self.rows_on > 1 else 0.0)

    @property
    def columns_written(self) -> float:
        """Estimated time to write columns."""
        return 0.0


class View(Product):
    """The input is used as columns in place: the kernel has one tap, and pixels or channels are contiguous."""

    name = "view"
    turn_calls = 3
    description = "matrix products on the input in place"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return len(problem.xs) == 1 and problem.is_one_kind and inputs_are_columns(problem)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        by_memory = geometry.is_pointwise and geometry.group_outputs < PRODUCT_OUTPUTS
        nbytes = MEMORY_BLOCK if by_memory else CACHE_BLOCK
        return nbytes // (2 * sums_per_pixel(problem) or 1), 1

    @classmethod
    def fitted(cls, problem: ConvProblem, fixed: int, limit: int) -> Self:
        if result_takes_sums(problem) and not (problem.bias or problem.activation):
            # The loop needs no memory except the result.
            geometry, threads = problem.geometry, problem.host.threads
            share = share_of_pixels(geometry, threads, geometry.batch * geometry.pixels)
            blocks = cls(problem, block_of_pixels(geometry, share, geometry.batch))
            if not is_undivided(problem):
                return blocks
            whole = cls(problem, (geometry.batch, *geometry.out_size), threads)
            # If the caller set the number of threads, use one product, so that every thread has a part.
            return min(whole, blocks, key=attrgetter("seconds")) if problem.host.most else whole
        return super().fitted(problem, fixed, limit)

    @classmethod
    def may_be_whole(cls, problem: ConvProblem) -> bool:
        # The sums of a larger image would leave the cache before their epilogue.
        return problem.geometry.pixels < LONE_PIXELS and super().may_be_whole(problem)

    @property
    def workspace(self) -> int:
        return self.sums_bytes

    @cached_property
    def lone(self) -> LoneProduct | None:
        return self.lone_product(is_view=True) if self.geometry.batch == 1 else None

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        ((x, _),) = run.images.inputs
        if not self.in_place:
            return product(run, run.weight, block.of(x)[0], block)
        geometry, (samples, *axes) = self.geometry, block.size
        pixels = prod(axes)
        columns = block.of(x).reshape(samples, geometry.groups, geometry.group_channels, pixels)
        place = block.of(run.out).reshape(samples, geometry.groups, geometry.group_outputs, pixels)
        multiply(run.weight, columns, self.rows_on, place)
        return place if run.products_are_result else place.transpose(1, 2, 0, 3).reshape(block.sums_shape)


class Columns(Product):
    """All windows of a block are copied to columns."""

    name = "columns"
    turn_calls = 8
    contention = cost.PRODUCTS_BESIDE
    description = "columns (im2col) and matrix products"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return not View.applies(problem)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = geometry.in_channels * geometry.taps * ITEMSIZE[accumulator(problem.x_dtype)]
        per_pixel = per_pixel or 2 * sums_per_pixel(problem)
        pixels = COLUMNS_BLOCK // (per_pixel or 1)
        return max(pixels, LONG_PRODUCT), geometry.batch

    @cached_property
    def in_place(self) -> bool:
        return self.block[0] == 1 and result_takes_sums(self.problem)

    @property
    def extra_bytes(self) -> int:
        return prod(tile_shape(self.geometry, self.geometry.in_channels, self.block)) * self.x_dtype.itemsize

    @property
    def columns_written(self) -> float:
        geometry = self.geometry
        columns = self.columns_work(geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps)
        if geometry.in_channels * geometry.taps * prod(self.block) * self.x_dtype.itemsize > 2 * CACHE_BLOCK:
            columns *= cost.FARTHER
        return columns + (self.tile_work if geometry.taps > 1 else 0.0)

    @cached_property
    def parts(self) -> cost.Parts | None:
        return parts_of_columns(self.problem, self._sizes)

    @cached_property
    def lone(self) -> LoneProduct | None:
        return self.lone_product(is_view=False)

    @property
    def work(self) -> float:
        return super().work if self.lone is None else self.lone.work + self.store_work

    @property
    def workspace(self) -> int:
        pixels, item = prod(self.block), self.x_dtype.itemsize
        nbytes = columns_bytes(self.problem, self.block, item)
        beyond = lines_apart(pixels, item) - pixels
        nbytes += self.geometry.in_channels * self.geometry.taps * beyond * self.x_dtype.itemsize
        return self.sums_bytes + (nbytes if self.lone is None else max(nbytes, self.lone.nbytes))

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return with_parts(self, weight)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        if not self.problem.is_one_kind or self.rows_on > 1:
            return product(run, run.weight, run.images.matrix(block), block)
        scratch = run.images.scratch
        columns, matrices = scratch.views(self, block.size, ("columns",), partial(self._steps, run.images, block))
        place = block.of(run.out) if self.in_place else np.empty(block.sums_shape, self.sums_dtype)
        rows, run_of_columns = self._part
        by_group = place.reshape(self.geometry.groups, self.geometry.group_outputs, block.area)
        places = place_parts(by_group, rows, run_of_columns)
        weights = row_parts(run.weight, rows)
        run.images.copy_windows(block, columns)
        multiply_parts(weights, matrices, places)
        return place.reshape(block.sums_shape)

    @cached_property
    def _part(self) -> tuple[int, int]:
        return part_of(*self._sizes, self.factor_dtype, self.parts)

    def _steps(self, images: Images, block: Block) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return a block's columns, and their parts as matrices of all groups."""
        matrix = images.rows_of_columns(block)
        by_group = matrix.reshape(self.geometry.groups, self.geometry.reduction, block.area)
        return matrix.reshape(block.columns_shape), column_parts(by_group, self._part[1])


def is_undivided(problem: ConvProblem) -> bool:
    """Whether the convolution is one product, divided by the rows of the weight rather than by pixels.

    Halves of a single sample take longer than a product that BLAS's threads share.  If the weight is larger than all
    columns, each part would read it again.  A BLAS that uses fewer threads than requested divides nothing.
    """
    geometry = problem.geometry
    item = ITEMSIZE[accumulator(problem.x_dtype)]
    columns = geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps * item
    weight = geometry.out_channels * geometry.reduction * item
    is_one = columns <= PRODUCT_BLOCK and (geometry.batch == 1 or weight > columns)
    if not is_one or problem.host.threads == 1:
        return is_one
    from cupyconv.numpy.threads import BLAS  # searches for BLAS libraries: not for small problems

    return BLAS.threads >= problem.host.threads


def with_parts(loop: ConvLoop, weight: np.ndarray) -> np.ndarray:
    """Return the weight; if it alone is complex, its real and imaginary parts as twice as many outputs."""
    if loop.problem.factor_alone_is_complex:
        return np.concatenate([weight.real, weight.imag], axis=1)
    return weight


def product(run: ConvRun, weight: np.ndarray, columns: np.ndarray, block: Block) -> np.ndarray:
    """Return a block's sums: the weight, as returned by `with_parts`, times columns."""
    geometry, loop = run.geometry, run.loop
    columns = columns.reshape(geometry.groups, weight.shape[2], block.area)
    threads, parts = (loop.rows_on, loop.parts) if isinstance(loop, Product) else (1, None)
    if loop.problem.x_alone_is_complex:  # real and imaginary parts are twice as many real pixels
        sums = multiply(weight, columns.view(weight.dtype), threads).view(loop.sums_dtype)
    elif loop.problem.factor_alone_is_complex:
        real, imaginary = np.split(multiply(weight, columns, threads), 2, axis=1)
        sums = np.empty(real.shape, loop.sums_dtype)
        sums.real, sums.imag = real, imaginary
    elif loop.in_place:
        place = block.of(run.out).reshape(geometry.groups, geometry.group_outputs, block.area)
        sums = multiply(weight, columns, threads, place, parts)
    else:
        sums = multiply(weight, columns, threads, None, parts)
    return sums.reshape(block.sums_shape)


def multiply(
    weight: np.ndarray,
    columns: np.ndarray,
    threads: int,
    place: np.ndarray | None = None,
    parts: cost.Parts | None = None,
) -> np.ndarray:
    """Return the products of all groups; each thread computes some groups, or some rows."""
    if threads == 1:
        return in_runs(weight, columns, place, parts)
    from cupyconv.numpy.threads import in_threads

    groups, rows = weight.shape[:2]
    sums = np.empty((groups, rows, columns.shape[-1]), np.result_type(weight, columns)) if place is None else place

    def compute(part: tuple[slice, slice]) -> None:
        some, own = part
        in_runs(weight[some, own], columns[..., some, :, :], sums[..., some, own, :], parts)

    whole = slice(None)
    if groups >= threads:
        shares = [(part, whole) for part in parts_of(groups, -(-groups // threads))]
    else:
        shares = [(whole, part) for part in parts_of(rows, -(-rows // threads))]
    in_threads(threads, compute, shares)
    return sums


IMPLEMENTATIONS = (View, MecRows, Columns)
