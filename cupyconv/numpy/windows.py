"""Windows as slices: which input elements a tap reads, along one axis and along all three.

No padded copy is made.  Along an axis, the outputs whose tap falls inside the image are one slice; the
few at the borders are zeros, or are read through an index array that follows the padding mode.

::

    outputs of a block     | border |        inside         | border |
    input elements         | zeros  |  slice(first, last,   | index  |
                           | or idx |        stride)        |  array |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cupyconv.problem.geometry import Windows

#: Input elements of a run of outputs along an axis.
Elements = slice | np.ndarray
Segment = tuple[slice, Elements | None]  # positions of the outputs, and what they read; None: zeros
Region = tuple[tuple[slice, ...], tuple[Elements, ...] | None]


def padded_index(index: np.ndarray, size: int, mode: str) -> np.ndarray:
    """Elements of an axis that padded indices stand for, as ``np.pad`` defines `mode`."""
    if mode == "edge":
        return np.clip(index, 0, size - 1)
    if mode == "wrap":
        return index % size
    if mode == "symmetric":
        folded = index % (2 * size)
        return np.minimum(folded, 2 * size - 1 - folded)
    if mode == "reflect":
        period = max(1, 2 * (size - 1))
        folded = index % period
        return np.minimum(folded, period - folded)
    raise AssertionError(mode)


def axis_segments(outputs: range, size: int, stride: int, offset: int, mode: str) -> list[Segment]:
    """The runs of `outputs` (positions in it) whose tap at ``output * stride + offset`` is read alike."""
    inside_from = min(max(-(offset // stride), outputs.start), outputs.stop)
    inside_to = max(min(-((offset - size) // stride), outputs.stop), inside_from)
    segments: list[Segment] = []
    runs = ((outputs.start, inside_from, False), (inside_from, inside_to, True), (inside_to, outputs.stop, False))
    for begin, end, inside in runs:
        if begin == end:
            continue
        at = slice(begin - outputs.start, end - outputs.start)
        first = begin * stride + offset
        if inside:
            segments.append((at, slice(first, first + (end - begin - 1) * stride + 1, stride)))
        elif mode == "constant":
            segments.append((at, None))
        else:
            padded = np.arange(begin, end) * stride + offset
            segments.append((at, padded_index(padded, size, mode)))
    return segments


def boxes(
    windows: Windows, outputs: Sequence[range], strides: Sequence[int], offsets: Sequence[int]
) -> tuple[Region, ...]:
    """Boxes of three axes of `outputs`, each with the input elements it reads; None stands for zeros."""
    axes = [
        axis_segments(run, size, stride, offset, windows.padding_mode)
        for run, size, stride, offset in zip(outputs, windows.size, strides, offsets)
    ]
    regions: list[Region] = []
    for box in product(*axes):
        elements = tuple(element for _, element in box if element is not None)
        regions.append((tuple(at for at, _ in box), elements if len(elements) == len(box) else None))
    return tuple(regions)


def tap_regions(windows: Windows, block: tuple[range, ...]) -> tuple[tuple[Region, ...], ...]:
    """For every tap, in C order, what a block's output pixels read.

    Kept between calls, since a small convolution is bound by working this out; not for large kernels,
    which are not, and whose regions would take megabytes.
    """
    return (_kept_tap_regions if windows.taps <= 64 else _tap_regions)(windows, block)


def _tap_regions(windows: Windows, block: tuple[range, ...]) -> tuple[tuple[Region, ...], ...]:
    return tuple(
        boxes(windows, block, windows.stride, [t * d - b for t, d, b in zip(tap, windows.dilation, windows.before)])
        for tap in product(*(range(k) for k in windows.kernel))
    )


_kept_tap_regions = lru_cache(maxsize=256)(_tap_regions)


@lru_cache(maxsize=256)
def tile_regions(windows: Windows, block: tuple[range, ...]) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """The size of the tile that all windows of a block lie in, padding included, and what fills it."""
    size = tuple((len(run) - 1) * s + span for run, s, span in zip(block, windows.stride, windows.span))
    offsets = [run.start * s - before for run, s, before in zip(block, windows.stride, windows.before)]
    return size, boxes(windows, [range(extent) for extent in size], (1, 1, 1), offsets)


def windows_of_tile(
    windows: Windows, tile: tuple[int, ...], out_size: Sequence[int], itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a view (c, kd, kh, kw, n, d, h, w) of all windows in a C-ordered tile (c, n, d, h, w)."""
    c, n, *spatial = (prod(tile[axis + 1 :]) * itemsize for axis in range(5))
    taps = [step * gap for step, gap in zip(spatial, windows.dilation)]
    moves = [step * stride for step, stride in zip(spatial, windows.stride)]
    return (tile[0], *windows.kernel, tile[1], *out_size), (c, *taps, n, *moves)


def five_axes(image: np.ndarray) -> np.ndarray:
    """A view (n, c, d, h, w): axes of length 1 in front of the spatial ones."""
    if image.ndim == 4:
        return image[:, :, None]
    return image.reshape(*image.shape[:2], *(1,) * (5 - image.ndim), *image.shape[2:])


def read(image: np.ndarray, elements: Sequence[Elements]) -> np.ndarray:
    """The elements of the last three axes: a view where they are slices, a gather of a border else."""
    if slice is type(elements[0]) is type(elements[1]) is type(elements[2]):
        return image[(..., *elements)]
    # Cut to what is needed along every axis first, so that no gather is larger than that.
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    image = image[(..., *cut)]
    for axis, element in enumerate(elements):
        if not isinstance(element, slice):
            index: list[Any] = [slice(None)] * 3
            index[axis] = element - element.min()
            image = image[(..., *index)]
    return image


def add(image: np.ndarray, elements: Sequence[Elements], values: np.ndarray) -> None:
    """The adjoint of `read`: each value is added to the element that it would have been read from."""
    cut: list[Any] = [e if isinstance(e, slice) else slice(int(e.min()), int(e.max()) + 1) for e in elements]
    for axis, element in enumerate(elements, start=values.ndim - 3):
        if isinstance(element, slice):
            continue
        # Several values may belong to one element: they are brought together along this axis first.
        shape = (*values.shape[:axis], int(element.max() - element.min()) + 1, *values.shape[axis + 1 :])
        together = np.zeros(shape, values.dtype)
        gathered, spread = np.moveaxis(values, axis, 0), np.moveaxis(together, axis, 0)
        for one, index in zip(gathered, element - element.min()):
            spread[index] += one
        values = together
    image[(..., *cut)] += values
