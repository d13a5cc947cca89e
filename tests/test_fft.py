"""The method "fft" on NumPy: its results, its errors, how it divides work, and when it is chosen."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import reference
import reference_gradients
from fft_cases import CASES, DTYPES, MIXED, normal
from peak_memory import peak_bytes
from tolerance import assert_close

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import fft, fft_scattered, fft_weight_gradient
from cupyconv.problem.problems import NotApplicable


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
