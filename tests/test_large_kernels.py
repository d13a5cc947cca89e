"""Kernels as large as the image, or larger, need no loop over a million taps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import reference
import reference_gradients
import test_avg_pool
import test_max_pool
from peak_memory import peak_bytes
from targets import numpy_target
from tolerance import assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.numpy import max_pool, pool_blocks, pool_search, pooling
from cupyconv.numpy.pool_search import Search
from cupyconv.problem import caches
from cupyconv.problem.passes import MaxPoolGradientProblem

SIZE = 1500


def planes(*sizes: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(-1, 2, (1, 1, n, n)).astype(np.float32) for n in sizes]


def convolution() -> tuple[np.ndarray, np.ndarray]:
    x, w = planes(SIZE, SIZE)
    return cupyconv.conv(x, w), (x * w).sum(keepdims=True, dtype=np.float64)


def of_a_line() -> tuple[np.ndarray, np.ndarray]:
    x, w = (plane.reshape(1, 1, -1) for plane in planes(2 * SIZE, 2 * SIZE))
    return cupyconv.conv(x, w), (x * w).sum(keepdims=True, dtype=np.float64)


def dilated() -> tuple[np.ndarray, np.ndarray]:
    x, w = planes(2 * SIZE, SIZE)
    sums = [[(x[..., i::2, j::2] * w).sum(dtype=np.float64) for j in range(2)] for i in range(2)]
    return cupyconv.conv(x, w, dilation=2), np.array(sums)[None, None]


def columns() -> tuple[np.ndarray, np.ndarray]:
    (x,) = planes(SIZE)
    return cupyconv.im2col(x, (SIZE, SIZE)), x.reshape(1, -1, 1)


def sums_of_columns() -> tuple[np.ndarray, np.ndarray]:
    (x,) = planes(SIZE)
    return cupyconv.col2im(x.reshape(1, -1, 1), (SIZE, SIZE), (SIZE, SIZE)), x


def transposed() -> tuple[np.ndarray, np.ndarray]:
    x, w = planes(1, SIZE)
    return cupyconv.conv_transpose(x, w), x * w


def input_gradient() -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient for a weight whose products exceed the workspace limit."""
    grad, w = planes(1, 2 * SIZE)
    return cupyconv.conv_grad_input(grad, w, w.shape), grad * w


def weight_gradient() -> tuple[np.ndarray, np.ndarray]:
    grad, x = planes(1, SIZE)
    return cupyconv.conv_grad_weight(grad, x, (SIZE, SIZE)), grad * x


def large_weight_gradient() -> tuple[np.ndarray, np.ndarray]:
    """Return the gradient of several pixels, for more taps than fit the workspace limit."""
    grad, x = planes(2, 2500 + 1)
    shifted = [[grad[..., i, j].item() * x[..., i : i + 2500, j : j + 2500] for j in range(2)] for i in range(2)]
    return cupyconv.conv_grad_weight(grad, x, (2500, 2500)), np.array(shifted).sum((0, 1))


def pooling_gradient() -> tuple[np.ndarray, np.ndarray]:
    x, grad = planes(SIZE, 1)
    x[0, 0, 700, 800] = 2
    expected = np.zeros(x.shape)
    expected[0, 0, 700, 800] = grad.item()
    return cupyconv.vjp(cupyconv.max_pool, x, SIZE)[1](grad).x, expected


def place_of_the_largest() -> tuple[np.ndarray, np.ndarray]:
    (x,) = planes(2 * SIZE)
    x[0, 0, 700, 800] = 2
    return cupyconv.max_pool(x, 2 * SIZE, return_indices=True)[1].astype(np.float32), np.full((1, 1, 1, 1), 2_100_800)


def mean() -> tuple[np.ndarray, np.ndarray]:
    """Return the mean's gradient, the same share for each element, after checking the mean."""
    (x,) = planes(2 * SIZE)
    x = x.reshape(1, 1, -1).astype(np.float16)
    y, pullback = cupyconv.vjp(cupyconv.avg_pool, x, x.shape[2:])
    assert_exact(y, x.mean(keepdims=True, dtype=np.float64).astype(np.float16), "float16")
    gradient = pullback(np.full((1, 1, 1), 60_000, np.float16)).x
    return gradient.astype(np.float32), np.full(x.shape, np.float16(60_000 / x.size))


@pytest.mark.parametrize(
    "case",
    [
        convolution,
        of_a_line,
        dilated,
        columns,
        sums_of_columns,
        transposed,
        input_gradient,
        weight_gradient,
        large_weight_gradient,
        pooling_gradient,
        place_of_the_largest,
        mean,
    ],
)
def test_a_kernel_as_large_as_the_image(case: Callable[[], tuple[np.ndarray, np.ndarray]]):
    """With one iteration of a loop per tap, they took 15 to 100 s."""
    start = time.process_time()
    actual, expected = case()
    assert time.process_time() - start < 8
    assert_exact(actual, expected, "float32")


@pytest.mark.parametrize("mode", ["wrap", "reflect", "symmetric", "edge"])
def test_a_border_much_longer_than_the_image(mode):
    """With one iteration of a loop per element of the border, its gradient took seconds."""
    x, weight = np.zeros((1, 1, 100), np.float32), np.ones((1, 1, 1), np.float32)
    grad = np.ones((1, 1, 100 + 10**6), np.float32)
    start = time.process_time()
    actual = cupyconv.conv_grad_input(grad, weight, x.shape, padding=((10**6, 0),), padding_mode=mode)
    assert time.process_time() - start < 1.5
    times = np.pad(np.arange(100), (10**6, 0), mode)
    np.testing.assert_array_equal(actual[0, 0], np.bincount(times, minlength=100))


@pytest.mark.parametrize("limit", [None, 40_000, 12_000])
@pytest.mark.parametrize("mode", ["constant", "reflect", "wrap"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize(
    "size, kernel, settings",
    [
        ((17,), (15,), dict(padding=2)),
        ((9, 8), (8, 7), dict(padding=((1, 2), (0, 3)), stride=(2, 1))),
        ((9, 8), (4, 3), dict(padding=2, dilation=(2, 3))),
        ((5, 6, 4), (4, 5, 3), dict(padding=1, stride=(1, 2, 1))),
    ],
    ids=str,
)
def test_more_taps_than_pixels(size, kernel, settings, dtype, mode, limit):
    """Whatever the limit allows is right: some taps at a time, or pixel by pixel."""
    rng = np.random.default_rng(1)

    def integers(*shape):
        values = rng.integers(-3, 4, shape).astype(dtype)
        return values + 1j * rng.integers(-3, 4, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values

    x, w, windows = integers(2, 2, *size), integers(3, 2, *kernel), settings
    settings = settings | {"padding_mode": mode}
    expected = reference.conv(x, w, **settings)
    grad, name = integers(*expected.shape), np.dtype(dtype).name
    gradients = reference_gradients.conv_gradients(grad, x, w, **settings)
    columns = reference.im2col(x, kernel, **windows)
    with cupyconv.options(workspace_limit=limit):
        assert_exact(cupyconv.conv(x, w, **settings, method="direct"), expected, name)
        assert_exact(cupyconv.conv_grad_input(grad, w, x.shape, **settings, method="direct"), gradients.x, name)
        assert_exact(cupyconv.conv_grad_weight(grad, x, kernel, **settings, method="direct"), gradients.weight, name)
        assert_exact(cupyconv.im2col(x, kernel, **windows), columns, name)
        image = cupyconv.col2im(columns.astype(dtype), size, kernel, **windows)
    assert_exact(image, reference.col2im(columns, size, kernel, **windows), name)


@pytest.mark.parametrize("of_any", [
    test_max_pool.test_every_maximum, test_avg_pool.test_every_mean, test_avg_pool.test_means_of_random_numbers,
    test_avg_pool.test_every_share_of_a_gradient,
], ids=lambda test: test.__name__)  # fmt: skip
def test_pooling_window_by_window(of_any, monkeypatch):
    """Pooling is done as for few windows of many taps."""
    monkeypatch.setattr(pool_blocks, "MANY_TAPS", 0)
    forget_calls()
    try:
        of_any(target=numpy_target())
    finally:
        forget_calls()


@pytest.mark.parametrize("of_any", [
    test_max_pool.test_where_the_first_of_the_largest_lies, test_max_pool.test_the_gradient_goes_to_the_first_of_the_largest,
], ids=lambda test: test.__name__)  # fmt: skip
@pytest.mark.parametrize("limit", [None, 8_000, 1_500])
@pytest.mark.parametrize("joins, size", [(False, 1), (False, 5), (True, 1), (True, 40), (True, 1 << 15)])
def test_pooling_by_search(of_any, joins, size, limit, monkeypatch):
    """Windows are searched as if they had many taps, in one box or several, and the pieces of a box in any size."""
    candidates = Search.candidates

    def wanted(*arguments):
        known = [*candidates(*arguments)]
        return [search for search in known if search.joins == joins] or known

    monkeypatch.setattr(Search, "candidates", wanted)
    monkeypatch.setattr(pool_search, "SLAB" if joins else "PIECE", size)
    monkeypatch.setattr(pooling, "PLACES", (max_pool.LargestPlacesBySearch,))
    monkeypatch.setitem(pooling.STEPS, MaxPoolGradientProblem, (max_pool.MaxPoolGradientBySearch,))
    forget_calls()
    try:
        with cupyconv.options(workspace_limit=limit):
            of_any(target=numpy_target())
    finally:
        forget_calls()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [(2100, 2100), (2, 3, 4_000_000), (300, 300, 200)], ids=str)
def test_pooling_of_all_of_an_image_keeps_within_the_limit(size, dtype):
    """Pooling was once refused from 2050 x 2050 on."""
    size, channels = (size[2:], size[1]) if size[0] == 2 else (size, 1)
    x = np.ones((1, channels, *size), dtype)
    for function, settings in (
        (cupyconv.max_pool, {}),
        (cupyconv.max_pool, {"return_indices": True}),
        (cupyconv.avg_pool, {}),
    ):
        assert peak_bytes(partial(function, x, size, **settings)) < 17 << 20
        y, pullback = cupyconv.vjp(function, x, size, **settings)
        grad = y[0] if settings else y
        assert peak_bytes(partial(pullback, grad)) < x.nbytes + (17 << 20)


def largest_places(x: np.ndarray, taps: int, padding: int) -> np.ndarray:
    """Return the index of the first largest element of each window, by one axis after the other, tap by tap."""
    image = np.pad(x, padding, constant_values=-np.inf)
    indices = np.pad(np.arange(x.size).reshape(x.shape), padding, constant_values=-1)
    for axis in (1, 0):
        outputs = image.shape[axis] - taps + 1
        here = [np.take(each, range(outputs), axis) for each in (image, indices)]
        for tap in range(1, taps):
            there = [np.take(each, range(tap, tap + outputs), axis) for each in (image, indices)]
            here = [np.where(there[0] > here[0], new, old) for new, old in zip(there, here)]
        image, indices = here
    return indices


MANY_TAPS = {
    "one window": ((500, 500), (500, 500), {}),
    "a hundred rows": ((101, 2004), (100, 1000), dict(stride=(1, 100), padding=(50, 1))),
    "a window per pixel": ((520, 520), (500, 500), dict(stride=1, padding=250)),
    "larger windows": ((820, 820), (800, 800), dict(stride=1, padding=400)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    "name, threads, limit",
    [
        *((name, threads, None) for name in MANY_TAPS for threads in (1, 32, 64)),
        ("one window", 32, 20_000),
        ("a hundred rows", 2, 10**6),
    ],
)
def test_no_window_is_searched_for_each_element(name, threads, limit, dtype):
    """If a thread's share of the workspace was small, or windows were many, this took 25 s to several hours."""
    size, taps, settings = MANY_TAPS[name]
    x = np.random.default_rng(0).integers(-9, 10, (1, 1, *size)).astype(dtype)
    with cupyconv.options(threads=threads, workspace_limit=limit):
        start = time.process_time()
        y, pullback = cupyconv.vjp(cupyconv.max_pool, x, taps, **settings)
        grad = (np.arange(y.size).reshape(y.shape) % 3 - 1).astype(dtype)
        gradient = pullback(grad).x
        places = cupyconv.max_pool(x, taps, **settings, return_indices=True)[1]
        assert time.process_time() - start < 6
        peak = peak_bytes(lambda: pullback(grad))
    assert np.array_equal(x.ravel()[places], y)
    expected = np.zeros(x.size)
    np.add.at(expected, places.ravel(), grad.ravel())
    assert np.array_equal(gradient, expected.reshape(x.shape).astype(dtype))
    assert peak < x.nbytes + (limit or 16 << 20) + 200_000  # and Python's objects
    if name == "a window per pixel" and threads == 1:
        assert np.array_equal(places[0, 0], largest_places(x[0, 0].astype(np.float32), 500, 250))


@pytest.mark.parametrize("function", [cupyconv.max_pool, cupyconv.avg_pool], ids=lambda function: function.__name__)
def test_blocks_are_not_smaller_than_what_a_window_reads(function):
    """Each block once had one window, because a cache did not hold what it reads; it took 80 s."""
    x = np.ones((1, 1, 820, 820), np.float32)
    start = time.process_time()
    y, pullback = cupyconv.vjp(function, x, 800, stride=1, padding=400)
    pullback(y)
    assert time.process_time() - start < 8


def test_a_long_loop_is_announced():
    x, w = (np.broadcast_to(np.float32(1), shape) for shape in ((1, 64, 2000, 2000), (8, 64, 3, 3)))
    with cupyconv.options(workspace_limit=3000):
        plan = cupyconv.explain(cupyconv.conv, x, w)
    assert any("a Python loop of" in note for note in plan.notes)
    assert not any("a Python loop of" in note for note in cupyconv.explain(cupyconv.conv, x, w).notes)


LONG_CALLS = {
    "conv": (cupyconv.conv, ((8, 16, 20_000), (8, 4, 2)), {"groups": 4, "dilation": 2}, 3000),
    "linmerge": (cupyconv.linmerge, ([(8, 32, 120, 120)] * 3, (16, 96)), {}, 6000),
    "wrapped gradient": (
        cupyconv.conv_grad_input,
        ((4, 8, 150, 150), (8, 8, 3, 3)),
        {"input_shape": (4, 8, 150, 150), "padding": 1, "padding_mode": "wrap"},
        3000,
    ),
    "gathered gradient": (
        cupyconv.conv_grad_input,
        ((1, 1, 1000, 1000), (1, 1, 3, 3)),
        {"input_shape": (1, 1, 1000, 1000), "padding": 1},
        3000,
    ),
    "max_pool": (cupyconv.max_pool, ((4, 8, 150, 150),), {"kernel_shape": 3, "return_indices": True}, 300),
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_loops_of_a_second_are_announced(name):
    """Each took 0.8 to 5.5 s, and no note said so."""
    function, shapes, settings, limit = LONG_CALLS[name]
    arrays = [[np.ones(one) for one in shape] if isinstance(shape, list) else np.ones(shape) for shape in shapes]
    with cupyconv.options(workspace_limit=limit, threads=1):
        plan = cupyconv.explain(function, *arrays, **settings)
    assert any("a Python loop of" in note for note in plan.notes)
    quick = cupyconv.explain(function, *arrays, **settings)
    assert not any("a Python loop of" in note for note in quick.notes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64])
@pytest.mark.parametrize("is_c_order", [True, False], ids=["C order", "reversed"])
def test_sums_of_a_weight_gradient_beyond_the_limit(dtype, is_c_order):
    """It was once refused: products of all taps at once, and sums in addition to the result, had to fit the limit."""
    rng = np.random.default_rng(0)
    grad, x = (rng.integers(-2, 3, (2, c, n, n)).astype(dtype) for c, n in ((2, 2), (3, 61)))
    out = np.empty((2, 3, 60, 60), dtype) if is_c_order else np.empty((2, 3, 60, 60), dtype)[..., ::-1]
    with cupyconv.options(workspace_limit=30_000):
        plan = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (60, 60), out=out)
        cupyconv.conv_grad_weight(grad, x, (60, 60), out=out)
        peak = peak_bytes(lambda: cupyconv.conv_grad_weight(grad, x, (60, 60), out=out))
    assert_exact(out, reference_gradients.conv_grad_weight(grad, x, (60, 60)), np.dtype(dtype).name)
    on_top = 0 if is_c_order and dtype == np.float32 else 3 * 60 * 60 * max(4, np.dtype(dtype).itemsize)
    assert plan.workspace_bytes <= 30_000 + on_top
    assert peak <= plan.workspace_bytes + caches.spent() + 200_000  # and Python's objects
