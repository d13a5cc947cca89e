"""How far a result may be from the reference: not at all on integers, by its dtype's rounding on random data.

**Integer-valued data** (`assert_exact`).  Every product and partial sum is an integer that the accumulator holds
exactly, in any order of summation, so only equality is right.

**Random data** (`assert_close`).  A result is a sum of `terms` products, accumulated in the accumulator's precision
and rounded once to its dtype.  With u the unit roundoff (half of eps), the error of the sum is bounded by

    u_acc * terms * M            always,
    u_acc * lambda * sqrt(terms) * M       with a probability that lambda brings near 1,

where M = sum |x| |w| (+ |bias| + |residual|), because roundings are as often up as down (Higham and Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019).  The tolerance is the second bound
with lambda = 4, and with terms + 4 instead of terms, because the bias, the residual and an activation are roundings
too.

The result itself is allowed 1 ulp, which is at most eps_out * |y|: half of it for the rounding, half for a tie that the
accumulated error decides the other way.  Below the normal numbers an ulp is the smallest subnormal.

float16 and bfloat16 have a float32 accumulator.  Their eps_out, 2**-10 and 2**-7, is then nearly all of their
tolerance.  But if terms cancel and |y| is small, only the float32 part is left, which detects a 16-bit accumulator.

Activations are Lipschitz with a constant near 1, and lose at most a few ulp of their argument or of 1 (softplus(0), or
exp(v) - 1 near 0).  So M counts 1 for an activation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LAMBDA = 4.0
EXTRA_ROUNDINGS = 4
LARGEST_NORMAL_PRODUCT = 20.0  # |x w| of two standard normals stays below it over millions of draws


def assert_exact(actual: Any, expected: np.ndarray, dtype: Any) -> None:
    """Assert equality in shape, dtype and every value.  `expected` must be representable in `dtype`."""
    dtype = np.dtype(dtype)
    actual = checked(actual, expected, dtype)
    wanted = rounded(expected, dtype)
    finite = np.isfinite(expected)
    assert np.array_equal(widened(wanted)[finite], expected[finite]), f"the expected values are not exact in {dtype}"
    compare(actual, wanted, np.zeros(expected.shape))


def assert_close(
    actual: Any, expected: np.ndarray, dtype: Any, terms: int, *, magnitude: Any = None, factor: float = 1.0
) -> None:
    """Assert equal shape and dtype, non-finite values in the same places, and other errors within the tolerance above.

    `terms` is the number of products in one result.  `magnitude` is M, an array or a bound; the default is that of
    standard normal data (complex: of unit variance in both parts together).  `factor` widens the accumulator's part,
    for methods that transform their data first.
    """
    dtype = np.dtype(dtype)
    actual = checked(actual, expected, dtype)
    compare(actual, rounded(expected, dtype), tolerance(expected, dtype, terms, magnitude, factor))


def tolerance(expected: np.ndarray, dtype: Any, terms: int, magnitude: Any = None, factor: float = 1.0) -> np.ndarray:
    """Return the largest error allowed in each value."""
    dtype = np.dtype(dtype)
    if magnitude is None:
        magnitude = terms + LARGEST_NORMAL_PRODUCT  # the mean of |x w| is 2/pi, below 1
    result, unit_roundoff = finfo(dtype), float(finfo(accumulator(dtype)).eps) / 2
    ulp = np.maximum(float(result.eps) * np.abs(expected), float(result.smallest_subnormal))
    relative = factor * LAMBDA * unit_roundoff * math.sqrt(terms + EXTRA_ROUNDINGS)
    return ulp + relative * np.asarray(magnitude, np.float64)


def accumulator(dtype: Any) -> np.dtype:
    """Return the dtype of sums: float32 for 16-bit types, the dtype itself for others."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def finfo(dtype: Any) -> Any:
    if np.dtype(dtype).name != "bfloat16":
        return np.finfo(dtype)
    import ml_dtypes  # installed if an array has its dtype

    return ml_dtypes.finfo(dtype)


def checked(actual: Any, expected: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `actual` as a plain NumPy array, after checking its shape and dtype."""
    assert actual.dtype == dtype, f"dtype is {actual.dtype}, expected {dtype}"
    assert actual.shape == expected.shape, f"shape is {actual.shape}, expected {expected.shape}"
    return np.asarray(actual.get() if hasattr(actual, "get") else actual)


def compare(actual: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> None:
    """Raise AssertionError with the worst element, unless |actual - expected| <= allowed everywhere."""
    actual, expected = widened(actual), widened(expected)
    kind_of_actual, kind_of_expected = non_finite_kind(actual), non_finite_kind(expected)
    both_finite = (kind_of_actual == "") & (kind_of_expected == "")
    with np.errstate(all="ignore"):
        error = np.where(both_finite, np.abs(actual - expected), 0.0)
    allowed = np.where(both_finite, allowed, 0.0)
    excess = np.where(kind_of_actual != kind_of_expected, np.inf, error - allowed)
    wrong = excess > 0
    if wrong.any():
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        raise AssertionError(
            f"{np.count_nonzero(wrong)} of {wrong.size} values are wrong, the worst at {worst}: "
            f"{actual[worst]!r}, expected {expected[worst]!r}, "
            f"error {error[worst]:.3g}, allowed {allowed[worst]:.3g}"
        )


def non_finite_kind(array: np.ndarray) -> np.ndarray:
    """Return the kind of infinity or NaN, empty for finite values; for complex values the kind is unspecified."""
    if array.dtype.kind == "c":
        return np.where(np.isfinite(array), "", "non-finite")
    return np.select([np.isnan(array), array == np.inf, array == -np.inf], ["nan", "+inf", "-inf"], "")


def rounded(expected: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return expected.astype(dtype)


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
