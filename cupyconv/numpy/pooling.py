"""Pooling and its gradients, block by block, each finished while in cache.

The maximum of a window, or its sum, is taken along one axis after the other, a slice for every tap: kd + kh + kw
passes instead of kd * kh * kw, and the first ones, over whole rows, leave less for the last.  The gradient of a mean goes
the same way back.  Along an axis of few windows with many taps each, both go over the windows, a call for each.  Where a
maximum lies is asked of every tap, the last one first: the answer of the first stays.

The gradient of a maximum goes over all taps in row-major order.  A tap whose element is its window's maximum takes
what is left of the window's gradient, so the first one takes all of it.  A block is of elements, and looks at every window
over them: no block depends on another, and each element's sum has the same order however the blocks are cut.

Where a block has fewer windows than taps, both look for the first largest element of each window, a piece at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.choice import long_loop
from cupyconv.numpy.pool_windows import (
    PIECE,
    Elements,
    Outputs,
    everywhere,
    few,
    first_largest,
    most_read,
    most_windows,
    on_axis,
)
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Scratch, block_words, five_axes
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

#: Bytes that a block touches, at most: they stay in a core's L2 cache.  In smaller ones a call takes so little time that
#: threads wait for each other's.
BLOCK_BYTES = 2 << 20
#: Seconds of an element that a reduction reads or writes, and seconds of work from which another thread is worth waking.
TOUCHED, SHARE = 650e-12, 600e-6
#: Slices along an axis, of all its blocks and taps, up to which they are worked out before: more take megabytes.
_KEPT_SLICES = 4096
#: Taps along an axis for each of its windows, from which on a call for each window takes less than one for each tap.
MANY_TAPS = 32
#: Bytes of the places that a plane's largest element has, in a piece and in its window.
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
    notes = problem.notes + long_loop(sum(one.blocks for one in steps))
    return problem.planned(steps, {"blocks": max((one.workspace for one in steps), default=0)}, notes=notes)


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
        all_threads = problem.host.threads  # as the caller asked for, or at most so many
        if problem.host.most:
            all_threads = cls.worth_waking(problem)

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

    @classmethod
    def worth_waking(cls, problem: PoolingProblem) -> int:
        """Of as many threads as there may be, those that have enough to do."""
        return problem.host.threads

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


class Reduction(PoolingStep):
    """One number of every window, by a ufunc that takes its elements in any order."""

    ufunc: ClassVar[np.ufunc]
    of_nothing: ClassVar[float]

    @classmethod
    def worth_waking(cls, problem: PoolingProblem) -> int:
        elements = sum(prod(operand.shape) for operand in problem.arrays)
        return cost.worth_waking(problem.host.threads, elements * TOUCHED, SHARE)

    def part(self, axis: int, run: range) -> Any:
        return Outputs.of(self.problem.windows, axis, run, self.by_window(axis))

    def by_window(self, axis: int) -> bool:
        """Whether the block goes over its windows along an axis, and not over their taps."""
        return MANY_TAPS * self.block[2 + axis] <= self.problem.windows.kernel[axis]

    @property
    def compared(self) -> list[int]:
        """The axes that are not a view, of a block whose windows all lie inside."""
        windows = self.problem.windows
        padded = [windows.out_size[axis] * windows.stride[axis] > windows.size[axis] for axis in range(3)]
        return [axis for axis in range(3) if windows.kernel[axis] > 1 or windows.before[axis] or padded[axis]]

    @property
    def copies(self) -> bool:
        """Whether 16-bit images are widened before they are read; a call for each window does so by itself."""
        return self.widened and not (self.compared and self.by_window(self.compared[0]))

    @property
    def touched(self) -> int:
        outputs = self.block[2:]
        return prod(self.block[:2]) * (prod(most_read(self.problem.windows, outputs)) + prod(outputs))

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left along each compared axis but the last; widened: what the block reads, and its result."""
        outputs, read = self.block[2:], most_read(self.problem.windows, self.block[2:])
        partial = sum(prod((*outputs[: axis + 1], *read[axis + 1 :])) for axis in self.compared[:-1])
        return partial + prod(read) * self.copies + prod(outputs) * self.widened, 0

    def image(self, x: np.ndarray, dtype: np.dtype, new: NewArray, parts: Sequence[Outputs]) -> np.ndarray:
        """What a block reads, in a dtype that can be compared in."""
        image = x[everywhere([part.read for part in parts])]
        return _in_dtype("image", image, dtype, new) if self.copies else image

    def reduced(
        self, dtype: np.dtype, new: NewArray, image: np.ndarray, out: np.ndarray, parts: Sequence[Outputs]
    ) -> np.ndarray:
        """The numbers of what a block reads: in its `out` if they can be, else a temporary, or a view of single elements."""
        compared = [axis for axis in range(3) if not parts[axis].is_view]
        for axis, part in enumerate(parts):
            if part.is_view:  # before the others, that the last of them ends in `out` itself
                image = image[on_axis(axis, part.taps[0][1])]
        for axis in compared:
            part = parts[axis]
            shape = (*image.shape[: 2 + axis], part.length, *image.shape[3 + axis :])
            in_place = axis == compared[-1] and out.dtype == dtype and shape == out.shape
            partial = out if in_place else new(f"partial {axis}", shape, dtype)
            (self._reduce_each if part.each else self._reduce_along)(axis, part, image, partial)
            image = partial
        return image

    def _reduce_each(self, axis: int, part: Outputs, image: np.ndarray, partial: np.ndarray) -> None:
        """Window by window along one axis; `of_nothing` where all of one falls on padding."""
        for at, elements in enumerate(part.each):
            number, read = partial[on_axis(axis, slice(at, at + 1))], image[on_axis(axis, elements)]
            if read.size:
                self.ufunc.reduce(read, 2 + axis, partial.dtype, number, keepdims=True)
            else:
                number.fill(self.of_nothing)

    def _reduce_along(self, axis: int, part: Outputs, image: np.ndarray, partial: np.ndarray) -> None:
        """Over the taps of one axis; `of_nothing` where all of them fall on padding."""
        covering = [elements for at, elements in part.taps if part.covered((at, elements))][:2]
        rest = [tap for tap in part.taps if tap[1] not in covering]
        if len(covering) == 2:
            one, other = (image[on_axis(axis, elements)] for elements in covering)
            self.ufunc(one, other, out=partial)
        elif covering:
            partial[...] = image[on_axis(axis, covering[0])]
        else:
            partial.fill(self.of_nothing)
        for at, elements in rest:
            so_far = partial[on_axis(axis, at)]
            self.ufunc(so_far, image[on_axis(axis, elements)], out=so_far)


class MaxPool(Reduction):
    """The largest element of every window."""

    ufunc, of_nothing = np.maximum, -np.inf

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        self.largest(dtype, new, images, parts)

    def largest(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the block reads, and the largest of each window, which are written too."""
        x, out = images[:2]
        image = self.image(x, dtype, new, parts)
        out = out[everywhere([part.out for part in parts])]
        largest = self.reduced(dtype, new, image, out, parts)
        if largest is not out:
            out[...] = largest
        return image, largest


class LargestPlaces(MaxPool):
    """The largest element of every window, and where it lies."""

    def by_window(self, axis: int) -> bool:
        """All axes or none."""
        return few(prod(self.block[2:]), self.problem.windows.taps)

    @property
    def touched(self) -> int:
        return super().touched + prod(self.block) * -(-8 // ITEMSIZE[self.dtype])

    @property
    def temporaries(self) -> tuple[int, int]:
        """And which elements are the largest, or NaN; of few windows a piece of one, and where its largest is."""
        if self.by_window(0):
            return 2 * min(self.problem.windows.taps, PIECE), PLACE_BYTES
        return super().temporaries[0], 2 * prod(self.block[2:])

    @property
    def shared(self) -> int:
        """Places of the elements that a block reads, of 8 bytes each."""
        if self.by_window(0):
            return 0
        return prod(most_read(self.problem.windows, self.block[2:])) * -(-8 // ITEMSIZE[self.dtype])

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        if self.by_window(0):
            self._finish_each(dtype, images, parts)
        else:
            self._finish_by_tap(dtype, new, images, parts)

    def _finish_each(self, dtype: np.dtype, images: Sequence[np.ndarray], parts: Sequence[Outputs]) -> None:
        height, width = images[0].shape[3:]
        x = images[0][everywhere([part.read for part in parts])]
        out, indices = (image[everywhere([part.out for part in parts])] for image in images[1:])
        for window in product(*(range(part.length) for part in parts)):
            read = [part.each[at] for part, at in zip(parts, window)]
            here = everywhere(window)
            elements = x[everywhere(read)]
            if elements[0, 0].size == 0:
                out[here], indices[here] = self.of_nothing, -1
                continue
            out[here], places = first_largest(elements, dtype)
            index = np.zeros(elements.shape[:2], np.int64)
            for part, along, place, step in zip(parts, read, places, (height * width, width, 1)):
                index += (place * along.step + (along.start + part.read.start)) * step
            indices[here] = index

    def _finish_by_tap(
        self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Outputs]
    ) -> None:
        image, largest = self.largest(dtype, new, images, parts)
        height, width = images[0].shape[3:]
        places = new("places", (1, 1, *(part.read.stop - part.read.start for part in parts)), np.dtype(np.int64))
        places[...] = 0
        for axis, (run, step) in enumerate(zip([part.read for part in parts], (height * width, width, 1))):
            along = np.arange(run.start * step, run.stop * step, step).reshape(-1, *(1,) * (2 - axis))
            places += along
        indices = images[2][everywhere([part.out for part in parts])]
        indices.fill(-1)
        hit = new("hit", largest.shape, np.dtype(bool))
        some_are_nan = bool(np.isnan(largest).any())
        for tap in product(*(part.taps[::-1] for part in parts)):
            at, elements = (everywhere(slices) for slices in zip(*tap))
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
        return super().part(axis, run), _counts(self.problem, axis, run)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        x, out = images
        runs, counts = zip(*parts)
        out = out[everywhere([run.out for run in runs])]
        image = self.image(x, dtype, new, runs)
        sums = self.reduced(dtype, new, image, out, runs)
        means = out if out.dtype == dtype else sums  # of 16-bit images a copy that may be written to
        np.divide(sums, _outer("taps", counts, dtype, new), out=means)
        if means is not out:
            out[...] = means


class Adjoint(PoolingStep):
    """Gradients of elements, from those of the windows over them."""

    def part(self, axis: int, run: range) -> Any:
        return Elements.of(self.problem.windows, axis, run, self.by_window(axis))

    def by_window(self, axis: int) -> bool:
        """Whether a block goes over its windows along an axis, and not over their taps."""
        raise NotImplementedError

    @property
    def touched(self) -> int:
        elements = self.block[2:]
        return prod(self.block[:2]) * (2 * prod(elements) + 4 * prod(most_windows(self.problem.windows, elements)))


class MaxPoolGradient(Adjoint):
    """Each window's gradient, at the element that was its largest."""

    def by_window(self, axis: int) -> bool:
        """All axes or none."""
        windows = self.problem.windows
        return few(prod(most_windows(windows, self.block[2:])), windows.taps)

    @property
    def touched(self) -> int:
        """A plane is never cut where each of its parts would look for the largest of the same windows again."""
        return 0 if self.by_window(0) and prod(self.block[:2]) == 1 else super().touched

    @property
    def temporaries(self) -> tuple[int, int]:
        """What is left of the gradient, what a tap takes, and which do; widened: all that the block reads and writes."""
        elements, windows = self.block[2:], self.problem.windows
        over = most_windows(windows, elements)
        if self.by_window(0):
            return 2 * min(windows.taps, PIECE) + prod(elements) * self.widened, PLACE_BYTES
        copies = prod(over) + prod(most_read(windows, over)) + prod(elements)
        return 2 * prod(over) + copies * self.widened, 2 * prod(over)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Elements]) -> None:
        x, y, grad, out = images
        over = everywhere([part.windows for part in parts])
        image, out = x[everywhere([part.read for part in parts])], out[everywhere([part.elements for part in parts])]
        sums = out if out.dtype == dtype else new("sums", out.shape, dtype)
        sums[...] = 0
        if self.by_window(0):
            _add_by_window(parts, image, grad[over], sums)
        else:
            image, largest = _in_dtype("image", image, dtype, new), _in_dtype("largest", y[over], dtype, new)
            left = new("left", largest.shape, dtype)
            left[...] = grad[over]
            self._add_by_tap(new, parts, image, largest, left, sums)
        if sums is not out:
            out[...] = sums

    def _add_by_tap(
        self,
        new: NewArray,
        parts: Sequence[Elements],
        image: np.ndarray,
        largest: np.ndarray,
        left: np.ndarray,
        sums: np.ndarray,
    ) -> None:
        windows, dtype = self.problem.windows, left.dtype
        some_are_nan = bool(np.isnan(largest).any())
        # Taken and left as bits: a mask splits them exactly, infinities and NaNs too.
        bits = np.dtype(f"i{dtype.itemsize}")
        taken, hit = new("taken", left.shape, bits), new("hit", left.shape, np.dtype(bool))
        left_bits, taken_numbers = left.view(bits), taken.view(dtype)
        once = _once(windows)
        for tap in product(*(part.taps for part in parts)):
            at, elements, own_at, own = (everywhere(slices) for slices in zip(*tap))
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


def _add_by_window(parts: Sequence[Elements], image: np.ndarray, grad: np.ndarray, sums: np.ndarray) -> None:
    """The last window first: an element's sum has the order that going over the taps gives it."""
    for window in product(*(reversed(range(len(part.each))) for part in parts)):
        read = [part.each[at] for part, at in zip(parts, window)]
        elements = image[everywhere(read)]
        if elements[0, 0].size == 0:
            continue
        is_own, places = np.ones(elements.shape[:2], bool), []
        for part, along, place in zip(parts, read, first_largest(elements, sums.dtype)[1]):
            place = place * along.step + (along.start + part.read.start - part.elements.start)
            is_own &= (place >= 0) & (place < part.elements.stop - part.elements.start)
            places.append(place)
        sums[(*np.nonzero(is_own), *(place[is_own] for place in places))] += grad[everywhere(window)][is_own]


class AvgPoolGradient(Adjoint):
    """Each window's gradient, in equal shares at all its elements."""

    problem: AvgPoolGradientProblem

    def by_window(self, axis: int) -> bool:
        windows = self.problem.windows
        return MANY_TAPS * most_windows(windows, self.block[2:])[axis] <= windows.kernel[axis]

    @property
    def temporaries(self) -> tuple[int, int]:
        """Shares of every window; their sums along one axis, and then another; widened: of all three, or rounded shares."""
        elements, over = self.block[2:], most_windows(self.problem.windows, self.block[2:])
        partial = elements[0] * over[1] * over[2] + elements[0] * elements[1] * over[2]
        return prod(over) + partial + prod(over if _once(self.problem.windows) else elements) * self.widened, 0

    @property
    def shared(self) -> int:
        """How many taps count, of every window."""
        return prod(most_windows(self.problem.windows, self.block[2:]))

    def part(self, axis: int, run: range) -> Any:
        part = super().part(axis, run)
        return part, _counts(self.problem, axis, range(part.windows.start, part.windows.stop))

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        grad, out = images
        runs, counts = zip(*parts)
        over = grad[everywhere([run.windows for run in runs])]
        out = out[everywhere([run.elements for run in runs])]
        shares = new("shares", over.shape, dtype)
        shares[...] = over
        shares /= _outer("taps", counts, dtype, new)
        once = _once(self.problem.windows)
        if once and out.dtype != dtype:  # nothing is added: rounded before there are many
            dtype = out.dtype
            shares = _in_dtype("rounded", shares, dtype, new)
        for axis, run in enumerate(runs):
            shape = (*shares.shape[: 2 + axis], out.shape[2 + axis], *shares.shape[3 + axis :])
            sums = out if axis == 2 and out.dtype == dtype else new(f"sums {axis}", shape, dtype)
            sums[...] = 0
            taps = [(own, own_at) for _, _, own_at, own in run.taps]
            taps += [(run.own(read), slice(at, at + 1)) for at, read in enumerate(run.each)]
            for own, own_at in taps:
                if once:
                    sums[on_axis(axis, own)] = shares[on_axis(axis, own_at)]
                else:
                    sums[on_axis(axis, own)] += shares[on_axis(axis, own_at)]
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


def _in_dtype(name: str, image: np.ndarray, dtype: np.dtype, new: NewArray) -> np.ndarray:
    """The image, or a copy of it in another dtype."""
    if image.dtype == dtype:
        return image
    copy = new(name, image.shape, dtype)
    copy[...] = image
    return copy


def _once(windows: Windows) -> bool:
    """Whether no two windows overlap."""
    axes = zip(windows.span, windows.stride, windows.out_size)
    return all(span <= stride or outputs == 1 for span, stride, outputs in axes)
