"""The cost model: an unmeasured estimate of the seconds that a step takes on a GPU, used to rank drafts.

The estimated time of a step is the larger of its memory and arithmetic times, plus one launch.  A kernel launch stores
its own arithmetic time: the planner of the launch knows the tiles and computes the time with the functions of this
file.  For GEMM calls and transforms, this file computes it from the sizes.

The rates of a GPU come from `machine`.  The constants are defined only here, and **no GPU has measured them**: they are
estimates from the kernels' inner loops, good enough to rank drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupyconv.cuda.plan.launches import WARP
from cupyconv.problem.arrays import Operand
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import GemmCall, KernelLaunch, Step, Transform

# Unmeasured: the share of the arithmetic rate that a kernel's inner loop reaches; the rest is loads and index
# arithmetic.

MERGE, DEPTHWISE, RECURRENT_GRADIENT = 0.6, 0.15, 0.3
#: direct.cu, transposed.cu and weight_gradient.cu, the general kernels.
GENERAL = 0.06
#: implicit_gemm.cu, by tile: a warp with a smaller part loads each fragment for fewer products.
IMPLICIT_GEMM = {(64, 64): 0.6, (128, 128): 0.8, (64, 256): 0.85, (128, 256): 0.85}
#: Instructions that a warp of implicit_gemm.cu issues per K-slab, by arithmetic, bytes per element, gather and tile.
#: They are counted in the machine code for sm_90, along the most frequent path; the present code is within an eighth of
#: them (tests/test_machine_code.py).
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
#: implicit_weight_gradient.cu, by tile.
IMPLICIT_WEIGHT_GRADIENT = {(64, 128): 0.6, (128, 128): 0.7}
#: conv_pair.cu, which loads its operands from shared memory, by the kind of layer.
PAIR = {"DENSE": 0.5, "DEPTHWISE": 0.25}
#: The recurrent kernels, by samples per thread.
RECURRENT = {1: 0.15, 4: 0.35, 8: 0.5}

#: Instructions that a warp of recurrent_gradient_persistent.cu issues to multiply one gate of its block's 8 units for
#: the 8 units of another block, by arithmetic and bytes per element of the weight, counted as above.
GRADIENT_ISSUED = {("TF32X3", 2): 23, ("TF32X3", 4): 32, ("FMA", 2): 55, ("FMA", 4): 53, ("FMA", 8): 61}

# Unmeasured: work in addition to the products.

#: Cost for conv_pair.cu to load one element of x into its tile, and one element of a weight, in multiply-adds.
PAIR_X_LOAD, PAIR_WEIGHT_LOAD = 3, 20
#: Cost for col2im.cu and transposed.cu to find the windows that read an element, by divisions, and for col2im.cu to
#: read one element of the columns, in multiply-adds.
READERS_PLACE, COL2IM_READ = 600, 10
#: Cost for finish_tiles.cu and tiles.cu to find the position of an element, by divisions, in multiply-adds.
TILE_PLACE = 60
#: cuFFT: the share of the memory bandwidth that each axis of a transform reaches, for images stored one after the other
#: and for interleaved images.
TRANSFORM, INTERLEAVED_TRANSFORM = 0.4, 0.25
#: Factor on the estimated time of a convolution by transforms: "auto" picks the method only if it wins by far.
TRANSFORMS_DOUBT = 2
#: Memory bandwidth that one multiprocessor can use while others are idle, as a multiple of its even share.
BANDWIDTH_PER_MULTIPROCESSOR = 4
#: L2 bandwidth as a multiple of the memory bandwidth.  Tiles read again from L2 what their neighbours have read.
L2_SPEED = 2.5
#: Bytes per second that each multiprocessor reads from L2 while all of them read: the order of magnitude of published
#: figures for sm_80 to sm_90.
L2_PER_MULTIPROCESSOR = 40e9
#: Warp instructions that a multiprocessor issues per clock, and the share of clocks in which shared memory reads or
#: writes a line of `SHARED_LINE` bytes while several warps compete for it.
ISSUED_PER_CLOCK, SHARED_MEMORY, SHARED_LINE = 4, 0.65, 128
#: Time of a barrier of all blocks: an atomic addition and a load, one after the other, both in L2.
BARRIER_SECONDS = 1.5e-6
#: Host time of a repeated call, and additional host time per kernel and per product or transform.  Measured with CuPy
#: 14 on a driver that does nothing, on a server processor (``python -m tests.fake_gpu tests/benchmarks/host_time.py``:
#: 11 µs with one kernel, 17 with a kernel and a product, 19 with one more kernel).  The time of the driver and of
#: cuBLAS comes on top.
HOST_CALL, HOST_KERNEL, HOST_PRODUCT = 9e-6, 2e-6, 6e-6
#: cuBLAS works in tiles of about this many rows and columns; the part of a tile outside the matrix is wasted.
GEMM_TILE = 64


@dataclass(frozen=True)
class Cost:
    seconds: float
    bound: str

    def __str__(self) -> str:
        return f"{by_model(self.seconds)}, bound by {self.bound}"


def by_model(seconds: float) -> str:
    """Format a time with two significant digits, the accuracy of the model."""
    microseconds = float(f"{seconds * 1e6:.1e}")
    return f"estimated {microseconds:,.{0 if microseconds >= 10 else 1}f} µs (model not yet measured on a GPU)"


def on_the_host(seconds: float) -> str:
    """Format the host time of a call, also with two significant digits."""
    return f"host overhead {float(f'{seconds * 1e6:.1e}'):,.0f} µs plus driver"


def core_rate(dtype: str, gpu: GpuModel) -> float:
    """Operations per second of CUDA cores that multiply and add numbers of a dtype; 16-bit numbers count as float32."""
    return gpu.fp64 if dtype in ("float64", "complex128") else gpu.fp32


def product_rate(arithmetic: str, dtype: str, gpu: GpuModel) -> float:
    """Operations per second of an arithmetic of kernels/warp_tile.cuh."""
    if arithmetic == "FMA":
        return core_rate(dtype, gpu)
    if arithmetic == "MMA":
        if dtype == "float64":  # cuBLAS uses mma.sync for doubles too: no `mma_share`
            return gpu.gemm_rate(dtype, "float64")
        return gpu.gemm_rate(dtype, "float32") * gpu.mma_share
    return gpu.tf32 * gpu.mma_share / {"TF32": 1, "TF32X3": 3}[arithmetic]


def priced(launch: KernelLaunch, rate: float, gpu: GpuModel, *, beside: float = 0) -> KernelLaunch:
    """Return the launch with its arithmetic time at `rate` operations per second of the whole GPU.

    The time grows if there are fewer blocks than multiprocessors.  `beside` counts additional multiply-adds, such as
    those that compute positions.
    """
    busy = min(1.0, launch.blocks / gpu.multiprocessors)
    return replace(launch, arithmetic_seconds=(launch.flops / rate + 2 * beside / gpu.fp32) / busy)


def issue_rate(gpu: GpuModel) -> float:
    """Warp instructions that the GPU issues per second.

    A multiprocessor issues for as many threads per clock as it has float32 lanes; up to sm_80, for twice as many.
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
    """Estimated time of equal blocks in whole rounds: the time of the multiprocessor that has the most blocks.

    The time of a block is the longest of four times: its operations at `rate`, its bytes from L2, the instructions that
    its warps issue, and the lines that it reads from and writes to shared memory.
    """
    rounds = -(-blocks // gpu.multiprocessors)
    operations = operations_per_block * gpu.multiprocessors / rate
    issued_seconds = issued * gpu.multiprocessors / issue_rate(gpu)
    lines_seconds = gpu.multiprocessors * shared_memory_seconds(shared_lines, gpu)
    return rounds * max(operations, issued_seconds, lines_seconds, l2_bytes / L2_PER_MULTIPROCESSOR)


def shared_memory_seconds(lines: float, gpu: GpuModel) -> float:
    """Time to move lines to and from shared memory or the L1 cache, spread evenly over all multiprocessors."""
    return lines / (issue_rate(gpu) / ISSUED_PER_CLOCK * SHARED_MEMORY)


def lines_of(image: Operand, step: int = 1) -> int:
    """Lines that a warp touches if its threads read every `step`-th pixel along the rows of an image."""
    return max(1, min(WARP, WARP * abs(image.strides[4]) * step * image.itemsize // SHARED_LINE))


def memory_seconds(step: Step, gpu: GpuModel) -> float:
    """Time to move the bytes of a step; a few multiprocessors cannot use the whole memory bandwidth."""
    if isinstance(step, Transform):
        return step.bytes_moved / (gpu.bandwidth * (INTERLEAVED_TRANSFORM if step.interleaved else TRANSFORM))
    blocks = step.blocks if isinstance(step, KernelLaunch) else gpu.multiprocessors
    return step.bytes_moved / (gpu.bandwidth * min(1.0, blocks * BANDWIDTH_PER_MULTIPROCESSOR / gpu.multiprocessors))


def arithmetic_seconds(step: Step, gpu: GpuModel) -> float:
    """Time of the arithmetic of a step."""
    if isinstance(step, KernelLaunch):
        return step.arithmetic_seconds
    if isinstance(step, Transform):
        return step.flops / (core_rate(step.dtype, gpu) * TRANSFORM)
    assert isinstance(step, GemmCall)
    tiles_m, tiles_n = -(-step.m // GEMM_TILE), -(-step.n // GEMM_TILE)
    used = step.m * step.n / (tiles_m * tiles_n * GEMM_TILE**2)
    busy = min(1.0, tiles_m * tiles_n * step.batch / gpu.multiprocessors)
    return step.flops / (gpu.gemm_rate(step.dtype, step.compute) * used * busy)
