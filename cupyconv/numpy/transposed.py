"""Transposed convolution on NumPy: gathered if that is faster, else by an implementation that scatters products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, seconds_of
from cupyconv.numpy.choice import FFT, Method, choose
from cupyconv.numpy.convolution import LONE_PIXELS, MEMORY_BLOCK, SHORT_CALL, is_matrix
from cupyconv.numpy.gathered import GatheredLoop, Zeros, plan_gathered
from cupyconv.numpy.scattered import Piece, ScatteredLoop, ScatteredRun, x_is_factor
from cupyconv.numpy.windows import CACHED_REGIONS, tap_regions
from cupyconv.problem.arrays import accumulator, dtype_from_name, dtype_name
from cupyconv.problem.geometry import ConvGeometry, tap_boxes
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import NotApplicable, TransposedProblem, inputs_with_channels

if TYPE_CHECKING:
    from cupyconv.numpy.interleaved import InterleavedLoop

    TransposedLoop: TypeAlias = GatheredLoop | Zeros | InterleavedLoop | ScatteredLoop


def plan_transposed(problem: TransposedProblem) -> Plan:
    """Return the plan for ``problem.method``; raise ValueError if a named method does not apply."""
    kept, geometry = inputs_with_channels(problem.geometry)
    if geometry is not problem.geometry:
        problem = replace(problem, geometry=geometry, outs=tuple(problem.outs[i] for i in kept))
    plan = _planned(problem)
    steps = cast("tuple[TransposedLoop, ...]", plan.steps)
    if not any(step.adds_zeros for step in steps):
        return plan
    return replace(plan, steps=(FiniteWeight(problem, steps, plan.workspace_bytes),))


def _planned(problem: TransposedProblem) -> Plan:
    """Return the plan with the least estimated time, gathered or scattered."""
    try:
        gathered = _plan_gathered(problem)
    except ValueError as refusal:
        # The error is about parts of the result.  `choose` reports the method's own reason, except for "winograd":
        # only gathering has that method.
        if problem.method == "winograd" and not isinstance(refusal, NotApplicable):
            raise
        return choose(problem, METHODS)
    if seconds_of(gathered.steps) <= cost.least_scattered(problem):
        return gathered
    try:
        scattered = choose(problem, METHODS)
    except ValueError:
        return gathered
    return min(gathered, scattered, key=lambda plan: seconds_of(plan.steps))


def _plan_gathered(problem: TransposedProblem) -> Plan:
    if problem.geometry.padding_mode == "constant":
        if max(problem.geometry.stride) == 1:
            return plan_gathered(problem)
        from cupyconv.numpy.interleaved import plan_interleaved  # imported only for strides

        return least(problem, plan_interleaved, plan_gathered)
    from cupyconv.numpy.folded import plan_folded  # imported only for padding modes

    return plan_folded(problem)


def least(problem: TransposedProblem, *planners: Callable[[TransposedProblem], Plan]) -> Plan:
    """Return the plan with the least estimated time; if there is none, raise the last planner's ValueError."""
    plans = []
    for planner in planners:
        try:
            plans.append(planner(problem))
        except ValueError:
            if planner is planners[-1] and not plans:
                raise
    return min(plans, key=lambda plan: seconds_of(plan.steps))


@dataclass(frozen=True)
class FiniteWeight(NumpyStep):
    """Run loops that multiply by zeros where the definition has no term, or others if a factor is not finite.

    The others use no more memory, unless there is no such plan.
    """

    problem: TransposedProblem
    loops: tuple[TransposedLoop, ...]
    workspace: int

    @property
    def seconds(self) -> float:
        return seconds_of(self.loops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.loops))

    @cached_property
    def _others(self) -> tuple[NumpyStep, ...]:
        method = "auto" if self.problem.method == "winograd" else self.problem.method
        problem = replace(self.problem, method=method, weight_is_finite=False)
        try:
            plan = _planned(replace(problem, workspace_limit=self.workspace))
        except ValueError:
            plan = _planned(problem)
        return cast("tuple[NumpyStep, ...]", plan.steps)

    def run(self, arrays: Mapping[str, Any]) -> None:
        factors = ["weight"]
        if any(loop.has_zero_taps for loop in self.loops):
            factors += [x.name for x in self.problem.xs]
        for loop in self.loops if all(_is_finite(arrays[name]) for name in factors) else self._others:
            loop.run(arrays)


def _is_finite(array: np.ndarray) -> bool:
    """Whether an array has no infinity and no NaN.  A sum that overflows counts as not finite."""
    return bool(np.isfinite(array.sum(dtype=dtype_from_name(accumulator(dtype_name(array.dtype))))))


class ScatteredView(ScatteredLoop):
    """Compute each result as one product: a 1x1 kernel, and matrices that BLAS accesses in place."""

    name = "view"
    description = "matrix products written to the results in place"
    kept = 0

    @property
    def work(self) -> float:
        return self.products_work(1)

    @classmethod
    def applies(cls, problem: TransposedProblem) -> bool:
        geometry = problem.geometry
        return (
            geometry.is_pointwise
            and geometry.pixels >= LONE_PIXELS
            and (len(problem.outs) == 1 or geometry.groups == 1)
            and problem.dtype == accumulator(problem.dtype)
            and all(out.pixel_stride == 1 and is_matrix(out) for out in problem.outs)
            and x_is_factor(problem)
            and problem.is_one_kind
        )

    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        matrix, x = run.factors(block, pixels)
        at: Any = (..., *(slice(axis.start, axis.stop) for axis in pixels))
        for piece, part in sums:
            place = piece[at].reshape(len(matrix), len(piece) // len(matrix), x.shape[2])
            np.matmul(matrix[:, part] if len(sums) > 1 else matrix, x, out=place)


class ScatteredColumns(ScatteredLoop):
    """Compute one product for all taps, and add its columns."""

    name = "columns"
    description = "matrix products, whose columns are added (col2im)"

    @classmethod
    def applies(cls, problem: TransposedProblem) -> bool:
        return not ScatteredView.applies(problem)

    @property
    def work(self) -> float:
        return self.products_work(self.geometry.taps) + self.added_work

    @classmethod
    def columns(cls, geometry: ConvGeometry) -> int:
        return geometry.taps

    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        matrix, x = run.factors(block, pixels)
        samples, channels = map(len, block)
        run.add_each(sums, pixels, run.product(matrix, x, (channels, self.geometry.taps, samples, *map(len, pixels))))


class ScatteredTaps(ScatteredLoop):
    """Compute a product for each tap or, if these are small, for some taps at a time."""

    name = "taps"
    description = "tap by tap, no columns"
    taps_first = True

    @cached_property
    def taps(self) -> int:
        """Most taps of one product."""
        products, limit = self._tap_bytes or 1, self.problem.limit // 8
        return max(1, min(SHORT_CALL // products, limit // (products + self._weight_bytes)))

    @property
    def _tap_bytes(self) -> int:
        """Bytes of one tap's products."""
        nbytes = self.channels * prod(self.block) * self.sums_dtype.itemsize
        return nbytes + nbytes // 2 * self.problem.factor_alone_is_complex

    @property
    def _weight_bytes(self) -> int:
        """Bytes of one tap's weight, which is copied if a product has several taps."""
        nbytes = self.channels * self.geometry.group_outputs * self.factor_dtype.itemsize
        return nbytes + nbytes // 2 * self.problem.factor_alone_is_complex

    @property
    def workspace(self) -> int:
        taps = min(self.taps, self.geometry.taps)
        copied = taps * self._weight_bytes if taps > 1 else 0
        return super().workspace + (taps - 1) * self._tap_bytes + copied

    @classmethod
    def applies(cls, problem: TransposedProblem) -> bool:
        return not ScatteredScaledTaps.applies(problem)

    @property
    def work(self) -> float:
        return cost.OF_ONE_TAP * self.products_work(min(self.taps, self.geometry.taps)) + self.added_work

    @property
    def calls(self) -> float:
        uncached = self.turns > CACHED_REGIONS * self.blocks  # each product's taps have regions of their own
        return super().calls + 2 * cost.REGION_CALLS * self.turns * uncached

    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        samples, channels = block
        groups, within = run.groups(channels)
        x = run.x_of(groups, samples, pixels)
        for some, box in tap_boxes(self.geometry.kernel, self.taps):
            # (groups, channels of each, taps, outputs)
            weight = run.weight[some, groups, :, within].transpose(1, 3, 0, 2)
            matrix = weight.reshape(len(weight), prod(weight.shape[1:-1]), weight.shape[-1])
            shape = (len(channels), matrix.shape[1] * len(matrix) // len(channels), len(samples), *map(len, pixels))
            run.add_each(sums, pixels, run.product(matrix, x, shape), box)


class ScatteredScaledTaps(ScatteredLoop):
    """Depthwise: multiply x by a number per channel, since a matrix product would have a vector as a factor."""

    name = "scaled taps"
    description = "tap by tap, no columns"
    target = MEMORY_BLOCK
    fewest_channels = 1
    kept = 2
    one_product = False  # there is one for every output of a group

    @classmethod
    def applies(cls, problem: TransposedProblem) -> bool:
        geometry = problem.geometry
        return geometry.is_depthwise and problem.is_one_kind and geometry.taps <= geometry.pixels

    @property
    def work(self) -> float:
        products = self.geometry.batch * self.geometry.pixels * self.geometry.out_channels * self.geometry.taps
        return cost.copied(products, self.block[3], self.problem.dtype) + self.geometry.group_outputs * self.added_work

    def add(self, run: ScatteredRun, sums: list[Piece], block: tuple[range, range], pixels: tuple[range, ...]) -> None:
        samples, channels = block
        outputs, own = self.geometry.group_outputs, slice(channels.start, channels.stop)
        size = (len(samples), *map(len, pixels))
        x = run.x_of(own, samples, pixels).reshape(len(channels), outputs, *size)
        factors = run.weight[own, :, 0, :, None, None, None, None]  # [c, o, t]
        values = run.sums.array("values", (len(channels), *size))
        for t, regions in enumerate(tap_regions(self.geometry, pixels)):
            for o in range(outputs):
                np.multiply(x[:, o], factors[:, o, t], out=values)
                run.add(sums, regions, values)


METHODS = {
    "fft": FFT._replace(implementations="cupyconv.numpy.fft_scattered"),
    "gemm": Method((ScatteredView, ScatteredColumns)),
    "direct": Method((ScatteredScaledTaps, ScatteredTaps)),
}
