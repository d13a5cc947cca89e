"""Every example runs as it stands and says that its own check passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from targets import gpu_target

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(example: Path, *arguments: str) -> str:
    """The output of a script that ends well and warns of nothing."""
    command = [sys.executable, "-W", "error", str(example), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_examples():
    assert [example.stem for example in EXAMPLES] == ["batchnorm_folding", "edges", "merge_fields"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path):
    assert run(example).strip()


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_a_gpu(example: Path):
    gpu_target()
    assert run(example, "--cupy").strip()
