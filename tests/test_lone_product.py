"""Small convolutions, whose views and memory are cached between calls: results are exact, whichever thread calls."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from peak_memory import peak_bytes
from runs_seen import runs_seen

import cupyconv
from cupyconv.numpy import cost, gathered, interleaved
from cupyconv.numpy.lone_product import LoneProduct
from cupyconv.numpy.shifted_rows import ShiftedRows
from cupyconv.numpy.shifts import Shifts
from cupyconv.problem.caches import BUDGET, spent


@pytest.fixture
def runs(monkeypatch):
    """Record the products that ran: for each, whether its columns were runs with gaps."""

    def has_gaps(product: LoneProduct) -> bool:
        return product._length > np.prod((product._geometry.batch, *product._geometry.out_size))

    yield from runs_seen(monkeypatch, LoneProduct, has_gaps)


def integers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(dtype)


def reordered(x: np.ndarray, layout: str) -> np.ndarray:
    if layout == "channels last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    if layout == "other bytes":
        return x.astype(x.dtype.newbyteorder())
    return np.repeat(x, 2, axis=-1)[..., ::2] if layout == "stepped" else x


#: Shapes of x and weight, settings, and whether float32 columns are runs, or None if that is not clear.
CASES = {
    "3x3": ((1, 5, 13, 16), (8, 5, 3, 3), {"padding": 1}, True),
    "3x3 without padding": ((1, 4, 12, 9), (3, 4, 3, 3), {}, True),
    "two samples": ((2, 4, 6, 7), (3, 4, 3, 3), {"padding": ((0, 1), (2, 1))}, True),
    "two samples without padding": ((2, 4, 6, 7), (3, 4, 3, 3), {}, False),
    "dilation": ((1, 3, 11, 12), (4, 3, 2, 3), {"dilation": (3, 2), "padding": 1}, None),
    "stride": ((1, 8, 11, 12), (4, 8, 3, 3), {"stride": 2, "padding": 1}, False),
    "1x1": ((1, 8, 16, 16), (8, 8, 1, 1), {}, False),
    "1x1 of few pixels": ((3, 8, 5, 5), (8, 8, 1, 1), {}, False),
    "1-D": ((2, 3, 40), (5, 3, 5), {"padding": "same"}, None),
    "3-D": ((1, 2, 5, 6, 4), (3, 2, 3, 3, 3), {"padding": 1}, True),
    "a reflected border": ((2, 3, 8, 9), (4, 3, 3, 5), {"padding": (1, 2), "padding_mode": "reflect"}, True),
    "a repeated edge": ((1, 3, 8, 9), (4, 3, 5, 3), {"padding": (2, 1), "padding_mode": "edge"}, True),
}


@pytest.mark.parametrize("layout", ["C order", "channels last", "stepped", "other bytes"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("case", CASES)
def test_calls_one_after_the_other(case, dtype, layout, runs):
    """All epilogues are right, with arrays present or not; nothing that is cached belongs to another call."""
    x_shape, weight_shape, how, is_run = CASES[case]
    rng = np.random.default_rng(5)
    weight, bias = integers(rng, *weight_shape, dtype=dtype), integers(rng, weight_shape[0], dtype=dtype)
    for _ in range(3):
        x = integers(rng, *x_shape, dtype=dtype)
        given = reordered(x, layout)
        plain = reference.conv(x, weight, **how)
        np.testing.assert_array_equal(cupyconv.conv(given, weight, method="gemm", **how), plain)
        residual = integers(rng, *plain.shape, dtype=dtype)
        activation = None if dtype is np.complex64 else "relu"
        expected = reference.conv(x, weight, bias, residual=residual, activation=activation, **how)
        epilogue = {"activation": activation, "residual": residual, "method": "gemm", **how}
        np.testing.assert_array_equal(cupyconv.conv(given, weight, bias, **epilogue), expected)
        cupyconv.conv(given, weight, bias, out=residual, **epilogue)
        np.testing.assert_array_equal(residual, expected)
        out = np.full_like(np.moveaxis(residual, 1, -1), 7, order="C")
        cupyconv.conv(given, weight, method="gemm", out=np.moveaxis(out, -1, 1), **how)
        np.testing.assert_array_equal(np.moveaxis(out, -1, 1), plain)
    assert len(runs) == 12
    if is_run is not None and layout == "C order" and dtype is np.float32:
        assert set(runs) == {is_run}


@pytest.mark.parametrize("how", [{}, {"stride": 2}, {"padding": 1, "stride": 3, "padding_mode": "edge"}])
def test_one_pixel_of_zero_times_nan(how, runs):
    weight, x = np.full((2, 1, 1), np.nan, np.float32), np.zeros((1, 1, 1), np.float32)
    assert np.isnan(cupyconv.conv(x, weight, **how)).all()
    assert np.isnan(cupyconv.conv([x, x[:, :0]], weight, **how)).all()
    assert len(runs) == 2


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("how", [{}, {"padding": 1, "padding_mode": "symmetric"}, {"stride": 2}])
def test_several_inputs_are_one_product(how, kernel, runs):
    """Inputs are copied side by side, each in its own layout, again in every call."""
    rng = np.random.default_rng(1)
    weight = integers(rng, 6, 9, kernel, kernel)
    for _ in range(3):
        x = integers(rng, 2, 9, 7, 8)
        xs = [x[:, :4].copy(), reordered(x[:, 4:5], "stepped"), reordered(x[:, 5:], "channels last")]
        expected = reference.conv(x, weight, **how)
        np.testing.assert_array_equal(cupyconv.conv(xs, weight, method="gemm", **how), expected)
        out = integers(rng, *expected.shape)
        cupyconv.conv(xs, weight, method="gemm", activation="relu", out=out, **how)
        np.testing.assert_array_equal(out, np.maximum(expected, 0))
    assert len(runs) == 6


def test_calls_at_the_same_time(runs):
    """Each call has its own memory."""
    rng = np.random.default_rng(0)
    weight = integers(rng, 8, 8, 3, 3)
    xs = [integers(rng, 1, 8, 16, 16) for _ in range(8)]
    expected = [reference.conv(x, weight, padding=1) for x in xs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(50):
                for y, right in zip(pool.map(lambda x: cupyconv.conv(x, weight, padding=1), xs), expected):
                    np.testing.assert_array_equal(y, right)
    finally:
        sys.setswitchinterval(interval)
    assert len(runs) == 400


def test_a_border_stays_zero_where_images_are_not_finite(runs):
    x, weight = np.full((1, 2, 6, 6), np.inf, np.float32), np.ones((2, 2, 3, 3), np.float32)
    assert np.isinf(cupyconv.conv(x, weight, padding=1)).all()
    np.testing.assert_array_equal(
        cupyconv.conv(np.ones_like(x), weight, padding=1), reference.conv(np.ones_like(x), weight, padding=1)
    )
    assert len(runs) == 2


def test_no_more_than_the_limit(runs):
    """If runs do not fit the limit, the convolution uses an implementation that needs less memory."""
    x, weight = np.ones((1, 8, 16, 16), np.float32), np.ones((8, 8, 3, 3), np.float32)
    for limit in (1 << 20, 90_000, 20_000):
        with cupyconv.options(workspace_limit=limit):
            assert cupyconv.explain(cupyconv.conv, x, weight, padding=1).workspace_bytes <= limit
            np.testing.assert_array_equal(cupyconv.conv(x, weight, padding=1), reference.conv(x, weight, padding=1))
    assert runs == [True]


def test_layers_of_a_chain(runs):
    """Their images have other axes than the caller's."""
    rng = np.random.default_rng(1)
    x, first, second = integers(rng, 1, 2, 1), integers(rng, 1, 2, 3), integers(rng, 2, 1, 1)
    with cupyconv.options(threads=1):
        layers = [cupyconv.ConvLayer(first, padding=1), cupyconv.ConvLayer(second)]
        y = cupyconv.conv_chain(x, layers, fuse=False)
    np.testing.assert_array_equal(y, reference.conv(reference.conv(x, first, padding=1), second))
    assert len(runs) == 2


@pytest.mark.parametrize(("stride", "parts"), [(1, 1), ((1, 3), 3)])
def test_parts_that_an_input_gradient_is_gathered_from(stride, parts, runs, monkeypatch):
    """Each part is a convolution of a part of the gradient, whose result is written with a stride."""
    monkeypatch.setattr(interleaved, "plan_interleaved", gathered.plan_gathered)
    monkeypatch.setattr(cost, "least_scattered", lambda problem: inf)
    rng = np.random.default_rng(4)
    settings = dict(stride=stride, padding=(1, 0))
    x, weight = np.zeros((1, 3, 9, 24), np.float32), integers(rng, 4, 3, 3, 6)
    grad = integers(rng, *reference.conv(x, weight, **settings).shape)
    expected = reference_gradients.conv_grad_input(grad, weight, x.shape, **settings)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, x.shape, **settings)
        for _ in range(3):
            actual = cupyconv.conv_grad_input(grad, weight, x.shape, **settings)
            np.testing.assert_array_equal(actual, expected)
    assert "of x, " in plan.reason and len(runs) == 3 * parts


def test_parts_that_would_keep_much_together_keep_nothing():
    """Their runner would be too large to be cached, so each call would be planned again."""
    x, weight = np.ones((1, 8, 16, 16), np.float32), np.ones((8, 512, 4, 4), np.float32)
    settings = dict(stride=4, dilation=3)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, **settings)
        out = cupyconv.conv_transpose(x, weight, **settings)
        cupyconv.clear_caches()
        first, again = (peak_bytes(lambda: cupyconv.conv_transpose(x, weight, **settings, out=out)) for _ in range(2))
    assert plan.reason.startswith("16 convolutions of x")
    assert first <= plan.workspace_bytes + 1_000_000 and again <= plan.workspace_bytes + 40_000


def test_what_parts_keep_together_is_counted(monkeypatch):
    monkeypatch.setattr(interleaved, "plan_interleaved", gathered.plan_gathered)
    x, weight = np.ones((1, 8, 16, 16), np.float32), np.ones((8, 256, 4, 1), np.float32)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, stride=(4, 1))
        out = cupyconv.conv_transpose(x, weight, stride=(4, 1))
        cupyconv.clear_caches()
        nbytes = peak_bytes(lambda: cupyconv.conv_transpose(x, weight, stride=(4, 1), out=out))
    assert plan.reason.startswith("4 convolutions of x")
    assert 1_000_000 < nbytes <= plan.workspace_bytes + 100_000


@pytest.mark.parametrize("taps", [1, 3])
def test_arrays_whose_strides_are_no_multiples_of_an_element(taps, runs):
    record = np.zeros((1, 2, 300), dtype=[("flag", "u1"), ("value", "f4")])
    x, weight = integers(np.random.default_rng(2), 1, 2, 300), np.ones((2, 2, taps), np.float32)
    expected = reference.conv(x, weight)
    record["value"] = x
    np.testing.assert_array_equal(cupyconv.conv(record["value"], weight), expected)
    cupyconv.conv(x, weight, out=record["value"][..., : expected.shape[2]])
    cupyconv.conv(x, weight, out=record["value"][..., : expected.shape[2]], activation="relu")
    np.testing.assert_array_equal(record["value"][..., : expected.shape[2]], np.maximum(expected, 0))
    assert (record["flag"] == 0).all() and runs


def test_a_result_at_an_address_that_is_no_multiple_of_an_element(runs):
    rng = np.random.default_rng(3)
    x, weight = integers(rng, 1, 3, 6, 7), integers(rng, 4, 3, 1, 1)
    out = np.ndarray((1, 4, 6, 7), np.float32, bytearray(4 * 4 * 6 * 7 + 1), 1)
    cupyconv.conv(x, weight, out=out)
    np.testing.assert_array_equal(out, reference.conv(x, weight))
    assert runs


@pytest.mark.parametrize(("size", "is_kept"), [(200, True), (800, False)])
def test_a_tile_is_kept_within_the_budget(size, is_kept, runs, monkeypatch):
    """If windows are far apart, the tile is much larger than the columns; a large one is in the memory of blocks."""
    for implementation in (Shifts, ShiftedRows):  # they would read only what the columns hold
        monkeypatch.setattr(implementation, "applies", lambda problem: False)
    x, weight = np.ones((1, 2, size, size), np.float32), np.ones((2, 2, 2, 2), np.float32)
    cupyconv.clear_caches()
    with cupyconv.options(threads=1):
        y = cupyconv.conv(x, weight, stride=20, padding=1, method="gemm")
    np.testing.assert_array_equal(y, reference.conv(x, weight, stride=20, padding=1))
    assert bool(runs) == is_kept
    assert x.nbytes < spent() <= BUDGET


@pytest.mark.parametrize("outputs", [1, 3])
def test_zero_times_what_is_not_finite(outputs, runs):
    """A product of one number with a row must not be a scaled copy, which would make zeros of a row times zero."""
    x, weight = np.array([[[np.nan, np.inf, 1.0]]]), np.zeros((outputs, 1, 1))
    expected = np.broadcast_to([np.nan, np.nan, 0.0], (1, outputs, 3))
    np.testing.assert_array_equal(cupyconv.conv(x, weight), expected)
    assert runs
