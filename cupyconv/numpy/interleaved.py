"""A strided transposed convolution as one convolution, in which the phases of a channel are neighbouring outputs.

::

    result, stride 2    e o e o e o      even and odd elements read nearly the same elements of x: each is an output of
    x                   |   |   |        one convolution of stride 1, whose sums are written to every other element

A phase with fewer taps than the others has zeros instead.  Compared with one convolution per phase (`gathered`), these
zeros are wasted work; in return, x is read once, products have more rows, and there are fewer calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch
from cupyconv.numpy.choice import by_another
from cupyconv.numpy.convolution import ConvLoop, ConvRun, plan_conv, result_takes_sums
from cupyconv.numpy.gathered import GatheringStep, check_gathers
from cupyconv.numpy.windows import Block, five_axes
from cupyconv.problem.arrays import c_strides
from cupyconv.problem.geometry import Triple
from cupyconv.problem.plan import Plan
from cupyconv.problem.polyphase import AxisPhase, joint_phase, phase_problem, phases_along
from cupyconv.problem.problems import NotApplicable, TransposedProblem

#: Most phases that may be outputs of one convolution: stride 4 along two axes.
MAX_OUTPUTS = 16
#: Most products, as a multiple of the products that are needed.
MAX_ZEROS = 2.5
#: Why the method "fft" does not compute phases as outputs of one convolution.
NO_TRANSFORMS = "not supported with the phases as outputs of one convolution"


@dataclass(frozen=True)
class InterleavedLoop(GatheringStep):
    """A convolution whose outputs are all phases of a result's channels, from `first_channel` of all results on."""

    output: str
    first_channel: int
    phases: tuple[tuple[AxisPhase, ...], ...]  # per axis
    joint: tuple[AxisPhase, ...]  # per axis, one phase with room for the taps of all

    @property
    def own_calls(self) -> int:
        # The second term is for storing the sums of each phase of a block.
        return cost.GATHERED_CALLS + 4 * self.count * (1 + self.convolution.turns)

    @property
    def weight_elements(self) -> int:
        return prod(self.convolution.problem.weight.shape)

    def __str__(self) -> str:
        taps = " x ".join(str(len(axis.taps)) for axis in self.joint)
        stride = " x ".join(map(str, self.problem.geometry.stride))
        return f"{self.convolution}, {taps} taps, {self.count} phases as outputs, written with stride {stride}"

    @cached_property
    def count(self) -> int:
        """Number of phases per channel."""
        return prod(map(len, self.phases))

    #: Windows may reach beyond x, where the result has no term.
    adds_zeros = True

    @property
    def has_zero_taps(self) -> bool:
        """Whether x is also multiplied by zeros."""
        return any(len(phase.taps) < len(joint.taps) for own, joint in zip(self.phases, self.joint) for phase in own)

    @cached_property
    def _read(self) -> Any:
        return tuple(slice(max(0, -axis.before), min(0, axis.after) or None) for axis in self.joint)

    def run(self, arrays: Mapping[str, Any]) -> None:
        parts = {"weight": self._weight(arrays["weight"]), "out": arrays[self.output]}
        for name, _ in self.convolution.inputs:
            parts[name] = five_axes(arrays[name])[(..., *self._read)]
        if "pre" in arrays:
            parts["pre"] = arrays["pre"]
        if "bias" in arrays:
            parts["bias"] = np.repeat(arrays["bias"], self.count)
        firsts = [(d, h, w) for d, h, w in product(*([phase.first for phase in own] for own in self.phases))]
        self.convolution.run(parts, run_of=partial(InterleavedRun, stride=self.problem.geometry.stride, firsts=firsts))

    def _weight(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight with phases as outputs: each has its taps, last to first, where its window begins."""
        geometry = self.convolution.geometry
        channels = geometry.out_channels // self.count // geometry.groups
        own = five_axes(weight)[:, self.first_channel : self.first_channel + channels]
        own = own.reshape(geometry.groups, geometry.group_channels, *own.shape[1:]).swapaxes(1, 2)
        shape = geometry.groups, channels, self.count, geometry.group_channels, *geometry.kernel
        phased = np.zeros(shape, weight.dtype)
        for i, phase in enumerate(product(*self.phases)):
            begins = [joint.before - axis.before for joint, axis in zip(self.joint, phase)]
            place: Any = tuple(slice(begin, begin + len(axis.taps)) for begin, axis in zip(begins, phase))
            taps: Any = tuple(
                slice(t.start, t.stop if t.stop >= 0 else None, t.step) for t in (axis.taps for axis in phase)
            )
            phased[(slice(None), slice(None), i, slice(None), *place)] = own[(..., *taps)]
        if self.problem.conjugate:
            np.conjugate(phased, out=phased)
        return phased.reshape(geometry.out_channels, geometry.group_channels, *geometry.kernel)


class InterleavedRun(ConvRun):
    """A run that writes the sums of each phase to every `stride`-th element of the result."""

    def __init__(
        self, loop: ConvLoop, arrays: Mapping[str, Any], scratch: Scratch, *, stride: Triple, firsts: list[Triple]
    ) -> None:
        super().__init__(loop, arrays, scratch)
        self._stride, self._firsts = stride, firsts

    def write(self, image: np.ndarray, block: Block, sums: np.ndarray) -> None:
        samples, outputs, *size = sums.shape
        by_phase = sums.reshape(samples, outputs // len(self._firsts), len(self._firsts), *size)
        for i, first in enumerate(self._firsts):
            place, pixels = block.every(self._stride, first, len(self._firsts), image)
            place[...] = by_phase[(slice(None), slice(None), i, *pixels)]


def plan_interleaved(problem: TransposedProblem) -> Plan:
    """Plan one convolution per result; raise ValueError if its phases have no joint window."""
    geometry = problem.geometry
    check_gathers(problem)
    if problem.method == "fft":
        raise NotApplicable(NO_TRANSFORMS)
    count = prod(map(min, geometry.stride, geometry.size))
    if not 1 < count <= MAX_OUTPUTS or not problem.outs:
        raise NotApplicable("it has one phase or too many")
    together = [joint_phase(*along) for along in zip(phases_along(geometry), geometry.out_size, geometry.stride)]
    joint, phases = tuple(axis for axis, _ in together), tuple(tuple(own) for _, own in together)
    taps = tuple(len(axis.taps) for axis in joint)
    if prod(taps) * count > MAX_ZEROS * geometry.taps:
        raise NotApplicable("most products would be with zeros")
    # Bytes of the weights of all results.
    nbytes = geometry.in_channels * count * geometry.group_outputs * prod(taps) * problem.weight.itemsize
    if nbytes > problem.limit // 2:
        raise NotApplicable("the weight of all phases takes more than half of the workspace limit")
    within, plans, steps = replace(problem, workspace_limit=problem.limit - nbytes, allow_fft=False), [], []
    for out, first in zip(problem.outs, geometry.channel_offsets):
        outputs = out.shape[1] * count
        shape = (outputs, geometry.group_outputs, *taps)
        weight = replace(problem.weight, shape=shape, strides=c_strides(shape))
        part = phase_problem(within, joint, replace(out, shape=(out.shape[0], outputs, *out.shape[2:])), weight)
        if result_takes_sums(part):
            raise NotApplicable("each phase is one pixel")
        plan = plan_conv(part)
        plans.append(plan)
        for loop in plan.steps:
            assert isinstance(loop, ConvLoop)
            steps.append(InterleavedLoop(problem, loop, out.name, first, phases, joint))
    largest = max(plans, key=lambda plan: plan.flops)
    sizes = {"weight": nbytes, "blocks": max(plan.workspace_bytes for plan in plans)}
    reason = f"a convolution of x with {count} phases as outputs, {largest.reason}"
    # The inner convolution only reports that its options forbid transforms.
    why = {"fft": NO_TRANSFORMS} if problem.allow_fft else {}
    rejected = tuple((method, why.get(method, said)) for method, said in largest.rejected)
    return by_another(problem, largest, steps, sizes=sizes, reason=reason, rejected=rejected)
