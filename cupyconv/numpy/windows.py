"""What the outputs of a block read: windows as slices, the tile that contains the windows, and columns.

A large image is never copied whole for its padding.  Along an axis, the outputs whose tap falls inside the image read
one slice.  The few outputs at the borders read zeros, or what the padding mode repeats: a slice in either direction, or
one element.  Only a border that is longer than the image is read through an index array.

::

    outputs of a block     | border  |        inside         | border  |
    input elements         | zeros,  |  slice(first, last,   | zeros,  |
                           | a slice |        stride)        | a slice |

If a kernel has several taps, the part of the padded image that a block reads is copied once, to a tile.  Windows are
views of the tile, or of the image if it is C-contiguous and the block reads no border.

::

    x_0, x_1, ...   --read-->   tile                  --windows-->   columns
    any strides,                (channels, samples,                  (channels, taps, samples, pixels)
    any dtype                    d, h, w), padded                    a copy of overlapping views

A prologue transforms the elements while they are copied, so it never transforms the padding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, product
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyconv.numpy.backend import Scratch, lines_apart
from cupyconv.problem.caches import LARGEST, Cache
from cupyconv.problem.geometry import ConvGeometry, Triple, Windows, ranges_of, tap_boxes
from cupyconv.problem.plan import counted

if TYPE_CHECKING:
    from cupyconv.numpy.prologue import Transform

#: Input elements that consecutive outputs read along an axis; a slice of one element may be read by several outputs.
Elements = slice | np.ndarray
Segment = tuple[slice, Elements | None]  # positions of the outputs, and the elements they read; None: zeros
Region = tuple[tuple[slice, ...], tuple[Elements, ...] | None]
#: Number of samples, and of pixels along three axes, of a block of outputs.
BlockSize = tuple[int, int, int, int]

#: Largest number of blocks of a loop that are cached between runs, a few kilobytes each.  Python needs tens of
#: microseconds to make a block, in which no other thread can start its next product.
_CACHED_BLOCKS = 128
#: Largest number of taps whose regions are cached.  Computing them dominates the time of a small convolution.  A large
#: one is not bound by it, and its regions would need megabytes.
_CACHED_TAPS = 64
#: Largest index arrays, in bytes, that are cached: half of the largest entry; the rest is for the objects that hold
#: them.
_CACHED_INDICES = LARGEST // 2
#: Index arrays that exist at once for a border (elements read, and temporaries to compute them), and bytes of an index.
INDEX_ARRAYS, INDEX_BYTES = 4, 8
#: Elements beside one of a border's below which NumPy's slow loop over elements takes less time than Python's loop over
#: the border: a long border of a small image would take seconds.
FEW_BESIDE = 64
#: Distance in bytes of addresses that map to the same set of the L1 cache, and cache lines per set.
PLACES, LINES_OF_A_PLACE = 4096, 8
#: Most channels that are copied one by one to an image with channels last, and elements from one of its pixels to the
#: next.
FEW_CHANNELS, CLOSE = 4, 8
#: Number of blocks whose regions are cached.  A loop over more blocks computes them again for each block.
CACHED_REGIONS = 256
#: Upper bounds in bytes, for regions that are slices: of a block's key, with all that a geometry computes later; of a
#: region.
_KEY_BYTES, _REGION_BYTES = 4096, 1024
#: Largest tile, in bytes, that is filled with zeros as a whole: one long write is faster than several short ones.
_SMALL_TILE = 2 << 20


def padded_index(index: np.ndarray, size: int, mode: str) -> np.ndarray:
    """Return the elements of an axis that padded indices refer to, as ``np.pad`` defines `mode`."""
    if mode == "edge":
        return np.clip(index, 0, size - 1)
    if mode == "wrap":
        return index % size
    if mode == "symmetric":
        folded = index % (2 * size)
        return np.minimum(folded, 2 * size - 1 - folded)
    if mode == "reflect":
        period = max(1, 2 * (size - 1))
        folded = index % period
        return np.minimum(folded, period - folded)
    raise AssertionError(mode)


def is_gathered(windows: Windows, axis: int) -> bool:
    """Whether the borders along an axis are read through index arrays: if they are no run of the image.

    Most are longer than the image; for "reflect", also one that is as long.
    """
    mode, pad = windows.padding_mode, max(0, windows.before[axis], windows.after[axis])
    return mode not in ("constant", "edge") and pad > _longest_run(windows.size[axis], mode)


def has_gathered(windows: Windows) -> bool:
    """Whether any border is read through index arrays."""
    return any(is_gathered(windows, axis) for axis in range(3))


def _longest_run(size: int, mode: str) -> int:
    """Length of the longest border that is a run of an image of this size."""
    return size - (mode == "reflect")


def _border(padded: range, size: int, mode: str) -> Elements:
    """Return the elements that positions before the image, or after it, refer to.

    Within the image's size, they are a run of the image in either direction; "edge" repeats one element.  Longer
    borders are index arrays.
    """
    first, last = padded_index(np.array((padded[0], padded[-1])), size, mode).tolist()
    longest = _longest_run(size, mode)
    if mode == "edge" or len(padded) == 1:
        return slice(first, first + 1, 1)
    if padded[0] < -longest or padded[-1] >= size + longest:
        return padded_index(np.arange(padded.start, padded.stop, padded.step), size, mode)
    step = padded.step if mode == "wrap" else -padded.step
    stop = last + (1 if step > 0 else -1)
    return slice(first, stop if stop >= 0 else None, step)


def inside_image(outputs: range, size: int, stride: int, offset: int) -> range:
    """Return the outputs whose tap, at ``output * stride + offset``, is inside the image."""
    first = min(max(-(offset // stride), outputs.start), outputs.stop)
    return range(first, max(min(-((offset - size) // stride), outputs.stop), first))


def axis_segments(outputs: range, size: int, stride: int, offset: int, mode: str) -> list[Segment]:
    """Split `outputs` into runs whose tap, at ``output * stride + offset``, is before, inside or after the image."""
    inside = inside_image(outputs, size, stride, offset)
    segments: list[Segment] = []
    runs = ((outputs.start, inside.start, False), (inside.start, inside.stop, True), (inside.stop, outputs.stop, False))
    for begin, end, is_inside in runs:
        if begin == end:
            continue
        at = slice(begin - outputs.start, end - outputs.start)
        first = begin * stride + offset
        if is_inside:
            segments.append((at, slice(first, first + (end - begin - 1) * stride + 1, stride)))
        elif mode == "constant":
            segments.append((at, None))
        else:
            segments.append((at, _border(range(first, end * stride + offset, stride), size, mode)))
    return segments


def boxes(
    windows: Windows, outputs: Sequence[range], strides: Sequence[int], offsets: Sequence[int]
) -> tuple[Region, ...]:
    """Return boxes of `outputs` along three axes, each with the input elements that it reads; None stands for zeros."""
    regions: list[tuple[tuple[slice, ...], tuple[Elements, ...] | None]] = [((), ())]
    for run, size, stride, offset in zip(outputs, windows.size, strides, offsets):
        segments, whole = axis_segments(run, size, stride, offset, windows.padding_mode), slice(0, len(run))
        longer: list[Region] = []
        for at, elements in regions:
            if elements is None:  # zeros along the remaining axes too
                longer.append(((*at, whole), None))
                continue
            for own, read in segments:
                longer.append(((*at, own), None if read is None else (*elements, read)))
        regions = longer
    return tuple(regions)


def tap_regions(windows: Windows, block: tuple[range, ...]) -> Iterable[tuple[Region, ...]]:
    """Return the regions that a block's output pixels read, for every tap in C order.

    Regions are cached between calls, because computing them dominates the time of a small convolution.  Large kernels
    and borders longer than the image have regions of megabytes, which are not cached: they exist for one tap at a time.
    """
    if windows.taps > _CACHED_TAPS:
        return _EachTap(windows, block)
    key = windows, block
    regions = _TAP_REGIONS.get(key)
    if regions is None:
        through_index = sum(read_through_index(windows, map(len, block)))
        if windows.taps * through_index * INDEX_BYTES > _CACHED_INDICES:
            return _EachTap(windows, block)
        regions = tuple(_EachTap(windows, block))
        _TAP_REGIONS.keep(key, regions, at_most=_most_bytes(windows, sum(map(len, regions))))
    return regions


def read_through_index(windows: Windows, extents: Iterable[int]) -> list[int]:
    """Return how many outputs along each axis, at most, have a tap on the border and read through index arrays."""
    pads = (max(0, before) + max(0, after) for before, after in zip(windows.before, windows.after))
    return [min(extent, pad) * is_gathered(windows, axis) for axis, (extent, pad) in enumerate(zip(extents, pads))]


def _most_bytes(windows: Windows, regions: int) -> int | None:
    """Upper bound of the bytes of a block's cached regions and their key; None if regions hold index arrays."""
    return None if has_gathered(windows) else _KEY_BYTES + _REGION_BYTES * regions


_TAP_REGIONS: Cache[tuple[tuple[Region, ...], ...]] = Cache(CACHED_REGIONS)


class _EachTap:
    """The regions of each tap, computed when the iteration reaches the tap."""

    def __init__(self, windows: Windows, block: tuple[range, ...]) -> None:
        self._windows, self._block = windows, block

    def __iter__(self) -> Iterator[tuple[Region, ...]]:
        windows = self._windows
        for tap in product(*(range(k) for k in windows.kernel)):
            offsets = [t * d - b for t, d, b in zip(tap, windows.dilation, windows.before)]
            yield boxes(windows, self._block, windows.stride, offsets)


class Phase(NamedTuple):
    """Taps that read elements of the same remainder modulo the stride; one tile contains all that they read."""

    taps: tuple[slice, ...]  # taps of the kernel along each axis
    counts: tuple[int, ...]  # number of these taps along each axis
    gaps: tuple[int, ...]  # elements of the tile between what consecutive taps read
    size: tuple[int, ...]  # size of the tile
    regions: tuple[Region, ...]  # regions that fill the tile


def phase_reach(windows: Windows) -> tuple[int, ...]:
    """Upper bound of the elements that a phase's tile has in addition to a block's pixels, along each axis."""
    return tuple(
        (-(-taps // (stride // gcd(stride, gap))) - 1) * (gap // gcd(stride, gap))
        for taps, stride, gap in zip(windows.kernel, windows.stride, windows.dilation)
    )


def phase_regions(windows: Windows, block: tuple[range, ...], bare: bool = False) -> tuple[Phase, ...]:
    """Return all phases of a block's windows, cached like the regions of `tap_regions`; rows of `bare` phases have no
    padding.
    """
    key = windows, block, bare
    phases = _PHASES.get(key)
    if phases is None:
        phases = tuple(_phases(windows, block, bare))
        _PHASES.keep(key, phases, at_most=_most_bytes(windows, sum(2 + len(phase.regions) for phase in phases)))
    return phases


_PHASES: Cache[tuple[Phase, ...]] = Cache(CACHED_REGIONS)


def phases_along(windows: Windows, axis: int) -> list[tuple[range, int]]:
    """Return the taps of each phase along an axis, and the elements of its tile between consecutive taps."""
    taps, stride, gap = windows.kernel[axis], windows.stride[axis], windows.dilation[axis]
    common = gcd(stride, gap)
    period = stride // common
    return [(range(first, taps, period), gap // common) for first in range(min(period, taps))]


class LineRegions(NamedTuple):
    """The regions that each line of a block reads."""

    of_lines: tuple[tuple[Region, ...], ...]
    elements: tuple[Any, ...]  # index of the elements of each region that is not zeros, in the same order
    layout: Hashable  # equal for blocks whose regions are at the same places


def line_regions(windows: Windows, block: tuple[range, ...], row: int, shift: int | None = None) -> LineRegions:
    """Return the regions that lines read, for every tap along depth and height and every phase along the width.

    A line (see `lines`) has rows of `row` elements of one phase.  Without a `shift`, they begin at the first element of
    the image.  With one, they begin `shift` elements after the one at the block's first pixel, and may be padding.
    """
    first = 0 if shift is None else block[2].start + shift
    key = windows, block[:2], row, first
    regions = _LINE_REGIONS.get(key)
    if regions is None:
        (depth, height, stride), outputs = windows.stride, (*block[:2], range(row))
        kernel, gaps, before = windows.kernel, windows.dilation, windows.before
        offsets = (
            (i * gaps[0] - before[0], j * gaps[1] - before[1], first * stride + phase)
            for i, j, phase in product(range(kernel[0]), range(kernel[1]), range(stride))
        )
        of_lines = tuple(boxes(windows, outputs, (depth, height, stride), own) for own in offsets)
        every = [region for regions_of_line in of_lines for region in regions_of_line]
        elements = tuple((..., *own) for _, own in every if own is not None)
        layout = tuple((own is None, *((part.start, part.stop) for part in at)) for at, own in every)
        regions = LineRegions(of_lines, elements, (tuple(map(len, of_lines)), layout))
        _LINE_REGIONS.keep(key, regions, at_most=_most_bytes(windows, 2 * len(every)))
    return regions


_LINE_REGIONS: Cache[LineRegions] = Cache(CACHED_REGIONS)


class BareRow(NamedTuple):
    """A row without padding that a phase of taps along the width reads; these rows are adjacent in memory."""

    elements: int
    firsts: range  # for each tap, the element that the first pixel reads, as if the row continued on both sides
    pixels: list[range]  # for each tap, the pixels that read elements of the row


def bare_rows(windows: Windows) -> list[BareRow]:
    """Return the rows of all phases along the width."""
    width, rows = windows.out_size[2], []
    for taps, gap in phases_along(windows, 2):
        reach, offset = (len(taps) - 1) * gap, taps.start * windows.dilation[2] - windows.before[2]
        inside = inside_image(range(width + reach), windows.size[2], windows.stride[2], offset)
        firsts = range(-inside.start, reach - inside.start + 1, gap)
        pixels = [range(min(max(0, -first), width), min(max(0, len(inside) - first), width)) for first in firsts]
        rows.append(BareRow(len(inside), firsts, pixels))
    return rows


def _phases(windows: Windows, block: tuple[range, ...], bare: bool) -> Iterator[Phase]:
    for axes in product(*(phases_along(windows, axis) for axis in range(3))):
        counts = tuple(len(taps) for taps, _ in axes)
        gaps = tuple(gap for _, gap in axes)
        outputs = [range(own.start, own.stop + (n - 1) * gap) for own, n, gap in zip(block, counts, gaps)]
        offsets = [taps.start * d - b for (taps, _), d, b in zip(axes, windows.dilation, windows.before)]
        if bare:
            outputs[2] = inside_image(outputs[2], windows.size[2], windows.stride[2], offsets[2])
        regions = boxes(windows, outputs, windows.stride, offsets)
        own = tuple(slice(taps.start, taps.stop, taps.step) for taps, _ in axes)
        yield Phase(own, counts, gaps, tuple(map(len, outputs)), regions)


def five_axes(image: np.ndarray) -> np.ndarray:
    """Return a view (n, c, d, h, w), with axes of length 1 before the given spatial axes."""
    if image.ndim == 4:
        return image[:, :, None]
    return image.reshape(*image.shape[:2], *(1,) * (5 - image.ndim), *image.shape[2:])


def read(image: np.ndarray, elements: Sequence[Elements]) -> np.ndarray:
    """Return elements of the last three axes: a view if all are slices, else a gathered copy."""
    if slice is type(elements[0]) is type(elements[1]) is type(elements[2]):
        return image[(..., *elements)]
    # Cut every axis to the needed range first, so that no gather is larger than that.
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    image = image[(..., *cut)]
    for axis, element in enumerate(elements):
        if not isinstance(element, slice):
            index: list[Any] = [slice(None)] * 3
            index[axis] = element - element.min()
            image = image[(..., *index)]
    return image


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array (channels, ...), a few channels at a time if the target stores channels last.

    The copy then proceeds pixel by pixel: it reads one cache line per channel, and the next pixels read these lines
    again.  For images of 32 x 32 elements or more, with sides that are powers of two, all these lines map to a few sets
    of the L1 cache.  A part has as many channels as these sets have lines.  With `FEW_CHANNELS`, NumPy's loop over the
    channels of a pixel is so short that loops over the pixels of each channel take a third of the time, if pixels are
    close to each other.
    """
    if target.strides[0] != target.itemsize:
        target[...] = source
        return
    most = LINES_OF_A_PLACE * (PLACES // gcd(source.strides[0], PLACES))
    if len(target) <= FEW_CHANNELS <= target.shape[-1] and target.strides[-1] <= CLOSE * target.itemsize:
        most = 1
    for some in parts_of(len(target), most):
        target[some] = source[some]


def add(image: np.ndarray, elements: Sequence[Elements], values: np.ndarray) -> None:
    """Add each value to the element that `read` would read it from: the adjoint of `read`."""
    if slice is type(elements[0]) is type(elements[1]) is type(elements[2]):
        place = image[(..., *elements)]
        repeated = tuple(axis for axis in (-3, -2, -1) if place.shape[axis] < values.shape[axis])
        np.add(place, values.sum(repeated, keepdims=True) if repeated else values, place)
        return
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    for axis, element in enumerate(elements, start=values.ndim - 3):
        if not isinstance(element, slice):
            values = _together(values, axis, element - element.min())
    image[(..., *cut)] += values


def _together(values: np.ndarray, axis: int, elements: np.ndarray) -> np.ndarray:
    """Sum the values that belong to the same element along an axis; a function, so that temporaries are freed."""
    together = np.zeros((*values.shape[:axis], int(elements.max()) + 1, *values.shape[axis + 1 :]), values.dtype)
    gathered, spread = np.moveaxis(values, axis, 0), np.moveaxis(together, axis, 0)
    if prod(gathered.shape[1:]) < FEW_BESIDE:
        np.add.at(spread, elements, gathered)
        return together
    for one, index in zip(gathered, elements):
        spread[index] += one
    return together


def added_together(windows: Windows, extents: Sequence[int], steps: Sequence[int]) -> int:
    """Upper bound of the elements that `add` allocates for border values, `extents` per axis and `steps` apart.

    They span the elements that a border refers to, one of "edge".  At a corner, the array of the previous axis exists
    too.  A border that is a run of the image is added in place.
    """
    sizes, pads = windows.size, [max(0, *ends) for ends in zip(windows.before, windows.after)]
    values = [min(extent, max(size, pad)) for extent, size, pad in zip(extents, sizes, pads)]
    # A border that is longer than the image refers to its elements repeatedly.
    spans = [
        min(pad, (n - 1) * step + 1) if pad <= size else size for n, step, size, pad in zip(values, steps, sizes, pads)
    ]
    if windows.padding_mode == "edge":
        spans = [min(1, pad) for pad in pads]
    has_corners = sum(map(bool, pads)) > 1
    largest = 0
    for axis, span in enumerate(spans):
        if not (is_gathered(windows, axis) or (windows.padding_mode == "edge" and pads[axis] > 1)):
            continue
        others = list(map(max, values, spans))
        del others[axis]
        largest = max(largest, (span + min(values[axis], pads[axis]) * has_corners) * prod(others))
    return largest


def tile_size(windows: Windows, pixels: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the part of a padded image that contains all windows of `pixels` outputs."""
    return tuple((n - 1) * s + span for n, s, span in zip(pixels, windows.stride, windows.span))


def tile_shape(windows: Windows, channels: int, block: BlockSize) -> tuple[int, ...]:
    """Return the shape of a block's tile: (channels, samples, d, h, w)."""
    return channels, block[0], *tile_size(windows, block[1:])


def columns_shape(windows: Windows, block: BlockSize) -> tuple[int, ...]:
    """Return the shape of all windows of a block: (channels, kd, kh, kw, samples, d, h, w)."""
    return windows.in_channels, *windows.kernel, *block


def tile_regions(windows: Windows, block: tuple[range, ...]) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Return the size of the tile that contains all windows of a block, with padding, and the regions that fill it."""
    key = windows, block
    tile = _TILE_REGIONS.get(key)
    if tile is None:
        size = tile_size(windows, tuple(map(len, block)))
        starts = [run.start * s - before for run, s, before in zip(block, windows.stride, windows.before)]
        tile = size, boxes(windows, [range(extent) for extent in size], (1, 1, 1), starts)
        _TILE_REGIONS.keep(key, tile, at_most=_most_bytes(windows, len(tile[1])))
    return tile


_TILE_REGIONS: Cache[tuple[tuple[int, ...], tuple[Region, ...]]] = Cache(256)


class Block:
    """A part of the result: some samples and pixels, of all groups or of some; and the input elements that it reads."""

    def __init__(
        self, geometry: ConvGeometry, itemsize: int, ranges: tuple[range, ...], groups: slice | None = None
    ) -> None:
        self.geometry, self._itemsize, self._ranges = geometry, itemsize, ranges
        self._tiles: dict[int, Tile] = {}
        samples, depth, height, width = map(len, ranges)
        self.size: BlockSize = (samples, depth, height, width)
        self.groups = groups or slice(0, geometry.groups)
        self.outputs = slice(self.groups.start * geometry.group_outputs, self.groups.stop * geometry.group_outputs)
        self._samples, *pixels = (slice(r.start, r.stop) for r in ranges)
        self._at = (self._samples, self.outputs if groups else slice(None), *pixels)
        self._has_all_pixels = self.size == (geometry.batch, *geometry.out_size)
        self._is_all = self._has_all_pixels and not groups
        self.area = prod(self.size)
        self.columns_shape = columns_shape(geometry, self.size)
        self.sums_shape = (self.groups.stop - self.groups.start, geometry.group_outputs, *self.size)

    def of(self, image: np.ndarray) -> np.ndarray:
        """Return this block's samples, channels and pixels of a five-axis image of the result's size."""
        return image if self._is_all else image[self._at]

    def every(
        self, stride: Triple, first: Triple, of: int, image: np.ndarray
    ) -> tuple[np.ndarray, tuple[slice, slice, slice]]:
        """Return this block's part of an image whose pixels are `stride` apart from `first` on.

        The image has one channel per `of` outputs.  The second result says which of the block's pixels are inside it.
        """
        channels = slice(self.outputs.start // of, self.outputs.stop // of)
        at, own = [], []
        for axis, (begin, step, outputs) in enumerate(zip(first, stride, self._ranges[1:])):
            begin += outputs.start * step
            outside = max(0, -(begin // step))
            place = range(begin + outside * step, image.shape[2 + axis], step)[: max(0, len(outputs) - outside)]
            at.append(slice(place.start, place.stop, step))
            own.append(slice(outside, outside + len(place)))
        return image[(self._samples, channels, *at)], (own[0], own[1], own[2])

    def samples_of(self, image: np.ndarray) -> np.ndarray:
        """Return this block's samples of an image."""
        return image if self._has_all_pixels else image[self._samples]

    def read_in_place(self, image: np.ndarray) -> tuple[np.ndarray, Triple]:
        """Return the part of an image (samples, channels, d, h, w) that the windows read, and the padding before it."""
        at, before = self._reach
        return self.samples_of(image)[at], before

    @cached_property
    def _reach(self) -> tuple[tuple[Any, ...], Triple]:
        geometry = self.geometry
        at: list[Any] = [...]
        before = []
        axes = zip(self._ranges[1:], geometry.stride, geometry.before, geometry.span, geometry.size)
        for outputs, stride, padding, span, size in axes:
            begin = outputs.start * stride - padding
            end = begin + (len(outputs) - 1) * stride + span
            first = min(max(begin, 0), size)
            at.append(slice(first, max(first, min(end, size))))
            before.append(first - begin)
        return tuple(at), (before[0], before[1], before[2])

    def parts(self, size: BlockSize) -> Iterator[tuple[tuple[slice, ...], Block]]:
        """Split this block into blocks of `size`; yield the place of each in this block, and the block."""
        axes = [
            list(zip(ranges_of(len(whole), part), ranges_of(whole, part))) for whole, part in zip(self._ranges, size)
        ]
        for parts in product(*axes):
            at = tuple(slice(within.start, within.stop) for within, _ in parts)
            yield at, Block(self.geometry, self._itemsize, tuple(own for _, own in parts))

    def with_taps(self, taps: Sequence[range]) -> Block:
        """Return a block with the same pixels and only some taps of the kernel."""
        return Block(self.geometry.with_taps(taps), self._itemsize, self._ranges)

    @property
    def taps(self) -> Iterable[tuple[Region, ...]]:
        """Regions that each tap reads; `tap_regions` caches them, not the block."""
        return tap_regions(self.geometry, self._ranges[1:])

    def lines(self, row: int, shift: int | None = None) -> LineRegions:
        """Regions that lines with rows of `row` elements read (see `line_regions`, which caches them)."""
        return line_regions(self.geometry, self._ranges[1:], row, shift)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the stride and the regions that they read; `phase_regions` caches them."""
        return phase_regions(self.geometry, self._ranges[1:])

    @property
    def bare_phases(self) -> tuple[Phase, ...]:
        """The `phases` for rows without padding."""
        return phase_regions(self.geometry, self._ranges[1:], bare=True)

    def tile(self, channels: int) -> Tile:
        """Return the tile that all taps read, for `channels` channels."""
        tile = self._tiles.get(channels)
        if tile is None:
            tile = self._tiles[channels] = Tile(self.geometry, self._itemsize, self._ranges, channels)
        return tile


class Tile:
    """The part of the padded inputs that contains all windows of a block: (channels, samples, d, h, w)."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, block: tuple[range, ...], channels: int) -> None:
        samples, *out_size = map(len, block)
        size, regions = tile_regions(geometry, block[1:])
        self.shape = (channels, samples, *size)
        #: Shape of a view (c, kd, kh, kw, n, d, h, w) of all windows.
        self.windows_shape = (channels, *geometry.kernel, samples, *out_size)
        c, n, *spatial = (prod(self.shape[axis + 1 :]) * itemsize for axis in range(5))
        taps = [step * gap for step, gap in zip(spatial, geometry.dilation)]
        moves = [step * stride for step, stride in zip(spatial, geometry.stride)]
        self.windows_strides = (c, *taps, n, *moves)
        read = tuple(region for region in regions if region[1] is not None)
        self.not_zeros, self.has_zeros = read, len(read) < len(regions)
        self.in_image = self._in_image(geometry, itemsize, block, regions[0][1]) if len(regions) == 1 else None
        self.all_regions = regions
        self.starts_as_zeros = len(read) < len(regions) and prod(self.shape) * itemsize <= _SMALL_TILE
        self.regions = read if self.starts_as_zeros else regions

    def _in_image(
        self, geometry: ConvGeometry, itemsize: int, block: tuple[range, ...], elements: tuple[Elements, ...] | None
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the offset and strides of the windows in a C-contiguous image; None if they read a border."""
        n, c, *spatial = (prod((self.shape[0], *geometry.size)[axis:]) * itemsize for axis in range(5))
        begin = block[0].start * n
        if elements is None:
            return None
        for element, step, extent in zip(elements, spatial, self.shape[2:]):
            if not isinstance(element, slice) or element.step < 0 or element.stop - element.start < extent:
                return None
            begin += element.start * step
        taps = [step * gap for step, gap in zip(spatial, geometry.dilation)]
        moves = [step * stride for step, stride in zip(spatial, geometry.stride)]
        return begin, (c, *taps, n, *moves)


class Blocks:
    """The blocks of a loop in order, each of `part` groups or of all; a small number is cached between runs."""

    def __init__(self, geometry: ConvGeometry, size: BlockSize, itemsize: int, part: int | None = None) -> None:
        self._geometry, self._itemsize = geometry, itemsize  # `itemsize` is that of the elements read
        self._axes = [ranges_of(extent, part) for extent, part in zip((geometry.batch, *geometry.out_size), size)]
        self._groups: list[slice | None] = list(parts_of(geometry.groups, part)) if part else [None]
        few = len(self._groups) * prod(map(len, self._axes)) <= _CACHED_BLOCKS
        self._kept = tuple(self._cut()) if few else None

    def __iter__(self) -> Iterator[Block]:
        return self._cut() if self._kept is None else iter(self._kept)

    def some(self, first: int, count: int) -> Iterator[Block]:
        """Yield `count` blocks from block `first` on; each is made on demand unless it is cached."""
        return self._cut(first, first + count) if self._kept is None else iter(self._kept[first : first + count])

    def _cut(self, first: int = 0, stop: int | None = None) -> Iterator[Block]:
        cuts = islice(product(product(*self._axes), self._groups), first, stop)
        return (Block(self._geometry, self._itemsize, ranges, groups) for ranges, groups in cuts)


class Images:
    """A run's inputs as five-axis arrays, concatenated along the channels, and scratch memory to read them into.

    `inputs` lists each array with its slice of the concatenated channels.
    """

    def __init__(
        self, inputs: Sequence[tuple[np.ndarray, slice]], scratch: Scratch, transform: Transform | None
    ) -> None:
        self.inputs, self.scratch, self._transform = inputs, scratch, transform
        self.channels = inputs[-1][1].stop if inputs else 0

    @property
    def is_plain(self) -> bool:
        """Whether there is exactly one input, without a prologue."""
        return len(self.inputs) == 1 and self._transform is None

    def read(self, regions: tuple[Region, ...], block: Block, target: np.ndarray) -> None:
        """Copy boxes of a block's samples to `target`: (channels, samples, d, h, w) or (groups, channels, ...)."""
        channels_first = (1, 0, 2, 3, 4) if target.ndim == 5 else (1, 2, 0, 3, 4, 5)
        for at, elements in regions:
            for x, channels in self.inputs:
                place: Any = (channels, ..., *at)
                part = target[place]
                if elements is None:
                    part[...] = 0
                elif self._transform is None:
                    copy(part, read(block.samples_of(x), elements).transpose(channels_first))
                else:
                    self._transform.write(part, read(block.samples_of(x), elements).transpose(channels_first), channels)

    def tile(self, block: Block) -> np.ndarray:
        """Return a copy of the part of the padded inputs with all windows of a block: (channels, samples, d, h, w)."""
        tile = block.tile(self.channels)
        image = self.scratch.array("tile", tile.shape)
        if tile.starts_as_zeros:
            image.fill(0)
        self.read(tile.regions, block, image)
        return image

    def read_tile(self, block: Block, target: np.ndarray) -> None:
        """Copy a block's tile to `target`, (channels, samples, d, h, w); if `target` is larger, the rest is zeros."""
        tile = block.tile(self.channels)
        if tile.starts_as_zeros or target.shape != tile.shape:
            target.fill(0)
        self.read(tile.regions, block, target)

    def tile_or_view(self, block: Block) -> np.ndarray:
        """Return the tile, or a view of the input if the input contains the tile as it is.

        An unaligned input is copied, because a product would copy each of its overlapping windows.
        """
        tile = block.tile(self.channels)
        if self.is_plain and tile.in_image is not None:
            elements = tile.not_zeros[0][1]
            assert elements is not None
            image = read(block.samples_of(self.inputs[0][0]), elements).swapaxes(0, 1)
            if image.dtype == self.scratch.dtype and image.strides[-1] == image.itemsize and image.flags.aligned:
                return image
        return self.tile(block)

    def columns(self, block: Block) -> np.ndarray:
        """Return a C-contiguous copy of all windows of a block, (channels, kd, kh, kw, samples, d, h, w)."""
        columns = self.scratch.array("columns", block.columns_shape)
        self.copy_windows(block, columns)
        return columns

    def matrix(self, block: Block) -> np.ndarray:
        """Return a copy of all windows of a block, (channels x taps, pixels), whose rows start at cache lines."""
        matrix = self.rows_of_columns(block)
        self.copy_windows(block, matrix.reshape(block.columns_shape))
        return matrix

    def rows_of_columns(self, block: Block) -> np.ndarray:
        """Return scratch memory for the matrix that `matrix` returns."""
        row = lines_apart(block.area, self.scratch.dtype.itemsize)
        return self.scratch.array("columns", (prod(block.columns_shape[:4]), row))[:, : block.area]

    def copy_windows(self, block: Block, columns: np.ndarray) -> None:
        """Copy all windows of a block to `columns`."""
        if block.geometry.taps == 1:
            self.read(next(iter(block.taps)), block, columns[:, 0, 0, 0])
            return
        tile = block.tile(self.channels)
        if tile.in_image is not None and self._is_factor(columns.dtype):
            image, (begin, strides) = self.inputs[0][0], tile.in_image
        else:
            image, begin, strides = self.tile(block), 0, tile.windows_strides
        columns[...] = np.ndarray(tile.windows_shape, columns.dtype, image, begin, strides)

    def some_taps(self, block: Block, most: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield slices of at most `most` taps and their columns; each iteration overwrites the previous columns."""
        if most > 1:
            for taps, box in tap_boxes(block.geometry.kernel, most):
                yield taps, self.columns(block.with_taps(box))
            return
        columns = self.scratch.array("columns", (self.channels, *block.size))
        for t, regions in enumerate(block.taps):
            self.read(regions, block, columns)
            yield slice(t, t + 1), columns

    def _is_factor(self, dtype: np.dtype) -> bool:
        """Whether there is exactly one input, C-contiguous, of this dtype and without a prologue."""
        image = self.inputs[0][0] if self.is_plain else None
        return image is not None and image.dtype == dtype and image.flags.c_contiguous

    def by_group(self, groups: int) -> Images:
        """Return images with channels split into groups, (n, groups, channels, d, h, w); no group spans two inputs."""
        per_group = self.channels // groups
        inputs = [
            (
                x.reshape(len(x), x.shape[1] // per_group, per_group, *x.shape[2:]),
                slice(own.start // per_group, own.stop // per_group),
            )
            for x, own in self.inputs
        ]
        return Images(inputs, self.scratch, self._transform and self._transform.by_group(groups))

    def some(self, channels: slice) -> Images:
        """Return images of some channels of the concatenation; their first channel becomes channel 0."""
        some = []
        for x, own in self.inputs:
            begin, end = max(channels.start, own.start), min(channels.stop, own.stop)
            if begin < end:
                part = x[:, begin - own.start : end - own.start]
                some.append((part, slice(begin - channels.start, end - channels.start)))
        return Images(some, self.scratch, self._transform and self._transform.of(channels))


def parts_of(count: int, part: int) -> Iterator[slice]:
    """Yield slices of `part` groups or channels at a time."""
    return (slice(first, min(first + part, count)) for first in range(0, count, part))


def whole_and_rest(width: int, part: int) -> list[tuple[int, int, int]]:
    """Split a row into whole parts and a remainder, as tuples (first pixel, number of parts, pixels per part)."""
    whole, rest = divmod(width, part)
    return [parts for parts in ((0, whole, part), (whole * part, 1, rest)) if parts[1] and parts[2]]


def block_words(blocks: int, block: Sequence[int], axes: str, threads: int) -> str:
    """Describe in words how a loop is cut into blocks."""
    return f"{counted(blocks, 'block')} of {' x '.join(map(str, block))} ({axes}) on {counted(threads, 'thread')}"
