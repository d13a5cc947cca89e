"""max_pool and its gradient, block by block, each finished while in cache.

The maximum over a window is taken along one axis after the other, a slice for every tap: kd + kh + kw passes
instead of kd * kh * kw, and the first ones, over whole rows, leave less for the last.

The gradient goes over all taps in row-major order.  A tap whose element is its window's maximum takes what is left
of the window's gradient, so the first one takes all of it.  A block is of elements, and looks at every window over
them: no block depends on another, and each element's sum has the same order however the blocks are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import axis_segments, five_axes
from cupyconv.problem.dtypes import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.even_parts import even_part
from cupyconv.problem.geometry import Windows
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import PoolingGradientProblem, PoolingProblem

#: Bytes that a block touches, at most: they stay in a core's L2 cache.
BLOCK_BYTES = 512 << 10

#: Elements of a block along the axes (n, c, d, h, w).
Block = tuple[int, ...]


class NewArray(Protocol):
    """An uninitialised array by name, laid out as the input is."""

    def __call__(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray: ...


def plan_max_pool(problem: PoolingProblem) -> Plan:
    """The largest element of every window."""
    return _plan(problem, MaxPool)


def plan_max_pool_gradient(problem: PoolingGradientProblem) -> Plan:
    """Each window's gradient, at the element that was its largest."""
    return _plan(problem, MaxPoolGradient)


def _plan(problem: PoolingProblem, loop: type[PoolingLoop]) -> Plan:
    loops = [loop.of(one) for one in problem.each]
    workspace = max((loop.workspace for loop in loops), default=0)
    return problem.planned(loops, [Buffer("blocks", workspace)] if workspace else [])


@dataclass(frozen=True)
class PoolingLoop:
    """A loop over blocks of what is written for one image, each finished while in cache.

    `block` cuts the axes of the result in the order in which they lie in memory: planes of a C-ordered image, rows of
    a channels-last one.
    """

    body: ClassVar[str]
    #: What a block has to know of its elements along one axis.
    on_axis: ClassVar[type[_Outputs] | type[_Elements]]

    inputs: tuple[str, ...]
    result: str
    shape: tuple[int, ...]  # of the result
    block: Block
    blocks: int
    threads: int
    workspace: int  # bytes of temporaries, of all threads
    geometry: Windows
    dtype: str  # compared and added in
    bytes_moved: int
    flops: int

    @classmethod
    def of(cls, problem: PoolingProblem) -> Self:
        """The loop of the largest blocks that stay in cache and within the limit on workspace."""
        windows, x, (out,), limit = problem.windows, problem.xs[0], problem.outs, problem.limit
        threads, dtype = problem.host.threads, accumulator(x.dtype)

        def temporaries(block: Block) -> int:
            elements, flags = cls.temporaries(windows, block, widened=dtype != x.dtype)
            return elements * ITEMSIZE[dtype] + flags

        def fits(block: Block) -> bool:
            in_cache = cls.touched(windows, block) * ITEMSIZE[dtype] <= BLOCK_BYTES
            return in_cache and threads * temporaries(block) <= limit

        by_distance = sorted(range(5), key=lambda axis: abs(x.strides[axis]) if x.shape[axis] > 1 else 0)
        block = _largest_block(out.shape, by_distance, fits)
        blocks = prod(-(-extent // part) for extent, part in zip(out.shape, block))
        at_once = max(1, min(threads, blocks, limit // (temporaries(block) or 1)))
        workspace = at_once * temporaries(block)
        if workspace > limit:
            raise ValueError(f"the smallest block needs {workspace:,} bytes of workspace, the limit is {limit:,}")
        return cls(
            inputs=tuple(operand.name for operand in problem.inputs),
            result=out.name,
            shape=out.shape,
            block=block,
            blocks=blocks,
            threads=at_once,
            workspace=workspace,
            geometry=windows,
            dtype=dtype,
            bytes_moved=problem.minimal_bytes,
            flops=problem.flops,
        )

    def __str__(self) -> str:
        block = " x ".join(map(str, self.block))
        return (
            f"loop     {self.body} in {self.dtype}, {' and '.join(self.inputs)} -> {self.result}:"
            f" {self.blocks} block(s) of {block} (n, c, d, h, w) on {self.threads} thread(s)"
        )

    @property
    def shape_of_work(self) -> object:
        return self

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        dtype = dtype_from_name(self.dtype)
        cuts = [[range(at, min(at + part, n)) for at in range(0, n, part)] for n, part in zip(self.shape, self.block)]
        planes = [tuple(slice(r.start, r.stop) for r in plane) for plane in product(*cuts[:2])]
        parts = list(product(*([self.on_axis.of(self.geometry, axis, r) for r in cuts[2 + axis]] for axis in range(3))))

        def run(arrays: Mapping[str, Any]) -> None:
            images = [five_axes(arrays[name]) for name in (*self.inputs, self.result)]
            scratch = Scratch(dtype, self.blocks)
            axes = sorted(range(5), key=lambda axis: -abs(images[0].strides[axis]))  # in memory, outermost first

            def new(name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
                return scratch.array(name, [shape[axis] for axis in axes], dtype).transpose(np.argsort(axes))

            def finish(block: tuple[tuple[slice, ...], Sequence[Any]]) -> None:
                plane, part = block
                self.finish(dtype, new, [image[plane] for image in images], part)

            for _ in in_threads(self.threads, finish, product(planes, parts)):
                pass

        return run

    # What a direction has of its own.

    @staticmethod
    def touched(windows: Windows, block: Block) -> int:
        """Elements that a block reads and writes."""
        raise NotImplementedError

    @staticmethod
    def temporaries(windows: Windows, block: Block, widened: bool) -> tuple[int, int]:
        """Numbers and flags of a block's temporaries; where it is `widened`, beside 16-bit images."""
        raise NotImplementedError

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        """Compute one block of some planes of the images."""
        raise NotImplementedError


def _largest_block(shape: Sequence[int], axes: Sequence[int], fits: Callable[[Block], bool]) -> Block:
    """The largest block that fits: whole axes first to last, part of one, single steps of the rest."""

    def with_part(axis: int, part: int) -> Block:
        return (*block[:axis], part, *block[axis + 1 :])

    block: Block = (1, 1, 1, 1, 1)
    for axis in axes:
        extent = shape[axis]
        if not fits(with_part(axis, extent)):
            part = max(1, bisect_right(range(extent), 0, key=lambda below: not fits(with_part(axis, below + 1))))
            return with_part(axis, even_part(extent, part))
        block = with_part(axis, extent)
    return block


class _Outputs(NamedTuple):
    """A run of outputs along an axis: the elements that their windows read, and for every tap those it reads of them."""

    out: slice
    read: slice
    taps: tuple[tuple[slice, slice], ...]  # positions of outputs, elements

    @classmethod
    def of(cls, windows: Windows, axis: int, outputs: range) -> _Outputs:
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


class MaxPool(PoolingLoop):
    """The largest element of every window."""

    body = "max_pool"
    on_axis = _Outputs

    @staticmethod
    def touched(windows: Windows, block: Block) -> int:
        samples, channels, *outputs = block
        return samples * channels * (prod(_most_read(windows, outputs)) + prod(outputs))

    @staticmethod
    def temporaries(windows: Windows, block: Block, widened: bool) -> tuple[int, int]:
        """Maxima along one axis, and then another; widened: what the block reads, and its result."""
        samples, channels, *outputs = block
        read = _most_read(windows, outputs)
        elements = outputs[0] * read[1] * read[2] + outputs[0] * outputs[1] * read[2]
        if widened:
            elements += prod(read) + prod(outputs)
        return samples * channels * elements, 0

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Outputs]) -> None:
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
    def of(cls, windows: Windows, axis: int, elements: range) -> _Elements:
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


class MaxPoolGradient(PoolingLoop):
    """Each window's gradient, at the element that was its largest."""

    body = "max_pool gradient"
    on_axis = _Elements

    @staticmethod
    def touched(windows: Windows, block: Block) -> int:
        samples, channels, *elements = block
        return samples * channels * (2 * prod(elements) + 4 * prod(_most_windows(windows, elements)))

    @staticmethod
    def temporaries(windows: Windows, block: Block, widened: bool) -> tuple[int, int]:
        """What is left of the gradient, what a tap takes, and which do; widened: all that the block reads and writes."""
        samples, channels, *elements = block
        over = _most_windows(windows, elements)
        numbers = 2 * prod(over)
        if widened:
            numbers += prod(over) + prod(_most_read(windows, over)) + prod(elements)
        return samples * channels * numbers, samples * channels * 2 * prod(over)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Elements]) -> None:
        windows = self.geometry
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


def _most_read(windows: Windows, outputs: Sequence[int]) -> list[int]:
    """Elements along each axis that windows of this many outputs read, at the most."""
    return [
        min(size, (count - 1) * stride + span)
        for size, count, stride, span in zip(windows.size, outputs, windows.stride, windows.span)
    ]


def _most_windows(windows: Windows, elements: Sequence[int]) -> list[int]:
    """Windows along each axis that lie over this many elements, at the most."""
    return [
        min(out, (count + span - 2) // stride + 1)
        for out, count, span, stride in zip(windows.out_size, elements, windows.span, windows.stride)
    ]


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
