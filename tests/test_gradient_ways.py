"""Gradient implementations on NumPy that no other test forces: interleaved phases, exchanged factors, rows and runs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import reference_gradients
from integer_arrays import integers
from peak_memory import peak_bytes
from tolerance import assert_exact

import cupyconv
from cupyconv.numpy import interleaved, transposed, weight_channels, weight_gradient, weight_sums
from cupyconv.numpy.backend import cached_scratch
from cupyconv.numpy.convolution import CACHE_BLOCK
from cupyconv.numpy.interleaved import InterleavedLoop
from cupyconv.numpy.weight_channels import GradientChannels
from cupyconv.numpy.weight_exchanged import ExchangedLoops
from cupyconv.numpy.weight_rows import GradientRows
from cupyconv.problem import caches
from cupyconv.problem.problems import NotApplicable


def refused(*_):
    raise NotApplicable("not in this test")


# --- phases as outputs of one convolution ---------------------------------------------------------------------


@pytest.fixture
def as_outputs(fresh, monkeypatch):
    """Plan every strided gradient with its phases as the outputs of one convolution, if that is possible."""
    monkeypatch.setattr(transposed, "plan_gathered", refused)
    monkeypatch.setattr(transposed.cost, "least_scattered", lambda problem: float("inf"))
    monkeypatch.setattr(interleaved, "MAX_ZEROS", float("inf"))


def is_interleaved(plan) -> bool:
    return all(isinstance(loop, InterleavedLoop) for step in plan.steps for loop in getattr(step, "loops", [step]))


STRIDED = {
    "as many taps": ((2, 4, 9, 8), (6, 4, 4, 2), dict(stride=2, padding=1)),
    "fewer taps": ((2, 4, 10, 9), (6, 4, 3, 3), dict(stride=2, padding=1)),
    "a phase a window later": ((1, 2, 23, 21), (3, 2, 11, 7), dict(stride=4, padding=[(5, 2), (0, 3)])),
    "along one axis": ((2, 4, 9, 8), (6, 4, 3, 3), dict(stride=(1, 3), padding=1, dilation=(2, 1))),
    "no padding, elements that are not read": ((1, 3, 12, 11), (4, 3, 3, 3), dict(stride=2)),
    "depthwise": ((2, 6, 14, 13), (6, 1, 5, 5), dict(stride=2, padding=2, groups=6)),
    "groups": ((2, 8, 11, 10), (4, 4, 3, 3), dict(stride=2, padding=1, groups=2)),
    "1-D": ((2, 4, 41), (6, 4, 15), dict(stride=4, padding=[(7, 4)])),
    "3-D": ((1, 3, 7, 6, 5), (4, 3, 3, 3, 3), dict(stride=2, padding=1)),
    "fewer elements than the stride": ((2, 2, 3, 9), (3, 2, 11, 11), dict(stride=4, padding=[(6, 6), (5, 5)])),
    "much padding": ((1, 2, 6, 6), (2, 2, 3, 3), dict(stride=2, padding=4)),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "float16"])
@pytest.mark.parametrize("shape, kernel, window", STRIDED.values(), ids=STRIDED.keys())
def test_phases_are_outputs(shape, kernel, window, dtype, as_outputs):
    weight = integers(*kernel, dtype=dtype)
    out = cupyconv.conv(np.zeros(shape, dtype), weight, **window).shape
    grad = integers(*out, dtype=dtype, seed=1)
    expected = reference_gradients.conv_grad_input(grad, weight, shape, **window)
    for limit in (None, 30_000):
        with cupyconv.options(workspace_limit=limit, threads=2, allow_winograd=False):
            plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, shape, **window)
            assert is_interleaved(plan) or limit
            assert limit is None or plan.workspace_bytes <= limit
            assert_exact(cupyconv.conv_grad_input(grad, weight, shape, **window), expected, dtype)


def test_phases_of_several_inputs_and_in_any_layout(as_outputs):
    shapes, weight = [(2, 3, 9, 10), (2, 5, 9, 10)], integers(4, 8, 3, 3)
    grad, window = integers(2, 4, 5, 5, seed=1), dict(stride=2, padding=1)
    expected = reference_gradients.conv_grad_input(grad, weight, shapes, **window)
    assert is_interleaved(cupyconv.explain(cupyconv.conv_grad_input, grad, weight, shapes, **window))
    channels_last = np.ascontiguousarray(np.moveaxis(grad, 1, -1))
    for own in (grad, np.moveaxis(channels_last, -1, 1)):
        for actual, one in zip(cupyconv.conv_grad_input(own, weight, shapes, **window), expected, strict=True):
            assert_exact(actual, one, "float32")


def test_phases_with_an_epilogue(as_outputs):
    x, weight, bias = integers(2, 4, 5, 6), integers(4, 3, 3, 3), integers(3)
    window = dict(stride=2, padding=1, output_padding=1, activation="silu")
    y = cupyconv.conv_transpose(x, weight, bias, **window)
    np.testing.assert_allclose(y, reference_gradients.conv_transpose(x, weight, bias, **window), rtol=1e-5, atol=1e-5)
    result, pullback = cupyconv.vjp(cupyconv.conv_transpose, x, weight, bias, **window)
    np.testing.assert_array_equal(result, y)
    expected = reference_gradients.conv_transpose_gradients(y, x, weight, bias, **window)
    for actual, one in zip(pullback(y)[:3], (expected.x, expected.weight, expected.bias), strict=True):
        np.testing.assert_allclose(actual, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("where", ["grad", "weight"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_lands_where_the_definition_puts_it(where, value, as_outputs):
    shape, weight, grad = (1, 4, 9, 9), integers(4, 4, 3, 3), integers(1, 4, 5, 5, seed=1)
    (grad if where == "grad" else weight)[0, 1, 2, 1] = value
    window = dict(stride=2, padding=1)
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_input(grad, weight, shape, **window)
    assert 0 < np.isfinite(expected).sum() < expected.size
    np.testing.assert_array_equal(cupyconv.conv_grad_input(grad, weight, shape, **window), expected)


@pytest.mark.parametrize("shape, kernel, settings", [
    ((2, 144, 56, 56), (144, 1, 3, 3), dict(stride=2, padding=1, groups=144)),
    ((1, 96, 56, 56), (96, 1, 5, 5), dict(stride=2, padding=2, groups=96)),
    ((8, 240, 14, 14), (240, 1, 5, 5), dict(stride=2, padding=2, groups=240)),
    ((2, 128, 28, 28), (128, 4, 3, 3), dict(stride=2, padding=1, groups=32)),
    ((1, 3, 224, 224), (64, 3, 11, 11), dict(stride=4, padding=5)),
])  # fmt: skip
def test_where_phases_were_measured_to_be_best_as_outputs(shape, kernel, settings):
    """Outputs were 1.2 to 2.1 times as fast as a convolution per phase, and as products that are added."""
    grad = cupyconv.conv(np.zeros(shape, np.float32), np.zeros(kernel, np.float32), **settings)
    with cupyconv.options(threads=2):
        plan = cupyconv.explain(cupyconv.conv_grad_input, grad, np.zeros(kernel, np.float32), shape, **settings)
    assert is_interleaved(plan), plan


# --- the weight's gradient ------------------------------------------------------------------------------------


def only(monkeypatch, *implementations):
    monkeypatch.setitem(
        weight_gradient.METHODS, "gemm", weight_gradient.METHODS["gemm"]._replace(implementations=implementations)
    )


def loops_of(plan):
    """Return the plan's loops; if factors are exchanged, the loops of the exchanged gradient."""
    return [loop for step in plan.steps for loop in (step.loops if isinstance(step, ExchangedLoops) else [step])]


WEIGHTS = {
    "2-D": ((3, 2, 17, 19), (4, 2, 3, 3), dict(padding=1)),
    "strides": ((2, 3, 20, 15), (4, 3, 5, 3), dict(stride=(2, 3), padding=2)),
    "3-D": ((2, 2, 6, 7, 8), (3, 2, 3, 3, 2), dict(padding=1)),
    "rows along the height alone": ((2, 4, 12, 9), (4, 2, 3, 1), dict(groups=2)),
    "a dilated width": ((2, 3, 12, 19), (4, 3, 2, 3), dict(dilation=(1, 3), padding=2)),
    "reflected": ((2, 3, 12, 13), (4, 3, 3, 3), dict(padding=1, padding_mode="reflect")),
}


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
@pytest.mark.parametrize("shape, kernel, window", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_products_of_rows(shape, kernel, window, dtype, fresh, monkeypatch):
    only(monkeypatch, GradientRows, weight_gradient.GradientColumns)
    x = integers(*shape, dtype=dtype)
    out = cupyconv.conv(x, np.zeros(kernel, dtype), **window).shape
    grad = integers(*out, dtype=dtype, seed=1)
    if dtype == "float32":
        only(monkeypatch, GradientRows)
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], method="gemm", **window)
        assert all(step.name == "MEC rows" for step in plan.steps), plan
    expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window)
    for limit in (None, 20_000):
        with cupyconv.options(workspace_limit=limit, threads=2):
            actual = cupyconv.conv_grad_weight(grad, x, kernel[2:], method="gemm", **window)
        assert_exact(actual, expected, dtype)


CHANNELS = WEIGHTS | {
    "more groups than one at a time": ((2, 24, 9, 10), (12, 2, 3, 3), dict(padding=1, groups=12)),
    "some channels of a group": ((2, 10, 9, 10), (8, 5, 5, 3), dict(padding=2, groups=2)),
    "1-D": ((2, 7, 60), (3, 7, 9), dict(padding=[(8, 0)])),
    "one tap": ((3, 6, 20, 20), (5, 6, 1, 1), dict(stride=2)),
}

TALL = {
    "one product": ((1, 6, 20, 20), (40, 6, 1, 1), dict(stride=2), True),
    "several blocks": ((2, 4, 80, 70), (16, 4, 1, 1), dict(stride=2), False),
    "groups": ((2, 8, 21, 20), (64, 2, 3, 1), dict(stride=(1, 2), groups=4), True),
    "some channels of a group": ((2, 10, 9, 10), (160, 5, 3, 3), dict(padding=2, groups=2), True),
    "1-D, dilated": ((2, 4, 60), (40, 4, 3), dict(padding=4, dilation=3), True),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape, kernel, window", CHANNELS.values(), ids=CHANNELS.keys())
def test_some_channels_at_a_time(shape, kernel, window, dtype, fresh, monkeypatch):
    """Several inputs, a gradient that is copied once or read in place, and a result in any order are right."""
    only(monkeypatch, GradientChannels)
    monkeypatch.setattr(weight_channels, "LONE_SAMPLE", 150)
    x = integers(*shape, dtype=dtype)
    grad = integers(*cupyconv.conv(x, np.zeros(kernel, dtype), **window).shape, dtype=dtype, seed=1)
    expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window)
    xs = [x[:, :1], x[:, 1:]]
    out = np.empty((*kernel[:-1], 2 * kernel[-1]), dtype)[..., ::2]
    for threads, limit in ((1, None), (2, None), (2, 120_000), (2, 50_000)):
        with cupyconv.options(workspace_limit=limit, threads=threads):
            plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], method="gemm", **window)
            assert all(loop.name == "channels" for loop in loops_of(plan))
            assert limit is None or plan.workspace_bytes <= limit
            for images, place in ((x, None), (xs, out)):
                actual = cupyconv.conv_grad_weight(grad, images, kernel[2:], method="gemm", out=place, **window)
                assert_exact(actual, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape, kernel, window, is_one", TALL.values(), ids=TALL.keys())
def test_a_tall_product_is_written_where_the_result_lies(shape, kernel, window, is_one, dtype, fresh, monkeypatch):
    """This requires the sums' dtype and order; the result may be NaN before."""
    only(monkeypatch, GradientChannels)
    monkeypatch.setattr(weight_gradient, "plan_exchanged", refused)
    x = integers(*shape, dtype=dtype)
    grad = integers(*cupyconv.conv(x, np.zeros(kernel, dtype), **window).shape, dtype=dtype, seed=1)
    expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window)
    outs = [np.full(kernel, np.nan, dtype), np.full((*kernel[:-1], 2 * kernel[-1]), np.nan, dtype)[..., ::2]]
    for threads, limit, out in product((1, 2), (None, 1 << 18), outs):
        with cupyconv.options(workspace_limit=limit, threads=threads):
            settings = dict(window, method="gemm", out=out)
            plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], **settings)
            actual = cupyconv.conv_grad_weight(grad, x, kernel[2:], **settings)
        is_result = is_one and out.flags.c_contiguous and dtype != "float16"
        assert limit or [step.in_place for step in plan.steps] == [is_result], plan
        assert limit is None or plan.workspace_bytes <= limit
        assert_exact(actual, expected, dtype)


@pytest.mark.parametrize("outputs", [4096, 200])
@pytest.mark.parametrize("channels, side, kernel", [(512, 30, 3), (300, 50, 5), (4096, 36, 1)])
def test_columns_of_some_channels_stay_in_cache(channels, side, kernel, outputs, fresh, monkeypatch):
    """Shares have as many channels as fit the cache; sums and a product count too if they are not the result."""
    only(monkeypatch, GradientChannels)
    monkeypatch.setattr(weight_gradient, "plan_exchanged", refused)
    x, grad = (np.zeros((1, n, size, size), np.float32) for n, size in ((channels, side), (outputs, side // 2)))
    with cupyconv.options(threads=1):
        settings = dict(stride=2, padding=kernel // 2, method="gemm")
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, **settings).steps
    rows = (side // 2) ** 2 + (0 if loop.in_place else 2 * outputs)
    assert loop.in_place == (outputs > 1000) and loop.shares > 1
    assert CACHE_BLOCK < loop.channels * kernel**2 * rows * x.itemsize <= 2 * CACHE_BLOCK


def test_threads_have_as_many_channels_of_a_tall_product(fresh):
    """As one product by one thread, transposed back to the result, a strided one-tap layer took 3.5 times as long."""
    x, grad = np.zeros((1, 512, 28, 28), np.float32), np.zeros((1, 1024, 14, 14), np.float32)
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 1, stride=2).steps
    assert (loop.name, loop.in_place, loop.shares, loop.threads) == ("channels", True, 2, 2)


@pytest.mark.parametrize("size", [(33, 35), (34, 45)])
def test_a_thousand_pixels_and_some_more_are_one_product(size, fresh):
    """In two products whose sums were added, it took 1.3 times as long."""
    x, grad = np.zeros((1, 24, *size)), np.zeros((1, 40, *size))
    with cupyconv.options(threads=2):
        (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1).steps
    assert (loop.name, loop.blocks, loop.threads) == ("channels", 1, 2)


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("channels", [37, 40, 42, 100])
def test_threads_have_as_many_shares_of_channels(channels, threads, fresh, monkeypatch):
    """With three shares on two threads, one thread waited for half of the time."""
    only(monkeypatch, GradientChannels)
    x, grad = np.zeros((5, channels, 41, 37), np.float32), np.zeros((5, 64, 21, 19), np.float32)
    with cupyconv.options(threads=threads):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 5, stride=2, padding=2, method="gemm")
        (loop,) = plan.steps
    rounds = -(-loop.shares // threads)
    assert loop.shares == -(-channels // loop.channels) and loop.threads == threads
    assert rounds * loop.channels * threads < channels + rounds * threads, loop


@pytest.mark.parametrize("shape, kernel, block", [
    ((4, 3, 224, 224), (64, 3, 7, 7), 2 << 20),
    ((2, 64, 56, 56), (128, 64, 5, 5), 8 << 20),  # blocks of the fewest pixels with which a product is fast
])  # fmt: skip
def test_columns_stay_in_cache_until_their_product_is_done(shape, kernel, block, fresh, monkeypatch):
    """Columns of half an image, multiplied at once, left the cache: the first layer then took 1.2 times as long."""
    only(monkeypatch, weight_gradient.GradientColumns)
    x = np.zeros(shape, np.float32)
    window = dict(stride=2, padding=kernel[2] // 2)
    grad = cupyconv.conv(x, np.zeros(kernel, np.float32), **window)
    for threads in (1, 2):  # a requested single thread leaves products to BLAS, which divides long ones
        with cupyconv.options(threads=threads):
            (loop,) = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], method="gemm", **window).steps
        columns, pixels = np.prod(kernel[1:]) * np.prod(loop.block) * x.itemsize, np.prod(loop.block)
        is_long = threads == 1 and block == 2 << 20
        assert (columns > 4 << 20) if is_long else columns <= block, loop
        assert pixels >= weight_gradient.LONG_SUM // 2, loop


@pytest.mark.parametrize("shape", [(8, 64, 56, 56), (8, 128, 28, 28), (8, 256, 14, 14)])
def test_with_little_memory_some_channels_at_a_time_were_measured_to_be_best(shape):
    """They were 1.9 to 3 times as fast as implementations whose sums cover the whole weight."""
    x, grad = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    with cupyconv.options(threads=2, workspace_limit=1 << 20):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1)
    assert [step.name for step in plan.steps] == ["channels"], plan


EXCHANGED = {
    "2-D": ((2, 8, 12, 13), (2, 8, 3, 3), dict(padding=1)),
    "no padding": ((2, 8, 12, 13), (2, 8, 3, 4), {}),
    "full": ((2, 8, 12, 13), (2, 8, 3, 4), dict(padding="full")),
    "sides": ((2, 8, 12, 13), (3, 8, 3, 4), dict(padding=[(2, 0), (1, 3)])),
    "dilation": ((2, 8, 12, 13), (2, 8, 3, 3), dict(padding=[(4, 1), (0, 2)], dilation=2)),
    "groups": ((2, 12, 12, 13), (4, 6, 3, 3), dict(padding=1, groups=2)),
    "1-D": ((3, 6, 40), (1, 6, 5), dict(padding=2)),
    "3-D": ((1, 6, 5, 6, 7), (2, 6, 3, 1, 3), dict(padding=[(1, 1), (0, 0), (1, 1)])),
}


@pytest.fixture
def exchanges(fresh, monkeypatch):
    """Exchange factors wherever that is possible."""
    monkeypatch.setattr(ExchangedLoops, "seconds", 0.0)


def is_exchanged(plan) -> bool:
    return all(isinstance(step, ExchangedLoops) for step in plan.steps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, kernel, window", EXCHANGED.values(), ids=EXCHANGED.keys())
def test_factors_exchanged(shape, kernel, window, dtype, exchanges):
    x = integers(*shape, dtype=dtype)
    grad = integers(*cupyconv.conv(x, np.zeros(kernel, dtype), **window).shape, dtype=dtype, seed=1)
    assert is_exchanged(cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], **window))
    expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window)
    assert_exact(cupyconv.conv_grad_weight(grad, x, kernel[2:], **window), expected, dtype)
    strided = np.empty((*kernel[:-1], 2 * kernel[-1]), dtype)[..., ::2]
    assert_exact(cupyconv.conv_grad_weight(grad, x, kernel[2:], out=strided, **window), expected, dtype)


@pytest.mark.parametrize("shape, kernel, window", [
    ((1, 8, 9, 9), (2, 8, 3, 3), dict(padding=3)),  # some windows read only padding
    ((1, 8, 1, 9), (2, 8, 2, 3), dict(padding=[(1, 1), (1, 1)], dilation=(2, 1))),  # the same, around the image
    ((1, 8, 9, 9), (2, 8, 3, 3), dict(padding=1, stride=2)),
    ((1, 8, 9, 9), (2, 8, 3, 3), dict(padding=1, padding_mode="wrap")),
])  # fmt: skip
def test_what_cannot_be_exchanged_is_not(shape, kernel, window, exchanges):
    x = integers(*shape)
    grad = integers(*cupyconv.conv(x, np.zeros(kernel, np.float32), **window).shape, seed=1)
    assert not is_exchanged(cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], **window))
    grad[0, 0, 0, 0] = np.inf
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window)
    np.testing.assert_array_equal(cupyconv.conv_grad_weight(grad, x, kernel[2:], **window), expected)


@pytest.mark.parametrize("where", ["grad", "x"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_factors_that_are_not_finite_are_not_exchanged(where, value, exchanges):
    x, grad = integers(1, 8, 9, 9), integers(1, 2, 9, 9, seed=1)
    (grad if where == "grad" else x)[0, 1, 0, 3] = value
    assert is_exchanged(cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 3, padding=1))
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_weight(grad, x, (3, 3), padding=1)
    np.testing.assert_array_equal(cupyconv.conv_grad_weight(grad, x, 3, padding=1), expected)


@pytest.mark.parametrize("outputs, columns, pixels", [(1, 1, 100_000), (16, 27, 3000), (3, 9, 70_000), (30, 32, 5000)])
def test_products_of_few_elements_let_other_threads_run(outputs, columns, pixels):
    """NumPy holds the GIL in a product of 500 elements or fewer; several products at a time have more elements."""
    run = weight_sums.pixels_of_run(outputs, columns, pixels)
    assert run and pixels // run * outputs * columns > weight_sums.HELD
    assert run * outputs * columns <= 1_000_000, "BLAS packs its operands"


@pytest.mark.parametrize("outputs, columns, pixels", [(31, 31, 5000), (1, 1, 500), (16, 27, 200), (0, 9, 5000)])
def test_long_and_short_products_have_no_runs(outputs, columns, pixels):
    assert weight_sums.pixels_of_run(outputs, columns, pixels) == 0


@pytest.mark.parametrize("method, shape, kernel, window", [
    ("gemm", (1, 1, 130, 131), (1, 1, 3, 3), dict(padding=1)),
    ("gemm", (2, 3, 40, 41), (5, 3, 3, 3), {}),
    ("gemm", (2, 6, 80, 81), (6, 2, 3, 3), dict(groups=3, stride=(1, 2))),
    ("gemm", (2, 3, 80, 81), (5, 3, 1, 1), {}),
    ("direct", (2, 3, 40, 41), (5, 3, 3, 3), {}),
])  # fmt: skip
def test_sums_of_runs(method, shape, kernel, window, fresh, monkeypatch):
    implementations = (
        weight_gradient.GradientView,
        weight_gradient.GradientMecProducts,
        weight_gradient.GradientColumns,
    )
    only(monkeypatch, *implementations)
    x, called = integers(*shape), []
    own = weight_sums.WeightRun._add_runs
    monkeypatch.setattr(weight_sums.WeightRun, "_add_runs", lambda *args: called.append(1) or own(*args))
    grad = integers(*cupyconv.conv(x, np.zeros(kernel, np.float32), **window).shape, seed=1)
    with cupyconv.options(threads=1):  # one thread accumulates block by block
        actual = cupyconv.conv_grad_weight(grad, x, kernel[2:], method=method, **window)
    assert called
    assert_exact(actual, reference_gradients.conv_grad_weight(grad, x, kernel[2:], **window), "float32")


CALLS = {
    "phases": (cupyconv.conv_grad_input, (1, 24, 32, 32), (24, 1, 5, 5), dict(stride=2, padding=2, groups=24)),
    "rows": (cupyconv.conv_grad_weight, (2, 3, 64, 64), (8, 3, 3, 3), dict(padding=1)),
    "exchanged": (cupyconv.conv_grad_weight, (2, 32, 64, 64), (2, 32, 3, 3), dict(padding=1)),
    "runs": (cupyconv.conv_grad_weight, (1, 1, 100_000), (1, 1, 9), dict(padding=4)),
    "tall": (cupyconv.conv_grad_weight, (1, 128, 28, 28), (256, 128, 1, 1), dict(stride=2)),
}


@pytest.mark.parametrize("limit", [None, 300_000])
@pytest.mark.parametrize("function, shape, kernel, window", CALLS.values(), ids=CALLS.keys())
def test_memory_keeps_within_what_explain_says(function, shape, kernel, window, limit):
    x, weight = integers(*shape), integers(*kernel)
    grad = cupyconv.conv(x, weight, **window)
    is_input = function is cupyconv.conv_grad_input
    arguments = (grad, weight, shape) if is_input else (grad, x, kernel[2:])
    out = np.empty(shape if is_input else kernel, np.float32)
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = cupyconv.explain(function, *arguments, out=out, **window)
        call = partial(function, *arguments, out=out, **window)
        call()
        cached_scratch(np.dtype("float32"))._give_back()
        python_objects = 100_000
        assert peak_bytes(call) <= plan.workspace_bytes + python_objects
    assert limit is None or plan.workspace_bytes <= limit


@pytest.mark.parametrize("implementation, shape, kernel", [
    ("columns", (4, 3, 96, 96), (16, 3, 7, 7)),
    ("channels", (4, 64, 17, 17), (64, 64, 7, 1)),
    ("MEC rows", (2, 3, 64, 64), (8, 3, 3, 3)),
    ("taps", (2, 32, 40, 40), (32, 32, 3, 3)),
])  # fmt: skip
def test_what_a_gradient_writes_beside_its_result_stays(implementation, shape, kernel, fresh, monkeypatch):
    """The next call writes to the same memory; after the memory was released, a call allocates it again."""
    implementations = {each.name: each for each in (weight_gradient.GradientColumns, GradientChannels, GradientRows)}
    implementations["taps"] = weight_gradient.GradientTaps
    only(monkeypatch, implementations[implementation])
    x, method, stride = (
        integers(*shape),
        "direct" if implementation == "taps" else "gemm",
        1 + (implementation == "columns"),
    )
    grad = cupyconv.conv(x, np.zeros(kernel, np.float32), stride=stride)
    out, python_objects = np.empty(kernel, np.float32), 100_000
    call = partial(cupyconv.conv_grad_weight, grad, x, kernel[2:], stride=stride, method=method, out=out)
    with cupyconv.options(threads=1):  # with two threads, another one may have done the work before
        call()
        assert peak_bytes(call) <= python_objects
        cached_scratch(np.dtype("float32"))._give_back()
        assert peak_bytes(call) > 2 * python_objects
    assert_exact(out, reference_gradients.conv_grad_weight(grad, x, kernel[2:], stride=stride), "float32")


def test_where_much_is_kept_already_what_a_gradient_writes_is_of_one_call(fresh, monkeypatch):
    """The memory leaves a part of the budget to others, and stays within what `explain` reports."""
    only(monkeypatch, weight_gradient.GradientColumns)
    x = integers(4, 3, 96, 96)
    grad = cupyconv.conv(x, np.zeros((16, 3, 7, 7), np.float32))
    out, python_objects = np.empty((16, 3, 7, 7), np.float32), 100_000
    call = partial(cupyconv.conv_grad_weight, grad, x, 7, method="gemm", out=out)
    others = caches.BUDGET - weight_sums.CACHED_BLOCKS
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, 7, method="gemm", out=out)
        call()
        cupyconv.clear_caches()
        assert caches.reserve(others)
        try:
            call()
            assert caches.spent() < others + python_objects
            assert 2 * python_objects < peak_bytes(call) <= plan.workspace_bytes + python_objects
        finally:
            caches.release(others)
    assert_exact(out, reference_gradients.conv_grad_weight(grad, x, (7, 7)), "float32")


def test_memory_that_gradients_keep_is_a_part_of_the_budget(fresh):
    """Other caches use the rest of the budget, and may use some of this part too."""
    cupyconv.clear_caches()
    dtype, most = np.dtype("float32"), weight_sums.CACHED_BLOCKS

    def is_kept(nbytes: int) -> bool:
        return weight_sums.memory_of_run(dtype, nbytes, 1) is cached_scratch(dtype)

    assert is_kept(most) and not is_kept(most + 1)
    others = caches.BUDGET - most - caches.spent() - 1000
    assert others > most and caches.reserve(others)
    try:
        assert is_kept(1000) and not is_kept(1001)
    finally:
        caches.release(others)


def test_phases_of_an_image_that_is_not_finite_take_no_more():
    """The fallback without zeros between the taps is planned within the memory of the phases."""
    x, weight = np.ones((1, 5, 33, 45), np.float32), np.ones((5, 9, 3, 14), np.float32)
    x[0, 0, 3, 3], settings = np.nan, dict(stride=3, padding=((1, 2), (4, 12)), method="gemm")
    out = cupyconv.conv_transpose(x, weight, **settings)  # the first call also imports what it needs
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, out=out, **settings)
        assert isinstance(plan.steps[0], transposed.FiniteWeight)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv_transpose(x, weight, out=out, **settings))
    assert np.isfinite(out).any() and np.isnan(out).any()
    assert peak <= plan.workspace_bytes + 200_000


@pytest.mark.parametrize("shape, outputs", [((7, 102, 32, 32), 30), ((1, 256, 12, 12), 8)])
def test_exchanged_factors_that_are_not_finite_take_no_more(shape, outputs, exchanges):
    """The fallback by the definition is planned within the memory of the first choice, also for a large result."""
    x, grad = np.ones(shape, np.float32), np.ones((shape[0], outputs, *shape[2:]), np.float32)
    x[0, 0, 3, 3], out = np.nan, np.empty((outputs, shape[1], 3, 3), np.float32)

    def gradient():
        cupyconv.conv_grad_weight(grad, x, (3, 3), padding=1, method="gemm", out=out)

    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (3, 3), padding=1, method="gemm", out=out)
        assert isinstance(plan.steps[0], ExchangedLoops)
        gradient()  # the first call also imports what it needs
        cupyconv.clear_caches()
        peak = peak_bytes(gradient)
    assert np.isnan(out[:, 0]).all() and np.isfinite(out[:, 1:]).all()
    assert peak <= plan.workspace_bytes + 200_000  # it was once exceeded by 0.8 MB


@pytest.mark.parametrize("name, shape, kernel", [
    ("MEC rows", (4, 3, 128, 128), (16, 3, 3, 3)),
    ("MEC rows", (2, 12, 90, 90), (4, 12, 5, 5)),
    ("Winograd", (4, 64, 28, 28), (64, 64, 3, 3)),
    ("MEC columns", (1, 64, 56, 56), (64, 64, 7, 7)),
        ("Winograd", (1, 32, 104, 104), (64, 32, 4, 4)),
])  # fmt: skip
def test_ways_that_were_measured_to_be_best(name, shape, kernel):
    """They are faster by 1.2 and more; the second one, with exchanged factors, by 1.7."""
    x, window = np.zeros(shape, np.float32), dict(padding=kernel[2] // 2)
    grad = cupyconv.conv(x, np.zeros(kernel, np.float32), **window)
    with cupyconv.options(threads=2):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel[2:], **window)
    assert {loop.name for loop in loops_of(plan)} == {name}, plan
    assert is_exchanged(plan) == (kernel[0] < kernel[1])


@pytest.mark.parametrize("name, size, kernel", [("strips", 56, 7), ("columns", 112, 3)])
def test_products_of_complex_strips_are_priced_as_small_as_they_are(name, size, kernel):
    """Relative to the method's other implementations, strips took 0.6 of the time for the first, 1.4 for the second."""
    x = np.zeros((1, 200, size, size), np.complex64)
    with cupyconv.options(threads=2):
        settings: Any = dict(padding=kernel // 2, groups=200, method="gemm")
        plan = cupyconv.explain(cupyconv.conv_grad_weight, x, x, (kernel, kernel), **settings)
    assert {loop.name for loop in loops_of(plan)} == {name}, plan


def test_a_sum_over_no_samples_is_zero(fresh, monkeypatch):
    only(monkeypatch, GradientChannels)
    x, grad, out = np.ones((0, 6, 9, 9)), np.ones((0, 4, 7, 7)), np.full((4, 6, 3, 3), np.nan)
    cupyconv.conv_grad_weight(grad, x, (3, 3), method="gemm", out=out)
    assert not out.any()
