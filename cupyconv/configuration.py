"""`show_config`: what the library finds on this machine, for users and for bug reports.

CuPy is found by its package metadata.  It is imported only if an NVIDIA driver responds, because only then can it
report more than its version.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from cupyconv.problem.caches import BUDGET, clear, spent
from cupyconv.version import __version__

_DRIVER_LIBRARIES = {"win32": "nvcuda.dll", "linux": "libcuda.so.1"}
_LABEL_WIDTH = 15


def show_config() -> None:
    """Print versions, GPUs, backends and caches; include this page in a bug report.

    The page warns of two installed CuPy packages, which break each other, and of an NVIDIA driver without CuPy.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.show_config()  # doctest: +ELLIPSIS
    cupyconv       0...
    """
    print(configuration_page())


def clear_caches() -> None:
    """Release everything that is cached between calls.

    The caches hold checked and planned calls, which later calls of the same kind reuse, and scratch memory of threads.
    Together they hold at most 64 MiB of host memory; the least recently used entry is evicted first.  Results do not
    depend on the caches.  Any thread may clear them at any time; running calls continue.

    On a GPU, only compiled kernels and the handles of cuBLAS are cached, at most 16 handles per thread.  They are not
    released, because destroying them would wait for the GPU.  CuPy manages its memory pool itself:
    ``cupy.get_default_memory_pool().free_all_blocks()``.

    Examples
    --------
    >>> import cupyconv
    >>> cupyconv.clear_caches()
    """
    clear()


def configuration_page() -> str:
    """The text that `show_config` prints."""
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}".rstrip() for label, text in _entries())


def cupy_distributions() -> list[str]:
    """All installed packages that provide a module ``cupy``, as ``name version``."""
    from importlib import metadata  # imported here and below, because only this page needs it

    found = {
        f"{name} {distribution.version}"
        for distribution in metadata.distributions()
        if (name := (distribution.metadata["Name"] or "").lower()) == "cupy"
        or name.startswith(("cupy-cuda", "cupy-rocm"))
    }
    return sorted(found)


def driver_cuda_version() -> int | None:
    """The CUDA version of the NVIDIA driver, 13000 for 13.0, or None if there is no driver."""
    name = _DRIVER_LIBRARIES.get(sys.platform)
    if name is None:
        return None
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    number = ctypes.c_int()
    return number.value if library.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value else None


def install_line(cuda: int) -> str:
    """The command that installs CuPy for a driver of this CUDA version."""
    return f"python -m pip install 'cupy-cuda{13 if cuda >= 13000 else 12}x[ctk]>=14'"


def cupy_with_gpu() -> tuple[ModuleType | None, str]:
    """The module CuPy if it can use a GPU, otherwise None; and the state in words."""
    packages, cuda = cupy_distributions(), driver_cuda_version()
    if cuda is None:
        return None, "no NVIDIA driver was found"
    if not packages:
        return None, f"NVIDIA driver found (CUDA {_dotted(cuda)}), but CuPy is not installed: {install_line(cuda)}"
    try:
        cupy = import_module("cupy")
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # report whatever a broken CuPy or driver raises
        return None, f"CuPy cannot use a GPU: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return cupy, f"{count} GPU" + "s" * (count != 1)


def _entries() -> Iterator[tuple[str, str]]:
    """Labels and texts; an empty label continues the entry above."""
    yield "cupyconv", f"{__version__} in {Path(__file__).resolve().parent}"
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "NumPy", f"{np.__version__}, BLAS: {_numpy_blas()}"
    yield "SciPy", _version("scipy") or "not installed"
    yield "ml_dtypes", _version("ml_dtypes") or "not installed (needed for bfloat16 on NumPy)"
    packages = cupy_distributions()
    yield "CuPy", ", ".join(packages) or "not installed"
    if len(packages) > 1:
        yield from _paragraph(
            f"WARNING: {len(packages)} CuPy packages are installed together; they overwrite each other's files and"
            " do not work. Uninstall all of them, then install one:"
            f" python -m pip uninstall {' '.join(package.split()[0] for package in packages)}"
        )
    cupy, state = cupy_with_gpu()
    cuda = driver_cuda_version()
    yield "NVIDIA driver", f"CUDA {_dotted(cuda)}" if cuda else "not found"
    if cupy is None:
        yield "GPU", state if cuda else "none"
    else:
        yield from _gpus(cupy)
    yield "backends", "numpy, cuda" if cupy else "numpy"
    from cupyconv.cuda.run.kernel_sources import kernel_directory, source_hash
    from cupyconv.cuda.run.parameters import PARAMETERS

    try:
        yield "kernels", f"{kernel_directory()}, hash {source_hash()}"
    except FileNotFoundError as error:  # the package is in an archive, which CUDA's compiler cannot read
        yield "kernels", f"not found: {error}"
    yield from _paragraph(f"compiled on first use: {', '.join(PARAMETERS)}")
    yield "caches", f"{spent() / 2**20:.1f} of at most {BUDGET >> 20} MiB; clear_caches() releases them"
    yield "kernel cache", str(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _gpus(cupy: ModuleType) -> Iterator[tuple[str, str]]:
    runtime = cupy.cuda.runtime
    for ordinal in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(ordinal)
        name = properties["name"]
        yield (
            f"GPU {ordinal}",
            f"{name.decode() if isinstance(name, bytes) else name},"
            f" sm_{properties['major']}{properties['minor']}, {properties['totalGlobalMem'] / 2**30:.0f} GiB",
        )
    yield (
        "CUDA",
        f"runtime {_dotted(runtime.runtimeGetVersion())}, NVRTC {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))}",
    )


def _paragraph(text: str) -> Iterator[tuple[str, str]]:
    for line in textwrap.wrap(text, 100 - _LABEL_WIDTH, break_on_hyphens=False):
        yield "", line


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numpy_blas() -> str:
    configuration = np.show_config(mode="dicts")
    blas = (configuration or {}).get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _dotted(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
