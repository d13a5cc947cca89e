"""``python -m cupyconv bench``: times the library and its peers in turns on the same arrays, with checked results.

======================  ===========================================================================
`cases.py`              one case as data: shapes, sizes, arrays, the library's call
`recurrent_layers.py`   cases of recurrent layers, and their NumPy peer
`tables.py`             the tables of cases
`machines.py`           the measured machine, NumPy or a GPU, and its properties
`clock.py`              events, warm-up, empty caches, rounds in which implementations take turns
`reference.py`          the check of results before they are timed
`floors.py`             the rates of a copy and of a GEMM, measured in the same run
`peers.py`              the interface of a participant, which offers implementations of a case
`own_ways.py`           the library: its choice, its methods, and what the choice is compared with
`array_peers.py`        NumPy, CuPy and the loop over samples as peers
`torch_peers.py`        PyTorch
`onnxruntime_peer.py`   ONNX Runtime
`jax_peer.py`           JAX
`filter_peers.py`       SciPy and OpenCV, for filters
`runner.py`             the list of participants, and the runner of one participant
`processes.py`          a runner in a separate process
`session.py`            a run through a table within a budget of seconds
`record.py`             the results file
`choice.py`             the choice of method="auto", compared with the best method
`memory.py`             memory at several batch sizes
`report.py`             the printed page
`progress.py`           the progress line on a terminal
`web_page.py`           a record as a page for a browser
`charts.py`             the page's charts
`markup.py`             HTML from elements
======================  ===========================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cupyconv.bench.machines import Machine, cuda_machine, numpy_machine
from cupyconv.bench.memory import growing
from cupyconv.bench.own_ways import Ours
from cupyconv.bench.processes import ProcessRunner
from cupyconv.bench.record import OURS, read_record
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.runner import GPU_PEERS, PEERS, AnyRunner, Runner, SharedArrays
from cupyconv.bench.session import Session, Watch
from cupyconv.bench.tables import gpu_cases, numpy_cases
from cupyconv.bench.web_page import write_page
from cupyconv.configuration import cupy_with_gpu
from cupyconv.numpy.threads import BLAS

__all__ = ["run_bench"]

Begin = Mapping[str, Callable[[], AnyRunner]]


def run_bench(
    *,
    gpu: bool,
    seconds: float,
    only: str,
    groups: tuple[str, ...] | None,
    peers: tuple[str, ...] | None,
    threads: int | None,
    methods: tuple[str, ...] | None,
    json: Path | None,
    resume: bool,
    report: Path | None,
    source: Path | None,
) -> int:
    """Measure a table, or draw an earlier record.

    The exit status is 0 if nothing failed, and 2 if the request cannot be measured.
    """
    if source is not None:
        return _drawn(source, report)
    if report is not None and json is None:
        json = report / "results.json"
        report.mkdir(parents=True, exist_ok=True)
    known = GPU_PEERS if gpu else PEERS
    unknown = [name for name in peers or () if name not in known]
    if unknown:
        return _refused(f"unknown peers: {', '.join(unknown)}; known are {', '.join(known)}")
    if gpu and threads is not None:
        return _refused("--threads is for the CPU: omit it with --gpu")
    if resume and json is None:
        return _refused("--resume needs --json with the file to continue")
    cupy, state = cupy_with_gpu() if gpu else (None, "")
    if gpu and cupy is None:
        return _refused(f"no GPU to measure: {state}")
    table: Sequence[AnyCase] = gpu_cases() if gpu else numpy_cases()
    there = dict.fromkeys(case.group for case in table)
    if groups is not None and (unknown := [name for name in groups if name not in there]):
        return _refused(f"unknown groups: {', '.join(unknown)}; known are {', '.join(there)}")
    cases = [case for case in table if only in case.name and (groups is None or case.group in groups)]
    if not cases:
        return _refused(f"no case has {only!r} in its name")
    machine = numpy_machine() if cupy is None else cuda_machine(cupy)
    arrays = SharedArrays(machine)
    chosen = tuple(known) if peers is None else peers
    if gpu:
        begin = _in_this_process(machine, arrays, chosen, methods)
    else:
        threads = threads or BLAS.threads
        begin = in_processes(chosen, threads, methods)
    session = Session(
        machine, cases, begin,
        seconds=seconds, threads=threads, arrays=arrays, path=json, watch=Watch() if gpu else None,
        growing=growing(cases),
    )  # fmt: skip
    status = session.run(resume=resume)
    if report is not None:
        print(f"\nweb page: {write_page(session.record, report)}")
    return status


def _drawn(source: Path, report: Path | None) -> int:
    """Draw the page of an earlier run."""
    if report is None:
        return _refused("--from needs --report with the directory of the web page")
    try:
        record = read_record(source)
        if not (isinstance(record, dict) and {"environment", "cases", "errors"} <= record.keys()):
            raise ValueError(f"{source} is not a results file")
    except (OSError, ValueError) as failure:
        return _refused(f"--from needs a file that --json wrote: {failure}")
    print(f"web page: {write_page(record, report)}")
    return 0


def in_processes(peers: Sequence[str], threads: int, methods: tuple[str, ...] | None) -> Begin:
    """Return constructors that run the library and each peer in a separate process."""
    begin: dict[str, Callable[[], AnyRunner]] = {OURS: partial(ProcessRunner, OURS, threads, methods)}
    return begin | {name: partial(ProcessRunner, name, threads) for name in peers}


def _in_this_process(
    machine: Machine, arrays: SharedArrays, peers: Sequence[str], methods: tuple[str, ...] | None
) -> Begin:
    """Return constructors that run all participants in this process on the same arrays, as a GPU's context requires."""
    begin: dict[str, Callable[[], AnyRunner]] = {OURS: lambda: Runner(machine, Ours(methods), arrays)}
    return begin | {name: lambda make=GPU_PEERS[name]: Runner(machine, make(machine), arrays) for name in peers}


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2
