"""cuFFT on host memory: executes a plan of ``cufftMakePlanMany``, in cuFFT's advanced data layout.

::

    element (i, j, k) of image b is at   b * dist + ((i * embed[1] + j) * embed[2] + k) * stride

It refuses what cuFFT refuses, and also what cuFFT leaves undefined.  Neither direction normalizes.  An inverse
transform to real numbers overwrites its source, as cuFFT may do.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import scipy.fft

from cupyconv.cuda.run.device import TransformArguments

from .blas import Memory

INT32_MAX = 2**31 - 1


class Kind(NamedTuple):
    """The source and target types of a cufftType."""

    source: str
    target: str


#: cufftType
TYPES = {
    0x29: Kind("complex64", "complex64"),
    0x2A: Kind("float32", "complex64"),
    0x2C: Kind("complex64", "float32"),
    0x69: Kind("complex128", "complex128"),
    0x6A: Kind("float64", "complex128"),
    0x6C: Kind("complex128", "float64"),
}


def check(plan: TransformArguments) -> None:
    """Raise ValueError for arguments that cuFFT refuses when a plan is created."""
    if not 1 <= len(plan.size) <= 3 or not len(plan.size) == len(plan.inembed) == len(plan.onembed):
        raise ValueError(f"one to three axes, not {plan.size} within {plan.inembed} and {plan.onembed}")
    if plan.type not in TYPES or plan.direction not in (-1, 1):
        raise ValueError(f"{plan.type:#x} is no type of transforms, or {plan.direction} no direction")
    numbers = (*plan.size, plan.batch, *(n for n in plan[1:7] if isinstance(n, int)))
    if not all(1 <= n <= INT32_MAX for n in numbers):
        raise ValueError(f"sizes lie between 1 and {INT32_MAX}: {plan}")
    for shape, embed in zip(_shapes(plan), (plan.inembed, plan.onembed)):
        if any(n > room for n, room in zip(shape[1:], embed[1:])):
            raise ValueError(f"{shape} elements do not fit {embed}")


def transform(memory: Memory, plan: TransformArguments, source: int, target: int) -> None:
    """Execute a plan that `check` accepts on the allocations that `memory` finds."""
    kind = TYPES[plan.type]
    shapes = _shapes(plan)
    images = _view(memory, source, kind.source, shapes[0], plan.inembed, plan.istride, plan.idist, plan.batch)
    results = _view(memory, target, kind.target, shapes[1], plan.onembed, plan.ostride, plan.odist, plan.batch)
    if np.may_share_memory(images, results):
        raise ValueError("source and target overlap")
    axes = tuple(range(1, images.ndim))
    with np.errstate(all="ignore"):
        if kind.source.startswith("float"):
            if plan.direction != -1:
                raise ValueError("real numbers are transformed forward")
            values = scipy.fft.rfftn(images, axes=axes)
        elif kind.target.startswith("float"):
            if plan.direction != 1:
                raise ValueError("transforms to real numbers are inverse")
            values = scipy.fft.irfftn(images, plan.size, axes, norm="forward")
        elif plan.direction == -1:
            values = scipy.fft.fftn(images, axes=axes)
        else:
            values = scipy.fft.ifftn(images, axes=axes, norm="forward")
        assert values.dtype == results.dtype
        results[...] = values
    if kind.target.startswith("float"):
        images[...] = np.nan


def _shapes(plan: TransformArguments) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements of an image along each axis, before and after the transform."""
    half = (*plan.size[:-1], plan.size[-1] // 2 + 1)
    kind = TYPES[plan.type]
    return (
        half if kind.target.startswith("float") else plan.size,
        half if kind.source.startswith("float") else plan.size,
    )


def _view(
    memory: Memory,
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    embed: tuple[int, ...],
    stride: int,
    dist: int,
    batch: int,
) -> np.ndarray:
    """Return the images as an array (batch, *shape)."""
    itemsize = np.dtype(dtype).itemsize
    if address % itemsize:
        raise ValueError(f"{address:#x} is not aligned to {dtype}")
    steps = (dist, *(stride * prod(embed[axis + 1 :]) for axis in range(len(shape))))
    elements = 1 + sum((n - 1) * step for n, step in zip((batch, *shape), steps))
    allocation, start = memory(address, address + elements * itemsize)
    strides = tuple(step * itemsize for step in steps)
    return np.ndarray((batch, *shape), dtype, allocation, address - start, strides)
