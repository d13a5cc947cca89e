"""Run the host device's tests under a sanitizer::

    python -m tests.host_device.sanitize asan|ubsan|tsan [pytest arguments]

=======  ====================================================================================================
asan     accesses outside shared, local and global arrays, at the kernel's line
ubsan    misaligned vector accesses, signed overflow, shifts, indices outside arrays of known size
tsan     data races within a block and between blocks; it remembers some thousand threads, so grids must be small
=======  ====================================================================================================

Without arguments all tests marked `host_device` run; under tsan, which takes seconds for what takes
milliseconds elsewhere, those of small grids.  asan and ubsan stop at the first finding, tsan reports
all and makes the exit status nonzero.  Only the kernels are instrumented, not Python or NumPy.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from . import build

#: The library that has to be loaded before Python, and what it is to do.
RUNTIMES = {
    "asan": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}),
    "ubsan": ("libubsan.so", {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}),
    "tsan": ("libtsan.so", {"TSAN_OPTIONS": "exitcode=66:halt_on_error=0", "OPENBLAS_NUM_THREADS": "1"}),
}

#: Reports go to file descriptor 2, which pytest must not swallow: a process that halts never shows it.
PYTEST = [sys.executable, "-m", "pytest", "--capture=sys"]


def environment(mode: str) -> dict[str, str]:
    """The variables under which Python can load kernels compiled with this sanitizer."""
    name, options = RUNTIMES[mode]
    command = [*build.compiler(), f"-print-file-name={name}"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(library):
        raise FileNotFoundError(f"{build.compiler()[0]} has no {name}")
    return {**os.environ, **options, "LD_PRELOAD": library, "CUPYCONV_HOST_SANITIZER": mode}


def launcher(mode: str) -> list[str]:
    """What to put before a command: tsan's shadow memory needs its addresses free, so no randomisation."""
    return ["setarch", platform.machine(), "-R"] if mode == "tsan" and shutil.which("setarch") else []


def check_finding(mode: str, program: str, name: str, arguments: dict[str, object], finding: str | None) -> None:
    """A program of Python, given the name of a kernel and arguments, runs to its end, or the sanitizer finds something."""
    command = [*launcher(mode), sys.executable, "-c", program, name, repr(arguments)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, check=False, env=environment(mode), cwd=root, capture_output=True, text=True)
    if finding is None:
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode != 0, "nothing was found"
        assert finding in result.stderr and f"{name}.cu:" in result.stderr, result.stderr


#: What runs where no tests are named.
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
