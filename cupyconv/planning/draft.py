"""A method's proposal: its steps and workspace, and what they would cost."""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.machine import GpuModel
from cupyconv.plan import Buffer, GemmCall, KernelLaunch, Step

#: Share of the arithmetic rate that a kernel's inner loop reaches; the rest is loads and indices.
KERNEL_EFFICIENCY = {"merge": 0.6, "depthwise": 0.15, "direct": 0.06}

#: cuBLAS works in tiles of about this many rows and columns; what a matrix leaves of a tile is wasted.
GEMM_TILE = 64


@dataclass(frozen=True)
class Draft:
    """One way to do a problem."""

    method: str
    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    reason: str = ""

    @property
    def bytes_moved(self) -> int:
        return sum(step.bytes_moved for step in self.steps)

    def cost(self, gpu: GpuModel) -> Cost:
        """Seconds by the model: each step takes the larger of its memory and arithmetic times, and a launch."""
        memory = arithmetic = total = 0.0
        for step in self.steps:
            by_bytes = step.bytes_moved / gpu.bandwidth
            by_flops = _arithmetic_seconds(step, gpu)
            memory, arithmetic = memory + by_bytes, arithmetic + by_flops
            total += max(by_bytes, by_flops) + gpu.launch_seconds
        launches = len(self.steps) * gpu.launch_seconds
        bound = max((arithmetic, "arithmetic"), (memory, "memory"), (launches, "launch"))[1]
        return Cost(total, bound)


@dataclass(frozen=True)
class Cost:
    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:,.1f} µs by the model, bound by {self.bound}"


def _arithmetic_seconds(step: Step, gpu: GpuModel) -> float:
    if isinstance(step, KernelLaunch):
        dtype = dict(step.kernel.macros).get("Y_DTYPE", dict(step.kernel.macros).get("DTYPE", ""))
        rate = gpu.fp64 if dtype in ("float64", "complex128") else gpu.fp32
        return step.flops / (rate * KERNEL_EFFICIENCY.get(step.kernel.name, 1.0))
    assert isinstance(step, GemmCall)
    tiles_m, tiles_n = -(-step.m // GEMM_TILE), -(-step.n // GEMM_TILE)
    used = step.m * step.n / (tiles_m * tiles_n * GEMM_TILE**2)
    busy = min(1.0, tiles_m * tiles_n * step.batch / gpu.multiprocessors)
    return step.flops / (gpu.gemm_rate(step.dtype, step.compute) * used * busy)
