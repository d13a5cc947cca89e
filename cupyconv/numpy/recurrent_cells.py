"""Recurrent cells: from the state before a step, and what its inputs add to the gates, to the state after it.

Samples lie innermost: a weight is the left factor of its products, as it lies in memory, and each gate is one run, over
which every pass is one loop.  A step allocates nothing, activations aside that have temporaries of their own.

A sigmoid is ``tanh(v / 2) / 2 + 1 / 2``, so gates with one and gates with tanh are one pass of tanh.  That first half is
the gate's *slope*, which costs no digit: a factor of the weights' rows where they are folded, else a pass over the gates.
The second half of a sigmoid waits too in an lstm that is *doubled*: its gates are ``tanh(v / 2) + 1``, its h is twice what
it should be, which the weight's columns undo, and c is half of a sum of two products::

    memory    c  g  f  i  o        1 to f, i, o        [f, i] * [c, g] in one pass        (1/2, 1/2) . [f * c, i * g] by BLAS

A small step is bound by the calls it makes.  So results are given by position and constants as arrays, which takes half
as long as names and Python's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from math import prod
from typing import Any

import numpy as np
from numpy import add, multiply, subtract, tanh

from cupyconv.numpy.activations import activate
from cupyconv.numpy.backend import aligned_bytes
from cupyconv.numpy.cost import SMALL_PRODUCT
from cupyconv.problem.activations import Activation
from cupyconv.problem.recurrence import RecurrentGeometry

#: Activations that have no temporaries.
IN_PLACE = ("none", "relu", "relu6", "clip", "sigmoid", "tanh", "affine", "scaled_tanh")
#: Rows of a weight that are multiplied at a time, where BLAS would copy both factors of the whole product at each step.
_BLOCKS = (64, 48, 32)
#: Products without blocks, as a part of the largest that BLAS does not copy factors for: near that they are slower.
_IN_ONE = 0.6
#: Steps from which a copy of the weight in blocks takes less than it saves.
_MANY_STEPS = 8
#: Elements of a weight that takes longer to copy by columns than it saves.
_FEW_ELEMENTS = 16_000
#: Rows of a weight that are copied at a time, so that columns are read and written in cache.
_ROWS_COPIED = 64
#: Elements of c up to which BLAS takes one thread for half the sum of two, whatever it was told.
_SMALL_SUM = 4500
#: A doubled lstm's gates as they lie in memory.
_DOUBLED = (2, 1, 0, 3)
#: Bytes of gates up to which one call for all of them takes less than one for each kind.
_SMALL_GATES = 16 << 10

#: A step in x's time: what its inputs add to the gates, as the cell cuts it, or None; the state's factor, which is h, or
#: where inputs and biases are columns of its weight, [h, x, 1]; h before and after it.
Step = tuple[int, Any, np.ndarray, np.ndarray, np.ndarray]
#: What a gradient needs, (T, N, ., H) by name: see `RecurrentGeometry.keeps`; empty where there is none.
Kept = Mapping[str, np.ndarray]


def slopes(geometry: RecurrentGeometry, direction: int, doubled: bool = False) -> list[float]:
    """What each gate is multiplied with before its activation is applied; in the order of a `doubled` lstm, or the usual one."""
    each = [0.5 if activation.name == "sigmoid" else 1.0 for activation in _of_gates(geometry, direction)]
    return [each[gate] for gate in _DOUBLED] if doubled else each


def _of_gates(geometry: RecurrentGeometry, direction: int) -> list[Activation]:
    """The activation of each gate."""
    f, *others = geometry.activations[direction]
    return {"rnn": [f], "lstm": [f, f, *others[:1], f], "gru": [f, f, *others]}[geometry.cell]


def is_doubled(geometry: RecurrentGeometry, direction: int, peephole: bool, folded: bool) -> bool:
    """Whether an lstm's gates i, f, o and its h are kept twice as large as they are, which folded weights undo."""
    names = [activation.name for activation in geometry.activations[direction]]
    return folded and geometry.cell == "lstm" and not peephole and names == ["sigmoid", "tanh", "tanh"]


def block_of_rows(rows: int, columns: int, geometry: RecurrentGeometry, samples: int) -> int:
    """Rows of the blocks that a weight is copied in, so that each is a small product; 0 where it is multiplied as it lies."""
    if samples == 1 or geometry.steps < _MANY_STEPS or rows * columns * samples <= _IN_ONE * SMALL_PRODUCT:
        return 0
    small = [block for block in _BLOCKS if block * columns * samples <= SMALL_PRODUCT]
    return min(small, key=lambda block: in_blocks(rows, block), default=0)


def in_blocks(rows: int, block: int) -> int:
    """The rows of all blocks: those of the last one that are too many hold nothing of interest."""
    return -(-rows // block) * block if block else rows


def copied_for_blas(
    parts: Sequence[np.ndarray], slope: np.ndarray | None, block: int, order: Sequence[int] = (0,), halved: int = 0
) -> np.ndarray:
    """A weight of these parts, side by side, times the slope of each row: copied so that it lies column by column.

    ``(rows, columns)``, or where it is multiplied in blocks ``(blocks, rows of one, columns)``.  BLAS reads a weight that lies
    so, and begins at a cache line, in half the time; a small one in nearly the same, and that stays in rows.

    The rows of gates come in this `order`, in which slopes are given; the first columns, as many as are `halved`, are times a
    half too.
    """
    rows, columns, dtype = len(parts[0]), sum(part.shape[1] for part in parts), parts[0].dtype
    of_gate = rows // len(order)
    if rows * columns < _FEW_ELEMENTS and not block:
        joined = np.concatenate(parts, 1)
        if len(order) > 1:
            joined = joined.reshape(len(order), of_gate, columns).take(order, 0).reshape(rows, columns)
        turned = np.empty((columns, rows), dtype)
        if slope is None:
            turned[...] = joined.T
        else:
            multiply(joined.T, slope.T, turned)
        if halved:
            multiply(turned[:halved], np.array(0.5, dtype), turned[:halved])
        return turned.T
    own = block or rows  # without gaps: the method `dot` copies what has some, at each call
    memory = _at_cache_line((in_blocks(rows, own) // own, columns, own), dtype)
    run = block or _ROWS_COPIED
    for begin, end in pairwise(sorted({*range(0, rows, run), *range(0, rows, of_gate), rows})):
        copy = memory[begin // own, :, begin % own : begin % own + end - begin]
        column, source = 0, order[begin // of_gate] * of_gate + begin % of_gate
        for part in parts:
            copy[column : column + part.shape[1]] = part[source : source + end - begin].T
            column += part.shape[1]
    memory[-1, :, rows - (len(memory) - 1) * own :] = 0  # where BLAS reads beyond the weight
    if slope is not None:
        if rows < len(memory) * own:
            slope = np.concatenate((slope, np.ones((len(memory) * own - rows, 1), dtype)))
        slope = slope.reshape(-1, 1, own)
        multiply(memory[:, halved:], slope, memory[:, halved:])
        if halved:
            multiply(memory[:, :halved], slope * dtype.type(0.5), memory[:, :halved])
    return memory.swapaxes(1, 2) if block else memory[0].T


def _at_cache_line(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that begins at a cache line."""
    return np.ndarray(shape, dtype, aligned_bytes(prod(shape) * dtype.itemsize))


#: A product with a weight: its other factor, and where the result goes.
Product = Callable[[np.ndarray, np.ndarray], object]


def multiplied_by(weight: np.ndarray) -> Product:
    """``product(factor, out)`` of a weight; where it is in blocks, `out` is (blocks, rows of one, N)."""
    return partial(np.matmul, weight) if weight.ndim > 2 else weight.dot  # takes half the time of `np.matmul`


def _no_copy() -> None:
    """Of a weight that is multiplied as it lies."""


class Weights:
    """What one direction of a call multiplies and adds, in the dtype computed with.

    Where `slope` (G * H, 1) is given they are *folded*: copied, with the slopes, and with the biases that are added with
    the state as one more column of `weight_hh`.  Where they are `joined`, the columns of weight_ih come before that one, and
    nothing is left to add.  `block` and `input_block` are the rows of blocks that weight_hh and weight_ih are multiplied
    in, see `block_of_rows`.  A `doubled` lstm's have its order of gates, and halved columns of h.
    """

    def __init__(
        self,
        geometry: RecurrentGeometry,
        weight_ih: np.ndarray,
        weight_hh: np.ndarray,
        bias_ih: np.ndarray | None = None,
        bias_hh: np.ndarray | None = None,
        peephole: np.ndarray | None = None,
        *,
        slope: np.ndarray | None = None,
        doubled: bool = False,
        joined: bool = False,
        block: int = 0,
        input_block: int = 0,
    ) -> None:
        rows, hidden = weight_hh.shape
        is_gru = geometry.cell == "gru"
        resets_product = is_gru and geometry.linear_before_reset
        both = bias_hh if bias_ih is None else bias_ih if bias_hh is None else bias_ih + bias_hh
        with_state = [weight_hh, weight_ih] if joined else [weight_hh]
        #: Added with the inputs to the rows from `biased` on; and to the product that a gru's reset gate multiplies.
        self.input_bias, self.biased, self.candidate_bias = both, 0, None
        if both is not None and (slope is not None or resets_product):
            first = 2 * hidden if is_gru else rows  # the candidate's rows, of which two biases may be told apart
            of_inputs, of_state = (bias_ih, bias_hh) if resets_product else (both, None)
            column = both.copy()
            if slope is None:
                column[first:] = 0 if of_inputs is None else of_inputs[first:]
                self.input_bias = column
                self.candidate_bias = None if of_state is None else of_state[first:, None]
            else:
                column[first:] = 0 if of_state is None else of_state[first:]
                with_state.append(column[:, None])
                self.input_bias = None
                if of_inputs is not None and first < rows:
                    self.input_bias, self.biased = of_inputs[first:] * slope[first:, 0], first
        order, halved = (_DOUBLED, hidden) if doubled else ((0,), 0)
        #: The inputs' weight, (G * H, I) or in blocks; of no use where it is joined.
        self.weight_ih = weight_ih
        #: What makes the copies of either weight, once; until then nothing can be multiplied by them.  It is let go then: it
        #: holds this, and memory that waits for the collector of cycles is not what the next call writes.
        self.copy_input: Callable[[], None] = _no_copy
        self.copy_state: Callable[[], None] = _no_copy
        if input_block or (slope is not None and not joined):
            self.copy_input = partial(self._copy_input, slope, input_block, order)
        self.peephole = peephole
        if peephole is not None:
            self.peephole = peephole.reshape(3, hidden, 1) * (1 if slope is None else slope[0])
        #: ``recurrent(h, out)``, the state's product; ``candidate(h, out)``, that of a gru which resets the state.
        self.recurrent = self.candidate = multiplied_by(weight_hh)
        apart = 2 * hidden if is_gru and not resets_product else rows  # the candidate's rows, where they wait for r
        if block or slope is not None:
            self.copy_state = partial(self._copy_state, with_state, weight_hh, apart, slope, block, order, halved)
        elif apart < rows:
            self.recurrent, self.candidate = multiplied_by(weight_hh[:apart]), multiplied_by(weight_hh[apart:])

    def _copy_input(self, slope: np.ndarray | None, block: int, order: Sequence[int]) -> None:
        self.copy_input = _no_copy
        self.weight_ih = copied_for_blas([self.weight_ih], slope, block, order)

    def _copy_state(
        self,
        with_state: Sequence[np.ndarray],
        weight_hh: np.ndarray,
        apart: int,
        slope: np.ndarray | None,
        block: int,
        order: Sequence[int],
        halved: int,
    ) -> None:
        self.copy_state = _no_copy
        of_gates, own = [part[:apart] for part in with_state], None if slope is None else slope[:apart]
        self.recurrent = multiplied_by(copied_for_blas(of_gates, own, block, order, halved))
        if apart < len(weight_hh):
            own = None if slope is None else slope[apart:]
            self.candidate = multiplied_by(copied_for_blas([weight_hh[apart:]], own, block))


class Cell:
    """One direction's gates and states of `batch` samples, in memory that every step writes anew.

    No argument of a call is held here, so that a cell may serve one call after the other.  `folded` says whether the
    weights will be.
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
        # The last block of a product may end beyond the gates.
        self._memory = np.empty((of_c + rows + block, batch), dtype)
        #: An lstm's other state; and where the next one is written, which may be elsewhere.
        self.c = self.next_c = self._memory[:of_c]
        #: The gates, and their rows one after the other.
        self.rows = self._memory[of_c : of_c + rows]
        self.gates = self.rows.reshape(geometry.gates, geometry.hidden, batch)
        #: Whether gates and h are twice as large as they should be, and gates lie in another order.
        self.doubled = is_doubled(geometry, direction, peephole, folded)
        self._order = [*_DOUBLED] if self.doubled else [*range(geometry.gates)]
        self._is_small = self.gates.nbytes <= _SMALL_GATES
        each = slopes(geometry, direction, self.doubled)
        self._slopes, self._folded = np.array(each, dtype)[:, None], folded
        self._slope = None if folded or set(each) == {1.0} else self._spread(each)
        self._clip = None if geometry.clip is None else self._spread([geometry.clip * slope for slope in each])
        self._completes = self._slope is not None or self._clip is not None
        of_gates = _of_gates(geometry, direction)
        self.prepare([of_gates[gate] for gate in self._order], geometry.activations[direction][-1], peephole)

    def prepare(self, of_gates: Sequence[Activation], last: Activation, peephole: bool) -> None:
        """What all steps share: the activations of the gates, and the last one of the cell."""
        raise NotImplementedError

    def cut(self, projected: np.ndarray) -> Any:
        """What the inputs of a step add to the gates, (G * H, N), as `advance` takes it."""
        return projected

    def advance(self, given: Weights, steps: Iterable[Step], kept: Kept) -> None:
        """Work out these steps, one after the other; `c` is the state that is not in them."""
        raise NotImplementedError

    def _written(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of the gates, as a product writes them."""
        if not self._block:
            return rows
        shape = in_blocks(len(rows), self._block) // self._block, self._block, rows.shape[1]
        return np.ndarray(shape, rows.dtype, self._memory, rows.ctypes.data - self._memory.ctypes.data)

    def _spread(self, values: Sequence[float]) -> np.ndarray:
        """A number for each of some gates, as an array beside them: of small ones a whole one, which saves time in a call."""
        each = np.array(values, self.gates.dtype).reshape(-1, 1, 1)
        return np.broadcast_to(each, (len(each), *self.gates.shape[1:])).copy() if self._is_small else each

    def _completion_of(self, gates: slice) -> Callable[[Kept, int], None]:
        """What comes after the sums of these gates and before their activations."""
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
        """What applies an activation to each of these gates, which have their slope, in place."""
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
        #: The gates that do not see the new c: all but o, where there are peepholes.
        early, late = (slice(3), slice(3, 4)) if peephole else (slice(4), slice(4, 4))
        self._activate_early = self._activation_of(early, of_gates)
        self._complete_early = self._completion_of(early)
        self._activate_late = self._activation_of(late, of_gates)
        self._complete_late = self._completion_of(late)
        self._seen = np.empty_like(self.gates[:2]) if peephole else None
        self._rows_written = self._written(self.rows)
        #: What i and f are together, where they are.
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
        #: What i and f are together, where they are.
        self._whole = np.array(2, c.dtype) if self.geometry.input_forget else None
        #: Two products, and c: half of their sum.
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
    """The cell of one direction, for `batch` samples; see `Cell`."""
    doubled = is_doubled(geometry, direction, peephole, folded)
    kind = _DoubledLstm if doubled else _CELLS[geometry.cell]
    return kind(geometry, direction, batch, dtype, peephole, folded, block)
