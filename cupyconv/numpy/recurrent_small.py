"""One step of a few samples: most of its time is spent in Python, so it reads and writes the caller's arrays in place.

Such a step makes few calls, and each of them is short.  Everything else that a step needs is created once and cached.
The samples are the outermost axis, as in the caller's arrays::

    x (N, I)  --dot-->  projected (N, G * H)
    h (N, H)  --dot-->  gates (N, G * H)      + projected + biases   --activations-->   the next h, c (N, H)

With rare settings, a step of one sample uses the same cell as a sequence, and a step of several samples is a sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
from numpy import add, multiply, subtract, tanh

from cupyconv.numpy.activations import activate
from cupyconv.numpy.backend import product_of
from cupyconv.numpy.recurrent_cells import Cell, cell_of
from cupyconv.numpy.recurrent_weights import Weights, slopes
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.recurrence import RecurrentProblem

#: Roles of the arguments that all steps of a direction share.
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "peephole")
#: Multiply-adds of a product up to which a step of several samples is small: of a larger one, BLAS takes longer with
#: few rows than with few columns.
SMALL_STEP = 150_000
#: Samples per hidden unit up to which a step is small: a gate is a view of short rows, one per sample.
SAMPLES_OF_A_UNIT = 4
_NOTHING_KEPT: dict[str, np.ndarray] = {}
_NO_STATE = np.empty(0)


def is_small(problem: RecurrentProblem) -> bool:
    """Whether one step is computed best on the caller's arrays."""
    geometry = problem.geometry
    if geometry.batch == 1:
        return True
    products = geometry.batch * geometry.gates * geometry.hidden * max(geometry.inputs, geometry.hidden)
    is_few = geometry.batch <= SAMPLES_OF_A_UNIT * geometry.hidden
    return is_few and products <= SMALL_STEP and _is_usual(problem)


def small_step(problem: RecurrentProblem, dtype: str) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that runs one small step in `dtype`, on arguments and results by name."""
    kind = _USUAL[problem.geometry.cell] if _is_usual(problem) else _CellStep
    return kind(problem, dtype_from_name(dtype)).run


def _is_usual(problem: RecurrentProblem) -> bool:
    """Whether a class of this file computes the cell: it has the usual activations, and no rare settings."""
    geometry = problem.geometry
    names = tuple(activation.name for activation in geometry.activations[0])
    is_rare = {
        "rnn": False,
        "lstm": names != ("sigmoid", "tanh", "tanh") or problem.peephole is not None or geometry.input_forget,
        "gru": names != ("sigmoid", "tanh") or not geometry.linear_before_reset,
    }
    return geometry.clip is None and not is_rare[geometry.cell]


class _UsualStep:
    """A step that computes all gates, (N, G * H), at once.  A sigmoid is computed as ``tanh(v / 2) / 2 + 1 / 2``."""

    #: Roles of the arrays that a step reads and writes, except biases.
    roles: ClassVar[tuple[str, ...]] = ("x", "weight_ih", "h0", "weight_hh", "out")

    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        geometry, names = problem.geometry, {role: operand.name for role, operand in problem.operands.items()}
        self._of = itemgetter(*(names[role] for role in self.roles))
        self._bias_ih, self._bias_hh = names.get("bias_ih"), names.get("bias_hh")
        self._biases = [name for name in (self._bias_ih, self._bias_hh) if name]
        self._times_input, self._times_state = product_of(geometry.inputs), product_of(geometry.hidden)
        self._shape, self._dtype = (geometry.batch, geometry.gates * geometry.hidden), dtype
        #: Memory that no call is using.
        self._idle: deque[tuple[Any, ...]] = deque(maxlen=1)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        try:
            memory = self._idle.pop()
        except IndexError:  # the first call, or a concurrent one
            memory = self._memory()
        self._compute(arrays, *memory)
        self._idle.append(memory)

    def _memory(self) -> tuple[Any, ...]:
        """Allocate the projected inputs and the gates, followed by views of single gates."""
        return np.empty(self._shape, self._dtype), np.empty(self._shape, self._dtype)

    def _compute(self, arrays: Mapping[str, Any], *memory: Any) -> None:
        raise NotImplementedError


class _RnnStep(_UsualStep):
    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        super().__init__(problem, dtype)
        self._activation = problem.geometry.activations[0][0]

    def _compute(self, arrays: Mapping[str, Any], *memory: Any) -> None:
        projected, gate = memory
        x, weight_ih, h, weight_hh, out = self._of(arrays)
        self._times_input(x, weight_ih.T, projected)
        self._times_state(h, weight_hh.T, gate)
        add(gate, projected, gate)
        for name in self._biases:
            add(gate, arrays[name], gate)
        activate(gate, self._activation)
        out[...] = gate


class _LstmStep(_UsualStep):
    roles = (*_UsualStep.roles, "c0", "c")

    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        super().__init__(problem, dtype)
        self._slope = np.repeat(np.array(slopes(problem.geometry, 0), dtype), problem.geometry.hidden)
        self._offset = 1 - self._slope

    def _memory(self) -> tuple[Any, ...]:
        projected, gates = super()._memory()
        return projected, gates, *np.split(gates, 4, axis=1)

    def _compute(self, arrays: Mapping[str, Any], *memory: Any) -> None:
        projected, gates, i, f, g, o = memory
        x, weight_ih, h, weight_hh, next_h, c, next_c = self._of(arrays)
        slope, offset = self._slope, self._offset
        self._times_input(x, weight_ih.T, projected)
        self._times_state(h, weight_hh.T, gates)
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


class _GruStep(_UsualStep):
    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        super().__init__(problem, dtype)
        self._half, self._one = np.array(0.5, dtype), np.array(1, dtype)

    def _memory(self) -> tuple[Any, ...]:
        projected, gates = super()._memory()
        r, z, _ = np.split(gates, 3, axis=1)
        rz = r.shape[1] + z.shape[1]
        return projected, gates, projected[:, :rz], projected[:, rz:], gates[:, :rz], gates[:, rz:], r, z

    def _compute(self, arrays: Mapping[str, Any], *memory: Any) -> None:
        projected, gates, projected_rz, projected_n, rz, n, r, z = memory
        x, weight_ih, h, weight_hh, out = self._of(arrays)
        half = self._half
        self._times_input(x, weight_ih.T, projected)
        self._times_state(h, weight_hh.T, gates)
        if self._bias_ih is not None:
            add(projected, arrays[self._bias_ih], projected)
        if self._bias_hh is not None:
            add(gates, arrays[self._bias_hh], gates)
        add(rz, projected_rz, rz)
        multiply(rz, half, rz)
        tanh(rz, rz)
        multiply(rz, half, rz)
        add(rz, half, rz)
        multiply(n, r, n)
        add(n, projected_n, n)
        tanh(n, n)
        subtract(self._one, z, r)
        multiply(r, n, r)
        multiply(z, h, z)
        add(z, r, out)


_USUAL: dict[str, type[_UsualStep]] = {"rnn": _RnnStep, "lstm": _LstmStep, "gru": _GruStep}


class _CellStep:
    """A step by a cell.  For one sample, a state (1, H) has the same memory layout as the column (H, 1) of a cell."""

    def __init__(self, problem: RecurrentProblem, dtype: np.dtype) -> None:
        geometry = problem.geometry
        self._geometry, self._dtype, self._times_input = geometry, dtype, product_of(geometry.inputs)
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
        self._times_input(arrays[names["x"]], weights.weight_ih.T, projected)
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
