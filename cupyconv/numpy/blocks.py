"""Blocks of a convolution: a part of its output's pixels, what their windows read, and reading it.

::

    x_0, x_1, ...   --read-->   tile                  --windows-->   columns
    any strides,                (channels, samples,                  (channels, taps, samples, pixels)
    any dtype                    d, h, w), padded                    a copy of overlapping views

A prologue transforms what is read as it is written, and so never the padding.

*Shared columns* are a fraction of the columns: along the outermost axis of the kernel, the taps' columns are the
same rows of pixels, each beginning further on, so they are written once for all of these taps.

::

    columns for kh = 0      row 0   row 1   row 2   row 3          with pixels in the order (h, samples, d, w)
                    1               row 1   row 2   row 3   row 4  a tap's columns are one matrix, rows apart;
                    2                       row 2   row 3   ...    with a stride, rows of one residue are

*Runs* are no columns at all: at stride 1 a tap reads the tile from one element on to another, and what lies between the
rows of pixels is worked out in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import product
from math import gcd, prod

import numpy as np

from cupyconv.numpy.loops import BlockLoop
from cupyconv.numpy.prologue import Transform
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import Region, read, tap_regions, tile_regions, windows_of_tile
from cupyconv.problem.geometry import ConvGeometry

#: Blocks up to which, and taps up to which, what a block reads is kept from run to run: a small convolution is
#: bound by working it out; a large one is not, and would keep megabytes.
_KEPT_BLOCKS, _KEPT_TAPS = 4, 64
#: Bytes of a tile up to which zeros are written all over it: one long write takes less than several short ones.
_SMALL_TILE = 256 << 10


class Block:
    """A part of the result, and what is read for it."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, ranges: tuple[range, ...]) -> None:
        self.geometry, self._itemsize, self._ranges = geometry, itemsize, ranges
        self._tiles: dict[int, Tile] = {}
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
        return tap_regions(self.geometry, self._ranges[1:])

    @cached_property
    def tile(self) -> Tile:
        """What all taps read."""
        return self.tile_of(self.geometry.in_channels)

    def tile_of(self, channels: int) -> Tile:
        """What all taps read of so many channels."""
        if channels not in self._tiles:
            self._tiles[channels] = Tile(self.geometry, self._itemsize, self._ranges, channels)
        return self._tiles[channels]


class Tile:
    """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, block: tuple[range, ...], channels: int) -> None:
        samples, *out_size = map(len, block)
        size, regions = tile_regions(geometry, block[1:])
        self.shape = (channels, samples, *size)
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


def tile_of(
    inputs: Inputs, block: Block, scratch: Scratch, transform: Transform | None = None, channels: slice | None = None
) -> np.ndarray:
    """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""
    tile = block.tile
    if channels is not None:
        tile = block.tile_of(channels.stop - channels.start)
        inputs = _some_channels(inputs, channels)
        transform = transform and transform.of(channels)
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


def shared_columns(
    inputs: Inputs, block: Block, channels: slice, scratch: Scratch, transform: Transform | None
) -> list[tuple[slice, np.ndarray]]:
    """Columns of some channels that the taps along the kernel's outermost axis share: (c, tap, other taps, pixels).

    Each array is a view in which a tap's pixels begin further on than those of the one before.  Where the stride
    keeps taps from meeting the same rows, there is one for every residue, beside the taps that it has.
    """
    geometry, axis = block.geometry, block.geometry.outermost
    image = tile_of(inputs, block, scratch, transform, channels)
    tile = block.tile_of(len(image))
    stride, gap, rows = geometry.stride[axis], geometry.dilation[axis], block.size[1 + axis]
    a_row = block.area // rows
    # Axes of all windows, (c, kd, kh, kw, n, d, h, w), in another order: the outermost before the samples.
    order = [0, *(1 + a for a in range(3) if a != axis), 5 + axis, 4, *(5 + a for a in range(3) if a != axis)]
    strides = tuple(tile.windows_strides[a] for a in order)
    shape = [tile.windows_shape[a] for a in order]
    period = stride // gcd(stride, gap)
    columns = []
    for first in range(min(period, geometry.kernel[axis])):
        taps = len(range(first, geometry.kernel[axis], period))
        step = period * gap // stride
        shape[3] = rows + (taps - 1) * step
        begin = first * gap * image.strides[2 + axis]
        part = np.ndarray(shape, image.dtype, image, begin, strides)
        if part[0].size == part[0, 0, 0].size and part[0, 0, 0].flags.c_contiguous:
            source, c_stride = image, image.strides[0]
        else:
            source, begin = scratch.array(f"columns {first}", tuple(shape)), 0
            source[...] = part
            c_stride = source.strides[0]
        item, others = image.itemsize, shape[1] * shape[2]
        views = np.ndarray(
            (len(image), taps, others, block.area), image.dtype, source, begin,
            (c_stride, step * a_row * item, c_stride // others, item),
        )  # fmt: skip
        columns.append((slice(first, None, period), views))
    return columns


def runs_of(
    inputs: Inputs, block: Block, channels: slice, scratch: Scratch, transform: Transform | None
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """At stride 1, what each tap reads of some channels as one run of the tile: (c, kd, kh, kw, run); and its pixels.

    A run holds what lies between the block's rows too.  The function makes of runs, (..., run), a view of their
    pixels, (..., samples, d, h, w).
    """
    image = tile_of(inputs, block, scratch, transform, channels)
    tile = block.tile_of(len(image))
    c, *taps = tile.windows_strides[:4]
    last = sum((k - 1) * step for k, step in zip(block.geometry.kernel, taps)) // image.itemsize
    run = max(0, image[0].size - last) if image.size else 0
    runs = np.ndarray((len(image), *block.geometry.kernel, run), image.dtype, image, 0, (c, *taps, image.itemsize))

    def pixels(of: np.ndarray) -> np.ndarray:
        steps = tuple(step // image.itemsize * of.itemsize for step in tile.windows_strides[4:])
        return np.ndarray((*of.shape[:-1], *block.size), of.dtype, of, 0, (*of.strides[:-1], *steps))

    return runs, pixels


def parts_of(count: int, part: int) -> Iterable[slice]:
    """So many groups, or channels, at a time."""
    return (slice(first, min(first + part, count)) for first in range(0, count, part))


def _some_channels(inputs: Inputs, wanted: slice) -> Inputs:
    """Some channels of the concatenation, counted from the first of them."""
    some = []
    for x, channels in inputs:
        begin, end = max(wanted.start, channels.start), min(wanted.stop, channels.stop)
        if begin < end:
            part = x[:, begin - channels.start : end - channels.start]
            some.append((part, slice(begin - wanted.start, end - wanted.start)))
    return some
