"""NVRTC in a separate process, because NVRTC would use an emulated libcuda as if it were a real one."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

from tests import nvrtc

_one_at_a_time = threading.Lock()


def ask(task: tuple[str, tuple[str, ...], int, str]) -> tuple[int, int] | nvrtc.CompileError:
    """Return static shared memory and registers of a source for an architecture, or the compiler's error."""
    with _one_at_a_time:
        process = _process()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)


@cache
def _process() -> subprocess.Popen[bytes]:
    """Return the compiler's process, which ends when its input does, with this process."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.fake_gpu.compiler"]
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        outcome: tuple[int, int] | nvrtc.CompileError
        try:
            compiled = nvrtc.compile_source(*task)
            outcome = compiled.shared, compiled.registers
        except nvrtc.CompileError as error:
            outcome = error
        pickle.dump(outcome, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
