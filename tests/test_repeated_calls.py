"""`call.repeated`: repeated calls of one weight and settings give the function's results, and are checked once."""

from __future__ import annotations

import numpy as np
import pytest

import cupyconv
from cupyconv.call.repeated import KEPT, RepeatedCall
from cupyconv.numpy import convolution
from cupyconv.numpy.convolution import ConvRun
from tests.reference import conv as reference

RNG = np.random.default_rng(0)


def integers(*shape, dtype=np.float32):
    return RNG.integers(-4, 5, shape).astype(dtype)


@pytest.mark.parametrize("weight, settings", [
    ((8, 4, 3, 3), {"padding": 1, "method": "gemm"}),  # columns, or MEC columns
    ((48, 32, 3, 3), {"padding": 1, "method": "winograd"}),
    ((6, 1, 3, 3), {"padding": 1, "groups": 6}),  # Toeplitz matrices
    ((6, 1, 1, 9), {"groups": 6}),
    ((8, 4, 1, 1), {}),
    ((4, 4, 9, 9), {"padding": "same", "method": "fft"}),
])  # fmt: skip
def test_the_result_is_the_functions(weight, settings):
    """Results equal the function's, also for other images and alternating sizes; winograd and fft round."""
    w, bias = integers(*weight), integers(weight[0])
    channels = weight[1] * settings.get("groups", 1)
    call = RepeatedCall(cupyconv.conv, {"weight": w, "bias": bias, "activation": "relu", **settings})
    for size in (12, 13, 12):
        x = integers(2, channels, size, size)
        expected = reference(x, w, bias, activation="relu", **{k: v for k, v in settings.items() if k != "method"})
        atol = 2e-3 if settings.get("method") in ("winograd", "fft") else 0
        np.testing.assert_allclose(call(x=x), expected, rtol=0, atol=atol)
        out = np.zeros((2, 2 * weight[0], *expected.shape[2:]), np.float32)
        call(x=x, out=out[:, weight[0] :])
        np.testing.assert_array_equal(out[:, weight[0] :], call(x=x))
        assert not out[:, : weight[0]].any()


def test_lists_and_residuals_are_found_by_their_names():
    """A residual that is the image in one call may be another array in the next."""
    w = integers(4, 4, 1, 1)
    call = RepeatedCall(cupyconv.conv, {"weight": w})
    a, b, residual = integers(2, 2, 8, 8), integers(2, 2, 8, 8), integers(2, 4, 8, 8)
    whole = np.concatenate([a, b], 1)
    for given in (whole, residual):
        np.testing.assert_array_equal(call(x=whole, residual=given), cupyconv.conv(whole, w, residual=given))
        np.testing.assert_array_equal(call(x=[a, b], residual=given), cupyconv.conv([a, b], w, residual=given))


def test_calls_are_told_apart_by_what_they_are_given():
    """The same arrays under other names, or in a list, are another call; an argument that is None is absent."""
    call = RepeatedCall(cupyconv.conv, {"weight": integers(4, 4, 3, 3), "padding": 1, "method": "gemm"})
    x, other, halves = integers(1, 4, 6, 6), integers(1, 4, 6, 6), [integers(1, 2, 6, 6), integers(1, 2, 6, 6)]
    added = call(residual=other, x=x) - call(residual=None, x=x)
    np.testing.assert_array_equal(added, other)
    assert call(out=other, x=x) is other
    call(x=halves, residual=None), call(x=x)
    with pytest.raises(ValueError, match="channels"):
        call(x=halves[0], residual=halves[1])
    with cupyconv.options(workspace_limit=0), pytest.raises(ValueError, match="the limit is 0"):
        call(x=x)


def test_a_layout_is_checked_once(monkeypatch):
    """Alternating sizes are checked once each; a weight that is given with each call is not constant."""
    w, checked = integers(4, 4, 3, 3), []
    whole = RepeatedCall.checked
    monkeypatch.setattr(RepeatedCall, "checked", lambda self, **given: checked.append(1) or whole(self, **given))
    call = RepeatedCall(cupyconv.conv, {"weight": w})
    for size in (8, 9, 8, 9):
        call(x=integers(1, 4, size, size))
    assert len(checked) == 2
    given = {"x": integers(1, 4, 8, 8), "weight": w}
    assert not RepeatedCall(cupyconv.conv, {"padding": 1}).checked(**given).problem.weight_is_constant


def test_what_is_made_of_the_weight_is_made_once(monkeypatch):
    w, x = RNG.normal(size=(64, 64, 3, 3)).astype(np.float32), RNG.normal(size=(1, 64, 40, 40)).astype(np.float32)
    first = cupyconv.conv(x, w, method="winograd")  # from here on BLAS's number of threads is known
    made = []
    of_run = ConvRun._arranged
    monkeypatch.setattr(ConvRun, "_arranged", lambda run, weight: made.append(1) or of_run(run, weight))
    call = RepeatedCall(cupyconv.conv, {"weight": w, "method": "winograd"})
    for _ in range(4):
        np.testing.assert_array_equal(call(x=x), first)
    assert len(made) == 1
    for _ in range(2):
        np.testing.assert_array_equal(cupyconv.conv(x, w, method="winograd"), first)
    assert len(made) == 3
    plan, plain = call.checked(x=x).plan(), cupyconv.explain(cupyconv.conv, x, w, method="winograd")
    assert sum(step.cached_bytes for step in plan.steps) == 4 * 36 * 64 * 64
    assert plan.workspace_bytes == plain.workspace_bytes - 4 * (36 + 9) * 64 * 64  # without the taps too
    assert plan.steps[0].seconds < plain.steps[0].seconds


def test_no_more_is_kept_than_stated(monkeypatch):
    """A float16 weight has a copy for products; if the copy is too large to cache, each run makes its own."""
    x, w = integers(1, 4, 8, 8, dtype=np.float16), integers(4, 4, 3, 3, dtype=np.float16)
    for bound, kept in ((convolution.CACHED_CONSTANT, True), (100, False)):
        monkeypatch.setattr(convolution, "CACHED_CONSTANT", bound)
        call = RepeatedCall(cupyconv.conv, {"weight": w, "method": "gemm"})
        assert bool(sum(step.cached_bytes for step in call.checked(x=x).plan().steps)) == kept
        np.testing.assert_array_equal(call(x=x), cupyconv.conv(x, w, method="gemm"))
        np.testing.assert_array_equal(call(x=x), cupyconv.conv(x, w, method="gemm"))


def test_the_fixed_arguments_are_known_by_name():
    w, bias = integers(4, 2, 3, 3), integers(4)
    call = RepeatedCall(cupyconv.conv, {"weight": w, "bias": bias, "groups": 2})
    arguments = call.arguments
    assert arguments["bias"] is bias and arguments["groups"] == 2
    assert arguments["x"] is None and arguments["stride"] == 1
    np.testing.assert_array_equal(arguments["weight"], w)
    arguments["groups"] = 3  # of a copy
    assert call(x=integers(1, 4, 6, 6)).shape == (1, 4, 4, 4)


def test_options_and_sizes_have_executables_of_their_own():
    w = integers(4, 4, 3, 3)
    call = RepeatedCall(cupyconv.conv, {"weight": w})
    for size in range(3, 3 + 2 * KEPT):
        x = integers(1, 4, size, size)
        np.testing.assert_array_equal(call(x=x), cupyconv.conv(x, w))
    assert len(call._executables) <= KEPT
    with cupyconv.options(threads=1):
        assert call(x=x).shape == (1, 4, size - 2, size - 2)
    with pytest.raises(ValueError, match="x"):
        call(x=integers(1, 5, 8, 8))
