"""The polyphase decomposition: a transposed convolution as convolutions of stride 1, one per phase of its result.

Along an axis of stride s = 2, with a kernel of three taps::

    result       i   o i o i o i        a phase: elements with the same remainder of i + before modulo s
    taps             1 . 1 . 1 .        the same taps reach all of them: tap 1 reaches one phase,
                     . 0 . 0 . 0        taps 0 and 2 reach the other
                     . 2 . 2 . 2

A phase is a convolution of x with those taps in reverse order.  With g = gcd(stride, dilation), the taps of a phase
are stride / g apart in the kernel, and dilation / g pixels apart in x.  A phase that no tap reaches is zero.  All
arrays are views: the weight and the result with larger strides, and x cropped to the part that windows read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product, starmap
from math import gcd, prod

from cupyconv.problem.arrays import Operand, c_strides
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import ConvProblem, NotApplicable, TransposedProblem

#: Maximum number of phases of a result: each phase has its own launches.
MOST_PHASES = 64


@dataclass(frozen=True)
class AxisPhase:
    """Elements ``first``, ``first + stride`` ... of an axis, `count` in total, as a convolution along that axis."""

    first: int
    count: int
    taps: range  # taps of the kernel, in the order in which they meet x; empty if no tap reaches the phase
    dilation: int
    before: int
    after: int  # padding of x, as `before`; negative values crop x


def axis_phases(size: int, pixels: int, kernel: int, stride: int, before: int, dilation: int) -> list[AxisPhase]:
    """The phases of an axis of `size` elements, reached from `pixels` pixels of x."""
    common = gcd(stride, dilation)
    tap_step, gap = stride // common, dilation // common
    phases = []
    for first in range(min(stride, size)):
        count = (size - 1 - first) // stride + 1
        nothing = AxisPhase(first, count, range(0), 1, 0, 0)
        window, rest = divmod(first + before, stride)
        # The smallest t for which t * dilation has the same remainder.
        lowest = rest // common * pow(gap, -1, tap_step) % tap_step
        if rest % common or lowest >= kernel:
            phases.append(nothing)
            continue
        taps = range(lowest, kernel, tap_step)
        reach = (len(taps) - 1) * gap
        ahead = reach - window + (lowest * dilation - rest) // stride
        behind = count + reach - ahead - pixels
        reached = pixels + min(ahead, 0) + min(behind, 0) > 0
        phases.append(AxisPhase(first, count, taps[::-1], gap, ahead, behind) if reached else nothing)
    return phases


def phases_of(geometry: ConvGeometry) -> list[tuple[AxisPhase, ...]]:
    """The phases of a result along its three axes; raises NotApplicable if there are too many."""
    count = prod(map(min, geometry.stride, geometry.size))
    if count > MOST_PHASES:
        raise NotApplicable(f"stride {geometry.stride} gives {count} phases, at most {MOST_PHASES} are supported")
    return list(product(*phases_along(geometry)))


def phases_along(geometry: ConvGeometry) -> list[list[AxisPhase]]:
    """The phases of each of the three axes."""
    return [
        axis_phases(*along)
        for along in zip(
            geometry.size, geometry.out_size, geometry.kernel, geometry.stride, geometry.before, geometry.dilation
        )
    ]


def joint_phase(phases: list[AxisPhase], pixels: int, stride: int) -> tuple[AxisPhase, list[AxisPhase]]:
    """All phases of an axis as outputs of one convolution, whose window covers the taps of each phase.

    Returns this convolution along the axis, and the phases as its outputs.  An element of a phase is the output of the
    window in which its taps begin.  If this needs a longer window for some phase, that phase begins one window later;
    its `first` is then before the axis.  Raises NotApplicable if a phase has no taps, or taps that are several pixels
    apart.
    """
    if len(phases) == 1 and phases[0].taps:
        return phases[0], phases
    if not all(phase.taps and phase.dilation == 1 for phase in phases):
        raise NotApplicable("its phases have no common window")
    before, taps = max(phase.before for phase in phases), max(len(phase.taps) for phase in phases)
    own = []
    for phase in phases:
        later = max(0, before - phase.before + len(phase.taps) - taps)
        moved = phase.first - later * stride, phase.count + later, phase.taps, 1, phase.before + later
        own.append(AxisPhase(*moved, phase.after))
    count = max(phase.count for phase in own)
    return AxisPhase(0, count, range(taps), 1, before, count + taps - 1 - before - pixels), own


def phase_problems(problem: TransposedProblem, weight: Operand) -> list[ConvProblem]:
    """One convolution per phase of each result, with the exchanged `weight`.

    Raises NotApplicable if no convolutions compute the same.
    """
    geometry = problem.geometry
    if geometry.padding_mode != "constant":
        raise NotApplicable(f"padding_mode {geometry.padding_mode!r} adds elements of several phases together")
    phases = phases_of(geometry)
    return [
        phase_problem(
            problem, phase, out, _taps(weight, phase, out.shape[1], first) if is_reached(phase) else problem.weight
        )
        for out, first in zip(problem.outs, geometry.channel_offsets)
        for phase in phases
    ]


def exchanged_view(problem: TransposedProblem) -> Operand | None:
    """The weight as convolutions with x need it: (channels of the results, outputs of a group, taps).

    Returns None if no view has this layout.
    """
    weight, geometry, shape = problem.weight, problem.geometry, exchanged_shape(problem.geometry)
    if 0 in shape:
        return weight.view(shape, c_strides(shape), 0)
    outputs, inputs = weight.stride_c, weight.stride_n
    if problem.conjugate:
        return None
    if geometry.groups > 1:
        if geometry.group_channels == 1:
            outputs = geometry.group_outputs * weight.stride_n
        elif geometry.group_outputs > 1 or weight.stride_n != geometry.group_channels * weight.stride_c:
            return None
    return weight.view(shape, (outputs, inputs, *weight.strides[2:]), 0)


def exchanged_shape(geometry: ConvGeometry) -> tuple[int, ...]:
    """The shape of the weight with the outputs and channels of each group exchanged."""
    return (geometry.in_channels, geometry.group_outputs, *geometry.kernel)


def results_apart(problem: TransposedProblem) -> list[TransposedProblem]:
    """Split the problem so that each part has one result, which is whole groups or channels of one group.

    Without groups, or with one result, the problem itself is returned.
    """
    geometry = problem.geometry
    channels, outputs = geometry.group_channels, geometry.group_outputs
    if geometry.groups == 1 or len(problem.outs) == 1:
        return [problem]
    (x,) = problem.xs  # only an input gradient has several results, and it has one input array
    parts = []
    for out, begin in zip(problem.outs, geometry.channel_offsets):
        end = begin + out.shape[1]
        whole = min(-(-begin // channels) * channels, end), max(end // channels * channels, begin)
        for own in starmap(range, pairwise(sorted({begin, *whole, end}))):
            groups = range(own.start // channels, -(-own.stop // channels))
            of_groups = range(groups.start * outputs, groups.stop * outputs)
            weight = problem.weight
            parts.append(
                replace(
                    problem,
                    geometry=replace(geometry, channels=(len(own),), out_channels=len(of_groups), groups=len(groups)),
                    xs=(_some_channels(x, of_groups),),
                    outs=(_some_channels(out, range(own.start - begin, own.stop - begin)),),
                    weight=weight.view(
                        (len(of_groups), len(own) // len(groups), *weight.shape[2:]),
                        weight.strides,
                        of_groups.start * weight.stride_n + own.start % channels * weight.stride_c,
                    ),
                )
            )
    return parts


def _some_channels(image: Operand, wanted: range) -> Operand:
    shape = (image.shape[0], len(wanted), *image.shape[2:])
    return image.view(shape, image.strides, wanted.start * image.stride_c)


def is_reached(phase: tuple[AxisPhase, ...]) -> bool:
    """Whether any tap reaches the elements of a phase."""
    return all(axis.taps for axis in phase)


def phase_problem(
    problem: TransposedProblem, phase: tuple[AxisPhase, ...], out: Operand, weight: Operand
) -> ConvProblem:
    """The convolution of x with the taps of a phase, `weight`, that computes this phase of a result."""
    geometry, reached = problem.geometry, is_reached(phase)
    xs = tuple(_cut(x, phase) for x in problem.xs) if reached else problem.xs[:1]
    pads = [(max(axis.before, 0), max(axis.after, 0)) for axis in phase]
    as_convolution = ConvGeometry(
        batch=geometry.batch,
        channels=tuple(x.shape[1] for x in xs) if reached else (0,),
        out_channels=out.shape[1],
        groups=geometry.groups if reached else 1,
        rank=geometry.rank,
        padding_mode="constant",
        stride=(1, 1, 1),
        size=xs[0].shape[2:] if reached else tuple(axis.count for axis in phase),  # type: ignore[arg-type]
        kernel=tuple(len(axis.taps) if reached else 1 for axis in phase),  # type: ignore[arg-type]
        before=tuple(pad[0] if reached else 0 for pad in pads),  # type: ignore[arg-type]
        after=tuple(pad[1] if reached else 0 for pad in pads),  # type: ignore[arg-type]
        dilation=tuple(axis.dilation for axis in phase),  # type: ignore[arg-type]
    )
    return ConvProblem(
        geometry=as_convolution,
        xs=xs,
        weight=weight,
        out=_every(out, phase, geometry.stride),
        bias=problem.bias,
        pre=problem.pre and _every(problem.pre, phase, geometry.stride),
        x_dtype=problem.x_dtype,
        weight_dtype=problem.weight_dtype,
        activation=problem.activation,
        method=problem.method,
        machine=problem.machine,
        workspace_limit=problem.limit,
        allow_tf32=problem.allow_tf32,
        allow_winograd=problem.allow_winograd,
        allow_fft=problem.allow_fft,
    )


def _taps(weight: Operand, phase: tuple[AxisPhase, ...], channels: int, first: int) -> Operand:
    """The taps of a phase, for the channels of a result, beginning with channel `first`."""
    taps = [axis.taps for axis in phase]
    offset = first * weight.stride_n + sum(t[0] * step for t, step in zip(taps, weight.strides[2:]))
    return weight.view(
        (channels, weight.shape[1], *map(len, taps)),
        (*weight.strides[:2], *(t.step * step for t, step in zip(taps, weight.strides[2:]))),
        offset,
    )


def _cut(x: Operand, phase: tuple[AxisPhase, ...]) -> Operand:
    """The part of x that the windows read."""
    begins = [max(0, -axis.before) for axis in phase]
    ends = [extent - max(0, -axis.after) for extent, axis in zip(x.shape[2:], phase)]
    shape = (*x.shape[:2], *(end - begin for begin, end in zip(begins, ends)))
    return x.view(shape, x.strides, sum(begin * step for begin, step in zip(begins, x.strides[2:])))


def _every(out: Operand, phase: tuple[AxisPhase, ...], stride: tuple[int, ...]) -> Operand:
    """The elements of a phase."""
    shape = (*out.shape[:2], *(axis.count for axis in phase))
    strides = (*out.strides[:2], *(s * step for s, step in zip(stride, out.strides[2:])))
    return out.view(shape, strides, sum(axis.first * step for axis, step in zip(phase, out.strides[2:])))
