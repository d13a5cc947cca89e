"""Depthwise convolution as products of Toeplitz matrices: several neighbouring outputs of a channel at a time.

One output of a channel is a vector by a vector, which no BLAS is quick at.  But m neighbouring outputs read nearly
the same elements, and what they are of these is a matrix with the kernel on each row, one step further on:

::

    m outputs         | w0 w1 w2          |   m + k - 1 elements, with as many columns as there are
    of a channel  =   |    w0 w1 w2       | x  pixels beside them: (m, n) = (m, m + k - 1) x (m + k - 1, n)
                      |       w0 w1 w2    |

Along the height (or depth) the columns are the rows of the image where they lie, and for a kernel of several columns
a copy of these, shifted, for each.  Along the width the windows of m outputs are the rows of an overlapping view,
and nothing is copied at all.

The zeros are multiplied too, and zero times infinity is NaN: where sums are not finite they are computed again, from
each window alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import ceil, gcd, prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import LONE_PIXELS, MEMORY_BLOCK, ConvLoop, ConvRun, temporaries
from cupyconv.numpy.windows import Block, Images, Scratch, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import ConvGeometry, even_part
from cupyconv.problem.problems import ConvProblem

#: Rows of outputs, and outputs along the width, that one product computes.
HEIGHTS, LENGTH = (18, 12, 8, 7, 6, 4, 3, 2, 1), 16
#: Bytes of what a group copies for a block: more than elsewhere, since each of a dozen calls should be long.
COPIES_BLOCK = 4 * MEMORY_BLOCK
#: Multiply-adds up to which OpenBLAS does a product without packing its operands (x86-64 with AVX-512).
SMALL_PRODUCT = 900_000
#: Fewest pixels beside each other that are worth a product of their own.
LEAST_WIDTH = 64
#: Nanoseconds of float32 on one core: for a product, for a multiply-add, for an element that is copied, and to begin
#: a run of them; and for the calls of NumPy that copy, multiply and check products of many channels at once.
PRODUCT_NS, MULTIPLY_NS, COPY_NS, RUN_NS, CALLS_NS = 100, 0.016, 0.1, 5, 50_000

#: Nanoseconds of work that a thread should have: each of a few calls a block waits for the interpreter's lock, and a thread
#: takes as long to wake as to compute a tenth of a millisecond.
SHARE_NS = 800_000

# --- the choice -----------------------------------------------------------------------------------------------


def product_ns(outputs: int, reduction: int, columns: int) -> float:
    """What a small product (outputs, reduction) x (reduction, columns) takes: six rows at a time, then two, then one."""
    passes = outputs // 6 + ceil(outputs % 6 / 2)
    return PRODUCT_NS + MULTIPLY_NS * (outputs + passes) * reduction * (columns + 8)


def reach(geometry: ConvGeometry, axis: int, outputs: int) -> int:
    """Elements along an axis that so many neighbouring outputs read."""
    return (outputs - 1) * geometry.stride[axis] + geometry.span[axis]


# --- the ways -------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """Kernels as they are, (channels, outputs of each, *kernel), and as Toeplitz matrices."""

    kernels: np.ndarray
    matrices: np.ndarray


class ToeplitzLoop(ConvLoop):
    """Products of the image and of a matrix that has a channel's kernel on its diagonals."""

    smallest = 1
    turn_calls = 20
    thread_bytes = COPIES_BLOCK

    @classmethod
    @abstractmethod
    def nanoseconds(cls, geometry: ConvGeometry) -> float:
        """What it is estimated to take."""

    @property
    @abstractmethod
    def products_work(self) -> float:
        """What products take, and the copies that they are of."""

    @property
    def work(self) -> float:
        return self.products_work + self.tile_work + self.store_work

    @property
    def calls(self) -> float:
        return self.turns * (self.turn_calls + self._calls)

    @property
    def _calls(self) -> float:
        """Calls for some groups of a block: they copy, multiply and check."""
        return 6.0

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = (1 + geometry.group_outputs + cls.copies(geometry)) * ITEMSIZE[accumulator(problem.x_dtype)]
        share = -(-geometry.batch * geometry.pixels // cls.workers(problem))
        return min(share, int(COPIES_BLOCK // per_pixel)), 1 if geometry.pixels >= LONE_PIXELS else geometry.batch

    @classmethod
    def workers(cls, problem: ConvProblem) -> int:
        """Threads that have enough to do."""
        return max(1, min(problem.host.threads, int(cls.nanoseconds(problem.geometry) / SHARE_NS)))

    @cached_property
    def threads(self) -> int:
        return max(1, min(self.workers(self.problem), self.blocks))

    @classmethod
    def copies(cls, geometry: ConvGeometry) -> float:
        """Copies of a pixel, beside the tile, that a block must have room for."""
        return 0

    @cached_property
    def part(self) -> int:
        # Of several groups twice as much: longer calls win more than memory of a farther cache costs.
        room = min(2 * COPIES_BLOCK, self.problem.limit * 3 // (4 * self.problem.host.threads))
        return even_part(self.geometry.groups, room // (self._group_bytes or 1))

    @property
    def workspace(self) -> int:
        return self.part * self._group_bytes + self.sums_bytes

    @property
    @abstractmethod
    def _group_bytes(self) -> int:
        """Bytes of what is copied for a group of a block, and of its matrix."""

    @property
    def _tile_bytes(self) -> int:
        """Bytes of a group's tile, and of what fills borders; where phases are read, of these beside it."""
        copies = 1 + temporaries(self.geometry, self.problem.prologue) + (self.geometry.stride[2] > 1)
        return copies * prod(tile_shape(self.geometry, 1, self.block)) * self.x_dtype.itemsize

    @classmethod
    @abstractmethod
    def outputs_of(cls, geometry: ConvGeometry) -> int:
        """Neighbouring outputs that a product computes."""

    @cached_property
    def outputs(self) -> int:
        return self.outputs_of(self.geometry)

    @staticmethod
    @abstractmethod
    def axis_of(geometry: ConvGeometry) -> int:
        """The axis along which they are neighbours."""

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry, axis, outputs = problem.geometry, cls.axis_of(problem.geometry), cls.outputs_of(problem.geometry)
        reduction = reach(geometry, axis, outputs) * geometry.taps // geometry.kernel[axis]
        return 2 * geometry.out_channels * outputs * reduction * ITEMSIZE[accumulator(problem.weight_dtype)]

    def arranged(self, weight: np.ndarray) -> Kernels:  # type: ignore[override]
        kernels = weight.reshape(*weight.shape[:2], *self.geometry.kernel)
        return Kernels(kernels, self.matrices(kernels))

    @abstractmethod
    def matrices(self, weight: np.ndarray) -> np.ndarray:
        """The Toeplitz matrices of kernels (c, outputs of each, *kernel)."""

    @abstractmethod
    def multiply(self, images: Images, block: Block, matrices: np.ndarray, sums: np.ndarray) -> bool:
        """Write a block's sums (c, outputs of each, n, d, h, w) of some channels; whether all are finite.

        One output of each product says so: the zeros bring all that the product reads to every one of them.
        """

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        if self.in_place:
            sums = block.of(run.out).swapaxes(0, 1).reshape(block.sums_shape)
        else:
            sums = np.empty(block.sums_shape, self.sums_dtype)
        weights: Any = run.weight
        for groups in parts_of(self.geometry.groups, self.part):
            images, own = run.images.some(groups), sums[groups]
            if not self.multiply(images, block, weights.matrices[groups], own):
                scale_windows(self.geometry, images.tile(block), weights.kernels[groups], own)
        return sums


class ToeplitzRows(ToeplitzLoop):
    """Neighbouring rows of outputs together: matrices times rows of the image, shifted for each column of the kernel."""

    name = "Toeplitz rows"
    words = "products of Toeplitz matrices, several rows of outputs at a time"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        return geometry.is_depthwise and problem.is_one_kind and max(geometry.kernel[:2]) > 1

    @classmethod
    def nanoseconds(cls, geometry: ConvGeometry) -> float:
        axis, rows = cls.axis_of(geometry), cls.outputs_of(geometry)
        times = geometry.batch * geometry.groups * geometry.out_size[1 - axis] * ceil(geometry.out_size[axis] / rows)
        return CALLS_NS / 2 + times * product_and_copies_ns(geometry, axis, rows)

    @classmethod
    def copies(cls, geometry: ConvGeometry) -> float:
        axis = cls.axis_of(geometry)
        if geometry.out_size[1 - axis] == 1:  # the width is cut until they take as much as the tile and the sums
            return 1 + geometry.group_outputs
        return reach(geometry, axis, 4) * geometry.taps / geometry.kernel[axis] / 4

    @staticmethod
    def axis_of(geometry: ConvGeometry) -> int:
        """The axis along which outputs are taken together: the last but the width with several taps."""
        return 1 if geometry.kernel[1] > 1 else 0

    @classmethod
    def outputs_of(cls, geometry: ConvGeometry) -> int:
        axis = cls.axis_of(geometry)
        extent = geometry.out_size[axis]

        def cost(rows: int) -> float:
            own = product_and_copies_ns(geometry, axis, rows)
            # Rows that are left are a call of their own.
            return ceil(extent / rows) * own + (extent % rows > 0) * max(own, CALLS_NS / (geometry.groups or 1))

        return min((rows for rows in HEIGHTS if rows <= extent), key=cost, default=1)

    @cached_property
    def axis(self) -> int:
        return self.axis_of(self.geometry)

    @cached_property
    def rows(self) -> int:
        """Outputs along the axis that a product of a block computes."""
        return min(self.outputs, self.block[1 + self.axis])

    @cached_property
    def reduction(self) -> int:
        """Elements of a column that a product sums over."""
        return reach(self.geometry, self.axis, self.rows) * self.other_taps

    @cached_property
    def other_taps(self) -> int:
        return self.geometry.taps // self.geometry.kernel[self.axis]

    @cached_property
    def width(self) -> int:
        """Pixels beside each other that a product computes: so few that it is a small one, and copies stay in cache."""
        copies = self._products * self.reduction * self.x_dtype.itemsize
        most = min(SMALL_PRODUCT // (self.rows * self.reduction), COPIES_BLOCK // copies)
        return even_part(self.block[3], max(LEAST_WIDTH, most))

    @property
    def products_work(self) -> float:
        geometry, problem, others = self.geometry, self.problem, self.block[2 - self.axis]
        along, across = ceil(self.block[1 + self.axis] / self.rows), ceil(self.block[3] / self.width)
        times = self.blocks * geometry.groups * self.block[0] * others * along * across
        products = geometry.group_outputs * cost.product(self.rows, self.reduction, self.width, problem)
        copies = self.reduction * self.width * (self.other_taps > 1)
        return times * (products + cost.copied(copies, self.width, problem.x_dtype))

    @property
    def _calls(self) -> float:
        extent = self.block[1 + self.axis]
        runs = (extent >= self.rows) + (extent % self.rows > 0)
        return 5.0 * runs * -(-self.block[3] // self.width)

    @property
    def _products(self) -> int:
        """Products of a group at a time."""
        return prod(self.block[:3]) // self.block[1 + self.axis] * (self.block[1 + self.axis] // self.rows)

    @property
    def _group_bytes(self) -> int:
        pitch = self.width if self.width < self.block[3] else tile_shape(self.geometry, 1, self.block)[-1]
        copies = 0 if self.other_taps == 1 else self._products * pitch
        return copies * self.reduction * self.x_dtype.itemsize + self._tile_bytes

    def matrices(self, weight: np.ndarray) -> np.ndarray:
        axis = self.axis
        by_row = np.moveaxis(weight[..., self._taps_by_phase], 2 + axis, -1)
        return toeplitz(by_row, self.outputs, self.geometry.stride[axis], self.geometry.dilation[axis])

    def multiply(self, images: Images, block: Block, matrices: np.ndarray, sums: np.ndarray) -> bool:
        axis = self.axis
        if axis == 0:  # sums (c, o, n, beside, along, w)
            sums = sums.swapaxes(3, 4)
        c, outputs, n, others, extent, width = sums.shape
        rows = min(self.outputs, extent)
        matrix = matrices[:, :, :rows, :, : reach(self.geometry, axis, rows)]
        matrix = matrix.reshape(c, outputs, 1, 1, 1, rows, -1)
        phases, is_finite = self._phases(images, block), True
        for pixels in parts_of(width, self.width):
            for first, count in runs_of(extent, rows):
                read = self._columns(images.scratch, phases, first, count, rows, others, pixels)
                place = sums[..., first : first + count * rows, pixels]
                place = place.reshape(c, outputs, n, others, count, rows, pixels.stop - pixels.start)
                np.matmul(matrix, read[:, None], out=place)
                is_finite = is_finite and sum_is_finite(place[..., 0, :])
        return is_finite

    def _columns(
        self, scratch: Scratch, phases: list[np.ndarray], first: int, count: int, rows: int, others: int, pixels: slice
    ) -> np.ndarray:
        """What products read, (c, n, other axis, products, other taps and rows, pixels): a view or a copy."""
        geometry, axis, beside = self.geometry, self.axis, 1 - self.axis
        tall = reach(geometry, axis, rows)
        source, wide = phases[0], pixels.stop - pixels.start
        item, along, across = source.itemsize, source.strides[2 + axis], source.strides[2 + beside]
        shape = (*source.shape[:2], others, count)
        moves = (*source.strides[:2], geometry.stride[beside] * across, rows * geometry.stride[axis] * along)
        at = [0, 0, pixels.start]
        at[axis] = first * geometry.stride[axis]
        if self.other_taps == 1:
            return strided(source, at, (*shape, tall, wide), (*moves, along, item))
        # Where rows follow each other in memory they are copied as one run, with what lies between their pixels.
        pitch = along // item if wide == self.block[3] and along == source.shape[-1] * item else wide
        pixel_shape, steps = (
            ((tall, wide), (along, item)) if pitch == wide else ((tall * pitch - pitch + wide,), (item,))
        )
        memory = scratch.array("columns", (*shape, geometry.kernel[beside], geometry.kernel[2], tall * pitch))
        columns = memory
        for source, taps in zip(phases, self._taps_of_phases):
            at[2] = pixels.start + taps[0] * geometry.dilation[2] // geometry.stride[2]
            tap = geometry.dilation[2] * self._period // geometry.stride[2] * item
            place = columns[..., : len(taps), : prod(pixel_shape)]
            if pitch == wide:
                place = place.reshape(*place.shape[:-1], tall, wide)
            place[...] = strided(
                source,
                at,
                (*shape, geometry.kernel[beside], len(taps), *pixel_shape),
                (*moves, geometry.dilation[beside] * across, tap, *steps),
            )
            columns = columns[..., len(taps) :, :]
        return memory.reshape(*shape, self.other_taps * tall, pitch)[..., :wide]

    @cached_property
    def _period(self) -> int:
        """Taps along the width from which they read the same columns of pixels again, further on."""
        return self.geometry.stride[2] // gcd(self.geometry.stride[2], self.geometry.dilation[2])

    @cached_property
    def _taps_of_phases(self) -> list[range]:
        taps = self.geometry.kernel[2]
        return [range(first, taps, self._period) for first in range(min(self._period, taps))]

    @cached_property
    def _taps_by_phase(self) -> Any:
        return slice(None) if self._period == 1 else [tap for taps in self._taps_of_phases for tap in taps]

    def _phases(self, images: Images, block: Block) -> list[np.ndarray]:
        """The tile's columns of pixels, those apart that the stride keeps apart, in the order of taps."""
        stride, gap = self.geometry.stride[2], self.geometry.dilation[2]
        return [images.tile_or_view(block, taps[0] * gap % stride, stride) for taps in self._taps_of_phases]


class ToeplitzRuns(ToeplitzLoop):
    """Neighbouring outputs along the width together: windows of the image where it lies, times matrices."""

    name = "Toeplitz runs"
    words = "products of Toeplitz matrices, a run of outputs at a time"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        geometry = problem.geometry
        return (
            geometry.is_depthwise and problem.is_one_kind and geometry.kernel[:2] == (1, 1) and geometry.kernel[2] > 1
        )

    @classmethod
    def nanoseconds(cls, geometry: ConvGeometry) -> float:
        depth, height, width = geometry.out_size
        length = min(LENGTH, width)
        reduction, windows = reach(geometry, 2, length), ceil(width / length)
        many = min(windows, ceil(reduction / (length * geometry.stride[2])) + 1)  # products of windows side by side
        if height * many >= windows:
            many, rows = windows, height
        else:
            many, rows = many * height, ceil(windows / many)
        times = geometry.batch * geometry.out_channels * depth * many
        return times * product_ns(rows, reduction, length)

    @property
    def products_work(self) -> float:
        geometry, length = self.geometry, self.outputs
        samples, depth, height, width = self.block
        reduction, windows = reach(geometry, 2, length), ceil(width / length)
        many = min(windows, ceil(reduction / (length * geometry.stride[2])))
        many, rows = (windows, height) if height * many >= windows else (many * height, ceil(windows / many))
        times = self.blocks * samples * geometry.out_channels * depth * many
        return times * cost.product(rows, reduction, length, self.problem)

    @staticmethod
    def axis_of(geometry: ConvGeometry) -> int:
        return 2

    @classmethod
    def outputs_of(cls, geometry: ConvGeometry) -> int:
        return min(LENGTH, geometry.out_size[2])

    @property
    def _group_bytes(self) -> int:
        return self._tile_bytes

    def matrices(self, weight: np.ndarray) -> np.ndarray:
        """(c, o, K, outputs)"""
        matrices = toeplitz(weight, self.outputs, self.geometry.stride[2], self.geometry.dilation[2])
        return np.ascontiguousarray(matrices[:, :, :, 0].swapaxes(2, 3))

    def multiply(self, images: Images, block: Block, matrices: np.ndarray, sums: np.ndarray) -> bool:
        (c, outputs, n, depth, height, width), geometry = sums.shape, self.geometry
        image = images.tile_or_view(block)
        length, is_finite = min(self.outputs, width), True
        reduction, move = reach(geometry, 2, length), length * geometry.stride[2] * image.itemsize
        matrix = matrices[:, :, None, None, None, None, None, :reduction, :length]
        own, samples, deeper, lower = (
            step * stride for step, stride in zip(image.strides, (1, 1, *geometry.stride[:2]))
        )
        apart = -(-reduction // (length * geometry.stride[2]))  # runs whose windows do not overlap
        # The rows of a product's first matrix are rows of the image, or where these are few, windows side by side.
        by_rows = height * apart >= width // length
        if by_rows:
            runs = [(begin, count, 1, 1) for begin, count in runs_of(width, length)]
        else:
            runs = runs_apart(width, length, apart, max(1, SMALL_PRODUCT // (length * reduction)))
        for begin, many, phases, count in runs:
            shape = [height, many, phases, count, reduction]
            steps = [lower, phases * count * move, move, phases * move, image.itemsize]
            place = sums[..., begin : begin + many * phases * count * length]
            place = place.reshape(c, outputs, n, depth, height, many, count, phases, length).swapaxes(6, 7)
            if by_rows:
                shape[0], shape[3], steps[0], steps[3], place = 1, height, 0, lower, place.swapaxes(4, 7)
            first = (0, 0, begin * geometry.stride[2])
            windows = strided(image, first, (c, 1, n, depth, *shape), (own, 0, samples, deeper, *steps))
            np.matmul(windows, matrix, out=place)
            is_finite = is_finite and sum_is_finite(place[..., 0])
        return is_finite


def product_and_copies_ns(geometry: ConvGeometry, axis: int, rows: int) -> float:
    """What so many rows of outputs along an axis take, of a channel; the columns that they read are copied once."""
    reduction = reach(geometry, axis, rows) * geometry.taps // geometry.kernel[axis]
    copies = COPY_NS * reduction * (geometry.out_size[2] + geometry.span[2] - 1)
    return geometry.group_outputs * product_ns(rows, reduction, geometry.out_size[2]) + copies


def sum_is_finite(sums: np.ndarray) -> bool:
    # einsum adds strided rows three times as quickly as np.sum does.
    return bool(np.isfinite(np.einsum("abcdefgh"[: sums.ndim] + "->", sums)))


def scale_windows(geometry: ConvGeometry, image: np.ndarray, weight: np.ndarray, sums: np.ndarray) -> None:
    """The sums (c, outputs of each, n, d, h, w) of windows of a tile (c, n, d, h, w), each by itself."""
    c, n, *pixels = image.strides
    taps = [step * gap for step, gap in zip(pixels, geometry.dilation)]
    moves = [step * stride for step, stride in zip(pixels, geometry.stride)]
    shape = (len(image), *geometry.kernel, *sums.shape[2:])
    windows = np.ndarray(shape, image.dtype, image, 0, (c, *taps, n, *moves))
    np.einsum("coijk,cijkndhw->condhw", weight, windows, out=sums)


def strided(image: np.ndarray, first: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """A view of an image's elements from the pixel `first` on."""
    if image.flags.c_contiguous:
        offset = sum(index * step for index, step in zip(first, image.strides[2:]))
        return np.ndarray(shape, image.dtype, image, offset, strides)
    from_first: Any = (..., *(slice(index, None) for index in first))
    return np.lib.stride_tricks.as_strided(image[from_first], shape, strides)


def toeplitz(weight: np.ndarray, outputs: int, stride: int, dilation: int) -> np.ndarray:
    """Matrices (c, o, outputs, other taps, reach) with the taps, the last axis of a weight (c, o, ..., taps), on diagonals."""
    c, o, *_, taps = weight.shape
    weight = weight.reshape(c, o, -1, taps)
    reach = (outputs - 1) * stride + dilation * (taps - 1) + 1
    matrices = np.zeros((c, o, outputs, weight.shape[2], reach), weight.dtype)
    of_c, of_o, of_output, of_other, item = matrices.strides
    strides = (of_c, of_o, of_output + stride * item, of_other, dilation * item)
    band = np.ndarray((c, o, outputs, *weight.shape[2:]), weight.dtype, matrices, 0, strides)
    band[...] = weight[:, :, None]
    return matrices


def runs_of(extent: int, part: int) -> list[tuple[int, int]]:
    """(first, how many) parts: all that are whole, and one that ends where the axis does, some of it done twice."""
    whole = [(0, extent // part)]
    return whole if extent % part == 0 else [*whole, (extent - part, 1)]


def runs_apart(width: int, length: int, apart: int, most: int) -> list[tuple[int, int, int, int]]:
    """Runs of `length` outputs, and one more that ends where the width does: (first, products, phases, count).

    Runs whose windows overlap are rows of different matrices: of a product's phases each has every `phases`-th of its
    runs, `count` of them and no more than `most`.
    """
    runs, done, left = [], 0, width // length
    while left:
        phases = min(apart, left)
        count = min(most, left // phases)
        many = left // (phases * count)
        runs.append((done * length, many, phases, count))
        done += many * phases * count
        left -= many * phases * count
    if width % length:
        runs.append((width - length, 1, 1, 1))
    return runs


#: The ways of these products.
WAYS: tuple[type[ToeplitzLoop], ...] = (ToeplitzRows, ToeplitzRuns)
