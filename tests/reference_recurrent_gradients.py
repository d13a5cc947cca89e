"""The oracle of recurrent gradients: the cells' equations in float64, one sample and one step at a time, on a tape.

Backpropagation through time is not written by hand.  The forward equations are written with arrays that record what
they were computed from.  Going through the records backward gives the gradient of every argument:

    z = u * v        is recorded as     u gains v * dz,  v gains u * dz

The rules of `reference` apply: no code of the package, no diagnosis of invalid arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from reference import activation, wide
from reference_gradients import derivative

Share = Callable[[np.ndarray], np.ndarray]
_made = count()


class Gradients(NamedTuple):
    """One gradient per argument, of its shape; None for an absent argument."""

    x: Any = None
    weight_ih: Any = None
    weight_hh: Any = None
    bias_ih: Any = None
    bias_hh: Any = None
    h0: Any = None
    c0: Any = None
    peephole: Any = None


class Noted:
    """An array that records the arrays it was computed from, and how its gradient contributes to each of theirs."""

    def __init__(self, value: np.ndarray, *made_from: tuple[Noted, Share]) -> None:
        self.value, self.made_from, self.number = value, made_from, next(_made)
        self.gradient = np.zeros(value.shape)

    def __add__(self, other: Noted) -> Noted:
        return Noted(self.value + other.value, (self, lambda g: g), (other, lambda g: g))

    def __mul__(self, other: Noted) -> Noted:
        return Noted(self.value * other.value, (self, lambda g: g * other.value), (other, lambda g: g * self.value))

    def __matmul__(self, vector: Noted) -> Noted:
        shares: tuple[Share, Share] = lambda g: np.outer(g, vector.value), lambda g: self.value.T @ g
        return Noted(self.value @ vector.value, (self, shares[0]), (vector, shares[1]))

    def __getitem__(self, at: Any) -> Noted:
        def in_place(g: np.ndarray) -> np.ndarray:
            whole = np.zeros(self.value.shape)
            whole[at] = g
            return whole

        return Noted(self.value[at], (self, in_place))

    def one_minus(self) -> Noted:
        return Noted(1 - self.value, (self, lambda g: -g))

    def through(self, spec: Any) -> Noted:
        """Apply an activation."""
        return Noted(activation(spec, self.value), (self, lambda g: g * derivative(spec, self.value)))

    def clipped(self, bound: float | None) -> Noted:
        """Clip to -bound ... bound; the derivative is zero at a bound and beyond it."""
        if bound is None:
            return self
        inside = np.abs(self.value) < bound
        return Noted(np.clip(self.value, -bound, bound), (self, lambda g: np.where(inside, g, 0.0)))


def send_back(results: Sequence[tuple[Noted, np.ndarray]]) -> None:
    """Propagate gradients to everything that the results depend on, in descending order of creation."""
    waiting: dict[int, Noted] = {}
    for result, gradient in results:
        result.gradient = result.gradient + gradient
        waiting[result.number] = result
    while waiting:
        node = waiting.pop(max(waiting))
        for source, share in node.made_from:
            source.gradient = source.gradient + share(node.gradient)
            waiting[source.number] = source


def recurrent_gradients(
    cell: str,
    grads: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None],
    arguments: dict[str, np.ndarray | None],
    *,
    direction: str = "forward",
    lengths: Sequence[int] | None = None,
    activations: Sequence[Sequence[Any]],
    clip: float | None = None,
    input_forget: bool = False,
    linear_before_reset: bool = True,
) -> tuple[dict[str, np.ndarray], Gradients]:
    """Return results, and gradients of the arguments, given those of y, h and c.

    `arguments` have the names of `Gradients`; `activations` has those of the cell for each direction.
    """
    signs = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}[direction]
    given = {name: Noted(wide(array)) for name, array in arguments.items() if array is not None}
    steps, samples, _ = given["x"].value.shape
    hidden = given["weight_hh"].value.shape[-1]
    zeros = Noted(np.zeros(hidden))

    def of_direction(name: str, d: int) -> Noted | None:
        array = given.get(name)
        return array[d] if array is not None and direction == "bidirectional" else array

    y = [[[zeros] * len(signs) for _ in range(samples)] for _ in range(steps)]
    last: dict[str, list[list[Noted]]] = {"h": [], "c": []}
    for d, sign in enumerate(signs):
        weights = {name: of_direction(name, d) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole")}
        for state in last.values():
            state.append([])
        for n in range(samples):
            h = given["h0"][d, n] if "h0" in given else zeros
            c = given["c0"][d, n] if "c0" in given else zeros
            own_steps = range(steps if lengths is None else int(lengths[n]))
            for t in own_steps[::sign]:
                h, c = step(cell, given["x"][t, n], h, c, weights, hidden, activations[d], clip, input_forget,
                            linear_before_reset)  # fmt: skip
                y[t][n][d] = h
            last["h"][d].append(h)
            last["c"][d].append(c)

    grad_y, grad_h, grad_c = (None if grad is None else wide(grad) for grad in grads)
    results: list[tuple[Noted, np.ndarray]] = []
    for d in range(len(signs)):
        for n in range(samples):
            if grad_y is not None:
                results += [(y[t][n][d], grad_y[t, n, d * hidden : (d + 1) * hidden]) for t in range(steps)]
            results += [(last["h"][d][n], grad_h[d, n])] if grad_h is not None else []
            results += [(last["c"][d][n], grad_c[d, n])] if grad_c is not None else []
    send_back(results)

    forward = {"y": np.zeros((steps, samples, len(signs) * hidden))}
    for t, n, d in np.ndindex(steps, samples, len(signs)):
        forward["y"][t, n, d * hidden : (d + 1) * hidden] = y[t][n][d].value
    for name, state in last.items():
        forward[name] = np.zeros((len(signs), samples, hidden))
        for d, n in np.ndindex(len(signs), samples):
            forward[name][d, n] = state[d][n].value
    return forward, Gradients(**{name: noted.gradient for name, noted in given.items()})


def step(
    cell: str, x: Noted, h: Noted, c: Noted, weights: dict[str, Noted | None], hidden: int, specs: Sequence[Any],
    clip: float | None, input_forget: bool, linear_before_reset: bool,
) -> tuple[Noted, Noted]:  # fmt: skip
    """Return the states after one step of one sample."""
    zeros = Noted(np.zeros(hidden))

    def from_x(gate: int) -> Noted:
        return linear(weights["weight_ih"], weights["bias_ih"], x, gate)

    def from_h(gate: int, h: Noted = h) -> Noted:
        return linear(weights["weight_hh"], weights["bias_hh"], h, gate)

    def linear(weight: Any, bias: Any, vector: Noted, gate: int) -> Noted:
        rows = slice(gate * hidden, (gate + 1) * hidden)
        product = weight[rows] @ vector
        return product if bias is None else product + bias[rows]

    def peephole(part: int, state: Noted) -> Noted:
        whole = weights["peephole"]
        return zeros if whole is None else whole[part * hidden : (part + 1) * hidden] * state

    if cell == "rnn":
        return (from_x(0) + from_h(0)).clipped(clip).through(specs[0]), c
    if cell == "lstm":
        i = (from_x(0) + from_h(0) + peephole(0, c)).clipped(clip).through(specs[0])
        f = (from_x(1) + from_h(1) + peephole(1, c)).clipped(clip).through(specs[0])
        g = (from_x(2) + from_h(2)).clipped(clip).through(specs[1])
        c = (i.one_minus() if input_forget else f) * c + i * g
        o = (from_x(3) + from_h(3) + peephole(2, c)).clipped(clip).through(specs[0])
        return o * c.through(specs[2]), c
    r = (from_x(0) + from_h(0)).clipped(clip).through(specs[0])
    z = (from_x(1) + from_h(1)).clipped(clip).through(specs[0])
    inner = r * from_h(2) if linear_before_reset else from_h(2, r * h)
    n = (from_x(2) + inner).clipped(clip).through(specs[1])
    return z.one_minus() * n + z * h, c
