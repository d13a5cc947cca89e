"""The naive definition of recurrent layers: one sample, one step, one gate at a time, in float64.

It follows the text of the ONNX operators RNN, LSTM and GRU, with PyTorch's order of gates.  It shares no code with the
package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import reference

#: Activations of ONNX's recurrent operators in addition to those of `reference`.
ACTIVATIONS: dict[str, Any] = {
    "affine": lambda v, alpha=1.0, beta=0.0: alpha * v + beta,
    "thresholded_relu": lambda v, alpha=1.0: np.where(v >= alpha, v, np.where(np.isnan(v), v, 0.0)),
    "scaled_tanh": lambda v, alpha=1.0, beta=1.0: alpha * np.tanh(beta * v),
    "softsign": lambda v: v / (1 + np.abs(v)),
}
GATES = {"rnn": 1, "lstm": 4, "gru": 3}
DEFAULTS = {"rnn": ("tanh",), "lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh")}


class Result(NamedTuple):
    """Results, data for gradients, and the largest magnitude of any intermediate value."""

    y: np.ndarray
    h: np.ndarray
    c: np.ndarray
    gates: np.ndarray
    largest: float


def activation(spec: Any, v: np.ndarray) -> np.ndarray:
    name, *parameters = (spec,) if spec is None or isinstance(spec, str) else spec
    if name in ACTIVATIONS:
        with np.errstate(all="ignore"):
            return ACTIVATIONS[name](v, *parameters)
    return reference.activation(spec, v)


def recurrent(
    cell: str,
    x: np.ndarray,
    weight_ih: np.ndarray,
    weight_hh: np.ndarray,
    bias_ih: np.ndarray | None = None,
    bias_hh: np.ndarray | None = None,
    *,
    h0: np.ndarray | None = None,
    c0: np.ndarray | None = None,
    peephole: np.ndarray | None = None,
    lengths: Sequence[int] | None = None,
    direction: str = "forward",
    activations: Sequence[Any] | None = None,
    input_forget: bool = False,
    linear_before_reset: bool = True,
    clip: float | None = None,
) -> Result:
    """Compute a layer.  `activations` are those of one direction, or a pair of such."""
    steps, batch, _ = x.shape
    hidden, directions = weight_hh.shape[-1], 2 if direction == "bidirectional" else 1
    rows = GATES[cell] * hidden
    y = np.zeros((steps, batch, directions * hidden))
    h, c = np.zeros((directions, batch, hidden)), np.zeros((directions, batch, hidden))
    gates = np.zeros((directions, steps, batch, rows))
    largest = 0.0
    chosen = activations or DEFAULTS[cell]
    pair = directions == 2 and len(chosen) == 2 and all(is_group(group, len(DEFAULTS[cell])) for group in chosen)

    def part(array: np.ndarray | None, d: int, axes: int, size: int = 0) -> Any:
        if array is None:
            return np.zeros(size)
        return reference.wide(array[d] if array.ndim > axes else array)

    for d in range(directions):
        functions = chosen[d] if pair else chosen
        w, r = part(weight_ih, d, 2), part(weight_hh, d, 2)
        b_ih, b_hh = part(bias_ih, d, 1, rows), part(bias_hh, d, 1, rows)
        p = part(peephole, d, 1, 3 * hidden).reshape(3, hidden)
        backwards = direction == "reverse" or d == 1
        for n in range(batch):
            length = steps if lengths is None else int(lengths[n])
            state = part(h0, d, 3)[d][n] if h0 is not None else np.zeros(hidden)
            memory = part(c0, d, 3)[d][n] if c0 is not None else np.zeros(hidden)
            for t in reversed(range(length)) if backwards else range(length):
                u = naive_product(w, reference.wide(x[t, n])) + b_ih
                state, memory, before = step(
                    cell, u, r, b_hh, state, memory, p, functions, input_forget, linear_before_reset, clip
                )
                gates[d, t, n] = before
                y[t, n, d * hidden : (d + 1) * hidden] = state
                finite = [np.abs(a[np.isfinite(a)]).max(initial=0) for a in (state, memory, before)]
                largest = max(largest, *finite)
            h[d, n], c[d, n] = state, memory
    return Result(y, h, c, gates, largest)


def step(
    cell: str,
    u: np.ndarray,
    r: np.ndarray,
    b_hh: np.ndarray,
    h: np.ndarray,
    c: np.ndarray,
    p: np.ndarray,
    functions: Sequence[Any],
    input_forget: bool,
    linear_before_reset: bool,
    clip: float | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return one sample's next states and the inputs of the gates' activations; `u` is W x + b of its inputs."""
    size = len(h)

    def clipped(v: np.ndarray) -> np.ndarray:
        return v if clip is None else reference.clip(v, -clip, clip)

    with np.errstate(all="ignore"):
        if cell == "rnn":
            v = clipped(u + naive_product(r, h) + b_hh)
            return activation(functions[0], v), c, v
        if cell == "lstm":
            v_i, v_f, v_g, v_o = np.split(u + naive_product(r, h) + b_hh, 4)
            v_i, v_f, v_g = clipped(v_i + p[0] * c), clipped(v_f + p[1] * c), clipped(v_g)
            i, f, g = activation(functions[0], v_i), activation(functions[0], v_f), activation(functions[1], v_g)
            if input_forget:
                f = 1 - i
            c = f * c + i * g
            v_o = clipped(v_o + p[2] * c)
            o = activation(functions[0], v_o)
            return o * activation(functions[2], c), c, np.concatenate([v_i, v_f, v_g, v_o])
        u_r, u_z, u_n = np.split(u, 3)
        r_r, r_z, r_n = r[:size], r[size : 2 * size], r[2 * size :]
        b_r, b_z, b_n = np.split(b_hh, 3)
        v_r, v_z = clipped(u_r + naive_product(r_r, h) + b_r), clipped(u_z + naive_product(r_z, h) + b_z)
        reset, z = activation(functions[0], v_r), activation(functions[0], v_z)
        if linear_before_reset:
            v_n = clipped(u_n + reset * (naive_product(r_n, h) + b_n))
        else:
            v_n = clipped(u_n + naive_product(r_n, reset * h) + b_n)
        return (1 - z) * activation(functions[1], v_n) + z * h, c, np.concatenate([v_r, v_z, v_n])


def naive_product(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Multiply row by row."""
    return np.array([np.sum(row * vector) for row in matrix]) if len(matrix) else np.zeros(0)


def is_group(group: Any, count: int) -> bool:
    """Return whether this is a tuple of activations, and not one activation with parameters."""
    numbers = isinstance(group, (tuple, list)) and all(isinstance(entry, (int, float)) for entry in group[1:])
    return isinstance(group, (tuple, list)) and len(group) == count and (count == 1 or not numbers)
