"""Plan method "fft" on CUDA: products of spectra, by overlap-save.

See Stockham, "High-Speed Convolution and Correlation", 1966.

::

    weight, flipped  --tiles.cu-->  tiles  --cuFFT-->  W                                       once per call
    x_0              --tiles.cu-->  tiles  --cuFFT-->  X_0  -- X_0 W_0 -->  Y                  per chunk of units
    x_1              --tiles.cu-->  tiles  --cuFFT-->  X_1  -- added -->    Y                  reuses the memory of x_0
    Y                --cuFFT-->     sums   --finish_tiles.cu-->  bias, residual, activation of every stride-th sum
                                                                 that did not wrap around

If each frequency has a matrix product, this is units x channels by channels x outputs.

The weight is flipped in its tile, so that the products of spectra give the convolution, and no spectrum is conjugated.
It is also divided by the number of elements of a tile, because neither transform divides by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    epilogue_params,
    groups_params,
    image,
    prologue_params,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.matrices import MAX_BATCH
from cupyconv.cuda.plan.tiles import BLOCK, Spectra, Tiling, draft_tiled, grid_of
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.plan import Address, Buffer, KernelLaunch, Step
from cupyconv.problem.problems import ConvProblem


def draft_fft(problem: ConvProblem) -> Draft:
    """Draft the fastest tiles and order of spectra by the cost model, or raise `NotApplicable` if none fits."""
    return draft_tiled(problem, ConvTiling)


@dataclass(frozen=True)
class ConvTiling(Tiling):
    """Tiles of the inputs, each of which gives one block of the result."""

    problem: ConvProblem

    def buffers(self, units: int) -> tuple[Buffer, ...]:
        outputs = self.problem.geometry.out_channels
        images = max(units * max(self.widest, outputs), self.kernels)
        return (
            Buffer("tiles", images * self.image_bytes),
            Buffer("spectra of the weight", self.kernels * self.spectrum_bytes),
            Buffer("spectra", units * self.widest * self.spectrum_bytes),
            Buffer("products", units * outputs * self.spectrum_bytes),
        )

    def first_steps(self) -> list[Step]:
        geometry, weight = self.problem.geometry, self.problem.weight
        last = sum((taps - 1) * step for taps, step in zip(geometry.kernel, weight.strides[2:]))
        flipped = weight.view(weight.shape, (*weight.strides[:2], *(-step for step in weight.strides[2:])), last)
        kernel = geometry.kernel, (1, 1, 1), self.tile, (1, 1, 1), (0, 0, 0), geometry.dilation, 0
        cut = self.cut(
            flipped, kernel, 0, geometry.out_channels, scale=1 / self.elements, purpose="tiles of the weight"
        )
        return [cut, self.transform("tiles", "spectra of the weight", self.kernels, purpose="spectra of the weight")]

    def steps(self, first: int, units: int) -> list[Step]:
        steps: list[Step] = []
        for part, spectra in self.cut_inputs(first, units):
            products = self._matrix_products(units, part) if self.interleaved else [self._products(units, part)]
            steps += [*spectra, *products]
        outputs = units * self.problem.geometry.out_channels
        steps.append(self.transform("products", "tiles", outputs, inverse=True, purpose="sums"))
        return [*steps, self._finish(first, units)]

    def _products(self, units: int, part: range) -> KernelLaunch:
        """Return the launch that adds one input's products, one by one."""
        geometry, rows = self.problem.geometry, units * self.problem.geometry.out_channels
        group_channels = min(geometry.group_channels, len(part))
        operands = units * len(part) + geometry.out_channels * group_channels + rows * (1 + bool(part.start))
        launch = KernelLaunch(
            variant("spectra", DTYPE=self.spectrum_dtype),
            (min(-(-self.frequencies // BLOCK), GRID_X), min(rows, GRID_Y), 1),
            BLOCK,
            (
                ("x", Address("spectra")),
                ("weight", Address("spectra of the weight")),
                ("y", Address("products")),
                ("frequencies", self.frequencies),
                ("units", units),
                ("first", part.start),
                ("channels", len(part)),
                *groups_params(geometry),
            ),
            purpose="products of spectra",
            bytes_moved=operands * self.spectrum_bytes,
        )
        return self.multiplied(launch, units * len(part) * geometry.group_outputs * self.frequencies)

    def _matrix_products(self, units: int, part: range) -> Iterator[Step]:
        """Yield the GEMM calls that add one input to Y = X Wᵀ of each frequency, group by group."""
        geometry = self.problem.geometry
        channels, outputs = geometry.group_channels, geometry.group_outputs
        for group, begin, end in self.groups_of(part):
            x = Spectra("spectra", begin - part.start, len(part), units * len(part))
            within = group * outputs * channels + begin - group * channels
            weight = Spectra("spectra of the weight", within, channels, self.kernels, transposed=True)
            y = Spectra("products", group * outputs, geometry.out_channels, units * geometry.out_channels)
            for first in range(0, self.frequencies, MAX_BATCH):
                yield self.matrix_product(
                    units, outputs, end - begin, x, weight, y, int(begin > group * channels), first
                )

    def _finish(self, first: int, units: int) -> KernelLaunch:
        problem, geometry, out = self.problem, self.problem.geometry, self.problem.out
        xs = problem.xs if self.computes_again else ()
        places, lanes = units * prod(self.block), self.lanes(out)
        pixels = units * geometry.pixels // prod(self.tiles)
        bytes_of_pixel = ITEMSIZE[self.dtype] + out.itemsize * (1 + bool(problem.residual) + bool(problem.pre))
        launch = KernelLaunch(
            variant(
                "finish_tiles",
                problem.prologue,
                X_DTYPE=problem.x_dtype,
                W_DTYPE=problem.weight_dtype,
                Y_DTYPE=out.dtype,
            ),
            *grid_of(places, geometry.out_channels, lanes),
            (
                ("sources", sources_params(xs)),
                ("windows", windows_params(geometry)),
                ("weight", image(problem.weight)),
                ("out", image(out)),
                ("epilogue", epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)),
                ("prologue", prologue_params(problem.prologue)),
                ("sums", Address("tiles")),
                *zip(("stride_u", "stride_o", "stride_t"), self.strides(units, geometry.out_channels, self.elements)),
                ("first_unit", first),
                ("tiles", self.tiles),
                ("tile", self.tile),
                ("block", self.block),
                ("units", units),
                ("outputs", geometry.out_channels),
                ("output_lanes", lanes),
                ("group_channels", geometry.group_channels),
                ("group_outputs", geometry.group_outputs),
                ("computes_again", int(self.computes_again)),
            ),
            purpose=f"results from the tiles, {problem.activation if problem.activation else 'bias, residual'}",
            bytes_moved=pixels * geometry.out_channels * bytes_of_pixel,
        )
        return self.placed(launch, places, geometry.out_channels)
