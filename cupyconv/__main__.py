"""``python -m cupyconv info``, ``demo`` and ``bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cupyconv.configuration import show_config
from cupyconv.planning.request import METHODS


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
    _add_bench(commands)
    given = parser.parse_args(arguments)
    if given.command == "info":
        show_config()
        return 0
    if given.command == "bench":
        from cupyconv.bench import run_bench

        return run_bench(
            gpu=given.gpu, seconds=given.seconds, only=given.only, methods=given.methods, torch=given.torch,
            json=given.json, resume=given.resume,
        )  # fmt: skip
    from cupyconv.demo import run_demo

    return run_demo(small=given.small, directory=given.output)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="every case checked, timed beside its peers, and written down")
    bench.add_argument("--gpu", action="store_true", help="CuPy on the current GPU; without it NumPy is measured")
    bench.add_argument("--seconds", type=float, default=480, help="end within them (480); what is left out is said")
    bench.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    bench.add_argument("--methods", type=_methods, metavar="A,B", help="time these methods beside the one chosen (all)")
    bench.add_argument("--no-torch", action="store_false", dest="torch", help="leave torch out where it is installed")
    bench.add_argument("--json", type=Path, metavar="FILE", help="the results file, whole after every case")
    bench.add_argument("--resume", action="store_true", help="go on with the file of --json where a run has ended")


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
