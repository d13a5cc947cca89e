"""Did ``method="auto"`` choose well?  Compares its choice with the times of all methods in a results file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cupyconv.bench.record import EXACT, OURS, is_ours

#: A choice is good if its time is at most this multiple of the best method's time.
WITHIN = 1.10
#: The planner is good if this share of its choices is good.
SHARE = 0.90


@dataclass(frozen=True)
class Choice:
    """The method chosen for one case, and the measured seconds of each method."""

    case: str
    chosen: str
    seconds: Mapping[str, float]

    @property
    def best(self) -> str:
        return min(self.seconds, key=lambda method: self.seconds[method])

    @property
    def loss(self) -> float:
        """Time of the choice divided by that of the best method; infinite if the choice was not measured."""
        return self.seconds.get(self.chosen, float("inf")) / self.seconds[self.best]

    @property
    def is_good(self) -> bool:
        return self.loss <= WITHIN

    def __str__(self) -> str:
        times = ", ".join(f"{method} {seconds * 1e6:,.1f} µs" for method, seconds in sorted(self.seconds.items()))
        return f"{self.case}: chosen {self.chosen}, best {self.best} by {self.loss:.2f} ({times})"


def recorded(record: Mapping[str, Any]) -> list[Choice]:
    """Return the choices of the run, for cases in which at least two methods were measured."""
    return [choice for row in record["cases"] if (choice := choice_of(row)) is not None]


def worst_first(choices: Iterable[Choice]) -> list[Choice]:
    return sorted(choices, key=lambda choice: -choice.loss)


def bad_choices(choices: Iterable[Choice]) -> list[Choice]:
    """Return the bad choices, worst first."""
    return [choice for choice in worst_first(choices) if not choice.is_good]


def choice_of(row: Mapping[str, Any]) -> Choice | None:
    """Return the choice of a row of a results file, or None if fewer than two methods were measured.

    For a chain, its layers in separate calls count as a method: a choice that is slower than these is bad.
    """
    measured = {name.removeprefix(OURS).strip(): way["median"] for name, way in row["ways"].items() if is_ours(name)}
    seconds = {name or row["chosen"]: median for name, median in measured.items() if name != EXACT}
    return Choice(row["case"]["name"], row["chosen"], seconds) if len(seconds) > 1 else None
