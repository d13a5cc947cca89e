"""The interface of a participant, which offers implementations of a case.

The library is one participant, in `own_ways.py`; the others are its peers.  A participant is created in the process in
which it runs.  A peer that is not installed is reported and left out.
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
    """A library is not installed."""


def installed(name: str) -> ModuleType:
    """Return the library of this name; raise NotInstalled if it is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NotInstalled(name) from error


@dataclass(frozen=True)
class Way:
    """One implementation of a case.

    `prepare` returns the call to be timed, or raises.  `as_array` converts the call's result to an array of the
    machine.  `transform` allows the errors of an algorithm that transforms its data.  If an implementation allocates
    memory itself (`allocates`), its memory is not counted.  It is only prepared if at least `patience` seconds of the
    run are left.
    """

    name: str
    prepare: Callable[[], Call]
    as_array: Callable[[Any], Any] = lambda returned: returned
    transform: bool = False
    allocates: bool = False
    patience: float = 0.0


class Participant:
    """A library with its implementations of cases."""

    def properties(self) -> dict[str, Any]:
        """Return versions for the record."""
        return {}

    def during(self, case: AnyCase) -> AbstractContextManager[Any]:
        """Return a context for all work on a case."""
        return nullcontext()

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        """Return the implementations of a case, empty if the library does not support it."""
        raise NotImplementedError

    def product(self, square: Case, x: Any, weight: Any) -> Call | None:
        """Return a product of two matrices, given as a 1x1 convolution, for the floor, or None if there is none."""
        return None

    def release(self) -> None:
        """Release unused memory."""

    def notes(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> dict[str, Any]:
        """Return notes on a case for the record."""
        return {}
