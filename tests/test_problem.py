"""The problem layer against NumPy: layouts, phases of transposed convolutions, shares, and what plans print.

Parameters of kernels are computed here, in integers; most of them are otherwise checked only by tests that run kernels.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import example, given
from hypothesis import strategies as st
from plans import recurrent_gradient_plan
from test_any_call import FITTING

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import _OPERATIONS
from cupyconv.ops.conv_pullback import EPILOGUE_GRADIENT, PROLOGUE_GRADIENT
from cupyconv.problem import activations
from cupyconv.problem.activations import IDENTITY, RECURRENT_ONLY, TABLE, resolve_activation
from cupyconv.problem.arrays import (
    COUNT_ITEMSIZE,
    ITEMSIZE,
    Operand,
    c_strides,
    collapsed_stride,
    dtype_from_name,
    is_channels_last,
    operand,
    overlaps_itself,
)
from cupyconv.problem.geometry import (
    Windows,
    box_within,
    conv_geometry,
    even_part,
    pointwise_geometry,
    ranges_of,
    tap_boxes,
)
from cupyconv.problem.machine import KNOWN_GPUS, nearest_gpu
from cupyconv.problem.plan import (
    Address,
    Buffer,
    Conversion,
    GemmCall,
    Kernel,
    KernelLaunch,
    LaunchLoop,
    Matrix,
    Rounds,
    Transform,
    _listed,
    every_step,
)
from cupyconv.problem.polyphase import (
    MOST_PHASES,
    axis_phases,
    exchanged_shape,
    exchanged_view,
    joint_phase,
    phase_problems,
    phases_of,
    results_apart,
)
from cupyconv.problem.problems import NotApplicable, Problem, Prologue, without_empty_inputs
from cupyconv.problem.recurrence import DIRECTIONS, RecurrentGeometry
from cupyconv.problem.transforms import MAX_SHARES, is_real, share_problem, share_sizes

RANDOMS = st.randoms(use_true_random=False)


def integers(random: Random, *shape: int) -> np.ndarray:
    return np.array([random.randint(-4, 4) for _ in range(math.prod(shape))], np.float64).reshape(shape)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def some_view(random: Random) -> np.ndarray:
    """Return a random view: sliced, with steps, axes in any order, and axes of one element or of stride 0."""
    array = np.zeros([random.choice((1, 1, 2, 3, 5)) for _ in range(random.randint(1, 5))], random.choice(("f2", "f4")))
    for axis, extent in enumerate(array.shape):
        first, step = random.randrange(extent), random.choice((1, 1, 2, -1))
        array = array[(slice(None),) * axis + (slice(first if first % 2 else None, None, step),)]
    array = array.transpose(random.sample(range(array.ndim), array.ndim))
    if random.random() < 0.2:
        array = np.broadcast_to(array[:1], (random.randint(1, 3), *array.shape[1:]))
    return array


def offsets(array: np.ndarray) -> list[int]:
    """Return the offsets of all elements, in bytes from the first."""
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

    # Steps are distances between neighbours in C order; an axis of one element has none.
    steps = {after - before for before, after in pairwise(places)}
    stride = collapsed_stride(array.shape, array.strides)
    assert (stride is None) == (len(steps) > 1) and (not steps or stride in (None, *steps))
    assert steps or stride == 1

    for channel in (0, 1):
        unit = array.ndim > channel + 1 and array.shape[channel] > 1 and array.strides[channel] == array.itemsize
        c_ordered = array.flags.c_contiguous
        assert is_channels_last(array.shape, array.strides, array.itemsize, channel) == (unit and not c_ordered)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-40, 40)), max_size=3), st.sampled_from((1, 2, 4, 8)))
@example([(2, 7)], 8)
@example([(2, 5), (2, -12)], 4)
def test_a_view_overlaps_itself_where_two_of_its_elements_share_a_byte(axes, itemsize):
    shape, strides = [extent for extent, _ in axes], [step for _, step in axes]
    places = [sum(i * step for i, step in zip(index, strides)) for index in np.ndindex(*shape)]
    some_bytes = [place + byte for place in places for byte in range(itemsize)]
    assert overlaps_itself(shape, strides, itemsize) == (len(set(some_bytes)) < len(some_bytes))
    assert not overlaps_itself([*shape, 0], [*strides, 1], itemsize)


def test_elements_beyond_a_million_are_not_listed():
    """Views that do not overlap count as overlapping if a list of over a million elements would have to show it."""
    assert not overlaps_itself((2, 1000), (12, 8), 4) and overlaps_itself((2, 1 << 20), (12, 8), 4)
    assert not overlaps_itself((1, 1 << 21), (0, 4), 4), "an axis of one element is none"
    assert not overlaps_itself((3, 1 << 20), (4 << 20, 4), 4), "rows one after the other need no list"


@given(RANDOMS)
def test_views_of_operands_are_those_of_numpy(random):
    array = np.zeros([random.randint(2, 4) for _ in range(5)], np.float32).transpose(0, *random.sample(range(1, 5), 4))
    described = operand("x", "float32", array.shape, array.strides, 1 << 20)
    first = random.randrange(len(array))
    some, expected = described.samples(first, 1), array[first:]
    assert some.shape == (1, *array.shape[1:])
    assert some.offset == expected.ctypes.data - array.ctypes.data
    assert ((1 << 20) + some.offset) % some.alignment == 0
    assert 0 < some.alignment <= 16 and (some.alignment == 16 or some.offset % (2 * some.alignment))
    assert some.strides == described.strides
    assert described.view((1, *array.shape[1:]), described.strides, 0).strides == (0, *described.strides[1:])
    image = array[0, 0]
    steps = {after - before for before, after in pairwise(offsets(image))}
    assert described.pixels == image.size
    assert described.pixel_stride == (steps.pop() // 4 if len(steps) == 1 else None)
    fresh = some.in_c_order("float64")
    assert (fresh.alignment, fresh.nbytes) == (16, 2 * some.nbytes)
    strides = [step // 8 for step in np.empty(some.shape).strides]
    assert fresh.strides == tuple(step if extent > 1 else 0 for extent, step in zip(some.shape, strides))


@pytest.mark.parametrize("byte", [0, 1, 2, 4, 8, 12, 16, 24, 32, 48])
def test_alignment_is_that_of_the_address(byte):
    described = operand("x", "float32", (4, 4), (16, 4), byte)
    assert described.alignment == (math.gcd(byte, 16) if byte else 16)
    assert operand("x", "float32", (2, 4), (18, 4), 16).alignment == 1
    assert operand("x", "float32", (1, 4), (18, 4), 16).alignment == 16


def test_items_are_of_numpys_sizes():
    sizes = ITEMSIZE | COUNT_ITEMSIZE
    assert sizes == {name: dtype_from_name(name).itemsize for name in sizes}


# --- windows --------------------------------------------------------------------------------------------------


def some_windows(random: Random) -> Windows:
    sizes: Any = [
        tuple(random.randint(low, high) for _ in range(3)) for low, high in ((1, 7), (1, 4), (1, 3), (1, 3), (0, 3))
    ]
    size, kernel, stride, dilation, before = sizes
    missing = [d * (k - 1) + 1 - n - b for n, k, d, b in zip(size, kernel, dilation, before)]
    after: Any = tuple(max(0, need) + random.randint(0, 3) for need in missing)
    return Windows(
        batch=2, channels=(3,), size=size, kernel=kernel, stride=stride, before=before, after=after, dilation=dilation,
        padding_mode="constant", rank=3,
    )  # fmt: skip


def reads(windows: Windows, axis: int) -> list[list[int]]:
    """Return the elements that the taps of each pixel along an axis read."""
    step, gap, before = windows.stride[axis], windows.dilation[axis], windows.before[axis]
    taps = range(windows.kernel[axis])
    return [[pixel * step + tap * gap - before for tap in taps] for pixel in range(windows.out_size[axis])]


@given(RANDOMS)
def test_some_taps_and_exchanged_pixels_read_the_same_elements(random):
    windows = some_windows(random)
    taps, pixels = (
        [range(first := random.randrange(n), random.randint(first + 1, n)) for n in sizes]
        for sizes in (windows.kernel, windows.out_size)
    )
    fewer, exchanged = windows.with_taps(taps), windows.exchanged(pixels)
    for axis in range(3):
        read = reads(windows, axis)
        assert reads(fewer, axis) == [[row[tap] for tap in taps[axis]] for row in read]
        assert reads(exchanged, axis) == [[read[p][tap] for p in pixels[axis]] for tap in range(windows.kernel[axis])]
    first = windows.outermost
    assert windows.kernel[:first] == (1,) * first and (windows.kernel[first] > 1 or (first, windows.taps) == (0, 1))
    for some in (fewer, exchanged):
        padded = tuple(map(sum, zip(some.size, some.before, some.after)))
        assert some.reached == padded, "nothing is left after the last window"


@pytest.mark.parametrize("kernel, axis", [((1, 1, 1), 0), ((1, 1, 2), 2), ((1, 2, 1), 1), ((2, 1, 2), 0)], ids=str)
def test_the_first_axis_of_several_taps(kernel, axis):
    shapes = {"x": (1, 1, 4, 4, 4)}
    geometry = conv_geometry(shapes, (1, 1, *kernel), batched=True, stride=1, padding=0, dilation=1, groups=1)
    assert geometry.outermost == axis


@given(st.integers(0, 300), st.integers(0, 300))
@example(0, 5)
def test_parts_are_as_few_as_fit_and_alike(extent, most):
    part = even_part(extent, most)
    parts = ranges_of(extent, part)
    assert [i for some in parts for i in some] == list(range(extent)) and 1 <= part <= max(1, most)
    assert len(parts) == math.ceil(extent / max(1, most))
    assert part == 1 or len(ranges_of(extent, part - 1)) > len(parts)


@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 130))
def test_boxes_are_runs_in_c_order_as_large_as_fit(size, most):
    """Boxes of a kernel's taps, or of pixels, cover all of them once, and none has more than `most`."""
    found, inner = [], 1
    for run, box in tap_boxes(size, most):
        assert len(found) == run.start and run.stop - run.start <= max(1, most)
        found += product(*box)
        assert len(found) == run.stop
    assert found == list(product(*map(range, size)))
    for extent, part in zip(size[::-1], box_within(size, most)[::-1]):
        parts = len(ranges_of(extent, part))
        assert parts <= 1 or math.ceil(extent / (parts - 1)) * inner > most, "fewer would fit"
        if part < extent:
            break
        inner *= extent


@pytest.mark.parametrize("function", [cupyconv.conv, cupyconv.conv_transpose], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("name", ["stride", "dilation", "padding"])
def test_steps_are_within_the_kernels_integers(function, name):
    x, weight, most = np.ones((1, 1, 5)), np.ones((1, 1, 1)), 2**31 - 1
    others = {"stride": most} if name == "padding" else {}  # otherwise padding cuts off all of a transposed result
    checked_call(function, x, weight, **others, **{name: most})
    with pytest.raises(ValueError, match=rf"{name} must be at most {most}, given \({most + 1},"):
        checked_call(function, x, weight, **others, **{name: most + 1})


def test_a_convolution_in_words():
    """The words name all that is unusual, and no more."""
    shapes, weight = {"x[0]": (2, 1, 10, 9), "x[1]": (2, 3, 10, 9)}, (6, 2, 3, 2)
    window: Any = dict(stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(1, 2), groups=2, padding_mode="reflect")
    assert str(conv_geometry(shapes, weight, batched=True, **window)) == (
        "conv 4 (merged from 1+3) -> 6 channels, kernel 3x2 on 2 samples of 10x9, stride (2, 1), dilation (1, 2),"
        " padding ((1, 0), (0, 2)) reflect, groups 2"
    )
    plain = conv_geometry({"x": (2, 9)}, (3, 2, 4), batched=False, stride=1, padding=0, dilation=1, groups=1)
    assert str(plain) == "conv 2 -> 3 channels, kernel 4 on 1 sample of 9"
    assert str(pointwise_geometry({"xs": (3, 2)}, (4, 2))) == "conv 2 -> 4 channels, kernel 1 on 3 samples of 1"
    many = pointwise_geometry({"xs": (3, 2, 4, 5, 6, 7)}, (4, 2))
    assert str(many) == "conv 2 -> 4 channels, kernel 1x1x1 on 3 samples of 20x6x7"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_depthwise_convolution_has_one_channel_per_group(groups):
    settings: Any = dict(batched=True, stride=1, padding=0, dilation=1, groups=groups)
    geometry = conv_geometry({"x": (1, 4, 9)}, (8, 4 // groups, 2), **settings)
    assert geometry.is_depthwise is (groups == 4)
    assert (geometry.group_channels, geometry.group_outputs) == (4 // groups, 8 // groups)
    assert (geometry.reduction, geometry.products) == (8 // groups, 8 * 8 * 8 // groups)


# --- the phases of a transposed convolution -------------------------------------------------------------------


def seen(described: Operand, memory: dict[str, np.ndarray]) -> np.ndarray:
    """Return the elements that an operand describes, in the memory of its name."""
    strides = [step * described.itemsize for step in described.strides]
    return np.ndarray(described.shape, described.dtype, memory[described.name], described.offset, strides)


@given(RANDOMS)
def test_phases_are_convolutions_that_compute_the_same(random):
    """The naive convolution of the views that each phase describes gives its part of the result."""
    for _ in range(5):
        check_phases(random)


def check_phases(random: Random) -> None:
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
            assert len(phase.xs) == geometry.groups == 1
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
    """Conjugated weights and some grouped ones have no exchanged view; of several results each has its own part."""
    x, weight = np.zeros((1, 2, 5, 5)), np.zeros((2, 2, 3, 3))
    merged: Any = checked_call(cupyconv.conv_grad_input, x, weight, [(1, 1, 7, 7), (1, 1, 7, 7)]).problem
    exchanged = exchanged_view(merged)
    assert exchanged is not None and len(phase_problems(merged, exchanged)) == 2
    assert results_apart(merged) == [merged]
    inputs: Any = checked_call(cupyconv.conv_transpose, [x, x], np.zeros((4, 2, 3, 3)), groups=2).problem
    assert results_apart(inputs) == [inputs]
    conjugated: Any = checked_call(cupyconv.conv_grad_input, x + 0j, weight + 0j, (1, 2, 7, 7)).problem
    assert exchanged_view(conjugated) is None
    grouped: Any = checked_call(
        cupyconv.conv_grad_input, x, np.zeros((2, 1, 3, 3)), [(1, 1, 7, 7), (1, 1, 7, 7)], groups=2
    ).problem
    parts = results_apart(grouped)
    assert [(part.geometry.groups, part.outs) for part in parts] == [(1, (out,)) for out in grouped.outs]
    assert [(part.xs[0].offset, part.weight.offset) for part in parts] == [(0, 0), (25 * 8, 9 * 8)]


@given(RANDOMS)
def test_parts_of_results_compute_the_whole(random):
    """Groups may end anywhere in the results, lie within one of them, or be shared by several."""
    groups, channels, outputs = random.randint(2, 4), random.randint(1, 3), random.randint(1, 2)
    ends = random.sample(range(1, groups * channels), random.randint(1, min(3, groups * channels - 1)))
    shapes = [(2, end - begin, 6) for begin, end in pairwise(sorted((0, *ends, groups * channels)))]
    grad, weight = integers(random, 2, groups * outputs, 4), integers(random, groups * outputs, channels, 3)
    problem: Any = checked_call(cupyconv.conv_grad_input, grad, weight, shapes, groups=groups).problem
    memory = {out.name: np.full(out.shape, np.nan) for out in problem.outs}
    memory |= {problem.xs[0].name: grad.reshape(-1), "weight": weight.reshape(-1)}
    for part in results_apart(problem):
        (image,), (out,), geometry = part.xs, part.outs, part.geometry
        assert (geometry.in_channels, geometry.out_channels) == (out.shape[1], image.shape[1])
        images, kernels = (seen(each, memory)[:, :, 0, 0] for each in (image, part.weight))
        seen(out, memory)[:, :, 0, 0] = reference_gradients.conv_transpose(images, kernels, groups=geometry.groups)
    found = np.concatenate([memory[out.name][:, :, 0, 0] for out in problem.outs], axis=1)
    np.testing.assert_array_equal(found, reference_gradients.conv_transpose(grad, weight, groups=groups))


#: For an axis: size, kernel, stride, padding before it, dilation.
SMALL_AXES = list(product((1, 2, 3, 5, 8), (1, 2, 3, 5), (1, 2, 3), (0, 1, 3), (1, 2, 3)))


@pytest.mark.parametrize("pixels", [1, 2, 4])
def test_phases_of_an_axis_meet_the_taps_that_reach_them(pixels):
    """A tap of a pixel reaches one element, in one phase only; a phase that no tap reaches has no taps."""
    for size, kernel, stride, before, dilation in SMALL_AXES:
        reaching = {(p * stride + t * dilation - before, p, t) for p in range(pixels) for t in range(kernel)}
        met, elements = set(), []
        for phase in axis_phases(size, pixels, kernel, stride, before, dilation):
            own = [phase.first + i * stride for i in range(phase.count)]
            elements += own
            read = [
                (e, i - phase.before + j * phase.dilation, t)
                for i, e in enumerate(own)
                for j, t in enumerate(phase.taps)
            ]
            met |= {(element, pixel, tap) for element, pixel, tap in read if 0 <= pixel < pixels}
            assert pixels + min(phase.before, 0) + min(phase.after, 0) > 0, "something is left of x"
            assert not phase.taps or read[-1][1] == pixels + phase.after - 1, "padded up to what the last tap reads"
        assert sorted(elements) == list(range(size))
        assert met == {each for each in reaching if 0 <= each[0] < size}


def test_phases_in_one_convolution_find_their_taps_in_its_windows():
    joined = 0
    for size, kernel, stride, before, dilation in SMALL_AXES:
        pixels = max(1, (size + 2 * before - dilation * (kernel - 1) - 1) // stride + 1)
        phases = axis_phases(size, pixels, kernel, stride, before, dilation)
        try:
            joint, own = joint_phase(phases, pixels, stride)
        except NotApplicable:
            assert any(not phase.taps or (phase.dilation > 1 and len(phases) > 1) for phase in phases)
            continue
        joined += len(phases) > 1
        assert len(own) == len(phases)
        assert joint.count == joint.before + pixels + joint.after - (len(joint.taps) - 1) * joint.dilation
        assert len(joint.taps) == max(len(phase.taps) for phase in phases), "no window is longer than it has to be"
        assert joint.first == 0 or len(phases) == 1
        for phase, moved in zip(phases, own):
            later = moved.count - phase.count
            assert later >= 0 and moved.first + later * stride == phase.first and moved.count <= joint.count
            assert (moved.taps, moved.dilation) == (phase.taps, phase.dilation)
            assert moved.before - later == phase.before, "an element's first tap is that of the same pixel"
            assert 0 <= joint.before - moved.before <= len(joint.taps) - len(phase.taps)
    assert joined > 50


def test_as_many_phases_as_are_allowed():
    def phases(*stride: int) -> int:
        problem: Any = checked_call(
            cupyconv.conv_transpose, zeros(1, 1, 2, 2), zeros(1, 1, 9, 9), stride=stride
        ).problem
        return len(phases_of(problem.geometry))

    assert phases(8, 8) == MOST_PHASES
    with pytest.raises(NotApplicable, match=r"stride \(1, 9, 8\) gives 72 phases, at most 64 are supported"):
        phases(9, 8)


def test_phases_are_refused_where_padding_folds_them():
    x, weight = np.zeros((1, 2, 5, 5)), np.zeros((2, 2, 3, 3))
    folded: Any = checked_call(
        cupyconv.conv_grad_input, x, weight, (1, 2, 5, 5), padding=1, padding_mode="reflect"
    ).problem
    with pytest.raises(NotApplicable, match="adds elements of several phases"):
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
    assert last <= max(1, groups * outputs // MAX_SHARES) < min(others, default=math.inf)


@given(RANDOMS)
def test_shares_together_are_the_whole(random):
    """Shares of one input or several, each with its part of the bias, compute the whole result together."""
    groups, each, outputs = random.randint(1, 4), random.randint(1, 3), random.randint(1, 4)
    x, weight = integers(random, 2, groups * each, 5), integers(random, groups * outputs, each, 3)
    ends = sorted(random.sample(range(1, groups * each), random.randint(0, min(2, groups * each - 1))))
    xs, bias = [part.copy() for part in np.split(x, ends, axis=1)], integers(random, groups * outputs)
    scale, shift = integers(random, groups * each), integers(random, groups * each)
    problem: Any = checked_call(cupyconv.conv, xs, weight, bias, groups=groups, prologue=(scale, shift, None)).problem
    expected = reference.conv(x * scale[:, None] + shift[:, None], weight, bias, groups=groups)
    own = random.randint(1, groups)
    some = outputs if own > 1 else random.randint(1, outputs)
    memory = {part.name: values.reshape(-1) for part, values in zip(problem.xs, xs)}
    memory |= {"weight": weight.reshape(-1), "bias": bias, "scale": scale, "shift": shift}
    memory["out"] = np.full(expected.size, np.nan)
    for first, start in product(range(0, groups, own), range(0, outputs, some)):
        taken, kept = range(first, min(first + own, groups)), range(start, min(start + some, outputs))
        share, cut = share_problem(problem, taken, kept)
        if len(taken) == groups and len(kept) == outputs:
            assert share is problem and not cut
        images, kernels = [seen(part, memory)[:, :, 0, 0] for part in share.xs], seen(share.weight, memory)
        if cut:
            extents = {part.name: part.shape[0 if part is share.weight else 1] for part in share.arrays if part}
            assert {name: end - begin for name, begin, end in cut} == extents
        assert share.geometry.channels == tuple(image.shape[1] for image in images)
        assert share.geometry.out_channels == len(kernels)
        scaled = np.concatenate(images, axis=1)[:, :, None, None] * seen(share.prologue.scale, memory)
        y = reference.conv(
            (scaled + seen(share.prologue.shift, memory))[:, :, 0, 0], kernels[:, :, 0, 0], groups=len(taken)
        )
        seen(share.out, memory)[...] = y[:, :, None, None] + seen(share.bias, memory)
    np.testing.assert_array_equal(memory["out"].reshape(expected.shape), expected)


@pytest.mark.parametrize("channels, kept", [((0, 3, 0, 2), (3, 2)), ((0, 0), (0,)), ((2, 1), (2, 1))], ids=str)
def test_inputs_without_channels_are_left_out(channels, kept):
    xs = [zeros(1, count, 4) for count in channels]
    problem: Any = checked_call(cupyconv.conv, xs, zeros(5, sum(channels), 2)).problem
    fewer = without_empty_inputs(problem)
    assert fewer.geometry.channels == tuple(x.shape[1] for x in fewer.xs) == kept
    assert fewer.xs[-1] == problem.xs[{(3, 2): 3, (0,): 0, (2, 1): 1}[kept]]


@pytest.mark.parametrize("kernel, sizes", [((1, 9), {1}), ((2, 1), {1}), ((3, 2), {2})], ids=str)
def test_axes_of_one_tap_are_not_transformed(kernel, sizes):
    plan = cupyconv.explain(cupyconv.conv, zeros(2, 4, 40, 40), zeros(4, 4, *kernel), method="fft", on="sm_90")
    assert {len(step.size) for step in every_step(plan.steps) if isinstance(step, Transform)} == sizes


# --- names, and words -----------------------------------------------------------------------------------------


def test_codes_of_activations_are_their_places_in_the_kernel():
    """Codes follow the order of the kernel's switch, starting at 1."""
    codes = [code for table in (TABLE, RECURRENT_ONLY) for code, _ in table.values()]
    assert codes == list(range(1, len(codes) + 1))
    assert IDENTITY.code == 0 and not IDENTITY and resolve_activation("relu")


def test_the_defaults_of_activations_are_those_of_the_table():
    """The third column of the docstring's table lists them; clip's are required."""
    assert activations.__doc__
    for name, (_, defaults) in (TABLE | RECURRENT_ONLY).items():
        (row,) = [line for line in activations.__doc__.splitlines() if line.startswith(f"{name} ")]
        said = re.findall(r"\((\S+)\)", row[64:])
        assert list(defaults) == ([None, None] if said == ["required"] else list(map(float, said)))


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
    """On NumPy each line of a plan's page has words, and the problem has words too."""
    case = FITTING[name](random)
    plan = cupyconv.explain(getattr(cupyconv, name), **case)
    page = str(plan)
    assert "None" not in page and "result" in page and all(buffer.nbytes for buffer in plan.workspace)
    first, *lines = page.splitlines()
    assert first.strip() and all(line.strip() for line in lines)


@pytest.mark.parametrize(
    "parts, words",
    [
        ("scale", "scale * x"), ("shift", "x + shift"), ("scale shift", "scale * x + shift"), ("relu", "relu(x)"),
        ("shift relu", "relu(x + shift)"), ("", "x"),
    ],
)  # fmt: skip
def test_a_prologue_in_words(parts, words):
    vectors = {
        name: Operand(name, "float32", (1, 2, 1, 1, 1), (0, 1, 0, 0, 0)) for name in ("scale", "shift") if name in parts
    }
    prologue = Prologue(**vectors, activation=resolve_activation("relu" if "relu" in parts else None))
    assert str(prologue) == words and bool(prologue) == bool(parts) and prologue.vectors == tuple(vectors.values())


# --- what is counted ------------------------------------------------------------------------------------------

X, W = zeros(2, 4, 5), zeros(6, 2, 3)
Y = zeros(2, 6, 3)
#: Calls, their operations, and the elements of their arguments and results.
FIGURES: dict[str, tuple[Any, int, int]] = {
    "conv": ((cupyconv.conv, X, W, dict(groups=2)), 2 * Y.size * 6, X.size + W.size + Y.size),
    "complex x": ((cupyconv.conv, X + 0j, W, dict(groups=2)), 4 * Y.size * 6, 2 * X.size + W.size + 2 * Y.size),
    "complex weight": ((cupyconv.conv, X, W + 0j, dict(groups=2)), 4 * Y.size * 6, X.size + 2 * W.size + 2 * Y.size),
    "both complex": ((cupyconv.conv, X + 0j, W + 0j, dict(groups=2)), 8 * Y.size * 6, 2 * (X.size + W.size + Y.size)),
    "transposed": ((cupyconv.conv_transpose, Y, W, dict(groups=2)), 2 * Y.size * 6, X.size + W.size + Y.size),
    "weight gradient": ((cupyconv.conv_grad_weight, Y, X, 3, dict(groups=2)), 2 * Y.size * 6, X.size + W.size + Y.size),
    "chain": (
        (cupyconv.conv_chain, X, [cupyconv.ConvLayer(W, groups=2), cupyconv.ConvLayer(zeros(1, 6, 2))], {}),
        2 * Y.size * 6 + 2 * 4 * 12, X.size + W.size + 12 + 4,
    ),
    "im2col": ((cupyconv.im2col, X, 3, {}), 0, X.size + 2 * 12 * 3),
    "col2im": ((cupyconv.col2im, zeros(2, 12, 3), 5, 3, {}), 2 * 12 * 3, X.size + 2 * 12 * 3),
    "max_pool": ((cupyconv.max_pool, [X, X], 3, dict(stride=1)), 2 * 8 * 3 * 3, 2 * X.size + 2 * 8 * 3),
    "rnn": ((cupyconv.rnn, zeros(5, 2, 3), zeros(4, 3), zeros(4, 4), {}), 2 * 10 * 4 * 7, 30 + 12 + 16 + 40 + 8),
    "lstm": (
        (cupyconv.lstm, zeros(5, 2, 3), zeros(2, 16, 3), zeros(2, 16, 4), dict(direction="bidirectional")),
        2 * 10 * 32 * 7, 30 + 32 * 7 + 80 + 2 * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("on", [None, "sm_90"])
@pytest.mark.parametrize("name", FIGURES)
def test_operations_and_the_least_bytes(name, on):
    """A product and its sum are two operations, four if one factor is complex, eight if both are; arrays count once."""
    (function, *arguments, settings), flops, elements = FIGURES[name]
    plan = cupyconv.explain(function, *arguments, **settings, on=on)
    assert (plan.flops, plan.minimal_bytes) == (flops, 4 * elements)


@pytest.mark.parametrize("x", [X, X + 0j], ids=["real x", "complex x"])
@pytest.mark.parametrize("weight", [W, W + 0j], ids=["real weight", "complex weight"])
def test_which_factor_is_complex(x, weight):
    problem: Any = checked_call(cupyconv.conv, x, weight, groups=2).problem
    kinds = x.dtype.kind == "c", weight.dtype.kind == "c"
    assert problem.x_alone_is_complex is (kinds == (True, False))
    assert problem.factor_alone_is_complex is (kinds == (False, True))
    assert problem.is_one_kind is (kinds[0] == kinds[1]) and is_real(problem) is (not any(kinds))


@pytest.mark.parametrize("on", [None, "sm_90"])
def test_operations_and_the_least_bytes_of_passes_over_gradients(on):
    grad, scale = zeros(2, 3, 5), zeros(3)
    usual = {"grad": grad, "spatial": 1, "activation": None}
    through = {"x": grad, "scale": scale, "shift": None, "sums": None, "through": True}
    back = PROLOGUE_GRADIENT.checked(usual | through, on).plan()
    assert (back.flops, back.minimal_bytes) == (4 * 30, 4 * (3 * 30 + 3 + 6))  # with the sums of scale and shift
    assert (back.problem, back.result) == ("gradient of scale * x, float32 (2, 3, 1, 1, 5)", "float32 (2, 3, 1, 1, 5)")
    sums = EPILOGUE_GRADIENT.checked(usual | {"saved": None, "through": False, "sums": True}, on).plan()
    assert (sums.flops, sums.minimal_bytes) == (30, 4 * (30 + 3))
    both = {"saved": grad, "through": True, "sums": True, "activation": "relu"}
    back = EPILOGUE_GRADIENT.checked(usual | both, on).plan()
    assert (back.flops, back.minimal_bytes) == (2 * 30, 4 * (3 * 30 + 3))
    assert back.problem == "derivative of relu and sums of channels of float32 (2, 3, 1, 1, 5)"


def test_operations_of_a_layers_gradients():
    """A weight has two products: one takes the gradient back through it, one gives its own gradient."""
    back = recurrent_gradient_plan("rnn", "float32", (5, 2, 3, 4))
    assert back.problem == "gradients of rnn 3 -> 4, forward, on 5 steps x 2 samples"
    assert "grad_x (5, 2, 3), grad_weight_ih (1, 4, 3), grad_weight_hh (1, 4, 4)" in back.result
    assert back.flops == 2 * 2 * 10 * 4 * 7


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, weight, settings, words",
    [
        ((1, 2), (2, 2), {}, "weight"),
        ((1, 2, 3, 3, 3, 3), (2, 2, 1, 1, 1, 1), {}, "weight"),
        ((1, 3, 9), (3, 2, 2), {"groups": 2}, "groups 2 does not divide the weight's 3"),
        ((1, 4, 9), (3, 2, 2), {}, "takes 3 input channels"),
        ((1, 2, 9), (2, 2, 0), {}, "must have at least one element"),
        ((1, 2, 0), (2, 2, 3), {}, "must have at least one element"),
        ((1, 2, 5, 0), (2, 2, 3, 3), {}, "must have at least one element"),
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
        ("abab", "ab repeated for 1 more chunk (2 steps)"),
        ("ababab", "ab repeated for 2 more chunks (4 steps)"),
        ("abac", "abac"),
        ("xabcabc", "xabc repeated for 1 more chunk (3 steps)"),
        ("abcabd", "abcabd"),
        ("ababcdcd", "ab repeated for 1 more chunk (2 steps)cd repeated for 1 more chunk (2 steps)"),
    ],
)
def test_rounds_are_printed_once(names, lines):
    printed = [
        line.split()[1].split("<")[0] if line.startswith("kernel") else line
        for line in _listed(tuple(map(launch, names)))
    ]
    assert "".join(printed).replace("... ", " ") == lines


@given(st.integers(0, 5000), st.integers(1, 700))
@example(512, 256)
def test_as_many_parts_as_a_buffer_has_room_for(room, nbytes):
    parts = Buffer.parts_in(room, nbytes)
    assert Buffer("parts", parts * nbytes).space <= room < Buffer("parts", (parts + 1) * nbytes).space


def matrix(name: str) -> Matrix:
    return Matrix(Address(name), 4, 0)


def product_of(purpose: str) -> GemmCall:
    return GemmCall(2, 3, 4, *map(matrix, "abc"), 1, "float32", "float32", "float32", purpose=purpose)


def transform_of(purpose: str) -> Transform:
    return Transform((8, 8), 3, Address("tiles"), Address("spectra"), "float32", purpose=purpose)


@pytest.mark.parametrize(
    "step, word",
    [
        (launch, "kernel   {}<"),
        (product_of, "beta 0)  {}"),
        (transform_of, "complex64  {}"),
        (lambda name: LaunchLoop((launch("a"),), 4, name), "4 x, {} ="),
        (lambda name: Rounds((launch(name),), (launch(name),), 3), "  kernel   {}<"),
    ],
    ids=["launches", "products", "transforms", "loops", "rounds"],
)
def test_steps_alike_are_printed_once_and_others_each(step, word):
    """Up to four equal steps are all printed; of more, only the first."""
    names = [chr(ord("a") + i) for i in range(9)]
    page = "\n".join(_listed(tuple(map(step, names))))
    assert all(page.count(word.format(name)) == 1 for name in names)
    for alike in (4, 5):
        page = "\n".join(_listed((step("a"),) * alike))
        assert page.count(word.format("a")) == (alike if alike == 4 else 1)
        assert ("... and 4 more like it" in page) == (alike == 5)


def test_what_is_converted_comes_first():
    """Converted arrays use the limit first; everything else shares the rest, which is never negative."""
    problem = checked_call(cupyconv.conv, X, W, groups=2).problem
    assert problem.sharing_with(()) is problem
    converted = [Conversion(name, "float32", "float64", problem.limit // 4) for name in ("x", "weight")]
    assert problem.sharing_with(converted).limit == problem.limit // 2
    assert problem.sharing_with(3 * converted).limit == 0


def test_steps_of_a_layer_wait_for_each_other():
    """Steps of a recurrent layer wait for each other; nothing in a convolution waits."""
    assert checked_call(cupyconv.conv, X, W, groups=2).problem.turns == 1
    for steps in (0, 1, 5):
        layer: Any = checked_call(cupyconv.rnn, zeros(steps, 2, 3), zeros(4, 3), zeros(4, 4)).problem
        assert layer.turns == max(1, steps)


def test_weights_that_are_copied_whole_come_on_top_of_a_small_limit_only():
    """A larger limit leaves no less space in addition to the copied weights."""
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
    assert replace(KNOWN_GPUS["sm_75"], arch="sm_70").shared_bytes == 64 << 10


@pytest.mark.parametrize("gpu", KNOWN_GPUS.values(), ids=str)
def test_fewer_bits_take_no_longer(gpu):
    """16-bit products are fastest, then TF32, then float32, which no library computes at the full rate of the cores."""
    rates = [gpu.gemm_rate(*kinds) for kinds in (("float16", "float32"), ("float32", "tf32"), ("float32", "float32"))]
    assert rates == sorted(rates, reverse=True) and rates[2] < gpu.fp32
    assert gpu.gemm_rate("bfloat16", "float32") == rates[0] == gpu.gemm16 and rates[1] == gpu.tf32
    assert gpu.gemm_rate("float64", "float64") == gpu.gemm64
