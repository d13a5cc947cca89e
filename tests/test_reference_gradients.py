"""The gradient reference against results by hand, adjoints, finite differences, SciPy, and PyTorch if it is installed.

As in `test_reference`, nothing here uses the package.  An adjoint identity ties each gradient to the forward function,
which `test_reference` checks against SciPy and np.pad.  An identity does not show which part of the canvas a transposed
convolution keeps, or which of two equal maxima wins, so these are worked out by hand.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import assume, given
from strategies import ACTIVATIONS, ConvCase, PoolCase, TransposedCase, conv_cases, pool_cases, transposed_cases

generator = np.random.default_rng(4)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
FLOAT64 = dict(dtypes=("float64",), layouts=("c_order",))
REAL_OR_COMPLEX = dict(dtypes=("float64", "complex128"), layouts=("c_order",))


def integers(*shape: int) -> np.ndarray:
    return generator.integers(-4, 5, shape).astype(np.float64)


def row(*values: float) -> np.ndarray:
    """Return a 1-D image or kernel of one channel, (1, 1, size)."""
    return np.array(values, np.float64)[None, None]


def inner(a: Any, b: Any) -> complex:
    """Return <a, b>, the sum of conj(a) b over all arrays of two lists."""
    return sum(np.vdot(one, other) for one, other in zip(reference.sequence(a), reference.sequence(b)))


# --- by hand --------------------------------------------------------------------------------------------------


def test_input_gradient_by_hand() -> None:
    # y = [x0 + 10 x1, x1 + 10 x2]
    assert reference_gradients.conv_grad_input(row(1, 2), row(1, 10), (1, 1, 3)).tolist() == [[[1, 12, 20]]]


def test_weight_gradient_by_hand() -> None:
    # dw0 = 1 x0 + 2 x1, dw1 = 1 x1 + 2 x2
    assert reference_gradients.conv_grad_weight(row(1, 2), row(3, 5, 7), (2,)).tolist() == [[[13, 19]]]


def test_elements_that_no_window_reaches_have_no_gradient() -> None:
    gradient = reference_gradients.conv_grad_input(row(1, 1), row(1, 1), (1, 1, 6), stride=3)
    assert gradient.tolist() == [[[1, 1, 0, 1, 1, 0]]]


@pytest.mark.parametrize(
    ("mode", "folded"),
    [
        ("constant", [4, 8, 16]),
        ("edge", [1 + 2 + 4, 8, 16 + 32]),
        ("wrap", [4 + 32, 8 + 1, 16 + 2]),
        ("reflect", [4, 8 + 2 + 32, 16 + 1]),
        ("symmetric", [4 + 2, 8 + 1, 16 + 32]),
    ],
)
def test_padding_modes_fold_back(mode: str, folded: list[float]) -> None:
    grad = row(1, 2, 4, 8, 16, 32)  # for the padded row [_, _, x0, x1, x2, _]
    gradient = reference_gradients.conv_grad_input(grad, row(1), (1, 1, 3), padding=((2, 1),), padding_mode=mode)
    assert gradient.tolist() == [[folded]]


def test_complex_gradients_conjugate_the_other_factor() -> None:
    assert reference_gradients.conv_grad_input(row(1), row(1) * 1j, (1, 1, 1)).item() == -1j
    assert reference_gradients.conv_grad_weight(row(1), row(1) * 1j, (1,)).item() == -1j


def test_the_gradient_of_a_real_argument_is_real() -> None:
    # y = i x, so <y, i> = x: dy/dx is 1 for grad i, and 0 for grad 1.
    for grad, expected in ((1j, 1), (1, 0)):
        got = reference_gradients.conv_gradients(row(1) * grad, row(5), row(1) * 1j)
        assert got.x.dtype == np.float64 and got.x.item() == expected
        assert got.weight.item() == 5 * grad


def test_transposed_stamps_the_kernel() -> None:
    transposed = reference_gradients.conv_transpose
    assert transposed(row(1, 2), row(1, 10, 100)).tolist() == [[[1, 12, 120, 200]]]
    assert transposed(row(1, 2), row(1, 10), stride=3).tolist() == [[[1, 10, 0, 2, 20]]]
    assert transposed(row(1, 2), row(1, 10), dilation=2).tolist() == [[[1, 2, 10, 20]]]
    assert transposed(row(1, 2), row(1, 10), np.array([7.0])).tolist() == [[[8, 19, 27]]]
    assert transposed(row(1) * 1j, row(1) * 1j).item() == -1, "nothing is conjugated"


def test_transposed_padding_cuts_and_output_padding_uncovers_it_again() -> None:
    transposed = reference_gradients.conv_transpose
    x, weight = row(1, 2), row(1, 10, 100)  # the whole canvas, at stride 2, is [1, 10, 102, 20, 200]
    assert transposed(x, weight, stride=2, padding=((1, 0),)).tolist() == [[[10, 102, 20, 200]]]
    assert transposed(x, weight, stride=2, padding=((0, 2),)).tolist() == [[[1, 10, 102]]]
    assert transposed(x, weight, stride=2, padding=1).tolist() == [[[10, 102, 20]]]
    assert transposed(x, weight, stride=2, padding=1, output_padding=1).tolist() == [[[10, 102, 20, 200]]]
    assert transposed(x, weight, stride=2, output_padding=1).tolist() == [[[1, 10, 102, 20, 200, 0]]]


def test_transposed_output_shape_cuts_onnxs_halves() -> None:
    def transposed(size: int, padding: Any) -> list[float]:
        x, weight = row(1, 2), row(1, 10, 100)  # [1, 10, 102, 20, 200]
        return reference_gradients.conv_transpose(x, weight, stride=2, output_shape=(size,), padding=padding)[
            0, 0
        ].tolist()

    assert transposed(4, "same") == [1, 10, 102, 20], "SAME_UPPER cuts the odd element at the end"
    for other in ("same_lower", 0, "valid"):
        assert transposed(4, other) == [10, 102, 20, 200], "everything else at the beginning"
    for padding in ("same", "same_lower", 0):
        assert transposed(3, padding) == [10, 102, 20]
        assert transposed(7, padding) == [1, 10, 102, 20, 200, 0, 0], "what no stamp reaches is at the end"


def test_transposed_same_is_size_times_stride() -> None:
    x, weight = row(1, 2), row(1, 10, 100)
    same = reference_gradients.conv_transpose(x, weight, stride=2, padding="same")
    lower = reference_gradients.conv_transpose(x, weight, stride=2, padding="same_lower")
    assert (same.tolist(), lower.tolist()) == ([[[1, 10, 102, 20]]], [[[10, 102, 20, 200]]])
    assert reference_gradients.conv_transpose(x, row(3), stride=3, padding="same").tolist() == [[[3, 0, 0, 6, 0, 0]]]


def test_onnxs_own_example_of_a_given_output_shape() -> None:
    """Values are those of ONNX's tests for strides (3, 2), output_shape (10, 8), with zeros at both ends."""
    x, weight = np.arange(9.0).reshape(1, 1, 3, 3), np.ones((1, 2, 3, 3))
    y = reference_gradients.conv_transpose(x, weight, stride=(3, 2), output_shape=(10, 8))
    line = [[0, 0, 1, 1, 3, 2, 2, 0], [3, 3, 7, 4, 9, 5, 5, 0], [6, 6, 13, 7, 15, 8, 8, 0]]
    expected = [line[0]] * 3 + [line[1]] * 3 + [line[2]] * 3 + [[0] * 8]
    assert y[0, 0].tolist() == expected and y[0, 1].tolist() == expected


def test_transposed_groups_stay_apart() -> None:
    x = np.array([1.0, 2, 3, 4]).reshape(1, 4, 1)
    weight = np.array([[1.0, 10], [2, 20], [100, 1000], [200, 2000]]).reshape(4, 2, 1)
    y = reference_gradients.conv_transpose(x, weight, groups=2)
    assert y.ravel().tolist() == [1 + 4, 10 + 40, 300 + 800, 3000 + 8000]


def test_pooling_by_hand() -> None:
    pool = reference_gradients.max_pool
    assert pool(row(1, 3, 2, 5, 4), (2,)).tolist() == [[[3, 5]]], "stride is the kernel, what is left over is not read"
    assert pool(row(1, 3, 2, 5, 4), (2,), stride=1).tolist() == [[[3, 3, 5, 5]]]
    assert pool(row(1, 3, 2, 5, 4), (2,), stride=1, dilation=3).tolist() == [[[5, 4]]]
    assert pool(row(-1, -3), (2,), stride=1, padding=1).tolist() == [[[-1, -1, -3]]], "padding never wins"
    assert pool(row(-1, -3), (1,), padding=((0, 2),)).tolist() == [[[-1, -3, -np.inf, -np.inf]]]
    assert pool(row(-1, -3, -2), (2,), padding="same").tolist() == [[[-1, -2]]]
    assert pool(row(-1, -3, -2), (2,), padding="same_lower").tolist() == [[[-1, -2]]]
    assert pool(row(-4, -3, -2), (2,), padding="same_lower").tolist() == [[[-4, -2]]]
    np.testing.assert_array_equal(pool(row(1, np.nan, 2, 5), (2,)), [[[np.nan, 5]]])
    assert [y.shape for y in pool([np.ones((2, 3, 4)), np.ones((2, 1, 4))], (2,))] == [(2, 3, 2), (2, 1, 2)]
    assert isinstance(pool((row(1),), (1,)), list)


def test_pooling_gradient_goes_to_the_first_of_equals() -> None:
    def gradient(grad: np.ndarray, x: np.ndarray, *args: Any, **kwargs: Any) -> list[float]:
        return reference_gradients.max_pool_gradients(grad, x, *args, **kwargs).x[0, 0].tolist()

    assert gradient(row(1, 2), row(7, 7, 1, 5), (2,)) == [1, 0, 0, 2]
    assert gradient(row(1, 2, 4), row(3, 7, 7, 1), (2,), stride=1) == [0, 3, 4, 0]
    assert gradient(row(1, 2), row(1, np.nan, np.nan, 3), (2,)) == [0, 1, 2, 0]
    assert gradient(row(1), row(5, np.nan, np.nan), (3,)) == [0, 1, 0], "a NaN is larger, and the first NaN is first"
    assert gradient(row(1, 2), row(-np.inf, -np.inf), (2,), stride=1, padding=((1, 0),)) == [3, 0], "not the padding"
    assert gradient(row(1, 2, 4), row(5), (1,), padding=1) == [2], "a window of padding alone gives it to no one"
    square = np.array([[1.0, 2], [2, 2]])[None, None]
    got = reference_gradients.max_pool_gradients(np.ones((1, 1, 1, 1)), square, (2, 2)).x
    assert got.tolist() == [[[[0, 1], [0, 0]]]], "the last axis is the fastest"


# --- adjoints: of functions that are linear in an argument ----------------------------------------------------------


def grad_of(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    real = generator.integers(-4, 5, shape)
    return (real + 1j * generator.integers(-4, 5, shape)).astype(dtype) if np.dtype(dtype).kind == "c" else real * 1.0


@given(case=conv_cases(activations=(None,), **REAL_OR_COMPLEX))
def test_convolution(case: ConvCase) -> None:
    """<conv(x, w), g> = <x, conv_grad_input(g, w)> = <w, conv_grad_weight(g, x)>"""
    window = {name: value for name, value in case.parameters.items() if name != "activation"}
    arrays = case.arrays()
    x, weight = arrays["x"], arrays["weight"]
    y = reference.conv(x, weight, **window)
    grad = grad_of(y.shape, y.dtype)
    shapes = x.shape if case.bare_x else [array.shape for array in x]
    back = reference_gradients.conv_grad_input(grad, weight, shapes, **window)
    assert isinstance(back, list) == (not case.bare_x)
    assert [g.shape for g in reference.sequence(back)] == [array.shape for array in reference.sequence(x)]
    assert inner(y, grad) == inner(x, back)
    weight_back = reference_gradients.conv_grad_weight(grad, x, case.kernel, **window)
    assert weight_back.shape == weight.shape
    assert inner(y, grad) == inner(weight, weight_back)


@given(case=transposed_cases(activations=(None,), mixed_dtypes=False, **REAL_OR_COMPLEX))
def test_transposed_convolution(case: TransposedCase) -> None:
    """The function is linear in x and in the weight, so both identities hold again; it is also linear in the bias."""
    arrays = case.arrays()
    bias = arrays.pop("bias")
    y = reference_gradients.conv_transpose(**arrays, **case.parameters)
    assert y.shape == case.out_shape
    grad = grad_of(y.shape, y.dtype)
    back = reference_gradients.conv_transpose_gradients(grad, **arrays, bias=bias, **case.parameters)
    assert isinstance(back.x, list) == (not case.bare_x)
    assert inner(y, grad) == inner(arrays["x"], back.x) == inner(arrays["weight"], back.weight)
    if bias is not None:
        with_bias = reference_gradients.conv_transpose(**arrays, bias=bias, **case.parameters)
        assert inner(with_bias - y, grad) == inner(bias, back.bias)


@given(case=transposed_cases(activations=(None,), **FLOAT64))
def test_transposed_convolution_is_the_input_gradient(case: TransposedCase) -> None:
    """The convolution is that over the result; zeros added at the end must not leave space for more outputs."""
    arrays = case.arrays()
    strides, dilations = (reference.per_axis(value, case.rank) for value in (case.stride, case.dilation))
    ends = [
        s * (n - 1) + d * (k - 1) + 1 - begin - size
        for n, k, s, d, begin, size in zip(case.spatial, case.kernel, strides, dilations, *case.window)
    ]
    pairs = [(begin, max(0, end)) for begin, end in zip(case.window[0], ends)]
    assume(reference.output_shape(case.out_spatial, case.kernel, pairs, strides, dilations) == case.spatial)
    x = np.concatenate(reference.sequence(arrays["x"]), axis=case.channel_axis)
    window = dict(stride=case.stride, padding=pairs, dilation=case.dilation, groups=case.groups)
    gradient = reference_gradients.conv_grad_input(x, arrays["weight"], case.out_shape, **window)
    y = reference_gradients.conv_transpose(x, arrays["weight"], **case.parameters)
    assert np.array_equal(y, gradient)


@pytest.mark.parametrize("spatial", [(), (3,), (2, 1, 2)])
@pytest.mark.parametrize("factor", [1, 1j])
def test_linmerge(spatial: tuple[int, ...], factor: complex) -> None:
    xs = [integers(2, channels, *spatial) * factor for channels in (1, 3, 2)]
    weight = integers(4, 6) + factor * integers(4, 6)
    y = reference.linmerge(xs, weight)
    grad = grad_of(y.shape, y.dtype)
    back = reference_gradients.linmerge_gradients(grad, xs, weight, bias=integers(4))
    assert [g.shape for g in back.x] == [x.shape for x in xs]
    assert inner(y, grad) == inner(xs, back.x) == inner(weight, back.weight)
    assert np.array_equal(back.bias, np.real(grad).sum(axis=(0, *range(2, grad.ndim))))


@given(case=pool_cases(**FLOAT64))
def test_pooling_is_linear_where_the_maxima_stay(case: PoolCase) -> None:
    """Scaling by 3 leaves maxima in place: <max_pool(3 x) - max_pool(x), g> = <2 x, gradient>."""
    x = case.arrays(integer=True)["x"]
    y = reference_gradients.max_pool(x, **case.parameters)
    grad = [grad_of(one.shape, one.dtype) for one in reference.sequence(y)]
    back = reference_gradients.max_pool_gradients(grad if isinstance(y, list) else grad[0], x, **case.parameters).x
    finite = [np.where(np.isfinite(one), one, 0) for one in reference.sequence(y)]
    assert inner(finite, grad) == inner(x, back)


# --- finite differences -------------------------------------------------------------------------------------------

RECURRENT_ACTIVATIONS = (("affine", 0.4, -1.0), ("thresholded_relu", 0.5), ("scaled_tanh", 1.7, 0.6), "softsign")
SMOOTH_POINTS = np.array([-30.0, -7.3, -2.4, -1.1, -0.4, 0.2, 0.7, 1.3, 2.2, 4.9, 6.7, 30.0])  # away from kinks


@pytest.mark.parametrize("spec", (*ACTIVATIONS, *RECURRENT_ACTIVATIONS), ids=str)
def test_derivatives_are_limits_of_difference_quotients(spec: Any) -> None:
    step = 1e-5
    ahead, behind = (reference.activation(spec, SMOOTH_POINTS + s) for s in (step, -step))
    quotient = (ahead - behind) / (2 * step)
    np.testing.assert_allclose(reference_gradients.derivative(spec, SMOOTH_POINTS), quotient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "at", "expected"),
    [
        ("relu", [0.0, -0.0], [0, 0]),
        ("relu6", [0.0, 6.0], [0, 0]),
        (("clip", -2, 5), [-2.0, 5.0], [0, 0]),
        (("clip", 1, 1), [1.0, 0.0], [0, 0]),
        (("leaky_relu", 0.2), [0.0, -0.0], [0.2, 0.2]),
        (("leaky_relu", -0.5), [0.0, -1.0], [-0.5, -0.5]),
        (("elu", 0.5), [0.0, -0.0], [0.5, 0.5]),
        (("hard_sigmoid", 0.25, 0.5), [-2.0, 2.0], [0, 0]),
        ("hardswish", [-3.0, 3.0], [0, 1]),
        (("thresholded_relu", 0.5), [0.5], [0]),
    ],
    ids=str,
)
def test_derivatives_where_a_function_bends(spec: Any, at: list[float], expected: list[float]) -> None:
    assert reference_gradients.derivative(spec, np.array(at)).tolist() == expected


def test_derivatives_far_out_are_their_limits() -> None:
    limits = {
        "relu": (0, 1), "relu6": (0, 0), "leaky_relu": (0.01, 1), "elu": (0, 1), "sigmoid": (0, 0), "tanh": (0, 0),
        "hard_sigmoid": (0, 0), "hardswish": (0, 1), "gelu": (0, 1), "gelu_tanh": (0, 1), "silu": (0, 1),
        "mish": (0, 1), "softplus": (0, 1), "affine": (1, 1), "thresholded_relu": (0, 1), "scaled_tanh": (0, 0),
    }  # fmt: skip
    assert {"clip", "softsign", *limits} == set(reference_gradients.DERIVATIVES)
    for name, expected in limits.items():
        assert reference_gradients.derivative(name, np.array([-1000.0, 1000.0])).tolist() == list(expected), name


@given(case=conv_cases(activations=("tanh", "silu", "softplus", "mish"), **FLOAT64))
def test_every_gradient_of_a_convolution_is_a_directional_derivative(case: ConvCase) -> None:
    arrays = case.arrays(integer=False)
    for name, array in arrays.items():  # far from where the activations are flat
        arrays[name] = [0.1 * a for a in array] if isinstance(array, list) else None if array is None else 0.1 * array
    grad = generator.standard_normal(case.out_shape)
    back = reference_gradients.conv_gradients(grad, **arrays, **case.parameters)
    for name, gradient in zip(back._fields, back):
        assert (gradient is None) == (arrays[name] is None)
        if gradient is None:
            continue
        step = 1e-5
        direction = [generator.standard_normal(g.shape) for g in reference.sequence(gradient)]
        values = []
        for sign in (1, -1):
            moved = [a + sign * step * d for a, d in zip(reference.sequence(arrays[name]), direction)]
            with_moved = {**arrays, name: moved if isinstance(arrays[name], list) else moved[0]}
            values.append(np.vdot(grad, reference.conv(**with_moved, **case.parameters)))
        slope = inner(direction, gradient)
        scale = 1 + math.sqrt(sum(np.size(d) for d in direction)) * float(np.abs(grad).sum())
        assert abs((values[0] - values[1]) / (2 * step) - slope) <= 1e-7 * scale, name


# --- SciPy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, kernel", [((9,), (4,)), ((4, 5), (3, 2)), ((3, 4, 2), (2, 3, 1))])
def test_a_transposed_convolution_is_scipys_full_convolution(x: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    signal = pytest.importorskip("scipy.signal")
    image, taps = integers(*x), integers(*kernel)
    expected = signal.convolve(image, taps, "full", "direct")
    assert np.array_equal(reference_gradients.conv_transpose(image[None, None], taps[None, None])[0, 0], expected)


@pytest.mark.parametrize("size, kernel", [((9,), (4,)), ((6, 7), (3, 2)), ((4, 5, 6), (2, 3, 1))])
def test_pooling_is_scipys_maximum_filter(size: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    """SciPy centres an even window as "same_lower" does."""
    ndimage = pytest.importorskip("scipy.ndimage")
    image = integers(*size)
    expected = ndimage.maximum_filter(image, kernel, mode="constant", cval=-np.inf)
    got = reference_gradients.max_pool(image[None, None], kernel, stride=1, padding="same_lower")
    assert np.array_equal(got[0, 0], expected)


# --- PyTorch ------------------------------------------------------------------------------------------------------


@needs_torch
@given(case=conv_cases(activations=ACTIVATIONS, **FLOAT64))
def test_convolution_against_torch(case: ConvCase) -> None:
    import torch_peer

    arrays = case.arrays(integer=False)
    grad = generator.standard_normal(case.out_shape)
    expected = torch_peer.conv_gradients(grad, **arrays, **case.parameters)
    assert_gradients_close(reference_gradients.conv_gradients(grad, **arrays, **case.parameters), expected)


@needs_torch
@given(case=transposed_cases(activations=ACTIVATIONS, **FLOAT64))
def test_transposed_convolution_against_torch(case: TransposedCase) -> None:
    import torch_peer

    arrays = case.arrays(integer=False)
    grad = generator.standard_normal(case.out_shape)
    y, expected = torch_peer.conv_transpose(grad, **arrays, **case.parameters)
    np.testing.assert_allclose(
        reference_gradients.conv_transpose(**arrays, **case.parameters), y, rtol=1e-9, atol=1e-11
    )
    got = reference_gradients.conv_transpose_gradients(grad, **arrays, **case.parameters)
    assert_gradients_close(got, expected)


@needs_torch
@given(case=pool_cases(**FLOAT64))
def test_pooling_against_torch(case: PoolCase) -> None:
    import torch_peer

    x = case.arrays(integer=True)["x"]
    y = reference_gradients.max_pool(x, **case.parameters)
    grad = [generator.standard_normal(one.shape) for one in reference.sequence(y)]
    grad = grad if isinstance(y, list) else grad[0]
    expected, expected_back = torch_peer.max_pool(grad, x, **case.parameters)
    back = reference_gradients.max_pool_gradients(grad, x, **case.parameters).x
    for got, wanted in zip(map(reference.sequence, (y, back)), map(reference.sequence, (expected, expected_back))):
        assert all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, wanted, strict=True))


def assert_gradients_close(got: Any, expected: Any) -> None:
    for name, a, b in zip(got._fields, got, expected, strict=True):
        assert (a is None) == (b is None), name
        for one, other in zip(reference.sequence(a), reference.sequence(b), strict=True):
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9, err_msg=name)
