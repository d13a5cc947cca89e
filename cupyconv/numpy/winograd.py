"""Winograd's F(4, 3) along every axis of three taps: 6 products for 4 outputs, where a sum over taps takes 12.

(Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", CVPR 2016.)  Of the two matrices a tile is multiplied by, and of their products, along one axis:

::

    y [4]  =  A' [4, 6]  ( (G [6, 3] w)  *  (B' [6, 6] x) )         y: outputs, x: the inputs they read, w: taps

    x, padded  [samples, d, h, w, channels]      channels last: a transform is then one batched product, whose
       | B' along w, h, d                        batch are overlapping windows, and all behind the axis its columns
    V  [6 6 6, tiles, channels]
       | one product for each of the 6 6 6, with U = G w
    M  [6 6 6, tiles, outputs]
       | A' along d, h, w
    y  [samples, d, h, w, outputs]

The matrices are those of the polynomials' values at 0, +-sqrt(1/2), +-sqrt(2) and infinity, which lose less to rounding
than small integers (Barabasz et al., "Error Analysis and Improving the Accuracy of Winograd Convolution", 2020).  Rows
are scaled so that no transform of x or w is larger than its largest element.

Rounding errors grow with the largest terms of a tile, not of a single output: the bound is normwise.  A sum that is not
finite says that something in its tile was not, or was too large: such a block is computed from columns instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import product
from math import prod, sqrt
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, kept_scratch
from cupyconv.numpy.block_loops import PixelLoop, largest_block
from cupyconv.numpy.choice import winograd_refusal
from cupyconv.numpy.convolution import ConvLoop, ConvRun, columns_bytes, sums_per_pixel, temporaries
from cupyconv.numpy.gemm import product as column_product
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Block, BlockSize, parts_of, tile_shape
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part
from cupyconv.problem.problems import ConvProblem, NotApplicable

TAPS, OUTPUTS, INPUTS = 3, 4, 6
FLOAT32 = np.dtype(np.float32)
Shape = tuple[int, ...]
#: Bytes of the products of a block and of what they are products of: a few megabytes stay in cache, and calls are long.
BLOCK = 4 << 20
#: Elements behind an axis below which tiles are copied apart, so that a row has those of all tiles: each row is a product
#: of BLAS, and where it has no kernels for small ones, these wait for each other's memory.
LONG_ROW = 256
#: Bytes of a transformed weight up to which it is kept for a whole run.  A larger one is transformed anew for every block,
#: in parts that stay in cache: the memory is the blocks', which are larger for it.
KEPT_WEIGHT, LARGE_BLOCK, WEIGHT_CACHE, FEWEST_OUTPUTS = 4 << 20, 8 << 20, 512 << 10, 32
#: Elements of a transformed weight from which another thread takes a part of it.
WEIGHT_PART = 1 << 18
#: Kernels whose transforms are one product: where BLAS has kernels for small products, they do not copy the factor.
WEIGHT_ROWS = 1024

# --- the transforms -------------------------------------------------------------------------------------------


class Transforms(NamedTuple):
    """The matrices along one axis, in float64."""

    inputs: np.ndarray  # B' [6, 6]
    taps: np.ndarray  # G [6, 3]
    outputs: np.ndarray  # A' [4, 6]


@lru_cache(maxsize=1)
def transforms() -> Transforms:
    """F(4, 3) at the points 0, +-1/r, +-r and infinity, where r = sqrt(2).

    A row of B' has the coefficients of the product of (x - q) over all other points q; rows of G and of A have powers of
    their point, and that product's value at the point divides.
    """
    r = sqrt(2)
    points = (0, 1 / r, -1 / r, r, -r)
    inputs = np.array(
        [
            [1, 0, -2.5, 0, 1, 0],
            [0, -r, -2, 1 / r, 1, 0],
            [0, r, -2, -1 / r, 1, 0],
            [0, -1 / r, -0.5, r, 1, 0],
            [0, 1 / r, -0.5, -r, 1, 0],
            [0, 1, 0, -2.5, 0, 1],
        ]
    )
    values = np.array([1, -1.5, -1.5, 6, 6, 1])
    taps = np.array([[p**i for i in range(TAPS)] for p in points] + [[0, 0, 1]])
    outputs = np.array([[p**i for i in range(OUTPUTS)] for p in points] + [[0, 0, 0, 1]])
    scales = abs(inputs).sum(1), abs(taps).sum(1)
    return Transforms(
        inputs / scales[0][:, None], taps / scales[1][:, None], (outputs.T * (scales[0] * scales[1] / values))
    )


@lru_cache(maxsize=1)
def transforms_float32() -> Transforms:
    return Transforms(*(matrix.astype(np.float32) for matrix in transforms()))


@lru_cache(maxsize=8)
def weight_transform(kernel: Triple) -> np.ndarray:
    """The matrix that the taps of a kernel are multiplied by, along all axes at once: (products, taps)."""
    along = [transforms().taps if taps == TAPS else np.ones((1, 1)) for taps in kernel]
    return reduce(np.kron, along).astype(np.float32)


class Tiling:
    """How a block is cut into tiles, and the shapes its transforms go through: (products, samples, d, h, w, channels).

    Of an axis with a dilation, every phase is tiled as if it were alone.
    """

    def __init__(self, geometry: ConvGeometry, block: BlockSize) -> None:
        self.axes = tiled_axes(geometry)
        self.phases = [dilation if axis in self.axes else 1 for axis, dilation in enumerate(geometry.dilation)]
        self._samples = block[0]
        self._counts = tiles_along(geometry, block)
        #: Whether tiles reach further than the block.
        self.is_cut = [count * step for count, step in zip(self._counts, tile_steps(geometry))] != list(block[1:])

    def _pixels(self, per_tile: int, beside: int) -> list[int]:
        return [
            (count * per_tile + beside) * phases if axis in self.axes else count
            for axis, (count, phases) in enumerate(zip(self._counts, self.phases))
        ]

    def transformed(self, channels: int, beside: int = INPUTS - OUTPUTS) -> list[Shape]:
        """The shapes from an image to what products take; `beside` are the elements of a tile that the next has too.

        Where rows are short there is one more before a transform: of tiles apart.
        """
        sizes, products = self._pixels(OUTPUTS, beside), 1
        shapes: list[Shape] = [(products, self._samples, *sizes, channels)]
        for axis in reversed(self.axes):
            sizes[axis] = self._counts[axis] * self.phases[axis]
            behind = prod(sizes[axis + 1 :]) * channels
            if behind < LONG_ROW:
                before = products * self._samples * prod(sizes[:axis])
                shapes.append((OUTPUTS + beside, before, self._counts[axis], self.phases[axis], behind))
            products *= INPUTS
            shapes.append((products, self._samples, *sizes, channels))
        return shapes

    def back(self, channels: int) -> list[Shape]:
        """The shapes from products to an image of the outputs."""
        return self.transformed(channels, 0)[::-1]

    def transform(self, matrix: np.ndarray, image: np.ndarray, memory: Iterator[np.ndarray]) -> np.ndarray:
        """The tiles of an image, times a matrix along every axis."""
        for axis in reversed(self.axes):
            windows, target = _windows(image, axis, self.phases[axis], matrix.shape[1]), next(memory)
            if target.ndim == windows.ndim:
                target[...] = np.moveaxis(windows, 3, 0)
                windows, target = _apart(target), next(memory)
            np.matmul(matrix, windows, out=_products(target, windows.shape))
            image = target
        return image

    def transform_back(self, matrix: np.ndarray, products: np.ndarray, memory: Iterator[np.ndarray]) -> np.ndarray:
        """An image of the outputs of all tiles: products times a matrix along every axis."""
        for axis in self.axes:
            image, tiles = next(memory), None
            if image.ndim < products.ndim:
                tiles, image = image, next(memory)
            windows = _windows(image, axis, self.phases[axis], len(matrix))
            place = windows if tiles is None else _apart(tiles)
            np.matmul(matrix, _products(products, place.shape), out=place)
            if tiles is not None:
                windows[...] = np.moveaxis(tiles, 0, 3)
            products = image
        return products


def _windows(image: np.ndarray, axis: int, phases: int, extent: int) -> np.ndarray:
    """The tiles along an axis, of so many elements: (all before the axis, tile, phase, element, all behind it)."""
    before, size, behind = prod(image.shape[: 2 + axis]), image.shape[2 + axis], prod(image.shape[3 + axis :])
    row = behind * image.itemsize
    step = OUTPUTS * phases
    return np.ndarray(
        (before, size // step, phases, extent, behind),
        image.dtype,
        image,
        0,
        (size * row, step * row, row, phases * row, image.itemsize),
    )


def _apart(tiles: np.ndarray) -> np.ndarray:
    """Tiles (element, all before the axis, tile, phase, all behind it) as windows whose rows are those of all tiles."""
    elements, before = tiles.shape[:2]
    return tiles.reshape(elements, before, 1, 1, prod(tiles.shape[2:])).transpose(1, 2, 3, 0, 4)


def _products(image: np.ndarray, windows: tuple[int, ...]) -> np.ndarray:
    """The products of one axis, the first of all: (all before the axis, tile, phase, product, all behind it)."""
    before, tiles, phases, _, behind = windows
    return image.reshape(INPUTS, before, tiles, phases, behind).transpose(1, 2, 3, 0, 4)


def tiled_axes(geometry: ConvGeometry) -> list[int]:
    return [axis for axis, taps in enumerate(geometry.kernel) if taps == TAPS]


def tiles_along(geometry: ConvGeometry, block: Sequence[int]) -> list[int]:
    """Tiles of one phase along each axis; pixels where the kernel has one tap."""
    steps = tile_steps(geometry)
    return [-(-extent // step) for extent, step in zip(block[1:], steps)]


def all_tiles(geometry: ConvGeometry) -> int:
    """Tiles of all samples and phases."""
    phases = (geometry.dilation[axis] for axis in tiled_axes(geometry))
    return geometry.batch * prod(tiles_along(geometry, (1, *geometry.out_size))) * prod(phases)


def tile_steps(geometry: ConvGeometry) -> list[int]:
    """Pixels along each axis that whole tiles of all phases have."""
    return [OUTPUTS * gap if taps == TAPS else 1 for taps, gap in zip(geometry.kernel, geometry.dilation)]


def products_of(geometry: ConvGeometry) -> int:
    """Products of a tile."""
    return int(INPUTS ** len(tiled_axes(geometry)))


def tile_bytes(geometry: ConvGeometry) -> int:
    """Bytes of a tile's products and of what they are products of."""
    return products_of(geometry) * (geometry.in_channels + geometry.out_channels) * FLOAT32.itemsize


def in_turn(scratch: Scratch, shapes: Sequence[Shape], names: Sequence[str]) -> Iterator[np.ndarray]:
    """Arrays of these shapes in two buffers in turn."""
    return (scratch.array(names[i % 2], shape) for i, shape in enumerate(shapes))


def in_turn_bytes(shapes: Sequence[Shape]) -> int:
    """Bytes of two buffers for arrays in turn."""
    return FLOAT32.itemsize * sum(max(map(prod, shapes[i::2]), default=0) for i in range(2))


def channels_first(image: np.ndarray) -> np.ndarray:
    """An image (1, samples, d, h, w, channels) as windows are read: (channels, samples, d, h, w)."""
    return image[0].transpose(4, 0, 1, 2, 3)


def tiles_block(geometry: ConvGeometry, most: int, share: int) -> BlockSize:
    """A block of at most so many tiles of each phase, about `share` of them: some samples, else a part of one."""
    axes = (geometry.batch, *tiles_along(geometry, (geometry.batch, *geometry.out_size)))
    parts = [1, 1, 1, 1]
    for axis, count in enumerate(axes):
        inner = max(1, prod(axes[axis + 1 :]))
        if inner <= min(most, share) or axis == 3:
            parts[axis:] = [even_part(count, min(most // inner, -(-share // inner))), *axes[axis + 1 :]]
            break
    extents = (geometry.batch, *geometry.out_size)
    steps = (1, *tile_steps(geometry))
    return tuple(max(1, min(part * step, extent)) for part, step, extent in zip(parts, steps, extents))  # type: ignore[return-value]


# --- the method -----------------------------------------------------------------------------------------------


#: Kept from call to call, at most what a block takes: the first touch of a page of memory takes longer than
#: all that is done with it here.
MEMORY = kept_scratch(FLOAT32)


class TiledLoop(PixelLoop):
    """A loop over blocks of whole tiles."""

    fresh_work = 0.0  # memory is kept

    @classmethod
    def loops(cls, problem: Any) -> tuple[Sequence[Self], Mapping[str, int]]:
        if refusal := winograd_refusal(problem):
            raise NotApplicable(refusal)
        return super().loops(problem)

    @classmethod
    def applies(cls, problem: Any) -> bool:
        return True

    @classmethod
    def block_bytes(cls, problem: Any) -> int:
        """Bytes of a block's tiles and their products."""
        return BLOCK

    @classmethod
    def fitted(cls, problem: Any, fixed: int, limit: int) -> Self:
        geometry, threads = problem.geometry, problem.host.threads
        phases = prod(geometry.dilation[axis] for axis in tiled_axes(geometry))
        tiles = geometry.batch * prod(tiles_along(geometry, (1, *geometry.out_size)))
        most = max(1, cls.block_bytes(problem) // (phases * tile_bytes(geometry) or 1))
        while True:
            blocks = threads * -(-tiles // (threads * most))  # each thread has as many
            loop = cls(problem, tiles_block(geometry, most, -(-tiles // max(1, blocks))))
            needed = fixed + threads * loop.workspace
            if needed <= limit:
                return loop
            if most == 1:
                raise NotApplicable(f"the smallest block needs {needed:,} bytes of workspace, the limit is {limit:,}")
            most //= 2

    @property
    def calls(self) -> float:
        return self.turns * cost.winograd_calls(self.geometry)

    @property
    def transforms_work(self) -> float:
        """What the transforms of all tiles of the inputs and of the outputs take."""
        geometry = self.geometry
        elements = (
            self.blocks * self.block_tiles * products_of(geometry) * (geometry.in_channels + geometry.out_channels)
        )
        work = cost.transformed(elements, geometry.in_channels + geometry.out_channels)
        read = self.blocks * prod(tile_shape(geometry, geometry.in_channels, self.block))
        return work + cost.transposed(read + geometry.batch * geometry.pixels * geometry.out_channels)

    @cached_property
    def block_tiles(self) -> int:
        """Tiles of a whole block, of all phases."""
        geometry = self.geometry
        return (
            self.block[0]
            * prod(tiles_along(geometry, self.block))
            * prod(geometry.dilation[axis] for axis in tiled_axes(geometry))
        )

    @cached_property
    def tiling(self) -> Tiling:
        """That of a whole block."""
        return Tiling(self.geometry, self.block)

    def tiling_of(self, block: Block) -> Tiling:
        return self.tiling if block.size == self.block else Tiling(self.geometry, block.size)

    def parts_by_columns(self, block: Block, room: int) -> Iterator[tuple[tuple[slice, ...], Block]]:
        """Parts of a block, and where they lie in it, whose columns have room in so many bytes."""
        problem, item = self.problem, self.x_dtype.itemsize
        size = largest_block(
            self.geometry, lambda part: columns_bytes(problem, part, item), room, block.area, 1, block.size[0]
        )
        return block.parts(size)


class Weights(NamedTuple):
    """The weight as it is, (groups, outputs per group, K_g), and transformed where that is kept.

    The latter with outputs last, (products, groups, channels, outputs): so BLAS reads the factor of a small product faster.
    """

    matrix: np.ndarray
    factors: np.ndarray | None


class Winograd(TiledLoop, ConvLoop):
    """Tiles of 4 outputs along every axis of three taps."""

    name = "Winograd"
    words = "F(4, 3) along axes of three taps: 6 products for 4 outputs, where columns take 12"
    in_place: ClassVar[bool] = False

    @classmethod
    def block_bytes(cls, problem: ConvProblem) -> int:
        return BLOCK if keeps_weight(problem.geometry) else LARGE_BLOCK

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        return factor_bytes(problem.geometry) if keeps_weight(problem.geometry) else 0

    @property
    def work(self) -> float:
        geometry, problem = self.geometry, self.problem
        sizes = self.block_tiles, geometry.group_channels, geometry.group_outputs
        products = self.blocks * products_of(geometry) * geometry.groups * cost.product(*sizes, problem)
        times = (not problem.weight_is_constant) if keeps_weight(geometry) else self.blocks
        weights = times * cost.transformed_weight(kernels_of(geometry), products_of(geometry), geometry.taps)
        return products + weights + self.transforms_work + self.store_work

    @property
    def sums_bytes(self) -> int:
        """Bytes of a temporary an activation takes, and of sums that are not those of the transforms."""
        return (1 + bool(self.problem.activation)) * prod(self.block) * sums_per_pixel(self.problem)

    @property
    def workspace(self) -> int:
        shapes = _shapes(self.tiling, self.geometry)
        gathered = prod(shapes[0]) * temporaries(self.geometry, self.problem.prologue)
        factors = 0 if keeps_weight(self.geometry) else part_bytes(self.geometry)
        return in_turn_bytes(shapes) + gathered * FLOAT32.itemsize + factors + self.sums_bytes

    @property
    def form(self) -> str:
        return f"Winograd {self.geometry.kernel} {self.weight_shape}, {keeps_weight(self.geometry)}"

    def arranged(self, weight: np.ndarray) -> Weights:  # type: ignore[override]
        geometry = self.geometry
        if not keeps_weight(self.geometry):
            return Weights(weight, None)
        by_tap = weight.reshape(*weight.shape[:2], geometry.group_channels, geometry.taps).transpose(3, 0, 2, 1)
        kernels = by_tap if geometry.groups > 1 else by_tap[:, 0]
        factors = np.empty((products_of(geometry), *kernels.shape[1:]), FLOAT32)

        def transform(part: slice) -> None:
            taps = np.ascontiguousarray(kernels[:, part]).reshape(geometry.taps, -1)
            _times_taps(weight_transform(geometry.kernel), taps, factors[:, part].reshape(len(factors), -1))

        threads, count = max(1, min(self.threads, factors.size // WEIGHT_PART)), kernels.shape[1]
        largest = products_of(geometry) * geometry.taps * min(WEIGHT_ROWS, kernels[0].size)
        holds_blas = cost.holds_blas(threads, self.problem.host, largest)
        in_threads(threads, transform, parts_of(count, even_part(count, -(-count // threads))), holds_blas)
        return Weights(weight, factors)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry, matrices = self.geometry, transforms_float32()
        weights: Any = run.weight
        tiling = self.tiling_of(block)
        memory = in_turn(run.images.scratch, _shapes(tiling, geometry), ("columns", "tile"))
        image = next(memory)
        run.images.read_tile(block, channels_first(image))
        tiles = by_group(tiling.transform(matrices.inputs, image, memory), geometry.groups)
        products = next(memory)
        self._multiply(tiles, weights, by_group(products, geometry.groups), run.images.scratch)
        image = tiling.transform_back(matrices.outputs, products, memory)
        if not np.isfinite(image.sum()):
            return self._sums_of_columns(run, weights.matrix, block)
        at: Any = (0, slice(None), *map(slice, block.size[1:]))
        return image[at].transpose(4, 0, 1, 2, 3).reshape(block.sums_shape)

    def _multiply(self, tiles: np.ndarray, weights: Weights, place: np.ndarray, scratch: Scratch) -> None:
        """Each product and group: tiles (tiles, channels) times the transformed weight (channels, outputs)."""
        geometry, matrix = self.geometry, weight_transform(self.geometry.kernel)
        channels = geometry.group_channels
        if weights.factors is not None:
            shape = len(matrix), geometry.groups, channels, geometry.group_outputs
            np.matmul(tiles, weights.factors.reshape(shape), out=place)
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

    def _sums_of_columns(self, run: ConvRun, matrix: np.ndarray, block: Block) -> np.ndarray:
        """The sums as they are defined, of as many pixels at a time as the transforms' memory has room for."""
        sums = np.empty(block.sums_shape, self.sums_dtype)
        for at, part in self.parts_by_columns(block, in_turn_bytes(_shapes(self.tiling, self.geometry))):
            sums[(slice(None), slice(None), *at)] = column_product(run, matrix, run.images.columns(part), part)
        return sums


def keeps_weight(geometry: ConvGeometry) -> bool:
    """Whether the transformed weight is made once for all blocks."""
    return factor_bytes(geometry) <= KEPT_WEIGHT


def factor_bytes(geometry: ConvGeometry) -> int:
    """Bytes of the transformed weight."""
    return products_of(geometry) * kernels_of(geometry) * FLOAT32.itemsize


def outputs_at_once(geometry: ConvGeometry) -> int:
    """Outputs whose kernels are transformed at a time, where the weight is not kept."""
    part = WEIGHT_CACHE // (geometry.group_channels * geometry.taps * FLOAT32.itemsize)
    return even_part(geometry.group_outputs, max(FEWEST_OUTPUTS, part))


def products_at_once(geometry: ConvGeometry) -> int:
    """Products whose factors are transformed at a time, where the weight is not kept."""
    part = WEIGHT_CACHE // (outputs_at_once(geometry) * geometry.group_channels * FLOAT32.itemsize)
    return even_part(products_of(geometry), max(1, part))


def part_bytes(geometry: ConvGeometry) -> int:
    """Bytes of the kernels that are transformed at a time, and of what becomes of them."""
    kernels = outputs_at_once(geometry) * geometry.group_channels
    return (geometry.taps + products_at_once(geometry)) * kernels * FLOAT32.itemsize


def kernels_of(geometry: ConvGeometry) -> int:
    """How many kernels there are: one for every output and channel of its group."""
    return geometry.out_channels * geometry.group_channels


def _times_taps(matrix: np.ndarray, taps: np.ndarray, target: np.ndarray) -> None:
    """The product of both, in parts of `WEIGHT_ROWS` kernels."""
    whole = taps.shape[1] - taps.shape[1] % WEIGHT_ROWS

    def pieces(rows: np.ndarray) -> np.ndarray:
        return rows[:, :whole].reshape(len(rows), -1, WEIGHT_ROWS).swapaxes(0, 1)

    np.matmul(matrix, pieces(taps), out=pieces(target))
    np.matmul(matrix, taps[:, whole:], out=target[:, whole:])


def by_group(image: np.ndarray, groups: int) -> np.ndarray:
    """The matrix of each product and group: (products, groups, tiles, channels of a group)."""
    products, *tiles, channels = image.shape
    return image.reshape(products, prod(tiles), groups, channels // groups).swapaxes(1, 2)


def _shapes(tiling: Tiling, geometry: ConvGeometry) -> list[Shape]:
    """All arrays of a block, from what it reads to its sums."""
    return tiling.transformed(geometry.in_channels) + tiling.back(geometry.out_channels)


WAYS = (Winograd,)
