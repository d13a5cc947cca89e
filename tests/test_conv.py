"""`conv` against the naive reference, over the whole product of its parameters, on every target."""

from __future__ import annotations

import reference
from hypothesis import given
from hypothesis import strategies as st
from strategies import ACTIVATIONS, conv_cases
from tolerance import assert_close, assert_exact

import cupyconv

METHODS = st.sampled_from(("auto", "auto", "direct", "gemm", "implicit_gemm"))
LIMITS = st.sampled_from((None, None, 1 << 20, 20_000, 4_000))


def run(target, case, arrays, method, limit):
    """The case on a target; None where a named method refuses it for a reason it gives."""
    views = case.views(arrays, target.to_device, target.xp)
    out = case.new_out(target.to_device, target.xp)
    with cupyconv.options(workspace_limit=limit):
        try:
            result = cupyconv.conv(**views, **case.parameters, method=method, out=out)
        except ValueError as refusal:
            if (method != "auto" and "does not apply" in str(refusal)) or (limit and "workspace" in str(refusal)):
                return None
            raise
    assert out is None or result is out
    return target.to_host(result)


@given(case=conv_cases(), method=METHODS, limit=LIMITS)
def test_integers_are_exact(target, case, method, limit):
    arrays = case.arrays(integer=True)
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        assert_exact(actual, reference.conv(**arrays, **case.parameters), case.result_dtype)


@given(case=conv_cases(activations=ACTIVATIONS), method=METHODS, limit=LIMITS)
def test_random_data(target, case, method, limit):
    arrays = case.arrays(integer=False)
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        expected = reference.conv(**arrays, **case.parameters)
        magnitude = case.magnitude(arrays)
        assert_close(actual, expected, case.result_dtype, case.terms, magnitude=magnitude)
