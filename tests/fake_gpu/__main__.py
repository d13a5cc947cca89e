"""``python -m tests.fake_gpu SCRIPT [ARGUMENTS]``: run a script with the real CuPy on emulated GPUs."""

from __future__ import annotations

import runpy
import sys

from tests import fake_gpu


def main() -> None:
    reason = fake_gpu.unavailable()
    if reason is not None or len(sys.argv) < 2:
        sys.exit(reason or __doc__)
    fake_gpu.install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
