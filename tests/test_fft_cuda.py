"""The method "fft" on CUDA: the cases of NumPy in both orders of spectra, and what only CUDA has."""

from __future__ import annotations

import gc
import re
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from fft_cases import CASES, DTYPES, MIXED, MODES, normal
from plans import array
from plans import check as check_plan
from rounds import each_step
from tolerance import assert_close

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import tiles
from cupyconv.cuda.plan.fft_weight_gradient import GradientTiling
from cupyconv.cuda.plan.matrices import MAX_BATCH
from cupyconv.problem.plan import MAX_SOURCES, GemmCall, Transform, every_step

#: Orders of spectra, as values of `interleaved`.
ORDERS = {"frequencies side by side": (False,), "channels side by side": (True,)}


@pytest.fixture(params=ORDERS)
def order(request, monkeypatch):
    """Allow only one order of spectra."""
    monkeypatch.setattr(tiles, "ORDERS", ORDERS[request.param])
    forget_calls()
    yield request.param
    forget_calls()


def on(target, arrays):
    return [target.to_device(array) for array in arrays]


def multiplies_numbers(weight, settings):
    """Whether each product has one channel and one output; such products are not planned as matrices."""
    groups = settings.get("groups", 1)
    return weight.shape[1] * weight.shape[0] // groups == 1


def check(target, x, weight, settings, *, limit=150_000):
    expected = reference.conv(x, weight, **settings)
    arrays = on(target, (x, weight))
    terms = max(1, int(np.prod(weight.shape[1:])))
    for most in (None, limit):
        with cupyconv.options(workspace_limit=most), pytest.MonkeyPatch.context() as patch:
            if most is not None:  # recomputation would hide a sum that begins with unwritten memory, which is NaN here
                patch.setattr(tiles, "MAX_PRODUCTS", 0)
            plan = cupyconv.explain(cupyconv.conv, *arrays, method="fft", **settings)
            actual = cupyconv.conv(*arrays, method="fft", **settings)
        assert plan.method == "fft" and (most is None or plan.workspace_bytes <= most)
        assert_close(actual, expected, np.result_type(x, weight), terms, factor=4)
    return plan


@pytest.mark.parametrize("name", CASES)
def test_convolution(cuda_target, order, name):
    x, weight, settings = CASES[name]
    x, weight = normal(*x), normal(*weight, seed=1)
    if multiplies_numbers(weight, settings) and order == "channels side by side":
        with pytest.raises(ValueError, match="does not fit the workspace limit"):
            cupyconv.explain(cupyconv.conv, *on(cuda_target, (x, weight)), method="fft", **settings)
        return
    check(cuda_target, x, weight, settings)


@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in DTYPES if dtype != "float32"), *MIXED], ids=str)
def test_dtypes(cuda_target, order, dtypes):
    for name in ("many channels", "symmetric"):
        x, weight, settings = CASES[name]
        check(cuda_target, normal(*x, dtype=dtypes[0]), normal(*weight, dtype=dtypes[1], seed=1), settings, limit=None)


@pytest.mark.parametrize("channels_last", [False, True])
def test_everything_around_a_convolution(cuda_target, order, channels_last):
    """Merged inputs in any strides, prologue, bias, residual, activation, its input saved, `out` in place are right."""
    xs = [normal(2, 3, 9, 11), normal(2, 9, 11, 2).transpose(0, 3, 1, 2), normal(2, 1, 18, 11)[:, :, ::2]]
    weight, bias, residual = normal(4, 6, 5, 3), normal(4), normal(2, 4, 9, 11)
    prologue = normal(6), normal(6, seed=1), "relu"
    images = reference.transformed(xs, *prologue, axis=1)
    settings = dict(padding="same", activation="gelu")
    expected = reference.conv(images, weight, bias, residual=residual, **settings)
    scale, shift, weight, bias, residual = on(cuda_target, (*prologue[:2], weight, bias, residual))
    xs = on(cuda_target, xs)
    if channels_last:
        xs = [cuda_target.to_device(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for x in xs]
    settings |= dict(prologue=(scale, shift, "relu"), method="fft")
    for limit in (None, 60_000):
        with cupyconv.options(workspace_limit=limit):
            actual = cupyconv.conv(xs, weight, bias, residual=residual, **settings)
            in_place = cuda_target.to_device(residual)
            cupyconv.conv(xs, weight, bias, residual=in_place, out=in_place, **settings)
            saved, _ = cupyconv.vjp(cupyconv.conv, xs, weight, bias, residual=residual, **settings)
        assert_close(actual, expected, np.float32, 15 * 6, magnitude=300.0, factor=4)
        np.testing.assert_array_equal(in_place, actual)
        np.testing.assert_array_equal(saved, actual)


def test_more_inputs_than_a_kernel_takes(cuda_target, order):
    xs = [normal(1, 1 + i % 2, 9, 8, seed=i) for i in range(MAX_SOURCES + 3)]
    weight = normal(2, sum(x.shape[1] for x in xs), 3, 3)
    settings = dict(padding="same", padding_mode="wrap")
    expected = reference.conv(np.concatenate(xs, axis=1), weight, **settings)
    arrays = on(cuda_target, xs), cuda_target.to_device(weight)
    actual = cupyconv.conv(*arrays, method="fft", **settings)
    assert_close(actual, expected, np.float32, weight[0].size, factor=4)
    assert "not recomputed" in str(cupyconv.explain(cupyconv.conv, *arrays, method="fft", **settings))
    few = arrays[0][:MAX_SOURCES]
    arrays = few, cuda_target.to_device(weight[:, : sum(x.shape[1] for x in few)].copy())
    assert "are recomputed" in str(cupyconv.explain(cupyconv.conv, *arrays, method="fft", **settings))


def test_a_weight_with_too_large_spectra_is_computed_in_shares(cuda_target, order):
    """Shares are of outputs, or of groups whose inputs begin anywhere; each has its own bias, residual and prologue."""
    for xs, weight, groups in (
        ([normal(1, 5, 30, 30), normal(1, 3, 30, 30)], normal(24, 8, 11, 11), 1),
        ([normal(1, 5, 30, 30), normal(1, 7, 30, 30)], normal(24, 3, 11, 11), 4),
    ):
        bias, channels = normal(24), sum(x.shape[1] for x in xs)
        scale, residual = normal(channels), normal(1, 24, 20, 20)
        images = reference.transformed(xs, scale, None, "relu", axis=1)
        expected = reference.conv(images, weight, bias, groups=groups, residual=residual)
        xs, (weight, bias, scale, residual) = on(cuda_target, xs), on(cuda_target, (weight, bias, scale, residual))
        settings = dict(groups=groups, prologue=(scale, None, "relu"), residual=residual, method="fft")
        with cupyconv.options(workspace_limit=250_000):
            plan = cupyconv.explain(cupyconv.conv, xs, weight, bias, **settings)
            actual = cupyconv.conv(xs, weight, bias, **settings)
        assert "shares of" in plan.reason and plan.workspace_bytes <= 250_000
        assert_close(actual, expected, np.float32, 121 * 8, magnitude=1000.0, factor=4)


# --- enqueued work, and its memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 2 << 20, 250_000])
def test_it_takes_what_explain_says(cuda_target, limit):
    x, weight = on(cuda_target, (normal(3, 2, 161, 147), normal(3, 2, 15, 15)))
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, x, weight, padding="same", method="fft")
        out = cupyconv.conv(x, weight, padding="same", method="fft")
        gc.collect()
        before = cuda_target.device.peak_bytes = cuda_target.device.allocated_bytes
        cupyconv.conv(x, weight, padding="same", method="fft", out=out)
    assert cuda_target.device.peak_bytes - before <= plan.workspace_bytes
    assert limit is None or plan.workspace_bytes <= limit


def test_the_number_of_calls_depends_on_chunks_alone(cuda_target):
    """Samples and tiles share one launch and one transform of each kind; with less memory, each chunk has as many."""
    weight = cuda_target.to_device(normal(3, 2, 9, 9))

    def enqueued(samples, limit=None):
        x = cuda_target.to_device(normal(samples, 2, 61, 47))
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv, x, weight, method="fft")
            cuda_target.device.log.clear()
            cupyconv.conv(x, weight, method="fft")
        return len(list(every_step(plan.steps))), len(cuda_target.device.log)

    assert enqueued(1) == enqueued(5) == (7, 7)
    listed, run = enqueued(60, 500_000)
    assert run > 7 and (run - 2) % 5 == 0 and listed < run


def test_its_steps_print():
    x, weight = np.empty((16, 64, 61, 47), np.float32), np.empty((64, 64, 9, 9), np.float32)
    page = str(cupyconv.explain(cupyconv.conv, x, weight, method="fft", on="sm_90"))
    for words in (
        "tiles<float32, float32>", "fft      ", "float32 -> complex64", "complex64 -> float32, inverse", "gemm     m ",
        "finish_tiles<float32, float32, float32>", "interleaved", "rounding errors are relative", "recomputed from their windows",
        "cuFFT's work area", "spectra of the weight",
    ):  # fmt: skip
        assert words in page, page


def test_without_room_it_is_refused_and_auto_goes_on():
    x, weight = np.empty((1, 8, 400, 400), np.float32), np.empty((8, 8, 31, 31), np.float32)
    with cupyconv.options(workspace_limit=100_000):
        with pytest.raises(ValueError, match=r"'fft' does not apply: the smallest tile .* limit of 100,000 bytes"):
            cupyconv.explain(cupyconv.conv, x, weight, method="fft", on="sm_90")
        assert cupyconv.explain(cupyconv.conv, x, weight, on="sm_90").method != "fft"


def test_a_device_that_needs_more_memory_for_transforms_is_planned_for(cuda_target, monkeypatch):
    """The device's need shows when a plan is prepared; a new plan that counts it stays within the limit."""
    device = cuda_target.device
    monkeypatch.setattr(device, "transform_work", 40.0)
    monkeypatch.setattr(device, "model", device.model)
    forget_calls()
    x, weight = normal(3, 2, 61, 47), normal(3, 2, 9, 9)
    arrays = on(cuda_target, (x, weight))
    with cupyconv.options(workspace_limit=400_000):
        before = cupyconv.explain(cupyconv.conv, *arrays, method="fft")
        y = cupyconv.conv(*arrays, method="fft")
        after = cupyconv.explain(cupyconv.conv, *arrays, method="fft")
    assert_close(y, reference.conv(x, weight), np.float32, weight[0].size, factor=4)
    assert device.model.transform_area > 5 and after.workspace_bytes <= 400_000
    for step in every_step(after.steps):
        if isinstance(step, Transform):
            assert step.work_bytes >= 40 * step.batch * np.prod(step.size)
            assert step.work_bytes <= after.workspace[-1].nbytes or "shares" in after.reason
    assert before.workspace != after.workspace
    forget_calls()


# --- infinities and NaN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_infinities_and_nan_are_where_the_definition_puts_them(cuda_target, order, dtype):
    x, weight = normal(2, 3, 40, 31, dtype=dtype), normal(4, 3, 5, 5, dtype=dtype)
    x[0, 0, 10, 10], x[1, -1, 30, 0], x[0, 0, 30, 7] = np.inf, np.nan, -np.inf
    weight[0, 0, 2, 3] = 0
    bias = normal(4, dtype=dtype)
    arrays = on(cuda_target, (x, weight, bias))
    actual = cupyconv.conv(*arrays, padding=2, method="fft").get()
    plain = cupyconv.conv(*arrays, padding=2, method="direct").get()
    if dtype == "complex64":
        np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(plain))
    else:
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(actual), kind(plain))
    finite = np.isfinite(plain)
    assert not finite.all()
    np.testing.assert_allclose(actual[finite], plain[finite], rtol=1e-3, atol=1e-4 * abs(plain[finite]).max())


def test_what_would_take_too_long_is_left_as_it_is(cuda_target, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_PRODUCTS", 1000)
    forget_calls()
    x, weight = normal(1, 1, 300, 30), normal(1, 1, 3, 3)
    x[0, 0, 5, 5] = np.nan
    x, weight = on(cuda_target, (x, weight))
    with cupyconv.options(workspace_limit=30_000):
        assert "not recomputed" in str(cupyconv.explain(cupyconv.conv, x, weight, method="fft"))
        y = cupyconv.conv(x, weight, method="fft")
    assert np.isnan(y).sum() > 9 and np.isfinite(y[:, :, 200:]).all()
    forget_calls()


# --- gradients ------------------------------------------------------------------------------------------------


def check_input_gradient(target, grad, weight, shapes, settings, *, limit=250_000):
    """Compare input gradients with the reference; `shapes` is one shape or a list of shapes."""
    merged = shapes if isinstance(shapes, tuple) else (shapes[0][0], sum(s[1] for s in shapes), *shapes[0][2:])
    expected = reference_gradients.conv_grad_input(grad, weight, merged, **settings)
    arrays = on(target, (grad, weight))
    for most in (None, limit):
        with cupyconv.options(workspace_limit=most):
            plan = cupyconv.explain(cupyconv.conv_grad_input, *arrays, shapes, method="fft", **settings)
            actual = cupyconv.conv_grad_input(*arrays, shapes, method="fft", **settings)
        assert plan.method == "fft" and (most is None or plan.workspace_bytes <= most)
        if isinstance(shapes, list):
            actual = np.concatenate([part.get() for part in actual], axis=1)
        assert_close(actual, expected, np.result_type(grad, weight), weight[0].size * weight.shape[0], factor=4)
    return plan


GRADIENTS = ("2-D", "1-D", "3-D", "dilation", "many channels", "groups", "several outputs of a channel", *MODES)


@pytest.mark.parametrize("name", GRADIENTS)
def test_an_input_gradient_is_a_convolution(cuda_target, order, name):
    """This also holds with groups, whose weight is no view of the other, and for padding that repeats elements."""
    x, weight, settings = CASES[name]
    weight = normal(*weight, seed=1)
    grad = normal(*reference.conv(normal(*x), weight, **settings).shape, seed=2)
    check_input_gradient(cuda_target, grad, weight, x, settings)


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("complex64", "complex64"), ("complex128", "complex128"), *MIXED], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["many channels", "groups", "symmetric"])
def test_an_input_gradient_of_complex_numbers_has_the_weight_conjugated(cuda_target, order, dtypes, name):
    x, weight, settings = CASES[name]
    weight = normal(*weight, dtype=dtypes[1], seed=1)
    grad = normal(*reference.conv(np.zeros(x), np.zeros(weight.shape), **settings).shape, dtype=dtypes[0], seed=2)
    check_input_gradient(cuda_target, grad, weight, x, settings)


def test_input_gradients_of_groups_that_several_inputs_share(cuda_target, order):
    """Inputs begin and end inside groups and at their borders, with whole groups between; the weight is strided."""
    weight, settings = normal(10, 5, 3, 6).transpose(0, 3, 1, 2)[:, ::2], dict(groups=5, padding=((1, 2), (0, 3)))
    shapes = [(2, channels, 11, 9) for channels in (2, 2, 8, 1, 1, 1)]
    grad = normal(*reference.conv(normal(2, 15, 11, 9), weight, **settings).shape)
    check_input_gradient(cuda_target, grad, weight, shapes, settings)


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
def test_input_gradients_of_groups_are_convolutions_by_other_methods_too(cuda_target, method):
    """The gradient of integers is exact; the exchanged weight is a copy."""
    rng = np.random.default_rng(5)
    weight, grad = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((10, 3, 3, 2), (2, 10, 7, 8)))
    for settings in (dict(groups=5), dict(groups=5, stride=2, padding=1)):
        shape = (2, 15, 9, 9) if settings == dict(groups=5) else (2, 15, 13, 14)
        expected = reference_gradients.conv_grad_input(grad, weight, shape, **settings)
        arrays = on(cuda_target, (grad, weight))
        plan = cupyconv.explain(cupyconv.conv_grad_input, *arrays, shape, method=method, **settings)
        actual = cupyconv.conv_grad_input(*arrays, shape, method=method, **settings)
        np.testing.assert_array_equal(actual, expected)
        assert method == "direct" or "exchange_weight" in str(plan)


def test_without_room_for_the_exchanged_weight_an_input_gradient_is_refused():
    grad, weight = np.empty((1, 8, 40, 40), np.float32), np.empty((8, 4, 31, 31), np.float32)
    with cupyconv.options(workspace_limit=100_000), pytest.raises(ValueError, match="exchanged needs 123,008"):
        cupyconv.explain(cupyconv.conv_grad_input, grad, weight, (1, 8, 70, 70), groups=2, method="fft", on="sm_90")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", [1, (2, 1)])
def test_an_input_gradient_is_folded_where_padding_repeats_elements(cuda_target, mode, stride):
    """Several images are folded at once, some transforms at a time, for 2, 2 and 1 samples, and one by one."""
    shapes, weight = [(5, 2, 30, 21), (5, 1, 30, 21)], normal(3, 3, 7, 6)
    settings = dict(padding=((2, 3), (4, 1)), padding_mode=mode, stride=stride)
    grad = normal(*reference.conv(normal(5, 3, 30, 21), weight, **settings).shape)
    expected = reference_gradients.conv_grad_input(grad, weight, (5, 3, 30, 21), **settings)
    arrays = on(cuda_target, (grad, weight))
    for limit in (None, 130_000, 60_000, 40_000):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv_grad_input, *arrays, shapes, method="fft", **settings)
            actual = cupyconv.conv_grad_input(*arrays, shapes, method="fft", **settings)
        assert limit is None or plan.workspace_bytes <= limit
        merged = np.concatenate([part.get() for part in actual], axis=1)
        assert_close(merged, expected, np.float32, 6 * weight.size, factor=4)


def test_the_gradient_of_one_image_is_folded_where_two_would_not_fit():
    """The padded gradient of a sample may use half of the workspace, and no more."""
    grad, weight = (np.broadcast_to(np.float32(0), shape) for shape in ((1, 1, 1000, 1000), (1, 4, 9, 9)))
    settings = dict(padding=4, padding_mode="reflect", method="fft", on="sm_90")
    sample = 4 * 1008**2 * 4
    for times, fits in ((1.9, False), (2.1, True), (3.9, True)):
        with cupyconv.options(workspace_limit=int(times * sample)):
            try:
                plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, (1, 4, 1000, 1000), **settings)
                assert fits and {buffer.name: buffer.nbytes for buffer in plan.workspace}["padded"] == sample
            except ValueError as refusal:
                assert not fits and "workspace" in str(refusal)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_auto_takes_it_for_the_gradient_of_a_deconvolution(mode):
    image, psf = np.ones((1, 1, 1024, 1024), np.float32), np.ones((1, 1, 63, 63), np.float32)
    settings = dict(padding=31, padding_mode=mode, on="sm_90")
    plan = cupyconv.explain(cupyconv.conv_grad_input, image, psf, image.shape, **settings)
    assert plan.method == "fft" and "rounding errors" in plan.reason
    with pytest.raises(ValueError, match="'fft' does not apply: sums of float16 would be rounded twice"):
        image, psf = image.astype(np.float16), psf.astype(np.float16)
        cupyconv.explain(
            cupyconv.conv_grad_input, image, psf, image.shape, method="fft", **settings | {"padding_mode": "edge"}
        )


def test_the_gradients_of_a_result_by_transforms(cuda_target):
    """Each gradient uses the method with the lowest estimated time."""
    x, weight = normal(2, 2, 40, 31), normal(3, 2, 9, 9)
    arrays = on(cuda_target, (x, weight))
    y, pullback = cupyconv.vjp(cupyconv.conv, *arrays, padding="same", padding_mode="reflect", method="fft")
    grad = normal(*y.shape, seed=3)
    gradients = pullback(cuda_target.to_device(grad))
    settings = dict(padding="same", padding_mode="reflect")
    expected = reference_gradients.conv_grad_input(grad, weight, x.shape, **settings)
    assert_close(gradients.x, expected, np.float32, 6 * weight.size, factor=4)
    expected = reference_gradients.conv_grad_weight(grad, x, (9, 9), **settings)
    assert_close(gradients.weight, expected, np.float32, grad[:, 0].size, factor=4)


def check_weight_gradient(target, grad, xs, weight, settings, *, limit=150_000):
    merged = np.concatenate(xs, axis=1) if isinstance(xs, list) else xs
    expected = reference_gradients.conv_grad_weight(grad, merged, weight[2:], **settings)
    dtype = np.result_type(grad, merged)
    arrays = target.to_device(grad), on(target, xs) if isinstance(xs, list) else target.to_device(xs)
    out = target.to_device(np.full(expected.shape, np.nan, dtype))
    for most in (None, limit):
        with cupyconv.options(workspace_limit=most):
            plan = cupyconv.explain(cupyconv.conv_grad_weight, *arrays, weight[2:], method="fft", **settings)
            cupyconv.conv_grad_weight(*arrays, weight[2:], method="fft", out=out, **settings)
        assert plan.method == "fft" and (most is None or plan.workspace_bytes <= most)
        assert_close(out, expected, dtype, max(1, grad[:, :1].size), factor=4)
    return plan


@pytest.mark.parametrize("name", CASES)
def test_a_weight_gradient(cuda_target, order, name):
    x, weight, settings = CASES[name]
    x = normal(*x)
    grad = normal(*reference.conv(x, normal(*weight), **settings).shape, seed=2)
    if multiplies_numbers(np.empty(weight), settings) and order == "channels side by side":
        with pytest.raises(ValueError, match="does not fit the workspace limit"):
            cupyconv.conv_grad_weight(*on(cuda_target, (grad, x)), weight[2:], method="fft", **settings)
        return
    check_weight_gradient(cuda_target, grad, x, weight, settings)


@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in DTYPES if dtype != "float32"), *MIXED], ids=str)
def test_dtypes_of_a_weight_gradient(cuda_target, order, dtypes):
    """Gradients of complex numbers use conjugates."""
    for name in ("many channels", "symmetric"):
        x, weight, settings = CASES[name]
        shape = reference.conv(np.zeros(x), np.zeros(weight), **settings).shape
        grad, x = normal(*shape, dtype=dtypes[0], seed=2), normal(*x, dtype=dtypes[1])
        check_weight_gradient(cuda_target, grad, x, weight, settings, limit=None)


def test_a_weight_gradient_of_merged_inputs(cuda_target, order):
    """Inputs are transformed one by one, in the same memory, wherever groups begin, with a prologue and any strides."""
    xs = [normal(3, 5, 23, 17), normal(3, 23, 17, 2).transpose(0, 3, 1, 2), normal(3, 5, 46, 17)[:, :, ::2]]
    for groups in (1, 3):
        weight, settings = (6, 12 // groups, 5, 3), dict(groups=groups, padding=((2, 2), (1, 0)), stride=(2, 1))
        grad = normal(*reference.conv(np.concatenate(xs, axis=1), normal(*weight), **settings).shape, seed=2)
        check_weight_gradient(cuda_target, grad, xs, weight, settings)
    scale, shift = normal(12), normal(12, seed=1)
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    weight, settings = normal(6, 4, 5, 3), dict(groups=3, padding="same")
    grad = normal(3, 6, 23, 17)
    expected = reference_gradients.conv_grad_weight(grad, images, (5, 3), **settings)
    prologue = (*on(cuda_target, (scale, shift)), "relu")
    arrays = on(cuda_target, xs), cuda_target.to_device(weight)
    _, pullback = cupyconv.vjp(cupyconv.conv, *arrays, prologue=prologue, method="fft", **settings)
    actual = pullback(cuda_target.to_device(grad), needs=("weight",)).weight
    assert_close(actual, expected, np.float32, grad[:, 0].size, magnitude=10.0, factor=4)


def test_a_weight_gradient_in_shares(cuda_target, order):
    """Shares are of outputs, or of groups, if the spectra of all kernels do not fit."""
    for channels, weight, groups in ((8, (24, 8, 11, 11), 1), (12, (24, 3, 11, 11), 4)):
        xs = [normal(1, 5, 30, 30), normal(1, channels - 5, 30, 30)]
        plan = check_weight_gradient(cuda_target, normal(1, 24, 20, 20), xs, weight, dict(groups=groups), limit=330_000)
        assert "shares of" in plan.reason


def test_shares_that_have_no_room_in_what_others_leave_are_refused():
    x, grad = array(2, 29, 48, 35), array(2, 35, 44, 31)
    with cupyconv.options(workspace_limit=38_216), pytest.raises(ValueError, match="does not fit the workspace limit"):
        cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (5, 5), method="fft", on="sm_90")


def test_a_weight_gradient_is_added_in_parts_where_tiles_are_small(cuda_target):
    x, grad = normal(1, 1, 9000), normal(1, 1, 8993)
    problem = checked_call(cupyconv.conv_grad_weight, *on(cuda_target, (grad, x)), (8,), method="fft").problem
    small = GradientTiling(problem, (1, 1, 57), False)
    assert small.sum_parts > 4 and GradientTiling(problem, (1, 1, 8993), False).sum_parts == 1


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_weight_gradient_has_infinities_where_the_definition_puts_them(cuda_target, order, dtype):
    x, grad = normal(2, 3, 40, 31, dtype=dtype), normal(2, 4, 36, 27, dtype=dtype)
    x[0, 0, 0, 0], x[1, 2, 1, 0] = np.inf, np.nan
    arrays = on(cuda_target, (grad, x))
    actual = cupyconv.conv_grad_weight(*arrays, (5, 5), method="fft").get()
    plain = cupyconv.conv_grad_weight(*arrays, (5, 5), method="direct").get()
    finite = np.isfinite(plain)
    assert finite.any() and not finite.all()
    np.testing.assert_array_equal(np.isfinite(actual), finite)
    np.testing.assert_allclose(actual[finite], plain[finite], rtol=1e-3, atol=1e-4 * abs(plain[finite]).max())


def test_auto_takes_it_for_the_weight_of_a_large_kernel():
    image = np.ones((1, 1, 1024, 1024), np.float32)
    settings = dict(padding=31, on="sm_90")
    plan = cupyconv.explain(cupyconv.conv_grad_weight, image, image, (63, 63), **settings)
    assert plan.method == "fft" and "rounding errors" in plan.reason
    with cupyconv.options(allow_fft=False):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, image, image, (63, 63), **settings)
    assert plan.method != "fft"
    settings = dict(padding=1, on="sm_90")
    assert cupyconv.explain(cupyconv.conv_grad_weight, image, image, (3, 3), **settings).method != "fft"


# --- the choice -----------------------------------------------------------------------------------------------


def chosen(x, weight, **settings):
    arrays = np.empty(x, np.float32), np.empty(weight, np.float32)
    return cupyconv.explain(cupyconv.conv, *arrays, padding="same", **settings, on="sm_90")


@pytest.mark.parametrize("x, weight, takes_it", [
    ((1, 1, 1024, 1024), (1, 1, 31, 31), True), ((1, 1, 1024, 1024), (1, 1, 63, 63), True),
    ((1, 1, 128, 128, 128), (1, 1, 15, 15, 15), True), ((1, 1, 10**7), (1, 1, 1001), True),
    ((4, 16, 512, 512), (16, 16, 31, 31), True),
    ((1, 1, 1024, 1024), (1, 1, 3, 3), False), ((8, 64, 56, 56), (64, 64, 3, 3), False),
    ((8, 64, 56, 56), (64, 64, 7, 7), False), ((1, 1, 10**6), (1, 1, 5), False), ((1, 1, 30, 30), (1, 1, 9, 9), False),
])  # fmt: skip
def test_auto_takes_it_for_large_kernels_alone(x, weight, takes_it):
    plan = chosen(x, weight)
    assert (plan.method == "fft") == takes_it, plan
    if not takes_it:
        assert "model not yet measured" in dict(plan.rejected)["fft"]


def test_it_can_be_forbidden():
    with cupyconv.options(allow_fft=False):
        plan = chosen((1, 1, 1024, 1024), (1, 1, 63, 63))
        assert plan.method != "fft" and "allow_fft=False" in dict(plan.rejected)["fft"]
        with pytest.raises(ValueError, match=r"'fft' does not apply: .*allow_fft=False"):
            chosen((1, 1, 1024, 1024), (1, 1, 63, 63), method="fft")
    with pytest.raises(ValueError, match="method 'fft' does not apply: only for kernels of several taps"):
        chosen((1, 4, 9, 9), (4, 4, 1, 1), method="fft")


def test_without_cufft_another_method_is_taken(cuda_target, monkeypatch):
    """That cuFFT is missing shows when a plan is prepared; all later plans take it into account."""
    device = cuda_target.device
    monkeypatch.setattr(device, "has_cufft", False)
    monkeypatch.setattr(device, "model", device.model)
    forget_calls()
    x, weight = normal(1, 1, 90, 80), normal(1, 1, 25, 25)
    arrays = on(cuda_target, (x, weight))
    with pytest.raises(ValueError, match="'fft' does not apply: CuPy does not find cuFFT"):
        cupyconv.conv(*arrays, method="fft")
    assert "not find cuFFT" in dict(cupyconv.explain(cupyconv.conv, *arrays).rejected)["fft"]
    assert_close(cupyconv.conv(*arrays), reference.conv(x, weight), np.float32, 625, factor=4)
    forget_calls()


def test_it_is_captured_where_products_are_one_by_one(cuda_target, monkeypatch):
    """Matrix products are cuBLAS calls, which cannot be captured."""
    one, several = normal(1, 1, 9, 9), normal(4, 4, 9, 9)
    for weight, refused in ((one, False), (several, True)):
        x = normal(1, weight.shape[1], 40, 40)
        monkeypatch.setattr(tiles, "ORDERS", (refused,))
        forget_calls()
        arrays = on(cuda_target, (x, weight))
        expected = cupyconv.conv(*arrays, method="fft").get()
        out = cuda_target.to_device(np.zeros_like(expected))
        with monkeypatch.context() as patch:
            patch.setattr(cuda_target.device, "capturing", True)
            if refused:
                with pytest.raises(RuntimeError, match="cannot capture cuBLAS calls"):
                    cupyconv.conv(*arrays, method="fft", out=out)
                continue
            cupyconv.conv(*arrays, method="fft", out=out)
        np.testing.assert_array_equal(out, expected)
    forget_calls()


def test_lengths_are_the_next_that_are_quick():
    quick = sorted(2**a * 3**b * 5**c * 7**d for a in range(12) for b in range(8) for c in range(6) for d in range(5))
    for least in (1, 2, 3, 11, 13, 17, 97, 121, 1000, 1086, 2047):
        assert tiles.fast_length(least) == next(n for n in quick if n >= least)
        assert tiles.fast_length(least, 2) == next(n for n in quick if n >= least and n % 2 == 0)


TRANSFORMED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = [
    ((2, 8, 61), (8, 8, 9), {}, 1),
    ((2, 8, 61, 47), (8, 8, 9, 1), {}, 47),
    ((2, 8, 61, 47), (8, 8, 1, 9), {}, 61),
    ((2, 8, 61, 47), (8, 8, 5, 7), {"stride": (2, 3)}, 1),
    ((2, 8, 20, 30, 17), (8, 8, 5, 1, 7), {}, 30),
    ((3, 8, 200), (16, 8, 33), {"groups": 1}, 1),
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "settings", "lines"), TRANSFORMED)
def test_transforms_are_along_the_axes_of_several_taps_and_of_quick_lengths(
    monkeypatch, shape, kernel, settings, lines, interleaved
):
    """The last length is even; along other axes tiles are one pixel long.  cuFFT has memory for the largest spectra."""
    monkeypatch.setattr(tiles, "ORDERS", (interleaved,))
    plan = cupyconv.explain(cupyconv.conv, array(*shape), array(*kernel), method="fft", on="sm_90", **settings)
    check_plan(plan)
    transforms = [step for step in each_step(plan.steps) if isinstance(step, Transform)]
    spectra = []
    for transform in transforms:
        assert len(transform.size) == sum(taps > 1 for taps in kernel[2:]) and transform.size[-1] % 2 == 0
        assert transform.size == tuple(map(tiles.fast_length, transform.size)), "quick lengths"
        assert all(length >= taps for length, taps in zip(transform.size, (taps for taps in kernel[2:] if taps > 1)))
        spectra.append(prod(transform.frequencies) * transform.batch * 8)
    (own,) = (buffer.nbytes for buffer in plan.workspace if buffer.is_kept)
    assert own >= 0.9 * max(spectra)
    (units,) = re.findall(r"([\d,]+) tiles?\b", plan.reason)
    assert int(units.replace(",", "")) % (shape[0] * lines) == 0


def test_more_frequencies_than_a_batch_holds(monkeypatch):
    """Each frequency has exactly one product."""
    monkeypatch.setattr(tiles, "ORDERS", (True,))
    limit, settings = 1 << 34, {"method": "fft", "on": "sm_90"}
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.conv, array(1, 16, 900, 900), array(16, 16, 251, 251), **settings)
    check_plan(plan, limit)
    calls = [step for step in each_step(plan.steps) if isinstance(step, GemmCall)]
    (frequencies,) = {prod(step.frequencies) for step in plan.steps if isinstance(step, Transform)}
    assert frequencies > MAX_BATCH and sum(call.batch for call in calls) % frequencies == 0
    ends = list(accumulate(call.batch * call.c.stride * 8 for call in calls))
    assert [call.c.at.offset for call in calls] == [0, *ends[:-1]]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "outputs", "taps"), [((64, 64, 4096, 4096), 64, 31), ((1, 4096, 64, 64), 4096, 3), ((2, 2, 60_000, 60_000), 2, 99)]
)  # fmt: skip
def test_elements_of_a_steps_tiles_have_32_bits(monkeypatch, shape, outputs, taps, interleaved):
    """With more memory there are still chunks or shares, but no more than 32 bits require."""
    monkeypatch.setattr(tiles, "ORDERS", (interleaved,))
    settings = {"method": "fft", "on": "sm_90", "padding": "same"}
    x, weight, limit = array(*shape), array(outputs, shape[1], taps, taps), 1 << 50
    grad = array(shape[0], outputs, *shape[2:])
    for function, arguments in ((cupyconv.conv, (x, weight)), (cupyconv.conv_grad_weight, (grad, x, taps))):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(function, *arguments, **settings)
        check_plan(plan, limit)
        transforms = [step for step in each_step(plan.steps) if isinstance(step, Transform)]
        assert 2 * max(step.batch * prod(step.size) for step in transforms) > 2**30


def test_what_a_place_takes_grows_with_its_channels():
    """The estimated time of a position grows with its channels, also if the number of threads stays the same."""
    taken = []
    for channels in (1, 4, 8, 16):
        tiling = tiles.Tiling(
            checked_call(cupyconv.conv, array(2, channels, 64), array(3, channels, 9), on="sm_90").problem,
            (1, 1, 9),
            False,
        )
        taken.append(tiling.cut(tiling.problem.xs[0], (), 0, 2).arithmetic_seconds)
    assert sorted({*taken}) == taken
