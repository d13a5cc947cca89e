"""The gradient of a depthwise weight by runs: what a tap reads, times the gradient, as one vector by another.

A tap reads the tile from one element on to another, one run of memory, and the next tap the same run, begun further on.  The
gradient is written with as much between its rows as there is between those of the tile, zeros:

::

    tile, 6 wide       | x0 x1 x2 x3 x4 x5 | x6 x7 x8 ...             tap 0 reads the run from x0 on, tap 1 from x1 on
    gradient, 4 wide   | g0 g1 g2 g3  0  0 | g4 g5 g6 g7 0 0 | ...    both are products with this run of the gradient

So what is read of x is copied once for all taps; of strides, once for each phase: elements that a stride apart lie side by side
then.  A run is cut into pieces, and all taps multiply a piece while it stays in the innermost cache.

The zeros are multiplied too, and zero times infinity is NaN: taps whose sums are not finite are summed again, without.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, kept_scratch
from cupyconv.numpy.convolution import LONE_PIXELS, temporaries
from cupyconv.numpy.weight_sums import DepthwiseGradientLoop, Pairs, WeightRun
from cupyconv.numpy.windows import Block, BlockSize, Images, Phase, parts_of, phase_reach, whole_and_rest
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import WeightGradientProblem

#: Bytes of a piece of a run: as many of the gradient stay in the innermost cache with it.
PIECE = 16 << 10
#: Pixels of a block: of few channels too, what one copies for a block stays in cache until it is multiplied.
BLOCK_PIXELS = 1 << 17
#: Calls for each phase of the stride.
PHASE_CALLS = 10


class GradientRuns(DepthwiseGradientLoop):
    """Depthwise: what each tap reads, one run of memory, times the gradient: the product of two vectors."""

    name = "multiplied runs"
    words = "each tap's run of elements, times the gradient"
    turn_calls = 18
    beside_others = 1.5  # sums of few channels are so few that NumPy lets no other thread run beside them
    fresh_work = 0.0  # memory is kept

    # Sizes

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        return BLOCK_PIXELS, 1 if problem.geometry.pixels >= LONE_PIXELS else problem.geometry.batch

    @cached_property
    def _dtype(self) -> np.dtype:
        """That of both vectors."""
        return np.result_type(self.x_dtype, self.factor_dtype)

    @property
    def largest_product(self) -> int:
        return PIECE  # at the most; BLAS divides longer ones only

    @cached_property
    def _extent(self) -> BlockSize:
        """Samples and elements of a phase's tile."""
        samples, *pixels = self.block
        d, h, w = (extent + more for extent, more in zip(pixels, phase_reach(self.geometry)))
        return samples, d, h, w

    @cached_property
    def _phases(self) -> int:
        """Of the stride, those that have taps."""
        geometry = self.geometry
        axes = zip(geometry.stride, geometry.dilation, geometry.kernel)
        return prod(min(stride // gcd(stride, gap), taps) for stride, gap, taps in axes)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's tile, of what fills borders, of its gradient or both parts of it, and of products of pieces."""
        geometry, tile = self.geometry, prod(self._extent)
        outputs = self.rows or geometry.group_outputs
        pieces = 2 + tile // self._piece(tile)
        grads = outputs * (1 + self.problem.factor_alone_is_complex)
        copies = 1 + temporaries(geometry, self.problem.prologue) + grads
        return (copies * tile + (pieces + 1) * outputs * geometry.taps) * self._dtype.itemsize

    def _piece(self, run: int) -> int:
        """Elements of a run that are multiplied at a time."""
        return even_part(run, PIECE // self._dtype.itemsize)

    @property
    def products_work(self) -> float:
        geometry, problem, (*_, width) = self.geometry, self.problem, self._extent
        run = run_of(self.block, self._extent)
        read = self.blocks * geometry.in_channels * self._phases * prod(self._extent)
        read *= geometry.stride[2]  # elements of one cache line belong to so many phases, and each reads it again
        multiplied = self.blocks * geometry.out_channels * geometry.taps * run
        work = cost.copied(read, width, problem.x_dtype, geometry.stride[2] > 1)
        if run > prod(self.block):
            work += cost.copied(
                self.blocks * geometry.out_channels * prod(self.block), self.block[3], problem.grad_dtype
            )
        return work + cost.dot(multiplied, self._piece(run), problem)

    @property
    def calls(self) -> float:
        return self.turns * (self.turn_calls + PHASE_CALLS * self._phases)

    # Sums

    def images(self, arrays: Mapping[str, Any], scratch: Scratch) -> Images:
        return super().images(arrays, self.product_memory)

    @property
    def product_memory(self) -> Scratch:
        return kept_scratch(self._dtype)

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry, phases = self.geometry, block.phases
        d, h, w = (max(0, *(phase.size[axis] for phase in phases)) for axis in range(3))
        extent = block.size[0], d, h, w
        length = run_of(block.size, extent)
        for groups in parts_of(geometry.groups, self.part):
            own, grads = images.some(groups), [grad[groups] for grad, _ in pairs]
            if length > block.area or grads[0].dtype != self._dtype or grads[0].strides[2] != grads[0].itemsize:
                grads = [self._with_zeros(run, block, extent, grad, i) for i, grad in enumerate(grads)]
            for phase in phases:
                image = self._image(own, block, extent, phase)
                for grad, (_, sums) in zip(grads, pairs):
                    products = self._products(run, phase, image, grad[..., :length])
                    if length > block.area and not np.isfinite(products.sum()):
                        alone = _windows_by_gradient(block, phase, image, grad.reshape(*grad.shape[:2], *extent))
                        np.copyto(products, alone, where=~np.isfinite(products))
                    place: Any = (..., *phase.taps)
                    taps = sums[groups].reshape(*products.shape[:2], *geometry.kernel, copy=False)[place]
                    if is_first:
                        taps[...] = products
                    else:
                        taps += products

    def _with_zeros(self, run: WeightRun, block: Block, extent: BlockSize, grad: np.ndarray, number: int) -> np.ndarray:
        """The gradient (c, outputs of each, elements of a tile), zeros between its rows."""
        copy = run.scratch(f"gradient {number}", (*grad.shape[:2], *extent))
        copy.fill(0)
        _, d, h, w = block.size
        copy[..., :d, :h, :w] = grad.reshape(*grad.shape[:2], *block.size)
        return copy.reshape(*grad.shape[:2], -1)

    def _image(self, images: Images, block: Block, extent: BlockSize, phase: Phase) -> np.ndarray:
        """What a phase's taps read, (c, samples, d, h, w), with zeros where others read more."""
        image = images.scratch.array("tile", (images.channels, *extent), self._dtype)
        regions = [region for region in phase.regions if region[1] is not None]
        if len(regions) < len(phase.regions) or phase.size != extent[1:]:
            image.fill(0)
        d, h, w = phase.size
        images.read(tuple(regions), block, image[..., :d, :h, :w])
        return image

    def _products(self, run: WeightRun, phase: Phase, image: np.ndarray, grad: np.ndarray) -> np.ndarray:
        """The products of each tap's run with the gradient's (c, outputs, elements): (c, outputs, *taps of the phase)."""
        (c, outputs, length), counts = grad.shape, phase.counts
        total = run.scratch("sum of pieces", (c, outputs, *counts))
        for first, count, piece in whole_and_rest(length, self._piece(length)):
            steps = (image.strides[0], 0, piece * image.itemsize, *_steps(phase, image), 0, image.itemsize)
            begin = first * image.itemsize
            x = np.ndarray((c, 1, count, *counts, 1, piece), image.dtype, image, begin, steps)
            g = grad[..., first : first + count * piece].reshape(c, outputs, count, 1, 1, 1, piece, 1)
            products = np.matmul(x, g, out=run.scratch("pieces", (c, outputs, count, *counts, 1, 1)))[..., 0, 0]
            if first:
                total += products[:, :, 0]  # what is left of the run
            else:
                np.einsum("copijk->coijk", products, out=total)
        return total


def run_of(block: BlockSize, extent: BlockSize) -> int:
    """Elements from a block's first pixel to its last, in tiles of this extent."""
    samples, d, h, w = block
    _, depth, height, width = extent
    return (((samples - 1) * depth + d - 1) * height + h - 1) * width + w


def _steps(phase: Phase, image: np.ndarray) -> tuple[int, ...]:
    """Bytes from a tap's run to the next one's, along each axis."""
    return tuple(gap * step for gap, step in zip(phase.gaps, image.strides[2:]))


def _windows_by_gradient(block: Block, phase: Phase, image: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The same products of pixels alone, without what lies between."""
    samples, d, h, w = block.size
    shape = (len(image), *phase.counts, samples, d, h, w)
    windows = np.ndarray(shape, image.dtype, image, 0, (image.strides[0], *_steps(phase, image), *image.strides[1:]))
    return np.einsum("cijkndhw,condhw->coijk", windows, grad[..., :d, :h, :w])
