"""Kernels: what CuPy compiles, loads and launches.

NVRTC compiles the project's kernels in another process, with all options from CuPy.  A fault in source or options is
therefore an error here too, and registers and shared memory are known.  The host device executes the kernels.  Only the
host compiler compiles CuPy's own kernels.  In place of a cubin, CuPy stores a text with all of this, also in its cache
on disk.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupyconv.problem.plan import Kernel
from tests import nvrtc
from tests.fake_gpu import compiler
from tests.fake_gpu.machine import (
    INVALID_VALUE,
    LAUNCH_FAILURE,
    MACHINE,
    OUT_OF_RESOURCES,
    TOO_MANY_COOPERATIVE_BLOCKS,
    CudaError,
    GpuSpec,
    Launch,
    Stream,
)
from tests.host_device import build
from tests.host_device.device import subnormals_flushed

HERE = Path(__file__).resolve().parent

#: The beginning of an image: CuPy requires that of a cubin; the rest is unique to the emulation.
_MAGIC = b"\x7fELF emulated\0"
#: A macro that all kernels of the project are compiled with, and CuPy's kernels are not.
_OURS = "-DCUPYCONV_SOURCE_HASH="
#: Assumed number of registers of a CuPy kernel.
_REGISTERS = 32
#: A loop over the whole grid that works with any number of threads.
_GRID_STRIDE = re.compile(r"\bCUPY_FOR\b|\+=\s*(blockDim|gridDim)")
_FLOAT64 = re.compile(r"\b(double|float64|complex128)\b")
#: The code with which a kernel reads the GPU's clock.
_GLOBAL_TIMER = re.compile(r"""asm volatile\("mov.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\);""")

_STATIC_SHARED, _REGISTERS_PER_THREAD, _MAX_DYNAMIC_SHARED = 1, 4, 8  # CUfunction_attribute


# ---- compiling --------------------------------------------------------------------------------------------------------


class Program:
    """Replaces CuPy's `_NVRTCProgram`."""

    def __init__(
        self, src: str | bytes, name: str = "", headers: Sequence[Any] = (), include_names: Sequence[Any] = (),
        name_expressions: Any = None, method: str = "ptx",
    ) -> None:  # fmt: skip
        self.source = src.decode() if isinstance(src, bytes) else src
        self.name, self.method = name, method
        assert not name_expressions, "names of template instances are not emulated"

    def compile(self, options: Iterable[str] = (), log_stream: Any = None) -> tuple[bytes, None]:
        options = tuple(options)
        if self.method == "ptx":  # CuPy queries the compiler's name and version this way
            return b"// emulated", None
        shared, registers = 0, _REGISTERS
        if any(option.startswith(_OURS) for option in options):
            shared, registers = _with_nvrtc(self.source, options, self.name)
        image = {"source": self.source, "options": options, "shared": shared, "registers": registers}
        return _MAGIC + json.dumps(image).encode() + b"\0", None


def _with_nvrtc(source: str, options: Sequence[str], name: str) -> tuple[int, int]:
    """Compile with NVRTC; return static shared memory and registers, or raise CuPy's error."""
    from cupy.cuda.compiler import CompileException

    (architecture,) = [o.rpartition("_")[2] for o in options if o.startswith(("-arch=", "--gpu-architecture="))]
    others = [o for o in options if not o.startswith(("-arch=", "--gpu-architecture="))]
    task = source, (*others, "--ptxas-options=-v"), int(architecture), name or "kernel.cu"
    outcome = compiler.ask(task)
    if isinstance(outcome, nvrtc.CompileError):
        raise CompileException(str(outcome), source, name, options, "nvrtc")
    return outcome


# ---- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A source with its options, and its resources according to NVRTC."""

    source: str
    options: list[str]
    shared: int
    registers: int

    @classmethod
    def of_image(cls, address: int) -> Module | None:
        """Return the module of an image that `Program` made, or None for another image."""
        if ctypes.string_at(address, len(_MAGIC)) != _MAGIC:
            return None
        return cls(**json.loads(ctypes.string_at(address + len(_MAGIC))))

    def function(self, name: str) -> Function | None:
        if re.search(rf"\b{name}\b", self.source) is None:
            return None
        if any(option.startswith(_OURS) for option in self.options):
            folders = [Path(o[2:]) for o in self.options if o.startswith("-I")]
            folder = next(folder for folder in folders if (folder / f"{name}.cu").is_file())
            macros = [o[2:].partition("=") for o in self.options if o.startswith("-D") and not o.startswith(_OURS)]
            return OurFunction(name, self, Kernel(name, tuple((macro, value) for macro, _, value in macros)), folder)
        return CupyFunction(name, self)


@dataclass
class Function:
    """A kernel of a module; a subclass knows how to run it on the host."""

    name: str
    module: Module
    dynamic_shared: int | None = field(default=None, init=False)  # as allowed by a caller

    def run(self, parameters: Any, config: build.LaunchConfig) -> None:
        raise NotImplementedError

    def copy_of(self, parameters: Any) -> Any:
        """Return a copy of the parameters, which a launch takes along."""
        raise NotImplementedError

    @property
    def flushes(self) -> bool:
        """Whether subnormal numbers are zero: CuPy compiles this way, which affects float32 but not float64."""
        return "-ftz=true" in self.module.options and not _FLOAT64.search(self.types)

    @property
    def types(self) -> str:
        """The text in which a kernel names the types it computes with."""
        raise NotImplementedError

    def attribute(self, attribute: int) -> int:
        known = {
            _STATIC_SHARED: self.module.shared,
            _REGISTERS_PER_THREAD: self.module.registers,
            _MAX_DYNAMIC_SHARED: self._allowed,
        }
        return known.get(attribute, 0)

    def set_attribute(self, attribute: int, value: int) -> None:
        if attribute == _MAX_DYNAMIC_SHARED:
            if value + self.module.shared > MACHINE.spec.shared_per_block:
                raise CudaError(INVALID_VALUE, f"{value} bytes of shared memory")
            self.dynamic_shared = value

    @property
    def _allowed(self) -> int:
        if self.dynamic_shared is not None:
            return self.dynamic_shared
        return MACHINE.spec.shared_unasked - self.module.shared

    def blocks_per_multiprocessor(self, threads: int, dynamic_shared: int) -> int:
        """Return how many blocks of a launch are resident on a multiprocessor at once."""
        spec = MACHINE.spec
        if dynamic_shared > self._allowed or threads > spec.threads_per_block:
            return 0
        warps = -(-threads // 32)
        registers = warps * -(-self.module.registers * 32 // 256) * 256
        shared = -(-(dynamic_shared + self.module.shared + 1024) // 128) * 128  # the system reserves 1 KiB per block
        return min(
            spec.registers // registers,
            spec.shared_per_multiprocessor // shared,
            spec.threads_per_multiprocessor // (32 * warps),
            spec.blocks_per_multiprocessor,
        )

    def launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, stream: Stream, parameters: Any,
        cooperative: bool,
    ) -> None:  # fmt: skip
        """Enqueue the launch, or refuse it, as a GPU would."""
        spec, threads = MACHINE.spec, block[0] * block[1] * block[2]
        if stream.gpu != MACHINE.gpu:
            raise CudaError(INVALID_VALUE, "a stream of another device")
        if (
            not (threads and all(grid))
            or max(grid[1:]) > 65535
            or grid[0] >= 1 << 31
            or threads > spec.threads_per_block
        ):
            raise CudaError(INVALID_VALUE, f"grid {grid}, block {block}")
        if shared_bytes > self._allowed:
            raise CudaError(INVALID_VALUE, f"{shared_bytes} bytes of shared memory, {self._allowed} allowed")
        resident = self.blocks_per_multiprocessor(threads, shared_bytes)
        if not resident:
            raise CudaError(OUT_OF_RESOURCES, f"{threads} threads of {self.module.registers} registers")
        if cooperative and grid[0] * grid[1] * grid[2] > resident * spec.multiprocessors:
            raise CudaError(TOO_MANY_COOPERATIVE_BLOCKS)
        if MACHINE.work_enqueued.next_one():
            raise CudaError(OUT_OF_RESOURCES, "as a test asked for")
        MACHINE.launches.append(Launch(self.name, MACHINE.gpu, grid, block, shared_bytes, cooperative, stream))
        copied = self.copy_of(parameters)
        config = build.LaunchConfig(
            grid=grid, block=block, dynamic_shared_bytes=shared_bytes, order=2, seed=len(MACHINE.launches),
            cooperative=cooperative, strict=False,
        )  # fmt: skip

        def work() -> None:
            with subnormals_flushed(self.flushes):
                self.run(copied, config)

        MACHINE.enqueue(stream, work)

    def _run_on_host(self, kernel: Any, parameters: Any, config: build.LaunchConfig) -> None:
        message = build.load_runtime()(kernel, parameters, ctypes.byref(config))
        if message is not None:
            print(f"emulated GPU: {self.name}: {message.decode()}", flush=True)
            raise CudaError(LAUNCH_FAILURE)


@dataclass
class OurFunction(Function):
    """A kernel of the project, which has one struct as its parameter."""

    variant: Kernel
    folder: Path

    @property
    def types(self) -> str:
        return " ".join(self.module.options)

    @functools.cached_property
    def compiled(self) -> build.HostKernel:
        return build.load_kernel(self.variant, self.folder)

    def copy_of(self, parameters: Any) -> Any:
        return ctypes.create_string_buffer(ctypes.string_at(parameters[0], self.compiled.params_size))

    def run(self, parameters: Any, config: build.LaunchConfig) -> None:
        self._run_on_host(self.compiled.address, parameters, config)


class CupyFunction(Function):
    """A kernel of CuPy's, or of a test, with any number of parameters."""

    @property
    def types(self) -> str:
        return self.module.source

    @functools.cached_property
    def compiled(self) -> ctypes.CDLL:
        from cupy._core.core import _get_header_dir_path

        headers = Path(_get_header_dir_path())
        bundled = [headers, *(headers / "cupy/_cccl" / part for part in ("libcudacxx", "thrust", "cub"))]
        includes = [HERE, *bundled, *nvrtc.includes()]
        text = _GLOBAL_TIMER.sub(r"\1 = cuda_on_host::nanoseconds();", self.module.source)
        source = f'#include "cupy_kernels.h"\n{text}\nEXPORT_CUPY_KERNEL({self.name})\n'
        flags = ["-std=gnu++17", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing"]
        flags += [o for o in self.module.options if o.startswith("-D")] + [f"-I{folder}" for folder in includes]
        runtime = build.build_runtime("")
        build.load_runtime()
        library = ctypes.CDLL(str(build.build_library(self.name[:60], source, flags, sources=(HERE,), library=runtime)))
        library.cuda_on_host_parameter_sizes.restype = ctypes.POINTER(ctypes.c_size_t)
        return library

    @functools.cached_property
    def sizes(self) -> list[int]:
        sizes = self.compiled.cuda_on_host_parameter_sizes()
        count = next(i for i in range(1000) if sizes[i] == 0)
        return list(sizes[:count])

    def copy_of(self, parameters: Any) -> Any:
        held = [ctypes.create_string_buffer(ctypes.string_at(parameters[i], size)) for i, size in enumerate(self.sizes)]
        copied = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        copied.values = held
        return copied

    def run(self, parameters: Any, config: build.LaunchConfig) -> None:
        if _GRID_STRIDE.search(self.module.source) and "__syncthreads" not in self.module.source:
            config.grid[:] = config.block[:] = (1, 1, 1)
        self._run_on_host(self.compiled.cuda_on_host_kernel, parameters, config)


# ---- helpers ----------------------------------------------------------------------------------------------------------


def device_properties(properties: int, spec: GpuSpec) -> None:
    """Fill a cudaDeviceProp."""
    _helpers().fill_properties(
        ctypes.c_void_p(properties), spec.name.encode(), spec.capability, spec.multiprocessors, ctypes.c_size_t(spec.memory),
        spec.shared_per_block, spec.shared_per_multiprocessor, spec.registers, spec.threads_per_block,
        spec.threads_per_multiprocessor,
    )  # fmt: skip


@functools.cache
def _helpers() -> ctypes.CDLL:
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{HERE}", *(f"-I{folder}" for folder in nvrtc.includes())]
    source = '#include "helpers.cpp"\n'
    return ctypes.CDLL(str(build.build_library("fake_gpu", source, flags, sources=(HERE,), library=None)))
