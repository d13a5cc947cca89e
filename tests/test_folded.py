"""Input gradients through padding modes on NumPy: the image with zero padding, plus the folded borders."""

from __future__ import annotations

import numpy as np
import pytest
import reference_gradients
from integer_arrays import integers
from peak_memory import peak_bytes

import cupyconv

MODES = ("reflect", "symmetric", "edge", "wrap")


def plan_of(shape, weight, grad, **window):
    return cupyconv.explain(cupyconv.conv_grad_input, grad, weight, shape, **window)


def is_folded(plan) -> bool:
    return "border " in str(plan)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape, kernel, window", [
    ((2, 3, 30), (3, 3, 4), dict(padding=[(2, 5)])),
    ((1, 4, 12, 11), (4, 4, 3, 3), dict(padding=1)),
    ((2, 4, 12, 14), (6, 2, 3, 2), dict(padding=[(2, 1), (0, 2)], groups=2)),
    ((1, 3, 16, 17), (3, 3, 3, 3), dict(padding=2, dilation=2)),
    ((1, 4, 13, 16), (8, 4, 4, 3), dict(padding=[(0, 1), (2, 0)], stride=(1, 2))),
    ((1, 2, 9, 10, 11), (2, 2, 3, 1, 3), dict(padding=[(1, 1), (0, 0), (1, 2)])),
    ((3, 1, 24, 24), (1, 1, 5, 7), dict(padding=[(2, 2), (3, 3)])),
])  # fmt: skip
def test_every_border_is_folded_where_its_elements_stand_for_others(shape, kernel, window, mode, gathered):
    weight = integers(*kernel)
    out = cupyconv.conv(np.zeros(shape, np.float32), weight, padding_mode=mode, **window).shape
    grad = integers(*out)
    expected = reference_gradients.conv_grad_input(grad, weight, shape, padding_mode=mode, **window)
    for threads in (1, 2):
        with cupyconv.options(threads=threads, allow_fft=False, allow_winograd=False):  # so that results are exact
            actual = cupyconv.conv_grad_input(grad, weight, shape, padding_mode=mode, **window)
        np.testing.assert_array_equal(actual, expected)


def test_which_gradients_are_folded():
    grad, weight = integers(2, 4, 32, 32), integers(4, 4, 3, 3)
    for mode in MODES:
        assert is_folded(plan_of((2, 4, 32, 32), weight, grad, padding=1, padding_mode=mode))
    assert not is_folded(plan_of((2, 4, 32, 32), weight, grad, padding=1))
    half = grad.astype(np.float16), weight.astype(np.float16)  # sums would be rounded twice
    assert not is_folded(plan_of((2, 4, 32, 32), half[1], half[0], padding=1, padding_mode="wrap"))
    with cupyconv.options(workspace_limit=2_000):  # too small for a border of 34 x 8 elements, and for it twice
        assert not is_folded(plan_of((2, 4, 32, 32), weight, grad, padding=1, padding_mode="wrap"))
    wide = integers(2, 4, 4, 4)  # the borders are larger than the image
    assert not is_folded(plan_of((2, 4, 4, 4), integers(4, 4, 7, 7), wide, padding=3, padding_mode="reflect"))


def test_several_inputs_each_have_their_borders(gathered):
    grad, weight = integers(2, 2, 12, 12), integers(2, 6, 3, 3)
    shapes = [(2, 2, 12, 12), (2, 4, 12, 12)]
    window = dict(padding=1, padding_mode="symmetric")
    assert is_folded(plan_of(shapes, weight, grad, **window))
    actual = cupyconv.conv_grad_input(grad, weight, shapes, **window)
    expected = reference_gradients.conv_grad_input(grad, weight, shapes, **window)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_infinite_weight_gives_what_the_definition_gives():
    grad, weight = integers(1, 8, 64, 64), integers(8, 8, 3, 3)
    weight[1, 0, 0, 2] = np.inf
    window = dict(padding=1, padding_mode="reflect")
    assert is_folded(plan_of((1, 8, 64, 64), weight, grad, **window))
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_input(grad, weight, (1, 8, 64, 64), **window)
    np.testing.assert_array_equal(cupyconv.conv_grad_input(grad, weight, (1, 8, 64, 64), **window), expected)


@pytest.mark.parametrize("limit", [209_715, 300_000, 450_000])
def test_what_the_image_and_its_borders_keep_is_within_the_limit(limit):
    """The image's part once kept its memory beside a border's, which together passed the limit."""
    grad, weight = integers(1, 8, 16, 30), integers(8, 16, 3, 3)
    with cupyconv.options(workspace_limit=limit, threads=1):
        plan = plan_of((1, 16, 16, 30), weight, grad, padding=1, padding_mode="edge")
    assert is_folded(plan) and plan.workspace_bytes <= limit and not plan.notes


@pytest.mark.parametrize("limit", [None, 60_000])
def test_borders_keep_within_the_limit_that_explain_says(limit):
    shape = (1, 8, 32, 32)
    grad, weight = integers(*shape), integers(8, 8, 5, 5)
    window = dict(padding=2, padding_mode="wrap")
    out, expected = np.empty(shape, np.float32), reference_gradients.conv_grad_input(grad, weight, shape, **window)
    with cupyconv.options(workspace_limit=limit, threads=2):
        plan = plan_of(shape, weight, grad, out=out, **window)
        assert is_folded(plan)

        def call():
            cupyconv.conv_grad_input(grad, weight, shape, out=out, **window)

        call()
        python_objects = 100_000
        assert peak_bytes(call) <= plan.workspace_bytes + python_objects
    assert limit is None or plan.workspace_bytes <= max(limit, 2 * weight.nbytes)
    np.testing.assert_array_equal(out, expected)
