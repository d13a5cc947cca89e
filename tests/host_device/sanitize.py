"""Run the host device's tests under a sanitizer::

    python -m tests.host_device.sanitize asan|ubsan|tsan [pytest arguments]

=======  ====================================================================================================
asan     accesses outside shared, local and global arrays, at the kernel's line
ubsan    misaligned vector accesses, signed overflow, shifts, indices outside arrays of known size
tsan     data races within a block and between blocks; it only tracks some thousand threads, so grids must be small
=======  ====================================================================================================

Without arguments, all tests marked `host_device` run.  Under tsan only those with small grids run, because tsan
turns milliseconds into seconds.  asan and ubsan stop at the first finding.  tsan reports all findings and returns a
nonzero exit status.  Only the kernels are instrumented, not Python or NumPy.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from . import build

#: The library to load before Python, and its options.
RUNTIMES = {
    "asan": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}),
    "ubsan": ("libubsan.so", {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}),
    "tsan": ("libtsan.so", {"TSAN_OPTIONS": "exitcode=66:halt_on_error=0", "OPENBLAS_NUM_THREADS": "1"}),
}

#: Reports go to file descriptor 2, which pytest must not capture: a halting process would never print them.
PYTEST = [sys.executable, "-m", "pytest", "--capture=sys"]


def environment(mode: str) -> dict[str, str]:
    """Return the environment variables with which Python can load kernels compiled with this sanitizer."""
    name, options = RUNTIMES[mode]
    command = [*build.compiler(), f"-print-file-name={name}"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(library):
        raise FileNotFoundError(f"{build.compiler()[0]} has no {name}")
    return {**os.environ, **options, "LD_PRELOAD": library, "CUPYCONV_HOST_SANITIZER": mode}


def launcher(mode: str) -> list[str]:
    """Return the prefix of a command: no address randomization, because tsan's shadow memory needs fixed addresses."""
    return ["setarch", platform.machine(), "-R"] if mode == "tsan" and shutil.which("setarch") else []


def check_finding(mode: str, program: str, name: str, arguments: dict[str, object], finding: str | None) -> None:
    """Check that a Python program with a kernel's name and arguments passes, or that the sanitizer finds `finding`."""
    command = [*launcher(mode), sys.executable, "-c", program, name, repr(arguments)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, check=False, env=environment(mode), cwd=root, capture_output=True, text=True)
    if finding is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0, "nothing was found"
        assert finding in result.stderr and f"{name}.cu:" in result.stderr, result.stderr


#: Tests to run if none are named.
TESTS = {
    "asan": ["tests", "-m", "host_device"],
    "ubsan": ["tests", "-m", "host_device"],
    "tsan": [
        "tests/test_conv.py",
        "tests/test_traps.py",
        "tests/test_host_device.py",
        "tests/test_tensor_core.py",
        "tests/test_recurrent_cuda.py::test_few_blocks_that_wait",
        "tests/test_recurrent_gradients.py::test_few_blocks_that_wait",
        "-m",
        "host_device",
    ],
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in RUNTIMES:
        print(__doc__, file=sys.stderr)
        return 2
    mode, *rest = arguments
    command = [*launcher(mode), *PYTEST, *(rest or TESTS[mode])]
    return subprocess.run(command, check=False, env=environment(mode)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
