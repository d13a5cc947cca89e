"""Record what the results depend on, as the bench does: GPU, driver, commit, versions (with torch's if installed).

::

    python -m tests.gpu_report.environment --target gpu --results FILE --commit "unless git knows it"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

from cupyconv.bench.machines import cuda_machine, environment, numpy_machine
from tests.gpu_report.processes import add_line

PACKAGES = ("numpy", "ml_dtypes", "pytest", "hypothesis", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report.environment")
    parser.add_argument("--target", choices=("gpu", "host_device"), default="gpu")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--commit", default="")
    given = parser.parse_args(arguments)
    on_gpu = given.target == "gpu"
    known = environment(cuda_machine(import_module("cupy")) if on_gpu else numpy_machine())
    if known["commit"] == "unknown" and given.commit:  # a copy without git: the caller names its commit
        known["commit"] = given.commit
    known["dirty"] = "unknown" if known["commit"] == "unknown" else known["commit"].endswith("-dirty")
    versions = {package: _version(package) for package in PACKAGES}
    line = {"part": "environment", "name": "environment", "outcome": "passed", "values": known | versions}
    add_line(given.results, **line)
    print(line)
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
