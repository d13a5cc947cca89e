"""Weight gradient by the fast Fourier transform: the correlation of x with the incoming gradient.

::

    x of a block        |x x x x x x x x x x x x|      what all windows of the block read, a tile (`spectra`)
    grad, stride 2      |g . g . g . g . . . . .|      one stride apart, with zeros between
    weight gradient     |d . d . d|. . . . . . .       from conj(rfft(grad)) rfft(x), summed over samples: the elements
                                                       at the taps, one dilation apart

The contribution of every block is transformed back and added to the sums, a few outputs at a time.  A kernel nearly as
large as the image is cut too: a block's contribution to each part has a tile of its own, shorter than the image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.block_loops import largest_block
from cupyconv.numpy.convolution import box_bytes, temporaries
from cupyconv.numpy.spectra import (
    BLOCK,
    MAX_PRODUCTS,
    Tile,
    block_extents,
    every,
    has_large_spectra,
    part_extents,
    tiles_read,
    with_lines,
)
from cupyconv.numpy.weight_sums import Pairs, WeightGradientLoop, WeightRun
from cupyconv.numpy.windows import INDEX_ARRAYS, INDEX_BYTES, Block, Images, has_gathered, parts_of, tile_size
from cupyconv.problem.geometry import Triple, even_part, ranges_of
from cupyconv.problem.problems import NotApplicable, WeightGradientProblem
from cupyconv.problem.transforms import ERRORS, SMALLEST, transformed_axes


@lru_cache(maxsize=64)
def best_loop(problem: WeightGradientProblem, fixed: int, limit: int) -> GradientFft | int:
    """Return the loop with the least estimated time; if none fits the limit, the bytes that the smallest needs."""
    geometry, threads, least = problem.geometry, problem.host.threads, 0
    best: GradientFft | None = None
    for extents, taps in chain(
        ((extents, geometry.kernel) for extents in block_extents(geometry)), part_extents(geometry)
    ):
        if best and best.taps == geometry.kernel != taps and not has_large_spectra(problem):
            break
        line = GradientFft(problem, (1, *extents), taps=taps)
        room = (limit - fixed) // threads
        needed = line.workspace + line.index_bytes
        if needed > room:
            least = min(least or needed, needed)
            continue
        lines = min(min(room - line.index_bytes, BLOCK) // line.workspace, -(-line.blocks // threads))
        loop = replace(line, block=with_lines(geometry, line.block, lines))
        if loop.workspace + loop.index_bytes > room:  # several lines need memory to add their spectra
            loop = line
        if best is None or loop.seconds < best.seconds:
            best = loop
    return best or fixed + threads * least


@dataclass(frozen=True)
class GradientFft(WeightGradientLoop):
    """Multiply the spectra of x and of the gradient, block by block."""

    name: ClassVar[str] = "FFT"
    description: ClassVar[str] = f"products of spectra; {ERRORS}"
    reads_boxes: ClassVar[bool] = True
    products_are_summed: ClassVar[bool] = False  # products of taps are strided

    problem: WeightGradientProblem
    #: Taps of a part of the kernel, whose sums are computed together.
    taps: Triple = (1, 1, 1)

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return True

    @classmethod
    def fitted(cls, problem: Any, fixed: int, limit: int) -> Self:
        if refusal := problem.fft_refusal:
            raise NotApplicable(refusal)
        if 0 in (problem.geometry.batch, *problem.geometry.out_size):
            return cls(problem, (1, 1, 1, 1))
        loop: Any = best_loop(problem, fixed, limit)
        if isinstance(loop, int):
            raise problem.does_not_fit(SMALLEST, loop, limit)
        return loop

    # Memory and cost of a block.

    @cached_property
    def is_real(self) -> bool:
        """Whether transforms are of real numbers; if one factor alone is complex, its parts are transformed."""
        return self.x_dtype.kind == "f"

    @cached_property
    def tile(self) -> Tile:
        """The tile of a whole block."""
        part = self.geometry.with_taps(tuple(map(range, self.taps)))
        return Tile.of(part, self.block[1:], self.is_real, transformed_axes(self.geometry))

    @cached_property
    def tiles(self) -> int:
        """Number of tiles of all blocks under all parts."""
        return tiles_read(self.geometry, self.block, self.taps)

    @property
    def index_bytes(self) -> int:
        return INDEX_ARRAYS * INDEX_BYTES * max(self.tile.size) * has_gathered(self.geometry)

    @classmethod
    def product_bytes(cls, problem: WeightGradientProblem) -> int:
        """Return the bytes of one tap's product; products of several taps, to recompute a block, fit its memory."""
        return super().product_bytes(problem) // problem.geometry.taps

    @cached_property
    def spectrum_dtype(self) -> np.dtype:
        return np.result_type(self.x_dtype, np.complex64)

    @cached_property
    def several(self) -> int:
        """Number of outputs of a group that are transformed back together."""
        return even_part(self.geometry.group_outputs, BLOCK // (self._output_bytes or 1))

    @property
    def _output_bytes(self) -> int:
        """Bytes per output of each group: its gradients and their spectra, products, and their inverse transforms."""
        geometry, tile = self.geometry, self.tile
        spectrum, image = prod(tile.frequencies) * self.spectrum_dtype.itemsize, tile.elements * self.x_dtype.itemsize
        grad = geometry.groups * self.block[0] * (image + 2 * spectrum)
        added = any(extent > 1 for axis, extent in enumerate(self.block[1:]) if axis not in tile.along)
        return grad + geometry.in_channels * ((2 + added) * spectrum + image)

    @cached_property
    def columns_bytes(self) -> int:
        geometry, tile = self.geometry, self.tile
        spectrum = prod(tile.frequencies) * self.spectrum_dtype.itemsize
        read = tile.elements * self.x_dtype.itemsize * (1 + temporaries(geometry, self.problem.prologue))
        return self.block[0] * geometry.in_channels * (read + spectrum) + self.several * self._output_bytes

    @property
    def products_work(self) -> float:
        geometry, tile, samples = self.geometry, self.tile, self.tiles * self.block[0]
        pairs = geometry.group_channels * geometry.out_channels
        transforms = samples * (geometry.in_channels + geometry.out_channels) + self.tiles * pairs
        products = cost.complex_products(samples * pairs * prod(tile.frequencies), self.problem)
        return transforms * tile.seconds(self.problem, geometry.in_channels) + products

    @property
    def calls(self) -> float:
        return self.tiles * cost.FFT_CALLS * -(-self.geometry.group_outputs // self.several)

    @cached_property
    def computes_again(self) -> bool:
        """Whether a block that is not finite is recomputed from its windows."""
        geometry = self.geometry
        return prod(self.block) * geometry.out_channels * geometry.group_channels * prod(self.taps) <= MAX_PRODUCTS

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.tile.size)))
        again = "recomputed from their windows" if self.computes_again else "not recomputed and fill their whole tile"
        parts = ""
        if self.taps != self.geometry.kernel:
            parts = f"; kernel in parts of {' x '.join(map(str, self.geometry.spatial(self.taps)))} taps"
        return f"{super().__str__()}, tiles of {shown}; non-finite results are {again}{parts}"

    # Computation.

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        kernels = [
            (grad, sums.reshape(*sums.shape[:2], geometry.group_channels, *geometry.kernel, copy=False))
            for grad, sums in pairs
        ]
        for part in product(*map(ranges_of, geometry.kernel, self.taps)):
            own: Any = (..., *(slice(axis.start, axis.stop) for axis in part))
            self._add_part(run, block.with_taps(part), images, [(grad, sums[own]) for grad, sums in kernels], is_first)

    def _add_part(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        """Add a block's contribution to the sums (groups, rows, channels, *taps) of a part of the kernel."""
        geometry = block.geometry
        if not block.tile(geometry.in_channels).not_zeros:
            for _, sums in pairs if is_first else ():
                sums.fill(0)
            return
        size = self.tile.shape(tile_size(geometry, block.size[1:]))
        image = images.scratch.array("tile", (geometry.in_channels, block.size[0], *size))
        images.read_tile(block, image)
        x = self.tile.spectrum(image, 2)
        x = x.reshape(geometry.groups, 1, geometry.group_channels, *x.shape[1:])
        for grad, sums in pairs:
            for outputs in parts_of(sums.shape[1], self.several):
                own, target = grad[:, outputs], sums[:, outputs]
                values = self._product(images, block, x, own)
                if self.computes_again and not np.isfinite(values.sum()):
                    values = self._of_columns(run, block, images, own, target)
                if is_first:
                    target[...] = values
                else:
                    target += values
                del values  # free them before the next ones

    def _product(self, images: Images, block: Block, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
        """Return the weight gradients (groups, outputs, channels, *taps) of some outputs."""
        geometry, axes = block.geometry, (*grad.shape[:2], block.size[0])
        apart = images.scratch.array("grad", (*axes, *self.tile.shape(tile_size(geometry, block.size[1:]))))
        apart.fill(0)
        place: Any = (..., *every(block.size[1:], geometry.stride))
        # Conjugate both the gradient and its spectrum, so that a complex gradient itself is not conjugated.
        np.conjugate(grad, out=apart[place])
        spectrum = self.tile.spectrum(apart, 3)
        factor = np.conjugate(spectrum, out=spectrum)[:, :, None]
        shape = (*grad.shape[:2], geometry.group_channels, *factor.shape[4:])
        products = images.scratch.array("products", shape, self.spectrum_dtype)
        more = images.scratch.array("product", shape, self.spectrum_dtype)
        for sample in range(block.size[0]):
            target = more if sample else products
            np.multiply(x[:, :, :, sample], factor[:, :, :, sample], out=target)
            if sample:
                products += more
        lines = (3 + axis for axis in range(3) if axis not in self.tile.along)
        if beside := tuple(axis for axis in lines if products.shape[axis] > 1):
            products = products.sum(beside, keepdims=True)
        return self.tile.image(products, 3, every(geometry.kernel, geometry.dilation))

    def _of_columns(
        self, run: WeightRun, block: Block, images: Images, grad: np.ndarray, target: np.ndarray
    ) -> np.ndarray:
        """Compute the gradients by definition, for as many pixels and taps at a time as fit the block's memory."""
        problem, geometry, item, room = self.problem, block.geometry, self.x_dtype.itemsize, self.columns_bytes
        most = geometry.taps
        while most > 1 and box_bytes(problem, (1, 1, 1, 1), item, most) > room:
            most = -(-most // 2)
        size = largest_block(
            geometry, lambda part: box_bytes(problem, part, item, most), room, block.area, 1, block.size[0]
        )
        sums = np.zeros((*target.shape[:3], geometry.taps), target.dtype)
        for at, part in block.parts(size):
            own: Any = (slice(None), slice(None), *at)
            matrix = grad[own].reshape(*grad.shape[:2], part.area)
            for taps, columns in images.some_taps(part, most):
                run.add_product(matrix, columns.reshape(geometry.groups, -1, part.area), sums[..., taps], False)
        return sums.reshape(target.shape)


IMPLEMENTATIONS = (GradientFft,)
