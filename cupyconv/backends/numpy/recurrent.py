"""A recurrent layer step by step: the inputs of a chunk of steps in one product, all gates in place.

::

    x of a chunk   --BLAS-->   projected (steps, N, G*H)
    h (N, H)       --BLAS-->   gates (N, G*H)   + projected + biases   --activations-->   h, c

The time loop allocates nothing, activations aside that have temporaries of their own.  Where lengths are given, a
step's states are worked out beside the old ones and copied for the samples that are not past their length, so
that nothing of what lies beyond reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cupyconv.activations import Activation
from cupyconv.backends.numpy.activations import activate
from cupyconv.dtypes import dtype_from_name
from cupyconv.plan import RecurrentLoop


class RecurrentLayer:
    """What runs a plan's loop."""

    def __init__(self, loop: RecurrentLoop) -> None:
        self._loop = loop
        self._direction = {"rnn": _Rnn, "lstm": _Lstm, "gru": _Gru}[loop.geometry.cell]

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        given = {role: arrays[name] for role, name in self._loop.buffers}
        for direction in range(self._loop.geometry.directions):
            self._direction(self._loop, given, direction).run()


class _Direction:
    """One direction of one run: its arguments in the dtype computed with, and the memory that its steps share."""

    def __init__(self, loop: RecurrentLoop, given: Mapping[str, Any], direction: int) -> None:
        geometry, dtype = loop.geometry, dtype_from_name(loop.dtype)
        self._loop, self.geometry, self.dtype = loop, geometry, dtype
        self._given, self._index = given, direction
        hidden, batch = geometry.hidden, geometry.batch
        self._backwards = geometry.signs[direction] < 0
        weight_ih, weight_hh = self._own("weight_ih", 2), self._own("weight_hh", 2)
        assert weight_ih is not None and weight_hh is not None
        self._weight_ih = weight_ih.astype(dtype, copy=False).T
        self.weight_hh = weight_hh.astype(dtype, copy=False).T
        self.bias_ih, self.bias_hh = self._vector("bias_ih"), self._vector("bias_hh")
        x, out = given["x"], given["out"]
        self._x = x if x.ndim == 3 else x[None]
        self._out = (out if out.ndim == 3 else out[None])[:, :, direction * hidden : (direction + 1) * hidden]
        self.kept = {name: given[name][direction] for name in geometry.keeps if name in given}
        self.gates = np.empty((batch, geometry.gates * hidden), dtype)
        self.each = [self.gates[:, k * hidden : (k + 1) * hidden] for k in range(geometry.gates)]
        self.h, self.c = self._state("h0"), self._state("c0")

    def _own(self, role: str, axes: int) -> np.ndarray | None:
        """What an argument or a result of so many axes has for this direction; None where it is absent."""
        array = self._given.get(role)
        return None if array is None else array[self._index] if array.ndim > axes else array

    def _vector(self, role: str) -> np.ndarray | None:
        """Rounded to the result's dtype first, as an argument of that dtype would have been."""
        vector = self._own(role, 1)
        if vector is None:
            return None
        return vector.astype(self._given["out"].dtype, copy=False).astype(self.dtype, copy=False)

    def _state(self, role: str) -> np.ndarray:
        state = np.zeros((self.geometry.batch, self.geometry.hidden), self.dtype)
        initial = self._own(role, 2)
        if initial is not None:
            state[...] = initial.astype(self._given["out"].dtype, copy=False)
        return state

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        """The states after step t, into `h` and `c`, which may be `self.h` and `self.c`."""
        raise NotImplementedError

    def run(self) -> None:
        """All steps, and the last states."""
        lengths = self._given.get("lengths")
        least = most = self.geometry.steps
        if lengths is not None and lengths.size:
            least, most = int(lengths.min()), int(lengths.max())
            until = np.ascontiguousarray(lengths)[:, None]
            inside, past = np.empty(until.shape, bool), np.empty(until.shape, bool)
        h, c = (self.h, self.c) if least == most else (np.empty_like(self.h), np.empty_like(self.c))
        self._out[most:] = 0
        for t, projected in self._projected(most):
            if t < least:
                self.advance(t, projected, self.h, self.c)
                self._out[t] = self.h
            else:
                self.advance(t, projected, h, c)
                np.greater(until, t, out=inside)
                np.logical_not(inside, out=past)
                np.copyto(self.h, h, where=inside)
                np.copyto(self.c, c, where=inside)
                self._out[t] = self.h
                np.copyto(self._out[t], 0, where=past)
        for role, state in (("h", self.h), ("c", self.c)):
            last = self._own(role, 2)
            if last is not None:
                last[...] = state

    def _projected(self, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """The steps before `most` in this direction's order, each with what its inputs add to the gates."""
        loop, geometry = self._loop, self.geometry
        samples, inputs, width = geometry.batch, geometry.inputs, self.gates.shape[1]
        chunks = [range(first, min(first + loop.chunk, most)) for first in range(0, most, loop.chunk)]
        kept = self.kept.get("gates")
        memory = np.empty((loop.chunk if kept is None else 0, samples, width), self.dtype)
        copy = np.empty((loop.chunk * loop.copies_x, samples, inputs), self.dtype)
        for chunk in reversed(chunks) if self._backwards else chunks:
            x = self._x[chunk.start : chunk.stop]
            if loop.copies_x:
                copy[: len(chunk)] = x
                x = copy[: len(chunk)]
            projected = memory[: len(chunk)] if kept is None else kept[chunk.start : chunk.stop]
            rows = len(chunk) * samples
            np.matmul(x.reshape(rows, inputs), self._weight_ih, out=projected.reshape(rows, width))
            for t in reversed(chunk) if self._backwards else chunk:
                yield t, projected[t - chunk.start]

    # What cells are made of.

    def added(self) -> np.ndarray | None:
        """The sum of both biases."""
        if self.bias_ih is None or self.bias_hh is None:
            return self.bias_hh if self.bias_ih is None else self.bias_ih
        return self.bias_ih + self.bias_hh

    def clip(self, gates: np.ndarray) -> None:
        bound = self.geometry.clip
        if bound is not None:
            np.clip(gates, -bound, bound, out=gates)

    def activations(self) -> tuple[Activation, ...]:
        return self.geometry.activations[self._index]


class _Rnn(_Direction):
    def __init__(self, loop: RecurrentLoop, given: Mapping[str, Any], direction: int) -> None:
        super().__init__(loop, given, direction)
        self._bias = self.added()
        (f,) = self.activations()
        self._activate = _activation_of(self.gates, [(0, 1, f)], self.geometry.hidden)

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates = self.gates
        np.matmul(self.h, self.weight_hh, out=gates)
        gates += projected
        if self._bias is not None:
            gates += self._bias
        self.clip(gates)
        if self.kept:
            projected[...] = gates
        self._activate()
        h[...] = gates


class _Lstm(_Direction):
    def __init__(self, loop: RecurrentLoop, given: Mapping[str, Any], direction: int) -> None:
        super().__init__(loop, given, direction)
        hidden = self.geometry.hidden
        self._bias = self.added()
        peephole = self._vector("peephole")
        self._peepholes = None if peephole is None else peephole.reshape(3, hidden)
        self._product = np.empty_like(self.c)
        f, g, self._of_cell = self.activations()
        early = [(0, 2, f), (2, 3, g)]
        #: The gates that do not see the new c: all but o, where there are peepholes.
        self._early = self.gates if peephole is None else self.gates[:, : 3 * hidden]
        if peephole is None:
            early.append((3, 4, f))
        self._activate_early = _activation_of(self._early, early, hidden)
        self._activate_o = _activation_of(self.each[3], [(0, 1, f)], hidden)

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        gates, peepholes, product = self.gates, self._peepholes, self._product
        i, f, g, o = self.each
        np.matmul(self.h, self.weight_hh, out=gates)
        gates += projected
        if self._bias is not None:
            gates += self._bias
        if peepholes is not None:
            i += np.multiply(peepholes[0], self.c, out=product)
            f += np.multiply(peepholes[1], self.c, out=product)
        self.clip(self._early)
        if self.kept:
            projected[...] = gates
        self._activate_early()
        if self.geometry.input_forget:
            np.subtract(1, i, out=f)
        np.multiply(f, self.c, out=c)
        i *= g
        c += i
        if peepholes is not None:
            o += np.multiply(peepholes[2], c, out=product)
            self.clip(o)
            if self.kept:
                projected[:, -o.shape[1] :] = o
            self._activate_o()
        if self.kept:
            self.kept["cells"][t] = c
        h[...] = c
        _in_place(h, self._of_cell)
        h *= o


class _Gru(_Direction):
    def __init__(self, loop: RecurrentLoop, given: Mapping[str, Any], direction: int) -> None:
        super().__init__(loop, given, direction)
        geometry, hidden = self.geometry, self.geometry.hidden
        bias = self.added()
        self._two = 2 * hidden
        self._bias_rz = None if bias is None else bias[: self._two]
        self._bias_in, self._bias_hn = (None if b is None else b[self._two :] for b in (self.bias_ih, self.bias_hh))
        f, g = self.activations()
        self._rz, self._n = self.gates[:, : self._two], self.gates[:, self._two :]
        if not geometry.linear_before_reset:  # two products, each with a matrix of its own
            memory = self.gates.reshape(-1)
            self._rz = memory[: geometry.batch * self._two].reshape(geometry.batch, self._two)
            self._n = memory[self._rz.size :].reshape(geometry.batch, hidden)
        self._activate_rz = _activation_of(self._rz, [(0, 2, f)], hidden)
        self._activate_n = _activation_of(self._n, [(0, 1, g)], hidden)
        self._reset = np.empty_like(self.h)

    def advance(self, t: int, projected: np.ndarray, h: np.ndarray, c: np.ndarray) -> None:
        rz, n, two = self._rz, self._n, self._two
        r, z = rz[:, : n.shape[1]], rz[:, n.shape[1] :]
        linear_before_reset = self.geometry.linear_before_reset
        if linear_before_reset:
            np.matmul(self.h, self.weight_hh, out=self.gates)
            if self._bias_hn is not None:
                n += self._bias_hn
            if self.kept:
                self.kept["candidate"][t] = n
        else:
            np.matmul(self.h, self.weight_hh[:, :two], out=rz)
        rz += projected[:, :two]
        if self._bias_rz is not None:
            rz += self._bias_rz
        self.clip(rz)
        if self.kept:
            projected[:, :two] = rz
        self._activate_rz()
        if linear_before_reset:
            n *= r
        else:
            np.multiply(r, self.h, out=self._reset)
            if self.kept:
                self.kept["candidate"][t] = self._reset
            np.matmul(self._reset, self.weight_hh[:, two:], out=n)
            if self._bias_hn is not None:
                n += self._bias_hn
        n += projected[:, two:]
        if self._bias_in is not None:
            n += self._bias_in
        self.clip(n)
        if self.kept:
            projected[:, two:] = n
        self._activate_n()
        np.subtract(1, z, out=r)
        r *= n
        np.multiply(z, self.h, out=h)
        h += r


def _activation_of(gates: np.ndarray, parts: Sequence[tuple[int, int, Activation]], hidden: int) -> Callable[[], None]:
    """What applies to runs of gates, each (first, behind, activation), in place.

    A sigmoid is (1 + tanh(v / 2)) / 2: so gates with one and gates with tanh are one pass of tanh.
    """
    runs = [(gates[:, first * hidden : behind * hidden], activation) for first, behind, activation in parts]
    if any(activation.name not in ("sigmoid", "tanh") for _, activation in runs):

        def one_by_one() -> None:
            for run, activation in runs:
                _in_place(run, activation)

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


def _in_place(v: np.ndarray, activation: Activation) -> None:
    """`activate`, but for a sigmoid without its temporary."""
    if activation.name != "sigmoid":
        activate(v, activation)
        return
    v *= 0.5
    np.tanh(v, out=v)
    v *= 0.5
    v += 0.5
