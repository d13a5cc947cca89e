"""Columns as shifts of the image: strides, dilations, borders and parts in every phase, against the naive reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from tolerance import assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import convolution, gemm, long_rows, mec, shifts

#: Samples, channels, outputs, spatial size, kernel, settings.
LAYERS = {
    "groups": (1, 6, 9, (7, 6), (3, 3), dict(groups=3, padding=1)),
    "one group": (2, 4, 5, (7, 6), (3, 3), dict(padding=1)),
    "even kernel": (1, 4, 6, (8, 9), (4, 2), dict(groups=2, padding="same")),
    "wide kernel": (2, 4, 6, (5, 4), (3, 9), dict(groups=2, padding="same")),
    "stride": (2, 4, 6, (9, 8), (3, 3), dict(groups=2, stride=2, padding=1)),
    "stride, odd": (1, 4, 6, (9, 11), (5, 3), dict(groups=2, stride=(3, 2), padding=(2, 1))),
    "stride beyond the kernel": (1, 4, 6, (9, 11), (2, 2), dict(groups=2, stride=3, padding=1)),
    "dilation": (1, 4, 6, (9, 11), (3, 3), dict(groups=2, dilation=(2, 3), padding="same")),
    "dilation beyond the image": (1, 4, 6, (4, 3), (3, 3), dict(groups=2, dilation=5, padding=5)),
    "stride and dilation": (1, 4, 6, (12, 10), (3, 3), dict(groups=2, stride=(2, 4), dilation=(3, 2), padding=(3, 2))),
    "more padding than taps read": (1, 4, 6, (3, 4), (2, 3), dict(groups=2, padding=((3, 2), (5, 4)))),
    "a stride that reads padding alone": (
        1,
        4,
        6,
        (5, 1),
        (3, 3),
        dict(groups=2, stride=(1, 3), padding=((1, 1), (4, 1))),
    ),
    "borders between rows": (1, 4, 6, (6, 5), (3, 1), dict(groups=2, padding=(2, 0), padding_mode="reflect")),
    "3-D": (2, 4, 6, (4, 5, 3), (3, 2, 3), dict(groups=2, padding="same")),
    "3-D, stride": (1, 4, 6, (5, 4, 7), (3, 1, 3), dict(groups=2, stride=(2, 1, 2), padding=(1, 0, 1))),
}


@pytest.fixture(autouse=True)
def shifts_only(monkeypatch):
    monkeypatch.setitem(convolution.METHODS, "gemm", convolution.SHIFTED["gemm"])
    for implementation in (gemm.View, gemm.Columns, mec.MecRows, long_rows.LongRows):
        monkeypatch.setattr(implementation, "applies", lambda problem: False)
    forget_calls()
    yield
    forget_calls()


def layer(batch, channels, outputs, size, kernel, settings, dtype="float32"):
    """Return a layer's arrays and its result."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (batch, channels, *size)).astype(dtype)
    weight = rng.integers(-3, 4, (outputs, channels // settings.get("groups", 1), *kernel)).astype(dtype)
    if np.dtype(dtype).kind == "c":
        x, weight = x + 1j * x[::-1, ::-1], weight - 2j * weight[::-1]
    return x, weight, reference.conv([x], weight, **settings)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block, pixels", [(1 << 21, 256), (1500, 1)], ids=["whole", "bands and parts"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name, dtype, block, pixels, threads, monkeypatch):
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", block)
    monkeypatch.setattr(shifts, "LONG_PRODUCT", pixels)
    monkeypatch.setattr(shifts.Shifts, "smallest", 1)
    x, weight, expected = layer(*LAYERS[name], dtype)
    settings = LAYERS[name][-1]
    with cupyconv.options(threads=threads):
        (loop,) = cupyconv.explain(cupyconv.conv, x, weight, method="gemm", **settings).steps
        assert loop.name == "shifted columns"
        # Memory behind an image of other channels is not zero, because it has been used before.
        cupyconv.conv(x + 100, weight, method="gemm", **settings)
        assert_exact(cupyconv.conv(x, weight, method="gemm", **settings), expected, dtype)


def test_bands_and_parts_of_groups(monkeypatch):
    """Rows and groups are split if their columns do not fit; every thread has the same number of parts."""
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 30_000)
    x, weight, expected = layer(1, 24, 24, (40, 16), (3, 3), dict(groups=12, padding=1))
    (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=12, method="gemm").steps
    assert loop.block == (1, 1, 20, 16) and loop.part == 1
    assert_exact(cupyconv.conv(x, weight, padding=1, groups=12, method="gemm"), expected, "float32")
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 400_000)
    for threads, part in ((1, 6), (2, 6), (3, 4)):
        with cupyconv.options(threads=threads):
            forget_calls()
            (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=12, method="gemm").steps
            assert loop.part == part
            assert_exact(cupyconv.conv(x, weight, padding=1, groups=12, method="gemm"), expected, "float32")


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_bias_residual_activation_prologue_and_several_inputs(last, monkeypatch):
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 3000)
    x, weight, _ = layer(*LAYERS["stride"])
    rng = np.random.default_rng(1)
    settings = LAYERS["stride"][-1]
    scale, shift, bias = (rng.integers(-2, 3, count).astype(np.float32) for count in (4, 4, 6))
    read = np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)
    y = reference.conv([read], weight, **settings)
    residual = rng.integers(-3, 4, y.shape).astype(np.float32)
    if last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    given = dict(prologue=(scale, shift, "relu"), method="gemm", **settings)
    for threads in (1, 2):
        with cupyconv.options(threads=threads):
            assert_exact(cupyconv.conv(x, weight, **given), y, "float32")
            expected = np.maximum(y + bias[:, None, None] + residual, 0)
            actual = cupyconv.conv([x[:, :1], x[:, 1:]], weight, bias, residual=residual, activation="relu", **given)
            assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("name", ["groups", "stride", "dilation", "3-D"])
def test_values_that_are_not_finite_land_where_the_definition_puts_them(name):
    """Non-finite values at the ends of rows do not reach other rows, which are their neighbours in memory."""
    x, weight, _ = layer(*LAYERS[name])
    settings = LAYERS[name][-1]
    weight[weight == 0] = 1
    x[0, 0, ..., 0], x[-1, 1, ..., -1] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = reference.conv([x], weight, **settings)
    np.testing.assert_array_equal(cupyconv.conv(x, weight, method="gemm", **settings), expected)


@pytest.mark.parametrize("limit", [40_000, 9_000, 6_000])
def test_the_limit_holds(limit):
    x, weight, expected = layer(2, 12, 12, (15, 14), (3, 3), dict(groups=4, padding=1))
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, groups=4, method="gemm")
        assert plan.workspace_bytes <= limit
        assert_exact(cupyconv.conv(x, weight, padding=1, groups=4, method="gemm"), expected, "float32")
    with cupyconv.options(workspace_limit=200), pytest.raises(ValueError, match="bytes of workspace, the limit is 200"):
        cupyconv.conv(x, weight, padding=1, groups=4, method="gemm")


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(padding=(1, 0)), dict(padding=1, padding_mode="edge"), dict(padding=((1, 1), (1, 0)))],
    ids=["none", "no columns", "a border", "one side"],
)
def test_rows_that_are_longer_than_those_of_the_result_have_other_ways(settings):
    x, weight, _ = layer(1, 4, 6, (7, 6), (3, 3), dict(groups=2, padding=1))
    with pytest.raises(ValueError, match="no implementation applies"):
        cupyconv.explain(cupyconv.conv, x, weight, groups=2, method="gemm", **settings)


def test_a_row_is_not_cut(monkeypatch):
    """A row stays whole however long it is, and however few rows there are for threads."""
    monkeypatch.setattr(shifts, "COLUMNS_BLOCK", 1000)
    monkeypatch.setattr(shifts, "LONG_PRODUCT", 1)
    x, weight, expected = layer(1, 2, 3, (3, 90), (3, 3), dict(padding=1))
    for threads in (1, 2, 4):
        with cupyconv.options(threads=threads):
            (loop,) = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm").steps
            assert loop.block[3] == 90
            assert_exact(cupyconv.conv(x, weight, padding=1, method="gemm"), expected, "float32")


#: Channels, outputs, size, kernel, stride, groups, dtype.
SHIFTED = {
    "32 groups": (128, 128, (28, 28), (3, 3), 1, 32, "float32"),
    "groups of 16 channels": (512, 512, (7, 7), (3, 3), 1, 32, "float32"),
    "groups and a stride": (256, 256, (28, 28), (3, 3), 2, 32, "float32"),
    "stride": (16, 16, (59, 59), (3, 3), 2, 1, "float32"),
    "one row": (96, 64, (42, 10), (1, 5), 1, 1, "float32"),
    "float64": (96, 32, (13, 13), (3, 3), 1, 1, "float64"),
}


@pytest.mark.parametrize("channels, outputs, size, kernel, stride, groups, dtype", SHIFTED.values(), ids=SHIFTED)
def test_layers_of_many_groups_and_those_without_winograds_method_are_shifted(
    channels, outputs, size, kernel, stride, groups, dtype, monkeypatch
):
    monkeypatch.undo()
    forget_calls()
    x, weight = np.zeros((1, channels, *size), dtype), np.zeros((outputs, channels // groups, *kernel), dtype)
    padding = tuple(taps // 2 for taps in kernel)
    with cupyconv.options(threads=1):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=padding, stride=stride, groups=groups)
    assert [step.name for step in plan.steps] == ["shifted columns"]
