"""Spectra: the Fourier transforms, forward and inverse, of tiles with lengths that are fast to transform.

::

    tile     |x x x x x x x x x x x x x x 0|    a length with small prime factors: all that a block reads, perhaps zeros
    windows  [k   k   k]                        the first window, dilated by zeros between taps
                       [k   k   k]              the last window of the block
    outputs  |y y y y y y y y|. . . . . . .|    the product of spectra wraps around, except in these outputs

Transforms of real numbers have half the frequencies along the last transformed axis.  Axes along which the kernel has
one tap are not transformed: each position along them is a separate tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2, prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part
from cupyconv.problem.problems import ProductsProblem
from cupyconv.problem.transforms import transformed_axes

#: Bytes of a block: as many samples and lines are computed together as stay in cache.
BLOCK = 2 << 20
#: Ratio of a candidate's transform lengths to those of the candidate before.
LONGER = 1.4
#: The spectra of a weight leave enough memory if this many times their bytes fit the workspace limit.
SMALL_SPECTRA = 8
#: Most kernel parts along an axis for which the tiles that are only padding are counted.
COUNTED = 1024
#: Most multiply-adds of a block that is recomputed if it is not finite: these take a few seconds.
MAX_PRODUCTS = 1 << 34

# --- cutting --------------------------------------------------------------------------------------------------


def block_extents(geometry: ConvGeometry) -> Iterator[Triple]:
    """Yield candidate extents of blocks of the result, the smallest first.

    The transformed axes of a tile are longer than the kernel by a common factor.  Other axes of a block have one pixel.
    """
    from scipy.fft import next_fast_len  # imported only when transforms are likely

    along, longer, before = transformed_axes(geometry), 1.0, (0, 0, 0)
    whole = tuple(extent if axis in along else 1 for axis, extent in enumerate(geometry.out_size))
    while before != whole:
        longer *= LONGER
        extents = [1, 1, 1]
        for axis in along:
            span = geometry.span[axis]
            length = next_fast_len(max(cost.SHORTEST, int(span * longer)), True)
            extents[axis] = even_part(geometry.out_size[axis], (length - span) // geometry.stride[axis] + 1)
        if tuple(extents) != before:
            before = (extents[0], extents[1], extents[2])
            yield before


def has_large_spectra(problem: ProductsProblem) -> bool:
    """Whether the weight's spectra leave little memory for tiles larger than the kernel, so that it is cut too."""
    geometry = problem.geometry
    spectra = geometry.out_channels * geometry.group_channels * prod(geometry.span)
    return SMALL_SPECTRA * spectra * ITEMSIZE[accumulator(problem.dtype)] > problem.limit


def part_extents(geometry: ConvGeometry) -> Iterator[tuple[Triple, Triple]]:
    """Yield candidate extents of blocks of the result, with taps of kernel parts, the smallest tiles first.

    Block and part are each half of a tile's length, because loops run over both, unless one of them is shorter.
    """
    from scipy.fft import next_fast_len

    along, longest = transformed_axes(geometry), float(cost.SHORTEST)
    whole = geometry.out_size, geometry.kernel
    extents, taps = [1, 1, 1], [1, 1, 1]
    while any((extents[axis], taps[axis]) != (whole[0][axis], whole[1][axis]) for axis in along):
        longest *= LONGER
        for axis in along:
            stride, gap, reached = geometry.stride[axis], geometry.dilation[axis], geometry.reached[axis]
            length = reached if reached <= longest else next_fast_len(int(longest), True)
            span = max(length // 2, length - (geometry.out_size[axis] - 1) * stride)
            taps[axis] = even_part(geometry.kernel[axis], (span - 1) // gap + 1)
            extents[axis] = even_part(geometry.out_size[axis], (length - (taps[axis] - 1) * gap - 1) // stride + 1)
        yield (extents[0], extents[1], extents[2]), (taps[0], taps[1], taps[2])


def tiles_read(geometry: ConvGeometry, block: Sequence[int], taps: Sequence[int]) -> int:
    """Return the number of tiles of all blocks (n, d, h, w) under all kernel parts, without those of padding alone."""
    count = -(-geometry.batch // block[0])
    for axis, (own, part) in enumerate(zip(block[1:], taps)):
        size, stride, gap = geometry.size[axis], geometry.stride[axis], geometry.dilation[axis]
        blocks, parts, step = -(-geometry.out_size[axis] // own), -(-geometry.kernel[axis] // part), own * stride
        if geometry.padding_mode != "constant" or parts > COUNTED:
            count *= blocks * parts
            continue
        reach = (own - 1) * stride + (part - 1) * gap + 1
        firsts = [first * part * gap - geometry.before[axis] for first in range(parts)]
        count *= sum(
            max(0, min(blocks, -((first - size) // step)) - max(0, -(first + reach) // step + 1)) for first in firsts
        )
    return count


def with_lines(geometry: ConvGeometry, block: Sequence[int], most: int) -> tuple[int, int, int, int]:
    """Return the block (n, d, h, w) with at most `most` lines, over samples and axes that are not transformed."""
    counts, along, wider = (geometry.batch, *geometry.out_size), transformed_axes(geometry), list(block)
    for axis in reversed([axis for axis in range(4) if axis - 1 not in along]):
        stride = geometry.stride[axis - 1] if axis else 1
        wider[axis] = even_part(counts[axis], most // stride)
        if wider[axis] < counts[axis]:
            break
        most //= wider[axis] * stride
    return wider[0], wider[1], wider[2], wider[3]


# --- transforms -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The sizes of a tile, and its transforms along some of its three axes."""

    size: Triple
    along: tuple[int, ...]
    is_real: bool

    @classmethod
    def of(cls, geometry: ConvGeometry, pixels: Sequence[int], is_real: bool, along: tuple[int, ...]) -> Tile:
        """Return the tile of all windows of `pixels` pixels of the result, transformed along the axes `along`."""
        from scipy.fft import next_fast_len

        read = [(n - 1) * stride + span for n, stride, span in zip(pixels, geometry.stride, geometry.span)]
        depth, height, width = (
            next_fast_len(extent, is_real) if axis in along else extent for axis, extent in enumerate(read)
        )
        return cls((depth, height, width), along, is_real)

    @cached_property
    def elements(self) -> int:
        return prod(self.size)

    @cached_property
    def frequencies(self) -> Triple:
        """Sizes of the tile's spectrum."""
        depth, height, width = (
            extent // 2 + 1 if self.is_real and axis == self.along[-1] else extent
            for axis, extent in enumerate(self.size)
        )
        return depth, height, width

    @cached_property
    def of_kernel(self) -> Triple:
        """Sizes of a kernel's spectrum."""
        depth, height, width = (n if axis in self.along else 1 for axis, n in enumerate(self.frequencies))
        return depth, height, width

    @cached_property
    def _levels(self) -> float:
        return log2(prod(self.size[axis] for axis in self.along))

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of a transform of real numbers."""
        return int(2.5 * self.elements * self._levels)

    def seconds(self, problem: ProductsProblem, images: int = 1) -> float:
        """Return the estimated time of one image's transform, if `images` images are transformed together."""
        lines = max(1, images) * self.elements // max(self.size[axis] for axis in self.along)
        return cost.fourier(self.elements, self._levels, problem, lines)

    def shape(self, read: Sequence[int]) -> Triple:
        """Return the sizes of the tile of a smaller block, which reads `read`; transformed axes keep their length."""
        depth, height, width = (self.size[axis] if axis in self.along else n for axis, n in enumerate(read))
        return depth, height, width

    def spectrum(self, image: np.ndarray, first: int) -> np.ndarray:
        """Return the spectrum of an image along its three axes from `first` on; a complex image may be overwritten."""
        from scipy.fft import fft, rfft

        for axis in reversed(self.along):
            transform = rfft if self.is_real and axis == self.along[-1] else fft
            image = transform(image, self.size[axis], first + axis, overwrite_x=True)
        return image

    def image(self, spectrum: np.ndarray, first: int, wanted: Sequence[slice]) -> np.ndarray:
        """Return the wanted elements of the image with this spectrum, which is overwritten."""
        from scipy.fft import ifft, irfft

        for axis, elements in enumerate(wanted):
            if axis in self.along:
                transform = irfft if self.is_real and axis == self.along[-1] else ifft
                spectrum = transform(spectrum, self.size[axis], first + axis, overwrite_x=True)
            own: Any = (slice(None),) * (first + axis) + (elements,)
            spectrum = spectrum[own]
        return spectrum


def every(counts: Sequence[int], strides: Sequence[int]) -> list[slice]:
    """Return slices of `counts` elements along each axis, `strides` apart, from the first element on."""
    return [slice(0, (count - 1) * stride + 1, stride) for count, stride in zip(counts, strides)]


def dilated(kernels: np.ndarray, geometry: ConvGeometry) -> np.ndarray:
    """Return kernels (..., kd, kh, kw) with zeros between their taps."""
    if geometry.dilation == (1, 1, 1):
        return kernels
    wide = np.zeros((*kernels.shape[:-3], *geometry.span), kernels.dtype)
    taps: Any = (..., *every(geometry.kernel, geometry.dilation))
    wide[taps] = kernels
    return wide
