"""Plan of a recurrent layer: how many steps and samples are computed at a time, and how the weights are copied.

If there are many steps, the weights are folded: they are copied to the layout that BLAS reads fastest, and biases and
slopes become part of the copy instead of passes over all gates.  Folded weights may also be joined: a step then has one
product of its state and inputs.  `recurrent_layer` runs the plan.
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
from cupyconv.numpy.recurrent_small import is_small, small_step
from cupyconv.numpy.recurrent_weights import block_of_rows, in_blocks
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan, counted
from cupyconv.problem.recurrence import RecurrentGeometry, RecurrentProblem

#: Why the other method exists only on a GPU.
NO_PERSISTENT = "not supported on NumPy; it keeps the recurrent weight in the multiprocessors of a GPU between steps"
#: Most bytes of memory that a layer reuses from call to call.  To allocate it, touch it first and cut it into steps
#: takes a tenth of the time of 100 steps of 128 units.
CACHED_BYTES = 1 << 20
#: Steps times samples, of which at most four count, from which folding takes less time than it saves.  One sample with
#: a large input weight saves less: it needs one step per `FOLDED_ELEMENTS` elements of the weights, but
#: `ALWAYS_FOLDED_FROM` steps are always enough.
FOLDED_FROM, FOLDED_ELEMENTS, ALWAYS_FOLDED_FROM = 32, 1000, 128
#: Elements of the input weight up to which it is faster to multiply one sample's input in each step than all inputs at
#: once.
JOINED_WEIGHT = 20_000
#: Columns up to which weights are joined for several samples; and samples from which they are always joined.
JOINED_COLUMNS, MANY_SAMPLES = 256, 32
#: Bytes of a chunk's gates and states, so that they stay in cache; and its most steps, each of which needs several
#: objects.
CHUNK_BYTES, MAX_STEPS = 2 << 20, 256


def plan_recurrent(problem: RecurrentProblem) -> Plan:
    """Plan the layer; ValueError if the method does not apply, or if one step of one sample exceeds the limit."""
    if problem.method == "persistent":
        raise ValueError(f"method 'persistent' does not apply: {NO_PERSISTENT}")
    geometry = problem.geometry
    empty = not problem.out.nbytes and not prod((geometry.directions, geometry.batch, geometry.hidden))
    step, sizes = _fitting(problem)
    return problem.planned(
        () if empty else (step,),
        sizes,
        method="step",
        reason="one product for the inputs of many steps, then step by step",
        bytes_moved=problem.minimal_bytes,
        rejected=(("persistent", NO_PERSISTENT),),
    )


@dataclass(frozen=True)
class RecurrentStep(NumpyStep):
    """A loop over steps, for each direction and part of the samples.

    One product multiplies the inputs of `samples` samples in `chunk` steps by the input weight.  Then each step
    multiplies the state by the recurrent weight, and computes all gates in place in this product.
    """

    problem: RecurrentProblem
    samples: int
    chunk: int
    threads: int
    copied: tuple[str, ...]  # roles of factors whose dtype or layout BLAS does not accept
    folded: bool  # whether weights are copied with slopes and biases
    joined: bool  # whether weight_hh and weight_ih are copied side by side as one weight
    blocks: tuple[int, int]  # rows per block of the copies of weight_hh and weight_ih; 0 if there are no blocks
    ahead: int  # chunks whose inputs another thread may multiply ahead; 0 if no thread does
    keeps_memory: bool  # whether memory is reused from call to call

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return accumulator(self.problem.dtype)

    @property
    def is_single(self) -> bool:
        """Whether arrays belong to a single step: they have no time axis and no direction axis."""
        return self.problem.h is None

    @property
    def has_bias_column(self) -> bool:
        """Whether biases are a column of the recurrent weight."""
        return self.folded and _is_biased(self.problem)

    def __str__(self) -> str:
        geometry = self.problem.geometry
        parts, chunks = -(-geometry.batch // self.samples), -(-geometry.steps // self.chunk)
        samples, gates = min(self.samples, geometry.batch), geometry.gates * geometry.hidden
        products = 2 if geometry.cell == "gru" and not geometry.linear_before_reset else 1
        apart = f"one input product {self.chunk * samples} x {geometry.inputs} x {gates}, then per step"
        apart += f" {counted(products, 'product')} of the state, then all gates"
        joined = f"per step one product {gates} x {geometry.hidden + geometry.inputs} x {samples} of state and inputs, then all gates"
        return (
            f"loop     {geometry.cell} in {self.dtype}: {counted(geometry.directions, 'direction')}, {counted(parts, 'part')}"
            f" of {counted(self.samples, 'sample')}, {counted(chunks, 'chunk')} of {counted(self.chunk, 'step')}"
            f" on {counted(self.threads, 'thread')}; "
            + (joined if self.joined else apart)
            + "; next inputs in another thread" * bool(self.ahead)
            + "; slopes and biases folded into the weights" * self.folded
            + (
                f"; weights in blocks of {' and '.join(map(str, filter(None, self.blocks)))} rows"
                if any(self.blocks)
                else ""
            )
            + (f"; {', '.join(self.copied)} copied" if self.copied else "")
        )

    @property
    def holds_blas(self) -> bool:
        """Whether BLAS uses a single thread, as the layer does."""
        problem, geometry = self.problem, self.problem.geometry
        largest = geometry.gates * geometry.hidden * max(_columns(problem, self.joined)) * self.samples
        if self.samples == 1 and not self.joined:
            largest = geometry.gates * geometry.hidden * geometry.inputs * self.chunk
        return cost.holds_blas(self.threads, problem.host, largest)

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        return small_step(self.problem, self.dtype) if self.is_small else RecurrentLayer(self).run

    @property
    def is_small(self) -> bool:
        """Whether this is a step on one thread that needs little memory, with all arrays in the dtype `dtype`."""
        problem = self.problem
        dtypes = {operand.dtype for operand in problem.operands.values()}
        is_one = self.is_single and problem.geometry.directions == 1 and self.samples >= problem.geometry.batch
        return (
            is_one
            and self.keeps_memory
            and not (self.copied or problem.kept)
            and dtypes == {self.dtype}
            and is_small(problem)
        )


def _fitting(problem: RecurrentProblem) -> tuple[RecurrentStep, dict[str, int]]:
    """Return the step, and the bytes of its memory by purpose.

    First it chooses samples: all of them or a part for each thread, or fewer if the limit requires it.  Then it chooses
    as many steps as fit.
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
            raise problem.does_not_fit("one step of one sample", least, limit)
    in_cache = CHUNK_BYTES * at_once // (per_step or 1)
    if ahead:
        in_cache = min(in_cache, chunk_ahead(problem))
    chunk = even_part(geometry.steps, min(chunk, MAX_STEPS, max(1, in_cache)))
    sizes["inputs"] = chunk * per_step
    # Number of sequences: one per direction and part of the samples.
    every = geometry.directions * -(-geometry.batch // samples)
    own = sum(sizes.values()) - sizes["weights"]  # each call copies the weights again
    keeps_memory = every * own <= at_once * min(CACHED_BYTES, problem.limit)
    return RecurrentStep(problem, samples, chunk, at_once, copied, folded, joined, blocks, ahead, keeps_memory), sizes


def _columns(problem: RecurrentProblem, joined: bool) -> tuple[int, int]:
    """Most columns of the recurrent weight, and columns of the input weight, which are 0 if the weights are joined."""
    geometry = problem.geometry
    own = geometry.hidden + _is_biased(problem)
    return (own + geometry.inputs, 0) if joined else (own, geometry.inputs)


def _blocks(problem: RecurrentProblem, samples: int, joined: bool) -> tuple[int, int]:
    """Rows per block of the copies of the recurrent and the input weight; 0 if the workspace limit is small."""
    geometry, item = problem.geometry, ITEMSIZE[accumulator(problem.dtype)]
    rows, columns = geometry.gates * geometry.hidden, _columns(problem, joined)
    if 2 * geometry.directions * rows * sum(columns) * item > problem.limit:
        return 0, 0
    of_state, of_input = (block_of_rows(rows, own, geometry, samples) for own in columns)
    return of_state, of_input


def _is_joined(problem: RecurrentProblem, samples: int) -> bool:
    """Whether folded weights are joined.

    The weights of a gru are not joined, because its reset gate affects only one of the two products.  One sample's
    step is bound by reading the weight; if the input weight is large, the inputs of many steps read it together.  A
    step of several samples is bound by many columns, for which BLAS reads its other factor again and again.
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
    """Roles of factors that are copied because BLAS does not accept their dtype or layout."""
    dtype = accumulator(problem.dtype)
    rows_of_x = 0 if problem.geometry.batch == 1 else 1  # the axis of the rows of x
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
    """Whether weights are copied with slopes and biases: if there are many steps and the copy is small."""
    geometry = problem.geometry
    elements = geometry.gates * geometry.hidden * (geometry.inputs + geometry.hidden + 1)
    nbytes = geometry.directions * elements * ITEMSIZE[accumulator(problem.dtype)]
    least = FOLDED_FROM
    if geometry.batch == 1 and not _has_small_input(geometry):
        least = max(least, min(elements // FOLDED_ELEMENTS, ALWAYS_FOLDED_FROM))
    return geometry.steps * min(4, geometry.batch) >= least and 4 * nbytes <= problem.limit
