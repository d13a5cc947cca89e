"""The steps of a plan one by one, those of its rounds too."""

from __future__ import annotations

from collections.abc import Iterable

from cupyconv.problem.plan import Rounds, Step


def each_step(steps: Iterable[Step]) -> list[Step]:
    """All that is enqueued, in order; a launch that is repeated with a counter is one."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Rounds):
            for number in range(step.times):
                found += each_step(step.round(number))
        else:
            found.append(step)
    return found
