"""``python -m cupyconv info`` and ``python -m cupyconv demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cupyconv.configuration import show_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupyconv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("info", help="versions, GPU, backends, caches")
    demo = commands.add_parser("demo", help="what the library does, measured and checked on this machine, in a minute")
    demo.add_argument(
        "--small", action="store_true", help="a hundredth of the work: seconds, and times that mean little"
    )
    demo.add_argument("--output", type=Path, default=Path(), metavar="DIRECTORY", help="where the picture goes")
    given = parser.parse_args(arguments)
    if given.command == "info":
        show_config()
        return 0
    from cupyconv.demo import run_demo

    return run_demo(small=given.small, directory=given.output)


if __name__ == "__main__":
    sys.exit(main())
