"""The gradient of a weight by products of spectra on CUDA: the correlation of x with the incoming gradient.

::

    grad, a stride apart  --tiles.cu-->  tiles  --cuFFT-->  G                                 per chunk of units
    x_0                   --tiles.cu-->  tiles  --cuFFT-->  X_0  -- conj(G) X_0 -->  D_0      one input after the other
    x_1                   --tiles.cu-->  tiles  --cuFFT-->  X_1  -- conj(G) X_1 -->  D_1
    D, of all units       --cuFFT-->     sums   --finish_weight_tiles.cu-->  the elements under the taps, conjugated

    x of a tile           |x x x x x x x x x x x x|      all elements that the windows of the block read
    grad, stride 2        |g . g . g . g . . . . .|      the gradients of the block, with zeros in between
    weight gradient       |d . d . d|. . . . . . .       dilation 2: all other elements are discarded

If each frequency has a matrix product, this is outputs x units by units x channels, which includes the sum over
samples.  Products computed one by one are summed in parts, so that small and numerous tiles have enough threads too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import BUSY_THREADS
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    groups_params,
    image,
    prologue_params,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.matrices import MAX_BATCH
from cupyconv.cuda.plan.tiles import BLOCK, Spectra, Tiling, draft_tiled
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.plan import Address, Buffer, KernelLaunch, Step
from cupyconv.problem.problems import WeightGradientProblem

#: Threads per block of finish_weight_tiles.cu; minimum units per part.
FINISH_BLOCK, MIN_PART = 128, 8


def draft_fft_gradient(problem: WeightGradientProblem) -> Draft:
    """Draft the fastest tiles and order of spectra by the cost model, or raise `NotApplicable` if none fits."""
    return draft_tiled(problem, GradientTiling)


@dataclass(frozen=True)
class GradientTiling(Tiling):
    """Tiles of the inputs and of the gradient, whose products are summed."""

    problem: WeightGradientProblem

    again = "are recomputed from the definition"
    not_again = "are not recomputed and fill their whole kernel"

    @cached_property
    def sum_parts(self) -> int:
        """The number of parts in which products computed one by one are summed, to keep the GPU busy."""
        if self.interleaved:
            return 1
        wanted = -(-self.problem.gpu.multiprocessors * BUSY_THREADS // (self.frequencies * self.kernels))
        return max(1, min(wanted, self.units // MIN_PART))

    def buffers(self, units: int) -> tuple[Buffer, ...]:
        outputs, sums = self.problem.geometry.out_channels, self.sum_parts * self.kernels
        return (
            Buffer("tiles", max(units * max(self.widest, outputs), sums) * self.image_bytes),
            Buffer("spectra of the gradient", units * outputs * self.spectrum_bytes),
            Buffer("spectra", units * self.widest * self.spectrum_bytes),
            Buffer("products", sums * self.spectrum_bytes),
        )

    def steps(self, first: int, units: int) -> list[Step]:
        geometry, grad = self.problem.geometry, self.problem.grad
        windows = geometry.out_size, self.tiles, self.tile, self.block, (0, 0, 0), geometry.stride, 0
        purpose, scale = "tiles of the gradient", 1 / self.elements
        outputs = units * geometry.out_channels
        steps: list[Step] = [
            self.cut(grad, windows, first, units, read=self.block, scale=scale, purpose=purpose),
            self.transform("tiles", "spectra of the gradient", outputs, purpose="spectra of the gradient"),
        ]
        for part, spectra in self.cut_inputs(first, units):
            products = self._matrix_products if self.interleaved else self._products
            steps += [*spectra, *products(first, units, part)]
        return steps

    def last_steps(self) -> list[Step]:
        sums = self.sum_parts * self.kernels
        return [self.transform("products", "tiles", sums, inverse=True, purpose="sums"), self._finish()]

    def _products(self, first: int, units: int, part: range) -> Iterator[Step]:
        """Yield the launch that adds a chunk's products with one input, one by one."""
        geometry = self.problem.geometry
        rows = geometry.out_channels * min(geometry.group_channels, len(part))
        operands = units * (geometry.out_channels + len(part)) + self.sum_parts * rows * (1 + bool(first))
        launch = KernelLaunch(
            variant("spectra_gradient", DTYPE=self.spectrum_dtype),
            (min(-(-self.frequencies // BLOCK), GRID_X), min(rows, GRID_Y), self.sum_parts),
            BLOCK,
            (
                ("grad", Address("spectra of the gradient")),
                ("x", Address("spectra")),
                ("y", Address("products")),
                ("frequencies", self.frequencies),
                ("units", units),
                ("units_per_part", -(-units // self.sum_parts)),
                ("first", part.start),
                ("channels", len(part)),
                *groups_params(geometry),
                ("adds", int(first > 0)),
            ),
            purpose="products of spectra",
            bytes_moved=operands * self.spectrum_bytes,
        )
        yield self.multiplied(launch, units * len(part) * geometry.group_outputs * self.frequencies)

    def _matrix_products(self, first: int, units: int, part: range) -> Iterator[Step]:
        """Yield the GEMM calls that add a chunk to D = Gᴴ X of each frequency, group by group."""
        geometry = self.problem.geometry
        channels, outputs = geometry.group_channels, geometry.group_outputs
        for group, begin, end in self.groups_of(part):
            all_outputs = geometry.out_channels, units * geometry.out_channels
            grad = Spectra("spectra of the gradient", group * outputs, *all_outputs, transposed=True, conjugated=True)
            x = Spectra("spectra", begin - part.start, len(part), units * len(part))
            within = group * outputs * channels + begin - group * channels
            sums = Spectra("products", within, channels, self.kernels)
            for frequency in range(0, self.frequencies, MAX_BATCH):
                yield self.matrix_product(outputs, end - begin, units, grad, x, sums, int(first > 0), frequency)

    def _finish(self) -> KernelLaunch:
        problem, geometry, out = self.problem, self.problem.geometry, self.problem.out
        xs = problem.xs if self.computes_again else ()
        elements = self.kernels * geometry.taps
        strides = self.strides(geometry.out_channels, geometry.group_channels, self.elements)
        launch = KernelLaunch(
            variant(
                "finish_weight_tiles",
                problem.prologue,
                X_DTYPE=problem.x_dtype,
                G_DTYPE=problem.grad_dtype,
                Y_DTYPE=out.dtype,
            ),
            (min(-(-elements // FINISH_BLOCK), GRID_X), 1, 1),
            FINISH_BLOCK,
            (
                ("sources", sources_params(xs)),
                ("windows", windows_params(geometry)),
                ("prologue", prologue_params(problem.prologue)),
                ("grad", image(problem.grad)),
                ("out", image(out)),
                ("sums", Address("tiles")),
                ("stride_part", self.kernels * self.elements),
                *zip(("stride_o", "stride_c", "stride_t"), strides),
                ("batch", geometry.batch),
                ("tile", self.tile),
                ("parts", self.sum_parts),
                ("outputs", geometry.out_channels),
                ("group_channels", geometry.group_channels),
                ("group_outputs", geometry.group_outputs),
                ("computes_again", int(self.computes_again)),
            ),
            purpose="weight gradient from the tiles",
            bytes_moved=elements * (self.sum_parts * ITEMSIZE[self.dtype] + out.itemsize),
        )
        return self.placed(launch, elements, 1)
