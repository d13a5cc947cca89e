"""Winograd's F(7 - r, r) along every axis of r = 2 to 5 taps: for 3 taps, 6 products instead of 12 for 4 outputs.

(Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", CVPR 2016.)  The transforms of a tile along one axis, and the steps of a block:

::

    y [m]  =  A' [m, 6]  ( (G [6, r] w)  *  (B' [6, 6] x) )         y: m = 7 - r outputs, x: what they read, w: taps

    x, padded  [samples, d, h, w, channels]      channels last: a transform is one batched product, whose batch is
       | B' along w, h, d                        the overlapping windows; its columns are all axes behind the axis
    V  [6 6 6, tiles, channels]
       | one product for each of the 6 6 6, with U = G w
    M  [6 6 6, tiles, outputs]
       | A' along d, h, w                        along w, the product also makes pixels contiguous instead of channels
    y  [samples, outputs, d, h, w]

The matrices evaluate polynomials at 0, +-sqrt(1/2), +-sqrt(2) and infinity.  These points lose less to rounding than
small integers (Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution", 2020).  Rows are
scaled so that no transform of x or w is larger than its largest element.

Rounding errors grow with the largest terms of a tile, not of a single output: the bound is normwise.  If a sum is not
finite, an element of its tile was not finite or was too large.  Such a block is recomputed from columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from math import prod
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, cached_scratch
from cupyconv.numpy.block_loops import PixelLoop, largest_block
from cupyconv.numpy.choice import winograd_refusal
from cupyconv.numpy.convolution import ConvLoop, ConvRun, columns_bytes, sums_per_pixel, temporaries
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Block, BlockSize, parts_of, tile_shape
from cupyconv.numpy.winograd_tiles import (
    BUFFERS,
    FLOAT32,
    Product,
    Rows,
    Shape,
    Tiling,
    channels_first,
    in_turn,
    in_turn_bytes,
    in_turn_room,
    multiply_all,
    products_of,
    tile_bytes,
    tile_steps,
    tiled_axes,
    tiles_along,
    tiles_block,
    tiles_of_segment,
    weight_transform,
)
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Bytes of a block's tiles and of their products: a few megabytes stay in cache, and calls are long.
BLOCK = 4 << 20
#: Bytes up to which a transformed weight is reused for a whole run.  A larger one is transformed again for every block,
#: in parts that stay in cache, and the memory that this saves goes to larger blocks.
CACHED_WEIGHT, LARGE_BLOCK, WEIGHT_CACHE, MIN_OUTPUTS = (4 << 20, 8 << 20, 512 << 10, 32)
#: Elements of a transformed weight that are worth another thread.
WEIGHT_PART = 1 << 18
#: Kernels that one product transforms.  If BLAS has code for small products, it does not copy the factor then.
WEIGHT_ROWS = 1024

# --- the method -----------------------------------------------------------------------------------------------


#: Memory that is cached between calls, at most the bytes of a block: the first touch of a page takes longer than all
#: that is done with it here.
MEMORY = cached_scratch(FLOAT32)


class TiledLoop(PixelLoop):
    """A loop over blocks of whole tiles."""

    fresh_work = 0.0  # memory is cached between calls

    @classmethod
    def loops(cls, problem: Any) -> tuple[Sequence[Self], Mapping[str, int]]:
        if refusal := winograd_refusal(problem):
            raise NotApplicable(refusal)
        return super().loops(problem)

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        sides = [cost.tile_outputs(geometry.kernel[axis]) for axis in tiled_axes(geometry)]
        pixels = "x".join(map(str, sides))
        return f"{products_of(geometry)} products per tile of {pixels} pixels instead of {prod(sides) * geometry.taps}"

    @classmethod
    def applies(cls, problem: Any) -> bool:
        return True

    @classmethod
    def block_bytes(cls, problem: Any) -> int:
        """Return the target for the bytes of a block's tiles and their products."""
        return BLOCK

    @classmethod
    def fitted(cls, problem: Any, fixed: int, limit: int) -> Self:
        geometry, threads = problem.geometry, problem.host.threads
        phases = prod(geometry.dilation[axis] for axis in tiled_axes(geometry))
        tiles = geometry.batch * prod(tiles_along(geometry, (1, *geometry.out_size)))
        most = max(1, cls.block_bytes(problem) // (phases * tile_bytes(geometry) or 1))
        while True:
            blocks = threads * -(-tiles // (threads * most))  # the same number per thread
            loop = cls(problem, tiles_block(geometry, most, -(-tiles // max(1, blocks))))
            needed = fixed + threads * (loop.workspace + loop.index_bytes)
            if needed <= limit:
                return loop
            if most == 1:
                raise problem.does_not_fit("the smallest block", needed, limit)
            room = max(0, limit - fixed)
            most = max(1, min(most - 1, most * room // (needed - fixed)))

    @property
    def calls(self) -> float:
        return self.turns * cost.winograd_calls(self.geometry)

    @property
    def transforms_work(self) -> float:
        """Estimated time of the input and output transforms of all tiles."""
        channels = self.geometry.in_channels
        work = cost.transformed(self.elements * channels, self._rows(channels), self.geometry.kernel)
        read = self.blocks * prod(tile_shape(self.geometry, channels, self.block))
        return work + cost.transposed(read) + self.outputs_work

    @property
    def outputs_work(self) -> float:
        """Estimated time of the output transforms."""
        geometry, channels = self.geometry, self.geometry.out_channels
        work = cost.transformed(self.elements * channels, self._rows(channels), geometry.kernel)
        return work + cost.transposed(geometry.batch * geometry.pixels * channels)

    @property
    def elements(self) -> int:
        """Elements of all tiles of one channel."""
        return self.blocks * self.block_tiles * products_of(self.geometry)

    def _rows(self, channels: int) -> tuple[int, int, int]:
        """Return the number of contiguous elements behind each axis of the tiles."""
        _, height, width = tiles_along(self.geometry, self.block)
        return height * width * channels, width * channels, channels

    @cached_property
    def block_tiles(self) -> int:
        """Tiles of a whole block, over all phases."""
        geometry = self.geometry
        return (
            self.block[0]
            * prod(tiles_along(geometry, self.block))
            * prod(geometry.dilation[axis] for axis in tiled_axes(geometry))
        )

    @cached_property
    def tiling(self) -> Tiling:
        """The tiling of a whole block."""
        return Tiling(self.geometry, self.block)

    def tiling_of(self, block: Block) -> Tiling:
        return self.tiling if block.size == self.block else Tiling(self.geometry, block.size)

    @cached_property
    def columns_shapes(self) -> list[Shape]:
        """Shapes, one per buffer, that hold the columns of one pixel of a block that is not finite."""
        return [(self._columns_bytes((1, 1, 1, 1)) // FLOAT32.itemsize,)] * 2

    def _columns_bytes(self, part: BlockSize) -> int:
        """Return the bytes of a part's columns and the tile that they are copied from; subclasses may add sums."""
        return columns_bytes(self.problem, part, FLOAT32.itemsize)

    def parts_by_columns(self, block: Block, room: int) -> Iterator[tuple[tuple[slice, ...], Block]]:
        """Return parts of a block whose columns fit in `room` bytes, each with its slices of the block."""
        return block.parts(largest_block(self.geometry, self._columns_bytes, room, block.area, 1, block.size[0]))


class Weights:
    """The weight (groups, outputs per group, K_g), and the transformed weight if all blocks reuse it.

    The transformed weight is (products, groups, channels, outputs): with outputs last, BLAS reads the factor of a small
    product faster.  The first use computes it.  By then another thread is awake and works on its first tiles.
    """

    def __init__(self, matrix: np.ndarray, make: Callable[[], np.ndarray] | None) -> None:
        self.matrix, self.is_kept, self._make, self._lock = matrix, make is not None, make, Lock()
        self._factors: np.ndarray | None = None

    def transformed(self) -> np.ndarray:
        """Return the transformed weight, which the first call computes."""
        if self._factors is None:
            with self._lock:
                if self._factors is None:
                    assert self._make
                    self._factors, self._make = self._make(), None
        return self._factors


class Steps(NamedTuple):
    """The products that compute a block, and the arrays that they use."""

    image: np.ndarray
    forward: list[Product]
    tiles: np.ndarray
    products: np.ndarray
    back: list[Product]
    rows: list[Rows]
    sums: np.ndarray


class Winograd(TiledLoop, ConvLoop):
    """Compute tiles of six elements along every axis of more than one tap."""

    name = "Winograd"

    @cached_property
    def makes_rows(self) -> bool:
        """Whether pixels of the sums are contiguous, as in the result; otherwise channels are."""
        return self.in_place or self.problem.out.stride_c != 1

    @property
    def outputs_work(self) -> float:
        """Estimated time of output transforms; the last is one product per part of a row if pixels are contiguous."""
        geometry, tiles = self.geometry, tiles_of_segment(self.geometry)
        if not (tiles and self.makes_rows):
            return super().outputs_work
        channels, (depth, height, width) = geometry.out_channels, geometry.out_size
        rows, _, _ = self._rows(channels)
        work = cost.transformed(self.elements * channels, (rows, tiles * channels, 0), (*geometry.kernel[:2], 1))
        parts = geometry.batch * depth * height * -(-width // (tiles * tile_steps(geometry)[2]))
        return work + cost.transformed_to_rows(geometry.batch * geometry.pixels * channels, parts)

    @classmethod
    def block_bytes(cls, problem: ConvProblem) -> int:
        return BLOCK if keeps_weight(problem.geometry) else LARGE_BLOCK

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry = problem.geometry
        by_tap = kernels_of(geometry) * geometry.taps * FLOAT32.itemsize  # the copy that is transformed
        return factor_bytes(geometry) + by_tap if keeps_weight(geometry) else 0

    @property
    def cached_bytes(self) -> int:
        return factor_bytes(self.geometry) if super().cached_bytes else 0

    @property
    def work(self) -> float:
        geometry, problem = self.geometry, self.problem
        products = self.blocks * products_of(geometry) * cost.products_of_tiles(self.block_tiles, geometry, problem)
        times = (not problem.weight_is_constant) if keeps_weight(geometry) else self.blocks
        weights = times * cost.transformed_weight(kernels_of(geometry), products_of(geometry), geometry.taps)
        return products + weights + self.transforms_work + self.store_work

    @property
    def sums_bytes(self) -> int:
        """Bytes of an activation's temporary, and of sums that are not in the result itself."""
        arrays = (not self.in_place) + bool(self.problem.activation)
        return arrays * prod(self.block) * sums_per_pixel(self.problem)

    @property
    def workspace(self) -> int:
        gathered = prod(self._whole[0]) * temporaries(self.geometry, self.problem.prologue)
        factors = 0 if keeps_weight(self.geometry) else part_bytes(self.geometry)
        return in_turn_bytes(self._whole) + gathered * FLOAT32.itemsize + factors + self.sums_bytes

    @property
    def form(self) -> str:
        return f"Winograd {self.geometry.kernel} {self.weight_shape}, {keeps_weight(self.geometry)}"

    def arranged(self, weight: np.ndarray) -> Weights:  # type: ignore[override]
        if not keeps_weight(self.geometry):
            return Weights(weight, None)
        shape = (
            products_of(self.geometry),
            self.geometry.groups,
            self.geometry.group_channels,
            self.geometry.group_outputs,
        )
        if self.cached_bytes:
            factors = np.empty(shape, FLOAT32)
        else:
            factors = self.memory.array("factors", shape)
        threads = max(1, min(self.threads, factors.size // WEIGHT_PART))
        weights = Weights(weight, partial(self._transformed, weight, factors, threads))
        if self.cached_bytes or threads > 1:
            weights.transformed()
        return weights

    def _transformed(self, weight: np.ndarray, factors: np.ndarray, threads: int) -> np.ndarray:
        """Transform the weight on `threads` threads."""
        geometry = self.geometry
        by_tap = weight.reshape(*weight.shape[:2], geometry.group_channels, geometry.taps).transpose(3, 0, 2, 1)
        groups, channels = factors.shape[1:3]
        # Cut along groups, or along channels if there is one group.
        own = by_tap if groups > 1 else by_tap[:, 0]
        place = factors if groups > 1 else factors[:, 0]

        def transform(part: slice) -> None:
            taps = np.ascontiguousarray(own[:, part]).reshape(geometry.taps, -1)
            _times_taps(weight_transform(geometry.kernel), taps, place[:, part].reshape(len(factors), -1))

        count = groups if groups > 1 else channels
        largest = len(factors) * geometry.taps * min(WEIGHT_ROWS, factors[0].size)
        holds_blas = cost.holds_blas(threads, self.problem.host, largest)
        in_threads(threads, transform, parts_of(count, even_part(count, -(-count // threads))), holds_blas)
        return factors

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        scratch = run.images.scratch
        steps = scratch.views(self, block.size, BUFFERS, partial(self._steps, scratch, block))
        run.images.read_tile(block, steps.image)
        multiply_all(steps.forward)
        self._multiply(steps.tiles, run.weight, steps.products, scratch)
        multiply_all(steps.back)
        sums = block.of(run.out) if self.in_place else steps.sums
        for channels, matrix, pixels in steps.rows:
            place = sums[..., pixels]
            place = place.reshape(*place.shape[:4], channels.shape[3], -1, copy=False).transpose(0, 2, 3, 4, 1, 5)
            np.matmul(channels, matrix, place)
        if not np.isfinite(np.einsum("ncdhw->", sums)):  # a third of the time of `sum`
            if not self.makes_rows:  # they share memory with the columns
                sums = scratch.array("sums", sums.shape)
            self._sums_of_columns(run, run.weight.matrix, block, sums)
        return sums.swapaxes(0, 1).reshape(block.sums_shape)

    def _steps(self, scratch: Scratch, block: Block) -> Steps:
        geometry, tiling = self.geometry, self.tiling_of(block)
        memory = in_turn(scratch, self._shapes(tiling), self._whole)
        image = next(memory)
        forward, tiles = tiling.transform(image, memory)
        products = next(memory)
        rows: list[Rows] = []
        if self.makes_rows:
            back, rows = tiling.into_rows(products, memory, block.size[1:])
            shape = block.size[0], geometry.out_channels, *block.size[1:]
            sums = scratch.array("sums", (0,) if self.in_place else shape)
        else:
            back, outputs = tiling.transform_back(products, memory)
            at: Any = (0, slice(None), *map(slice, block.size[1:]))
            sums = outputs[at].transpose(0, 4, 1, 2, 3)
            scratch.array("sums", (0,))
        by_groups = (by_group(tiles, geometry.groups), by_group(products, geometry.groups))
        return Steps(channels_first(image), forward, *by_groups, back, rows, sums)

    def _multiply(self, tiles: np.ndarray, weights: Weights, place: np.ndarray, scratch: Scratch) -> None:
        """Multiply tiles (tiles, channels) by the transformed weight (channels, outputs), per product and group."""
        geometry, matrix = self.geometry, weight_transform(self.geometry.kernel)
        channels = geometry.group_channels
        if weights.is_kept:
            np.matmul(tiles, weights.transformed(), out=place)
            return
        for group, outputs in product(
            range(geometry.groups), parts_of(geometry.group_outputs, outputs_at_once(geometry))
        ):
            kernels = weights.matrix[group, outputs].reshape(-1, channels, geometry.taps)
            taps = scratch.array("taps", kernels.shape[::-1])
            taps[...] = kernels.T
            for some in parts_of(len(matrix), products_at_once(geometry)):
                factors = scratch.array("factors", (len(matrix[some]), channels, len(kernels)))
                _times_taps(matrix[some], taps.reshape(len(taps), -1), factors.reshape(len(factors), -1))
                np.matmul(tiles[some, group], factors, out=place[some, group, :, outputs])

    def _sums_of_columns(self, run: ConvRun, matrix: np.ndarray, block: Block, place: np.ndarray) -> None:
        """Compute the sums by their definition, from columns in the memory of the transforms."""
        geometry, room = self.geometry, in_turn_room(self._whole)
        memory = run.images.scratch.array(BUFFERS[0], (room // FLOAT32.itemsize,))
        for (samples, *pixels), part in self.parts_by_columns(block, room):
            columns = run.images.columns(part).reshape(geometry.groups, geometry.reduction, part.area)
            shape = geometry.groups, geometry.group_outputs, part.area
            sums = memory[columns.size :][: prod(shape)].reshape(shape)  # behind the columns
            np.matmul(matrix, columns, out=sums)
            place[(samples, slice(None), *pixels)] = sums.reshape(geometry.out_channels, *part.size).swapaxes(0, 1)

    def _columns_bytes(self, part: BlockSize) -> int:
        return super()._columns_bytes(part) + prod(part) * sums_per_pixel(self.problem)

    @cached_property
    def _whole(self) -> list[Shape]:
        """Shapes of the arrays of a whole block, and of the columns that it needs if it is not finite."""
        return self._shapes(self.tiling) + self.columns_shapes

    def _shapes(self, tiling: Tiling) -> list[Shape]:
        """Return the shapes of all arrays of a block, from its input to its sums."""
        geometry = self.geometry
        return tiling.transformed(geometry.in_channels) + tiling.back(geometry.out_channels, self.makes_rows)


def keeps_weight(geometry: ConvGeometry) -> bool:
    """Whether the weight is transformed once for all blocks."""
    return factor_bytes(geometry) <= CACHED_WEIGHT


def factor_bytes(geometry: ConvGeometry) -> int:
    """Return the bytes of the transformed weight."""
    return products_of(geometry) * kernels_of(geometry) * FLOAT32.itemsize


def outputs_at_once(geometry: ConvGeometry) -> int:
    """Return how many outputs have their kernels transformed at a time, if the transformed weight is not reused."""
    part = WEIGHT_CACHE // (geometry.group_channels * geometry.taps * FLOAT32.itemsize)
    return even_part(geometry.group_outputs, max(MIN_OUTPUTS, part))


def products_at_once(geometry: ConvGeometry) -> int:
    """Return how many products have their factors computed at a time, if the transformed weight is not reused."""
    part = WEIGHT_CACHE // (outputs_at_once(geometry) * geometry.group_channels * FLOAT32.itemsize)
    return even_part(products_of(geometry), max(1, part))


def part_bytes(geometry: ConvGeometry) -> int:
    """Return the bytes of the kernels that are transformed at a time, and of their transforms."""
    kernels = outputs_at_once(geometry) * geometry.group_channels
    return (geometry.taps + products_at_once(geometry)) * kernels * FLOAT32.itemsize


def kernels_of(geometry: ConvGeometry) -> int:
    """Return the number of kernels: one per output and channel of its group."""
    return geometry.out_channels * geometry.group_channels


def _times_taps(matrix: np.ndarray, taps: np.ndarray, target: np.ndarray) -> None:
    """Write the product of `matrix` and `taps` to `target`, in parts of `WEIGHT_ROWS` kernels."""
    whole = taps.shape[1] - taps.shape[1] % WEIGHT_ROWS

    def pieces(rows: np.ndarray) -> np.ndarray:
        return rows[:, :whole].reshape(len(rows), -1, WEIGHT_ROWS).swapaxes(0, 1)

    np.matmul(matrix, pieces(taps), out=pieces(target))
    if whole < taps.shape[1]:
        np.matmul(matrix, taps[:, whole:], out=target[:, whole:])


def by_group(image: np.ndarray, groups: int) -> np.ndarray:
    """Return a view with a matrix per product and group: (products, groups, tiles, channels per group)."""
    products, *tiles, channels = image.shape
    return image.reshape(products, prod(tiles), groups, channels // groups).swapaxes(1, 2)


IMPLEMENTATIONS = (Winograd,)
