"""Weight gradient by channels: columns of a few channels at a time, multiplied by the output gradient.

::

    dW [O, channel 0 | channel 1 | ...]   =   grad [O, pixels]   x   columns of channel 0 | of channel 1 | ...  [pixels, taps]

The columns of a channel contribute to the gradient of that channel only, so threads divide the channels.  If threads
divided the pixels, each would need sums of the whole weight, which are added at the end.  Here each thread holds sums
of its current channels only, so little memory is enough.  BLAS is faster at tall products than at wide ones.  If there
are more columns than outputs, the sums are therefore stored transposed, and are transposed back when they are copied to
the result.  Otherwise, if there is only one block, its product is written directly to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, prod
from typing import Any, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.block_loops import PixelLoop, block_of_pixels, even_channels
from cupyconv.numpy.convolution import CACHE_BLOCK, columns_bytes, inputs_are_columns
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.weight_sums import blas_divides, grad_is_factor, memory_of_run, sums_are_result
from cupyconv.numpy.windows import Blocks, five_axes, parts_of
from cupyconv.problem.arrays import ITEMSIZE, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import WeightGradientProblem

#: Approximate pixels of a product, and of one that BLAS divides; and pixels of a sample from which its gradient is read
#: in place.
PIXELS, DIVIDED, LONE_SAMPLE = 1536, 1024, 768
#: If fewer channels than this fit, blocks have fewer pixels instead.
FEW_CHANNELS = 16
#: Products here take this fraction of the time that the cost model estimates.
IN_CACHE = 0.8


@dataclass(frozen=True)
class GradientChannels(PixelLoop):
    """Columns of `channels` channels at a time: whole groups, or some channels of one group."""

    name = "channels"
    description = "columns of a few channels at a time, and matrix products"
    turn_calls = 9

    problem: WeightGradientProblem
    channels: int = 1

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        is_real = not (is_complex(problem.x_dtype) or is_complex(problem.grad_dtype))
        return is_real and not inputs_are_columns(problem) and problem.geometry.group_channels > 1

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        is_lone = grad_is_factor(problem) and geometry.pixels >= LONE_SAMPLE
        return DIVIDED if blas_divides(problem) else PIXELS, 1 if is_lone else geometry.batch

    @classmethod
    def loops(cls, problem: WeightGradientProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        least = 0
        for loop in cls._to_try(problem):
            needed = 3 * Plan.ALIGNMENT + loop.copied_bytes + problem.host.threads * loop.workspace
            if needed <= problem.limit:
                sizes = {"grad": loop.copied_bytes, "blocks": loop.threads * loop.workspace}
                return [loop] if problem.out.nbytes else [], sizes
            least = min(least or needed, needed)
        raise problem.does_not_fit("the smallest block", least, problem.limit)

    @classmethod
    def _to_try(cls, problem: WeightGradientProblem) -> Iterator[Self]:
        """Yield loops, the best first: columns that fit in cache, then smaller ones.

        Loops over single samples come last; products can then read the gradient in place.
        """
        geometry, (pixels, samples) = problem.geometry, cls.aim(problem)
        most_channels = ceil(geometry.in_channels / problem.host.threads)
        per_pixel = geometry.taps * ITEMSIZE[accumulator(problem.x_dtype)]
        for most_samples in dict.fromkeys((samples, 1)):
            target = 2 * CACHE_BLOCK
            while target >= 4 * per_pixel:
                fitting = target // (per_pixel * min(most_channels, FEW_CHANNELS) or 1)
                block = block_of_pixels(geometry, max(cls.smallest, min(pixels, fitting)), most_samples)
                if block[0] < min(2, most_samples):
                    break
                channels = target // (per_pixel * (prod(block) + 2 * geometry.group_outputs) or 1)
                loop = cls(problem, block, cls._share(problem, channels))
                # A product that is written directly to the result needs cache space for its columns only.
                larger = replace(loop, channels=cls._share(problem, target // (per_pixel * prod(block) or 1)))
                loop = larger if larger.in_place else loop
                yield loop
                target -= target // 4

    @classmethod
    def _share(cls, problem: WeightGradientProblem, most: int) -> int:
        """About `most` channels or fewer, such that every thread gets the same number of parts."""
        geometry, threads = problem.geometry, problem.host.threads
        rounds = ceil(geometry.in_channels / (threads * max(1, most)))
        return even_channels(geometry, ceil(geometry.in_channels / (threads * rounds or 1)))

    # Sizes and costs.

    @cached_property
    def _is_tall(self) -> bool:
        return self.geometry.group_outputs >= self.largest.geometry.reduction

    @cached_property
    def in_place(self) -> bool:
        return self._is_tall and self.blocks == 1 and sums_are_result(self.problem)

    @property
    def _part(self) -> tuple[int, int]:
        """Groups of a part, and channels per group."""
        own = self.geometry.group_channels
        return max(1, self.channels // own), min(self.channels, own)

    @cached_property
    def largest(self) -> WeightGradientProblem:
        """The problem of a full-size part."""
        return replace(self.problem, geometry=_convolution(self.geometry, *self._part))

    @cached_property
    def shares(self) -> int:
        groups, channels = self._part
        return ceil(self.geometry.groups / groups) * ceil(self.geometry.group_channels / channels)

    @property
    def turns(self) -> int:
        return self.shares * self.blocks

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy of the gradient; 0 if products read the gradient in place."""
        if self.block[0] == 1 and grad_is_factor(self.problem):
            return 0
        return prod(self.problem.grad.shape) * self.factor_dtype.itemsize

    @property
    def workspace(self) -> int:
        """Bytes of a block's columns, its product, and the sums."""
        geometry = self.largest.geometry
        sums = geometry.groups * geometry.reduction * geometry.group_outputs * self.sums_dtype.itemsize
        products = (not self.in_place) + (self.blocks > 1)
        return columns_bytes(self.largest, self.block, self.x_dtype.itemsize) + products * sums + self.index_bytes

    @property
    def work(self) -> float:
        geometry, own = self.geometry, self.largest.geometry
        columns = geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps
        groups = self.turns * own.groups
        products = IN_CACHE * groups * cost.product(own.reduction, prod(self.block), own.group_outputs, self.problem)
        sums = (not self.in_place) * (self.blocks + 1) * geometry.reduction * geometry.out_channels
        copied = cost.copied(self.copied_bytes / self.factor_dtype.itemsize, self.block[3], self.problem.grad_dtype)
        return (
            self.tile_work * (geometry.taps > 1)
            + self.columns_work(columns)
            + products
            + cost.added(sums, self.problem.dtype)
            + self.threads * copied
        )

    # Execution.

    @cached_property
    def _memory_bytes(self) -> int:
        """Bytes that a run writes in addition to the result; computing them per run took a tenth of a small call."""
        return self.copied_bytes + self.threads * self.workspace

    def _scratch(self, dtype: np.dtype) -> Scratch:
        return memory_of_run(dtype, self._memory_bytes, self.turns)

    @cached_property
    def _cut(self) -> Callable[[ConvGeometry], Blocks]:
        """A cached function from a part's geometry to its blocks; only the last part may have another size."""
        return lru_cache(maxsize=4)(lambda own: Blocks(own, self.block, self.x_dtype.itemsize))

    def run(self, arrays: Mapping[str, Any]) -> None:
        geometry = self.geometry
        images, memory = self.images(arrays, self._scratch(self.x_dtype)), self._scratch(self.sums_dtype)
        grad, out = five_axes(arrays["grad"]), arrays["out"]
        if self.copied_bytes:
            by_output = grad.swapaxes(0, 1)
            copy = self._scratch(self.factor_dtype).array("factor", by_output.shape)
            copy[...] = by_output
            grad = copy.swapaxes(0, 1)
        out = out.reshape(geometry.groups, geometry.group_outputs, geometry.group_channels, *out.shape[2:])

        def compute(part: tuple[slice, slice]) -> None:
            groups, channels = part
            own = _convolution(geometry, groups.stop - groups.start, channels.stop - channels.start)
            first = groups.start * geometry.group_channels + channels.start
            some = images.some(slice(first, first + own.in_channels))
            factors = grad[:, groups.start * own.group_outputs : groups.stop * own.group_outputs]
            result = out[groups, :, channels]
            shape = own.groups, own.group_outputs, own.reduction
            sums = result.reshape(shape, copy=False) if self.in_place else self._memory("sums", shape, memory)
            if not self.blocks:
                sums[...] = 0
            for number, block in enumerate(self._cut(own)):
                columns = some.columns(block).reshape(own.groups, own.reduction, block.area)
                factor = block.of(factors).swapaxes(0, 1).reshape(own.groups, own.group_outputs, block.area)
                place = self._memory("product", shape, memory) if number else sums
                np.matmul(factor, columns.swapaxes(1, 2), out=place)
                if number:
                    sums += place
            if not self.in_place:
                result[...] = sums.reshape(result.shape)

        of_groups, of_channels = map(parts_of, (geometry.groups, geometry.group_channels), self._part)
        in_threads(self.threads, compute, product(of_groups, of_channels), self.holds_blas)

    def _memory(self, name: str, shape: tuple[int, int, int], memory: Scratch) -> np.ndarray:
        """A scratch array (groups, outputs, columns), stored with the longer of the last two axes first."""
        groups, outputs, columns = shape
        if self._is_tall:
            return memory.array(name, shape)
        return memory.array(name, (groups, columns, outputs)).swapaxes(1, 2)


@lru_cache(maxsize=64)
def _convolution(geometry: ConvGeometry, groups: int, channels: int) -> ConvGeometry:
    """The convolution of `groups` groups with `channels` channels each."""
    return replace(geometry, channels=(groups * channels,), groups=groups, out_channels=groups * geometry.group_outputs)
