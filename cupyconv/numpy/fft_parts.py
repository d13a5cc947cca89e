"""The method "fft" with a kernel cut into parts, because the spectra of a kernel as large as the image do not fit.

The sum over taps is a sum over parts of the kernel.  Each part has a tile of its own, and the products of spectra are
added before the inverse transform.  This is partitioned convolution (Stockham, 1966, again; Torger and Farina,
"Real-Time Partitioned Convolution for Ambiophonics Surround Sound", 2001).

::

    kernel   [k k k k|k k k k|k k k k]         x under a block, part by part:
                                               |x x x x x x x|
    block    |y y y y|                                 |x x x x x x x|
                                                               |x x x x x x x|    each as long as a part and the block

    Y  =  sum over parts of  X conj(W)  --irfft-->  sums

The spectra of a part are computed again for each block, a few channels at a time.  Tiles that are only padding are
zero, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import ConvRun, temporaries
from cupyconv.numpy.fft import ONE_BY_ONE, Fft
from cupyconv.numpy.spectra import BLOCK, Tile, dilated, part_extents, tiles_read
from cupyconv.numpy.windows import INDEX_ARRAYS, INDEX_BYTES, Block, has_gathered, parts_of
from cupyconv.problem.arrays import product_flops
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part, ranges_of
from cupyconv.problem.transforms import is_real, transformed_axes

#: Arrays of a spectrum's size that exist at once per transformed kernel: padded along an axis, and transformed.
OF_A_KERNEL = 3
#: Calls to transform kernels.  The `cost.FFT_CALLS` of a block are a few times as many.
KERNEL_CALLS = cost.FFT_CALLS / 4


@dataclass(frozen=True)
class FftParts(Fft):
    """Compute the tiles of a block of the result under one part of the kernel after the other."""

    name: ClassVar[str] = "FFT of parts"

    #: Taps of a part.
    taps: Triple = (1, 1, 1)

    @classmethod
    def tilings(cls, geometry: ConvGeometry) -> Iterator[dict[str, Any]]:
        return ({"block": (1, *extents), "taps": taps} for extents, taps in part_extents(geometry))

    # Memory and cost of a block.

    @cached_property
    def part_geometry(self) -> ConvGeometry:
        """Geometry of the first part; none is larger."""
        return self.geometry.with_taps(tuple(map(range, self.taps)))

    @cached_property
    def tile(self) -> Tile:
        along = transformed_axes(self.geometry)
        return Tile.of(self.part_geometry, self.block[1:], is_real(self.problem), along)

    spectra_bytes = weight_work = 0
    by_matrix = False

    @cached_property
    def kernels_at_once(self) -> int:
        """Number of kernels of an output that are transformed together."""
        if self.channels_at_once <= 1:
            return 1
        return even_part(self.geometry.group_channels, BLOCK // (OF_A_KERNEL * self._spectrum))

    @property
    def _spectrum(self) -> int:
        return prod(self.tile.frequencies) * self.spectrum_dtype.itemsize

    @cached_property
    def workspace(self) -> int:
        """Bytes of a block's tile and sums, an activation's temporary, and spectra, also of kernels and products."""
        geometry, tile, samples = self.geometry, self.tile, self.block[0]
        read = tile.elements * self.x_dtype.itemsize * (1 + temporaries(geometry, self.problem.prologue))
        sums = tile.elements * self.sums_dtype.itemsize * (1 + bool(self.problem.activation))
        images = self.channels_at_once * (read + self._spectrum) + geometry.out_channels * (sums + self._spectrum)
        kernels = OF_A_KERNEL * self.kernels_at_once * prod(tile.of_kernel) * self.spectrum_dtype.itemsize
        index = INDEX_ARRAYS * INDEX_BYTES * max(tile.size) * has_gathered(geometry)
        return max(samples * (images + self._spectrum) + kernels + index, self._again_bytes)

    @cached_property
    def tiles(self) -> int:
        """Number of tiles of all blocks under all parts."""
        return tiles_read(self.geometry, self.block, self.taps)

    @property
    def work(self) -> float:
        geometry, tile, problem, samples = self.geometry, self.tile, self.problem, self.block[0]
        pairs = geometry.group_channels * geometry.out_channels
        inputs = samples * geometry.in_channels * tile.seconds(problem, self.channels_at_once)
        own = inputs + pairs * tile.seconds(problem, self.kernels_at_once)
        own += cost.complex_products(samples * pairs * prod(tile.frequencies), problem)
        back = self.blocks * samples * geometry.out_channels * tile.seconds(problem, geometry.out_channels)
        return (self.tiles * own + back) * (ONE_BY_ONE if self.one_by_one else 1) + self.store_work

    @property
    def turns(self) -> int:
        return self.tiles

    @property
    def calls(self) -> float:
        geometry = self.geometry
        steps = -(-geometry.in_channels // (self.channels_at_once or 1))
        kernels = geometry.out_channels * -(-geometry.group_channels // self.kernels_at_once)
        return self.blocks * cost.FFT_CALLS + self.tiles * (steps * cost.FFT_CALLS / 2 + kernels * KERNEL_CALLS)

    @property
    def flops(self) -> int:
        geometry, tile, samples = self.geometry, self.tile, self.block[0]
        pairs = geometry.group_channels * geometry.out_channels
        transforms = (
            self.tiles * (samples * geometry.in_channels + pairs) + self.blocks * samples * geometry.out_channels
        )
        products = self.tiles * samples * pairs * prod(tile.frequencies) * product_flops("complex64", "complex64")
        return transforms * tile.flops * (1 if tile.is_real else 2) + products

    def __str__(self) -> str:
        shown = " x ".join(map(str, self.geometry.spatial(self.taps)))
        return f"{super().__str__()}; kernel in parts of {shown} taps"

    # Computation.

    def arranged(self, weight: np.ndarray) -> np.ndarray:  # type: ignore[override]
        return weight

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        geometry = self.geometry
        if not geometry.in_channels:
            return np.zeros(block.sums_shape, self.sums_dtype)
        kernels = run.weight.reshape(geometry.groups, geometry.group_outputs, geometry.group_channels, *geometry.kernel)
        depth, height, width = self._tile_size(block)
        frequencies = replace(self.tile, size=(depth, height, width)).frequencies
        shape = geometry.groups, geometry.group_outputs, block.size[0], *frequencies
        y = run.products.array("spectra", shape, self.spectrum_dtype)
        y.fill(0)
        for part in product(*map(ranges_of, geometry.kernel, self.taps)):
            within = block.with_taps(part)
            if within.tile(geometry.in_channels).not_zeros:
                taps: Any = (..., *(slice(axis.start, axis.stop) for axis in part))
                self._add_part(run, within, kernels[taps], y)
        sums = self.tile.image(y.reshape(geometry.out_channels, *shape[2:]), 2, self._wanted(block))
        return self._finite(run, run.weight, block, sums)

    def _add_part(self, run: ConvRun, block: Block, kernels: np.ndarray, sums: np.ndarray) -> None:
        """Add the products with a kernel part (groups, outputs, channels, *taps) to the spectra of a block's sums."""
        geometry, size = self.geometry, (block.size[0], *self._tile_size(block))
        for some in parts_of(geometry.in_channels, self.channels_at_once):
            image = run.images.scratch.array("tile", (some.stop - some.start, *size))
            run.images.some(some).read_tile(block, image)
            x = self.tile.spectrum(image, 2)
            x = x.reshape(geometry.groups, -1, *x.shape[1:])
            first = some.start if geometry.groups == 1 else 0
            for group, output in product(range(geometry.groups), range(geometry.group_outputs)):
                for own in parts_of(x.shape[1], self.kernels_at_once):
                    weight = self._spectra(kernels[group, output, first + own.start : first + own.stop], block.geometry)
                    for channel, factor in zip(range(own.start, own.stop), weight):
                        more = run.products.array("product", x.shape[2:], x.dtype)
                        sums[group, output] += np.multiply(x[group, channel], factor, out=more)
                    del weight  # free them before the next ones
            del x

    def _spectra(self, kernels: np.ndarray, geometry: ConvGeometry) -> np.ndarray:
        """Return the conjugate spectra of the conjugated kernels (channels, *taps)."""
        spectrum = self.tile.spectrum(np.conjugate(dilated(kernels, geometry)), 1)
        return np.conjugate(spectrum, out=spectrum)
