"""Infinities and NaN: in arguments, where results must have them too, and in memory, where no result may have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference

import cupyconv
from cupyconv.numpy import backend


def assert_they_land_where_defined(
    x: np.ndarray, weight: np.ndarray, settings: dict[str, Any], where: str, value: float
) -> None:
    """Check a convolution with one such value, at the begin, in the middle and at the end of `x` or `weight`."""
    spoilt = {"x": x, "weight": weight}[where]
    for place in (0, spoilt.size // 2, spoilt.size - 1):
        before, spoilt.flat[place] = spoilt.flat[place], value
        with np.errstate(invalid="ignore"):
            expected = reference.conv([x], weight, **{k: v for k, v in settings.items() if k != "method"})
        np.testing.assert_array_equal(cupyconv.conv(x, weight, **settings), expected)
        spoilt.flat[place] = before


def assert_memory_does_not_matter(
    x: np.ndarray, weight: np.ndarray, settings: dict[str, Any], expected: np.ndarray
) -> None:
    """Check calls between which all scratch memory, which other loops use too, is filled with NaN."""
    cupyconv.clear_caches()
    for _ in range(3):
        np.testing.assert_array_equal(cupyconv.conv(x, weight, **settings), expected)
        for buffers in list(backend.cached_scratch(x.dtype)._all.values()):
            for key, memory in list(buffers.items()):
                if type(key) is str:
                    memory.fill(255)  # not a number
    cupyconv.clear_caches()
