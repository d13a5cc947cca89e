"""The phases of a transposed convolution in one grid of implicit_gemm.cu: every variant, for every kind of phase.

Normally the cost model chooses the variant; these tests force each in turn, as `test_implicit_gemm.py` does.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import reference_gradients
from tolerance import assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import implicit_gemm
from cupyconv.cuda.plan.arithmetic import FIRST_MMA
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.plan import MAX_PHASES, KernelLaunch
from tests.test_implicit_gemm import ALONG_CHANNELS, ALONG_PIXELS, PIXEL_CHUNKS, VARIANTS, tile_of

#: Shape of `x` (a list: inputs whose channels are merged), shape of the weight, settings.
CASES = {
    "two taps, both pixels of one": ((2, 8, 4, 8), (8, 5, 2, 2), dict(stride=2)),
    "three taps": ((2, 6, 5, 7), (6, 4, 3, 3), dict(stride=2, padding=1)),
    "four taps": ((1, 8, 6, 8), (8, 70, 4, 4), dict(stride=2, padding=1)),
    "one tap, which three phases miss": ((2, 8, 4, 4), (8, 3, 1, 1), dict(stride=2, output_padding=1)),
    "an axis that stays": ((2, 5, 4, 6), (5, 3, 3, 3), dict(stride=(1, 2), padding=(1, 1))),
    "three axes": ((2, 8, 3, 4, 2), (8, 6, 3, 2, 3), dict(stride=2, padding=(1, 0, 1), output_padding=(1, 0, 0))),
    "windows that begin inside the image": ((1, 4, 9, 9), (4, 2, 3, 3), dict(stride=2, padding=5)),
    "dilation": ((1, 4, 6, 5), (4, 3, 3, 2), dict(stride=2, dilation=3, padding=2)),
    "dilation as wide as the stride": ((1, 4, 6, 5), (4, 3, 3, 2), dict(stride=2, dilation=2)),
    "eight phases of a row": ((2, 8, 12), (8, 4, 16), dict(stride=8, padding=4)),
    "nine phases, of which one is alone": ((2, 4, 5, 4), (4, 3, 3, 4), dict(stride=3, padding=1)),
    "sixteen phases": ((1, 8, 4, 5), (8, 3, 4, 4), dict(stride=4)),
    "a result of one row": ((2, 4, 1, 5), (4, 3, 1, 3), dict(stride=2, padding=(0, 1))),
    "merged inputs": ([(2, 5, 4, 5), (2, 8, 4, 5)], (13, 4, 3, 3), dict(stride=2, padding=1)),
    "sums in parts": ((1, 256, 3, 3), (256, 4, 3, 3), dict(stride=2, padding=1)),
    "each channel by itself": ((2, 6, 5, 5), (6, 1, 3, 3), dict(stride=2, padding=1, groups=6)),
    "no sample": ((0, 6, 5, 5), (6, 4, 3, 3), dict(stride=2, padding=1)),
}  # fmt: skip

#: Cases in which a phase may read 16 bytes of channels, and cases in which it may read 16 bytes of pixels.
OCTETS = {name: case for name, case in CASES.items() if not isinstance(case[0], list) and case[0][1] % 8 == 0}
WHERE_THEY_LIE = {name: CASES[name] for name in ("two taps, both pixels of one", "one tap, which three phases miss")}


def integers(shape, dtype, seed):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype_from_name(dtype))


def arrays_of(case, dtype):
    x_shape, weight_shape, settings = case
    shapes = x_shape if isinstance(x_shape, list) else [x_shape]
    xs = [integers(shape, dtype, i) for i, shape in enumerate(shapes)]
    bias = integers((weight_shape[1] * settings.get("groups", 1),), dtype, 8)
    return (xs if isinstance(x_shape, list) else xs[0]), integers(weight_shape, dtype, 9), bias


def on_target(target, values, channels_last=False):
    """Copy an array, or a list of arrays, to the target."""
    if isinstance(values, list):
        return [on_target(target, value, channels_last) for value in values]
    if not channels_last:
        return target.to_device(values)
    base = target.to_device(np.ascontiguousarray(np.moveaxis(values, 1, -1)))
    return base.transpose(0, values.ndim - 1, *range(1, values.ndim - 1))


def products(plan):
    return [step for step in plan.steps if isinstance(step, KernelLaunch) and step.kernel.name == "implicit_gemm"]


def run_forced(target, variant, *arguments, **settings):
    """Return the result of one variant, and its plan."""
    arithmetic, gather, gatherings = variant["ARITHMETIC"], variant["GATHER"], implicit_gemm._gatherings

    def chosen(*how):
        if gather == "ALONG_PIXELS":  # it reads any layout
            return [replace(one, gather=gather) for one in gatherings(*how) if not one.steps]
        return [one for one in gatherings(*how) if one.gather == gather]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implicit_gemm, "_gatherings", chosen)
        patch.setattr(implicit_gemm, "arithmetics", lambda *_: (arithmetic,))
        patch.setattr(implicit_gemm, "tiles", lambda *_: (tile_of(variant),))
        call = checked_call(cupyconv.conv_transpose, *arguments, method="implicit_gemm", **settings)
        if arithmetic != "FMA" and call.problem.machine.capability < FIRST_MMA[variant["DTYPE"]]:
            pytest.skip(f"{call.problem.machine} has no matrix instructions for it")
        plan = call.plan()
    call.plan = lambda: plan
    return target.to_host(call.run()), plan


def check_case(target, case, variant):
    """Check results exactly, with bias and activation, on integers, and check the number of grids."""
    is_complex = variant["DTYPE"].startswith("complex")  # complex dtypes have no activation
    settings = dict(case[2], activation=None if is_complex else ("leaky_relu", 0.5))
    x, weight, bias = arrays_of(case, variant["DTYPE"])
    given = on_target(target, x, variant["GATHER"] == "ALONG_CHANNELS"), *on_target(target, [weight, bias])
    actual, plan = run_forced(target, variant, *given, **settings)
    assert_exact(actual, reference_gradients.conv_transpose(x, weight, bias, **settings), variant["DTYPE"])
    strides = np.broadcast_to(settings["stride"], actual.ndim - 2)
    grids = -(-prod(map(min, strides, actual.shape[2:])) // MAX_PHASES) if actual.size else 0
    assert len(products(plan)) == grids
    if case is CASES["sums in parts"]:
        assert products(plan)[0].grid[1] > 1 and plan.steps[-1].kernel.name == "epilogue"


@pytest.mark.grid(variant=ALONG_PIXELS, case=CASES)
def test_along_pixels(cuda, case, variant):
    check_case(cuda, case, variant)


@pytest.mark.grid(variant=ALONG_CHANNELS, case=OCTETS)
def test_along_channels(cuda, case, variant):
    check_case(cuda, case, variant)


@pytest.mark.grid(variant=PIXEL_CHUNKS, case=WHERE_THEY_LIE)
def test_pixels_in_chunks(cuda, case, variant):
    check_case(cuda, case, variant)


@pytest.mark.parametrize("gather", ["ALONG_PIXELS", "PIXEL_CHUNKS", "ALONG_CHANNELS"])
def test_each_gather_is_reached(gather):
    """With kernel and stride 2, a phase reads pixels in place; it reads channels-last images 16 bytes at a time."""
    case = CASES["three taps" if gather == "ALONG_PIXELS" else "two taps, both pixels of one"]
    x, weight, _ = arrays_of(case, "float16")
    if gather == "ALONG_CHANNELS":
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    plan = cupyconv.explain(
        cupyconv.conv_transpose, x, weight, **case[2], method="implicit_gemm", on="sm_90"
    )  # fmt: skip
    assert [dict(launch.kernel.macros)["GATHER"] for launch in products(plan)] == [gather]


@pytest.mark.parametrize("rank, phases", [(1, 2), (2, 4), (3, 8)])
def test_an_input_gradient_at_stride_2_is_one_grid(rank, phases):
    shape = (2, 16, *(9,) * rank)
    grad, weight = np.empty((2, 8, *(5,) * rank), np.float16), np.empty((8, 16, *(3,) * rank), np.float16)
    window = dict(stride=2, padding=1, method="implicit_gemm", on="sm_80")
    plan = cupyconv.explain(cupyconv.conv_grad_input, grad, weight, shape, **window)
    (launch,) = products(plan)
    assert dict(launch.params)["phases"] == phases
    assert [step.kernel.name for step in plan.steps][-2:] == ["pack_weight", "implicit_gemm"]
    assert launch.flops == 2 * 2 * 8 * 16 * 13**rank  # per axis: 5 elements with one tap, 4 with two


def test_several_results_have_a_grid_each(cuda):
    """The gradients of merged inputs have one grid per input, each with that input's channels."""
    shapes = [(2, 3, 7, 8), (2, 6, 7, 8)]
    grad, weight = integers((2, 5, 4, 4), "float32", 0), integers((5, 9, 3, 3), "float32", 1)
    window = dict(stride=2, padding=1)
    variant = next(v for v in VARIANTS if (v["DTYPE"], v["ARITHMETIC"]) == ("float32", "FMA"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implicit_gemm, "arithmetics", lambda *_: (variant["ARITHMETIC"],))
        results = cupyconv.conv_grad_input(
            cuda.to_device(grad), cuda.to_device(weight), shapes, method="implicit_gemm", **window
        )
    expected = reference_gradients.conv_grad_input(grad, weight, (2, 9, 7, 8), **window)
    for result, part in zip(results, (expected[:, :3], expected[:, 3:])):
        assert_exact(cuda.to_host(result), part, "float32")


@pytest.mark.parametrize("layout", ["c_order", "channels_last", "every other element"])
def test_where_results_lie(cuda, layout):
    """A phase stores its elements correctly in any layout, and leaves the memory between them unchanged."""
    case = CASES["three taps"]
    x, weight, bias = arrays_of(case, "float32")
    settings = case[2]
    expected = reference_gradients.conv_transpose(x, weight, bias, **settings)
    batch, channels, height, width = expected.shape
    if layout == "channels_last":
        base = np.full((batch, height, width, channels), 99, np.float32)
        view = lambda array: array.transpose(0, 3, 1, 2)  # noqa: E731
    else:
        gap = 1 if layout == "c_order" else 2
        base = np.full((batch, channels, height, gap * width), 99, np.float32)
        view = lambda array: array[..., ::gap]  # noqa: E731
    base = cuda.to_device(base)
    given = map(cuda.to_device, (x, weight, bias))
    cupyconv.conv_transpose(*given, **settings, method="implicit_gemm", out=view(base))
    written = cuda.to_host(base)
    assert_exact(view(written), expected, "float32")
    if layout == "every other element":
        assert (written[..., 1::2] == 99).all()


#: Outputs and channels per group, the kernel, the stride, the number of groups, the number of results.
CONJUGATED = {
    "one convolution": (6, 5, (3, 3), 1, 1, 1),
    "phases": (6, 5, (3, 2), 2, 1, 1),
    "a weight that lies in slabs already": (8, 8, (1, 1), 1, 1, 1),
    "two results": (6, 6, (3, 3), 2, 1, 2),
    "groups, whose weight is copied": (6, 5, (3, 3), 1, 2, 1),
    "groups of one channel": (3, 1, (2, 2), 1, 2, 1),
}


@pytest.mark.parametrize("name", CONJUGATED)
@pytest.mark.parametrize("order", ["outputs last", "channels last"])
def test_a_complex_weight_is_conjugated_once(cuda, name, order):
    """A complex weight is conjugated while it is packed, or copied for groups; no extra pass conjugates it."""
    outputs, channels, kernel, stride, groups, results = CONJUGATED[name]
    shape = (2, channels * groups, 9, 8)
    size = [(n - k) // stride + 1 for n, k in zip(shape[2:], kernel)]
    grad, weight = (
        integers(each, "complex64", seed) + 1j * integers(each, "complex64", seed + 2)
        for seed, each in enumerate([(2, outputs * groups, *size), (outputs * groups, channels, *kernel)])
    )
    window = {"stride": stride, "groups": groups}
    expected = reference_gradients.conv_grad_input(grad, weight, shape, **window)
    axes = (2, 3, 1, 0) if order == "outputs last" else (0, 2, 3, 1)
    given = cuda.to_device(np.ascontiguousarray(weight.transpose(axes))).transpose(np.argsort(axes).tolist())
    part = (2, channels * groups // results, 9, 8)
    arguments = (cuda.to_device(grad), given, [part] * results if results > 1 else part)
    found = cupyconv.conv_grad_input(*arguments, **window, method="implicit_gemm")
    found = np.concatenate([cuda.to_host(each) for each in (found if results > 1 else [found])], axis=1)
    assert_exact(found, expected, "complex64")
    plan = cupyconv.explain(cupyconv.conv_grad_input, *arguments, **window, method="implicit_gemm")
    conjugating = [step.purpose for step in plan.steps if "conjugated" in getattr(step, "purpose", "")]
    copies = groups > 1 and channels > 1
    words = "weight with outputs and channels exchanged" if copies else "weight packed into K-slabs"
    assert conjugating == [f"{words}, conjugated"] * (1 if copies else results)
