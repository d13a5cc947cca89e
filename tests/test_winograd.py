"""Winograd's method on NumPy: what it computes, its error bound, and where it must not be chosen."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_gradients
from peak_memory import peak_bytes
from tolerance import assert_close

import cupyconv
from cupyconv.numpy.winograd_tiles import transforms

#: Shapes of x and weight, and settings: every rank, axes of one tap, overhanging tiles, groups, dilation, padding modes.
CASES = {
    "2-D": ((2, 5, 13, 11), (7, 5, 3, 3), dict(padding=1)),
    "whole tiles": ((1, 4, 10, 14), (3, 4, 3, 3), {}),
    "smaller than a tile": ((3, 2, 3, 4), (2, 2, 3, 3), {}),
    "1-D": ((2, 5, 37), (7, 5, 3), dict(padding=((2, 0),))),
    "3-D": ((2, 3, 6, 5, 7), (4, 3, 3, 3, 3), dict(padding=1)),
    "3 x 1": ((2, 3, 9, 8), (4, 3, 3, 1), dict(padding=((1, 1), (2, 0)))),
    "1 x 3": ((2, 3, 9, 8), (4, 3, 1, 3), {}),
    "3 x 1 x 3": ((1, 3, 6, 5, 7), (4, 3, 3, 1, 3), dict(padding=1)),
    "2 x 2": ((2, 3, 13, 11), (4, 3, 2, 2), dict(padding=1)),
    "4 x 5": ((1, 3, 12, 22), (5, 3, 4, 5), dict(padding=2)),
    "5 x 5 groups": ((3, 6, 9, 8), (8, 3, 5, 5), dict(groups=2, padding=2)),
    "5 x 2 dilation": ((1, 3, 17, 20), (4, 3, 5, 2), dict(dilation=(2, 3), padding=3)),
    "1-D of 4": ((2, 5, 37), (7, 5, 4), dict(padding=((2, 0),))),
    "5 x 1 x 4": ((1, 3, 6, 5, 17), (4, 3, 5, 1, 4), dict(padding=2)),
    "3 x 3 x 1": ((2, 3, 8, 9, 7), (4, 3, 3, 3, 1), dict(padding=1)),
    "2 x 3 x 4": ((1, 3, 6, 5, 7), (4, 3, 2, 3, 4), {}),
    "groups": ((2, 6, 9, 8), (8, 3, 3, 3), dict(groups=2, padding=1)),
    "depthwise": ((2, 4, 9, 8), (4, 1, 3, 3), dict(groups=4, padding=1)),
    "dilation": ((1, 3, 17, 20), (4, 3, 3, 3), dict(dilation=(3, 2), padding=2)),
    "dilated rows of one tap": ((1, 3, 9, 20), (4, 3, 1, 3), dict(dilation=(5, 2))),
    "reflect": ((1, 3, 9, 8), (4, 3, 3, 3), dict(padding=3, padding_mode="reflect")),
    "symmetric": ((1, 3, 9, 8), (4, 3, 3, 3), dict(padding=3, padding_mode="symmetric")),
    "edge": ((1, 3, 9, 8), (4, 3, 3, 3), dict(padding=3, padding_mode="edge")),
    "wrap": ((1, 3, 9, 8), (4, 3, 3, 3), dict(padding=3, padding_mode="wrap")),
    "empty": ((0, 3, 9, 8), (4, 3, 3, 3), {}),
    "no outputs": ((2, 3, 9, 8), (0, 3, 3, 3), {}),
    "no channels": ((2, 0, 9, 8), (4, 0, 3, 3), {}),
}
#: Bound of an error, in roundings of the largest sum of absolute products: along one, two and three axes.
ROUNDINGS = 64


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def check(function, oracle, arrays, settings, terms):
    """Assert that the result is the reference's, on 1 and on 2 threads, in one block and in many."""
    expected = oracle(*arrays, **settings)
    for threads, limit in ((1, None), (2, None), (2, 40_000), (1, 200_000)):
        with cupyconv.options(threads=threads, workspace_limit=limit):
            plan = cupyconv.explain(function, *arrays, method="winograd", **settings)
            actual = function(*arrays, method="winograd", **settings)
        assert plan.method == "winograd" and (limit is None or plan.workspace_bytes <= limit)
        assert_close(actual, expected, np.float32, terms, factor=4)


@pytest.mark.parametrize("name", CASES)
def test_convolution(name):
    x, weight, settings = CASES[name]
    check(cupyconv.conv, reference.conv, (normal(*x), normal(*weight)), settings, int(np.prod(weight[1:])))


@pytest.mark.parametrize("name", CASES)
def test_weight_gradient(name):
    x, weight, settings = CASES[name]
    grad = normal(*cupyconv.conv(normal(*x), normal(*weight), **settings).shape)
    arrays = grad, normal(*x), weight[2:]
    check(cupyconv.conv_grad_weight, reference_gradients.conv_grad_weight, arrays, settings, max(1, grad[:, :1].size))


@pytest.mark.parametrize(
    "name", [n for n in CASES if "padding_mode" not in CASES[n][2] and n not in ("no channels", "empty")]
)
def test_input_gradient(name):
    """An input gradient is a convolution, except with a padding mode."""
    x, weight, settings = CASES[name]
    grad = normal(*cupyconv.conv(normal(*x), normal(*weight), **settings).shape)
    expected = reference_gradients.conv_grad_input(grad, normal(*weight), x, **settings)
    actual = cupyconv.conv_grad_input(grad, normal(*weight), x, method="winograd", **settings)
    assert_close(actual, expected, np.float32, int(np.prod(weight)) // max(1, weight[1]), factor=4)


def test_everything_around_a_convolution():
    """Merged inputs with their own strides, a prologue, bias, residual, activation and an in-place `out` are right."""
    xs = [normal(2, 3, 9, 11), normal(2, 9, 11, 2).transpose(0, 3, 1, 2), normal(2, 1, 18, 11)[:, :, ::2]]
    weight, bias, residual = normal(4, 6, 3, 3), normal(4), normal(2, 4, 9, 11)
    settings = dict(padding=1, activation="gelu")
    prologue = normal(6), normal(6), "relu"
    images = reference.transformed(xs, *prologue, axis=1)
    expected = reference.conv(images, weight, bias, residual=residual, **settings)
    settings["prologue"] = prologue
    for threads in (1, 2):
        with cupyconv.options(threads=threads):
            actual = cupyconv.conv(
                xs, weight, bias, residual=residual, out=residual.copy(), method="winograd", **settings
            )
            in_place = residual.copy()
            cupyconv.conv(xs, weight, bias, residual=in_place, out=in_place, method="winograd", **settings)
        assert_close(actual, expected, np.float32, 54, magnitude=200.0, factor=4)
        np.testing.assert_array_equal(in_place, actual)


# --- accuracy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_matrices_are_an_identity(count):
    """y = A' ((G w) * (B' x)), and no transform of x or w is larger than its largest element."""
    inputs, taps, outputs = transforms(count)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 1000)), rng.standard_normal((count, 1000))
    expected = sum(w[t] * x[t : t + 7 - count] for t in range(count))
    np.testing.assert_allclose(outputs @ ((taps @ w) * (inputs @ x)), expected, atol=1e-13)
    for matrix in (inputs, taps):
        np.testing.assert_allclose(abs(matrix).sum(1), 1, rtol=1e-15)
    # So only A' amplifies a product's rounding, and less than with another point if the taps are few.
    assert abs(outputs).sum(1).max() < 6 * count + 7.5


SPREAD = {
    "normal": lambda rng, *shape: rng.standard_normal(shape),
    "positive": lambda rng, *shape: rng.random(shape),
    "constant": lambda rng, *shape: np.full(shape, 1 / 3),
    "of all sizes": lambda rng, *shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 8, shape),
}


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("x, weight", [
    ((2, 64, 500), (64, 64, 3)), ((1, 64, 30, 30), (64, 64, 3, 3)), ((1, 16, 14, 14, 14), (16, 16, 3, 3, 3)),
    ((2, 64, 500), (64, 64, 5)), ((1, 64, 30, 30), (64, 64, 2, 2)), ((1, 64, 30, 30), (64, 64, 4, 5)),
])  # fmt: skip
def test_errors_are_bounded_by_the_largest_sum(kind, x, weight):
    """Errors, measured against float64, are within the bound that the docstrings state."""
    rng = np.random.default_rng(0)
    x, weight = (SPREAD[kind](rng, *shape).astype(np.float32) for shape in (x, weight))
    exact = cupyconv.conv(x.astype(np.float64), weight.astype(np.float64), padding=1)
    largest = cupyconv.conv(abs(x.astype(np.float64)), abs(weight.astype(np.float64)), padding=1).max()
    error = abs(cupyconv.conv(x, weight, padding=1, method="winograd") - exact).max()
    assert 0 < error <= ROUNDINGS * 2.0**-24 * largest


# --- infinities and NaN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", ["x", "weight", "zeros in the weight", "overflow", "transform"])
def test_infinities_and_nan_are_where_the_definition_puts_them(case, threads):
    """A tile has six by six elements, of which a result reads three by three."""
    x, weight = normal(3, 4, 21, 22), normal(5, 4, 3, 3)
    if case == "weight":
        weight[2, 1, 0, 2], weight[3, 0, 1, 1] = np.inf, np.nan
    elif case == "overflow":
        x, weight = np.full_like(x, 1e36), np.ones_like(weight)
        x[1, :, 9:11, 14] = 3e38
    elif case == "transform":  # finite sums of elements that are not far from the largest number
        x[...], weight[...] = np.finfo(np.float32).max, 0
        weight[:, :, 1, 1] = np.float32(0.2)
    else:
        x[0, 2, 10, 10], x[1, 3, 20, 0], x[1, 3, 5, 0], x[2, 0, 7, 7] = np.inf, np.nan, -np.inf, np.inf
        if case == "zeros in the weight":
            weight[:, :, :, 1] = 0
    expected = reference.conv(x, weight, padding=1)
    with cupyconv.options(threads=threads):
        actual = cupyconv.conv(x, weight, padding=1, method="winograd")
        plain = cupyconv.conv(x, weight, padding=1, method="gemm")
    assert np.isfinite(plain).any()
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(actual), kind(plain))
    finite = np.isfinite(plain)
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=1e-5, atol=1e-5 * abs(expected[finite]).max())


@pytest.mark.parametrize("limit", [None, 300_000])
@pytest.mark.parametrize(
    "x, weight", [((2, 9, 13, 16), (11, 9, 3, 3)), ((1, 16, 70), (5, 16, 3)), ((1, 3, 9, 8, 7), (4, 3, 3, 3, 3))]
)
def test_sums_of_an_infinite_block_whose_channels_lie_side_by_side(x, weight, limit):
    """Sums of a block with infinities are stored next to the columns, and computed from several parts of these."""
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (x, weight))
    x[0, 0][tuple(extent // 2 for extent in x.shape[2:])] = np.inf
    out = np.empty((len(x), *x.shape[2:], len(weight)), np.float32)
    out = np.moveaxis(out, -1, 1)
    with cupyconv.options(workspace_limit=limit):
        cupyconv.conv(x, weight, padding=1, out=out, method="winograd")
    plain = cupyconv.conv(x, weight, padding=1, method="gemm")
    assert np.isfinite(plain).any() and not np.isfinite(plain).all()
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-4)


def test_infinities_in_a_weight_gradient():
    x, grad = normal(3, 4, 21, 22), normal(3, 5, 21, 22)
    x[1, 3, 5, 0], grad[2, 1, 7, 7] = np.inf, np.nan
    actual = cupyconv.conv_grad_weight(grad, x, (3, 3), padding=1, method="winograd")
    plain = cupyconv.conv_grad_weight(grad, x, (3, 3), padding=1, method="gemm")
    assert np.isfinite(plain).any() and np.isinf(plain).any() and np.isnan(plain).any()
    np.testing.assert_allclose(actual, plain, rtol=1e-4, atol=1e-4)


# --- the choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, weight, settings, words", [
    (np.ones((1, 4, 9, 9)), np.ones((4, 4, 3, 3)), {}, "float32"),
    (np.ones((1, 4, 9, 9), np.float16), np.ones((4, 4, 3, 3), np.float16), {}, "float32"),
    (np.ones((1, 4, 9, 9), np.complex64), np.ones((4, 4, 3, 3), np.complex64), {}, "float32"),
    (normal(1, 4, 9, 9), normal(4, 4, 3, 3), dict(stride=2), "stride 1"),
    (normal(1, 4, 9, 9), normal(4, 4, 6, 3), {}, "2 to 5 taps"),
    (normal(1, 4, 9, 9), normal(4, 4, 1, 1), {}, "2 to 5 taps"),
])  # fmt: skip
def test_what_it_is_not_for_is_refused_by_name_and_never_chosen(x, weight, settings, words):
    with pytest.raises(ValueError, match=f"method 'winograd' does not apply: .*{words}"):
        cupyconv.conv(x, weight, method="winograd", **settings)
    plan = cupyconv.explain(cupyconv.conv, x, weight, **settings)
    assert plan.method != "winograd" and words in dict(plan.rejected)["winograd"]


@pytest.mark.parametrize("kernel, words", [
    ((5,), "6 products per tile of 2 pixels instead of 10"),
    ((3, 3), "36 products per tile of 4x4 pixels instead of 144"),
    ((2, 1, 4), "36 products per tile of 5x3 pixels instead of 120"),
])  # fmt: skip
def test_its_page_counts_the_products_of_a_tile(kernel, words):
    """A tile has one element along axes of one tap, and the page does not name it."""
    x, weight = normal(1, 2, *(9,) * len(kernel)), normal(3, 2, *kernel)
    call = dict(padding="same", method="winograd")
    assert cupyconv.explain(cupyconv.conv, x, weight, **call).reason == words
    grad = normal(1, 3, *(9,) * len(kernel))
    assert cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, **call).reason == words


def test_auto_takes_it_where_products_dominate_unless_it_is_forbidden():
    many, few = (normal(1, 64, 56, 56), normal(64, 64, 3, 3)), (normal(1, 3, 56, 56), normal(16, 3, 3, 3))
    grad = normal(1, 64, 56, 56)
    calls = [
        (cupyconv.conv, many), (cupyconv.conv_grad_input, (grad, many[1], many[0].shape)),
        (cupyconv.conv_grad_weight, (grad, many[0], (3, 3))),
    ]  # fmt: skip
    for function, arrays in calls:
        plan = cupyconv.explain(function, *arrays, padding=1)
        assert plan.method == "winograd" and dict(plan.rejected)["gemm"].startswith("estimated ")
        with cupyconv.options(allow_winograd=False):
            plan = cupyconv.explain(function, *arrays, padding=1)
            assert plan.method == "gemm"
            with pytest.raises(ValueError, match=r"'winograd' does not apply: .*allow_winograd=False"):
                cupyconv.explain(function, *arrays, padding=1, method="winograd")
    assert "allow_winograd=False" in dict(plan.rejected)["winograd"]
    plan = cupyconv.explain(cupyconv.conv, *few, padding=1)
    assert plan.method == "gemm" and dict(plan.rejected)["winograd"].startswith("estimated ")


def test_sums_of_integers_are_exact_where_it_is_forbidden():
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((2, 64, 40, 40), (64, 64, 3, 3)))
    exact = cupyconv.conv(x.astype(np.float64), weight.astype(np.float64), padding=1)
    assert (cupyconv.conv(x, weight, padding=1) != exact).any()
    with cupyconv.options(allow_winograd=False):
        assert (cupyconv.conv(x, weight, padding=1) == exact).all()


@pytest.mark.parametrize("taps", [3, 5, 10])
def test_phases_of_a_strided_input_gradient_are_outputs(taps):
    """The phases have half as many taps: 2, 3 and 5."""
    x, weight = normal(2, 4, 25, 24), normal(4, 4, taps, taps)
    grad = cupyconv.conv(x, weight, stride=2, padding=1)
    expected = reference_gradients.conv_grad_input(grad, weight, x.shape, stride=2, padding=1)
    actual = cupyconv.conv_grad_input(grad, weight, x.shape, method="winograd", stride=2, padding=1)
    assert_close(actual, expected, np.float32, 4 * taps**2, factor=4)


def test_phases_of_too_many_taps_are_refused():
    x, weight = normal(1, 4, 25, 24), normal(4, 4, 11, 11)
    grad = cupyconv.conv(x, weight, stride=2)
    with pytest.raises(ValueError, match=r"method 'winograd' does not apply: .*2 to 5 taps"):
        cupyconv.conv_grad_input(grad, weight, x.shape, method="winograd", stride=2)


def test_an_input_gradient_with_a_padding_mode_is_that_of_the_image_and_its_borders():
    x, weight, settings = normal(1, 4, 12, 12), normal(4, 4, 3, 3), dict(padding=1, padding_mode="reflect")
    plan = cupyconv.explain(cupyconv.conv_grad_input, x, weight, x.shape, method="winograd", **settings)
    assert plan.method == "winograd" and str(plan).count("loop     Winograd") == 1 and str(plan).count("border ") == 4
    actual = cupyconv.conv_grad_input(x, weight, x.shape, method="winograd", **settings)
    exact = cupyconv.conv_grad_input(x.astype(np.float64), weight.astype(np.float64), x.shape, **settings)
    np.testing.assert_allclose(actual, exact, atol=1e-5)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("limit", [None, 1 << 20, 300_000])
def test_it_takes_what_explain_says(threads, limit):
    x, weight = normal(2, 16, 61, 47), normal(16, 16, 3, 3)
    out = np.empty((2, 16, 61, 47), np.float32)
    arguments = dict(padding=1, out=out, method="winograd", activation="relu", bias=normal(16))
    small = x[:, :, :9, :9]  # other calls import what these need
    cupyconv.conv(small, weight, normal(16), padding=1, method="winograd", activation="relu")
    cupyconv.conv_grad_weight(small, small, (3, 3), padding=1, method="winograd")
    with cupyconv.options(threads=threads, workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, x, weight, **arguments)
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, **arguments))
        grad_plan = cupyconv.explain(cupyconv.conv_grad_weight, out, x, (3, 3), padding=1, method="winograd")
        grad_peak = peak_bytes(lambda: cupyconv.conv_grad_weight(out, x, (3, 3), padding=1, method="winograd"))
    python_objects = 200_000
    assert peak <= plan.workspace_bytes + python_objects
    assert grad_peak <= grad_plan.workspace_bytes + weight.nbytes + python_objects
    for made in (plan, grad_plan):
        assert limit is None or made.workspace_bytes <= limit


@pytest.mark.parametrize("x, weight, settings", [
    ((1, 64, 60, 60), (64, 64, 3, 3), dict(padding=3, padding_mode="edge")),  # borders are gathered
    ((1, 64, 60, 60), (64, 64, 3, 3), dict(padding=1, activation="gelu")),  # a temporary
    ((1, 256, 14, 14), (256, 256, 3, 3), dict(padding=1)),  # the weight in parts
    ((1, 64, 4000), (8, 64, 3), {}),  # columns of a block with NaN, in the smaller of two buffers
])  # fmt: skip
def test_each_part_of_its_memory_counts(x, weight, settings):
    x, weight = normal(*x), normal(*weight)
    x[(0, 0, *(extent // 2 for extent in x.shape[2:]))] = np.nan if not settings else 1
    with cupyconv.options(threads=1):
        out = cupyconv.conv(x, weight, **settings)
        plan = cupyconv.explain(cupyconv.conv, x, weight, out=out, method="winograd", **settings)
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, out=out, method="winograd", **settings))
    assert peak <= plan.workspace_bytes + 150_000  # and memory of Python objects


def test_a_weight_too_large_for_the_limit_leaves_it_to_columns():
    x, weight = normal(1, 64, 8, 8), normal(64, 64, 3, 3)
    with cupyconv.options(workspace_limit=400_000):
        with pytest.raises(
            ValueError, match=r"'winograd' does not apply: the smallest block needs .* the limit is 400,000"
        ):
            cupyconv.conv(x, weight, method="winograd")
        assert cupyconv.explain(cupyconv.conv, x, weight).method == "gemm"


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_block_with_infinities_takes_no_more(limit):
    """Columns of a block with infinities use the memory that the transforms had."""
    x, weight = normal(1, 32, 60, 60), normal(4, 32, 3, 3)
    x[0, 0, 30, 30] = np.nan
    out = np.empty((1, 4, 60, 60), np.float32)
    with cupyconv.options(threads=1, workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding=1, out=out, method="winograd")
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, padding=1, out=out, method="winograd"))
    assert np.isnan(out).sum() == 4 * 9
    assert peak <= plan.workspace_bytes + 150_000  # and Python objects; columns of a whole block need 4 MB


@pytest.mark.parametrize("limit", [2000, 4000, 9222])
def test_index_arrays_of_a_border_count(limit):
    arrays = np.ones((7, 2, 147), np.float32), np.ones((4, 2, 3), np.float32)
    with cupyconv.options(threads=2, workspace_limit=limit):
        try:
            plan = cupyconv.explain(cupyconv.conv, *arrays, padding=1, padding_mode="edge", method="winograd")
        except ValueError as refusal:
            assert "the limit is" in str(refusal) and limit < 9222
        else:
            assert plan.workspace_bytes <= limit


def test_sums_of_many_outputs_lie_behind_the_columns():
    x, weight, out = normal(3, 14, 2752), normal(34, 14, 3), np.empty((3, 34, 2750), np.float32)
    x[0, 0, 1000] = np.nan
    with cupyconv.options(threads=1, workspace_limit=2_700_000):
        plan = cupyconv.explain(cupyconv.conv, x, weight, out=out, method="winograd")
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, out=out, method="winograd"))
    assert np.isnan(out).sum() == 34 * 3
    assert peak <= plan.workspace_bytes + 200_000  # in separate memory they would need 0.7 MB


@pytest.mark.parametrize("mode", ["constant", "edge"])
@pytest.mark.parametrize("kernel", [(4, 4), (5, 4), (2, 5), (1, 5)])
def test_columns_of_a_tile_that_is_larger_than_its_image(kernel, mode):
    """Columns need more memory than the tile and its transform if the tile is larger than its image."""
    x, weight = np.ones((1, 2, 4, 3), np.float32), np.ones((2, 2, *kernel), np.float32)
    x[0, 0, 0, 0] = np.inf
    settings = dict(padding=1, padding_mode=mode)
    plain = cupyconv.conv(x, weight, method="gemm", **settings)
    np.testing.assert_array_equal(cupyconv.conv(x, weight, method="winograd", **settings), plain)
    assert np.isinf(plain).any()


@pytest.mark.parametrize("value", [0, np.nan])
@pytest.mark.parametrize("limit", [400_000, 1 << 20, None])
def test_weight_gradients_within_the_limit(limit, value):
    """Products cover few outputs at a time; columns, if there is a NaN, are stored where the inputs' tiles were."""
    x, grad = normal(4, 64, 20, 20), normal(4, 64, 20, 20)
    grad[1, 40, 5, 5] = value
    expected = cupyconv.conv_grad_weight(x, grad, (3, 3), padding=1, method="gemm")

    def gradient():
        return cupyconv.conv_grad_weight(x, grad, (3, 3), padding=1, method="winograd")

    with cupyconv.options(threads=1, workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, x, grad, (3, 3), padding=1, method="winograd")
        cupyconv.clear_caches()
        peak = peak_bytes(gradient) - expected.nbytes
        np.testing.assert_allclose(gradient(), expected, rtol=1e-3, atol=1e-3)
    assert peak <= plan.workspace_bytes + 150_000  # and Python objects; the products of all outputs need 0.6 MB
