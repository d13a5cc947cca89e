"""The direct method: products of one tap after another are added to the sums, without columns of all taps.

If a tap reads little, for example because the kernel is as large as the image, a product covers several taps.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.convolution import MEMORY_BLOCK, ConvLoop, ConvRun, box_bytes, sums_per_pixel, taps_at_a_time
from cupyconv.numpy.gemm import product, with_parts
from cupyconv.numpy.windows import CACHED_REGIONS, Block
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem


class TapByTap(ConvLoop):
    """One product per tap, or per few small taps; only these have columns, and each product passes over the sums."""

    name = "taps"
    description = "tap by tap, no columns"
    smallest = 1

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return True

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        geometry = problem.geometry
        per_pixel = geometry.in_channels * ITEMSIZE[accumulator(problem.x_dtype)]
        per_pixel += 2 * sums_per_pixel(problem)
        return MEMORY_BLOCK // (per_pixel or 1), geometry.batch

    @cached_property
    def in_place(self) -> bool:
        return False

    @cached_property
    def taps(self) -> int:
        """Largest number of taps per product."""
        return taps_at_a_time(self.problem, self.block, self.x_dtype.itemsize)

    @cached_property
    def rounds(self) -> int:
        return super().rounds * -(-self.geometry.taps // self.taps)

    @property
    def work(self) -> float:
        geometry, rounds = self.geometry, -(-self.geometry.taps // self.taps)
        sizes = geometry.group_outputs, geometry.reduction / rounds, prod(self.block)
        products = self.rounds * geometry.groups * cost.product(*sizes, self.problem)
        columns = self.columns_work(geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps)
        columns += self.tile_work * (self.taps > 1)
        passes = 2 * rounds * cost.added(prod(self.problem.out.shape), self.problem.dtype)
        return products + columns + passes + self.store_work

    @property
    def calls(self) -> float:
        if self.taps > 1:
            return self.turns * 30
        places = prod(-(-extent // part) for extent, part in zip(self.geometry.out_size, self.block[1:]))
        return self.turns * (7 + cost.REGION_CALLS * (places > CACHED_REGIONS))

    @property
    def workspace(self) -> int:
        """Bytes of the sums, of the products, and of the columns of one product's taps."""
        return box_bytes(self.problem, self.block, self.x_dtype.itemsize, self.taps) + 2 * self.sums_bytes

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight as (groups, outputs per group, channels, taps)."""
        weight = with_parts(self, weight)
        return weight.reshape(*weight.shape[:2], self.geometry.group_channels, self.geometry.taps)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = np.zeros(block.sums_shape, self.sums_dtype)
        for taps, columns in run.images.some_taps(block, self.taps):
            weight = run.weight[..., taps]
            sums += product(run, np.ascontiguousarray(weight).reshape(*weight.shape[:2], -1), columns, block)
        return sums


IMPLEMENTATIONS = (TapByTap,)
