"""max_pool and its gradient, block by block, each finished while in cache.

The maximum over a window is taken along one axis after the other, a slice for every tap: kd + kh + kw passes
instead of kd * kh * kw, and the first ones, over whole rows, leave less for the last.

The gradient goes over all taps in row-major order.  A tap whose element is its window's maximum takes what is left
of the window's gradient, so the first one takes all of it.  A block is of elements, and looks at every window over
them: no block depends on another, and each element's sum has the same order however the blocks are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyconv.numpy.loops import PoolingLoop
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import axis_segments, five_axes
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.geometry import Windows


class NewArray(Protocol):
    """An uninitialised array by name, laid out as the input is."""

    def __call__(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray: ...


def pooling_loop(loop: PoolingLoop) -> Callable[[Mapping[str, np.ndarray]], None]:
    """What runs a loop, given arguments and results by name."""
    windows, dtype = loop.geometry, dtype_from_name(loop.dtype)
    part_of_axis: Callable[..., Any]
    compute: Callable[..., None]
    if loop.body == "max_pool":
        part_of_axis, compute, spatial = _Outputs.along, _max_pool, windows.out_size
    else:
        part_of_axis, compute, spatial = _Elements.along, _max_pool_gradient, windows.size
    shape = (windows.batch, windows.in_channels, *spatial)
    cuts = [[range(at, min(at + part, n)) for at in range(0, n, part)] for n, part in zip(shape, loop.block)]
    planes = [tuple(slice(r.start, r.stop) for r in plane) for plane in product(*cuts[:2])]
    parts = list(product(*([part_of_axis(windows, axis, r) for r in cuts[2 + axis]] for axis in range(3))))

    def run(arrays: Mapping[str, np.ndarray]) -> None:
        images = [five_axes(arrays[name]) for name in (*loop.inputs, loop.result)]
        scratch = Scratch(dtype, loop.blocks)
        axes = sorted(range(5), key=lambda axis: -abs(images[0].strides[axis]))  # in memory, outermost first

        def new(name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
            return scratch.array(name, [shape[axis] for axis in axes], dtype).transpose(np.argsort(axes))

        def finish(block: tuple[tuple[slice, ...], tuple[Any, ...]]) -> None:
            plane, part = block
            with np.errstate(all="ignore"):  # every thread has its own
                compute(windows, dtype, new, [image[plane] for image in images], part)

        if loop.threads == 1:
            for block in product(planes, parts):
                finish(block)
        else:
            with ThreadPoolExecutor(loop.threads) as pool:
                list(pool.map(finish, product(planes, parts)))

    return run


class _Outputs(NamedTuple):
    """A run of outputs along an axis: the elements that their windows read, and for every tap those it reads of them."""

    out: slice
    read: slice
    taps: tuple[tuple[slice, slice], ...]  # positions of outputs, elements

    @classmethod
    def along(cls, windows: Windows, axis: int, outputs: range) -> _Outputs:
        read = _read(windows, axis, outputs)
        offsets = _offsets(windows, axis, read.start)
        taps = [_inside(outputs, read.stop - read.start, windows.stride[axis], offset) for offset in offsets]
        return cls(slice(outputs.start, outputs.stop), read, tuple(tap for tap in taps if tap is not None))

    @property
    def length(self) -> int:
        return self.out.stop - self.out.start

    @property
    def is_view(self) -> bool:
        """Whether there is nothing to compare: every output is an element."""
        return len(self.taps) == 1 and self.covered(self.taps[0])

    def covered(self, tap: tuple[slice, slice]) -> bool:
        return tap[0] == slice(0, self.length)


def _max_pool(
    windows: Windows, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Outputs]
) -> None:
    x, out = images
    out = out[_everywhere([part.out for part in parts])]
    image = _widened("image", x[_everywhere([part.read for part in parts])], dtype, new)
    compared = [axis for axis in range(3) if not parts[axis].is_view]
    for axis, part in enumerate(parts):
        if part.is_view:
            image = image[_along(axis, part.taps[0][1])]
            continue
        shape = (*image.shape[: 2 + axis], part.length, *image.shape[3 + axis :])
        in_place = axis == compared[-1] and out.dtype == dtype and shape == out.shape
        maxima = out if in_place else new(f"maxima {axis}", shape, dtype)
        _maximum_along(axis, part, image, maxima)
        image = maxima
    if image is not out:
        out[...] = image


def _maximum_along(axis: int, part: _Outputs, image: np.ndarray, maxima: np.ndarray) -> None:
    """The maximum over the taps of one axis; -inf where all of them fall on padding."""
    covering = [elements for at, elements in part.taps if part.covered((at, elements))][:2]
    rest = [tap for tap in part.taps if tap[1] not in covering]
    if len(covering) == 2:
        one, other = (image[_along(axis, elements)] for elements in covering)
        np.maximum(one, other, out=maxima)
    elif covering:
        maxima[...] = image[_along(axis, covering[0])]
    else:
        maxima.fill(-np.inf)
    for at, elements in rest:
        so_far = maxima[_along(axis, at)]
        np.maximum(so_far, image[_along(axis, elements)], out=so_far)


class _Elements(NamedTuple):
    """A run of elements along an axis, the windows over it, and all that those read."""

    elements: slice
    windows: slice
    read: slice
    taps: tuple[tuple[slice, slice, slice, slice], ...]  # windows and elements read; of these, elements of the run

    @classmethod
    def along(cls, windows: Windows, axis: int, elements: range) -> _Elements:
        stride, before = windows.stride[axis], windows.before[axis]
        first = max(0, -((windows.span[axis] - 1 - before - elements.start) // stride))
        over = range(first, max(first, min(windows.out_size[axis], (elements[-1] + before) // stride + 1)))
        read = _read(windows, axis, over) if over else slice(0, 0)
        taps = []
        for in_read, in_run in zip(_offsets(windows, axis, read.start), _offsets(windows, axis, elements.start)):
            reads = _inside(over, read.stop - read.start, stride, in_read)
            own = _inside(over, len(elements), stride, in_run) or (slice(0, 0), slice(0, 0))
            if reads is not None:
                taps.append((*reads, *own))
        return cls(slice(elements.start, elements.stop), slice(over.start, over.stop), read, tuple(taps))


def _max_pool_gradient(
    windows: Windows, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Elements]
) -> None:
    x, y, grad, out = images
    over = _everywhere([part.windows for part in parts])
    out = out[_everywhere([part.elements for part in parts])]
    sums = out if out.dtype == dtype else new("sums", out.shape, dtype)
    sums[...] = 0
    image = _widened("image", x[_everywhere([part.read for part in parts])], dtype, new)
    largest = _widened("largest", y[over], dtype, new)
    left = new("left", largest.shape, dtype)
    left[...] = grad[over]
    # Taken and left as bits: a mask splits them exactly, infinities and NaNs too.
    bits = np.dtype(f"i{dtype.itemsize}")
    taken, hit = new("taken", left.shape, bits), new("hit", left.shape, np.dtype(bool))
    left_bits, taken_numbers = left.view(bits), taken.view(dtype)
    some_are_nan = bool(np.isnan(largest).any())
    once = all(span <= stride for span, stride in zip(windows.span, windows.stride))
    for tap in product(*(part.taps for part in parts)):
        at, elements, own_at, own = (_everywhere(slices) for slices in zip(*tap))
        hits, mask, rest = hit[at], taken[at], left_bits[at]
        np.equal(image[elements], largest[at], out=hits)
        if some_are_nan:
            hits |= np.isnan(image[elements])
        np.copyto(mask, hits)
        np.subtract(0, mask, out=mask)  # np.negative into itself is wrong for some strides (NumPy 2.4)
        mask &= rest
        rest ^= mask
        if once:
            sums[own] = taken_numbers[own_at]
        else:
            sums[own] += taken_numbers[own_at]
    if sums is not out:
        out[...] = sums


def _read(windows: Windows, axis: int, outputs: range) -> slice:
    """The elements along an axis that the windows of outputs lie over."""
    stride, before, size = windows.stride[axis], windows.before[axis], windows.size[axis]
    first = min(max(0, outputs.start * stride - before), size)
    return slice(first, max(first, min(size, outputs[-1] * stride - before + windows.span[axis])))


def _offsets(windows: Windows, axis: int, origin: int) -> list[int]:
    """Where each tap of the window at output 0 reads, counted from `origin`."""
    return [t * windows.dilation[axis] - windows.before[axis] - origin for t in range(windows.kernel[axis])]


def _inside(outputs: range, size: int, stride: int, offset: int) -> tuple[slice, slice] | None:
    """Of a tap: the outputs for which it falls on one of `size` elements, by position, and those elements."""
    for at, elements in axis_segments(outputs, size, stride, offset, "constant"):
        if isinstance(elements, slice):
            return at, elements
    return None


def _everywhere(slices: Sequence[slice]) -> Any:
    """An index of the last three axes."""
    return (..., *slices)


def _along(axis: int, elements: slice) -> Any:
    """An index of one of the last three axes."""
    return (..., elements, *(slice(None),) * (2 - axis))


def _widened(name: str, image: np.ndarray, dtype: np.dtype, new: NewArray) -> np.ndarray:
    """The image in the dtype compared in."""
    if image.dtype == dtype:
        return image
    widened = new(name, image.shape, dtype)
    widened[...] = image
    return widened
