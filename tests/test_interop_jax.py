"""`cupyconv.interop.jax`: values and gradients compared with JAX's own, in eager, traced and vectorized calls."""

from __future__ import annotations

import doctest
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from cupyconv.interop import jax as interop  # noqa: E402


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def array(*shape, dtype=np.float64):
    rng = np.random.default_rng(sum(shape))
    real = rng.standard_normal(shape)
    return jnp.asarray((real + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else real).astype(dtype))


def jax_conv(x, weight, bias):
    y = jax.lax.conv_general_dilated(x, weight, (2, 1), ((1, 0), (2, 1)), feature_group_count=2)
    return y + bias[:, None, None]


def ours(x, weight, bias):
    return interop.conv(x, weight, bias, stride=(2, 1), padding=((1, 0), (2, 1)), groups=2)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128, np.float32])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_and_cotangents_are_jaxs(dtype, transform):
    """Complex cotangents are transposed and not conjugated, which is JAX's convention."""
    arguments = array(2, 4, 6, 5, dtype=dtype), array(6, 2, 3, 2, dtype=dtype), array(6, dtype=dtype)
    expected, expected_vjp = jax.vjp(jax_conv, *arguments)
    actual, actual_vjp = jax.vjp(transform(ours), *arguments)
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, tolerance, tolerance)
    cotangent = array(*expected.shape, dtype=dtype)
    for a, b in zip(actual_vjp(cotangent), expected_vjp(cotangent), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a, b, tolerance, 10 * tolerance)


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_inputs_get_a_cotangent_each(kind):
    xs, weight = kind([array(2, 2, 9), array(2, 3, 9)]), array(4, 5, 3)

    def loss(xs, weight):
        return (interop.conv(xs, weight, padding="same", activation="silu") ** 2).sum()

    def expected(xs, weight):
        y = jax.lax.conv_general_dilated(jnp.concatenate(list(xs), 1), weight, (1,), "SAME")
        return (jax.nn.silu(y) ** 2).sum()

    actual_x, actual_w = jax.jit(jax.grad(loss, (0, 1)))(xs, weight)
    expected_x, expected_w = jax.grad(expected, (0, 1))(xs, weight)
    assert type(actual_x) is kind
    for a, b in zip([*actual_x, actual_w], [*expected_x, expected_w], strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-10)


def test_residual_and_linmerge():
    a, b, weight, residual = array(2, 2, 3, 4), array(2, 1, 3, 4), array(4, 3), array(2, 4, 3, 4)

    def loss(a, residual):
        return interop.linmerge([a, b], weight, residual=residual, activation="tanh").sum()

    def expected(a, residual):
        return jnp.tanh(jnp.einsum("oc,nchw->nohw", weight, jnp.concatenate([a, b], 1)) + residual).sum()

    for x, y in zip(jax.grad(loss, (0, 1))(a, residual), jax.grad(expected, (0, 1))(a, residual), strict=True):
        np.testing.assert_allclose(x, y, 1e-12, 1e-12)


def test_vmap():
    xs, weight = array(3, 2, 4, 9), array(5, 4, 3)
    batched = jax.vmap(lambda x: interop.conv(x, weight))(xs)
    np.testing.assert_allclose(batched, np.stack([interop.conv(x, weight) for x in xs]), 1e-12)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_check_grads(activation):
    def merged(a, b, weight, bias, residual):
        return interop.conv([a, b], weight, bias, stride=2, padding=1, padding_mode="reflect", groups=2,
                            residual=residual, activation=activation)  # fmt: skip

    arguments = array(2, 1, 9), array(2, 3, 9), array(4, 2, 3), array(4), array(2, 4, 5)
    check_grads(merged, arguments, order=1, modes=["rev"])


def test_check_grads_of_linmerge():
    arguments = [array(2, 2, 5), array(2, 1, 5)], array(4, 3), array(4), array(2, 4, 5)
    function = lambda xs, weight, bias, residual: interop.linmerge(xs, weight, bias, residual=residual)  # noqa: E731
    check_grads(function, arguments, order=1, modes=["rev"])


def loss_of_a_sample(weight, x):
    return (interop.conv(x[None], weight, padding=1, activation="tanh") ** 2).sum()


def test_jit_and_vmap_of_gradients():
    weight, xs = array(5, 4, 3), array(3, 4, 9)
    gradient = jax.grad(loss_of_a_sample)
    expected = np.stack([gradient(weight, x) for x in xs])
    np.testing.assert_allclose(jax.vmap(gradient, (None, 0))(weight, xs), expected, 1e-12)
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient, (None, 0)))(weight, xs), expected, 1e-12)
    np.testing.assert_allclose(jax.jit(gradient)(weight, xs[0]), expected[0], 1e-12)


def test_a_shared_residual_gets_the_sum():
    x, weight, residual, c = array(2, 3, 6), array(4, 3, 1), array(2, 4, 6), array(2, 4, 6)

    def loss(first, second):
        return ((interop.conv(x, weight, residual=first) + interop.conv(x, weight, residual=second)) * c).sum()

    np.testing.assert_array_equal(jax.grad(lambda shared: loss(shared, shared))(residual), 2 * c)
    for one in jax.grad(loss, (0, 1))(residual, residual):
        np.testing.assert_array_equal(one, c)


def test_second_derivatives_and_forward_mode_are_refused():
    weight, x = array(5, 4, 3), array(4, 9)

    def penalty(weight):
        return (jax.grad(loss_of_a_sample)(weight, x) ** 2).sum()

    for differentiated in (penalty, jax.jit(penalty)):
        with pytest.raises(ValueError, match="do not support JVP"):
            jax.grad(differentiated)(weight)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda weight: loss_of_a_sample(weight, x), (weight,), (weight,))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_errors_keep_their_type_and_words(transform):
    with pytest.raises(ValueError, match="takes 3 input channels"):
        transform(interop.conv)(array(1, 2, 9), array(4, 3, 3))


def test_the_script_in_the_docstring_runs(capsys):
    script = re.search(r"complete::\n\n((?:    .*\n|\n)+)", interop.__doc__).group(1)
    with jax.enable_x64(False):
        exec(compile("\n".join(line[4:] for line in script.splitlines()), "docstring", "exec"), {})
    assert "(16, 48, 3, 3)" in capsys.readouterr().out


def test_docstrings():
    with jax.enable_x64(False):
        assert doctest.testmod(interop).failed == 0
