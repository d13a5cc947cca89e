"""How many blocks of a kernel a multiprocessor holds at a time: by registers, shared memory and threads.

Registers are what the compiler used, listed here and held against it by a test; the limits are those of the
CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import Kernel

#: Registers of a multiprocessor; bytes of its shared memory that a block takes beside what it asks for.
REGISTERS = 65536
RESERVED_SHARED = 1 << 10

#: (dtype, first layer, second layer) of conv_pair.cu -> registers per thread, the most on any architecture, in whole
#: pieces: a header's change that takes one more changes no occupancy.
CONV_PAIR_REGISTERS = {
    ("float16", "DENSE", "DENSE"): 128,
    ("float16", "DENSE", "DEPTHWISE"): 128,
    ("float16", "DEPTHWISE", "DENSE"): 80,
    ("float16", "DEPTHWISE", "DEPTHWISE"): 64,
    ("bfloat16", "DENSE", "DENSE"): 128,
    ("bfloat16", "DENSE", "DEPTHWISE"): 128,
    ("bfloat16", "DEPTHWISE", "DENSE"): 80,
    ("bfloat16", "DEPTHWISE", "DEPTHWISE"): 64,
    ("float32", "DENSE", "DENSE"): 128,
    ("float32", "DENSE", "DEPTHWISE"): 112,
    ("float32", "DEPTHWISE", "DENSE"): 80,
    ("float32", "DEPTHWISE", "DEPTHWISE"): 64,
    ("float64", "DENSE", "DENSE"): 120,
    ("float64", "DENSE", "DEPTHWISE"): 120,
    ("float64", "DEPTHWISE", "DENSE"): 112,
    ("float64", "DEPTHWISE", "DEPTHWISE"): 80,
}


def registers(kernel: Kernel) -> int:
    """Registers per thread of a variant of conv_pair.cu, in whole pieces of 8."""
    macros = dict(kernel.macros)
    return CONV_PAIR_REGISTERS[macros["DTYPE"], macros["FIRST"], macros["SECOND"]]


def resident_blocks(kernel: Kernel, threads: int, shared_bytes: int, gpu: GpuModel) -> int:
    """Blocks that share a multiprocessor; 0 where not even one has room."""
    if shared_bytes > gpu.shared_bytes:
        return 0
    reserved = RESERVED_SHARED if gpu.capability >= 80 else 0
    by_shared = (gpu.shared_bytes + reserved) // (shared_bytes + reserved)
    return min(REGISTERS // (threads * registers(kernel)), by_shared, _threads(gpu) // threads)


def _threads(gpu: GpuModel) -> int:
    """The most threads that a multiprocessor holds."""
    if gpu.capability < 80:
        return 1024
    return 1536 if gpu.capability in (86, 87, 89) or gpu.capability >= 120 else 2048
