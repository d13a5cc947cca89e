"""A method's proposal: its steps and workspace, and what they would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cupyconv.cuda.plan.occupancy import resident_blocks
from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Address, Buffer, Conversion, GemmCall, KernelLaunch, LaunchLoop, Matrix, Plan, Step
from cupyconv.problem.problems import ChainProblem, ConvProblem, TransposedProblem, WeightGradientProblem
from cupyconv.problem.recurrence import RecurrentGradientProblem, RecurrentProblem

#: What is drafted, and chosen from, on a GPU.
DraftedProblem = (
    ConvProblem | ChainProblem | WeightGradientProblem | TransposedProblem | RecurrentProblem | RecurrentGradientProblem
)

#: Share of the arithmetic rate that a kernel's inner loop reaches; the rest is loads and indices.
KERNEL_EFFICIENCY = {
    "merge": 0.6,
    "depthwise": 0.15,
    "direct": 0.06,
    "transposed": 0.06,
    "weight_gradient": 0.06,
    "recurrent_gradient": 0.3,
}
#: The same of implicit_gemm, by its tile: a smaller one loads each element for fewer products.
TILE_EFFICIENCY = {"128": 0.8, "64": 0.6}
#: The same of conv_pair.cu, whose operands are loaded from shared memory: by the kind of layer.
PAIR_EFFICIENCY = {"DENSE": 0.5, "DEPTHWISE": 0.25}
#: What it takes to bring an element of x into its tile, and one of a weight into its place, in multiply-adds.
PAIR_X_LOAD, PAIR_WEIGHT_LOAD = 3, 20
#: How many times faster than memory the L2 cache is, from which tiles read again what their neighbours have read.
L2_SPEED = 2.5
#: Bytes that memory is read in.
SECTOR_BYTES = 32

#: The same of the recurrent kernels, by the samples of a thread.
RECURRENT_EFFICIENCY = {"1": 0.15, "4": 0.35, "8": 0.5}
#: Samples and units of their tiles (RecurrentTile of kernels/recurrent_tile.cuh).
RECURRENT_TILES = {"1": (4, 8), "4": (16, 8), "8": (32, 32)}
#: What it takes all blocks to wait for each other: an addition and a load that go to L2, one after the other.
BARRIER_SECONDS = 1.5e-6

#: Bytes of K in a block of implicit_gemm's sum (BLOCK_BYTES of kernels/warp_tile.cuh).
IMPLICIT_GEMM_BLOCK_BYTES = 64
#: cuBLAS works in tiles of about this many rows and columns; what a matrix leaves of a tile is wasted.
GEMM_TILE = 64


@dataclass(frozen=True)
class Draft:
    """One way to do a problem."""

    method: str
    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def bytes_moved(self) -> int:
        return sum(step.bytes_moved for step in self.steps)

    def cost(self, gpu: GpuModel) -> Cost:
        """Seconds by the model: each step takes the larger of its memory and arithmetic times, and a launch."""
        memory = arithmetic = total = 0.0
        launches = 0.0
        for step, times in self._repeated_steps():
            by_bytes = step.bytes_moved / gpu.bandwidth
            by_flops = _arithmetic_seconds(step, gpu)
            memory, arithmetic = memory + times * by_bytes, arithmetic + times * by_flops
            launches += times * gpu.launch_seconds
            total += times * (max(by_bytes, by_flops) + gpu.launch_seconds)
        bound = max((arithmetic, "arithmetic"), (memory, "memory"), (launches, "launch"))[1]
        return Cost(total, bound)

    def plan(
        self, problem: DraftedProblem, title: str, result: str, rejected: tuple[tuple[str, str], ...] = (),
        conversions: tuple[Conversion, ...] = (), notes: tuple[str, ...] = (),
    ) -> Plan:  # fmt: skip
        """The plan to run this for `problem`; `title` and `result` are words."""
        cost = self.cost(problem.gpu)
        return Plan(
            method=self.method, backend="cuda", device=str(problem.gpu), problem=title, result=result, steps=self.steps,
            flops=problem.flops, bytes_moved=self.bytes_moved, minimal_bytes=problem.minimal_bytes, bound=cost.bound,
            rejected=rejected, reason=f"{self.reason}; {cost}", notes=notes + self.notes, conversions=conversions,
            workspace=self.workspace,
        )  # fmt: skip

    def _repeated_steps(self) -> Iterator[tuple[Step, int]]:
        """What is enqueued, and how often."""
        for step in self.steps:
            if isinstance(step, LaunchLoop):
                yield from ((launch, step.times) for launch in step.launches)
            else:
                yield step, 1


def in_sequence(method: str, drafts: Sequence[Draft], reason: str) -> Draft:
    """One draft after the other, in the same workspace: a step has finished with it before the next begins."""
    steps: list[Step] = []
    most = 0
    for draft in drafts:
        places: dict[str, Address] = {}
        used = 0
        for buffer in draft.workspace:
            places[buffer.name] = Address("workspace", used)
            used += buffer.space
        steps += [relocated(step, places) for step in draft.steps]
        most = max(most, used)
    notes = tuple(dict.fromkeys(note for draft in drafts for note in draft.notes))
    return Draft(method, tuple(steps), (Buffer("workspace", most),) if most else (), reason, notes)


def relocated(value: Any, places: Mapping[str, Address]) -> Any:
    """A step, or a part of one, with every buffer in `places` at that place of another."""
    if isinstance(value, Address):
        place = places.get(value.buffer)
        return Address(place.buffer, place.offset + value.offset) if place else value
    if isinstance(value, tuple):
        return tuple(relocated(part, places) for part in value)
    if isinstance(value, KernelLaunch):
        return replace(value, params=relocated(value.params, places))
    if isinstance(value, Matrix):
        return replace(value, at=relocated(value.at, places))
    if isinstance(value, GemmCall):
        return replace(value, **{name: relocated(getattr(value, name), places) for name in ("a", "b", "c")})
    return value


@dataclass(frozen=True)
class Cost:
    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:,.1f} µs by the model, bound by {self.bound}"


def _arithmetic_seconds(step: Step, gpu: GpuModel) -> float:
    if isinstance(step, KernelLaunch):
        if step.kernel.name == "implicit_gemm":
            return _implicit_gemm_seconds(step, gpu)
        if step.kernel.name in ("recurrent_step", "recurrent_persistent"):
            return _recurrent_seconds(step, gpu)
        if step.kernel.name == "conv_pair":
            return _conv_pair_seconds(step, gpu)
        macros = dict(step.kernel.macros)
        rate = _fma_rate(macros.get("Y_DTYPE", macros.get("DTYPE", "")), gpu)
        return step.flops / (rate * KERNEL_EFFICIENCY.get(step.kernel.name, 1.0))
    assert isinstance(step, GemmCall)
    tiles_m, tiles_n = -(-step.m // GEMM_TILE), -(-step.n // GEMM_TILE)
    used = step.m * step.n / (tiles_m * tiles_n * GEMM_TILE**2)
    busy = min(1.0, tiles_m * tiles_n * step.batch / gpu.multiprocessors)
    return step.flops / (gpu.gemm_rate(step.dtype, step.compute) * used * busy)


def _implicit_gemm_seconds(step: KernelLaunch, gpu: GpuModel) -> float:
    """Whole rounds of whole tiles: every multiprocessor takes as long as the one with the most of them."""
    macros, params = dict(step.kernel.macros), dict(step.params)
    dtype, arithmetic, tile = macros["DTYPE"], macros["ARITHMETIC"], int(macros["TILE"])
    rate = {
        "FMA": _fma_rate(dtype, gpu),
        "MMA": gpu.gemm_rate(dtype, "float64" if dtype == "float64" else "float32") * gpu.mma_share,
        "TF32": gpu.tf32 * gpu.mma_share,
        "TF32X3": gpu.tf32 * gpu.mma_share / 3,
    }[arithmetic]
    blocks = step.grid[0] * step.grid[1]
    flops = 2 * tile * tile * params["a_split"] * (IMPLICIT_GEMM_BLOCK_BYTES // ITEMSIZE[dtype])
    rounds = -(-blocks // gpu.multiprocessors)
    return rounds * flops * gpu.multiprocessors / (rate * TILE_EFFICIENCY[macros["TILE"]])


def _recurrent_seconds(step: KernelLaunch, gpu: GpuModel) -> float:
    """Whole tiles, and in one launch of many steps the barriers between them."""
    macros, params = dict(step.kernel.macros), dict(step.params)
    samples, units = RECURRENT_TILES[macros["SAMPLES"]]
    columns, rows, directions = step.grid
    passes = -(-params["batch"] // (samples * rows))
    gates = params["gates_a_unit"] if step.cooperative else int(macros["GATES"])
    flops = passes * 2 * samples * units * gates * params["hidden"]
    seconds = products_seconds(columns * rows * directions, flops, macros, gpu)
    return params["count"] * (seconds + BARRIER_SECONDS) if step.cooperative else seconds


def products_seconds(blocks: int, flops: int, macros: Mapping[str, str], gpu: GpuModel) -> float:
    """What the recurrent products of a step take, `flops` in each block."""
    dtype = macros["DTYPE"]
    rate = {
        "FMA": _fma_rate(dtype, gpu),
        # Of two instructions for each product, one is for the part of the state that rounding would lose.
        "MMA": gpu.gemm_rate(dtype, "float32") * gpu.mma_share / 2,
        "TF32": gpu.tf32 * gpu.mma_share,
    }[macros["ARITHMETIC"]]
    rounds = -(-blocks // gpu.multiprocessors)
    return rounds * flops * gpu.multiprocessors / (rate * RECURRENT_EFFICIENCY[macros["SAMPLES"]])


def _conv_pair_seconds(step: KernelLaunch, gpu: GpuModel) -> float:
    """Whole rounds of whole tiles, with all that is computed twice or for nothing.

    A block loads and computes in turn; others of its multiprocessor fill the gaps, where there are others.
    """
    macros, params = dict(step.kernel.macros), dict(step.params)
    dtype, kinds = macros["DTYPE"], (macros["FIRST"], macros["SECOND"])
    itemsize, on_tensor_cores = ITEMSIZE[dtype], ITEMSIZE[dtype] == 2
    fma = _fma_rate(dtype, gpu)
    dense = gpu.gemm_rate(dtype, "float32") * gpu.mma_share if on_tensor_cores else fma
    k_step, rows = (16, 16) if on_tensor_cores else (16 // itemsize, 64 // itemsize)
    group = 128 if on_tensor_cores else 64  # pixels that are computed together

    channels = sum(_whole(count, k_step) for _, _, count in params["sources"])
    middle, outputs = params["middle"], params["outputs"]
    x_tile, columns = params["x_tile"][0], step.grid[1]
    x_pixels, x_rows = prod(x_tile), prod(x_tile[:2])
    layers = (
        (kinds[0], prod(params["middle_tile"][0]), columns * _whole(middle, rows), channels, params["first"]),
        (kinds[1], prod(params["tile"][0]), _whole(outputs, rows), _whole(middle, k_step), params["second"]),
    )
    a_tile = columns * x_pixels * channels * 2 * PAIR_X_LOAD / gpu.fp32
    weights = 0
    for kind, pixels, its_outputs, its_channels, (windows, *_) in layers:
        taps = prod(windows[2])
        if kind == "DENSE":
            a_tile += 2 * _whole(pixels, group) * its_outputs * its_channels * taps / (dense * PAIR_EFFICIENCY[kind])
            weights += its_outputs * its_channels * taps
        else:
            a_tile += 2 * pixels * its_outputs * taps / (fma * PAIR_EFFICIENCY[kind])
            weights += its_outputs * taps
    rounds = -(-params["blocks"] // step.grid[0])
    blocks = step.grid[0] * columns
    busy = -(-blocks // gpu.multiprocessors) * gpu.multiprocessors / blocks  # the fullest multiprocessor's share
    seconds = busy * step.grid[0] * (rounds * a_tile + weights * 2 * PAIR_WEIGHT_LOAD / gpu.fp32)
    read = columns * channels * (_whole(x_tile[2] * itemsize, SECTOR_BYTES) * x_rows) * params["blocks"]
    loading = max(step.bytes_moved / gpu.bandwidth, read / (gpu.bandwidth * L2_SPEED))
    alone = resident_blocks(step.kernel, step.block, step.shared_bytes, gpu) == 1
    return seconds + loading if alone else max(seconds, loading)


def _whole(count: int, piece: int) -> int:
    return -(-count // piece) * piece


def _fma_rate(dtype: str, gpu: GpuModel) -> float:
    return gpu.fp64 if dtype in ("float64", "complex128") else gpu.fp32
