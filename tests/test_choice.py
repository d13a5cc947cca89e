"""``method="auto"`` is checked against measured times of all methods, and the check itself against made-up times.

Each GPU results file in ``tests/benchmarks/results`` is replayed: the current planner plans the recorded shapes for the
recorded architecture.  This needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv.bench import choice, record, tables
from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase
from cupyconv.bench.recurrent_layers import AnyCase, RecurrentCase
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.machine import nearest_gpu

RESULTS = sorted((Path(__file__).parent / "benchmarks" / "results").glob("gpu*.json"))

MERGE = Case("merge", 4, (4,) * 5, (10**5,), 4, (1,))
WIDE = Case("wide", 8, (256,), (28, 28), 256, (3, 3), padding=((1, 1), (1, 1)), dtype="float64")


def case_from_record(record: Mapping[str, Any], group: str) -> AnyCase:
    """Return the case that a results file records in this group; fields that no longer exist are left out."""
    other = LargeKernelCase if group == "large kernels" else Case
    kind = RecurrentCase if "cell" in record else GradientCase if "of" in record else other
    known = {field.name for field in fields(kind)}
    return kind(**{name: as_tuple(value) for name, value in record.items() if name in known})


def as_tuple(value: Any) -> Any:
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def replayed(record: Mapping[str, Any]) -> list[choice.Choice]:
    """Return the current choices for the recorded cases, planned from shapes alone for the recorded architecture."""
    arch = nearest_gpu(int(record["environment"]["arch"].removeprefix("sm_"))).arch
    choices = []
    for entry in record["cases"]:
        measured = choice.choice_of(entry)
        if measured is not None:
            choices.append(replace(measured, chosen=chosen_now(case_from_record(entry["case"], entry["group"]), arch)))
    return choices


def chosen_now(case: AnyCase, arch: str) -> str:
    """Return the method that planning chooses for a case; no array is filled with data."""
    arrays = case.arrays(lambda dtype, first, elements: np.zeros(elements, dtype_from_name(dtype)))
    function, arguments, keywords = case.call(*arrays)
    with cupyconv.options(allow_tf32=True) if case.tf32 else nullcontext():
        return cupyconv.explain(function, *arguments, **keywords, on=arch).method


def is_good(choices: list[choice.Choice]) -> bool:
    """Whether enough of the choices are close to the best; False without choices, since nothing is known then."""
    return bool(choices) and len(choice.bad_choices(choices)) <= (1 - choice.SHARE) * len(choices) + 1e-9


def row(case, chosen, **seconds):
    implementations = {
        ("cupyconv" if method == chosen else f"cupyconv {method}"): {"median": s} for method, s in seconds.items()
    }
    return {
        "case": asdict(case),
        "group": case.group,
        "chosen": chosen,
        "ways": implementations | {"torch": {"median": 1e-9}},
    }


def made_up(*rows, arch="sm_90"):
    return {"environment": {"arch": arch}, "cases": list(rows)}


def test_cases_come_back_from_a_record():
    for case in (*tables.numpy_cases(), *tables.gpu_cases()):
        assert case_from_record(json.loads(json.dumps(asdict(case))), case.group) == case


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_choice_is_within_a_tenth_of_the_best_on_nine_tenths_of_the_table(path):
    choices = replayed(record.read_record(path))
    assert choices, f"{path.name} has no case of which two methods were measured"
    bad = choice.bad_choices(choices)
    assert is_good(choices), f"{len(bad)} of {len(choices)} are not:\n" + "\n".join(map(str, bad))


@pytest.mark.skipif(bool(RESULTS), reason="there are GPU results, and the test above reads them")
def test_there_are_measurements_to_hold_the_choice_to():
    pytest.skip("no tests/benchmarks/results/gpu*.json yet: no GPU has been measured, the cost model is unproven")


def test_what_planning_takes_today_is_what_is_judged():
    """The current planner's choices are judged, not those in the record, which an older model made."""
    record = made_up(row(MERGE, "gemm", gemm=2.0, direct=1.0), row(WIDE, "direct", gemm=1.0, direct=9.0))
    assert [c.chosen for c in choice.recorded(record)] == ["gemm", "direct"] and not is_good(choice.recorded(record))
    assert [c.chosen for c in replayed(record)] == ["direct", "gemm"]
    assert is_good(replayed(record))


def test_bad_choices_are_found_and_sorted():
    record = made_up(
        row(MERGE, "direct", direct=1.2, gemm=1.0), row(WIDE, "gemm", gemm=3.0, direct=1.0),
        *(row(replace(MERGE, name=str(i)), "direct", direct=1.09, gemm=1.0) for i in range(10)),
    )  # fmt: skip
    bad = choice.bad_choices(replayed(record))
    assert [c.case for c in bad] == ["wide", "merge"] and bad[0].loss == 3.0
    assert "chosen gemm, best direct by 3.00" in str(bad[0])


@pytest.mark.parametrize(("bad", "verdict"), [(1, True), (2, False)])
def test_nine_of_ten_is_enough(bad, verdict):
    good = [choice.Choice("good", "a", {"a": 1.0, "b": 1.0})] * (10 - bad)
    assert is_good(good + [choice.Choice("bad", "a", {"a": 1.2, "b": 1.0})] * bad) is verdict


def test_nothing_measured_proves_nothing():
    assert not is_good([])
    assert replayed(made_up(row(MERGE, "direct", direct=1.0))) == []  # one method: there was no choice


def test_a_choice_that_was_not_measured_is_bad():
    assert choice.Choice("x", "new", {"a": 1.0, "b": 2.0}).loss == float("inf")


def test_the_replay_needs_no_memory_and_no_gpu():
    """The replay creates arrays for the whole table but touches none; an unknown architecture uses a known one."""
    rows = [row(case, "direct", direct=1.0, gemm=1.0) for case in tables.gpu_cases()]
    assert len(replayed(made_up(*rows, arch="sm_103"))) == len(rows)
