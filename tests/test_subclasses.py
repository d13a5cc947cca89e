"""Arrays of NumPy subclasses: their elements count, not their own indexing and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from integer_arrays import integers

import cupyconv


class NoArithmetic(np.ndarray):
    """Sparse or lazy arrays are like this if they inherit from NumPy's array only for its attributes."""

    __array_ufunc__ = None


class OwnIndexing(np.ndarray):
    def __getitem__(self, key):
        raise AssertionError("indexed")

    def __setitem__(self, key, value):
        raise AssertionError("written by index")


class OwnArithmetic(np.ndarray):
    """Everything that is computed with it is one too large."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **settings):
        plain = [x.view(np.ndarray) if isinstance(x, OwnArithmetic) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **settings) + 1


class AtMostFourAxes(np.ndarray):
    def __array_finalize__(self, other):
        assert self.ndim < 5, "more axes than a map has"


SUBCLASSES = [NoArithmetic, OwnIndexing, OwnArithmetic, AtMostFourAxes]


def plain(array: np.ndarray) -> np.ndarray:
    return np.ndarray.view(array, np.ndarray)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual", "out", "all"])
@pytest.mark.parametrize("subclass", SUBCLASSES)
def test_a_convolution(subclass, name):
    """An argument that refused arithmetic once raised TypeError after `out` was half written."""
    arrays = {"x": integers(2, 3, 7, 6), "weight": integers(4, 3, 3, 3), "bias": integers(4)}
    arrays |= {"residual": integers(2, 4, 7, 6), "out": np.empty((2, 4, 7, 6), np.float32)}
    given = {key: array.view(subclass) if name in (key, "all") else array for key, array in arrays.items()}
    oracle = {key: array for key, array in arrays.items() if key != "out"}
    for settings in ({"method": "direct"}, {"method": "gemm"}, {"padding_mode": "edge"}):
        y = cupyconv.conv(**given, padding=1, activation="relu", **settings)
        settings.pop("method", None)
        expected = reference.conv(**oracle, padding=1, activation="relu", **settings)
        assert y is given["out"] and np.array_equal(plain(y), expected)


@pytest.mark.parametrize("subclass", SUBCLASSES)
def test_other_functions_and_gradients(subclass):
    """Results are plain arrays, with the bits that plain arguments give."""

    def gradients_of(a, function, *arguments, **settings):
        y, pullback = cupyconv.vjp(function, *arguments, **settings)
        y = y if isinstance(y, np.ndarray) else y[0]
        yield y
        grad = a(integers(*y.shape))
        for gradient in pullback(grad):
            each = gradient if isinstance(gradient, list) else [gradient] if gradient is not None else []
            assert not any(np.shares_memory(plain(grad), one) for one in each)
            yield from each

    def results(a):
        x, weight, merging = a(integers(2, 3, 7, 6)), a(integers(4, 3, 3, 3)), a(integers(4, 6))
        scaled = {"prologue": (a(integers(6)), None, "relu")}
        yield from gradients_of(
            a, cupyconv.conv, [x, x], a(integers(4, 6, 3, 3)), a(integers(4)), activation="gelu", **scaled
        )
        yield from gradients_of(a, cupyconv.linmerge, [x, x], merging, residual=a(integers(2, 4, 7, 6)), **scaled)
        yield from gradients_of(a, cupyconv.conv_transpose, x, a(integers(3, 2, 3, 3)), stride=2, activation="relu")
        yield from gradients_of(a, cupyconv.max_pool, x, 3)
        yield from gradients_of(a, cupyconv.avg_pool, x, 3)
        states = {"h0": a(integers(1, 2, 2)), "c0": a(integers(1, 2, 2)), "peephole": a(integers(6))}
        yield from gradients_of(a, cupyconv.lstm, a(integers(5, 2, 3)), a(integers(8, 3)), a(integers(8, 2)), **states)
        yield cupyconv.conv_transpose(x, a(integers(3, 2, 3, 3)), stride=2)
        yield cupyconv.max_pool(x, 3)
        yield cupyconv.avg_pool(x, 3, padding=1)
        yield cupyconv.col2im(cupyconv.im2col(x, 2), (7, 6), 2)
        yield cupyconv.linmerge([x, x], a(integers(4, 6)))
        yield cupyconv.conv_chain(x, [cupyconv.ConvLayer(weight, activation="relu")])
        yield cupyconv.conv_grad_weight(a(integers(2, 4, 5, 4)), x, (3, 3))
        yield from cupyconv.fold_batchnorm(weight, None, mean=a(integers(4)), var=a(integers(4) + 3))

    for y, expected in zip(results(lambda array: array.view(subclass)), results(np.asarray), strict=True):
        assert type(y) is np.ndarray and np.array_equal(y, expected)
