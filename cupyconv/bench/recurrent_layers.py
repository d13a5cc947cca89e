"""Recurrent layers as cases: sizes, arrays and the library's call; the NumPy peer, and in float64 the reference.

States are below 1 whatever the sizes, as weights of the state are scaled by the root of their number: errors are
seen beside 1, and none grows from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from types import ModuleType
from typing import Any

from cupyconv.bench.cases import APART, Case, Fill, LayerCase, repeat_normals
from cupyconv.ops.recurrent import gru, lstm
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.recurrence import GATES, RECURRENT_METHODS

_FUNCTIONS: dict[str, Callable[..., Any]] = {"lstm": lstm, "gru": gru}


@dataclass(frozen=True)
class RecurrentCase(LayerCase):
    """One layer over a sequence, in one direction, with both biases; `tf32` and `judged` as for `Case`."""

    name: str
    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str = "float32"
    tf32: bool = False
    judged: str = "device"

    @property
    def methods(self) -> tuple[str, ...]:
        return RECURRENT_METHODS

    @property
    def rows(self) -> int:
        return GATES[self.cell] * self.hidden

    @property
    def terms(self) -> int:
        """Products in one gate."""
        return self.inputs + self.hidden

    @property
    def magnitude(self) -> float:
        """What errors are seen beside: no state is above 1."""
        return 1.0

    @property
    def flops(self) -> int:
        return 2 * self.steps * self.batch * self.rows * self.terms

    @property
    def minimal_bytes(self) -> int:
        """Every argument and result once."""
        states = self.batch * self.hidden * (2 if self.cell == "lstm" else 1)
        elements = self.steps * self.batch * self.terms + self.rows * (self.terms + 2) + states
        return elements * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        return self.steps * self.batch * self.hidden * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], list[Any]]:
        """x alone in a list, and weights and biases."""
        shapes = ((self.steps, self.batch, self.inputs), (self.rows, self.inputs), (self.rows, self.hidden))
        scales = (1.0, 1 / sqrt(max(1, self.inputs)), 1 / sqrt(max(1, self.hidden)), 0.5, 0.5)
        made = []
        for number, (shape, scale) in enumerate(zip((*shapes, (self.rows,), (self.rows,)), scales)):
            array = fill(self.dtype, number * APART, prod(shape)).reshape(shape)
            made.append(array if scale == 1 else array * array.dtype.type(scale))
        return made[:1], made[1:]

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        return _FUNCTIONS[self.cell], (*xs, *weights), {}

    def ours(self, xs: list[Any], weights: list[Any], method: str = "auto") -> Any:
        """The library's y."""
        return super().ours(xs, weights, method)[0]


AnyCase = Case | RecurrentCase


def loop_in_python(xp: ModuleType, case: RecurrentCase, x: Any, weights: list[Any]) -> Any:
    """What a good NumPy user writes without a library: the inputs' product before the loop."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    hidden, steps = case.hidden, len(x)
    h = xp.zeros((case.batch, hidden), x.dtype)
    c = h
    y = xp.empty((steps, case.batch, hidden), x.dtype)
    projected = x.reshape(-1, case.inputs) @ weight_ih.T + bias_ih
    projected = projected.reshape(steps, case.batch, -1)
    for t in range(steps):
        of_state = h @ weight_hh.T + bias_hh
        if case.cell == "lstm":
            gates = projected[t] + of_state
            i, f, g, o = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
            c = _sigmoid(xp, f) * c + _sigmoid(xp, i) * xp.tanh(g)
            h = _sigmoid(xp, o) * xp.tanh(c)
        else:
            rz = _sigmoid(xp, projected[t][:, : 2 * hidden] + of_state[:, : 2 * hidden])
            n = xp.tanh(projected[t][:, 2 * hidden :] + rz[:, :hidden] * of_state[:, 2 * hidden :])
            h = n + rz[:, hidden:] * (h - n)
        y[t] = h
    return y


def _sigmoid(xp: ModuleType, v: Any) -> Any:
    return 1 / (1 + xp.exp(-v))
