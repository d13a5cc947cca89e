"""Gradients of recurrent layers on CUDA: back through time step by step, then products of all steps.

::

    recurrent_gradient    step by step: dh from the gates' gradients of the step before, then this step's gates'
                          one launch for all steps where its blocks fit on the GPU at once, else one for each
    GEMM                  weight_ih: dgates' x     weight_hh: dgates' h before     x: dgates weight_ih
    epilogue_grad         the tiles' sums added up, of biases and peepholes

Both directions are one launch.  Where the gates' gradients of all steps pass the limit on workspace, the directions
come one after the other, in runs of steps that fit; between two runs the state's gradient is where the initial
state's will be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.conversions import check_alignment, convert
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import as_line, epilogue_launch
from cupyconv.cuda.plan.epilogue_grad import sum_of_parts
from cupyconv.cuda.plan.launches import GRID_X, variant
from cupyconv.cuda.plan.matrices import MAX_DIMENSION, compute_type
from cupyconv.cuda.plan.recurrence import (
    COUNTERS_APART,
    counters_from_zero,
    gate_activations,
    room_for_waiting,
    uses_default_gates,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, c_strides
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Address, Buffer, Conversion, GemmCall, KernelLaunch, LaunchLoop, Matrix, Plan, Step
from cupyconv.problem.recurrence import RecurrentGradientProblem

#: Samples, and units, of a block of recurrent_gradient.cu, and threads of one.
TILE, THREADS = 16, 256
CELLS = {"rnn": "RNN", "lstm": "LSTM", "gru": "GRU"}


def plan_recurrent_gradient(problem: RecurrentGradientProblem) -> Plan:
    """The plan; ValueError where one step's gates pass the limit."""
    check_alignment(problem.arguments)
    problem, conversions = _converted(problem)
    draft = _Gradient(problem.sharing_with(conversions)).draft()
    return draft.plan(problem, conversions=conversions)


def _converted(problem: RecurrentGradientProblem) -> tuple[RecurrentGradientProblem, tuple[Conversion, ...]]:
    """Arguments as the kernels and products take them, and what is copied for that.

    Large ones are not, but for an x of another precision than the result: the kernels widen 16-bit numbers.
    """
    conversions: list[Conversion] = []
    stored = problem.operands["y"].dtype

    def converted(operand: Operand) -> Operand:
        if operand.name == "lengths":
            return operand
        wide = operand.name in ("weight_ih", "gates", "cells", "candidate", "grad_h", "grad_c")
        dtype = problem.dtype if wide else stored
        in_order = operand.name in ("x", "grad_y") or operand.strides == c_strides(operand.shape)
        return convert(operand, dtype, conversions, as_it_lies=in_order)

    return replace(problem, arguments=tuple(map(converted, problem.arguments))), tuple(conversions)


@dataclass(frozen=True)
class _Run:
    """Steps whose gates' gradients are in memory together, of one direction or of both."""

    directions: tuple[int, ...]
    first: tuple[int, int]  # the earliest of their times, by direction
    count: int
    begins: bool  # there is none before it in its directions


class _Gradient:
    """What all steps of the plan share."""

    def __init__(self, problem: RecurrentGradientProblem) -> None:
        geometry = self.geometry = problem.geometry
        self.problem, self.operands = problem, problem.operands
        self.item = ITEMSIZE[problem.dtype]
        #: Of a 16-bit layer TF32 holds x, h and the weights exactly, and the gates' gradients with as many digits as float16.
        self.compute = compute_type(problem.dtype, problem.allow_tf32 or self.operands["y"].itemsize == 2)
        self.resets = geometry.cell == "gru" and not geometry.linear_before_reset
        self.rows = geometry.gates * geometry.hidden
        self.sums = self.operands["sums"]
        self.tiles = -(-geometry.batch // TILE)
        x = self.operands["x"]
        plain = x.strides == c_strides(x.shape) and x.dtype == problem.dtype
        self.gathers = not plain or "lengths" in self.operands
        #: Blocks of a direction.
        self.blocks = self.tiles * -(-geometry.hidden // TILE)

    def draft(self) -> Draft:
        geometry = self.geometry
        if 0 in (geometry.steps, geometry.batch, geometry.hidden):
            return Draft("step", tuple(self._of_nothing()), reason="there are no gates")
        #: Each tile's sums where there are several, to be added in their order.
        workspace = [Buffer("sums of tiles", self.tiles * self.sums.nbytes)] if self.tiles > 1 else []
        together, most = self._runs_that_fit(sum(buffer.space for buffer in workspace))
        passes = [tuple(range(geometry.directions))] if together else [(d,) for d in range(geometry.directions)]
        steps: list[Step] = []
        runs = [run for directions in passes for run in self._runs(directions, most)]
        for run in runs:
            steps += self._steps(run)
        per_step = self._per_step(len(passes[0]))
        workspace += [Buffer(name, most * nbytes) for name, nbytes in per_step.items() if nbytes]
        waiting = self._wait(len(passes[0]))
        if waiting:
            workspace.append(self._counters(len(passes[0])))
        if self.tiles > 1:
            count = prod(self.sums.shape)
            sums = replace(self.sums, shape=(1, count, 1, 1, 1), strides=(0, int(count > 1), 0, 0, 0))
            tiles = replace(sums, name="sums of tiles", shape=(self.tiles, count, 1, 1, 1))
            steps.append(sum_of_parts(replace(tiles, strides=c_strides(tiles.shape)), sums, self.problem.gpu))
        words = f"{'two launches' if self.resets else 'one launch'} per step"
        words = f"{'one launch for all steps' if waiting else words}, blocks of {TILE} samples x {TILE} units"
        words += f", in {len(runs)} runs of {most} steps" * (len(runs) > 1)
        return Draft("persistent" if waiting else "step", tuple(steps), tuple(workspace), words)

    def _wait(self, directions: int) -> bool:
        """Whether the blocks of so many directions wait for each other, which they can where all are on the GPU at once."""
        return self.geometry.steps > 1 and self.blocks * directions <= room_for_waiting(self.problem.gpu)

    # Memory.

    def _counters(self, directions: int) -> Buffer:
        return Buffer("counters", directions * self.tiles * COUNTERS_APART * ITEMSIZE["float32"])

    def _per_step(self, directions: int) -> dict[str, int]:
        """Bytes of each step of a run, by buffer."""
        geometry, state = self.geometry, self.geometry.batch * self.geometry.hidden * self.item
        sizes = {"dgates": directions * geometry.gates * state, "previous": directions * state}
        if geometry.cell == "gru":
            sizes["reset" if self.resets else "dcandidate"] = directions * state
        if self.gathers:
            sizes["inputs"] = geometry.batch * geometry.inputs * self.item
        return sizes

    def _runs_that_fit(self, taken: int) -> tuple[bool, int]:
        """Whether both directions run together, and the steps of a run."""
        geometry, problem = self.geometry, self.problem
        most = min(geometry.steps, MAX_DIMENSION // geometry.batch)
        for directions in dict.fromkeys((geometry.directions, 1)):
            sizes = self._per_step(directions)
            left = problem.limit - taken - len(sizes) * Plan.ALIGNMENT
            left -= self._counters(directions).space * self._wait(directions)
            fitting = min(most, left // sum(sizes.values()))
            if fitting == geometry.steps or (directions == 1 and fitting >= 1):
                return directions == geometry.directions, even_part(geometry.steps, fitting)
        least = problem.limit - left + sum(sizes.values())
        raise ValueError(f"one step needs {least:,} bytes of workspace, the limit is {problem.limit:,}")

    # Steps of the plan.

    def _of_nothing(self) -> list[Step]:
        """Zeros; of no steps, the initial states' gradients are the last ones'."""
        names = ("grad_x", "grad_weight_ih", "grad_weight_hh", "sums")
        steps: list[Step] = [
            epilogue_launch(as_line(self.operands[name])) for name in names if self.operands[name].nbytes
        ]
        if self.operands["grad_h0"].nbytes:
            steps += self._launches(_Run(tuple(range(self.geometry.directions)), (0, 0), 0, True))
        return steps

    def _runs(self, directions: tuple[int, ...], most: int) -> list[_Run]:
        """Runs in the order in which gradients meet them."""
        steps, runs = self.geometry.steps, []
        for begin in range(0, steps, most):
            count = min(most, steps - begin)
            first = [steps - begin - count if sign > 0 else begin for sign in self.geometry.signs]
            runs.append(_Run(directions, (first[0], first[-1]), count, begin == 0))
        return runs

    def _steps(self, run: _Run) -> list[Step]:
        steps: list[Step] = self._launches(run)
        if self.gathers and self.geometry.inputs:
            steps.append(self._inputs_launch(run))
        for place, d in enumerate(run.directions):
            steps += self._products(run, place, d)
        return steps

    def _launches(self, run: _Run) -> list[Step]:
        """One launch for each step, or two, and the last, which is the product alone; or one that does what these do."""
        geometry, item = self.geometry, self.item
        assert self.blocks <= GRID_X, "states of that many tiles fit no memory"
        state = len(run.directions) * geometry.batch * geometry.hidden
        kernel = variant("recurrent_gradient", DTYPE=self.operands["y"].dtype, CELL=CELLS[geometry.cell])
        products = (2, 1) if self.resets else (geometry.gates,)
        purposes = ("state, gates but r", "r and the state before") if self.resets else ("product, state, gates",)
        rate = cost.core_rate(self.operands["y"].dtype, self.problem.gpu) * cost.RECURRENT_GRADIENT
        launches = []
        for phase, (gates, purpose) in enumerate(zip(products, purposes)):
            weights = len(run.directions) * gates * geometry.hidden**2
            launch = KernelLaunch(
                kernel,
                (self.blocks, len(run.directions), 1),
                THREADS,
                self._params(run, phase),
                purpose=purpose,
                bytes_moved=weights * item + (3 * geometry.gates + 5) * state * item // len(products),
                flops=2 * gates * geometry.hidden * state,
            )
            launches.append(cost.priced(launch, rate, self.problem.gpu))
        if not (run.count and self._wait(len(run.directions))):
            return [LaunchLoop(tuple(launches), times=run.count + 1, counter="steps_done")]
        waits = (run.count + 1) * len(launches)
        together = replace(
            launches[0],
            purpose="product, state, gates of all steps",
            bytes_moved=(run.count + 1) * sum(launch.bytes_moved for launch in launches),
            flops=(run.count + 1) * sum(launch.flops for launch in launches),
            arithmetic_seconds=(run.count + 1) * sum(launch.arithmetic_seconds for launch in launches)
            + waits * cost.BARRIER_SECONDS,
            cooperative=True,
        )
        return [counters_from_zero(self._counters(len(run.directions))), together]

    def _params(self, run: _Run, phase: int) -> tuple[tuple[str, Any], ...]:
        """The C++ struct RecurrentGradientParams."""
        geometry, operands = self.geometry, self.operands
        grad_y, lengths = operands.get("grad_y"), operands.get("lengths")
        lstm, gru = geometry.cell == "lstm", geometry.cell == "gru"
        carried_h, carried_c = self._given("grad_h0"), self._given("grad_c0")
        buffers = {name: Address(name) for name in self._per_step(1)} if run.count else {}
        sums = (Address("sums of tiles") if self.tiles > 1 else self._at("sums")) if run.count else None
        return (
            ("gates", self._given("gates") if run.count else None),
            ("beside", self._given("cells" if lstm else "candidate") if run.count and (lstm or gru) else None),
            ("weight_hh", self._given("weight_hh")),
            ("y", self._given("y") if run.count else None),
            ("h0", self._given("h0")),
            ("c0", self._given("c0")),
            ("peephole", self._given("peephole")),
            ("lengths", self._given("lengths")),
            ("lengths_stride", lengths.strides[0] if lengths else 0),
            ("grad_y", self._given("grad_y") if run.count else None),
            *zip(("grad_y_t", "grad_y_n", "grad_y_u"), grad_y.strides if grad_y else (0, 0, 0)),
            ("begin_h", self._given("grad_h") if run.begins else carried_h),
            ("begin_c", self._given("grad_c") if run.begins else carried_c),
            ("carried_h", carried_h),
            ("carried_c", carried_c),
            *((name, buffers.get(name)) for name in ("dgates", "dcandidate", "previous", "reset")),
            ("sums", sums),
            ("activation", gate_activations(geometry)),
            ("default_gates", int(uses_default_gates(geometry))),
            ("clip", inf if geometry.clip is None else geometry.clip),
            ("first", run.first),
            ("steps", geometry.steps),
            ("batch", geometry.batch),
            ("count", run.count),
            ("hidden", geometry.hidden),
            ("directions", geometry.directions),
            ("sign", (geometry.signs[0], geometry.signs[-1])),
            ("first_direction", run.directions[0]),
            ("is_reset", phase),
            ("input_forget", int(geometry.input_forget)),
            ("reset_first", int(self.resets)),
            ("wide_lengths", int(lengths is not None and lengths.dtype == "int64")),
            ("begins", int(run.begins)),
            ("sum_rows", self.sums.shape[1]),
            ("steps_done", 0),
            ("counters", Address("counters") if run.count and self._wait(len(run.directions)) else None),
        )

    def _inputs_launch(self, run: _Run) -> KernelLaunch:
        """x of the run's steps; both directions together are of all steps."""
        geometry, x, lengths = self.geometry, self.operands["x"], self.operands.get("lengths")
        elements = run.count * geometry.batch * geometry.inputs
        return KernelLaunch(
            variant("recurrent_inputs", DTYPE=x.dtype),
            (min(-(-elements // THREADS), GRID_X), 1, 1),
            THREADS,
            (
                ("x", self._given("x")),
                *zip(("stride_t", "stride_n", "stride_i"), x.strides),
                ("lengths", self._given("lengths")),
                ("lengths_stride", lengths.strides[0] if lengths else 0),
                ("inputs", Address("inputs")),
                ("first", run.first[run.directions[0]]),
                ("steps", run.count),
                ("batch", geometry.batch),
                ("columns", geometry.inputs),
                ("wide_lengths", int(lengths is not None and lengths.dtype == "int64")),
            ),
            purpose="inputs as a matrix",
            bytes_moved=elements * (x.itemsize + self.item),
        )

    def _products(self, run: _Run, place: int, d: int) -> list[Step]:
        """What is linear in the gates' gradients of a run, which are the `place`-th of its buffers."""
        geometry, hidden, inputs, rows = self.geometry, self.geometry.hidden, self.geometry.inputs, self.rows
        depth = run.count * geometry.batch
        dgates, previous = self._run_at("dgates", run, place, rows), self._run_at("previous", run, place, hidden)
        first = run.first[d] * geometry.batch
        x = Address("inputs") if self.gathers else self._at("x", first * inputs)
        by_gates, by_steps = Matrix(dgates, rows, 0, transposed=True), Matrix(dgates, rows, 0)
        beta = int(not run.begins)  # later runs add to the weights' gradients
        calls: list[Step] = []
        if inputs:
            weight_at, grad_at = self._at("weight_ih", d * rows * inputs), self._at("grad_weight_ih", d * rows * inputs)
            sizes = rows, inputs, depth
            calls.append(self._product("weight_ih", sizes, by_gates, Matrix(x, inputs, 0), grad_at, beta))
            grad_x, sizes = self._at("grad_x", first * inputs), (depth, inputs, rows)
            calls.append(self._product("x", sizes, by_steps, Matrix(weight_at, inputs, 0), grad_x, int(d > 0)))
        parts = [(0, rows, by_gates, previous)]  # rows of the weight, their gates' gradients, the factor
        if geometry.cell == "gru":
            candidate = replace(by_gates, at=replace(dgates, offset=dgates.offset + 2 * hidden * self.item))
            if not self.resets:
                candidate = replace(by_gates, at=self._run_at("dcandidate", run, place, hidden), ld=hidden)
            factor = self._run_at("reset", run, place, hidden) if self.resets else previous
            parts = [(0, 2 * hidden, by_gates, previous), (2 * hidden, hidden, candidate, factor)]
        for row, count, gradients, factor in parts:
            at, sizes = self._at("grad_weight_hh", (d * rows + row) * hidden), (count, hidden, depth)
            calls.append(self._product("weight_hh", sizes, gradients, Matrix(factor, hidden, 0), at, beta))
        return calls

    def _product(
        self, purpose: str, sizes: tuple[int, int, int], a: Matrix, b: Matrix, c: Address, beta: int
    ) -> GemmCall:
        """One call of sizes (m, n, k), whose result has no gaps."""
        dtype = self.problem.dtype
        target = Matrix(c, sizes[1], 0)
        return GemmCall(*sizes, a, b, target, 1, dtype, dtype, self.compute, beta=beta, purpose=purpose)

    def _run_at(self, buffer: str, run: _Run, place: int, columns: int) -> Address:
        return Address(buffer, place * run.count * self.geometry.batch * columns * self.item)

    def _at(self, name: str, elements: int = 0) -> Address:
        """A place in an argument or result."""
        operand = self.operands[name]
        return Address(name, operand.offset + elements * operand.itemsize)

    def _given(self, name: str) -> Address | None:
        """An argument or result from its first element; None where it is absent or empty."""
        return self._at(name) if name in self.operands and self.operands[name].nbytes else None
