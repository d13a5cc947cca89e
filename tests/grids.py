"""Large grids of parameters: by default every pair of values occurs, with ``--nightly`` every combination.

::

    @pytest.mark.grid(case=CASES, variant=VARIANTS, stride=[1, 2])
    def test_something(case, variant, stride): ...

is the same as three stacked ``parametrize``, except for the number of tests.  An axis is a list, or a dict from ids to
values.  A fault in code of this kind nearly always shows with one value, or with a pair: a dtype and a tile, a padding
mode and a layout.  If three values together decide what is compiled or which branch runs, use ``together=3``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import combinations, product
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]


def fewest(covered_by: Sequence[Set[Hashable]]) -> list[int]:
    """Return the indices of few of these sets whose union is the union of all of them.

    The next set is always the one with the most missing elements, and the first of equal ones, so that every process
    finds the same sets.
    """
    missing = set().union(*covered_by)
    chosen = []
    while missing:
        best = max(range(len(covered_by)), key=lambda index: len(covered_by[index] & missing))
        chosen.append(best)
        missing -= covered_by[best]
    return sorted(chosen)


def covering_rows(axes: Sequence[Sequence[Any]], together: int = 2) -> list[tuple[int, ...]]:
    """Return rows of the product of these axes, as indices; any values of `together` axes occur in some row.

    In an axis of dicts with the same keys, such as the macros of a kernel's variants, each dict occurs at least once
    as a whole.  Its items occur with every value of the other axes.
    """
    parts = [_parts(number, values) for number, values in enumerate(axes)]
    rows = list(product(*(range(len(axis)) for axis in axes)))
    return [rows[number] for number in fewest([_covered(parts, row, together) for row in rows])]


def _parts(number: int, values: Sequence[Any]) -> list[list[Hashable]]:
    """Return what is paired with other axes, for each value of an axis: its index, or the items of a dict."""
    if all(isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values):
        return [[(number, *item) for item in value.items()] for value in values]
    return [[(number, index)] for index in range(len(values))]


def _covered(parts: Sequence[Sequence[Sequence[Hashable]]], row: tuple[int, ...], together: int) -> set[Hashable]:
    """Return each value of a row, and every combination of `together` values in it."""
    of_row = [axis[index] for axis, index in zip(parts, row)]
    return {*enumerate(row), *(found for some in combinations(of_row, together) for found in product(*some))}


def combined(*axes: Sequence[Any], full: bool) -> list[tuple[Any, ...]]:
    """Return rows of values: the whole product, or few rows that contain every pair."""
    rows = product(*(range(len(axis)) for axis in axes)) if full else covering_rows(axes)
    return [tuple(axis[index] for axis, index in zip(axes, row)) for row in rows]


def grid_parameters(axes: Mapping[str, Axis], *, full: bool, together: int = 2) -> list[Any]:
    """Return the values that `parametrize` accepts for the names of these axes."""
    labels = [[*axis] if isinstance(axis, Mapping) else [_label(value) for value in axis] for axis in axes.values()]
    values = [[*axis.values()] if isinstance(axis, Mapping) else axis for axis in axes.values()]
    rows = product(*(range(len(axis)) for axis in values)) if full else covering_rows(values, together)
    return [
        pytest.param(*(axis[i] for axis, i in zip(values, row)), id="-".join(axis[i] for axis, i in zip(labels, row)))
        for row in rows
    ]


def _label(value: Any) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)
