"""Recurrent layers as cases: sizes, arrays and the library's call.  The NumPy peer is also the reference, in float64.

Weights of the state are divided by the square root of their number, so states stay below 1 for all sizes.  Errors are
relative to 1 and do not grow from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from types import ModuleType
from typing import Any

from cupyconv.bench.cases import APART, Case, Fill, LayerCase, repeat_normals
from cupyconv.ops.recurrent import gru, lstm
from cupyconv.ops.recurrent_step import gru_step, lstm_step
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.recurrence import GATES, RECURRENT_METHODS

_FUNCTIONS: dict[str, Callable[..., Any]] = {"lstm": lstm, "gru": gru}
STATES = {"lstm": 2, "gru": 1}
_STEPS: dict[str, Callable[..., Any]] = {"lstm": lstm_step, "gru": gru_step}


@dataclass(frozen=True)
class RecurrentCase(LayerCase):
    """One layer over a sequence, in one direction, with both biases.  See `Case` for `tf32` and `judged`.

    With `single` the case is the function for one step from a given state.
    """

    name: str
    cell: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str = "float32"
    tf32: bool = False
    judged: str = "device"
    single: bool = False

    @property
    def group(self) -> str:
        return "small calls" if self.judged == "host" else "recurrent"

    @property
    def methods(self) -> tuple[str, ...]:
        return RECURRENT_METHODS

    @property
    def rows(self) -> int:
        return GATES[self.cell] * self.hidden

    @property
    def terms(self) -> int:
        """Number of products per gate."""
        return self.inputs + self.hidden

    @property
    def magnitude(self) -> float:
        """Magnitude that errors are relative to: no state is above 1."""
        return 1.0

    @property
    def flops(self) -> int:
        return 2 * self.steps * self.batch * self.rows * self.terms

    @property
    def minimal_bytes(self) -> int:
        """Bytes of every argument and result, counted once; for a single step y is the state."""
        states = self.batch * self.hidden * (STATES[self.cell] + self.given_states)
        sequences = self.steps * self.batch * (self.inputs if self.single else self.terms)
        elements = sequences + self.rows * (self.terms + 2) + states
        return elements * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        return self.steps * self.batch * self.hidden * ITEMSIZE[self.dtype]

    def arrays(self, fill: Fill = repeat_normals) -> tuple[list[Any], list[Any]]:
        """Return x, followed by the initial state for a single step, and the weights and biases."""
        shapes = [(self.steps, self.batch, self.inputs), (self.rows, self.inputs), (self.rows, self.hidden)]
        scales = [1.0, 1 / sqrt(max(1, self.inputs)), 1 / sqrt(max(1, self.hidden)), 0.5, 0.5]
        shapes += [(self.rows,)] * 2 + [(self.batch, self.hidden)] * self.given_states
        made = []
        for number, (shape, scale) in enumerate(zip(shapes, scales + [0.5] * self.given_states)):
            array = fill(self.dtype, number * APART, prod(shape)).reshape(shape)
            made.append(array if scale == 1 else array * array.dtype.type(scale))
        return made[:1] + made[5:], made[1:5]

    @property
    def given_states(self) -> int:
        """Number of arrays with the initial state of a step; a sequence starts from zeros."""
        return STATES[self.cell] if self.single else 0

    def call(self, xs: list[Any], weights: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        if self.single:
            return _STEPS[self.cell], (xs[0][0], *xs[1:], *weights), {}
        return _FUNCTIONS[self.cell], (*xs, *weights), {}

    def compared(self, returned: Any) -> Any:
        """Return y of a sequence, or h of a step."""
        return returned if self.single and self.cell == "gru" else returned[0]


AnyCase = Case | RecurrentCase


def loop_in_python(xp: ModuleType, case: RecurrentCase, xs: list[Any], weights: list[Any]) -> Any:
    """Compute what a good NumPy user writes without a library: the product of all inputs before the loop."""
    x = xs[0]
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    hidden, steps = case.hidden, len(x)
    h = xs[1] if case.single else xp.zeros((case.batch, hidden), x.dtype)
    c = xs[-1] if case.single else h
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
    return h if case.single else y


def _sigmoid(xp: ModuleType, v: Any) -> Any:
    return 1 / (1 + xp.exp(-v))
