"""What a block of a convolution's outputs reads: windows as slices, the tile that they lie in, and columns.

No large image is copied whole for its padding.  Along an axis, the outputs whose tap falls inside the image are one slice; the
few at the borders are zeros, or are read through an index array that follows the padding mode.

::

    outputs of a block     | border |        inside         | border |
    input elements         | zeros  |  slice(first, last,   | index  |
                           | or idx |        stride)        |  array |

Where a kernel has several taps, a block's part of the padded image is copied once (of a small image that is all of
it), and its windows are a view of that copy; or of the image, where it is one in C order and no border is read.

::

    x_0, x_1, ...   --read-->   tile                  --windows-->   columns
    any strides,                (channels, samples,                  (channels, taps, samples, pixels)
    any dtype                    d, h, w), padded                    a copy of overlapping views

A prologue transforms what is read as it is written, and so never the padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, product
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyconv.numpy.backend import Scratch, lines_apart
from cupyconv.problem.geometry import ConvGeometry, Triple, Windows, ranges_of, tap_boxes
from cupyconv.problem.kept import LARGEST, Cache
from cupyconv.problem.plan import counted

if TYPE_CHECKING:
    from cupyconv.numpy.prologue import Transform

#: Input elements of a run of outputs along an axis.
Elements = slice | np.ndarray
Segment = tuple[slice, Elements | None]  # positions of the outputs, and what they read; None: zeros
Region = tuple[tuple[slice, ...], tuple[Elements, ...] | None]
#: Samples, and pixels along three axes, of a block of outputs.
BlockSize = tuple[int, int, int, int]

#: Blocks of a loop up to which they are kept from run to run, a few kilobytes each: to cut one takes Python tens of
#: microseconds, in which no other thread can begin its next product.
_KEPT_BLOCKS = 128
#: Taps up to which what each reads is kept: a small convolution is bound by working it out; a large one is not, and would
#: keep megabytes.
_KEPT_TAPS = 64
#: Bytes of index arrays up to which they are kept too: half of what is kept of anything, the rest is for what holds them.
_KEPT_INDICES = LARGEST // 2
#: Index arrays that there are at once of a border: the elements read, and those it takes to work them out.  An index has 8 bytes.
INDEX_ARRAYS, INDEX_BYTES = 4, 8
#: Bytes of memory from one place of the nearest cache to itself, and the lines that stay in a place.
PLACES, LINES_OF_A_PLACE = 4096, 8
#: Blocks of which what they read is kept: a loop over more of them works it out anew for each.
KEPT_REGIONS = 256
#: What one block's regions take at the most, where they are slices: their key, with all that a geometry works out later, and each.
_KEY_BYTES, _REGION_BYTES = 3072, 1024
#: Bytes of a tile up to which zeros are written all over it: one long write takes less than several short ones.
_SMALL_TILE = 2 << 20


def padded_index(index: np.ndarray, size: int, mode: str) -> np.ndarray:
    """Elements of an axis that padded indices stand for, as ``np.pad`` defines `mode`."""
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


def inside_image(outputs: range, size: int, stride: int, offset: int) -> range:
    """Those of the outputs whose tap, at ``output * stride + offset``, is inside the image."""
    first = min(max(-(offset // stride), outputs.start), outputs.stop)
    return range(first, max(min(-((offset - size) // stride), outputs.stop), first))


def axis_segments(outputs: range, size: int, stride: int, offset: int, mode: str) -> list[Segment]:
    """The runs of `outputs` (positions in it) whose tap at ``output * stride + offset`` is read alike."""
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
            padded = np.arange(begin, end) * stride + offset
            segments.append((at, padded_index(padded, size, mode)))
    return segments


def boxes(
    windows: Windows, outputs: Sequence[range], strides: Sequence[int], offsets: Sequence[int]
) -> tuple[Region, ...]:
    """Boxes of three axes of `outputs`, each with the input elements it reads; None stands for zeros."""
    regions: list[tuple[tuple[slice, ...], tuple[Elements, ...] | None]] = [((), ())]
    for run, size, stride, offset in zip(outputs, windows.size, strides, offsets):
        segments, whole = axis_segments(run, size, stride, offset, windows.padding_mode), slice(0, len(run))
        longer: list[Region] = []
        for at, elements in regions:
            if elements is None:  # zeros along the axes behind too
                longer.append(((*at, whole), None))
                continue
            for own, read in segments:
                longer.append(((*at, own), None if read is None else (*elements, read)))
        regions = longer
    return tuple(regions)


def tap_regions(windows: Windows, block: tuple[range, ...]) -> Iterable[tuple[Region, ...]]:
    """For every tap, in C order, what a block's output pixels read.

    Kept between calls, since a small convolution is bound by working this out.  Not so large kernels and wide borders,
    whose regions would take megabytes: of these there are one tap's at a time.
    """
    if windows.taps > _KEPT_TAPS:
        return _EachTap(windows, block)
    key = windows, block
    regions = _TAP_REGIONS.get(key)
    if regions is None:
        through_index = 0 if windows.padding_mode == "constant" else sum(read_through_index(windows, map(len, block)))
        if windows.taps * through_index * INDEX_BYTES > _KEPT_INDICES:
            return _EachTap(windows, block)
        regions = tuple(_EachTap(windows, block))
        _TAP_REGIONS.keep(key, regions, at_most=_most_bytes(windows, sum(map(len, regions))))
    return regions


def read_through_index(windows: Windows, extents: Iterable[int]) -> list[int]:
    """Of so many outputs along each axis those whose tap may be on the border, where index arrays say what it reads."""
    pads = (max(0, before) + max(0, after) for before, after in zip(windows.before, windows.after))
    return list(map(min, extents, pads))


def _most_bytes(windows: Windows, regions: int) -> int | None:
    """Of what is kept of a block, with its key, at the most; not known where regions hold index arrays."""
    return _KEY_BYTES + _REGION_BYTES * regions if windows.padding_mode == "constant" else None


_TAP_REGIONS: Cache[tuple[tuple[Region, ...], ...]] = Cache(KEPT_REGIONS)


class _EachTap:
    """What each tap reads, worked out when it is its turn."""

    def __init__(self, windows: Windows, block: tuple[range, ...]) -> None:
        self._windows, self._block = windows, block

    def __iter__(self) -> Iterator[tuple[Region, ...]]:
        windows = self._windows
        for tap in product(*(range(k) for k in windows.kernel)):
            offsets = [t * d - b for t, d, b in zip(tap, windows.dilation, windows.before)]
            yield boxes(windows, self._block, windows.stride, offsets)


class Phase(NamedTuple):
    """Taps that read elements of one rest modulo the stride; what all of them read lies in a tile of its own."""

    taps: tuple[slice, ...]  # of the kernel, along each axis
    counts: tuple[int, ...]  # how many these are
    gaps: tuple[int, ...]  # elements of the tile from what a tap reads to what the next one does
    size: tuple[int, ...]  # of the tile
    regions: tuple[Region, ...]  # what fills it


def phase_reach(windows: Windows) -> tuple[int, ...]:
    """Elements of a phase's tile beyond those of a block's pixels, along each axis, at the most."""
    return tuple(
        (-(-taps // (stride // gcd(stride, gap))) - 1) * (gap // gcd(stride, gap))
        for taps, stride, gap in zip(windows.kernel, windows.stride, windows.dilation)
    )


def phase_regions(windows: Windows, block: tuple[range, ...], bare: bool = False) -> tuple[Phase, ...]:
    """All phases of a block's windows, with tiles whose rows have no padding if they are to be `bare`; kept between calls, as
    `tap_regions` are.
    """
    key = windows, block, bare
    phases = _PHASES.get(key)
    if phases is None:
        phases = tuple(_phases(windows, block, bare))
        _PHASES.keep(key, phases, at_most=_most_bytes(windows, sum(2 + len(phase.regions) for phase in phases)))
    return phases


_PHASES: Cache[tuple[Phase, ...]] = Cache(KEPT_REGIONS)


def phases_along(windows: Windows, axis: int) -> list[tuple[range, int]]:
    """The taps of each phase along an axis, and the elements of its tile from one to the next."""
    taps, stride, gap = windows.kernel[axis], windows.stride[axis], windows.dilation[axis]
    common = gcd(stride, gap)
    period = stride // common
    return [(range(first, taps, period), gap // common) for first in range(min(period, taps))]


class BareRow(NamedTuple):
    """A row of the image without padding, of what a phase of taps along the width reads: one after the other lie in memory."""

    elements: int
    firsts: range  # for each tap, the element that the first pixel reads, as if the row went on to both sides
    pixels: list[range]  # for each tap, those that read what is there


def bare_rows(windows: Windows) -> list[BareRow]:
    """Those of all phases along the width."""
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
    """A view (n, c, d, h, w): axes of length 1 in front of the spatial ones."""
    if image.ndim == 4:
        return image[:, :, None]
    return image.reshape(*image.shape[:2], *(1,) * (5 - image.ndim), *image.shape[2:])


def read(image: np.ndarray, elements: Sequence[Elements]) -> np.ndarray:
    """The elements of the last three axes: a view where they are slices, a gather of a border else."""
    if slice is type(elements[0]) is type(elements[1]) is type(elements[2]):
        return image[(..., *elements)]
    # Cut to what is needed along every axis first, so that no gather is larger than that.
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    image = image[(..., *cut)]
    for axis, element in enumerate(elements):
        if not isinstance(element, slice):
            index: list[Any] = [slice(None)] * 3
            index[axis] = element - element.min()
            image = image[(..., *index)]
    return image


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy (channels, ...), where channels lie last in the target as many at a time as the nearest cache keeps lines of.

    Pixels are copied one after the other then, each from as many lines as it has channels, which the next ones read again.
    Of images of 32 x 32 elements and more, and sides that are powers of two, all these lines belong to the same few places.
    """
    if target.strides[0] != target.itemsize:
        target[...] = source
        return
    most = LINES_OF_A_PLACE * (PLACES // gcd(source.strides[0], PLACES))
    for some in parts_of(len(target), most):
        target[some] = source[some]


def add(image: np.ndarray, elements: Sequence[Elements], values: np.ndarray) -> None:
    """The adjoint of `read`: each value is added to the element that it would have been read from."""
    if slice is type(elements[0]) is type(elements[1]) is type(elements[2]):
        place = image[(..., *elements)]
        np.add(place, values, place)
        return
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    for axis, element in enumerate(elements, start=values.ndim - 3):
        if not isinstance(element, slice):
            values = _together(values, axis, element - element.min())
    image[(..., *cut)] += values


def _together(values: np.ndarray, axis: int, elements: np.ndarray) -> np.ndarray:
    """Values of which several may belong to one element, brought together along this axis; a function lets go of all else."""
    together = np.zeros((*values.shape[:axis], int(elements.max()) + 1, *values.shape[axis + 1 :]), values.dtype)
    gathered, spread = np.moveaxis(values, axis, 0), np.moveaxis(together, axis, 0)
    for one, index in zip(gathered, elements):
        spread[index] += one
    return together


def added_together(windows: Windows, extents: Sequence[int], steps: Sequence[int]) -> int:
    """Elements of what `add` brings together for so many values along each axis, `steps` apart, at the most.

    They span what a border stands for; of a corner there are those of the axis before too.
    """
    sizes, pads = windows.size, [max(0, *ends) for ends in zip(windows.before, windows.after)]
    values = [min(extent, max(size, pad)) for extent, size, pad in zip(extents, sizes, pads)]
    # Beyond the image's size a border begins anew.
    spans = [
        min(pad, (n - 1) * step + 1) if pad <= size else size for n, step, size, pad in zip(values, steps, sizes, pads)
    ]
    has_corners = sum(map(bool, pads)) > 1
    largest = 0
    for axis, span in enumerate(spans):
        others = list(map(max, values, spans))
        del others[axis]
        largest = max(largest, (span + min(values[axis], pads[axis]) * has_corners) * prod(others))
    return largest


def tile_size(windows: Windows, pixels: Sequence[int]) -> tuple[int, ...]:
    """The part of a padded image that all windows of so many pixels lie in."""
    return tuple((n - 1) * s + span for n, s, span in zip(pixels, windows.stride, windows.span))


def tile_shape(windows: Windows, channels: int, block: BlockSize) -> tuple[int, ...]:
    """The tile of a block: (channels, samples, d, h, w)."""
    return channels, block[0], *tile_size(windows, block[1:])


def columns_shape(windows: Windows, block: BlockSize) -> tuple[int, ...]:
    """All windows of a block: (channels, kd, kh, kw, samples, d, h, w)."""
    return windows.in_channels, *windows.kernel, *block


def tile_regions(windows: Windows, block: tuple[range, ...]) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """The size of the tile that all windows of a block lie in, padding included, and what fills it."""
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
    """A part of the result, and what is read for it: some samples and pixels of all groups, or of some."""

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
        """These samples, channels and pixels of an image of the result's size, of five axes."""
        return image if self._is_all else image[self._at]

    def every(
        self, stride: Triple, first: Triple, of: int, image: np.ndarray
    ) -> tuple[np.ndarray, tuple[slice, slice, slice]]:
        """The same of an image that has these pixels `stride` apart, from `first` on, and one channel `of` so many outputs.

        And which of the pixels that is: those that lie in the image.
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
        """These samples of an image."""
        return image if self._has_all_pixels else image[self._samples]

    def read_in_place(self, image: np.ndarray) -> tuple[np.ndarray, Triple]:
        """What the windows read of an image (samples, channels, d, h, w), and their padding before it."""
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
        """Blocks of this size that it falls into, and where they lie in it."""
        axes = [
            list(zip(ranges_of(len(whole), part), ranges_of(whole, part))) for whole, part in zip(self._ranges, size)
        ]
        for parts in product(*axes):
            at = tuple(slice(within.start, within.stop) for within, _ in parts)
            yield at, Block(self.geometry, self._itemsize, tuple(own for _, own in parts))

    def with_taps(self, taps: Sequence[range]) -> Block:
        """The same pixels with some taps of the kernel."""
        return Block(self.geometry.with_taps(taps), self._itemsize, self._ranges)

    @property
    def taps(self) -> Iterable[tuple[Region, ...]]:
        """What each tap reads; kept by `tap_regions`, not with the block."""
        return tap_regions(self.geometry, self._ranges[1:])

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What the taps of each phase of the stride read; kept by `phase_regions`."""
        return phase_regions(self.geometry, self._ranges[1:])

    @property
    def bare_phases(self) -> tuple[Phase, ...]:
        """The same, of rows without padding."""
        return phase_regions(self.geometry, self._ranges[1:], bare=True)

    def tile(self, channels: int) -> Tile:
        """What all taps read of so many channels."""
        tile = self._tiles.get(channels)
        if tile is None:
            tile = self._tiles[channels] = Tile(self.geometry, self._itemsize, self._ranges, channels)
        return tile


class Tile:
    """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""

    def __init__(self, geometry: ConvGeometry, itemsize: int, block: tuple[range, ...], channels: int) -> None:
        samples, *out_size = map(len, block)
        size, regions = tile_regions(geometry, block[1:])
        self.shape = (channels, samples, *size)
        #: Those of a view (c, kd, kh, kw, n, d, h, w) of all windows.
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
        """Where the windows lie in an image in C order, as an offset and strides; None where they read a border."""
        n, c, *spatial = (prod((self.shape[0], *geometry.size)[axis:]) * itemsize for axis in range(5))
        begin = block[0].start * n
        for element, step in zip(elements or (np.empty(0),), spatial):
            if not isinstance(element, slice):
                return None
            begin += element.start * step
        taps = [step * gap for step, gap in zip(spatial, geometry.dilation)]
        moves = [step * stride for step, stride in zip(spatial, geometry.stride)]
        return begin, (c, *taps, n, *moves)


class Blocks:
    """The blocks of a loop, in order, of some groups each where a part is given; few are kept from run to run."""

    def __init__(self, geometry: ConvGeometry, size: BlockSize, itemsize: int, part: int | None = None) -> None:
        self._geometry, self._itemsize = geometry, itemsize  # the latter of what is read
        self._axes = [ranges_of(extent, part) for extent, part in zip((geometry.batch, *geometry.out_size), size)]
        self._groups: list[slice | None] = list(parts_of(geometry.groups, part)) if part else [None]
        few = len(self._groups) * prod(map(len, self._axes)) <= _KEPT_BLOCKS
        self._kept = tuple(self._cut()) if few else None

    def __iter__(self) -> Iterator[Block]:
        return self._cut() if self._kept is None else iter(self._kept)

    def some(self, first: int, count: int) -> Iterator[Block]:
        """So many of them, each made as it is asked for."""
        return self._cut(first, first + count) if self._kept is None else iter(self._kept[first : first + count])

    def _cut(self, first: int = 0, stop: int | None = None) -> Iterator[Block]:
        cuts = islice(product(product(*self._axes), self._groups), first, stop)
        return (Block(self._geometry, self._itemsize, ranges, groups) for ranges, groups in cuts)


class Images:
    """A run's inputs, of five axes, their channels one after the other, and memory to read them into.

    `inputs` are arrays, and the channels of the concatenation that each one is.
    """

    def __init__(
        self, inputs: Sequence[tuple[np.ndarray, slice]], scratch: Scratch, transform: Transform | None
    ) -> None:
        self.inputs, self.scratch, self._transform = inputs, scratch, transform
        self.channels = inputs[-1][1].stop if inputs else 0

    def read(self, regions: tuple[Region, ...], block: Block, target: np.ndarray) -> None:
        """Read boxes of a block's samples into (channels, samples, d, h, w), or (groups, channels, ...)."""
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
        """The part of the padded inputs that all windows of a block lie in: (channels, samples, d, h, w)."""
        tile = block.tile(self.channels)
        image = self.scratch.array("tile", tile.shape)
        if tile.starts_as_zeros:
            image.fill(0)
        self.read(tile.regions, block, image)
        return image

    def read_tile(self, block: Block, target: np.ndarray) -> None:
        """Read what all windows of a block lie in into (channels, samples, d, h, w), with zeros behind it."""
        tile = block.tile(self.channels)
        if tile.starts_as_zeros or target.shape != tile.shape:
            target.fill(0)
        self.read(tile.regions, block, target)

    def tile_or_view(self, block: Block) -> np.ndarray:
        """The tile; where it lies as it is in an input, that part of the input.

        Not at an address that is no multiple of an element: of overlapping windows there a product copies each.
        """
        tile = block.tile(self.channels)
        is_one = len(self.inputs) == len(tile.regions) == 1 and not tile.starts_as_zeros
        if is_one and self._transform is None and (elements := tile.regions[0][1]) is not None:
            image = read(block.samples_of(self.inputs[0][0]), elements).swapaxes(0, 1)
            if image.dtype == self.scratch.dtype and image.strides[-1] == image.itemsize and image.flags.aligned:
                return image
        return self.tile(block)

    def columns(self, block: Block) -> np.ndarray:
        """All windows of a block as (channels, kd, kh, kw, samples, d, h, w) in C order."""
        columns = self.scratch.array("columns", block.columns_shape)
        self.copy_windows(block, columns)
        return columns

    def matrix(self, block: Block) -> np.ndarray:
        """The same as (channels x taps, pixels), whose rows begin where cache lines do."""
        matrix = self.rows_of_columns(block)
        self.copy_windows(block, matrix.reshape(block.columns_shape))
        return matrix

    def rows_of_columns(self, block: Block) -> np.ndarray:
        """Memory for this matrix."""
        row = lines_apart(block.area, self.scratch.dtype.itemsize)
        return self.scratch.array("columns", (prod(block.columns_shape[:4]), row))[:, : block.area]

    def copy_windows(self, block: Block, columns: np.ndarray) -> None:
        """Write all windows of a block to columns."""
        if block.geometry.taps == 1:
            self.read(next(iter(block.taps)), block, columns[:, 0, 0, 0])
            return
        tile = block.tile(self.channels)
        if tile.in_image is not None and self._is_plain(columns.dtype):
            image, (begin, strides) = self.inputs[0][0], tile.in_image
        else:
            image, begin, strides = self.tile(block), 0, tile.windows_strides
        columns[...] = np.ndarray(tile.windows_shape, columns.dtype, image, begin, strides)

    def some_taps(self, block: Block, most: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns of at most so many taps of a block, and which these are; the next overwrite them."""
        if most > 1:
            for taps, box in tap_boxes(block.geometry.kernel, most):
                yield taps, self.columns(block.with_taps(box))
            return
        columns = self.scratch.array("columns", (self.channels, *block.size))
        for t, regions in enumerate(block.taps):
            self.read(regions, block, columns)
            yield slice(t, t + 1), columns

    def _is_plain(self, dtype: np.dtype) -> bool:
        """Whether this is one image in C order that is read as it is."""
        if len(self.inputs) != 1 or self._transform is not None:
            return False
        ((image, _),) = self.inputs
        return image.dtype == dtype and image.flags.c_contiguous

    def by_group(self, groups: int) -> Images:
        """The same with channels cut into groups, none of which is of two inputs: images (n, groups, channels, d, h, w)."""
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
        """Some channels of the concatenation, counted from the first of them."""
        some = []
        for x, own in self.inputs:
            begin, end = max(channels.start, own.start), min(channels.stop, own.stop)
            if begin < end:
                part = x[:, begin - own.start : end - own.start]
                some.append((part, slice(begin - channels.start, end - channels.start)))
        return Images(some, self.scratch, self._transform and self._transform.of(channels))


def parts_of(count: int, part: int) -> Iterator[slice]:
    """So many groups, or channels, at a time."""
    return (slice(first, min(first + part, count)) for first in range(0, count, part))


def whole_and_rest(width: int, part: int) -> list[tuple[int, int, int]]:
    """(first pixel, how many, pixels of each) parts of a row: all that are whole, and what is left."""
    whole, rest = divmod(width, part)
    return [parts for parts in ((0, whole, part), (whole * part, 1, rest)) if parts[1] and parts[2]]


def block_words(blocks: int, block: Sequence[int], axes: str, threads: int) -> str:
    """How a loop is cut, in words."""
    return f"{counted(blocks, 'block')} of {' x '.join(map(str, block))} ({axes}) on {counted(threads, 'thread')}"
