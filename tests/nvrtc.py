"""NVRTC, NVIDIA's run-time compiler, called through ctypes without CuPy and without a GPU.

It comes in the wheels ``nvidia-cuda-nvrtc`` (the compiler), ``nvidia-cuda-runtime`` and ``nvidia-cuda-crt`` (the
headers).  The options are the package's own and those that CuPy adds, so that the result is the code that a user's
GPU gets.  The command compiles every variant for every architecture::

    python -m tests.nvrtc              # 75 80 86 89 90 100 120
    python -m tests.nvrtc 90 120
    python -m tests.nvrtc 90 --part 2/5    # every fifth variant, from the second on; five such runs cover all

    pip install --target DIR 'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-runtime-cu12==12.9.*'
    CUPYCONV_NVRTC=DIR python -m tests.nvrtc        # another release

It prints registers, spills, stack, static shared memory, size and time of each variant.  It exits nonzero if one
fails, or if one that is meant to be fast spills on an architecture of `WITHOUT_SPILLS`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from cupyconv.cuda.run.kernel_sources import compile_options, kernel_source
from cupyconv.problem.plan import Kernel
from tests.variants import all_variants, is_fast, is_planned

#: Architectures on which a spill in a variant meant to be fast is a failure.  On the others, the assembler gives
#: variants fewer registers than it may, and a spill is only shown.
WITHOUT_SPILLS = (75, 80, 86, 89, 90)
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

#: Options that ``cupy.RawModule(backend="nvrtc")`` adds to those it is given.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")

#: Options that log resource use and turn every warning of the assembler into an error.
CHECK_OPTIONS = ("--ptxas-options=-v", "--ptxas-options=--warning-as-error")


class CompileError(RuntimeError):
    """The source does not compile without a warning; the message is the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """The compiled code of one source for one architecture."""

    cubin: bytes
    ptx: str
    log: str
    seconds: float

    @property
    def registers(self) -> int:
        """Registers per thread of the entry point."""
        return max(self._numbers(r"Used (\d+) registers"), default=0)

    @property
    def spills(self) -> int:
        """Bytes of register spills, stores and loads, in all functions."""
        return sum(self._numbers(r"(\d+) bytes spill"))

    @property
    def stack(self) -> int:
        """Bytes of local memory per thread: arrays indexed at run time, spills, calls."""
        return max(self._numbers(r"(\d+) bytes stack frame"), default=0)

    @property
    def shared(self) -> int:
        """Bytes of static shared memory, without what a launch requests."""
        return max(self._numbers(r"(\d+) bytes smem"), default=0)

    def _numbers(self, pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, self.log)]


@dataclass(frozen=True)
class Installation:
    """Paths of the compiler and of the CUDA headers."""

    library: Path
    includes: tuple[Path, ...]


def unavailable() -> str | None:
    """Return why nothing can be compiled here, or None if it can."""
    found = _installation()
    if found is None:
        return "NVRTC is not installed (pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt)"
    if not found.includes:
        return f"{found.library} is there, the CUDA headers are not (pip install nvidia-cuda-runtime nvidia-cuda-crt)"
    return None


def includes() -> tuple[Path, ...]:
    """Return the folders of the CUDA headers."""
    installation = _installation()
    return installation.includes if installation else ()


def preload() -> None:
    """Load the compiler's library, so that other code that looks for it by name finds this one."""
    _library()


def require(missing: Callable[[], str | None] = unavailable) -> None:
    """Skip the calling test module if NVRTC, or another tool of NVIDIA that `missing` looks for, is not installed.

    With CUPYCONV_REQUIRE_NVRTC=1 this is a failure, for runs that must not skip these tests.
    """
    import pytest

    reason = missing()
    if reason is None:
        return
    if os.environ.get("CUPYCONV_REQUIRE_NVRTC") == "1":
        pytest.fail(f"{reason}, and CUPYCONV_REQUIRE_NVRTC=1 asks for it", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def compile_variant(kernel: Kernel, architecture: int) -> Compiled:
    """Compile one variant as CuPy does, with warnings as errors."""
    options = (*compile_options(kernel.macros), *CUPY_OPTIONS, *CHECK_OPTIONS)
    return compile_source(kernel_source(kernel.name), options, architecture, f"{kernel.name}.cu")


def compile_source(source: str, options: Sequence[str], architecture: int, name: str = "source.cu") -> Compiled:
    """Compile `source` to PTX and machine code for ``sm_<architecture>``, or raise `CompileError`.

    A warning is an error too.  It is found in the log, because only the newest releases have an option for this.
    """
    installation = _installation()
    assert installation is not None, unavailable()
    includes = [f"-I{directory}" for directory in installation.includes]
    every = [option.encode() for option in (*options, *includes, f"-arch=sm_{architecture}")]
    nvrtc = _library()
    program = ctypes.c_void_p()
    started = time.perf_counter()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(every), (ctypes.c_char_p * len(every))(*every))
        log = _output(program, "ProgramLog").rstrip(b"\0").decode()
        if status or ": warning #" in log:
            raise CompileError(log or _message(status))
        ptx = _output(program, "PTX").rstrip(b"\0").decode()
        return Compiled(_output(program, "CUBIN"), ptx, log, time.perf_counter() - started)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


Outcome = tuple[Kernel, int, "Compiled | CompileError"]


def compile_all(kernels: Iterable[Kernel], architectures: Iterable[int]) -> Iterator[Outcome]:
    """Compile every kernel for every architecture on all cores; yield the outcomes in order, failures included."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_outcome, list(product(kernels, architectures)))


def _outcome(task: tuple[Kernel, int]) -> Outcome:
    try:
        return (*task, compile_variant(*task))
    except CompileError as error:
        return (*task, error)


@functools.cache
def _installation() -> Installation | None:
    """Return the newest NVRTC of the ``nvidia`` wheels, or of those in the folder CUPYCONV_NVRTC.

    The headers are those of its own release, or all that are found if its release has none.
    """
    spec, chosen = importlib.util.find_spec("nvidia"), os.environ.get("CUPYCONV_NVRTC")
    found = [Path(chosen, "nvidia")] if chosen else (spec.submodule_search_locations or () if spec else ())
    roots = [Path(root) for root in found]
    patterns = ("*/lib/libnvrtc.so.*", "*/bin/**/nvrtc64_*.dll")
    libraries = [path for root in roots for pattern in patterns for path in root.glob(pattern)]
    libraries = [path for path in libraries if "builtins" not in path.name and ".alt." not in path.name]
    if not libraries:
        return None
    library = max(libraries, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    own = next(parent for parent in library.parents if parent.parent in roots) / "include"
    everywhere = [directory for root in roots for directory in sorted(root.glob("*/include"))]
    includes = [own] if (own / "cuda_fp16.h").is_file() else everywhere
    complete = any((directory / "cuda_fp16.h").is_file() for directory in includes)
    return Installation(library, tuple(includes) if complete else ())


@functools.cache
def _library() -> ctypes.CDLL:
    installation = _installation()
    assert installation is not None
    # NVRTC opens this library by name when it compiles, and some releases do not look for it in their own folder.
    for builtins in installation.library.parent.glob("*nvrtc-builtins*"):
        if ".alt." not in builtins.name and builtins.suffix != ".a":
            ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(installation.library))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _output(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc, size = _library(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(_message(status))


def _message(status: int) -> str:
    return f"NVRTC: {_library().nvrtcGetErrorString(status).decode()}"


def _part(text: str) -> tuple[int, int]:
    first, every = (int(number) for number in text.split("/"))
    if not 1 <= first <= every:
        raise ValueError
    return first, every


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every variant and print a table; return 1 if there is a failure, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.nvrtc", description="Compile every kernel variant.")
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES, metavar="arch")
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="only each N-th variant, from the K-th on"
    )
    given = parser.parse_args(arguments)
    architectures, (first, every) = given.architectures, given.part
    reason = unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    print(f"{'variant':<54} {'sm':>4} {'registers':>9} {'spills':>7} {'stack':>6} {'shared':>6} {'cubin':>8} {'s':>6}")
    started = time.perf_counter()
    count, failures = 0, []
    for kernel, architecture, result in compile_all(all_variants()[first - 1 :: every], architectures):
        count += 1
        if isinstance(result, CompileError):
            failures.append(f"{kernel} for sm_{architecture}:\n{result}")
            print(f"{kernel!s:<54} {architecture:>4} does not compile")
            continue
        slow = "  spills" if result.spills and is_fast(kernel) and is_planned(kernel, architecture) else ""
        print(
            f"{kernel!s:<54} {architecture:>4} {result.registers:>9} {result.spills:>7} {result.stack:>6}"
            f" {result.shared:>6} {len(result.cubin):>8} {result.seconds:>6.2f}{slow}"
        )
        if slow and architecture in WITHOUT_SPILLS:
            failures.append(f"{kernel} for sm_{architecture} spills {result.spills} bytes")
    print(f"{count} compiled in {time.perf_counter() - started:.0f} s, {len(failures)} failed")
    print(*failures, sep="\n\n", file=sys.stderr, end="\n" if failures else "")
    return min(1, len(failures))


if __name__ == "__main__":
    sys.exit(main())
