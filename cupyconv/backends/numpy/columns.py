"""im2col and col2im as copies and sums of slices, one tap at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyconv.backends.numpy.windows import Region, read, tap_regions
from cupyconv.geometry import Windows


def im2col(windows: Windows, xs: Sequence[np.ndarray], columns: np.ndarray) -> None:
    """Write windows into `columns`, shaped (N, C, taps, depth, height, width)."""
    for t, regions in enumerate(_regions(windows)):
        for at, elements in regions:
            for x, first in zip(xs, windows.channel_offsets):
                target = read(columns[:, first : first + x.shape[1], t], at)
                target[...] = 0 if elements is None else read(x, elements)


def col2im(windows: Windows, columns: np.ndarray, image: np.ndarray, sums_dtype: np.dtype) -> None:
    """Add every entry of `columns` (N, C, taps, depth, height, width) to the element it was read from.

    Sums are kept in the image, or where that would round each of them, a sample at a time beside it.
    """
    for columns_n, image_n in zip(columns, image):
        sums = image_n if image.dtype == sums_dtype else np.empty(image_n.shape, sums_dtype)
        sums[...] = 0
        for t, regions in enumerate(_regions(windows)):
            for at, elements in regions:
                if elements is not None:  # what fell on padding is dropped
                    read(sums, elements)[...] += read(columns_n[:, t], at)
        if sums is not image_n:
            image_n[...] = sums


def _regions(windows: Windows) -> tuple[tuple[Region, ...], ...]:
    """Of all output pixels at once."""
    depth, height, width = windows.out_size
    return tap_regions(windows, (range(depth), range(height), range(width)))
