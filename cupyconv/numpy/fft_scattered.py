"""Transposed convolution by the fast Fourier transform: a run of pixels contributes to all elements that it reaches.

Blocks use overlap-add, the transpose of the overlap-save in `fft`.  Pixels of x are written to a tile (`spectra`) one
stride apart, with zeros between them.  The tile's spectrum times the kernel's is the spectrum of their contribution:

::

    x, stride 2      |x . x . x . x . . . . .|     as long as all windows of the run reach
    kernel           [k   k   k]
    contribution     |v v v v v v v v v v v 0|     added to the result's elements; in padding, to the elements that
                                                   the padding mode's index map copies

This is for padding modes, which no convolution gathers; with zero padding, the result is a convolution (`gathered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.block_loops import even_channels
from cupyconv.numpy.fft import multiply
from cupyconv.numpy.scattered import Piece, ScatteredLoop, ScatteredRun
from cupyconv.numpy.spectra import BLOCK, MAX_PRODUCTS, Tile, block_extents, dilated, every, with_lines
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import parts_of, tap_regions, tile_regions, tile_size
from cupyconv.problem.arrays import accumulator
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import NotApplicable, TransposedProblem
from cupyconv.problem.transforms import ERRORS, SMALLEST, is_real, transformed_axes


@lru_cache(maxsize=64)
def best_loop(problem: TransposedProblem, fixed: int, limit: int) -> ScatteredFft | int:
    """Return the loop with the least estimated time, for as many channels at a time as fit the limit.

    If none fits, return the bytes that the smallest needs.
    """
    geometry, threads, exact = problem.geometry, problem.host.threads, accumulator(problem.dtype) == problem.dtype
    best: ScatteredFft | None = None
    channels, least = -(-geometry.in_channels // max(1, min(geometry.in_channels, -(-threads // geometry.batch)))), 0
    while best is None and channels:
        own = even_channels(geometry, channels)
        for extents in block_extents(geometry):
            line = ScatteredFft(problem, (1, *extents), own, exact)
            room = limit - fixed - line.spectra_bytes
            if threads * line.workspace > room:
                needed = limit - room + threads * line.workspace
                least = min(least or needed, needed)
                if needed > 2 * limit:
                    break  # the tiles that follow are larger
                continue
            _, depth, height, width = with_lines(
                replace(geometry, batch=1), line.block, min(room // threads, BLOCK) // line.workspace
            )
            loop = replace(line, block=(1, depth, height, width))
            if best is None or loop.seconds < best.seconds:
                best = loop
        channels //= 2
    return best or least


class FftRun(ScatteredRun):
    """A run with the weight's spectra (groups, channels, outputs, 1, *frequencies)."""

    def __init__(self, loop: ScatteredFft, arrays: Mapping[str, Any]) -> None:
        super().__init__(loop, arrays)
        geometry, tile = loop.geometry, loop.tile
        kernels = self.weight.reshape(*self.weight.shape[:3], *geometry.kernel).swapaxes(1, 2)
        self.spectra = np.empty((*kernels.shape[:3], 1, *tile.of_kernel), loop.spectrum_dtype)

        def transform(at: Any) -> None:
            self.spectra[at][:, 0] = tile.spectrum(np.array(dilated(kernels[at], geometry)), 1)

        in_threads(loop.problem.host.threads, transform, product(*map(range, kernels.shape[:2])))

    def add_runs(self, sums: list[Piece], block: tuple[range, range]) -> None:
        """Add all runs; threads without a block of their own compute some of them, and all are added in order."""
        loop: Any = self.loop
        for runs in parts_of(len(loop.pixel_runs), loop.helpers):
            pixels = loop.pixel_runs[runs]
            for values, own in zip(in_threads(len(pixels), partial(loop.values, self, block), pixels), pixels):
                loop.add_values(self, sums, block, own, values)
            del values  # free them before the next ones


@dataclass(frozen=True)
class ScatteredFft(ScatteredLoop):
    """Compute the contribution of a run of pixels to all elements by a product of spectra."""

    name: ClassVar[str] = "FFT"
    description: ClassVar[str] = f"products of spectra, added to the result; {ERRORS}"

    problem: TransposedProblem

    @classmethod
    def applies(cls, problem: TransposedProblem) -> bool:
        return True

    @classmethod
    def loops(cls, problem: TransposedProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if refusal := problem.fft_refusal:
            raise NotApplicable(refusal)
        if 0 in (problem.geometry.batch, problem.geometry.in_channels, *problem.geometry.size):
            return [], {}
        weight = cls._weight_copy(problem)
        limit = problem.limit_with(weight)
        loop: Any = best_loop(problem, weight + 3 * Plan.ALIGNMENT, limit)
        if isinstance(loop, int):
            raise problem.does_not_fit(SMALLEST, loop, limit)
        return [loop], {"weight": weight, "spectra": loop.spectra_bytes, "blocks": loop.threads * loop.workspace}

    # Memory and cost of a block.

    @cached_property
    def tile(self) -> Tile:
        """The tile of a whole run."""
        return Tile.of(self.geometry, self.block[1:], is_real(self.problem), transformed_axes(self.geometry))

    @cached_property
    def helpers(self) -> int:
        """Number of threads for the runs of a block."""
        return max(1, self.problem.host.threads // self.threads)

    @cached_property
    def spectrum_dtype(self) -> np.dtype:
        return np.result_type(self.sums_dtype, np.complex64)

    @cached_property
    def spectra_bytes(self) -> int:
        return prod(self.tile.of_kernel) * prod(self.problem.weight.shape[:2]) * self.spectrum_dtype.itemsize

    @cached_property
    def _groups(self) -> int:
        """Number of groups per block."""
        return max(1, self.channels // max(1, self.geometry.group_channels))

    @cached_property
    def workspace(self) -> int:
        """Bytes of a run's tile and contribution, their spectra, x, and temporaries for borders and activations."""
        geometry, tile, channels = self.geometry, self.tile, self.channels
        outputs, spectrum = self._groups * geometry.group_outputs, prod(tile.frequencies) * self.spectrum_dtype.itemsize
        values = tile.elements * self.sums_dtype.itemsize * (1 + (geometry.padding_mode != "constant"))
        nbytes = outputs * (2 * tile.elements * self.x_dtype.itemsize + spectrum) + channels * (values + spectrum)
        nbytes += self._groups * spectrum * (geometry.group_outputs > 1)
        nbytes *= self.helpers
        image = channels * prod(geometry.size) * self.sums_dtype.itemsize
        return nbytes + image * (not self.in_place) + image * bool(self.problem.activation)

    @property
    def runs(self) -> int:
        """Number of runs of pixels per block."""
        return prod(-(-n // own) for n, own in zip(self.geometry.out_size, self.block[1:]))

    @property
    def work(self) -> float:
        geometry, tile, problem = self.geometry, self.tile, self.problem
        pairs, outputs = self.channels * geometry.group_outputs, self._groups * geometry.group_outputs
        run = sum(images * tile.seconds(problem, images) for images in (self.channels, outputs))
        run += cost.complex_products(pairs * prod(tile.frequencies), problem)
        run += cost.added(self.channels * tile.elements, problem.dtype)
        return self.blocks * self.runs * run + geometry.group_channels * geometry.out_channels * tile.seconds(problem)

    @property
    def calls(self) -> float:
        regions = 3 ** len(self.tile.along)  # the image, and its borders
        return self.blocks * self.runs * (cost.FFT_CALLS + 12 * regions) + 2 * cost.FFT_CALLS

    @cached_property
    def seconds(self) -> float:
        # Threads without a block of their own compute runs.
        return cost.shared(self.work, self.calls, self.blocks * self.runs, self.threads * self.helpers)

    @cached_property
    def computes_again(self) -> bool:
        """Whether a run that is not finite is recomputed tap by tap."""
        products = prod(self.block) * self.channels * self.geometry.group_outputs * self.geometry.taps
        return products <= MAX_PRODUCTS

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.tile.size)))
        again = "recomputed tap by tap" if self.computes_again else "not recomputed and fill their whole tile"
        return f"{super().__str__()}, tiles of {shown}; non-finite results are {again}"

    # Computation.

    def run(self, arrays: Mapping[str, Any]) -> None:
        in_threads(self.threads, FftRun(self, arrays).finish, self.each_block)

    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        assert isinstance(run, FftRun)
        self.add_values(run, sums, block, pixels, self.values(run, block, pixels))

    def values(self, run: FftRun, block: tuple[range, range], pixels: tuple[range, ...]) -> np.ndarray:
        """Return a run's contribution to all elements that its windows reach: (channels, samples, d, h, w)."""
        geometry, (samples, channels), counts = self.geometry, block, [len(axis) for axis in pixels]
        groups, within = run.groups(channels)
        x = run.x_of(groups, samples, pixels)
        axes = (*x.shape[:2], len(samples))
        read = tile_size(geometry, counts)
        tile = run.sums.array("tile", (*axes, *self.tile.shape(read)), self.x_dtype)
        tile.fill(0)
        apart: Any = (..., *every(counts, geometry.stride))
        tile[apart] = x.reshape(*axes, *counts)
        spectrum = self.tile.spectrum(tile, 3)
        weight = run.spectra[groups, within]
        brought = np.empty((*weight.shape[:2], *spectrum.shape[2:]), self.spectrum_dtype)
        multiply(spectrum, weight, brought, run.sums)
        values = self.tile.image(brought, 3, [slice(0, n) for n in read])
        return values.reshape(len(channels), len(samples), *read)

    def add_values(
        self, run: FftRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...], values: np.ndarray
    ) -> None:
        """Add the contribution of a run of pixels to the sums."""
        if self.computes_again and not np.isfinite(values.sum()):
            self._add_taps(run, sums, block, pixels)
        else:
            run.add(sums, tile_regions(self.geometry, pixels)[1], values)

    def _add_taps(
        self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]
    ) -> None:
        """Add the contribution of a run of pixels by its definition, tap by tap."""
        samples, channels = block
        shape = (len(channels), len(samples), *map(len, pixels))
        groups, within = run.groups(channels)
        x = run.x_of(groups, samples, pixels)
        for tap, regions in enumerate(tap_regions(self.geometry, pixels)):
            matrix = np.ascontiguousarray(run.weight[groups, :, within, tap].swapaxes(1, 2))
            run.add(sums, regions, run.product(matrix, x, shape))


IMPLEMENTATIONS = (ScatteredFft,)
