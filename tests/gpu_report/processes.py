"""Processes that run in parallel until a deadline, and the file of results that all of them append lines to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]

#: The exit status of a process whose GPU no longer works.
DEAD = 70


def add_line(results: Path, **line: Any) -> None:
    """Append a line at once, so that no line is lost when the process ends."""
    with results.open("ab", buffering=0) as file:  # one write per line, so that lines of several processes do not mix
        file.write((json.dumps(line) + "\n").encode())


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return all lines so far."""
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


@dataclass(frozen=True)
class Job:
    """A command, run from the root of the checkout."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit status (None if its time was over) and the relevant part of its output."""

    job: Job
    status: int | None
    seconds: float
    output: str


def lost_gpu() -> str:
    """Return the GPU's error if this process can no longer use it, for example after a fault in a kernel; else ""."""
    cupy = sys.modules.get("cupy")
    try:
        if cupy is not None and cupy.cuda.is_available():
            cupy.cuda.runtime.deviceSynchronize()
    except Exception as failure:
        return str(failure)
    return ""


def slice_of(share: str) -> slice:
    """Return the slice of a share: ``"2/8"`` is every eighth item, from the third on."""
    number, of = map(int, share.split("/"))
    return slice(number, None, of)


class _Running:
    def __init__(self, job: Job) -> None:
        self.job, self.began = job, time.monotonic()
        self.output: IO[bytes] = tempfile.TemporaryFile()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # The job gets its own process group, so that `kill` also ends every process that the job starts.
        self.process = subprocess.Popen(
            job.command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **job.variables},
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()

    def ended(self, log: Path, *, in_time: bool) -> Ended:
        seconds = time.monotonic() - self.began
        status = self.process.returncode if in_time else None
        with self.output as file:
            file.seek(0)
            output = file.read().decode(errors="replace")
        how = "its time was over" if status is None else f"exit status {status}"
        with log.open("a", encoding="utf-8") as file:
            file.write(
                f"===== {self.job.name}: {how} after {seconds:.1f} s\n$ {' '.join(self.job.command)}\n{output}\n"
            )
        return Ended(self.job, status, seconds, last_words(output))


def last_words(output: str, most: int = 4000) -> str:
    """Return the end of the output; for a crash its beginning, because Python names the error before the place."""
    crash = output.rfind("Fatal Python error")
    return output[crash:][:most] if crash >= 0 else output[-most:]


def run_jobs(
    jobs: Iterable[Job],
    *,
    at_once: int,
    until: float,
    log: Path,
    then: Callable[[Ended], Job | None] = lambda ended: None,
) -> None:
    """Run jobs until all have ended or until the time `until` (of `time.monotonic`); write their output to the log.

    `then` is called for each job that has ended or was killed, and may return another job to run.
    """
    waiting, running = deque(jobs), list[_Running]()
    try:
        while waiting or running:
            in_time = time.monotonic() < until
            while in_time and waiting and len(running) < at_once:
                running.append(_Running(waiting.popleft()))
            if not in_time:
                waiting.clear()
            for one in [one for one in running if one.process.poll() is not None or not in_time]:
                in_time_itself = one.process.poll() is not None
                one.kill()
                running.remove(one)
                another = then(one.ended(log, in_time=in_time_itself))
                if another is not None:
                    waiting.append(another)
            time.sleep(0.02)
    finally:
        for one in running:
            one.kill()
