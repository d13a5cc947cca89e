"""im2col and col2im as copies and sums of slices: tap by tap, or pixel by pixel if there are fewer pixels than taps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.windows import Region, block_words, five_axes, parts_of, read, tap_regions
from cupyconv.problem.arrays import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import Windows
from cupyconv.problem.passes import Col2imProblem, ColumnsProblem, Im2colProblem
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import HostModel

#: One thread, whatever the host has: the caller's thread does both operations.
ALONE = HostModel(1)


def plan_im2col(problem: Im2colProblem) -> Plan:
    """Plan the columns of one or several inputs, which are written directly to the result."""
    problem = replace(problem, machine=ALONE)
    return problem.planned([Im2col(problem)] if problem.columns.nbytes else [])


def plan_col2im(problem: Col2imProblem) -> Plan:
    """Plan an image from columns: the entries of each tap are added to the elements that they were read from."""
    (out,) = problem.xs
    problem = replace(problem, machine=ALONE)
    if not out.nbytes:
        return problem.planned([])
    if accumulator(out.dtype) == out.dtype:
        return problem.planned([Col2im(problem)])
    channel = out.pixels * ITEMSIZE[accumulator(out.dtype)]
    channels = max(1, min(problem.windows.in_channels, (problem.limit - Plan.ALIGNMENT) // channel))
    return problem.planned([Col2im(problem, channels)], {"sums": channels * channel})


@dataclass(frozen=True)
class ColumnsStep(NumpyStep):
    """A pass over all taps, or all pixels; each needs a few copies or sums of slices."""

    problem: ColumnsProblem

    def __str__(self) -> str:
        windows = self.problem.windows
        blocks = block_words(windows.batch, (1, *windows.out_size), "n, d, h, w", ALONE.threads)
        return f"loop     {self.problem.operation}{self.sums}: {blocks}"

    @property
    def sums(self) -> str:
        """The dtype in which the pass accumulates, as the page of a plan shows it; empty for copies."""
        return ""


class Im2col(ColumnsStep):
    """Write the windows of the inputs to ``out``."""

    def run(self, arrays: Mapping[str, Any]) -> None:
        windows = self.problem.windows
        xs = [five_axes(arrays[x.name]) for x in self.problem.xs]
        columns, each = _in_turn(arrays["out"], windows)
        for t, regions in enumerate(each):
            for at, elements in regions:
                for x, first in zip(xs, windows.channel_offsets):
                    target = read(columns[:, first : first + x.shape[1], t], at)
                    target[...] = 0 if elements is None else read(x, elements)


@dataclass(frozen=True)
class Col2im(ColumnsStep):
    """Add every entry of columns to the element of ``out`` that it was read from.

    Sums accumulate in the image, or, if that would round each sum, in an array for some channels of one sample.
    """

    channels: int = 0  # channels per array of sums; 0 if sums accumulate in the image

    @property
    def sums(self) -> str:
        return f", accumulates in {accumulator(self.problem.columns.dtype)}"

    def run(self, arrays: Mapping[str, Any]) -> None:
        windows = self.problem.windows
        (columns, each), image = _in_turn(arrays["columns"], windows), five_axes(arrays["out"])
        each = tuple(each)  # iterated over for every sample
        sums_dtype, count = dtype_from_name(accumulator(self.problem.columns.dtype)), image.shape[1]
        parts = [*parts_of(count, self.channels or count)]
        for n, channels in ((n, part) for n in range(len(image)) for part in parts):  # `product` would list all samples
            columns_nc, image_nc = columns[n, channels], image[n, channels]
            sums = np.empty(image_nc.shape, sums_dtype) if self.channels else image_nc
            sums[...] = 0
            for t, regions in enumerate(each):
                for at, elements in regions:
                    if elements is not None:  # entries for padding are dropped
                        read(sums, elements)[...] += read(columns_nc[:, t], at)
            if self.channels:
                image_nc[...] = sums


def _in_turn(columns: np.ndarray, windows: Windows) -> tuple[np.ndarray, Iterable[tuple[Region, ...]]]:
    """Return columns (N, C * taps, pixels) as a view (N, C, taps, *pixels), and what each tap reads for all pixels.

    If there are fewer pixels than taps, pixels and taps are exchanged.
    """
    pixels, taps = tuple(map(range, windows.out_size)), tuple(map(range, windows.kernel))
    shape = columns.shape[0], windows.in_channels
    if windows.taps <= windows.pixels:
        return columns.reshape(*shape, windows.taps, *windows.out_size), tap_regions(windows, pixels)
    by_pixel = np.moveaxis(columns.reshape(*shape, *windows.kernel, windows.pixels), -1, 2)
    return by_pixel, tap_regions(windows.exchanged(pixels), taps)
