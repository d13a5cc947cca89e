"""The polyphase decomposition: a transposed convolution as ordinary ones of stride 1, a residue class modulo the stride each.

Along an axis of stride s = 2, with a kernel of three taps::

    result       i   o i o i o i        elements whose i + before leaves the same rest modulo s
    taps             1 . 1 . 1 .        are reached through the same taps: one class by tap 1,
                     . 0 . 0 . 0        the other by taps 0 and 2
                     . 2 . 2 . 2

A class is a convolution of x with those taps, last to first.  With g = gcd(stride, dilation) the taps of a class
are stride / g apart and lie dilation / g pixels of x apart; the class that no tap reaches is zeros.  Everything is
a view: of the weight by strides, of x cut where a window would begin inside it, of the result by its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from cupyconv.problem.arrays import Operand
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.problems import ConvProblem, NotApplicable, TransposedProblem

#: Classes into which a result may be cut: each has launches of its own.
MOST_CLASSES = 64


@dataclass(frozen=True)
class AxisClass:
    """Elements ``first``, ``first + stride`` ... of an axis, `count` of them, as a convolution along that axis."""

    first: int
    count: int
    taps: range  # of the kernel, in the order in which they meet x; empty where nothing reaches the class
    dilation: int
    before: int
    after: int  # of x; negative ones cut it


def axis_classes(size: int, pixels: int, kernel: int, stride: int, before: int, dilation: int) -> list[AxisClass]:
    """The classes of an axis of `size` elements, reached from `pixels` of x."""
    common = gcd(stride, dilation)
    tap_step, gap = stride // common, dilation // common
    classes = []
    for first in range(min(stride, size)):
        count = (size - 1 - first) // stride + 1
        nothing = AxisClass(first, count, range(0), 1, 0, 0)
        window, rest = divmod(first + before, stride)
        lowest = next((t for t in range(min(kernel, tap_step)) if (t * dilation - rest) % stride == 0), None)
        if lowest is None:
            classes.append(nothing)
            continue
        taps = range(lowest, kernel, tap_step)
        reach = (len(taps) - 1) * gap
        ahead = reach - window + (lowest * dilation - rest) // stride
        behind = count + reach - ahead - pixels
        reached = pixels + min(ahead, 0) + min(behind, 0) > 0
        classes.append(AxisClass(first, count, taps[::-1], gap, ahead, behind) if reached else nothing)
    return classes


def residue_classes(geometry: ConvGeometry) -> list[tuple[AxisClass, ...]]:
    """The classes of a result's elements, along its three axes."""
    axes = [
        axis_classes(*along)
        for along in zip(
            geometry.size, geometry.out_size, geometry.kernel, geometry.stride, geometry.before, geometry.dilation
        )
    ]
    return list(product(*axes))


def class_problems(problem: TransposedProblem) -> list[ConvProblem]:
    """A convolution for each class of each result; NotApplicable where no convolutions compute the same."""
    geometry = problem.geometry
    if geometry.padding_mode != "constant":
        raise NotApplicable(f"padding_mode {geometry.padding_mode!r} folds elements of several classes together")
    if problem.conjugate:
        raise NotApplicable("the weight is conjugated")
    if geometry.groups > 1 and len(problem.outs) > 1:
        raise NotApplicable("several results of a grouped convolution")
    classes = residue_classes(geometry)
    if len(classes) > MOST_CLASSES:
        raise NotApplicable(f"stride {geometry.stride} makes {len(classes)} classes, {MOST_CLASSES} are allowed")
    return [
        class_problem(
            problem, one, out, _weight(problem, one, out.shape[1], first) if is_reached(one) else problem.weight
        )
        for out, first in zip(problem.outs, geometry.channel_offsets)
        for one in classes
    ]


def is_reached(one: tuple[AxisClass, ...]) -> bool:
    """Whether any tap reaches the elements of a class."""
    return all(axis.taps for axis in one)


def class_problem(problem: TransposedProblem, one: tuple[AxisClass, ...], out: Operand, weight: Operand) -> ConvProblem:
    """The convolution of x with the taps of a class, which are `weight`, that is its part of a result."""
    geometry, reached = problem.geometry, is_reached(one)
    xs = tuple(_cut(x, one) for x in problem.xs) if reached else problem.xs[:1]
    pads = [(max(axis.before, 0), max(axis.after, 0)) for axis in one]
    as_convolution = ConvGeometry(
        batch=geometry.batch,
        channels=tuple(x.shape[1] for x in xs) if reached else (0,),
        out_channels=out.shape[1],
        groups=geometry.groups if reached else 1,
        rank=geometry.rank,
        padding_mode="constant",
        stride=(1, 1, 1),
        size=xs[0].shape[2:] if reached else tuple(axis.count for axis in one),  # type: ignore[arg-type]
        kernel=tuple(len(axis.taps) if reached else 1 for axis in one),  # type: ignore[arg-type]
        before=tuple(pad[0] if reached else 0 for pad in pads),  # type: ignore[arg-type]
        after=tuple(pad[1] if reached else 0 for pad in pads),  # type: ignore[arg-type]
        dilation=tuple(axis.dilation for axis in one),  # type: ignore[arg-type]
    )
    return ConvProblem(
        geometry=as_convolution,
        xs=xs,
        weight=weight,
        out=_every(out, one, geometry.stride),
        bias=problem.bias,
        pre=problem.pre and _every(problem.pre, one, geometry.stride),
        x_dtype=problem.x_dtype,
        weight_dtype=problem.weight_dtype,
        activation=problem.activation,
        machine=problem.machine,
        workspace_limit=problem.limit,
        allow_tf32=problem.allow_tf32,
    )


def _weight(problem: TransposedProblem, one: tuple[AxisClass, ...], channels: int, first: int) -> Operand:
    """The taps of a class, with outputs and channels exchanged."""
    weight, geometry = problem.weight, problem.geometry
    outputs, inputs = weight.stride_c, weight.stride_n
    if geometry.groups > 1:
        if geometry.group_channels == 1:
            outputs = geometry.group_outputs * weight.stride_n
        elif geometry.group_outputs == 1 and weight.stride_n == geometry.group_channels * weight.stride_c:
            inputs = 0
        else:
            raise NotApplicable("the weight of several groups, transposed within each, is no strided view")
    taps = [axis.taps for axis in one]
    offset = first * weight.stride_c + sum(t[0] * step for t, step in zip(taps, weight.strides[2:]))
    return weight.view(
        (channels, geometry.group_outputs, *map(len, taps)),
        (outputs, inputs, *(t.step * step for t, step in zip(taps, weight.strides[2:]))),
        offset,
    )


def _cut(x: Operand, one: tuple[AxisClass, ...]) -> Operand:
    """The part of x that windows read."""
    begins = [max(0, -axis.before) for axis in one]
    ends = [extent - max(0, -axis.after) for extent, axis in zip(x.shape[2:], one)]
    shape = (*x.shape[:2], *(end - begin for begin, end in zip(begins, ends)))
    return x.view(shape, x.strides, sum(begin * step for begin, step in zip(begins, x.strides[2:])))


def _every(out: Operand, one: tuple[AxisClass, ...], stride: tuple[int, ...]) -> Operand:
    """The elements of a class."""
    shape = (*out.shape[:2], *(axis.count for axis in one))
    strides = (*out.strides[:2], *(s * step for s, step in zip(stride, out.strides[2:])))
    return out.view(shape, strides, sum(axis.first * step for axis, step in zip(one, out.strides[2:])))
