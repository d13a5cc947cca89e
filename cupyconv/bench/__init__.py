"""``python -m cupyconv bench``: the library and its peers on the same arrays, checked, timed in turns, written down.

=====================  ============================================================================
`cases.py`             one case as data: shapes, sizes, arrays, the library's call
`recurrent_layers.py`  the same of a recurrent layer, and its NumPy peer
`tables.py`            the tables of cases
`machines.py`          the machine that is measured, NumPy or a GPU, and its properties
`clock.py`             events, warm-up, empty caches, rounds in which every way has its turn
`reference.py`         what results are held to before they are timed
`floors.py`            the rates of a copy and of a GEMM, measured in the same run
`peers.py`             NumPy, CuPy and the loop over samples as peers
`torch_peers.py`       PyTorch as a peer, where it is installed
`session.py`           a run through a table within a budget of seconds
`record.py`            the results file
`choice.py`            what method="auto" chose, beside the best
`report.py`            the printed page
=====================  ============================================================================
"""

from __future__ import annotations

import sys
from pathlib import Path

from cupyconv.bench.machines import cuda_machine, numpy_machine
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.session import Session, Watch
from cupyconv.bench.tables import gpu_cases, numpy_cases, recurrent_cases
from cupyconv.bench.torch_peers import find_torch
from cupyconv.configuration import cupy_with_gpu

__all__ = ["run_bench"]


def run_bench(
    *,
    gpu: bool,
    seconds: float,
    only: str,
    methods: tuple[str, ...] | None,
    torch: bool,
    json: Path | None,
    resume: bool,
) -> int:
    """Measure a table; the exit status is 0 where nothing failed, 2 where there is no GPU that was asked for."""
    if resume and json is None:
        print("--resume goes on with the file of --json: name it", file=sys.stderr)
        return 2
    if gpu:
        cupy, state = cupy_with_gpu()
        if cupy is None:
            print(f"no GPU to measure: {state}", file=sys.stderr)
            return 2
        machine = cuda_machine(cupy)
    else:
        machine = numpy_machine()
    table: tuple[AnyCase, ...] = (*recurrent_cases(gpu=gpu), *(gpu_cases() if gpu else numpy_cases()))
    cases = [case for case in table if only in case.name]
    if not cases:
        print(f"no case has {only!r} in its name", file=sys.stderr)
        return 2
    session = Session(
        machine,
        cases,
        seconds=seconds,
        methods=methods,
        torch=find_torch if torch else lambda: None,
        path=json,
        watch=Watch() if gpu else None,
    )
    return session.run(resume=resume)
