"""The nightly run: its table lists every run, and one failure does not end the rest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

OF_EVERY_OUTCOME = """
import os, pytest
def test_passes(): assert "CUPYCONV_RUNS" not in os.environ
def test_passes_too(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("for a reason")
@pytest.fixture
def broken(): raise OSError
def test_has_an_error(broken): pass
"""

# A fake "Python": its environments are copies of it, and its tests pass unless its path contains "failing".
PRETENDED_PYTHON = """#!/bin/sh
case "$*" in
    *venv,*) ;;
    "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
    *pytest*) case "$0" in *failing*) exit 1 ;; esac ;;
esac
"""

# A part of the nightly run that runs pytest twice and fails.
PRETENDED_PYTHONS = """#!/bin/sh
echo 3.11.7 2.1.2 4000 0 30 >>"$CUPYCONV_RUNS"
echo 3.14.0t 2.5.0 3999 1 30 >>"$CUPYCONV_RUNS"
exit 1
"""

# A part's Python, which prints its arguments.
PRETENDED_RUN = """#!/bin/sh
echo "ran: $*"
"""

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_a_run_adds_its_row(tmp_path):
    tests, rows = tmp_path / "test_outcomes.py", tmp_path / "rows"
    tests.write_text(OF_EVERY_OUTCOME, encoding="utf-8")
    rows.write_text("an earlier row\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    subprocess.run(
        [*command, "-n", "1", "-c", os.devnull, tests],
        env={**os.environ, "CUPYCONV_RUNS": str(rows), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
        capture_output=True,
    )
    earlier, row = rows.read_text("utf-8").splitlines()
    python, *others = row.split()
    assert earlier == "an earlier row"
    assert python.removesuffix("t") == platform.python_version()
    assert others == [np.__version__, "2", "2", "1"]


@needs_bash
def test_the_table_has_every_run(tmp_path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    script(tmp_path / ".ci" / "pythons", PRETENDED_PYTHONS)
    night = subprocess.run([tmp_path / ".ci" / "nightly", "pythons"], capture_output=True, text=True)
    table = night.stdout.partition("== what ran\n")[2]
    assert [line.split() for line in table.splitlines()] == [
        ["part", "Python", "NumPy", "passed", "failed", "skipped"],
        ["pythons", "3.11.7", "2.1.2", "4000", "0", "30"],
        ["pythons", "3.14.0t", "2.5.0", "3999", "1", "30"],
    ]
    assert (night.returncode, night.stderr) == (1, "== failed: pythons\n")


@needs_bash
def test_sanitizers_run_every_test_and_thousands_of_calls(tmp_path):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".venv").mkdir()
    script(tmp_path / ".venv" / "bin" / "python", PRETENDED_RUN)
    parts = [f"{sanitizer}{calls}" for sanitizer in ("asan", "ubsan") for calls in ("", "-calls")]
    night = subprocess.run([tmp_path / ".ci" / "nightly", *parts], capture_output=True, text=True)
    ran = [line.split()[3:] for line in night.stdout.splitlines() if line.startswith("ran: ")]
    calls = ["tests/test_any_call_on_cuda.py", "--nightly", "-m", "host_device"]
    assert ran == [["asan"], ["asan", *calls], ["ubsan"], ["ubsan", *calls]]
    assert (night.returncode, night.stderr) == (0, "")


@needs_bash
def test_all_parts_end_within_a_day():
    nightly = ROOT / ".ci" / "nightly"
    unknown = subprocess.run([nightly, "unknown"], capture_output=True, text=True)
    listed = re.findall(r"parts=\((.*?)\n\)", nightly.read_text("utf-8"), re.DOTALL)[0]
    hours = dict(re.findall(r"(\S+):(\d+)", listed))
    assert sum(map(int, hours.values())) <= 24
    assert unknown.returncode == 2 and unknown.stderr == f"no part unknown, there are: {' '.join(hours)}\n"


@needs_bash
def test_a_python_that_fails_does_not_end_the_others(tmp_path):
    for name in ("failing-python", "python"):
        script(tmp_path / name, PRETENDED_PYTHON)
    run = subprocess.run(
        [ROOT / ".ci" / "pythons", tmp_path / "failing-python", "missing-python", tmp_path / "python"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert "\n== not on this machine: missing-python\n" in run.stdout
    assert run.stdout.endswith(f"\n== passed on {tmp_path}/python with numpy\n")
    oldest = re.findall(r'"numpy>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]
    failed = f"{tmp_path}/failing-python with"
    assert run.stderr == f"== failed on {failed} numpy=={oldest}, {failed} numpy\n"
    assert run.returncode == 1
