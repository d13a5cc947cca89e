"""`conv` and `linmerge` as JAX functions that ``jax.grad`` differentiates and ``jax.jit`` traces.

They are host callbacks: the NumPy backend computes them, also inside `jax.jit`.  Arrays on the CPU are not copied;
arrays on a GPU are transferred to the CPU and back.  Reverse mode works (`jax.grad`, `jax.vjp`), forward mode and
second derivatives do not.  A training step, complete::

    import jax
    from cupyconv.interop.jax import conv

    key = jax.random.key(0)
    skip, deep = jax.random.normal(key, (8, 16, 32, 32)), jax.random.normal(key, (8, 32, 32, 32))
    target = jax.random.normal(key, (8, 16, 32, 32))
    weight = 0.05 * jax.random.normal(key, (16, 48, 3, 3))
    loss = lambda weight: ((conv([skip, deep], weight, padding=1, activation="relu") - target) ** 2).mean()
    value, gradient = jax.jit(jax.value_and_grad(loss))(weight)
    print(value, gradient.shape)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

import cupyconv
from cupyconv.call.explain import checked_call


def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "constant",
    dilation: Any = 1,
    groups: int = 1,
    activation: Any = None,
    residual: Any = None,
    method: str = "auto",
) -> jax.Array:
    """`cupyconv.conv` of JAX arrays, differentiable in reverse mode with respect to x, weight, bias and residual.

    Parameters
    ----------
    x, weight, bias, stride, padding, padding_mode, dilation, groups, activation, residual, method
        See `cupyconv.conv`.

    Returns
    -------
    jax.Array
        In the promoted dtype.

    Raises
    ------
    TypeError, ValueError
        See `cupyconv.conv`.

    Notes
    -----
    Cotangents follow JAX's convention: for complex arrays they use the transpose, not the Hermitian adjoint.  The
    forward pass saves nothing but the arguments; the backward pass runs it again.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cupyconv.interop.jax import conv
    >>> xs = [jnp.ones((2, 2, 10)), jnp.ones((2, 4, 10))]
    >>> jax.grad(lambda weight: conv(xs, weight, padding=1).sum())(jnp.ones((4, 6, 3)))[0, 0]
    Array([18., 20., 18.], dtype=float32)
    """
    return _called(cupyconv.conv, "x", locals())


def linmerge(
    xs: Any, weight: Any, bias: Any = None, *, activation: Any = None, residual: Any = None, method: str = "auto"
) -> jax.Array:
    """`cupyconv.linmerge` of JAX arrays, differentiable in reverse mode with respect to xs, weight, bias and residual.

    Parameters
    ----------
    xs, weight, bias, activation, residual, method
        See `cupyconv.linmerge`.

    Returns
    -------
    jax.Array
        In the promoted dtype.

    Raises
    ------
    TypeError, ValueError
        See `cupyconv.linmerge`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cupyconv.interop.jax import linmerge
    >>> a, b, weight = jnp.ones((1, 2, 5)), jnp.ones((1, 1, 5)), jnp.array([[1.0, 2.0, 3.0]])
    >>> jax.grad(lambda a: linmerge([a, b], weight).sum())(a)[0, :, 0]
    Array([1., 2.], dtype=float32)
    """
    return _called(cupyconv.linmerge, "xs", locals())


def _called(function: Callable[..., Any], images: str, arguments: dict[str, Any]) -> jax.Array:
    """Return the function's result.  `arguments` maps names to values; `images` is the name of the first one."""
    _, *others = _Arrays._fields
    arrays = _Arrays(arguments[images], *(arguments[name] for name in others))
    settings = {name: value for name, value in arguments.items() if name not in (images, *others)}
    return _differentiable(_Settings(function, images, settings, repr(settings)), arrays)


class _Arrays(NamedTuple):
    x: Any
    weight: Any
    bias: Any
    residual: Any


@dataclass(frozen=True)
class _Settings:
    """A function and its arguments other than arrays, hashable as `custom_vjp` requires."""

    function: Callable[..., Any]
    images: str  # the function's name for x
    keywords: dict[str, Any] = field(compare=False)
    key: str  # `repr` of the keywords, used for comparison and hash

    def arguments(self, arrays: _Arrays) -> dict[str, Any]:
        """Return the function's keyword arguments."""
        others = arrays._asdict()
        x = others.pop("x")
        return {self.images: list(x) if isinstance(x, (list, tuple)) else x, **others, **self.keywords}


def _run(settings: _Settings, arrays: _Arrays) -> jax.Array:
    def function(arrays: _Arrays) -> np.ndarray:
        return settings.function(**settings.arguments(_numpy(arrays)))

    # Check on arrays that broadcast one element, so that errors are raised during tracing, with their own type.
    repeated = jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), arrays)
    result = checked_call(settings.function, **settings.arguments(repeated)).results[0]
    return jax.pure_callback(
        function, jax.ShapeDtypeStruct(result.shape, result.dtype), arrays, vmap_method="sequential"
    )


_differentiable: Any = jax.custom_vjp(_run, nondiff_argnums=(0,))


def _forward(settings: _Settings, arrays: _Arrays) -> tuple[jax.Array, _Arrays]:
    return _run(settings, arrays), arrays


def _backward(settings: _Settings, arrays: _Arrays, cotangent: jax.Array) -> tuple[_Arrays]:
    def function(arrays: _Arrays, cotangent: Any) -> _Arrays:
        arrays = _numpy(arrays)
        # The transpose is the Hermitian adjoint with conjugated inputs and outputs.
        _, pullback = cupyconv.vjp(settings.function, **settings.arguments(arrays))
        found = pullback(np.conj(np.asarray(cotangent)))
        x = type(arrays.x)(found.x) if isinstance(arrays.x, (list, tuple)) else found.x
        return jax.tree.map(np.conj, _Arrays(x, found.weight, found.bias, found.residual))

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
    return (jax.pure_callback(function, shapes, arrays, cotangent, vmap_method="sequential"),)


_differentiable.defvjp(_forward, _backward)


def _numpy(arrays: _Arrays) -> _Arrays:
    return jax.tree.map(np.asarray, arrays)
