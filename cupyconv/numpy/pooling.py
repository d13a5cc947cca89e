"""Pooling and its gradients, block by block, each finished while in cache.

The maximum of a window, or its sum, is taken along one axis after the other, a slice for every tap: kd + kh + kw
passes instead of kd * kh * kw, and the first ones, over whole rows, leave less for the last.  The gradient of a mean goes
the same way back.  Where a maximum lies is asked of every tap, the last one first: the answer of the first stays.

The gradient of a maximum goes over all taps in row-major order.  A tap whose element is its window's maximum takes
what is left of the window's gradient, so the first one takes all of it.  Where a block has fewer windows than taps, it
goes over the windows, and looks for the first such tap of each.  A block is of elements, and looks at every window over
them: no block depends on another, and each element's sum has the same order however the blocks are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Scratch, axis_segments, block_words, five_axes
from cupyconv.problem.arrays import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import Windows, even_part
from cupyconv.problem.passes import (
    AvgPoolGradientProblem,
    AvgPoolProblem,
    MaxPoolGradientProblem,
    MaxPoolProblem,
    MeanProblem,
    PoolingProblem,
)
from cupyconv.problem.plan import Plan

#: Bytes that a block touches, at most: they stay in a core's L2 cache.
BLOCK_BYTES = 512 << 10
#: Slices along an axis, of all its blocks and taps, up to which they are worked out before: more take megabytes.
_KEPT_SLICES = 4096
#: Bytes of the place in its window that a plane's largest element has.
PLACE_BYTES = 128

#: Elements of a block along the axes (n, c, d, h, w).
Block = tuple[int, ...]


class NewArray(Protocol):
    """An uninitialised array by name, laid out as the input is."""

    def __call__(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray: ...


def plan_pooling(problem: PoolingProblem) -> Plan:
    """One number of every window; or each window's gradient, at the elements that it came from."""
    step = LargestPlaces if isinstance(problem, MaxPoolProblem) and problem.indices else STEPS[type(problem)]
    steps = [step.of(one) for one in problem.each]
    return problem.planned(steps, {"blocks": max((one.workspace for one in steps), default=0)})


@dataclass(frozen=True)
class PoolingStep(NumpyStep):
    """A loop over blocks of what is written for one image, each finished while in cache.

    `block` cuts the axes of the result in the order in which they lie in memory: planes of a C-ordered image, rows of
    a channels-last one.
    """

    problem: PoolingProblem
    block: Block = (1, 1, 1, 1, 1)
    threads: int = 1

    @classmethod
    def of(cls, problem: PoolingProblem) -> Self:
        """The step of the largest blocks that stay in cache and within the limit on workspace."""
        x, (out,), limit = problem.inputs[0], problem.outs, problem.limit
        all_threads = problem.host.threads

        def fits(block: Block) -> bool:
            step = cls(problem, block, all_threads)
            return step.touched * ITEMSIZE[step.dtype] <= BLOCK_BYTES and step.workspace <= limit

        by_distance = sorted(range(5), key=lambda axis: abs(x.strides[axis]) if x.shape[axis] > 1 else 0)
        step = cls(problem, _largest_block(out.shape, by_distance, fits))
        threads = max(1, min(all_threads, step.blocks, limit // (step.workspace or 1)))
        step = replace(step, threads=threads)
        if step.workspace > limit:
            raise ValueError(f"the smallest block needs {step.workspace:,} bytes of workspace, the limit is {limit:,}")
        return step

    @property
    def blocks(self) -> int:
        return prod(-(-extent // part) for extent, part in zip(self.problem.outs[0].shape, self.block))

    @property
    def dtype(self) -> str:
        """What is compared and added in."""
        return accumulator(self.problem.inputs[0].dtype)

    @property
    def widened(self) -> bool:
        """Whether a block of 16-bit images has copies to be computed in."""
        return self.dtype != self.problem.inputs[0].dtype

    @property
    def workspace(self) -> int:
        """Bytes of temporaries, of all threads."""
        numbers, flags = self.temporaries
        of_planes = prod(self.block[:2]) * (numbers * ITEMSIZE[self.dtype] + flags)
        return self.threads * (of_planes + self.shared * ITEMSIZE[self.dtype])

    def __str__(self) -> str:
        problem = self.problem
        inputs, outs = (
            " and ".join(operand.name for operand in operands) for operands in (problem.inputs, problem.results)
        )
        cut = block_words(self.blocks, self.block, "n, c, d, h, w", self.threads)
        return f"loop     {problem.operation} in {self.dtype}, {inputs} -> {outs}: {cut}"

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        problem, dtype = self.problem, dtype_from_name(self.dtype)
        names = [operand.name for operand in problem.arrays]
        shape = problem.outs[0].shape
        cuts = [[range(at, min(at + part, n)) for at in range(0, n, part)] for n, part in zip(shape, self.block)]
        planes = [tuple(slice(r.start, r.stop) for r in plane) for plane in product(*cuts[:2])]
        longest = max(map(len, cuts[2:])) * max(problem.windows.kernel)
        few = longest <= _KEPT_SLICES
        kept = [[self.part(axis, r) for r in cut] for axis, cut in enumerate(cuts[2:])] if few else []

        def each_part() -> Iterator[Sequence[Any]]:
            if few:
                return product(*kept)
            return (tuple(self.part(axis, r) for axis, r in enumerate(cut)) for cut in product(*cuts[2:]))

        def run(arrays: Mapping[str, Any]) -> None:
            images = [five_axes(arrays[name]) for name in names]
            scratch = Scratch(dtype, self.blocks)
            axes = sorted(range(5), key=lambda axis: -abs(images[0].strides[axis]))  # in memory, outermost first

            def new(name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
                return scratch.array(name, [shape[axis] for axis in axes], dtype).transpose(np.argsort(axes))

            def finish(block: tuple[tuple[slice, ...], Sequence[Any]]) -> None:
                plane, part = block
                self.finish(dtype, new, [image[plane] for image in images], part)

            in_threads(self.threads, finish, ((plane, part) for part in each_part() for plane in planes))

        return run

    @property
    def touched(self) -> int:
        """Elements that a block reads and writes."""
        raise NotImplementedError

    @property
    def temporaries(self) -> tuple[int, int]:
        """Numbers and flags of the temporaries for one channel of one sample of a block."""
        raise NotImplementedError

    @property
    def shared(self) -> int:
        """Numbers of the temporaries that all channels and samples of a block have in common."""
        return 0

    def part(self, axis: int, run: range) -> Any:
        """What a block has to know of its run of elements along one axis."""
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


class Reduction(PoolingStep):
    """One number of every window, by a ufunc that takes its elements in any order."""

    ufunc: ClassVar[np.ufunc]
    of_nothing: ClassVar[float]

    def part(self, axis: int, run: range) -> Any:
        return _Outputs.of(self.problem.windows, axis, run)

    @property
    def touched(self) -> int:
        outputs = self.block[2:]
        return prod(self.block[:2]) * (prod(_most_read(self.problem.windows, outputs)) + prod(outputs))

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left along one axis, and then another; widened: what the block reads, and its result."""
        outputs, read = self.block[2:], _most_read(self.problem.windows, self.block[2:])
        partial = outputs[0] * read[1] * read[2] + outputs[0] * outputs[1] * read[2]
        return partial + (prod(read) + prod(outputs)) * self.widened, 0

    def reduced(
        self, dtype: np.dtype, new: NewArray, image: np.ndarray, out: np.ndarray, parts: Sequence[_Outputs]
    ) -> np.ndarray:
        """The numbers of what a block reads: in its `out` if they can be, else a temporary, or a view of single elements."""
        compared = [axis for axis in range(3) if not parts[axis].is_view]
        for axis, part in enumerate(parts):
            if part.is_view:
                image = image[_along(axis, part.taps[0][1])]
                continue
            shape = (*image.shape[: 2 + axis], part.length, *image.shape[3 + axis :])
            in_place = axis == compared[-1] and out.dtype == dtype and shape == out.shape
            partial = out if in_place else new(f"partial {axis}", shape, dtype)
            self._reduce_along(axis, part, image, partial)
            image = partial
        return image

    def _reduce_along(self, axis: int, part: _Outputs, image: np.ndarray, partial: np.ndarray) -> None:
        """Over the taps of one axis; `of_nothing` where all of them fall on padding."""
        covering = [elements for at, elements in part.taps if part.covered((at, elements))][:2]
        rest = [tap for tap in part.taps if tap[1] not in covering]
        if len(covering) == 2:
            one, other = (image[_along(axis, elements)] for elements in covering)
            self.ufunc(one, other, out=partial)
        elif covering:
            partial[...] = image[_along(axis, covering[0])]
        else:
            partial.fill(self.of_nothing)
        for at, elements in rest:
            so_far = partial[_along(axis, at)]
            self.ufunc(so_far, image[_along(axis, elements)], out=so_far)


class MaxPool(Reduction):
    """The largest element of every window."""

    ufunc, of_nothing = np.maximum, -np.inf

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Outputs]) -> None:
        self.largest(dtype, new, images, parts)

    def largest(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Outputs]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the block reads, and the largest of each window, which are written too."""
        x, out = images[:2]
        image = _widened("image", x[_everywhere([part.read for part in parts])], dtype, new)
        out = out[_everywhere([part.out for part in parts])]
        largest = self.reduced(dtype, new, image, out, parts)
        if largest is not out:
            out[...] = largest
        return image, largest


class LargestPlaces(MaxPool):
    """The largest element of every window, and where it lies."""

    @property
    def touched(self) -> int:
        return super().touched + prod(self.block) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def temporaries(self) -> tuple[int, int]:
        """And which elements are the largest, or NaN."""
        return super().temporaries[0], 2 * prod(self.block[2:])

    @property
    def shared(self) -> int:
        """Places of the elements that a block reads, of 8 bytes each."""
        return prod(_most_read(self.problem.windows, self.block[2:])) * -(-8 // ITEMSIZE[self.dtype])

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Outputs]) -> None:
        image, largest = self.largest(dtype, new, images, parts)
        height, width = images[0].shape[3:]
        places = new("places", (1, 1, *(part.read.stop - part.read.start for part in parts)), np.dtype(np.int64))
        places[...] = 0
        for axis, (run, step) in enumerate(zip([part.read for part in parts], (height * width, width, 1))):
            along = np.arange(run.start * step, run.stop * step, step).reshape(-1, *(1,) * (2 - axis))
            places += along
        indices = images[2][_everywhere([part.out for part in parts])]
        indices.fill(-1)
        hit = new("hit", largest.shape, np.dtype(bool))
        some_are_nan = bool(np.isnan(largest).any())
        for tap in product(*(part.taps[::-1] for part in parts)):
            at, elements = (_everywhere(slices) for slices in zip(*tap))
            hits = hit[at]
            np.equal(image[elements], largest[at], out=hits)
            if some_are_nan:
                hits |= np.isnan(image[elements])
            np.copyto(indices[at], places[elements], where=hits)


class AvgPool(Reduction):
    """The mean of every window."""

    ufunc, of_nothing = np.add, 0.0
    problem: AvgPoolProblem

    @property
    def shared(self) -> int:
        """How many taps count, of every window."""
        return prod(self.block[2:])

    def part(self, axis: int, run: range) -> Any:
        return _Outputs.of(self.problem.windows, axis, run), _counts(self.problem, axis, run)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        x, out = images
        runs, counts = zip(*parts)
        out = out[_everywhere([run.out for run in runs])]
        image = _widened("image", x[_everywhere([run.read for run in runs])], dtype, new)
        sums = self.reduced(dtype, new, image, out, runs)
        means = out if out.dtype == dtype else sums  # of 16-bit images a copy that may be written to
        np.divide(sums, _outer("taps", counts, dtype, new), out=means)
        if means is not out:
            out[...] = means


class _Elements(NamedTuple):
    """A run of elements along an axis, the windows over it, and all that those read."""

    elements: slice
    windows: slice
    read: slice
    taps: tuple[tuple[slice, slice, slice, slice], ...]  # windows and elements read; of these, elements of the run
    each_window: tuple[slice, ...]  # of the elements read, those of each window

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
        dilation, kernel = windows.dilation[axis], range(windows.kernel[axis])
        starts = [window * stride - before - read.start for window in over]
        each = [_inside(kernel, read.stop - read.start, dilation, start) or (slice(0, 0),) * 2 for start in starts]
        return cls(
            slice(elements.start, elements.stop),
            slice(over.start, over.stop),
            read,
            tuple(taps),
            tuple(in_read for _, in_read in each),
        )


class Adjoint(PoolingStep):
    """Gradients of elements, from those of the windows over them."""

    def part(self, axis: int, run: range) -> Any:
        return _Elements.of(self.problem.windows, axis, run)

    @property
    def touched(self) -> int:
        elements = self.block[2:]
        return prod(self.block[:2]) * (2 * prod(elements) + 4 * prod(_most_windows(self.problem.windows, elements)))


class MaxPoolGradient(Adjoint):
    """Each window's gradient, at the element that was its largest."""

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left of the gradient, what a tap takes, and which do; widened: all that the block reads and writes."""
        elements, windows = self.block[2:], self.problem.windows
        over = _most_windows(windows, elements)
        copies = prod(over) + prod(_most_read(windows, over)) + prod(elements)
        flags = 2 * windows.taps + PLACE_BYTES if self._by_window(prod(over), windows.taps) else 2 * prod(over)
        return 2 * prod(over) + copies * self.widened, flags

    @staticmethod
    def _by_window(windows: int, taps: int) -> bool:
        """Whether a block with so many windows of so many taps goes over the windows."""
        return 4 * windows < taps

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[_Elements]) -> None:
        windows = self.problem.windows
        x, y, grad, out = images
        over = _everywhere([part.windows for part in parts])
        out = out[_everywhere([part.elements for part in parts])]
        sums = out if out.dtype == dtype else new("sums", out.shape, dtype)
        sums[...] = 0
        image = _widened("image", x[_everywhere([part.read for part in parts])], dtype, new)
        largest = _widened("largest", y[over], dtype, new)
        left = new("left", largest.shape, dtype)
        left[...] = grad[over]
        some_are_nan = bool(np.isnan(largest).any())
        if self._by_window(prod(left.shape[2:]), windows.taps):
            _add_by_window(parts, image, largest, left, sums, some_are_nan)
        else:
            self._add_by_tap(new, parts, image, largest, left, sums, some_are_nan)
        if sums is not out:
            out[...] = sums

    def _add_by_tap(
        self,
        new: NewArray,
        parts: Sequence[_Elements],
        image: np.ndarray,
        largest: np.ndarray,
        left: np.ndarray,
        sums: np.ndarray,
        some_are_nan: bool,
    ) -> None:
        windows, dtype = self.problem.windows, left.dtype
        # Taken and left as bits: a mask splits them exactly, infinities and NaNs too.
        bits = np.dtype(f"i{dtype.itemsize}")
        taken, hit = new("taken", left.shape, bits), new("hit", left.shape, np.dtype(bool))
        left_bits, taken_numbers = left.view(bits), taken.view(dtype)
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


def _add_by_window(
    parts: Sequence[_Elements],
    image: np.ndarray,
    largest: np.ndarray,
    left: np.ndarray,
    sums: np.ndarray,
    some_are_nan: bool,
) -> None:
    """The last window first: an element's sum has the order that going over the taps gives it."""
    for window in product(*(reversed(range(len(part.each_window))) for part in parts)):
        read = [part.each_window[at] for part, at in zip(parts, window)]
        elements = image[_everywhere(read)]
        if elements.size == 0:
            continue
        hits = elements == largest[_everywhere(window)][..., None, None, None]
        if some_are_nan:
            hits |= np.isnan(elements)
        by_plane = hits.reshape(*hits.shape[:2], -1)
        first = by_plane.argmax(-1)
        is_own = np.take_along_axis(by_plane, first[..., None], -1)[..., 0]
        places = []
        for part, along, place in zip(parts, read, np.unravel_index(first, hits.shape[2:])):
            place = place * along.step + (along.start + part.read.start - part.elements.start)
            is_own &= (place >= 0) & (place < part.elements.stop - part.elements.start)
            places.append(place)
        sums[(*np.nonzero(is_own), *(place[is_own] for place in places))] += left[_everywhere(window)][is_own]


class AvgPoolGradient(Adjoint):
    """Each window's gradient, in equal shares at all its elements."""

    problem: AvgPoolGradientProblem

    @property
    def temporaries(self) -> tuple[int, int]:
        """Shares of every window; their sums along one axis, and then another; widened: of all three."""
        elements, over = self.block[2:], _most_windows(self.problem.windows, self.block[2:])
        partial = elements[0] * over[1] * over[2] + elements[0] * elements[1] * over[2]
        return prod(over) + partial + prod(elements) * self.widened, 0

    @property
    def shared(self) -> int:
        """How many taps count, of every window."""
        return prod(_most_windows(self.problem.windows, self.block[2:]))

    def part(self, axis: int, run: range) -> Any:
        part = super().part(axis, run)
        return part, _counts(self.problem, axis, range(part.windows.start, part.windows.stop))

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        grad, out = images
        runs, counts = zip(*parts)
        over = grad[_everywhere([run.windows for run in runs])]
        out = out[_everywhere([run.elements for run in runs])]
        shares = new("shares", over.shape, dtype)
        shares[...] = over
        shares /= _outer("taps", counts, dtype, new)
        for axis, run in enumerate(runs):
            shape = (*shares.shape[: 2 + axis], out.shape[2 + axis], *shares.shape[3 + axis :])
            sums = out if axis == 2 and out.dtype == dtype else new(f"sums {axis}", shape, dtype)
            sums[...] = 0
            for _, _, own_at, own in run.taps:
                sums[_along(axis, own)] += shares[_along(axis, own_at)]
            shares = sums
        if shares is not out:
            out[...] = shares


#: What solves each kind of problem.
STEPS: dict[type[PoolingProblem], type[PoolingStep]] = {
    MaxPoolProblem: MaxPool,
    MaxPoolGradientProblem: MaxPoolGradient,
    AvgPoolProblem: AvgPool,
    AvgPoolGradientProblem: AvgPoolGradient,
}


def _counts(problem: MeanProblem, axis: int, outputs: range) -> np.ndarray:
    """How many taps count along an axis, of a run of windows, in a shape that goes along this axis of an image."""
    return np.array([problem.count(axis, output) for output in outputs]).reshape(-1, *(1,) * (2 - axis))


def _outer(name: str, counts: Sequence[np.ndarray], dtype: np.dtype, new: NewArray) -> np.ndarray:
    """The product of what counts along each axis, for every window."""
    taps = new(name, (1, 1, *(along.size for along in counts)), dtype)
    taps[...] = counts[0]
    for along in counts[1:]:
        taps *= along
    return taps


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
    """The outputs for which a tap falls on one of `size` elements, by position, and those elements."""
    for at, elements in axis_segments(outputs, size, stride, offset, "constant"):
        if isinstance(elements, slice):
            return at, elements
    return None


def _everywhere(slices: Sequence[slice | int]) -> Any:
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
