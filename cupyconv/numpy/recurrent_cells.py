"""Recurrent cells: from the state before a step, and what its inputs add to the gates, to the state after it.

Samples lie innermost: a weight is the left factor of its products, as it lies in memory, and each gate is one run, over
which every pass is one loop.  A step allocates nothing, activations aside that have temporaries of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate
from cupyconv.problem.activations import Activation
from cupyconv.problem.recurrence import RecurrentGeometry

#: Activations that have no temporaries.
IN_PLACE = ("none", "relu", "relu6", "clip", "sigmoid", "tanh", "affine", "scaled_tanh")


class Arguments:
    """Arguments and results of one direction of some samples, by role; vectors in the dtype computed with."""

    def __init__(
        self,
        geometry: RecurrentGeometry,
        given: Mapping[str, Any],
        weights: Sequence[np.ndarray],
        direction: int,
        samples: slice,
        dtype: np.dtype,
    ) -> None:
        self._given, self._direction, self._samples, self._dtype = given, direction, samples, dtype
        self._hidden = hidden = geometry.hidden
        self.weight_ih, self.weight_hh = weights
        self.bias_ih, self.bias_hh = self._vector("bias_ih"), self._vector("bias_hh")
        self.peephole = self._vector("peephole")
        x, out = given["x"], given["out"]
        self.x = (x if x.ndim == 3 else x[None])[:, samples]
        self.out = (out if out.ndim == 3 else out[None])[:, samples, direction * hidden : (direction + 1) * hidden]
        lengths = given.get("lengths")
        self.lengths = None if lengths is None else lengths[samples]
        self.kept: dict[str, np.ndarray] = {}
        if "gates" in given:
            for name, shape in geometry.keeps.items():
                parts = (geometry.steps, geometry.batch, shape[-1] // max(1, hidden), hidden)
                self.kept[name] = given[name][direction].reshape(parts)[:, samples]

    def state(self, role: str) -> np.ndarray | None:
        """A state (samples, H), first or last; None where it is absent."""
        state = self._own(role, 2)
        return None if state is None else state[self._samples]

    def read_state(self, role: str, into: np.ndarray) -> None:
        """The state before the first step, zeros where none is given."""
        initial = self.state(role)
        into[...] = 0 if initial is None else initial.astype(self._given["out"].dtype, copy=False).T

    def _own(self, role: str, axes: int) -> np.ndarray | None:
        """What an argument or a result of so many axes has for this direction; None where it is absent."""
        array = self._given.get(role)
        return None if array is None else array[self._direction] if array.ndim > axes else array

    def _vector(self, role: str) -> np.ndarray | None:
        """A vector as (parts, H, 1), rounded to the result's dtype first, as an argument of that would have been."""
        vector = self._own(role, 1)
        if vector is None:
            return None
        rounded = vector.astype(self._given["out"].dtype, copy=False).astype(self._dtype, copy=False)
        return rounded.reshape(-1, self._hidden, 1)


class Cell:
    """One direction's gates and states of `batch` samples, in memory that every step writes anew.

    No argument of a call is held here, so that a cell may serve one call after the other.
    """

    def __init__(
        self, geometry: RecurrentGeometry, direction: int, batch: int, dtype: np.dtype, peephole: bool
    ) -> None:
        self.geometry = geometry
        self.gates = np.empty((geometry.gates, geometry.hidden, batch), dtype)
        #: The gates as products write them.
        self.rows = self.gates.reshape(-1, batch)
        self.h = np.empty((geometry.hidden, batch), dtype)
        self.c = np.empty((geometry.hidden if geometry.cell == "lstm" else 0, batch), dtype)
        self.prepare(geometry.activations[direction], peephole)

    def prepare(self, activations: Sequence[Activation], peephole: bool) -> None:
        """What all steps share."""
        raise NotImplementedError

    def input_bias(self, given: Arguments) -> np.ndarray | None:
        """The biases that are added with the inputs, (G, H, 1)."""
        if given.bias_ih is None or given.bias_hh is None:
            return given.bias_hh if given.bias_ih is None else given.bias_ih
        return given.bias_ih + given.bias_hh

    def advance(self, given: Arguments, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        """The states after step t, into `h` and `c`, which may be `self.h` and `self.c`."""
        raise NotImplementedError

    def clip(self, gates: np.ndarray) -> None:
        bound = self.geometry.clip
        if bound is not None:
            np.clip(gates, -bound, bound, out=gates)


def _keep(given: Arguments, t: int, first: int, gates: np.ndarray) -> None:
    """What the activations of these gates, from the first on, will be applied to."""
    if given.kept:
        given.kept["gates"][t, :, first : first + len(gates)] = gates.transpose(2, 0, 1)


class _Rnn(Cell):
    def prepare(self, activations: Sequence[Activation], peephole: bool) -> None:
        (self._activation,) = activations

    def advance(self, given: Arguments, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates = self.gates
        np.matmul(given.weight_hh, self.h, out=self.rows)
        gates += projected
        self.clip(gates)
        _keep(given, t, 0, gates)
        _apply(gates[0], self._activation, h)


class _Lstm(Cell):
    def prepare(self, activations: Sequence[Activation], peephole: bool) -> None:
        f, g, self._of_cell = activations
        self._each = tuple(self.gates)
        #: The gates that do not see the new c: all but o, where there are peepholes.
        self._early = self.gates[:3] if peephole else self.gates
        self._late = self.gates[len(self._early) :]
        self._activate_early = _activation_of(self._early, [f, f, g, f][: len(self._early)])
        self._activate_late = _activation_of(self._late, [f] * len(self._late))
        self._seen = np.empty_like(self.gates[:2]) if peephole else self._late

    def advance(self, given: Arguments, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates, peephole = self.gates, given.peephole
        i, f, g, o = self._each
        np.matmul(given.weight_hh, self.h, out=self.rows)
        gates += projected
        if peephole is not None:
            gates[:2] += np.multiply(peephole[:2], self.c, out=self._seen)
        self.clip(self._early)
        _keep(given, t, 0, self._early)
        self._activate_early()
        if self.geometry.input_forget:
            np.subtract(1, i, out=f)
        np.multiply(f, self.c, out=c)
        i *= g
        c += i
        if peephole is not None:
            o += np.multiply(peephole[2], c, out=i)
            self.clip(o)
            _keep(given, t, 3, self._late)
            self._activate_late()
        if given.kept:
            given.kept["cells"][t, :, 0] = c.T
        _apply(c, self._of_cell, h)
        h *= o


class _Gru(Cell):
    def prepare(self, activations: Sequence[Activation], peephole: bool) -> None:
        f, g = activations
        self._rz, self._each = self.gates[:2], tuple(self.gates)
        self._activate_rz = _activation_of(self._rz, [f, f])
        self._activate_n = _activation_of(self.gates[2:], [g])

    def input_bias(self, given: Arguments) -> np.ndarray | None:
        """Without the recurrent bias of n: that is added to the state's product, which the reset gate scales."""
        if given.bias_hh is None:
            return given.bias_ih
        bias = np.concatenate([given.bias_hh[:2], np.zeros_like(given.bias_hh[2:])])
        return bias if given.bias_ih is None else bias + given.bias_ih

    def advance(self, given: Arguments, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        rz, (r, z, n) = self._rz, self._each
        bias_hn = None if given.bias_hh is None else given.bias_hh[2]
        linear_before_reset, hidden = self.geometry.linear_before_reset, self.geometry.hidden
        if linear_before_reset:
            np.matmul(given.weight_hh, self.h, out=self.rows)
            if bias_hn is not None:
                n += bias_hn
            if given.kept:
                given.kept["candidate"][t, :, 0] = n.T
        else:
            np.matmul(given.weight_hh[: 2 * hidden], self.h, out=self.rows[: 2 * hidden])
        rz += projected[:2]
        self.clip(rz)
        _keep(given, t, 0, rz)
        self._activate_rz()
        if linear_before_reset:
            n *= r
        else:
            r *= self.h
            if given.kept:
                given.kept["candidate"][t, :, 0] = r.T
            np.matmul(given.weight_hh[2 * hidden :], r, out=n)
            if bias_hn is not None:
                n += bias_hn
        n += projected[2]
        self.clip(n)
        _keep(given, t, 2, self.gates[2:])
        self._activate_n()
        np.subtract(1, z, out=r)
        r *= n
        np.multiply(z, self.h, out=h)
        h += r


CELLS: dict[str, type[Cell]] = {"rnn": _Rnn, "lstm": _Lstm, "gru": _Gru}


def _activation_of(gates: np.ndarray, activations: Sequence[Activation]) -> Callable[[], None]:
    """What applies an activation to each of the gates, in place.

    A sigmoid is (1 + tanh(v / 2)) / 2: so gates with one and gates with tanh are one pass of tanh.
    """
    runs: list[tuple[np.ndarray, Activation]] = []
    for activation, same in groupby(range(len(activations)), lambda k: activations[k]):
        first, *others = same
        runs.append((gates[first : first + 1 + len(others)], activation))
    if any(activation.name not in ("sigmoid", "tanh") for _, activation in runs):

        def one_by_one() -> None:
            for run, activation in runs:
                _apply(run, activation, run)

        return one_by_one
    sigmoids = [run for run, activation in runs if activation.name == "sigmoid"]

    def at_once() -> None:
        for run in sigmoids:
            run *= 0.5
        np.tanh(gates, out=gates)
        for run in sigmoids:
            run *= 0.5
            run += 0.5

    return at_once


def _apply(v: np.ndarray, activation: Activation, out: np.ndarray) -> None:
    """`activate` from one array into another, which may be the same; a sigmoid without its temporary."""
    if activation.name == "tanh":
        np.tanh(v, out=out)
    elif activation.name == "sigmoid":
        np.multiply(v, 0.5, out=out)
        np.tanh(out, out=out)
        out *= 0.5
        out += 0.5
    else:
        if out is not v:
            out[...] = v
        activate(out, activation)
