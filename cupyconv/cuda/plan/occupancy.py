"""Occupancy: how many blocks of a kernel fit a multiprocessor, by registers, shared memory and threads.

The register counts are those of the compiler; a test compares this list with the compiled kernels.  The limits come
from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Kernel

#: Registers of a multiprocessor; granularity of registers per thread; bytes of shared memory reserved per block in
#: addition to what the block asks for.
REGISTERS, PIECE = 65536, 8
RESERVED_SHARED = 1 << 10
#: Threads that keep a multiprocessor busy: two warps for each of its four schedulers, so that one works while the other
#: waits.
BUSY_THREADS = 256

#: First and second layer of conv_pair.cu -> registers per thread by arithmetic and bytes per element, in whole pieces.
#: Both numbers are the maximum that NVRTC 12.9 and 13 used: on architectures up to sm_90, and on later ones, whose
#: assembler uses more.
CONV_PAIR_REGISTERS = {
    ("DENSE", "DENSE"): {
        "MMA 2": (120, 128), "TF32 4": (120, 128), "TF32X3 4": (104, 112), "FMA 4": (128, 128), "FMA 8": (120, 120)
    },
    ("DENSE", "DEPTHWISE"): {
        "MMA 2": (120, 128), "TF32 4": (80, 88), "TF32X3 4": (112, 104), "FMA 4": (96, 104), "FMA 8": (104, 112)
    },
    ("DEPTHWISE", "DENSE"): {
        "MMA 2": (80, 80), "TF32 4": (80, 80), "TF32X3 4": (104, 128), "FMA 4": (80, 80), "FMA 8": (96, 112)
    },
    ("DEPTHWISE", "DEPTHWISE"): {"MMA 2": (64, 64), "FMA 4": (64, 64), "FMA 8": (64, 72)},
}  # fmt: skip


def registers(kernel: Kernel, gpu: GpuModel) -> int:
    """Return the registers per thread of a variant of conv_pair.cu, in whole pieces of 8."""
    macros = dict(kernel.macros)
    of_layers = CONV_PAIR_REGISTERS[macros["FIRST"], macros["SECOND"]]
    return of_layers[f"{macros['ARITHMETIC']} {ITEMSIZE[macros['DTYPE']]}"][gpu.capability >= 100]


def resident_blocks(kernel: Kernel, threads: int, shared_bytes: int, gpu: GpuModel) -> int:
    """Return how many blocks of a variant of conv_pair.cu fit a multiprocessor; 0 if not even one fits."""
    return blocks_that_fit(registers(kernel, gpu), threads, shared_bytes, gpu)


def blocks_that_fit(registers: int, threads: int, shared_bytes: int, gpu: GpuModel) -> int:
    """Return how many blocks with these registers per thread fit a multiprocessor; 0 if not even one fits."""
    if shared_bytes > gpu.shared_bytes:
        return 0
    reserved = RESERVED_SHARED if gpu.capability >= 80 else 0
    by_shared = (gpu.shared_bytes + reserved) // (shared_bytes + reserved)
    by_registers = REGISTERS // (threads * (-(-registers // PIECE) * PIECE))
    return min(by_registers, by_shared, _threads(gpu) // threads)


def _threads(gpu: GpuModel) -> int:
    """Return the maximum number of resident threads per multiprocessor."""
    if gpu.capability < 80:
        return 1024
    return 1536 if gpu.capability in (86, 87, 89) or gpu.capability >= 120 else 2048
