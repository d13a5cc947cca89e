"""Memory against batch size: what a call allocates beyond its result, measured and as `explain` states it.

Beside it stand the columns of all samples, which a product of matrices needs where nobody cuts them into blocks: of a
merge the concatenation, of other layers every window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from math import prod
from time import perf_counter
from typing import Any

from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.record import OURS
from cupyconv.bench.runner import AnyRunner
from cupyconv.problem.arrays import ITEMSIZE

BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: The most bytes of a case's inputs and result.
LARGEST = 1 << 28


def growing(cases: Iterable[object]) -> list[Case]:
    """Of a table: the first merge, the first merge with a larger kernel, and the first other layer with one."""
    first: dict[tuple[bool, bool], Case] = {}
    for case in cases:
        if isinstance(case, Case) and not isinstance(case, GradientCase) and not case.then and case.judged == "device":
            merged, kernel = len(case.channels) > 1, prod(case.kernel) > 1
            if case.groups == 1 and (merged or kernel):
                first.setdefault((merged, kernel), case)
    return list(first.values())


def columns_bytes(case: Case) -> int:
    """The columns of all samples."""
    return case.batch * case.fan_in * prod(case.out_size) * ITEMSIZE[case.dtype]


def over_batches(case: Case, runner: AnyRunner, until: float) -> dict[str, Any]:
    """For a record: bytes beyond the result at each number of samples, as far as the arrays stay small and time lasts."""
    row: dict[str, Any] = {"case": asdict(case), "batches": [], "measured": [], "planned": [], "columns": []}
    for batch in BATCHES:
        grown = replace(case, batch=batch)
        if grown.minimal_bytes > LARGEST or perf_counter() > until:
            break
        try:
            _, notes = runner.set_up(grown)
            runner.result(OURS)
            measured = max(0, runner.peak_bytes(OURS) - grown.result_bytes)
        finally:
            runner.clear()
        row["batches"].append(batch)
        row["measured"].append(measured)
        row["planned"].append(notes["methods"][notes["chosen"]]["workspace_bytes"])
        row["columns"].append(columns_bytes(grown))
    return row
