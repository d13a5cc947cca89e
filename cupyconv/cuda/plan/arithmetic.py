"""The arithmetics of products on a GPU: CUDA cores, or tensor cores in a number format that depends on the dtype."""

from __future__ import annotations

from cupyconv.problem.machine import GpuModel

#: Oldest architecture with matrix instructions for a dtype.
FIRST_MMA = {"float16": 75, "bfloat16": 80, "float32": 80, "float64": 80, "complex64": 80}
#: Arithmetic -> its name in `explain`; complex64 has a name of its own.
WORDS = {
    "FMA": "CUDA cores",
    "MMA": "tensor cores",
    "TF32": "tensor cores, TF32",
    "TF32X3": "tensor cores, each float32 product as three TF32 products",
    "complex64": "tensor cores, each complex product as three real products of three TF32 products each",
}


def arithmetics(dtype: str, gpu: GpuModel, allow_tf32: bool) -> tuple[str, ...]:
    """Return the arithmetics that the GPU has for products of a dtype, named as in kernels/warp_tile.cuh."""
    if dtype == "float32" and gpu.capability >= FIRST_MMA[dtype]:
        return ("TF32",) if allow_tf32 else ("FMA", "TF32X3")
    if dtype == "float64" and gpu.capability >= FIRST_MMA[dtype]:
        return ("FMA", "MMA")
    if dtype in ("float32", "float64"):
        return ("FMA",)
    if dtype == "complex64":  # always: with TF32 alone, its additions would dominate
        return ("TF32X3",) if gpu.capability >= FIRST_MMA[dtype] else ()
    return ("MMA",) if dtype in FIRST_MMA and gpu.capability >= FIRST_MMA[dtype] else ()
