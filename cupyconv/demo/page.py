"""The demo's output: a page of 100 columns, and the list of failures."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TypeVar

WIDTH = 100
_BAR = 40

T = TypeVar("T")


class Page:
    """Prints text and collects failures."""

    def __init__(self) -> None:
        self.checks = 0
        self.failures: list[str] = []

    def line(self, text: str = "") -> None:
        print(text, flush=True)

    def heading(self, title: str) -> None:
        self.line(f"\n{title}\n{'=' * WIDTH}\n")

    def text(self, text: str) -> None:
        self.line(textwrap.fill(" ".join(text.split()), WIDTH) + "\n")

    def code(self, source: str) -> None:
        """Print the lines that run, as a user would type them."""
        self.line(textwrap.indent(textwrap.dedent(source).strip("\n"), "    >>> ") + "\n")

    def verbatim(self, text: str) -> None:
        """Print a plan indented; a continued line is indented four columns deeper than its beginning."""
        for line in text.splitlines():
            indent = "    " + " " * (len(line) - len(line.lstrip()))
            parts = textwrap.wrap(
                line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False
            )
            self.line("\n".join(parts))
        self.line()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: the first column is left-aligned, the others are right-aligned."""
        widths = [max(map(len, column)) for column in zip(header, *rows)]
        for row in (header, *rows):
            first, *others = (
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
            )
            self.line("    " + "   ".join([first, *others]).rstrip())
            if row is header:
                self.line("    " + "-" * (sum(widths) + 3 * (len(widths) - 1)))
        self.line()

    def check(self, what: str, error: float, allowed: float) -> None:
        """Count one check, and print a failure immediately."""
        self.checks += 1
        if not error <= allowed:  # a NaN fails too
            self.failure(f"{what}: error {error:.2g}, allowed {allowed:.2g}")

    def failure(self, text: str) -> None:
        self.failures.append(text)
        self.line(f"    FAILED  {text}\n")

    def progress(self, items: Sequence[T], what: str) -> Iterator[T]:
        """Yield `items`, with a progress bar on the terminal."""
        if not sys.stderr.isatty():
            yield from items
            return
        for done, item in enumerate(items):
            filled = _BAR * done // len(items)
            print(f"\r    {what:<40} [{'#' * filled}{'.' * (_BAR - filled)}]", end="", file=sys.stderr, flush=True)
            yield item
        print("\r" + " " * (WIDTH - 1) + "\r", end="", file=sys.stderr, flush=True)

    def verdict(self, seconds: float) -> None:
        self.line(f"\n{'=' * WIDTH}")
        if self.failures:
            self.line(f"{len(self.failures)} failed, {self.checks} checks, {seconds:.0f} s:")
            for failure in self.failures:
                self.line(f"    {failure}")
        else:
            self.line(f"all {self.checks} checks passed, {seconds:.0f} s")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
