"""Compile kernels for the host: one shared library per variant, cached by the content of every source.

A variant is `kernels/<name>.cu` with its macros.  Its translation unit includes that file and exports the kernel as a
plain call with a pointer to its parameter struct.  The runtime (`fibres.cpp`) is a separate library that all variants
share, so that a process has one pool of stacks.

The environment variable CUPYCONV_HOST_SANITIZER selects a sanitizer: ``asan``, ``ubsan``, ``tsan``.  The variable CXX
selects another compiler.  `.build/` may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cupyconv.problem.plan import Kernel

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
CACHE = HERE / ".build"
#: An include directive for one of the project's files.
INCLUDE = r'^\s*#\s*include\s+["<]([^">]+)[">]'

#: Compiler flags of each mode.  For the runtime a macro sets the mode instead: it is never instrumented.
SANITIZERS = {
    "": [],
    "asan": ["-g1", "-fsanitize=address", "-fno-omit-frame-pointer"],
    "ubsan": ["-g1", "-fsanitize=undefined,bounds-strict", "-fno-sanitize-recover=undefined"],
    "tsan": ["-g1", "-fsanitize=thread"],
}

COMMON_FLAGS = ["-std=gnu++17", "-fPIC", "-shared", "-fvisibility=hidden"]

# No C++ standard library, as under NVRTC (this also compiles faster).  Vectors may alias their elements, as in CUDA.
# Products and sums are not contracted, so that a result depends on the source alone.
KERNEL_FLAGS = ["-O1", "-nostdinc++", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-threadsafe-statics",
                "-DCUPYCONV_HOST"]  # fmt: skip


class CompileError(RuntimeError):
    """A kernel, or the runtime, does not compile.  The message is the compiler's."""


class LaunchConfig(ctypes.Structure):
    """The configuration of a launch; mirrors `LaunchConfig` in fibres.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_int),
        ("cooperative", ctypes.c_int),
        ("strict", ctypes.c_int),
    ]


@dataclass(frozen=True)
class HostKernel:
    """A loaded kernel: the address to call, and the size of its parameter struct."""

    address: int
    params_size: int
    library: ctypes.CDLL  # keeps the address valid


def sanitizer() -> str:
    """Return the mode that the environment selects."""
    mode = os.environ.get("CUPYCONV_HOST_SANITIZER", "")
    if mode not in SANITIZERS:
        raise ValueError(f"CUPYCONV_HOST_SANITIZER is {mode!r}; known are {', '.join(filter(None, SANITIZERS))}")
    return mode


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def unavailable() -> str | None:
    """Return why kernels cannot be compiled for the host here, or None if they can."""
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler: {compiler()[0]} is not on the path (set CXX, or install g++)"
    return None


@functools.cache
def load_kernel(kernel: Kernel, directory: Path = KERNELS, mode: str = "") -> HostKernel:
    """Compile `directory`/<name>.cu with the kernel's macros unless it is cached, and load it."""
    runtime = build_runtime(mode)
    load_runtime(mode)
    library = ctypes.CDLL(str(build_kernel(kernel, directory, mode, runtime)))
    address = ctypes.cast(library.cuda_on_host_kernel, ctypes.c_void_p).value
    assert address is not None
    return HostKernel(address, ctypes.c_size_t.in_dll(library, "cuda_on_host_params_size").value, library)


@functools.cache
def load_runtime(mode: str = "") -> Callable[..., bytes | None]:
    """Return the function (kernel address, params address, LaunchConfig) -> error text or None."""
    launch = ctypes.CDLL(str(build_runtime(mode))).cuda_on_host_launch
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(LaunchConfig)]
    launch.restype = ctypes.c_char_p
    return launch


def build_kernel(kernel: Kernel, directory: Path, mode: str, runtime: Path) -> Path:
    """Build the shared library of one variant and return its path."""
    source = f'#include "{kernel.name}.cu"\n#include "kernel_entry.h"\nEXPORT_KERNEL({kernel.name})\n'
    includes = dict.fromkeys([directory, KERNELS, HERE])  # in this order, without duplicates
    flags = [*COMMON_FLAGS, *KERNEL_FLAGS, *SANITIZERS[mode]]
    flags += [f"-D{name}={value}" for name, value in kernel.macros]
    flags += [f"-I{folder}" for folder in includes]
    return build_library(kernel.name, source, flags, sources=tuple(includes), library=runtime)


@functools.cache
def build_runtime(mode: str) -> Path:
    """Build the shared library that runs kernels of this mode and return its path."""
    # Export the functions that kernels call.  Loops stay loops, because sanitizers intercept memcpy and memset.
    flags = [*COMMON_FLAGS, "-fvisibility=default", "-O2", "-fno-tree-loop-distribute-patterns"]
    flags += ["-Wall", "-Wextra", "-Werror", f"-I{HERE}"]
    if mode:
        flags.append(f"-DCUDA_ON_HOST_{mode.upper()}")
    return build_library("fibres", '#include "fibres.cpp"\n', flags, sources=(HERE,), library=None)


def build_library(name: str, source: str, flags: list[str], *, sources: tuple[Path, ...], library: Path | None) -> Path:
    """Compile `source` into a shared library named by the hash of all its inputs, independent of their location."""
    options = [flag for flag in flags if not flag.startswith("-I")]
    key = hashlib.sha256(repr((source, options, compiler(), _compiler_version(), library and library.name)).encode())
    key.update(_included(source, sources))
    target = CACHE / f"{name}-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        unit, built = Path(scratch, "unit.cpp"), Path(scratch, target.name)
        unit.write_text(source)
        linked = [str(library)] if library else []
        command = [*compiler(), *flags, str(unit), *linked, f"-Wl,-soname,{target.name}", "-Wl,-rpath,$ORIGIN"]
        result = subprocess.run([*command, "-o", str(built)], check=False, capture_output=True, text=True)
        if result.returncode:
            raise CompileError(f"{shlex.join(command)}\n{result.stderr[:8000]}")
        built.replace(target)  # atomic: other processes see either no library or a complete one
    return target


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _included(source: str, folders: tuple[Path, ...]) -> bytes:
    """Return a digest of every project file that a source includes, directly or indirectly."""
    digest = hashlib.sha256()
    waiting, seen = re.findall(INCLUDE, source, re.MULTILINE), set()
    while waiting:
        name = waiting.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or name in seen:
            continue
        seen.add(name)
        text = path.read_text("utf-8")
        digest.update(f"{name}\0{text}\0".encode())
        waiting += re.findall(INCLUDE, text, re.MULTILINE)
    return digest.digest()
