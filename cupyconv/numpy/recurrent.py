"""A recurrent layer step by step: the inputs of a chunk of steps in one product, all gates in place.

::

    x of a chunk   --BLAS-->   projected (steps, G, H, N), biases included
    h (H, N)       --BLAS-->   gates (G, H, N)   + projected   --activations-->   h, c

Samples lie innermost: a weight is the left factor of its products, as it lies in memory, and each gate is one run, over
which every pass is one loop.  Of many inputs the biases are one more column of the weight, beside a 1 after every x: by
themselves they would be one more pass over all gates.  The time loop allocates nothing, activations aside that have
temporaries of their own.  Where lengths are given, a step's states are worked out beside the old
ones and copied for the samples that are not past their length, so that nothing of what lies beyond reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, product
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate
from cupyconv.numpy.loops import RecurrentLoop
from cupyconv.problem.activations import Activation
from cupyconv.problem.arrays import dtype_from_name

_WEIGHTS = ("weight_ih", "weight_hh")


class RecurrentLayer:
    """What runs a plan's loop."""

    def __init__(self, loop: RecurrentLoop) -> None:
        self._loop = loop
        self._direction = {"rnn": _Rnn, "lstm": _Lstm, "gru": _Gru}[loop.geometry.cell]

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        loop, geometry = self._loop, self._loop.geometry
        given = {role: arrays[name] for role, name in loop.buffers}
        parts = [slice(first, first + loop.samples) for first in range(0, max(1, geometry.batch), loop.samples)]
        weights = [[self._weight(given, role, d) for role in _WEIGHTS] for d in range(geometry.directions)]

        def finish(work: tuple[int, slice]) -> None:
            with np.errstate(all="ignore"):  # of the thread
                self._direction(loop, given, weights[work[0]], *work).run()

        every = list(product(range(geometry.directions), parts))
        if loop.threads == 1:
            for work in every:
                finish(work)
        else:
            with ThreadPoolExecutor(loop.threads) as pool:
                list(pool.map(finish, every))

    def _weight(self, given: Mapping[str, Any], role: str, direction: int) -> np.ndarray:
        """A weight of one direction, (G * H, columns)."""
        own = given[role][direction] if given[role].ndim == 3 else given[role]
        return np.array(own, dtype_from_name(self._loop.dtype), order="C") if role in self._loop.copied else own


class _Direction:
    """One direction of some samples: its arguments in the dtype computed with, and the memory that its steps share."""

    def __init__(
        self,
        loop: RecurrentLoop,
        given: Mapping[str, Any],
        weights: Sequence[np.ndarray],
        direction: int,
        samples: slice,
    ) -> None:
        geometry, dtype = loop.geometry, dtype_from_name(loop.dtype)
        self._loop, self.geometry, self.dtype = loop, geometry, dtype
        self._given, self._index, self._samples = given, direction, samples
        hidden = geometry.hidden
        self._batch = len(range(geometry.batch)[samples])
        self._backwards = geometry.signs[direction] < 0
        self._weight_ih, self.weight_hh = weights
        self.bias_ih, self.bias_hh = self._vector("bias_ih"), self._vector("bias_hh")
        x, out = given["x"], given["out"]
        self._x = (x if x.ndim == 3 else x[None])[:, samples]
        self._out = (out if out.ndim == 3 else out[None])[:, samples, direction * hidden : (direction + 1) * hidden]
        kept = {name: shape[-1] // max(1, hidden) for name, shape in geometry.keeps.items() if name in given}
        self.kept = {
            name: given[name][direction].reshape(geometry.steps, geometry.batch, parts, hidden)[:, samples]
            for name, parts in kept.items()
        }
        self.gates = np.empty((geometry.gates, hidden, self._batch), dtype)
        #: The same as the products have it.
        self.rows = self.gates.reshape(-1, self._batch)
        self.h, self.c = self._state("h0", hidden), self._state("c0", hidden if geometry.cell == "lstm" else 0)
        self._bias = self.input_bias()
        self.prepare()

    def _own(self, role: str, axes: int) -> np.ndarray | None:
        """What an argument or a result of so many axes has for this direction; None where it is absent."""
        array = self._given.get(role)
        return None if array is None else array[self._index] if array.ndim > axes else array

    def _vector(self, role: str) -> np.ndarray | None:
        """A vector as (parts, H, 1), rounded to the result's dtype first, as an argument of that would have been."""
        vector = self._own(role, 1)
        if vector is None:
            return None
        rounded = vector.astype(self._given["out"].dtype, copy=False).astype(self.dtype, copy=False)
        return rounded.reshape(-1, self.geometry.hidden, 1)

    def _state(self, role: str, size: int) -> np.ndarray:
        state = np.zeros((size, self._batch), self.dtype)
        initial = self._own(role, 2)
        if initial is not None:
            state[...] = initial[self._samples].astype(self._given["out"].dtype, copy=False).T
        return state

    def input_bias(self) -> np.ndarray | None:
        """The biases that are added with the inputs, (G, H, 1)."""
        if self.bias_ih is None or self.bias_hh is None:
            return self.bias_hh if self.bias_ih is None else self.bias_ih
        return self.bias_ih + self.bias_hh

    def prepare(self) -> None:
        """What all steps of a cell share."""
        raise NotImplementedError

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        """The states after step t, into `h` and `c`, which may be `self.h` and `self.c`."""
        raise NotImplementedError

    def run(self) -> None:
        """All steps, and the last states."""
        lengths = self._given.get("lengths")
        lengths = None if lengths is None else lengths[self._samples]
        least = most = self.geometry.steps
        if lengths is not None and lengths.size:
            least, most = int(lengths.min()), int(lengths.max())
            until = np.ascontiguousarray(lengths)
            inside, past = np.empty(until.shape, bool), np.empty(until.shape, bool)
        h, c = (self.h, self.c) if least == most else (np.empty_like(self.h), np.empty_like(self.c))
        self._out[most:] = 0
        for t, projected in self._projected(most):
            if t < least:
                self.advance(t, projected, self.h, self.c)
                self._out[t] = self.h.T
            else:
                self.advance(t, projected, h, c)
                np.greater(until, t, out=inside)
                np.logical_not(inside, out=past)
                np.copyto(self.h, h, where=inside)
                np.copyto(self.c, c, where=inside)
                self._out[t] = self.h.T
                np.copyto(self._out[t], 0, where=past[:, None])
        for role, state in (("h", self.h), ("c", self.c)):
            last = self._own(role, 2)
            if last is not None:
                last[self._samples] = state.T

    def _projected(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """The steps before `most` in this direction's order, each with what its inputs add to the gates."""
        loop, geometry = self._loop, self.geometry
        samples, inputs = self._batch, geometry.inputs
        chunks = [range(first, min(first + loop.chunk, most)) for first in range(0, most, loop.chunk)]
        memory = np.empty(loop.chunk * self.gates.size, self.dtype)
        weight, copies_x = self._weight_ih, "x" in loop.copied
        copy = np.ones((loop.chunk * copies_x, samples, inputs + loop.bias_column), self.dtype)
        if loop.bias_column:
            assert self._bias is not None
            weight = np.concatenate([weight, self._bias.reshape(-1, 1)], axis=1, dtype=self.dtype)
        for chunk in reversed(chunks) if self._backwards else chunks:
            steps = len(chunk)
            x = self._x[chunk.start : chunk.stop]
            if copies_x:
                copy[:steps, :, :inputs] = x
                x = copy[:steps]
            projected = memory[: steps * self.gates.size].reshape(steps, *self.gates.shape)
            np.matmul(weight, x.swapaxes(1, 2), out=projected.reshape(steps, *self.rows.shape))
            if self._bias is not None and not loop.bias_column:
                projected += self._bias
            for t in reversed(chunk) if self._backwards else chunk:
                yield t, projected[t - chunk.start]

    # What cells are made of.

    def clip(self, gates: np.ndarray) -> None:
        bound = self.geometry.clip
        if bound is not None:
            np.clip(gates, -bound, bound, out=gates)

    def keep(self, t: int, first: int, gates: np.ndarray) -> None:
        """What the activations of these gates, from the first on, will be applied to."""
        if self.kept:
            self.kept["gates"][t, :, first : first + len(gates)] = gates.transpose(2, 0, 1)

    def activations(self) -> tuple[Activation, ...]:
        return self.geometry.activations[self._index]


class _Rnn(_Direction):
    def prepare(self) -> None:
        (self._activation,) = self.activations()

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates = self.gates
        np.matmul(self.weight_hh, self.h, out=self.rows)
        gates += projected
        self.clip(gates)
        self.keep(t, 0, gates)
        _apply(gates[0], self._activation, h)


class _Lstm(_Direction):
    def prepare(self) -> None:
        self._peepholes = self._vector("peephole")
        f, g, self._of_cell = self.activations()
        #: The gates that do not see the new c: all but o, where there are peepholes.
        self._early = self.gates if self._peepholes is None else self.gates[:3]
        self._late = self.gates[len(self._early) :]
        self._activate_early = _activation_of(self._early, [f, f, g, f][: len(self._early)])
        self._activate_late = _activation_of(self._late, [f] * len(self._late))
        self._seen = np.empty_like(self.gates[:2]) if len(self._late) else self._late

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates, peepholes = self.gates, self._peepholes
        i, f, g, o = gates
        np.matmul(self.weight_hh, self.h, out=self.rows)
        gates += projected
        if peepholes is not None:
            gates[:2] += np.multiply(peepholes[:2], self.c, out=self._seen)
        self.clip(self._early)
        self.keep(t, 0, self._early)
        self._activate_early()
        if self.geometry.input_forget:
            np.subtract(1, i, out=f)
        np.multiply(f, self.c, out=c)
        i *= g
        c += i
        if peepholes is not None:
            o += np.multiply(peepholes[2], c, out=i)
            self.clip(o)
            self.keep(t, 3, self._late)
            self._activate_late()
        if self.kept:
            self.kept["cells"][t, :, 0] = c.T
        _apply(c, self._of_cell, h)
        h *= o


class _Gru(_Direction):
    def input_bias(self) -> np.ndarray | None:
        if self.bias_hh is None:
            return self.bias_ih
        bias = np.concatenate([self.bias_hh[:2], np.zeros_like(self.bias_hh[2:])])
        return bias if self.bias_ih is None else bias + self.bias_ih

    def prepare(self) -> None:
        #: It is added to the state's product, which the reset gate scales.
        self._bias_hn = None if self.bias_hh is None else self.bias_hh[2]
        f, g = self.activations()
        self._activate_rz = _activation_of(self.gates[:2], [f, f])
        self._activate_n = _activation_of(self.gates[2:], [g])

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        rz, (r, z, n) = self.gates[:2], self.gates
        linear_before_reset, hidden = self.geometry.linear_before_reset, self.geometry.hidden
        if linear_before_reset:
            np.matmul(self.weight_hh, self.h, out=self.rows)
            if self._bias_hn is not None:
                n += self._bias_hn
            if self.kept:
                self.kept["candidate"][t, :, 0] = n.T
        else:
            np.matmul(self.weight_hh[: 2 * hidden], self.h, out=self.rows[: 2 * hidden])
        rz += projected[:2]
        self.clip(rz)
        self.keep(t, 0, rz)
        self._activate_rz()
        if linear_before_reset:
            n *= r
        else:
            r *= self.h
            if self.kept:
                self.kept["candidate"][t, :, 0] = r.T
            np.matmul(self.weight_hh[2 * hidden :], r, out=n)
            if self._bias_hn is not None:
                n += self._bias_hn
        n += projected[2]
        self.clip(n)
        self.keep(t, 2, self.gates[2:])
        self._activate_n()
        np.subtract(1, z, out=r)
        r *= n
        np.multiply(z, self.h, out=h)
        h += r


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
