"""One step of one sample: most of its time is spent in Python, so it reads and writes the caller's arrays in place.

Such a step makes few calls, and each of them is short.  Everything else that a step needs is created once and cached.
An ordinary lstm step has its own list of calls; any other step uses the same cell as a sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from numpy import add, multiply, tanh

from cupyconv.numpy.recurrent_cells import Cell, cell_of
from cupyconv.numpy.recurrent_weights import Weights, slopes
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.recurrence import RecurrentProblem

#: Roles of the arguments that all steps of a direction share.
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole")
_NOTHING_KEPT: dict[str, np.ndarray] = {}
_NO_STATE = np.empty(0)


def lone_step(problem: RecurrentProblem, dtype: str) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that runs one step of one sample in `dtype`, on arguments and results by name."""
    geometry = problem.geometry
    names = [activation.name for activation in geometry.activations[0]]
    is_ordinary = names == ["sigmoid", "tanh", "tanh"] and not geometry.input_forget and geometry.clip is None
    if is_ordinary and problem.peephole is None:
        return _LstmStep(problem, dtype_from_name(dtype)).run
    return _CellStep(problem, dtype_from_name(dtype)).run


class _LstmStep:
    """A step of an lstm with sigmoid and tanh, which computes all gates, (1, 4 * H), at once.

    A sigmoid is computed as ``tanh(v / 2) / 2 + 1 / 2``.
    """

    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        geometry, names = problem.geometry, {role: operand.name for role, operand in problem.operands.items()}
        self._of = itemgetter(*(names[role] for role in ("x", "weight_ih", "h0", "weight_hh", "c0", "c", "out")))
        self._biases = [names[role] for role in ("bias_ih", "bias_hh") if role in names]
        self._shape, self._dtype = (1, 4 * geometry.hidden), dtype
        self._slope = np.repeat(np.array(slopes(geometry, 0), dtype), geometry.hidden).reshape(self._shape)
        self._offset = 1 - self._slope
        #: Memory that no call is using: the projected input; the gates as one array; and views of the single gates.
        self._idle: deque[tuple[np.ndarray, np.ndarray, list[np.ndarray]]] = deque(maxlen=1)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        try:
            memory = self._idle.pop()
        except IndexError:  # the first call, or a concurrent one
            gates = np.empty(self._shape, self._dtype)
            memory = np.empty_like(gates), gates, np.split(gates, 4, axis=1)
        projected, gates, (i, f, g, o) = memory
        x, weight_ih, h, weight_hh, c, next_c, next_h = self._of(arrays)
        slope, offset = self._slope, self._offset
        x.dot(weight_ih.T, projected)
        h.dot(weight_hh.T, gates)
        add(gates, projected, gates)
        for name in self._biases:
            add(gates, arrays[name], gates)
        multiply(gates, slope, gates)
        tanh(gates, gates)
        multiply(gates, slope, gates)
        add(gates, offset, gates)
        multiply(f, c, f)
        multiply(i, g, i)
        add(f, i, next_c)
        tanh(next_c, next_h)
        multiply(next_h, o, next_h)
        self._idle.append(memory)


class _CellStep:
    """A step by a cell.  For one sample, a state (1, H) has the same memory layout as the column (H, 1) of a cell."""

    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        geometry = problem.geometry
        self._geometry, self._dtype = geometry, dtype
        self._new_cell = partial(
            cell_of, geometry, 0, 1, self._dtype, problem.peephole is not None, folded=False, block=0
        )
        self._names = {role: operand.name for role, operand in problem.operands.items()}
        self._weights = [(role, self._names[role]) for role in WEIGHTS if role in self._names]
        self._has_cell_state = geometry.cell == "lstm"
        #: A cell that no call is using, with memory for its projected input.
        self._idle: deque[tuple[Cell, np.ndarray, Any]] = deque(maxlen=1)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and results are given by name."""
        try:
            memory = self._idle.pop()
        except IndexError:  # the first call, or a concurrent one
            memory = self._memory()
        cell, projected, cut = memory
        names = self._names
        own = {role: arrays[name] for role, name in self._weights}
        weights = Weights(self._geometry, **own)
        arrays[names["x"]].dot(weights.weight_ih.T, projected)
        if weights.input_bias is not None:
            np.add(projected, weights.input_bias, projected)
        if self._has_cell_state:
            cell.c[...] = arrays[names["c0"]].T
            cell.next_c = arrays[names["c"]].T
        h = arrays[names["h0"]].T
        cell.advance(weights, ((0, cut, h, h, arrays[names["out"]].T),), _NOTHING_KEPT)
        if self._has_cell_state:
            cell.next_c = _NO_STATE  # drop the reference to the caller's array
        self._idle.append(memory)

    def _memory(self) -> tuple[Cell, np.ndarray, Any]:
        cell = self._new_cell()
        projected = np.empty((1, len(cell.rows)), self._dtype)
        return cell, projected, cell.cut(projected.T)
