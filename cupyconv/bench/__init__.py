"""``python -m cupyconv bench``: the library and its peers on the same arrays, checked, timed in turns, written down.

======================  ===========================================================================
`cases.py`              one case as data: shapes, sizes, arrays, the library's call
`recurrent_layers.py`   the same of a recurrent layer, and its NumPy peer
`tables.py`             the tables of cases
`machines.py`           the machine that is measured, NumPy or a GPU, and its properties
`clock.py`              events, warm-up, empty caches, rounds in which every way has its turn
`reference.py`          what results are held to before they are timed
`floors.py`             the rates of a copy and of a GEMM, measured in the same run
`peers.py`              what it takes to be measured: a participant offers ways to do a case
`own_ways.py`           the library's: its choice, its methods, what the choice is held to
`array_peers.py`        NumPy, CuPy and the loop over samples as peers
`torch_peers.py`        PyTorch
`onnxruntime_peer.py`   ONNX Runtime
`jax_peer.py`           JAX
`filter_peers.py`       SciPy and OpenCV, for filters
`runner.py`             who takes part, and one participant at work
`processes.py`          the same in a process of its own
`session.py`            a run through a table within a budget of seconds
`record.py`             the results file
`choice.py`             what method="auto" chose, beside the best
`memory.py`             memory at several batch sizes
`report.py`             the printed page
`progress.py`           the line on a terminal while a run goes on
`web_page.py`           a record as a page for a browser
`charts.py`             its drawings
`markup.py`             HTML by elements
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
    """Measure a table, or draw what was measured; the exit status is 0 where nothing failed, 2 where what was asked for
    cannot be measured."""
    if source is not None:
        return _drawn(source, report)
    if report is not None and json is None:
        json = report / "results.json"
        report.mkdir(parents=True, exist_ok=True)
    known = GPU_PEERS if gpu else PEERS
    unknown = [name for name in peers or () if name not in known]
    if unknown:
        return _refused(f"no peer is called {', '.join(unknown)}; there are {', '.join(known)}")
    if gpu and threads is not None:
        return _refused("--threads are the processor's: leave it out with --gpu")
    if resume and json is None:
        return _refused("--resume goes on with the file of --json: name it")
    cupy, state = cupy_with_gpu() if gpu else (None, "")
    if gpu and cupy is None:
        return _refused(f"no GPU to measure: {state}")
    table: Sequence[AnyCase] = gpu_cases() if gpu else numpy_cases()
    there = dict.fromkeys(case.group for case in table)
    if groups is not None and (unknown := [name for name in groups if name not in there]):
        return _refused(f"no group is called {', '.join(unknown)}; there are {', '.join(there)}")
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
        print(f"\nthe page: {write_page(session.record, report)}")
    return status


def _drawn(source: Path, report: Path | None) -> int:
    """The page of an earlier run."""
    if report is None:
        return _refused("--from draws the page of --report: name its directory")
    try:
        record = read_record(source)
        if not (isinstance(record, dict) and {"environment", "cases", "errors"} <= record.keys()):
            raise ValueError(f"{source} has other things")
    except (OSError, ValueError) as failure:
        return _refused(f"--from needs a file that --json wrote: {failure}")
    print(f"the page: {write_page(record, report)}")
    return 0


def in_processes(peers: Sequence[str], threads: int, methods: tuple[str, ...] | None) -> Begin:
    """The library and each peer in a process of its own."""
    begin: dict[str, Callable[[], AnyRunner]] = {OURS: partial(ProcessRunner, OURS, threads, methods)}
    return begin | {name: partial(ProcessRunner, name, threads) for name in peers}


def _in_this_process(
    machine: Machine, arrays: SharedArrays, peers: Sequence[str], methods: tuple[str, ...] | None
) -> Begin:
    """All of them around the same arrays, as a GPU's context is."""
    begin: dict[str, Callable[[], AnyRunner]] = {OURS: lambda: Runner(machine, Ours(methods), arrays)}
    return begin | {name: lambda make=GPU_PEERS[name]: Runner(machine, make(machine), arrays) for name in peers}


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2
