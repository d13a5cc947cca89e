"""Tiles of Winograd's F(m, r): the transform matrices, and the products that transform an image to tiles and back.

::

    x      [samples, d, h, w, channels]    windows of 6 elements every m along an axis, each one product with B' [6, 6]
    V, M   [6 6 6, tiles, channels]        m = 7 - r along an axis of r taps
    y      [samples, outputs, d, h, w]     along d and h with A' [m, 6]; along w, a few tiles at a time (for 3 taps):

        (6 products x 4 tiles, outputs)^T  times  (6 x 4, 16 pixels)       A' for each tile, zeros elsewhere

The last product also makes pixels contiguous.  A copy would take several times as long as the products with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.cost import TILE, tile_outputs
from cupyconv.numpy.windows import BlockSize
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part

FLOAT32 = np.dtype(np.float32)
#: Names of a block's scratch buffers: two that alternate, and one for sums that are not in the result itself.
BUFFERS = "columns", "tile", "sums"
Shape = tuple[int, ...]
#: Pixels of a result's row that are computed at a time from contiguous channels: a vector.
SEGMENT = 16

# --- the transforms -------------------------------------------------------------------------------------------


class Transforms(NamedTuple):
    """The matrices along one axis."""

    inputs: np.ndarray  # B' [6, 6]
    taps: np.ndarray  # G [6, r]
    outputs: np.ndarray  # A' [m, 6]


#: All points except infinity.
_POINTS = np.array([0, sqrt(1 / 2), -sqrt(1 / 2), sqrt(2), -sqrt(2)])


@lru_cache(maxsize=8)
def transforms(taps: int) -> Transforms:
    """Return F(m, r) at the points 0, +-sqrt(1/2), +-sqrt(2) and infinity for r = `taps`, in float64.

    A row of B' has the coefficients of the product of (x - q) over all other points q.  Rows of G and of A have powers
    of their point.  A' is also divided by that product's value at the point.
    """
    inputs, values = np.zeros((TILE, TILE)), np.ones(TILE)
    for i, point in enumerate(_POINTS):
        others = np.delete(_POINTS, i)
        inputs[i, :-1], values[i] = np.poly(others)[::-1], np.prod(point - others)
    inputs[-1] = np.poly(_POINTS)[::-1]
    inputs = inputs.round(12)  # make zeros exact

    def powers(count: int) -> np.ndarray:
        return np.vstack([_POINTS[:, None] ** np.arange(count), np.eye(count)[-1]])

    weights, sums = powers(taps), powers(tile_outputs(taps))
    scales = abs(inputs).sum(1), abs(weights).sum(1)
    return Transforms(inputs / scales[0][:, None], weights / scales[1][:, None], sums.T * (prod(scales) / values))


@lru_cache(maxsize=8)
def transforms_float32(taps: int) -> Transforms:
    return Transforms(*(matrix.astype(np.float32) for matrix in transforms(taps)))


@lru_cache(maxsize=8)
def weight_transform(kernel: Triple) -> np.ndarray:
    """Return the matrix (products, taps) that transforms a kernel along all axes at once."""
    along = [transforms(taps).taps if taps > 1 else np.ones((1, 1)) for taps in kernel]
    return reduce(np.kron, along).astype(np.float32)


#: A matrix, the array that it is multiplied by, and the array that the product is written to.
Product = tuple[np.ndarray, np.ndarray, np.ndarray]
#: Channels (samples, d, h, part, channels, sum), the matrix (sum, pixels) that multiplies them, and the pixels along w.
Rows = tuple[np.ndarray, np.ndarray, slice]


class Products(NamedTuple):
    """Products to compute one after the other, and the array that the last one writes."""

    products: list[Product]
    image: np.ndarray

    def computed(self) -> np.ndarray:
        multiply_all(self.products)
        return self.image


def multiply_all(products: Sequence[Product]) -> None:
    for matrix, columns, place in products:
        np.matmul(matrix, columns, place)


class Tiling:
    """How a block is cut into tiles, and the shapes of its transforms: (products, samples, d, h, w, channels).

    Along a dilated axis, every phase is tiled by itself.
    """

    def __init__(self, geometry: ConvGeometry, block: BlockSize) -> None:
        self.axes = tiled_axes(geometry)
        self._taps = geometry.kernel
        self._outputs = [tile_outputs(taps) for taps in geometry.kernel]
        self.phases = [dilation if axis in self.axes else 1 for axis, dilation in enumerate(geometry.dilation)]
        self._samples = block[0]
        self._counts = tiles_along(geometry, block)
        #: Whether tiles reach beyond the block.
        self.is_cut = [count * step for count, step in zip(self._counts, tile_steps(geometry))] != list(block[1:])
        self._segment = tiles_of_segment(geometry)

    def transformed(self, channels: int, overlap: bool = True) -> list[Shape]:
        """Return the shapes from an image to its transformed tiles; with `overlap`, neighbours share elements."""
        sizes, products = (
            [
                (count * outputs + overlap * (taps - 1)) * phases
                for count, outputs, taps, phases in zip(self._counts, self._outputs, self._taps, self.phases)
            ],
            1,
        )
        shapes: list[Shape] = [(products, self._samples, *sizes, channels)]
        for axis in reversed(self.axes):
            sizes[axis] = self._counts[axis] * self.phases[axis]
            products *= TILE
            shapes.append((products, self._samples, *sizes, channels))
        return shapes

    def back(self, channels: int, is_into_rows: bool = False) -> list[Shape]:
        """Return the shapes from products to an image of outputs, or to the input of the product that makes rows."""
        shapes = self.transformed(channels, overlap=False)[::-1]
        return shapes[:-1] if is_into_rows and self._segment else shapes

    def transform(self, image: np.ndarray, memory: Iterator[np.ndarray], overlap: bool = True) -> Products:
        """Return the products that multiply an image's tiles by B' along every axis, or by A if they do not overlap."""
        products: list[Product] = []
        for axis in reversed(self.axes):
            matrices = transforms_float32(self._taps[axis])
            matrix = matrices.inputs if overlap else matrices.outputs.T
            windows, image = self._windows(image, axis, matrix.shape[1]), next(memory)
            products.append((matrix, windows, _products(image, windows.shape)))
        return Products(products, image)

    def _windows(self, image: np.ndarray, axis: int, extent: int) -> np.ndarray:
        """Return a view of tiles along an axis: (all before the axis, tile, phase, element, all behind it)."""
        before, size, behind = prod(image.shape[: 2 + axis]), image.shape[2 + axis], prod(image.shape[3 + axis :])
        tiles, phases, row = self._counts[axis], self.phases[axis], behind * image.itemsize
        strides = size * row, self._outputs[axis] * phases * row, row, phases * row, image.itemsize
        return np.ndarray((before, tiles, phases, extent, behind), image.dtype, image, 0, strides)

    def transform_back(
        self, image: np.ndarray, memory: Iterator[np.ndarray], axes: Sequence[int] | None = None
    ) -> Products:
        """Return the products that transform tiles by A' to an image of outputs, along every axis or only `axes`."""
        products = []
        for axis in self.axes if axes is None else axes:
            matrix, tiles, image = transforms_float32(self._taps[axis]).outputs, image, next(memory)
            windows = self._windows(image, axis, len(matrix))
            products.append((matrix, _products(tiles, windows.shape), windows))
        return Products(products, image)

    def into_rows(
        self, image: np.ndarray, memory: Iterator[np.ndarray], pixels: Sequence[int]
    ) -> tuple[list[Product], list[Rows]]:
        """Return the products that transform tiles back to rows of a result with contiguous pixels along w.

        The result is (samples, outputs, d, h, w).  The last product multiplies the channels of a few tiles by a wide
        matrix, whose columns are pixels.  This takes less time than a copy.
        """
        depth, height, width = pixels
        rows: list[Rows] = []
        if not self._segment:
            products, image = self.transform_back(image, memory)
            image = image[0, :, :depth, :height]
            for part, count in _cut(width, SEGMENT):
                size = (part.stop - part.start) // count
                parts = image[..., part, :].reshape(*image.shape[:3], count, size, -1, copy=False)
                rows.append((parts.swapaxes(4, 5), _identity(size), part))
            return products, rows
        *outer, axis = self.axes[:-1]
        products, image = self.transform_back(image, memory, outer)
        place = next(memory).reshape(-1)
        matrix, phases, own = transforms_float32(self._taps[axis]).outputs, self.phases[axis], self.phases[2]
        outputs, of_row = self._outputs[axis], self._outputs[2]
        (samples, *sizes), channels = image.shape[1:5], image.shape[5]
        before, behind = samples * prod(sizes[:axis]), prod(sizes[axis + 1 : 2])
        by_axis = image.reshape(TILE, TILE, before, -1, phases, behind, sizes[2], channels)
        count_along = by_axis.shape[3]
        sizes[axis] = count_along * outputs * phases
        step = of_row * own
        for part, count in _cut(width, self._segment * step):
            tiles = slice(part.start // of_row, -(-part.stop // step) * own)
            n = (tiles.stop - tiles.start) // count
            some = by_axis[..., tiles, :].reshape(*by_axis.shape[:6], count, n * channels, copy=False)
            shape = before, count_along, outputs, phases, behind, count, TILE, n * channels
            made, place = place[: prod(shape)].reshape(shape), place[prod(shape) :]
            products.append((matrix, some.transpose(2, 3, 4, 5, 6, 1, 0, 7), made.transpose(0, 1, 3, 4, 5, 6, 2, 7)))
            made = made.reshape(samples, *sizes[:2], count, TILE * n, channels)[:, :depth, :height]
            wide = _wide(self._taps[2], n // own, own)[:, : (part.stop - part.start) // count]
            rows.append((made.swapaxes(4, 5), wide, part))
        return products, rows


def _cut(extent: int, part: int) -> Iterator[tuple[slice, int]]:
    """Cut an axis into whole parts and the rest; yield a slice for each, and the number of parts in it."""
    whole = extent // part * part
    if whole:
        yield slice(0, whole), extent // part
    if whole < extent:
        yield slice(whole, extent), 1


@lru_cache(maxsize=32)
def _identity(size: int) -> np.ndarray:
    return np.eye(size, dtype=FLOAT32)


@lru_cache(maxsize=32)
def _wide(taps: int, tiles: int, phases: int) -> np.ndarray:
    """Return the matrix A' for several tiles: from (product, tile, phase) to (tile, output, phase)."""
    wide = np.einsum("op,tu,fg->ptfuog", transforms(taps).outputs, np.eye(tiles), np.eye(phases))
    return np.ascontiguousarray(wide.reshape(TILE * tiles * phases, -1), FLOAT32)


def _products(image: np.ndarray, windows: tuple[int, ...]) -> np.ndarray:
    """Return a view of products that are the first axis: (all before the axis, tile, phase, product, all behind it)."""
    before, tiles, phases, _, behind = windows
    return image.reshape(TILE, before, tiles, phases, behind).transpose(1, 2, 3, 0, 4)


def tiled_axes(geometry: ConvGeometry) -> list[int]:
    return [axis for axis, taps in enumerate(geometry.kernel) if taps > 1]


def tiles_along(geometry: ConvGeometry, block: Sequence[int]) -> list[int]:
    """Return the tiles of one phase along each axis; for an axis of one tap, the pixels."""
    steps = tile_steps(geometry)
    return [-(-extent // step) for extent, step in zip(block[1:], steps)]


def tile_steps(geometry: ConvGeometry) -> list[int]:
    """Return the pixels along each axis of one tile of every phase."""
    return [tile_outputs(taps) * (gap if taps > 1 else 1) for taps, gap in zip(geometry.kernel, geometry.dilation)]


def tiles_of_segment(geometry: ConvGeometry) -> int:
    """Return the neighbouring tiles that are transformed to rows of a result at a time; 0 if the rows are copied."""
    axes = tiled_axes(geometry)
    return SEGMENT // tile_steps(geometry)[2] if len(axes) > 1 and 2 in axes else 0


def products_of(geometry: ConvGeometry) -> int:
    """Return the number of products per tile."""
    return int(TILE ** len(tiled_axes(geometry)))


def tile_bytes(geometry: ConvGeometry) -> int:
    """Return the bytes of a transformed tile and of its products."""
    return products_of(geometry) * (geometry.in_channels + geometry.out_channels) * FLOAT32.itemsize


def in_turn(
    scratch: Scratch, shapes: Sequence[Shape], whole: Sequence[Shape], names: Sequence[str] = BUFFERS[:2]
) -> Iterator[np.ndarray]:
    """Return arrays of these shapes, alternately in two buffers that are large enough for a whole block."""
    buffers = [scratch.array(name, (max(map(prod, whole[i::2]), default=0),)) for i, name in enumerate(names)]
    return (buffers[i % 2][: prod(shape)].reshape(shape) for i, shape in enumerate(shapes))


def in_turn_bytes(shapes: Sequence[Shape]) -> int:
    """Return the bytes of the two buffers of `in_turn`."""
    return FLOAT32.itemsize * sum(max(map(prod, shapes[i::2]), default=0) for i in range(2))


def in_turn_room(shapes: Sequence[Shape]) -> int:
    """Return the bytes of the smaller of these buffers."""
    return FLOAT32.itemsize * min(max(map(prod, shapes[i::2])) for i in range(2))


def channels_first(image: np.ndarray) -> np.ndarray:
    """Return a view (channels, samples, d, h, w) of an image (1, samples, d, h, w, channels)."""
    return image[0].transpose(4, 0, 1, 2, 3)


def tiles_block(geometry: ConvGeometry, most: int, share: int) -> BlockSize:
    """Return a block of about `share`, at most `most`, tiles per phase: some samples, or a part of one."""
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
