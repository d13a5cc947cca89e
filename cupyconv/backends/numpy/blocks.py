"""Blocks of a convolution: a part of its output's pixels, what their windows read, and reading it.

::

    x_0, x_1, ...   --read-->   tile                  --windows-->   columns
    any strides,                (channels, samples,                  (channels, taps, samples, pixels)
    any dtype                    d, h, w), padded                    a copy of overlapping views

A prologue transforms what is read as it is written, and so never the padding.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from cupyconv.backends.numpy.prologue import Transform
from cupyconv.backends.numpy.windows import Region, read, tap_regions, tile_regions, windows_of_tile
from cupyconv.geometry import ConvGeometry
from cupyconv.plan import BlockLoop

#: Blocks up to which, and taps up to which, what a block reads is kept from run to run: a small convolution is
#: bound by working it out; a large one is not, and would keep megabytes.
_KEPT_BLOCKS, _KEPT_TAPS = 4, 64
#: Bytes of a tile up to which zeros are written all over it: one long write takes less than several short ones.
_SMALL_TILE = 64 << 10


class Block:
    """A part of the result, and what is read for it."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, ranges: tuple[range, ...]) -> None:
        self._geometry, self._itemsize, self._ranges = geometry, itemsize, ranges
        self.size = tuple(map(len, ranges))
        self._samples, *pixels = (slice(r.start, r.stop) for r in ranges)
        self._at = (self._samples, slice(None), *pixels)
        self._is_all = self.size == (geometry.batch, *geometry.out_size)
        self.area = prod(self.size)
        self.columns_shape = (geometry.in_channels, *geometry.kernel, *self.size)
        self.sums_shape = (geometry.groups, geometry.group_outputs, *self.size)

    def of(self, image: np.ndarray) -> np.ndarray:
        """These samples and pixels of an image of five axes."""
        return image if self._is_all else image[self._at]

    def samples_of(self, image: np.ndarray) -> np.ndarray:
        """These samples of an image."""
        return image if self._is_all else image[self._samples]

    @cached_property
    def taps(self) -> tuple[tuple[Region, ...], ...]:
        """What each tap reads."""
        return tap_regions(self._geometry, self._ranges[1:])

    @cached_property
    def tile(self) -> Tile:
        """What all taps read."""
        return Tile(self._geometry, self._itemsize, self._ranges)


class Tile:
    """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, block: tuple[range, ...]) -> None:
        samples, *out_size = map(len, block)
        size, regions = tile_regions(geometry, block[1:])
        self.shape = (geometry.in_channels, samples, *size)
        self.windows_shape, self.windows_strides = windows_of_tile(geometry, self.shape, out_size, itemsize)
        read = tuple(region for region in regions if region[1] is not None)
        self.starts_as_zeros = len(read) < len(regions) and prod(self.shape) * itemsize <= _SMALL_TILE
        self.regions = read if self.starts_as_zeros else regions


def cut_into_blocks(loop: BlockLoop, itemsize: int) -> Iterable[Block]:
    """The blocks of a loop, in order; `itemsize` is that of what is read."""
    geometry = loop.geometry
    assert isinstance(geometry, ConvGeometry)
    axes = [
        [range(first, min(first + part, extent)) for first in range(0, extent, part)]
        for extent, part in zip((geometry.batch, *geometry.out_size), loop.block)
    ]
    return (Block(geometry, itemsize, ranges) for ranges in product(*axes))


def are_kept(loop: BlockLoop) -> bool:
    """Whether what blocks read is worth keeping from run to run."""
    return loop.blocks <= _KEPT_BLOCKS and loop.geometry.taps <= _KEPT_TAPS


class Scratch:
    """Memory that a block leaves to the next one: its pages are mapped, and each thread has its own."""

    def __init__(self, dtype: np.dtype, blocks: int) -> None:
        self._dtype = dtype
        self._buffers = threading.local() if blocks > 1 else None

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """This thread's buffer of that name, uninitialised."""
        if self._buffers is None:
            return np.empty(shape, self._dtype)
        buffers, size = self._buffers.__dict__, prod(shape)
        if name not in buffers or buffers[name].size < size:
            buffers[name] = np.empty(size, self._dtype)
        buffer = buffers[name]
        return (buffer if buffer.size == size else buffer[:size]).reshape(shape)


#: The inputs, of five axes, and the channels of the concatenation that each one is.
Inputs = Sequence[tuple[np.ndarray, slice]]


def read_regions(
    inputs: Inputs, regions: tuple[Region, ...], block: Block, target: np.ndarray, transform: Transform | None = None
) -> None:
    """Boxes of the inputs, their channels one after the other, into (channels, samples, d, h, w)."""
    for at, elements in regions:
        for x, channels in inputs:
            part = target[(channels, slice(None), *at)]
            if elements is None:
                part[...] = 0
            elif transform is None:
                part[...] = read(block.samples_of(x), elements).swapaxes(0, 1)
            else:
                transform.write(part, read(block.samples_of(x), elements).swapaxes(0, 1), channels)


def tile_of(inputs: Inputs, block: Block, scratch: Scratch, transform: Transform | None = None) -> np.ndarray:
    """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""
    tile = block.tile
    image = scratch.array("tile", tile.shape)
    if tile.starts_as_zeros:
        image.fill(0)
    read_regions(inputs, tile.regions, block, image, transform)
    return image


def windows_of(inputs: Inputs, block: Block, scratch: Scratch, transform: Transform | None = None) -> np.ndarray:
    """A view (channels, kd, kh, kw, samples, d, h, w) of all windows of a block, in a tile that is read for it."""
    image, tile = tile_of(inputs, block, scratch, transform), block.tile
    return np.ndarray(tile.windows_shape, image.dtype, image, 0, tile.windows_strides)


def columns_of(inputs: Inputs, block: Block, scratch: Scratch, transform: Transform | None = None) -> np.ndarray:
    """All windows of a block as (channels, kd, kh, kw, samples, d, h, w) in C order."""
    columns = scratch.array("columns", block.columns_shape)
    if prod(block.columns_shape[1:4]) == 1:
        read_regions(inputs, block.taps[0], block, columns[:, 0, 0, 0], transform)
    else:
        columns[...] = windows_of(inputs, block, scratch, transform)
    return columns
