"""A runner in a separate process: the two ends of a pipe.

A request is the name of a `Runner` method with its arguments, pickled.  The response is the returned value or the
raised exception.  The environment of the process sets the number of threads, because some libraries read it only there.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cupyconv.bench.clock import Sample
from cupyconv.bench.machines import numpy_machine
from cupyconv.bench.own_ways import Ours
from cupyconv.bench.peers import NotInstalled, Participant
from cupyconv.bench.record import OURS
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.runner import PEERS, Offer, Runner

#: Environment variables for the number of threads: OpenBLAS, MKL, BLIS, Accelerate, OpenMP, and XLA for jax.
THREADS_OF = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OMP_NUM_THREADS",
    "PJRT_NPROC",
)


class Raised(Exception):
    """An exception of the other process, as text."""


class ProcessRunner:
    """`AnyRunner` in a process that starts immediately, and restarts after it has ended."""

    def __init__(self, name: str, threads: int, methods: tuple[str, ...] | None = None) -> None:
        self._name, self._threads, self._methods = name, threads, methods
        self._begin()

    def _begin(self) -> None:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **dict.fromkeys(THREADS_OF, str(self._threads)), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cupyconv.bench.processes import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        self._send((self._name, self._threads, self._methods))

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdout is not None
        try:
            self._send((method, arguments))
            answer, raised = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            status = self._process.wait()
            raise Raised(f"its process ended with status {status}") from None
        if raised is None:
            return answer
        kind, text = raised
        raise NotInstalled(text) if kind == NotInstalled.__name__ else Raised(f"{kind}: {text}")

    def properties(self) -> dict[str, Any]:
        return self._ask("properties")

    def set_up(self, case: AnyCase) -> tuple[list[Offer], dict[str, Any]]:
        if self._process.poll() is not None:  # a case ended the process
            self.close()
            self._begin()
        return self._ask("set_up", case)

    def result(self, way: str) -> Any:
        return self._ask("result", way)

    def sample(self, way: str, host: float) -> Sample:
        return self._ask("sample", way, host)

    def row(self, way: str, count: int) -> float | None:
        return self._ask("row", way, count)

    def peak_bytes(self, way: str) -> int:
        return self._ask("peak_bytes", way)

    def clear(self) -> None:
        if self._process.poll() is None:
            self._ask("clear")

    def copy_rate(self) -> float:
        return self._ask("copy_rate")

    def product_rate(self, case: AnyCase) -> float | None:
        return self._ask("product_rate", case)

    def close(self) -> None:
        """End the process without waiting for its work."""
        self._process.kill()
        with suppress(BrokenPipeError):  # a request may never have been read
            self._process.communicate()


def serve() -> None:
    """Serve requests until the pipe closes.  Output that libraries print goes to the standard error stream."""
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    name, threads, methods = pickle.load(questions)
    runner: Runner | None = None
    while True:
        try:
            method, arguments = pickle.load(questions)
        except EOFError:
            return
        answer, raised = None, None
        try:
            runner = runner or Runner(numpy_machine(), _participant(name, threads, methods))
            answer = getattr(runner, method)(*arguments)
        except Exception as error:
            raised = type(error).__name__, " ".join(str(error).split())
        pickle.dump((answer, raised), answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _participant(name: str, threads: int, methods: tuple[str, ...] | None) -> Participant:
    return Ours(methods) if name == OURS else PEERS[name](numpy_machine(), threads)
