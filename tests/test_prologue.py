"""Prologues: scale, shift and activation are applied to each input element as it is loaded.

The reference transforms whole inputs first and convolves the copies.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
import reference
import reference_gradients
from hypothesis import given
from hypothesis import strategies as st
from peak_memory import peak_bytes
from pullbacks import assert_rounded, attempted, bytes_of, on_device
from strategies import ACTIVATIONS, DTYPES, absolute_values, as_dtype, conv_cases, share_of_examples
from test_implicit_gemm import MACROS, run_forced, tile_of
from test_repetition import assert_warm_is_fresh
from tolerance import assert_close, assert_exact, compare, finfo, rounded, tolerance

import cupyconv
from cupyconv.call.operation import forget_calls

METHODS = st.sampled_from(("auto", "direct", "gemm", "implicit_gemm"))
LIMITS = st.sampled_from((None, None, 20_000, 4_000))
#: Activations that map integers to integers.
INTEGER_ACTIVATIONS = (None, "relu", "relu6", ("clip", -1, 2))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def dtypes_on(target):
    """Return all dtypes, but few on the host device, where each one compiles every kernel again."""
    return DTYPES if target.name != "host_device" else ("float16", "float32", "complex64")


def smaller(x):
    """Return integers of half the size, so that a scale and a shift of 1 keep them within the case's bounds."""
    half = np.trunc(reference.wide(x).real / 2)
    return (half + 1j * np.trunc(x.imag / 2) if x.dtype.kind == "c" else half).astype(x.dtype)


def drawn_prologue(data, case, activations, *, integer):
    """Return (scale, shift, activation) for a case; the vectors have the precision of transformed elements."""
    generator, channels = np.random.default_rng((case.seed, 2)), sum(case.channels)
    dtype = np.result_type(as_dtype(case.dtype), np.float32 if case.result_dtype.itemsize == 2 else case.dtype)
    if case.dtype == "bfloat16":
        dtype = np.dtype(np.float32)

    def vector():
        if integer:
            return generator.choice([-1, 0, 1, 1j] if dtype.kind == "c" else [-1, 0, 1], channels).astype(dtype)
        values = generator.normal(size=channels)
        return (values + 1j * generator.normal(size=channels) if dtype.kind == "c" else values).astype(dtype)

    activation = None if case.result_dtype.kind == "c" else data.draw(st.sampled_from(activations))
    scale, shift = (vector() if data.draw(st.booleans()) else None for _ in range(2))
    return scale, shift, activation


def moved(target, prologue):
    *vectors, activation = prologue
    return (*(None if vector is None else target.to_device(vector) for vector in vectors), activation)


def run(target, case, arrays, prologue, method, limit):
    """Run the case on a target; return None if it was refused for a stated reason."""
    views = case.views(arrays, target.to_device, target.xp)
    out = case.new_out(target.to_device, target.xp)
    arguments = {**views, **case.parameters, "prologue": moved(target, prologue), "method": method, "out": out}
    result = attempted(lambda: cupyconv.conv(**arguments), method, limit)
    return None if result is None else target.to_host(result)


# --- results ----------------------------------------------------------------------------------------------------


@share_of_examples(0.6)
@given(data=st.data(), method=METHODS, limit=LIMITS)
def test_integers_are_exact(target, data, method, limit):
    case = data.draw(conv_cases(dtypes=dtypes_on(target), mixed_dtypes=target.name == "numpy"))
    prologue = drawn_prologue(data, case, INTEGER_ACTIVATIONS, integer=True)
    arrays = case.arrays()
    xs = [smaller(x) for x in reference.sequence(arrays["x"])]
    arrays["x"] = xs[0] if case.bare_x else xs
    actual = run(target, case, arrays, prologue, method, limit)
    if actual is not None:
        images = reference.transformed(xs, *prologue, axis=case.channel_axis)
        expected = reference.conv(**{**arrays, "x": images}, **case.parameters)
        assert_exact(actual, expected, case.result_dtype)


def transform_error(xs, images, prologue, dtype, axis):
    """Return the error allowed for transformed elements: a few roundings in the dtype that may store them."""
    scale, shift, activation = prologue
    absolute = [None if vector is None else np.abs(vector) for vector in (scale, shift)]
    sizes = reference.transformed([np.abs(reference.wide(x)) for x in xs], *absolute, None, axis=axis)
    eps = 4 * float(finfo(dtype).eps)
    return [eps * (size + np.abs(image) + (activation is not None)) for size, image in zip(sizes, images)]


@share_of_examples(0.5)
@given(data=st.data(), method=METHODS, limit=LIMITS)
def test_random_data(target, data, method, limit):
    case = data.draw(conv_cases(dtypes=dtypes_on(target), mixed_dtypes=False, activations=(None, "relu")))
    prologue = drawn_prologue(data, case, ACTIVATIONS, integer=False)
    arrays, window = case.arrays(integer=False), {**case.parameters, "activation": None}
    actual = run(target, case, arrays, prologue, method, limit)
    if actual is not None:
        xs = reference.sequence(arrays["x"])
        images = reference.transformed(xs, *prologue, axis=case.channel_axis)
        errors = transform_error(xs, images, prologue, case.result_dtype, case.channel_axis)
        expected = reference.conv(**{**arrays, "x": images}, **case.parameters)
        magnitude = case.magnitude({**arrays, "x": images})
        entering = reference.conv(errors, absolute_values(arrays["weight"]), **window)
        allowed = tolerance(expected, case.result_dtype, case.terms, magnitude) + entering
        compare(actual, rounded(expected, case.result_dtype), allowed)


@pytest.mark.parametrize("layout", ["c_order", "reversed", "stepped", "window"])
@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_vectors_of_any_stride(target, method, layout):
    generator = np.random.default_rng(0)
    xs = [generator.integers(-3, 4, (2, c, 6, 5)).astype(np.float32) for c in (2, 3)]
    weight = generator.integers(-3, 4, (4, 5, 3, 3)).astype(np.float32)
    scale, shift = generator.integers(-3, 4, (2, 5)).astype(np.float32)
    prologue = on_device(target, scale, layout), on_device(target, shift, layout), "relu"
    y = cupyconv.conv([target.to_device(x) for x in xs], target.to_device(weight), prologue=prologue, method=method)
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    assert_exact(target.to_host(y), reference.conv(images, weight), np.float32)


@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_more_inputs_than_a_kernel_has_room_for(target, method):
    """Columns need several launches, each starting at a later channel of scale and shift; the fused merge needs one."""
    generator = np.random.default_rng(0)
    xs = [generator.integers(-3, 4, (1, 1, 24)).astype(np.float32) for _ in range(70)]
    weight = generator.integers(-3, 4, (3, 70)).astype(np.float32)
    scale, shift = generator.integers(-3, 4, (2, 70)).astype(np.float32)
    y = cupyconv.linmerge(
        [target.to_device(x) for x in xs], target.to_device(weight),
        prologue=moved(target, (scale, shift, "relu")), method=method,
    )  # fmt: skip
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    assert_exact(target.to_host(y), reference.linmerge(images, weight), np.float32)


@pytest.mark.parametrize("spatial", [(), (7,), (2, 3, 2, 2)])
def test_linmerge(target, spatial):
    generator = np.random.default_rng(0)
    xs = [generator.integers(-3, 4, (2, c, *spatial)).astype(np.float32) for c in (2, 0, 3)]
    weight = generator.integers(-3, 4, (4, 5)).astype(np.float32)
    scale, shift = generator.integers(-3, 4, (2, 5)).astype(np.float32)
    y = cupyconv.linmerge(
        [target.to_device(x) for x in xs], target.to_device(weight), prologue=moved(target, (scale, shift, "relu"))
    )
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    assert_exact(target.to_host(y), reference.linmerge(images, weight), np.float32)


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 2)])
def test_depthwise_kernels(target, kernel, stride):
    generator = np.random.default_rng(0)
    x = generator.integers(-3, 4, (2, 5, 13, 11)).astype(np.float32)
    weight = generator.integers(-3, 4, (10, 1, kernel, kernel)).astype(np.float32)
    scale, shift = generator.integers(-3, 4, (2, 5)).astype(np.float32)
    window = {"padding": "same", "stride": stride, "groups": 5}
    y = cupyconv.conv(
        target.to_device(x), target.to_device(weight), prologue=moved(target, (scale, shift, "relu")),
        method="direct", **window,
    )  # fmt: skip
    (image,) = reference.transformed(x, scale, shift, "relu", axis=1)
    assert_exact(target.to_host(y), reference.conv(image, weight, **window), np.float32)


@pytest.mark.parametrize("macros", [m for m in MACROS if "PROLOGUE" in m], ids=lambda m: "-".join(m.values()))
def test_implicit_gemm(cuda_target, macros):
    """Results are right with padding and with channels that are not whole K-chunks, so that slabs end within taps."""
    generator = np.random.default_rng(0)
    dtype = as_dtype(macros["DTYPE"])
    xs = [generator.integers(-1, 2, (2, c, 6, 7)).astype(dtype) for c in (3, 13, 6)]
    weight = generator.integers(-1, 2, (5, 22, 3, 2)).astype(dtype)
    scale, shift = generator.integers(-1, 2, (2, 22)).astype(dtype if dtype.itemsize == 8 else np.float32)
    activation = None if dtype.kind == "c" else "relu"
    window = {"padding": ((2, 1), (0, 1)), "dilation": (2, 1), "padding_mode": "constant"}
    arguments = {
        "x": [cuda_target.to_device(x) for x in xs],
        "weight": cuda_target.to_device(weight),
        "prologue": (cuda_target.to_device(scale), cuda_target.to_device(shift), activation),
    }
    y, plan = run_forced(cuda_target, {**arguments, **window}, macros["ARITHMETIC"], tile_of(macros))
    assert macros in [dict(step.kernel.macros) for step in plan.steps]
    images = reference.transformed(xs, scale, shift, activation, axis=1)
    assert_exact(y, reference.conv(images, weight, **window), dtype)


@pytest.mark.parametrize("dtype, arithmetic", [("float16", "MMA"), ("bfloat16", "MMA"), ("float32", "TF32")])
@pytest.mark.parametrize("width", [8, 7])
def test_implicit_gemm_of_moved_inputs(cuda_target, dtype, arithmetic, width):
    """The copy transforms the inputs, but neither padding nor the channels that fill up a vector."""
    generator = np.random.default_rng(0)
    xs = [generator.integers(-1, 2, (2, c, 6, width)).astype(as_dtype(dtype)) for c in (3, 13, 6)]
    weight = generator.integers(-1, 2, (5, 22, 3, 2)).astype(as_dtype(dtype))
    scale, shift = generator.integers(-1, 2, (2, 22)).astype(np.float32)
    arguments = {
        "x": [cuda_target.to_device(x) for x in xs],
        "weight": cuda_target.to_device(weight),
        "prologue": (cuda_target.to_device(scale), cuda_target.to_device(shift), "relu"),
    }
    y, plan = run_forced(cuda_target, {**arguments, "padding": 1}, arithmetic, (64, 64), moves=True)
    assert plan.steps[0].kernel.macros == (("DTYPE", dtype), ("PROLOGUE", "1"))
    images = reference.transformed(xs, scale, shift, "relu", axis=1)
    assert_exact(y, reference.conv(images, weight, padding=1), as_dtype(dtype))


# --- what a prologue is -------------------------------------------------------------------------------------------


@pytest.mark.grid(
    method_and_groups=[("direct", 1), ("direct", 2), ("gemm", 1), ("implicit_gemm", 1)],
    activation=[None, "sigmoid", "relu"],
    shift=[5.0, np.nan, np.inf],
)
def test_padding_is_not_transformed(target, method_and_groups, shift, activation):
    """A window of padding alone gives 0, whatever the prologue makes of a zero of the input."""
    method, groups = method_and_groups
    if target.name == "numpy" and method == "implicit_gemm":
        pytest.skip("a method of GPUs")
    x, weight = np.zeros((1, 2, 3, 4), np.float32), np.ones((2, 2 // groups, 2, 2), np.float32)
    vector = np.full(2, shift, np.float32)
    y = cupyconv.conv(
        target.to_device(x), target.to_device(weight), padding=2, groups=groups, method=method,
        prologue=(None, target.to_device(vector), activation),
    )  # fmt: skip
    images = reference.transformed(x, None, vector, activation, axis=1)
    expected = reference.conv(images, weight, padding=2, groups=groups)
    assert (expected[:, :, 0] == 0).all() and (expected[:, :, 2, 2] != 0).all()
    assert_close(target.to_host(y), expected, np.float32, 8, magnitude=50)


@pytest.mark.parametrize("method", ["direct", "gemm"])
def test_values_that_are_not_finite(target, method):
    """relu of NaN is NaN, of -inf 0; 0 times an infinity is NaN."""
    x = np.array([[[1, np.nan, -np.inf, np.inf, 2]]], np.float32)
    weight, one = np.ones((1, 1, 1), np.float32), np.ones(1, np.float32)
    for scale in (one, 0 * one, -one):
        y = cupyconv.conv(
            target.to_device(x), target.to_device(weight), method=method,
            prologue=(target.to_device(scale), None, "relu"),
        )  # fmt: skip
        (expected,) = reference.transformed(x, scale, None, "relu", axis=1)
        assert_exact(target.to_host(y), expected, np.float32)


@pytest.mark.parametrize("dtype, vector", [("float32", "float64"), ("float16", "float32"), ("float16", "float16")])
def test_vectors_do_not_widen_the_result(target, dtype, vector):
    """Vectors do not widen the result, and those of a 16-bit image may be float32, the dtype of the transformation."""
    x, weight = np.full((1, 2, 5), 3, dtype), np.ones((1, 2, 1), dtype)
    scale = np.array([1 + 2**-10, 1], vector)
    for method in ("direct", "gemm"):
        y = cupyconv.conv(
            target.to_device(x), target.to_device(weight), prologue=moved(target, (scale, scale, None)), method=method
        )
        assert y.dtype == dtype
        images = reference.transformed(x, scale, scale, None, axis=1)
        assert_close(target.to_host(y), reference.conv(images, weight), dtype, 2, magnitude=20)


def test_no_prologue_at_all(target):
    """No prologue and a prologue of three `None` are the same call."""
    x, weight = target.to_device(np.ones((1, 2, 9), np.float32)), target.to_device(np.ones((2, 2, 3), np.float32))
    plans = [cupyconv.explain(cupyconv.conv, x, weight, prologue=p) for p in (None, (None, None, None), [None] * 3)]
    assert plans[0] == plans[1] == plans[2]
    y = cupyconv.conv(x, weight, prologue=(None, None, None))
    assert bytes_of(target, y) == bytes_of(target, cupyconv.conv(x, weight))


def test_explain_says_so():
    x, weight, scale = np.ones((1, 16, 20, 20), np.float32), np.ones((8, 16, 3, 3), np.float32), np.ones(16, np.float32)
    for on, method in (
        (None, "gemm"),
        (None, "direct"),
        ("sm_90", "direct"),
        ("sm_90", "gemm"),
        ("sm_90", "implicit_gemm"),
    ):
        page = str(cupyconv.explain(cupyconv.conv, x, weight, prologue=(scale, scale, "relu"), method=method, on=on))
        assert "relu(scale * x + shift)" in page, page
    half = cupyconv.explain(cupyconv.conv, x.astype(np.float16), weight.astype(np.float16), on="sm_90",
                            prologue=(scale.astype(np.float16), None, None))  # fmt: skip
    assert "scale: float16 -> float32" in str(half)


def test_a_batch_normalisation_before_a_convolution(target):
    """A batch normalization before a convolution works as the documentation of `fold_batchnorm` says."""
    generator = np.random.default_rng(0)
    x, weight = generator.normal(size=(2, 3, 8)), generator.normal(size=(4, 3, 3))
    mean, gamma, beta = generator.normal(size=(3, 3))
    var = generator.uniform(0.5, 2, 3)
    scale = gamma / np.sqrt(var + 1e-5)
    column = (slice(None), None)
    normalised = gamma[column] * (x - mean[column]) / np.sqrt(var[column] + 1e-5) + beta[column]
    y = cupyconv.conv(
        target.to_device(x), target.to_device(weight), prologue=moved(target, (scale, beta - mean * scale, "relu"))
    )
    assert_close(target.to_host(y), reference.conv(np.maximum(normalised, 0), weight), np.float64, 9, magnitude=200)


def test_no_transformed_copy_is_made():
    """On NumPy transformed blocks are in the workspace, which never holds as much as one input."""
    xs = [np.ones((1, 8, 256, 256), np.float32) for _ in range(3)]
    vector, out = np.ones(24, np.float32), np.empty((1, 4, 256, 256), np.float32)
    few = [x[..., :40, :40] for x in xs]
    for weight, padding in ((np.ones((4, 24, 3, 3), np.float32), 1), (np.ones((4, 24, 1, 1), np.float32), 0)):
        with cupyconv.options(workspace_limit=1 << 20, threads=1):
            prologue = vector, vector, "relu"
            cupyconv.conv(few, weight, padding=padding, prologue=prologue)  # imports the modules first
            peak = peak_bytes(partial(cupyconv.conv, xs, weight, padding=padding, prologue=prologue, out=out))
        assert peak < 1.5 * (1 << 20) < xs[0].nbytes


def test_a_warm_call_is_a_fresh_call(target):
    """Calls that differ in one part of the prologue, some of them invalid, behave alike in first and repeated calls."""
    generator = np.random.default_rng(0)
    x, weight = (target.to_device(generator.normal(size=s).astype(np.float32)) for s in ((1, 3, 9), (2, 3, 3)))
    a, b, double = (target.to_device(generator.normal(size=3).astype(d)) for d in ("f4", "f4", "f8"))
    wide = target.to_device(generator.normal(size=6).astype(np.float32))
    prologues = [
        None, (a, None, None), (None, a, None), (a, b, None), (a, b, "relu"), [a, b, "relu"], (a, b, ("clip", 0, 1)),
        (a, b, ("clip", 0.0, 1.0)), (b, a, "relu"), (None, None, "relu"), (double, b, "relu"), (wide[::2], b, "relu"),
        (wide, b, "relu"), (a, b, ("clip", 1, 0)), (a, b), "relu", (a, [1.0, 2.0, 3.0], None), (1.0, None, None),
    ]  # fmt: skip
    calls = [lambda p=p: cupyconv.conv(x, weight, prologue=p) for p in prologues]
    calls += [lambda: cupyconv.conv(x, weight, a[:2]), lambda: cupyconv.conv(x, weight, out=a)]
    forget_calls()
    outcomes = assert_warm_is_fresh(target, calls)
    assert [isinstance(outcome[0], type) for outcome in outcomes[:18]] == [False] * 12 + [True] * 6
    assert outcomes[4] == outcomes[5] and outcomes[6] == outcomes[7] and outcomes[4] != outcomes[8]


# --- gradients ------------------------------------------------------------------------------------------------------


def expected_gradients(grad, arrays, prologue, parameters, axis):
    """Return the gradients of conv with a prologue: those of conv, taken back through the transformation."""
    scale, shift, activation = prologue
    xs, window = reference.sequence(arrays["x"]), {k: v for k, v in parameters.items() if k != "activation"}
    images = reference.transformed(xs, *prologue, axis=axis)
    inner = reference_gradients.conv_gradients(grad, **{**arrays, "x": images}, **parameters)
    before = reference.conv(**{**arrays, "x": images}, **window)
    dz = reference.wide(grad) * reference_gradients.derivative(parameters["activation"], before)
    to_images = reference_gradients.conv_grad_input(dz, arrays["weight"], [i.shape for i in images], **window)
    slopes = [
        reference_gradients.derivative(activation, u) for u in reference.transformed(xs, scale, shift, None, axis=axis)
    ]
    du = np.concatenate([d * slope for d, slope in zip(to_images, slopes)], axis)
    image = np.concatenate([reference.wide(x) for x in xs], axis)
    others = tuple(a for a in range(image.ndim) if a != axis)
    column = (slice(None), *(None,) * (image.ndim - axis - 1))
    dx = du if scale is None else du * reference.wide(scale).conj()[column]
    splits = np.cumsum([x.shape[axis] for x in xs])[:-1]
    vectors = (du * image.conj()).sum(others), du.sum(others)
    dscale, dshift = (None if vector is None else g for vector, g in zip((scale, shift), vectors))
    return inner._replace(x=np.split(dx, splits, axis)), dscale, dshift


@share_of_examples(0.5)
@given(data=st.data())
def test_pullback_of_integers_is_exact(target, data):
    dtypes = ("float32", "float64", "complex64") if target.name == "numpy" else ("float32", "complex64")
    case = data.draw(conv_cases(dtypes=dtypes, mixed_dtypes=target.name == "numpy"))
    prologue = drawn_prologue(data, case, INTEGER_ACTIVATIONS, integer=True)
    arrays, grad = case.arrays(), case.gradient()
    views = case.views(arrays, target.to_device, target.xp)
    _, pullback = cupyconv.vjp(cupyconv.conv, **views, **case.parameters, prologue=moved(target, prologue))
    gradients = pullback(on_device(target, grad, case.residual_layout, case.channel_axis))
    expected, dscale, dshift = expected_gradients(grad, arrays, prologue, case.parameters, case.channel_axis)
    pairs = [(gradients.weight, expected.weight, arrays["weight"])]
    pairs += zip(
        reference.sequence(gradients.x), reference.sequence(expected.x), reference.sequence(arrays["x"]), strict=True
    )
    for actual, wanted, vector in zip((gradients.scale, gradients.shift), (dscale, dshift), prologue):
        assert (actual is None) == (vector is None)
        pairs += [(actual, wanted, vector)] * (vector is not None)
    for actual, wanted, argument in pairs:
        wanted = wanted if argument.dtype.kind == "c" else wanted.real
        assert_rounded(target.to_host(actual), wanted, argument.dtype)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("clip", -0.5, 0.5)], ids=str)
def test_finite_differences(target, activation):
    """Gradients of every activation agree with finite differences in float64."""
    generator = np.random.default_rng(3)
    xs = [generator.normal(size=(2, c, 6)) for c in (2, 1)]
    weight, (scale, shift) = generator.normal(size=(2, 3, 3)), generator.normal(size=(2, 3))

    def result(first, second, weight, scale, shift):
        images = reference.transformed([first, second], scale, shift, activation, axis=1)
        return reference.conv(images, weight, padding=1)

    arguments = [*xs, weight, scale, shift]
    on = [target.to_device(a) for a in arguments]
    y, pullback = cupyconv.vjp(cupyconv.conv, on[:2], on[2], padding=1, prologue=(*on[3:], activation))
    np.testing.assert_allclose(target.to_host(y), result(*arguments), rtol=1e-10, atol=1e-10)
    grad, step = generator.normal(size=y.shape), 1e-6
    found = pullback(target.to_device(grad))
    for i, back in enumerate([*found.x, found.weight, found.scale, found.shift]):
        direction = generator.normal(size=arguments[i].shape)
        ends = [
            np.vdot(grad, result(*arguments[:i], arguments[i] + sign * step * direction, *arguments[i + 1 :]))
            for sign in (1, -1)
        ]
        assert np.vdot(target.to_host(back), direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_pullback_of_a_merge(target, dtype):
    """Gradients repeat bit for bit, are None unless asked for, have the arguments' dtypes, and agree with conv's."""
    generator = np.random.default_rng(0)
    xs = [target.to_device(generator.normal(size=(3, c, 50)).astype(dtype)) for c in (2, 3)]
    weight = target.to_device(generator.normal(size=(4, 5)).astype(dtype))
    prologue = (*(target.to_device(generator.normal(size=5).astype(np.float32)) for _ in range(2)), "silu")
    y, pullback = cupyconv.vjp(cupyconv.linmerge, xs, weight, prologue=prologue)
    grad = target.to_device(generator.normal(size=y.shape).astype(dtype))
    gradients = pullback(grad)
    assert bytes_of(target, list(gradients)) == bytes_of(target, list(pullback(grad)))
    assert [g.dtype for g in (*gradients.x, gradients.weight, gradients.scale)] == [dtype] * 3 + ["float32"]
    only = pullback(grad, needs="shift")
    assert only.x is only.scale is only.weight is None
    assert bytes_of(target, only.shift) == bytes_of(target, gradients.shift)
    _, of_conv = cupyconv.vjp(cupyconv.conv, xs, weight[:, :, None], prologue=prologue)
    tolerated = 1e-2 if dtype == "float16" else 1e-4
    for a, b in zip((*gradients.x, gradients.scale, gradients.shift), (*(c := of_conv(grad)).x, c.scale, c.shift)):
        np.testing.assert_allclose(target.to_host(a), target.to_host(b), rtol=tolerated, atol=tolerated)


def test_sums_in_parts(target):
    """Several blocks sum the many pixels of a channel, and every layout gives the same sums."""
    generator = np.random.default_rng(0)
    x = generator.integers(-2, 3, (2, 3, 40, 50)).astype(np.float32)
    weight = generator.integers(-1, 2, (2, 3, 1, 1)).astype(np.float32)
    scale, shift = (target.to_device(np.array(v, np.float32)) for v in ([1, -1, 1], [1, 0, -1]))
    grad = generator.integers(-1, 2, (2, 2, 40, 50)).astype(np.float32)
    found = []
    for layout in ("c_order", "channels_last", "unaligned"):
        _, pullback = cupyconv.vjp(
            cupyconv.conv, on_device(target, x, layout), target.to_device(weight), prologue=(scale, shift, "relu")
        )
        gradients = pullback(on_device(target, grad, layout))
        found.append([target.to_host(g) for g in (gradients.x, gradients.weight, gradients.scale, gradients.shift)])
    for others in found[1:]:
        for a, b in zip(found[0], others):
            np.testing.assert_array_equal(a, b)
    arrays = {"x": x, "weight": weight, "bias": None, "residual": None}
    prologue = target.to_host(scale), target.to_host(shift), "relu"
    expected, dscale, dshift = expected_gradients(grad, arrays, prologue, {"activation": None}, 1)
    for actual, wanted in zip(found[0], (expected.x[0], expected.weight, dscale, dshift)):
        np.testing.assert_array_equal(actual, wanted)


@needs_torch
@pytest.mark.parametrize("groups", [1, 2])
def test_against_torch(groups):
    """PyTorch agrees on a batch normalization at inference, relu, and a convolution over several feature maps."""
    import torch

    generator = np.random.default_rng(0)
    xs = [torch.tensor(generator.normal(size=(2, c, 7, 6)), requires_grad=True) for c in (2, 4)]
    weight = torch.tensor(generator.normal(size=(4, 6 // groups, 3, 3)), requires_grad=True)
    scale, shift = (torch.tensor(generator.normal(size=6), requires_grad=True) for _ in range(2))
    column = (slice(None), None, None)
    image = torch.relu(torch.cat(xs, 1) * scale[column] + shift[column])
    y = torch.nn.functional.conv2d(image, weight, padding=1, groups=groups)
    grad = torch.tensor(generator.normal(size=y.shape))
    y.backward(grad)
    arrays = [leaf.detach().numpy() for leaf in (*xs, weight, scale, shift)]
    ours, pullback = cupyconv.vjp(
        cupyconv.conv, arrays[:2], arrays[2], padding=1, groups=groups, prologue=(arrays[3], arrays[4], "relu")
    )
    np.testing.assert_allclose(ours, y.detach().numpy(), rtol=1e-11, atol=1e-11)
    found = pullback(grad.numpy())
    for leaf, back in zip((*xs, weight, scale, shift), (*found.x, found.weight, found.scale, found.shift)):
        np.testing.assert_allclose(back, leaf.grad.numpy(), rtol=1e-10, atol=1e-10)
