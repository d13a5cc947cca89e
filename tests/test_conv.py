"""`conv` against the naive reference, over the whole product of its parameters, on every target."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_images_of_one_pixel_or_one_channel_are_in_both_orders_and_give_c_order():
    """Their channels lie side by side in C order too, whatever the strides of axes that have one element."""
    features, weight = np.ones((2, 3), np.float32), np.ones((4, 3, 3, 3), np.float32)
    for x in (features.reshape(2, 3, 1, 1), features[:, :, np.newaxis, np.newaxis]):
        assert cupyconv.conv(x, weight, padding=2).flags.c_contiguous
    one_channel = np.ones((2, 5, 4, 1), np.float32).transpose(0, 3, 2, 1)
    assert cupyconv.conv(one_channel, weight[:, :1]).flags.c_contiguous
    y = cupyconv.conv(np.ones((2, 1, 2, 3), np.float32).transpose(0, 3, 1, 2), weight, padding=2)
    assert y.transpose(0, 2, 3, 1).flags.c_contiguous


def test_an_input_without_samples_beside_one_with_them_is_answered_with_the_axes_it_needs():
    weight = np.ones((4, 3, 3, 3), np.float32)
    with pytest.raises(
        ValueError, match=r"x\[1\] has shape \(1, 5, 5\), needed 4 axes: \(N, C, \*spatial\) with 2 spatial"
    ):
        cupyconv.conv([np.ones((1, 2, 5, 5), np.float32), np.ones((1, 5, 5), np.float32)], weight)
