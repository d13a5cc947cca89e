"""One line on the terminal during a long run: progress and the remaining time."""

from __future__ import annotations

import sys

from cupyconv.demo.page import WIDTH


class Progress:
    """Draws the line on standard error if that is a terminal.  Printed text appears above the line."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._line = ""

    def show(self, number: int, of: int, seconds: float, name: str) -> None:
        """Show the current item and the approximate number of seconds left."""
        self._draw(f"{number} of {of}, {duration(seconds)} left: {name}"[: WIDTH - 1])

    def say(self, text: str) -> None:
        """Print to standard output, and keep the line below the text."""
        line = self._line
        self._draw("")
        print(text, flush=True)
        self._draw(line)

    def end(self) -> None:
        """Remove the line."""
        self._draw("")

    def _draw(self, line: str) -> None:
        if self._shown and line != self._line:
            print(f"\r{' ' * len(self._line)}\r{line}", end="", file=sys.stderr, flush=True)
        self._line = line


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
