"""Depthwise convolution along the width: windows of neighbouring outputs where they lie, times Toeplitz matrices.

A window of m outputs is m + k - 1 elements of a row, and the next begins m elements further: rows of an overlapping view.
BLAS takes no matrix whose rows overlap, so windows that do are rows of different products:

::

    row      |----window 0----|          |----window 2----|
                      |----window 1----|          |----window 3----|

    rows 0, 2, 4 ... are one matrix, rows 1, 3, 5 ... another; or windows of different rows of the image are.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, prod

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import LONE_PIXELS, temporaries
from cupyconv.numpy.toeplitz import COPIES_BLOCK, ToeplitzLoop, reach, strided, sum_is_finite, toeplitz
from cupyconv.numpy.windows import Block, Images, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem

#: Outputs along the width that one product computes.
LENGTH = 16


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

    groups_bytes = 2 * COPIES_BLOCK

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = (1 + geometry.group_outputs) * ITEMSIZE[accumulator(problem.x_dtype)]
        share = -(-geometry.batch * geometry.pixels // cls.sharers(problem))
        return min(share, int(COPIES_BLOCK // per_pixel)), 1 if geometry.pixels >= LONE_PIXELS else geometry.batch

    @classmethod
    def rough_seconds(cls, problem: ConvProblem) -> float:
        geometry = problem.geometry
        length = min(LENGTH, geometry.out_size[2])
        outputs = geometry.batch * geometry.out_channels * geometry.pixels
        return outputs * reach(geometry, 2, length) * cost.MULTIPLY_ADD * cost.multiply_adds(problem) * 1.5

    @property
    def products_work(self) -> float:
        geometry, length = self.geometry, self.outputs
        samples, depth, height, width = self.block
        reduction, windows = reach(geometry, 2, length), ceil(width / length)
        many = min(windows, ceil(reduction / (length * geometry.stride[2])))
        many, rows = (windows, height) if height * many >= windows else (many * height, ceil(windows / many))
        times = self.blocks * samples * geometry.out_channels * depth * many
        return times * cost.product(rows, reduction, length, self.problem)

    @cached_property
    def outputs(self) -> int:
        """Neighbouring outputs that a product computes."""
        return min(LENGTH, self.geometry.out_size[2])

    @property
    def _group_bytes(self) -> int:
        geometry = self.geometry
        copies = 1 + temporaries(geometry, self.problem.prologue)
        return copies * prod(tile_shape(geometry, 1, self.block)) * self.x_dtype.itemsize

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        geometry = problem.geometry
        outputs = min(LENGTH, geometry.out_size[2])
        elements = geometry.out_channels * outputs * reach(geometry, 2, outputs)
        return 2 * elements * ITEMSIZE[accumulator(problem.weight_dtype)]

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Toeplitz matrices (c, outputs of each, elements, neighbouring outputs)."""
        matrices = toeplitz(weight, self.outputs, self.geometry.stride[2], self.geometry.dilation[2])
        return np.ascontiguousarray(matrices[:, :, :, 0].swapaxes(2, 3))

    def kernels(self, weight: np.ndarray) -> np.ndarray:
        return weight[:, :, None, None, : self.geometry.span[2] : self.geometry.dilation[2], 0]

    def multiply(self, images: Images, block: Block, weight: np.ndarray, sums: np.ndarray) -> bool:
        (c, outputs, n, depth, height, width), geometry = sums.shape, self.geometry
        image = images.tile_or_view(block)
        length, is_finite = min(self.outputs, width), True
        reduction, move = reach(geometry, 2, length), length * geometry.stride[2] * image.itemsize
        matrix = weight[:, :, None, None, None, None, None, :reduction, :length]
        own, samples, deeper, lower = (
            step * stride for step, stride in zip(image.strides, (1, 1, *geometry.stride[:2]))
        )
        apart = -(-reduction // (length * geometry.stride[2]))  # runs whose windows do not overlap
        # The rows of a product's first matrix are rows of the image, or where these are few, windows side by side.
        by_rows = height * apart >= width // length
        if by_rows:
            runs = [(begin, count, 1, 1) for begin, count in runs_of(width, length)]
        else:
            runs = runs_apart(width, length, apart, max(1, cost.SAFELY_SMALL // (length * reduction)))
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
