"""Does ``method="auto"`` choose well?  Its choice today, held to the times that a results file has of every method.

Planning needs shapes, strides and dtypes only, so a record of a GPU is replayed on a machine that has none; and a
change of the cost model is seen against measurements before it is measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyconv.bench.record import OURS
from cupyconv.bench.recurrent_layers import AnyCase, case_from_record
from cupyconv.call.explain import explain
from cupyconv.call.options import options
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.machine import nearest_gpu

#: A choice is good where it takes at most this much longer than the best method,
WITHIN = 1.10
#: and planning is where this share of its choices are.
SHARE = 0.90


@dataclass(frozen=True)
class Choice:
    """What is chosen for one case, and the seconds that were measured of each method."""

    case: str
    chosen: str
    seconds: Mapping[str, float]

    @property
    def best(self) -> str:
        return min(self.seconds, key=lambda method: self.seconds[method])

    @property
    def loss(self) -> float:
        """Time of the choice over that of the best; infinite where the choice was not measured."""
        return self.seconds.get(self.chosen, float("inf")) / self.seconds[self.best]

    def __str__(self) -> str:
        times = ", ".join(f"{method} {seconds * 1e6:,.1f} µs" for method, seconds in sorted(self.seconds.items()))
        return f"{self.case}: chosen {self.chosen}, best {self.best} by {self.loss:.2f} ({times})"


def recorded(record: Mapping[str, Any]) -> list[Choice]:
    """The choices of the run itself, where there was one: cases of which two methods were measured."""
    return [choice for row in record["cases"] if (choice := _choice(row, row["chosen"])) is not None]


def replayed(record: Mapping[str, Any]) -> list[Choice]:
    """Today's choices for the recorded cases, planned for the recorded GPU's architecture from shapes alone."""
    arch = nearest_gpu(int(record["environment"]["arch"].removeprefix("sm_"))).arch
    choices = []
    for row in record["cases"]:
        choice = _choice(row, "")
        if choice is not None:
            chosen = chosen_now(case_from_record(row["case"]), arch)
            choices.append(Choice(choice.case, chosen, choice.seconds))
    return choices


def chosen_now(case: AnyCase, arch: str) -> str:
    """The method that planning takes for a case; no array is filled."""
    function, arguments, keywords = case.call(*case.arrays(_unfilled))
    with options(allow_tf32=True) if case.tf32 else nullcontext():
        return explain(function, *arguments, **keywords, on=arch).method


def bad_choices(choices: Iterable[Choice]) -> list[Choice]:
    """The worst first."""
    return sorted((choice for choice in choices if choice.loss > WITHIN), key=lambda choice: -choice.loss)


def is_good(choices: list[Choice]) -> bool:
    """Whether enough of the choices are within reach of the best; of none, nothing can be said."""
    return bool(choices) and len(bad_choices(choices)) <= (1 - SHARE) * len(choices) + 1e-9


def _unfilled(dtype: str, first: int, elements: int) -> np.ndarray:
    return np.empty(elements, dtype_from_name(dtype))


def _choice(row: Mapping[str, Any], chosen: str) -> Choice | None:
    seconds = {
        name.removeprefix(OURS).strip() or row["chosen"]: way["median"]
        for name, way in row["ways"].items()
        if name.partition(" ")[0] == OURS
    }
    return Choice(row["case"]["name"], chosen, seconds) if len(seconds) > 1 else None
