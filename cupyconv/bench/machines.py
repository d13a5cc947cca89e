"""The measured machine: arrays, a clock, and the properties that its figures depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

import cupyconv
from cupyconv.bench.cases import PERIOD, Fill, normals, repeat_normals
from cupyconv.bench.clock import Clock, CudaClock, HostClock
from cupyconv.cuda.run.kernel_sources import source_hash
from cupyconv.demo.libraries import Library, cupy_library, numpy_library
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name


@dataclass(frozen=True)
class Machine:
    """The array library and device for the command; tests pass their own."""

    library: Library
    clock: Clock
    fill: Fill
    #: ``"sm_90"``, or None for NumPy.
    arch: str | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    #: For the floors: bytes of the copied array, and rows of the matrices by element size.
    copy_bytes: int = 1 << 27
    gemm_rows: Callable[[int], int] = lambda itemsize: 1024
    #: Releases unused memory.
    release: Callable[[], None] = lambda: None
    #: The stream that the clock times, if there are streams.
    stream: Callable[[], int | None] = lambda: None

    @property
    def xp(self) -> ModuleType:
        return self.library.xp


def numpy_machine() -> Machine:
    """Return NumPy on this processor."""
    # NumPy multiplies 16-bit matrices without BLAS: 2048 rows would take minutes.
    rows = {2: 256}
    return Machine(numpy_library(), HostClock(), repeat_normals, gemm_rows=lambda itemsize: rows.get(itemsize, 1024))


def cuda_machine(cupy: ModuleType) -> Machine:
    """Return CuPy on the current GPU."""
    ordinal = cupy.cuda.Device().id
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    name = properties["name"]
    pool = cupy.get_default_memory_pool()

    @lru_cache(maxsize=len(ITEMSIZE))
    def uploaded(dtype: str) -> Any:
        values = normals(dtype)
        return cupy.asarray(values.view(np.uint16) if values.itemsize == 2 else values)

    def fill(dtype: str, first: int, elements: int) -> Any:
        # Two-byte values are repeated as integers, so that no CuPy kernel needs to support bfloat16.
        return cupy.resize(uploaded(dtype)[first % PERIOD :], elements).view(dtype_from_name(dtype))

    return Machine(
        library=cupy_library(cupy),
        clock=CudaClock(cupy, properties["l2CacheSize"]),
        fill=fill,
        arch=f"sm_{properties['major']}{properties['minor']}",
        properties={
            "gpu": name.decode() if isinstance(name, bytes) else name,
            "multiprocessors": properties["multiProcessorCount"],
            "memory_bytes": properties["totalGlobalMem"],
            "l2_bytes": properties["l2CacheSize"],
            # The version number that NVIDIA publishes; CUDA does not report it.
            "driver": _output("nvidia-smi", f"--id={ordinal}", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda_of_driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "cublas": cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()),
            "cupy": cupy.__version__,
        },
        copy_bytes=1 << 30,
        gemm_rows=lambda itemsize: 8192 if itemsize <= 4 else 4096,
        release=pool.free_all_blocks,
        stream=lambda: cupy.cuda.get_current_stream().ptr,
    )


def environment(machine: Machine, threads: int | None = None) -> dict[str, Any]:
    """Return what the figures depend on.  `threads` applies to every library; None means each process's own number."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "date": date.today().isoformat(),
        "commit": commit_of(Path(__file__).resolve()),
        "cupyconv": cupyconv.__version__,
        "kernels": source_hash(),
        "machine": machine.library.description,
        **machine.properties,
        "host": numpy_library().description,
        "blas": f"{blas['name']} {blas['version']}",
        "blas_kernels": _blas_kernels(),
        "blas_threads": _blas_threads() if threads is None else _counted(threads),
        "python": sys.version.split()[0],
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "unknown",
        "clock": machine.clock.method,
    }


def commit_of(file: Path) -> str:
    """Return the commit of a tracked file, or "unknown" for another file in a repository, such as an installed one."""
    git = "git", "-C", str(file.parent)
    is_tracked = _output(*git, "ls-files", "--", file.name) == file.name
    return _output(*git, "describe", "--always", "--dirty") if is_tracked else "unknown"


def _output(*command: str) -> str:
    """Return what a program prints, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _blas_threads() -> str:
    limits = [os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")]
    limit = next(filter(None, limits), None)
    return "all cores" if limit is None else _counted(limit)


def _blas_kernels() -> str:
    """Return the processor type whose kernels BLAS runs, which an environment variable may select."""
    libraries = (library for library in threadpool_info() if library["user_api"] == "blas")
    return ", ".join(dict.fromkeys(library.get("architecture", "unknown") for library in libraries)) or "unknown"


def _counted(threads: int | str) -> str:
    return f"{threads} thread{'s' * (str(threads) != '1')}"
