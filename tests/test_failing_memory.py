"""NumPy's n-th allocation fails, for every n: the result all the same, from a plan with less, or MemoryError and no harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from failing_memory import failing_memory

import cupyconv
from cupyconv import ConvLayer

RNG = np.random.default_rng(0)


def integers(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return RNG.integers(-2, 3, shape).astype(dtype)


X, WEIGHT, BIAS = integers(3, 4, 20, 21), integers(6, 4, 3, 3), integers(6)
LAYERS = [ConvLayer(WEIGHT, BIAS, padding=1, activation="relu"), ConvLayer(integers(2, 6, 3, 3), padding=1)]
SEQUENCE, W_IH, W_HH = integers(7, 3, 5), integers(16, 5), integers(16, 4)

GRAD, POOLED, DEPTHWISE, TURNED = (
    integers(3, 6, 18, 19),
    integers(3, 4, 6, 7),
    integers(4, 1, 3, 3),
    integers(4, 6, 3, 3),
)
ARRAYS = [X, WEIGHT, BIAS, SEQUENCE, W_IH, W_HH, GRAD, POOLED, DEPTHWISE, TURNED]
NARROW = [array.astype(np.float16) for array in (X, WEIGHT)]
SINGLE = [array.astype(np.float32) for array in (X, WEIGHT)]

CALLS: dict[str, Callable[[], Any]] = {
    "conv": lambda: cupyconv.conv(X, WEIGHT, BIAS, padding=1, activation="relu"),
    "reflected": lambda: cupyconv.conv(X, WEIGHT, padding=2, padding_mode="reflect", stride=2),
    "16 bits": lambda: cupyconv.conv(*NARROW),
    "depthwise": lambda: cupyconv.conv(X, DEPTHWISE, groups=4),
    "winograd": lambda: cupyconv.conv(*SINGLE, method="winograd"),
    "transposed": lambda: cupyconv.conv_transpose(X, TURNED, stride=2, activation="relu"),
    "input gradient": lambda: cupyconv.conv_grad_input(GRAD, WEIGHT, X.shape),
    "weight gradient": lambda: cupyconv.conv_grad_weight(GRAD, X, (3, 3)),
    "chain": lambda: cupyconv.conv_chain(X, LAYERS),
    "pool": lambda: cupyconv.max_pool(X, 3, stride=2),
    "pool gradient": lambda: cupyconv.vjp(cupyconv.max_pool, X, 3, stride=3)[1](POOLED[:, :, :6, :7]).x,
    "im2col": lambda: cupyconv.im2col([X, X], (3, 3), padding=1),
    "lstm": lambda: cupyconv.lstm(SEQUENCE, W_IH, W_HH, lengths=[7, 3, 0])[0],
    "gradients": lambda: cupyconv.vjp(cupyconv.conv, X, WEIGHT, activation="relu")[1](GRAD).weight,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_allocation_fails_once(name):
    call = CALLS[name]
    with cupyconv.options(threads=1):
        expected, before = call(), [array.copy() for array in ARRAYS]
        cupyconv.clear_caches()
        with failing_memory(-1) as allocations:
            np.testing.assert_array_equal(call(), expected)
        count = allocations()
        assert count > 0, "nothing was asked for through the handler"
        for number in range(count):
            cupyconv.clear_caches()
            actual = None
            with suppress(MemoryError), failing_memory(number):
                actual = call()
            if actual is not None:  # a plan with less; its blocks are others, and of integers all sums are exact
                np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
            for array, as_it_was in zip(ARRAYS, before):
                np.testing.assert_array_equal(array, as_it_was)
        np.testing.assert_array_equal(call(), expected)
