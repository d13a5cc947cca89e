"""The report of a benchmark run: the floors of cases, and the page of text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupyconv.bench import floors, record, tables
from cupyconv.bench.cases import Case
from cupyconv.bench.report import block, summary


def test_the_floor_is_the_larger_time():
    case = Case("3x3", 1, (64,), (32, 32), 64, (3, 3))
    quick = floors.Rates(bandwidth=1e9, products={"float32": 1e30})
    work = {"bytes": case.minimal_bytes, "flops": case.flops}
    assert quick.floor(case) == {"seconds": case.minimal_bytes / 1e9, "bound": "memory", **work}
    slow = floors.Rates(bandwidth=1e30, products={"float32": 1e9, "TF32": 1e10})
    assert slow.floor(case) == {"seconds": case.flops / 1e9, "bound": "arithmetic", **work}
    assert slow.floor(replace(case, tf32=True))["seconds"] == case.flops / 1e10


def test_the_floor_of_the_original_merge_is_the_known_one():
    """The merge moves 384 MB in float32, and an H200 needs 89 µs to copy that many bytes."""
    merge = next(case for case in tables.gpu_cases() if case.name == "merge 5 x (4, 4, 10^6) -> 4, float32")
    assert merge.minimal_bytes == pytest.approx(384e6, rel=1e-5)
    assert floors.Rates(4.3e12, {"float32": 5e13}).floor(merge)["seconds"] == pytest.approx(89e-6, rel=0.01)


def way(median, **more):
    known = {"median": median, "min": median, "quartiles": [median, median], "row": median, "rounds": 5}
    return known | {"host_median": 1e-6} | more


def a_row(name="a case", group="convolutions", **ways):
    floor = {"seconds": 5e-5, "bound": "memory", "bytes": 10**8, "flops": 1}
    case = Case(name, 1, (1,), (8,), 1, (1,)).__dict__
    known = {"case": case, "group": group, "on_gpu": True, "chosen": "gemm", "methods": {}, "rejected": {}}
    return known | {"floor": floor, "ways": ways}


def page_of(*rows):
    return summary(record.new_record({}, 480) | {"cases": list(rows)})


def cells(page, label):
    """Return the words of the first line with this label."""
    (line, *_) = (line for line in page.splitlines() if line.strip().startswith(label))
    return line.split()


def test_losses_launch_bound_calls_and_bad_choices_are_on_the_page():
    row = a_row(
        **{"cupyconv": way(1e-4, host_median=2e-4), "cupyconv direct": way(8e-5, ratio=1.25)},
        torch=way(5e-5, ratio=2.0),
    )
    printed = block(row)
    assert "cupyconv: gemm" in printed and "1,000 GB/s" in printed and "50%" in printed
    assert "launch-bound" in printed.splitlines()[1] and "launch-bound" not in printed.splitlines()[3]
    assert printed.splitlines()[3].endswith("2.00  faster than cupyconv")
    page = page_of(row)
    assert cells(page, "a case") == ["a", "case", "100.0", "µs", "gemm", "2.00", "2.00"]
    assert "on 0 of the 1 cases" in page
    assert "a case  gemm            direct            1.25   direct 80.0, gemm 100.0" in page


def test_the_page_has_every_ratio_and_the_means_of_each_group():
    page = page_of(
        a_row("one", cupyconv=way(1.0), torch=way(1.0, ratio=0.5), jax=way(1.0, ratio=4.0)),
        a_row("two", cupyconv=way(1.0), torch=way(1.0, ratio=2.0)),
        a_row("other", "merge", cupyconv=way(1.0), torch=way(1.0, ratio=3.0)),
        a_row("broken", torch=way(1.0)),
    )
    assert cells(page, "torch") == ["torch", "jax", "best", "peer"]
    assert cells(page, "one")[-3:] == ["0.50", "4.00", "4.00"] and cells(page, "two")[-2:] == ["2.00", "2.00"]
    assert cells(page, "geometric mean")[-3:] == ["1.00", "4.00", "2.83"] and "3.00" in page.partition("merge:")[2]
    assert [cells(page, label)[1:] for label in ("faster", "slower", "slowest")] == [
        ["1", "0", "0"], ["1", "1", "2"], ["2.00", "4.00", "4.00"],
    ]  # fmt: skip
    assert "exact" not in page and "failed" in cells(page, "broken")


def test_what_is_unsteady_is_marked():
    page = page_of(
        a_row("one", cupyconv=way(1.0), torch=way(1.0, ratio=0.5, steady=False), jax=way(1.0, ratio=4.0)),
        a_row("two", cupyconv=way(1.0, steady=False), torch=way(1.0, ratio=2.0)),
    )
    assert cells(page, "one")[-3:] == ["0.50?", "4.00", "4.00"] and cells(page, "two")[-2] == "2.00?"
    assert "? the machine was busy" in page and "unsteady" in block(a_row(cupyconv=way(1.0, steady=False)))


def test_exact_arithmetic_has_a_mean_of_its_own_and_is_no_method():
    """Exact arithmetic has its own mean, and is not a method.  In the second case the chosen plan is exact itself."""
    page = page_of(
        a_row("one", **{"cupyconv": way(1.0), "cupyconv exact": way(4.0, ratio=0.25)}, torch=way(2.0, ratio=0.5)),
        a_row("two", cupyconv=way(1.0), torch=way(2.0, ratio=0.5)),
    )
    assert cells(page, "geometric mean  ")[-2:] == ["0.50", "0.50"]
    assert cells(page, "geometric mean, exact")[-2:] == ["1.00", "1.00"]
    assert "method=" not in page


def test_a_chain_that_loses_to_separate_calls_is_a_bad_choice():
    page = page_of(a_row("chain", **{"cupyconv": way(3.0), "cupyconv layer by layer": way(2.0, ratio=1.5)}))
    chosen = next(
        line.split() for line in page.partition("method=")[2].splitlines() if line.strip().startswith("chain")
    )
    assert "on 0 of the 1 cases" in page and chosen[1:6] == ["gemm", "layer", "by", "layer", "1.50"]
    assert (
        cells(page, "layer by layer")[-2:] == ["best", "peer"] and cells(page, "chain")[-1] == "1.50"
    )  # "layer by layer" is not a peer
