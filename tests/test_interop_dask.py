"""`cupyconv.interop.dask`: whole results, in any chunks, against the oracle; what a graph is made of; its errors."""

from __future__ import annotations

import doctest
import threading
from itertools import accumulate

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import conv_cases, pool_cases, transposed_cases
from tolerance import assert_exact

da = pytest.importorskip("dask.array", reason="Dask is not installed")

import dask  # noqa: E402

import cupyconv  # noqa: E402
from cupyconv.interop import dask as interop  # noqa: E402
from cupyconv.numpy.threads import BLAS  # noqa: E402

DTYPES = ("float32", "float64", "complex128")


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@st.composite
def chunks_of(draw, shape):
    """Any chunks of an array of this shape."""
    sizes = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3))) if size > 1 else []
        sizes.append(tuple(b - a for a, b in zip((0, *cuts), (*cuts, size))))
    return tuple(sizes)


def chunked(data, array):
    return da.from_array(array, chunks=data.draw(chunks_of(array.shape)))


def all_chunked(data, x):
    return [chunked(data, each) for each in x] if isinstance(x, list) else chunked(data, x)


# --- values ---------------------------------------------------------------------------------------------------


@given(case=conv_cases(dtypes=DTYPES), data=st.data())
def test_convolutions_in_any_chunks(case, data):
    """Strides, dilation, padding of every mode, groups and merges, over chunks that are smaller than a kernel too."""
    arrays = case.arrays()
    expected = reference.conv(**arrays, **case.parameters)
    lazy = {**arrays, "x": all_chunked(data, arrays["x"])}
    if case.residual:
        lazy["residual"] = chunked(data, arrays["residual"])
    y = interop.conv(**lazy, **case.parameters)
    assert y.shape == expected.shape
    assert y.dtype == case.result_dtype
    assert_exact(y.compute(), expected, case.result_dtype)


@given(case=transposed_cases(dtypes=DTYPES), data=st.data())
def test_transposed_convolutions_in_any_chunks(case, data):
    arrays = case.arrays()
    expected = reference_gradients.conv_transpose(**arrays, **case.parameters)
    y = interop.conv_transpose(**{**arrays, "x": all_chunked(data, arrays["x"])}, **case.parameters)
    assert y.shape == expected.shape
    assert_exact(y.compute(), expected, case.result_dtype)


@given(case=pool_cases(dtypes=("float32", "float64")), data=st.data())
def test_pooling_in_any_chunks(case, data):
    """A list gives a list, each image in chunks of its own."""
    x = case.arrays()["x"]
    y = interop.max_pool(all_chunked(data, x), **case.parameters)
    assert isinstance(y, list) == isinstance(x, list)
    expected = reference_gradients.max_pool(x, **case.parameters)
    for one, wanted in zip(reference.sequence(y), reference.sequence(expected), strict=True):
        assert_exact(one.compute(), wanted, case.dtype)
