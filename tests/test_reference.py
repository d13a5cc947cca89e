"""Tests of the tests: reference, tolerance and generated cases, against SciPy, np.pad and arithmetic by hand.

A reference with the same mistake as the package would let every test pass.  So nothing here uses the package, and each
fact comes from another source than the line that it tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import given
from strategies import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    OUT_LAYOUTS,
    ConvCase,
    as_dtype,
    constant_where_broadcast,
    conv_cases,
    embed,
    with_layout,
)
from tolerance import assert_close, assert_exact, tolerance

generator = np.random.default_rng(2)


def integers(*shape: int) -> np.ndarray:
    return generator.integers(-4, 5, shape).astype(np.float64)


def row(*values: float) -> np.ndarray:
    """Return a 1-D image or kernel of one channel, (1, 1, size)."""
    return np.array(values, np.float64)[None, None]


def conv_row(x: np.ndarray, weight: np.ndarray, **parameters: Any) -> list[float]:
    """Return the one row of a 1-D convolution's result."""
    return reference.conv(x, weight, **parameters)[0, 0].tolist()


# --- convolution, by hand -------------------------------------------------------------------------------------


def test_it_is_a_correlation_not_a_flipped_convolution() -> None:
    assert conv_row(row(1, 2, 3, 4), row(1, 10)) == [21, 32, 43]


def test_stride_keeps_every_second_position() -> None:
    assert conv_row(row(1, 2, 3, 4, 5), row(1, 10), stride=2) == [21, 43]


def test_dilation_is_counted_once() -> None:
    # Taps at 0, 2, 4: a kernel of reach 4 has 6 - 4 = 2 positions in 6 elements.
    assert conv_row(row(1, 2, 3, 4, 5, 6), row(1, 10, 100), dilation=2) == [531, 642]


def test_asymmetric_padding_keeps_its_sides() -> None:
    assert conv_row(row(1, 2, 3), row(1, 10), padding=((2, 0),)) == [0, 10, 21, 32]
    assert conv_row(row(1, 2, 3), row(1, 10), padding=((0, 2),)) == [21, 32, 3, 0]


def test_same_with_an_even_kernel_pads_one_more_after() -> None:
    assert conv_row(row(1, 2, 3), row(1, 10), padding="same") == [21, 32, 3]
    assert conv_row(row(1, 2, 3), row(1, 10), padding="same_lower") == [10, 21, 32]


def test_same_counts_dilation() -> None:
    # Reach 3 * (2 - 1) = 3: one zero before, two after.
    assert conv_row(row(1, 2, 3, 4), row(1, 10), padding="same", dilation=3) == [30, 41, 2, 3]
    assert conv_row(row(1, 2, 3, 4), row(1, 10), padding="same_lower", dilation=3) == [20, 30, 41, 2]


def test_same_with_stride_has_as_many_outputs_as_strides_begin() -> None:
    # Five elements, stride 2: ceil(5 / 2) = 3 outputs, at 0, 2, 4 of the image padded by (1, 1).
    assert conv_row(row(1, 2, 3, 4, 5), row(1, 10, 100), padding="same", stride=2) == [210, 432, 54]
    # Four elements: outputs at 0 and 2 read indices 0 to 4 only, so one zero, and it goes after.
    assert conv_row(row(1, 2, 3, 4), row(1, 10, 100), padding="same", stride=2) == [321, 43]
    # A stride beyond the kernel needs no padding and gets no negative one.
    assert conv_row(row(1, 2, 3, 4, 5, 6), row(1), padding="same", stride=3) == [1, 4]


def test_full_and_causal() -> None:
    assert conv_row(row(1, 2, 3), row(1, 10), padding="full") == [10, 21, 32, 3]
    assert conv_row(row(1, 2, 3), row(1, 10), padding="causal") == [10, 21, 32]
    assert conv_row(row(1, 2, 3, 4), row(1, 10), padding="causal", dilation=2) == [10, 20, 31, 42]


def test_padding_of_each_axis_is_its_own() -> None:
    result = reference.conv(np.ones((1, 1, 2, 3)), np.ones((1, 1, 1, 1)), padding=((1, 0), (0, 2)))
    assert result[0, 0].tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "seen"),
    [
        ("constant", [0, 0, 0, 1, 2, 3, 0, 0, 0]),
        ("edge", [1, 1, 1, 1, 2, 3, 3, 3, 3]),
        ("wrap", [1, 2, 3, 1, 2, 3, 1, 2, 3]),
        ("reflect", [2, 3, 2, 1, 2, 3, 2, 1, 2]),  # the third element is beyond the image and is reflected again
        ("symmetric", [3, 2, 1, 1, 2, 3, 3, 2, 1]),
    ],
)
def test_padding_modes(mode: str, seen: list[float]) -> None:
    assert conv_row(row(1, 2, 3), row(1), padding=3, padding_mode=mode) == seen


def test_groups_see_only_their_channels() -> None:
    x = np.array([1.0, 2, 3, 4]).reshape(1, 4, 1)
    weight = np.array([[1.0, 10], [100, 1000]]).reshape(2, 2, 1)
    assert reference.conv(x, weight, groups=2).ravel().tolist() == [21, 4300]


def test_a_depthwise_multiplier_counts_outputs_within_a_channel() -> None:
    x = np.array([1.0, 2]).reshape(1, 2, 1)
    weight = np.array([1.0, 10, 100, 1000]).reshape(4, 1, 1)
    assert reference.conv(x, weight, groups=2).ravel().tolist() == [1, 10, 200, 2000]


def test_a_group_may_straddle_two_inputs() -> None:
    x = integers(2, 6, 5)
    weight, parts = integers(4, 3, 2), [x[:, :2], x[:, 2:3], x[:, 3:]]
    assert np.array_equal(reference.conv(parts, weight, groups=2), reference.conv(x, weight, groups=2))


def test_the_order_of_the_epilogue() -> None:
    # (2 * 3 + bias -10) = -4, + residual 1 = -3, leaky_relu = -0.3.
    result = reference.conv(
        row(2), row(3), np.array([-10.0]), residual=np.ones((1, 1, 1)), activation=("leaky_relu", 0.1)
    )
    assert result.item() == pytest.approx(-0.3)


def test_a_missing_batch_axis_is_missing_in_the_result() -> None:
    x, weight, bias, residual = integers(2, 4, 5), integers(3, 2, 2, 2), integers(3), integers(3, 3, 4)
    with_batch = reference.conv(x[None], weight, bias, residual=residual[None])
    assert np.array_equal(reference.conv(x, weight, bias, residual=residual), with_batch[0])
    assert np.array_equal(reference.conv([x[:1], x[1:]], weight, bias, residual=residual), with_batch[0])


def test_empty_axes() -> None:
    assert reference.conv(np.ones((0, 2, 4)), np.ones((3, 2, 2))).shape == (0, 3, 3)
    no_channels = reference.conv(np.ones((2, 0, 4)), np.ones((3, 0, 2)), np.array([1.0, 2, 3]))
    assert no_channels[:, :, 0].tolist() == [[1, 2, 3], [1, 2, 3]]


def test_complex_products_are_not_conjugated() -> None:
    assert reference.conv(row(1) * 1j, row(1) * 1j).item() == -1
    assert reference.conv(row(3), row(1) * 1j).item() == 3j


def test_non_finite_values_reach_the_outputs_that_read_them() -> None:
    result = conv_row(row(0, 0, np.inf, 0, 0), row(1, 1), dilation=2)
    assert result == [np.inf, 0, np.inf]


# --- convolution, by SciPy ------------------------------------------------------------------------------------


def sum_over_channels(correlate: Any, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return every sample and output channel as a sum of single-channel correlations."""
    return np.array(
        [[sum(correlate(channel, taps) for channel, taps in zip(image, kernel)) for kernel in weight] for image in x]
    )


@pytest.mark.parametrize("spatial, kernel", [((9,), (4,)), ((6, 7), (3, 2)), ((4, 5, 6), (2, 3, 1))])
@pytest.mark.parametrize("mode", ["valid", "full"])
def test_against_scipy_signal(spatial: tuple[int, ...], kernel: tuple[int, ...], mode: str) -> None:
    signal = pytest.importorskip("scipy.signal")
    x, weight = integers(2, 3, *spatial), integers(2, 3, *kernel)
    expected = sum_over_channels(lambda a, b: signal.correlate(a, b, mode, "direct"), x, weight)
    assert np.array_equal(reference.conv(x, weight, padding=mode), expected)


@pytest.mark.parametrize("spatial, kernel", [((9,), (5,)), ((6, 7), (3, 5)), ((4, 5, 6), (3, 3, 1))])
def test_stride_and_dilation_against_scipy_signal(spatial: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    """Dilation is a correlation with zeros between the taps; stride keeps every n-th result."""
    signal = pytest.importorskip("scipy.signal")
    rank = len(spatial)
    stride, dilation = (2, 1, 3)[:rank], (2, 3, 2)[:rank]
    x, weight = integers(2, 3, *spatial), integers(2, 3, *kernel)
    spread = np.zeros((2, 3, *(d * (k - 1) + 1 for d, k in zip(dilation, kernel))))
    spread[(..., *(slice(None, None, d) for d in dilation))] = weight
    expected = sum_over_channels(lambda a, b: signal.correlate(a, b, "full", "direct"), x, spread)
    expected = expected[(..., *(slice(None, None, s) for s in stride))]
    result = reference.conv(x, weight, stride=stride, dilation=dilation, padding="full")
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("spatial, kernel", [((7,), (4,)), ((4, 5), (3, 2)), ((4, 3, 5), (2, 3, 4))])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("constant", "constant"), ("reflect", "mirror"), ("symmetric", "reflect"), ("edge", "nearest"), ("wrap", "wrap")],
)
@pytest.mark.parametrize("padding", ["same", "same_lower"])
def test_against_scipy_ndimage(
    spatial: tuple[int, ...], kernel: tuple[int, ...], ours: str, theirs: str, padding: str
) -> None:
    """SciPy centres an even kernel right of its middle ("same_lower"); an origin of -1 moves it left of its middle."""
    ndimage = pytest.importorskip("scipy.ndimage")
    origin = [-1 if k % 2 == 0 and padding == "same" else 0 for k in kernel]
    x, weight = integers(2, 2, *spatial), integers(3, 2, *kernel)
    expected = sum_over_channels(lambda a, b: ndimage.correlate(a, b, mode=theirs, origin=origin), x, weight)
    assert np.array_equal(reference.conv(x, weight, padding=padding, padding_mode=ours), expected)


@given(conv_cases(dtypes=("float64",)))
def test_a_padding_is_the_same_as_padding_first(case: ConvCase) -> None:
    arrays = case.arrays()
    batch_and_channels = [(0, 0)] * (case.channel_axis + 1)
    padded = [
        np.pad(x, [*batch_and_channels, *case.padding_pairs], mode=case.padding_mode)
        for x in reference.sequence(arrays["x"])
    ]
    unpadded = {**case.parameters, "padding": "valid", "padding_mode": "constant"}
    result = reference.conv(**arrays, **case.parameters)
    assert np.array_equal(reference.conv(**{**arrays, "x": padded}, **unpadded), result)


# --- merge and columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spatial", [(), (3,), (2, 3), (2, 1, 2), (2, 1, 2, 2)])
def test_linmerge_is_a_matrix_product_at_every_pixel(spatial: tuple[int, ...]) -> None:
    xs, weight, bias = [integers(2, channels, *spatial) for channels in (1, 3, 2)], integers(4, 6), integers(4)
    pixels_last = np.moveaxis(np.concatenate(xs, axis=1), 1, -1)
    expected = np.moveaxis(pixels_last @ weight.T + bias, -1, 1)
    residual = integers(*expected.shape)
    assert np.array_equal(reference.linmerge(xs, weight, bias), expected)
    assert np.array_equal(
        reference.linmerge(xs, weight, bias, residual=residual, activation="relu"), np.maximum(expected + residual, 0)
    )


def test_im2col_by_hand() -> None:
    x = np.array([[[1.0, 2, 3], [4, 5, 6]]])  # one sample, two channels
    assert reference.im2col(x, (2,), padding=((1, 0),))[0].tolist() == [[0, 1, 2], [1, 2, 3], [0, 4, 5], [4, 5, 6]]
    assert reference.im2col(x[0], (2,), dilation=2).tolist() == [[1], [3], [4], [6]]


def test_col2im_by_hand() -> None:
    # Two windows of two taps over three pixels: the middle pixel is in both.
    columns = np.array([[1.0, 2], [10, 20]])
    assert reference.col2im(columns, (3,), (2,)).tolist() == [[1, 12, 20]]
    # With padding of one before, the first column's first tap reads the padding.
    assert reference.col2im(columns, (2,), (2,), padding=((1, 0),)).tolist() == [[12, 20]]


@given(conv_cases(dtypes=("float64",), layouts=("c_order",)))
def test_columns_times_weight_is_the_convolution_and_col2im_is_the_adjoint(case: ConvCase) -> None:
    window = {name: case.parameters[name] for name in ("stride", "padding", "dilation")}
    arrays = case.arrays()
    columns = reference.im2col(arrays["x"], case.kernel, **window)
    weight = generator.integers(-3, 4, (2, sum(case.channels), *case.kernel)).astype(float)
    product = np.matmul(weight.reshape(2, -1), columns)
    convolution = reference.conv(arrays["x"], weight, **window)
    assert np.array_equal(product.reshape(convolution.shape), convolution)

    # <im2col(x), c> = <x, col2im(c)> for every c.
    other = generator.integers(-3, 4, columns.shape).astype(float)
    image = np.concatenate(reference.sequence(arrays["x"]), axis=case.channel_axis)
    back = reference.col2im(other, case.spatial, case.kernel, **window)
    assert back.shape == image.shape
    assert np.vdot(columns, other) == np.vdot(image, back)


# --- activations ----------------------------------------------------------------------------------------------

POINTS = (-30.0, -3.5, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 3.0, 6.5, 30.0)


def plain_softplus(v: float) -> float:
    return math.log1p(math.exp(v))


def plain_gelu_tanh(v: float) -> float:
    return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)))


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        (None, lambda v: v),
        ("relu", lambda v: max(v, 0)),
        ("relu6", lambda v: min(max(v, 0), 6)),
        ("leaky_relu", lambda v: v if v > 0 else 0.01 * v),
        (("leaky_relu", 0.2), lambda v: v if v > 0 else 0.2 * v),
        (("clip", -2, 5), lambda v: min(max(v, -2), 5)),
        ("elu", lambda v: v if v > 0 else math.exp(v) - 1),
        (("elu", 0.5), lambda v: v if v > 0 else 0.5 * (math.exp(v) - 1)),
        ("sigmoid", lambda v: math.exp(v) / (1 + math.exp(v))),
        ("hard_sigmoid", lambda v: min(max(0.2 * v + 0.5, 0), 1)),
        (("hard_sigmoid", 0.1, 0.3), lambda v: min(max(0.1 * v + 0.3, 0), 1)),
        (("hard_sigmoid", 0.1), lambda v: min(max(0.1 * v + 0.5, 0), 1)),
        ("hardswish", lambda v: v * min(max(v + 3, 0), 6) / 6),
        ("tanh", math.tanh),
        ("gelu", lambda v: v / 2 * math.erfc(-v / math.sqrt(2))),
        ("gelu_tanh", plain_gelu_tanh),
        ("silu", lambda v: v / (1 + math.exp(-v))),
        ("mish", lambda v: v * math.tanh(plain_softplus(v))),
        ("softplus", plain_softplus),
        ("affine", lambda v: v),
        (("affine", 2, 1), lambda v: 2 * v + 1),
        ("thresholded_relu", lambda v: v if v > 1 else 0),
        (("thresholded_relu", 2.5), lambda v: v if v > 2.5 else 0),
        ("scaled_tanh", math.tanh),
        (("scaled_tanh", 2, 0.5), lambda v: 2 * math.tanh(v / 2)),
        ("softsign", lambda v: v / (1 + abs(v))),
    ],
)
def test_activation_by_its_formula(spec: Any, formula: Any) -> None:
    result = reference.activation(spec, np.array(POINTS))
    assert result.tolist() == pytest.approx([formula(v) for v in POINTS], rel=1e-12, abs=1e-14)


def test_activations_against_scipy_special() -> None:
    special = pytest.importorskip("scipy.special")
    v = np.array(POINTS)
    for name, expected in [
        ("sigmoid", special.expit(v)),
        ("gelu", v * special.ndtr(v)),
        ("softplus", -special.log_expit(-v)),
        ("elu", np.where(v > 0, v, special.expm1(v))),
        ("silu", v * special.expit(v)),
    ]:
        np.testing.assert_allclose(reference.activation(name, v), expected, rtol=1e-12, atol=1e-14, err_msg=name)


def test_activations_far_out_neither_overflow_nor_warn() -> None:
    far = np.array([-1000.0, 1000.0])
    for name, expected in [("softplus", [0, 1000]), ("sigmoid", [0, 1]), ("mish", [0, 1000]), ("elu", [-1, 1000])]:
        assert reference.activation(name, far).tolist() == expected, name


@pytest.mark.parametrize("spec", [spec for spec in ACTIVATIONS if spec is not None], ids=str)
def test_nan_passes_through_a_convolutions_activation(spec: Any) -> None:
    assert np.isnan(reference.activation(spec, np.array([np.nan]))).all()


# --- batch normalisation and ONNX -----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_a_folded_batch_norm_is_the_norm_after_the_convolution(groups: int) -> None:
    x, weight, bias = integers(2, 4, 5), integers(6, 4 // groups, 2), integers(6)
    mean, gamma, beta = integers(6), integers(6), integers(6)
    var = np.abs(integers(6)) + 1
    y = reference.conv(x, weight, bias, groups=groups)
    expected = (y - mean[:, None]) / np.sqrt(var + 1e-3)[:, None] * gamma[:, None] + beta[:, None]
    folded = reference.fold_batchnorm(weight, bias, mean=mean, var=var, gamma=gamma, beta=beta, eps=1e-3, groups=groups)
    np.testing.assert_allclose(reference.conv(x, *folded, groups=groups), expected, rtol=1e-12, atol=1e-12)


def test_batch_norm_without_bias_gamma_and_beta() -> None:
    weight, bias = reference.fold_batchnorm(np.ones((1, 1, 1)), None, mean=np.array([3.0]), var=np.array([4.0]), eps=0)
    assert (weight.item(), bias.item()) == (0.5, -1.5)


def test_a_transposed_weight_is_scaled_along_its_output_channels() -> None:
    # Two inputs and three outputs in each of two groups; every output has its own power of ten.
    scales = np.array([1.0, 10, 100, 1000, 10000, 100000])
    weight, _ = reference.fold_batchnorm(
        np.ones((4, 3, 1)), None, mean=np.zeros(6), var=np.ones(6), gamma=scales, eps=0, groups=2, transposed=True
    )
    assert weight[:, :, 0].tolist() == [[1, 10, 100], [1, 10, 100], [1000, 10000, 100000], [1000, 10000, 100000]]


def test_onnx_lists_all_befores_first() -> None:
    assert reference.onnx_padding([1, 2, 3, 4]) == ((1, 3), (2, 4))
    assert reference.onnx_padding([1, 2]) == ((1, 2),)
    assert reference.onnx_padding(None) == 0
    names = {name: reference.onnx_padding(None, name) for name in ("VALID", "SAME_UPPER", "SAME_LOWER")}
    assert names == {"VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same_lower"}


# --- tolerance ------------------------------------------------------------------------------------------------


def products(dtype: Any, terms: int, results: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Return standard normal factors in `dtype`."""
    return generator.standard_normal((2, results, terms)).astype(dtype)


def accumulate(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """Return sums of products, accumulated one at a time in `dtype`."""
    total = np.zeros(len(a), dtype)
    for i in range(a.shape[1]):
        total = total + a[:, i].astype(dtype) * b[:, i].astype(dtype)
    return total


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("terms", [1, 9, 300])
def test_honest_rounding_is_close(name: str, terms: int) -> None:
    a, b = products(as_dtype(name), terms)
    exact = np.sum(reference.wide(a) * reference.wide(b), axis=1)
    assert_close(accumulate(a, b, np.float32).astype(as_dtype(name)), exact, as_dtype(name), terms)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_sixteen_bit_accumulator_is_caught(name: str) -> None:
    a, b = products(as_dtype(name), 64)
    exact = np.sum(reference.wide(a) * reference.wide(b), axis=1)
    with pytest.raises(AssertionError, match="values are wrong"):
        assert_close(accumulate(a, b, as_dtype(name)), exact, as_dtype(name), 64)


def test_a_factor_widens_the_accumulators_part_and_not_the_last_rounding() -> None:
    expected = np.array([1024.0])
    once, twice = (tolerance(expected, np.float16, 9, magnitude=1.0, factor=factor) for factor in (1, 2))
    assert twice - once == pytest.approx(once - 1.0)  # 1 ulp of 1024 is 1


def test_float32_in_a_float64_result_is_caught() -> None:
    a, b = products(np.float64, 9)
    exact = np.sum(a * b, axis=1)
    with pytest.raises(AssertionError, match="values are wrong"):
        assert_close(accumulate(a, b, np.float32).astype(np.float64), exact, np.float64, 9)


@pytest.mark.parametrize("name", DTYPES)
def test_the_comparisons_look_at_shape_and_dtype(name: str) -> None:
    dtype = as_dtype(name)
    other = np.dtype(np.float32 if dtype != np.float32 else np.float64)
    expected = np.array([[1.0, 2.0]])
    assert_exact(expected.astype(dtype), expected, dtype)
    assert_close(expected.astype(dtype), expected, dtype, 1)
    for judge in (assert_exact, lambda *args: assert_close(*args, terms=1)):
        with pytest.raises(AssertionError, match="dtype"):
            judge(expected.astype(other), expected, dtype)
        with pytest.raises(AssertionError, match="shape"):
            judge(expected[0].astype(dtype), expected, dtype)
        with pytest.raises(AssertionError, match=r"1 of 2 values are wrong, the worst at \(0, 1\)"):
            judge(np.array([[1.0, 2.125]]).astype(dtype), expected, dtype)


def test_an_expectation_that_is_not_exact_cannot_be_asserted_exactly() -> None:
    expected = np.array([2049.0])  # float16 has 2048 and 2050
    with pytest.raises(AssertionError, match="not exact in float16"):
        assert_exact(expected.astype(np.float16), expected, np.float16)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_compared_by_place(value: float) -> None:
    expected = np.array([1.0, value])
    assert_exact(expected.astype(np.float32), expected, np.float32)
    assert_close(expected.astype(np.float32), expected, np.float32, 1)
    for wrong in ([value, 1.0], [1.0, 2.0], [value, value], [1.0, -value if np.isinf(value) else np.inf]):
        with pytest.raises(AssertionError, match="values are wrong"):
            assert_close(np.array(wrong, np.float32), expected, np.float32, 1)


def test_which_part_of_a_complex_is_not_finite_does_not_matter() -> None:
    expected = np.array([complex(np.nan, 1.0), 1.0])
    assert_close(np.array([complex(0.0, np.inf), 1.0]), expected, np.complex128, 1)
    with pytest.raises(AssertionError, match="values are wrong"):
        assert_close(np.array([1.0, complex(0.0, np.inf)]), expected, np.complex128, 1)


# --- generated cases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape, channel_axis", [((2, 3, 4), 1), ((3, 4, 5), 0), ((2, 3, 1, 2, 4), 1), ((0, 2, 3), 1)])
def test_a_layout_changes_strides_and_no_values(layout: str, shape: tuple[int, ...], channel_axis: int) -> None:
    array = constant_where_broadcast(integers(*shape), layout, channel_axis=channel_axis)
    view = with_layout(array, layout, channel_axis=channel_axis)
    assert np.array_equal(view, array)
    assert view.shape == shape
    if array.size and layout not in ("c_order", "unaligned"):
        assert not view.flags.c_contiguous


def test_layouts_keep_the_class_that_the_device_gives() -> None:
    class DeviceArray(np.ndarray):
        pass

    for layout in LAYOUTS:
        array = constant_where_broadcast(integers(2, 3, 4), layout)
        view = with_layout(array, layout, lambda host: np.array(host).view(DeviceArray))
        assert type(view) is DeviceArray, layout


def test_what_the_layouts_are() -> None:
    array, item = integers(2, 3, 4), 8
    assert with_layout(array, "channels_last").strides == (12 * item, item, 3 * item)
    assert with_layout(array, "reversed").strides == (-12 * item, -4 * item, -item)
    assert with_layout(array, "fortran").flags.f_contiguous
    assert with_layout(constant_where_broadcast(array, "broadcast_last"), "broadcast_last").strides[2] == 0
    unaligned = with_layout(array, "unaligned")
    assert unaligned.flags.c_contiguous
    assert unaligned.ctypes.data - unaligned.base.ctypes.data == item
    assert with_layout(array, "window").strides == (42 * item, 7 * item, item)


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_between_the_values_there_is_only_nan(layout: str) -> None:
    base, view = embed(np.ones((2, 3, 4)), layout)
    assert view(base).size == np.count_nonzero(base == 1)
    assert np.count_nonzero(np.isnan(base)) == base.size - 24
    view(base)[...] = 2
    assert np.count_nonzero(base == 2) == 24


@given(conv_cases())
def test_a_case_is_valid_exact_and_repeatable(case: ConvCase) -> None:
    arrays = case.arrays()
    expected = reference.conv(**arrays, **case.parameters)
    assert expected.shape == case.out_shape
    assert min(case.out_spatial) >= 1
    assert_exact(expected.astype(case.result_dtype), expected, case.result_dtype)
    assert eval(repr(case)) == case  # the repr can be pasted into a test

    again, views = case.arrays(), case.views(arrays)
    for name in ("weight", "bias", "residual"):
        assert arrays[name] is None or np.array_equal(views[name], again[name])
    for view, x in zip(reference.sequence(views["x"]), reference.sequence(again["x"]), strict=True):
        assert view.dtype == as_dtype(case.dtype)
        assert np.array_equal(view, x)
    out = case.new_out()
    assert out is None or (out.shape, out.dtype) == (case.out_shape, case.result_dtype)


@given(conv_cases(activations=ACTIVATIONS))
def test_random_data_have_the_cases_dtypes_and_are_judged_by_their_own_magnitude(case: ConvCase) -> None:
    arrays = case.arrays(integer=False)
    assert all(x.dtype == as_dtype(case.dtype) for x in reference.sequence(arrays["x"]))
    assert arrays["weight"].dtype == as_dtype(case.weight_dtype or case.dtype)
    expected, magnitude = reference.conv(**arrays, **case.parameters), case.magnitude(arrays)
    linear = reference.conv(**arrays, **{**case.parameters, "activation": None})
    assert np.all(np.abs(linear) <= magnitude * (1 + 1e-12))
    assert_close(expected.astype(case.result_dtype), expected, case.result_dtype, case.terms, magnitude=magnitude)
