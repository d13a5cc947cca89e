"""Convolution along rows as products with a block-Toeplitz matrix: windows of neighbouring outputs, read in place.

In a line of pixels with their channels last, the window of m neighbouring outputs is one run of memory, and the next
window begins m pixels later.  So no columns are written, and a product has m times as many outputs::

    line          p0 p1 p2 p3 p4 p5 p6 p7 ...    pixels with all their channels, one row of pixels after the other
    window 0      |-- m + k - 1 --|
    window 1            |-- m + k - 1 --|        windows that overlap are rows of different matrices

                                    | w0    |    m = 2 outputs, k = 3 taps: each w is the matrix
    outputs (n, m x O)  =  windows  | w1 w0 |    (channels, outputs) of a tap
                                    | w2 w1 |
                                    |    w2 |

This is for kernels with taps along the width only: each tap along the height would need another copy of the line.

The zeros are multiplied too.  Sums that are not finite are recomputed without them (see `group_products`).
"""

from __future__ import annotations

from functools import cached_property, partial
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.convolution import ConvRun, temporaries
from cupyconv.numpy.group_products import GroupProducts, sum_is_finite
from cupyconv.numpy.toeplitz import reach
from cupyconv.numpy.windows import Block, BlockSize, Images, copy, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem

#: Numbers of neighbouring outputs per window to choose from, and the windows of a product for which they are chosen.
LENGTHS, WINDOWS = (1, 2, 4, 8), 256
#: Bytes of a block's line and products, which stay in cache.
LINE_BLOCK = 512 << 10
#: Seconds to copy an element to the line; to copy one from the products, and in addition for each float32 element that
#: lies between those of neighbouring pixels, up to `FAR`; to begin a window; and to arrange an element of the matrix.
READ, WRITE, WRITE_APART, FAR, BEGIN, ARRANGE = 600e-12, 400e-12, 5e-12, 80, 4e-9, 700e-12
#: Names of the scratch buffers.  The last one is used only for several inputs.
BUFFERS = "line", "products", "tile"


class Steps(NamedTuple):
    """Views of the scratch memory for blocks of one size."""

    image: np.ndarray  # the pixels of the line as a tile (channels, samples, d, h, w)
    tile: np.ndarray | None  # several inputs, concatenated; they are then moved to the line together
    beyond: tuple[np.ndarray, np.ndarray]  # elements of the line between rows, and at its end
    windows: np.ndarray  # (matrices, windows, reduction)
    products: np.ndarray  # (matrices, windows, neighbours x outputs)
    sums: np.ndarray  # the products as (1, outputs, samples, d, h, w)


class BlockToeplitz(GroupProducts):
    """Compute neighbouring outputs of a row together, with all channels at a time."""

    name = "block Toeplitz"
    description = "products of a block-Toeplitz matrix, several outputs of a row with all channels at a time"
    turn_calls = 10
    thread_bytes = LINE_BLOCK
    together = 1

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        is_along_rows = geometry.kernel[:2] == geometry.stride[:2] == (1, 1) and geometry.kernel[2] > 1
        return is_along_rows and geometry.groups == 1 and problem.is_one_kind

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = geometry.in_channels * geometry.stride[2] + geometry.out_channels
        return LINE_BLOCK // (per_pixel * ITEMSIZE[accumulator(problem.x_dtype)] or 1), geometry.batch

    @classmethod
    def workers(cls, problem: ConvProblem) -> int:
        return problem.host.threads

    # Sizes

    @cached_property
    def outputs(self) -> int:
        """Neighbouring outputs per window: those with the least estimated time per output."""
        lengths = [length for length in LENGTHS if length <= max(1, self.geometry.out_size[2])]
        return min(lengths, key=lambda length: self._product(WINDOWS, length) / length)

    def _product(self, windows: int, outputs: int) -> float:
        """Estimated time of a product of windows of this number of neighbouring outputs."""
        geometry = self.geometry
        reduction = reach(geometry, 2, outputs) * geometry.in_channels
        product = cost.product(windows, reduction, outputs * geometry.out_channels, self.problem)
        return product + windows * BEGIN

    @cached_property
    def _reach(self) -> int:
        """Pixels of a window."""
        return reach(self.geometry, 2, self.outputs)

    @cached_property
    def _move(self) -> int:
        """Pixels of the line from one window to the next."""
        return self.outputs * self.geometry.stride[2]

    def _pitch(self, width: int) -> int:
        """Pixels of the line from one row to the next: no window has outputs of two rows."""
        return ceil(reach(self.geometry, 2, width) / self._move) * self._move

    def _windows(self, block: BlockSize) -> tuple[int, int]:
        """Return the number of matrices with windows that do not overlap, and of their windows."""
        matrices = ceil(self._reach / self._move)
        return matrices, ceil(prod(block[:3]) * self._pitch(block[3]) / (self._move * matrices))

    def _line(self, block: BlockSize, windows: tuple[int, int]) -> int:
        """Pixels of the line: all rows, and the last window."""
        rows, last = prod(block[:3]) * self._pitch(block[3]), (prod(windows) - 1) * self._move
        return max(rows, last + self._reach)

    @property
    def largest_product(self) -> int:
        geometry, windows = self.geometry, self._windows(self.block)[1]
        return windows * self._reach * geometry.in_channels * self.outputs * geometry.out_channels

    # Memory and time

    @cached_property
    def part(self) -> int:
        return 1

    @cached_property
    def has_tile(self) -> bool:
        return len(self.problem.xs) > 1

    @property
    def _tile_elements(self) -> int:
        return prod(tile_shape(self.geometry, self.geometry.in_channels, self.block))

    @cached_property
    def _elements(self) -> tuple[int, int]:
        """Elements of the line, and of the products."""
        geometry, windows = self.geometry, self._windows(self.block)
        products = prod(windows) * self.outputs * geometry.out_channels
        return self._line(self.block, windows) * geometry.in_channels, products

    @property
    def extra_bytes(self) -> int:
        return super().workspace - self._elements[0] * self.x_dtype.itemsize

    @property
    def _group_bytes(self) -> int:
        """Bytes of the line, of the products, of the tile, and of temporary copies."""
        tiles = self.has_tile + temporaries(self.geometry, self.problem.prologue)
        return (sum(self._elements) + tiles * self._tile_elements) * self.x_dtype.itemsize

    @cached_property
    def _is_last(self) -> bool:
        """Whether the result has channels last, like the products."""
        return not self.in_place and self.problem.out.stride_c == 1

    @property
    def sums_bytes(self) -> int:
        return super().sums_bytes // (1 + self._is_last)

    @property
    def work(self) -> float:  # channels are last in any case
        return self.products_work + self.tile_work + self.store_work

    @property
    def products_work(self) -> float:
        (matrices, windows), (read, written) = self._windows(self.block), self._elements
        apart = min(self.geometry.out_channels * cost.width(self.problem.dtype), FAR)
        moved = read * READ + (written * (WRITE + apart * WRITE_APART) if not self._is_last else 0)
        work = self.blocks * (matrices * self._product(windows, self.outputs) + moved)
        if not self.problem.weight_is_constant:
            work += ARRANGE * self.outputs * prod(self.problem.weight.shape)
        return work

    @property
    def tile_work(self) -> float:
        if not self.has_tile:
            return 0.0
        return cost.copied(self.blocks * self._tile_elements, self.block[3], self.problem.x_dtype)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry, loop = problem.geometry, cls(problem, (1, 1, 1, 1))
        elements = loop._reach * geometry.in_channels * loop.outputs * geometry.out_channels
        return elements * ITEMSIZE[accumulator(problem.weight_dtype)]

    # Sums

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the matrix (1, pixels of a window, channels, neighbouring outputs, outputs)."""
        geometry = self.geometry
        kernels = weight.reshape(geometry.out_channels, geometry.in_channels, -1).transpose(2, 1, 0)
        matrix = np.zeros((1, self._reach, *kernels.shape[1:2], self.outputs, geometry.out_channels), weight.dtype)
        for neighbour in range(self.outputs):
            first = neighbour * geometry.stride[2]
            matrix[0, first : first + geometry.span[2] : geometry.dilation[2], :, neighbour] = kernels
        return matrix

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        kernels = weight[:, : self.geometry.span[2] : self.geometry.dilation[2], :, 0]
        return kernels.transpose(0, 3, 2, 1)[:, :, :, None, None]

    def place_of_sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """Return where a block's sums are stored: for a result with channels last, where the products are written."""
        return self._views(run.images.scratch, block).sums if self._is_last else super().place_of_sums(run, block)

    def _views(self, scratch: Scratch, block: Block) -> Steps:
        return scratch.views(self, block.size, BUFFERS, partial(self._steps, scratch, block.size))

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        steps = self._views(images.scratch, block)
        for elements in steps.beyond:
            elements.fill(0)
        images.read_tile(block, steps.image if steps.tile is None else steps.tile)
        if steps.tile is not None:
            copy(steps.image, steps.tile)
        np.matmul(steps.windows, weight.reshape(*steps.windows.shape[2:], -1), out=steps.products)
        if not self._is_last:
            sums[...] = steps.sums
        return sum_is_finite(steps.products[:, :, 0])  # one output of each window

    def _steps(self, scratch: Scratch, block: BlockSize) -> Steps:
        geometry, pitch, reached = self.geometry, self._pitch(block[3]), reach(self.geometry, 2, block[3])
        channels, outputs, (matrices, windows) = geometry.in_channels, geometry.out_channels, self._windows(block)
        line = scratch.array("line", (self._line(block, (matrices, windows)), channels))
        rows = prod(block[:3]) * pitch
        by_row = line[:rows].reshape(*block[:3], pitch, channels)
        move = self._move * line.strides[0]
        products = scratch.array("products", (windows, matrices, self.outputs * outputs), self.sums_dtype)
        by_pixel = products.reshape(-1, outputs)[: rows // geometry.stride[2]].reshape(1, *block[:3], -1, outputs)
        image, tile = by_row[..., :reached, :].transpose(4, 0, 1, 2, 3), None
        if self.has_tile:
            tile = scratch.array("tile", image.shape)
        return Steps(
            image,
            tile,
            (by_row[..., reached:, :], line[rows:]),
            np.ndarray(
                (matrices, windows, self._reach * channels), line.dtype, line, 0, (move, matrices * move, line.itemsize)
            ),
            products.swapaxes(0, 1),
            by_pixel[..., : block[3], :].transpose(0, 5, 1, 2, 3, 4),
        )
