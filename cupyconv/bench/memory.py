"""Memory against batch size: what a call allocates in addition to its result, as measured and as `explain` states it.

For comparison, the record has the size of all samples' columns, which a matrix product needs without blocking.  For a
merge the columns are the concatenation, for other layers all windows.
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
#: Largest size of a case's inputs and result in bytes.
LARGEST = 1 << 28


def growing(cases: Iterable[object]) -> list[Case]:
    """Return from a table its first merge, first merge with a larger kernel, and first other layer with one."""
    first: dict[tuple[bool, bool], Case] = {}
    for case in cases:
        if isinstance(case, Case) and not isinstance(case, GradientCase) and not case.then and case.judged == "device":
            merged, kernel = len(case.channels) > 1, prod(case.kernel) > 1
            if case.groups == 1 and (merged or kernel):
                first.setdefault((merged, kernel), case)
    return list(first.values())


def columns_bytes(case: Case) -> int:
    """Return the bytes of all samples' columns."""
    return case.batch * case.fan_in * prod(case.out_size) * ITEMSIZE[case.dtype]


def over_batches(case: Case, runner: AnyRunner, until: float) -> dict[str, Any]:
    """Return bytes in addition to the result per batch size, for a record, while arrays are small and time remains."""
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
