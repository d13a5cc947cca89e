"""im2col and col2im as copies and sums of slices, one tap at a time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from cupyconv.numpy.blocks import parts_of
from cupyconv.numpy.loops import BlockLoop
from cupyconv.numpy.windows import Region, five_axes, read, tap_regions
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.geometry import Windows


def im2col(loop: BlockLoop, arrays: Mapping[str, Any]) -> None:
    """Write windows of the inputs into ``out``."""
    xs, columns = [five_axes(arrays[name]) for name in loop.inputs], _by_tap(arrays["out"], loop.geometry)
    for t, regions in enumerate(_regions(loop.geometry)):
        for at, elements in regions:
            for x, first in zip(xs, loop.geometry.channel_offsets):
                target = read(columns[:, first : first + x.shape[1], t], at)
                target[...] = 0 if elements is None else read(x, elements)


def col2im(loop: BlockLoop, arrays: Mapping[str, Any]) -> None:
    """Add every entry of columns to the element of ``out`` that it was read from.

    Sums are kept in the image, or where that would round each of them, some channels of a sample at a time beside it.
    """
    columns, image = _by_tap(arrays[loop.inputs[0]], loop.geometry), five_axes(arrays["out"])
    sums_dtype, count = dtype_from_name(loop.dtype), image.shape[1]
    for n, channels in product(range(len(image)), parts_of(count, loop.part or count)):
        columns_nc, image_nc = columns[n, channels], image[n, channels]
        sums = np.empty(image_nc.shape, sums_dtype) if loop.part else image_nc
        sums[...] = 0
        for t, regions in enumerate(_regions(loop.geometry)):
            for at, elements in regions:
                if elements is not None:  # what fell on padding is dropped
                    read(sums, elements)[...] += read(columns_nc[:, t], at)
        if loop.part:
            image_nc[...] = sums


def _regions(windows: Windows) -> tuple[tuple[Region, ...], ...]:
    """Of all output pixels at once."""
    depth, height, width = windows.out_size
    return tap_regions(windows, (range(depth), range(height), range(width)))


def _by_tap(columns: np.ndarray, windows: Windows) -> np.ndarray:
    """A view (N, C, taps, depth, height, width) of columns (N, C * taps, pixels)."""
    return columns.reshape(columns.shape[0], windows.in_channels, windows.taps, *windows.out_size)
