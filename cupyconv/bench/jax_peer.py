"""JAX as a peer: each case is one function under ``jax.jit``, compiled before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.peers import Participant, Way, installed
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase
from cupyconv.demo.libraries import Call

_LETTERS = "DHW"


class Jax(Participant):
    """XLA's code for the processor.  The environment of the process sets its number of threads."""

    def __init__(self) -> None:
        self._jax = installed("jax")
        self._jax.config.update("jax_platforms", "cpu")
        self._jax.config.update("jax_enable_x64", True)

    def properties(self) -> dict[str, Any]:
        return {"jax": self._jax.__version__}

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """Support all cases except complex numbers."""
        if case.dtype.startswith("complex"):
            return []
        return [Way("jax", partial(self._compiled, case, xs, weights), np.asarray, transform=True, allocates=True)]

    def _compiled(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> Call:
        if isinstance(case, RecurrentCase):
            function: Callable[..., Any] = partial(self._recurrent_layer, case)
        elif isinstance(case, GradientCase):
            function = partial(self._gradient, case)
        else:
            function = partial(self._convolve, case)
        compiled = self._jax.jit(function)
        arrays = [[self._jax.numpy.asarray(a) for a in given] for given in (xs, weights)]
        return lambda: compiled(*arrays).block_until_ready()

    def _convolve(self, case: Case, xs: list[Any], weights: list[Any]) -> Any:
        for layer, weight in zip(case.layers, weights):
            x = self._jax.numpy.concatenate(xs, axis=1) if len(xs) > 1 else xs[0]
            xs = [self._convolve_once(layer, x, weight)]
        return xs[0]

    def _convolve_once(self, case: Case, x: Any, weight: Any) -> Any:
        rank = len(case.size)
        axes = _LETTERS[-rank:]
        return self._jax.lax.conv_general_dilated(
            x, weight, (case.stride,) * rank, case.pairs, rhs_dilation=(case.dilation,) * rank,
            dimension_numbers=("NC" + axes, "OI" + axes, "NC" + axes), feature_group_count=case.groups,
        )  # fmt: skip

    def _gradient(self, case: GradientCase, xs: list[Any], weights: list[Any]) -> Any:
        """Compute the transpose of the function, which is linear in the argument of the gradient."""
        arriving, *inputs = xs
        if case.of == "input":
            shape: tuple[int, ...] = (case.batch, case.in_channels, *case.size)
            linear: Callable[[Any], Any] = lambda x: self._convolve_once(case, x, weights[0])  # noqa: E731
        else:
            shape, joined = case.weight_shape, self._jax.numpy.concatenate(inputs, axis=1)
            linear = lambda weight: self._convolve_once(case, joined, weight)  # noqa: E731
        return self._jax.linear_transpose(linear, self._jax.ShapeDtypeStruct(shape, arriving.dtype))(arriving)[0]

    def _recurrent_layer(self, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Any:
        """Compute one product of all inputs, then a scan over the steps."""
        jnp, sigmoid = self._jax.numpy, self._jax.nn.sigmoid
        weight_ih, weight_hh, bias_ih, bias_hh = weights

        def step(state: tuple[Any, Any], projected: Any) -> tuple[tuple[Any, Any], Any]:
            h, c = state
            of_state = h @ weight_hh.T + bias_hh
            if case.cell == "lstm":
                i, f, g, o = jnp.split(projected + of_state, 4, axis=1)
                c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
                h = sigmoid(o) * jnp.tanh(c)
            else:
                (xr, xz, xn), (hr, hz, hn) = (jnp.split(gates, 3, axis=1) for gates in (projected, of_state))
                z = sigmoid(xz + hz)
                h = (1 - z) * jnp.tanh(xn + sigmoid(xr + hr) * hn) + z * h
            return (h, c), h

        none = jnp.zeros((case.batch, case.hidden), xs[0].dtype)
        begin = (xs[1], xs[-1]) if case.single else (none, none)
        y = self._jax.lax.scan(step, begin, xs[0] @ weight_ih.T + bias_ih)[1]
        return y[0] if case.single else y
