"""Mistakes of other libraries, each tested with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tolerance import assert_exact

import cupyconv


def conv(target, x, weight, **settings):
    x = [target.to_device(np.asarray(a)) for a in x] if isinstance(x, list) else target.to_device(np.asarray(x))
    return target.to_host(cupyconv.conv(x, target.to_device(np.asarray(weight)), **settings))


@pytest.fixture(params=["direct", "gemm"])
def method(request):
    return request.param


def row(*values):
    """Return one sample of one channel."""
    return np.array([[values]], np.float64)


def test_dilation_is_counted_once(target, method):
    y = conv(target, row(1, 2, 3, 4, 5), row(1, 10, 100), dilation=2, method=method)
    assert_exact(y, row(1 + 30 + 500), "float64")


def test_dilation_gathers_true_taps_only(cuda_target):
    """3x3 at dilation 2 needs nine rows of columns per channel, not the 25 of a kernel widened with zeros."""
    x, w = (cuda_target.to_device(np.ones(s, np.float32)) for s in ((1, 2, 9, 9), (3, 2, 3, 3)))
    plan = cupyconv.explain(cupyconv.conv, x, w, dilation=2, method="gemm")
    (gemm,) = [step for step in plan.steps if hasattr(step, "k")]
    assert gemm.k == 2 * 9
    assert plan.flops == 2 * 3 * 25 * 2 * 9


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ("same", (1 + 20, 2 + 30, 3 + 40, 4)),  # an even kernel's odd element goes after
        ("same_lower", (10, 1 + 20, 2 + 30, 3 + 40)),
        ("full", (10, 1 + 20, 2 + 30, 3 + 40, 4)),
        ("causal", (10, 1 + 20, 2 + 30, 3 + 40)),
        (((0, 2),), (1 + 20, 2 + 30, 3 + 40, 4, 0)),  # asymmetric pads are not averaged
        (((2, 0),), (0, 10, 1 + 20, 2 + 30, 3 + 40)),
    ],
)
def test_sides_of_padding(target, method, padding, expected):
    assert_exact(conv(target, row(1, 2, 3, 4), row(1, 10), padding=padding, method=method), row(*expected), "float64")


def test_same_counts_dilation_and_stride(target, method):
    # Span 5, stride 2: three outputs from 5 elements, total padding (3 - 1) * 2 + 5 - 5 = 4.
    y = conv(target, row(1, 2, 3, 4, 5), row(1, 10, 100), dilation=2, stride=2, padding="same", method=method)
    assert_exact(y, row(10 + 300, 1 + 30 + 500, 3 + 50), "float64")


@pytest.mark.parametrize(
    ("mode", "left", "right"),
    [("reflect", (3, 2), (3, 2)), ("symmetric", (2, 1), (4, 3)), ("edge", (1, 1), (4, 4)), ("wrap", (3, 4), (1, 2))],
)
def test_padding_modes(target, method, mode, left, right):
    y = conv(target, row(1, 2, 3, 4), row(1), padding=2, padding_mode=mode, method=method)
    assert_exact(y, row(*left, 1, 2, 3, 4, *right), "float64")


def test_groups_straddle_two_inputs(target, method):
    """The groups are channels 1, 2 | 3, 4 of inputs with 1 and 3 channels: the first group reads both inputs."""
    x = [np.full((1, 1, 2), 1.0), np.arange(2.0, 5.0).reshape(1, 3, 1) * np.ones(2)]
    y = conv(target, x, np.ones((2, 2, 1)), groups=2, method=method)
    assert_exact(y, np.array([[[3, 3], [7, 7]]]), "float64")


def test_depthwise_with_multiplier(target, method):
    x = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    y = conv(target, x, np.array([1.0, 10.0, 100.0, 1000.0]).reshape(4, 1, 1), groups=2, method=method)
    assert_exact(y, np.array([[[1, 2], [10, 20], [300, 400], [3000, 4000]]]), "float64")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_dtype_does_not_drift(target, method, dtype):
    assert conv(target, np.ones((1, 2, 4), dtype), np.ones((3, 2, 3), dtype), method=method).dtype == dtype


def test_float16_sums_are_not_kept_in_float16(target, method):
    """The sum of 4096 ones in float16 would stop at 2048, since 2048 + 1 is 2048."""
    y = conv(target, np.ones((1, 4096, 1), np.float16), np.ones((1, 4096, 1), np.float16), method=method)
    assert_exact(y, np.full((1, 1, 1), 4096), "float16")


def test_float16_merge_rounds_once(target, method):
    """2048 + 1 + 1: rounding after each input would lose both ones."""
    xs = [np.full((1, 1, 3), value, np.float16) for value in (2048, 1, 1)]
    y = conv(target, xs, np.ones((1, 3, 1), np.float16), method=method)
    assert_exact(y, np.full((1, 1, 3), 2050), "float16")


def test_float16_epilogue_rounds_once(target, method):
    x, w = np.full((1, 1, 3), 2048, np.float16), np.ones((1, 1, 1), np.float16)
    one = target.to_device(np.ones((1, 1, 3), np.float16))
    bias = target.to_device(np.ones(1, np.float16))
    y = conv(target, x, w, residual=one, bias=bias, activation="relu", method=method)
    assert_exact(y, np.full((1, 1, 3), 2050), "float16")


def test_addends_never_widen(target, method):
    x, w = np.ones((1, 1, 3), np.float32), np.ones((2, 1, 1), np.float32)
    bias = target.to_device(np.full(2, 0.1))
    y = conv(target, x, w, bias=bias, residual=target.to_device(np.ones((1, 2, 3))), method=method)
    assert_exact(y, np.full((1, 2, 3), np.float32(1) + np.float32(0.1) + np.float32(1)), "float32")


@pytest.mark.parametrize("real", ["x", "weight"])
def test_one_complex_side_is_not_promoted(cuda_target, real):
    """A real factor stays real: twice the work of a real convolution, not four times."""
    kinds = {"x": (np.float32, np.complex64), "weight": (np.complex64, np.float32)}[real]
    x, w = (cuda_target.to_device(np.ones(s, k)) for s, k in zip(((2, 3, 8), (4, 3, 3)), kinds))
    plan = cupyconv.explain(cupyconv.conv, x, w, method="gemm")
    assert plan.flops == 4 * 2 * 4 * 6 * 9
    assert {step.dtype for step in plan.steps if hasattr(step, "dtype")} == {"float32"}


def test_non_finite_values_stay_where_the_definition_puts_them(target, method):
    """A NaN reaches the windows that read it and no others, padding zeros and other samples included."""
    x = np.ones((2, 1, 6))
    x[0, 0, 0], x[1, 0, 3] = np.nan, np.inf
    y = conv(target, x, row(1, 1, 1), padding=1, method=method)
    expected = np.array([[[np.nan, np.nan, 3, 3, 3, 2]], [[2, 3, np.inf, np.inf, np.inf, 2]]])
    assert_exact(y, expected, "float64")


def test_last_row_and_column_of_a_strided_kernel_are_left_out(target, method):
    y = conv(target, np.arange(36.0).reshape(1, 1, 6, 6), np.ones((1, 1, 2, 2)), stride=3, method=method)
    assert_exact(y, np.array([[[[14, 26], [86, 98]]]]), "float64")


def test_no_inputs_leave_bias_and_residual(target, method):
    bias = target.to_device(np.array([1.0, -2.0]))
    residual = target.to_device(np.full((1, 2, 3), 0.5))
    y = conv(
        target, np.ones((1, 0, 3)), np.ones((2, 0, 1)), bias=bias, residual=residual, activation="relu", method=method
    )
    assert_exact(y, np.array([[[1.5] * 3, [0] * 3]]), "float64")
