"""Several inputs merged by a 1x1 kernel: copy the inputs, or add their products, whichever takes less time.

::

    few outputs       y  =  w_0 x_0  +  w_1 x_1  + ...      one product per input in place, added in cache
    many outputs      y  =  w  [ x_0                        the inputs concatenated by a copy, one product
                                 x_1 ... ]

The image is cut into chunks that stay in cache, and that are long enough for NumPy's call overhead to be small.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.block_toeplitz import BlockToeplitz
from cupyconv.numpy.convolution import ConvLoop, ConvRun, columns_bytes, copy_bytes, inputs_are_columns
from cupyconv.numpy.gemm import Columns, has_few_columns
from cupyconv.numpy.mec import MecRows, in_runs
from cupyconv.numpy.windows import Block
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.problems import ConvProblem

#: Bytes of the inputs in a chunk: if they are copied, and if they are read in place.
COPIED_CHUNK, READ_CHUNK = 4 << 20, 8 << 20
#: Passes over the outputs per additional product (a write, two reads, a write), relative to one pass of a copy.
_PASSES = 2


def _is_added(problem: ConvProblem) -> bool:
    """Whether adding the products of the inputs takes less time than copying the inputs."""
    geometry = problem.geometry
    return _PASSES * geometry.out_channels * (len(problem.xs) - 1) < geometry.in_channels


class Merge(ConvLoop):
    """Inputs of a 1x1 kernel, each with contiguous pixels or channels."""

    name = "merge"
    description = "inputs merged chunk by chunk"

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        several = len(problem.xs) > 1 and problem.geometry.groups == 1
        return several and problem.is_one_kind and inputs_are_columns(problem)

    @classmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        per_pixel = problem.geometry.in_channels * ITEMSIZE[accumulator(problem.x_dtype)]
        return (READ_CHUNK if _is_added(problem) else COPIED_CHUNK) // (per_pixel or 1), 1

    @cached_property
    def is_added(self) -> bool:
        return _is_added(self.problem)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        return copy_bytes(problem.weight, problem.weight_dtype) if _is_added(problem) else 0

    @cached_property
    def threads(self) -> int:
        return cost.worth_waking(min(self.problem.host.threads, self.blocks), self.work)

    @property
    def work(self) -> float:
        geometry, problem, area = self.geometry, self.problem, prod(self.block)
        results = prod(problem.out.shape)
        if not self.is_added:
            copies = cost.copied(geometry.batch * geometry.pixels * geometry.in_channels, area, problem.x_dtype)
            product = cost.product(geometry.out_channels, geometry.in_channels, area, problem)
            return self.blocks * product + copies + self.store_work
        products = sum(cost.product(geometry.out_channels, x.shape[1], area, problem) for x in problem.xs)
        passes = cost.added((len(problem.xs) - 1) * results, problem.dtype)
        return self.blocks * products + passes + self.store_work

    @property
    def workspace(self) -> int:
        if not self.is_added:
            return columns_bytes(self.problem, self.block, self.x_dtype.itemsize) + self.sums_bytes
        pixels = self.block[1] * self.block[2] * self.block[3]
        return self.geometry.out_channels * pixels * self.sums_dtype.itemsize + self.sums_bytes

    def arranged(self, weight: np.ndarray) -> Any:
        """Return the weight; if products are added, a separate matrix for each input."""
        if not self.is_added:
            return weight
        return [np.ascontiguousarray(weight[0, :, channels]) for _, channels in self.inputs]

    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        shape = (self.geometry.out_channels, block.area)
        sums = block.of(run.out).reshape(shape) if self.in_place else np.empty(shape, self.sums_dtype)
        parts = [block.of(x)[0].reshape(x.shape[1], block.area) for x, _ in run.images.inputs]
        if not self.is_added:
            columns = run.images.scratch.array("columns", (self.geometry.in_channels, block.area))
            in_runs(run.weight[0], np.concatenate(parts, out=columns), sums)
            return sums.reshape(block.sums_shape)
        in_runs(run.weight[0], parts[0], sums)
        product = run.products.array("product", shape, self.sums_dtype)
        for matrix, part in zip(run.weight[1:], parts[1:]):
            in_runs(matrix, part, product)
            sums += product
        return sums.reshape(block.sums_shape)


class MergedColumns(Columns):
    """Columns of inputs that `Merge` does not support, or of so few elements that one product is faster."""

    @classmethod
    def applies(cls, problem: ConvProblem) -> bool:
        return super().applies(problem) and (has_few_columns(problem) or not Merge.applies(problem))


IMPLEMENTATIONS = (Merge, MecRows, BlockToeplitz, MergedColumns)
