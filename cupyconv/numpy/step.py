"""What the steps of the NumPy backend have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyconv.problem.problems import Problem


@dataclass(frozen=True)
class NumpyStep:
    """A loop that solves a problem; a subclass has the sizes that were decided, prints itself and runs itself."""

    problem: Problem

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes

    @property
    def flops(self) -> int:
        return self.problem.flops

    @property
    def shape_of_work(self) -> object:
        return self

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """What runs the step; here is where it sets up what all runs share."""
        return self.run

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        raise NotImplementedError


def block_words(blocks: int, block: Sequence[int], axes: str, threads: int) -> str:
    """How a loop is cut, in words."""
    return f"{blocks} block(s) of {' x '.join(map(str, block))} ({axes}) on {threads} thread(s)"
