"""The cost model: an unmeasured estimate of the seconds that a step takes on a GPU, to rank one draft against another.

A step takes the longer of what its bytes and its arithmetic take, and a launch.  A kernel launch says itself what its
arithmetic takes: whoever plans it knows its tiles, and works that out with the functions here.  Of a GEMM call, and of a
transform, the sizes tell.

The rates of a GPU are those of `machine`.  The constants are of this page alone, and **no GPU has measured them**: they are
estimates from the kernels' inner loops, good for an order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyconv.cuda.plan.launches import WARP
from cupyconv.problem.arrays import Operand
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import GemmCall, KernelLaunch, Step, Transform

# Unmeasured: shares of the arithmetic rate that a kernel's inner loop reaches; the rest is loads and indices.

MERGE, DEPTHWISE, RECURRENT_GRADIENT = 0.6, 0.15, 0.3
#: direct.cu, transposed.cu and weight_gradient.cu, which are for everything.
GENERAL = 0.06
#: implicit_gemm.cu, by its tile: where a warp's part is smaller, it loads each fragment for fewer products.
IMPLICIT_GEMM = {(64, 64): 0.6, (128, 128): 0.8, (64, 256): 0.85, (128, 256): 0.85}
#: What a warp of implicit_gemm.cu issues for a K-slab, by arithmetic, bytes of an element, gather and tile: counted in its
#: machine code for sm_90, on the way that is nearly always taken; today's is within an eighth of it (tests/test_machine_code.py).
ISSUED = {
    ("MMA", 2, "ALONG_PIXELS"): {(64, 64): 303, (128, 128): 250},
    ("MMA", 2, "PIXEL_CHUNKS"): {(64, 64): 100, (128, 128): 134, (64, 256): 185, (128, 256): 180},
    ("MMA", 2, "ALONG_CHANNELS"): {(64, 64): 93, (128, 128): 110, (64, 256): 185, (128, 256): 161},
    ("TF32", 4, "ALONG_PIXELS"): {(64, 64): 156, (128, 128): 182},
    ("TF32", 4, "PIXEL_CHUNKS"): {(64, 64): 128, (128, 128): 148, (64, 256): 262, (128, 256): 242},
    ("TF32", 4, "ALONG_CHANNELS"): {(64, 64): 124, (128, 128): 142, (64, 256): 249, (128, 256): 225},
    ("TF32X3", 4, "ALONG_PIXELS"): {(64, 64): 467, (128, 128): 594},
    ("TF32X3", 4, "PIXEL_CHUNKS"): {(64, 64): 413, (128, 128): 536},
    ("TF32X3", 4, "ALONG_CHANNELS"): {(64, 64): 398, (128, 128): 532},
    ("TF32X3", 8, "ALONG_PIXELS"): {(64, 64): 553},
    ("TF32X3", 8, "PIXEL_CHUNKS"): {(64, 64): 507},
    ("TF32X3", 8, "ALONG_CHANNELS"): {(64, 64): 517},
    ("MMA", 8, "ALONG_PIXELS"): {(64, 64): 167, (128, 128): 201},
    ("MMA", 8, "PIXEL_CHUNKS"): {(64, 64): 102, (128, 128): 144},
    ("MMA", 8, "ALONG_CHANNELS"): {(64, 64): 123, (128, 128): 157},
    ("FMA", 4, "ALONG_PIXELS"): {(64, 64): 649, (128, 128): 1179},
    ("FMA", 4, "PIXEL_CHUNKS"): {(64, 64): 615, (128, 128): 1143},
    ("FMA", 4, "ALONG_CHANNELS"): {(64, 64): 677, (128, 128): 1171},
    ("FMA", 8, "ALONG_PIXELS"): {(64, 64): 394},
    ("FMA", 8, "PIXEL_CHUNKS"): {(64, 64): 353},
    ("FMA", 8, "ALONG_CHANNELS"): {(64, 64): 412},
}
#: implicit_weight_gradient.cu, by its tile.
IMPLICIT_WEIGHT_GRADIENT = {(64, 128): 0.6, (128, 128): 0.7}
#: conv_pair.cu, whose operands are loaded from shared memory: by the kind of layer.
PAIR = {"DENSE": 0.5, "DEPTHWISE": 0.25}
#: The recurrent kernels, by the samples of a thread.
RECURRENT = {1: 0.15, 4: 0.35, 8: 0.5}

#: What a warp of recurrent_gradient_persistent.cu issues for one gate of 8 units and another block's 8, by arithmetic and
#: bytes of an element of the weight, counted as above.
GRADIENT_ISSUED = {("TF32X3", 2): 23, ("TF32X3", 4): 32, ("FMA", 2): 55, ("FMA", 4): 53, ("FMA", 8): 61}

# Unmeasured: what lies beside the products.

#: What it takes conv_pair.cu to bring an element of x into its tile, and one of a weight into its place, in multiply-adds.
PAIR_X_LOAD, PAIR_WEIGHT_LOAD = 3, 20
#: What it takes col2im.cu and transposed.cu to find which windows read an element, with divisions, in multiply-adds; and
#: col2im.cu to read it once.
READERS_PLACE, COL2IM_READ = 600, 10
#: finish_tiles.cu and tiles.cu: what it takes to find where an element lies, with divisions, in multiply-adds.
TILE_PLACE = 60
#: cuFFT: the share of the memory's bandwidth that each axis of a transform reaches, where images lie one after the other and
#: where they are interleaved.
TRANSFORM, INTERLEAVED_TRANSFORM = 0.4, 0.25
#: How many times as long as that a convolution by transforms counts for: it is taken where it wins by far.
TRANSFORMS_DOUBT = 2
#: How many times its even share of the memory's bandwidth a multiprocessor gets where others are idle.
BANDWIDTH_PER_MULTIPROCESSOR = 4
#: How many times faster than memory the L2 cache is, from which tiles read again what their neighbours have read.
L2_SPEED = 2.5
#: Bytes a second that L2 gives each multiprocessor while all of them ask: the order of what is published of sm_80 to
#: sm_90.
L2_PER_MULTIPROCESSOR = 40e9
#: Warps' instructions that a multiprocessor issues a clock; and the share of its clocks in which shared memory, from which
#: several warps want different things, gives or takes a line of `SHARED_LINE` bytes.
ISSUED_PER_CLOCK, SHARED_MEMORY, SHARED_LINE = 4, 0.65, 128
#: What it takes all blocks to wait for each other: an addition and a load that go to L2, one after the other.
BARRIER_SECONDS = 1.5e-6
#: What a repeated call takes the host, and beside that each kernel and each product or transform in it: by CuPy 14 on a driver that
#: does nothing, on a server's processor (``python -m tests.fake_gpu tests/benchmarks/host_time.py``: 11 µs with one kernel, 17
#: with a kernel and a product, 19 with one more kernel).  The driver's and cuBLAS's own time comes on top.
HOST_CALL, HOST_KERNEL, HOST_PRODUCT = 9e-6, 2e-6, 6e-6
#: cuBLAS works in tiles of about this many rows and columns; what a matrix leaves of a tile is wasted.
GEMM_TILE = 64


@dataclass(frozen=True)
class Cost:
    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{by_model(self.seconds)}, bound by {self.bound}"


def by_model(seconds: float) -> str:
    """A time with the two digits that the model deserves."""
    microseconds = float(f"{seconds * 1e6:.1e}")
    return f"{microseconds:,.{0 if microseconds >= 10 else 1}f} µs by an unmeasured model"


def on_the_host(seconds: float) -> str:
    """The host's time of a call, with as many digits."""
    return f"the host takes {float(f'{seconds * 1e6:.1e}'):,.0f} µs and the driver's time"


def core_rate(dtype: str, gpu: GpuModel) -> float:
    """Operations a second of CUDA cores that multiply and add numbers of a dtype, 16-bit ones in float32."""
    return gpu.fp64 if dtype in ("float64", "complex128") else gpu.fp32


def product_rate(arithmetic: str, dtype: str, gpu: GpuModel) -> float:
    """Operations a second of products by an arithmetic of kernels/warp_tile.cuh."""
    if arithmetic == "FMA":
        return core_rate(dtype, gpu)
    if arithmetic == "MMA":
        if dtype == "float64":  # for doubles there is mma.sync alone, and cuBLAS has no other
            return gpu.gemm_rate(dtype, "float64")
        return gpu.gemm_rate(dtype, "float32") * gpu.mma_share
    return gpu.tf32 * gpu.mma_share / {"TF32": 1, "TF32X3": 3}[arithmetic]


def priced(launch: KernelLaunch, rate: float, gpu: GpuModel, *, beside: float = 0) -> KernelLaunch:
    """The launch with what its arithmetic takes at this rate of a whole GPU, a part of which its blocks may leave idle.

    Multiply-adds that it takes to find places come `beside`.
    """
    busy = min(1.0, launch.blocks / gpu.multiprocessors)
    return replace(launch, arithmetic_seconds=(launch.flops / rate + 2 * beside / gpu.fp32) / busy)


def issue_rate(gpu: GpuModel) -> float:
    """Instructions of warps a second.

    As many threads as those have lanes that multiply and add float32, or, up to sm_80, half as many.
    """
    return gpu.fp32 / 2 / WARP * (2 if gpu.capability <= 80 else 1)


def seconds_in_rounds(
    blocks: int,
    operations_per_block: float,
    rate: float,
    gpu: GpuModel,
    *,
    l2_bytes: float = 0,
    issued: float = 0,
    shared_lines: float = 0,
) -> float:
    """Whole rounds of whole blocks: every multiprocessor takes as long as the one with the most of them.

    A block takes the longest of its operations, of what it asks L2 for, of the instructions that its warps issue, and of
    the lines that go to and from shared memory, where one takes a clock.
    """
    rounds = -(-blocks // gpu.multiprocessors)
    operations = operations_per_block * gpu.multiprocessors / rate
    issued_seconds = issued * gpu.multiprocessors / issue_rate(gpu)
    lines_seconds = gpu.multiprocessors * shared_memory_seconds(shared_lines, gpu)
    return rounds * max(operations, issued_seconds, lines_seconds, l2_bytes / L2_PER_MULTIPROCESSOR)


def shared_memory_seconds(lines: float, gpu: GpuModel) -> float:
    """What lines to and from shared memory or the L1 cache take, evenly on all multiprocessors."""
    return lines / (issue_rate(gpu) / ISSUED_PER_CLOCK * SHARED_MEMORY)


def lines_of(image: Operand, step: int = 1) -> int:
    """Lines that a warp touches where its threads read every `step`-th neighbour along an image's rows."""
    return max(1, min(WARP, WARP * abs(image.strides[4]) * step * image.itemsize // SHARED_LINE))


def memory_seconds(step: Step, gpu: GpuModel) -> float:
    """What the bytes of a step take: few multiprocessors do not get all of the memory's bandwidth."""
    if isinstance(step, Transform):
        return step.bytes_moved / (gpu.bandwidth * (INTERLEAVED_TRANSFORM if step.interleaved else TRANSFORM))
    blocks = step.blocks if isinstance(step, KernelLaunch) else gpu.multiprocessors
    return step.bytes_moved / (gpu.bandwidth * min(1.0, blocks * BANDWIDTH_PER_MULTIPROCESSOR / gpu.multiprocessors))


def arithmetic_seconds(step: Step, gpu: GpuModel) -> float:
    """What the arithmetic of a step takes."""
    if isinstance(step, KernelLaunch):
        return step.arithmetic_seconds
    if isinstance(step, Transform):
        return step.flops / (core_rate(step.dtype, gpu) * TRANSFORM)
    assert isinstance(step, GemmCall)
    tiles_m, tiles_n = -(-step.m // GEMM_TILE), -(-step.n // GEMM_TILE)
    used = step.m * step.n / (tiles_m * tiles_n * GEMM_TILE**2)
    busy = min(1.0, tiles_m * tiles_n * step.batch / gpu.multiprocessors)
    return step.flops / (gpu.gemm_rate(step.dtype, step.compute) * used * busy)
