"""Recurrent layers as cases: sizes, arrays and the library's call, the float64 that results are held to, the NumPy peer.

States are below 1 whatever the sizes, as weights of the state are scaled by the root of their number: errors are
seen beside 1, and none grows from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from types import ModuleType
from typing import Any

from cupyconv.bench.cases import APART, Case, Fill, repeat_normals
from cupyconv.call.options import options
from cupyconv.ops.recurrent import gru, lstm
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.recurrence import GATES, RECURRENT_METHODS

_FUNCTIONS: dict[str, Callable[..., Any]] = {"lstm": lstm, "gru": gru}


@dataclass(frozen=True)
class RecurrentCase:
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

    def __str__(self) -> str:
        return self.name

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
            elements = 1
            for extent in shape:
                elements *= extent
            array = fill(self.dtype, number * APART, elements).reshape(shape)
            made.append(array if scale == 1 else array * array.dtype.type(scale))
        return made[:1], made[1:]

    def named(self, method: str) -> dict[str, Any]:
        """The keyword that asks for a method."""
        return {"method": method}

    def call(self, xs: list[Any], weight: list[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The library's function for this case, its arguments and its keywords."""
        return _FUNCTIONS[self.cell], (*xs, *weight), {}

    def ours(self, xs: list[Any], weight: list[Any], method: str = "auto") -> Any:
        """The library's y."""
        function, arguments, _ = self.call(xs, weight)
        with options(allow_tf32=self.tf32):
            return function(*arguments, method=method)[0]


AnyCase = Case | RecurrentCase


def case_from_record(record: Mapping[str, Any]) -> AnyCase:
    """The case that a results file holds."""
    return RecurrentCase(**record) if "cell" in record else Case.from_record(record)


def recurrent_in_float64(xp: ModuleType, case: RecurrentCase, x: Any, weights: list[Any]) -> Any:
    """y in the dtype of arrays that are float64: inputs and state side by side, one product a step."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    hidden = case.hidden
    h, c = xp.zeros((case.batch, hidden)), xp.zeros((case.batch, hidden))
    y = xp.zeros((case.steps, case.batch, hidden))
    both = xp.concatenate([weight_ih, weight_hh], axis=1).T
    for t in range(case.steps):
        gates = xp.concatenate([x[t], h], axis=1) @ both + (bias_ih + bias_hh)
        parts = [gates[:, k * hidden : (k + 1) * hidden] for k in range(GATES[case.cell])]
        if case.cell == "lstm":
            i, f, o = (1 / (1 + xp.exp(-parts[k])) for k in (0, 1, 3))
            c = f * c + i * xp.tanh(parts[2])
            h = o * xp.tanh(c)
        else:
            r, z = (1 / (1 + xp.exp(-parts[k])) for k in (0, 1))
            of_state = h @ weight_hh[2 * hidden :].T + bias_hh[2 * hidden :]
            n = xp.tanh(parts[2] + (r - 1) * of_state)
            h = n + z * (h - n)
        y[t] = h
    return y


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


def layer_of_torch(torch: ModuleType, case: RecurrentCase, x: Any, weights: list[Any]) -> Callable[[], Any]:
    """``torch.nn.LSTM`` or ``GRU`` on tensors, for inference; on a GPU that is cuDNN's."""
    layer = getattr(torch.nn, case.cell.upper())(case.inputs, case.hidden, device=x.device, dtype=x.dtype)
    layer.requires_grad_(False).eval()  # else cuDNN keeps what a backward pass would need
    for parameter, weight in zip(layer.parameters(), weights, strict=True):
        parameter.copy_(weight)

    def call() -> Any:
        return layer(x)[0]

    return call
