"""A recurrent layer step by step: the inputs of a chunk of steps in one product, all gates in place.

::

    x of a chunk   --BLAS-->   projected (steps, G, H, N), biases included
    h (H, N)       --BLAS-->   gates (G, H, N)   + projected   --activations-->   h, c

Of many inputs the biases are one more column of the weight, beside a 1 after every x: by themselves they would be one
more pass over all gates.  Where lengths are given, a step's states are worked out beside the old ones and copied for the
samples that are not past their length, so that nothing of what lies beyond reaches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.recurrent_cells import CELLS, IN_PLACE, Arguments
from cupyconv.numpy.threads import in_threads
from cupyconv.problem.arrays import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan
from cupyconv.problem.recurrence import RecurrentProblem

#: Why the other method is a GPU's.
NO_PERSISTENT = "it keeps the recurrent weight in the multiprocessors of a GPU from step to step"
#: Bytes of memory up to which a layer keeps it from call to call: allocating and cutting it takes longer than a small step.
KEPT_BYTES = 32 << 10


def plan_recurrent(problem: RecurrentProblem) -> Plan:
    """The plan; ValueError for a method that does not apply, or where one step of one sample passes the limit."""
    if problem.method == "persistent":
        raise ValueError(f"method 'persistent' does not apply: {NO_PERSISTENT}")
    geometry = problem.geometry
    empty = not problem.out.nbytes and not prod((geometry.directions, geometry.batch, geometry.hidden))
    step, sizes = _fitting(problem)
    return problem.planned(
        () if empty else (step,),
        sizes,
        method="step",
        reason="the inputs of many steps in one product, then step by step",
        bytes_moved=problem.minimal_bytes,
        rejected=(("persistent", NO_PERSISTENT),),
    )


@dataclass(frozen=True)
class RecurrentStep(NumpyStep):
    """A loop over steps, for each direction and part of the samples.

    The inputs of `samples` in `chunk` steps go through the input's weight in one product; then, step by step, the state goes
    through its own, and all gates are worked out where that product lies.
    """

    problem: RecurrentProblem
    samples: int
    chunk: int
    threads: int
    copied: tuple[str, ...]  # roles of factors that lie in memory as BLAS does not take them
    bias_column: bool  # whether biases are a column of the input's weight
    keeps_memory: bool  # whether it stays from call to call

    @property
    def dtype(self) -> str:
        """What is computed in."""
        return accumulator(self.problem.dtype)

    def __str__(self) -> str:
        geometry = self.problem.geometry
        parts, chunks = -(-geometry.batch // self.samples), -(-geometry.steps // self.chunk)
        rows, gates = self.chunk * min(self.samples, geometry.batch), geometry.gates * geometry.hidden
        products = 2 if geometry.cell == "gru" and not geometry.linear_before_reset else 1
        return (
            f"loop     {geometry.cell} in {self.dtype}, {geometry.directions} direction(s) of {parts} part(s)"
            f" of {self.samples} samples and {chunks} chunk(s) of {self.chunk} steps on {self.threads} thread(s): one input"
            f" product {rows} x {geometry.inputs} x {gates}, then per step {products} product(s) of the state and all gates"
            + (f"; {', '.join(self.copied)} copied" if self.copied else "")
        )

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return RecurrentLayer(self).run


def _fitting(problem: RecurrentProblem) -> tuple[RecurrentStep, dict[str, int]]:
    """The step, and the bytes of its memory by purpose.

    All samples, or a part for each thread, and of these what fits the limit; then as many steps as fit.
    """
    geometry, threads, item = problem.geometry, problem.host.threads, ITEMSIZE[accumulator(problem.dtype)]
    gates, bias_column = geometry.gates * geometry.hidden, _has_bias_column(problem)
    copied = _copied(problem, bias_column)
    input_copy = geometry.inputs + bias_column if "x" in copied else 0
    copied_weights = sum(prod(getattr(problem, role).shape) for role in copied if role != "x")
    temporaries = any(activation.name not in IN_PLACE for group in geometry.activations for activation in group)
    samples = even_part(geometry.batch, -(-geometry.batch // max(1, threads // geometry.directions)))
    while True:
        at_once = max(1, min(threads, geometry.directions * -(-geometry.batch // samples)))
        state = at_once * samples * geometry.hidden * item
        sizes = {
            "weights": (copied_weights + at_once * gates * (geometry.inputs + 1) * bias_column) * item,
            "gates": state * geometry.gates,
            "states": (6 if problem.peephole else 4) * state,
            "activations": 2 * temporaries * state * geometry.gates,
        }
        per_step = at_once * samples * (gates + input_copy) * item
        limit = problem.limit_with(sizes["weights"])
        left = limit - sum(sizes.values()) - Plan.ALIGNMENT * (len(sizes) + 2)
        chunk = min(geometry.steps, left // per_step) if per_step else geometry.steps
        if chunk >= min(1, geometry.steps):
            break
        if samples > 1:
            samples = even_part(geometry.batch, samples // 2)
        elif at_once > 1:
            threads = at_once // 2
        else:
            least = limit - left + per_step
            raise ValueError(f"one step of one sample needs {least:,} bytes of workspace, the limit is {limit:,}")
    chunk = even_part(geometry.steps, chunk)
    sizes["inputs"] = chunk * per_step
    every = geometry.directions * -(
        -geometry.batch // samples
    )  # direction and part of the samples, one after the other
    keeps_memory = every * sum(sizes.values()) <= at_once * min(KEPT_BYTES, problem.limit)
    return RecurrentStep(problem, samples, chunk, at_once, copied, bias_column, keeps_memory), sizes


def _copied(problem: RecurrentProblem, bias_column: bool) -> tuple[str, ...]:
    """Factors that are copied: what BLAS does not take as it lies."""
    dtype = accumulator(problem.dtype)
    lies = {
        role: operand.dtype == dtype and operand.strides[2] == 1 and operand.strides[1] >= operand.shape[2]
        for role, operand in (("x", problem.x), ("weight_ih", problem.weight_ih), ("weight_hh", problem.weight_hh))
    }
    if bias_column:
        lies |= {"x": False, "weight_ih": True}  # it is copied as the column is joined to it
    return tuple(role for role, as_it_is in lies.items() if not as_it_is)


def _has_bias_column(problem: RecurrentProblem) -> bool:
    """Whether biases are a column of the input's weight: where copies of both factors take less than a pass over all gates."""
    geometry = problem.geometry
    gates, samples = geometry.gates * geometry.hidden, geometry.steps * geometry.batch
    biased = problem.bias_ih is not None or problem.bias_hh is not None
    fits = 8 * gates * (geometry.inputs + 1) * ITEMSIZE[accumulator(problem.dtype)] <= problem.limit
    return biased and fits and samples * gates > geometry.inputs * (samples + gates)


class RecurrentLayer:
    """What runs a step of the plan, for one call after the other."""

    def __init__(self, step: RecurrentStep) -> None:
        geometry = step.problem.geometry
        self._step, self._geometry, self._dtype = step, geometry, dtype_from_name(step.dtype)
        self._buffers = [(role, operand.name) for role, operand in step.problem.operands.items()]
        starts = range(0, max(1, geometry.batch), step.samples)
        parts = [slice(first, min(first + step.samples, geometry.batch)) for first in starts]
        #: Each direction and part of the samples, beside a sequence that no call is using.
        self._work: list[tuple[int, slice, deque[_Sequence]]] = [
            (direction, samples, deque(maxlen=1)) for direction, samples in product(range(geometry.directions), parts)
        ]

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        step, geometry = self._step, self._geometry
        given = {role: arrays[name] for role, name in self._buffers}
        weights = [
            [self._weight(given, role, direction) for role in ("weight_ih", "weight_hh")]
            for direction in range(geometry.directions)
        ]

        def finish(work: tuple[int, slice, deque[_Sequence]]) -> None:
            direction, samples, idle = work
            try:
                sequence = idle.pop()
            except IndexError:  # the first call, or one beside another
                sequence = _Sequence(step, direction, samples.stop - samples.start, self._dtype)
            sequence.run(Arguments(geometry, given, weights[direction], direction, samples, self._dtype))
            if step.keeps_memory:
                idle.append(sequence)

        in_threads(step.threads, finish, self._work)

    def _weight(self, given: Mapping[str, Any], role: str, direction: int) -> np.ndarray:
        """A weight of one direction, (G * H, columns)."""
        own = given[role][direction] if given[role].ndim == 3 else given[role]
        return np.array(own, self._dtype, order="C") if role in self._step.copied else own


class _Sequence:
    """One direction of `batch` samples: the memory that the steps share, and all steps of one call after the other."""

    def __init__(self, step: RecurrentStep, direction: int, batch: int, dtype: np.dtype) -> None:
        self._step, self._geometry, self._dtype = step, step.problem.geometry, dtype
        geometry = self._geometry
        self._backwards = geometry.signs[direction] < 0
        peephole = step.problem.peephole is not None
        self._cell = CELLS[geometry.cell](geometry, direction, batch, dtype, peephole)
        self._projected = np.empty((step.chunk, *self._cell.gates.shape), dtype)
        self._x = None
        if "x" in step.copied:
            self._x = np.ones((step.chunk, batch, geometry.inputs + step.bias_column), dtype)

    def run(self, given: Arguments) -> None:
        """All steps, and the last states."""
        cell, lengths = self._cell, given.lengths
        least = most = self._geometry.steps
        if lengths is not None and lengths.size:
            least, most = int(lengths.min()), int(lengths.max())
            until = np.ascontiguousarray(lengths)
            inside, past = np.empty(until.shape, bool), np.empty(until.shape, bool)
        given.read_state("h0", cell.h)
        given.read_state("c0", cell.c)
        h, c = (cell.h, cell.c) if least == most else (np.empty_like(cell.h), np.empty_like(cell.c))
        given.out[most:] = 0
        for t, projected in self._steps(given, most):
            if t < least:
                cell.advance(given, t, projected, cell.h, cell.c)
                given.out[t] = cell.h.T
            else:
                cell.advance(given, t, projected, h, c)
                np.greater(until, t, out=inside)
                np.logical_not(inside, out=past)
                np.copyto(cell.h, h, where=inside)
                np.copyto(cell.c, c, where=inside)
                given.out[t] = cell.h.T
                np.copyto(given.out[t], 0, where=past[:, None])
        for role, state in (("h", cell.h), ("c", cell.c)):
            last = given.state(role)
            if last is not None:
                last[...] = state.T

    def _steps(self, given: Arguments, most: int) -> Iterator[tuple[int, np.ndarray]]:
        """The steps before `most` in this direction's order, each with what its inputs add to the gates."""
        step, weight, bias = self._step, given.weight_ih, self._cell.input_bias(given)
        chunks = [range(first, min(first + step.chunk, most)) for first in range(0, most, step.chunk)]
        if step.bias_column:
            assert bias is not None
            weight = np.concatenate([weight, bias.reshape(-1, 1)], axis=1, dtype=self._dtype)
        for chunk in reversed(chunks) if self._backwards else chunks:
            steps = len(chunk)
            x, projected = given.x[chunk.start : chunk.stop], self._projected[:steps]
            if self._x is not None:
                self._x[:steps, :, : self._geometry.inputs] = x
                x = self._x[:steps]
            np.matmul(weight, x.swapaxes(1, 2), out=projected.reshape(steps, *self._cell.rows.shape))
            if bias is not None and not step.bias_column:
                projected += bias
            for t in reversed(chunk) if self._backwards else chunk:
                yield t, projected[t - chunk.start]
