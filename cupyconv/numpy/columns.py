"""im2col and col2im as copies and sums of slices, one tap at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy.blocks import parts_of
from cupyconv.numpy.windows import Region, five_axes, read, tap_regions
from cupyconv.problem.dtypes import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import Windows
from cupyconv.problem.operands import Operand
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import Col2imProblem, ColumnsProblem, Im2colProblem


def plan_im2col(problem: Im2colProblem) -> Plan:
    """Columns of one or many inputs, written straight into the result."""
    return problem.planned([Im2col.of(problem, problem.xs)] if problem.columns.nbytes else [])


def plan_col2im(problem: Col2imProblem) -> Plan:
    """An image from columns: the entries of each tap are added to the elements that they were read from."""
    (out,) = problem.xs
    if not out.nbytes:
        return problem.planned([])
    if accumulator(out.dtype) == out.dtype:
        return problem.planned([Col2im.of(problem, [problem.columns])])
    channel = out.pixels * ITEMSIZE[accumulator(out.dtype)]
    channels = max(1, min(problem.windows.in_channels, (problem.limit - Plan.ALIGNMENT) // channel))
    return problem.planned([Col2im.of(problem, [problem.columns], channels)], [Buffer("sums", channels * channel)])


@dataclass(frozen=True)
class ColumnsLoop:
    """A pass over all taps; each is a few copies or sums of slices."""

    body: ClassVar[str]

    geometry: Windows
    inputs: tuple[str, ...]
    dtype: str  # of the sums
    bytes_moved: int
    flops: int
    channels: int = 0  # whose sums there are at a time; 0 where they are the result itself

    @classmethod
    def of(cls, problem: ColumnsProblem, inputs: Sequence[Operand], channels: int = 0) -> Self:
        """The loop of a problem that reads these arrays."""
        return cls(
            geometry=problem.windows,
            inputs=tuple(operand.name for operand in inputs),
            dtype=accumulator(problem.columns.dtype),
            bytes_moved=problem.minimal_bytes,
            flops=problem.flops,
            channels=channels,
        )

    def __str__(self) -> str:
        block = " x ".join(map(str, (1, *self.geometry.out_size)))
        return (
            f"loop     {self.body}, sums in {self.dtype}: {self.geometry.batch} block(s) of {block} (n, d, h, w)"
            f" on 1 thread(s)"
        )

    @property
    def shape_of_work(self) -> object:
        return self

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return self.run

    def run(self, arrays: Mapping[str, Any]) -> None:
        raise NotImplementedError


class Im2col(ColumnsLoop):
    """Windows of the inputs are written into ``out``."""

    body = "im2col"

    def run(self, arrays: Mapping[str, Any]) -> None:
        xs, columns = [five_axes(arrays[name]) for name in self.inputs], _by_tap(arrays["out"], self.geometry)
        for t, regions in enumerate(_regions(self.geometry)):
            for at, elements in regions:
                for x, first in zip(xs, self.geometry.channel_offsets):
                    target = read(columns[:, first : first + x.shape[1], t], at)
                    target[...] = 0 if elements is None else read(x, elements)


class Col2im(ColumnsLoop):
    """Every entry of columns is added to the element of ``out`` that it was read from.

    Sums are kept in the image, or where that would round each of them, some channels of a sample at a time beside it.
    """

    body = "col2im"

    def run(self, arrays: Mapping[str, Any]) -> None:
        columns, image = _by_tap(arrays[self.inputs[0]], self.geometry), five_axes(arrays["out"])
        sums_dtype, count = dtype_from_name(self.dtype), image.shape[1]
        for n, channels in product(range(len(image)), parts_of(count, self.channels or count)):
            columns_nc, image_nc = columns[n, channels], image[n, channels]
            sums = np.empty(image_nc.shape, sums_dtype) if self.channels else image_nc
            sums[...] = 0
            for t, regions in enumerate(_regions(self.geometry)):
                for at, elements in regions:
                    if elements is not None:  # what fell on padding is dropped
                        read(sums, elements)[...] += read(columns_nc[:, t], at)
            if self.channels:
                image_nc[...] = sums


def _regions(windows: Windows) -> tuple[tuple[Region, ...], ...]:
    """What each tap reads for all output pixels at once."""
    depth, height, width = windows.out_size
    return tap_regions(windows, (range(depth), range(height), range(width)))


def _by_tap(columns: np.ndarray, windows: Windows) -> np.ndarray:
    """A view (N, C, taps, depth, height, width) of columns (N, C * taps, pixels)."""
    return columns.reshape(columns.shape[0], windows.in_channels, windows.taps, *windows.out_size)
