"""Weight gradient by lines: one product of the image shifted by rows and of the gradient shifted along its rows.

The element of the weight at tap (i, j) is the sum of all pixels of the gradient times what this tap reads of the image.
For each tap i along the height, the line of the image that it reads is copied (see `lines`).  For each tap j along the
width, the gradient is copied so that each of its pixels is where this tap reads the image, with zeros where no pixel
reads.  The product of these lines has all taps: of kh + kw lines, not of kh * kw columns::

    lines of the gradient       lines of the image            all taps
    | g g g ... g . |  tap 0    | row - 1 ... |               | w w w |
    | g g g ... g g |  tap 1    | row     ... |  turned   =   | w w w |
    | . g g ... g g |  tap 2    | row + 1 ... |               | w w w |

The product has as many multiply-adds as one with all columns; with a stride along the width it has more, since a tap
reads one of the phases only.

The zeros are multiplied too, and zero times infinity is NaN.  Sums that are not finite are computed again from each
window alone.
"""

from __future__ import annotations

from functools import cached_property, partial
from math import ceil, prod
from typing import Any, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import whole_lines
from cupyconv.numpy.convolution import temporaries
from cupyconv.numpy.group_products import PIXELS_ALONE, is_finite
from cupyconv.numpy.lines import (
    LINES_BLOCK,
    QUICK,
    Reading,
    Taps,
    along_width,
    calls_to_read,
    has_lines,
    lines_of,
    only_image,
    row_of,
)
from cupyconv.numpy.weight_sums import GroupsGradientLoop, Pairs, WeightRun
from cupyconv.numpy.windows import Block, BlockSize, Images, LineRegions, parts_of, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import Triple, box_within, even_part
from cupyconv.problem.problems import WeightGradientProblem

#: Fewest elements of a line that are multiplied at a time; BLAS does not pack so few of so many lines.
MIN_RUN = 128
#: Seconds per element that is copied, or copied from a strided place; of a line that a product reads, or packs; and to
#: begin a product.
COPY, APART, READ, PACK, BEGIN = 65e-12, 220e-12, 20e-12, 800e-12, 45e-9
#: Names of the scratch buffers.
BUFFERS = "gradient lines", "lines", "product", "products of runs"


class Turn(NamedTuple):
    """Views of the scratch memory of the groups that are computed together."""

    reading: Reading  # the lines of the image
    shifted: list[tuple[np.ndarray, Any]]  # parts of the lines of the gradient, and its elements that are copied there
    others: list[np.ndarray]  # the other parts, which are zeros
    products: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # two factors, and where their product is written
    runs: np.ndarray | None  # products of runs of elements, whose sum is the total; None if one product is the total
    total: np.ndarray  # (groups, lines of the gradient, lines of the image)
    taps: list[tuple[Any, np.ndarray]]  # index of taps of the weight, and their elements of the total

    def multiply(self, grad: np.ndarray) -> None:
        """Compute the total of the lines that were read and of a gradient, (groups, outputs, n, pixels)."""
        for place, elements in self.shifted:
            place[...] = grad[elements]
        for zeros in self.others:
            zeros.fill(0)
        for one, other, product in self.products:
            np.matmul(one, other, out=product)
        if self.runs is not None:
            np.einsum("grxo->gxo", self.runs, out=self.total)


class Steps(NamedTuple):
    """Views that calls share, made once: Python makes a dozen views in the time of a product of some groups."""

    zeros: list[np.ndarray]  # padding of the image: set to zero once per block, since turns do not write there
    turns: dict[int, Turn]  # by the number of groups


class GradientLines(GroupsGradientLoop):
    """Products of lines of the image and of the gradient, some groups at a time."""

    name = "lines"
    description = "matrix products of the image shifted by rows and the gradient shifted along rows"
    turn_calls = 8
    groups_bytes = LINES_BLOCK
    reads_boxes = True
    products_are_summed = False
    fresh_work = 0.0  # memory is reused from call to call

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        geometry = problem.geometry
        if geometry.groups == 1 or geometry.kernel[2] == 1 or not has_lines(geometry) or 0 in geometry.out_size:
            return False
        # A pixel whose taps all read padding has no place in the lines: an infinity there would be lost.
        row, first = row_of(geometry), 0  # the first pixel without a place
        for shift in reversed(along_width(geometry).shifts):
            if first + shift < 0:
                break
            first = max(first, row - shift)
        return first >= geometry.out_size[2]

    # Sizes

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        lines = geometry.group_channels * lines_of(geometry) + geometry.group_outputs * geometry.kernel[2]
        return LINES_BLOCK // (lines * ITEMSIZE[accumulator(problem.dtype)] or 1), geometry.batch

    @classmethod
    def fitted(cls, problem: WeightGradientProblem, fixed: int, limit: int) -> Self:
        return cls.of_whole_rows(super().fitted(problem, fixed, limit), fixed, limit)

    @cached_property
    def _taps(self) -> Taps:
        return along_width(self.geometry)

    @cached_property
    def _row(self) -> int:
        return row_of(self.geometry)

    @property
    def _outputs(self) -> int:
        return self.rows or self.geometry.group_outputs

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Lines of the gradient and of the image, and elements of a line, of one group and a whole block."""
        geometry = self.geometry
        of_image = geometry.group_channels * lines_of(geometry)
        return self._outputs * len(self._taps.shifts), of_image, prod(self.block[:3]) * self._row

    @cached_property
    def _run(self) -> int:
        """Elements of a line that are multiplied at a time: so few that BLAS packs no operand, or all."""
        *lines, length = self._sizes
        run = cost.SMALL_PRODUCT // (prod(lines) or 1)
        return length if run < MIN_RUN else even_part(length, run)

    @property
    def largest_product(self) -> int:
        of_gradient, of_image, _ = self._sizes
        return of_gradient * of_image * self._run

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's lines, of what a prologue writes besides, and of products of runs with their sum."""
        of_gradient, of_image, length = self._sizes
        item = self._dtype.itemsize
        besides = temporaries(self.geometry, self.problem.prologue) * self.geometry.group_channels * length
        runs = ceil(length / (self._run or 1))
        products = (1 + (runs if runs > 1 else 0)) * of_gradient * of_image
        return ((of_gradient + of_image) * whole_lines(length, item) + besides + products) * item

    @classmethod
    def product_bytes(cls, problem: WeightGradientProblem) -> int:
        return 0  # `group_bytes` has those of a few groups

    @property
    def columns_bytes(self) -> int:
        size = self._alone
        alone = 2 * prod(tile_shape(self.geometry, self.geometry.group_channels, (1, *size)))
        return super().columns_bytes + alone * self._dtype.itemsize

    @property
    def _alone(self) -> Triple:
        """Pixels whose windows are read at a time if sums are not finite."""
        return box_within(self.block[1:], PIXELS_ALONE)

    @cached_property
    def _dtype(self) -> np.dtype:
        """The dtype of products."""
        return np.result_type(self.x_dtype, self.factor_dtype)

    @property
    def products_work(self) -> float:
        geometry, problem = self.geometry, self.problem
        _, of_image, length = self._sizes
        outputs = geometry.group_outputs  # `work` takes the share of this loop's outputs
        of_gradient = outputs * len(self._taps.shifts)
        wide, multiply_adds = cost.width(problem.dtype), cost.multiply_adds(problem)
        copies = of_image * (APART if geometry.stride[2] > 1 else COPY) + of_gradient * COPY
        read = PACK if cost.is_complex_product(problem) else READ
        multiplied = of_gradient * of_image * cost.MULTIPLY_ADD * multiply_adds + (of_gradient + of_image) * read * wide
        begun = BEGIN * ceil(length / (self._run or 1))
        own = length * (copies * wide + multiplied) + begun
        own += cost.summed(outputs * geometry.reduction, geometry.kernel[2], problem.dtype)
        zeros = outputs * prod(self.block[:3]) * sum(map(abs, self._taps.shifts))
        return self.blocks * geometry.groups * (own + cost.left_out(zeros))

    @property
    def calls(self) -> float:
        quick = lines_of(self.geometry) + 3 * len(self._taps.shifts) + self.geometry.kernel[2]
        return self.turns * (self.turn_calls + QUICK * quick + calls_to_read(self.problem))

    # Sums

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry, regions, per_group = self.geometry, block.lines(self._row), self.geometry.group_channels
        image, grads = only_image(images, block), [self._as_lines(grad) for grad, _ in pairs]
        is_line = grads[0].ndim == 4
        key, make = (regions.layout, block.size, is_line), partial(self._steps, run, regions, block.size, is_line)
        is_cut = prod(block.size[:3]) * self._row > self._run
        steps = run.views(self, key, BUFFERS if is_cut else BUFFERS[:3], make)
        for zeros in steps.zeros:
            zeros.fill(0)
        kernel = (-1, per_group, *geometry.kernel)
        weights = [sums.reshape(len(sums), *kernel, copy=False) for _, sums in pairs]
        for groups in parts_of(geometry.groups, self.part):
            turn = steps.turns[groups.stop - groups.start]
            channels = slice(groups.start * per_group, groups.stop * per_group)
            turn.reading.read(images, image, channels, block, regions)
            for (grad, _), lines, weight in zip(pairs, grads, weights):
                turn.multiply(lines[groups])
                if not is_finite(turn.total):
                    self._add_alone(block, images.some(channels), grad[groups], weight[groups], is_first)
                    continue
                taps = weight[groups]
                for tap, values in turn.taps:
                    if is_first:
                        taps[tap] = values
                    else:
                        taps[tap] += values

    def _as_lines(self, grad: np.ndarray) -> np.ndarray:
        """Return a gradient (groups, outputs, n, d, h, w), with one axis of pixels if these are a line."""
        is_line = self._row == grad.shape[5] and grad[:1, :1, :1].flags.c_contiguous
        return grad.reshape(*grad.shape[:3], -1, copy=False) if is_line else grad

    def _steps(self, run: WeightRun, regions: LineRegions, size: BlockSize, is_line: bool) -> Steps:
        """Make the views for a block that reads these regions, with a gradient that is a line or has three axes."""
        samples, depth, height, width = size
        geometry, part, shifts = self.geometry, self.part, self._taps.shifts
        length = samples * depth * height * self._row
        pitch = whole_lines(length, self._dtype.itemsize)
        factors, views = [], []
        of_each = (self._outputs, len(shifts)), (geometry.group_channels, len(regions.of_lines))
        for name, (images, lines) in zip(BUFFERS, of_each):
            memory = run.scratch(name, (part, images, lines, pitch))[..., :length]
            factors.append(memory.reshape(part, images * lines, length))
            views.append(memory.reshape(part, images, lines, samples, depth, height, self._row))
        shifted, others = self._shifted(views[0], width, is_line)
        reading = Reading.of(views[1].reshape(-1, *views[1].shape[2:], copy=False), regions)
        of_run = min(self._run, length)
        count, rest = divmod(length, of_run)
        sizes = [factor.shape[1] for factor in factors]
        total, runs = run.scratch(BUFFERS[2], (part, *sizes)), None
        if count + (rest > 0) > 1:
            runs = run.scratch(BUFFERS[3], (part, count + (rest > 0), *sizes))
        products = _in_runs(factors[0], factors[1], of_run, total if runs is None else runs)
        turns = {}
        for groups in {part, geometry.groups % part} - {0}:
            turns[groups] = Turn(
                reading.first(groups * geometry.group_channels),
                [(place[:groups], elements) for place, elements in shifted],
                [zeros[:groups] for zeros in others],
                [(one[:groups], other[:groups], product[:groups]) for one, other, product in products],
                None if runs is None else runs[:groups],
                total[:groups],
                self._by_tap(total[:groups]),
            )
        return Steps(reading.zeros, turns)

    def _shifted(
        self, lines: np.ndarray, width: int, is_line: bool
    ) -> tuple[list[tuple[np.ndarray, Any]], list[np.ndarray]]:
        """Return what is copied to lines (groups, outputs, shifts, n, d, h, w), and their elements that are zeros.

        All rows of a gradient that is a line are one run.  Elements that come from another row are overwritten.
        """
        row, copies, zeros = self._row, [], []
        for number, shift in enumerate(self._taps.shifts):
            line = lines[:, :, number]
            first, last = max(0, shift), min(row, width + shift)
            if first >= last:
                zeros.append(line)
                continue
            if is_line:
                by_sample = line.reshape(*line.shape[:3], -1, copy=False)
                length = by_sample.shape[3]
                place, elements = slice(first, length + min(0, shift)), slice(max(0, -shift), length - first)
                copies.append((by_sample[..., place], (..., elements)))
            else:
                copies.append((line[..., first:last], (..., slice(first - shift, last - shift))))
            zeros += [ends for ends in (line[..., :first], line[..., last:]) if ends.size]
        return copies, zeros

    def _by_tap(self, total: np.ndarray) -> list[tuple[Any, np.ndarray]]:
        """Return the index of taps of a weight (groups, outputs, channels, *kernel), and their elements of a product."""
        geometry, taps = self.geometry, self._taps
        by_line = self._outputs, len(taps.shifts), geometry.group_channels, *geometry.kernel[:2], geometry.stride[2]
        lines = total.reshape(len(total), *by_line)
        if geometry.stride[2] == 1:
            return [(..., np.moveaxis(lines[..., 0], 2, 5))]
        places = enumerate(zip(taps.numbers, taps.phases))
        return [((..., tap), lines[:, :, number, ..., phase]) for tap, (number, phase) in places]

    def _add_alone(self, block: Block, images: Images, grad: np.ndarray, taps: np.ndarray, is_first: bool) -> None:
        """Add the same sums by the definition: each window by itself, a few pixels of one group at a time."""
        per_group = taps.shape[2]
        if is_first:
            taps[...] = 0
        for group in range(len(taps)):
            own = images.some(slice(group * per_group, (group + 1) * per_group))
            for at, part in block.parts((1, *self._alone)):
                tile, shape = own.tile(part), part.tile(per_group)
                windows = np.ndarray(shape.windows_shape, tile.dtype, tile, 0, shape.windows_strides)
                pixels: Any = (group, slice(None), *at)
                taps[group] += np.einsum("cijkndhw,ondhw->ocijk", windows, grad[pixels])


def _in_runs(
    one: np.ndarray, other: np.ndarray, run: int, products: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Split matrices (groups, lines, elements) into runs; return their parts, and where the products are written.

    `products` is (groups, lines, lines), or has an axis of runs after the groups.
    """
    if products.ndim == 3:
        return [(one, other.swapaxes(1, 2), products)]
    count = one.shape[2] // run
    whole, rest = [], []
    for lines in (one, other):
        whole.append(lines[..., : count * run].reshape(*lines.shape[:2], count, run).swapaxes(1, 2))
        rest.append(lines[..., count * run :])
    parts = [(whole[0], whole[1].swapaxes(2, 3), products[:, :count])]
    if count < products.shape[1]:
        parts.append((rest[0], rest[1].swapaxes(1, 2), products[:, count]))
    return parts
