"""Backward pass through an epilogue, block by block in cache: the activation's derivative and each channel's sum.

The plan fixes the order of additions, so sums are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np

from cupyconv.numpy.activations import derivative
from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import block_words, five_axes
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, dtype_from_name
from cupyconv.problem.geometry import even_part
from cupyconv.problem.passes import ElementwiseGradProblem, EpilogueGradProblem
from cupyconv.problem.plan import Plan

#: Elements of a block: the gradient, the saved values and their product stay in a core's L2 cache.
BLOCK_ELEMENTS = 1 << 16

#: Slices of the axes (n, c, d, h, w).
At = tuple[slice, ...]


def plan_epilogue_grad(problem: EpilogueGradProblem) -> Plan:
    """Plan one pass over the gradient; no step if the gradient is empty and there are no sums."""
    return plan_in_blocks(problem, EpilogueGrad)


@dataclass(frozen=True)
class ElementwiseStep(NumpyStep):
    """A pass over images of equal shape, in blocks that stay in cache; `block` cuts the axes of all images."""

    #: Arrays of a block's size: temporaries, and copies that BLAS can read.
    TEMPORARIES: ClassVar[int]
    #: Axes of the sums in addition to the channel axis.
    SUMS: ClassVar[tuple[int, ...]] = ()

    problem: ElementwiseGradProblem
    block: tuple[int, ...]
    threads: int

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return accumulator(self.problem.grad.dtype)

    @property
    def bytes_moved(self) -> int:
        return sum(operand.nbytes for operand in self.problem.images)

    def __str__(self) -> str:
        blocks = prod(-(-extent // part) for extent, part in zip(self.problem.grad.shape, self.block))
        cut = block_words(blocks, self.block, "n, c, d, h, w", self.threads)
        return f"loop     {self.problem.operation} in {self.dtype}: {cut}"

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that writes ``out`` and ``sums``, if they are among its arrays."""
        cuts = [
            [slice(first, first + part) for first in range(0, extent, part)]
            for extent, part in zip(self.problem.grad.shape, self.block)
        ]

        def run(arrays: Mapping[str, Any]) -> None:
            finish = self.finisher(arrays)
            sums = arrays["sums"].reshape(-1, *self.SUMS) if "sums" in arrays else None
            if sums is not None:
                sums[...] = 0
            for at, part in zip(product(*cuts), in_threads(self.threads, finish, product(*cuts))):
                if sums is not None:
                    sums[at[1]] += part  # in the order of the blocks, whichever thread finishes first

        return run

    def finisher(self, arrays: Mapping[str, Any]) -> Callable[[At], np.ndarray | None]:
        """Return a function that computes a block, and returns its channel sums if `arrays` has sums."""
        raise NotImplementedError


def plan_in_blocks(problem: ElementwiseGradProblem, step: type[ElementwiseStep]) -> Plan:
    """Return the plan that is one step of this class."""
    grad = problem.grad
    if not grad.nbytes and not (problem.sums and problem.sums.nbytes):
        return problem.planned([])
    bytes_per_element = step.TEMPORARIES * ITEMSIZE[accumulator(grad.dtype)]
    at_once = max(1, min(problem.host.threads, -(-prod(grad.shape) // BLOCK_ELEMENTS)))
    elements = max(1, min(BLOCK_ELEMENTS, problem.limit // (bytes_per_element * at_once)))
    block = _block_of(problem.images[-1], elements)
    threads = max(1, min(at_once, prod(-(-extent // part) for extent, part in zip(grad.shape, block))))
    return problem.planned([step(problem, block, threads)], {"blocks": threads * prod(block) * bytes_per_element})


def _block_of(operand: Operand, elements: int) -> tuple[int, ...]:
    """Return a block of at most `elements` elements that are close in memory: whole axes, smallest stride first."""
    block, left = [1] * 5, elements
    for axis in sorted(range(5), key=lambda axis: (abs(operand.strides[axis]), -axis)):
        block[axis] = even_part(max(1, operand.shape[axis]), max(1, left))
        left //= block[axis]
    return tuple(block)


@dataclass(frozen=True)
class EpilogueGrad(ElementwiseStep):
    """Compute ``out`` and ``sums`` from ``grad`` and, with an activation, ``saved``."""

    TEMPORARIES = 4

    problem: EpilogueGradProblem

    def finisher(self, arrays: Mapping[str, Any]) -> Callable[[At], np.ndarray | None]:
        grad = five_axes(arrays["grad"])
        saved, out = (five_axes(arrays[name]) if name in arrays else None for name in ("saved", "out"))
        wanted, dtype = "sums" in arrays, dtype_from_name(self.dtype)

        def finish(at: At) -> np.ndarray | None:
            block = grad[at].astype(dtype, copy=False)
            place = out[at] if out is not None and out.dtype == dtype else None
            if saved is not None:
                slope = derivative(saved[at].astype(dtype, copy=False), self.problem.activation)
                block = np.multiply(block, slope, out=place)
            if out is not None and place is None:
                out[at] = block
            return channel_sums(block) if wanted else None

        return finish


def channel_sums(block: np.ndarray) -> np.ndarray:
    """Return each channel's sum of (n, c, d, h, w), as products with ones: BLAS is faster than NumPy's sum."""
    samples, channels = block.shape[:2]
    if channels > 1 and block.strides[1] == block.itemsize:
        rows = np.moveaxis(block, 1, -1).reshape(-1, channels)
        return np.ones(len(rows), block.dtype) @ rows
    planes = block.reshape(samples, channels, -1)
    return (planes @ np.ones(planes.shape[-1], block.dtype)).sum(axis=0)
