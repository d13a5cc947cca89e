"""Transposed convolution, gathered: each part of the result is a convolution of x with some of the taps, reversed.

::

    result, stride 2    e o e o e o      even elements are reached through some taps, odd ones through the others:
    x                   |   |   |        two convolutions of stride 1, each written to every other element

If the stride is larger than the kernel, no tap reaches some elements: zeros are first written to the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.choice import by_another
from cupyconv.numpy.convolution import CACHED_MEMORY, ConvLoop, plan_conv, plan_like
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import c_strides
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import Plan
from cupyconv.problem.polyphase import AxisPhase, is_reached, phase_problem, phases_of
from cupyconv.problem.problems import NotApplicable, TransposedProblem

#: Most convolutions that a result may be split into to be gathered: stride 4 along two axes.
MAX_PARTS = 16


@dataclass(frozen=True)
class GatheringStep(NumpyStep):
    """A step of a transposed convolution: a convolution of x by a weight with inputs and outputs exchanged."""

    problem: TransposedProblem
    convolution: ConvLoop

    @property
    def own_calls(self) -> int:
        """Calls in addition to the convolution's."""
        return cost.GATHERED_CALLS

    @property
    def weight_elements(self) -> int:
        """Number of elements that are copied to exchange the weight."""
        return prod(self.problem.weight.shape)

    @property
    def flops(self) -> int:
        return self.convolution.flops

    @property
    def bytes_moved(self) -> int:
        return self.convolution.bytes_moved

    @property
    def turns(self) -> int:
        return self.convolution.turns

    @property
    def calls(self) -> float:
        return self.convolution.calls + self.own_calls

    @property
    def seconds(self) -> float:
        return self.convolution.seconds + cost.exchanged(self.weight_elements) + self.own_calls * cost.CALL


@dataclass(frozen=True)
class GatheredLoop(GatheringStep):
    """A part of a transposed convolution's result, a phase along each axis, as a convolution or a share of one.

    The convolution has `geometry`.  Its weight has the taps of the phases, for the channels from `first_channel` of the
    concatenated results on, and outputs and channels of each group are exchanged.
    """

    geometry: ConvGeometry
    output: str
    first_channel: int
    phases: tuple[AxisPhase, ...]
    keeps: bool = False  # whether calls reuse what a run of the convolution sets up

    def __str__(self) -> str:
        taps = " x ".join(str(len(axis.taps) * is_reached(self.phases)) for axis in self.phases)
        stride = self.problem.geometry.stride
        every = f", written with stride {' x '.join(map(str, stride))}" if max(stride) > 1 else ""
        return f"{self.convolution}, {taps} taps{every}"

    #: Whether x is also multiplied by zeros.
    has_zero_taps = False

    @property
    def cached_memory(self) -> int:
        """Bytes that this part keeps between calls."""
        return self.convolution.cached_memory if self.keeps else 0

    @property
    def adds_zeros(self) -> bool:
        """Whether windows reach beyond x, where the result has no term."""
        geometry = self.convolution.geometry
        return any(geometry.before + geometry.after)

    @cached_property
    def _read(self) -> Any:
        return tuple(slice(max(0, -axis.before), min(0, axis.after) or None) for axis in self.phases)

    @cached_property
    def _written(self) -> Any:
        return tuple(slice(axis.first, None, step) for axis, step in zip(self.phases, self.problem.geometry.stride))

    def run(self, arrays: Mapping[str, Any]) -> None:
        geometry = self.geometry
        parts = {"weight": self._weight(arrays["weight"])}
        for name, _ in self.convolution.inputs:
            x = arrays[name]
            is_read = geometry.in_channels > 0
            parts[name] = (
                five_axes(x)[(..., *self._read)] if is_read else np.empty((geometry.batch, 0, *geometry.size), x.dtype)
            )
        for name, target in ((self.output, "out"), ("pre", "pre")):
            if name in arrays:
                parts[target] = five_axes(arrays[name])[(..., *self._written)]
        if "bias" in arrays:
            parts["bias"] = arrays["bias"]
        self._convolve(parts)

    @cached_property
    def _convolve(self) -> Callable[[Mapping[str, Any]], None]:
        """The function that runs the convolution; with `keeps`, one that reuses its setup, as a call of it would."""
        return self.convolution.executable() if self.keeps else self.convolution.run

    def _weight(self, weight: np.ndarray) -> np.ndarray:
        """Return the taps of the part: a copy, or an array without elements if no tap reaches the part."""
        geometry = self.geometry
        if geometry.reduction == 0:
            return np.empty((geometry.out_channels, 0, *geometry.kernel), weight.dtype)
        # Reversed, down to the first tap of the phase: one more step would be before the kernel.
        reversed_taps: Any = tuple(slice(axis.taps.start, None, axis.taps.step) for axis in self.phases)
        own = slice(self.first_channel, self.first_channel + geometry.out_channels // geometry.groups)
        taken = five_axes(weight)[(slice(None), own, *reversed_taps)]
        # (groups, channels of x, channels of the result, *taps); the copy exchanges the two.
        grouped = taken.reshape(geometry.groups, geometry.group_channels, geometry.group_outputs, *geometry.kernel)
        exchanged = np.array(grouped.swapaxes(1, 2), order="C")
        if self.problem.conjugate:
            np.conjugate(exchanged, out=exchanged)
        return exchanged.reshape(geometry.out_channels, geometry.group_channels, *geometry.kernel)


@dataclass(frozen=True)
class Zeros(NumpyStep):
    """Fill results with zeros before the elements that taps reach are written.

    Filling one contiguous run takes a fraction of the time of filling only the unreached elements, which are strided.
    """

    problem: TransposedProblem

    #: The loops that follow have the same attributes.
    adds_zeros = has_zero_taps = False

    @property
    def bytes_moved(self) -> int:
        return sum(out.nbytes for out in self.problem.outs)

    @property
    def flops(self) -> int:
        return 0

    @property
    def calls(self) -> float:
        return len(self.problem.outs)

    @property
    def seconds(self) -> float:
        elements = sum(prod(out.shape) for out in self.problem.outs)
        return cost.copied(elements, elements, self.problem.dtype) + self.calls * cost.CALL

    def __str__(self) -> str:
        return "fill     zeros where no tap contributes"

    def run(self, arrays: Mapping[str, Any]) -> None:
        for out in self.problem.outs:
            arrays[out.name][...] = 0


def check_gathers(problem: TransposedProblem) -> None:
    """Raise NotApplicable if the results are no convolutions of x."""
    if problem.geometry.padding_mode != "constant" or not problem.weight_is_finite:
        raise NotApplicable("only for padding_mode 'constant' and a finite weight")
    if problem.geometry.groups > 1 and len(problem.outs) > 1:
        raise NotApplicable("not supported for several results of a grouped convolution")


def workspace_with_kept(parts: Sequence[tuple[int, int]], limit: int) -> int | None:
    """Return the workspace of parts that run in turn and keep memory between calls, given both numbers of each.

    It is None if they should not: if it exceeds the limit, or if all parts together would keep more than one
    convolution may.  Then each call would be planned again.
    """
    kept = sum(own for _, own in parts)
    most = max(workspace + kept - own for workspace, own in parts)
    return most if kept <= CACHED_MEMORY and (most <= limit or not kept) else None


def without_cache(steps: Iterable[Any]) -> tuple[NumpyStep, ...]:
    """Return the same steps, which keep no memory between calls."""
    return tuple(replace(step, keeps=False) if isinstance(step, GatheredLoop) else step for step in steps)


def plan_gathered(problem: TransposedProblem) -> Plan:
    """Plan the results as convolutions; raise ValueError if that does not apply, or one of them has no plan."""
    geometry = problem.geometry
    phases = phases_of(geometry)
    check_gathers(problem)
    if len(phases) > MAX_PARTS:
        raise NotApplicable("it needs too many convolutions")
    if not phases or not problem.outs:
        raise NotApplicable("the result is empty")
    weight = prod(problem.weight.shape) * problem.weight.itemsize
    within, problems = replace(problem, workspace_limit=problem.limit_with(weight) - weight), []
    has_epilogue = bool(problem.bias or problem.pre or problem.activation)
    reached = phases if has_epilogue else [phase for phase in phases if is_reached(phase)] or phases
    for (out, first), phase in product(zip(problem.outs, geometry.channel_offsets), reached):
        taps = [axis.taps for axis in phase] if is_reached(phase) else [range(0)] * 3
        shape = (out.shape[1], geometry.group_outputs, *map(len, taps))
        own = replace(problem.weight, shape=shape, strides=c_strides(shape))
        part = phase_problem(within, phase, replace(out, name="out"), own)
        if not is_reached(phase):
            part = replace(part, method="auto")
        problems.append((part, out.name, first, phase))
    plans: list[Plan] = []
    steps: list[NumpyStep] = [Zeros(problem)] if len(reached) < len(phases) else []
    known: dict[tuple[Any, ...], Plan] = {}  # for parts that differ by at most a row of padding
    for part, name, first, phase in problems:
        kind = part.geometry.kernel, part.geometry.in_channels, part.geometry.out_channels, part.method
        plan = plan_like(known[kind], part) if kind in known else plan_conv(part)
        known.setdefault(kind, plan)
        plans.append(plan)
        loops = [loop for loop in plan.steps if isinstance(loop, ConvLoop)]
        steps += [GatheredLoop(problem, loop, part.geometry, name, first, phase) for loop in loops]
    largest = max(plans, key=lambda plan: plan.flops)
    parts = [(plan.workspace_bytes, sum(getattr(loop, "cached_memory", 0) for loop in plan.steps)) for plan in plans]
    blocks = max(plan.workspace_bytes for plan in plans)
    with_kept = workspace_with_kept(parts, problem.limit_with(weight) - weight)
    if with_kept is not None:
        steps = [replace(step, keeps=True) if isinstance(step, GatheredLoop) else step for step in steps]
        blocks = with_kept
    of = " (largest convolution)" * (len(plans) > 1)
    sizes = {"weight": weight, "blocks": blocks}
    return by_another(
        problem,
        largest,
        steps,
        sizes=sizes,
        rejected=tuple((name, f"{why}{of}") for name, why in largest.rejected),
        reason=f"{f'{len(plans)} convolutions' if of else 'a convolution'} of x, {largest.reason}",
    )
