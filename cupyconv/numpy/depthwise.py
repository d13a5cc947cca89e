"""Depthwise convolution, one input channel per output: the table of methods, and implementations that scale elements.

An output of one channel is a dot product.  Two kinds of implementations suit that.  `toeplitz` computes neighbouring
outputs as a product with a Toeplitz matrix (the method "gemm").  The classes here multiply the elements that each tap
reads by a number (the method "direct").  At stride 1 they write no columns: a tap reads one contiguous *run* of the
tile, and the results between the rows of pixels are not used.  At larger strides, taps share columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from math import prod

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.choice import FFT, WINOGRAD, Method
from cupyconv.numpy.convolution import (
    CACHE_BLOCK,
    LONE_PIXELS,
    MEMORY_BLOCK,
    PRODUCT_BLOCK,
    ConvLoop,
    ConvRun,
    result_takes_sums,
    temporaries,
)
from cupyconv.numpy.direct import TapByTap
from cupyconv.numpy.gemm import IMPLEMENTATIONS as COLUMNS_IMPLEMENTATIONS
from cupyconv.numpy.shared_columns import is_in_order, mec_bytes, mec_columns, mec_part
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.toeplitz_line import ToeplitzLine
from cupyconv.numpy.toeplitz_rows import ToeplitzRows
from cupyconv.numpy.toeplitz_runs import ToeplitzRuns
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape, whole_and_rest
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem

#: Elements of a run, a third of NumPy's buffer, below which it is slow to scale one tap after the other.
SHORT_RUN = 8192 // 3
#: Most channels-last elements that are scaled at a time.  With the weights of some taps they stay in the innermost
#: cache, and they are enough for an inner loop.
INNERMOST_RUN = 1400

# --- scaled elements ------------------------------------------------------------------------------------------


class ScaledLoop(ConvLoop):
    """A loop that multiplies elements by numbers, without matrix products."""

    turn_calls = 15
    #: Whether elements are scaled in channels-last layout.
    last = False

    @property
    @abstractmethod
    def scaled_work(self) -> float:
        """Estimated time to scale the elements."""

    @property
    def work(self) -> float:
        moved = cost.channels_moved(self.problem, self.last)
        return self.scaled_work + self.tile_work + self.store_work + moved


class ScaledPixels(ScaledLoop):
    """Scale pixels in channels-last layout: all channels of some pixels of a row are one run.

    The conversion to this layout and back is worth its time for many channels and few pixels.
    """

    name = "scaled pixels"
    description = "each tap's pixels times its weights, channels-last"
    smallest = 1
    last = True

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        return problem.is_one_kind and geometry.groups == geometry.in_channels == geometry.out_channels > 1

    @property
    def scaled_work(self) -> float:
        geometry = self.geometry
        elements = geometry.out_channels * geometry.taps * geometry.batch * geometry.pixels
        return cost.scaled(elements, self.problem, geometry.out_channels if geometry.stride[2] > 1 else 0)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        per_pixel = 2 * problem.geometry.in_channels * ITEMSIZE[accumulator(problem.x_dtype)]
        return 2 * CACHE_BLOCK // per_pixel, problem.geometry.batch

    @cached_property
    def in_place(self) -> bool:
        problem, out = self.problem, self.problem.out
        is_row = out.stride_c == 1 and out.pixel_stride == out.shape[1]
        return out.dtype == accumulator(out.dtype) and problem.residual is None and is_row

    @property
    def workspace(self) -> int:
        copies = 1 + temporaries(self.geometry, self.problem.prologue)
        tile = prod(tile_shape(self.geometry, self.geometry.in_channels, self.block)) * self.x_dtype.itemsize
        return copies * tile + self.sums_bytes

    @cached_property
    def threads(self) -> int:
        # With less work, threads mostly wait for each other between short calls.
        return cost.worth_waking(min(self.problem.host.threads, self.blocks), self.scaled_work)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry = problem.geometry
        return geometry.taps * geometry.in_channels * _pixels(geometry) * ITEMSIZE[accumulator(problem.weight_dtype)]

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight as (*kernel, channels), or at stride 1 as (*kernel, pixels of a run, channels)."""
        by_tap = weight.reshape(len(weight), *self.geometry.kernel).transpose(1, 2, 3, 0)
        if self.geometry.stride[2] > 1:
            return np.ascontiguousarray(by_tap)
        return np.repeat(by_tap[..., None, :], _pixels(self.geometry), axis=3)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry, channels = self.geometry, self.geometry.in_channels
        if self.in_place:
            sums = block.of(run.out).transpose(0, 2, 3, 4, 1)
        else:
            sums = np.empty((*block.size, channels), self.sums_dtype)
        tile = self._tile(run.images, block)
        n, *steps, item = tile.strides
        taps = [step * gap for step, gap in zip(steps, geometry.dilation)]
        moves = [step * stride for step, stride in zip(steps, geometry.stride)]
        if geometry.stride[2] > 1:
            shape = (*geometry.kernel, *block.size, channels)
            windows = np.ndarray(shape, tile.dtype, tile, 0, (*taps, n, *moves, item))
            np.einsum("ijkndhwc,ijkc->ndhwc", windows, run.weight, out=sums)
        else:
            *rows, width = block.size
            for begin, count, pixels in whole_and_rest(width, _pixels(geometry)):
                elements = pixels * channels
                runs_shape = (*geometry.kernel, *rows, count, elements)
                strides = (*taps, n, *moves[:2], elements * item, item)
                windows = np.ndarray(runs_shape, tile.dtype, tile, begin * channels * item, strides)
                weight = run.weight[..., :pixels, :].reshape(*geometry.kernel, elements)
                place = sums[..., begin : begin + count * pixels, :].reshape(*rows, count, elements)
                np.einsum("ijkndhqx,ijkx->ndhqx", windows, weight, out=place)
        return sums.transpose(4, 0, 1, 2, 3)[:, None]

    def _tile(self, images: Images, block: Block) -> np.ndarray:
        """Read the tile of all taps as (samples, d, h, w, channels)."""
        image = images.scratch.array("tile", (*block.tile(images.channels).shape[1:], images.channels))
        images.read(block.tile(images.channels).all_regions, block, image.transpose(4, 0, 1, 2, 3))
        return image


def _pixels(geometry: ConvGeometry) -> int:
    """Return the pixels of a row that are scaled as one run: if possible, a divisor of the width; 1 with a stride."""
    width, channels = max(1, geometry.out_size[2]), geometry.in_channels
    if geometry.stride[2] > 1:
        return 1
    most = min(width, max(1, INNERMOST_RUN // channels))
    equal = (pixels for pixels in range(most, most // 2, -1) if width % pixels == 0)
    return next(equal, even_part(width, most))


class ScaledRuns(ScaledLoop):
    """Multiply each tap's run of the tile by a number, and drop the results between rows."""

    name = "scaled runs"
    description = "each tap's contiguous elements times its weight"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return problem.geometry.is_depthwise and problem.is_one_kind and problem.geometry.stride == (1, 1, 1)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = (1 + geometry.group_outputs) * ITEMSIZE[accumulator(problem.x_dtype)]
        return MEMORY_BLOCK // per_pixel, 1 if geometry.pixels >= LONE_PIXELS else geometry.batch

    @property
    def scaled_work(self) -> float:
        geometry = self.geometry
        run = _run(geometry)
        is_short = run // self.sharers(self.problem) < SHORT_RUN and sum(taps > 1 for taps in geometry.kernel) > 1
        return cost.scaled(geometry.out_channels * geometry.taps * run, self.problem, is_short=is_short)

    @classmethod
    def sharers(cls, problem: ConvProblem) -> int:
        # Shorter runs gain nothing if the threads that share them have too little work.
        geometry = problem.geometry
        elements = geometry.out_channels * geometry.taps * _run(geometry)
        return cost.worth_waking(problem.host.threads, cost.scaled(elements, problem))

    @cached_property
    def threads(self) -> int:
        return max(1, min(self.sharers(self.problem), self.blocks))

    @cached_property
    def part(self) -> int:
        return even_part(self.geometry.groups, MEMORY_BLOCK // (self._group_bytes or 1))

    @property
    def workspace(self) -> int:
        return self.part * self._group_bytes + self.sums_bytes

    @property
    def _group_bytes(self) -> int:
        """Bytes of one group's tile, the sums of its runs, and temporary copies."""
        copies = 1 + self.geometry.group_outputs + temporaries(self.geometry, self.problem.prologue)
        return copies * prod(tile_shape(self.geometry, 1, self.block)) * self.x_dtype.itemsize

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return weight.reshape(*weight.shape[:2], *self.geometry.kernel)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry = self.geometry
        sums = self.place_of_sums(run, block)
        for groups in parts_of(geometry.groups, self.part):
            runs, pixels = _runs(run.images.some(groups), block)
            shape = (len(runs), geometry.group_outputs, runs.shape[-1])
            is_row = block.size[0] == 1 and shape[-1] == block.area  # no gaps between rows
            products = sums[groups].reshape(shape) if is_row else run.products.array("runs", shape, sums.dtype)
            np.einsum("cmdhw,cdhwp->pmc", run.weight[groups], runs, out=products.T, order="F")
            if not is_row:
                sums[groups] = pixels(products)
        return sums


def _run(geometry: ConvGeometry) -> int:
    """Return the elements of one tap's run over all pixels."""
    return geometry.batch * prod(tile_shape(geometry, 1, (geometry.batch, *geometry.out_size))[2:])


def _runs(images: Images, block: Block) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return a view (c, kd, kh, kw, run) of the runs that taps read of some channels, and a function for their pixels.

    The function returns a view (..., samples, d, h, w) of the pixels in runs (..., run).
    """
    image, tile, kernel = images.tile_or_view(block), block.tile(images.channels), block.geometry.kernel
    if not image.flags.c_contiguous:
        image = images.tile(block)
    c, *taps = tile.windows_strides[:4]
    last = sum((k - 1) * step for k, step in zip(kernel, taps)) // image.itemsize
    run = max(0, image[0].size - last) if image.size else 0
    runs = np.ndarray((len(image), *kernel, run), image.dtype, image, 0, (c, *taps, image.itemsize))

    def pixels(of: np.ndarray) -> np.ndarray:
        steps = tuple(step // image.itemsize * of.itemsize for step in tile.windows_strides[4:])
        return np.ndarray((*of.shape[:-1], *block.size), of.dtype, of, 0, (*of.strides[:-1], *steps))

    return runs, pixels


class ScaledTaps(ScaledLoop):
    """Multiply the columns that taps share by one number per channel and tap."""

    name = "scaled taps"
    description = "columns shared by {taps} taps, times their weights"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return problem.geometry.is_depthwise and problem.is_one_kind and problem.geometry.stride != (1, 1, 1)

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        return super().reason(geometry) if geometry.kernel[geometry.outermost] > 1 else "each element times its weight"

    @property
    def scaled_work(self) -> float:
        geometry = self.geometry
        elements = geometry.out_channels * geometry.taps * geometry.batch * geometry.pixels
        return cost.scaled_apart(elements, self.problem)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        # Columns have a block's samples between rows and pixels, so only the sums of a single sample can be the result.
        is_lone = geometry.pixels >= LONE_PIXELS and result_takes_sums(problem)
        other_taps = geometry.taps // geometry.kernel[geometry.outermost]
        columns = geometry.group_channels * other_taps * ITEMSIZE[accumulator(problem.x_dtype)]
        sums = geometry.out_channels * ITEMSIZE[accumulator(problem.out.dtype)]
        return PRODUCT_BLOCK // (max(columns, sums) or 1), 1 if is_lone else geometry.batch

    @cached_property
    def part(self) -> int:
        return mec_part(self.problem, self.block, self.x_dtype.itemsize)

    @cached_property
    def in_place(self) -> bool:
        return self.block[0] == 1 and is_in_order(self.geometry, self.block) and result_takes_sums(self.problem)

    @property
    def workspace(self) -> int:
        columns = mec_bytes(self.problem, self.block, self.x_dtype.itemsize)
        products = self.geometry.group_outputs * prod(self.block) * self.sums_dtype.itemsize
        return self.part * (columns + products) + self.sums_bytes

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return weight.reshape(*weight.shape[:2], self.geometry.kernel[self.geometry.outermost], -1)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        shape = (self.geometry.groups, self.geometry.group_outputs, block.area)
        sums = block.of(run.out).reshape(shape) if self.in_place else np.empty(shape, self.sums_dtype)
        for groups, columns in mec_columns(run.images, block, self.part):
            for taps, views in columns:
                # In Fortran order, the innermost loop of einsum is over pixels, whichever axis has the smallest stride.
                target, weight = sums[groups].T, run.weight[groups, :, taps]
                if taps.start:
                    target += np.einsum("cmtk,ctkp->pmc", weight, views, order="F")
                else:
                    np.einsum("cmtk,ctkp->pmc", weight, views, out=target, order="F")
        # Pixels are in the order of MEC columns: return a view in the result's order.
        samples_and_size, axis = list(block.size), 1 + self.geometry.outermost
        samples_and_size.insert(0, samples_and_size.pop(axis))
        return np.moveaxis(sums.reshape(*sums.shape[:2], *samples_and_size), 2, 2 + axis)


#: All methods of a depthwise convolution.
DEPTHWISE = {
    "winograd": WINOGRAD,
    "fft": FFT,
    "gemm": Method((ToeplitzLine, ShiftedRows, ToeplitzRows, ToeplitzRuns, *COLUMNS_IMPLEMENTATIONS)),
    "direct": Method((ScaledPixels, ScaledRuns, ScaledTaps, TapByTap)),
}
