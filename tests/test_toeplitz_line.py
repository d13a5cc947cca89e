"""A signal and one filter, with windows read in place: the reference's exact results, edges and infinities included."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
from peak_memory import peak_bytes
from runs_seen import runs_seen

import cupyconv
from cupyconv.numpy import gemm
from cupyconv.numpy.toeplitz_line import LineRun
from cupyconv.problem.plan import counted


@pytest.fixture
def lines(monkeypatch):
    """Yield the number of products of sets of windows, for each line that ran, also where one product would be faster."""
    monkeypatch.setattr(gemm, "SMALL", 0)

    def products(line: LineRun) -> int:
        return sum(len(part.products) for part in map(line._loop.part_of_line, line._numbers))

    yield from runs_seen(monkeypatch, LineRun, products)


def integers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(dtype)


def exactly(x: np.ndarray, weight: np.ndarray, **how: Any) -> np.ndarray:
    """Return the result of NumPy's float64 loop: exact for small integers, non-finite values where they belong."""
    ((before, after),) = how.get("padding", ((0, 0),))
    line = np.pad(x[0, 0].astype(np.float64), (before, after))
    return np.correlate(line, weight[0, 0].astype(np.float64))[None, None].astype(x.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("taps", [2, 5, 11, 12, 31, 70])
def test_lines_of_all_lengths_and_paddings(taps, dtype, lines):
    """Lines have all epilogues, in calls that are repeated with other arrays."""
    rng = np.random.default_rng(taps)
    for size in (1, 40, 333, 1000, 20_003):
        for padding in ((0, 0), (taps - 1, 0), (3, 1), (taps + 5, taps + 2)):
            outputs = size + sum(padding) - taps + 1
            if outputs < 1:
                continue
            for _ in range(2):
                x, weight = integers(rng, 1, 1, size, dtype=dtype), integers(rng, 1, 1, taps, dtype=dtype)
                bias, residual = integers(rng, 1, dtype=dtype), integers(rng, 1, 1, outputs, dtype=dtype)
                plain = exactly(x, weight, padding=(padding,))
                np.testing.assert_array_equal(cupyconv.conv(x, weight, padding=(padding,)), plain)
                how = dict(padding=(padding,), activation="relu", residual=residual)
                expected = np.maximum(plain + bias + residual, 0)
                np.testing.assert_array_equal(cupyconv.conv(x, weight, bias, **how), expected)
                cupyconv.conv(x, weight, bias, out=residual, **how)
                np.testing.assert_array_equal(residual, expected)
    assert max(lines) >= 2 and min(lines) == 0


def test_the_oracle_agrees(lines):
    rng = np.random.default_rng(3)
    x, weight = integers(rng, 1, 1, 900), integers(rng, 1, 1, 31)
    expected = reference.conv(x, weight, padding=((4, 9),))
    np.testing.assert_array_equal(exactly(x, weight, padding=((4, 9),)), expected)
    np.testing.assert_array_equal(cupyconv.conv(x, weight, padding=((4, 9),)), expected)
    assert lines and lines[0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 17, 1500, 2990, 2999])
def test_what_is_not_finite_is_where_the_definition_has_it(value, place, lines):
    """Only results that read a non-finite value are affected, although zeros of the matrix multiply it too."""
    rng = np.random.default_rng(4)
    x, weight = integers(rng, 1, 1, 3000), integers(rng, 1, 1, 9)
    x[0, 0, place] = value
    for padding in ((0, 0), (4, 4)):
        np.testing.assert_array_equal(
            cupyconv.conv(x, weight, padding=(padding,)), exactly(x, weight, padding=(padding,))
        )
    x[0, 0, place], weight[0, 0, 3] = 1, value
    np.testing.assert_array_equal(cupyconv.conv(x, weight), exactly(x, weight))
    assert len(lines) == 3 and all(lines)


def test_a_line_in_parts_on_several_threads(lines):
    """Results are exact, and have the same bits in each call."""
    rng = np.random.default_rng(5)
    x, weight = integers(rng, 1, 1, 1_000_000), integers(rng, 1, 1, 101)
    x[0, 0, 20_000] = np.inf
    drawn, taps = rng.standard_normal(x.shape, np.float32), rng.standard_normal(weight.shape, np.float32)
    for threads in (1, 2, 3):
        with cupyconv.options(threads=threads, allow_fft=False):
            plan = cupyconv.explain(cupyconv.conv, x, weight, padding=((50, 50),), activation="relu")
            assert f"on {counted(threads, 'thread')}" in str(plan)
            np.testing.assert_array_equal(
                cupyconv.conv(x, weight, padding=((50, 50),), activation="relu"),
                np.maximum(exactly(x, weight, padding=((50, 50),)), 0),
            )
            assert len({cupyconv.conv(drawn, taps).tobytes() for _ in range(5)}) == 1
    assert len(lines) == 18 and all(count >= 8 for count in lines)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lines_that_do_not_lie_as_elements_do(dtype, lines):
    rng = np.random.default_rng(6)
    weight = integers(rng, 1, 1, 7, dtype=dtype)
    x = integers(rng, 1, 1, 3000, dtype=dtype)
    expected = exactly(x, weight)
    swapped = x.astype(x.dtype.newbyteorder())
    unaligned = np.ndarray(x.shape, dtype, bytearray(x.nbytes + 1), 1)
    unaligned[...] = x
    for given in (swapped, unaligned, np.repeat(x, 2, axis=-1)[..., ::2]):
        np.testing.assert_array_equal(cupyconv.conv(given, weight), expected)
    x.flags.writeable = False
    np.testing.assert_array_equal(cupyconv.conv(x, weight.astype(weight.dtype.newbyteorder())), expected)
    for out in (
        np.ndarray(expected.shape, dtype, bytearray(expected.nbytes + 1), 1),
        np.empty((1, 1, 2 * expected.size), dtype)[..., ::2],
    ):
        cupyconv.conv(x, weight, out=out)
        np.testing.assert_array_equal(out, expected)
    assert lines


def test_calls_at_the_same_time(lines):
    """Calls at the same time have separate matrices."""
    rng = np.random.default_rng(0)
    x, weights = integers(rng, 1, 1, 5000), [integers(rng, 1, 1, 9) for _ in range(8)]
    expected = [exactly(x, weight) for weight in weights]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(50):
                for y, right in zip(pool.map(lambda weight: cupyconv.conv(x, weight), weights), expected):
                    np.testing.assert_array_equal(y, right)
    finally:
        sys.setswitchinterval(interval)
    assert len(lines) == 400 and all(lines)


def test_no_more_than_the_limit(lines):
    rng = np.random.default_rng(7)
    x, weight = integers(rng, 1, 1, 20_000), integers(rng, 1, 1, 9)
    for limit in (1 << 20, 100_000, 30_000):
        with cupyconv.options(workspace_limit=limit):
            assert cupyconv.explain(cupyconv.conv, x, weight, padding=((4, 4),)).workspace_bytes <= limit
            np.testing.assert_array_equal(
                cupyconv.conv(x, weight, padding=((4, 4),)), exactly(x, weight, padding=((4, 4),))
            )
    assert lines


@pytest.mark.parametrize("what", ["an infinity", "much padding", "the other byte order", "an odd address"])
def test_unusual_memory_is_within_the_limit(what):
    """A result at an address that is not a multiple of an element is computed elsewhere; such a line is copied."""
    x, weight = np.ones((1, 1, 100_000), np.float32), np.ones((1, 1, 9), np.float32)
    padding, limit = ((4, 4),), 900_000
    if what == "an infinity":
        x[..., 5] = np.inf
    elif what == "much padding":
        padding, limit = ((20_000, 0),), 100_000
    elif what == "the other byte order":
        x, weight = x[..., :4000].astype(">f4"), np.ones((1, 1, 3000), np.float32)
    else:
        x, weight = at_an_odd_address(x[..., :20_000].astype(np.float64)), np.ones((1, 1, 300))
    expected = exactly(x, weight, padding=padding).astype(weight.dtype)
    out = at_an_odd_address(expected)
    with cupyconv.options(threads=1, workspace_limit=limit):
        planned = cupyconv.explain(cupyconv.conv, x, weight, padding=padding, out=out, method="gemm").workspace_bytes
        cupyconv.clear_caches()
        peak = peak_bytes(lambda: cupyconv.conv(x, weight, padding=padding, out=out, method="gemm"))
    np.testing.assert_array_equal(out, expected)
    assert planned <= limit and peak <= planned + 60_000  # and memory of Python objects


def at_an_odd_address(array: np.ndarray) -> np.ndarray:
    copy = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), 1)
    copy[...] = array
    return copy


def test_a_line_of_very_many_parts_is_planned_at_once():
    x, weight = np.ones((1, 1, 100), np.float32), np.ones((1, 1, 9), np.float32)
    with cupyconv.options(workspace_limit=6000):
        seconds, peak = [], []
        for after in (10_000_000, 10_000_001):
            explained = partial(cupyconv.explain, cupyconv.conv, x, weight, padding=((0, after),))
            begin = time.perf_counter()
            peak.append(peak_bytes(explained))
            seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.5 and min(peak) < 1_000_000  # 11 s and 262 MB if all parts were examined


def test_complex_numbers_and_several_channels_go_other_ways(lines):
    rng = np.random.default_rng(0)
    for shape, outputs, dtype, settings in (
        ((1, 1, 300), 1, np.complex64, {}), ((1, 2, 300), 1, np.float64, {}), ((1, 1, 300), 2, np.float64, {}),
        ((2, 1, 300), 1, np.float64, {}), ((1, 1, 300), 1, np.float64, {"stride": 2}), ((1, 1, 300), 1, np.float64, {"dilation": 3}),
        ((1, 1, 3, 100), 1, np.float64, {}), ((1, 1, 300), 1, np.float64, {"padding": 2, "padding_mode": "reflect"}),
    ):  # fmt: skip
        x = integers(rng, *shape, dtype=dtype)
        weight = integers(rng, outputs, shape[1], *[1] * (len(shape) - 3), 5, dtype=dtype)
        assert np.array_equal(
            cupyconv.conv(x, weight, method="gemm", **settings), reference.conv(x, weight, **settings)
        )
    assert not lines
