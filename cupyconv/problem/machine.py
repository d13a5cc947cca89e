"""What planning knows of a processor: how wide it is, and rates that rank methods.

The rates of a GPU class are vendors' datasheet figures scaled by the fraction that well-written code
reaches; they rank methods against each other and predict no time.  Source: NVIDIA's data sheets of
the products named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

#: Shared memory that a block may have, in KiB, from a compute capability on (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability").
_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}


@dataclass(frozen=True)
class GpuModel:
    """One class of GPU.  Rates per second: bytes, and operations (a multiply-add is two).

    `mma_share` is how much of cuBLAS's tensor-core rates kernels written with ``mma.sync`` can reach: on
    newer architectures only instructions of their own reach all of it.

    `room` is for how many blocks of a cooperative launch a device turned out to have room at once, where a launch was
    refused; until then one is planned for each multiprocessor.  `has_transforms` is false where cuFFT turned out to be
    missing; `transform_area` is how many times the bytes of its spectra a transform has needed to work in.
    """

    #: The backend that runs what is planned for it.
    backend: ClassVar[str] = "cuda"

    name: str
    arch: str
    multiprocessors: int
    bandwidth: float
    fp32: float
    fp64: float
    gemm16: float
    tf32: float
    gemm64: float
    mma_share: float
    launch_seconds: float = 3e-6
    room: int | None = None
    has_transforms: bool = True
    transform_area: float = 1.0

    def __str__(self) -> str:
        return f"{self.name}, {self.arch}"

    @property
    def capability(self) -> int:
        """Compute capability as in the architecture's name: 90 for sm_90."""
        return int(self.arch[3:])

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may ask for."""
        known = [capability for capability in _SHARED_KIB if capability <= max(75, self.capability)]
        return _SHARED_KIB[max(known)] << 10

    def gemm_rate(self, dtype: str, compute: str) -> float:
        """What a large cuBLAS GEMM of these operands runs at."""
        if compute == "tf32":
            return self.tf32
        if compute == "float64":
            return self.gemm64
        return self.gemm16 if dtype in ("float16", "bfloat16") else 0.8 * self.fp32


_T = 1e12

#: One representative product per compute capability, for planning without the GPU at hand.
KNOWN_GPUS = {
    gpu.arch: gpu
    for gpu in (
        GpuModel("T4", "sm_75", 40, 0.28 * _T, 7.0 * _T, 0.2 * _T, 40 * _T, 7.0 * _T, 0.2 * _T, 0.9),
        GpuModel("A100", "sm_80", 108, 1.4 * _T, 17 * _T, 9 * _T, 230 * _T, 110 * _T, 17 * _T, 0.9),
        GpuModel("A10", "sm_86", 72, 0.5 * _T, 25 * _T, 0.4 * _T, 90 * _T, 45 * _T, 0.4 * _T, 0.9),
        GpuModel("L40", "sm_89", 142, 0.75 * _T, 65 * _T, 1.0 * _T, 150 * _T, 75 * _T, 1.0 * _T, 0.9),
        GpuModel("H200", "sm_90", 132, 4.2 * _T, 55 * _T, 28 * _T, 650 * _T, 330 * _T, 55 * _T, 0.6),
        GpuModel("B200", "sm_100", 148, 7.0 * _T, 65 * _T, 32 * _T, 1500 * _T, 750 * _T, 32 * _T, 0.3),
        GpuModel("RTX 5090", "sm_120", 170, 1.6 * _T, 90 * _T, 1.4 * _T, 190 * _T, 95 * _T, 1.4 * _T, 0.9),
    )
}  # fmt: skip


def known_gpu(arch: str) -> GpuModel:
    """The representative of an architecture such as ``"sm_90"``."""
    if not isinstance(arch, str) or arch not in KNOWN_GPUS:
        known = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in KNOWN_GPUS.values())
        raise ValueError(f"on={arch!r} is not a known architecture; known are {known}")
    return KNOWN_GPUS[arch]


def nearest_gpu(capability: int) -> GpuModel:
    """The model of the newest known architecture that is no newer than compute capability `capability`."""
    older = [gpu for arch, gpu in KNOWN_GPUS.items() if int(arch[3:]) <= capability]
    return older[-1] if older else KNOWN_GPUS["sm_75"]
