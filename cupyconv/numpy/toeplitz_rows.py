"""Depthwise convolution by rows: Toeplitz matrices times rows of the image, summed over the taps of the other axes.

A matrix has the taps along the height (or depth).  The matrices of the taps along the width are stacked.  One product
computes, for each of these taps, its contribution to m rows of the result, as wide as the image:

::

    matrices of w taps, each      rows of        lines of tap 0     | p0 p1 p2 p3 |      result     =   p0 p1 p2 ...  of tap 0
    (m, m + k - 1), one below  x  the image  =   lines of tap 1     | p0 p1 p2 p3 |                  +  p1 p2 p3 ...  of tap 1
    the other                     in place       lines of tap 2     | p0 p1 p2 p3 |                  +  p2 p3 p4 ...  of tap 2

The lines of a tap are contiguous, and are added as one long run, which begins at the tap's first pixel.  A product adds
the runs: a row of ones times a view whose rows are the runs of all taps.  A run that passes from one line to the next,
beyond the end of the image, must read zeros.  These overwrite the elements there, or are stored between the lines.

In a three-dimensional kernel, each tap along the depth has products of its own, with other rows; these are added too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property, partial
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.convolution import BLAS_REACH, MEMORY_BLOCK, temporaries
from cupyconv.numpy.group_products import COPIES_BLOCK, ONE_THREAD, GroupProducts, sum_is_finite
from cupyconv.numpy.lines import MAX_TAPS
from cupyconv.numpy.toeplitz import reach, strided, toeplitz, within
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import Triple, even_part
from cupyconv.problem.problems import ConvProblem

#: Most rows of outputs that one product computes.
MAX_ROWS = 32
#: Bytes of products that are added while in cache.  With fewer, calls are so short that threads wait for each other.
ROWS_BLOCK = 4 * MEMORY_BLOCK
#: Seconds of work that make another thread worth waking: calls are few, and their views already exist.
SHARE = 250e-6
#: Fewest neighbouring pixels that are worth a product of their own.
MIN_WIDTH = 64
#: Seconds to begin a product, and a run of sums; seconds per element that is added, per matrix element, and per zero.
BEGIN, RUN, ADD, MATRIX, CLEAR = 60e-9, 8e-9, 150e-12, 300e-12, 2.2e-9
#: Scratch buffers of a turn.  The last two are used only if products are added, and "sums" only if not in the result.
BUFFERS = ("kernels", "matrices", "products", "sums")


class Read(NamedTuple):
    """A product per channel and sample: where it is written and what it reads.  Without a matrix, zeros are written."""

    at: tuple[Any, ...]
    matrix: tuple[Any, ...] = ()
    first: tuple[int, ...] = ()  # first pixel of the image
    shape: tuple[int, ...] = ()
    rows: tuple[Any, ...] = ()  # the same as an index, for a single product; several share rows


class Turn(NamedTuple):
    """Views of the scratch memory of the groups whose products are in cache together."""

    products: Sequence[np.ndarray] = ()  # per read; empty if they are the result
    borders: Sequence[np.ndarray] = ()  # elements to set to 0, so that runs may pass from row to row
    runs: Sequence[np.ndarray] = ()  # the runs to add, in pieces
    in_runs: Sequence[np.ndarray] = ()  # sums of runs; empty if they are in the result
    sums: np.ndarray | None = None  # the part of the sums that is copied to the result


class Steps(NamedTuple):
    """Views that calls share, made once, because Python makes a dozen views in the time of a hundred products of BLAS.

    Also, while one thread makes views, no other thread can begin its next product.  Other loops use the same memory.
    """

    kernels: np.ndarray  # (c, taps of the other axis, taps of the width, outputs per channel, taps)
    lines: np.ndarray  # the same as a matrix (lines, taps)
    matrices: np.ndarray
    by_read: Sequence[np.ndarray]  # the part of the matrices for each read
    reads: Sequence[Read]
    ones: np.ndarray
    zeros: Sequence[np.ndarray]  # set to 0, because no product writes them
    turns: dict[int, Turn]  # by the number of groups
    pieces: Sequence[tuple[int, slice]]  # the run of the result, and the slice of it
    not_read: Sequence[tuple[Any, ...]] = ()  # where the result is zero


class ToeplitzRows(GroupProducts):
    """Compute neighbouring rows of outputs together: matrices times rows of the image, summed over the other taps."""

    name = "Toeplitz rows"
    description = "products of Toeplitz matrices, several output rows at a time, summed over the taps of other axes"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        is_planned = max(geometry.kernel[:2]) > 1 and geometry.kernel[2] <= MAX_TAPS
        return is_planned and geometry.is_depthwise and problem.is_one_kind

    # Sizes

    groups_bytes = ROWS_BLOCK

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        # Larger than the cache: to begin a block takes longer than to read from a farther cache.
        return int(COPIES_BLOCK // (_pixel_bytes(problem) or 1)), problem.geometry.batch

    @property
    def _calls(self) -> float:
        return 8.0  # views of a call's arrays, in addition to the products

    @classmethod
    def share(cls) -> float:
        return SHARE

    @classmethod
    def rough_seconds(cls, problem: ConvProblem) -> float:
        geometry = problem.geometry
        axis = 1 if geometry.kernel[1] > 1 else 0
        rows = geometry.taps // geometry.kernel[axis] * geometry.stride[2]
        own = reach(geometry, axis, 6) * cost.MULTIPLY_ADD + cost.ADD / 2
        outputs = geometry.batch * geometry.out_channels * geometry.pixels
        return outputs * rows * own * cost.multiply_adds(problem)

    @cached_property
    def axis(self) -> int:
        """The axis of rows that are computed together: height if the kernel has several taps along it, else depth."""
        return 1 if self.geometry.kernel[1] > 1 else 0

    @cached_property
    def taps(self) -> tuple[int, int, int]:
        """Taps along `axis`, along the other axis (depth or height), and along the width."""
        kernel = self.geometry.kernel
        return kernel[self.axis], kernel[1 - self.axis], kernel[2]

    @property
    def has_tile(self) -> bool:
        return not self.is_in_place

    @cached_property
    def is_in_place(self) -> bool:
        """Whether products read rows of the image in place."""
        geometry, (x, *more) = self.geometry, self.problem.xs
        reads_borders = any(geometry.before + geometry.after)
        if more or self.problem.prologue or x.dtype != self.x_dtype.name:
            return False
        if reads_borders and (geometry.padding_mode != "constant" or self.block[3] < geometry.out_size[2]):
            return False
        row = x.strides[2 + self.axis]
        is_matrix = x.strides[4] in (0, 1) and (row >= geometry.size[2] or geometry.size[self.axis] == 1)
        last = self._last(self.block[3])
        reaches = min(geometry.size[2], last + geometry.span[2] - geometry.before[2]) > last
        return is_matrix and reaches and row * reach(geometry, self.axis, MAX_ROWS) < BLAS_REACH

    def _last(self, pixels: int) -> int:
        """Return the index, in the rows that are added, of the last of `pixels` outputs."""
        return (pixels - 1) * self.geometry.stride[2]

    @cached_property
    def rows(self) -> int:
        """Rows of outputs per product."""
        samples, extent = self.block[0] * self.block[2 - self.axis], self.block[1 + self.axis]
        most = min(extent, MAX_ROWS)
        return min(range(1, most + 1), key=lambda rows: self._seconds_of(rows, samples, extent), default=1)

    @cached_property
    def tall(self) -> int:
        """Rows of the image that one product reads."""
        return reach(self.geometry, self.axis, self.rows)

    @property
    def products_work(self) -> float:
        geometry, problem = self.geometry, self.problem
        samples, extent = self.block[0] * self.block[2 - self.axis], self.block[1 + self.axis]
        work = self.blocks * geometry.groups * self._seconds_of(self.rows, samples, extent)
        if not self._adds_in_place:
            work += cost.copied(prod(problem.out.shape), self.block[3], problem.dtype, geometry.stride[2] > 1)
        return work

    def _seconds_of(self, rows: int, samples: int, extent: int) -> float:
        """Return the estimated time of one group of a block, `rows` rows at a time, with its matrices."""
        geometry, problem, (_, beside, width) = self.geometry, self.problem, self.taps
        lines, columns = width * geometry.group_outputs, self._last(self.block[3]) + 1
        tall, wide = reach(geometry, self.axis, rows), cost.width(problem.dtype)
        run = 0.0 if self._is_result(rows, extent) else RUN + rows * (columns + self._apart) * ADD * wide
        product = BEGIN + 1.2 * cost.product(rows * lines, tall, columns, problem)
        return beside * (samples * ceil(extent / rows) * (product + lines * run) + lines * rows * tall * MATRIX * wide)

    def _is_result(self, rows: int, extent: int) -> bool:
        """Whether the products are the result, because there are no other taps to add."""
        is_sum = self.taps[1] * self.taps[2] * self.geometry.group_outputs > 1
        return self._rows_are_result and not is_sum and extent % rows == 0

    @cached_property
    def _rows_are_result(self) -> bool:
        """Whether rows of products have the same pixels as rows of the result."""
        return self.is_in_place and self.geometry.stride[2] == 1 and self.geometry.size[2] == self.block[3]

    @cached_property
    def _apart(self) -> int:
        """Number of zeros between the rows of products, which taps read beyond the ends of the image.

        Without them, rows can be added in the result itself.  But then as many zeros are written again each time.
        """
        geometry, before = self.geometry, self.geometry.before[2]
        if not self.is_in_place:
            return 0
        behind = [
            self._last(self.block[3]) + tap * geometry.dilation[2] - before - geometry.size[2] + 1
            for tap in range(self.taps[2])
        ]
        ends = [max(0, before - tap * geometry.dilation[2], beyond) for tap, beyond in enumerate(behind)]
        most = max(ends)
        if self._rows_are_result and sum(ends) * CLEAR < self.block[3] * cost.COPY + cost.RUN:
            return 0
        return most

    @cached_property
    def _adds_in_place(self) -> bool:
        """Whether rows are added in the result itself."""
        return self._rows_are_result and not self._apart

    @property
    def tile_work(self) -> float:
        return 0.0 if self.is_in_place else super().tile_work

    @cached_property
    def several(self) -> int:
        """Number of groups whose products are in cache together."""
        return even_part(self.geometry.groups, self._room // self._products_bytes)

    @property
    def together(self) -> int:
        return self.several

    @property
    def _room(self) -> int:
        return min(ROWS_BLOCK, self.problem.limit // (2 * self.problem.host.threads))

    @cached_property
    def _products_bytes(self) -> int:
        """Bytes of one group's products, the copied tile that they read, and their sums."""
        geometry, (_, beside, width) = self.geometry, self.taps
        tiles = prod(self.block[:3]) // self.block[1 + self.axis] * ceil(self.block[1 + self.axis] / self.rows)
        columns = self._last(self.block[3]) + geometry.span[2] + self._apart
        row = self.rows * geometry.group_outputs * columns
        products = tiles * (beside * width * (row + 2 * geometry.dilation[2]) + row * (not self._adds_in_place))
        copies = 0 if self.is_in_place else 1 + temporaries(geometry, self.problem.prologue)
        return (products + copies * prod(tile_shape(geometry, 1, self.block))) * self.x_dtype.itemsize

    @property
    def _group_bytes(self) -> int:
        """Bytes of one group's kernel and matrices."""
        lines = self.taps[1] * self.taps[2] * self.geometry.group_outputs
        return lines * (self.rows * self.tall + self.taps[0]) * self.x_dtype.itemsize

    @property
    def workspace(self) -> int:
        return self.extra_bytes + self.several * self._products_bytes

    @property
    def extra_bytes(self) -> int:
        return super().workspace

    # Sums

    @cached_property
    def _diagonals(self) -> np.ndarray:
        """Each tap's position in a Toeplitz matrix, (taps, rows x elements); kernels times this are such matrices."""
        taps, axis = self.taps[0], self.axis
        one = np.eye(taps, dtype=self.factor_dtype).reshape(taps, 1, taps)
        return toeplitz(one, self.rows, self.geometry.stride[axis], self.geometry.dilation[axis])[:, 0, :, 0].reshape(
            taps, -1
        )

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        return weight.reshape(*weight.shape[:2], *self.geometry.kernel)

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        return weight[:, :, None]

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        scratch, geometry = images.scratch, self.geometry
        if self.is_in_place:
            tile, before = block.read_in_place(images.inputs[0][0])
            tile = tile.swapaxes(0, 1)
        else:
            tile, before = scratch.array("tile", tile_shape(geometry, self.several, block.size)), (0, 0, 0)
            tile = tile.reshape(self.several, *tile_shape(geometry, 1, block.size)[1:])
        image = tile
        if self.axis == 0:  # put the other axis before the axis of rows
            image, sums = image.swapaxes(2, 3), sums.swapaxes(3, 4)
        is_result = self._is_result(self.rows, sums.shape[4])
        in_place = self._adds_in_place and (sums.shape[4] == 1 or sums.strides[4] == sums.shape[5] * sums.itemsize)
        key = before, image.shape[2:], sums.shape, in_place
        names = BUFFERS[: 2 if is_result else 4 - in_place]
        steps = scratch.views(self, key, names, partial(self._steps, scratch, *key))
        steps.kernels[...] = weight.transpose(self._taps_last)
        np.matmul(steps.lines, self._diagonals, out=steps.matrices)
        for zeros in steps.zeros:
            zeros.fill(0)
        # Make views of this call's arrays; all other views already exist.
        images_read, in_result = [self._read(image, read) for read in steps.reads], []
        if is_result:
            by_line = sums[:, 0].reshape(len(sums), *sums.shape[2:4], -1, 1, self.rows, sums.shape[5])
            in_result = [by_line[read.at] for read in steps.reads]
            for at in steps.not_read:
                by_line[at] = 0
        elif in_place:
            runs = rows_as_runs(sums, self.rows)
            in_result = [runs[number][..., None, piece] for number, piece in steps.pieces]
        for groups in parts_of(len(sums), self.several):
            count = groups.stop - groups.start
            turn, own = steps.turns[count], groups
            if not self.is_in_place:
                own = slice(0, count)
                images.some(groups).read_tile(block, tile[own])
            places = [place[groups] for place in in_result]
            for matrices, read, place in zip(steps.by_read, images_read, turn.products or places):
                np.matmul(matrices[groups], read[own], out=place)
            for border in turn.borders:
                border.fill(0)
            for run, place in zip(turn.runs, turn.in_runs or places):
                np.matmul(steps.ones, run, out=place)
            if turn.sums is not None:
                sums[groups] = turn.sums
        return sum_is_finite(sums[:, :, :, :, :: self.rows])

    @cached_property
    def _taps_last(self) -> tuple[int, ...]:
        """The axes of kernels (c, outputs, d, h, w) in the order of `Steps.kernels`."""
        return (0, 2, 4, 1, 3) if self.axis == 1 else (0, 3, 4, 1, 2)

    def _steps(self, scratch: Scratch, before: Triple, size: Triple, sums: tuple[int, ...], in_place: bool) -> Steps:
        """Make the views for calls whose blocks read an image of this size and write sums of this shape."""
        (c, outputs, n, others, extent, pixels), rows, (taps, beside, across) = sums, self.rows, self.taps
        tiles, width = -(-extent // rows), size[2] + self._apart
        kernels = scratch.array("kernels", (c, beside, across, outputs, taps), self.factor_dtype)
        matrices = scratch.array("matrices", (c * beside * across * outputs, rows * self.tall), self.factor_dtype)
        by_tap = matrices.reshape(c, beside, across * outputs * rows, self.tall)
        at = (others, tiles), before, size
        every = self._reads[at] = self._reads.get(at) or list(self._each_read(*at))
        reads = [read for read in every if read.matrix]
        not_read, ones = [read.at for read in every if not read.matrix], np.ones((1, beside * across), self.sums_dtype)
        shared = kernels, kernels.reshape(-1, taps), matrices, [by_tap[read.matrix] for read in reads], reads, ones
        counts = {min(c, self.several), c % self.several} - {0}
        if self._is_result(rows, extent):
            return Steps(*shared, [], dict.fromkeys(counts, Turn()), [], not_read)
        memory, all_lines, by_line = self._memory(scratch, n, others, tiles, width)
        lines = by_line[..., : size[2]]
        places = [lines[read.at] for read in reads]
        zeros = [memory[: self._gap], all_lines[..., by_line.shape[5] * width :], *(lines[at] for at in not_read)]
        if self._apart:
            zeros.append(by_line[..., size[2] :])
        borders = [] if self._apart else list(self._borders(by_line, before[2], pixels))
        all_runs = self._runs(memory, all_lines, before[2], width)
        total, of_runs = None, row_runs(extent, rows)
        if not in_place:
            total = scratch.array("sums", (*all_runs.shape[:5], rows * width), self.sums_dtype)
            of_runs = [(slice(0, tiles), rows)]
        most = max(1, ONE_THREAD // all_runs.shape[5])
        pieces = [(number, piece) for number, (_, high) in enumerate(of_runs) for piece in parts_of(high * width, most)]
        runs = [all_runs[:, :, :, :, of_runs[number][0], :, piece] for number, piece in pieces]
        turns = {}
        for count in counts:
            some = slice(0, count)
            in_runs, own = [], None
            if total is not None:
                in_runs = [total[some, ..., None, piece] for _, piece in pieces]
                by_row = total[some].reshape(count, *total.shape[1:4], tiles * rows, width)
                own = by_row[..., :extent, : self._last(pixels) + 1 : self.geometry.stride[2]]
            products, zeroed, added = ([view[some] for view in views] for views in (places, borders, runs))
            turns[count] = Turn(products, zeroed, added, in_runs, own)
        return Steps(*shared, zeros, turns, pieces if in_place else [], [])

    @property
    def _gap(self) -> int:
        """Number of zeros before and after the runs of a product."""
        return self.taps[2] * self.geometry.dilation[2]

    def _memory(self, scratch: Scratch, n: int, others: int, tiles: int, width: int) -> tuple[np.ndarray, ...]:
        """Return memory for some channels, the products in it, and the lines of the products.

        The products are (c, n, outputs of the other axis, products, taps of the other axis, run).  The lines of all
        taps of the width are one run, between zeros that the first and the last tap reach into.
        """
        lines, gap = self.taps[2] * self.geometry.group_outputs * self.rows, self._gap
        size = self.several, n, others, tiles, self.taps[1], lines * width + gap
        memory = scratch.array("products", (gap + prod(size),), self.sums_dtype)
        products = np.ndarray(size, memory.dtype, memory, gap * memory.itemsize)
        return memory, products, products[..., : lines * width].reshape(*size[:5], lines, width)

    def _read(self, image: np.ndarray, read: Read) -> np.ndarray:
        """Return rows (c, n, other axis, products, rows of each, w) of an image (c, n, other axis, axis of rows, w)."""
        if read.rows:
            return image[read.rows]
        of_c, of_n, across, along, item = image.strides
        step, move = self.geometry.stride[1 - self.axis], self.rows * self.geometry.stride[self.axis]
        steps = (of_c, of_n, step * across, move * along, along, item)
        return strided(image, read.first, (*image.shape[:2], *read.shape), steps)

    @cached_property
    def _reads(self) -> dict[tuple[tuple[int, ...], Triple, Triple], list[Read]]:
        """The reads of each kind of block, cached even if the views are not."""
        return {}

    def _each_read(self, counts: tuple[int, ...], before: Triple, size: tuple[int, ...]) -> Iterator[Read]:
        """Yield the reads of a block; `counts` is its outputs along the other axis, and its products."""
        (others, tiles), width = counts, size[2]
        stride, dilation, every = self.geometry.stride, self.geometry.dilation, slice(None)
        move = self.rows * stride[self.axis]
        for tap in range(self.taps[1]):
            step, offset = stride[1 - self.axis], tap * dilation[1 - self.axis] - before[1 - self.axis]
            inside = within(step, offset, size[0], others)
            for beyond in (slice(0, inside.start), slice(inside.stop, others)):
                if beyond.start < beyond.stop:
                    yield Read((every, every, beyond, every, tap))
            if inside.start == inside.stop:
                continue
            for some, rows in runs_of_tiles(tiles, move, self.tall, size[1], before[self.axis]):
                at = (every, every, inside, some, tap)
                if not rows:
                    yield Read(at)
                    continue
                matrix = (every, None, None, None, tap, every, slice(rows.start, rows.stop))
                beside, above = inside.start * step + offset, some.start * move - before[self.axis] + rows.start
                shape = (inside.stop - inside.start, some.stop - some.start, len(rows))
                planes = slice(beside, beside + (shape[0] - 1) * step + 1, step)
                own = every, every, planes, None, slice(above, above + len(rows))
                for columns in parts_of(width, self._columns):
                    first, count = (beside, above, columns.start), columns.stop - columns.start
                    one = (*own, columns) if shape[1] == 1 else ()
                    yield Read((*at, every, columns), matrix, first, (*shape, count), one)

    @cached_property
    def _columns(self) -> int:
        """Most columns of one product, so that it stays a small one."""
        most = cost.SAFELY_SMALL // (self.taps[2] * self.geometry.group_outputs * self.rows * self.tall)
        return max(MIN_WIDTH, most)

    def _borders(self, by_line: np.ndarray, before: int, pixels: int) -> Iterator[np.ndarray]:
        """Yield the elements that must be zero, so that a tap's run may pass from one row to the next."""
        last, gap, width = self._last(pixels), self.geometry.dilation[2], by_line.shape[-1]
        by_tap = by_line.reshape(*by_line.shape[:-2], self.taps[2], -1, width)
        for tap in range(self.taps[2]):
            offset = tap * gap - before
            if offset < 0:
                yield by_tap[..., tap, :, max(0, width + offset) :]
            elif last + offset >= width:
                yield by_tap[..., tap, :, : last + offset - width + 1]

    def _runs(self, memory: np.ndarray, products: np.ndarray, before: int, width: int) -> np.ndarray:
        """Return each tap's lines as a run from its first pixel on: (c, outputs, n, others, products, taps, run)."""
        outputs, row, gap = self.geometry.group_outputs, self.rows * width, self.geometry.dilation[2]
        steps, item, taps = products.strides, products.itemsize, self.taps[1] * self.taps[2]
        shape = (len(products), outputs, *products.shape[1:4], taps, row)
        strides = (steps[0], row * item, *steps[1:4], (outputs * row + gap) * item, item)
        # The first run begins in the zeros before it.
        return np.ndarray(shape, products.dtype, memory, (self.taps[2] * gap - before) * item, strides)


def _pixel_bytes(problem: ConvProblem) -> int:
    """Return the bytes of products and sums per output pixel of one channel."""
    geometry = problem.geometry
    axis = 1 if geometry.kernel[1] > 1 else 0
    taps = geometry.taps // geometry.kernel[axis]
    return geometry.group_outputs * (taps + 1) * geometry.stride[2] * ITEMSIZE[accumulator(problem.x_dtype)]


@cache
def runs_of_tiles(tiles: int, step: int, tall: int, extent: int, before: int) -> list[tuple[slice, range]]:
    """Return runs of products of `tall` rows, `step` rows apart, each with the range of rows inside the image."""
    runs: list[tuple[slice, range]] = []
    for tile in range(tiles):
        above = tile * step - before
        start = min(max(0, -above), tall)
        reads = range(start, max(start, min(tall, extent - above)))
        if runs and runs[-1][1] == reads:
            runs[-1] = slice(runs[-1][0].start, tile + 1), reads
        else:
            runs.append((slice(tile, tile + 1), reads))
    return runs


def row_runs(extent: int, rows: int) -> list[tuple[slice, int]]:
    """Return the products of `rows` rows each, and the product of the rows left, as (products, rows per product)."""
    whole, left = divmod(extent, rows)
    runs = (slice(0, whole), rows), (slice(whole, whole + 1), left)
    return [(tiles, high) for tiles, high in runs if tiles.stop > tiles.start and high]


def rows_as_runs(sums: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return views of contiguous rows as the runs of `row_runs`."""
    *shape, extent, width = sums.shape
    runs = []
    for tiles, high in row_runs(extent, rows):
        count, first = tiles.stop - tiles.start, tiles.start * rows
        runs.append(sums[..., first : first + count * high, :].reshape(*shape, count, high * width))
    return runs
