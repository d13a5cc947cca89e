"""Accesses of a kernel's neighboring threads: vectors or single elements, along pixels or along channels.

Planning chooses every case here from sizes, strides and alignment.  Each test asserts the case by name, so that none
falls out of use unnoticed, and compares the result with the definition.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from tolerance import assert_exact

import cupyconv


def integers(seed, shape, dtype):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def channels_last(array):
    """Return the same values in a view with contiguous channels."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


LAYOUTS = {"pixels": np.ascontiguousarray, "channels": channels_last}


def the_launch(plan, name):
    (launch,) = [step for step in plan.steps if getattr(step, "kernel", None) and step.kernel.name == name]
    return launch, dict(launch.params), dict(launch.kernel.macros)


def moved_as_it_lies(target, array):
    """Copy the array to the device, with the strides that it has here."""
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    return target.to_device(np.ascontiguousarray(array.transpose(order))).transpose(np.argsort(order))


@pytest.mark.grid(
    together=3, dtype=["float16", "float32", "float64"], channels=[6, 16, 24], layout=["pixels", "channels"],
    residual_layout=["pixels", "channels"], side=[4, 5],
)  # fmt: skip
def test_epilogue(cuda_target, dtype, channels, layout, residual_layout, side):
    x, weight = integers(0, (2, 3, side, side), dtype), integers(1, (channels, 3, 3, 3), dtype)
    bias, residual = integers(2, channels, dtype), integers(3, (2, channels, side, side), dtype)
    out = moved_as_it_lies(cuda_target, LAYOUTS[layout](np.empty_like(residual)))
    arguments = {
        "x": cuda_target.to_device(x), "weight": cuda_target.to_device(weight), "bias": cuda_target.to_device(bias),
        "residual": moved_as_it_lies(cuda_target, LAYOUTS[residual_layout](residual)),
        "padding": 1, "activation": "relu", "method": "gemm", "out": out,
    }  # fmt: skip
    _, params, macros = the_launch(cupyconv.explain(cupyconv.conv, **arguments), "epilogue")
    full = 16 // np.dtype(dtype).itemsize
    extent = side * side if layout == "pixels" else channels
    assert params["along_channels"] == (layout == "channels")
    assert macros["WIDTH"] == str(full if extent % full == 0 else 1)
    assert params["residual_vectorized"] == (residual_layout == layout and macros["WIDTH"] != "1")
    cupyconv.conv(**arguments)
    expected = reference.conv(x, weight, bias, residual=residual, padding=1, activation="relu")
    assert_exact(cuda_target.to_host(out), expected, dtype)


@pytest.mark.grid(
    together=3, kernel=[(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)], mode=["constant", "reflect", "symmetric", "edge", "wrap"],
    layout=LAYOUTS, shape=[(8, 8), (9, 5), (19, 33), (3, 9, 10)],
)  # fmt: skip
def test_depthwise(cuda_target, kernel, mode, layout, shape):
    """Strips that end inside and beyond the image, narrow images, three axes, a multiplier, merged inputs are right."""
    side, stride = kernel
    dtype = "float32"
    xs = [layout(integers(i, (2, c, *shape), dtype)) for i, c in enumerate((2, 3))]
    taps = (1,) * (len(shape) - 2) + (side, side)
    weight, bias = integers(2, (10, 1, *taps), dtype), integers(3, 10, dtype)
    settings = {
        "padding": (0,) * (len(shape) - 2) + (side // 2, side // 2), "padding_mode": mode, "groups": 5,
        "stride": (1,) * (len(shape) - 2) + (stride, 2), "activation": ("leaky_relu", 0.5),
    }  # fmt: skip
    moved = [moved_as_it_lies(cuda_target, x) for x in xs], cuda_target.to_device(weight), cuda_target.to_device(bias)
    _, params, macros = the_launch(cupyconv.explain(cupyconv.conv, *moved, method="direct", **settings), "depthwise")
    assert (macros["KERNEL"], macros["STRIDE"]) == (str(side), str(stride))
    assert params["channel_lanes"] == (16 if layout is channels_last else 1)
    actual = cupyconv.conv(*moved, method="direct", **settings)
    assert_exact(cuda_target.to_host(actual), reference.conv(xs, weight, bias, **settings), dtype)


@pytest.mark.parametrize(("stride", "dtype"), [(1, "float32"), (2, "float32"), (1, "float16")])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_grouped_depthwise(cuda_target, stride, dtype, mode, layout):
    """Groups have three channels, of which one group spans two inputs, and two outputs."""
    xs = [layout(integers(i, (2, c, 11, 9), dtype)) for i, c in enumerate((4, 5))]
    weight, bias = integers(2, (6, 3, 3, 3), dtype), integers(3, 6, dtype)
    settings = {"padding": 1, "padding_mode": mode, "groups": 3, "stride": (stride, 1), "activation": "relu"}
    residual = integers(4, (2, 6, 11 if stride == 1 else 6, 9), dtype)
    moved = [moved_as_it_lies(cuda_target, x) for x in xs], cuda_target.to_device(weight), cuda_target.to_device(bias)
    _, params, macros = the_launch(cupyconv.explain(cupyconv.conv, *moved, method="direct", **settings), "depthwise")
    assert (macros["KERNEL"], macros["STRIDE"], macros["GROUPED"]) == ("3", str(stride), "1")
    assert params["group_channels"] == 3 and params["group_outputs"] == 2
    actual = cupyconv.conv(*moved, method="direct", residual=cuda_target.to_device(residual), **settings)
    assert_exact(cuda_target.to_host(actual), reference.conv(xs, weight, bias, residual=residual, **settings), dtype)


@pytest.mark.parametrize("change", ["dilation", "reversed", "kernel", "stride"])
def test_depthwise_of_any_kernel(cuda_target, change):
    """Cases that the compiled kernels do not cover are computed tap by tap."""
    x, weight = integers(0, (2, 4, 9, 11), "float64"), integers(1, (4, 1, 3, 4 if change == "kernel" else 3), "float64")
    settings = {
        "groups": 4,
        "padding": 2,
        "dilation": 1 + (change == "dilation"),
        "stride": 1 + 2 * (change == "stride"),
    }
    flip = np.s_[:, :, ::-1] if change == "reversed" else np.s_[:]
    moved = cuda_target.to_device(x)[flip], cuda_target.to_device(weight)
    _, _, macros = the_launch(cupyconv.explain(cupyconv.conv, *moved, method="direct", **settings), "depthwise")
    assert macros["KERNEL"] == "0"
    actual = cupyconv.conv(*moved, method="direct", **settings)
    assert_exact(cuda_target.to_host(actual), reference.conv(x[flip], weight, **settings), "float64")


@pytest.mark.grid(
    together=3, dtype=["float16", "float32", "float64", "complex128"], channels=[(3,), (8,), (16, 5), (40,)], layout=LAYOUTS,
    size=[(5, 7), (2, 3, 4)], step=[1, 2],
)  # fmt: skip
def test_im2col(cuda_target, dtype, channels, layout, size, step):
    """Whole and cut squares, along pixels and along channels, are written in vectors and one by one."""
    xs = [layout(integers(i, (3, c, *size), dtype)) for i, c in enumerate(channels)]
    kernel, settings = (2,) * len(size), {"padding": 1, "stride": 1}
    expected = reference.im2col(xs, kernel, **settings)
    whole = cuda_target.to_device(np.zeros((*expected.shape[:2], expected.shape[2] * step), dtype))
    moved, out = [moved_as_it_lies(cuda_target, x) for x in xs], whole[..., ::step]
    _, params, macros = the_launch(cupyconv.explain(cupyconv.im2col, moved, kernel, **settings, out=out), "im2col")
    width = int(macros["WIDTH"])
    assert params["squares"] == sum(-(-c // width) for c in channels)
    assert params["channel_lanes"] == (
        min(4, 1 << (params["squares"] - 1).bit_length()) if layout is channels_last else 1
    )
    cupyconv.im2col(moved, kernel, **settings, out=out)
    assert_exact(cuda_target.to_host(out), expected, dtype)


def test_one_pixel_is_channels_side_by_side(cuda_target):
    """A result with one pixel per sample is a matrix (n, c), in which channels are neighbors in memory."""
    x, weight = integers(0, (5, 4, 2, 2), "float32"), integers(1, (16, 4, 2, 2), "float32")
    arguments = [cuda_target.to_device(x), cuda_target.to_device(weight)]
    settings = {"activation": "relu", "method": "gemm"}
    _, params, macros = the_launch(cupyconv.explain(cupyconv.conv, *arguments, **settings), "epilogue")
    assert params["along_channels"] and macros["WIDTH"] == "4"
    expected = reference.conv(x, weight, activation="relu")
    assert_exact(cuda_target.to_host(cupyconv.conv(*arguments, **settings)), expected, "float32")
