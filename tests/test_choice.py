"""``method="auto"`` held to the times that were measured of every method, and the judge held to made-up ones.

Each results file of a GPU in ``tests/benchmarks/results`` is replayed: today's planning for the recorded shapes and
architecture.  That needs no GPU.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cupyconv.bench import choice, record, tables
from cupyconv.bench.cases import Case

RESULTS = sorted((Path(__file__).parent / "benchmarks" / "results").glob("gpu*.json"))

MERGE = Case("merge", 4, (4,) * 5, (10**5,), 4, (1,))
WIDE = Case("wide", 8, (256,), (28, 28), 256, (3, 3), padding=((1, 1), (1, 1)), dtype="float64")


def row(case, chosen, **seconds):
    ways = {("cupyconv" if method == chosen else f"cupyconv {method}"): {"median": s} for method, s in seconds.items()}
    return {"case": asdict(case), "chosen": chosen, "ways": ways | {"torch": {"median": 1e-9}}}


def made_up(*rows, arch="sm_90"):
    return {"environment": {"arch": arch}, "cases": list(rows)}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_choice_is_within_a_tenth_of_the_best_on_nine_tenths_of_the_table(path):
    choices = choice.replayed(record.read_record(path))
    assert choices, f"{path.name} has no case of which two methods were measured"
    bad = choice.bad_choices(choices)
    assert choice.is_good(choices), f"{len(bad)} of {len(choices)} are not:\n" + "\n".join(map(str, bad))


@pytest.mark.skipif(bool(RESULTS), reason="there are GPU results, and the test above reads them")
def test_there_are_measurements_to_hold_the_choice_to():
    pytest.skip("no tests/benchmarks/results/gpu*.json yet: no GPU has been measured, the cost model is unproven")


def test_what_planning_takes_today_is_what_is_judged():
    """The record says otherwise: it is of an older model."""
    record = made_up(row(MERGE, "gemm", gemm=2.0, direct=1.0), row(WIDE, "direct", gemm=1.0, direct=9.0))
    assert [c.chosen for c in choice.recorded(record)] == ["gemm", "direct"] and not choice.is_good(
        choice.recorded(record)
    )
    assert [c.chosen for c in choice.replayed(record)] == ["direct", "gemm"]
    assert choice.is_good(choice.replayed(record))


def test_bad_choices_are_found_and_sorted():
    record = made_up(
        row(MERGE, "direct", direct=1.2, gemm=1.0), row(WIDE, "gemm", gemm=3.0, direct=1.0),
        *(row(replace(MERGE, name=str(i)), "direct", direct=1.09, gemm=1.0) for i in range(10)),
    )  # fmt: skip
    bad = choice.bad_choices(choice.replayed(record))
    assert [c.case for c in bad] == ["wide", "merge"] and bad[0].loss == 3.0
    assert "chosen gemm, best direct by 3.00" in str(bad[0])


@pytest.mark.parametrize(("bad", "verdict"), [(1, True), (2, False)])
def test_nine_of_ten_is_enough(bad, verdict):
    good = [choice.Choice("good", "a", {"a": 1.0, "b": 1.0})] * (10 - bad)
    assert choice.is_good(good + [choice.Choice("bad", "a", {"a": 1.2, "b": 1.0})] * bad) is verdict


def test_nothing_measured_proves_nothing():
    assert not choice.is_good([])
    assert choice.replayed(made_up(row(MERGE, "direct", direct=1.0))) == []  # one method: there was no choice


def test_a_choice_that_was_not_measured_is_bad():
    assert choice.Choice("x", "new", {"a": 1.0, "b": 2.0}).loss == float("inf")


def test_the_replay_needs_no_memory_and_no_gpu():
    """Arrays of the whole table are asked for, and none is touched; other architectures than the known fall back."""
    rows = [row(case, "direct", direct=1.0, gemm=1.0) for case in tables.gpu_cases()]
    assert len(choice.replayed(made_up(*rows, arch="sm_103"))) == len(rows)
