"""The gradient of an epilogue by itself: derivatives, sums per channel, layouts, determinism, the plan.

The derivatives are compared with central differences of the oracle's activations in float64, so that no second list of
formulas can share a mistake with the first.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.ops.conv_pullback import EPILOGUE_GRADIENT
from cupyconv.problem.activations import TABLE, derivative_from_result, resolve_activation

ml_dtypes = pytest.importorskip("ml_dtypes")

SPECIFICATIONS = [
    *(name for name, (_, defaults) in TABLE.items() if None not in defaults),
    ("leaky_relu", 0.25),
    ("leaky_relu", -0.5),
    ("leaky_relu", 0),
    ("clip", -1, 2),
    ("clip", float("-inf"), 1),
    ("elu", 0.5),
    ("hard_sigmoid", 1 / 6, 0.75),
]
DTYPES = [np.dtype(dtype) for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64")]
LAYOUTS = ["c_order", "channels_last", "stepped"]

STEP = 1e-6
#: Points where functions have a kink; differences across a kink are meaningless.
BENDS = (-4.5, -3.0, -2.5, -1.0, 0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0)


def epilogue_grad(grad, saved=None, **settings):
    """Call the operation as pullbacks do."""
    return EPILOGUE_GRADIENT(arguments(grad, saved, **settings))


def arguments(grad, saved=None, **settings):
    defaults = {"activation": None, "through": True, "sums": True}
    return {"grad": grad, "saved": saved, "spatial": grad.ndim - 2, **defaults, **settings}


def saved_for(specification, v):
    """Return the array that a forward pass saves for an activation of `v`."""
    return reference.activation(specification, v) if derivative_from_result(resolve_activation(specification)) else v


def laid_out(target, array, layout):
    if layout == "channels_last":
        return np.moveaxis(target.to_device(np.ascontiguousarray(np.moveaxis(array, 1, -1))), -1, 1)
    if layout == "stepped":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
        wide[..., ::2] = array
        return target.to_device(wide)[..., ::2]
    return target.to_device(array)


def test_which_results_tell_their_derivative():
    told = {str(spec) for spec in SPECIFICATIONS if derivative_from_result(resolve_activation(spec))}
    assert told == {"relu", "leaky_relu", "sigmoid", "tanh", "('leaky_relu', 0.25)"}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("specification", SPECIFICATIONS, ids=str)
def test_derivatives_are_the_slopes(target, specification, dtype):
    v = np.concatenate([np.linspace(-12, 12, 241), [-200.0, -50.0, 50.0, 200.0]])
    v = v[np.abs(v[:, None] - BENDS).min(axis=1) > 0.01].astype(dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        ends = [reference.activation(specification, v + side * STEP) for side in (-1, 1)]
    slope = (ends[1] - ends[0]) / (2 * STEP)
    saved = saved_for(specification, v).astype(dtype)
    (actual,) = epilogue_grad(
        target.to_device(np.ones((1, 1, v.size), dtype)), target.to_device(saved[None, None]),
        activation=specification, sums=False,
    )  # fmt: skip
    # For sigmoid and tanh the saved result is rounded, and 1 - s loses digits of s.  Differences are accurate to 1e-8.
    rounding = 16 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        target.to_host(actual)[0, 0].astype(np.float64), slope, rtol=rounding, atol=max(rounding, 3e-8)
    )


@pytest.mark.parametrize("specification, at, slope", [
    ("relu", 0, 0), ("relu6", 0, 0), ("relu6", 6, 0), ("leaky_relu", 0, 0.01), (("clip", -1, 2), 2, 0), (("clip", -1, 2), -1, 0),
    (("elu", 0.5), 0, 0.5), (("hard_sigmoid", 0.25), 2, 0), (("hard_sigmoid", 0.25), -2, 0), ("hardswish", 3, 1), ("hardswish", -3, 0),
    ("relu", np.inf, 1), ("relu6", -np.inf, 0), ("gelu_tanh", 1e30, 1), ("gelu_tanh", -1e30, 0), ("gelu", -1e19, 0), ("softplus", 1e30, 1),
])  # fmt: skip
def test_where_they_bend_and_far_out(target, specification, at, slope):
    grad, saved = (target.to_device(np.full((1, 1, 5), value, np.float32)) for value in (3, at))
    (actual,) = epilogue_grad(grad, saved, activation=specification, sums=False)
    assert target.to_host(actual) == pytest.approx(3 * slope)


@pytest.mark.grid(layout=LAYOUTS, saved_layout=LAYOUTS, dtype=["float16", "float32", "float64"])
def test_both_results_in_every_layout(target, layout, saved_layout, dtype):
    """Integers have exact sums in any order; some images have more pixels than a block has threads."""
    rng = np.random.default_rng(0)
    for shape in ((3, 40, 5, 8), (2, 3, 700), (1, 1, 3), (5, 64, 4, 4, 4)):
        grad, saved = (rng.integers(-3, 4, shape).astype(dtype) for _ in range(2))
        expected = np.where(saved > 0, grad, 0).astype(np.float64)
        through, sums = epilogue_grad(
            laid_out(target, grad, layout), laid_out(target, saved, saved_layout), activation="relu"
        )
        assert_exact(through, expected, dtype)
        totals = expected.sum(axis=(0, *range(2, grad.ndim)))
        assert_exact(sums, totals, np.float32 if dtype == "float16" else dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64", "complex128"])
def test_sums_alone(target, layout, dtype):
    rng = np.random.default_rng(1)
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    grad = rng.standard_normal((3, 20, 16, 9))
    grad = (grad + 1j * rng.standard_normal(grad.shape) if dtype.kind == "c" else grad).astype(dtype)
    (sums,) = epilogue_grad(laid_out(target, grad, layout), through=False)
    expected = reference.wide(grad).sum(axis=(0, 2, 3))
    assert_close(sums, expected, np.float32 if dtype.itemsize == 2 else dtype, grad.size // 20)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_sums_to_zero(target, shape):
    grad = target.to_device(np.zeros(shape, np.float32))
    through, sums = epilogue_grad(grad, grad, activation="relu")
    assert through.shape == shape
    assert_exact(sums, np.zeros(shape[1]), np.float32)


def test_no_batch_and_many_axes(target):
    grad = np.random.default_rng(2).integers(-3, 4, (4, 3, 2, 5, 2, 2)).astype(np.float64)
    through, sums = epilogue_grad(target.to_device(grad), target.to_device(grad), activation="relu")
    assert_exact(through, np.maximum(grad, 0), np.float64)
    assert_exact(sums, np.maximum(grad, 0).sum(axis=(0, 2, 3, 4, 5)), np.float64)
    grad = grad[0, :, 0, 0]
    _, sums = epilogue_grad(target.to_device(grad), target.to_device(grad), activation="relu", spatial=2)
    assert_exact(sums, np.maximum(grad, 0).sum(axis=(1, 2)), np.float64)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads):
    grad, saved = np.random.default_rng(3).standard_normal((2, 7, 5, 200, 200)).astype(np.float32)
    with cupyconv.options(threads=threads):
        results = [epilogue_grad(grad, saved, activation="gelu") for _ in range(3)]
    expected = epilogue_grad(grad, saved, activation="gelu")
    for through, sums in results:
        assert np.array_equal(through, expected[0]) and np.array_equal(sums, expected[1])


def test_parts_are_added_by_a_second_launch_and_only_where_there_are_any(cuda_target):
    large, small = (cuda_target.to_device(np.ones(shape, np.float32)) for shape in ((4, 3, 64, 64), (2, 3, 4)))
    for grad, launches in ((large, 2), (small, 1)):
        cuda_target.device.log.clear()
        (sums,) = epilogue_grad(grad, through=False)
        assert len(cuda_target.device.log) == launches
        assert_exact(sums, np.full(3, grad.size / 3), np.float32)


@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_workspace_keeps_within_the_limit(target, limit):
    grad = target.to_device(np.ones((4, 3, 64, 64), np.float32))
    with cupyconv.options(workspace_limit=limit):
        checked = EPILOGUE_GRADIENT.checked(arguments(grad, grad, activation="tanh"))
        through, sums = checked.run()
    if target.name != "numpy":  # on NumPy every method needs some workspace
        assert checked.plan().workspace_bytes <= limit
    assert_exact(through, np.zeros(grad.shape), np.float32)
    assert_exact(sums, np.zeros(3), np.float32)


def test_the_plan_prints():
    grad = np.ones((4, 64, 56, 56), np.float32)
    page = str(EPILOGUE_GRADIENT.checked(arguments(grad, grad, activation="gelu")).plan())
    assert "derivative of gelu and sums of channels" in page and "16 blocks" in page
    plan = EPILOGUE_GRADIENT.checked(arguments(grad, grad, activation="gelu"), "sm_90").plan()
    assert [str(step.kernel) for step in plan.steps] == ["epilogue_grad<float32, 4, 0>", "epilogue_grad<float32, 4, 1>"]
    assert plan.bytes_moved < 1.01 * plan.minimal_bytes
