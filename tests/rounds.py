"""The single steps of a plan, including the steps of its rounds."""

from __future__ import annotations

from collections.abc import Iterable

from cupyconv.problem.plan import Rounds, Step


def each_step(steps: Iterable[Step]) -> list[Step]:
    """Return all enqueued steps in order; a launch that is repeated with a counter counts once."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Rounds):
            for number in range(step.times):
                found += each_step(step.round(number))
        else:
            found.append(step)
    return found
