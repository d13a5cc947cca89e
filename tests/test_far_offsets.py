"""Offsets beyond int32: the last element of every array is more than 2**31 elements after the first one.

The system maps memory when it is first touched, so an array may span gigabytes of which only a few pages exist.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import reference_gradients
from numpy.lib.stride_tricks import as_strided
from targets import Target, host_device_target, numpy_target
from test_failing_memory import CALLS, ON_CUDA_ONLY, ON_NUMPY_ONLY, arrays_on
from tolerance import assert_exact

import cupyconv

BEYOND_INT32 = 2**31 + 64


def untouched(target: Target, size: int, dtype: Any) -> Any:
    """Return a one-dimensional array of zeros whose memory is not mapped yet."""
    return np.zeros(size, dtype) if target.device is None else target.device.untouched(size, dtype)


def far_apart(target: Target, shape: tuple[int, ...], dtype: Any, axis: int) -> Any:
    """Return zeros that span more than 2**31 elements along one axis; the other axes are in C order."""
    if not -len(shape) <= axis < len(shape) or shape[axis] == 1:
        axis = shape.index(max(shape))
    axis %= len(shape)
    others = [extent for i, extent in enumerate(shape) if i != axis]
    steps = [prod(others[i + 1 :]) for i in range(len(others))]
    gap = -(-BEYOND_INT32 // (shape[axis] - 1))
    steps.insert(axis, gap)
    memory = untouched(target, gap * (shape[axis] - 1) + prod(others), dtype)
    return as_strided(memory, shape, [step * memory.itemsize for step in steps], subok=True)


def copied_far_apart(target: Target, array: np.ndarray, axis: int) -> Any:
    copy = far_apart(target, array.shape, array.dtype, axis)
    copy[...] = array
    return copy


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(autouse=True)
def little_memory():
    """Check that only touched pages use memory."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("whether memory is there is asked of Linux")
    if os.environ.get("CUPYCONV_HOST_SANITIZER") == "asan":
        pytest.skip(
            "AddressSanitizer writes a byte for every eight that are allocated, touched or not: minutes for each case"
        )
    before = resident_bytes()
    yield
    assert resident_bytes() - before < 1 << 30


CASES = [
    *(pytest.param(numpy_target, name, id=f"numpy-{name}") for name in CALLS if name not in ON_CUDA_ONLY),
    *(
        pytest.param(host_device_target, name, id=f"host_device-{name}", marks=pytest.mark.host_device)
        for name in CALLS
        if name not in ON_NUMPY_ONLY
    ),
]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("make_target, name", CASES)
def test_arguments(make_target, name, axis):
    """Arguments may have samples, channels or pixels that are far apart."""
    target = make_target()
    near = arrays_on(target)
    far = {key: copied_far_apart(target, target.to_host(array), axis) for key, array in vars(near).items()}
    call = CALLS[name]
    if name == "implicit_gemm" and axis == 1:  # the stride between channels exceeds int32
        with pytest.raises(ValueError, match=r"within an image.* exceed the kernel's int32 indices"):
            call(SimpleNamespace(**far))
        return
    actual, expected = call(SimpleNamespace(**far)), call(near)
    np.testing.assert_allclose(target.to_host(actual), target.to_host(expected), rtol=1e-5, atol=1e-5)


RESULTS = {
    "conv": lambda a, out: cupyconv.conv(a.x, a.weight, a.bias, activation="relu", out=out),
    "columns": lambda a, out: cupyconv.conv(a.x, a.weight, method="gemm", out=out),
    "merge": lambda a, out: cupyconv.linmerge([a.x, a.x[:, :2]], a.second[:, :, 0, 0], out=out),
    "transposed": lambda a, out: cupyconv.conv_transpose(a.x, a.turned, stride=2, out=out),
    "input gradient": lambda a, out: cupyconv.conv_grad_input(a.grad, a.weight, a.x.shape, out=out),
    "weight gradient": lambda a, out: cupyconv.conv_grad_weight(a.grad, a.x, (3, 3), out=out),
    "pool": lambda a, out: cupyconv.max_pool(a.x, 3, stride=2, out=out),
    "mean": lambda a, out: cupyconv.avg_pool(a.x, 3, stride=2, out=out),
    "im2col": lambda a, out: cupyconv.im2col(a.x, (3, 3), padding=1, out=out),
    "col2im": lambda a, out: cupyconv.col2im(a.grad.reshape(3, 6, -1), 343, 2, out=out),
}


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize(
    "make_target",
    [numpy_target, pytest.param(host_device_target, marks=pytest.mark.host_device)],
    ids=["numpy", "host_device"],
)
def test_results(make_target, name, axis):
    """Results may be written to arrays whose elements are far apart."""
    target = make_target()
    arrays = arrays_on(target)
    expected = target.to_host(RESULTS[name](arrays, None))
    out = far_apart(target, expected.shape, expected.dtype, axis)
    RESULTS[name](arrays, out)
    np.testing.assert_array_equal(target.to_host(out), expected)


def of_few_windows(target: Target, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
    """Return an image of more than 2**31 pixels, zero except two at each end of the last axis, and these elements."""
    x = untouched(target, prod(shape), np.float16).reshape(shape)
    ends = np.arange(1, 1 + prod(shape[:-1]) * 4, dtype=np.float16).reshape(*shape[:-1], 4)
    x[..., :2], x[..., -2:] = ends[..., :2], ends[..., 2:]
    return x, ends


STRIDE = 2**31 - 64
WINDOWS = {
    "conv": lambda x, w, g: cupyconv.conv(x, w, stride=STRIDE),
    "direct": lambda x, w, g: cupyconv.conv(x, w, stride=STRIDE, method="direct"),
    "far taps": lambda x, w, g: cupyconv.conv(x, w, dilation=STRIDE),
    "im2col": lambda x, w, g: cupyconv.im2col(x, 2, stride=STRIDE),
    "maximum": lambda x, w, g: cupyconv.max_pool(x, 2, stride=STRIDE),
    "mean": lambda x, w, g: cupyconv.avg_pool(x, 2, stride=STRIDE),
    "weight gradient": lambda x, w, g: cupyconv.conv_grad_weight(g, x, 2, stride=STRIDE),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(
    "make_target",
    [numpy_target, pytest.param(host_device_target, marks=pytest.mark.host_device)],
    ids=["numpy", "host_device"],
)
def test_few_windows_of_a_large_image(make_target, name):
    """The image itself has more than 2**31 pixels, and its two windows are at its ends."""
    target = make_target()
    x, ends = of_few_windows(target, (1, 1, STRIDE + 2))
    w = np.array([[[1, 2]], [[-1, 3]]], np.float16)
    g = np.array([[[1, -2], [3, 1]]], np.float16)
    moved = x, target.to_device(w), target.to_device(g)
    if name == "far taps":
        expected = reference.conv(ends, w, dilation=2)
    elif name == "im2col":
        expected = reference.im2col(ends, [2], stride=2)
    elif name in ("maximum", "mean"):
        expected = (reference_gradients.max_pool if name == "maximum" else reference_gradients.avg_pool)(
            ends, [2], stride=2
        )
    elif name == "weight gradient":
        expected = reference_gradients.conv_grad_weight(g, ends, [2], stride=2)
    else:
        expected = reference.conv(ends, w, stride=2)
    assert_exact(target.to_host(WINDOWS[name](*moved)), expected, "float16")
