"""Gradients of `conv` and `linmerge` compared with the naive reference, for all combinations of their parameters."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
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
from refusals import Ones, assert_refused, foreign, placed
from strategies import (
    ACTIVATIONS,
    LAYOUTS,
    absolute_values,
    as_dtype,
    constant_where_broadcast,
    conv_cases,
    drawn,
    nan_filled,
    with_layout,
)
from tolerance import assert_close, compare, finfo

import cupyconv

ml_dtypes = pytest.importorskip("ml_dtypes")
METHODS = st.sampled_from(("auto", "auto", "direct", "gemm", "implicit_gemm"))
LIMITS = st.sampled_from((None, None, 1 << 20, 20_000, 4_000))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def window_of(case):
    """Return the parameters that conv_grad_input and conv_grad_weight share with conv."""
    return {name: value for name, value in case.parameters.items() if name != "activation"}


def shapes_of(x):
    """Return `input_shape` for these inputs: a shape, or a list of shapes."""
    return [array.shape for array in x] if isinstance(x, list) else x.shape


def products(grad, weight, x, window):
    """Return the number of products in the largest sum of the two gradients."""
    ones = [np.ones(a.shape) for a in (grad, weight)]
    images = [np.ones(a.shape) for a in reference.sequence(x)]
    back = reference_gradients.conv_grad_input(*ones, shapes_of(images), **window)
    weight_back = reference_gradients.conv_grad_weight(ones[0], images, weight.shape[2:], **window)
    return int(max((a.max() for a in [*back, weight_back] if a.size), default=0))


# --- the two gradients ------------------------------------------------------------------------------------------


def input_gradient(target, case, grad, weight, x, method, limit):
    """Return conv_grad_input of the case on a target, or None if it was refused."""
    shapes, out = shapes_of(x), None
    if case.out_layout is not None:
        dtype = np.result_type(grad, weight)
        out = [
            on_device(target, nan_filled(shape, dtype), case.out_layout, case.channel_axis)
            for shape in ([shapes] if case.bare_x else shapes)
        ]
        out = out[0] if case.bare_x else out
    grad = on_device(target, grad, case.residual_layout, case.channel_axis)
    weight = on_device(target, weight, case.weight_layout)
    settings = {**window_of(case), "method": method, "out": out}
    back = attempted(lambda: cupyconv.conv_grad_input(grad, weight, shapes, **settings), method, limit)
    if back is None:
        return None
    assert isinstance(back, list) == (not case.bare_x), "a list of shapes gives a list"
    if out is not None:
        assert all(a is b for a, b in zip(reference.sequence(back), reference.sequence(out), strict=True))
    return [target.to_host(one) for one in reference.sequence(back)]


def weight_gradient(target, case, grad, x, method, limit):
    """Return conv_grad_weight of the case on a target, or None if it was refused."""
    dtype, out = np.result_type(grad, *reference.sequence(x)), None
    if case.out_layout is not None:
        out = on_device(target, nan_filled(case.weight_shape, dtype), case.out_layout)
    x = case.views({"x": x, "weight": np.ones(case.weight_shape), "bias": None, "residual": None},
                   target.to_device, target.xp)["x"]  # fmt: skip
    grad = on_device(target, grad, case.residual_layout, case.channel_axis)
    settings = {**window_of(case), "method": method, "out": out}
    back = attempted(lambda: cupyconv.conv_grad_weight(grad, x, case.kernel, **settings), method, limit)
    assert out is None or back is None or back is out
    return None if back is None else target.to_host(back)


@given(case=conv_cases(), method=METHODS, limit=LIMITS)
def test_input_gradient_of_integers_is_exact(target, case, method, limit):
    arrays, grad = case.arrays(), case.gradient(dtype=case.dtype)
    x, weight = arrays["x"], arrays["weight"]
    back = input_gradient(target, case, grad, weight, x, method, limit)
    if back is not None:
        expected = reference_gradients.conv_grad_input(grad, weight, shapes_of(x), **window_of(case))
        for one, wanted in zip(back, reference.sequence(expected), strict=True):
            assert_rounded(one, wanted, np.result_type(grad, weight))


@given(case=conv_cases(), method=METHODS, limit=LIMITS)
def test_weight_gradient_of_integers_is_exact(target, case, method, limit):
    x, grad = case.arrays()["x"], case.gradient(dtype=case.weight_dtype or case.dtype)
    back = weight_gradient(target, case, grad, x, method, limit)
    if back is not None:
        expected = reference_gradients.conv_grad_weight(grad, x, case.kernel, **window_of(case))
        assert_rounded(back, expected, np.result_type(grad, *reference.sequence(x)))


@given(case=conv_cases(mixed_dtypes=False), method=METHODS, limit=LIMITS)
def test_gradients_of_random_data(target, case, method, limit):
    arrays, grad, window = case.arrays(integer=False), case.gradient(integer=False), window_of(case)
    x, weight = arrays["x"], arrays["weight"]
    terms = products(grad, weight, x, window)
    absolute = [absolute_values(a) for a in (grad, weight, x)]
    back = input_gradient(target, case, grad, weight, x, method, limit)
    if back is not None:
        expected = reference_gradients.conv_grad_input(grad, weight, shapes_of(x), **window)
        magnitude = reference_gradients.conv_grad_input(absolute[0], absolute[1], shapes_of(x), **window)
        for one, wanted, m in zip(back, reference.sequence(expected), reference.sequence(magnitude), strict=True):
            assert_close(one, wanted, case.result_dtype, terms, magnitude=m)
    back = weight_gradient(target, case, grad, x, method, limit)
    if back is not None:
        expected = reference_gradients.conv_grad_weight(grad, x, case.kernel, **window)
        magnitude = reference_gradients.conv_grad_weight(absolute[0], absolute[2], case.kernel, **window)
        assert_close(back, expected, case.result_dtype, terms, magnitude=magnitude)


@given(case=conv_cases(dtypes=("float64", "complex128"), activations=(None,)))
def test_adjoint_identities(target, case):
    """<conv(x, w), g> = <x, conv_grad_input(g, w)> = <w, conv_grad_weight(g, x)>: the functions agree."""
    arrays, grad, window = case.arrays(integer=False), case.gradient(integer=False), window_of(case)
    arrays |= {"bias": None, "residual": None}
    x, weight = arrays["x"], arrays["weight"]
    views = case.views(arrays, target.to_device, target.xp)
    g = on_device(target, grad, case.residual_layout, case.channel_axis)
    y = target.to_host(cupyconv.conv(views["x"], views["weight"], **window))
    back = cupyconv.conv_grad_input(g, views["weight"], shapes_of(x), **window)
    weight_back = target.to_host(cupyconv.conv_grad_weight(g, views["x"], case.kernel, **window))
    forward = np.vdot(y, grad)
    through_x = sum(np.vdot(a, target.to_host(b)) for a, b in zip(reference.sequence(x), reference.sequence(back)))
    allowed = 1e-12 * np.vdot(case.magnitude(arrays), np.abs(grad))
    assert abs(forward - through_x) <= allowed
    assert abs(forward - np.vdot(weight, weight_back)) <= allowed


# --- pullbacks ----------------------------------------------------------------------------------------------------


@given(case=conv_cases(), method=METHODS, limit=LIMITS)
def test_pullback_of_integers_is_exact(target, case, method, limit):
    arrays, grad = case.arrays(), case.gradient()
    views = case.views(arrays, target.to_device, target.xp)

    def call():
        y, pullback = cupyconv.vjp(cupyconv.conv, **views, **case.parameters, method=method)
        return y, pullback(on_device(target, grad, case.residual_layout, case.channel_axis))

    answer = attempted(call, method, limit)
    if answer is not None:
        y, gradients = answer
        assert_rounded(target.to_host(y), reference.conv(**arrays, **case.parameters), case.result_dtype)
        expected = reference_gradients.conv_gradients(grad, **arrays, **case.parameters)
        for _, one, wanted, dtype in each_gradient(gradients, expected, arrays):
            assert_rounded(target.to_host(one), wanted, dtype)


@given(case=conv_cases(activations=ACTIVATIONS, mixed_dtypes=False))
def test_pullback_of_random_data(target, case):
    arrays, grad, window = case.arrays(integer=False), case.gradient(integer=False), window_of(case)
    views = case.views(arrays, target.to_device, target.xp)
    _, pullback = cupyconv.vjp(cupyconv.conv, **views, **case.parameters)
    gradients = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))

    expected = reference_gradients.conv_gradients(grad, **arrays, **case.parameters)
    v = reference.conv(**arrays, **window)
    error = entering_error(grad, case.activation, v, case.result_dtype, case.terms, case.magnitude(arrays))
    entering = np.abs(grad * reference_gradients.derivative(case.activation, v))
    absolute = {name: None if a is None else absolute_values(a) for name, a in arrays.items()}
    magnitudes, errors = (
        reference_gradients.conv_gradients(g, **absolute, **window) for g in (entering + error, error)
    )
    terms = {"x": products(grad, arrays["weight"], arrays["x"], window), "residual": 1}
    terms["weight"] = terms["bias"] = max(terms["x"], grad.size)
    checks = zip(each_gradient(gradients, expected, arrays), each_array(magnitudes), each_array(errors), strict=True)
    for (name, one, wanted, dtype), magnitude, e in checks:
        assert_within(target.to_host(one), wanted, dtype, terms=terms[name], magnitude=magnitude, entering=e)


@given(
    channels=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    outputs=st.integers(1, 9),
    spatial=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    batch=st.integers(0, 3),
    dtype=st.sampled_from(("float16", "float32", "float64", "complex64")),
    activation=st.sampled_from((None, "relu", ("leaky_relu", 0.25))),
    bias=st.booleans(),
    residual=st.booleans(),
    bare=st.booleans(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=6, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_linmerge_pullback_of_integers_is_exact(
    target, channels, outputs, spatial, batch, dtype, activation, bias, residual, bare, layouts, seed
):
    generator, kind = np.random.default_rng(seed), as_dtype(dtype)

    def values(shape, layout="c_order"):
        return constant_where_broadcast(drawn(generator, shape, kind, 2), layout)

    out_shape = (batch, outputs, *spatial)
    xs = [values((batch, c, *spatial), layout) for c, layout in zip(channels, layouts)]
    arguments = {
        "xs": xs[0] if bare and len(xs) == 1 else xs,
        "weight": values((outputs, sum(channels)), layouts[-2]),
        "bias": values((outputs,)) if bias else None,
        "residual": values(out_shape) if residual else None,
    }
    activation = None if kind.kind == "c" else activation
    grad = values(out_shape, layouts[-1])
    moved = {
        name: None if a is None else on_device(target, a, layouts[-2] if name == "weight" else "c_order")
        for name, a in arguments.items()
        if name != "xs"
    }
    moved_xs = [on_device(target, x, layout) for x, layout in zip(xs, layouts)]
    moved["xs"] = moved_xs if isinstance(arguments["xs"], list) else moved_xs[0]
    y, pullback = cupyconv.vjp(cupyconv.linmerge, **moved, activation=activation)
    assert_rounded(target.to_host(y), reference.linmerge(**arguments, activation=activation), dtype)
    expected = reference_gradients.linmerge_gradients(grad, **arguments, activation=activation)
    arguments["x"] = arguments.pop("xs")
    for _, one, wanted, kind in each_gradient(pullback(on_device(target, grad, layouts[-1])), expected, arguments):
        assert_rounded(target.to_host(one), wanted, kind)


# --- guarantees of a pullback ---------------------------------------------------------------------------------------


def example(target, *, dtype="float32", activation="gelu", xs=2, seed=0):
    """Return the arguments of a `conv` call with all optional arrays, its gradient, and keywords of `conv`."""
    generator = np.random.default_rng(seed)

    def values(*shape):
        return target.to_device(drawn(generator, shape, as_dtype(dtype)))

    arguments = {
        "x": [values(2, 3, 7, 6) for _ in range(xs)],
        "weight": values(4, 3 * xs, 3, 2),
        "bias": values(4),
        "residual": values(2, 4, 5, 5),
    }
    return arguments, values(2, 4, 5, 5), {"activation": activation}


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_same_bits_every_time(target, dtype, activation):
    arguments, grad, settings = example(target, dtype=dtype, activation=activation)
    y, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    first = pullback(grad)
    assert bytes_of(target, y) == bytes_of(target, cupyconv.conv(**arguments, **settings)), "y is conv's"
    pullback(target.to_device(target.to_host(grad) * 2))
    assert bytes_of(target, pullback(grad)) == bytes_of(target, first), "callable again, whatever came between"
    again, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    assert bytes_of(target, again) == bytes_of(target, y)
    assert bytes_of(target, pullback(grad)) == bytes_of(target, first)


@pytest.mark.parametrize("layout", ["c_order", "channels_last"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("function", ["conv", "linmerge"])
def test_every_gradient_has_memory_of_its_own(target, function, activation, layout):
    """A gradient may be modified in place, for example to accumulate several, and no other array changes."""
    arguments, grad, settings = example(target, activation=activation)
    if function == "linmerge":
        arguments["xs"] = [image[:, :, :5, :5] for image in arguments.pop("x")]
        arguments["weight"] = arguments["weight"][:, :, 0, 0]
    grad = on_device(target, target.to_host(grad), layout)
    y, pullback = cupyconv.vjp(getattr(cupyconv, function), **arguments, **settings)
    gradients = pullback(grad)
    arrays = [*each_array(gradients), *each_array(arguments.values()), y, grad]
    for i in range(len(each_array(gradients))):
        before = bytes_of(target, arrays)
        arrays[i][...] = i + 100
        assert [bytes_of(target, arrays) != before for arrays, before in zip(arrays, before)].index(True) == i
        assert bytes_of(target, arrays[i + 1 :]) == before[i + 1 :]


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("function", ["conv", "linmerge", "conv_transpose", "max_pool", "avg_pool"])
def test_a_pullback_names_the_arrays_it_reads(function, activation):
    """Writing to an argument or to the result changes the gradients exactly if it is in `pullback.holds`."""
    ones, others = np.ones, {"bias": np.ones(4), "activation": activation}
    prologue = (np.full(3, 2.0), ones(3), "relu")
    keywords = {
        "conv": {"weight": ones((4, 3, 2)), **others, "residual": ones((2, 4, 5)), "prologue": prologue},
        "linmerge": {"weight": ones((4, 3)), **others, "residual": ones((2, 4, 6)), "prologue": prologue},
        "conv_transpose": {"weight": ones((3, 4, 2)), **others},
        "max_pool": {"kernel_shape": 2},
        "avg_pool": {"kernel_shape": 2},
    }[function]
    x = [ones((2, 2, 6)), ones((2, 1, 6))]
    y, pullback = cupyconv.vjp(getattr(cupyconv, function), x, **keywords)
    arrays = [*x, *reference.sequence(y), *prologue[:2], *(a for a in keywords.values() if isinstance(a, np.ndarray))]
    grad = [ones(one.shape) for one in y] if isinstance(y, list) else ones(y.shape)
    expected = [one.tobytes() for one in each_array(pullback(grad))]
    for array in arrays:
        before = array.copy()
        array[...] = -3
        changed = [one.tobytes() for one in each_array(pullback(grad))] != expected
        assert changed == any(array is held for held in pullback.holds)
        array[...] = before


@pytest.mark.parametrize("batched", [True, False])
def test_the_gradient_of_a_residual_is_channels_last_where_that_of_y_is(target, batched):
    x, weight, grad = np.ones((2, 3, 4, 5)), np.ones((3, 3, 1, 1)), np.arange(120.0).reshape(2, 3, 4, 5)
    x, grad = (x, grad) if batched else (x[0], grad[0])
    for layout in ("c_order", "channels_last"):
        x_there, grad_there = (on_device(target, a, layout, int(batched)) for a in (x, grad))
        _, pullback = cupyconv.vjp(cupyconv.conv, x_there, target.to_device(weight), residual=grad_there)
        residual = pullback(grad_there).residual
        assert residual.strides == grad_there.strides
        assert np.array_equal(target.to_host(residual), grad)


def test_a_pullback_is_linear_in_the_gradient(target):
    arguments, grad, settings = example(target, dtype="float64")
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    once, twice = pullback(grad), pullback(target.to_device(target.to_host(grad) * 2))
    for one, other in zip(each_array(once), each_array(twice), strict=True):
        assert np.array_equal(target.to_host(one) * 2, target.to_host(other)), "a power of two is exact"


@pytest.mark.parametrize("needs", [("x",), ("weight",), ["bias"], {"residual"}, ("weight", "bias"), ()], ids=str)
def test_only_what_is_needed(target, needs):
    arguments, grad, settings = example(target)
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    everything, some = pullback(grad), pullback(grad, needs=needs)
    for name in ("x", "weight", "bias", "residual"):
        wanted = bytes_of(target, getattr(everything, name)) if name in needs else None
        assert bytes_of(target, getattr(some, name)) == wanted, name


def test_what_is_not_needed_is_not_computed(cuda_target):
    arguments, grad, settings = example(cuda_target)
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    log = cuda_target.device.log
    launches = {}
    for name, needs in {"all": None, "no weight": ("x", "bias"), "bias": ("bias",), "none": ()}.items():
        log.clear()
        pullback(grad, needs=needs)
        launches[name] = len(log)
    assert launches["none"] == 0
    assert launches["none"] < launches["bias"] < launches["no weight"] < launches["all"]


def test_an_absent_argument_may_be_needed(target):
    """So one tuple of names works for every layer of a network."""
    x, weight = (target.to_device(np.ones(shape, np.float32)) for shape in ((1, 2, 5), (3, 2, 3)))
    y, pullback = cupyconv.vjp(cupyconv.conv, x, weight)
    gradients = pullback(y, needs=("weight", "bias", "residual", "scale", "shift"))
    assert gradients.weight is not None
    assert gradients.x is gradients.bias is gradients.residual is gradients.scale is gradients.shift is None


def test_every_gradient_has_its_arguments_dtype(target):
    generator = np.random.default_rng(0)
    arguments = {
        "x": (drawn(generator, (2, 3, 6), np.dtype("float16"), 2), drawn(generator, (2, 1, 6), np.dtype("float32"), 2)),
        "weight": drawn(generator, (2, 4, 3), np.dtype("float16"), 2),
        "bias": drawn(generator, (2,), np.dtype("float64"), 2),
        "residual": drawn(generator, (2, 2, 4), np.dtype("float16"), 2),
    }
    moved = {name: target.to_device(a) for name, a in arguments.items() if name != "x"}
    moved["x"] = tuple(map(target.to_device, arguments["x"]))
    y, pullback = cupyconv.vjp(cupyconv.conv, **moved)
    assert y.dtype == np.float32
    grad = drawn(generator, (2, 2, 4), np.dtype("float32"), 2)
    expected = reference_gradients.conv_gradients(grad, **arguments)
    for _, one, wanted, dtype in each_gradient(pullback(target.to_device(grad)), expected, arguments):
        assert_rounded(target.to_host(one), wanted, dtype)


@pytest.mark.parametrize("x_kind, weight_kind", [("float64", "complex128"), ("complex64", "float32")])
def test_the_gradient_of_a_real_argument_is_real(target, x_kind, weight_kind):
    generator = np.random.default_rng(1)
    x, weight = drawn(generator, (2, 3, 6), np.dtype(x_kind), 2), drawn(generator, (2, 3, 3), np.dtype(weight_kind), 2)
    grad = drawn(generator, (2, 2, 4), np.result_type(x, weight), 2)
    _, pullback = cupyconv.vjp(cupyconv.conv, target.to_device(x), target.to_device(weight))
    expected = reference_gradients.conv_gradients(grad, x, weight)
    arguments = {"x": x, "weight": weight}
    for _, one, wanted, dtype in each_gradient(pullback(target.to_device(grad)), expected, arguments):
        assert_rounded(target.to_host(one), wanted, dtype)


def test_weight_gradient_of_a_real_and_a_complex_input(target):
    generator = np.random.default_rng(2)
    xs = [drawn(generator, (2, 3, 6), np.dtype(dtype), 2) for dtype in ("float32", "complex64")]
    grad = drawn(generator, (2, 2, 4), np.dtype("float32"), 2)
    actual = cupyconv.conv_grad_weight(target.to_device(grad), [target.to_device(x) for x in xs], 3)
    expected = reference_gradients.conv_grad_weight(grad, np.concatenate(xs, 1), (3,))
    assert_rounded(target.to_host(actual), expected, np.dtype("complex64"))


def test_a_list_of_one_stays_a_list(target):
    x, weight = (target.to_device(np.ones(shape, np.float32)) for shape in ((1, 2, 5), (3, 2, 3)))
    for given_x, is_list in ((x, False), ([x], True), ((x,), True)):
        y, pullback = cupyconv.vjp(cupyconv.conv, given_x, weight)
        assert isinstance(pullback(y).x, list) == is_list
        merged, pullback = cupyconv.vjp(cupyconv.linmerge, given_x, weight[:, :, 0])
        assert isinstance(pullback(merged).x, list) == is_list
    for shapes, is_list in (((1, 2, 5), False), ([1, 2, 5], False), ([(1, 2, 5)], True), (((1, 2, 5),), True)):
        assert isinstance(cupyconv.conv_grad_input(y, weight, shapes), list) == is_list


def test_launches_do_not_grow_with_the_batch(cuda_target):
    log = cuda_target.device.log

    def launches(batch):
        xs = [cuda_target.to_device(np.ones((batch, 2, 5, 6), np.float32)) for _ in range(2)]
        weight = cuda_target.to_device(np.ones((3, 4, 3, 3), np.float32))
        y, pullback = cupyconv.vjp(
            cupyconv.conv, xs, weight, cuda_target.to_device(np.ones(3, np.float32)), activation="tanh"
        )
        log.clear()
        pullback(y)
        return len(log)

    assert launches(16) == launches(8)


def test_gradients_of_a_merge_are_never_one_array(cuda_target):
    """In addition to its results, a call allocates only its workspace, which cannot hold their concatenation."""
    device, limit = cuda_target.device, 16 * 1024
    shapes = [(2, 16, 32, 32), (2, 8, 32, 32)]
    grad, weight = (cuda_target.to_device(np.ones(s, np.float32)) for s in ((2, 4, 32, 32), (4, 24, 1, 1)))
    out = [device.empty(shape, np.float32) for shape in shapes]
    before = device.peak_bytes = device.allocated_bytes
    with cupyconv.options(workspace_limit=limit):
        cupyconv.conv_grad_input(grad, weight, shapes, out=out)
    assert device.peak_bytes - before <= limit
    assert all((cuda_target.to_host(one) == 4).all() for one in out)


# --- activations ----------------------------------------------------------------------------------------------------

BENDS = (-3.0, -2.5, -2.0, -0.5, 0.0, -0.0, 0.5, 2.0, 2.5, 3.0, 5.0, 6.0)
FAR = (-1000.0, -100.0, -20.0, 20.0, 100.0, 1000.0)
#: Cases in which y says little about the derivative: slopes of another sign, flat pieces, no slope at all.
SPECIFICATIONS = (
    *(spec for spec in ACTIVATIONS if spec is not None),
    ("leaky_relu", -0.5),
    ("leaky_relu", 0),
    ("leaky_relu", 2),
    ("clip", 0.5, 0.5),
    ("clip", float("-inf"), 1),
    ("elu", -0.5),
    ("hard_sigmoid", -0.25, 0.5),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("specification", SPECIFICATIONS, ids=str)
def test_derivatives(target, specification, dtype):
    """Derivatives are right where functions bend and far from zero; the convolution multiplies by 1."""
    kind = as_dtype(dtype)
    v = np.array([*np.linspace(-8, 8, 101), *BENDS, *FAR]).astype(kind)
    _, pullback = cupyconv.vjp(
        cupyconv.conv,
        target.to_device(v[None, None]),
        target.to_device(np.ones((1, 1, 1), kind)),
        activation=specification,
    )
    actual = pullback(target.to_device(np.full((1, 1, v.size), 2, kind))).x
    wide = reference.wide(v)
    expected = 2 * reference_gradients.derivative(specification, wide)
    allowed = 8 * float(finfo(kind).eps) * (1 + np.abs(expected))
    if "hard" in str(specification):  # alpha v + beta may be rounded to either side of a bend
        near = 1e-6 * np.abs(wide)
        for shift in (-near, near):
            beside = 2 * reference_gradients.derivative(specification, wide + shift)
            allowed = allowed + np.abs(beside - expected)
    assert actual.dtype == kind
    compare(target.to_host(actual)[0, 0], expected.astype(kind), allowed)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_relu_lets_nothing_through_at_zero(target, dtype):
    zeros = target.to_device(np.array([0.0, -0.0, 0.0], dtype)[None, None])
    _, pullback = cupyconv.vjp(cupyconv.conv, zeros, target.to_device(np.ones((1, 1, 1), dtype)), activation="relu")
    assert (target.to_host(pullback(target.to_device(np.ones((1, 1, 3), dtype))).x) == 0).all()


# --- empty axes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, channels, outputs", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_axes(target, batch, channels, outputs):
    def ones(*shape):
        return target.to_device(np.ones(shape, np.float32))

    x, weight, grad = ones(batch, channels, 5), ones(outputs, channels, 3), ones(batch, outputs, 3)
    for back in (cupyconv.conv_grad_input(grad, weight, x.shape), cupyconv.vjp(cupyconv.conv, x, weight)[1](grad).x):
        assert back.shape == x.shape and (target.to_host(back) == 0).all()
    for back in (cupyconv.conv_grad_weight(grad, x, (3,)), cupyconv.vjp(cupyconv.conv, x, weight)[1](grad).weight):
        assert back.shape == weight.shape and (target.to_host(back) == 0).all()
    bias = cupyconv.vjp(cupyconv.conv, x, weight, ones(outputs))[1](grad).bias
    assert bias.shape == (outputs,) and (target.to_host(bias) == batch * 3).all()


# --- bad input ------------------------------------------------------------------------------------------------------

INPUT = dict(grad=Ones((2, 4, 6, 7)), weight=Ones((4, 5, 3, 3)), input_shape=(2, 5, 8, 9))
WEIGHT = dict(grad=Ones((2, 4, 6, 7)), x=Ones((2, 5, 8, 9)), kernel_shape=(3, 3))
SHAPE_OF_GRAD = [r"\bgrad\b", r"\(2, 4, 6, 7\)"]

INPUT_REFUSALS = [
    pytest.param(ValueError, words, changes, id=name)
    for name, words, changes in (
        ("grad of another size", [r"\bgrad\b", r"\(2, 4, 6, 6\)", r"\(2, 4, 6, 7\)"], dict(grad=Ones((2, 4, 6, 6)))),
        ("grad of another batch", [r"\bgrad\b", r"\(3, 4, 6, 7\)", r"\(2, 4, 6, 7\)"], dict(grad=Ones((3, 4, 6, 7)))),
        ("grad of other channels", [r"\bgrad\b", r"\(2, 3, 6, 7\)", r"\(2, 4, 6, 7\)"], dict(grad=Ones((2, 3, 6, 7)))),
        ("grad without batch", [r"\bgrad\b", r"\(4, 6, 7\)", r"\(2, 4, 6, 7\)"], dict(grad=Ones((4, 6, 7)))),
        ("stride forgotten", [*SHAPE_OF_GRAD, r"\(2, 4, 3, 4\)"], dict(stride=2)),
        ("padding forgotten", [*SHAPE_OF_GRAD, r"\(2, 4, 8, 9\)"], dict(padding="same")),
        ("channels of the shape", ["input_shape", "5", "6"], dict(input_shape=(2, 6, 8, 9))),
        ("rank of the shape", ["input_shape", r"\(8, 9\)"], dict(input_shape=(8, 9))),
        ("no shapes", ["input_shape", "at least one"], dict(input_shape=[])),
        ("shapes that differ", ["input_shape", r"\(2, 2, 8, 8\)"], dict(input_shape=[(2, 3, 8, 9), (2, 2, 8, 8)])),
        ("too few outs", [r"\bout\b", "2", "1"], dict(input_shape=[(2, 3, 8, 9), (2, 2, 8, 9)], out=[Ones((2, 3, 8, 9))])),
        ("out of another size", [r"\bout\b", r"\(2, 5, 8, 8\)", r"\(2, 5, 8, 9\)"], dict(out=Ones((2, 5, 8, 8)))),
        ("unknown method", ["method", "'im2col'"], dict(method="im2col")),
    )
]  # fmt: skip
WEIGHT_REFUSALS = [
    pytest.param(ValueError, words, changes, id=name)
    for name, words, changes in (
        ("grad of another size", [r"\bgrad\b", r"\(2, 4, 6, 6\)", "6, 7"], dict(grad=Ones((2, 4, 6, 6)))),
        ("grad of another batch", [r"\bgrad\b", r"\(3, 4, 6, 7\)"], dict(grad=Ones((3, 4, 6, 7)))),
        ("grad without batch", [r"\bgrad\b", r"\(4, 6, 7\)"], dict(grad=Ones((4, 6, 7)))),
        ("kernel of another size", [*SHAPE_OF_GRAD, "4, 5"], dict(kernel_shape=(5, 5))),
        ("kernel with channels", ["kernel_shape", r"\(4, 5, 3, 3\)"], dict(kernel_shape=(4, 5, 3, 3))),
        ("groups", ["groups 2", "5 channels"], dict(groups=2)),
        ("groups of grad", ["groups 5", r"4 channels of grad, of shape \(2, 4, 6, 7\)"], dict(groups=5)),
        ("out of another size", [r"\bout\b", r"\(4, 5, 3, 2\)", r"\(4, 5, 3, 3\)"], dict(out=Ones((4, 5, 3, 2)))),
    )
]
KINDS = [
    pytest.param(TypeError, words, changes, id=name)
    for name, words, changes in (
        ("integer grad", [r"\bgrad\b", "int32", "astype"], dict(grad=Ones((2, 4, 6, 7), "int32"))),
        ("two 16-bit types", [r"\bfloat16", "bfloat16"], dict(grad=Ones((2, 4, 6, 7), "float16"), weight=Ones((4, 5, 3, 3), ml_dtypes.bfloat16))),
        ("out of another precision", [r"\bout\b", "float64", "float32"], dict(out=Ones((2, 5, 8, 9), "float64"))),
        ("no grad", [r"\bgrad\b", "None"], dict(grad=None)),
        ("foreign grad", [r"\bgrad\b", r"torch\.Tensor", "from_dlpack"], dict(grad=foreign("torch", "Tensor"))),
    )
]  # fmt: skip


@pytest.mark.parametrize("error, words, changes", [*INPUT_REFUSALS, *KINDS])
def test_input_gradient_refuses(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (INPUT | changes).items()}
    assert_refused(target, error, words, cupyconv.conv_grad_input, **arguments)


@pytest.mark.parametrize("error, words, changes", WEIGHT_REFUSALS)
def test_weight_gradient_refuses(target, error, words, changes):
    arguments = {name: placed(value, target) for name, value in (WEIGHT | changes).items()}
    assert_refused(target, error, words, cupyconv.conv_grad_weight, **arguments)


def test_the_calls_that_are_varied_are_valid(target):
    back = cupyconv.conv_grad_input(**{name: placed(value, target) for name, value in INPUT.items()})
    assert back.shape == (2, 5, 8, 9) and float(target.to_host(back)[0, 0, 4, 4]) == 36
    weight = cupyconv.conv_grad_weight(**{name: placed(value, target) for name, value in WEIGHT.items()})
    assert weight.shape == (4, 5, 3, 3) and (target.to_host(weight) == 2 * 42).all()


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (4, 5, 5), (1, 2, 4, 5, 5), (2, 1, 5, 5), ()], ids=str)
def test_a_pullback_names_both_shapes(target, shape):
    arguments, _, settings = example(target)
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    words = [r"\bgrad\b", str(shape).replace("(", r"\(").replace(")", r"\)"), r"\(2, 4, 5, 5\)"]
    assert_refused(target, ValueError, words, pullback, target.to_device(np.ones(shape, np.float32)))


def test_a_pullback_refuses_what_is_no_gradient_of_y(target):
    arguments, grad, settings = example(target)
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    for strange, words in (
        (target.to_device(np.ones(grad.shape, np.int32)), ["grad", "int32", "astype"]),
        (target.to_device(np.ones(grad.shape, np.complex64)), ["grad", "complex64", "float32"]),
        (foreign("torch", "Tensor"), ["grad", r"torch\.Tensor"]),
        (None, ["grad", "None"]),
    ):
        assert_refused(target, TypeError, words, pullback, strange)
    assert_refused(target, ValueError, ["needs", "'weigth'", "weight"], pullback, grad, needs=("weigth",))


def test_libraries_are_not_mixed(cuda_target):
    arguments, grad, settings = example(cuda_target)
    _, pullback = cupyconv.vjp(cupyconv.conv, **arguments, **settings)
    on_host = cuda_target.to_host(grad)
    weight, x = arguments["weight"], arguments["x"]
    shapes = [array.shape for array in x]
    for function, *given_arguments in (
        (pullback, on_host),
        (cupyconv.conv_grad_input, on_host, weight, shapes),
        (cupyconv.conv_grad_weight, on_host, x, (3, 2)),
    ):
        assert_refused(cuda_target, TypeError, ["grad is numpy.ndarray"], function, *given_arguments)
    with_host_x = [x[0], cuda_target.to_host(x[1])]
    words = [r"x\[1\] is numpy.ndarray"]
    assert_refused(cuda_target, TypeError, words, cupyconv.conv_grad_weight, grad, with_host_x, (3, 2))


# --- out ------------------------------------------------------------------------------------------------------------


def test_out_may_not_overlap_an_argument_or_another_out(target):
    grad, weight = (target.to_device(np.ones(shape, np.float32)) for shape in ((2, 4, 6), (4, 4, 1)))
    assert_refused(
        target, ValueError, [r"\bout\b", "grad"], cupyconv.conv_grad_input, grad, weight, (2, 4, 6), out=grad
    )
    shapes, twice = [(2, 2, 6), (2, 2, 6)], target.to_device(np.ones((2, 2, 6), np.float32))
    words = [r"\bout\b", "overlap|share"]
    assert_refused(target, ValueError, words, cupyconv.conv_grad_input, grad, weight, shapes, out=[twice, twice])
    x = target.to_device(np.ones((4, 4, 1), np.float32))
    grad = target.to_device(np.ones((4, 4, 1), np.float32))
    words = [r"\bout\b", r"\bx\b"]
    assert_refused(target, ValueError, words, cupyconv.conv_grad_weight, grad, x, (1,), out=x)


def test_out_is_written_completely_and_nothing_beside_it(target):
    """Gradients fold back, and no window reads some elements; the border of NaN around each result is unchanged."""
    generator = np.random.default_rng(0)
    grad, weight = drawn(generator, (2, 3, 3), np.dtype("f4"), 2), drawn(generator, (3, 4, 2), np.dtype("f4"), 2)
    settings = dict(stride=3, padding=((1, 0),), padding_mode="wrap")
    shapes = [(2, 3, 8), (2, 1, 8)]
    bases = [target.to_device(nan_filled((n + 2, c + 2, size + 2), np.dtype("f4"))) for n, c, size in shapes]
    out = [base[1:-1, 1:-1, 1:-1] for base in bases]
    cupyconv.conv_grad_input(target.to_device(grad), target.to_device(weight), shapes, **settings, out=out)
    for base, wanted in zip(bases, reference_gradients.conv_grad_input(grad, weight, shapes, **settings)):
        assert np.array_equal(target.to_host(base), np.pad(wanted, 1, constant_values=np.nan), equal_nan=True)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@needs_torch
@given(case=conv_cases(dtypes=("float64",), activations=ACTIVATIONS))
def test_against_torch(target, case):
    import torch_peer

    arrays, grad = case.arrays(integer=False), case.gradient(integer=False)
    _, pullback = cupyconv.vjp(cupyconv.conv, **case.views(arrays, target.to_device, target.xp), **case.parameters)
    gradients = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))
    expected = torch_peer.conv_gradients(grad, **arrays, **case.parameters)
    for name, one, wanted, _ in each_gradient(gradients, expected, arrays):
        np.testing.assert_allclose(target.to_host(one), wanted, rtol=1e-9, atol=1e-9, err_msg=name)


def test_views_of_every_layout(target):
    """Gradients have the argument's shape, and layouts such as channels-last, reversed or broadcast change no value."""
    generator = np.random.default_rng(3)
    x, weight, grad = (drawn(generator, s, np.dtype("f4"), 2) for s in ((2, 4, 5, 6), (3, 4, 3, 3), (2, 3, 3, 4)))
    for layout in LAYOUTS:
        arrays = [constant_where_broadcast(a, layout) for a in (x, weight, grad)]
        moved = [with_layout(a, layout, target.to_device, target.xp) for a in arrays]
        _, pullback = cupyconv.vjp(cupyconv.conv, moved[0], moved[1])
        expected = reference_gradients.conv_gradients(arrays[2], arrays[0], arrays[1])
        for _, one, wanted, dtype in each_gradient(pullback(moved[2]), expected, {"x": x, "weight": weight}):
            assert_rounded(target.to_host(one), wanted, dtype)
