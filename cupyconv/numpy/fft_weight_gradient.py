"""The gradient of a weight by the fast Fourier transform: the correlation of x with the gradient that arrives.

::

    x of a block        |x x x x x x x x x x x x|      what all windows of the block read, a tile (`spectra`)
    grad, stride 2      |g . g . g . g . . . . .|      a stride apart, between zeros
    weight gradient     |d . d . d|. . . . . . .       of conj(rfft(grad)) rfft(x), summed over samples: what lies under
                                                       the taps, a dilation apart

Every block's part is brought back and added to the sums, a few outputs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.block_loops import largest_block
from cupyconv.numpy.convolution import columns_bytes, temporaries
from cupyconv.numpy.spectra import BLOCK, MOST_PRODUCTS, Tile, block_extents, every, with_lines
from cupyconv.numpy.weight_sums import Pairs, WeightGradientLoop, WeightRun
from cupyconv.numpy.windows import Block, Images, parts_of, tile_size
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import NotApplicable, WeightGradientProblem
from cupyconv.problem.transforms import ERRORS, no_room


@lru_cache(maxsize=64)
def best_loop(problem: WeightGradientProblem, fixed: int, limit: int) -> GradientFft | None:
    """The loop that is estimated to take the least; None where there is no room."""
    threads, best = problem.host.threads, None
    for extents in block_extents(problem.geometry):
        line = GradientFft(problem, (1, *extents))
        room = (limit - fixed) // threads
        if line.workspace + line.index_bytes > room:
            continue
        lines = min(min(room - line.index_bytes, BLOCK) // line.workspace, -(-line.blocks // threads))
        loop = replace(line, block=with_lines(problem.geometry, line.block, lines))
        if loop.workspace + loop.index_bytes > room:  # several lines have spectra that are added
            loop = line
        if best is None or loop.seconds < best.seconds:
            best = loop
    return best


@dataclass(frozen=True)
class GradientFft(WeightGradientLoop):
    """Products of the spectra of x and of the gradient, block by block."""

    name: ClassVar[str] = "FFT"
    words: ClassVar[str] = f"products of spectra; {ERRORS}"
    reads_boxes: ClassVar[bool] = True

    problem: WeightGradientProblem

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
        if loop is None:
            raise no_room(problem.limit)
        return loop

    # What a block takes.

    @cached_property
    def is_real(self) -> bool:
        """Whether transforms are of real numbers: of a factor that alone is complex its parts are."""
        return self.x_dtype.kind == "f"

    @cached_property
    def tile(self) -> Tile:
        """That of a whole block."""
        return Tile.of(self.geometry, self.block[1:], self.is_real)

    @cached_property
    def spectrum_dtype(self) -> np.dtype:
        return np.result_type(self.x_dtype, np.complex64)

    @cached_property
    def several(self) -> int:
        """Outputs of a group that are brought back together."""
        return even_part(self.geometry.group_outputs, BLOCK // (self._output_bytes or 1))

    @property
    def _output_bytes(self) -> int:
        """Bytes of an output of each group: its gradients and their spectra, the products', and what comes back."""
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
        geometry, tile, samples = self.geometry, self.tile, self.blocks * self.block[0]
        pairs = geometry.group_channels * geometry.out_channels
        transforms = samples * (geometry.in_channels + geometry.out_channels) + self.blocks * pairs
        products = cost.complex_products(samples * pairs * prod(tile.frequencies), self.problem)
        return transforms * tile.seconds(self.problem, geometry.in_channels) + products

    @property
    def calls(self) -> float:
        return self.turns * cost.FFT_CALLS * -(-self.geometry.group_outputs // self.several)

    @cached_property
    def computes_again(self) -> bool:
        """Whether a block that is not finite is computed from its windows."""
        return prod(self.block) * self.geometry.out_channels * self.geometry.reduction <= MOST_PRODUCTS

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.tile.size)))
        again = "computed again from its windows" if self.computes_again else "left so, all of it"
        return f"{super().__str__()}, tiles of {shown}; one that is not finite is {again}"

    # What it does.

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        size = self.tile.shape(tile_size(geometry, block.size[1:]))
        image = images.scratch.array("tile", (geometry.in_channels, block.size[0], *size))
        images.read_tile(block, image)
        x = self.tile.spectrum(image, 2)
        x = x.reshape(geometry.groups, 1, geometry.group_channels, *x.shape[1:])
        for grad, sums in pairs:
            for outputs in parts_of(sums.shape[1], self.several):
                own, target = grad[:, outputs], sums[:, outputs]
                product = self._product(images, block, x, own)
                if self.computes_again and not np.isfinite(product.sum()):
                    self._add_columns(run, block, images, own, target, is_first)
                elif is_first:
                    target[...] = product.reshape(target.shape)
                else:
                    target += product.reshape(target.shape)
                del product  # before memory for the next one is had

    def _product(self, images: Images, block: Block, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
        """The gradients (groups, outputs, channels, *taps) of some outputs."""
        geometry, axes = self.geometry, (*grad.shape[:2], block.size[0])
        apart = images.scratch.array("grad", (*axes, *self.tile.shape(tile_size(geometry, block.size[1:]))))
        apart.fill(0)
        place: Any = (..., *every(block.size[1:], geometry.stride))
        # The conjugate's spectrum, conjugated.
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

    def _add_columns(
        self, run: WeightRun, block: Block, images: Images, grad: np.ndarray, sums: np.ndarray, is_first: bool
    ) -> None:
        """The same as it is defined, of as many pixels at a time as the block's memory has room for."""
        problem, item, room = self.problem, self.x_dtype.itemsize, self.columns_bytes
        size = largest_block(
            self.geometry, lambda part: columns_bytes(problem, part, item), room, block.area, 1, block.size[0]
        )
        for at, part in block.parts(size):
            columns = images.columns(part).reshape(self.geometry.groups, self.geometry.reduction, part.area)
            own: Any = (slice(None), slice(None), *at)
            run.add_product(grad[own].reshape(*grad.shape[:2], part.area), columns, sums, is_first)
            is_first = False


WAYS = (GradientFft,)
