"""The method "fft" on NumPy: its results, its errors, how it divides work, and when it is chosen."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from fft_cases import CASES, DTYPES, MIXED, normal
from peak_memory import peak_bytes
from plans import array
from scipy.fft import next_fast_len
from tolerance import assert_close

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import convolution, cost, fft, fft_parts, fft_scattered, fft_weight_gradient, spectra
from cupyconv.numpy.fft_parts import FftParts
from cupyconv.problem.problems import HostModel, NotApplicable
from cupyconv.problem.transforms import share_problem, share_sizes, transformed_axes


def arrays_of(name, x_dtype="float32", weight_dtype="float32"):
    """Return x, the weight and the gradient of their convolution."""
    x, weight, settings = CASES[name]
    x, weight = normal(*x, dtype=x_dtype), normal(*weight, dtype=weight_dtype, seed=1)
    shape = reference.conv(x, weight, **settings).shape
    return x, weight, normal(*shape, dtype=np.result_type(x, weight), seed=2), settings


def check(function, oracle, arrays, settings, terms, limit=150_000):
    """Compare with the reference result on 1 and on 2 threads, in one block and in several."""
    expected = oracle(*arrays, **settings)
    for threads, most in ((1, None), (2, None), (2, limit)):
        with cupyconv.options(threads=threads, workspace_limit=most):
            plan = cupyconv.explain(function, *arrays, method="fft", **settings)
            actual = function(*arrays, method="fft", **settings)
        assert plan.method == "fft" and (most is None or plan.workspace_bytes <= most)
        assert_close(actual, expected, actual.dtype, terms, factor=4)


@pytest.mark.parametrize("name", CASES)
def test_convolution(name):
    x, weight, _, settings = arrays_of(name)
    check(cupyconv.conv, reference.conv, (x, weight), settings, int(np.prod(weight.shape[1:])))


@pytest.mark.parametrize("name", CASES)
def test_input_gradient(name):
    """The gradient is a convolution; with a padding mode, gradients of copies are added to the elements copied."""
    x, weight, grad, settings = arrays_of(name)
    arrays, terms = (grad, weight, x.shape), weight.size * (6 if "padding_mode" in settings else 1)
    check(cupyconv.conv_grad_input, reference_gradients.conv_grad_input, arrays, settings, terms)


@pytest.mark.parametrize("channels, groups", [((12,), 1), ((8,), 4), ((5, 7), 1)])
def test_input_gradients_in_shares(channels, groups):
    """Gradients of a list of inputs may be computed in shares of some channels, or of some groups."""
    weight = normal(6 * groups, sum(channels) // groups, 5, 4)
    shapes, settings = [(2, own, 13, 11) for own in channels], dict(padding=2, groups=groups)
    grad = normal(2, len(weight), 13, 12)
    expected = reference_gradients.conv_grad_input(grad, weight, shapes, **settings)
    with cupyconv.options(workspace_limit=60_000):
        plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, shapes, method="fft", **settings)
        actual = cupyconv.conv_grad_input(grad, weight, shapes, method="fft", **settings)
    assert "shares of" in str(plan)
    for own, one in zip(actual, expected, strict=True):
        assert_close(own, one, "float32", weight.size, factor=4)


@pytest.mark.parametrize("name", CASES)
def test_weight_gradient(name):
    x, weight, grad, settings = arrays_of(name)
    arrays = grad, x, weight.shape[2:]
    check(
        cupyconv.conv_grad_weight,
        reference_gradients.conv_grad_weight,
        arrays,
        settings,
        max(1, grad[:, :1].size),
        400_000,
    )


@pytest.mark.parametrize("name", ["2-D", "many channels", "symmetric"])
@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in DTYPES if dtype != "float32"), *MIXED], ids=str)
def test_dtypes(name, dtypes):
    x, weight, grad, settings = arrays_of(name, *dtypes)
    wide = int(np.prod(weight.shape[1:]))
    check(cupyconv.conv, reference.conv, (x, weight), settings, wide, None)
    grad_input, terms = (grad, weight, x.shape), 6 * weight.size
    check(cupyconv.conv_grad_input, reference_gradients.conv_grad_input, grad_input, settings, terms, None)
    for own in (grad, grad.real.astype(dtypes[1]) if dtypes[1][0] == "f" else grad):
        grad_weight = own, x, weight.shape[2:]
        check(
            cupyconv.conv_grad_weight, reference_gradients.conv_grad_weight, grad_weight, settings, own[:, 0].size, None
        )


def test_transposed_convolution():
    x, weight, bias = normal(2, 6, 7, 8), normal(6, 4, 5, 3), normal(4)
    for settings in (dict(stride=2, padding=1, output_padding=1), dict(dilation=(1, 2), activation="relu")):
        expected = reference_gradients.conv_transpose(x, weight, bias, **settings)
        actual = cupyconv.conv_transpose(x, weight, bias, method="fft", **settings)
        assert_close(actual, expected, np.float32, 6 * 15, factor=4)


@pytest.mark.parametrize("channels", [3, 16])
def test_everything_around_a_convolution(channels):
    """Merged inputs in any strides, prologue, bias, residual, activation, its input saved, `out` in place are right."""
    xs = [normal(2, channels, 9, 11), normal(2, 9, 11, 2).transpose(0, 3, 1, 2), normal(2, 1, 18, 11)[:, :, ::2]]
    total = channels + 3
    weight, bias, residual = normal(4, total, 5, 3), normal(4), normal(2, 4, 9, 11)
    settings = dict(padding="same", activation="gelu")
    prologue = normal(total), normal(total, seed=1), "relu"
    images = reference.transformed(xs, *prologue, axis=1)
    expected = reference.conv(images, weight, bias, residual=residual, **settings)
    settings |= dict(prologue=prologue, method="fft")
    for threads, limit in ((1, None), (2, None), (2, 120_000 * total)):
        with cupyconv.options(threads=threads, workspace_limit=limit):
            actual = cupyconv.conv(xs, weight, bias, residual=residual, **settings)
            in_place = residual.copy()
            cupyconv.conv(xs, weight, bias, residual=in_place, out=in_place, **settings)
            saved, _ = cupyconv.vjp(cupyconv.conv, xs, weight, bias, residual=residual, **settings)
        assert_close(actual, expected, np.float32, 15 * total, magnitude=50.0 * total, factor=4)
        np.testing.assert_array_equal(in_place, actual)
        np.testing.assert_array_equal(saved, actual)


# --- how work is divided -------------------------------------------------------------------------------------


def test_a_weight_with_too_large_spectra_is_computed_in_shares():
    """Shares are of outputs, or of groups whose inputs begin anywhere; each has its own bias, residual and prologue."""
    for xs, weight, groups in (
        ([normal(1, 5, 30, 30), normal(1, 3, 30, 30)], normal(24, 8, 11, 11), 1),
        ([normal(1, 5, 30, 30), normal(1, 7, 30, 30)], normal(24, 1, 11, 11), 12),
    ):
        bias, channels = normal(24), sum(x.shape[1] for x in xs)
        prologue, residual = (normal(channels), None, "relu"), normal(1, 24, 20, 20)
        images = reference.transformed(xs, *prologue, axis=1)
        expected = reference.conv(images, weight, bias, groups=groups, residual=residual)
        settings = dict(groups=groups, prologue=prologue, residual=residual, method="fft")
        with cupyconv.options(workspace_limit=250_000):
            plan = cupyconv.explain(cupyconv.conv, xs, weight, bias, **settings)
            actual = cupyconv.conv(xs, weight, bias, **settings)
        (loop,) = plan.steps
        assert loop.count > 1 and plan.workspace_bytes <= 250_000
        assert loop.flops == loop.count * loop.first.flops and loop.seconds == loop.count * loop.first.seconds
        assert plan.bytes_moved == loop.count * loop.first.bytes_moved >= plan.minimal_bytes
        assert f"repeated for {loop.count} shares of " in str(plan)
        assert_close(actual, expected, np.float32, 121 * 8, magnitude=1000.0, factor=4)


def test_channels_that_go_one_by_one_leave_room_for_larger_tiles():
    """The plan also holds for several inputs, one without channels, and with an epilogue, in the reported memory."""
    xs, weight = [normal(1, 3, 24, 24, 24), normal(1, 0, 24, 24, 24), normal(1, 3, 24, 24, 24)], normal(2, 6, 5, 5, 5)
    bias, prologue, residual = normal(2), (normal(6), None, "relu"), normal(1, 2, 24, 24, 24)
    settings = dict(padding="same", prologue=prologue, residual=residual, activation="relu", method="fft")
    out = np.empty_like(residual)
    with cupyconv.options(workspace_limit=900_000, threads=2):
        plan = cupyconv.explain(cupyconv.conv, xs, weight, bias, **settings)
        cupyconv.conv(xs, weight, bias, out=out, **settings)
        peak = peak_bytes(lambda: cupyconv.conv(xs, weight, bias, out=out, **settings))
    (loop,) = plan.steps
    assert loop.channels_at_once == 1 and loop.blocks > 1
    together = replace(loop, one_by_one=False)
    assert 2 * together.workspace + together.spectra_bytes > 900_000
    assert plan.workspace_bytes <= 900_000 and peak <= plan.workspace_bytes + 200_000
    images = reference.transformed(xs, *prologue, axis=1)
    expected = reference.conv(images, weight, bias, padding="same", residual=residual, activation="relu")
    assert_close(out, expected, np.float32, 125 * 6, magnitude=1000.0, factor=4)


def least_limit(function, *arrays, **settings):
    """Return the workspace limit that the refusal reports as sufficient."""
    with cupyconv.options(workspace_limit=1):
        with pytest.raises(
            ValueError, match="'fft' does not apply: the smallest tile with its spectra needs"
        ) as refusal:
            cupyconv.explain(function, *arrays, method="fft", **settings)
    return int(re.search(r"workspace_limit of ([\d,]+) bytes is enough", str(refusal.value))[1].replace(",", ""))


@pytest.mark.parametrize("loop", [fft.Fft, fft_scattered.ScatteredFft, fft_weight_gradient.GradientFft])
def test_a_refusal_carries_the_bytes_that_are_needed(loop):
    """A weight gradient's refusal wrapped another one and lost the number, so that it was never the least of several."""
    x, weight = normal(1, 4, 60, 60), normal(4, 4, 31, 31)
    call = {
        fft.Fft: (cupyconv.conv, x, weight),
        fft_scattered.ScatteredFft: (cupyconv.conv_transpose, x, weight),
        fft_weight_gradient.GradientFft: (cupyconv.conv_grad_weight, normal(1, 4, 30, 30), x, (31, 31)),
    }[loop]
    with cupyconv.options(workspace_limit=1_000, threads=1), pytest.raises(NotApplicable) as refusal:
        loop.loops(checked_call(*call).problem)
    assert 1_000 < refusal.value.needed < 10_000_000


def test_without_room_it_is_refused_and_auto_goes_on():
    x, weight = normal(1, 8, 160, 160), normal(8, 8, 31, 31)
    assert cupyconv.explain(cupyconv.conv, x, weight).method == "fft"
    with cupyconv.options(workspace_limit=10_000):
        with pytest.raises(ValueError, match=r"'fft' does not apply: the smallest tile .* the limit is 10,000"):
            cupyconv.conv(x, weight, method="fft")
        assert cupyconv.explain(cupyconv.conv, x, weight).method != "fft"


#: Kernels nearly as large as the image, or too large for the workspace limit.
LARGE = {
    "1-D": ((2, 3, 120), (2, 3, 101), dict(padding=((5, 9),))),
    "2-D": ((1, 1, 30, 27), (1, 1, 25, 22), {}),
    "3-D": ((1, 2, 7, 10, 9), (3, 2, 5, 8, 7), dict(padding=1)),
    "rows": ((2, 1, 5, 70), (2, 1, 1, 61), dict(stride=(2, 3))),
    "columns of a volume": ((1, 2, 40, 3, 4), (2, 2, 33, 1, 2), {}),
    "stride, groups": ((2, 4, 33, 31), (4, 2, 21, 19), dict(stride=(2, 3), groups=2, padding=((2, 3), (4, 1)))),
    "dilation": ((1, 2, 50, 40), (2, 2, 13, 11), dict(dilation=(3, 2), padding=4)),
    "far taps": ((1, 1, 400), (2, 1, 9), dict(dilation=45)),
    "many channels": ((1, 9, 20, 21), (8, 9, 17, 16), dict(padding=1)),
    "depthwise": ((2, 4, 26, 26), (4, 1, 21, 22), dict(groups=4)),
    "full": ((1, 1, 10, 9), (1, 1, 15, 16), dict(padding="full")),
    "wrap": ((1, 2, 21, 15), (2, 2, 17, 14), dict(padding=4, padding_mode="wrap")),
    "reflect": ((1, 1, 120), (2, 1, 110), dict(padding=20, padding_mode="reflect", stride=2)),
}


@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("float16",) * 2, ("complex64", "float32")], ids=str)
@pytest.mark.parametrize("share", [1, 2, 6])
@pytest.mark.parametrize("name", LARGE)
def test_a_kernel_is_cut_where_its_spectra_have_no_room(name, share, dtypes):
    """The kernel is divided at the limit that a refusal reports as sufficient, and at larger limits."""
    shape, kernel, settings = LARGE[name]
    x, weight = (np.round(2 * normal(*one, dtype=dtype)) for one, dtype in zip((shape, kernel), dtypes))
    bias, x_dtype = np.round(normal(kernel[0], dtype=dtypes[1])), np.result_type(x, weight)
    expected = reference.conv(x, weight, bias, **settings)
    limit = share * least_limit(cupyconv.conv, x, weight, bias, **settings)
    for threads in (1, 2):
        with cupyconv.options(workspace_limit=limit, threads=threads):
            plan = cupyconv.explain(cupyconv.conv, x, weight, bias, method="fft", **settings)
            actual = cupyconv.conv(x, weight, bias, method="fft", **settings)
            again = cupyconv.conv(x, weight, bias, method="fft", **settings)
        assert plan.method == "fft" and plan.workspace_bytes <= limit + (
            weight.nbytes * 2 if x_dtype != "float32" else 0
        )
        np.testing.assert_array_equal(actual, again)
        assert_close(actual, expected, actual.dtype, int(np.prod(kernel[1:])), magnitude=4.0 * weight[0].size, factor=4)
    if share == 1:
        # In these cases, the spectra of the whole weight fit whenever a tile does.
        assert name in ("3-D", "full", "wrap") or any("FFT of parts" in str(loop) for loop in plan.steps)
        with cupyconv.options(workspace_limit=limit // 2), pytest.raises(ValueError, match="smallest tile"):
            cupyconv.conv(x, weight, bias, method="fft", **settings)


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("name", LARGE)
def test_gradients_of_a_kernel_that_is_cut(name, share):
    shape, kernel, settings = LARGE[name]
    x, weight = (np.round(2 * normal(*one)) for one in (shape, kernel))
    grad = np.round(2 * normal(*reference.conv(x, weight, **settings).shape))
    expected = reference_gradients.conv_gradients(grad, x, weight, **settings)
    terms = int(grad[:, 0].size)
    limit = share * least_limit(cupyconv.conv_grad_weight, grad, x, kernel[2:], **settings)
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], method="fft", **settings)
        actual = cupyconv.conv_grad_weight(grad, x, kernel[2:], method="fft", **settings)
    assert plan.workspace_bytes <= limit
    assert share > 1 or name in ("3-D", "many channels", "wrap") or "parts of" in str(plan)
    assert_close(actual, expected.weight, np.float32, terms, magnitude=4.0 * terms, factor=4)
    terms = weight.size
    limit = share * least_limit(cupyconv.conv_grad_input, grad, weight, x.shape, **settings)
    with cupyconv.options(workspace_limit=limit, threads=2):
        actual = cupyconv.conv_grad_input(grad, weight, x.shape, method="fft", **settings)
    assert_close(actual, expected.x, np.float32, terms, magnitude=4.0 * terms, factor=4)


@pytest.mark.parametrize("size, kernel", [(1600, 1500), (1100, 1000), (1600, 1000), (2_000_000, 1_900_000)])
def test_a_kernel_nearly_as_large_as_the_image(size, kernel):
    """Thousands of outputs, each a sum of a million taps, once took half a minute of processor time."""
    axes = 2 if size < 10_000 else 1
    x, weight = normal(1, 1, *(size,) * axes), normal(1, 1, *(kernel,) * axes)
    y = cupyconv.conv(x, weight)
    grad = normal(*y.shape)
    calls = [
        (cupyconv.conv, (x, weight)),
        (cupyconv.conv_grad_weight, (grad, x, weight.shape[2:])),
        (cupyconv.conv_grad_input, (grad, weight, x.shape)),
    ]
    results = []
    for function, arrays in calls:
        start = time.process_time()
        results.append(function(*arrays))
        assert time.process_time() - start < 4
        assert cupyconv.explain(function, *arrays).method == "fft"
    x, weight, grad = (array.reshape(array.shape[2:]).astype(np.float64) for array in (x, weight, grad))
    outputs, last = len(grad), len(weight) - 1

    def at(*index):
        return index[:axes]

    def run(first, count):
        return (slice(first, first + count),) * axes

    y, grad_weight, grad_x = (result[0, 0] for result in results)
    for place in (0, outputs // 3, outputs - 1):
        np.testing.assert_allclose(y[at(place, place)], (x[run(place, last + 1)] * weight).sum(), rtol=1e-3, atol=0.1)
    for place in (0, last // 3, last):
        np.testing.assert_allclose(
            grad_weight[at(place, place)], (x[run(place, outputs)] * grad).sum(), rtol=1e-3, atol=0.1
        )
    middle = size // 2
    first = max(0, middle - last)
    count = min(middle, outputs - 1) - first + 1
    reached = np.flip(weight[run(middle - first - count + 1, count)])
    np.testing.assert_allclose(
        grad_x[at(middle, middle)], (grad[run(first, count)] * reached).sum(), rtol=1e-3, atol=0.1
    )


@pytest.mark.parametrize("channels", [1, 40])
def test_infinities_under_a_kernel_that_is_cut(channels):
    """Windows of such an element are computed again, in as many taps at a time as fit.

    All windows of one pixel exceeded the limit, and the call was once refused.
    """
    x, weight = normal(1, channels, 40, 36), normal(1, channels, 33, 31)
    x[0, -1, 3, 4], weight[0, 0, 5, 6] = np.inf, 0
    grad = normal(1, 1, 8, 6)
    grad[0, 0, 2, 2] = np.nan
    calls = [
        (cupyconv.conv, (x, weight), reference.conv(x, weight)),
        (cupyconv.conv_grad_weight, (grad, x, (33, 31)), reference_gradients.conv_grad_weight(grad, x, (33, 31))),
    ]
    for function, arrays, expected in calls:
        for limit in (*(times * least_limit(function, *arrays) for times in (1, 3)), None):
            with cupyconv.options(workspace_limit=limit):
                actual = function(*arrays, method="fft")
            for kind in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(kind(actual), kind(expected))
            finite = np.isfinite(expected)
            np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("limit", [None, 2 << 20])
def test_it_takes_what_explain_says(threads, limit):
    calls = []
    for x, weight in ((normal(2, 2, 161, 147), normal(3, 2, 15, 15)), (normal(1, 12, 61, 47), normal(12, 12, 7, 7))):
        out = np.empty(cupyconv.conv(x, weight, padding="same").shape, np.float32)
        grad_x, grad_weight = np.empty_like(x), np.empty_like(weight)
        calls += [
            (cupyconv.conv, (x, weight, normal(len(weight))), dict(activation="relu", out=out)),
            (cupyconv.conv_grad_input, (out, weight, x.shape), dict(padding_mode="reflect", out=grad_x)),
            (cupyconv.conv_grad_weight, (out, x, weight.shape[2:]), dict(out=grad_weight)),
        ]
    for function, arrays, settings in calls:
        settings |= dict(padding="same", method="fft")
        with cupyconv.options(threads=threads, workspace_limit=limit):
            plan = cupyconv.explain(function, *arrays, **settings)
            function(*arrays, **settings)
            peak = peak_bytes(lambda: function(*arrays, **settings))  # noqa: B023
        assert peak <= plan.workspace_bytes + 200_000, plan  # and Python's objects
        assert limit is None or plan.workspace_bytes <= limit


# --- what a plan counts ---------------------------------------------------------------------------------------


def problem_of(x, weight, dtype="float32", threads=1, limit=16 << 20, **settings) -> Any:
    """The problem of a convolution, without arrays."""
    problem = checked_call(cupyconv.conv, array(*x, dtype=dtype), array(*weight, dtype=dtype), **settings).problem
    return replace(problem, machine=HostModel(threads), workspace_limit=limit)


#: Windows of convolutions with large kernels: size, kernel, settings.
WINDOWS = [
    ((90,), (60,), dict(padding=5)),
    ((300,), (41,), dict(padding=((0, 70),), stride=3, dilation=5)),
    ((40, 31), (29, 17), dict(padding=((30, 3), (0, 40)))),
    ((10,), (60,), dict(padding=((80, 0),))),
    ((44, 9), (17, 1), dict(padding=(5, 0), stride=(1, 2))),
    ((50, 9), (12, 7), dict(padding=((90, 70), (8, 9)), stride=(2, 3), dilation=(4, 1))),
    ((60, 9, 44), (13, 1, 17), dict(padding=(70, 0, 3), dilation=(3, 1, 1), stride=(1, 4, 2))),
    ((12, 64, 33), (5, 31, 19), dict(padding="full")),
]


@pytest.mark.parametrize("size, kernel, settings", WINDOWS, ids=str)
@pytest.mark.parametrize("mode", ["constant", "wrap"])
def test_tiles_that_are_only_padding_are_not_counted(mode, size, kernel, settings, monkeypatch):
    """Each block has one tile per part of the kernel, except for tiles that read only zero padding."""
    geometry = problem_of((5, 1, *size), (1, 1, *kernel), padding_mode=mode, **settings).geometry
    for seed in range(20):
        random = Random(seed)
        block = [random.randint(1, extent) for extent in (geometry.batch, *geometry.out_size)]
        taps = [random.randint(1, extent) for extent in geometry.kernel]
        per_axis, all_of_axis = [], []
        for axis, (own, part) in enumerate(zip(block[1:], taps)):
            stride, gap, before = geometry.stride[axis], geometry.dilation[axis], geometry.before[axis]
            firsts = [
                pixel * stride + tap * gap - before
                for pixel in range(0, geometry.out_size[axis], own)
                for tap in range(0, geometry.kernel[axis], part)
            ]
            length = (own - 1) * stride + (part - 1) * gap + 1
            per_axis.append(sum(-length < first < geometry.size[axis] for first in firsts))
            all_of_axis.append(len(firsts))
        samples = -(-geometry.batch // block[0])
        expected = samples * int(np.prod(per_axis if mode == "constant" else all_of_axis))
        assert spectra.tiles_read(geometry, block, taps) == expected
        with monkeypatch.context() as patch:
            patch.setattr(spectra, "COUNTED", 1)  # parts of an axis that are more than this are all counted
            every = [every if -(-n // part) > 1 else some for some, every, n, part in
                     zip(per_axis, all_of_axis, geometry.kernel, taps)]  # fmt: skip
            expected = samples * int(np.prod(every if mode == "constant" else all_of_axis))
            assert spectra.tiles_read(geometry, block, taps) == expected


@pytest.mark.parametrize("size, kernel, settings", [
    *WINDOWS, ((20_000,), (9973,), {}), ((20_000,), (7001,), dict(stride=3)), ((9973,), (811,), dict(dilation=7)),
    ((5000,), (4987,), {}), ((5000,), (4000,), dict(stride=7)), ((500, 400), (123, 397), dict(stride=(1, 2))),
], ids=str)  # fmt: skip
def test_candidates_of_parts_halve_a_tile_up_to_the_whole_convolution(size, kernel, settings):
    """Block and part fit the tile, and the part exceeds half of the tile only if the block is a whole axis."""
    geometry = problem_of((1, 1, *size), (1, 1, *kernel), **settings).geometry
    along, candidates = transformed_axes(geometry), list(islice(spectra.part_extents(geometry), 100))
    whole = tuple(tuple(sizes[axis] if axis in along else 1 for axis in range(3))
                  for sizes in (geometry.out_size, geometry.kernel))  # fmt: skip
    assert candidates[-1] == whole and whole not in candidates[:-1]
    longest = float(cost.SHORTEST)
    for extents, taps in candidates:
        longest *= spectra.LONGER
        for axis in range(3):
            stride, gap, reached = geometry.stride[axis], geometry.dilation[axis], geometry.reached[axis]
            own, part = extents[axis], (taps[axis] - 1) * gap + 1
            if axis not in along:
                assert own == part == 1
                continue
            length = reached if reached <= longest else next_fast_len(int(longest), True)
            assert (own - 1) * stride + part <= length
            assert part <= length // 2 or own == geometry.out_size[axis] or taps[axis] == 1
            assert part + gap > length // 4 or taps[axis] == geometry.kernel[axis]
            # One block less would not fit the tile.
            blocks = -(-geometry.out_size[axis] // own)
            assert blocks == 1 or (-(-geometry.out_size[axis] // (blocks - 1)) - 1) * stride + part > length


def test_a_kernel_is_cut_too_if_its_spectra_leave_little_memory():
    """A dilated kernel is cut if eight times the bytes of its elements, with zeros between taps, exceed the limit."""
    for dtype, item in (("float32", 4), ("float16", 4), ("float64", 8), ("complex64", 8)):
        nbytes = 8 * 6 * 3 * (13 * 21) * item
        settings = dict(groups=2, dilation=(3, 5), dtype=dtype)
        for limit, is_large in ((nbytes - 1, True), (nbytes, False)):
            problem = problem_of((1, 6, 60, 60), (6, 3, 5, 5), limit=limit, **settings)
            assert spectra.has_large_spectra(problem) is is_large


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels, outputs, groups", [(4, 8, 1), (12, 3, 1), (8, 8, 4), (1, 5, 1)])
def test_the_largest_share_that_fits_is_computed_at_a_time(channels, outputs, groups, threads):
    """A share is chosen at exactly the bytes that it needs, and its channels go one by one only if they have to."""
    problem = problem_of((1, channels, 20, 20), (outputs, channels // groups, 15, 15), threads=threads, groups=groups)
    geometry, fixed = problem.geometry, 100
    (tiling,) = fft.Fft.tilings(geometry)  # no smaller tile

    def needed(loop):
        return fixed + loop.spectra_bytes + max(loop.spectra_bytes, threads * loop.workspace)

    loops = [
        [fft.Fft(share, cut=cut, one_by_one=one, **tiling) for one in (False, True)]
        for share, cut in (share_problem(problem, range(own), range(each)) for own, each in share_sizes(geometry))
    ]
    limits = {needed(loop) for pair in loops for loop in pair}
    for limit in sorted(limits | {limit - 1 for limit in limits}):
        best = fft.best_cut(fft.Fft, problem, fixed, limit)
        fitting = [loop for pair in loops for loop in pair if needed(loop) <= limit]
        if not fitting:
            assert best == min(limits) == limit + 1
            continue
        assert best.first == fitting[0]
        own = fitting[0].geometry
        assert best.shares == -(-groups // own.groups) * -(-outputs // groups // own.group_outputs)
        assert best.seconds == best.shares * best.first.seconds


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("channels, outputs, size, step", [
    (2, 2, (60, 9), 17_011), (8, 3, (60, 9), 17_011), (8, 8, (60, 9), 17_011), (40, 1, (20, 3), 487)
])  # fmt: skip
def test_several_samples_are_computed_together_if_they_fit(channels, outputs, size, step, threads):
    """A block has as many samples as fit the limit and the cache, unless a thread would be without a block."""
    problem, fixed, seen = problem_of((8, channels, *size), (outputs, channels, 9, 1), threads=threads), 100, set()
    width = size[1]
    for limit in [*range(step, 80 * step, step), 40 << 20]:
        best = fft.best_cut(fft.Fft, problem, fixed, limit)
        if isinstance(best, int):
            assert best > limit
            continue
        first = best.first
        room = limit - fixed - first.spectra_bytes
        assert threads * first.workspace <= room and first.spectra_bytes <= room
        line = replace(first, block=(1, *first.block[1:3], 1))
        lines = first.block[0] * first.block[3]
        assert first.blocks >= threads and (lines == 1 or first.workspace <= spectra.BLOCK)
        if not first.one_by_one and not first.by_matrix:
            more = lines + 1 if first.block[3] < width else lines + width  # the next that parts could be of
            most = min(min(room // threads, spectra.BLOCK) // line.workspace, -(-line.blocks // threads))
            assert lines <= most and 2 * more > most
        seen.add((lines, first.one_by_one))
    assert len({lines for lines, _ in seen}) > 1


@pytest.mark.parametrize("limit, words", [
    (330_000, "shares of 2 groups"), (230_000, "shares of 2 outputs"), (80_000, "shares of 1 output")
])  # fmt: skip
def test_shares_take_as_often_what_the_first_one_takes(limit, words):
    """The estimates of all shares are those of the first one times their number, and the plan names their size."""
    x, weight = array(1, 4, 60, 60), array(8, 1, 31, 31)
    with cupyconv.options(workspace_limit=limit, threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, groups=4, method="fft")
    (loop,) = plan.steps
    for name in ("work", "calls", "turns", "flops", "blocks", "bytes_moved", "seconds"):
        assert getattr(loop, name) == loop.count * getattr(loop.first, name) > 0
    assert loop.count > 1 and loop.workspace == loop.first.workspace
    assert str(loop).endswith(f"repeated for {loop.count} {words}"), loop


def parts_of_tiles(x, weight, block, taps, one_by_one=False, dtype="float32", **settings):
    """A loop over parts of a kernel, and the arrays of a run on one thread."""
    images, kernels = np.round(normal(*x, dtype=dtype)), np.round(normal(*weight, dtype=dtype))
    if prologue := settings.get("prologue"):
        vector = np.ones(x[1], dtype)
        settings["prologue"] = vector, vector, prologue
    call = checked_call(cupyconv.conv, images, kernels, **settings)
    problem: Any = replace(call.problem, machine=HostModel(1))
    (result,) = call.results
    loop = FftParts(problem, block=block, taps=taps, one_by_one=one_by_one)
    return loop, {**call.arrays, "out": np.empty(result.shape, result.dtype)}


#: Shapes of x and weight, a block and taps of a part that divide them, and settings.
PARTS = {
    "plain": ((1, 3, 41, 41), (2, 3, 30, 30), (1, 1, 6, 4), (1, 10, 15), {}),
    "padding": ((1, 2, 20, 20), (3, 2, 18, 18), (1, 1, 10, 13), (1, 6, 9), dict(padding=((17, 19), (20, 21)))),
    "groups": ((2, 6, 41, 12), (4, 3, 30, 1), (2, 1, 6, 4), (1, 10, 1), dict(groups=2)),
    "samples, complex": ((6, 2, 41, 41), (2, 2, 30, 30), (3, 1, 12, 12), (1, 15, 10), dict(dtype="complex64")),
    "one by one": (
        (2, 5, 41, 41),
        (2, 5, 30, 30),
        (2, 1, 6, 12),
        (1, 15, 30),
        dict(one_by_one=True, activation="relu"),
    ),
    "a volume": ((2, 2, 12, 9, 20), (2, 2, 9, 3, 10), (1, 4, 7, 11), (3, 3, 5), dict(bias=True)),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_transforms_and_products_of_parts_are_counted(name, monkeypatch):
    """The estimates of time, calls and operations count the transforms and the products that a run computes."""
    x, weight, block, taps, settings = PARTS[name]
    settings = {key: normal(weight[0]) if key == "bias" else value for key, value in settings.items()}
    loop, arrays = parts_of_tiles(x, weight, block, taps, **settings)
    forward, kernels, back = Counter(), Counter(), Counter()
    tile, geometry, samples = loop.tile, loop.geometry, block[0]

    def spectrum(self, image, first, plain=spectra.Tile.spectrum):
        seen = kernels if first == 1 else forward
        seen.update(calls=1, images=int(np.prod(image.shape[:first])))
        return plain(self, image, first)

    def image(self, spectrum, first, wanted, plain=spectra.Tile.image):
        back.update(calls=1, images=int(np.prod(spectrum.shape[:first])))
        return plain(self, spectrum, first, wanted)

    monkeypatch.setattr(spectra.Tile, "spectrum", spectrum)
    monkeypatch.setattr(spectra.Tile, "image", image)
    loop.run(arrays)
    transforms = forward["images"] + kernels["images"] + back["images"]
    products = kernels["images"] * samples * int(np.prod(tile.frequencies))
    assert forward["calls"] >= loop.tiles and back["calls"] == loop.blocks
    # A product of complex numbers is four multiplications and additions of each.
    assert loop.flops == transforms * tile.flops * (1 if tile.is_real else 2) + 8 * products
    per_call = forward["calls"] / 2 + back["calls"], kernels["calls"]
    assert loop.calls == per_call[0] * cost.FFT_CALLS + per_call[1] * fft_parts.KERNEL_CALLS
    monkeypatch.setattr(cost, "fourier", lambda *given: 0.25)
    monkeypatch.setattr(cost, "complex_products", lambda elements, problem: 1000 * elements)
    monkeypatch.setattr(cost, "added", lambda elements, dtype: 1e12)
    stored = loop.work // 1e12
    assert stored == 1 + ("bias" in settings) + ("activation" in settings)
    slower = fft.ONE_BY_ONE if loop.one_by_one else 1
    assert loop.work - stored * 1e12 == pytest.approx(slower * (transforms / 4 + 1000 * products), abs=0.1)
    assert geometry.in_channels == loop.channels_at_once or loop.one_by_one


def test_of_parts_no_more_kernels_are_transformed_at_once_than_stay_in_cache():
    """Equal parts of an output's kernels are transformed together, or one kernel if channels go one by one."""
    for size, expected in (((120, 100), 12), ((500, 400), 1), ((300, 250), 2), ((300, 150), 3)):
        loop, _ = parts_of_tiles((1, 12, *size), (1, 12, 60, 60), (1, 1, *(n - 59 for n in size)), (1, 60, 60))
        spectrum = int(np.prod(loop.tile.frequencies)) * 8
        assert loop.kernels_at_once == expected
        assert expected == 1 or 3 * expected * spectrum <= spectra.BLOCK
        assert replace(loop, one_by_one=True).kernels_at_once == 1
    assert parts_of_tiles((1, 2, 60, 60), (1, 2, 30, 30), (1, 1, 31, 31), (1, 30, 30))[0].kernels_at_once == 2


@pytest.mark.parametrize("settings", [
    {}, dict(one_by_one=True), dict(activation="gelu"), dict(prologue="relu"), dict(dtype="complex64"),
    dict(dtype="float64", groups=2), dict(padding=20, padding_mode="wrap", prologue="relu"), dict(dtype="float16"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("samples, channels, outputs", [(1, 2, 2), (3, 2, 2), (1, 8, 2), (1, 2, 8)])
def test_parts_take_the_memory_that_they_say(samples, channels, outputs, settings):
    """A run allocates at most the bytes that the loop counts, and at least half of them."""
    settings = dict(settings)
    groups = settings.get("groups", 1)
    x, weight = (samples, channels, 200, 190), (outputs, channels // groups, 120, 100)
    loop, arrays = parts_of_tiles(x, weight, (samples, 1, 81, 91), (1, 60, 50), **settings)
    loop.run(arrays)
    cupyconv.clear_caches()
    peak = peak_bytes(lambda: loop.run(arrays))
    objects, arranged = 100_000, convolution.weight_copy(loop.problem)
    assert loop.workspace / 2 <= peak - arranged + objects and peak - arranged <= loop.workspace + objects


@pytest.mark.parametrize("channels, outputs, size, settings", [
    (1, 8, (200, 190), dict(activation="gelu")), (24, 1, (310, 310), dict(prologue="relu")),
    (24, 1, (310, 310), dict(padding=9, padding_mode="reflect")),
], ids=str)  # fmt: skip
def test_temporaries_of_parts_are_counted(channels, outputs, size, settings):
    """The temporary arrays of an activation, a prologue and a border fit the counted bytes if one part has few taps."""
    block = [n - 19 for n in size]
    loop, arrays = parts_of_tiles(
        (1, channels, *size), (outputs, channels, 20, 20), (1, 1, *block), (1, 10, 10), **settings
    )
    loop.run(arrays)
    cupyconv.clear_caches()
    assert loop.workspace / 2 <= peak_bytes(lambda: loop.run(arrays)) <= loop.workspace


def test_the_smallest_parts_are_of_one_sample_and_one_output():
    """The bytes that are returned if nothing fits are exactly enough for one sample and one output."""
    problem, fixed = problem_of((6, 2, 60, 50), (4, 2, 40, 31)), 100
    least = fft.best_cut(FftParts, problem, fixed, 1)
    best = fft.best_cut(FftParts, problem, fixed, least)
    assert best.shares == 4 and best.first.geometry.out_channels == best.first.block[0] == 1
    assert fft.best_cut(FftParts, problem, fixed, least - 1) == least


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_parts_are_added_up_however_few_kernels_are_transformed_at_once(one_by_one, groups, monkeypatch):
    """The result is the same for any number of kernels that are transformed together."""
    weight, settings = (4, 6 // groups, 8, 6), dict(groups=groups, padding=1)
    for nbytes, most in ((1, 1), (7000, 3), (1 << 21, 6)):
        monkeypatch.setattr(fft_parts, "BLOCK", nbytes)
        loop, arrays = parts_of_tiles((2, 6, 13, 12), weight, (2, 1, 4, 9), (1, 4, 3), one_by_one, **settings)
        assert loop.kernels_at_once == (1 if one_by_one and groups == 1 else min(most, 6 // groups))
        loop.run(arrays)
        expected = reference.conv(arrays["x"], arrays["weight"], **settings)
        np.testing.assert_allclose(arrays["out"], expected, rtol=1e-4, atol=1e-3)


def test_parts_without_channels_are_zeros():
    """Without input channels the result is zero, and no call is counted except those of the blocks."""
    loop, arrays = parts_of_tiles((1, 0, 41, 41), (2, 0, 30, 30), (1, 1, 6, 4), (1, 10, 15))
    loop.run(arrays)
    assert not arrays["out"].any() and loop.calls == loop.blocks * cost.FFT_CALLS and loop.workspace > 0


# --- accuracy -------------------------------------------------------------------------------------------------

SPREAD = {
    "normal": lambda rng, *shape: rng.standard_normal(shape),
    "positive": lambda rng, *shape: rng.random(shape),
    "constant": lambda rng, *shape: np.full(shape, 1 / 3),
    "of all sizes": lambda rng, *shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 8, shape),
}


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("x, weight", [
    ((2, 2, 5000), (2, 2, 101)), ((1, 1, 200, 200), (1, 1, 31, 31)), ((1, 8, 24, 24, 24), (8, 8, 5, 5, 5)),
])  # fmt: skip
def test_errors_are_bounded_by_the_largest_element(kind, x, weight):
    """Errors stay within the bound of the docstrings, relative to a float64 result."""
    rng = np.random.default_rng(0)
    x, weight = (SPREAD[kind](rng, *shape).astype(np.float32) for shape in (x, weight))
    exact = cupyconv.conv(x.astype(np.float64), weight.astype(np.float64), method="gemm")
    error = abs(cupyconv.conv(x, weight, method="fft") - exact).max()
    assert 0 < error <= 2e-6 * abs(x).max() * abs(weight.astype(np.float64)).sum((1, *range(2, weight.ndim))).max()


# --- infinities and NaN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels", [1, 12])
def test_infinities_and_nan_are_where_the_definition_puts_them(channels, threads):
    x, weight, grad = normal(2, channels, 60, 60), normal(channels, channels, 5, 5), normal(2, channels, 60, 60, seed=3)
    x[0, 0, 10, 10], x[1, -1, 50, 0], x[0, 0, 30, 7] = np.inf, np.nan, -np.inf
    grad[1, 0, 31, 31] = np.inf
    weight[0, 0, 2, 3] = 0
    symmetric = dict(padding=2, padding_mode="symmetric")
    calls = [
        (cupyconv.conv, (x, weight), dict(padding=2)),
        (cupyconv.conv_grad_input, (grad, weight, x.shape), symmetric),
        (cupyconv.conv_grad_weight, (grad, x, (5, 5)), dict(padding=2)),
    ]
    for function, arrays, settings in calls:
        with cupyconv.options(threads=threads):
            actual = function(*arrays, method="fft", **settings)
            plain = function(*arrays, method="gemm", **settings)
            assert "are recomputed" in str(cupyconv.explain(function, *arrays, method="fft", **settings))
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(actual), kind(plain))
        finite = np.isfinite(plain)
        np.testing.assert_allclose(
            actual[finite], plain[finite], rtol=1e-3, atol=1e-4 * abs(plain[finite]).max(initial=0)
        )
        assert not finite.all()


def test_a_block_that_would_take_too_long_is_left_as_it_is(monkeypatch):
    for module in (fft, fft_scattered, fft_weight_gradient):
        monkeypatch.setattr(module, "MAX_PRODUCTS", 1000)
    forget_calls()
    x, weight = normal(1, 1, 300, 30), normal(1, 1, 3, 3)
    x[0, 0, 5, 5] = np.nan
    with cupyconv.options(workspace_limit=30_000):
        plan = cupyconv.explain(cupyconv.conv, x, weight, method="fft")
        y = cupyconv.conv(x, weight, method="fft")
    assert "are not recomputed" in str(plan) and np.isnan(y).sum() > 9 and np.isfinite(y[:, :, 200:]).all()
    forget_calls()


# --- the choice -----------------------------------------------------------------------------------------------


def test_auto_takes_it_for_large_kernels_unless_it_is_forbidden():
    image, kernel, small = normal(1, 1, 400, 400), normal(1, 1, 31, 31), normal(1, 1, 3, 3)
    symmetric = dict(padding=15, padding_mode="symmetric")
    calls = [
        (cupyconv.conv, (image, kernel), dict(padding="same")),
        (cupyconv.conv_grad_input, (image, kernel, image.shape), dict(padding="same")),
        (cupyconv.conv_grad_input, (image, kernel, image.shape), symmetric),
        (cupyconv.conv_grad_weight, (image, image, (31, 31)), symmetric),
        (cupyconv.conv_transpose, (image, kernel), {}),
    ]
    for function, arrays, settings in calls:
        plan = cupyconv.explain(function, *arrays, **settings)
        assert plan.method == "fft" and "rounding errors" in plan.reason
        with cupyconv.options(allow_fft=False):
            assert cupyconv.explain(function, *arrays, **settings).method != "fft"
            with pytest.raises(ValueError, match=r"'fft' does not apply: .*allow_fft=False"):
                cupyconv.explain(function, *arrays, method="fft", **settings)
    plan = cupyconv.explain(cupyconv.conv, image, small)
    assert plan.method != "fft" and "estimated " in dict(plan.rejected)["fft"]


def test_integers_are_exact_where_it_is_forbidden():
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((1, 1, 300, 300), (1, 1, 31, 31)))
    exact = cupyconv.conv(x.astype(np.float64), weight.astype(np.float64), method="gemm")
    assert (cupyconv.conv(x, weight) != exact).any()
    with cupyconv.options(allow_fft=False):
        assert (cupyconv.conv(x, weight) == exact).all()


def test_a_kernel_of_one_tap_is_refused():
    with pytest.raises(ValueError, match="method 'fft' does not apply: only for kernels of several taps"):
        cupyconv.conv(normal(1, 4, 9, 9), normal(4, 4, 1, 1), method="fft")


def test_a_chain_is_fused_without_it():
    """Layers of a chain use transforms as a whole, or are computed tile by tile with other methods."""
    x, layers = normal(1, 4, 30, 31), [cupyconv.ConvLayer(normal(4, 4, 9, 9), padding="same")] * 2
    expected = reference.conv(reference.conv(x, layers[0].weight, padding="same"), layers[1].weight, padding="same")
    for fuse in (True, False):
        actual = cupyconv.conv_chain(x, layers, fuse=fuse)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())
