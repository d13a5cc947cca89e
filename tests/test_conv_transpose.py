"""`conv_transpose` and its gradients against the naive oracle; the extent of its result; refused arguments."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import assume, given
from hypothesis import strategies as st
from pullbacks import (
    assert_rounded,
    assert_within,
    attempted,
    bytes_of,
    each_array,
    each_gradient,
    entering_error,
    on_device,
)
from refusals import Ones, assert_refused, least_workspace, placed
from strategies import ACTIVATIONS, absolute_values, drawn, nan_filled, transposed_cases, with_layout
from tolerance import assert_close, assert_exact

import cupyconv
from cupyconv.call.explain import checked_call
from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyBackend
from cupyconv.numpy.convolution import CACHED_MEMORY
from cupyconv.numpy.gathered import GatheredLoop, Zeros, plan_gathered
from cupyconv.numpy.interleaved import InterleavedLoop
from cupyconv.problem.arrays import c_strides
from cupyconv.problem.polyphase import axis_phases
from cupyconv.problem.problems import HostModel, NotApplicable

METHODS = st.sampled_from(("auto", "auto", "direct", "gemm", "implicit_gemm"))
LIMITS = st.sampled_from((None, None, 1 << 20, 20_000, 4_000))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def row(*values):
    return np.array(values, np.float64)[None, None]


# --- values ---------------------------------------------------------------------------------------------------


def run(target, case, arrays, method, limit):
    """Return the case's result on a target; None if a named method or the workspace limit refuses it with a reason."""
    views = case.views(arrays, target.to_device, target.xp)
    out = case.new_out(target.to_device, target.xp)
    settings = {**case.parameters, "method": method, "out": out}
    y = attempted(lambda: cupyconv.conv_transpose(**views, **settings), method, limit)
    assert out is None or y is None or y is out
    return None if y is None else target.to_host(y)


@given(case=transposed_cases(), method=METHODS, limit=LIMITS)
def test_integers_are_exact(target, case, method, limit):
    arrays = case.arrays()
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        assert_exact(actual, reference_gradients.conv_transpose(**arrays, **case.parameters), case.result_dtype)


@given(case=transposed_cases(activations=ACTIVATIONS), method=METHODS, limit=LIMITS)
def test_random_data(target, case, method, limit):
    arrays = case.arrays(integer=False)
    actual = run(target, case, arrays, method, limit)
    if actual is not None:
        expected = reference_gradients.conv_transpose(**arrays, **case.parameters)
        assert_close(actual, expected, case.result_dtype, case.terms, magnitude=case.magnitude(arrays))


@given(case=transposed_cases(dtypes=("float64",), activations=(None,)))
def test_it_is_the_input_gradient_of_a_convolution(target, case):
    """The result equals that of `conv_grad_input` if a convolution with that padding has as many outputs."""
    arrays = case.arrays(integer=False) | {"bias": None}
    strides, dilations = (reference.per_axis(value, case.rank) for value in (case.stride, case.dilation))
    begins, sizes = case.window
    covered = [s * (n - 1) + d * (k - 1) + 1 for n, k, s, d in zip(case.spatial, case.kernel, strides, dilations)]
    pairs = [(begin, max(0, full - begin - size)) for full, begin, size in zip(covered, begins, sizes)]
    assume(reference.output_shape(sizes, case.kernel, pairs, strides, dilations) == case.spatial)
    whole = np.concatenate(reference.sequence(arrays["x"]), axis=case.channel_axis)
    x, weight = target.to_device(whole), target.to_device(arrays["weight"])
    window = dict(stride=case.stride, dilation=case.dilation, groups=case.groups)
    y = target.to_host(cupyconv.conv_transpose(x, weight, **case.parameters))
    back = target.to_host(cupyconv.conv_grad_input(x, weight, case.out_shape, padding=pairs, **window))
    assert (np.abs(y - back) <= 1e-12 * case.magnitude(arrays)).all()


# --- groups on NumPy, gathered -----------------------------------------------------------------------------------------

GATHERED = {
    "stride 1": ((2, 12, 9, 8), (12, 2, 3, 3), dict(groups=6)),
    "depthwise": ((2, 12, 9, 8), (12, 1, 3, 3), dict(groups=12, padding=1)),
    "two outputs a channel": ((2, 12, 9, 8), (12, 1, 3, 3), dict(groups=6, padding=1)),
    "stride 2": ((2, 6, 9, 8), (6, 1, 3, 2), dict(groups=6, stride=2, padding=1)),
    "stride 2, dilation 3": ((2, 6, 5, 4), (6, 2, 3, 2), dict(groups=3, stride=2, dilation=3)),
    "elements that no tap reaches": ((1, 4, 5), (4, 1, 2), dict(groups=2, stride=5, output_padding=2)),
    "more than are read": ((2, 4, 6), (4, 1, 2), dict(groups=4, stride=2, padding=3)),
    "1-D": ((1, 6, 300), (6, 1, 5), dict(groups=6, padding=2)),
    "3-D": ((1, 4, 5, 6, 7), (4, 2, 2, 3, 2), dict(groups=2, stride=(2, 1, 2))),
}


@pytest.mark.parametrize(
    "x_dtype, weight_dtype", [("float32", "float32"), ("complex64", "complex64"), ("float16", "float16")]
)
@pytest.mark.parametrize("x_shape, weight_shape, settings", GATHERED.values(), ids=GATHERED.keys())
def test_grouped_results_are_gathered(x_shape, weight_shape, settings, x_dtype, weight_dtype, gathered):
    """Convolutions with reversed taps gather grouped results: the same numbers at every limit that fits a block."""
    rng = np.random.default_rng(0)

    def integers(shape, dtype):
        values = rng.integers(-3, 4, shape).astype(dtype)
        return values + 1j * rng.integers(-3, 4, shape).astype(dtype) if np.dtype(dtype).kind == "c" else values

    x, weight = integers(x_shape, x_dtype), integers(weight_shape, weight_dtype)
    bias = integers((weight_shape[1] * settings["groups"],), x_dtype)
    expected = reference_gradients.conv_transpose(x, weight, bias, **settings)
    limits = []
    for limit in (None, 50_000, 8_000):
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.conv_transpose, x, weight, bias, **settings)
            loops = [loop for step in plan.steps for loop in getattr(step, "loops", [step])]
            if all(isinstance(loop, GatheredLoop | InterleavedLoop) for loop in loops):
                limits.append(limit)
            assert limit is None or plan.workspace_bytes <= limit
            y = cupyconv.conv_transpose(x, weight, bias, **settings)
        assert_exact(y, expected, x_dtype)
    assert None in limits
    # It is the gradient of a convolution, which conjugates the weight and may leave out the last elements.
    window = {name: value for name, value in settings.items() if name != "output_padding"}
    again = cupyconv.conv_grad_input(x, weight.conj(), expected.shape, **window)
    assert_exact(again, expected - bias.reshape(-1, *(1,) * (x.ndim - 2)), x_dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("taps", [(1, 1), (2, 2), (3, 2), (4, 5)])
@pytest.mark.parametrize("channels, outputs, groups", [(1, 1, 1), (3, 5, 1), (4, 6, 2)])
def test_what_is_gathered_is_planned_for_the_weight_it_gets(channels, outputs, groups, taps, dtype):
    """A part runs with the weight that its memory was planned for: of the planned size, and in C order."""
    x, weight = np.ones((2, channels, 4, 5), dtype), np.ones((channels, outputs // groups, *taps), dtype)
    bias = np.ones(outputs, dtype)  # elements that no tap reaches have it too
    call = checked_call(cupyconv.conv_transpose, x, weight, bias, stride=2, groups=groups)
    plan = plan_gathered(replace(call.problem, machine=HostModel(1)))
    assert sum(step.convolution.flops for step in plan.steps) == sum(step.flops for step in plan.steps)
    for step in plan.steps:
        made, planned = step._weight(weight), step.convolution.problem.weight
        assert made.size == prod(planned.shape) and made.flags.c_contiguous
        assert len(planned.shape) == 5 and planned.strides == c_strides(planned.shape)
    (result,) = call.results
    out = np.full(result.shape, np.nan, dtype)
    NumpyBackend().prepare(plan)({**call.arrays, "out": out})
    assert_exact(out, reference_gradients.conv_transpose(x, weight, bias, stride=2, groups=groups), dtype)
    assert plan.workspace_bytes >= weight.nbytes


def test_how_a_result_is_gathered_is_said():
    x, one, two = (np.ones(shape, np.float32) for shape in ((1, 2, 6, 6), (2, 3, 1, 1), (2, 3, 2, 2)))

    def plan(weight, *bias, stride):
        problem = checked_call(cupyconv.conv_transpose, x, weight, *bias, stride=stride).problem
        return plan_gathered(replace(problem, machine=HostModel(1)))

    assert ", 1 x 2 x 2 taps" in str(plan(two, stride=1)) and "with stride" not in str(plan(two, stride=1))
    assert ", 1 x 1 x 1 taps, written with stride 1 x 2 x 2" in str(plan(two, stride=2))
    zeros, loop = plan(one, stride=2).steps
    assert "zeros where no tap contributes" in str(zeros)
    assert zeros.flops == 0 and zeros.flops + loop.flops == 2 * 36 * 2 * 3
    assert ", 0 x 0 x 0 taps" in str(plan(one, np.ones(3, np.float32), stride=2))


def test_what_forbids_transforms_is_not_said_to_be_an_option_that_nobody_set():
    """Phases that are outputs of one convolution are computed without transforms, and the plan gives this reason."""
    x, weight = np.ones((8, 64, 28, 28), np.float32), np.ones((64, 32, 4, 4), np.float32)
    explain = partial(cupyconv.explain, cupyconv.conv_transpose, x, weight, stride=2, padding=1)
    plan = explain()
    assert "phases as outputs" in plan.reason
    assert dict(plan.rejected)["fft"] == "not supported with the phases as outputs of one convolution"
    with cupyconv.options(allow_fft=False):
        assert dict(explain().rejected)["fft"] == "forbidden by options(allow_fft=False)"


def test_what_is_not_gathered():
    """Results that are not convolutions of x, and empty results, are not gathered."""
    x, weight = np.ones((1, 4, 6, 6), np.float32), np.ones((4, 2, 3, 3), np.float32)
    problem = replace(checked_call(cupyconv.conv_transpose, x, weight, groups=2).problem, machine=HostModel(1))
    plan_gathered(problem)
    geometry, (out,) = problem.geometry, problem.outs
    for words, other in {
        "only for padding_mode 'constant'": replace(problem, geometry=replace(geometry, padding_mode="wrap")),
        "a finite weight": replace(problem, weight_is_finite=False),
        "several results of a grouped": replace(problem, outs=(out, out)),
        "result is empty": replace(problem, outs=()),
        "is empty": replace(problem, geometry=replace(geometry, size=(1, 0, 6))),
    }.items():
        with pytest.raises(NotApplicable, match=words):
            plan_gathered(other)


@pytest.mark.parametrize("limit", [30_000, 100_000, 300_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("size", [20, 60, 120])
def test_what_is_gathered_keeps_no_more_from_call_to_call_than_it_says(size, limit):
    x, weight = np.ones((1, 16, size, size), np.float32), np.ones((16, 24, 2, 2), np.float32)
    problem = checked_call(cupyconv.conv_transpose, x, weight, stride=2).problem
    try:
        plan = plan_gathered(replace(problem, machine=HostModel(1), workspace_limit=limit))
    except ValueError:
        return
    kept = sum(step.convolution.cached_memory for step in plan.steps if step.keeps)
    assert kept <= CACHED_MEMORY and weight.nbytes + kept <= plan.workspace_bytes <= limit


@pytest.mark.parametrize("kernel, stride, parts", [((1, 1), 2, 1), ((3, 1), 2, 2), ((2, 2), 3, 4), ((1, 3), (1, 4), 3)])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
@pytest.mark.parametrize("channels", [[32], [16, 24]])
def test_what_no_tap_reaches_is_filled_at_once(kernel, stride, parts, dtype, channels, monkeypatch):
    """Results in any layout are filled with zeros first, then the parts that taps reach are computed."""
    monkeypatch.setattr(cost, "least_scattered", lambda problem: np.inf)
    rng = np.random.default_rng(3)
    grad, weight = (
        rng.integers(-3, 4, shape).astype(dtype) for shape in ((2, 48, 9, 11), (48, sum(channels), *kernel))
    )
    size = [(extent - 1) * by + taps for extent, by, taps in zip((9, 11), np.broadcast_to(stride, 2), kernel)]
    memory = [np.full((2, count, size[0] + 1, 2 * size[1]), np.nan, dtype) for count in channels]
    outs = [array[:, :, 1:, ::2] for array in memory]
    arguments = grad, weight, [out.shape for out in outs]
    plan = cupyconv.explain(cupyconv.conv_grad_input, *arguments, stride=stride, out=outs)
    (steps,) = (getattr(step, "loops", plan.steps) for step in plan.steps[:1])
    assert [type(step) for step in steps] == [Zeros] + [GatheredLoop] * parts * len(outs)
    cupyconv.conv_grad_input(*arguments, stride=stride, out=outs)
    expected = reference_gradients.conv_transpose(grad, weight, stride=stride)
    assert_exact(np.concatenate(outs, axis=1), expected, dtype)
    assert all(np.isnan(array[:, :, :1]).all() and np.isnan(array[..., 1::2]).all() for array in memory)


@pytest.mark.parametrize("given", [{"activation": "relu"}, {"bias": np.ones(1)}], ids=lambda given: next(iter(given)))
def test_what_no_tap_reaches_has_the_epilogue_too(given):
    """Elements that no tap reaches get bias and activation; here the only element is between two that taps reach."""
    settings = dict(stride=2, dilation=2, padding=((1, 3),))
    with cupyconv.options(threads=1):
        y = cupyconv.conv_transpose(np.ones((1, 1, 2)), np.ones((1, 1, 2)), **given, **settings)
    np.testing.assert_array_equal(y, np.full((1, 1, 1), float("bias" in given)))


# --- where the result begins and ends --------------------------------------------------------------------------------

#: Windows of the canvas [1, 10, 102, 20, 200], which is the result of x = [1, 2] and weight [1, 10, 100] at stride 2.
WINDOWS = {
    "all": ({}, [1, 10, 102, 20, 200]),
    "valid": (dict(padding="valid"), [1, 10, 102, 20, 200]),
    "both sides": (dict(padding=1), [10, 102, 20]),
    "before": (dict(padding=((1, 0),)), [10, 102, 20, 200]),
    "after": (dict(padding=((0, 2),)), [1, 10, 102]),
    "output_padding uncovers": (dict(padding=1, output_padding=1), [10, 102, 20, 200]),
    "output_padding extends": (dict(output_padding=(1,)), [1, 10, 102, 20, 200, 0]),
    "same": (dict(padding="same"), [1, 10, 102, 20]),
    "same_lower": (dict(padding="same_lower"), [10, 102, 20, 200]),
    "odd surplus": (dict(output_shape=(4,)), [10, 102, 20, 200]),
    "odd surplus, valid": (dict(output_shape=(4,), padding="valid"), [10, 102, 20, 200]),
    "odd surplus, same": (dict(output_shape=(4,), padding="same"), [1, 10, 102, 20]),
    "odd surplus, same_lower": (dict(output_shape=[4], padding="same_lower"), [10, 102, 20, 200]),
    "even surplus": (dict(output_shape=(3,)), [10, 102, 20]),
    "odd surplus and output_padding": (dict(output_shape=(4,), output_padding=1), [10, 102, 20, 200]),
    "even surplus and output_padding": (dict(output_shape=(3,), output_padding=1), [102, 20, 200]),
    "output_padding beside same": (dict(padding="same", output_padding=1), [10, 102, 20, 200]),
    "no surplus": (dict(output_shape=(5,)), [1, 10, 102, 20, 200]),
    "negative surplus": (dict(output_shape=(7,), padding="same"), [1, 10, 102, 20, 200, 0, 0]),
}


@pytest.mark.parametrize("method", ["auto", "direct", "gemm"])
@pytest.mark.parametrize("settings, expected", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(target, settings, expected, method):
    x, weight = target.to_device(row(1, 2)), target.to_device(row(1, 10, 100))
    y = attempted(lambda: cupyconv.conv_transpose(x, weight, stride=2, **settings, method=method), method)
    if y is not None:
        assert target.to_host(y).tolist() == [[expected]]


def test_beyond_every_stamp_there_is_bias_and_activation(target):
    x, weight, bias = target.to_device(row(1)), target.to_device(row(3)), target.to_device(np.array([-2.0]))
    y = cupyconv.conv_transpose(x, weight, bias, stride=3, output_padding=2, activation=("leaky_relu", 0.5))
    assert target.to_host(y).tolist() == [[[1, -1, -1]]]


def test_onnxs_own_example_of_a_given_output_shape(target):
    x, weight = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3), np.ones((1, 2, 3, 3), np.float32)
    y = cupyconv.conv_transpose(target.to_device(x), target.to_device(weight), stride=(3, 2), output_shape=(10, 8))
    line = [[0, 0, 1, 1, 3, 2, 2, 0], [3, 3, 7, 4, 9, 5, 5, 0], [6, 6, 13, 7, 15, 8, 8, 0]]
    expected = [line[0]] * 3 + [line[1]] * 3 + [line[2]] * 3 + [[0] * 8]
    assert target.to_host(y).tolist() == [[expected, expected]]


@pytest.mark.parametrize("name", ["same", "same_lower"])
@pytest.mark.parametrize("kernel, stride, dilation", [(3, 2, 1), (4, 2, 1), (4, 3, 2), (1, 3, 1), (5, 1, 2), (2, 1, 1)])
def test_same_is_the_adjoint_of_the_convolutions_same(target, name, kernel, stride, dilation):
    """The result has size * stride elements, from which the convolution with that padding computes `size` outputs."""
    generator = np.random.default_rng(kernel)
    x, weight = drawn(generator, (2, 3, 4), np.dtype("f8"), 3), drawn(generator, (3, 2, kernel), np.dtype("f8"), 3)
    settings = dict(stride=stride, padding=name, dilation=dilation)
    y = cupyconv.conv_transpose(target.to_device(x), target.to_device(weight), **settings)
    expected = reference_gradients.conv_grad_input(x, weight, (2, 2, 4 * stride), **settings)
    assert_exact(target.to_host(y), expected, "float64")


def test_nothing_is_conjugated(target):
    x, weight = (target.to_device(np.full((1, 1, 1), 1j)) for _ in range(2))
    assert target.to_host(cupyconv.conv_transpose(x, weight)).item() == -1


# --- gradients ------------------------------------------------------------------------------------------------------


@given(case=transposed_cases(), method=METHODS, limit=LIMITS)
def test_pullback_of_integers_is_exact(target, case, method, limit):
    arrays, grad = case.arrays(), case.gradient()
    views = case.views(arrays, target.to_device, target.xp)

    def call():
        y, pullback = cupyconv.vjp(cupyconv.conv_transpose, **views, **case.parameters, method=method)
        return y, pullback(on_device(target, grad, case.residual_layout, case.channel_axis))

    answer = attempted(call, method, limit)
    if answer is not None:
        y, gradients = answer
        expected_y = reference_gradients.conv_transpose(**arrays, **case.parameters)
        assert_exact(target.to_host(y), expected_y, case.result_dtype)
        expected = reference_gradients.conv_transpose_gradients(grad, **arrays, **case.parameters)
        for _, one, wanted, dtype in each_gradient(gradients, expected, arrays):
            assert_rounded(target.to_host(one), wanted, dtype)


@given(case=transposed_cases(activations=ACTIVATIONS, mixed_dtypes=False))
def test_pullback_of_random_data(target, case):
    arrays, grad = case.arrays(integer=False), case.gradient(integer=False)
    plain = {**case.parameters, "activation": None}
    _, pullback = cupyconv.vjp(
        cupyconv.conv_transpose, **case.views(arrays, target.to_device, target.xp), **case.parameters
    )
    gradients = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))

    expected = reference_gradients.conv_transpose_gradients(grad, **arrays, **case.parameters)
    v = reference_gradients.conv_transpose(**arrays, **plain)
    error = entering_error(grad, case.activation, v, case.result_dtype, case.terms, case.magnitude(arrays))
    entering = np.abs(grad * reference_gradients.derivative(case.activation, v))
    absolute = {name: None if a is None else absolute_values(a) for name, a in arrays.items()}
    magnitudes, errors = (
        reference_gradients.conv_transpose_gradients(g, **absolute, **plain) for g in (entering + error, error)
    )
    terms = {"x": arrays["weight"][0].size, "weight": max(1, grad.size), "bias": max(1, grad.size)}
    checks = zip(
        each_gradient(gradients, expected, arrays), each_array(magnitudes), each_array(errors), strict=True
    )  # fmt: skip
    for (name, one, wanted, dtype), magnitude, e in checks:
        assert_within(target.to_host(one), wanted, dtype, terms=terms[name], magnitude=magnitude, entering=e)


@given(case=transposed_cases(dtypes=("float64", "complex128"), activations=(None,), mixed_dtypes=False))
def test_adjoint_identities(target, case):
    """<conv_transpose(x, w), g> = <x, gradient of x> = <w, gradient of w>, all computed by this package."""
    arrays, grad = case.arrays(integer=False) | {"bias": None}, case.gradient(integer=False)
    y, pullback = cupyconv.vjp(
        cupyconv.conv_transpose, **case.views(arrays, target.to_device, target.xp), **case.parameters
    )
    back = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))
    forward = np.vdot(target.to_host(y), grad)
    pairs = zip(reference.sequence(arrays["x"]), reference.sequence(back.x), strict=True)
    allowed = 1e-12 * np.vdot(case.magnitude(arrays), np.abs(grad))
    assert abs(forward - sum(np.vdot(a, target.to_host(b)) for a, b in pairs)) <= allowed
    assert abs(forward - np.vdot(arrays["weight"], target.to_host(back.weight))) <= allowed


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_same_bits_every_time(target, dtype):
    generator = np.random.default_rng(0)
    shapes = ((2, 6, 5, 4), (6, 2, 3, 3), (4,))
    x, weight, bias = (target.to_device(drawn(generator, s, np.dtype(dtype))) for s in shapes)
    settings = dict(stride=2, groups=2, activation="gelu")
    y, pullback = cupyconv.vjp(cupyconv.conv_transpose, x, weight, bias, **settings)
    first = pullback(y)
    if dtype != "float16" or target.name == "numpy":  # on CUDA a stored 16-bit pre-activation is rounded first
        assert bytes_of(target, cupyconv.conv_transpose(x, weight, bias, **settings)) == bytes_of(target, y)
    assert bytes_of(target, pullback(y)) == bytes_of(target, first), "callable again"
    assert bytes_of(target, cupyconv.vjp(cupyconv.conv_transpose, x, weight, bias, **settings)[1](y)) == bytes_of(
        target, first
    )
    only = pullback(y, needs=("weight",))
    assert bytes_of(target, only.weight) == bytes_of(target, first.weight)
    assert only.x is only.bias is only.residual is None


def test_a_list_of_one_stays_a_list(target):
    x, weight = (target.to_device(np.ones(shape, np.float32)) for shape in ((1, 2, 5), (2, 3, 3)))
    for given_x, is_list in ((x, False), ([x], True), ((x,), True)):
        y, pullback = cupyconv.vjp(cupyconv.conv_transpose, given_x, weight)
        assert isinstance(pullback(y).x, list) == is_list


def test_launches_do_not_grow_with_the_batch(cuda_target):
    log = cuda_target.device.log

    def launches(batch):
        x = cuda_target.to_device(np.ones((batch, 4, 5, 6), np.float32))
        weight = cuda_target.to_device(np.ones((4, 3, 3, 3), np.float32))
        log.clear()
        y, pullback = cupyconv.vjp(cupyconv.conv_transpose, x, weight, stride=2)
        pullback(y)
        return len(log)

    assert launches(16) == launches(8)


@pytest.mark.parametrize("batch, channels, outputs", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_axes(target, batch, channels, outputs):
    def ones(*shape):
        return target.to_device(np.ones(shape, np.float32))

    x, weight, bias = ones(batch, channels, 5), ones(channels, outputs, 3), ones(outputs)
    y, pullback = cupyconv.vjp(cupyconv.conv_transpose, x, weight, bias)
    assert y.shape == (batch, outputs, 7)
    assert channels or (target.to_host(y) == 1).all()
    gradients = pullback(ones(*y.shape))
    for back, like in ((gradients.x, x), (gradients.weight, weight)):
        assert back.shape == like.shape and (target.to_host(back) == 0).all()
    assert gradients.bias.shape == (outputs,) and (target.to_host(gradients.bias) == batch * 7).all()


# --- bad input ------------------------------------------------------------------------------------------------------

CALL = dict(x=[Ones((2, 3, 4, 5)), Ones((2, 3, 4, 5))], weight=Ones((6, 2, 3, 3)), bias=Ones((2,)))

REFUSALS = [
    pytest.param(words, changes, id=name)
    for name, words, changes in (
        ("causal", ["padding", "causal"], dict(padding="causal")),
        ("full", ["padding", "full"], dict(padding="full")),
        ("channels", ["weight", "5", "6"], dict(weight=Ones((5, 2, 3, 3)))),
        ("axes exchanged", ["weight", "2", "6"], dict(weight=Ones((2, 6, 3, 3)))),
        ("groups", ["groups", "4", "6"], dict(groups=4)),
        ("bias of one group", ["bias", r"\(2,\)", r"\(4,\)"], dict(groups=2)),
        ("output_padding as large as stride", ["output_padding", "2", "stride 2"], dict(stride=2, output_padding=2)),
        ("negative output_padding", ["output_padding", "-1"], dict(output_padding=(0, -1))),
        ("padding beside output_shape", ["padding", "output_shape"], dict(stride=2, padding=1, output_shape=(9, 10))),
        ("output_shape of too many axes", ["output_shape", "4", "2"], dict(output_shape=(2, 2, 6, 7))),
        ("empty output_shape", ["output_shape", "at least 1", "0"], dict(output_shape=(0, 7))),
        ("nothing left", ["padding"], dict(padding=(3, 0))),
        ("flat ONNX list", ["padding", "4 entries"], dict(padding=(1, 1, 1, 1))),
        ("out of x's size", [r"\bout\b", r"\(2, 2, 4, 5\)", r"\(2, 2, 6, 7\)"], dict(out=Ones((2, 2, 4, 5)))),
    )
]  # fmt: skip


@pytest.mark.parametrize("words, changes", REFUSALS)
def test_values_refused(target, words, changes):
    arguments = {name: placed(value, target) for name, value in (CALL | changes).items()}
    assert_refused(target, ValueError, words, cupyconv.conv_transpose, **arguments)


@pytest.mark.parametrize(
    "words, changes",
    [
        (["weight", "int32", "astype"], dict(weight=Ones((6, 2, 3, 3), "int32"))),
        (["activation", "complex64"], dict(weight=Ones((6, 2, 3, 3), "complex64"), activation="relu")),
        ([r"\bout\b", "float64", "float32"], dict(out=Ones((2, 2, 6, 7), "float64"))),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_types_refused(target, words, changes):
    arguments = {name: placed(value, target) for name, value in (CALL | changes).items()}
    assert_refused(target, TypeError, words, cupyconv.conv_transpose, **arguments)


def test_the_call_that_is_varied_is_valid(target):
    y = cupyconv.conv_transpose(**{name: placed(value, target) for name, value in CALL.items()})
    assert y.shape == (2, 2, 6, 7) and float(target.to_host(y)[0, 0, 2, 2]) == 6 * 9 + 1


def test_a_pullback_names_both_shapes(target):
    y, pullback = cupyconv.vjp(cupyconv.conv_transpose, **{name: placed(value, target) for name, value in CALL.items()})
    assert y.shape == (2, 2, 6, 7)
    words = [r"\bgrad\b", r"\(2, 2, 4, 5\)", r"\(2, 2, 6, 7\)"]
    assert_refused(target, ValueError, words, pullback, target.to_device(np.ones((2, 2, 4, 5), np.float32)))


def test_out_is_written_completely_and_nothing_beside_it(target):
    """`out` is written in gaps between stamps and beyond them too, and the border of NaN around it is unchanged."""
    x, weight = np.ones((2, 3, 2), np.float32), np.ones((3, 4, 2), np.float32)
    base = target.to_device(nan_filled((4, 6, 9), np.dtype("f4")))
    moved = target.to_device(x), target.to_device(weight)
    cupyconv.conv_transpose(*moved, stride=4, output_padding=1, out=base[1:-1, 1:-1, 1:-1])
    expected = reference_gradients.conv_transpose(x, weight, stride=4, output_padding=1)
    assert np.array_equal(target.to_host(base), np.pad(expected, 1, constant_values=np.nan), equal_nan=True)


# --- PyTorch --------------------------------------------------------------------------------------------------------


@needs_torch
@given(case=transposed_cases(dtypes=("float64",), activations=ACTIVATIONS))
def test_against_torch(target, case):
    import torch_peer

    arrays, grad = case.arrays(integer=False), case.gradient(integer=False)
    y, pullback = cupyconv.vjp(
        cupyconv.conv_transpose, **case.views(arrays, target.to_device, target.xp), **case.parameters
    )
    gradients = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))
    expected_y, expected = torch_peer.conv_transpose(grad, **arrays, **case.parameters)
    np.testing.assert_allclose(target.to_host(y), expected_y, rtol=1e-9, atol=1e-9)
    for name, one, wanted, _ in each_gradient(gradients, expected, arrays):
        np.testing.assert_allclose(target.to_host(one), wanted, rtol=1e-9, atol=1e-9, err_msg=name)


@given(
    size=st.integers(1, 14),
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    before=st.integers(0, 6),
    dilation=st.integers(1, 5),
)
def test_the_phases_of_an_axis_read_what_the_definition_says(size, kernel, stride, before, dilation):
    """Element i of the result sums the taps t and pixels p for which i + before = p * stride + t * dilation."""
    pixels = max(1, (size + 2 * before - dilation * (kernel - 1) - 1) // stride + 1)
    found: dict[int, set[tuple[int, int]]] = {}
    for phase in axis_phases(size, pixels, kernel, stride, before, dilation):
        for k in range(phase.count):
            places = ((tap, k + j * phase.dilation - phase.before) for j, tap in enumerate(phase.taps))
            assert phase.first + k * stride not in found
            found[phase.first + k * stride] = {(tap, pixel) for tap, pixel in places if 0 <= pixel < pixels}
        if phase.taps:  # its convolution has as many elements, and reads at least one pixel
            reach = (len(phase.taps) - 1) * phase.dilation
            assert pixels + phase.before + phase.after - reach == phase.count
            assert pixels + min(phase.before, 0) + min(phase.after, 0) > 0
    everything = [(tap, pixel) for tap in range(kernel) for pixel in range(pixels)]
    assert found == {
        i: {(tap, pixel) for tap, pixel in everything if i + before == pixel * stride + tap * dilation}
        for i in range(size)
    }


@pytest.mark.grid(
    together=3, dtypes=["float32 float32", "float16 float16", "complex64 complex64", "complex64 float32", "float32 complex64"],
    groups=[1, 3], channels=[(12,), (5, 7), (4, 8)], layout=["c_order", "channels_last", "stepped"],
    cut=["whole", "half", "least"],
)  # fmt: skip
def test_products_in_chunks(cuda_target, dtypes, groups, channels, layout, cut):
    """Chunks have some samples, some groups of a sample, or some channels of a group; inputs or results are several."""
    generator = np.random.default_rng(0)

    def integers(shape, dtype):
        real, imaginary = (generator.integers(-2, 3, shape).astype("float32") for _ in range(2))
        return (real + 1j * imaginary).astype(dtype) if dtype == "complex64" else real.astype(dtype)

    def moved(image):
        return with_layout(image, layout, cuda_target.to_device, cuda_target.xp)

    x_dtype, weight_dtype = dtypes.split()
    xs, weight = [integers((3, count, 5, 6), x_dtype) for count in channels], integers((12, 4, 3, 3), weight_dtype)
    settings = {"groups": groups, "stride": 2, "padding": 1, "method": "gemm"}
    window = {name: settings[name] for name in ("groups", "stride", "padding")}
    bias = integers((4 * groups,), np.result_type(x_dtype, weight_dtype))
    calls = [(cupyconv.conv_transpose, (list(map(moved, xs)), *map(cuda_target.to_device, (weight, bias))))]
    expected = [[reference_gradients.conv_transpose(xs, weight, bias, **window)]]
    back, grad = integers((6, 12 // groups, 3, 3), weight_dtype), integers((3, 6, 5, 6), x_dtype)
    shapes = [(3, count, 9, 11) for count in channels]
    calls.append((cupyconv.conv_grad_input, (moved(grad), cuda_target.to_device(back), shapes)))
    whole = reference_gradients.conv_grad_input(grad, back, (3, 12, 9, 11), **window)
    expected.append(np.split(whole, np.cumsum(channels)[:-1], axis=1))
    for (function, arguments), wanted in zip(calls, expected):
        limit = None
        if cut != "whole":
            limit = cupyconv.explain(function, *arguments, **settings).workspace_bytes // 2
        if cut == "least":
            limit = least_workspace(lambda: cupyconv.explain(function, *arguments, **settings))  # noqa: B023
        with cupyconv.options(workspace_limit=limit):
            plan = cupyconv.explain(function, *arguments, **settings)
            actual = function(*arguments, **settings)
        assert (cut != "whole") == ("chunks" in plan.reason)
        for one, other in zip(actual if isinstance(actual, list) else [actual], wanted, strict=True):
            assert_exact(cuda_target.to_host(one), other, np.result_type(x_dtype, weight_dtype))


def test_samples_of_one_channel_are_columns_of_one_product():
    """Pixels of all samples are contiguous then: one long product is faster than a batch of short ones."""
    for channels, (n, batch) in {1: (4 * 30, 1), 2: (30, 4)}.items():
        x, weight = np.ones((4, channels, 5, 6), np.float32), np.ones((channels, 8, 3, 3), np.float32)
        gemm, _ = cupyconv.explain(cupyconv.conv_transpose, x, weight, method="gemm", on="sm_90").steps
        assert (gemm.m, gemm.n, gemm.k, gemm.batch) == (72, n, channels, batch)
