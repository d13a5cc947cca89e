"""Large grids run few rows, and every pair of values occurs in them."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from grids import combined, covering_rows, fewest, grid_parameters
from hypothesis import given
from hypothesis import strategies as st

MACROS = [
    {"DTYPE": dtype, "TILE": tile}
    for dtype, tile in (("float16", 64), ("float16", 128), ("float32", 64), ("float32", 128), ("float64", 64))
]


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_all_pairs_of_values_occur(lengths):
    axes = [[f"{axis}{index}" for index in range(length)] for axis, length in enumerate(lengths)]
    rows = covering_rows(axes)
    assert all(0 <= index < length for row in rows for index, length in zip(row, lengths, strict=True))
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(range(lengths[one]), range(lengths[other])))
    for axis, length in enumerate(lengths):
        assert {row[axis] for row in rows} == set(range(length))


def test_all_triples_occur_where_three_are_asked_for():
    lengths = (5, 4, 2, 3)
    rows = covering_rows([range(length) for length in lengths], together=3)
    for axes in combinations(range(4), 3):
        found = {tuple(row[axis] for axis in axes) for row in rows}
        assert found == set(product(*(range(lengths[axis]) for axis in axes)))
    assert len(rows) < 120


def test_rows_are_few_and_always_the_same():
    axes = [range(5), range(5), range(2), range(4)]
    rows = covering_rows(axes)
    assert 25 <= len(rows) <= 30 < 200 == len(list(product(*axes)))
    assert rows == sorted(set(rows)) == covering_rows(axes)


def test_dicts_of_the_same_keys_are_paired_by_their_items():
    """Each variant occurs once, each dtype and each tile in every case, but not each variant in every case."""
    cases = range(7)
    rows = covering_rows([MACROS, cases])
    assert {row[0] for row in rows} == set(range(len(MACROS)))
    for key in ("DTYPE", "TILE"):
        found = {(MACROS[variant][key], case) for variant, case in rows}
        assert found == set(product({macros[key] for macros in MACROS}, cases))
    assert len(rows) < len(MACROS) * len(cases)


def test_dicts_of_unlike_keys_are_values():
    """An absent key is a value too."""
    layouts, limits = [{}, {"order": "last"}, {"offset": 1}], [None, 1]
    assert len(covering_rows([layouts, limits])) == 6


def test_combined_are_the_values():
    assert combined("ab", [1, 2], full=True) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert len(combined("abc", "de", [1, 2], full=False)) == 6


def test_fewest_sets_hold_everything():
    sets = [{1}, {1, 2, 3}, {3, 4}, {2, 3}, {4, 5}]
    assert fewest(sets) == [1, 4]
    assert fewest([]) == []


@pytest.mark.parametrize("full, count", [(False, 6), (True, 12)])
def test_parameters_have_ids(full, count):
    parameters = grid_parameters(
        {"mode": {"first": None, "second": max, "third": 0.5}, "size": [1, 2], "deep": [True, False]}, full=full
    )
    assert len(parameters) == len({parameter.id for parameter in parameters}) == count
    assert parameters[0].id == "first-1-True" and parameters[0].values == (None, 1, True)


@pytest.mark.grid(dtype=["float16", "float32"], tile=[64, 128, 256], mode={"whole": 1, "cut": 2})
def test_the_mark_parametrizes(request, dtype, tile, mode):
    label = {1: "whole", 2: "cut"}[mode]
    assert request.node.name == f"test_the_mark_parametrizes[{dtype}-{tile}-{label}]"
