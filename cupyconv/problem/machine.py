"""Processor models for planning: sizes, and rates that rank methods.

The rates of a GPU class are the vendor's datasheet figures, scaled by the fraction that well-written code reaches.
They rank methods against each other and do not predict times.  Source: NVIDIA's data sheets of the named products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

#: Maximum shared memory per thread block, in KiB, from each compute capability on (CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability").
_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}


@dataclass(frozen=True)
class GpuModel:
    """One class of GPU.  Rates are per second: bytes, and operations (a multiply-add counts as two).

    `mma_share` is the fraction of cuBLAS's tensor-core rates that kernels written with ``mma.sync`` can reach: on newer
    architectures only architecture-specific instructions reach the full rate.

    `room` is the number of blocks of a cooperative launch that the device can run at once, learned from a refused
    launch; until then planning assumes one block per multiprocessor.  `has_transforms` is False if cuFFT turned out to
    be missing.  `transform_area` is the work area that a transform has needed, as a multiple of the bytes of its
    spectra.
    """

    #: The backend that runs the plans for this processor.
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
        """Maximum shared memory of one thread block."""
        known = [capability for capability in _SHARED_KIB if capability <= max(75, self.capability)]
        return _SHARED_KIB[max(known)] << 10

    def gemm_rate(self, dtype: str, compute: str) -> float:
        """The rate of a large cuBLAS GEMM with these operands."""
        if compute == "tf32":
            return self.tf32
        if compute == "float64":
            return self.gemm64
        return self.gemm16 if dtype in ("float16", "bfloat16") else 0.8 * self.fp32


_T = 1e12

#: One representative product per compute capability, for planning without access to the GPU.
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
    """The representative product of an architecture such as ``"sm_90"``."""
    if not isinstance(arch, str) or arch not in KNOWN_GPUS:
        known = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in KNOWN_GPUS.values())
        raise ValueError(f"on={arch!r} is not a known architecture; known are {known}")
    return KNOWN_GPUS[arch]


def nearest_gpu(capability: int) -> GpuModel:
    """The model of the newest known architecture that is not newer than compute capability `capability`."""
    older = [gpu for arch, gpu in KNOWN_GPUS.items() if int(arch[3:]) <= capability]
    return older[-1] if older else KNOWN_GPUS["sm_75"]
