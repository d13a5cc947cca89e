"""A method's proposal: its steps and workspace, and what they would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cupyconv.dtypes import ITEMSIZE
from cupyconv.machine import GpuModel
from cupyconv.plan import Address, Buffer, GemmCall, KernelLaunch, LaunchLoop, Matrix, Plan, Step

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

    def _repeated_steps(self) -> Iterator[tuple[Step, int]]:
        """What is enqueued, and how often."""
        for step in self.steps:
            if isinstance(step, LaunchLoop):
                yield from ((launch, step.times) for launch in step.launches)
            else:
                yield step, 1


def in_turn(method: str, drafts: Sequence[Draft], reason: str) -> Draft:
    """One draft after the other, in the same workspace: a step has finished with it before the next begins."""
    steps: list[Step] = []
    most = 0
    for draft in drafts:
        places: dict[str, Address] = {}
        used = 0
        for buffer in draft.workspace:
            places[buffer.name] = Address("workspace", used)
            used += -(-buffer.nbytes // Plan.ALIGNMENT) * Plan.ALIGNMENT
        steps += [moved(step, places) for step in draft.steps]
        most = max(most, used)
    notes = tuple(dict.fromkeys(note for draft in drafts for note in draft.notes))
    return Draft(method, tuple(steps), (Buffer("workspace", most),) if most else (), reason, notes)


def moved(value: Any, places: Mapping[str, Address]) -> Any:
    """A step, or a part of one, with every buffer in `places` at that place of another."""
    if isinstance(value, Address):
        place = places.get(value.buffer)
        return Address(place.buffer, place.offset + value.offset) if place else value
    if isinstance(value, tuple):
        return tuple(moved(part, places) for part in value)
    if isinstance(value, KernelLaunch):
        return replace(value, params=moved(value.params, places))
    if isinstance(value, Matrix):
        return replace(value, at=moved(value.at, places))
    if isinstance(value, GemmCall):
        return replace(value, **{name: moved(getattr(value, name), places) for name in ("a", "b", "c")})
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


def _fma_rate(dtype: str, gpu: GpuModel) -> float:
    return gpu.fp64 if dtype in ("float64", "complex128") else gpu.fp32
