"""Depthwise weight gradient by runs: the dot product of each tap's input elements and the output gradient.

A tap reads one contiguous run of the tile.  The next tap reads a run of the same length that begins further on.  The
gradient is written with the row length of the tile, and zeros fill the gaps between its rows:

::

    tile, 6 wide       | x0 x1 x2 x3 x4 x5 | x6 x7 x8 ...             tap 0 reads the run from x0 on, tap 1 from x1 on
    gradient, 4 wide   | g0 g1 g2 g3  0  0 | g4 g5 g6 g7 0 0 | ...    both are products with this run of the gradient

So x is copied once for all taps, or once per phase of the stride: elements that are a stride apart are then contiguous.
A run is cut into pieces, and all taps multiply a piece while it stays in the innermost cache.

The zeros are multiplied too, and zero times infinity is NaN.  Taps whose sums are not finite are summed again without
the zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, cached_scratch
from cupyconv.numpy.convolution import LONE_PIXELS, temporaries
from cupyconv.numpy.weight_sums import GroupsGradientLoop, Pairs, WeightRun
from cupyconv.numpy.windows import Block, BlockSize, Images, Phase, parts_of, phase_reach, whole_and_rest
from cupyconv.problem.geometry import even_part
from cupyconv.problem.problems import WeightGradientProblem

#: Bytes of a piece of a run; it stays in the innermost cache together with as many bytes of the gradient.
PIECE = 16 << 10
#: Pixels of a block: even if channels are few, a channel's copies for a block stay in cache until they are multiplied.
BLOCK_PIXELS = 1 << 17
#: Calls per phase of the stride.
PHASE_CALLS = 10


class GradientRuns(GroupsGradientLoop):
    """Depthwise: a dot product of each tap's contiguous run of input elements and the gradient."""

    name = "multiplied runs"
    description = "each tap's contiguous elements times the gradient"
    turn_calls = 18
    contention = 1.5  # with few channels the sums are so few that NumPy does not release the GIL
    fresh_work = 0.0  # memory is reused from call to call

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return problem.geometry.is_depthwise

    # Sizes

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        return BLOCK_PIXELS, 1 if problem.geometry.pixels >= LONE_PIXELS else problem.geometry.batch

    @cached_property
    def _dtype(self) -> np.dtype:
        """The dtype of both vectors."""
        return np.result_type(self.x_dtype, self.factor_dtype)

    @property
    def largest_product(self) -> int:
        return PIECE  # an upper bound; BLAS divides only longer ones

    @cached_property
    def _extent(self) -> BlockSize:
        """Samples of a phase's tile, and its elements along each axis."""
        samples, *pixels = self.block
        d, h, w = (extent + more for extent, more in zip(pixels, phase_reach(self.geometry)))
        return samples, d, h, w

    @cached_property
    def _phases(self) -> int:
        """Number of phases of the stride that have taps."""
        geometry = self.geometry
        axes = zip(geometry.stride, geometry.dilation, geometry.kernel)
        return prod(min(stride // gcd(stride, gap), taps) for stride, gap, taps in axes)

    @property
    def group_bytes(self) -> int:
        """Bytes per group: its tile and temporaries, its gradient or both parts of it, and products of pieces."""
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
        read *= geometry.stride[2]  # a cache line has elements of this many phases, and each phase reads it again
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
        return cached_scratch(self._dtype)

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
        """Copy the gradient to (c, outputs per channel, elements of a tile), with zeros between its rows."""
        copy = run.scratch(f"gradient {number}", (*grad.shape[:2], *extent))
        copy.fill(0)
        _, d, h, w = block.size
        copy[..., :d, :h, :w] = grad.reshape(*grad.shape[:2], *block.size)
        return copy.reshape(*grad.shape[:2], -1)

    def _image(self, images: Images, block: Block, extent: BlockSize, phase: Phase) -> np.ndarray:
        """Read a phase's tile (c, samples, d, h, w), filled with zeros up to the size of the largest phase's tile."""
        image = images.scratch.array("tile", (images.channels, *extent), self._dtype)
        regions = [region for region in phase.regions if region[1] is not None]
        if len(regions) < len(phase.regions) or phase.size != extent[1:]:
            image.fill(0)
        d, h, w = phase.size
        images.read(tuple(regions), block, image[..., :d, :h, :w])
        return image

    def _products(self, run: WeightRun, phase: Phase, image: np.ndarray, grad: np.ndarray) -> np.ndarray:
        """Multiply each tap's run by the gradient (c, outputs, elements); returns (c, outputs, *taps of the phase)."""
        (c, outputs, length), counts = grad.shape, phase.counts
        total = run.scratch("sum of pieces", (c, outputs, *counts))
        for first, count, piece in whole_and_rest(length, self._piece(length)):
            steps = (image.strides[0], 0, piece * image.itemsize, *_steps(phase, image), 0, image.itemsize)
            begin = first * image.itemsize
            x = np.ndarray((c, 1, count, *counts, 1, piece), image.dtype, image, begin, steps)
            g = grad[..., first : first + count * piece].reshape(c, outputs, count, 1, 1, 1, piece, 1)
            products = np.matmul(x, g, out=run.scratch("pieces", (c, outputs, count, *counts, 1, 1)))[..., 0, 0]
            if first:
                total += products[:, :, 0]  # the remainder of the run
            else:
                np.einsum("copijk->coijk", products, out=total)
        return total


def run_of(block: BlockSize, extent: BlockSize) -> int:
    """Elements from a block's first pixel to its last, in tiles of size `extent`."""
    samples, d, h, w = block
    _, depth, height, width = extent
    return (((samples - 1) * depth + d - 1) * height + h - 1) * width + w


def _steps(phase: Phase, image: np.ndarray) -> tuple[int, ...]:
    """Bytes from a tap's run to the next tap's, along each axis."""
    return tuple(gap * step for gap, step in zip(phase.gaps, image.strides[2:]))


def _windows_by_gradient(block: Block, phase: Phase, image: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The same products over pixels only, without the elements between rows."""
    samples, d, h, w = block.size
    shape = (len(image), *phase.counts, samples, d, h, w)
    windows = np.ndarray(shape, image.dtype, image, 0, (image.strides[0], *_steps(phase, image), *image.strides[1:]))
    return np.einsum("cijkndhw,condhw->coijk", windows, grad[..., :d, :h, :w])
