"""NumPy layers whose taps share columns, some groups at a time: every implementation against the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_gradients
from tolerance import assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import (
    depthwise,
    direct,
    gemm,
    long_rows,
    mec,
    shared_columns,
    shifts,
    weight_channels,
    weight_gradient,
)
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.weight_lines import GradientLines

#: Channels of the inputs, outputs, spatial size, kernel, settings.
LAYERS = {
    "one group": ((5, 7), 4, (7, 6), (3, 3), dict(groups=1, padding=1)),
    "one group, stride": ((16,), 3, (9, 8), (3, 2), dict(groups=1, stride=2, padding=1)),
    "groups": ((6,), 9, (7, 6), (3, 2), dict(groups=3, padding=1)),
    "merged in the middle of a group": ((4, 1, 3), 6, (7, 6), (2, 3), dict(groups=2, padding="same")),
    "depthwise": ((5,), 5, (7, 6), (3, 3), dict(groups=5, padding=1)),
    "depthwise, merged": ((2, 3), 10, (7, 6), (3, 3), dict(groups=5, padding="same")),
    "stride": ((6,), 6, (9, 8), (3, 3), dict(groups=2, stride=(2, 3), padding=1)),
    "stride and dilation": ((4,), 8, (12, 9), (4, 2), dict(groups=4, stride=4, dilation=(2, 3))),
    "stride beyond the kernel": ((4,), 4, (9, 8), (2, 2), dict(groups=4, stride=3)),
    "borders": ((4,), 4, (6, 5), (3, 3), dict(groups=2, padding=2, padding_mode="reflect")),
    "depthwise, borders": ((4,), 4, (6, 5), (3, 3), dict(groups=4, padding=2, padding_mode="wrap")),
    "1-D": ((6,), 6, (300,), (5,), dict(groups=3, padding=2)),
    "1-D depthwise": ((6,), 6, (300,), (5,), dict(groups=6, padding=2, dilation=2)),
    "3-D": ((4,), 6, (4, 5, 3), (2, 3, 2), dict(groups=2, padding=1)),
    "3-D, rows": ((4,), 4, (4, 5, 3), (1, 3, 2), dict(groups=4, padding=1)),
}
BODIES = {"MEC columns", "MEC rows", "long MEC rows", "scaled taps", "scaled runs", "multiplied runs"}


@pytest.fixture(autouse=True, params=[64, 5000])
def small_cache(request, monkeypatch):
    """Let a cache hold one group of these layers, or a few."""

    for module in (depthwise, shared_columns):
        monkeypatch.setattr(module, "MEMORY_BLOCK", request.param)
    monkeypatch.setattr(long_rows, "PART", request.param)
    # Taps share columns however short the products are, because no other implementation applies.
    others = (weight_gradient.GradientColumns, weight_gradient.GradientTaps, weight_channels.GradientChannels)
    others = (ShiftedRows, GradientLines, direct.TapByTap, depthwise.ScaledPixels, *others)
    for implementation in (gemm.Columns, shifts.Shifts, *others):
        monkeypatch.setattr(implementation, "applies", lambda problem: False)
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def long_rows_only(monkeypatch):
    """Disable products of single rows, which may be faster for layers this small."""
    monkeypatch.setattr(mec.MecRows, "applies", lambda problem: False)


def integers(rng, shape, dtype="float32"):
    values = rng.integers(-3, 4, shape).astype(dtype)
    return values + 1j * rng.integers(-3, 4, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values


def layer(channels, outputs, size, kernel, settings, dtype="float32", batch=3):
    rng = np.random.default_rng(0)
    xs = [integers(rng, (batch, c, *size), dtype) for c in channels]
    weight = integers(rng, (outputs, sum(channels) // settings["groups"], *kernel), dtype)
    y = reference.conv(xs, weight, **settings)
    return xs, weight, integers(rng, y.shape, dtype), y


def bodies(function, *arguments, **settings):
    return {step.name for step in cupyconv.explain(function, *arguments, **settings).steps}


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("channels, outputs, size, kernel, settings", LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_and_its_gradients(channels, outputs, size, kernel, settings, dtype):
    xs, weight, grad, expected = layer(channels, outputs, size, kernel, settings, dtype)
    method = "direct" if settings["groups"] == sum(channels) else "gemm"  # depthwise convolutions have other products
    assert bodies(cupyconv.conv, xs, weight, method=method, **settings) <= BODIES
    assert_exact(cupyconv.conv(xs, weight, method=method, **settings), expected, dtype)

    assert bodies(cupyconv.conv_grad_weight, grad, xs, kernel, method=method, **settings) <= BODIES
    expected = reference_gradients.conv_grad_weight(grad, xs, kernel, **settings)
    assert_exact(cupyconv.conv_grad_weight(grad, xs, kernel, method=method, **settings), expected, dtype)

    shapes = [x.shape for x in xs]
    expected = reference_gradients.conv_grad_input(grad, weight, shapes, **settings)
    for actual, wanted in zip(cupyconv.conv_grad_input(grad, weight, shapes, method=method, **settings), expected):
        assert_exact(actual, wanted, dtype)


#: Spatial size, kernel, samples, settings, and the number of bands into which an image is cut.
LONG_ROWS = {
    "one row of many samples": ((4, 9), (3, 3), 6, dict(padding=1), 1),
    "bands": ((12, 9), (3, 3), 1, dict(padding=1), 12),
    "bands of several rows": ((12, 40), (3, 3), 1, dict(padding=1), 3),
    "bands, stride": ((25, 41), (3, 3), 1, dict(stride=(2, 1), padding=1), 13),
    "bands, dilation": ((14, 9), (3, 2), 1, dict(dilation=(2, 3), padding="same"), 14),
    "1-D, dilation": ((90,), (4,), 2, dict(dilation=3), 1),
    "3-D": ((6, 5, 4), (3, 2, 3), 3, dict(padding=1), 1),
    "3-D, bands": ((6, 5, 4), (3, 2, 3), 1, dict(padding=1), 6),
    "3-D, stride": ((9, 7, 8), (2, 3, 3), 2, dict(stride=(2, 3, 1), padding=1), 1),
}


@pytest.mark.parametrize("size, kernel, batch, settings, bands", LONG_ROWS.values(), ids=LONG_ROWS.keys())
@pytest.mark.parametrize("threads", [1, 2])
def test_long_rows(size, kernel, batch, settings, bands, threads, long_rows_only):
    xs, weight, _, y = layer((2, 4), 9, size, kernel, settings | dict(groups=3), batch=batch)
    given = settings | dict(groups=3, method="gemm")
    with cupyconv.options(threads=threads):
        if threads == 1:
            (step,) = cupyconv.explain(cupyconv.conv, xs, weight, **given).steps
            assert isinstance(step, long_rows.LongRows)
            if step.blocks == 1:
                assert step.block[1 + step.axis] // step.layout.rows == bands
        assert_exact(cupyconv.conv(xs, weight, **given), y, "float32")


@pytest.mark.parametrize("groups", [8, 64])
def test_threads_that_would_have_little_room_are_fewer(groups, long_rows_only):
    """Fewer threads run if each would have little memory: their calls would be short, and wait for each other."""
    x, weight = np.ones((8, 64, 80, 80), np.float32), np.ones((64, 64 // groups, 3, 3), np.float32)
    threads = []
    for limit in (1 << 24, 1 << 20):
        with cupyconv.options(threads=2, workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=groups, method="gemm")
            assert plan.workspace_bytes <= limit
            threads += [step.threads for step in plan.steps]
    assert threads == [2, 1]


@pytest.mark.parametrize("limit", [60_000, 20_000])
@pytest.mark.parametrize("name", ["groups", "depthwise, merged", "stride", "borders"])
def test_the_limit_holds(name, limit):
    xs, weight, grad, expected = layer(*LAYERS[name])
    kernel, settings = LAYERS[name][3:]
    with cupyconv.options(workspace_limit=limit, allow_fft=False, allow_winograd=False):
        assert cupyconv.explain(cupyconv.conv, xs, weight, **settings).workspace_bytes <= limit
        assert_exact(cupyconv.conv(xs, weight, **settings), expected, "float32")
        assert cupyconv.explain(cupyconv.conv_grad_weight, grad, xs, kernel, **settings).workspace_bytes <= limit
        expected = reference_gradients.conv_grad_weight(grad, xs, kernel, **settings)
        assert_exact(cupyconv.conv_grad_weight(grad, xs, kernel, **settings), expected, "float32")


@pytest.mark.parametrize("name", ["groups", "depthwise", "stride"])
def test_bias_residual_activation_and_layout(name):
    xs, weight, _, y = layer(*LAYERS[name])
    settings = LAYERS[name][4]
    rng = np.random.default_rng(1)
    bias, residual = integers(rng, y.shape[1:2]), integers(rng, y.shape)
    x = np.ascontiguousarray(np.moveaxis(xs[0], 1, -1))
    expected = np.maximum(y + bias[:, None, None] + residual, 0)
    for given in (xs[0], np.moveaxis(x, -1, 1)):
        for threads in (1, 3):
            with cupyconv.options(threads=threads):
                actual = cupyconv.conv(given, weight, bias, residual=residual, activation="relu", **settings)
            assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("name", ["groups", "depthwise", "stride"])
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name):
    """Non-finite values at a corner, which not every tap reads, reach the results that the definition says."""
    xs, weight, grad, _ = layer(*LAYERS[name])
    kernel, settings = LAYERS[name][3:]
    weight[weight == 0] = 1
    grad[grad == 0] = 1
    xs[0][0, 0, 0, 0], xs[0][1, 1, -1, -1] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        forward = reference.conv(xs, weight, **settings)
        backward = reference_gradients.conv_grad_weight(grad, xs, kernel, **settings)
    np.testing.assert_array_equal(cupyconv.conv(xs, weight, **settings), forward)
    np.testing.assert_array_equal(cupyconv.conv_grad_weight(grad, xs, kernel, **settings), backward)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_again(threads):
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal((4, 12, 30, 30), np.float32) for _ in range(2))
    for groups in (3, 12):
        weight = rng.standard_normal((12, 12 // groups, 3, 3)).astype(np.float32)
        with cupyconv.options(threads=threads):
            settings = dict(padding=1, groups=groups)
            for call in (
                lambda: cupyconv.conv(x, weight, **settings),  # noqa: B023
                lambda: cupyconv.conv_grad_input(grad, weight, x.shape, **settings),  # noqa: B023
                lambda: cupyconv.conv_grad_weight(grad, x, 3, **settings),  # noqa: B023
            ):
                assert len({call().tobytes() for _ in range(4)}) == 1


#: Spatial size, kernel, outputs, settings: for one group, so that MEC rows are the implementation.
ROWS = {
    "odd": ((11, 37), (3, 3), 5, dict(padding=1)),
    "outputs of several parts": ((9, 40), (5, 3), 40, dict(padding=(2, 1))),
    "stride": ((20, 41), (5, 5), 9, dict(stride=2, padding=2)),
    "dilation": ((17, 33), (3, 3), 8, dict(dilation=2, padding=2)),
    "stride and dilation": ((25, 30), (3, 2), 8, dict(dilation=(4, 1), stride=(2, 3), padding=3)),
    "few outputs": ((13, 45), (3, 4), 3, dict(padding=(1, 2))),
    "3-D": ((6, 9, 7), (3, 3, 2), 8, dict(padding=1)),
    "3-D, one tap in front": ((3, 8, 19), (1, 3, 3), 12, dict(padding=(0, 1, 1))),
    "borders": ((9, 13), (3, 3), 8, dict(padding=1, padding_mode="reflect")),
}


@pytest.mark.parametrize("turned", [False, True], ids=["weight as it lies", "turned"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("size, kernel, outputs, settings", ROWS.values(), ids=ROWS.keys())
def test_blocks_of_a_part_of_every_row(size, kernel, outputs, settings, dtype, turned, monkeypatch):
    monkeypatch.setattr(mec, "COLUMNS_BLOCK", 2500)
    monkeypatch.setattr(mec, "MIN_BLOCK", 4)
    monkeypatch.setattr(mec.MecRows, "turns_weight", turned)
    monkeypatch.setattr(mec.MecRows, "fitted", mec.MecRows._of_parts)
    monkeypatch.setattr(long_rows.LongRows, "applies", lambda problem: False)
    (x,), weight, _, expected = layer((4,), outputs, size, kernel, settings | dict(groups=1), dtype)
    (loop,) = cupyconv.explain(cupyconv.conv, [x], weight, method="gemm", **settings).steps
    axis = loop.geometry.outermost
    assert loop.name == "MEC rows" and loop.block[2 + axis] < loop.geometry.out_size[1 + axis]
    for threads in (None, 2):
        with cupyconv.options(threads=threads):
            assert_exact(cupyconv.conv(x, weight, method="gemm", **settings), expected, dtype)
