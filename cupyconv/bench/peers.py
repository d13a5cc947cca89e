"""What it takes to be measured: a participant offers ways to do a case.

The library is one, in `own_ways.py`; its peers are the others.  A participant is made in the process in which it runs.
What is not installed is told, and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from cupyconv.bench.cases import Case
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.demo.libraries import Call


class NotInstalled(Exception):
    """A library that is not there."""


def installed(name: str) -> ModuleType:
    """The library of this name; NotInstalled where it is not there."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NotInstalled(name) from error


@dataclass(frozen=True)
class Way:
    """One way to do a case.

    `prepare` gives the call to be timed, or raises.  `as_array` makes an array of the machine's from what it returns.
    `transform` allows the errors of an algorithm that transforms its data.  The memory of a way that `allocates` for
    itself is not counted.  `patience` is the seconds that must be left of the run when it is prepared.
    """

    name: str
    prepare: Callable[[], Call]
    as_array: Callable[[Any], Any] = lambda returned: returned
    transform: bool = False
    allocates: bool = False
    patience: float = 0.0


class Participant:
    """A library with its ways to do a case."""

    def properties(self) -> dict[str, Any]:
        """Versions, for the record."""
        return {}

    def during(self, case: AnyCase) -> AbstractContextManager[Any]:
        """Around all that is done of a case."""
        return nullcontext()

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """None where the case is not for this library."""
        raise NotImplementedError

    def product(self, square: Case, x: Any, weight: Any) -> Call | None:
        """A product of two matrices as the case of a 1x1 convolution, for the floor; None where there is none."""
        return None

    def release(self) -> None:
        """Give back memory that nothing uses."""

    def notes(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> dict[str, Any]:
        """What is noted of a case in the record."""
        return {}
