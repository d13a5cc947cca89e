"""The kernel of depthwise transposed convolutions at stride 2: every variant and every edge against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_gradients
from strategies import as_dtype, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.cuda.plan import transposed as planning
from cupyconv.problem.plan import KernelLaunch
from tests.variants import all_variants

pytestmark = pytest.mark.usefixtures("fresh")

VARIANTS = [dict(kernel.macros) for kernel in all_variants() if kernel.name == "depthwise_transposed"]


def drawn(shape, dtype, seed, integer=True):
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) if integer else rng.standard_normal(shape)
    return values.astype(as_dtype(dtype))


def launches(plan):
    return [step for step in plan.steps if isinstance(step, KernelLaunch)]


def transposed(target, xs, weight, bias=None, layout="c_order", **settings):
    """Run the kernel in one launch on arrays in this layout, even if the general kernel is as good for small arrays."""
    arrays = [with_layout(x, layout, target.to_device, target.xp) for x in xs]
    call = (arrays, target.to_device(weight), None if bias is None else target.to_device(bias))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "cheapest", lambda drafts, _: drafts[0])
        plan = cupyconv.explain(cupyconv.conv_transpose, *call, method="direct", **settings)
        assert [launch.kernel.name for launch in launches(plan)] == ["depthwise_transposed"]
        return target.to_host(cupyconv.conv_transpose(*call, method="direct", **settings))


@pytest.mark.parametrize("layout", ["c_order", "channels_last"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
def test_every_variant(cuda, variant, layout):
    """Both phases at top and left, two inputs, two channels per group, an epilogue: exact with integers, else close."""
    size, dtype = int(variant["KERNEL"]), variant["DTYPE"]
    for padding, integer in (((1, 0), True), ((0, 1), True), ((1, 1), False)):
        window = dict(stride=2, padding=padding, output_padding=1, groups=3)
        xs = [drawn((2, channels, 7, 6), dtype, channels, integer) for channels in (2, 4)]
        weight, bias = drawn((6, 1, size, size), dtype, 8, integer), drawn((3,), dtype, 9, integer)
        settings = dict(window, activation=("leaky_relu", 0.5))
        actual = transposed(cuda, xs, weight, bias, layout, **settings)
        wide = [[reference.wide(x) for x in xs], reference.wide(weight), reference.wide(bias)]
        expected = reference_gradients.conv_transpose(*wide, **settings)
        if integer:
            assert_exact(actual, expected, dtype)
        else:
            magnitude = reference_gradients.conv_transpose([abs(x) for x in wide[0]], *map(abs, wide[1:]), **window)
            assert_close(actual, expected, dtype, 2 * size * size, magnitude=magnitude)


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("size", [(2, 2), (1, 9), (9, 2), (16, 3), (17, 40)])
def test_strips_that_begin_and_end_outside(cuda, size, padding):
    """Results have several strips, part of a strip, or one row; they have more channels than a warp has lanes."""
    weight = drawn((40, 1, 5, 5), "float32", 1)
    for layout in ("c_order", "channels_last"):
        x = drawn((1, 40, *size), "float32", 2)
        actual = transposed(cuda, [x], weight, layout=layout, stride=2, padding=padding, groups=40)
        expected = reference_gradients.conv_transpose(x, weight, stride=2, padding=padding, groups=40)
        assert_exact(actual, expected, "float32")


def test_gradients_of_several_inputs_of_groups(cuda):
    """Each input has a launch for its own channels, which end within a group."""
    shapes = [(2, 3, 13, 12), (2, 5, 13, 12)]
    grad, weight = drawn((2, 12, 7, 6), "float32", 0), drawn((12, 2, 3, 3), "float32", 1)
    window = dict(stride=2, padding=1, groups=4)
    call = (cuda.to_device(grad), cuda.to_device(weight), shapes)
    plan = cupyconv.explain(cupyconv.conv_grad_input, *call, method="direct", **window)
    assert [launch.kernel.name for launch in launches(plan)] == ["depthwise_transposed"] * 2
    results = cupyconv.conv_grad_input(*call, method="direct", **window)
    expected = reference_gradients.conv_grad_input(grad, weight, (2, 8, 13, 12), **window)
    for result, part in zip(results, (expected[:, :3], expected[:, 3:])):
        assert_exact(cuda.to_host(result), part, "float32")


def test_a_plane_of_three_axes_that_padding_cuts(cuda):
    """Along d, windows have one tap and stride 1; padding cuts off the first and last planes of the result."""
    x, weight = drawn((2, 3, 4, 3, 5), "float32", 0), drawn((3, 1, 1, 3, 3), "float32", 1)
    settings = dict(stride=(1, 2, 2), padding=(1, 1, 0), groups=3)
    actual = transposed(cuda, [x], weight, **settings)
    assert actual.shape[2] == 2
    assert_exact(actual, reference_gradients.conv_transpose(x, weight, **settings), "float32")


def test_what_is_not_finite_reaches_what_it_is_multiplied_with(cuda):
    """Elements that windows miss are not multiplied by zeros: an infinite tap leaves them finite."""
    x, weight = drawn((1, 2, 5, 5), "float32", 0), drawn((2, 1, 3, 3), "float32", 1)
    x[x == 0] = 1  # zero times infinity is NaN too
    x[0, 0, 2, 2], weight[0, 0, 0, 1], weight[1, 0, 2, 2] = np.inf, np.inf, np.nan
    settings = dict(stride=2, output_padding=1, groups=2)
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_transpose(x.astype(float), weight.astype(float), **settings)
    actual = transposed(cuda, [x], weight, **settings)
    assert np.isfinite(expected).any()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "why, shape, settings",
    [
        ("stride 3", (4, 1, 3, 3), dict(stride=3)),
        ("another stride along w", (4, 1, 3, 3), dict(stride=(2, 1))),
        ("dilation", (4, 1, 3, 3), dict(stride=2, dilation=2)),
        ("no square", (4, 1, 3, 2), dict(stride=2)),
        ("a larger kernel", (4, 1, 8, 8), dict(stride=2)),
    ],
)
def test_others_have_one_launch_of_the_general_kernel(why, shape, settings):
    x, weight = np.empty((2, 4, 64, 64), np.float32), np.empty(shape, np.float32)
    plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, groups=4, method="direct", on="sm_90", **settings)
    assert [launch.kernel.name for launch in launches(plan)] == ["transposed"], why


def test_at_stride_1_a_depthwise_one_is_a_depthwise_convolution():
    x, weight = np.empty((2, 4, 64, 64), np.float32), np.empty((4, 1, 3, 3), np.float32)
    plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, groups=4, method="direct", on="sm_90")
    assert [launch.kernel.name for launch in launches(plan)] == ["depthwise"]
