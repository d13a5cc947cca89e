"""Compile and load every kernel variant that planning may request on this GPU; CuPy caches it::

    python -m tests.gpu_report.compilation --share 0/16 --results FILE

Each of sixteen processes compiles every sixteenth variant.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyconv.problem.machine import nearest_gpu
from cupyconv.problem.plan import Kernel, KernelLaunch
from tests.gpu_report.processes import add_line, slice_of
from tests.variants import all_variants, is_planned


def planned_variants(capability: int) -> list[Kernel]:
    """Return the variants that planning may request on a GPU of this compute capability."""
    known = int(nearest_gpu(capability).arch.removeprefix("sm_"))
    return [kernel for kernel in all_variants() if is_planned(kernel, known)]


def compile_variants(device: Any, kernels: Sequence[Kernel], results: Path, share: str = "") -> int:
    """Load each variant and write a line for it; return the number of failures."""
    failed = 0
    add_line(results, part="compile", share=share, expected=len(kernels))
    for kernel in kernels:
        name = " ".join([kernel.name, *(f"{macro}={value}" for macro, value in kernel.macros)])
        began, message = time.perf_counter(), ""
        try:
            device.load(KernelLaunch(kernel, (1, 1, 1), 32, ()))
        except Exception as failure:  # the line and the exit status show it
            message = f"{type(failure).__name__}: {failure}"
            failed += 1
        seconds, outcome = time.perf_counter() - began, "failed" if message else "passed"
        add_line(results, part="compile", name=name, outcome=outcome, seconds=seconds, message=message)
        print(f"{name}: {seconds:.2f} s {message}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report.compilation")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args(arguments)
    from cupyconv.cuda.run.cupy_device import CupyDevice

    device = CupyDevice(0)
    kernels = planned_variants(device.capability)[slice_of(given.share)]
    return 1 if compile_variants(device, kernels, given.results, given.share) else 0


if __name__ == "__main__":
    sys.exit(main())
