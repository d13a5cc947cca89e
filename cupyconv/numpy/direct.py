"""Without columns: tap by tap, one tap's products after the other added to the sums."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cupyconv.numpy.convolution import MEMORY_BLOCK, ConvLoop, ConvRun, one_tap_bytes, sums_per_pixel
from cupyconv.numpy.gemm import product, with_parts
from cupyconv.numpy.windows import Block
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem


class TapByTap(ConvLoop):
    """A product for each tap: no columns but one tap's, and a sum that is gone through for every tap."""

    name = "taps"
    words = "tap by tap, no columns"
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

    @property
    def workspace(self) -> int:
        """Beside the sums: one tap's products and columns."""
        return one_tap_bytes(self.problem, self.block, self.x_dtype.itemsize) + 2 * self.sums_bytes

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """The matrix of each tap: (taps, groups, outputs per group, channels)."""
        weight = with_parts(self, weight)
        return np.moveaxis(weight.reshape(*weight.shape[:2], self.geometry.group_channels, self.geometry.taps), 3, 0)

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        sums = np.zeros(block.sums_shape, self.sums_dtype)
        columns = run.images.scratch.array("columns", (self.geometry.in_channels, *block.size))
        for weight, regions in zip(run.weight, block.taps):
            run.images.read(regions, block, columns)
            sums += product(run, np.ascontiguousarray(weight), columns, block)
        return sums


#: The first that applies and fits the workspace limit is taken.
WAYS = (TapByTap,)
