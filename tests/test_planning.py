"""Plans as data: the launches that they would run, checked without memory, a compiler or a GPU.

The arrays have the shapes, strides and dtypes of real ones, but no memory behind them; `explain` reads nothing else.
All rules hold for every GPU; the choice between methods is tested on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from grids import combined
from hypothesis import given
from hypothesis import strategies as st
from plans import GPU, array, check, columns_launches, gemms, launches, plan, recurrent_gradient_plan
from strategies import share_of_examples

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.cuda.plan import depthwise, depthwise_transposed
from cupyconv.cuda.plan.gemm import MIN_CHUNK
from cupyconv.cuda.plan.launches import is_along_channels, vector_width
from cupyconv.cuda.plan.matrices import (
    MAX_BATCH,
    MAX_DIMENSION,
    MatrixView,
    image_factors,
    image_matrix,
    is_in_segments,
    matrix_view,
    segments,
)
from cupyconv.numpy.pool_blocks import PoolingStep
from cupyconv.ops.conv_grad_weight import check_conv_grad_weight
from cupyconv.ops.conv_pullback import EPILOGUE_GRADIENT, PROLOGUE_GRADIENT
from cupyconv.ops.pooling import AVG_POOL_GRADIENT, MAX_POOL_GRADIENT
from cupyconv.problem.arrays import ITEMSIZE, operand
from cupyconv.problem.machine import KNOWN_GPUS
from cupyconv.problem.plan import MAX_SOURCES, Address, GemmCall, Kernel, KernelLaunch, LaunchLoop, Matrix, Plan
from cupyconv.problem.recurrence import GATES
from tests.variants import all_variants

ml_dtypes = pytest.importorskip("ml_dtypes")

METHODS = ("auto", "direct", "gemm", "implicit_gemm")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

DTYPES = [
    ("float16", "float16"),
    (BFLOAT16, BFLOAT16),
    ("float32", "float32"),
    ("float64", "float64"),
    ("complex64", "complex64"),
    ("complex64", "float32"),
    ("float32", "complex64"),
    ("complex128", "complex128"),
    ("complex128", "float64"),
    ("float64", "complex128"),
    ("float32", "float64"),
]

#: (batch, channels of each input, spatial size, outputs, kernel, settings)
PROBLEMS: list[tuple[int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = [
    *[(4, (4, 4), (64,), outputs, (1,), {}) for outputs in (1, 2, 3, 5, 9, 40)],
    (3, (64, 64, 128), (32, 32), 256, (1, 1), {}),
    (3, (6000,), (16,), 4, (1,), {}),
    (2, (8,), (7, 9), 6, (1, 1), {"stride": 2}),
    (64, (3,), (32, 32), 16, (3, 3), {"padding": 1}),
    (5, (2, 1, 3), (30,), 4, (5,), {"padding": "same", "dilation": 3, "padding_mode": "reflect"}),
    (2, (8,), (6, 8, 8), 8, (3, 3, 3), {"padding": "full", "stride": (1, 2, 3)}),
    (4, (8,), (16, 16), 24, (3, 3), {"groups": 8}),
    *[(4, (5, 7), (16, 16), 8, (3, 3), {"groups": 4, "stride": stride}) for stride in (1, 2)],
    *[(2, (6,), (9, 9), 12, (k, k), {"groups": 6, "stride": s}) for k, s in (*depthwise.KERNELS, (4, 1))],
    (4, (16,), (16, 16), 8, (1, 1), {"groups": 4}),
    (7, (32,), (4, 4), 10, (4, 4), {}),
    (1, (3,) * 60, (9, 9), 4, (3, 3), {"padding": 1}),
    (2, (3,) * 60, (64,), 4, (1,), {}),
    (2, (0, 3, 0), (8, 8), 4, (3, 3), {}),
    (2, (0,), (8, 8), 4, (1, 1), {}),
    (0, (3,), (8, 8), 4, (3, 3), {}),
]
LAYOUTS = [{}, {"order": "last"}, {"order": "gaps"}, {"offset": 1}]
EPILOGUES = [(), ("bias",), ("bias", "activation"), ("residual",), ("residual", "activation")]


@dataclass(frozen=True)
class Case:
    words: str
    plan: Plan
    limit: int | None


def rows(dtype: np.dtype, *, full: bool) -> list[tuple[Any, ...]]:
    """Combine problems, layouts, epilogues and limits: every pair of them, or all combinations."""
    of_dtype = [epilogue for epilogue in EPILOGUES if dtype.kind != "c" or "activation" not in epilogue]
    # With a prologue, strides and limits need no other kernels.
    with_prologue = product(PROBLEMS, ({}, {"offset": 1}), (("prologue",),), (None,))
    return [*combined(PROBLEMS, LAYOUTS, of_dtype, (None, 40_000), full=full), *with_prologue]


def every_plan(x_dtype: Any, weight_dtype: Any, *, full: bool) -> Iterator[Case]:
    """Yield plans for problems, layouts, epilogues and limits, by every method."""
    dtype = np.result_type(x_dtype, weight_dtype)
    for problem, layout, epilogue, limit in rows(dtype, full=full):
        batch, channels, size, outputs, kernel, parameters = problem
        xs = [array(batch, count, *size, dtype=x_dtype, **layout) for count in channels]
        weight = array(outputs, sum(channels) // parameters.get("groups", 1), *kernel, dtype=weight_dtype)
        arguments: dict[str, Any] = dict(parameters)
        if "bias" in epilogue:
            arguments["bias"] = array(outputs, dtype=dtype)
        if "prologue" in epilogue:
            scale = array(sum(channels), dtype=np.result_type(x_dtype, "float32") if dtype.itemsize == 2 else x_dtype)
            arguments["prologue"] = scale, None, None if dtype.kind == "c" else "relu"
        if "activation" in epilogue:
            arguments["activation"] = "relu"
        if "residual" in epilogue:
            out_size = checked_call(cupyconv.conv, xs, weight, **parameters).problem.geometry
            arguments["residual"] = array(batch, outputs, *out_size.spatial(out_size.out_size), dtype=dtype, **layout)
        for method in METHODS:
            words = f"{problem} {layout} {epilogue} {dtype} {method} limit {limit}"
            try:
                yield Case(words, plan(xs, weight, method=method, limit=limit, **arguments), limit)
            except ValueError as refusal:
                assert "appl" in str(refusal), words


@functools.cache
def kernels_asked_for(x_dtype: Any, weight_dtype: Any, *, full: bool) -> frozenset[Kernel]:
    """Return the kernels of all plans, after checking each plan."""
    asked: set[Kernel] = set()
    for case in every_plan(x_dtype, weight_dtype, full=full):
        try:
            check(case.plan, case.limit)
        except AssertionError as error:
            raise AssertionError(f"{case.words}\n{case.plan}\n{error}") from None
        asked |= {launch.kernel for launch in launches(case.plan)}
    return frozenset(asked)


def kernels_of_columns(dtype: Any, step: int) -> set[Kernel]:
    """Return the kernels of im2col, into columns with pixels `step` apart, and of col2im."""
    images, out = np.empty((2, 3, 8, 8), dtype), np.empty((2, 27, 36 * step), dtype)[..., ::step]
    plans = (
        cupyconv.explain(cupyconv.im2col, images, 3, out=out, on=GPU),
        cupyconv.explain(cupyconv.col2im, out, (8, 8), 3, on=GPU),
    )
    return {launch.kernel for made in plans for launch in launches(made)}


def kernels_of_widening(narrow: Any, wide: Any) -> set[Kernel]:
    """Return the kernels of a chain whose second layer computes in a wider dtype, for even and odd image sizes."""
    asked: set[Kernel] = set()
    for size in (8, 7):
        first = cupyconv.ConvLayer(array(3, 3, 1, 1, dtype=narrow))
        second = cupyconv.ConvLayer(array(4, 3, 3, 3, dtype=wide))
        x = array(1, 3, size, size, dtype=narrow)
        made = cupyconv.explain(cupyconv.conv_chain, x, [first, second], fuse=False, on=GPU)
        check(made)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_pairs(dtype: Any) -> set[Kernel]:
    """Return the kernels of two layers fused into one, each layer dense or depthwise."""
    asked: set[Kernel] = set()
    for groups, on, tf32 in product(product((1, 6), repeat=2), ("sm_75", GPU), (False, True)):
        if dtype == BFLOAT16 and on == "sm_75":
            continue  # no matrix instructions for bfloat16
        layers = [cupyconv.ConvLayer(array(6, 6 // count, 3, dtype=dtype), groups=count) for count in groups]
        with cupyconv.options(allow_tf32=tf32):
            made = cupyconv.explain(cupyconv.conv_chain, array(2, 6, 9, dtype=dtype), layers, fuse=True, on=on)
        check(made, on=on)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_implicit_gemm(dtype: Any) -> set[Kernel]:
    """Return the kernels of small and large problems on every GPU; the best arithmetic and tile differ."""
    asked: set[Kernel] = set()
    sizes = ((1, 16, 8, 16), (64, 256, 56, 64), (64, 256, 56, 256), (32, 256, 14, 256))
    is_complex = np.dtype(dtype).kind == "c"
    for (batch, channels, size, outputs), order, kernel, on, tf32, has_prologue in product(
        sizes, ("C", "last"), (1, 3), KNOWN_GPUS, (False, True), (False, True)
    ):
        scale = array(channels, dtype=dtype) if is_complex else None
        pre = (scale, None, None if is_complex else "relu") if has_prologue else None
        x = array(batch, channels, size, size, dtype=dtype, order=order)
        weight = array(outputs, channels, kernel, kernel, dtype=dtype)
        with cupyconv.options(allow_tf32=tf32):
            try:
                made = cupyconv.explain(cupyconv.conv, x, weight, method="implicit_gemm", prologue=pre, on=on)
            except ValueError as refusal:
                assert on == "sm_75" and f"no matrix instructions for {np.dtype(dtype)}" in str(refusal)
                continue
        check(made, on=on)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_implicit_weight_gradients(dtype: Any) -> set[Kernel]:
    """Return the kernels for few and many outputs on every GPU, and for images copied first, also with a prologue."""
    asked: set[Kernel] = set()
    settings = {"stride": 1, "padding": 1, "padding_mode": "constant", "dilation": 1, "groups": 1}
    settings |= {"method": "implicit_gemm", "kernel_shape": 3}
    for outputs, on, tf32, (order, prologue) in product(
        (64, 256), KNOWN_GPUS, (False, True), (("last", None), ("C", None), ("C", "relu"))
    ):
        grad, x = (array(8, channels, 28, 28, dtype=dtype, order=order) for channels in (outputs, 64))
        arrays = {"grad": grad, "x": x, "scale": None, "shift": None, "out": None}
        with cupyconv.options(allow_tf32=tf32):
            try:
                made = check_conv_grad_weight(arrays, on=on, prologue_activation=prologue, **settings).plan()
            except ValueError as refusal:
                assert "sm_75 has no matrix instructions for bfloat16" in str(refusal)
                continue
        check(made)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_depthwise_weight_gradients(dtype: Any) -> set[Kernel]:
    """Return the kernels of each kernel size and stride, for both layouts."""
    asked: set[Kernel] = set()
    for kernel, stride, order in product((3, 5), (1, 2), ("C", "last")):
        grad, x = (array(8, 64, size, size, dtype=dtype, order=order) for size in (28 // stride, 28))
        how = {"stride": stride, "padding": kernel // 2, "groups": 64, "method": "direct", "on": GPU}
        made = cupyconv.explain(cupyconv.conv_grad_weight, grad, x, kernel, **how)
        check(made)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_depthwise_transposed(dtype: Any) -> set[Kernel]:
    """Return the kernels of each kernel size."""
    asked: set[Kernel] = set()
    for kernel, _ in depthwise_transposed.KERNELS:
        x, weight = array(8, 64, 28, 28, dtype=dtype), array(64, 1, kernel, kernel, dtype=dtype)
        made = cupyconv.explain(cupyconv.conv_transpose, x, weight, stride=2, groups=64, method="direct", on=GPU)
        check(made)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_weight_gradients(x_dtype: Any, grad_dtype: Any) -> set[Kernel]:
    """Return the kernels of conv_grad_weight, for one and for two outputs per group, after checking each plan."""
    asked: set[Kernel] = set()
    dtype = np.result_type(x_dtype, grad_dtype)
    parts = ({}, {"prologue_activation": "relu"} if dtype.kind != "c" else {"shift": array(6, dtype=x_dtype)})
    for method, out_channels, limit, prologue in product(("direct", "gemm", "fft"), (6, 12), (None, 8_000), parts):
        grad, x = array(3, out_channels, 20, 20, dtype=grad_dtype), array(3, 6, 20, 20, dtype=x_dtype)
        arrays = {"grad": grad, "x": x, "scale": None, "shift": prologue.get("shift"), "out": None}
        settings = {"stride": 1, "padding": 2, "padding_mode": "constant", "dilation": 2, "groups": 6}
        settings |= {"method": method, "prologue_activation": prologue.get("prologue_activation")}
        with cupyconv.options(workspace_limit=limit):
            try:
                made = check_conv_grad_weight(arrays, on=GPU, kernel_shape=3, **settings).plan()
                assert made.method == method
            except ValueError as refusal:
                assert (limit and "limit" in str(refusal)) or (
                    prologue and "complex inputs with a prologue" in str(refusal)
                )
                continue
        check(made, limit)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_epilogue_grads(dtype: Any) -> set[Kernel]:
    """Return the kernels that sum channels of images in every layout, aligned and not."""
    images = [array(2, 8, 16, 16, dtype=dtype, **layout) for layout in LAYOUTS]
    settings = {"saved": None, "spatial": 2, "activation": None, "through": False, "sums": True}
    plans = [EPILOGUE_GRADIENT.checked({"grad": grad, **settings}, GPU).plan() for grad in images]
    for made in plans:
        check(made)
    return {launch.kernel for made in plans for launch in launches(made)}


def kernels_of_prologue_grads(dtype: Any) -> set[Kernel]:
    """Return the kernels of a prologue's gradient, aligned and not."""
    images = [array(2, 8, 16, 16, dtype=dtype, **layout) for layout in LAYOUTS]
    scale = array(8, dtype=np.result_type(dtype, "float32") if np.dtype(dtype).itemsize == 2 else dtype)
    settings = {"scale": scale, "shift": None, "sums": None, "spatial": 2, "activation": None, "through": True}
    plans = [PROLOGUE_GRADIENT.checked({"grad": grad, "x": grad, **settings}, GPU).plan() for grad in images]
    for made in plans:
        check(made)
    return {launch.kernel for made in plans for launch in launches(made)}


def pooling_plans(x: np.ndarray, kernel_shape: Any, on: str | None = GPU, **settings: Any) -> dict[str, Plan]:
    """Return the plans of max_pool, with and without indices, of avg_pool, and of their gradients."""
    call = checked_call(cupyconv.max_pool, x, kernel_shape, **settings, on=on)
    (result,) = call.results
    y = array(*result.shape, dtype=result.dtype, order="C" if result.channel is None else "last")
    usual = {"kernel_shape": kernel_shape, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, **settings}
    of_mean = {"grad": y, "out": None, "x_shapes": (x.shape,), "count_include_pad": True}
    calls = {
        "max_pool": call,
        "indices": checked_call(cupyconv.max_pool, x, kernel_shape, return_indices=True, **settings, on=on),
        "avg_pool": checked_call(cupyconv.avg_pool, x, kernel_shape, **settings, on=on),
        "max_pool gradient": MAX_POOL_GRADIENT.checked({"x": x, "y": y, "grad": y, **usual}, on),
        "avg_pool gradient": AVG_POOL_GRADIENT.checked({**of_mean, **usual}, on),
    }
    return {name: call.plan() for name, call in calls.items()}


def kernels_of_recurrent_layers(dtype: Any) -> set[Kernel]:
    """Return the kernels of each recurrent cell, for few and many samples on every GPU, after checking each plan."""
    asked: set[Kernel] = set()
    functions = ((cupyconv.rnn, 1, {}), (cupyconv.lstm, 4, {}), (cupyconv.gru, 3, {}))
    functions += ((cupyconv.gru, 3, {"linear_before_reset": False}),)
    functions += tuple((function, gates, {**changed, "clip": 1.0}) for function, gates, changed in functions)
    problems = ((2, "persistent", 64), (64, "persistent", 64), (2, "step", 64), (512, "step", 1024))
    every = product(functions, problems, KNOWN_GPUS, (False, True))
    for (function, gates, changed), (batch, method, hidden), on, tf32 in every:
        arrays = [
            array(*shape, dtype=dtype) for shape in ((3, batch, 8), (gates * hidden, 8), (gates * hidden, hidden))
        ]
        with cupyconv.options(allow_tf32=tf32):
            made = cupyconv.explain(function, *arrays, method=method, on=on, **changed)
        check(made)
        asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_input_gradients(x_dtype: Any, weight_dtype: Any, *, full: bool) -> set[Kernel]:
    """Return the kernels of input gradients, into one array and into several, after checking each plan."""
    asked: set[Kernel] = set()
    cuts = (("constant", None), ("edge", None), ("constant", 40_000))[: 3 if x_dtype == "float32" else 2]
    for problem, layout, (mode, limit) in combined(PROBLEMS, LAYOUTS, cuts, full=full):
        batch, channels, size, outputs, kernel, parameters = problem
        parameters = {"padding": 1, **parameters, "padding_mode": mode}
        xs = [array(batch, count, *size, dtype=x_dtype) for count in channels]
        weight = array(outputs, sum(channels) // parameters.get("groups", 1), *kernel, dtype=weight_dtype)
        geometry = checked_call(cupyconv.conv, xs, weight, **parameters).problem.geometry
        grad = array(batch, outputs, *geometry.spatial(geometry.out_size), dtype=x_dtype, **layout)
        for method in ("direct", "gemm", "implicit_gemm"):
            call = functools.partial(cupyconv.explain, cupyconv.conv_grad_input, on=GPU, method=method, **parameters)
            with cupyconv.options(workspace_limit=limit):
                try:
                    made = call(grad, weight, [x.shape for x in xs])
                except ValueError as refusal:
                    assert "appl" in str(refusal), problem
                    continue
            check(made, limit)
            asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_exchanged_weights(dtype: Any) -> set[Kernel]:
    """Return the kernels for grouped weights, whose outputs and channels no view can exchange."""
    x, weight = array(2, 8, 19, 19, dtype=dtype), array(8, 3, 9, 9, dtype=dtype)
    made = cupyconv.explain(cupyconv.conv_transpose, x, weight, groups=2, method="fft", on=GPU)
    check(made)
    return {launch.kernel for launch in launches(made)}


def kernels_of_transforms(x_dtype: Any, weight_dtype: Any) -> set[Kernel]:
    """Return the kernels of both orders of spectra, in every layout, in one share and several, after checking plans."""
    asked: set[Kernel] = set()
    for layout, groups, (size, limit) in product(LAYOUTS, (1, 8), ((40, None), (64, 1_000_000))):
        for prologue in ({}, {"prologue": (None, array(16), None)}):
            x = array(3, 16, size, size, dtype=x_dtype, **layout)
            weight = array(32, 16 // groups, 9, 9, dtype=weight_dtype)
            try:
                made = plan(x, weight, groups=groups, padding=3, method="fft", limit=limit, **prologue)
            except ValueError as refusal:
                assert limit and x_dtype != weight_dtype and "limit of 0 bytes" in str(refusal), refusal
                continue
            check(made, limit)
            asked |= {launch.kernel for launch in launches(made)}
    return asked


def kernels_of_recurrent_gradients(dtype: Any) -> set[Kernel]:
    """Return the kernels of every cell, with and without tensor cores, for a single step, and with lengths."""
    lengths = np.zeros(20, np.int64)
    plans = [recurrent_gradient_plan(cell, dtype, on=on) for cell in GATES for on in (None, "sm_75")]
    plans += [recurrent_gradient_plan(cell, dtype, (1, 20, 3, 5)) for cell in GATES]
    plans.append(recurrent_gradient_plan("rnn", dtype, lengths=lengths))
    found: set[Kernel] = set()
    for made in plans:
        for step in made.steps:
            found |= {launch.kernel for launch in (step.launches if isinstance(step, LaunchLoop) else [step])
                      if isinstance(launch, KernelLaunch)}  # fmt: skip
    return found


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(np.dtype(dtype).name for dtype in pair))
def test_every_plan_respects_the_limits_and_asks_for_listed_kernels(dtypes, nightly):
    unlisted = kernels_asked_for(*dtypes, full=nightly) - set(all_variants())
    assert not unlisted, ", ".join(map(str, unlisted))


def test_every_listed_kernel_is_asked_for(nightly):
    """The list has no kernel that no plan uses."""
    asked = {kernel for dtypes in DTYPES for kernel in kernels_asked_for(*dtypes, full=nightly)}
    for (dtype, _), step in product(DTYPES, (1, 2)):
        asked |= kernels_of_columns(dtype, step) | kernels_of_epilogue_grads(dtype)
        asked |= kernels_of_prologue_grads(dtype)
    for dtype in ("float16", BFLOAT16, "float32", "float64", "complex64"):
        asked |= kernels_of_implicit_gemm(dtype)
    for dtype in ("float16", BFLOAT16, "float32", "float64"):
        asked |= kernels_of_pairs(dtype)
        asked |= kernels_of_recurrent_layers(dtype) | kernels_of_recurrent_gradients(dtype)
    for dtype in (dtype for dtype, _ in DTYPES if np.dtype(dtype).kind != "c"):
        asked |= {
            launch.kernel
            for made in pooling_plans(array(2, 3, 8, 8, dtype=dtype), 2).values()
            for launch in launches(made)
        }
    for dtype in ("float16", BFLOAT16, "float32", "float64"):
        asked |= kernels_of_implicit_weight_gradients(dtype)
    for dtype in ("float16", BFLOAT16, "float32", "float64"):
        asked |= kernels_of_depthwise_weight_gradients(dtype) | kernels_of_depthwise_transposed(dtype)
    for narrow, wide in product(("float16", BFLOAT16, "float32"), ("float32", "float64")):
        asked |= kernels_of_widening(narrow, wide)
    for dtype in ("complex64", "complex128"):
        asked |= kernels_of_exchanged_weights(dtype)
    for dtypes in DTYPES:
        asked |= kernels_of_transforms(*dtypes)
        asked |= kernels_of_input_gradients(*dtypes, full=nightly) | kernels_of_weight_gradients(*dtypes)
    assert sorted(map(str, set(all_variants()) - asked)) == []
    assert sorted(map(str, asked - set(all_variants()))) == []


# One batched GEMM.


def test_one_call_for_all_samples_with_a_shared_weight():
    """One GEMM call, as drawn in cuda/plan/gemm.py: weight [16, 27] x columns [27, 1024] for 64 samples."""
    made = plan(array(64, 3, 32, 32), array(16, 3, 3, 3), padding=1, method="gemm")
    (call,) = gemms(made)
    assert (call.m, call.n, call.k, call.batch) == (16, 1024, 27, 64)
    assert call.a == Matrix(Address("weight"), ld=27, stride=0)
    assert call.b == Matrix(Address("columns"), ld=1024, stride=27 * 1024)
    assert call.c == Matrix(Address("out"), ld=1024, stride=16 * 1024)
    assert call.beta == 0 and call.flops == made.flops == 2 * 64 * 16 * 1024 * 27
    assert len(made.steps) == 2 and len(columns_launches(made)) == 1


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_launches_do_not_depend_on_the_batch(groups, order, kernel):
    counts = {
        batch: [type(step).__name__ for step in made.steps]
        for batch in (1, 2, 3, 7, 50, 64, 199, 200)
        if (
            made := plan(
                array(batch, 8, 12, 12, order=order), array(16, 8 // groups, kernel, kernel), array(16),
                groups=groups, activation="relu", method="gemm",
            )
        )
    }  # fmt: skip
    # A single sample is one long matrix, so all groups fit into one call.
    assert len(counts[1]) <= len(counts[2])
    assert all(steps == counts[2] for batch, steps in counts.items() if batch > 1), counts


def test_grouped_in_c_order_is_one_call_a_group_over_all_samples():
    made = plan(array(16, 8, 10, 10), array(12, 2, 3, 3), groups=4, method="gemm")
    calls = gemms(made)
    assert [(call.m, call.n, call.k, call.batch) for call in calls] == [(3, 64, 18, 16)] * 4
    assert [call.a.at for call in calls] == [Address("weight", 3 * 18 * 4 * g) for g in range(4)]
    assert [call.c.at for call in calls] == [Address("out", 3 * 64 * 4 * g) for g in range(4)]
    assert all(call.a.stride == 0 and call.c.stride == 12 * 64 for call in calls)


@pytest.mark.parametrize("kernel", [1, 3])
def test_grouped_channels_last_is_one_call_over_the_groups(kernel):
    made = plan(array(16, 8, 10, 10, order="last"), array(12, 2, kernel, kernel), groups=4, method="gemm")
    (call,) = gemms(made)
    pixels = (11 - kernel) ** 2
    assert (call.m, call.n, call.k, call.batch) == (16 * pixels, 3, 2 * kernel**2, 4)
    assert call.c == Matrix(Address("out"), ld=12, stride=3)


def test_pointwise_reads_the_input_where_it_lies():
    made = plan(array(8, 64, 20, 20), array(32, 64, 1, 1), method="gemm")
    (call,) = made.steps
    assert isinstance(call, GemmCall) and call.b.at == Address("x") and call.batch == 8
    assert made.workspace_bytes == 0
    last = plan(array(8, 64, 20, 20, order="last"), array(32, 64, 1, 1), method="gemm")
    (call,) = last.steps
    assert isinstance(call, GemmCall) and call.a.at == Address("x")


@pytest.mark.parametrize("parameters", [{"stride": 2}, {"padding": 1}])
def test_pointwise_with_stride_or_padding_has_columns(parameters):
    made = plan(array(8, 64, 20, 20), array(32, 64, 1, 1), method="gemm", **parameters)
    assert len(columns_launches(made)) == 1 and len(gemms(made)) == 1


def test_pointwise_products_of_a_transposed_convolution_are_its_result():
    """Without groups and strides, products are the result; otherwise they are columns that every element gathers."""
    x = array(4, 64, 32, 32)
    made = cupyconv.explain(cupyconv.conv_transpose, x, array(64, 32, 1, 1), method="gemm", on=GPU)
    assert not made.workspace and {call.c.at.buffer for call in gemms(made)} == {"out"} and len(made.steps) == 1
    for groups, stride in ((2, 1), (1, 2)):
        settings: Any = dict(groups=groups, stride=stride, method="gemm", on=GPU)
        made = cupyconv.explain(cupyconv.conv_transpose, x, array(64, 32, 1, 1), **settings)
        assert {call.c.at.buffer for call in gemms(made)} == {"columns"} and launches(made, "col2im")


def test_a_merge_of_many_channels_is_one_accumulating_call_an_input():
    xs = [array(4, channels, 64, 64) for channels in (256, 128, 512)]
    made = plan(xs, array(512, 896, 1, 1), method="gemm")
    assert len(made.steps) == 3 and made.workspace_bytes == 0
    calls = gemms(made)
    assert [call.b.at.buffer for call in calls] == ["x[0]", "x[1]", "x[2]"]
    assert [call.k for call in calls] == [256, 128, 512]
    assert [call.a.at.offset for call in calls] == [0, 256 * 4, 384 * 4]
    assert [call.beta for call in calls] == [0, 1, 1]
    assert all(call.a.ld == 896 and call.a.stride == 0 and call.batch == 4 for call in calls)


def test_a_merge_of_few_channels_is_the_fused_kernel():
    made = plan([array(4, 4, 1_000_000)] * 5, array(4, 20, 1), array(4), activation="relu")
    assert made.method == "direct" and made.bound == "memory" and made.workspace_bytes == 0
    (launch,) = launches(made)
    assert str(launch.kernel) == "merge<float32, 4, 4, 7>"
    assert launch.shared_bytes == 4 * (20 + 1) * 4, "weights and biases"
    steps = -(-4 * 10**6 // 4 // 128 // (7 * 132))
    assert launch.grid[0] == -(-4 * 10**6 // 4 // 128 // steps) <= 7 * 132, "a GPU's room, shared evenly"
    prologue = (array(20), array(20), "relu")
    (launch,) = launches(plan([array(4, 4, 1_000_000)] * 5, array(4, 20, 1), prologue=prologue, method="direct"))
    tile = int(dict(launch.kernel.macros)["TILE"])
    assert launch.shared_bytes == tile * (20 + 1) * 4 + 2 * 20 * 4, "and a scale and a shift for each channel"


@pytest.mark.parametrize(
    ("dtype", "tiles"), [("float16", (8, 16, 32)), ("float32", (4, 8, 16)), ("float64", (4, 8, 16))]
)
def test_a_merge_reads_its_inputs_as_seldom_as_there_are_tiles_for(dtype, tiles):
    """A merge reads its inputs once per tile of outputs; of the tiles with the fewest reads, the smallest is chosen."""
    for outputs in range(1, 70):
        made = plan([array(4, 8, 4096, dtype=dtype)] * 2, array(outputs, 16, 1, dtype=dtype), method="direct")
        (launch,) = launches(made, "merge")
        times = {tile: -(-outputs // tile) for tile in tiles}
        tile = int(dict(launch.kernel.macros)["TILE"])
        assert times[tile] == min(times.values()) and all(times[less] > times[tile] for less in tiles if less < tile)
        assert launch.grid[0] % times[tile] == 0


def test_columns_of_many_inputs_are_one_matrix():
    """A list of inputs costs one launch per table of inputs, and no additional GEMM."""
    for count in (1, 2, 5, 40, MAX_SOURCES, MAX_SOURCES + 1, 150):
        made = plan([array(2, 2, 12, 12)] * count, array(8, 2 * count, 3, 3), method="gemm")
        assert len(gemms(made)) == 1
        assert len(columns_launches(made)) == -(-count // MAX_SOURCES)
        begins = [dict(launch.params)["columns"].offset for launch in columns_launches(made)]
        of_table = MAX_SOURCES * 2 * 9 * dict(columns_launches(made)[0].params)["stride_row"] * 4
        assert begins == [of_table * i for i in range(len(begins))]


# Sums of 16-bit types.


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
class TestSixteenBits:
    def test_a_bias_alone_is_written_first_and_added_to(self, dtype):
        made = plan(array(4, 64, 32, 32, dtype=dtype), array(64, 64, 3, 3, dtype=dtype), array(64, dtype=dtype),
                    method="gemm")  # fmt: skip
        (call,) = gemms(made)
        assert call.c.at.buffer == "out" and call.c_dtype == np.dtype(dtype).name and call.beta == 1
        (first,) = launches(made, "epilogue")
        assert made.steps.index(first) < made.steps.index(call) and dict(first.params)["sums"] is None

    @pytest.mark.parametrize("extra", ["activation", "residual", "accumulation"])
    def test_more_than_one_rounding_is_avoided_by_float32_sums(self, dtype, extra):
        xs = [array(4, 64, 32, 32, dtype=dtype)] * (2 if extra == "accumulation" else 1)
        arguments: dict[str, Any] = {}
        if extra == "activation":
            arguments["activation"] = "tanh"
        if extra == "residual":
            arguments |= {"residual": array(4, 64, 32, 32, dtype=dtype), "bias": array(64, dtype=dtype)}
        made = plan(xs, array(64, 64 * len(xs), 1, 1, dtype=dtype), method="gemm", **arguments)
        calls = gemms(made)
        assert len(calls) == len(xs)
        assert all(call.c.at.buffer == "sums" and call.c_dtype == "float32" for call in calls)
        assert isinstance(made.steps[-1], KernelLaunch) and made.steps[-1].kernel.name == "epilogue"

    def test_a_residual_alone_is_written_first_and_added_to(self, dtype):
        given = array(4, 64, 32, 32, dtype=dtype), array(64, 64, 3, 3, dtype=dtype)
        made = plan(*given, method="gemm", padding=1, residual=array(4, 64, 32, 32, dtype=dtype))
        (call,), (first,) = gemms(made), launches(made, "epilogue")
        assert call.c.at.buffer == "out" and call.c_dtype == np.dtype(dtype).name and call.beta == 1
        assert made.steps.index(first) < made.steps.index(call) and dict(first.params)["sums"] is None

    @pytest.mark.parametrize("activation", ["relu", "relu6", ("clip", -1, 1)], ids=str)
    def test_bounds_are_applied_to_the_rounded_product(self, dtype, activation):
        given = array(4, 64, 32, 32, dtype=dtype), array(64, 64, 1, 1, dtype=dtype)
        made = plan(*given, method="gemm", activation=activation)
        (call,), (last,) = gemms(made), launches(made, "epilogue")
        assert call.c.at.buffer == "out" and call.beta == 0 and made.workspace_bytes == 0
        assert made.steps[-1] is last and dict(last.params)["sums"].buffer == "out"

    def test_one_product_goes_straight_into_the_result(self, dtype):
        made = plan(array(4, 64, 32, 32, dtype=dtype), array(64, 64, 3, 3, dtype=dtype), method="gemm")
        (call,) = gemms(made)
        assert call.c_dtype == np.dtype(dtype).name and call.compute == "float32" and call.beta == 0


def test_wider_types_accumulate_in_the_result():
    made = plan([array(4, 64, 32, 32)] * 2, array(64, 128, 1, 1), array(64), method="gemm", activation="relu")
    assert all(call.c.at.buffer == "out" for call in gemms(made)) and made.workspace_bytes == 0


def test_tf32_only_where_it_is_allowed():
    arguments = array(4, 64, 32, 32), array(64, 64, 1, 1)
    assert gemms(plan(*arguments, method="gemm"))[0].compute == "float32"
    with cupyconv.options(allow_tf32=True):
        made = cupyconv.explain(cupyconv.conv, *arguments, method="gemm", on=GPU)
    assert gemms(made)[0].compute == "tf32"


@pytest.mark.parametrize(("on", "has_tf32"), [("sm_75", False), ("sm_80", True), ("sm_86", True), ("sm_90", True)])
def test_tensor_cores_are_asked_for_on_every_gpu_that_has_them(on, has_tf32):
    with cupyconv.options(allow_tf32=True):
        made = cupyconv.explain(cupyconv.conv, array(4, 64, 32, 32), array(64, 64, 3, 3), method="implicit_gemm", on=on)
    assert ("tensor cores, TF32" in made.reason) == has_tf32


@pytest.mark.parametrize(
    ("dtype", "tf32"), [("float16", False), ("float32", False), ("float32", True), ("float64", False)]
)
def test_large_products_are_cut_into_large_tiles(dtype, tf32):
    """Tiles are large because each operand is read once per row or column of tiles."""
    x, weight = array(64, 256, 56, 56, dtype=dtype, order="last"), array(256, 256, 3, 3, dtype=dtype)
    with cupyconv.options(allow_tf32=tf32):
        made = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="implicit_gemm", on=GPU)
    (launch,) = launches(made, "implicit_gemm")
    macros = dict(launch.kernel.macros)
    assert int(macros["TILE_M"]) * int(macros["TILE_N"]) > 64 * 64


# Workspace.


@dataclass(frozen=True)
class Columns:
    """The part of the image whose columns one launch writes."""

    first_sample: int
    samples: int
    first_pixel: int
    pixels: int


def chunks(plan: Plan) -> list[Columns]:
    """Return what each launch for the first input does; a sample's address gives its number."""
    found = []
    for launch in columns_launches(plan):
        params = dict(launch.params)
        (address, stride_n, *_), first, _ = params["sources"][0][0]
        if first == 0 and address.buffer in ("x", "x[0]"):
            itemsize = int(dict(launch.kernel.macros)["DTYPE"].removeprefix("bits")) // 8
            sample = address.offset // (stride_n * itemsize) if stride_n else 0
            found.append(Columns(sample, params["batch"], params["first_pixel"], params["pixels"]))
    return found


def assert_covers(parts: list[Columns], batch: int, pixels: int) -> None:
    """Assert that the parts cover every pixel of every sample once."""
    assert sum(part.samples * part.pixels for part in parts) == batch * pixels
    seen = {(n, part.first_pixel) for part in parts for n in range(part.first_sample, part.first_sample + part.samples)}
    assert len(seen) == sum(part.samples for part in parts)
    for part in parts:
        assert part.first_pixel + part.pixels <= pixels and part.first_sample + part.samples <= batch
        following = part.first_pixel + part.pixels
        assert following == pixels or (part.first_sample, following) in seen


def test_chunks_are_of_samples_first():
    # Columns of one sample: 27 x 1024 floats, 108 KiB.
    for limit, samples in ((256 << 20, 64), (4 << 20, 32), (1 << 20, 8), (250_000, 2), (120_000, 1)):
        made = plan(array(64, 3, 32, 32), array(16, 3, 3, 3), padding=1, method="gemm", limit=limit)
        parts = chunks(made)
        assert_covers(parts, 64, 1024)
        assert {part.pixels for part in parts} == {1024}
        assert max(part.samples for part in parts) == samples, limit
        assert len(gemms(made)) == len(parts) and {call.a.stride for call in gemms(made)} == {0}


def test_then_of_pixels():
    made = plan(array(3, 16, 100, 100), array(8, 16, 3, 3), padding=1, method="gemm", limit=1 << 20)
    parts = chunks(made)
    assert_covers(parts, 3, 10_000)
    assert {part.samples for part in parts} == {1}
    assert len({part.first_pixel for part in parts}) == -(-10_000 * 16 * 9 * 4 // (1 << 20))
    assert f", {len(parts)} chunks of " in made.reason
    assert {call.c.at.offset // (8 * 10_000 * 4) for call in gemms(made)} == {0, 1, 2}


@share_of_examples(0.5)
@given(
    batch=st.integers(1, 100), channels=st.integers(1, 8), outputs=st.integers(1, 9), size=st.integers(3, 150),
    limit=st.integers(350_000, 4_000_000), order=st.sampled_from(["C", "last"]),
)  # fmt: skip
def test_chunks_are_balanced_and_cover_everything_once(batch, channels, outputs, size, limit, order):
    made = plan(array(batch, channels, size, size, order=order), array(outputs, channels, 3, 3), padding=1,
                method="gemm", limit=limit)  # fmt: skip
    parts = chunks(made)
    assert_covers(parts, batch, size * size)
    check(made, limit)
    for total, sizes in ((batch, [part.samples for part in parts]), (size * size, [part.pixels for part in parts])):
        count = -(-total // max(sizes))
        assert max(sizes) <= -(-total // count) + 7, f"chunks of {sizes} where {count} equal ones would do"


@given(
    batch=st.integers(0, 40), channels=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    outputs=st.integers(0, 40), size=st.lists(st.integers(1, 60), min_size=1, max_size=2), taps=st.integers(1, 3),
    dtype=st.sampled_from(["float16", "float32", "complex128"]),
    weight_dtype=st.sampled_from(["float16", "float32", "complex64"]),
    order=st.sampled_from(["C", "last", "gaps"]), biased=st.booleans(), limit=st.integers(0, 1 << 21),
    method=st.sampled_from(METHODS), on=st.sampled_from(sorted(KNOWN_GPUS)),
)  # fmt: skip
def test_workspace_never_passes_the_limit(
    batch, channels, outputs, size, taps, dtype, weight_dtype, order, biased, limit, method, on
):
    xs = [array(batch, count, *size, dtype=dtype, order=order) for count in channels]
    weight = array(outputs, sum(channels), *(taps,) * len(size), dtype=weight_dtype)
    bias = array(outputs, dtype=dtype if dtype != "complex128" else "float32") if biased else None
    try:
        made = plan(xs, weight, bias, padding=taps // 2, method=method, limit=limit, on=on)
    except ValueError as refusal:
        has_none = method == "implicit_gemm" and "no kernel for products of" in str(refusal)
        assert has_none or ("the limit is" in str(refusal) and method != "direct")
        return
    check(made, limit)
    assert made.workspace_bytes <= limit or made.conversions


def test_conversions_count_against_the_limit():
    """Arguments that are widened to the result's dtype count as workspace; columns get the rest of the limit."""
    limit = 2 << 20  # x in float64 uses 1.5 MiB of it
    made = plan(array(64, 3, 32, 32), array(16, 3, 3, 3, dtype="float64"), method="gemm", limit=limit)
    assert [c.nbytes for c in made.conversions] == [64 * 3 * 32 * 32 * 8]
    assert made.workspace_bytes <= limit


def test_a_limit_too_small_for_columns():
    arguments = array(64, 3, 32, 32), array(16, 3, 3, 3)
    made = plan(*arguments, limit=1000)
    assert made.method == "direct" and made.workspace_bytes == 0
    refused = dict(made.rejected)["gemm"]
    assert "the limit is 1,000" in refused
    with pytest.raises(ValueError, match=r"'gemm' does not apply: .*needs [\d,]+ bytes of workspace, .* 1,000"):
        plan(*arguments, limit=1000, method="gemm")
    # The workspace that the refusal names is enough.
    needed = int(refused.split(" needs ")[1].split()[0].replace(",", ""))
    assert plan(*arguments, limit=needed, method="gemm").workspace_bytes <= needed
    assert min(MIN_CHUNK, 30 * 30) * 27 * 4 <= needed


def test_a_named_method_is_refused_with_its_reason():
    xs = [array(2, 1, 8, 8)] * (MAX_SOURCES + 1)
    weight = array(4, MAX_SOURCES + 1, 3, 3)
    with pytest.raises(
        ValueError, match=f"'direct' does not apply: {MAX_SOURCES + 1} inputs; .* {MAX_SOURCES} for other"
    ):
        plan(xs, weight, method="direct")
    assert plan(xs, weight).method == "gemm"
    with pytest.raises(ValueError, match=f"no method applies: direct: {MAX_SOURCES + 1} inputs.*; gemm: .*limit.*; im"):
        plan(xs, weight, limit=10)
    with pytest.raises(ValueError, match=f"'implicit_gemm' does not apply: {MAX_SOURCES + 1} inputs"):
        plan(xs, weight, method="implicit_gemm")
    for method in ("wavelet", "fast"):
        with pytest.raises(
            ValueError, match=f"unknown method '{method}'; known are auto, direct, gemm, implicit_gemm, winograd, fft$"
        ):
            plan(xs, weight, method=method)


# Pooling.


@pytest.mark.parametrize("order", ["C", "last", "gaps"])
@pytest.mark.parametrize(
    "shape", [(2, 64, 56, 56), (1, 1, 1, 1), (70_000, 3, 4, 4), (1, 300_000, 9), (1, 5, 50_000, 60_000)], ids=str
)
def test_pooling_is_one_launch_within_the_limits(shape, order):
    for made in pooling_plans(array(*shape, order=order), (1, 1)[: len(shape) - 2], padding=1).values():
        check(made)
        (launch,) = launches(made)
        params = dict(launch.params)
        assert params["lanes"] == (min(32, -(-shape[1] // 4)) if order == "last" and shape[2] > 1 else 1)
        assert made.workspace_bytes == 0 and made.bound == "memory"


@share_of_examples(0.5)
@given(
    shape=st.lists(st.integers(1, 300), min_size=3, max_size=5), taps=st.integers(1, 4), stride=st.integers(1, 4),
    order=st.sampled_from(["C", "last", "gaps"]), dtype=st.sampled_from(["float16", "float32", "float64"]),
    limit=st.integers(100, 1 << 22), threads=st.integers(1, 3),
)  # fmt: skip
def test_pooling_on_numpy_keeps_within_the_workspace(shape, taps, stride, order, dtype, limit, threads):
    x = array(*shape, dtype=dtype, order=order)
    try:
        with cupyconv.options(workspace_limit=limit, threads=threads):
            plans = pooling_plans(x, taps, on=None, stride=stride, padding=taps - 1)
    except ValueError as refusal:
        assert "workspace" in str(refusal) and limit < threads * 5**3 * 60
        return
    for name, made in plans.items():
        (loop,) = made.steps
        assert isinstance(loop, PoolingStep) and 1 <= loop.threads <= threads
        assert sum(buffer.nbytes for buffer in made.workspace) <= limit
        windows = loop.problem.windows
        extents = (*shape[:2], *(windows.size if "gradient" in name else windows.out_size))
        assert loop.blocks == prod(-(-extent // part) for extent, part in zip(extents, loop.block))


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 16), st.integers(3, 60), st.integers(3, 60)),
    outputs=st.integers(1, 16), groups=st.integers(1, 4), taps=st.integers(1, 3), dtype=st.sampled_from(["float16", "float32"]),
    method=st.sampled_from(["auto", "direct", "gemm"]), limit=st.integers(1_000, 1 << 18), threads=st.integers(1, 3),
)  # fmt: skip
def test_convolution_on_numpy_keeps_within_the_workspace(shape, outputs, groups, taps, dtype, method, limit, threads):
    """Plans fit the limit or are refused; only a weight's copy of more than half the limit is added to it."""
    batch, channels, *size = shape
    x = array(batch, groups * channels, *size, dtype=dtype)
    weight = array(groups * outputs, channels, taps, taps, dtype=dtype)
    copy = weight.size * 4  # in the dtype of sums
    with cupyconv.options(workspace_limit=limit, threads=threads):
        try:
            made = cupyconv.explain(cupyconv.conv, x, weight, padding=taps // 2, groups=groups, method=method)
        except ValueError as refusal:
            assert "workspace" in str(refusal)
            return
    assert made.workspace_bytes <= limit + (copy if 2 * copy > limit else 0)


def test_pooling_prints_too():
    on_gpu = {name: str(made) for name, made in pooling_plans(array(2, 8, 16, 16, order="last"), 2).items()}
    assert "pool<float32, 4, LARGEST>" in on_gpu["max_pool"] and "threads along channels" in on_gpu["max_pool"]
    assert "pool<float32, 4, LARGEST_AND_PLACE>" in on_gpu["indices"] and "int64 (2, 8, 8, 8)" in on_gpu["indices"]
    assert "pool<float32, 4, MEAN>" in on_gpu["avg_pool"] and "mean of each window" in on_gpu["avg_pool"]
    assert "pool_gradient<float32, 4, LARGEST>" in on_gpu["max_pool gradient"]
    assert "pool_gradient<float32, 4, MEAN>" in on_gpu["avg_pool gradient"]
    on_numpy = cupyconv.explain(cupyconv.max_pool, [array(2, 8, 16, 16), array(2, 1, 16, 16)], 3, padding="same")
    assert "max_pool 9 (8+1) channels, kernel 3x3 on 2 samples of 16x16" in str(on_numpy)
    assert str(on_numpy).count("loop     max_pool in float32") == 2


# Sizes beyond 32 bits.


@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_more_pixels_than_an_int32_counts(order, kernel, method):
    arguments = array(2, 3, 50_000, 60_000, order=order), array(4, 3, kernel, kernel)
    if method == "implicit_gemm" and order == "C":
        with pytest.raises(ValueError, match=r"'implicit_gemm' does not apply: .* strides within an image.* int32"):
            plan(*arguments, padding=kernel // 2, method=method)
        return
    made = plan(*arguments, padding=kernel // 2, method=method)
    check(made)
    assert sum(call.batch * call.m * call.n for call in gemms(made)) in (0, 2 * 4 * 50_000 * 60_000)
    assert made.flops == 2 * 2 * 4 * 3 * kernel**2 * 50_000 * 60_000


@pytest.mark.parametrize("shape", [(100_000, 3, 2, 2), (1_000_000, 2, 3, 3), (70_000, 8, 1, 1), (100, 2, 8192, 8192)])
@pytest.mark.parametrize("order", ["C", "last"])
@pytest.mark.parametrize("method", METHODS)
def test_more_samples_than_a_batch_holds(shape, order, method):
    for parameters in ({"padding": 0}, {"padding": 1}):
        made = plan(array(*shape, order=order), array(4, shape[1], 1, 1), method=method, **parameters)
        check(made)
    if method == "gemm" and order == "C" and shape[2] > 1:
        assert (
            sum(call.batch for call in gemms(plan(array(*shape), array(4, shape[1], 1, 1), method=method))) == shape[0]
        )


def test_more_channels_and_groups_than_a_grid_holds():
    check(plan(array(1, 70_000, 3, 3), array(70_000, 1, 3, 3), groups=70_000))
    check(plan(array(1, 70_000, 3, 3), array(70_000, 1, 3, 3), groups=70_000, method="gemm"))
    check(plan(array(2, 4, 64), array(300_000, 4, 1)))


@pytest.mark.parametrize("groups", [2, 3, MAX_BATCH, MAX_BATCH + 1, 2 * MAX_BATCH + 5])
def test_one_sample_of_a_transposed_convolution_is_batched_over_all_groups(groups):
    """Every group is in exactly one call, and the columns of the calls are stored one after another."""
    x, weight = array(1, groups, 3, 3), array(groups, 2, 2, 2)
    with cupyconv.options(workspace_limit=1 << 30):
        made = cupyconv.explain(cupyconv.conv_transpose, x, weight, groups=groups, stride=2, method="gemm", on=GPU)
    check(made, limit=1 << 30)
    first = 0
    for call in gemms(made):
        assert call.c.at.offset == first * call.c.stride * ITEMSIZE[call.c_dtype]
        assert call.c.stride == call.m * call.c.ld and call.batch <= MAX_BATCH
        first += call.batch
    assert first == groups


@pytest.mark.parametrize("groups", [2, MAX_BATCH, MAX_BATCH + 1, 2 * MAX_BATCH + 5])
def test_one_part_of_a_weight_gradient_is_batched_over_all_groups(groups):
    x = array(1, groups, 3, 3)
    made = cupyconv.explain(cupyconv.conv_grad_weight, x, x, 1, groups=groups, method="gemm", on=GPU)
    check(made)
    assert sum(call.batch for call in gemms(made)) == groups and made.workspace_bytes == 0


@pytest.mark.parametrize("x_dtype", ["float32", "complex64"])
@pytest.mark.parametrize("weight_dtype", ["float32", "complex64"])
def test_products_are_real_where_a_factor_is(x_dtype, weight_dtype):
    """If one factor is real, a complex one is multiplied as real numbers; the real one does not become complex."""
    made = plan(array(2, 4, 8, 8, dtype=x_dtype), array(4, 4, 3, 3, dtype=weight_dtype), method="gemm")
    is_one_real = "float32" in (x_dtype, weight_dtype)
    assert {call.dtype for call in gemms(made)} == {"float32" if is_one_real else "complex64"}
    multiply_adds = sum(call.m * call.n * call.k * call.batch for call in gemms(made))
    assert multiply_adds == 2 * 36 * 4 * 36 * (2 if x_dtype != weight_dtype else 1)


def test_dimensions_beyond_cublas_leave_the_direct_kernel():
    x, weight = array(1, 2**27, 4, 4), array(1, 2**27, 4, 4)
    with pytest.raises(ValueError, match="32-bit"):
        plan(x, weight, method="gemm")
    assert plan(x, weight).method == "direct"


# The page people read.


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="on='sm_999' is not a known .*" + ".*".join(KNOWN_GPUS)):
        plan(array(1, 1, 4), array(1, 1, 1), on="sm_999")


@pytest.mark.parametrize("on", KNOWN_GPUS)
def test_every_known_gpu_can_be_planned_for(on):
    made = plan([array(4, 4, 100_000)] * 3, array(4, 12, 1), on=on)
    assert on in made.device and made.method == "direct"
    check(made)


def test_a_function_without_a_plan_is_refused():
    with pytest.raises(TypeError, match=r"conv, linmerge, .*im2col, col2im"):
        cupyconv.explain(np.add, 1, 2)


# --- rules of the problem -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "implicit_gemm"])
@pytest.mark.parametrize("function", [cupyconv.conv, cupyconv.conv_transpose, cupyconv.conv_grad_weight])
def test_as_many_inputs_as_parameters_hold_are_taken_and_no_more(function, method):
    for count in (MAX_SOURCES, MAX_SOURCES + 1):
        xs, y = [array(2, 8, 9, 9, dtype="float16")] * count, array(2, 8, 9, 9, dtype="float16")
        channels = (8 * count, 8) if function is cupyconv.conv_transpose else (8, 8 * count)
        arguments: Any = xs, array(*channels, 3, 3, dtype="float16")
        if function is cupyconv.conv_grad_weight:
            arguments = y, xs, 3
        if count > MAX_SOURCES:
            with pytest.raises(ValueError, match=f"{count} inputs; .*at most .*{MAX_SOURCES}"):
                cupyconv.explain(function, *arguments, padding=1, method=method, on=GPU)
        else:
            made = cupyconv.explain(function, *arguments, padding=1, method=method, on=GPU)
            assert max(len(dict(launch.params).get("sources", [()])[0]) for launch in launches(made)) == count


def test_as_many_phases_as_allowed_are_taken_and_no_more():
    x = np.ones((1, 2, 40, 40), np.float32)

    def plan(*stride):
        weight = np.ones((2, 2, *(step + 1 for step in stride)), np.float32)
        return cupyconv.explain(cupyconv.conv_transpose, x, weight, stride=stride, method="implicit_gemm", on="sm_90")

    assert plan(8, 8).method == "implicit_gemm"
    with pytest.raises(ValueError, match="72 phases, at most 64 are supported"):
        plan(8, 9)


# Decisions that depend on layouts, compared with an enumeration of elements.


@given(st.randoms(use_true_random=False))
def test_vectors_are_as_wide_as_every_row_is_aligned_for(random):
    """Vectors are as wide as the start addresses of all rows of two images allow."""
    dtype = random.choice(("float16", "float32", "float64"))
    item = ITEMSIZE[dtype]
    pixels = random.choice((3, 4, 8, 16))
    images = []
    for _ in range(2):
        row = pixels + random.choice((0, 0, 1, 4, 8))
        shape = (2, 3, 1, 1, pixels)
        step = random.choice((1, 1, 1, 2))
        strides = tuple(each * item for each in (3 * row * step, row * step, row * step, row * step, step))
        images.append(operand("x", dtype, shape, strides, 64 + random.choice((0, 0, 16, 8, item))))
    rows = [
        image.alignment % 16 == 0 and (n * image.stride_n + c * image.stride_c) * item % 16 == 0
        for image in images
        for n in (0, 1)
        for c in (0, 1, 2)
    ]
    unit = all(image.pixel_stride == 1 for image in images)
    expected = 16 // item if unit and all(rows) and pixels * item % 16 == 0 else 1
    assert vector_width(images, pixels) == expected


def addressable(rows: int, columns: int, place: Callable[[int, int], int | None]) -> bool:
    """Return whether some leading dimension, by rows or by columns, gives cuBLAS the address of every element."""
    elements = list(product(range(rows), range(columns)))
    return any(
        all(place(r, c) == r * ld + c for r, c in elements)
        if by_rows
        else all(place(r, c) == c * ld + r for r, c in elements)
        for by_rows in (True, False)
        for ld in range(columns if by_rows else rows, 40)
    )


def is_matrix(view: MatrixView, rows: int, columns: int) -> bool:
    """Return whether cuBLAS accepts the leading dimension: no row or column starts within another."""
    return view.ld >= (rows if view.transposed else columns)


def test_a_matrix_is_where_its_strides_say_wherever_cublas_can_read_it():
    for rows, columns, row_stride, column_stride in product((1, 2, 3), (1, 2, 3), range(-1, 5), (None, *range(-1, 5))):

        def place(r: int, c: int) -> int | None:
            return None if column_stride is None else r * row_stride + c * column_stride  # noqa: B023

        view = matrix_view(Address("x"), 4, rows, row_stride, columns, column_stride, 100)
        assert (view is not None) == (column_stride is not None and addressable(rows, columns, place))
        if view is not None:
            assert is_matrix(view, rows, columns)
            every = product(range(rows), range(columns), range(2))
            assert all(view.start(r, c, n).offset == 4 * (100 * n + (place(r, c) or 0)) for r, c, n in every)


def test_an_image_is_a_matrix_of_its_channels_wherever_cublas_can_read_it():
    for channels, pixels, step_n, step_c, step_p in product((1, 2, 3), (1, 2, 3), (0, 3, 9), range(-1, 4), range(4)):
        strides = tuple(4 * step for step in (step_n, step_c, 0, 0, step_p))
        image = operand("x", "float32", (2, channels, 1, 1, pixels), strides, 64)
        view = image_matrix(image)
        assert (view is not None) == addressable(channels, pixels, lambda c, p: c * step_c + p * step_p)  # noqa: B023
        if view is not None:
            assert is_matrix(view, channels, pixels)
            every = product(range(channels), range(pixels), range(2))
            places = {(c, p, n): n * step_n + c * step_c + p * step_p for c, p, n in every}
            assert all(view.start(*one).offset == 4 * place for one, place in places.items())
            # All samples as one matrix with more columns.
            joined = view.joined(channels, pixels, 2)
            if joined is not None:
                assert is_matrix(joined, channels, 2 * pixels)
                assert all(joined.start(c, n * pixels + p).offset == 4 * at for (c, p, n), at in places.items())
            long = addressable(channels, 2 * pixels, lambda c, p: places[c, p % pixels, p // pixels])  # noqa: B023
            assert (joined is not None) == long


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 9))
def test_rows_of_a_group_are_each_in_one_place(counts, reduction):
    """Segments of each group of rows are these rows' places in consecutive images, and none is empty."""
    images = [operand(f"x[{i}]", "float32", (1, n, 1, 1, 4), (16 * n, 16, 16, 16, 4), 64) for i, n in enumerate(counts)]
    factors, rows = (
        image_factors(images, [None] * len(images)),
        [(i, r) for i, n in enumerate(counts) for r in range(n)],
    )
    most = 0
    for begin in range(0, len(rows), reduction):
        found = segments(factors, begin, begin + reduction)
        assert all(count > 0 for *_, count in found)
        lying = [(i, first + r) for i, first, _, count in found for r in range(count)]
        assert lying == rows[begin : begin + reduction]
        here = [at + r for _, _, at, count in found for r in range(count)]
        assert here == list(range(len(here)))
        most = max(most, len(found))
    assert is_in_segments(factors, reduction) == (most > 1)


def test_numbers_of_two_parts_are_a_real_matrix_where_their_parts_are_columns():
    for transposed, ld in product((False, True), (3, 5, MAX_DIMENSION)):
        view = MatrixView(Address("x", 8), 8, ld, 17, transposed)
        real = view.as_real()
        assert (real is None) == (transposed or ld == MAX_DIMENSION)
        for row, column, sample, part in product(range(2), repeat=4) if real is not None else ():
            at = view.start(row, column, sample).offset + 4 * part
            assert real is not None and real.itemsize == 4 and real.start(row, 2 * column + part, sample).offset == at


@pytest.mark.parametrize(
    "shape, order, along",
    [
        ((2, 8, 5, 5), "C", False),
        ((2, 8, 5, 5), "last", True),
        ((2, 2, 5, 5), "last", True),
        ((2, 1, 5, 5), "last", False),
        ((2, 8, 1, 1), "C", True),
        ((2, 1, 1, 1), "C", False),
        ((2, 8, 5, 1), "last", True),
    ],
)
def test_channels_are_neighbours(shape, order, along):
    image = array(*shape, order=order)
    assert is_along_channels(operand("out", "float32", _five(image.shape), _five(image.strides, 1), 64)) is along


def _five(axes: tuple[int, ...], fill: int = 1) -> tuple[int, ...]:
    return (*axes[:2], fill, *axes[2:])


PLANE = depthwise.PLANE_EXTENT
STRIPS = [
    ((2, 40, 40), (3, 3), {}, (), (3, 1)),
    ((2, 40, 40), (3, 3), {"stride": 2}, (), (3, 2)),
    ((2, 40, 40), (3, 5), {}, (), depthwise.ANY_KERNEL),
    ((2, 40, 40), (3, 3), {"dilation": 2}, (), depthwise.ANY_KERNEL),
    ((2, 40, 40), (3, 3), {"dilation": (1, 2)}, (), depthwise.ANY_KERNEL),
    ((2, 40, 40), (3, 3), {}, (2,), depthwise.ANY_KERNEL),
    ((2, 40, 40), (3, 3), {}, (3,), depthwise.ANY_KERNEL),
    ((1, 40, PLANE // 256), (3, 3), {}, (), (3, 1)),
    ((1, 40, PLANE // 40), (3, 3), {}, (), depthwise.ANY_KERNEL),
    ((1, 3, PLANE), (3, 3), {"padding": 1}, (), depthwise.ANY_KERNEL),
    ((PLANE // 4, 4, 4), (3, 3), {}, (), depthwise.ANY_KERNEL),
]


@pytest.mark.parametrize("image, kernel, window, backwards, found", STRIPS)
def test_strips_serve_square_kernels_of_planes_counted_in_32_bits(image, kernel, window, backwards, found):
    """Strips exclude reversed pixels, taps apart, and planes or pixel counts that exceed the kernel's counters."""
    x = array(image[0], 4, *image[1:])
    for axis in backwards:
        x = np.flip(x, axis)
    problem: Any = checked_call(cupyconv.conv, x, array(4, 1, *kernel), groups=4, on=GPU, **window).problem
    chosen = depthwise.listed_kernel(problem.geometry, problem.xs, (problem.out,), depthwise.KERNELS)
    assert chosen == found


@pytest.mark.parametrize("stride, phases", [(1, 1), (2, 4), ((2, 1), 2), ((1, 3), 3)])
def test_phases_multiply_as_often_as_they_have_taps_and_say_how_many_they_are(stride, phases):
    """Operations count only taps that reach the result; padding and phases without taps add none."""
    x, weight = array(2, 32, 9, 11), array(32, 16, 3, 3)
    plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, stride=stride, method="implicit_gemm", on=GPU)
    (launch,) = launches(plan, "implicit_gemm")
    words = "convolution" if phases == 1 else f"{phases} convolutions in one grid"
    assert words in str(plan)
    steps = (stride, stride) if isinstance(stride, int) else stride
    sizes = [(n - 1) * s + 3 for n, s in zip((9, 11), steps)]
    pairs = functools.reduce(
        lambda total, axis: total * sum(len(range(at % axis[1], 3, axis[1])) for at in range(axis[0])),
        zip(sizes, steps),
        1,
    )
    assert launch.flops == 2 * 2 * 32 * 16 * pairs


def test_a_repeated_border_is_not_folded_in_16_bits():
    grad, weight = array(1, 4, 64, 64, dtype="float16"), array(4, 4, 9, 9, dtype="float16")
    with pytest.raises(ValueError, match="rounded twice"):
        cupyconv.explain(
            cupyconv.conv_grad_input, grad, weight, (1, 4, 64, 64), padding=4, padding_mode="reflect",
            method="fft", on=GPU,
        )  # fmt: skip
