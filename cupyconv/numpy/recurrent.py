"""A recurrent layer step by step: the inputs of a chunk of steps in one product, all gates in place.

::

    x of a chunk   --BLAS-->   projected (steps, G * H, N)
    [h, 1] (H, N)  --BLAS-->   gates (G, H, N)   + projected   --activations-->   the next h, c
    [h, x, 1]      --BLAS-->   gates             of joined weights

Of many steps the weights are folded: copied as BLAS reads them fastest, with what would else be passes over all gates,
biases and slopes.  Then they may be joined too: a step has one product of its state and inputs.  The states of a chunk lie
side by side, each the next step's factor; the result gets them together.  Where lengths are given, samples past their
length get their old states back, so that nothing of what lies beyond reaches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import LINE, NumpyStep
from cupyconv.numpy.recurrent_cells import (
    IN_PLACE,
    Step,
    Weights,
    block_of_rows,
    cell_of,
    in_blocks,
    is_doubled,
    slopes,
)
from cupyconv.numpy.recurrent_inputs import InputsAhead, chunk_ahead, division
from cupyconv.numpy.recurrent_lone import WEIGHTS, lone_step
from cupyconv.numpy.threads import in_threads
from cupyconv.problem.arrays import ITEMSIZE, accumulator, dtype_from_name
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan
from cupyconv.problem.recurrence import RecurrentGeometry, RecurrentProblem

#: Why the other method is a GPU's.
NO_PERSISTENT = "it keeps the recurrent weight in the multiprocessors of a GPU from step to step"
#: Bytes of memory up to which a layer keeps it from call to call: to allocate it, touch it first and cut it into steps takes
#: a tenth of the time of 100 steps of 128 units.
KEPT_BYTES = 1 << 20
#: Steps, of a sample each, or of more samples a quarter of them, from which folding takes less than it saves.  Of one sample
#: with a large weight less is saved: elements of the weights for each step, and steps that are always enough.
FOLDED_FROM, FOLDED_ELEMENTS, ALWAYS_FOLDED_FROM = 32, 1000, 128
#: Elements of an input's weight up to which one sample's step takes less with it than the inputs of many steps by themselves.
JOINED_WEIGHT = 20_000
#: Columns up to which weights are joined for some samples; and samples from which they always are.
JOINED_COLUMNS, MANY_SAMPLES = 256, 32
#: Bytes of a chunk's gates and states, so that they stay in cache; and its most steps, each of which is some objects.
CHUNK_BYTES, MOST_STEPS = 2 << 20, 256

#: Lengths where none are given.
_NO_LENGTHS = np.empty(0, np.int64)


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
    folded: bool  # whether weights are copied with slopes and biases
    joined: bool  # and weight_ih beside weight_hh, as one
    blocks: tuple[int, int]  # rows of the blocks that weight_hh and weight_ih are copied in; 0 where they are not
    ahead: int  # chunks whose inputs another thread may work out ahead; 0 where none does
    keeps_memory: bool  # whether it stays from call to call

    @property
    def dtype(self) -> str:
        """What is computed in."""
        return accumulator(self.problem.dtype)

    @property
    def is_single(self) -> bool:
        """Whether arrays are those of a step: without an axis of time or of directions."""
        return self.problem.h is None

    @property
    def has_bias_column(self) -> bool:
        """Whether biases are a column of the state's weight."""
        return self.folded and _is_biased(self.problem)

    def __str__(self) -> str:
        geometry = self.problem.geometry
        parts, chunks = -(-geometry.batch // self.samples), -(-geometry.steps // self.chunk)
        samples, gates = min(self.samples, geometry.batch), geometry.gates * geometry.hidden
        products = 2 if geometry.cell == "gru" and not geometry.linear_before_reset else 1
        apart = f"one input product {self.chunk * samples} x {geometry.inputs} x {gates}, then per step"
        apart += f" {products} product(s) of the state and all gates"
        joined = f"per step one product {gates} x {geometry.hidden + geometry.inputs} x {samples} of state and inputs, and all gates"
        return (
            f"loop     {geometry.cell} in {self.dtype}, {geometry.directions} direction(s) of {parts} part(s)"
            f" of {self.samples} samples and {chunks} chunk(s) of {self.chunk} steps on {self.threads} thread(s): "
            + (joined if self.joined else apart)
            + "; inputs ahead in another thread" * bool(self.ahead)
            + "; weights folded" * self.folded
            + (f"; in blocks of {' and '.join(map(str, filter(None, self.blocks)))} rows" if any(self.blocks) else "")
            + (f"; {', '.join(self.copied)} copied" if self.copied else "")
        )

    @property
    def holds_blas(self) -> bool:
        """Whether products have one thread of BLAS, as the layer has."""
        problem, geometry = self.problem, self.problem.geometry
        largest = geometry.gates * geometry.hidden * max(_columns(problem, self.joined)) * self.samples
        if self.samples == 1 and not self.joined:
            largest = geometry.gates * geometry.hidden * geometry.inputs * self.chunk
        return cost.holds_blas(self.threads, problem.host, largest)

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return lone_step(self.problem, self.dtype) if self.is_lone else RecurrentLayer(self).run

    @property
    def is_lone(self) -> bool:
        """Whether it is a step of one sample, on arrays in the dtype computed in, that takes little memory."""
        problem = self.problem
        dtypes = {operand.dtype for operand in problem.operands.values()}
        is_one = self.is_single and problem.geometry.batch == problem.geometry.directions == 1
        return is_one and self.keeps_memory and not (self.copied or problem.kept) and dtypes == {self.dtype}


def _fitting(problem: RecurrentProblem) -> tuple[RecurrentStep, dict[str, int]]:
    """The step, and the bytes of its memory by purpose.

    All samples, or a part for each thread, and of these what fits the limit; then as many steps as fit.
    """
    geometry, threads, item = problem.geometry, problem.host.threads, ITEMSIZE[accumulator(problem.dtype)]
    gates = geometry.gates * geometry.hidden
    copied, folded, line = _copied(problem), _is_folded(problem), LINE // item
    factors = (("weight_hh", problem.weight_hh), ("weight_ih", problem.weight_ih))
    temporaries = any(activation.name not in IN_PLACE for group in geometry.activations for activation in group)
    threads, ahead = division(problem, "x" in copied)
    samples = even_part(geometry.batch, -(-geometry.batch // max(1, threads // geometry.directions)))
    while True:
        joined = folded and not ahead and _is_joined(problem, samples)
        blocks = _blocks(problem, samples, joined)
        weights = sum(gates * operand.shape[2] for role, operand in factors if role in copied)
        weights += sum(
            columns * in_blocks(gates, block) + line
            for columns, block in zip(_columns(problem, joined), blocks)
            if block or (folded and columns)
        )
        at_once = max(1, min(threads, geometry.directions * -(-geometry.batch // samples)))
        state, sums = at_once * samples * geometry.hidden * item, at_once * samples * item
        sizes = {
            "weights": geometry.directions * weights * item,
            "gates": state * geometry.gates + sums * blocks[0],
            "states": (6 if problem.peephole else 4) * state + sums,
            "activations": 2 * temporaries * state * geometry.gates,
        }
        inputs = geometry.inputs if joined else in_blocks(gates, blocks[1]) + geometry.inputs * ("x" in copied)
        per_step = sums * (geometry.hidden + 1 + inputs * max(1, ahead))
        limit = problem.limit_with(sizes["weights"])
        left = limit - sum(sizes.values()) - Plan.ALIGNMENT * (len(sizes) + 2)
        chunk = min(geometry.steps, left // per_step) if per_step else geometry.steps
        if chunk >= min(1, geometry.steps):
            break
        if ahead:
            ahead = 0
        elif samples > 1:
            samples = even_part(geometry.batch, samples // 2)
        elif at_once > 1:
            threads = at_once // 2
        else:
            least = limit - left + per_step
            raise ValueError(f"one step of one sample needs {least:,} bytes of workspace, the limit is {limit:,}")
    in_cache = CHUNK_BYTES * at_once // (per_step or 1)
    if ahead:
        in_cache = min(in_cache, chunk_ahead(problem))
    chunk = even_part(geometry.steps, min(chunk, MOST_STEPS, max(1, in_cache)))
    sizes["inputs"] = chunk * per_step
    # Every direction and part of the samples, one after the other.
    every = geometry.directions * -(-geometry.batch // samples)
    own = sum(sizes.values()) - sizes["weights"]  # those are copied by each call
    keeps_memory = every * own <= at_once * min(KEPT_BYTES, problem.limit)
    return RecurrentStep(problem, samples, chunk, at_once, copied, folded, joined, blocks, ahead, keeps_memory), sizes


def _columns(problem: RecurrentProblem, joined: bool) -> tuple[int, int]:
    """The most columns of the state's weight, and those of the input's; 0 where they are joined."""
    geometry = problem.geometry
    own = geometry.hidden + _is_biased(problem)
    return (own + geometry.inputs, 0) if joined else (own, geometry.inputs)


def _blocks(problem: RecurrentProblem, samples: int, joined: bool) -> tuple[int, int]:
    """Rows of the blocks that the weights of the state and of the input are copied in; none where the limit is small."""
    geometry, item = problem.geometry, ITEMSIZE[accumulator(problem.dtype)]
    rows, columns = geometry.gates * geometry.hidden, _columns(problem, joined)
    if 2 * geometry.directions * rows * sum(columns) * item > problem.limit:
        return 0, 0
    of_state, of_input = (block_of_rows(rows, own, geometry, samples) for own in columns)
    return of_state, of_input


def _is_joined(problem: RecurrentProblem, samples: int) -> bool:
    """Whether folded weights are joined.

    Not a gru's, whose reset gate tells them apart.  One sample's step is bound by reading a large weight, which the inputs
    of many steps read together; that of some samples by long columns, from which BLAS reads its other factor again and again.
    """
    geometry = problem.geometry
    if geometry.cell == "gru":
        return False
    if samples == 1:
        return _has_small_input(geometry)
    return samples >= MANY_SAMPLES or sum(_columns(problem, True)) <= JOINED_COLUMNS


def _has_small_input(geometry: RecurrentGeometry) -> bool:
    return geometry.gates * geometry.hidden * geometry.inputs <= JOINED_WEIGHT


def _copied(problem: RecurrentProblem) -> tuple[str, ...]:
    """Factors that are copied: what BLAS does not take as it lies."""
    dtype = accumulator(problem.dtype)
    rows_of_x = 0 if problem.geometry.batch == 1 else 1  # the axis along which they lie
    factors = (("x", problem.x, rows_of_x), ("weight_ih", problem.weight_ih, 1), ("weight_hh", problem.weight_hh, 1))
    return tuple(
        role
        for role, operand, rows in factors
        if operand.dtype != dtype
        or (operand.strides[2] != 1 and operand.shape[2] > 1)
        or (operand.strides[rows] < operand.shape[2] and operand.shape[rows] > 1)
    )


def _is_biased(problem: RecurrentProblem) -> bool:
    return problem.bias_ih is not None or problem.bias_hh is not None


def _is_folded(problem: RecurrentProblem) -> bool:
    """Whether weights are copied with slopes and biases: of many steps, where a copy is small."""
    geometry = problem.geometry
    elements = geometry.gates * geometry.hidden * (geometry.inputs + geometry.hidden + 1)
    nbytes = geometry.directions * elements * ITEMSIZE[accumulator(problem.dtype)]
    least = FOLDED_FROM
    if geometry.batch == 1 and not _has_small_input(geometry):
        least = max(least, min(elements // FOLDED_ELEMENTS, ALWAYS_FOLDED_FROM))
    return geometry.steps * min(4, geometry.batch) >= least and 4 * nbytes <= problem.limit


class RecurrentLayer:
    """What runs a step of the plan, for one call after the other."""

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
        #: Each direction and part of the samples, beside a sequence that no call is using.
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
        """All steps of one direction and part of the samples."""
        direction, samples, idle = work
        try:
            sequence = idle.pop()
        except IndexError:  # the first call, or one beside another
            sequence = _Sequence(self._step, direction, samples, self._dtype)
        sequence.run(arrays, weights[direction])
        if self._step.keeps_memory:
            idle.append(sequence)

    def _weights(self, arrays: Mapping[str, Any], direction: int) -> Weights:
        own = {role: arrays[name] for role, name in self._weight_names}
        if self._geometry.directions > 1:
            own = {role: array[direction] for role, array in own.items()}
        for role in self._converted:
            if own[role].ndim == 1:  # rounded to the result's dtype first, as an argument of that would have been
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
    times: slice | None  # the same of an array; None where it is all of it
    projected: np.ndarray  # what the inputs add, (steps, G * H, N); of one sample (steps, G * H)
    written: np.ndarray  # as the product writes it; of joined weights x itself, (steps, I, N), beside the states
    first: np.ndarray  # h before the step that comes first
    last: np.ndarray  # and after the one that comes last
    states: np.ndarray  # h after each, (steps, N, H); of a single step (N, H)
    steps: Iterable[Step]  # in order

    def of(self, array: np.ndarray) -> np.ndarray:
        """These steps of an array of all."""
        return array if self.times is None else array[self.times]


class _Sequence:
    """One direction of some samples: the memory that the steps share, and all steps of one call after the other."""

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
        #: What the inputs add in each step of a chunk; of several where they are worked out ahead.
        self._projected = np.empty(
            (max(1, step.ahead), step.chunk, 0 if step.joined else in_blocks(rows, input_block), batch), dtype
        )
        #: h before and after each step of a chunk, beside x and a 1 where inputs and biases are columns of its weight.
        self._states = np.empty((step.chunk + 1, hidden + inputs + step.has_bias_column, batch), dtype)
        self._states[:, hidden + inputs :] = 1
        self._zero, self._half, self._two = np.zeros((1, 1), dtype), dtype.type(0.5), dtype.type(2)
        self._is_lone = batch == 1
        x_shape = (geometry.inputs,) if self._is_lone else (batch, geometry.inputs)
        self._x = np.empty((step.chunk, *x_shape), dtype) if "x" in step.copied and not step.joined else None
        #: What this has of each argument and result but weights, as a view; None where it is all of it.  Of x (T, N, I), or
        #: rows (T, I) of one sample; of the result (T, N, H), or (N, H) of a single step; of states (N, H).
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
        #: Where all steps are one chunk it may be kept.
        self._every: list[_Chunk] | None = None
        if step.keeps_memory and step.chunk >= geometry.steps:
            self._every = [chunk._replace(steps=[*chunk.steps]) for chunk in self._chunks(geometry.steps)]

    def run(self, arrays: Mapping[str, Any], weights: Weights) -> None:
        """All steps, and the last states; arguments and results are given by name."""
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
        """The steps before `most` in this direction's order, as views of the memory that they share."""
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
        """Steps for a cell to work out; after each, samples past their length get their old states back."""
        for step in steps:
            t, *_, h, after = step
            past, c = lengths <= t, self._cell.c.copy()
            yield step
            np.copyto(after, h, where=past)
            np.copyto(self._cell.c, c, where=past)

    def _initial(self, state: np.ndarray | None) -> np.ndarray:
        """A state before the first step as a cell has it: as an argument of the result's dtype would have been; or zeros."""
        if state is None:
            return self._zero
        return (state if state.dtype == self._result_dtype else state.astype(self._result_dtype)).T

    def _project(self, x: np.ndarray, chunk: _Chunk, weights: Weights) -> None:
        """What the inputs of the steps of a chunk add to its gates, or the inputs beside its states."""
        if self._step.joined:
            chunk.written[...] = x[:, :, None] if self._is_lone else x.swapaxes(1, 2)
            return
        if self._x is not None:
            copy = self._x[: len(x)]
            copy[...] = x
            x = copy
        if self._is_lone:
            np.dot(x, weights.weight_ih.T, chunk.written)
        elif self._input_block:
            np.matmul(weights.weight_ih, x.swapaxes(1, 2)[:, None], chunk.written)
        else:
            np.matmul(weights.weight_ih, x.swapaxes(1, 2), chunk.written)
        bias, first = weights.input_bias, weights.biased
        if bias is not None:
            projected = chunk.projected[:, first:] if first else chunk.projected
            np.add(projected, bias if self._is_lone else bias[:, None], projected)
