"""Gradients of recurrent layers on CUDA: back through time step by step, then GEMMs over all steps.

::

    recurrent_gradient             one launch per step: dh from the gate gradients of the step before, then the gate
                                   gradients of this step
    recurrent_gradient_persistent  the same in one cooperative launch for all steps; each block holds rows of weight_hh
    GEMM                           weight_ih: dgates' x     weight_hh: dgates' h before     x: dgates weight_ih
    epilogue_grad                  adds the sums of all blocks, for biases and peepholes

One launch computes both directions.  If the gate gradients of all steps exceed the workspace limit, the directions are
computed one after the other, in runs of steps that fit.  Between two runs, the gradient of the state is stored in the
result for the gradient of the initial state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import FIRST_MMA
from cupyconv.cuda.plan.conversions import convert
from cupyconv.cuda.plan.draft import Draft, cheapest_of
from cupyconv.cuda.plan.epilogue import as_line, epilogue_launch
from cupyconv.cuda.plan.epilogue_grad import sum_of_parts
from cupyconv.cuda.plan.launches import GRID_X, WARP, variant
from cupyconv.cuda.plan.matrices import MAX_DIMENSION, compute_type
from cupyconv.cuda.plan.recurrence import (
    COUNTERS_APART,
    counters_from_zero,
    gate_activations,
    room_for_waiting,
    uses_default_gates,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides
from cupyconv.problem.geometry import even_part
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Address, Buffer, Conversion, GemmCall, KernelLaunch, LaunchLoop, Matrix, Plan, Step
from cupyconv.problem.problems import NotApplicable
from cupyconv.problem.recurrence import RecurrentGeometry, RecurrentGradientProblem

#: Samples per block of recurrent_gradient.cu, which has as many units; threads per block.
TILE, THREADS = 16, 256
#: recurrent_gradient_persistent.cu: samples per tile, units per block, elements from one sample's gates to the next,
#: warps.
ROWS, UNITS, PITCH, WARPS = 16, 8, 12, THREADS // WARP
CELLS = {"rnn": "RNN", "lstm": "LSTM", "gru": "GRU"}
#: Maximum bytes that its blocks pass to each other, so that they stay in the L2 cache of large GPUs.
MAX_PARTS = 32 << 20


def plan_recurrent_gradient(problem: RecurrentGradientProblem) -> Plan:
    """Plan a recurrent gradient; raise ValueError if the gates of one step exceed the workspace limit."""
    problem, conversions = _converted(problem)
    shared = problem.sharing_with(conversions)
    together = tuple(dict.fromkeys((problem.geometry.directions, 1)))
    candidates = [(waits, directions) for waits in (True, False) for directions in together]
    draft = cheapest_of(candidates, lambda candidate: _Gradient(shared, *candidate).draft(), problem.gpu)
    return draft.plan(problem, conversions=conversions)


def _converted(problem: RecurrentGradientProblem) -> tuple[RecurrentGradientProblem, tuple[Conversion, ...]]:
    """Return the problem with its arguments as the kernels and GEMMs need them, and the conversions.

    The only large argument that is copied is an x in another precision than the result: the kernels themselves widen
    16-bit numbers.
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
    """Steps whose gate gradients are in memory at the same time, for one direction or both."""

    directions: tuple[int, ...]
    first: tuple[int, int]  # the earliest time, by direction
    count: int
    begins: bool  # whether it is the first run of its directions


def gradient_arithmetic(dtype: str, gpu: GpuModel) -> str:
    """Return the arithmetic of recurrent_gradient_persistent.cu: tensor cores have TF32 from sm_80 on."""
    return "TF32X3" if dtype != "float64" and gpu.capability >= FIRST_MMA["float32"] else "FMA"


def shared_bytes(dtype: str, geometry: RecurrentGeometry) -> int:
    """Shared memory of recurrent_gradient_persistent.cu: parts and gate gradients, then rows of the weight."""
    blocks = -(-geometry.hidden // UNITS)
    sums = WARPS * ROWS * UNITS + geometry.gates * ROWS * PITCH
    return sums * ITEMSIZE[accumulator(dtype)] + geometry.gates * UNITS * (blocks | 1) * UNITS * ITEMSIZE[dtype]


class _Gradient:
    """Draft one plan; `waits` is whether blocks wait for each other, `together` the directions per launch."""

    def __init__(self, problem: RecurrentGradientProblem, waits: bool, together: int) -> None:
        geometry = self.geometry = problem.geometry
        self.problem, self.operands, self.waits, self.together = problem, problem.operands, waits, together
        self.item = ITEMSIZE[problem.dtype]
        self.stored = self.operands["y"].dtype
        #: For a 16-bit layer, TF32 holds x, h and weights exactly, and gate gradients with the precision of float16.
        self.compute = compute_type(problem.dtype, problem.allow_tf32 or ITEMSIZE[self.stored] == 2)
        self.resets = geometry.cell == "gru" and not geometry.linear_before_reset
        self.rows = geometry.gates * geometry.hidden
        self.sums = self.operands["sums"]
        x = self.operands["x"]
        plain = x.strides == c_strides(x.shape) and x.dtype == problem.dtype
        self.gathers = not plain or "lengths" in self.operands
        self.tiles = -(-geometry.batch // (ROWS if waits else TILE))
        #: Blocks along the units.
        self.columns = -(-geometry.hidden // (UNITS if waits else TILE))
        #: Blocks along the samples, each of which stores its own sums.
        self.grid_rows = self._rows_that_wait() if waits else self.tiles

    def draft(self) -> Draft:
        geometry = self.geometry
        if 0 in (geometry.steps, geometry.batch, geometry.hidden):
            return Draft("step", tuple(self._of_nothing()), reason="there are no steps, samples or units")
        #: The sums of each row of blocks, if there are several rows; they are added in order.
        workspace = [Buffer("sums of tiles", self.grid_rows * self.sums.nbytes)] if self.grid_rows > 1 else []
        if self.waits:
            workspace += [Buffer("counters", self._counters), Buffer("parts", self._parts)]
        most = self._steps_that_fit(sum(buffer.space for buffer in workspace))
        every = range(geometry.directions)
        passes = [tuple(every)] if self.together == geometry.directions else [(d,) for d in every]
        steps: list[Step] = []
        runs = [run for directions in passes for run in self._runs(directions, most)]
        for run in runs:
            steps += self._steps(run)
        workspace += [Buffer(name, most * nbytes) for name, nbytes in self._per_step().items() if nbytes]
        if self.grid_rows > 1:
            shape = (self.grid_rows, prod(self.sums.shape), 1, 1, 1)
            tiles = replace(self.sums, name="sums of tiles", shape=shape, strides=c_strides(shape))
            steps.append(sum_of_parts(tiles, self.sums, self.problem.gpu))
        description = (
            f"{'two launches' if self.resets else 'one launch'} per step, blocks of {TILE} samples x {TILE} units"
        )
        if self.waits:
            description = f"one launch for all steps, blocks of {ROWS} samples x {UNITS} units"
            description += f", {self._tiles_of_a_block} passes per step" * (self._tiles_of_a_block > 1)
        description += f", in {len(runs)} chunks of {most} steps" * (len(runs) > 1)
        return Draft("persistent" if self.waits else "step", tuple(steps), tuple(workspace), description)

    def _rows_that_wait(self) -> int:
        """Return the rows of blocks that are all on the GPU at once, or raise `NotApplicable`."""
        geometry, gpu = self.geometry, self.problem.gpu
        room = room_for_waiting(gpu) // max(1, self.columns * self.together)
        needed = shared_bytes(self.stored, geometry)
        if geometry.steps < 2 or not room or not self.tiles:
            raise NotApplicable(
                f"{self.columns * self.together} blocks must run at the same time, for at least 2 steps; given {geometry.steps}"
            )
        if needed > gpu.shared_bytes:
            raise NotApplicable(f"a block needs {needed:,} bytes of shared memory, the GPU has {gpu.shared_bytes:,}")
        if self._parts > MAX_PARTS:
            raise NotApplicable(f"the blocks exchange {self._parts:,} bytes, at most {MAX_PARTS:,} are supported")
        return -(-self.tiles // -(-self.tiles // min(room, self.tiles)))

    @property
    def _tiles_of_a_block(self) -> int:
        return -(-self.tiles // self.grid_rows)

    # Memory.

    @property
    def _counters(self) -> int:
        """Bytes of the counters, one per tile of samples."""
        return self.together * self.tiles * COUNTERS_APART * ITEMSIZE["float32"]

    @property
    def _parts(self) -> int:
        """Bytes that every block stores for every block, in two halves that are used alternately."""
        return 2 * self.together * self.tiles * self.columns**2 * ROWS * UNITS * self.item

    def _per_step(self) -> dict[str, int]:
        """Return the bytes per step of a run, by buffer."""
        geometry, state = self.geometry, self.geometry.batch * self.geometry.hidden * self.item
        sizes = {"dgates": self.together * geometry.gates * state, "previous": self.together * state}
        if geometry.cell == "gru":
            sizes["reset" if self.resets else "dcandidate"] = self.together * state
        if self.gathers:
            sizes["inputs"] = geometry.batch * geometry.inputs * self.item
        return sizes

    def _steps_that_fit(self, taken: int) -> int:
        """Return the steps per run; both directions run together only if all steps fit."""
        geometry, sizes = self.geometry, self._per_step()
        left = self.problem.limit - taken - len(sizes) * Plan.ALIGNMENT
        most = min(geometry.steps, MAX_DIMENSION // geometry.batch)
        fitting = min(most, left // sum(sizes.values()))
        if fitting == geometry.steps or (self.together == 1 and fitting >= 1):
            return even_part(geometry.steps, fitting)
        least = self.problem.limit - left + sum(sizes.values())
        raise NotApplicable(f"one step needs {least:,} bytes of workspace, the limit is {self.problem.limit:,}")

    # Steps of the plan.

    def _of_nothing(self) -> list[Step]:
        """Return zeros; without steps, the gradients of the initial states equal those of the last states."""
        names = ("grad_x", "grad_weight_ih", "grad_weight_hh", "sums")
        steps: list[Step] = [
            epilogue_launch(as_line(self.operands[name])) for name in names if self.operands[name].nbytes
        ]
        if self.operands["grad_h0"].nbytes:
            steps += self._launches(_Run(tuple(range(self.geometry.directions)), (0, 0), 0, True))
        return steps

    def _runs(self, directions: tuple[int, ...], most: int) -> list[_Run]:
        """Return the runs in the order of the backward pass."""
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
        """Return one launch for all steps, or a loop with one or two per step, whose last round is only a product."""
        return self._one_launch(run) if self.waits and run.count else [self._launch_for_each_step(run)]

    def _one_launch(self, run: _Run) -> list[Step]:
        geometry, gpu, turns = self.geometry, self.problem.gpu, run.count * (1 + self.resets)
        arithmetic = gradient_arithmetic(self.stored, gpu)
        blocks, state = self.columns * self.grid_rows * self.together, self.together * geometry.batch * geometry.hidden
        weights = self.together * self.rows * geometry.hidden
        # Per tile and turn: a warp multiplies for every WARPS-th block; `exchanged` is what a block writes and reads.
        issued = (
            cost.GRADIENT_ISSUED[arithmetic, ITEMSIZE[self.stored]] * self.columns * geometry.gates / (1 + self.resets)
        )
        exchanged = 2 * min(ROWS, geometry.batch) * self.columns * UNITS * self.item
        seconds = self._tiles_of_a_block * cost.seconds_in_rounds(blocks, 0, 1, gpu, l2_bytes=exchanged, issued=issued)
        launch = KernelLaunch(
            variant(
                "recurrent_gradient_persistent", DTYPE=self.stored, CELL=CELLS[geometry.cell], ARITHMETIC=arithmetic
            ),
            (self.columns, self.grid_rows, self.together),
            THREADS,
            self._params(run, 0),
            shared_bytes=shared_bytes(self.stored, geometry),
            purpose="product, state, gates of all steps",
            bytes_moved=weights * ITEMSIZE[self.stored] + run.count * (3 * geometry.gates + 5) * state * self.item,
            flops=2 * run.count * weights * geometry.batch,
            l2_bytes=blocks * self._tiles_of_a_block * turns * exchanged,
            arithmetic_seconds=turns * (seconds + cost.BARRIER_SECONDS),
            cooperative=True,
        )
        return [counters_from_zero(Buffer("counters", self._counters)), launch]

    def _launch_for_each_step(self, run: _Run) -> LaunchLoop:
        geometry, item = self.geometry, self.item
        blocks = self.tiles * self.columns
        assert blocks <= GRID_X, "states of that many tiles fit no memory"
        state = len(run.directions) * geometry.batch * geometry.hidden
        kernel = variant("recurrent_gradient", DTYPE=self.stored, CELL=CELLS[geometry.cell])
        products = (2, 1) if self.resets else (geometry.gates,)
        purposes = ("state, gates except r", "r and the previous state") if self.resets else ("product, state, gates",)
        rate = cost.core_rate(self.stored, self.problem.gpu) * cost.RECURRENT_GRADIENT
        launches = []
        for phase, (gates, purpose) in enumerate(zip(products, purposes)):
            weights = len(run.directions) * gates * geometry.hidden**2
            launch = KernelLaunch(
                kernel,
                (blocks, len(run.directions), 1),
                THREADS,
                self._params(run, phase),
                purpose=purpose,
                bytes_moved=weights * item + (3 * geometry.gates + 5) * state * item // len(products),
                flops=2 * gates * geometry.hidden * state,
            )
            launches.append(cost.priced(launch, rate, self.problem.gpu))
        return LaunchLoop(tuple(launches), times=run.count + 1, counter="steps_done")

    def _params(self, run: _Run, phase: int) -> tuple[tuple[str, Any], ...]:
        """Return the fields of the C++ struct RecurrentGradientParams."""
        geometry, operands = self.geometry, self.operands
        grad_y, lengths = operands.get("grad_y"), operands.get("lengths")
        carried_h, carried_c = self._given("grad_h0"), self._given("grad_c0")
        buffers = {name: Address(name) for name in self._per_step()} if run.count else {}
        sums = (Address("sums of tiles") if self.grid_rows > 1 else self._at("sums")) if run.count else None
        return (
            ("gates", self._given("gates")),
            ("beside", self._given("cells" if geometry.cell == "lstm" else "candidate")),
            ("weight_hh", self._given("weight_hh")),
            ("y", self._given("y")),
            ("h0", self._given("h0")),
            ("c0", self._given("c0")),
            ("peephole", self._given("peephole")),
            ("lengths", self._given("lengths")),
            ("lengths_stride", lengths.strides[0] if lengths else 0),
            ("grad_y", self._given("grad_y")),
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
            ("counters", Address("counters") if self.waits else None),
            ("parts", Address("parts") if self.waits else None),
        )

    def _inputs_launch(self, run: _Run) -> KernelLaunch:
        """Return the launch that copies x of the run's steps; a run of both directions has all steps."""
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
        """Return the GEMMs with the gate gradients of a run and direction `d`, the `place`-th one in its buffers."""
        geometry, hidden, inputs, rows = self.geometry, self.geometry.hidden, self.geometry.inputs, self.rows
        depth = run.count * geometry.batch
        dgates, previous = self._run_at("dgates", run, place, rows), self._run_at("previous", run, place, hidden)
        first = run.first[d] * geometry.batch
        x = Address("inputs") if self.gathers else self._at("x", first * inputs)
        by_gates, by_steps = Matrix(dgates, rows, 0, transposed=True), Matrix(dgates, rows, 0)
        beta = int(not run.begins)  # later runs accumulate into the weight gradients
        calls: list[Step] = []
        if inputs:
            weight_at, grad_at = self._at("weight_ih", d * rows * inputs), self._at("grad_weight_ih", d * rows * inputs)
            sizes = rows, inputs, depth
            calls.append(self._product("weight_ih", sizes, by_gates, Matrix(x, inputs, 0), grad_at, beta))
            grad_x, sizes = self._at("grad_x", first * inputs), (depth, inputs, rows)
            calls.append(self._product("x", sizes, by_steps, Matrix(weight_at, inputs, 0), grad_x, int(d > 0)))
        parts = [(0, rows, by_gates, previous)]  # rows of the weight, their gate gradients, the other factor
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
        """Return one call with sizes (m, n, k) and a contiguous result."""
        dtype = self.problem.dtype
        target = Matrix(c, sizes[1], 0)
        return GemmCall(*sizes, a, b, target, 1, dtype, dtype, self.compute, beta=beta, purpose=purpose)

    def _run_at(self, buffer: str, run: _Run, place: int, columns: int) -> Address:
        return Address(buffer, place * run.count * self.geometry.batch * columns * self.item)

    def _at(self, name: str, elements: int = 0) -> Address:
        """Return the address of an element of an argument or result."""
        operand = self.operands[name]
        return Address(name, operand.offset + elements * operand.itemsize)

    def _given(self, name: str) -> Address | None:
        """Return the address of an argument or result; None if it is absent or empty."""
        return self._at(name) if name in self.operands and self.operands[name].nbytes else None
