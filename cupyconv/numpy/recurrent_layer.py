"""Execution of a recurrent layer: one chunk of steps after the other, for each direction and part of the samples.

::

    x of a chunk   --BLAS-->   projected (steps, G * H, N)
    [h, 1] (H, N)  --BLAS-->   gates (G, H, N)   + projected   --activations-->   the next h, c
    [h, x, 1]      --BLAS-->   gates             of joined weights

The states of a chunk are contiguous.  Each of them is the factor of the next step, and all are copied to the result
together.  If lengths are given, samples past their length get their old states back, so that later inputs do not affect
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyconv.numpy.backend import product_of
from cupyconv.numpy.recurrent_cells import Step, cell_of
from cupyconv.numpy.recurrent_inputs import InputsAhead
from cupyconv.numpy.recurrent_small import WEIGHTS
from cupyconv.numpy.recurrent_weights import Weights, in_blocks, is_doubled, slopes
from cupyconv.numpy.threads import in_threads
from cupyconv.problem.arrays import dtype_from_name

if TYPE_CHECKING:
    from cupyconv.numpy.recurrent import RecurrentStep

#: Stands for lengths that are not given.
_NO_LENGTHS = np.empty(0, np.int64)


class RecurrentLayer:
    """Runs a step of the plan; one call after the other reuses it."""

    def __init__(self, step: RecurrentStep) -> None:
        geometry = step.problem.geometry
        self._step, self._geometry, self._dtype = step, geometry, dtype_from_name(step.dtype)
        operands = step.problem.operands
        of_weights = [role for role in WEIGHTS if role in operands]
        self._weight_names = [(role, operands[role].name) for role in of_weights]
        self._converted = [role for role in of_weights if role in step.copied or operands[role].dtype != step.dtype]
        self._result_dtype = dtype_from_name(step.problem.dtype)
        starts = range(0, max(1, geometry.batch), step.samples)
        parts = [slice(first, min(first + step.samples, geometry.batch)) for first in starts]
        #: Each direction and part of the samples, with a `_Sequence` that no call is using.
        self._work: list[tuple[int, slice, deque[_Sequence]]] = [
            (direction, samples, deque(maxlen=1)) for direction, samples in product(range(geometry.directions), parts)
        ]
        directions, peephole = range(geometry.directions), step.problem.peephole is not None
        self._doubled = [is_doubled(geometry, direction, peephole, step.folded) for direction in directions]
        self._slopes = [
            np.repeat(np.array(slopes(geometry, direction, self._doubled[direction]), self._dtype), geometry.hidden)[
                :, None
            ]
            for direction in directions
        ]

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the result; arguments and results are given by name."""
        step = self._step
        weights = [self._weights(arrays, direction) for direction in range(self._geometry.directions)]
        for own in weights:
            own.copy_input()
            if not step.ahead:
                own.copy_state()
        in_threads(step.threads, partial(self._finish, arrays, weights), self._work, step.holds_blas)

    def _finish(
        self, arrays: Mapping[str, Any], weights: list[Weights], work: tuple[int, slice, deque[_Sequence]]
    ) -> None:
        """Run all steps of one direction and part of the samples."""
        direction, samples, idle = work
        try:
            sequence = idle.pop()
        except IndexError:  # the first call, or a concurrent one
            sequence = _Sequence(self._step, direction, samples, self._dtype)
        sequence.run(arrays, weights[direction])
        if self._step.keeps_memory:
            idle.append(sequence)

    def _weights(self, arrays: Mapping[str, Any], direction: int) -> Weights:
        own = {role: arrays[name] for role, name in self._weight_names}
        if self._geometry.directions > 1:
            own = {role: array[direction] for role, array in own.items()}
        for role in self._converted:
            if own[role].ndim == 1:  # rounded to the result's dtype first, as an argument of that dtype would be
                own[role] = own[role].astype(self._result_dtype, copy=False).astype(self._dtype, copy=False)
            else:
                own[role] = np.array(own[role], self._dtype, order="C")
        slope = self._slopes[direction] if self._step.folded else None
        step = self._step
        block, input_block = step.blocks
        return Weights(
            self._geometry,
            **own,
            slope=slope,
            doubled=self._doubled[direction],
            joined=step.joined,
            block=block,
            input_block=input_block,
        )


class _Chunk(NamedTuple):
    """Some steps of a sequence, as views of its memory."""

    begin: int
    end: int
    times: slice | None  # these steps as an index of a sequence; None if they are the whole sequence
    projected: np.ndarray  # projected inputs, (steps, G * H, N); for one sample (steps, G * H)
    written: np.ndarray  # the same memory as the product writes it; if joined, memory for x next to h, (steps, I, N)
    first: np.ndarray  # h before the step that runs first
    last: np.ndarray  # h after the step that runs last
    states: np.ndarray  # h after each step, (steps, N, H); for a single step (N, H)
    steps: Iterable[Step]  # in the order in which they run

    def of(self, array: np.ndarray) -> np.ndarray:
        """Select these steps from an array of all steps."""
        return array if self.times is None else array[self.times]


class _Sequence:
    """One direction of some samples: the memory that its steps share, reused by one call after the other."""

    def __init__(self, step: RecurrentStep, direction: int, samples: slice, dtype: np.dtype) -> None:
        problem, geometry = step.problem, step.problem.geometry
        batch, hidden = samples.stop - samples.start, geometry.hidden
        self._step, self._geometry, self._result_dtype = step, geometry, dtype_from_name(problem.dtype)
        self._backwards = geometry.signs[direction] < 0
        block, input_block = step.blocks
        peephole = problem.peephole is not None
        self._cell = cell_of(geometry, direction, batch, dtype, peephole, step.folded, block)
        rows, self._input_block = len(self._cell.rows), input_block
        inputs = geometry.inputs if step.joined else 0
        #: Projected inputs of each step of a chunk; of several chunks if another thread multiplies ahead.
        self._projected = np.empty(
            (max(1, step.ahead), step.chunk, 0 if step.joined else in_blocks(rows, input_block), batch), dtype
        )
        #: h before and after each step of a chunk, followed by x and a 1 if inputs and biases are columns of the
        #: weight.
        self._states = np.empty((step.chunk + 1, hidden + inputs + step.has_bias_column, batch), dtype)
        self._states[:, hidden + inputs :] = 1
        self._zero, self._half, self._two = np.zeros((1, 1), dtype), dtype.type(0.5), dtype.type(2)
        self._is_lone = batch == 1
        x_shape = (geometry.inputs,) if self._is_lone else (batch, geometry.inputs)
        self._x = np.empty((step.chunk, *x_shape), dtype) if "x" in step.copied and not step.joined else None
        #: Index of this sequence's view of each argument and result except weights; None if it is the whole array.  The
        #: view of x is (T, N, I), or (T, I) for one sample; of the result (T, N, H), or (N, H) for a single step; of
        #: states (N, H).
        every = None if batch == geometry.batch else samples
        columns = slice(direction * hidden, (direction + 1) * hidden)
        own: dict[str, Any] = {"x": (slice(None), samples.start if self._is_lone else samples), "lengths": every}
        own["out"] = (slice(None), samples, columns)
        states: Any = (direction, samples)
        if step.is_single:
            states = own["out"] = every
            own["x"] = every if self._is_lone else (None, samples)
        own |= dict.fromkeys(("h0", "c0", "h", "c"), states)
        names = {role: operand.name for role, operand in problem.operands.items()}
        self._own = [(role, names[role], index) for role, index in own.items() if role in names]
        self._has_cell_state = geometry.cell == "lstm"
        self._kept = {
            role: (names[role], (geometry.steps, geometry.batch, shape[-1] // max(1, hidden), hidden))
            for role, shape in (geometry.keeps.items() if problem.kept else ())
        }
        self._direction, self._samples = direction, samples
        #: The only chunk if it has all steps; it may be cached.
        self._every: list[_Chunk] | None = None
        if step.keeps_memory and step.chunk >= geometry.steps:
            self._every = [chunk._replace(steps=[*chunk.steps]) for chunk in self._chunks(geometry.steps)]

    def run(self, arrays: Mapping[str, Any], weights: Weights) -> None:
        """Compute all steps, and the last states; arguments and results are given by name."""
        own = {role: arrays[name] if index is None else arrays[name][index] for role, name, index in self._own}
        kept = {
            role: arrays[name][self._direction].reshape(shape)[:, self._samples]
            for role, (name, shape) in self._kept.items()
        }
        cell, x, out, lengths = self._cell, own["x"], own["out"], own.get("lengths", _NO_LENGTHS)
        least = most = self._geometry.steps
        if lengths.size:
            least, most = int(lengths.min()), int(lengths.max())
            out[most:] = 0
        h = self._initial(own.get("h0"))
        if cell.doubled:
            h = h * self._two
        if self._has_cell_state:
            cell.c[...] = self._initial(own.get("c0"))
        chunks: Iterable[_Chunk] = self._every if self._every and most == self._geometry.steps else self._chunks(most)

        def advance(chunk: _Chunk) -> None:
            nonlocal h
            chunk.first[...] = h
            steps = chunk.steps if chunk.end <= least else self._within(lengths, chunk.steps)
            cell.advance(weights, steps, kept)
            h = chunk.last
            if cell.doubled:
                np.multiply(chunk.states, self._half, chunk.of(out), casting="unsafe")
            else:
                chunk.of(out)[...] = chunk.states
            if chunk.end > least:
                past = np.greater_equal.outer(np.arange(chunk.begin, chunk.end), lengths)
                np.copyto(chunk.of(out), 0, where=past[:, :, None])

        if self._step.ahead:
            every = [*chunks]
            inputs = InputsAhead(
                len(every), self._step.ahead, lambda n: self._project(every[n].of(x), every[n], weights)
            )
            inputs.run(weights.copy_state, lambda n: advance(every[n]))
        else:
            for chunk in chunks:
                self._project(chunk.of(x), chunk, weights)
                advance(chunk)
        if "h" in own:
            own["h"][...] = h.T * self._half if cell.doubled else h.T
        if "c" in own:
            own["c"][...] = cell.c.T

    def _chunks(self, most: int) -> Iterator[_Chunk]:
        """Yield chunks of the steps before `most`, in this direction's order, as views of the shared memory."""
        order = slice(None, None, -1 if self._backwards else 1)
        rows, hidden = len(self._cell.rows), self._geometry.hidden
        for number, first in enumerate(range(0, most, self._step.chunk)[order]):
            count = min(self._step.chunk, most - first)
            buffer = self._projected[number % len(self._projected)]
            written, before, after = buffer[:count], self._states[:count], self._states[1 : count + 1]
            projected = written[:, :rows]
            if self._backwards:
                before, after = after, before
            h_before, h_after = before[:, :hidden], after[:, :hidden]
            times = range(first, first + count)
            cut = repeat(None) if self._step.joined else map(self._cell.cut, projected[order])
            steps = zip(times[order], cut, before[order], h_before[order], h_after[order])
            if self._step.joined:
                written = before[:, hidden : hidden + self._geometry.inputs]
            elif self._is_lone:
                written = projected = projected[:, :, 0]
            elif self._input_block:
                written = written.reshape(count, -1, self._input_block, written.shape[2])
            yield _Chunk(
                begin=first,
                end=first + count,
                times=None if count == self._geometry.steps else slice(first, first + count),
                projected=projected,
                written=written,
                first=h_before[order][0],
                last=h_after[order][-1],
                states=h_after.swapaxes(1, 2)[0] if self._step.is_single else h_after.swapaxes(1, 2),
                steps=steps,
            )

    def _within(self, lengths: np.ndarray, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield steps for a cell to compute; after each step, samples past their length get their old states back."""
        for step in steps:
            t, *_, h, after = step
            past, c = lengths <= t, self._cell.c.copy()
            yield step
            np.copyto(after, h, where=past)
            np.copyto(self._cell.c, c, where=past)

    def _initial(self, state: np.ndarray | None) -> np.ndarray:
        """The initial state for a cell, or zeros; rounded to the result's dtype, like an argument of that dtype."""
        if state is None:
            return self._zero
        return (state if state.dtype == self._result_dtype else state.astype(self._result_dtype)).T

    def _project(self, x: np.ndarray, chunk: _Chunk, weights: Weights) -> None:
        """Multiply a chunk's inputs by the input weight; if weights are joined, copy the inputs next to the states."""
        if self._step.joined:
            chunk.written[...] = x[:, :, None] if self._is_lone else x.swapaxes(1, 2)
            return
        if self._x is not None:
            copy = self._x[: len(x)]
            copy[...] = x
            x = copy
        if self._is_lone:
            product_of(self._geometry.inputs)(x, weights.weight_ih.T, chunk.written)
        elif self._input_block:
            np.matmul(weights.weight_ih, x.swapaxes(1, 2)[:, None], chunk.written)
        else:
            np.matmul(weights.weight_ih, x.swapaxes(1, 2), chunk.written)
        bias, first = weights.input_bias, weights.biased
        if bias is not None:
            projected = chunk.projected[:, first:] if first else chunk.projected
            np.add(projected, bias if self._is_lone else bias[:, None], projected)
