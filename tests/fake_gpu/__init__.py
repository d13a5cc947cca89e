"""The real CuPy on emulated GPUs: its wheels are unmodified, and this package answers all their CUDA calls.

``pytest --fake-gpu`` runs the GPU tests this way.  It checks everything between the library and CUDA: CuPy's arrays,
allocators, streams, graphs and launches, their order, arguments and limits.  It shows nothing about time, or about the
hardware's own behavior.

::

    cupyconv  ->  CuPy's wheel  ->  cudart, libcuda, cuBLAS, cuFFT, NVRTC      as on a GPU up to this point
                                         libraries.py                            jumps to Python
                                         calls.py, blas.py, fft.py, random.py    the functions
                                         machine.py                              memory, streams, events, graphs
                                         kernels.py  ->  host device             compiled, loaded, launched, executed
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from functools import partial

from tests import host_device, nvrtc


def unavailable() -> str | None:
    """Return why the real CuPy cannot run on emulated GPUs here, or None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulation writes machine code of x86-64 Linux"
    try:
        version = importlib.metadata.version("cupy-cuda13x")
    except importlib.metadata.PackageNotFoundError:
        return "the wheel cupy-cuda13x is not installed"
    if int(version.partition(".")[0]) < 14:
        return f"cupy-cuda13x {version} is older than 14"
    reason = host_device.unavailable() or nvrtc.unavailable()
    if reason is not None:
        return reason
    from tests.fake_gpu import libraries

    module = libraries.wheel_module("api", "runtime")
    if module is None or not any(name == "cudaMalloc" for _, _, name in libraries.symbols(module)):
        return "this wheel of CuPy keeps no symbols of the CUDA runtime inside it"
    return None


def is_installed() -> bool:
    """Whether CuPy's GPUs are emulated in this process."""
    return _installed


_installed = False
_let_go: Callable[[], None]


def let_go() -> None:
    """Make every later CUDA call return at once without effect, for good: what remains is CuPy's and our own time."""
    _let_go()


def install() -> None:
    """Provide CuPy with its GPUs, before it is imported."""
    global _installed, _let_go
    _installed = True
    assert "cupy" not in sys.modules, "CuPy has been imported, and has met the machine's own CUDA"
    from tests.fake_gpu import libraries
    from tests.fake_gpu.blas import CUBLAS
    from tests.fake_gpu.calls import DRIVER, RUNTIME
    from tests.fake_gpu.fft import CUFFT
    from tests.fake_gpu.random import CURAND

    os.environ["CUPY_ACCELERATORS"] = ""  # the wheel contains CUB's kernels, compiled for a GPU
    os.environ["CUPY_CACHE_DIR"] = str(libraries.BUILD / "cupy")
    _let_go = partial(libraries.let_go, libraries.load_library("libcuda.so.1", DRIVER))
    atexit.register(_let_go)
    for module, soname, functions in (
        (libraries.wheel_module("libs", "cublas"), "libcublas.so.13", CUBLAS),
        (libraries.wheel_module("libs", "curand"), "libcurand.so.10", CURAND),
        (libraries.wheel_module("", "cufft", "cupy"), "libcufft.so.12", CUFFT),
    ):
        assert module is not None
        stem = module.name.partition(".")[0]
        wanted = [name for _, kind, name in libraries.symbols(module, "-D") if kind == "U" and name.startswith(stem)]
        libraries.load_library(soname, functions, wanted)
    libraries.load_library("libcublasLt.so.13", {}, ["cublasLtCreate"])  # libcublas would need it
    runtime = libraries.wheel_module("api", "runtime")
    assert runtime is not None
    libraries.replace_functions(runtime, RUNTIME, "cuda[A-Z].*")

    nvrtc.preload()  # CuPy queries its version

    from cupy.cuda import compiler

    from tests.fake_gpu.kernels import Program

    compiler._NVRTCProgram = Program
