"""Compare the calls of the table with NumPy, one kernel per process::

    python -m tests.gpu_report.smoke --target gpu merge im2col --dtypes float32

Each call adds a line to the results: whether the kernel ran and was right, and its largest error relative to the
largest value.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv.bench.cases import APART, repeat_normals
from cupyconv.call.dispatch import backend_for
from cupyconv.problem.arrays import is_complex
from cupyconv.problem.plan import KernelLaunch
from tests.gpu_report.calls import CALLS, SmokeCall
from tests.gpu_report.processes import DEAD, add_line, lost_gpu
from tests.targets import Target, gpu_target, host_device_target
from tests.tolerance import finfo

TARGETS = {"gpu": gpu_target, "host_device": host_device_target}

#: Factor of the normally distributed data, so that an LSTM's gates do not saturate.
SCALE = 0.25
#: Itemsize -> allowed error, in steps of the dtype at the largest value.  16-bit types are rounded once or twice; sums
#: of the others have a few hundred roundings.
STEPS = {2: 4, 4: 64, 8: 64, 16: 64}


def arrays_of(call: SmokeCall, dtype: str) -> list[np.ndarray]:
    """Return the arguments in host memory."""
    drawn = (repeat_normals(dtype, i * APART, prod(shape)).reshape(shape) for i, shape in enumerate(call.shapes))
    scaled = [(array * array.dtype.type(SCALE)).astype(array.dtype) for array in drawn]
    if call.of_few_bits:
        return [(np.round(array.astype(np.float64) * 8) / 8).astype(array.dtype) for array in scaled]
    return scaled


def allowed_error(dtype: str, array: np.ndarray) -> float:
    """Return the allowed error relative to the largest value."""
    itemsize = array.real.itemsize if is_complex(dtype) else array.itemsize
    return STEPS[itemsize] * float(finfo(array.dtype).eps)


class Loaded:
    """Records the names of the kernels that a device loads, which are those of the prepared plans."""

    def __init__(self, device: Any) -> None:
        self.names: set[str] = set()
        self._load = device.load
        device.load = self

    def __call__(self, launch: KernelLaunch) -> Any:
        self.names.add(launch.kernel.name)
        return self._load(launch)


def run_call(target: Target, name: str, dtype: str) -> dict[str, Any]:
    """Run one kernel in one dtype; return the contents of its line."""
    call = CALLS[name]
    arrays = arrays_of(call, dtype)
    wide = np.complex128 if is_complex(dtype) else np.float64
    expected = call(*(array.astype(wide) for array in arrays))
    given = [target.to_device(array) for array in arrays]
    device = backend_for({"x": given[0]}).device
    loaded = Loaded(device)
    began = time.perf_counter()
    try:
        results = [target.to_host(result) for result in call(*given, **call.how)]
    finally:
        device.load = loaded._load
    seconds = time.perf_counter() - began
    error, allowed = 0.0, allowed_error(dtype, arrays[0])
    for result, wanted in zip(results, expected, strict=True):
        assert (result.shape, result.dtype) == (wanted.shape, arrays[0].dtype), f"{result.shape} of {result.dtype}"
        difference = np.abs(result.astype(wide) - wanted).max() / np.abs(wanted).max()
        error = max(error, float(difference)) if np.isfinite(difference) else float("inf")
    message = ""
    if not error <= allowed:
        message = f"an error of {error:.2g}, allowed are {allowed:.2g}"
    if name not in loaded.names:
        message = f"{name} did not run, but {', '.join(sorted(loaded.names)) or 'no kernel'}"
    return {"error": error, "allowed": allowed, "seconds": seconds, "message": message}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the calls of some kernels; return 0 if all passed, `DEAD` if one ended the GPU's context, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report.smoke")
    parser.add_argument("kernels", nargs="+", choices=CALLS)
    parser.add_argument("--target", choices=TARGETS, default="gpu")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--results", type=Path, help="add a line for each call to this file")
    parser.add_argument("--no-pool", action="store_true", help="an allocation for each array, as a sanitizer wants it")
    given = parser.parse_args(arguments)
    target = TARGETS[given.target]()
    if given.target == "gpu":
        _prepare_memory(target.xp, pool=not given.no_pool)
    failed = 0
    for name in given.kernels:
        for dtype in given.dtypes or CALLS[name].dtypes:
            try:
                line = run_call(target, name, dtype)
            except Exception as failure:  # the line and the exit status show it
                line = {"message": f"{type(failure).__name__}: {failure}", "seconds": 0.0}
            line = {"part": "smoke", "name": f"{name} {dtype}", "kernel": name, "dtype": dtype} | line
            line["outcome"] = "failed" if line["message"] else "passed"
            failed += line["outcome"] == "failed"
            print(line, flush=True)
            if given.results:
                add_line(given.results, **line)
            if line["outcome"] == "failed" and (failure := lost_gpu()):
                print(f"the GPU no longer works: {failure}", flush=True)
                return DEAD
    return 1 if failed else 0


def _prepare_memory(cupy: Any, *, pool: bool) -> None:
    """Fill the pool's memory with NaN; without a pool, each array has bounds that a sanitizer sees."""
    if pool:
        cupy.cuda.alloc(1 << 26).memset(0xFF, 1 << 26)
    else:
        cupy.cuda.set_allocator(None)


if __name__ == "__main__":
    sys.exit(main())
