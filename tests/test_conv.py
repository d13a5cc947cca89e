"""`conv` against the naive reference, for combinations of all its parameters, on every target."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from refusals import least_workspace
from strategies import ACTIVATIONS, conv_cases, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import gemm

METHODS = st.sampled_from(("auto", "auto", "direct", "gemm", "implicit_gemm"))
LIMITS = st.sampled_from((None, None, 1 << 20, 20_000, 4_000))


def run(target, case, arrays, method, limit):
    """Return the case's result on a target; None if a named method or the workspace limit refuses it with a reason."""
    views = case.views(arrays, target.to_device, target.xp)
    out = case.new_out(target.to_device, target.xp)
    with cupyconv.options(workspace_limit=limit):
        try:
            result = cupyconv.conv(**views, **case.parameters, method=method, out=out)
        except ValueError as refusal:
            if (method != "auto" and "does not apply" in str(refusal)) or (limit and "workspace" in str(refusal)):
                return None
            raise
    assert out is None or result is out
    return target.to_host(result)


@given(case=conv_cases(), method=METHODS, limit=LIMITS)
def test_integers_are_exact(target, case, method, limit):
    arrays = case.arrays(integer=True)
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        assert_exact(actual, reference.conv(**arrays, **case.parameters), case.result_dtype)


@given(case=conv_cases(activations=ACTIVATIONS), method=METHODS, limit=LIMITS)
def test_random_data(target, case, method, limit):
    arrays = case.arrays(integer=False)
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        expected = reference.conv(**arrays, **case.parameters)
        magnitude = case.magnitude(arrays)
        assert_close(actual, expected, case.result_dtype, case.terms, magnitude=magnitude)


def test_images_of_one_pixel_or_one_channel_are_in_both_orders_and_give_c_order():
    """Channels of such images are contiguous in C order too, whatever the strides of axes of length 1."""
    features, weight = np.ones((2, 3), np.float32), np.ones((4, 3, 3, 3), np.float32)
    for x in (features.reshape(2, 3, 1, 1), features[:, :, np.newaxis, np.newaxis]):
        assert cupyconv.conv(x, weight, padding=2).flags.c_contiguous
    one_channel = np.ones((2, 5, 4, 1), np.float32).transpose(0, 3, 2, 1)
    assert cupyconv.conv(one_channel, weight[:, :1]).flags.c_contiguous
    y = cupyconv.conv(np.ones((2, 1, 2, 3), np.float32).transpose(0, 3, 1, 2), weight, padding=2)
    assert y.transpose(0, 2, 3, 1).flags.c_contiguous


def test_an_input_without_samples_beside_one_with_them_is_answered_with_the_axes_it_needs():
    weight = np.ones((4, 3, 3, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"x\[1\] has shape \(1, 5, 5\), needed 4 axes: \(N, C, \*spatial\) with 2 spatial"
    ):
        cupyconv.conv([np.ones((1, 2, 5, 5), np.float32), np.ones((1, 5, 5), np.float32)], weight)


def strided_out(shape, strides):
    """Return a result of one sample with strides of `strides` floats, and its buffer."""
    buffer = np.full(4096, np.nan, np.float32)
    return as_strided(buffer, (1, *shape), (0, *(4 * step for step in strides))), buffer


@pytest.mark.parametrize("shape, strides", [((2, 3), (3, 2)), ((3, 2), (2, 7))])
def test_out_may_have_its_rows_between_each_other(shape, strides):
    """Rows of `out` may be interleaved: addresses show that its elements are distinct, strides alone do not."""
    out, buffer = strided_out(shape, strides)
    x, weight = (
        np.arange(1.0, shape[1] + 1, dtype=np.float32)[None, None],
        np.arange(1.0, shape[0] + 1, dtype=np.float32)[:, None],
    )
    assert cupyconv.linmerge([x], weight, out=out) is out
    np.testing.assert_array_equal(out, weight * x)
    assert np.isfinite(buffer).sum() == out.size


@pytest.mark.parametrize(
    "shape, strides", [((2, 5), (0, 1)), ((2, 5), (4, 1)), ((3, 4), (3, 2)), ((1100, 1100), (1, 1))]
)
def test_out_may_not_have_one_element_in_two_places(shape, strides):
    out, buffer = strided_out(shape, strides)
    with pytest.raises(ValueError, match="out"):
        cupyconv.linmerge([np.ones((1, 1, shape[1]), np.float32)], np.ones((shape[0], 1), np.float32), out=out)
    assert np.isnan(buffer).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_wider_bias_is_rounded_to_the_results_dtype_first(dtype):
    """The bias is rounded as if it were given in the result's dtype, even if the sums have a wider dtype."""
    rng = np.random.default_rng(1)
    x, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 4, 20, 20), (6, 4, 3, 3)))
    bias = rng.standard_normal(6).astype(dtype)
    expected = cupyconv.conv(x, weight, bias.astype(np.float16))
    np.testing.assert_array_equal(cupyconv.conv(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "relu6", ("clip", -100.03, 1000.3)], ids=str)
@pytest.mark.parametrize("addends", [(), ("bias",), ("residual",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize("keeps_sums", [True, False])
def test_sixteen_bits_are_rounded_once_by_products(cuda_target, monkeypatch, dtype, activation, addends, keeps_sums):
    """Sums that only float32 represents are rounded once, whether they are stored or the rounded result is clipped."""
    dtype = getattr(ml_dtypes, dtype, dtype)
    rng = np.random.default_rng(0)

    def halves(*shape, up_to=30):
        return (rng.integers(-up_to, up_to, shape) / 2).astype(dtype)

    x, weight = halves(2, 20, 9, 8), halves(6, 20, 1, 1)
    extras = {"bias": halves(6), "residual": halves(2, 6, 9, 8)}
    extras = {name: extras[name] for name in addends}
    exact = np.einsum("oc,nchw->nohw", *(a.astype("float64") for a in (weight[:, :, 0, 0], x)))
    for name in addends:
        addend = extras[name].astype("float64")
        exact += addend[:, None, None] if name == "bias" else addend
    low, high = {"relu": (0, np.inf), "relu6": (0, 6)}.get(activation, activation[1:])
    monkeypatch.setattr(gemm, "cheapest_of", lambda implementations, draft_of, gpu: draft_of(keeps_sums))
    forget_calls()
    try:
        given = {name: cuda_target.to_device(a) for name, a in extras.items()}
        arrays = cuda_target.to_device(x), cuda_target.to_device(weight)
        actual = cupyconv.conv(*arrays, **given, activation=activation, method="gemm")
    finally:
        monkeypatch.undo()
        forget_calls()
    assert np.abs(exact).max() > 1000
    expected = np.clip(exact, np.float32(low), np.float32(high)).astype("float32").astype(dtype)
    np.testing.assert_array_equal(cuda_target.to_host(actual), expected)


@pytest.mark.grid(
    together=3, dtypes=["float32 complex64", "complex64 float32"], groups=[1, 3], channels=[(12,), (5, 7)], kernel=[1, 3],
    layout=["c_order", "channels_last", "stepped"], out_layout=["c_order", "channels_last", "stepped"], cut=["whole", "half", "least"],
)  # fmt: skip
def test_products_of_which_one_factor_is_complex(
    cuda_target, monkeypatch, dtypes, groups, channels, kernel, layout, out_layout, cut
):
    """Real products are used: x as number pairs, or the weight as real and imaginary planes; any `out`, in chunks."""
    monkeypatch.setattr(gemm, "MIN_CHUNK", 8)
    generator = np.random.default_rng(0)

    def integers(shape, dtype):
        real, imaginary = (generator.integers(-3, 4, shape).astype("float32") for _ in range(2))
        return (real + 1j * imaginary).astype(dtype) if dtype == "complex64" else real

    x_dtype, weight_dtype = dtypes.split()
    xs = [integers((4, count, 5, 6), x_dtype) for count in channels]
    weight = integers((6, 12 // groups, kernel, kernel), weight_dtype)
    settings = {"groups": groups, "padding": kernel // 2}
    expected = reference.conv(xs, weight, **settings)
    place = cuda_target.to_device, cuda_target.xp
    out = with_layout(np.full(expected.shape, np.nan, "complex64"), out_layout, *place)
    moved = [with_layout(x, layout, *place) for x in xs]
    given = {"x": moved, "weight": cuda_target.to_device(weight), **settings, "method": "gemm", "out": out}
    limit = None
    if cut != "whole":
        limit = cupyconv.explain(cupyconv.conv, **given).workspace_bytes // 2
    if cut == "least":
        limit = least_workspace(lambda: cupyconv.explain(cupyconv.conv, **given))
    with cupyconv.options(workspace_limit=limit):
        cupyconv.conv(**given)
    assert_exact(cuda_target.to_host(out), expected, "complex64")
