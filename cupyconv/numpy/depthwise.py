"""Depthwise convolution, one input channel for each output: the choice, and sums of scaled elements.

Of one channel, one output is a vector by a vector.  Two ways suit that: neighbouring outputs as a product with a
Toeplitz matrix (`toeplitz`, the method "gemm"), and here what each tap reads times a number (the method "direct").
At stride 1 no columns are written: a tap reads the tile from one element on to another, one *run* of memory, and what
lies between the rows of pixels is computed in vain.  At strides, taps share columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import prod

import numpy as np

from cupyconv.numpy.convolution import (
    LONE_PIXELS,
    MEMORY_BLOCK,
    METHODS,
    NO_ROOM_FOR_COLUMNS,
    PASS_PER_TAP,
    ConvLoop,
    ConvRun,
    Method,
    fft_unsuited,
    temporaries,
)
from cupyconv.numpy.direct import TapByTap
from cupyconv.numpy.mec import MecLoop, mec_columns
from cupyconv.numpy.toeplitz import best_of_products
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem

#: Nanoseconds for an element of float32 times a tap: of a run, of a run shorter than a third of NumPy's buffer where taps
#: lie along several axes, and where strides keep elements apart; and for a run of a channel and tap, however short.
RUN_NS, SHORT_RUN_NS, STRIDED_NS, TAP_NS = 0.14, 0.3, 0.65, 15
SHORT_RUN = 8192 // 3

# --- the choice -----------------------------------------------------------------------------------------------


def methods_of(problem: ConvProblem) -> Mapping[str, Method]:
    """Every method of a depthwise convolution: products before scaled elements where they are estimated to take less."""
    products, ways = best_of_products(problem)
    scaled = scaled_ns(problem)
    is_quicker = products < scaled or not problem.is_one_kind
    few = "slower: few outputs beside each other, or few taps, and products with many zeros"
    return {
        "fft": METHODS["fft"]._replace(unsuited=lambda _: fft_unsuited(problem, others_ns=min(products, scaled))),
        "gemm": Method(ways, few, NO_ROOM_FOR_COLUMNS, lambda _: "" if is_quicker else few),
        "direct": Method((ScaledRuns, ScaledTaps, TapByTap), PASS_PER_TAP),
        "winograd": METHODS["winograd"],
    }


def scaled_ns(problem: ConvProblem) -> float:
    """What scaled elements are estimated to take."""
    geometry = problem.geometry
    outputs = geometry.out_channels * geometry.taps
    if geometry.stride != (1, 1, 1):
        return outputs * (geometry.batch * geometry.pixels * STRIDED_NS + TAP_NS)
    depth, height, width = tile_shape(geometry, 1, (geometry.batch, *geometry.out_size))[2:]
    run = geometry.batch * depth * height * width
    is_short = run // problem.host.threads < SHORT_RUN and sum(taps > 1 for taps in geometry.kernel) > 1
    return outputs * (run * (SHORT_RUN_NS if is_short else RUN_NS) + TAP_NS)


# --- scaled elements ------------------------------------------------------------------------------------------


class ScaledRuns(ConvLoop):
    """A tap's run of the tile times a number; what lies between rows is left out."""

    name = "scaled runs"
    words = "each tap's run of elements scaled"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return problem.geometry.is_depthwise and problem.is_one_kind and problem.geometry.stride == (1, 1, 1)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = (1 + geometry.group_outputs) * ITEMSIZE[accumulator(problem.x_dtype)]
        return MEMORY_BLOCK // per_pixel, 1 if geometry.pixels >= LONE_PIXELS else geometry.batch

    @cached_property
    def part(self) -> int:
        return even_part(self.geometry.groups, MEMORY_BLOCK // (self._group_bytes or 1))

    @property
    def workspace(self) -> int:
        return self.part * self._group_bytes + self.sums_bytes

    @property
    def _group_bytes(self) -> int:
        """Bytes of a group's tile, of the sums of its runs, and of what fills borders."""
        copies = 1 + self.geometry.group_outputs + temporaries(self.geometry, self.problem.prologue)
        return copies * prod(tile_shape(self.geometry, 1, self.block)) * self.x_dtype.itemsize

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return weight.reshape(*weight.shape[:2], *self.geometry.kernel)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry = self.geometry
        if self.in_place:
            sums = block.of(run.out).swapaxes(0, 1).reshape(block.sums_shape)
        else:
            sums = np.empty(block.sums_shape, self.sums_dtype)
        for groups in parts_of(geometry.groups, self.part):
            runs, pixels = _runs(run.images.some(groups), block)
            shape = (len(runs), geometry.group_outputs, runs.shape[-1])
            is_row = block.size[0] == 1 and shape[-1] == block.area  # nothing lies between
            products = sums[groups].reshape(shape) if is_row else run.products.array("runs", shape, sums.dtype)
            np.einsum("cmdhw,cdhwp->pmc", run.weight[groups], runs, out=products.T, order="F")
            if not is_row:
                sums[groups] = pixels(products)
        return sums


def _runs(images: Images, block: Block) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """What each tap reads of some channels as one run of the tile: (c, kd, kh, kw, run); and its pixels.

    The function makes of runs, (..., run), a view of their pixels, (..., samples, d, h, w).
    """
    image, tile, kernel = images.tile(block), block.tile(images.channels), block.geometry.kernel
    c, *taps = tile.windows_strides[:4]
    last = sum((k - 1) * step for k, step in zip(kernel, taps)) // image.itemsize
    run = max(0, image[0].size - last) if image.size else 0
    runs = np.ndarray((len(image), *kernel, run), image.dtype, image, 0, (c, *taps, image.itemsize))

    def pixels(of: np.ndarray) -> np.ndarray:
        steps = tuple(step // image.itemsize * of.itemsize for step in tile.windows_strides[4:])
        return np.ndarray((*of.shape[:-1], *block.size), of.dtype, of, 0, (*of.strides[:-1], *steps))

    return runs, pixels


class ScaledTaps(MecLoop):
    """Columns that taps share, times a number per channel and tap."""

    name = "scaled taps"
    words = "columns that {taps} taps share, scaled"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return problem.geometry.is_depthwise and problem.is_one_kind and problem.geometry.stride != (1, 1, 1)

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        return super().reason(geometry) if geometry.kernel[geometry.outermost] > 1 else "each element scaled"

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return weight.reshape(*weight.shape[:2], self.geometry.kernel[self.geometry.outermost], -1)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = self.empty_sums(run, block)
        for groups, columns in mec_columns(run.images, block, self.part):
            for taps, views in columns:
                # In Fortran's order the innermost loop is over pixels, whichever axis has the smallest stride.
                target, weight = sums[groups].T, run.weight[groups, :, taps]
                if taps.start:
                    target += np.einsum("cmtk,ctkp->pmc", weight, views, order="F")
                else:
                    np.einsum("cmtk,ctkp->pmc", weight, views, out=target, order="F")
        return self.in_order(sums, block)
