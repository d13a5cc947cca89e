"""Average pooling: the mean of every window, and its gradient, in equal shares at all elements of the window.

The gradient is the adjoint of the sum, computed along one axis after the other with one slice per tap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy.pool_blocks import Adjoint, NewArray, Reduction, in_dtype, many_taps, windows_are_apart
from cupyconv.numpy.pool_windows import everywhere, most_windows, on_axis
from cupyconv.problem.passes import AvgPoolGradientProblem, AvgPoolProblem, MeanProblem


class AvgPool(Reduction):
    """The mean of every window."""

    ufunc, of_nothing, many_in_one_call = np.add, 0.0, 16
    problem: AvgPoolProblem

    @property
    def shared(self) -> int:
        """One number per window: how many of its taps count."""
        return prod(self.block[2:])

    def part(self, axis: int, run: range) -> Any:
        return super().part(axis, run), _counts(self.problem, axis, run)

    def finish(self, dtype: np.dtype, new: NewArray, images: Sequence[np.ndarray], parts: Sequence[Any]) -> None:
        x, out = images
        runs, counts = zip(*parts)
        out = out[everywhere([run.out for run in runs])]
        image = self.image(x, dtype, new, runs)
        sums = self.reduced(dtype, new, image, out, runs)
        means = out if out.dtype == dtype else sums  # for 16-bit images, `sums` is a writable copy
        np.divide(sums, _outer("taps", counts, dtype, new), out=means)
        if means is not out:
            out[...] = means


class AvgPoolGradient(Adjoint):
    """The gradient of each window, added in equal shares to all its elements."""

    problem: AvgPoolGradientProblem

    def by_window(self, axis: int) -> bool:
        windows = self.problem.windows
        return many_taps(most_windows(windows, self.block[2:])[axis], windows.kernel[axis])

    @property
    def temporaries(self) -> tuple[int, int]:
        """Shares of every window, and their sums along one axis, and then along another.

        If widened, also the sums along all three axes, or rounded shares.
        """
        elements, over = self.block[2:], most_windows(self.problem.windows, self.block[2:])
        partial = elements[0] * over[1] * over[2] + elements[0] * elements[1] * over[2]
        return prod(over) + partial + prod(
            over if windows_are_apart(self.problem.windows) else elements
        ) * self.widened, 0

    @property
    def shared(self) -> int:
        """One number per window: how many of its taps count."""
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
        once = windows_are_apart(self.problem.windows)
        if once and out.dtype != dtype:  # nothing is added: round the shares while they are few
            dtype = out.dtype
            shares = in_dtype("rounded", shares, dtype, new)
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


def _counts(problem: MeanProblem, axis: int, outputs: range) -> np.ndarray:
    """How many taps of each window in a run count along an axis, in a shape that broadcasts with an image.

    If all windows have the same number, it is there once.
    """
    counts = [problem.count(axis, output) for output in outputs]
    return np.array(counts[:1] if len({*counts}) == 1 else counts).reshape(-1, *(1,) * (2 - axis))


def _outer(name: str, counts: Sequence[np.ndarray], dtype: np.dtype, new: NewArray) -> Any:
    """The product of the counts along all axes, for every window; one number if it is the same for all."""
    if all(along.size == 1 for along in counts):
        return dtype.type(prod(along.item() for along in counts))
    taps = new(name, (1, 1, *(along.size for along in counts)), dtype)
    taps[...] = counts[0]
    for along in counts[1:]:
        taps *= along
    return taps
