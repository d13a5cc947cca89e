"""Depthwise weight gradient by strips: products of strips of the image and of the gradient, with taps on diagonals.

One tap's gradient is a dot product, and all taps of a kernel row read the same elements again.  In a strip of both, a
few pixels wide, all elements of an x row are therefore multiplied by all of a gradient row, and summed over rows:

::

    x' [elements, rows]   x   grad [rows, outputs]    =    d0            only the diagonals are needed:
                                                           d1 d0         d0 d0 ... sum up to tap 0's gradient,
    for each row of the kernel, from                       d2 d1 d0      d1 d1 ... to tap 1's
    its row of x on, `stride` rows apart                      d2 d1

Narrow strips waste fewer products; in wide strips, BLAS is faster per product.  Pixels fill the vectors of BLAS or,
with large strides and narrow strips, elements do; the other side is processed one by one.  All reads are in place.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import ceil, inf, prod
from typing import NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import temporaries
from cupyconv.numpy.toeplitz import reach, strided
from cupyconv.numpy.weight_sums import GroupsGradientLoop, Pairs, WeightRun, grad_is_factor
from cupyconv.numpy.windows import Block, Images, parts_of, tile_shape, whole_and_rest
from cupyconv.problem.arrays import accumulator, product_flops
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import WeightGradientProblem

#: Smallest and largest width of a strip, in pixels of the gradient.
NARROWEST, WIDEST = 6, 16
#: Smallest fraction of a vector that the elements of a strip fill: with fewer, BLAS took up to twice as long.
FILLED = 0.75
#: Time of products and of their sums, relative to the cost model: here, both stay in the innermost cache.
IN_CACHE = 0.85
#: Time of so small a complex product relative to the cost model, near the worst case: BLAS packs what it hardly uses.
COMPLEX = 3.2
#: Calls for the strips of one width.
STRIP_CALLS = 14
#: Elements of a sample's gradient from which it is a block of its own: calls are long enough.
LONE_GRADIENT = 30_000


class GradientStrips(GroupsGradientLoop):
    """Multiply strips of the image and of the gradient for each kernel row, and sum the diagonals of the products."""

    name = "strips"
    description = "matrix products of strips of x and the gradient, whose diagonals sum to the taps"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return problem.geometry.is_depthwise and problem.geometry.kernel[0] == 1

    @property
    def products_work(self) -> float:
        return self.tile_work + products_work(self.problem)

    @property
    def calls(self) -> float:
        widths = 1 + (self.block[3] % self._strip.width > 0)
        return self.blocks * self.turn_calls + self.turns * STRIP_CALLS * widths

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        is_lone = gradient_is_rows(problem) and geometry.out_channels * geometry.pixels >= LONE_GRADIENT
        samples = 1 if is_lone else geometry.batch
        return geometry.pixels * samples, samples

    @cached_property
    def grad_in_place(self) -> bool:
        return gradient_is_rows(self.problem)

    @cached_property
    def _strip(self) -> Strip:
        return strip_of(self.geometry, self.sums_dtype.name)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's tile with temporary copies, and of its products and their sum."""
        geometry, length = self.geometry, self._strip.width
        tile = (1 + temporaries(geometry, self.problem.prologue)) * prod(tile_shape(geometry, 1, self.block))
        strips = 1 + self.block[0] * self.block[1] * ceil(self.block[3] / length)
        outputs = self.rows or geometry.group_outputs
        products = strips * outputs * geometry.kernel[1] * reach(geometry, 2, length) * length
        return (tile + products) * self.sums_dtype.itemsize

    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        for groups in parts_of(self.geometry.groups, self.part):
            image = images.some(groups).tile_or_view(block)
            for grad, sums in pairs:
                taps = sums[groups]
                by_pixel = grad[groups].reshape(*taps.shape[:2], *block.size)
                is_new = is_first
                for first, strips, width in whole_and_rest(block.size[3], self._strip.width):
                    matrices = self._products(run, image, by_pixel, first, strips, width)
                    sum_of_diagonals = np.einsum("coabp->coab", self._diagonals(matrices)).reshape(taps.shape)
                    if is_new:
                        taps[...] = sum_of_diagonals
                    else:
                        taps += sum_of_diagonals
                    is_new = False

    def _products(
        self, run: WeightRun, image: np.ndarray, grad: np.ndarray, first: int, strips: int, width: int
    ) -> np.ndarray:
        """Return the products of `strips` strips from the pixel `first` on, summed over all strips.

        They are (c, outputs, kh, elements, pixels), with the last two axes exchanged if the strips are turned.
        """
        geometry = self.geometry
        (deeper, down, right), elements = geometry.stride, reach(geometry, 2, width)
        c, outputs, *samples, height, _ = grad.shape
        own, n, d, row, item = image.strides
        x = strided(
            image,
            (0, 0, first * right),
            (c, 1, *samples, strips, geometry.kernel[1], elements, height),
            (own, 0, n, d * deeper, width * right * item, geometry.dilation[1] * row, item, down * row),
        )
        *others, row, item = grad.strides
        shape = (c, outputs, *samples, strips, 1, height, width)
        g = np.lib.stride_tricks.as_strided(grad[..., first:], shape, (*others, width * item, 0, row, item))
        sides = (width, elements) if self._strip.is_turned else (elements, width)
        products = run.scratch("strips", (c, outputs, *samples, strips, geometry.kernel[1], *sides))
        np.matmul(x, g, out=products.swapaxes(-1, -2) if self._strip.is_turned else products)
        products = products.reshape(c, outputs, -1, geometry.kernel[1] * elements * width)
        if products.shape[2] > 1:
            total = run.scratch("sum of strips", (c, outputs, products.shape[3]))
            products = np.einsum("coxp->cop", products, out=total)
        return products.reshape(c, outputs, geometry.kernel[1], *sides)

    def _diagonals(self, matrices: np.ndarray) -> np.ndarray:
        """Return a view of the products of each tap's elements and pixels: (c, outputs, kh, kw, pixels)."""
        *others, element, pixel = matrices.strides
        pixels = matrices.shape[4]
        if self._strip.is_turned:
            element, pixel, pixels = pixel, element, matrices.shape[3]
        strides = (*others, element * self.geometry.dilation[2], element * self.geometry.stride[2] + pixel)
        shape = (*matrices.shape[:3], self.geometry.kernel[2], pixels)
        return np.ndarray(shape, matrices.dtype, matrices, 0, strides)


class Strip(NamedTuple):
    """How the gradient is cut: the width of a strip in pixels, and the number of products.

    If `is_turned`, elements fill vectors, not pixels.  `seconds` is the estimated time of one product and its sum.
    """

    width: int
    is_turned: bool
    products: int
    seconds: float


def strip_counts(width: int) -> list[int]:
    """Return the least number of strips for each width of a strip; more strips of this width take longer."""
    counts = {max(1, ceil(width / own)) for own in range(NARROWEST, WIDEST + 1)}
    return sorted(count for count in counts if count <= max(1, width // NARROWEST))


@lru_cache(maxsize=64)
def strip_of(geometry: ConvGeometry, dtype: str) -> Strip:
    """Return the strips with the least estimated time, among those that cut a row about evenly."""
    depth, height, width = geometry.out_size
    rows = geometry.batch * depth * geometry.out_channels * geometry.kernel[1]
    least, best = inf, Strip(max(1, width), False, 0, 0.0)
    for count in strip_counts(width):
        own = max(1, ceil(width / count))
        elements = reach(geometry, 2, own)
        for is_turned, sides in ((False, (elements, own)), (True, (own, elements))):
            if is_turned and elements < FILLED * cost.VECTOR_ELEMENTS / cost.width(dtype):
                continue
            each = cost.small_product(sides[0], height, sides[1], dtype) + cost.added(elements * own, dtype)
            seconds = IN_CACHE * rows * count * each
            if width % own:
                seconds += STRIP_CALLS * cost.CALL  # for the last strip, which is narrower
            if seconds < least:
                least, best = seconds, Strip(own, is_turned, rows * count, each)
    return best


def products_work(problem: WeightGradientProblem) -> float:
    """Return the estimated time of the products of strips and of their sum."""
    width, _, products, own = strip_of(problem.geometry, accumulator(problem.dtype))
    if cost.is_complex_product(problem):
        elements = reach(problem.geometry, 2, width)
        own = COMPLEX * cost.product(elements, problem.geometry.out_size[1], width, problem)
        return IN_CACHE * products * (own + cost.added(elements * width, problem.dtype))
    return IN_CACHE * products * own * product_flops(problem.x_dtype, problem.factor_dtype) / 2


def gradient_is_rows(problem: WeightGradientProblem) -> bool:
    """Whether products read the rows of a sample's gradient in place."""
    return grad_is_factor(problem) and problem.grad.pixel_stride == 1
