"""im2col and col2im as copies and sums of slices, one tap at a time."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from cupyconv.backends.numpy.windows import Region, block_regions, read
from cupyconv.geometry import Windows


def im2col(windows: Windows, xs: Sequence[np.ndarray], columns: np.ndarray) -> None:
    """Write windows into `columns`, shaped (N, C, taps, depth, height, width)."""
    for t, regions in enumerate(_regions(windows)):
        for at, elements in regions:
            for x, first in zip(xs, windows.channel_offsets):
                channels = slice(first, first + x.shape[1])
                columns[(slice(None), channels, t, *at)] = 0 if elements is None else read(x, elements)


def col2im(windows: Windows, columns: np.ndarray, image: np.ndarray, sums_dtype: np.dtype) -> None:
    """Add every entry of `columns` (N, C, taps, depth, height, width) to the element it was read from.

    One sample at a time is summed in `sums_dtype` and rounded once.
    """
    with np.errstate(all="ignore"):
        for n in range(windows.batch):
            sums = np.zeros(image.shape[1:], sums_dtype)
            for t, regions in enumerate(_regions(windows)):
                for at, elements in regions:
                    if elements is not None:  # what fell on padding is dropped
                        sums[(slice(None), *elements)] += columns[(n, slice(None), t, *at)]
            image[n] = sums


def _regions(windows: Windows) -> tuple[tuple[Region, ...], ...]:
    """Of all output pixels at once."""
    depth, height, width = windows.out_size
    return block_regions(windows, (range(depth), range(height), range(width)))
