"""NumPy and CuPy for the demo: arrays, a clock, counted memory, free memory."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupyconv.demo.page import Page, megabytes, milliseconds

Call = Callable[[], Any]


@dataclass(frozen=True)
class Library:
    """An array library on this machine."""

    name: str
    description: str
    xp: ModuleType
    to_host: Callable[[Any], np.ndarray]
    #: Seconds of one call, until the GPU has finished.
    seconds: Callable[[Call], float]
    #: Peak bytes that one call allocates, including its result.
    peak_bytes: Callable[[Call], int]
    free_bytes: Callable[[], int | None]


@dataclass(frozen=True)
class Measured:
    """Measurements of one implementation of a job on one library."""

    seconds: float
    beyond_result: int
    error: float
    result: Any


def numpy_library() -> Library:
    """NumPy on the host."""
    cores = os.cpu_count() or 1
    processor = _proc_entry("cpuinfo", "model name") or platform.processor() or platform.machine()
    description = f"NumPy {np.__version__}, {processor}, {cores} core{'s' * (cores > 1)}"
    return Library("NumPy", description, np, np.asarray, _host_seconds, _host_peak, host_free_bytes)


def cupy_library(cupy: ModuleType) -> Library:
    """CuPy on the current GPU."""
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    description = f"CuPy {cupy.__version__}, {name.decode() if isinstance(name, bytes) else name}"

    def seconds(call: Call) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) / 1e3

    def peak_bytes(call: Call) -> int:
        with _pool_counter(cupy) as counter:
            call()
        return counter.peak

    def free_bytes() -> int:
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    return Library("CuPy", description, cupy, cupy.asnumpy, seconds, peak_bytes, free_bytes)


def measure(
    page: Page, library: Library, ways: Mapping[str, Call], error_of: Callable[[np.ndarray], float], rounds: int
) -> dict[str, Measured]:
    """Check results, count memory, then return median times of rounds in which every implementation runs in turn."""
    results = {name: call() for name, call in ways.items()}
    errors = {name: error_of(library.to_host(result)) for name, result in results.items()}
    peaks = {name: library.peak_bytes(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in page.progress(range(rounds), f"timing on {library.name}"):
        for name, call in ways.items():
            times[name].append(library.seconds(call))
    return {
        name: Measured(
            statistics.median(times[name]), max(0, peaks[name] - results[name].nbytes), errors[name], results[name]
        )
        for name in ways
    }


def table_of(page: Page, libraries: Sequence[Library], measured: Sequence[dict[str, Measured]]) -> None:
    """Print a row per implementation, with its time, memory and error per library, and the difference between two."""
    header = [""]
    for library in libraries:
        header += [library.name, "extra memory", "error"]
    rows = []
    for name in measured[-1]:
        row = [name]
        known = [ways.get(name) for ways in measured]
        for way in known:
            row += [milliseconds(way.seconds), megabytes(way.beyond_result), f"{way.error:.1e}"] if way else [""] * 3
        if len(libraries) > 1:
            row.append(_difference(libraries, known))
        rows.append(row)
    if len(libraries) > 1:
        header.append("difference")
    page.table(header, rows)


def host_free_bytes() -> int | None:
    """Return the bytes of memory available without swapping, or None if the system does not report them."""
    found = [free for free in (_meminfo(), _cgroup_room(), _windows_free()) if free is not None]
    if not found and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min(found, default=None)


def _pool_counter(cupy: ModuleType) -> Any:
    """Return a memory hook that counts the bytes allocated from CuPy's pool since it began, and their peak."""

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[name-defined]
        name = "cupyconv_demo"
        now = peak = 0

        def malloc_postprocess(self, **values: Any) -> None:
            self.now += values["mem_size"]
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, **values: Any) -> None:
            self.now -= values["mem_size"]

    return Counter()


def _difference(libraries: Sequence[Library], measured: Sequence[Measured | None]) -> str:
    first, last = measured[0], measured[-1]
    if first is None or last is None:
        return ""
    return f"{np.abs(libraries[0].to_host(first.result) - libraries[-1].to_host(last.result)).max():.1e}"


def _host_seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _host_peak(call: Call) -> int:
    tracemalloc.start()  # NumPy reports its arrays to tracemalloc
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _proc_entry(file: str, key: str) -> str | None:
    """Return the first value of a key in a file of /proc, or None if there is none."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _meminfo() -> int | None:
    available = _proc_entry("meminfo", "MemAvailable:")
    return int(available.split()[0]) << 10 if available else None


def _cgroup_room() -> int | None:
    """Return the bytes left below a container's limit.  Reclaimable file cache counts as used, so it is added back."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        statistic = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistic.get("inactive_file", 0))


def _windows_free() -> int | None:
    if sys.platform != "win32":
        return None

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *(
                (name, ctypes.c_ulonglong)
                for name in ("total", "free", "page", "page_free", "virtual", "virtual_free", "extended")
            ),
        )

    status = Status(length=ctypes.sizeof(Status))
    return status.free if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
