"""Transposed convolution, scattered: products are added where the kernel reaches, block by block; epilogue, store.

::

    columns [g, C_g taps, pixels]   =   W' [g, C_g taps, O_g]   x   x [g, O_g, pixels]
    results [g, C_g, elements]     +=   a slice of columns for every tap

    x of a run of pixels   --BLAS-->   columns                    --add-->   sums                 --epilogue-->   results
    any strides,                       [channels, taps, pixels]              [channels, elements]                 any strides,
    any dtype                          dtype of the sums                     or the results themselves            rounded once

A block is some samples and some channels of the results, so blocks share nothing.  Within a block, the runs of x's
pixels are multiplied one after the other, and added while their columns are in cache.

Blocks are disjoint and the runs of a block are added in order.  The results are therefore bitwise the same in whatever
order threads compute the blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.activations import activate
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.block_loops import MIN_BLOCK, BlockLoop, block_of_pixels, even_channels
from cupyconv.numpy.convolution import LONE_PIXELS, PRODUCT_BLOCK, copy_bytes, is_matrix, weight_is_factor
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import (
    INDEX_ARRAYS,
    INDEX_BYTES,
    Region,
    add,
    added_together,
    five_axes,
    parts_of,
    read,
    read_through_index,
    tap_regions,
)
from cupyconv.problem.arrays import ITEMSIZE, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry, even_part, ranges_of
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.problems import TransposedProblem

#: Channels of a block below which pixels are cut instead: fewer channels would leave too few rows in a product.
FEW_CHANNELS = 32

#: Sums of some of a block's channels: (array [channels, samples, d, h, w], the slice of the block's channels).
Piece = tuple[np.ndarray, slice]


# --- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScatteredLoop(BlockLoop):
    """A loop over samples and channels of the results; a subclass is an implementation that adds products.

    `block` is the samples of a block, and the extents of a run: the pixels of x that one product covers.  Each run is
    added to the sums that its windows reach.  `channels` is the channels of some whole groups, or of part of one.
    """

    kept: ClassVar[int] = 1
    #: Target for the bytes of a run's columns.
    target: ClassVar[int] = PRODUCT_BLOCK
    #: Channels of a block below which pixels are cut.
    fewest_channels: ClassVar[int] = FEW_CHANNELS
    #: `taps_first`: whether taps are the first axis of the weight, which is a copy then.  `one_product`: whether an
    #: element is a single product if there is one tap.
    taps_first: ClassVar[bool] = False
    one_product: ClassVar[bool] = True

    problem: TransposedProblem
    channels: int = 1
    in_place: bool = False  # the sums are the results themselves

    @classmethod
    def columns(cls, geometry: ConvGeometry) -> int:
        """Return the number of columns that are stored per channel and pixel."""
        return cls.kept

    @abstractmethod
    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        """Add the contribution of a run of pixels to a block of (samples, channels)."""

    # Common to all subclasses.

    @property
    def each_block(self) -> Iterator[tuple[range, range]]:
        """The samples and the channels of each block; channels count through the concatenated results."""
        geometry, (whole, part) = self.geometry, self.cut_channels
        for samples in parts_of(geometry.batch, self.block[0]):
            for first in range(0, geometry.in_channels, whole):
                for channels in parts_of(whole, part):
                    yield range(samples.start, samples.stop), range(first + channels.start, first + channels.stop)

    @property
    def cut_channels(self) -> tuple[int, int]:
        """The channels that are cut into parts (those of a group, or all), and the channels of a part."""
        geometry, part = self.geometry, max(1, self.channels)
        whole = geometry.in_channels if part >= geometry.group_channels else geometry.group_channels
        return max(1, whole), part

    @property
    def blocks(self) -> int:
        geometry, (whole, part) = self.geometry, self.cut_channels
        return -(-geometry.batch // self.block[0]) * (geometry.in_channels // whole) * -(-whole // part)

    @property
    def turns(self) -> int:
        return self.blocks * self.runs * min(self.geometry.taps, max(1, prod(self.block[1:])))

    @cached_property
    def runs(self) -> int:
        """Number of runs of x's pixels per block."""
        return prod(-(-extent // part) for extent, part in zip(self.geometry.out_size, self.block[1:]))

    @cached_property
    def area(self) -> int:
        """Pixels of a run, over all samples of a block."""
        return prod(self.block)

    def products_work(self, taps: float) -> float:
        """Return the estimated time of the products, each of `taps` taps."""
        geometry, own = self.geometry, max(1, self.channels // max(1, self.geometry.group_channels))
        sizes = self.channels / own * taps, geometry.group_outputs, self.area
        return self.blocks * self.runs * own * geometry.taps / taps * cost.product(*sizes, self.problem)

    @property
    def added_work(self) -> float:
        """Estimated time to write zeros, to add an element for every tap, and to copy sums and x."""
        geometry, problem = self.geometry, self.problem
        elements = self.blocks * self.runs * self.channels * self.area * geometry.taps
        if geometry.padding_mode == "constant":
            work = cost.added_to_windows(elements, problem.dtype, self.block[3], geometry.stride[2] > 1)
        else:
            work = cost.added_with_border(elements, problem.dtype)
        passes = 1 + (not self.in_place) + bool(problem.activation)
        work += cost.added(passes * geometry.batch * geometry.in_channels * prod(geometry.size), problem.dtype)
        if not x_is_factor(problem) or self.block[0] > 1:
            copies = -(-geometry.group_channels // max(1, self.channels))
            work += cost.copied(
                copies * geometry.batch * geometry.out_channels * geometry.pixels, self.block[3], problem.x_dtype
            )
        return work

    @property
    def calls(self) -> float:
        each = 2 if self.geometry.padding_mode == "constant" else 20
        return self.turns * each + self.blocks * self.runs * 12

    def __str__(self) -> str:
        samples, *run = self.block
        sums = "the results" if self.in_place else self.sums_dtype
        return (
            f"loop     {self.name}, accumulates in {sums}: {counted(self.blocks, 'block')} of {counted(samples, 'sample')}"
            f" x {counted(self.channels, 'channel')}, runs of {' x '.join(map(str, run))} (d, h, w), on {counted(self.threads, 'thread')}"
        )

    @property
    def workspace(self) -> int:
        """Bytes for one block: columns, its part of x, sums, and temporaries for borders and activations."""
        problem, geometry, (samples, *run), channels = self.problem, self.geometry, self.block, self.channels
        area, columns = self.area, self.columns(geometry)
        item, x_item = self.sums_dtype.itemsize, self.x_dtype.itemsize
        nbytes = columns * channels * area * item
        if problem.factor_alone_is_complex:
            # Products with the real or imaginary part of the weight, and a copy of that part: it is strided, and NumPy
            # 2.5 copies it.
            nbytes += columns * channels * (area + geometry.group_outputs) * item // 2
        if not (x_is_factor(problem) and samples == 1):
            groups = max(1, channels // max(1, geometry.group_channels))
            nbytes += groups * geometry.group_outputs * area * x_item
        if geometry.padding_mode != "constant":
            # Values are added tap by tap, or pixel by pixel.
            implementations = (run, geometry.stride), (geometry.kernel, geometry.dilation)
            nbytes += (
                channels
                * samples
                * max(added_together(geometry, *implementation) for implementation in implementations)
                * item
            )
            nbytes += (
                INDEX_ARRAYS
                * INDEX_BYTES
                * max(max(read_through_index(geometry, implementation[0])) for implementation in implementations)
            )
        image = channels * samples * prod(geometry.size) * item
        return nbytes + image * ((not self.in_place) + bool(problem.activation))

    @classmethod
    def loops(cls, problem: TransposedProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        loop = cls._fitted(problem)
        sizes = {"weight": cls._weight_copy(problem), "blocks": loop.threads * loop.workspace}
        return [loop] if any(out.nbytes for out in problem.outs) else [], sizes

    @classmethod
    def _fitted(cls, problem: TransposedProblem) -> Self:
        """Return the first loop of `_to_try` that fits the workspace limit."""
        weight = cls._weight_copy(problem)
        limit, fixed = problem.limit_with(weight), weight + 2 * Plan.ALIGNMENT
        least = 0
        for loop in cls._to_try(problem):
            needed = fixed + problem.host.threads * loop.workspace
            if needed <= limit:
                return loop
            least = min(least or needed, needed)
        raise problem.does_not_fit("the smallest block", least, limit)

    @classmethod
    def _to_try(cls, problem: TransposedProblem) -> Iterator[Self]:
        """Yield candidates, the best first: then fewer channels, shorter runs, and at last sums in the results."""
        geometry, machine = problem.geometry, problem.host
        one = cls(problem, (1, 1, 1, 1))
        exact = accumulator(problem.dtype) == problem.dtype
        # Every tap adds to the sums.  In a strided result, that takes longer than one copy at the end.
        unit = all(out.strides[4] == 1 or out.shape[4] == 1 for out in problem.outs)
        per_pixel = max(1, cls.columns(geometry)) * ITEMSIZE[accumulator(problem.dtype)]
        implementations = [replace(one, in_place=in_place) for in_place in dict.fromkeys((exact and unit, exact))]
        for implementation in implementations:
            target = cls.target
            while target:
                fitting = target // (per_pixel * max(1, geometry.pixels))
                channels = max(fitting, min(cls.fewest_channels, target // (per_pixel * MIN_BLOCK)), 1)
                samples = fitting // max(1, geometry.in_channels) if geometry.pixels < LONE_PIXELS else 1
                samples = even_part(geometry.batch, min(samples, geometry.batch // machine.threads))
                if -(-geometry.batch // samples) < machine.threads:  # too few samples for all threads
                    channels = min(channels, -(-geometry.in_channels // machine.threads))
                channels = even_channels(geometry, channels)
                pixels = target // (per_pixel * max(1, channels))
                block = (samples, *geometry.out_size)
                if pixels < geometry.pixels:
                    block = (1, *block_of_pixels(geometry, max(1, pixels), 1)[1:])
                yield replace(implementation, block=block, channels=channels)
                target //= 2
            yield implementation

    @classmethod
    def _weight_copy(cls, problem: TransposedProblem) -> int:
        """Return the bytes of the weight's copy, if one is needed: for the dtype, the order or the conjugate."""
        is_conjugated = problem.conjugate and is_complex(problem.weight_dtype)
        is_copied = cls.taps_first or is_conjugated or not weight_is_factor(problem)
        return copy_bytes(problem.weight, problem.weight_dtype) if is_copied else 0

    #: Nothing is multiplied by zeros.
    adds_zeros = has_zero_taps = False

    @cached_property
    def written_once(self) -> bool:
        """Whether each element's sum is a single product."""
        return self.geometry.is_pointwise and self.one_product

    @cached_property
    def pixel_runs(self) -> list[tuple[range, ...]]:
        """The runs of x's pixels that products cover."""
        return list(product(*map(ranges_of, self.geometry.out_size, self.block[1:])))

    def run(self, arrays: Mapping[str, Any]) -> None:
        in_threads(self.threads, ScatteredRun(self, arrays).finish, self.each_block, self.holds_blas)


def x_is_factor(problem: TransposedProblem) -> bool:
    """Whether products read x in place, sample by sample."""
    (x, *others) = problem.xs
    return not others and x.dtype == accumulator(problem.x_dtype) and is_matrix(x) and problem.is_one_kind


# --- runs -----------------------------------------------------------------------------------------------------


class ScatteredRun:
    """One run: its arrays, viewed with five axes, and the data that its blocks share."""

    def __init__(self, loop: ScatteredLoop, arrays: Mapping[str, Any]) -> None:
        self.loop, self.problem, self.geometry = loop, loop.problem, loop.geometry
        problem, geometry = loop.problem, loop.geometry
        self.xs = [five_axes(arrays[x.name]) for x in problem.xs]
        self.outs = [five_axes(arrays[out.name]) for out in problem.outs]
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        weight = arrays["weight"]
        if loop.taps_first:
            weight = np.moveaxis(weight, (0, 1), (-2, -1))
        weight = np.ascontiguousarray(weight, loop.factor_dtype)
        if problem.conjugate:  # in place only in a copy, not in the argument
            is_copy = not np.may_share_memory(weight, arrays["weight"])
            weight = np.conjugate(weight, out=weight if is_copy else None)
        per_group = (geometry.groups, geometry.group_outputs, geometry.group_channels)
        self.weight = weight.reshape((geometry.taps, *per_group) if loop.taps_first else (*per_group, geometry.taps))
        bias = arrays.get("bias")
        if bias is not None:
            bias = bias.astype(self.outs[0].dtype, copy=False).astype(loop.sums_dtype, copy=False)
        self.bias = bias
        self.sums, self._x = Scratch(loop.sums_dtype, loop.blocks), Scratch(loop.x_dtype, loop.blocks)

    def finish(self, block: tuple[range, range]) -> None:
        """Compute some channels of some samples."""
        geometry, (samples, channels) = self.geometry, block
        results = self._pieces(samples, channels)
        sums = results
        if not self.loop.in_place:
            image = self.sums.array("sums", (len(channels), len(samples), *geometry.size))
            sums = [(image[part], part) for _, part in results]
        if not self.loop.written_once:
            for piece, _ in sums:
                piece[...] = 0
        self.add_runs(sums, block)
        for (piece, part), (result, _) in zip(sums, results):
            if self.bias is not None:
                piece += self.bias[channels.start : channels.stop][part, None, None, None, None]
            if self.pre is not None:
                self.pre[samples.start : samples.stop, channels.start : channels.stop].swapaxes(0, 1)[part] = piece
            activate(piece, self.problem.activation)
            if piece is not result:
                result[...] = piece

    def add_runs(self, sums: list[Piece], block: tuple[range, range]) -> None:
        """Add the contributions of all pixels, run after run."""
        for pixels in self.loop.pixel_runs:
            self.loop.add(self, sums, block, pixels)

    def _pieces(self, samples: range, channels: range) -> list[Piece]:
        """Return the parts of the results that a block covers."""
        pieces = []
        for out, first in zip(self.outs, self.geometry.channel_offsets):
            begin, end = max(channels.start, first), min(channels.stop, first + out.shape[1])
            if begin < end:
                part = out[samples.start : samples.stop, begin - first : end - first].swapaxes(0, 1)
                pieces.append((part, slice(begin - channels.start, end - channels.start)))
        return pieces

    def add_each(
        self, sums: list[Piece], pixels: tuple[range, ...], values: np.ndarray, taps: Sequence[range] | None = None
    ) -> None:
        """Add values [channels, taps, samples, pixels of the run]: tap by tap, or pixel by pixel if these are fewer."""
        windows = self.geometry if taps is None else self.geometry.with_taps(taps)
        if windows.taps <= prod(map(len, pixels)):
            for t, regions in enumerate(tap_regions(windows, pixels)):
                self.add(sums, regions, values[:, t])
            return
        by_pixel = values.reshape(len(values), *windows.kernel, values.shape[2], prod(values.shape[3:]))
        by_pixel = np.moveaxis(by_pixel, (-1, -2), (1, 2))
        every_tap = tuple(map(range, windows.kernel))
        for p, regions in enumerate(tap_regions(windows.exchanged(pixels), every_tap)):
            self.add(sums, regions, by_pixel[:, p])

    def add(self, sums: list[Piece], regions: tuple[Region, ...], values: np.ndarray) -> None:
        """Add values [channels, samples, pixels of the run] to the elements that a tap reads for them."""
        for at, elements in regions:
            if elements is None:  # values in padding are dropped
                continue
            for piece, part in sums:
                columns = read(values[part], at)
                if self.loop.written_once:
                    read(piece, elements)[...] = columns
                else:
                    add(piece, elements, columns)

    # Products.

    def groups(self, channels: range) -> tuple[slice, slice]:
        """Return the groups of a block's channels, and the slice of channels in each group."""
        per_group = self.geometry.group_channels
        first, last = channels.start // per_group, (channels.stop - 1) // per_group
        begin = channels.start - first * per_group
        return slice(first, last + 1), slice(begin, begin + min(per_group, len(channels)))

    def factors(self, block: tuple[range, range], pixels: tuple[range, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the factors of columns: the weight [groups, channels * taps, outputs], x [groups, outputs, pixels]."""
        groups, within = self.groups(block[1])
        weight = self.weight[groups, :, within]
        matrix = weight.reshape(*weight.shape[:2], weight.shape[2] * weight.shape[3]).swapaxes(1, 2)
        return matrix, self.x_of(groups, block[0], pixels)

    def x_of(self, groups: slice, samples: range, pixels: tuple[range, ...]) -> np.ndarray:
        """Return the part of x that a product reads: [groups, outputs per group, pixels of all samples]."""
        geometry = self.geometry
        count, rows = groups.stop - groups.start, geometry.group_outputs
        first, last = groups.start * rows, groups.stop * rows
        at = tuple(slice(axis.start, axis.stop) for axis in pixels)
        xs = [read(x[samples.start : samples.stop], at) for x in self.xs]
        size = tuple(map(len, pixels))
        as_it_lies = len(xs) == 1 and len(samples) == 1 and xs[0].dtype == self.loop.x_dtype
        if as_it_lies and not self.problem.x_alone_is_complex:
            return xs[0][0, first:last].reshape(count, rows, prod(size))
        gathered = self._x.array("x", (count * rows, len(samples), *size))
        offset = 0
        for x in xs:
            begin, end = max(first, offset), min(last, offset + x.shape[1])
            if begin < end:
                gathered[begin - first : end - first] = x[:, begin - offset : end - offset].swapaxes(0, 1)
            offset += x.shape[1]
        return gathered.reshape(count, rows, len(samples) * prod(size))

    def product(self, matrix: np.ndarray, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return rows of the weight times x, in a scratch buffer of shape `shape`."""
        columns = self.sums.array("columns", shape)
        place = columns.reshape(*matrix.shape[:2], x.shape[2])
        real = columns.real.dtype
        if self.problem.x_alone_is_complex:  # as real numbers, x has twice as many pixels
            np.matmul(matrix, x.view(real), out=place.view(real))
        elif self.problem.factor_alone_is_complex:
            part = self.sums.array("part", place.shape, real)
            place.real = np.matmul(matrix.real, x, out=part)
            place.imag = np.matmul(matrix.imag, x, out=part)
        else:
            np.matmul(matrix, x, out=place)
        return columns
