"""Base classes of pooling and its gradients: a loop over blocks, each finished while it is in cache.

`Reduction` computes a block of windows.  It reduces along one axis after the other, with one slice per tap.  This
takes kd + kh + kw passes instead of kd * kh * kw, and the first passes, over whole rows, leave less work for the last.
Along an axis with few windows that have many taps each, it makes one call per window.

`Adjoint` computes a block of elements from all windows over them.  No block depends on another, and each element's sum
has the same order however the blocks are cut.
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
from cupyconv.numpy.backend import NumpyStep, Scratch
from cupyconv.numpy.pool_windows import Elements, Outputs, everywhere, most_read, most_windows, on_axis
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import block_words, five_axes
from cupyconv.problem.arrays import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import Windows, even_part
from cupyconv.problem.passes import PoolingProblem

#: Most bytes that a block touches, so that they stay in a core's L2 cache.  With smaller blocks, calls are so short
#: that threads wait for each other's calls.
BLOCK_BYTES = 2 << 20
#: A block may touch this many times as much as the smallest one, whatever the cache: its parts would read almost all of
#: it again.
_REACH = 8
#: Slices along an axis, over all its blocks and taps, up to which they are computed in advance: more would take
#: megabytes.
_CACHED_SLICES = 4096
#: Ratio of taps to windows along an axis from which one call per window is faster than one call per tap.
MANY_TAPS = 32

#: Elements of a block along the axes (n, c, d, h, w).
Block = tuple[int, ...]


class NewArray(Protocol):
    """Returns an uninitialized array by name, with the memory layout of the input."""

    def __call__(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray: ...


@dataclass(frozen=True)
class PoolingStep(NumpyStep):
    """A loop over blocks of the results for one image, each finished while it is in cache.

    `block` cuts the axes of the result in memory order: planes of a C-ordered image, rows of a channels-last one.
    """

    problem: PoolingProblem
    block: Block = (1, 1, 1, 1, 1)
    threads: int = 1

    @classmethod
    def of(cls, problem: PoolingProblem) -> Self:
        """Plan a step with the largest blocks that stay in cache and within the workspace limit."""
        x, (out,) = problem.inputs[0], problem.outs
        by_distance = sorted(range(5), key=lambda axis: abs(x.strides[axis]) if x.shape[axis] > 1 else 0)
        return cls(problem).with_largest_block(out.shape, by_distance)

    def with_largest_block(self, shape: Sequence[int], axes: Sequence[int]) -> Self:
        """This step with the largest block, of up to `shape`, and as many threads as have enough work and workspace.

        The block grows along the axes in the given order, from one element.
        """
        problem, limit = self.problem, self.problem.limit
        all_threads = problem.host.threads  # as the caller requested, or an upper bound
        if problem.host.most:
            all_threads = self.worth_waking(problem)
        all_threads = max(1, min(all_threads, limit // (self.workspace or 1)))
        most = max(BLOCK_BYTES // ITEMSIZE[self.dtype], _REACH * self.touched)

        def fits(block: Block) -> bool:
            step = replace(self, block=block, threads=all_threads)
            return step.touched <= most and step.workspace <= limit

        step = replace(self, block=largest_block(shape, axes, fits))
        threads = max(1, min(all_threads, step.blocks, limit // (step.workspace or 1)))
        step = replace(step, threads=threads)
        if step.workspace > limit:
            raise ValueError(f"the smallest block needs {step.workspace:,} bytes of workspace, the limit is {limit:,}")
        return step

    @classmethod
    def worth_waking(cls, problem: PoolingProblem) -> int:
        """Number of available threads that have enough work."""
        return problem.host.threads

    @property
    def blocks(self) -> int:
        return prod(-(-extent // part) for extent, part in zip(self.problem.outs[0].shape, self.block))

    @property
    def turns(self) -> int:
        return self.blocks

    @property
    def dtype(self) -> str:
        """The dtype of comparisons and sums."""
        return accumulator(self.problem.inputs[0].dtype)

    @property
    def widened(self) -> bool:
        """Whether 16-bit images are copied to a wider dtype for the computation."""
        return self.dtype != self.problem.inputs[0].dtype

    @property
    def workspace(self) -> int:
        """Bytes of the temporaries of all threads."""
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
        few = longest <= _CACHED_SLICES
        kept = [[self.part(axis, r) for r in cut] for axis, cut in enumerate(cuts[2:])] if few else []

        def each_part() -> Iterator[Sequence[Any]]:
            if few:
                return product(*kept)
            return (tuple(self.part(axis, r) for axis, r in enumerate(cut)) for cut in product(*cuts[2:]))

        strides = problem.inputs[0].strides
        axes = sorted(range(5), key=lambda axis: -abs(strides[axis]))  # in memory, outermost first
        places = [axes.index(axis) for axis in range(5)]

        def run(arrays: Mapping[str, Any]) -> None:
            images = [five_axes(arrays[name]) for name in names]
            scratch = Scratch(dtype, self.turns)

            def new(name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
                return scratch.array(name, [shape[axis] for axis in axes], dtype).transpose(places)

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
        """Temporaries per channel and sample of a block: a count of numbers, and bytes of flags."""
        raise NotImplementedError

    @property
    def shared(self) -> int:
        """Count of numbers in the temporaries that all channels and samples of a block share."""
        return 0

    def part(self, axis: int, run: range) -> Any:
        """Describe a block's run of elements along one axis."""
        raise NotImplementedError

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        """Compute one block of some planes of the images."""
        raise NotImplementedError


def largest_block(shape: Sequence[int], axes: Sequence[int], fits: Callable[[Block], bool]) -> Block:
    """The largest block that fits: whole axes in the given order, then part of one, and single steps of the rest."""

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
    """One number per window, by a ufunc that reduces its elements in any order."""

    ufunc: ClassVar[np.ufunc]
    of_nothing: ClassVar[float]
    #: Elements of a window from which one call for all axes is faster than one call per axis, or per tap.
    many_in_one_call: ClassVar[int]

    @classmethod
    def worth_waking(cls, problem: PoolingProblem) -> int:
        elements = sum(prod(operand.shape) for operand in problem.arrays)
        return cost.worth_waking(problem.host.threads, elements * cost.POOLED)

    def part(self, axis: int, run: range) -> Any:
        return Outputs.of(self.problem.windows, axis, run, self.by_window(axis))

    def by_window(self, axis: int) -> bool:
        """Whether the block visits windows along an axis instead of taps."""
        return many_taps(self.block[2 + axis], self.problem.windows.kernel[axis])

    @property
    def compared(self) -> list[int]:
        """Axes along which a block may need a reduction; along the others, its outputs are a view of the elements."""
        windows = self.problem.windows
        padded = [windows.out_size[axis] * windows.stride[axis] > windows.size[axis] for axis in range(3)]
        return [axis for axis in range(3) if windows.kernel[axis] > 1 or windows.before[axis] or padded[axis]]

    @property
    def copies(self) -> bool:
        """Whether 16-bit images are widened before they are read; a call per window widens them by itself."""
        return self.widened and not (self.compared and self.by_window(self.compared[0]))

    @property
    def touched(self) -> int:
        outputs = self.block[2:]
        return prod(self.block[:2]) * (prod(most_read(self.problem.windows, outputs)) + prod(outputs))

    @property
    def temporaries(self) -> tuple[int, int]:
        """Results along each compared axis except the last; if widened, also the elements read, and the result."""
        outputs, read = self.block[2:], most_read(self.problem.windows, self.block[2:])
        partial = sum(prod((*outputs[: axis + 1], *read[axis + 1 :])) for axis in self.compared[:-1])
        return partial + prod(read) * self.copies + prod(outputs) * self.widened, 0

    def image(self, x: np.ndarray, dtype: np.dtype, new: NewArray, parts: Sequence[Outputs]) -> np.ndarray:
        """The elements that a block reads, in a dtype that can be compared."""
        image = x[everywhere([part.read for part in parts])]
        return in_dtype("image", image, dtype, new) if self.copies else image

    def reduced(
        self, dtype: np.dtype, new: NewArray, image: np.ndarray, out: np.ndarray, parts: Sequence[Outputs]
    ) -> np.ndarray:
        """Reduce a block's elements into `out` if possible, else into a temporary; or return a view of the elements."""
        compared = [axis for axis in range(3) if not parts[axis].is_view]
        for axis, part in enumerate(parts):
            if part.is_view:  # before the other axes, so that the last reduction can write to `out`
                image = image[on_axis(axis, part.taps[0][1])]
        if self._is_one_window(parts, compared) and prod(image.shape[2:]) >= self.many_in_one_call:
            shape = (*image.shape[:2], *(1 if axis in compared else image.shape[2 + axis] for axis in range(3)))
            place = out if out.dtype == dtype and shape == out.shape else new("partial", shape, dtype)
            self._reduce(tuple(2 + axis for axis in compared), image, place)
            return place
        for axis in compared:
            part = parts[axis]
            shape = (*image.shape[: 2 + axis], part.length, *image.shape[3 + axis :])
            in_place = axis == compared[-1] and out.dtype == dtype and shape == out.shape
            partial = out if in_place else new(f"partial {axis}", shape, dtype)
            (self._reduce_each if part.each else self._reduce_along)(axis, part, image, partial)
            image = partial
        return image

    def _is_one_window(self, parts: Sequence[Outputs], compared: Sequence[int]) -> bool:
        """Whether a block has one output along each compared axis, whose window has all elements that are read."""
        dilation = self.problem.windows.dilation
        return bool(compared) and all(parts[axis].length == dilation[axis] == 1 for axis in compared)

    def _reduce_each(self, axis: int, part: Outputs, image: np.ndarray, partial: np.ndarray) -> None:
        """Reduce window by window along one axis; a window with nothing but padding gives `of_nothing`."""
        for at, elements in enumerate(part.each):
            self._reduce(2 + axis, image[on_axis(axis, elements)], partial[on_axis(axis, slice(at, at + 1))])

    def _reduce(self, axes: int | tuple[int, ...], read: np.ndarray, place: np.ndarray) -> None:
        """Reduce axes to one number each; nothing to read gives `of_nothing`."""
        if read.size:
            self.ufunc.reduce(read, axes, place.dtype, place, keepdims=True)
        else:
            place.fill(self.of_nothing)

    def _reduce_along(self, axis: int, part: Outputs, image: np.ndarray, partial: np.ndarray) -> None:
        """Reduce tap by tap along one axis; a window with nothing but padding gives `of_nothing`."""
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


class Adjoint(PoolingStep):
    """Gradients of elements, from the gradients of the windows over them."""

    def part(self, axis: int, run: range) -> Any:
        return Elements.of(self.problem.windows, axis, run, self.by_window(axis))

    def by_window(self, axis: int) -> bool:
        """Whether a block visits windows along an axis instead of taps."""
        raise NotImplementedError

    @property
    def touched(self) -> int:
        elements = self.block[2:]
        return prod(self.block[:2]) * (2 * prod(elements) + 4 * prod(most_windows(self.problem.windows, elements)))


def many_taps(windows: int, taps: int) -> bool:
    """Whether to visit windows along an axis instead of taps."""
    return MANY_TAPS * windows <= taps


def in_dtype(name: str, image: np.ndarray, dtype: np.dtype, new: NewArray) -> np.ndarray:
    """The image, or a copy of it in another dtype."""
    if image.dtype == dtype:
        return image
    copy = new(name, image.shape, dtype)
    copy[...] = image
    return copy


def windows_are_apart(windows: Windows) -> bool:
    """Whether no two windows overlap."""
    axes = zip(windows.span, windows.stride, windows.out_size)
    return all(span <= stride or outputs == 1 for span, stride, outputs in axes)
