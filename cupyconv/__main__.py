"""``python -m cupyconv info``, ``demo`` and ``bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cupyconv.configuration import show_config
from cupyconv.problem.problems import METHODS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cupyconv", description="Convolution on NumPy and CuPy arrays.")
    commands = parser.add_subparsers(dest="command", required=True)
    _command(commands, "info", "Print versions, GPUs, missing packages and the directory of compiled kernels.")
    demo = _command(
        commands, "demo", "Show what the library does, measured and checked on this machine in about a minute."
    )
    demo.add_argument(
        "--small", action="store_true", help="a hundredth of the work, in seconds; its times are not representative"
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path(),
        dest="directory",
        metavar="DIRECTORY",
        help="directory of the picture (default: current directory)",
    )
    _add_bench(commands)
    given = vars(parser.parse_args(arguments))
    command = given.pop("command")
    if command == "info":
        show_config()
        return 0
    if command == "bench":
        from cupyconv.bench import run_bench

        return run_bench(**given)
    from cupyconv.demo import run_demo

    return run_demo(**given)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=does[0].lower() + does[1:].rstrip("."), description=does)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _command(
        commands, "bench", "Compare layers with other libraries; each result is checked before it is timed."
    )
    bench.add_argument("--gpu", action="store_true", help="measure CuPy on the current GPU (default: NumPy)")
    bench.add_argument(
        "--seconds", type=float, default=480, help="time limit (default: 480); cases that do not fit are listed"
    )
    bench.add_argument("--only", default="", metavar="TEXT", help="measure only cases with TEXT in their names")
    bench.add_argument(
        "--methods",
        type=_methods,
        metavar="A,B",
        help="time these methods in addition to the chosen one (default: all)",
    )
    bench.add_argument("--groups", type=_names, metavar="A,B", help="measure only these groups of cases (default: all)")
    bench.add_argument(
        "--peers", type=_names, metavar="A,B", help="compare with these libraries (default: all that are installed)"
    )
    bench.add_argument(
        "--threads", type=_count, metavar="N", help="threads of every library (default: NumPy's; not with --gpu)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, after every case")
    bench.add_argument("--resume", action="store_true", help="continue the run in the file of --json")
    bench.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write the results as a web page: DIR/index.html (and DIR/results.json)",
    )
    bench.add_argument(
        "--from", type=Path, dest="source", metavar="FILE", help="do not measure; write the web page of these results"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, given {text!r}")
    return int(text)


def _methods(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
