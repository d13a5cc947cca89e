"""The problem layer by itself, against NumPy: layouts, the phases of transposed convolutions, shares, what plans print.

What kernels are given is worked out here, in integers; most of it is otherwise seen only by tests that run kernels.
"""

from __future__ import annotations

import math
from itertools import pairwise, product
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
from hypothesis import strategies as st
from test_any_call import FITTING

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import _OPERATIONS
from cupyconv.problem.activations import IDENTITY, RECURRENT_ONLY, TABLE, resolve_activation
from cupyconv.problem.arrays import Operand, c_strides, collapsed_stride, is_channels_last, operand, overlaps_itself
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.machine import KNOWN_GPUS, nearest_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch, LaunchLoop, Rounds, _listed
from cupyconv.problem.polyphase import exchanged_shape, exchanged_view, phase_problems, results_apart
from cupyconv.problem.problems import NotApplicable, Problem
from cupyconv.problem.recurrence import DIRECTIONS, RecurrentGeometry
from cupyconv.problem.transforms import MOST_SHARES, share_problem, share_sizes

RANDOMS = st.randoms(use_true_random=False)


def integers(random: Random, *shape: int) -> np.ndarray:
    return np.array([random.randint(-4, 4) for _ in range(math.prod(shape))], np.float64).reshape(shape)


def some_view(random: Random) -> np.ndarray:
    """Of an array: sliced, with steps, in any order of axes, with axes of one element and of stride 0."""
    array = np.zeros([random.choice((1, 1, 2, 3, 5)) for _ in range(random.randint(1, 5))], random.choice(("f2", "f4")))
    for axis, extent in enumerate(array.shape):
        first, step = random.randrange(extent), random.choice((1, 1, 2, -1))
        array = array[(slice(None),) * axis + (slice(first if first % 2 else None, None, step),)]
    array = array.transpose(random.sample(range(array.ndim), array.ndim))
    if random.random() < 0.2:
        array = np.broadcast_to(array[:1], (random.randint(1, 3), *array.shape[1:]))
    return array


def offsets(array: np.ndarray) -> list[int]:
    """Of all elements, in bytes from the first."""
    return [sum(i * s for i, s in zip(index, array.strides)) for index in np.ndindex(array.shape)]


# --- layouts --------------------------------------------------------------------------------------------------


@given(RANDOMS)
def test_layouts_are_those_of_numpy(random):
    for _ in range(30):
        check_layout(some_view(random))


def check_layout(array: np.ndarray) -> None:
    described = operand("x", array.dtype.name, array.shape, array.strides, array.ctypes.data)
    assert described.shape == array.shape
    assert all(n == 1 or s * array.itemsize == own for n, s, own in zip(array.shape, described.strides, array.strides))
    assert all(s == 0 for n, s in zip(array.shape, described.strides) if n == 1)
    assert described.alignment <= 16 and array.ctypes.data % described.alignment == 0
    assert described.alignment == 16 or array.ctypes.data % (2 * described.alignment)

    places = offsets(array)
    assert overlaps_itself(array.shape, array.strides, array.itemsize) == (len(set(places)) < len(places))

    # A step is between neighbours of all axes in C order; an axis of one element has none.
    steps = {after - before for before, after in pairwise(places)}
    stride = collapsed_stride(array.shape, array.strides)
    assert (stride is None) == (len(steps) > 1) and (not steps or stride in (None, *steps))
    assert steps or stride == 1

    for channel in (0, 1):
        unit = array.ndim > channel + 1 and array.shape[channel] > 1 and array.strides[channel] == array.itemsize
        c_ordered = array.flags.c_contiguous
        assert is_channels_last(array.shape, array.strides, array.itemsize, channel) == (unit and not c_ordered)


@given(RANDOMS)
def test_views_of_operands_are_those_of_numpy(random):
    array = np.zeros([random.randint(2, 4) for _ in range(5)], np.float32).transpose(0, *random.sample(range(1, 5), 4))
    described = operand("x", "float32", array.shape, array.strides, 1 << 20)
    first = random.randrange(len(array))
    some, expected = described.samples(first, 1), array[first:]
    assert some.shape == (1, *array.shape[1:])
    assert some.offset == expected.ctypes.data - array.ctypes.data
    assert ((1 << 20) + some.offset) % some.alignment == 0
    assert some.alignment == 16 or some.offset % (2 * some.alignment)
    assert some.strides == described.strides
    assert described.view((1, *array.shape[1:]), described.strides, 0).strides == (0, *described.strides[1:])


@pytest.mark.parametrize("byte", [0, 1, 2, 4, 8, 12, 16, 24, 32, 48])
def test_alignment_is_that_of_the_address(byte):
    described = operand("x", "float32", (4, 4), (16, 4), byte)
    assert described.alignment == (math.gcd(byte, 16) if byte else 16)
    assert operand("x", "float32", (2, 4), (18, 4), 16).alignment == 1
    assert operand("x", "float32", (1, 4), (18, 4), 16).alignment == 16


# --- the phases of a transposed convolution -------------------------------------------------------------------


def seen(described: Operand, memory: dict[str, np.ndarray]) -> np.ndarray:
    """The elements that an operand describes, of the memory of its name."""
    strides = [step * described.itemsize for step in described.strides]
    return np.ndarray(described.shape, described.dtype, memory[described.name], described.offset, strides)


@given(RANDOMS)
def test_phases_are_convolutions_that_compute_the_same(random):
    """Each computed by the naive convolution, of the views that it describes."""
    rank, groups = random.randint(1, 3), random.choice((1, 1, 2, 3))
    inputs, outputs = random.choice(((2, 1), (1, 2), (1, 1), (2, 2), (3, 2)))
    kernel, size, stride, dilation = ([random.randint(1, 4 if rank < 3 else 3) for _ in range(rank)] for _ in range(4))
    x = integers(random, 2, groups * inputs, *size)
    weight = integers(random, groups * inputs, outputs, *kernel)
    window = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups}
    most = [((n - 1) * s + d * (k - 1)) // 2 for n, s, d, k in zip(size, stride, dilation, kernel)]
    window["padding"] = tuple(random.randint(0, n) for n in most)
    expected = reference_gradients.conv_transpose(x, weight, **window)
    order = random.choice(([0, *range(1, rank + 2)], [0, *range(2, rank + 2), 1]))
    channels_last = np.ascontiguousarray(x.transpose(order))
    memory = {"x": channels_last.reshape(-1), "weight": weight.reshape(-1), "out": np.full(expected.size, np.nan)}
    problem: Any = checked_call(
        cupyconv.conv_transpose, channels_last.transpose(np.argsort(order)), weight, **window
    ).problem
    whole = seen(problem.outs[0], memory)
    exchanged = exchanged_view(problem)
    if exchanged is None:
        assert groups > 1 and inputs > 1
        grouped = weight.reshape(groups, inputs, outputs, *kernel).swapaxes(1, 2)
        memory["exchanged"] = np.ascontiguousarray(grouped).reshape(-1)
        shape = exchanged_shape(problem.geometry)
        exchanged = Operand("exchanged", "float64", shape, c_strides(shape))
    for phase in phase_problems(problem, exchanged):
        geometry, target = phase.geometry, seen(phase.out, memory)
        assert geometry.stride == (1, 1, 1) and target.shape[2:] == geometry.out_size
        if geometry.in_channels == 0:
            target[...] = 0
            continue
        images = np.concatenate([seen(image, memory) for image in phase.xs], axis=1)
        assert images.shape[2:] == geometry.size and images.shape[1] == geometry.in_channels
        target[...] = reference.conv(
            images,
            seen(phase.weight, memory),
            padding=tuple(zip(geometry.before, geometry.after)),
            dilation=geometry.dilation,
            groups=geometry.groups,
        )
    np.testing.assert_array_equal(whole.reshape(expected.shape), expected)


def test_weights_whose_exchange_is_no_view():
    """Conjugated ones, and those of some groups; of several results each has its own."""
    x, weight = np.zeros((1, 2, 5, 5)), np.zeros((2, 2, 3, 3))
    merged: Any = checked_call(cupyconv.conv_grad_input, x, weight, [(1, 1, 7, 7), (1, 1, 7, 7)]).problem
    exchanged = exchanged_view(merged)
    assert exchanged is not None and len(phase_problems(merged, exchanged)) == 2
    assert results_apart(merged) == [merged]
    conjugated: Any = checked_call(cupyconv.conv_grad_input, x + 0j, weight + 0j, (1, 2, 7, 7)).problem
    assert exchanged_view(conjugated) is None
    grouped: Any = checked_call(
        cupyconv.conv_grad_input, x, np.zeros((2, 1, 3, 3)), [(1, 1, 7, 7), (1, 1, 7, 7)], groups=2
    ).problem
    parts = results_apart(grouped)
    assert [(part.geometry.groups, part.outs) for part in parts] == [(1, (out,)) for out in grouped.outs]
    assert [(part.xs[0].offset, part.weight.offset) for part in parts] == [(0, 0), (25 * 8, 9 * 8)]


def test_phases_are_refused_where_padding_folds_them():
    x, weight = np.zeros((1, 2, 5, 5)), np.zeros((2, 2, 3, 3))
    folded: Any = checked_call(
        cupyconv.conv_grad_input, x, weight, (1, 2, 5, 5), padding=1, padding_mode="reflect"
    ).problem
    with pytest.raises(NotApplicable, match="folds"):
        phase_problems(folded, folded.weight)


# --- shares of groups and outputs -----------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 200))
def test_shares_are_halved_as_often_as_allowed(groups, outputs):
    geometry: Any = type("Sizes", (), {"groups": groups, "group_outputs": outputs})
    sizes = share_sizes(geometry)
    assert sizes[0] == (groups, outputs)
    for (own, each), (fewer, less) in pairwise(sizes):
        assert (fewer, less) == ((math.ceil(own / 2), each) if own > 1 else (1, math.ceil(each / 2)))
    *others, last = [math.prod(size) for size in sizes]
    assert last <= max(1, groups * outputs // MOST_SHARES) < min(others, default=math.inf)


@given(RANDOMS)
def test_shares_together_are_the_whole(random):
    groups, each, outputs = random.randint(1, 4), random.randint(1, 3), random.randint(1, 4)
    x, weight = integers(random, 2, groups * each, 5), integers(random, groups * outputs, each, 3)
    scale = np.ones(groups * each)
    problem: Any = checked_call(
        cupyconv.conv, x, weight, np.zeros(groups * outputs), groups=groups, prologue=(scale, None, None)
    ).problem
    expected = reference.conv(x, weight, groups=groups)
    own = random.randint(1, groups)
    some = outputs if own > 1 else random.randint(1, outputs)
    out = np.full(expected.shape, np.nan)
    memory = {"x": x.reshape(-1), "weight": weight.reshape(-1)}
    for first, start in product(range(0, groups, own), range(0, outputs, some)):
        taken, kept = range(first, min(first + own, groups)), range(start, min(start + some, outputs))
        share, cut = share_problem(problem, taken, kept)
        if len(taken) == groups and len(kept) == outputs:
            assert share is problem and not cut
        geometry: ConvGeometry = share.geometry
        images, kernels = seen(share.xs[0], memory), seen(share.weight, memory)
        assert images.shape[1] == geometry.in_channels and kernels.shape[0] == geometry.out_channels
        at = first * outputs + start
        assert share.out.offset == at * expected.shape[2] * 8 and share.out.shape[1] == len(kernels)
        assert share.bias.shape[-1] == len(kernels) or share.bias.shape[1] == len(kernels)
        y = reference.conv(images[:, :, 0, 0], kernels[:, :, 0, 0], groups=geometry.groups)
        out[:, at : at + len(kernels)] = y
    np.testing.assert_array_equal(out, expected)


# --- names, and words -----------------------------------------------------------------------------------------


def test_codes_of_activations_are_their_places_in_the_kernel():
    """A kernel's switch has them in this order, from 1 on."""
    codes = [code for table in (TABLE, RECURRENT_ONLY) for code, _ in table.values()]
    assert codes == list(range(1, len(codes) + 1))
    assert IDENTITY.code == 0 and not IDENTITY and resolve_activation("relu")


@pytest.mark.parametrize("spec", [None, "relu", "relu6", ("clip", -1.5, 2.5), "tanh", "hardswish"], ids=str)
def test_activations_that_only_bound_say_their_bounds(spec):
    values = np.linspace(-8, 8, 65)
    expected, bounds = reference.activation(spec, values), resolve_activation(spec).bounds
    if bounds is None:
        assert expected.min() > values.min() and spec in ("tanh", "hardswish")
    else:
        np.testing.assert_array_equal(np.clip(values, *bounds), expected)


@pytest.mark.parametrize("name", sorted(function.__name__ for function in _OPERATIONS))
@given(RANDOMS)
def test_pages_say_everything(name, random):
    """Each line of a plan has its words, on NumPy; and the problem has them too."""
    case = FITTING[name](random)
    page = str(cupyconv.explain(getattr(cupyconv, name), **case))
    assert "None" not in page and "result" in page
    first, *lines = page.splitlines()
    assert first.strip() and all(line.strip() for line in lines)


# --- what is refused ------------------------------------------------------------------------------------------


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    "x, weight, settings, words",
    [
        ((1, 2), (2, 2), {}, "weight"),
        ((1, 2, 3, 3, 3, 3), (2, 2, 1, 1, 1, 1), {}, "weight"),
        ((1, 3, 9), (3, 2, 2), {"groups": 2}, "groups 2 does not divide the weight's 3"),
        ((1, 4, 9), (3, 2, 2), {}, "takes 3 input channels"),
        ((1, 2, 9), (2, 2, 0), {}, "must have elements"),
        ((1, 2, 0), (2, 2, 3), {}, "must have elements"),
        ((1, 2, 5, 0), (2, 2, 3, 3), {}, "must have elements"),
        ((1, 2, 9), (2, 2, 3), {"stride": 0}, "stride"),
        ((1, 2, 9), (2, 2, 3), {"dilation": 0}, "dilation"),
    ],
    ids=str,
)
def test_a_transposed_convolution_of_wrong_shapes_is_refused(x, weight, settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        cupyconv.conv_transpose(zeros(*x), zeros(*weight), **settings)


# --- recurrent layers, and what steps count -------------------------------------------------------------------


@pytest.mark.parametrize("peephole", [False, True])
@pytest.mark.parametrize(
    "cell, first, rows, kept",
    [
        ("rnn", True, 1, {"gates": 5}),
        ("lstm", True, 4, {"gates": 20, "cells": 5}),
        ("gru", True, 4, {"gates": 15, "candidate": 5}),
        ("gru", False, 3, {"gates": 15, "candidate": 5}),
    ],
)
def test_what_gradients_of_recurrent_layers_keep_and_sum(cell, first, rows, kept, peephole):
    layer = RecurrentGeometry(
        cell=cell, steps=7, batch=2, inputs=3, hidden=5, direction="bidirectional", activations=(),
        linear_before_reset=first,
    )  # fmt: skip
    assert layer.sums(peephole) == rows + 3 * peephole
    assert layer.keeps == {name: (2, 7, 2, width) for name, width in kept.items()}
    assert layer.signs == (1, -1) and DIRECTIONS["forward"] == (1,) and DIRECTIONS["reverse"] == (-1,)


def launch(name: str, nbytes: int = 10, flops: int = 7) -> KernelLaunch:
    return KernelLaunch(Kernel(name, ()), (3, 2, 1), 64, (), bytes_moved=nbytes, flops=flops)


def test_loops_of_launches_count_each_time():
    loop = LaunchLoop((launch("a"), launch("b", 5, 1)), 4, "t", 2)
    assert (loop.bytes_moved, loop.flops) == (60, 32) and "t = 2 ... 5" in str(loop)
    rounds = Rounds((launch("a"), launch("b")), (launch("a"), launch("b")), 3)
    assert (rounds.bytes_moved, rounds.flops) == (60, 42) and "3 x" in str(rounds)


@pytest.mark.parametrize(
    "names, lines",
    [
        ("a", "a"),
        ("ab", "ab"),
        ("abab", "ab and so on for 1 more chunks, 2 steps"),
        ("ababab", "ab and so on for 2 more chunks, 4 steps"),
        ("abac", "abac"),
        ("xabcabc", "xabc and so on for 1 more chunks, 3 steps"),
        ("abcabd", "abcabd"),
        ("ababcdcd", "ab and so on for 1 more chunks, 2 stepscd and so on for 1 more chunks, 2 steps"),
    ],
)
def test_rounds_are_printed_once(names, lines):
    printed = [
        line.split()[1].split("<")[0] if line.startswith("kernel") else line
        for line in _listed(tuple(map(launch, names)))
    ]
    assert "".join(printed).replace("... ", " ") == lines


def test_weights_that_are_copied_whole_come_on_top_of_a_small_limit_only():
    """A larger limit leaves no less beside them."""
    limits, weights = range(1, 400), 100
    room = [Problem.limit_with(SimpleNamespace(limit=limit), weights) for limit in limits]
    assert all(given == limit for limit, given in zip(limits, room) if limit >= 2 * weights)
    assert all(limit < given <= limit + weights for limit, given in zip(limits, room) if limit < 2 * weights)
    assert room == sorted(room) and room[0] == 1 + weights


def test_a_gpu_that_is_not_in_the_table_is_planned_for_as_the_newest_that_is_older():
    names = {capability: nearest_gpu(capability).arch for capability in (70, 75, 79, 80, 87, 90, 103, 130)}
    assert names == {
        70: "sm_75", 75: "sm_75", 79: "sm_75", 80: "sm_80", 87: "sm_86", 90: "sm_90", 103: "sm_100", 130: "sm_120",
    }  # fmt: skip
    shared = {arch: gpu.shared_bytes >> 10 for arch, gpu in KNOWN_GPUS.items()}
    assert shared == {
        "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    }  # fmt: skip
