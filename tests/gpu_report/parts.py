"""The parts of a report: the processes that each starts, and the line that it adds if one ends without a result."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cupyconv.bench.record import error_line, read_record
from tests import host_device
from tests.gpu_report.calls import CALLS, EXCHANGING
from tests.gpu_report.processes import DEAD, Ended, Job, add_line, read_lines, run_jobs


class Skipped(Exception):
    """A part cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Run:
    """One report: its folder, its contents, and its number of processes."""

    out: Path
    #: Why there is no GPU; empty if there is one.
    no_gpu: str = ""
    kernels: tuple[str, ...] = tuple(CALLS)
    processes: int = 2
    commit: str = ""
    #: Files and directories of tests.
    tests: tuple[str, ...] = ("tests",)
    #: The bench runs only the cases whose names contain this.
    cases: str = ""

    @property
    def target(self) -> str:
        return "host_device" if self.no_gpu else "gpu"

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def bench_record(self) -> Path:
        return self.out / "bench.json"

    def lines(self, part: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.results) if line["part"] == part]

    def run(self, jobs: Sequence[Job], until: float, then: Callable[[Ended], Job | None]) -> None:
        run_jobs(jobs, at_once=self.processes, until=until, log=self.out / "log.txt", then=then)

    def need_gpu(self) -> None:
        if self.no_gpu:
            raise Skipped(self.no_gpu)

    def failed(self, part: str, name: str, ended: Ended, **more: str) -> None:
        """Add a failure for what a process was running when it ended by itself."""
        message = f"the process ended with status {ended.status}\n{ended.output}"
        add_line(self.results, part=part, name=name, outcome="failed", seconds=ended.seconds, message=message, **more)


def environment(run: Run, until: float) -> None:
    command = _module("environment", "--target", run.target, "--results", str(run.results), "--commit", run.commit)

    add_line(run.results, part="environment", expected=1)

    def then(ended: Ended) -> None:
        if ended.status not in (0, None):
            run.failed("environment", "environment", ended)

    run.run([Job("environment", command)], until, then)


def smoke(run: Run, until: float) -> None:
    """Run each kernel in its own process; if a call ends the process, another continues after that call."""
    reason = host_device.unavailable() if run.no_gpu else None
    if reason:
        raise Skipped(f"{run.no_gpu}, and no host device: {reason}")
    add_line(run.results, part="smoke", expected=sum(len(CALLS[name].dtypes) for name in run.kernels))

    def job(name: str, dtypes: Sequence[str]) -> Job:
        where = ("--target", run.target, "--results", str(run.results))
        return Job(name, _module("smoke", name, *where, "--dtypes", *dtypes))

    def then(ended: Ended) -> Job | None:
        done = {line["dtype"] for line in run.lines("smoke") if line.get("kernel") == ended.job.name}
        left = [dtype for dtype in CALLS[ended.job.name].dtypes if dtype not in done]
        if not left or ended.status is None:
            return None
        if ended.status == DEAD:
            return job(ended.job.name, left)
        run.failed("smoke", f"{ended.job.name} {left[0]}", ended, kernel=ended.job.name, dtype=left[0])
        return job(ended.job.name, left[1:]) if left[1:] else None

    run.run([job(name, CALLS[name].dtypes) for name in run.kernels], until, then)


def compilation(run: Run, until: float) -> None:
    """Compile all variants, distributed to the processes."""
    run.need_gpu()
    where = ("--results", str(run.results))
    jobs = [Job(share, _module("compilation", "--share", share, *where)) for share in _shares(run, "compile")]

    def then(ended: Ended) -> None:
        if ended.status not in (0, 1, None):
            run.failed("compile", f"share {ended.job.name}", ended)

    run.run(jobs, until, then)


def tests(run: Run, until: float) -> None:
    """Run the tests marked `gpu`, distributed to the processes; if one ends early, another one continues."""
    run.need_gpu()
    run_tests(run, until, "-m", "gpu")


def run_tests(run: Run, until: float, *options: str) -> None:
    def job(share: str) -> Job:
        plugin = ("-p", "tests.gpu_report.pytest_plugin", "--report-to", str(run.results), "--share", share)
        quietly = ("-q", "--no-header", "--capture=sys", "-p", "no:cacheprovider", "--continue-on-collection-errors")
        variables = {"CUPYCONV_REQUIRE_GPU": "1"} | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        return Job(share, (sys.executable, "-m", "pytest", *quietly, *plugin, *options, *run.tests), variables)

    def then(ended: Ended) -> Job | None:
        lines = run.lines("tests")
        begun = [line["begun"] for line in lines if "begun" in line and line["share"] == ended.job.name]
        if ended.status is None:
            return None
        if begun and begun[-1] not in {line.get("name") for line in lines}:  # it ended the process, or ran too long
            run.failed("tests", begun[-1], ended)
            return job(ended.job.name)
        if ended.status not in (0, 1, 5, DEAD):  # 0: all passed, 1: some failed, 5: no tests, DEAD: GPU lost
            run.failed("tests", f"share {ended.job.name}", ended)
        return job(ended.job.name) if ended.status == DEAD else None

    run.run([job(share) for share in _shares(run, "tests")], until, then)


SANITIZERS = ("memcheck", "racecheck", "synccheck")
#: Exit status of a sanitizer that found an error.
FOUND = 99


def sanitizer(run: Run, until: float) -> None:
    """Run NVIDIA's sanitizers on the smoke calls of kernels whose threads exchange values, in two dtypes."""
    run.need_gpu()
    run_sanitizers(run, until)


def run_sanitizers(run: Run, until: float) -> None:
    program = find_sanitizer()
    if program is None:
        raise Skipped("compute-sanitizer is neither on PATH nor in CUDA's folder")
    jobs = []
    for kernel in (kernel for kernel in EXCHANGING if kernel in run.kernels):
        for tool in SANITIZERS:
            checked = (program, "--tool", tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no")
            ours = () if tool == "memcheck" else ("--kernel-name", f"kns={kernel}")  # leaves out cuBLAS's kernels
            call = _module("smoke", kernel, "--target", run.target, "--no-pool", "--dtypes", "float32", "float16")
            jobs.append(Job(f"{tool} {kernel}", (*checked, *ours, *call)))
    add_line(run.results, part="sanitizer", expected=len(jobs))

    def then(ended: Ended) -> None:
        if ended.status == 0:
            add_line(
                run.results, part="sanitizer", name=ended.job.name, outcome="passed", seconds=ended.seconds, message=""
            )
        elif ended.status is not None:
            run.failed("sanitizer", ended.job.name, ended)

    run.run(jobs, until, then)


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, found on PATH or in CUDA's folder, or None."""
    roots = [Path(root) for name in ("CUDA_PATH", "CUDA_HOME") if (root := os.environ.get(name))]
    roots += sorted(Path("/usr/local").glob("cuda*"))
    places = [
        os.environ.get("PATH", ""),
        *(str(root / "bin") for root in roots),
        *(str(r / "compute-sanitizer") for r in roots),
    ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def bench(run: Run, until: float) -> None:
    """Run the bench, which writes its own record; if its process ends early, another one resumes it."""
    run.need_gpu()
    run_bench(run, until, "--gpu")


#: Seconds in which the bench can end by itself.
TO_END = 10.0


def run_bench(run: Run, until: float, *options: str) -> None:
    seconds = max(1.0, until - time.monotonic() - TO_END)
    what = ("bench", "--seconds", f"{seconds:.0f}", "--only", run.cases, "--json", str(run.bench_record))
    first = Job("bench", (sys.executable, "-m", "cupyconv", *what, *options))
    ended_in = set[str]()

    def then(ended: Ended) -> Job | None:
        if not run.bench_record.exists():
            run.failed("bench", "bench", ended)
            return None
        case = read_record(run.bench_record)["running"]
        if ended.status is None or case is None or case in ended_in:
            return None
        ended_in.add(case)
        return replace(first, command=(*first.command, "--resume"))

    run.run([first], until, then)
    if not run.bench_record.exists():
        return
    record = read_record(run.bench_record)
    add_line(run.results, part="bench", expected=len(record["cases"]) + len(record["errors"]) + len(record["skipped"]))
    for row in record["cases"]:
        add_line(run.results, part="bench", name=row["case"]["name"], outcome="passed", message="")
    if record["running"] is not None:
        message = "the process ended while this case was measured"
        add_line(run.results, part="bench", name=record["running"], outcome="failed", message=message)
    for error in record["errors"]:
        add_line(run.results, part="bench", name=error["case"], outcome="failed", message=error_line(error))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tests.gpu_report.{name}", *arguments)


def _shares(run: Run, part: str) -> list[str]:
    """Return the processes' shares.  One result is expected of each process until it adds the real number."""
    shares = [f"{number}/{run.processes}" for number in range(run.processes)]
    for share in shares:
        add_line(run.results, part=part, share=share, expected=1)
    return shares


#: The parts in order, each with its share of the time.  The time that a part does not use goes to those after it.
PARTS = {
    "smoke": (smoke, 0.15),
    "compile": (compilation, 0.2),
    "tests": (tests, 0.3),
    "sanitizer": (sanitizer, 0.15),
    "bench": (bench, 0.2),
}
