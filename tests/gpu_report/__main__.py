"""The command: it runs the parts in turn, each within its share of the time, and writes a report after each."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from cupyconv.bench.record import read_record
from cupyconv.configuration import cupy_with_gpu
from tests.gpu_report.calls import CALLS
from tests.gpu_report.parts import PARTS, Run, Skipped, environment
from tests.gpu_report.processes import add_line, read_lines
from tests.gpu_report.report import as_json, in_words, is_whole, report_of

#: Maximum seconds of the environment part.
FOR_ENVIRONMENT = 60.0
#: Maximum of the default number of processes; each holds a CUDA context.
MAX_PROCESSES = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every expected result is there and none failed, 2 if a required GPU is missing, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_report",
        description="Test and measure the library on this machine's GPU, and write a report of it.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, for the report")
    parser.add_argument("--minutes", type=float, default=8, help="the time to use (default: 8)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="these only (default: all)")
    parser.add_argument(
        "--kernel", nargs="+", choices=CALLS, default=list(CALLS), help="the smoke of these (default: all)"
    )
    processes = min(os.cpu_count() or 1, MAX_PROCESSES)
    parser.add_argument("--processes", type=int, default=processes, help=f"side by side (default here: {processes})")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    given = parser.parse_args(arguments)
    cupy, state = cupy_with_gpu()
    if cupy is None and os.environ.get("CUPYCONV_REQUIRE_GPU") == "1":
        print(f"{state}, and CUPYCONV_REQUIRE_GPU=1 asks for a GPU", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        given.out.resolve(), no_gpu="" if cupy else state, kernels=tuple(given.kernel), processes=given.processes,
        commit=given.commit,
    )  # fmt: skip
    if run.results.exists():
        parser.error(f"{run.out} has a report already")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running processes are ended too
    return report(run, [name for name in PARTS if name in given.part], time.monotonic() + 60 * given.minutes)


def report(run: Run, names: Sequence[str], until: float) -> int:
    """Run the parts; each gets its share of the remaining time."""
    environment(run, min(until, time.monotonic() + FOR_ENVIRONMENT))
    for number, name in enumerate(names):
        began = time.monotonic()
        part, share = PARTS[name]
        share /= sum(PARTS[other][1] for other in names[number:])
        print(f"{name}: at most {share * (until - began):.0f} s", flush=True)
        try:
            part(run, began + share * (until - began))
        except Skipped as reason:
            add_line(run.results, part=name, skipped=str(reason))
        except Exception:  # the report shows it, and the next part runs
            add_line(run.results, part=name, name=name, outcome="failed", message=traceback.format_exc())
        add_line(run.results, part=name, part_seconds=time.monotonic() - began)
        found = write_report(run)
    print(f"\n{in_words(found)}\n\n{run.out / 'gpu-report.json'} has all of it", flush=True)
    return 0 if is_whole(found) else 1


def write_report(run: Run) -> dict:
    """Write the report so far, and return it."""
    record = read_record(run.bench_record) if run.bench_record.exists() else None
    found = report_of(read_lines(run.results), record, run.target)
    (run.out / "gpu-report.json").write_text(as_json(found), encoding="utf-8")
    return found


if __name__ == "__main__":
    sys.exit(main())
