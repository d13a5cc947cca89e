"""The kernel for the gradient of depthwise weights: every variant against the oracle, in parts and at every edge."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import reference_gradients
from strategies import as_dtype, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.operation import forget_calls
from cupyconv.cuda.plan import depthwise_weight_gradient as planning
from cupyconv.problem.plan import KernelLaunch
from tests.variants import all_variants

VARIANTS = [dict(kernel.macros) for kernel in all_variants() if kernel.name == "depthwise_weight_gradient"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Cut small images into parts too; forget cached calls before and after each test."""
    monkeypatch.setattr(planning, "SMALLEST_SHARE", 1)
    forget_calls()
    yield
    forget_calls()


def gradient(target, grad, xs, kernel, layout, groups, **window):
    """Return the kernel's result for arrays in this layout, and the number of parts."""
    arrays = [with_layout(array, layout, target.to_device, target.xp) for array in (grad, *xs)]
    call = (arrays[0], arrays[1:], kernel)
    settings = dict(window, groups=groups, method="direct")
    plan = cupyconv.explain(cupyconv.conv_grad_weight, *call, **settings)
    launch = plan.steps[0]
    assert isinstance(launch, KernelLaunch) and launch.kernel.name == "depthwise_weight_gradient"
    return target.to_host(cupyconv.conv_grad_weight(*call, **settings)), launch.grid[0]


def drawn(shape, dtype, seed, integer):
    rng = np.random.default_rng(seed)
    values = rng.integers(-1, 2, shape) if integer else rng.standard_normal(shape)
    return values.astype(as_dtype(dtype))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant.values()))
@pytest.mark.parametrize("layout", ["c_order", "channels_last"])
def test_every_variant(cuda, variant, layout):
    """Several inputs, several outputs per channel, strips that end outside: exact with integers, else close."""
    kernel, stride, dtype = int(variant["KERNEL"]), int(variant["STRIDE"]), variant["DTYPE"]
    mode = "constant" if layout == "c_order" else "reflect"
    window = {"padding": ((2, 1), (1, 2)), "stride": (stride, 1), "padding_mode": mode}
    for integer in (True, False):
        xs = [drawn((2, channels, 9, 8), dtype, channels, integer) for channels in (2, 3)]
        grad = drawn((2, 10, (12 - kernel) // stride + 1, 12 - kernel), dtype, 9, integer)
        actual, _ = gradient(cuda, grad, xs, (kernel, kernel), layout, 5, **window)

        def oracle(grad, xs):
            return reference_gradients.conv_grad_weight(grad, xs, (kernel, kernel), groups=5, **window)

        expected = oracle(reference.wide(grad), [reference.wide(x) for x in xs])
        if integer:
            assert_exact(actual, expected, grad.dtype)
        else:
            magnitude = oracle(abs(reference.wide(grad)), [abs(reference.wide(x)) for x in xs])
            assert_close(actual, expected, grad.dtype, grad[:, 0].size, magnitude=magnitude)


@pytest.mark.parametrize("layout", ["c_order", "channels_last"])
def test_parts_and_non_finite_values(cuda, layout):
    """Many blocks share the sums; non-finite values reach only the taps that read them, also in the tail of a strip."""
    x, grad = drawn((3, 40, 21, 34), "float32", 0, True), drawn((3, 40, 21, 34), "float32", 1, True)
    expected = reference_gradients.conv_grad_weight(grad.astype(float), x.astype(float), (3, 3), groups=40, padding=1)
    actual, parts = gradient(cuda, grad, [x], (3, 3), layout, 40, padding=1)
    assert parts > 1
    assert_exact(actual, expected, "float32")
    x[1, 7, 20, 5], grad[2, 8, 16, 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected = reference_gradients.conv_grad_weight(grad, x, (3, 3), groups=40, padding=1)
    actual, _ = gradient(cuda, grad, [x], (3, 3), layout, 40, padding=1)
    assert_close(actual, expected, "float32", grad[:, 0].size, magnitude=2000)
