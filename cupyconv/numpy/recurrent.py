"""A recurrent layer step by step: how many steps and samples go at a time, and how its weights are copied.

Of many steps the weights are folded: copied as BLAS reads them fastest, with what would else be passes over all gates,
biases and slopes.  Then they may be joined too: a step has one product of its state and inputs.  `recurrent_layer` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from cupyconv.numpy import cost
from cupyconv.numpy.backend import LINE, NumpyStep
from cupyconv.numpy.recurrent_cells import IN_PLACE
from cupyconv.numpy.recurrent_inputs import chunk_ahead, division
from cupyconv.numpy.recurrent_layer import RecurrentLayer
from cupyconv.numpy.recurrent_lone import lone_step
from cupyconv.numpy.recurrent_weights import block_of_rows, in_blocks
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan, counted
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
        apart += f" {counted(products, 'product')} of the state and all gates"
        joined = f"per step one product {gates} x {geometry.hidden + geometry.inputs} x {samples} of state and inputs, and all gates"
        return (
            f"loop     {geometry.cell} in {self.dtype}, {counted(geometry.directions, 'direction')} of {counted(parts, 'part')}"
            f" of {counted(self.samples, 'sample')} and {counted(chunks, 'chunk')} of {counted(self.chunk, 'step')}"
            f" on {counted(self.threads, 'thread')}: "
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
            raise problem.no_room("one step of one sample", least, limit)
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
