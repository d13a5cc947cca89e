"""`im2col` and `col2im` against their definitions, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import OUT_LAYOUTS, with_layout
from tolerance import assert_exact

import cupyconv

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


@st.composite
def windows(draw):
    """Draw a spatial size, a kernel size and the keywords of valid windows over up to three axes."""
    rank = draw(st.integers(1, 3))
    entries = st.lists(st.integers(1, 3), min_size=rank, max_size=rank).map(tuple)
    kernel, stride, dilation = draw(entries), draw(entries), draw(entries)
    pairs = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(rank))
    spatial = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    for size, (before, after), taps, gap in zip(spatial, pairs, kernel, dilation):
        assume(size + before + after >= gap * (taps - 1) + 1)
    return spatial, kernel, dict(stride=stride, padding=pairs, dilation=dilation)


def values(rng, shape, dtype):
    return rng.integers(-3, 4, shape).astype(dtype)


@given(
    geometry=windows(),
    batch=st.integers(0, 2),
    channels=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(OUT_LAYOUTS),
    given_out=st.booleans(),
    seed=st.integers(0, 999),
)
def test_im2col(target, geometry, batch, channels, dtype, layout, given_out, seed):
    spatial, kernel, settings = geometry
    rng = np.random.default_rng(seed)
    xs = [values(rng, (batch, c, *spatial), dtype) for c in channels]
    expected = reference.im2col(xs, kernel, **settings)
    moved = [with_layout(x, layout, target.to_device, target.xp) for x in xs]
    out = None
    if given_out:
        empty = np.full(expected.shape, np.nan, dtype)
        out = with_layout(empty, layout, target.to_device, target.xp)
    actual = cupyconv.im2col(moved, kernel, **settings, out=out)
    assert out is None or actual is out
    assert_exact(target.to_host(actual), expected, dtype)


@given(
    geometry=windows(),
    batch=st.integers(0, 2),
    channels=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(OUT_LAYOUTS),
    seed=st.integers(0, 999),
)
def test_col2im(target, geometry, batch, channels, dtype, layout, seed):
    spatial, kernel, settings = geometry
    rng = np.random.default_rng(seed)
    rows = reference.im2col(np.zeros((batch, channels, *spatial)), kernel, **settings).shape
    columns = values(rng, rows, dtype)
    expected = reference.col2im(columns, spatial, kernel, **settings)
    moved = with_layout(columns, layout, target.to_device, target.xp)
    actual = cupyconv.col2im(moved, spatial, kernel, **settings)
    assert_exact(target.to_host(actual), expected, dtype)


@pytest.mark.parametrize("limit", [1, 4000, 5000, 8100, 13_000, 1 << 20])
def test_sums_beside_an_image_keep_within_the_limit(limit):
    """Only the sums of a single channel may exceed the limit; the result is rounded once for any number at a time."""
    columns = np.random.default_rng(1).standard_normal((2, 4 * 9, 30 * 30)).astype(np.float16)
    one = 32 * 32 * 4
    with cupyconv.options(workspace_limit=limit):
        plan = cupyconv.explain(cupyconv.col2im, columns, (32, 32), (3, 3))
        image = cupyconv.col2im(columns, (32, 32), (3, 3))
    assert one <= plan.workspace_bytes <= max(limit, one)
    assert plan.workspace_bytes == 4 * one or limit - plan.workspace_bytes < 1.1 * one, "as many as there is room for"
    assert "float32: 2 blocks of 1 x 1 x 30 x 30 (n, d, h, w) on 1 thread" in str(plan)
    wide = cupyconv.col2im(columns.astype(np.float32), (32, 32), (3, 3))
    np.testing.assert_array_equal(image, wide.astype(np.float16))


def test_a_plan_of_columns_says_one_thread_however_many_there_are():
    x = np.ones((2, 3, 8, 8), np.float32)
    with cupyconv.options(threads=2):
        for plan in (
            cupyconv.explain(cupyconv.im2col, x, 3),
            cupyconv.explain(cupyconv.col2im, cupyconv.im2col(x, 3), (8, 8), 3),
        ):
            assert "on numpy (1 thread)\n" in str(plan) and " on 1 thread\n" in f"{plan}\n"


@given(geometry=windows(), seed=st.integers(0, 999))
def test_adjoint(target, geometry, seed):
    """The two functions are adjoint: <im2col(x), c> == <x, col2im(c)>."""
    spatial, kernel, settings = geometry
    rng = np.random.default_rng(seed)
    x = values(rng, (2, 3, *spatial), "float64")
    columns = cupyconv.im2col(target.to_device(x), kernel, **settings)
    other = values(rng, columns.shape, "float64")
    image = cupyconv.col2im(target.to_device(other), spatial, kernel, **settings)
    assert (target.to_host(columns) * other).sum() == (x * target.to_host(image)).sum()


def test_batch_axis_may_be_missing(target):
    x = np.arange(12.0).reshape(1, 3, 4)
    columns = cupyconv.im2col(target.to_device(x), (2, 2))
    assert columns.shape == (4, 6)
    assert_exact(target.to_host(columns), reference.im2col(x[None], (2, 2))[0], "float64")
    assert cupyconv.col2im(columns, (3, 4), (2, 2)).shape == (1, 3, 4)


@pytest.mark.parametrize("pixels", [64, 65, 1003])
def test_vectors_and_tails(target, pixels):
    """Rows are correct whether or not their length is a multiple of a 16-byte vector."""
    x = np.arange(2 * 3 * (pixels + 2), dtype=np.float16).reshape(2, 3, -1) % 97
    actual = cupyconv.im2col(target.to_device(x), 3)  # one int for all axes
    assert_exact(target.to_host(actual), reference.im2col(x, (3,)), "float16")


def test_a_plan_says_in_which_dtype_col2im_accumulates():
    """A plan of im2col, which only copies, once said so too."""
    copies = str(cupyconv.explain(cupyconv.im2col, np.ones((1, 2, 9), np.float16), 3))
    sums = str(cupyconv.explain(cupyconv.col2im, np.ones((1, 6, 7), np.float16), (9,), (3,)))
    assert "accumulates" not in copies and "col2im, accumulates in float32" in sums
