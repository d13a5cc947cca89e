"""Checks that every pullback must pass, and bounds of the error of a gradient.

A gradient of integer-valued data is exact: the sum is exact in the accumulator, in any order, and is rounded once.
So `assert_rounded` accepts only the nearest value in the argument's dtype.

On random data, the gradient that enters the sums has errors of its own, because the pre-activation at which the
derivative was taken is itself computed.  `entering_error` bounds them by the change of the derivative while the
pre-activation changes by its own tolerance, and by a few roundings in the dtype that may have stored it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import reference
import reference_gradients
from strategies import with_layout
from targets import Target
from tolerance import assert_exact, checked, compare, finfo, rounded, tolerance, widened

import cupyconv

FIELDS = ("x", "weight", "bias", "residual", "scale", "shift")


def attempted(call: Callable[[], Any], method: str = "auto", limit: int | None = None) -> Any:
    """Return the call's result; None if a named method does not apply, or the workspace limit is too small."""
    with cupyconv.options(workspace_limit=limit):
        try:
            return call()
        except ValueError as refusal:
            if (method != "auto" and "does not apply" in str(refusal)) or (limit and "workspace" in str(refusal)):
                return None
            raise


def on_device(target: Target, array: np.ndarray, layout: str = "c_order", channel_axis: int = 1) -> Any:
    return with_layout(array, layout, target.to_device, target.xp, channel_axis=channel_axis)


def assert_rounded(actual: Any, expected: np.ndarray, dtype: Any) -> None:
    """Check that the values are the exact values, rounded once."""
    assert_exact(actual, widened(rounded(expected, np.dtype(dtype))), dtype)


def each_gradient(gradients: Any, expected: Any, arguments: dict[str, Any]) -> list[tuple[str, Any, np.ndarray, Any]]:
    """Check the form of the tuple; return (name, actual, expected, dtype) of every single gradient."""
    assert gradients._fields == FIELDS
    single = []
    for name in FIELDS:
        actual, argument = getattr(gradients, name), arguments.get(name)
        if argument is None:
            assert actual is None, f"there is no {name}, yet it has a gradient"
            continue
        if name == "x":
            assert isinstance(actual, list) == isinstance(argument, (list, tuple)), "a list exactly for a sequence"
        pairs = zip(reference.sequence(actual), reference.sequence(getattr(expected, name)), strict=True)
        for (one, wanted), like in zip(pairs, reference.sequence(argument), strict=True):
            assert one.shape == like.shape
            single.append((name, one, wanted, like.dtype))
    return single


def each_array(gradients: Any) -> list[Any]:
    """Return every single array, in the order of `each_gradient`."""
    return [one for field in gradients if field is not None for one in reference.sequence(field)]


def bytes_of(target: Target, value: Any) -> Any:
    """Return all bits of an array, or of a list or tuple of arrays, for comparison with ==."""
    if value is None or isinstance(value, (list, tuple)):
        return None if value is None else [bytes_of(target, one) for one in value]
    return target.to_host(value).tobytes()


def entering_error(
    grad: np.ndarray, activation: Any, before_activation: np.ndarray, dtype: Any, terms: int, magnitude: np.ndarray
) -> np.ndarray:
    """Bound the error of grad * derivative(before_activation)."""
    wide = np.abs(reference.wide(grad))
    if activation is None:
        return np.zeros(wide.shape)
    off = tolerance(before_activation, dtype, terms, magnitude)
    here, low, high = (
        reference_gradients.derivative(activation, before_activation + shift) for shift in (0, -off, off)
    )
    moved = np.maximum(np.abs(low - here), np.abs(high - here))
    return wide * (moved + 4 * float(finfo(np.dtype(dtype)).eps) * (1 + np.abs(here)))


def assert_within(
    actual: Any, expected: np.ndarray, dtype: Any, *, terms: int, magnitude: np.ndarray, entering: Any
) -> None:
    """Check with the tolerance of a sum of `terms` products, plus `entering`, the error of the incoming gradient."""
    dtype = np.dtype(dtype)
    allowed = tolerance(expected, dtype, terms, magnitude) + entering
    compare(checked(actual, expected, dtype), rounded(expected, dtype), allowed)
