"""An allocator for NumPy that fails from its n-th allocation on, installed as a handler of NEP 49.

The allocator is a few lines of C, because it runs where Python code may not.  NumPy accepts it as a capsule of a
``PyDataMem_Handler``; `PyDataMem_SetHandler` is entry 304 of its C API.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

_SET_HANDLER = 304
_SOURCE = """
#include <stdlib.h>
long failing_count = 0, failing_number = -1, failing_times = 1;
static int refuses(void) {
    long since = failing_count++ - failing_number;
    return failing_number >= 0 && 0 <= since && since < failing_times;
}
static void *take(void *ctx, size_t size) { return refuses() ? 0 : malloc(size); }
static void *take_zeros(void *ctx, size_t count, size_t size) { return refuses() ? 0 : calloc(count, size); }
static void *change(void *ctx, void *pointer, size_t size) { return refuses() ? 0 : realloc(pointer, size); }
static void give_back(void *ctx, void *pointer, size_t size) { free(pointer); }
struct { char name[127]; unsigned char version; void *ctx, *malloc, *calloc, *realloc, *free; } failing_handler = {
    "failing", 1, 0, (void *)take, (void *)take_zeros, (void *)change, (void *)give_back};
"""


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    directory = Path(tempfile.mkdtemp(prefix="failing_memory"))
    try:
        source, library = directory / "failing.c", directory / "failing.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(directory)


@cache
def _set_handler() -> Callable[[object], object]:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    api = pointer_of(np._core._multiarray_umath._ARRAY_API, None)
    functions = ctypes.cast(api, ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[_SET_HANDLER])


@contextmanager
def failing_memory(number: int, times: int = 1) -> Iterator[Callable[[], int]]:
    """Let `times` of NumPy's allocations in this thread fail, from the one with this number on; none if negative.

    The context manager yields a function that returns the number of allocations so far.
    """
    library, new_capsule = _library(), ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    count, fails, failures = (ctypes.c_long.in_dll(library, f"failing_{name}") for name in ("count", "number", "times"))
    handler = ctypes.c_char.in_dll(library, "failing_handler")
    before = _set_handler()(new_capsule(ctypes.addressof(handler), b"mem_handler", None))
    count.value, fails.value, failures.value = 0, number, times
    try:
        yield lambda: count.value
    finally:
        fails.value = -1
        _set_handler()(before)
