"""Recurrent cells: compute the state after a step from the state before it and the projected inputs.

The projected inputs, which are added to the gates, are a step's inputs times their weight.  Samples are the innermost
axis.  So a weight is the left factor of its products without a copy, and each gate is contiguous, so that every pass
over it is one loop.  A step allocates nothing, except for activations that have temporaries of their own.

A sigmoid is ``tanh(v / 2) / 2 + 1 / 2``, so gates with a sigmoid and gates with tanh share one pass of tanh.  The inner
factor 1 / 2 is the gate's *slope*.  Multiplying by it loses no precision.  It is a factor of the weights' rows if they
are folded, and otherwise a pass over the gates.  The outer factor 1 / 2 is also deferred in an lstm that is *doubled*.
Its gates are ``tanh(v / 2) + 1``, and its h is twice the true value, which halved columns of the weight compensate.
Its c is half of a sum of two products::

    memory    c  g  f  i  o        1 to f, i, o        [f, i] * [c, g] in one pass        (1/2, 1/2) . [f * c, i * g] by BLAS

The time of a small step is bound by its calls.  So results are passed by position, and constants as arrays, which takes
half the time of keyword arguments and Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy import add, multiply, subtract, tanh

from cupyconv.numpy.activations import activate
from cupyconv.numpy.recurrent_weights import DOUBLED, Weights, activations_of_gates, in_blocks, is_doubled, slopes
from cupyconv.problem.activations import Activation
from cupyconv.problem.recurrence import RecurrentGeometry

#: Activations without temporaries.
IN_PLACE = ("none", "relu", "relu6", "clip", "sigmoid", "tanh", "affine", "scaled_tanh")
#: Elements of c up to which BLAS computes half the sum of two vectors on one thread, whatever its thread setting.
_SMALL_SUM = 4500
#: Bytes of gates up to which one call for all gates is faster than one call per kind of gate.
_SMALL_GATES = 16 << 10

#: A step: its index in x's time; the projected inputs, as `Cell.cut` returns them, or None; the factor of the recurrent
#: weight, which is h, or [h, x, 1] if inputs and biases are columns of the weight; h before the step; and h after it.
Step = tuple[int, Any, np.ndarray, np.ndarray, np.ndarray]
#: Arrays (T, N, ., H) that a gradient needs, by name, see `RecurrentGeometry.keeps`; empty if there is no gradient.
Kept = Mapping[str, np.ndarray]


class Cell:
    """Gates and states of one direction for `batch` samples, in memory that every step overwrites.

    A cell holds no reference to the arguments of a call, so it can be reused by later calls.  `folded` tells whether
    the weights will be folded.
    """

    def __init__(
        self,
        geometry: RecurrentGeometry,
        direction: int,
        batch: int,
        dtype: np.dtype,
        peephole: bool,
        folded: bool,
        block: int,
    ) -> None:
        self.geometry, self._block = geometry, block
        rows, of_c = geometry.gates * geometry.hidden, geometry.hidden if geometry.cell == "lstm" else 0
        # The last block of a product may extend beyond the gates.
        self._memory = np.empty((of_c + rows + block, batch), dtype)
        #: The cell state of an lstm; and the array to which the next one is written, which may be another.
        self.c = self.next_c = self._memory[:of_c]
        #: The gates as (G * H, N), and as (G, H, N).
        self.rows = self._memory[of_c : of_c + rows]
        self.gates = self.rows.reshape(geometry.gates, geometry.hidden, batch)
        #: Whether gates and h are stored doubled, and gates are stored in another order.
        self.doubled = is_doubled(geometry, direction, peephole, folded)
        self._order = [*DOUBLED] if self.doubled else [*range(geometry.gates)]
        self._is_small = self.gates.nbytes <= _SMALL_GATES
        each = slopes(geometry, direction, self.doubled)
        self._slopes, self._folded = np.array(each, dtype)[:, None], folded
        self._slope = None if folded or set(each) == {1.0} else self._spread(each)
        self._clip = None if geometry.clip is None else self._spread([geometry.clip * slope for slope in each])
        self._completes = self._slope is not None or self._clip is not None
        of_gates = activations_of_gates(geometry, direction)
        self.prepare([of_gates[gate] for gate in self._order], geometry.activations[direction][-1], peephole)

    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        """Set up what all steps share, given the gates' activations and the cell's last activation."""
        raise NotImplementedError

    def cut(self, projected: np.ndarray) -> Any:
        """Convert a step's projected inputs, (G * H, N), to the form that `advance` expects."""
        return projected

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        """Compute `steps` in order; `self.c` is the state that they do not contain."""
        raise NotImplementedError

    def _written(self, rows: np.ndarray) -> np.ndarray:
        """A view of some rows of the gates in the shape that a product writes."""
        if not self._block:
            return rows
        shape = in_blocks(len(rows), self._block) // self._block, self._block, rows.shape[1]
        return np.ndarray(shape, rows.dtype, self._memory, rows.ctypes.data - self._memory.ctypes.data)

    def _spread(self, values: Sequence[float]) -> np.ndarray:
        """One number per gate, as an array that broadcasts to the gates; full-size for small gates, which is faster."""
        each = np.array(values, self.gates.dtype).reshape(-1, 1, 1)
        return np.broadcast_to(each, (len(each), *self.gates.shape[1:])).copy() if self._is_small else each

    def _completion_of(self, gates: slice) -> Callable[[Kept, int], None]:
        """Return a function that scales, clips and saves these gates after their sums and before their activations."""
        own, slopes_of_each = self.gates[gates], self._slopes[gates]
        slope = None if self._slope is None else self._slope[gates]
        most = None if self._clip is None else self._clip[gates]
        least, order = None if most is None else -most, self._order[gates]

        def complete(kept: Kept, t: int) -> None:
            if slope is not None:
                multiply(own, slope, own)
            if most is not None:
                np.clip(own, least, most, own)
            if kept:
                kept["gates"][t][:, order] = own.transpose(2, 0, 1) / slopes_of_each

        return complete

    def _activation_of(self, gates: slice, of_gates: Sequence[Activation]) -> Callable[[], None]:
        """Return a function that applies the activations in place to these gates, which have been scaled by slopes."""
        own, activations = self.gates[gates], of_gates[gates]
        runs: list[tuple[np.ndarray, Activation]] = []
        for activation, same in groupby(range(len(own)), lambda k: activations[k]):
            first, *others = same
            runs.append((own[first : first + 1 + len(others)], activation))
        sigmoids = [run for run, activation in runs if activation.name == "sigmoid"]
        half = np.array(0.5, own.dtype)
        halves = [(run, half, half) for run in sigmoids]
        if len(runs) > 1 and self._is_small:
            are = [activation.name == "sigmoid" for activation in activations]
            halves = [(own, self._spread([0.5 if yes else 1.0 for yes in are]), self._spread([yes / 2 for yes in are]))]

        def by_tanh() -> None:
            tanh(own, own)
            for run, scale, offset in halves:
                multiply(run, scale, run)
                add(run, offset, run)

        def one_by_one() -> None:
            for run, activation in runs:
                if activation.name != "sigmoid":
                    activate(run, activation)
            for run in sigmoids:
                tanh(run, run)
                multiply(run, half, run)
                add(run, half, run)

        if any(activation.name not in ("sigmoid", "tanh") for activation in activations):
            return one_by_one
        return by_tanh


class _Rnn(Cell):
    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        self._activate = self._activation_of(slice(1), of_gates)
        self._complete = self._completion_of(slice(1))

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        rows, recurrent, activate_gate, completes = self.rows, given.recurrent, self._activate, self._completes or kept
        written = self._written(rows)
        for t, projected, factor, _, after in steps:
            recurrent(factor, written)
            if projected is not None:
                add(rows, projected, rows)
            if completes:
                self._complete(kept, t)
            activate_gate()
            after[...] = rows


class _Lstm(Cell):
    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        self._of_cell = None if last.name == "tanh" else last
        #: Gates that do not read the new c; with peepholes, gate o reads it.
        early, late = (slice(3), slice(3, 4)) if peephole else (slice(4), slice(4, 4))
        self._activate_early = self._activation_of(early, of_gates)
        self._complete_early = self._completion_of(early)
        self._activate_late = self._activation_of(late, of_gates)
        self._complete_late = self._completion_of(late)
        self._seen = np.empty_like(self.gates[:2]) if peephole else None
        self._rows_written = self._written(self.rows)
        #: The sum of i and f if the two are coupled.
        self._whole = np.array(1, self.gates.dtype) if self.geometry.input_forget else None

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        gates, rows, c, recurrent, peephole = self.gates, self.rows, self.c, given.recurrent, given.peephole
        activate_early, completes = self._activate_early, self._completes or kept
        (i, f, g, o), next_c, whole = gates, self.next_c, self._whole
        of_cell, written = self._of_cell, self._rows_written
        for t, projected, factor, _, after in steps:
            recurrent(factor, written)
            if projected is not None:
                add(rows, projected, rows)
            if peephole is not None:
                gates[:2] += multiply(peephole[:2], c, self._seen)
            if completes:
                self._complete_early(kept, t)
            activate_early()
            if whole is not None:
                subtract(whole, i, f)
            multiply(f, c, f)
            multiply(i, g, i)
            add(f, i, next_c)
            if peephole is not None:
                o += multiply(peephole[2], next_c, i)
                if completes:
                    self._complete_late(kept, t)
                self._activate_late()
            if kept:
                kept["cells"][t, :, 0] = next_c.T
            if of_cell is None:
                tanh(next_c, after)
            else:
                after[...] = next_c
                activate(after, of_cell)
            multiply(after, o, after)


class _DoubledLstm(Cell):
    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        hidden, c = self.geometry.hidden, self.c
        self._rows_written = self._written(self.rows)
        self._complete = self._completion_of(slice(4))
        self._c_g, self._f_i, self._f_i_o = (
            self._memory[: 2 * hidden],
            self.rows[hidden : 3 * hidden],
            self.rows[hidden:],
        )
        self._one, self._half = np.array(1, c.dtype), np.array(0.5, c.dtype)
        #: The sum of doubled i and f if the two are coupled.
        self._whole = np.array(2, c.dtype) if self.geometry.input_forget else None
        #: Two products, and c, which is half of their sum.
        self._products, self._sums = self._f_i.reshape(2, -1), c.reshape(-1)
        self._half_sum = np.array((0.5, 0.5), c.dtype).dot if c.size <= _SMALL_SUM else self._half_of_large

    def _half_of_large(self, products: np.ndarray, sums: np.ndarray) -> None:
        add(products[0], products[1], sums)
        multiply(sums, self._half, sums)

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        rows, written, c, (_, f, i, o) = self.rows, self._rows_written, self.c, self.gates
        recurrent, completes, whole, one = given.recurrent, self._completes or kept, self._whole, self._one
        c_g, f_i, f_i_o, half_sum, products, sums = (
            self._c_g, self._f_i, self._f_i_o, self._half_sum, self._products, self._sums,
        )  # fmt: skip
        for t, projected, factor, _, after in steps:
            recurrent(factor, written)
            if projected is not None:
                add(rows, projected, rows)
            if completes:
                self._complete(kept, t)
            tanh(rows, rows)
            add(f_i_o, one, f_i_o)
            if whole is not None:
                subtract(whole, i, f)
            multiply(f_i, c_g, f_i)
            half_sum(products, sums)
            if kept:
                kept["cells"][t, :, 0] = c.T
            tanh(c, after)
            multiply(after, o, after)


class _Gru(Cell):
    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        rz, n = slice(2), slice(2, 3)
        self._rows_rz = self.gates[rz].reshape(-1, self.gates.shape[2])
        self._activate_rz = self._activation_of(rz, of_gates)
        self._complete_rz = self._completion_of(rz)
        self._activate_n = self._activation_of(n, of_gates)
        self._complete_n = self._completion_of(n)
        self._one = np.array(1, self.gates.dtype)

    def cut(self, projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = len(self._rows_rz)
        return projected[:rows], projected[rows:]

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        rz, (r, z, n), one, resets_product = self._rows_rz, self.gates, self._one, self.geometry.linear_before_reset
        product = self._written(self.rows if resets_product else rz)
        written_n, recurrent, candidate_bias = self._written(n), given.recurrent, given.candidate_bias
        activate_rz, activate_n, completes = self._activate_rz, self._activate_n, self._completes or kept
        for t, (projected_rz, projected_n), factor, h, after in steps:
            recurrent(factor, product)
            add(rz, projected_rz, rz)
            if completes:
                self._complete_rz(kept, t)
            activate_rz()
            if resets_product:
                if candidate_bias is not None:
                    add(n, candidate_bias, n)
                if kept:
                    kept["candidate"][t, :, 0] = n.T / self._slopes[2] if self._folded else n.T
                multiply(n, r, n)
            else:
                multiply(r, h, r)
                if kept:
                    kept["candidate"][t, :, 0] = r.T
                given.candidate(r, written_n)
            add(n, projected_n, n)
            if completes:
                self._complete_n(kept, t)
            activate_n()
            subtract(one, z, r)
            multiply(r, n, r)
            multiply(z, h, after)
            add(after, r, after)


_CELLS: dict[str, type[Cell]] = {"rnn": _Rnn, "lstm": _Lstm, "gru": _Gru}


def cell_of(
    geometry: RecurrentGeometry, direction: int, batch: int, dtype: np.dtype, peephole: bool, folded: bool, block: int
) -> Cell:
    """Create the cell of one direction for `batch` samples; see `Cell`."""
    doubled = is_doubled(geometry, direction, peephole, folded)
    kind = _DoubledLstm if doubled else _CELLS[geometry.cell]
    return kind(geometry, direction, batch, dtype, peephole, folded, block)
