"""`avg_pool` and its gradient compared with the naive oracle: exactly if sums of integers are divided once."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
from hypothesis import strategies as st
from pullbacks import FIELDS, assert_rounded, bytes_of
from refusals import Ones, assert_refused, foreign, placed
from strategies import drawn, nan_filled, pool_cases
from tolerance import assert_close

import cupyconv

pytest.importorskip("ml_dtypes")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def row(*values):
    return np.array(values, np.float64)[None, None]


@given(case=pool_cases(), include=st.booleans())
def test_every_mean(target, case, include):
    """A mean of integers is rounded once, because its sum is exact, so that only one result is right."""
    arrays, settings = case.arrays(), {**case.parameters, "count_include_pad": include}
    out = case.new_out(target.to_device, target.xp)
    y = cupyconv.avg_pool(**case.views(arrays, target.to_device, target.xp), **settings, out=out)
    assert isinstance(y, list) == (not case.bare_x), "a list gives a list"
    if out is not None:
        assert all(a is b for a, b in zip(reference.sequence(y), reference.sequence(out), strict=True))
    expected = reference_gradients.avg_pool(arrays["x"], **settings)
    for one, wanted in zip(reference.sequence(y), reference.sequence(expected), strict=True):
        assert_rounded(target.to_host(one), wanted, case.dtype)


@given(case=pool_cases(), include=st.booleans())
def test_means_of_random_numbers(target, case, include):
    arrays, settings = case.arrays(integer=False), {**case.parameters, "count_include_pad": include}
    y = cupyconv.avg_pool(**case.views(arrays, target.to_device, target.xp), **settings)
    expected = reference_gradients.avg_pool(arrays["x"], **settings)
    absolute = reference_gradients.avg_pool([np.abs(x) for x in reference.sequence(arrays["x"])], **settings)
    taps = int(np.prod(case.kernel_shape))
    for one, wanted, magnitude in zip(reference.sequence(y), reference.sequence(expected), absolute, strict=True):
        assert_close(target.to_host(one), wanted, case.dtype, taps, magnitude=magnitude)


@given(case=pool_cases(), include=st.booleans())
def test_every_share_of_a_gradient(target, case, include):
    arrays, grad, settings = case.arrays(), case.gradient(), {**case.parameters, "count_include_pad": include}
    y, pullback = cupyconv.vjp(cupyconv.avg_pool, **case.views(arrays, target.to_device, target.xp), **settings)
    assert pullback.holds == ()
    grads = [target.to_device(one) for one in reference.sequence(grad)]
    gradients = pullback(grads[0] if case.bare_x else grads)
    assert gradients._fields == FIELDS
    assert all(value is None for value in gradients[1:])
    assert isinstance(gradients.x, list) == isinstance(y, list) == (not case.bare_x)
    absolute = [np.abs(one) for one in reference.sequence(grad)]
    expected, magnitudes = (
        reference.sequence(reference_gradients.avg_pool_gradients(of, arrays["x"], **settings).x)
        for of in (grad, absolute if isinstance(grad, list) else absolute[0])
    )
    taps = int(np.prod(case.kernel_shape))
    for one, wanted, magnitude in zip(reference.sequence(gradients.x), expected, magnitudes, strict=True):
        assert_close(target.to_host(one), wanted, case.dtype, taps, magnitude=magnitude)


@pytest.mark.parametrize(
    "x, settings, expected",
    [
        ((1, 3, 2, 6, 4), dict(kernel_shape=(2,)), [2, 4]),
        ((1, 3, 2, 6, 4), dict(kernel_shape=(2,), ceil_mode=True), [2, 4, 4]),
        ((1, 3, 2, 6), dict(kernel_shape=2, stride=1, dilation=2), [1.5, 4.5]),
        ((2, 4), dict(kernel_shape=2, stride=1, padding=1), [1, 3, 2]),
        ((2, 4), dict(kernel_shape=2, stride=1, padding=1, count_include_pad=False), [2, 3, 4]),
        ((2, 4, 6), dict(kernel_shape=3, stride=2, padding=1, ceil_mode=True), [2, 10 / 3]),
        ((2, 4, 6, 8), dict(kernel_shape=3, stride=2, padding=1, ceil_mode=True), [2, 6, 4]),
        ((2, 4, 6, 8), dict(kernel_shape=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False), [3, 6, 8]),
        ((2,), dict(kernel_shape=1, stride=1, padding=1), [0, 2, 0]),
        ((2,), dict(kernel_shape=1, stride=1, padding=1, count_include_pad=False), [np.nan, 2, np.nan]),
        ((3,), dict(kernel_shape=3, padding="same"), [1]),
        ((1, np.nan, 2, np.inf, -np.inf), dict(kernel_shape=2, stride=1), [np.nan, np.nan, np.inf, np.nan]),
    ],
    ids=str,
)
def test_by_hand(target, x, settings, expected):
    y = target.to_host(cupyconv.avg_pool(target.to_device(row(*x)), **settings))
    np.testing.assert_allclose(y, row(*expected), rtol=1e-15)


@pytest.mark.parametrize("pool", ["avg_pool", "max_pool"])
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
@pytest.mark.parametrize("padding", [0, 1])
def test_one_window_of_the_whole_image(target, pool, layout, padding):
    """The mean and the largest of all elements; padding does not count, and NaN is in the result of its plane only."""
    x = np.random.default_rng(0).integers(-50, 50, (3, 5, 12, 11)).astype(np.float32)
    x[1, 2, 3, 4] = np.nan
    given = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1) if layout == "channels last" else x
    window = 12 + 2 * padding, 11 + 2 * padding
    settings = {"count_include_pad": False} if pool == "avg_pool" else {}
    y = getattr(cupyconv, pool)(target.to_device(given), window, padding=padding, **settings)
    expected = (np.mean if pool == "avg_pool" else np.max)(x.astype(np.float64), (2, 3), keepdims=True)
    np.testing.assert_array_equal(target.to_host(y), expected.astype(np.float32))


def test_sums_of_sixteen_bit_numbers_are_kept_in_float32(target):
    """Means are right whose sums fail in float16: 2048 + 1 + 1 + ... stays 2048, 40,000 + 40,000 is infinite."""
    x = np.ones((1, 1, 4), np.float16)
    x[..., 0] = 2048
    assert target.to_host(cupyconv.avg_pool(target.to_device(x), 4)).item() == np.float16(2051 / 4)
    assert target.to_host(cupyconv.avg_pool(target.to_device(x * 0 + np.float16(4e4)), 4)).item() == np.float16(4e4)


def test_a_gradient_is_in_the_precision_of_the_image(target):
    """The image's gradient has the image's dtype, even if the incoming gradient has another precision."""
    x = target.to_device(np.ones((1, 2, 4), np.float32))
    _, pullback = cupyconv.vjp(cupyconv.avg_pool, x, 2)
    gradients = pullback(target.to_device(np.ones((1, 2, 2), np.float64)))
    assert gradients.x.dtype == np.float32 and target.to_host(gradients.x).tolist() == [[[0.5] * 4] * 2]
    assert pullback(target.to_device(np.ones((1, 2, 2), np.float32)), needs=()).x is None
    assert bytes_of(target, pullback(target.to_device(np.ones((1, 2, 2), np.float32)))) == bytes_of(target, gradients)


def test_launches_do_not_grow_with_the_batch(cuda_target):
    log = cuda_target.device.log

    def launches(batch):
        x = cuda_target.to_device(np.ones((batch, 3, 6, 8), np.float32))
        log.clear()
        y, pullback = cupyconv.vjp(cupyconv.avg_pool, x, (2, 2))
        pullback(y)
        return len(log)

    assert launches(16) == launches(2) == 2


@pytest.mark.parametrize("shape", [(0, 2, 6), (2, 0, 6), (0, 6)], ids=str)
def test_empty_axes(target, shape):
    y, pullback = cupyconv.vjp(cupyconv.avg_pool, target.to_device(np.ones(shape, np.float32)), (2,))
    assert y.shape == (*shape[:-1], 3)
    assert pullback(y).x.shape == shape


def test_out_is_written_completely_and_nothing_beside_it(target):
    base = target.to_device(nan_filled((4, 5, 6), np.dtype("f4")))
    x = drawn(np.random.default_rng(0), (2, 3, 8), np.dtype("f4"), 8)
    cupyconv.avg_pool(target.to_device(x), (2,), out=base[1:-1, 1:-1, 1:-1])
    expected = reference_gradients.avg_pool(x, (2,))
    assert np.array_equal(target.to_host(base), np.pad(expected, 1, constant_values=np.nan), equal_nan=True)


REFUSALS = [
    pytest.param(error, words, changes, id=name)
    for name, error, words, changes in (
        ("complex", TypeError, [r"\bx\b", "complex64", "real and imaginary parts separately"], dict(x=Ones((2, 3, 8, 9), "complex64"))),
        ("integers", TypeError, [r"\bx\b", "int32", "astype"], dict(x=Ones((2, 3, 8, 9), "int32"))),
        ("foreign", TypeError, [r"\bx\b", r"torch\.Tensor", "from_dlpack"], dict(x=foreign("torch", "Tensor"))),
        ("axes", ValueError, ["kernel_shape|x", r"\(2, 3, 8, 9\)"], dict(kernel_shape=(2,))),
        ("too large", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=(9, 1))),
        ("count is a number", TypeError, ["count_include_pad", "True or False", "0"], dict(count_include_pad=0)),
        ("ceil_mode is a number", TypeError, ["ceil_mode", "True or False", "1"], dict(ceil_mode=1)),
        ("short out", ValueError, [r"\bout\b", r"\(2, 3, 4, 3\)", r"\(2, 3, 4, 4\)"], dict(out=Ones((2, 3, 4, 3)))),
        ("one out for two", ValueError, [r"\bout\b", "2", "1"], dict(x=[Ones((2, 3, 8, 9))] * 2, out=[Ones((2, 3, 4, 4))])),
    )
]  # fmt: skip


@pytest.mark.parametrize("error, words, changes", REFUSALS)
def test_refused(target, error, words, changes):
    call = dict(x=Ones((2, 3, 8, 9)), kernel_shape=(2, 2)) | changes
    arguments = {name: placed(value, target) for name, value in call.items()}
    assert_refused(target, error, words, cupyconv.avg_pool, **arguments)


def test_a_pullback_refuses_what_does_not_fit(target):
    def ones(*shape, dtype=np.float32):
        return target.to_device(np.ones(shape, dtype))

    _, pullback = cupyconv.vjp(cupyconv.avg_pool, ones(2, 3, 8), (2,))
    assert_refused(target, ValueError, [r"\bgrad\b", r"\(2, 3, 5\)", r"\(2, 3, 4\)"], pullback, ones(2, 3, 5))
    assert_refused(target, TypeError, [r"\bgrad\b", "complex64"], pullback, ones(2, 3, 4, dtype=np.complex64))
    assert_refused(target, TypeError, [r"\bgrad\b", "None"], pullback, None)
    assert_refused(target, TypeError, [r"\bgrad\b", "list"], pullback, [[1.0]])
    _, pullback = cupyconv.vjp(cupyconv.avg_pool, [ones(2, 3, 8), ones(2, 1, 8)], (2,))
    assert_refused(target, ValueError, [r"grad\[1\]", r"\(2, 3, 4\)", r"\(2, 1, 4\)"], pullback, [ones(2, 3, 4)] * 2)
    assert_refused(target, ValueError, [r"\bgrad\b", "1", "2"], pullback, [ones(2, 3, 4)])


def test_libraries_are_not_mixed(cuda_target):
    _, pullback = cupyconv.vjp(cupyconv.avg_pool, cuda_target.to_device(np.ones((1, 1, 4), np.float32)), (2,))
    assert_refused(cuda_target, TypeError, ["grad is numpy.ndarray"], pullback, np.ones((1, 1, 2), np.float32))


@needs_torch
@pytest.mark.parametrize("settings", [
    dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=2, stride=3), dict(kernel_size=5, stride=4, padding=2),
    dict(kernel_size=2, stride=5, padding=1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_against_torch(target, settings, include, ceil_mode):
    import torch

    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 11, 10)).astype(np.float64)
    ours = {"stride": settings["stride"], "padding": settings.get("padding", 0)}
    modes = dict(ceil_mode=ceil_mode, count_include_pad=include)
    y, pullback = cupyconv.vjp(cupyconv.avg_pool, target.to_device(x), (settings["kernel_size"],) * 2, **ours, **modes)
    leaf = torch.from_numpy(x).requires_grad_()
    wanted = torch.nn.functional.avg_pool2d(leaf, **settings, **modes)
    wanted.sum().backward()
    np.testing.assert_allclose(target.to_host(y), wanted.detach(), rtol=1e-14)
    back = target.to_host(pullback(target.to_device(np.ones(y.shape))).x)
    np.testing.assert_allclose(back, leaf.grad, rtol=1e-13)


@pytest.mark.parametrize("stride", [None, 1])
@pytest.mark.parametrize("padding", [0, 1])
def test_gradient_of_a_mean_of_all(target, stride, padding):
    """Shares are rounded once, even if they are so small that float16 has few bits for them."""
    x = target.to_device(np.ones((2, 1, 40, 40, 41), np.float16))
    y, pullback = cupyconv.vjp(
        cupyconv.avg_pool, x, (40 + 2 * padding,) * 2 + (41 + 2 * padding,), stride=stride, padding=padding
    )
    grad = np.array([1, -3], np.float16).reshape(y.shape)
    shares = grad.astype(np.float32) / ((40 + 2 * padding) ** 2 * (41 + 2 * padding))
    gradient = target.to_host(pullback(target.to_device(grad)).x)
    np.testing.assert_array_equal(gradient, np.broadcast_to(shares.astype(np.float16), gradient.shape))
