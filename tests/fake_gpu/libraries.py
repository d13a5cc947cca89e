"""Redirect CuPy's calls to Python functions: shared libraries of jumps, and jumps written over a linked-in runtime.

CuPy looks for libcuda and libcublas by name.  Instead it finds libraries with one instruction per function, a jump
through a table that this module fills.  cudart is linked into a module of CuPy, whose symbol table has the address of
each of its functions; jumps replace their first bytes.  No file on disk is changed, and no function of NVIDIA's is
executed.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.host_device.build import CACHE

#: The folder of libraries and of CuPy's kernel cache, next to the host device's kernels.
BUILD = CACHE / "fake_gpu"

Callback = ctypes._CFuncPtr  # a Python function as a C one
_kept: list[object] = []  # callbacks and libraries live as long as the process
_undo: list[tuple[str, Callable[[int], None]]] = []  # each redirects a call to a C function
#: Functions that answer 0 after `let_go`, and which argument receives it.
_ANSWERS = {"cudaGetDevice": "zero_in_first", "cudaStreamIsCapturing": "zero_in_second"}


def wheel_module(package: str, stem: str, root: str = "cupy_backends") -> Path | None:
    """Return the path of a compiled module of CuPy's wheel."""
    spec = find_spec(root)
    folders = spec.submodule_search_locations if spec else None
    return next(iter(Path(next(iter(folders))).glob(f"cuda/{package}/{stem}.*.so")), None) if folders else None


def symbols(module: Path, *options: str) -> list[tuple[int, str, str]]:
    """Return address, kind and name of a module's symbols."""
    listed = subprocess.run(["nm", *options, str(module)], capture_output=True, text=True, check=True).stdout
    return [
        (int(address or "0", 16), kind, name)
        for address, kind, name in re.findall(r"^([0-9a-f]*)\s+(\w) (\w+)", listed, re.MULTILINE)
    ]


def load_library(soname: str, functions: Mapping[str, Callback], others: Iterable[str] = ()) -> ctypes.CDLL:
    """Create a library in which CuPy finds these functions; `others` exist too and report that they are missing."""
    names = [*functions, *sorted({*others} - {*functions})]
    jumps = "".join(
        f'".globl {name}\\n.type {name}, @function\\n{name}: jmp *jump_table + {8 * place}(%rip)\\n"\n'
        for place, name in enumerate(names)
    )
    source = (
        f'extern "C" {{ __attribute__((visibility("hidden"))) void* jump_table[{len(names)}]; }}\n'
        f'asm(".text\\n"\n{jumps});\n'
        'extern "C" void set_jump(int place, void* target) { jump_table[place] = target; }\n'
        'extern "C" int nothing() { return 0; }\n'
        'extern "C" int zero_in_first(int* answer) { return *answer = 0; }\n'
        'extern "C" int zero_in_second(void*, int* answer) { return *answer = 0; }\n'
    )
    version = f"{soname} {{ global: *; }};\n"
    digest = hashlib.sha256((source + version).encode()).hexdigest()[:16]
    target = BUILD / digest / soname
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / "version.map").write_text(version)
        scratch = target.with_suffix(f".{os.getpid()}")  # each of several processes creates its own
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-Wl,--version-script=version.map", f"-Wl,-soname,{soname}", "-o", scratch],
            cwd=target.parent, check=True, input=source, text=True,
        )  # fmt: skip
        scratch.replace(target)
    library = ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    library.set_jump.argtypes = [ctypes.c_int, ctypes.c_void_p]
    for place, name in enumerate(names):
        library.set_jump(place, _address(functions.get(name) or missing(name)))
        _undo.append((name, partial(library.set_jump, place)))
    _kept.append(library)
    return library


def replace_functions(module: Path, functions: Mapping[str, Callback], pattern: str) -> None:
    """Write jumps over the functions of a module whose names match; those not given report that they are missing."""
    library = ctypes.CDLL(str(module))  # the same mapping as that of the import
    _kept.append(library)
    table = {name: address for address, kind, name in symbols(module) if kind in "tT"}
    entry = f"PyInit_{module.name.split('.')[0]}"
    base = _address(getattr(library, entry)) - table[entry]
    for name, address in table.items():
        if re.fullmatch(pattern, name):
            _write_jump(base + address, _address(functions.get(name) or missing(name)))
            _undo.append((name, partial(_write_jump, base + address)))


def let_go(library: ctypes.CDLL) -> None:
    """Make every later call return without effect: CuPy still calls at interpreter exit, when Python cannot answer.

    The queries for the current device and for a capturing stream answer 0.
    """
    for name, undo in _undo:
        undo(_address(getattr(library, _ANSWERS.get(name, "nothing"))))


def missing(name: str) -> Callback:
    """Return the replacement of a function that is not emulated."""

    def report() -> int:
        print(f"emulated GPU: {name} is not emulated", flush=True)
        return 801

    callback = ctypes.CFUNCTYPE(ctypes.c_int)(report)
    _kept.append(callback)
    return callback


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    _kept.append(function)
    return address


def _write_jump(at: int, target: int) -> None:
    """Write the code ``mov rax, target; jmp rax``."""
    code = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"
    page = at // mmap.PAGESIZE * mmap.PAGESIZE
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), everything):
        raise OSError(ctypes.get_errno(), "the code of CuPy's runtime module cannot be made writable")
    ctypes.memmove(at, code, len(code))
