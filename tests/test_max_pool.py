"""Tests of `max_pool` and its gradient against the naive reference, exact because a maximum is one of its inputs."""

from __future__ import annotations

import importlib.util
import platform

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
from hypothesis import strategies as st
from pullbacks import FIELDS, assert_rounded, bytes_of, on_device
from refusals import Ones, assert_refused, foreign, placed
from strategies import PoolCase, as_dtype, drawn, nan_filled, pool_cases
from tolerance import assert_exact

import cupyconv

ml_dtypes = pytest.importorskip("ml_dtypes")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
SPECIAL = (np.nan, np.inf, -np.inf)


def row(*values):
    return np.array(values, np.float64)[None, None]


def sprinkled(case: PoolCase, xs: list[np.ndarray], share: float) -> list[np.ndarray]:
    """Return the arrays with a share of their elements set to NaN or infinity; broadcast views stay unchanged."""
    generator = np.random.default_rng((case.seed, 2))
    changed = []
    for x, layout in zip(xs, case.layouts):
        chosen = generator.random(x.shape) < (0 if "broadcast" in layout else share)
        changed.append(np.where(chosen, generator.choice(np.array(SPECIAL), x.shape).astype(x.dtype), x))
    return changed


# --- values ---------------------------------------------------------------------------------------------------------


@given(case=pool_cases(), integer=st.booleans(), special=st.sampled_from((0, 0, 0.1, 0.6)))
def test_every_maximum(target, case, integer, special):
    xs = sprinkled(case, reference.sequence(case.arrays(integer=integer)["x"]), special)
    arrays = {"x": xs[0] if case.bare_x else xs}
    out = case.new_out(target.to_device, target.xp)
    y = cupyconv.max_pool(**case.views(arrays, target.to_device, target.xp), **case.parameters, out=out)
    assert isinstance(y, list) == (not case.bare_x), "a list gives a list"
    if out is not None:
        assert all(a is b for a, b in zip(reference.sequence(y), reference.sequence(out), strict=True))
    expected = reference_gradients.max_pool(arrays["x"], **case.parameters)
    for one, wanted in zip(reference.sequence(y), reference.sequence(expected), strict=True):
        assert_exact(target.to_host(one), wanted, case.dtype)


@given(case=pool_cases(), special=st.sampled_from((0, 0, 0.1, 0.6)))
def test_where_the_first_of_the_largest_lies(target, case, special):
    xs = sprinkled(case, reference.sequence(case.arrays()["x"]), special)
    arrays = {"x": xs[0] if case.bare_x else xs}
    views = case.views(arrays, target.to_device, target.xp)
    y, indices = cupyconv.max_pool(**views, **case.parameters, return_indices=True)
    assert isinstance(y, list) == isinstance(indices, list) == (not case.bare_x)
    expected = reference_gradients.max_pool(arrays["x"], **case.parameters)
    for one, wanted in zip(reference.sequence(y), reference.sequence(expected), strict=True):
        assert_exact(target.to_host(one), wanted, case.dtype)
    expected = reference_gradients.max_pool_indices(arrays["x"], **case.parameters)
    for one, wanted in zip(reference.sequence(indices), reference.sequence(expected), strict=True):
        assert one.dtype == np.int64
        assert np.array_equal(target.to_host(one), wanted)


@given(case=pool_cases(), special=st.sampled_from((0, 0, 0.1, 0.6)))
def test_the_gradient_goes_to_the_first_of_the_largest(target, case, special):
    """The gradient goes to the first of equal maxima.  Inputs are small integers, so almost every window has a tie."""
    xs = sprinkled(case, reference.sequence(case.arrays()["x"]), special)
    arrays, grad = {"x": xs[0] if case.bare_x else xs}, case.gradient()
    y, pullback = cupyconv.vjp(cupyconv.max_pool, **case.views(arrays, target.to_device, target.xp), **case.parameters)
    grads = [target.to_device(one) for one in reference.sequence(grad)]
    gradients = pullback(grads[0] if case.bare_x else grads)
    assert gradients._fields == FIELDS
    assert all(value is None for value in gradients[1:])
    assert isinstance(gradients.x, list) == isinstance(y, list) == (not case.bare_x)
    expected = reference_gradients.max_pool_gradients(grad, arrays["x"], **case.parameters).x
    for one, wanted in zip(reference.sequence(gradients.x), reference.sequence(expected), strict=True):
        assert_rounded(target.to_host(one), wanted, case.dtype)


@pytest.mark.parametrize(
    "x, settings, expected",
    [
        ((1, 3, 2, 5, 4), dict(kernel_shape=(2,)), [3, 5]),
        ((1, 3, 2, 5, 4), dict(kernel_shape=2, stride=1), [3, 3, 5, 5]),
        ((1, 3, 2, 5, 4), dict(kernel_shape=(2,), stride=None, dilation=3), [5]),
        ((-1, -3), dict(kernel_shape=(2,), stride=1, padding=1), [-1, -1, -3]),
        ((-1, -3), dict(kernel_shape=(1,), stride=1, padding=((0, 2),)), [-1, -3, -np.inf, -np.inf]),
        ((-1, -3, -2), dict(kernel_shape=(2,), padding="same"), [-1, -2]),
        ((-4, -3, -2), dict(kernel_shape=(2,), padding="same_lower"), [-4, -2]),
        ((-4, -3, -2), dict(kernel_shape=(2,), stride=1, padding="causal"), [-4, -3, -2]),
        ((-4, -3), dict(kernel_shape=(2,), stride=1, padding="full"), [-4, -3, -3]),
        ((1, np.nan, 2, np.inf), dict(kernel_shape=(2,), stride=1), [np.nan, np.nan, np.inf]),
        ((np.inf, np.nan), dict(kernel_shape=(2,)), [np.nan]),
        ((-np.inf, -np.inf), dict(kernel_shape=(2,)), [-np.inf]),
        ((1, 3, 2, 5, 4), dict(kernel_shape=2, ceil_mode=True), [3, 5, 4]),
        ((1, 3, 2, 5), dict(kernel_shape=1, stride=4, ceil_mode=True), [1]),
        ((1, 3), dict(kernel_shape=3, stride=2, ceil_mode=True), [3]),
        ((1, 3, 2, 5), dict(kernel_shape=2, stride=4, padding=1, ceil_mode=True), [1, 5]),
        ((1, 3, 2), dict(kernel_shape=2, stride=3, padding=((0, 2),), ceil_mode=True), [3]),
    ],
    ids=str,
)
def test_by_hand(target, x, settings, expected):
    y = target.to_host(cupyconv.max_pool(target.to_device(row(*x)), **settings))
    assert np.array_equal(y, row(*expected), equal_nan=True)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the host device cannot flush subnormals here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_subnormals_are_told_apart_where_arithmetic_flushes_them(target, monkeypatch, dtype):
    """Maxima of subnormals are right even if arithmetic flushes them to zero, as in the GPU code that CuPy compiles."""
    if target.name == "host_device":
        monkeypatch.setattr(target.device, "flushes_subnormals", True)
    kind = as_dtype(dtype)
    least = float(ml_dtypes.finfo(kind).smallest_subnormal)
    values = np.array([0.0, -0.0, 1, -1, 2, -2, 5, np.inf, -np.inf, np.nan, 2e9 if kind.itemsize > 2 else 300]) * least
    x = np.random.default_rng(0).choice(values, (2, 3, 40)).astype(kind)
    assert np.isin(x.astype(np.float64) / least, [1, 2, 5]).any(), "the factor is exact"
    grad = np.ones((2, 3, 20), kind)
    y, pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(x), (4,), stride=2, padding=1)
    received = pullback(target.to_device(grad)).x
    assert_exact(target.to_host(y), reference_gradients.max_pool(x, (4,), stride=2, padding=1), dtype)
    expected = reference_gradients.max_pool_gradients(grad, x, (4,), stride=2, padding=1).x
    assert_exact(target.to_host(received), expected, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_lowest_number_still_beats_the_padding(target, dtype):
    kind = as_dtype(dtype)
    lowest = np.full((1, 1, 1), float(ml_dtypes.finfo(kind).min)).astype(kind)
    x = target.to_device(lowest)
    y, pullback = cupyconv.vjp(cupyconv.max_pool, x, (3,), padding=1)
    assert target.to_host(y).item() == lowest.item()
    assert target.to_host(pullback(target.to_device(np.ones((1, 1, 1), kind))).x).item() == 1


@pytest.mark.parametrize(
    "x, grad, settings, expected",
    [
        ((7, 7, 1, 5), (1, 2), dict(kernel_shape=(2,)), [1, 0, 0, 2]),
        ((3, 7, 7, 1), (1, 2, 4), dict(kernel_shape=(2,), stride=1), [0, 3, 4, 0]),
        ((5, np.nan, np.nan), (1,), dict(kernel_shape=(3,)), [0, 1, 0]),
        ((-np.inf, -np.inf), (1, 2), dict(kernel_shape=(2,), stride=1, padding=((1, 0),)), [3, 0]),
        ((5,), (1, 2, 4), dict(kernel_shape=(1,), stride=1, padding=1), [2]),
        ((1, 9, 2, 3), (1, 2), dict(kernel_shape=(3,), stride=1), [0, 3, 0, 0]),
    ],
    ids=str,
)
def test_gradient_by_hand(target, x, grad, settings, expected):
    _, pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(row(*x)), **settings)
    assert target.to_host(pullback(target.to_device(row(*grad))).x).tolist() == [[expected]]


def test_indices_by_hand(target):
    x = np.array([[1.0, 2, 0, -np.inf], [2, 2, 2, np.nan]])[None, None]
    y, indices = cupyconv.max_pool(
        target.to_device(x), (2, 2), stride=(1, 2), padding=((1, 1), (0, 2)), return_indices=True
    )
    assert target.to_host(indices).tolist() == [[[[1, 2, -1], [1, 7, -1], [4, 7, -1]]]]
    assert target.to_host(y)[0, 0, :, 0].tolist() == [2, 2, 2]


def test_rows_before_columns(target):
    """Among equal maxima of a 2-D window, the first tap in C order (last axis fastest) receives the gradient."""
    x = np.array([[1.0, 2, 0], [2, 2, 2]])[None, None]
    _, pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(x), (2, 3))
    assert target.to_host(pullback(target.to_device(np.ones((1, 1, 1, 1)))).x).tolist() == [[[[0, 1, 0], [0, 0, 0]]]]


# --- promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_same_bits_every_time(target, dtype):
    """Every call gives the same bits, also if windows overlap, so that one element is the sum of many gradients."""
    generator = np.random.default_rng(0)
    xs = [target.to_device(drawn(generator, (2, c, 7, 6), np.dtype(dtype))) for c in (3, 1)]
    settings = dict(kernel_shape=(4, 3), stride=1, padding=1)
    y, pullback = cupyconv.vjp(cupyconv.max_pool, xs, **settings)
    first = pullback(y)
    assert bytes_of(target, cupyconv.max_pool(xs, **settings)) == bytes_of(target, y)
    assert bytes_of(target, pullback(y)) == bytes_of(target, first), "callable again"
    assert bytes_of(target, cupyconv.vjp(cupyconv.max_pool, xs, **settings)[1](y)) == bytes_of(target, first)
    assert pullback(y, needs=()).x is None


def test_sums_of_sixteen_bit_gradients_are_kept_in_float32(target):
    """Gradients are accumulated in float32: in float16, 2048 + 1 + 1 + ... stays 2048."""
    x = np.zeros((1, 1, 9), np.float16)
    x[..., 4] = 1
    grad = np.ones((1, 1, 5), np.float16)
    grad[..., 0] = 2048
    _, pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(x), (5,), stride=1)
    assert target.to_host(pullback(target.to_device(grad)).x)[0, 0].tolist() == [0, 0, 0, 0, 2052, 0, 0, 0, 0]


def test_a_pullback_beside_indices_is_that_of_the_maxima(target):
    x, grad = row(1, 3, 2, 5, 4), row(1, 2, 3)
    settings = dict(kernel_shape=2, ceil_mode=True)
    (_, indices), pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(x), **settings, return_indices=True)
    assert target.to_host(indices).tolist() == [[[1, 3, 4]]]
    assert target.to_host(pullback(target.to_device(grad)).x).tolist() == [[[0, 1, 0, 2, 3]]]


def test_a_list_of_one_stays_a_list(target):
    x = target.to_device(np.ones((1, 2, 6), np.float32))
    for given_x, is_list in ((x, False), ([x], True), ((x,), True)):
        y, pullback = cupyconv.vjp(cupyconv.max_pool, given_x, (2,))
        assert isinstance(y, list) == isinstance(pullback(y).x, list) == is_list
        assert isinstance(cupyconv.max_pool(given_x, (2,)), list) == is_list


@pytest.mark.parametrize("shape", [(0, 2, 6), (2, 0, 6), (0, 6)], ids=str)
def test_empty_axes(target, shape):
    y, pullback = cupyconv.vjp(cupyconv.max_pool, target.to_device(np.ones(shape, np.float32)), (2,))
    assert y.shape == (*shape[:-1], 3)
    assert pullback(y).x.shape == shape


def test_launches_do_not_grow_with_the_batch(cuda_target):
    log = cuda_target.device.log

    def launches(batch):
        x = cuda_target.to_device(np.ones((batch, 3, 6, 8), np.float32))
        log.clear()
        y, pullback = cupyconv.vjp(cupyconv.max_pool, x, (2, 2))
        pullback(y)
        return len(log)

    assert launches(16) == launches(2) > 0


# --- bad input and out ----------------------------------------------------------------------------------------------

REFUSALS = [
    pytest.param(error, words, changes, id=name)
    for name, error, words, changes in (
        ("complex", TypeError, [r"\bx\b", "complex64"], dict(x=Ones((2, 3, 8, 9), "complex64"))),
        ("integers", TypeError, [r"\bx\b", "int32", "astype"], dict(x=Ones((2, 3, 8, 9), "int32"))),
        ("foreign", TypeError, [r"\bx\b", r"torch\.Tensor", "from_dlpack"], dict(x=foreign("torch", "Tensor"))),
        ("axes", ValueError, ["kernel_shape|x", r"\(2, 3, 8, 9\)"], dict(kernel_shape=(2,))),
        ("no taps", ValueError, ["kernel", "at least"], dict(kernel_shape=(2, 0))),
        ("too large", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=(9, 1))),
        ("too large with dilation", ValueError, ["kernel", "spans 9", "has 8"], dict(dilation=(8, 1))),
        ("ceil_mode is a number", TypeError, ["ceil_mode", "True or False", "1"], dict(ceil_mode=1)),
        ("return_indices is a number", TypeError, ["return_indices", "True or False", "1"], dict(return_indices=1)),
        ("too large for ceil_mode", ValueError, ["kernel", "spans 9", "has 8"], dict(kernel_shape=(9, 1), stride=1, ceil_mode=True)),
        ("no stride", ValueError, ["stride", "at least 1", "0"], dict(stride=0)),
        ("short out", ValueError, [r"\bout\b", r"\(2, 3, 4, 3\)", r"\(2, 3, 4, 4\)"], dict(out=Ones((2, 3, 4, 3)))),
        ("out of another precision", TypeError, [r"\bout\b", "float64", "float32"], dict(out=Ones((2, 3, 4, 4), "float64"))),
        ("one out for two", ValueError, [r"\bout\b", "2", "1"], dict(x=[Ones((2, 3, 8, 9))] * 2, out=[Ones((2, 3, 4, 4))])),
    )
]  # fmt: skip


@pytest.mark.parametrize("error, words, changes", REFUSALS)
def test_refused(target, error, words, changes):
    call = dict(x=Ones((2, 3, 8, 9)), kernel_shape=(2, 2)) | changes
    arguments = {name: placed(value, target) for name, value in call.items()}
    assert_refused(target, error, words, cupyconv.max_pool, **arguments)


def test_a_pullback_names_both_shapes(target):
    def ones(*shape):
        return target.to_device(np.ones(shape, np.float32))

    _, pullback = cupyconv.vjp(cupyconv.max_pool, ones(2, 3, 8, 9), (2, 2))
    assert_refused(target, ValueError, [r"\bgrad\b", r"\(2, 3, 4, 5\)", r"\(2, 3, 4, 4\)"], pullback, ones(2, 3, 4, 5))
    _, pullback = cupyconv.vjp(cupyconv.max_pool, [ones(2, 3, 8), ones(2, 1, 8)], (2,))
    wrong_second = [ones(2, 3, 4), ones(2, 3, 4)]
    assert_refused(target, ValueError, [r"\bgrad\b", r"\(2, 3, 4\)", r"\(2, 1, 4\)"], pullback, wrong_second)
    assert_refused(target, ValueError, [r"\bgrad\b", "1", "2"], pullback, [ones(2, 3, 4)])


def test_libraries_are_not_mixed(cuda_target):
    x = cuda_target.to_device(np.ones((1, 1, 4), np.float32))
    words = [r"x\[1\] is numpy.ndarray"]
    assert_refused(cuda_target, TypeError, words, cupyconv.max_pool, [x, np.ones((1, 1, 4), np.float32)], (2,))
    _, pullback = cupyconv.vjp(cupyconv.max_pool, x, (2,))
    assert_refused(cuda_target, TypeError, ["grad is numpy.ndarray"], pullback, np.ones((1, 1, 2), np.float32))


def test_out_may_not_overlap_x(target):
    x = target.to_device(np.ones((1, 1, 4), np.float32))
    assert_refused(target, ValueError, [r"\bout\b", r"\bx\b"], cupyconv.max_pool, x, (1,), out=x)


def test_out_is_for_the_maxima(target):
    x, out = target.to_device(row(1, 3, 2, 5)), target.to_device(row(7, 7))
    y, indices = cupyconv.max_pool(x, 2, return_indices=True, out=out)
    assert y is out
    assert (target.to_host(y).tolist(), target.to_host(indices).tolist()) == ([[[3, 5]]], [[[1, 3]]])


def test_out_is_written_completely_and_nothing_beside_it(target):
    base = target.to_device(nan_filled((4, 5, 6), np.dtype("f4")))
    x = drawn(np.random.default_rng(0), (2, 3, 8), np.dtype("f4"))
    cupyconv.max_pool(target.to_device(x), (2,), out=base[1:-1, 1:-1, 1:-1])
    expected = reference_gradients.max_pool(x, (2,))
    assert np.array_equal(target.to_host(base), np.pad(expected, 1, constant_values=np.nan), equal_nan=True)


# --- PyTorch --------------------------------------------------------------------------------------------------------


@needs_torch
@given(case=pool_cases(dtypes=("float64",), ceil_modes=(False,)))
def test_against_torch(target, case):
    import torch_peer

    parameters = {name: value for name, value in case.parameters.items() if name != "ceil_mode"}
    arrays, grad = case.arrays(), case.gradient()
    y, pullback = cupyconv.vjp(cupyconv.max_pool, **case.views(arrays, target.to_device, target.xp), **case.parameters)
    grads = [on_device(target, one) for one in reference.sequence(grad)]
    back = pullback(grads[0] if case.bare_x else grads).x
    wanted = torch_peer.max_pool(grad, arrays["x"], **parameters)
    for got, expected in zip((y, back), wanted):
        for one, other in zip(reference.sequence(got), reference.sequence(expected), strict=True):
            assert np.array_equal(target.to_host(one), other)


@needs_torch
@pytest.mark.parametrize("settings", [
    dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=2, stride=3), dict(kernel_size=(3, 2), stride=(2, 1), dilation=2),
    dict(kernel_size=5, stride=4, padding=2), dict(kernel_size=2, stride=5, padding=1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_indices_and_ceil_mode_are_torchs(target, settings, ceil_mode):
    import torch

    x = np.random.default_rng(0).integers(-3, 4, (2, 3, 11, 10)).astype(np.float32)
    ours = {"kernel_shape" if name == "kernel_size" else name: value for name, value in settings.items()}
    ours |= {
        "kernel_shape": (ours["kernel_shape"],) * 2 if isinstance(ours["kernel_shape"], int) else ours["kernel_shape"]
    }
    y, indices = cupyconv.max_pool(target.to_device(x), **ours, ceil_mode=ceil_mode, return_indices=True)
    wanted = torch.nn.functional.max_pool2d(torch.from_numpy(x), **settings, ceil_mode=ceil_mode, return_indices=True)
    assert np.array_equal(target.to_host(y), wanted[0])
    assert np.array_equal(target.to_host(indices), wanted[1])
