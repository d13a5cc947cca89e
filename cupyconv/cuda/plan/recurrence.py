"""Recurrent layers on CUDA: one launch per step, or one cooperative launch for all steps.

::

    projection             x of all steps times weight_ih, one GEMM per direction, into `gates`
    recurrent_step         one launch per step: recurrent product, all gates, new state     (method "step")
    recurrent_persistent   the same in one launch for all steps                             (method "persistent")

Both kernels write h to one half of `states` and read the other half.  If the gates of all steps exceed the workspace
limit, the steps are cut into chunks, each with its own projection.  If the caller names a method, a kernel of this
library computes the projection, so that a graph can capture the whole call; "auto" may use cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import FIRST_MMA, arithmetics
from cupyconv.cuda.plan.conv import draft_conv, plan_chosen
from cupyconv.cuda.plan.conversions import converted
from cupyconv.cuda.plan.draft import Draft, cheapest_of, in_rounds, in_sequence
from cupyconv.cuda.plan.epilogue import epilogue_launch
from cupyconv.cuda.plan.launches import GRID_Y, VECTOR_BYTES, WARP, address, variant
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator
from cupyconv.problem.geometry import LARGEST_STEP, pointwise_geometry
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Address, Buffer, GemmCall, KernelLaunch, LaunchLoop, Plan, Step
from cupyconv.problem.problems import ConvProblem, NotApplicable
from cupyconv.problem.recurrence import RECURRENT_METHODS, RecurrentGeometry, RecurrentProblem

#: Threads per block, and a warp as 4 (samples) x 8 (units) lanes: RecurrentTile of kernels/recurrent_tile.cuh.
THREADS, LANE_SAMPLES, LANE_UNITS = 256, 4, 8
#: Bytes per row of the weight that a warp multiplies per K-block (STEP of kernels/recurrent_products.cuh).
STEP_BYTES = 32
#: Padding bytes after each row of the state in shared memory (STATE_PAD there).
STATE_PAD_BYTES = {"FMA": 16, "MMA": 32, "TF32": 16, "TF32X3": 16}
#: K-blocks in flight, by whether the weight is resident in shared memory.
STAGES = {False: 3, True: 4}
#: Elements between two counters, so that each has its own cache line (APART of kernels/recurrent_persistent.cu).
COUNTERS_APART = 32


@dataclass(frozen=True)
class Tile:
    """A block's part of a step, with `samples` samples per thread: the host side of RecurrentTile."""

    dtype: str
    arithmetic: str
    samples: int
    resident: bool

    @property
    def macros(self) -> tuple[tuple[str, str], ...]:
        return ("DTYPE", self.dtype), ("ARITHMETIC", self.arithmetic), ("SAMPLES", str(self.samples))

    @property
    def unit_warps(self) -> int:
        return 4 if self.samples == 8 else 1

    @property
    def k_warps(self) -> int:
        return THREADS // WARP // self.unit_warps

    @property
    def rows(self) -> int:
        return LANE_SAMPLES * self.samples

    @property
    def units(self) -> int:
        return LANE_UNITS * self.unit_warps

    @property
    def k_block(self) -> int:
        return self.k_warps * STEP_BYTES // ITEMSIZE[self.dtype]

    def shared_bytes(self, gates: int, product_gates: int, hidden: int) -> int:
        """Return the bytes for the stages, whose memory partial sums reuse, plus the resident rows of all gates."""
        item, sums = ITEMSIZE[self.dtype], ITEMSIZE[accumulator(self.dtype)]
        partial = product_gates * self.rows * self.units * sums  # per warp
        if not self.resident:
            weight = product_gates * self.units * (self.k_block * item + VECTOR_BYTES)
            stage = weight + self.rows * (self.k_block * sums + STATE_PAD_BYTES[self.arithmetic])
            return max(STAGES[False] * stage, self.k_warps * partial)
        stage = self.rows * (STEP_BYTES // item * sums + STATE_PAD_BYTES[self.arithmetic])
        columns = -(-hidden // self.k_block) * self.k_block
        return self.k_warps * max(STAGES[True] * stage, partial) + gates * self.units * (columns * item + VECTOR_BYTES)


def recurrent_tiles(dtype: str, resident: bool, gpu: GpuModel, allow_tf32: bool = False) -> tuple[Tile, ...]:
    """Return the tiles for a GPU: on tensor cores if it has them, except for float64, else on CUDA cores."""
    if dtype == "float64" or gpu.capability < FIRST_MMA[dtype]:
        # Eight samples of four gates in float64 exceed the registers.
        samples = (1, 4) if resident else (4,) if dtype == "float64" else (4, 8)
        return tuple(Tile(dtype, "FMA", count, resident) for count in samples)
    arithmetic = "MMA" if ITEMSIZE[dtype] == 2 else "TF32" if allow_tf32 else "TF32X3"
    tiles = tuple(Tile(dtype, arithmetic, count, resident) for count in ((4,) if resident else (4, 8)))
    if resident and arithmetic == "TF32X3":  # three instructions per product, of 16 samples each
        return (Tile(dtype, "FMA", 1, resident), *tiles)
    return tiles


def plan_recurrent(problem: RecurrentProblem) -> Plan:
    """Plan a recurrent layer by ``problem.method``; raise ValueError if the method asked for does not apply."""
    names = ("x", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "h0", "c0", "peephole")
    problem, conversions = converted(problem, **dict.fromkeys(names, problem.dtype))
    return plan_chosen(problem, _draft, conversions, methods=RECURRENT_METHODS)


def _draft(method: str, problem: RecurrentProblem) -> Draft:
    if 0 in (problem.geometry.batch, problem.geometry.hidden):
        return Draft(method, (), reason="the result is empty")
    layer = _Layer(problem)
    candidates = [lambda: layer.sequence(method)]
    if method == "step" and problem.geometry.steps == 1:
        candidates.insert(0, layer.single_step)
    return cheapest_of(candidates, lambda candidate: candidate(), problem.gpu)


@dataclass(frozen=True)
class _Chunk:
    """Steps whose gates are in memory at the same time, counted in processing order."""

    first: int
    count: int

    def time(self, sign: int, steps: int) -> int:
        """Return the earliest time of the chunk in a direction."""
        return self.first if sign > 0 else steps - self.first - self.count


class _Layer:
    """The parts of a plan that both methods share."""

    def __init__(self, problem: RecurrentProblem) -> None:
        geometry = problem.geometry
        self.problem, self.gpu, self.geometry = problem, problem.gpu, geometry
        self.dtype, self.computed = problem.dtype, accumulator(problem.dtype)
        #: Arrays stored for the gradient.  Without steps, there are none: they would be too small for the reset state.
        self.kept = {operand.name: operand for operand in problem.kept if problem.geometry.steps}
        #: Gates per recurrent product of a step, one product after the other.
        self.products = (2, 1) if geometry.cell == "gru" and not geometry.linear_before_reset else (geometry.gates,)
        #: Methods for the projection of the inputs: only "gemm" if the GPU has no instructions for "implicit_gemm".
        self.projecting: tuple[str, ...] = ("gemm",)
        if arithmetics(self.dtype, self.gpu, problem.allow_tf32):
            self.projecting = ("implicit_gemm", "gemm") if problem.method == "auto" else ("implicit_gemm",)
        #: Elements of the gates per direction and step.
        self.gates_per_step = geometry.batch * geometry.gates * geometry.hidden

    def single_step(self) -> Draft:
        """Draft a sequence of one step, whose kernel also projects the inputs."""
        tile = recurrent_tiles(self.dtype, False, self.gpu, self.problem.allow_tf32)[0]
        launches = self._launches("step", tile, self._tiles(tile), _Chunk(0, 1), 1, projected=False)
        workspace = self._state_buffers(0) + _buffer("gates", self._gates_bytes(1) if len(self.products) > 1 else 0)
        needed = sum(buffer.space for buffer in workspace)
        if needed > self.problem.limit:
            raise NotApplicable(f"one step needs {needed:,} bytes of workspace, the limit is {self.problem.limit:,}")
        description = f"one step with input projection, blocks of {tile.rows} samples x {tile.units} units"
        return Draft("step", launches, tuple(workspace), description, self._notes())

    def sequence(self, method: str) -> Draft:
        """Draft the projections, and the launches that compute their steps."""
        tile, grid, description = self._step_tile() if method == "step" else self._persistent_tile()
        persistent = method == "persistent"
        workspace = self._state_buffers(tiles_that_wait=prod(self._tiles(tile)[1:]) if persistent else 0)
        count, project = self._projections(sum(buffer.space for buffer in workspace))

        projections: list[Draft] = []

        def steps_of(chunk: _Chunk) -> list[Step]:
            launches = self._launches(method, tile, grid, chunk, count)
            projections.append(project(chunk))
            loop = [LaunchLoop(launches, max(chunk.count, 1), "step", chunk.first)]
            return [*projections[-1].steps, *((counters_from_zero(workspace[-1]), *launches) if persistent else loop)]

        whole, rest = divmod(self.geometry.steps, max(1, count))
        steps = in_rounds(whole, lambda i: steps_of(_Chunk(i * count, count)))
        if rest or not whole:
            steps += steps_of(_Chunk(whole * count, rest))
        shared = max((buffer.nbytes for draft in projections for buffer in draft.workspace), default=0)
        workspace += _buffer("gates", self._gates_bytes(count)) + _buffer("workspace", shared)
        description += f", in {whole + bool(rest):,} chunks of {count} steps" * (whole + bool(rest) > 1)
        description += "".join(f"; input projection by {draft.method}, {draft.reason}" for draft in projections[:1])
        notes = list(dict.fromkeys(note for draft in projections for note in draft.notes))
        if self.projecting == ("gemm",):
            notes.append(
                f"{self.gpu.arch} has no matrix instructions for {self.dtype}: cuBLAS projects the inputs, so CUDA graphs cannot"
                " capture the call"
            )
        return Draft(method, tuple(steps), tuple(workspace), description, (*notes, *self._notes()))

    # Tiles and grids.

    def _tiles(self, tile: Tile) -> tuple[int, int, int]:
        geometry = self.geometry
        return -(-geometry.hidden // tile.units), -(-geometry.batch // tile.rows), geometry.directions

    def _step_tile(self) -> tuple[Tile, tuple[int, int, int], str]:
        known = recurrent_tiles(self.dtype, False, self.gpu, self.problem.allow_tf32)
        tiles = [tile for tile in known if self._tiles(tile)[1] <= GRID_Y]
        if not tiles:
            raise NotApplicable(f"{self.geometry.batch:,} samples exceed the largest grid")
        tile = min(tiles, key=lambda tile: self._seconds(tile, self._tiles(tile), self.geometry.gates))
        launches = "one launch" if len(self.products) == 1 else f"{len(self.products)} launches"
        return tile, self._tiles(tile), f"{launches} per step, blocks of {tile.rows} samples x {tile.units} units"

    def _persistent_tile(self) -> tuple[Tile, tuple[int, int, int], str]:
        """Return the fastest tile whose blocks all fit on the GPU at once, one per multiprocessor."""
        gpu, geometry = self.gpu, self.geometry
        room = room_for_waiting(gpu)
        there_is = f"the GPU has {room} multiprocessors" if gpu.room is None else f"the GPU has room for {room}"
        fitting, reasons = [], []
        for tile in recurrent_tiles(self.dtype, True, gpu, self.problem.allow_tf32):
            columns, tiles, directions = self._tiles(tile)
            needed = tile.shared_bytes(geometry.gates, max(self.products), geometry.hidden)
            if needed > gpu.shared_bytes:
                reasons.append(
                    f"a block with the weight rows of {tile.units} units needs {needed:,} bytes of shared memory,"
                    f" the GPU has {gpu.shared_bytes:,}"
                )
            elif columns * directions > room:
                reasons.append(
                    f"{columns * directions} blocks of {tile.units} units must run at the same time, {there_is}"
                )
            else:
                rows = min(tiles, room // (columns * directions))
                fitting.append((tile, (columns, -(-tiles // -(-tiles // rows)), directions)))
        if not fitting:
            raise NotApplicable(reasons[-1])
        tile, grid = min(fitting, key=lambda entry: self._seconds(entry[0], entry[1], geometry.gates))
        passes = -(-self._tiles(tile)[1] // grid[1])
        description = f"one launch for all steps, blocks of {tile.rows} samples x {tile.units} units"
        return tile, grid, description + f", {passes} passes per step" * (passes > 1)

    def _seconds(self, tile: Tile, grid: tuple[int, int, int], gates: int) -> float:
        """Return the estimated time of the products of one step, in whole rounds of whole tiles."""
        rate = cost.product_rate(tile.arithmetic, tile.dtype, self.gpu)
        if tile.arithmetic == "MMA":
            rate /= 2  # two instructions per product: one is for the rounding error of the state
        passes = -(-self._tiles(tile)[1] // grid[1])
        operations = passes * 2 * tile.rows * tile.units * gates * self.geometry.hidden
        return cost.seconds_in_rounds(prod(grid), operations, rate * cost.RECURRENT[tile.samples], self.gpu)

    def _l2_bytes(self, tile: Tile, grid: tuple[int, int, int], gates: int, reduction: int) -> int:
        """Return the bytes that a block reads from L2 per step: states, projections, and non-resident weights."""
        states = tile.rows * (reduction + tile.units * gates) * ITEMSIZE[self.computed]
        weights = 0 if tile.resident else tile.units * gates * reduction * ITEMSIZE[self.dtype]
        return -(-self._tiles(tile)[1] // grid[1]) * (states + weights)

    # Memory.

    def _state_buffers(self, tiles_that_wait: int) -> list[Buffer]:
        """Return the buffers whose size does not depend on the steps per chunk; the counters are the last one."""
        geometry = self.geometry
        state = geometry.directions * geometry.batch * geometry.hidden * ITEMSIZE[self.computed]
        carried, resets = geometry.steps > 1, len(self.products) > 1 and "candidate" not in self.kept
        return [
            *_buffer("states", 2 * state * (carried or tiles_that_wait > 0)),
            *_buffer("cell state", state * (carried and geometry.cell == "lstm")),
            *_buffer("reset state", state * resets),
            *_buffer("counters", tiles_that_wait * COUNTERS_APART * ITEMSIZE["float32"]),
        ]

    def _gates_bytes(self, count: int) -> int:
        """Return the workspace for the gates of `count` steps."""
        if "gates" in self.kept:
            return 0
        return count * self.geometry.directions * self.gates_per_step * ITEMSIZE[self.computed]

    def _projections(self, taken: int) -> tuple[int, Callable[[_Chunk], Draft]]:
        """Return the steps per chunk that fit the rest of the workspace, and the function that drafts a projection."""
        reason = ""
        if self.geometry.steps > LARGEST_STEP:
            raise NotApplicable(f"{self.geometry.steps:,} steps; the kernel supports at most {LARGEST_STEP:,}")
        for count in self._chunk_lengths():
            limit = self.problem.limit - taken - Buffer("gates", self._gates_bytes(count)).space
            if limit < 0:
                reason = f"{-limit:,} more bytes are needed"
                continue
            try:
                for chunk in self._ends(count):
                    self._projection(chunk, count, limit)
                return count, partial(self._projection, stride=count, limit=limit)
            except NotApplicable as refusal:
                reason = str(refusal)
        raise NotApplicable(f"one step does not fit into {self.problem.limit:,} bytes of workspace: {reason}")

    def _ends(self, count: int) -> list[_Chunk]:
        """Return the first chunk, and the last one if it has fewer steps."""
        whole, rest = divmod(self.geometry.steps, max(1, count))
        return [_Chunk(0, count)] * bool(whole) + [_Chunk(whole * count, rest)] * bool(rest)

    def _chunk_lengths(self) -> Iterator[int]:
        """Yield the steps per chunk to try: all, a half, and so on to one; only all if fewer save no gates."""
        parts, steps = 1, self.geometry.steps
        yield steps
        while -(-steps // parts) > 1 and self._gates_bytes(steps):
            parts = min(steps, 2 * parts)
            yield -(-steps // parts)

    # Steps of the plan.

    def _projection(self, chunk: _Chunk, stride: int, limit: int) -> Draft:
        """Draft a chunk's projection, with `stride` steps of gates per direction, or raise `NotApplicable`."""
        if not chunk.count:
            return Draft("", ())
        directions = []
        for d in range(self.geometry.directions):
            conv = self._projection_problem(d, chunk, stride, limit)
            draft = cheapest_of(self.projecting, partial(draft_conv, problem=conv), self.gpu)
            directions.append(replace(draft, steps=tuple(map(_as_projection, draft.steps))))
        return in_sequence(directions[0].method, directions, directions[0].reason)

    def _projection_problem(self, d: int, chunk: _Chunk, stride: int, limit: int) -> ConvProblem:
        """Return a convolution of one tap: pixels are (time, sample), channels the inputs, outputs the gates.

        If a gradient needs the gates, they are stored for all steps, and a single chunk contains all steps.
        """
        problem, geometry = self.problem, self.geometry
        x, weight, rows = problem.x, problem.weight_ih, geometry.gates * geometry.hidden
        time, count, batch = chunk.time(geometry.signs[d], geometry.steps), chunk.count, geometry.batch
        gates = self.kept.get("gates", Operand("gates", self.computed, (), ()))
        return ConvProblem(
            geometry=pointwise_geometry({x.name: (1, geometry.inputs, count, batch)}, (rows, geometry.inputs)),
            xs=(
                x.view(
                    (1, geometry.inputs, 1, count, batch), (0, x.strides[2], 0, *x.strides[:2]), time * x.strides[0]
                ),
            ),
            weight=weight.view((rows, geometry.inputs, 1, 1, 1), (*weight.strides[1:], 0, 0, 0), d * weight.strides[0]),
            out=gates.view(
                (1, rows, 1, count, batch), (0, 1, 0, self.gates_per_step, rows), d * stride * self.gates_per_step
            ),
            x_dtype=self.dtype,
            weight_dtype=self.dtype,
            machine=self.gpu,
            workspace_limit=limit,
            allow_tf32=problem.allow_tf32,
            method=problem.method,
        )

    def _launches(
        self, method: str, tile: Tile, grid: tuple[int, int, int], chunk: _Chunk, stride: int, *, projected: bool = True
    ) -> tuple[KernelLaunch, ...]:
        """Return the launches of one step, or the one launch for all steps of a chunk."""
        geometry, persistent = self.geometry, method == "persistent"
        steps = max(chunk.count, 1) if persistent else 1
        reduction = geometry.hidden + (0 if projected else geometry.inputs)
        products = 2 * geometry.directions * geometry.batch * geometry.hidden * reduction
        weights = self.problem.weight_hh.nbytes + (0 if projected else self.problem.weight_ih.nbytes)
        state = geometry.directions * geometry.batch * geometry.hidden * ITEMSIZE[self.computed]
        stored = geometry.directions * self.gates_per_step * ITEMSIZE[self.computed]
        resets = len(self.products) > 1
        purposes = ("r, z and the reset state", "n and the new state") if resets else ("product, gates, state",)
        # The persistent kernel has code for gates other than the default only with GIVEN_GATES.  The step kernel always
        # has it, so that it is compiled once.
        given = {"GIVEN_GATES": 1} if persistent and not uses_default_gates(geometry) else {}
        launches = []
        for count, purpose in zip(self.products[: 1 if persistent else None], purposes):
            gates = geometry.gates if persistent else count
            seconds = self._seconds(tile, grid, gates)
            launches.append(
                KernelLaunch(
                    variant(f"recurrent_{method}", **dict(tile.macros), GATES=count, **given),
                    grid,
                    THREADS,
                    self._params(chunk, stride, persistent, count, projected),
                    shared_bytes=tile.shared_bytes(geometry.gates, count, geometry.hidden),
                    purpose=purpose + " of all steps" * persistent,
                    bytes_moved=weights * gates // geometry.gates + steps * (stored + 3 * state),
                    flops=steps * products * gates,
                    l2_bytes=steps * prod(grid) * self._l2_bytes(tile, grid, gates, reduction),
                    arithmetic_seconds=steps * (seconds + cost.BARRIER_SECONDS) if persistent else seconds,
                    cooperative=persistent,
                )
            )
        return tuple(launches)

    def _params(
        self, chunk: _Chunk, stride: int, persistent: bool, gates: int, projected: bool
    ) -> tuple[tuple[str, Any], ...]:
        """Return the fields of the C++ struct RecurrentParams."""
        problem, geometry = self.problem, self.geometry
        lengths, y, state = problem.lengths, problem.out, geometry.batch * geometry.hidden
        kept_gates, beside = self.kept.get("gates"), self.kept.get("cells", self.kept.get("candidate"))
        in_memory = geometry.steps > 0 and (kept_gates or projected or len(self.products) > 1)
        gates_at = Address(kept_gates.name if kept_gates else "gates") if in_memory else None
        first = [chunk.time(sign, geometry.steps) for sign in geometry.signs]
        two_products = len(self.products) > 1
        return (
            ("weight", _strided(problem.weight_hh)),
            ("x", _strided(None if projected else problem.x)),
            ("weight_ih", _strided(None if projected else problem.weight_ih)),
            ("bias_ih", _strided(problem.bias_ih)),
            ("bias_hh", _strided(problem.bias_hh)),
            ("peephole", _strided(problem.peephole)),
            ("h0", _strided(problem.h0)),
            ("c0", _strided(problem.c0)),
            ("h", _strided(problem.h)),
            ("c", _strided(problem.c)),
            ("y", (address(y), geometry.hidden * y.strides[2], y.strides[1], y.strides[2])),
            ("y_step", y.strides[0]),
            ("lengths", address(lengths)),
            ("lengths_stride", lengths.strides[0] if lengths else 0),
            ("gates", gates_at),
            ("gates_d", stride * self.gates_per_step),
            ("gates_t", self.gates_per_step),
            ("beside", Address(beside.name) if beside else Address("reset state") if two_products else None),
            ("beside_d", (geometry.steps if beside else 1) * state),
            ("beside_t", state if beside else 0),
            ("states", Address("states") if persistent or geometry.steps > 1 else None),
            ("cells", Address("cell state") if geometry.steps > 1 and geometry.cell == "lstm" else None),
            ("counters", Address("counters") if persistent else None),
            ("activation", gate_activations(geometry)),
            ("default_gates", int(uses_default_gates(geometry))),
            ("clip", inf if geometry.clip is None else geometry.clip),
            ("steps", geometry.steps),
            ("batch", geometry.batch),
            ("inputs", geometry.inputs),
            ("hidden", geometry.hidden),
            ("step", chunk.first),
            ("count", max(chunk.count, 1)),
            ("first", tuple(first)),
            ("backward", [int(sign < 0) for sign in geometry.signs]),
            ("gates_per_unit", geometry.gates),
            ("is_candidate", int(two_products and (persistent or gates == 1))),
            ("keeps_gates", int(bool(kept_gates) or two_products)),
            ("input_forget", int(geometry.input_forget)),
            ("lengths_wide", int(lengths is not None and lengths.dtype == "int64")),
            ("weight_vector", _vector_bytes(problem.weight_hh)),
            ("weight_ih_vector", _vector_bytes(problem.weight_ih)),
            ("states_vectorized", int(geometry.hidden * ITEMSIZE[self.computed] % VECTOR_BYTES == 0)),
        )

    def _notes(self) -> tuple[str, ...]:
        weight = self.problem.weight_hh
        if _vector_bytes(weight) == VECTOR_BYTES:
            return ()
        access = "scalar access" if not _vector_bytes(weight) else f"{_vector_bytes(weight)}-byte access"
        return (f"{weight.name}: rows are not aligned multiples of {VECTOR_BYTES} bytes: {access}",)


def _buffer(name: str, nbytes: int) -> list[Buffer]:
    return [Buffer(name, nbytes)] if nbytes else []


def _vector_bytes(weight: Operand) -> int:
    """Return the bytes per vectorized access to the rows of a weight: 16, else max(4, item size), else 0."""
    for nbytes in (VECTOR_BYTES, max(4, weight.itemsize)):
        width = nbytes // weight.itemsize
        whole = all(number % width == 0 for number in (weight.shape[2], *weight.strides[:2]))
        if whole and weight.strides[2] == 1 and weight.alignment >= nbytes:
            return nbytes
    return 0


def _strided(operand: Operand | None) -> tuple[Any, ...] | None:
    """Return the fields of the C++ struct Strided; an array (directions, rows) has its rows along the last axis."""
    if operand is None:
        return None
    across = operand.strides[1] if len(operand.strides) == 3 else 0
    return address(operand), operand.strides[0], across, operand.strides[-1]


def room_for_waiting(gpu: GpuModel) -> int:
    """Return how many blocks may wait for each other: one per multiprocessor, or the known limit of the device."""
    return gpu.multiprocessors if gpu.room is None else gpu.room


def gate_activations(geometry: RecurrentGeometry) -> tuple[tuple[float, float, int], ...]:
    """Return the fields of the C++ struct GateActivation, three structs per direction."""
    each = [activation for group in geometry.activations for activation in (*group, IDENTITY, IDENTITY)[:3]]
    return tuple((*(activation.bounds or (activation.alpha, activation.beta)), activation.code) for activation in each)


def uses_default_gates(geometry: RecurrentGeometry) -> bool:
    """Return whether every gate has its default activation, and `clip` is None."""
    default = {"rnn": ("tanh",), "lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh")}[geometry.cell]
    each = {tuple(activation.name for activation in group) for group in geometry.activations}
    return each == {default} and geometry.clip is None


def _as_projection(step: Step) -> Step:
    """Return the step with the purpose that `explain` prints."""
    if isinstance(step, GemmCall) or (isinstance(step, KernelLaunch) and step.kernel.name == "implicit_gemm"):
        return replace(step, purpose="projection of the inputs")
    return step


def counters_from_zero(buffer: Buffer) -> KernelLaunch:
    """Return the launch that sets counters to 0, by storing float32 zeros, which have the same bits."""
    count = buffer.nbytes // ITEMSIZE["float32"]
    counters = Operand(buffer.name, "float32", (1, count, 1, 1, 1), (0, 1, 0, 0, 0))
    return replace(epilogue_launch(counters), purpose="counters set to 0")
