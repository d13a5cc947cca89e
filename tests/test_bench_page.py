"""The page of `python -m cupyconv bench --report`: complete HTML, every case, the record's numbers, nothing fetched."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest

from cupyconv import bench
from cupyconv.__main__ import main
from cupyconv.bench import memory, session
from cupyconv.bench.cases import Case, GradientCase
from cupyconv.bench.machines import numpy_machine
from cupyconv.bench.own_ways import Ours
from cupyconv.bench.progress import Progress, duration
from cupyconv.bench.record import new_record, read_record, resume
from cupyconv.bench.runner import Runner
from cupyconv.bench.web_page import page

SMALL = (
    Case("merge", 3, (2, 1, 3), (50,), 4, (1,)),
    Case("3x3", 2, (5,), (7, 8), 4, (3, 3), padding=((1, 1), (1, 1))),
    Case("3x3 merged", 2, (2, 3), (7, 6), 4, (3, 3), padding=((1, 1), (1, 1))),
)


def way(median, beyond=None, **more):
    known = {"median": median, "min": median, "quartiles": [median, median], "row": None, "rounds": 5, "steady": True}
    return known | {"host_median": median, "beyond_result": beyond} | more


def row_of(name, group, ways, *, bound="arithmetic", chosen="gemm"):
    case = asdict(Case(name, 2, (3,), (8,), 4, (3,)))
    floor = {"seconds": 1.25e-3, "bound": bound, "bytes": 2 * 10**6, "flops": 5 * 10**8}
    return {"case": case, "group": group, "on_gpu": False, "chosen": chosen, "methods": {}, "rejected": {}, "floor": floor, "ways": ways}  # fmt: skip


@pytest.fixture
def written():
    record = new_record({"date": "2026-01-02", "commit": "abc1234", "machine": "a quick one", "torch": "9.9"}, 60)
    record["floors"] = {
        "bandwidth": 40e9, "products": {"float32": 4e11, "float64": 2e11}, "by": {"float32": "torch", "float64": "numpy"},
    }  # fmt: skip
    record["cases"] = [
        row_of("3x3, 3 -> 4", "convolutions", {
            "cupyconv": way(2.5e-3, 3 << 20), "numpy": way(0.0125, 5 << 21, ratio=0.2), "torch": way(2e-3, ratio=1.25),
        }),
        row_of("merge <b> & \"all\"", "merge", {"cupyconv": way(0.04, 0), "numpy": way(0.02, 64, ratio=2.0, steady=False)}, bound="memory"),
        row_of("nobody beside", "merge", {"cupyconv": way(7e-6)}),
        row_of("ours failed", "merge", {"numpy": way(1.0)}),
    ]  # fmt: skip
    record["memory"] = [{
        "case": asdict(SMALL[0]), "batches": [1, 2, 4], "measured": [1 << 20, 1 << 20, 0],
        "planned": [3 << 19, 3 << 19, 3 << 19], "columns": [1 << 20, 1 << 21, 1 << 22],
    }]  # fmt: skip
    record["errors"] = [{"case": "ours failed", "way": "cupyconv", "error": "ValueError: a < b"}]
    record["skipped"] = ["too late"]
    return record


class Reader(HTMLParser):
    """Checks that a page is what a browser expects, and collects its tables, elements and text."""

    VOID = frozenset(("meta",))

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.elements, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))

    def handle_starttag(self, tag, attrs):
        assert tag not in self.VOID
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))
        self.open.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)
        if any(tag in ("td", "th") for tag, _ in self.open):
            self.tables[-1][-1][-1] += data

    def line(self, name, column):
        """Return the row that begins with a name, in the table that has this column, by column names."""
        (found,) = [
            dict(zip(table[0], row)) for table in self.tables if column in table[0] for row in table if row[0] == name
        ]
        return found


def number(text):
    return float(re.match(r"[\d,.]+", text)[0].replace(",", ""))


def test_it_is_whole_and_names_every_case(written):
    read = Reader(page(written))
    text = "\n".join(read.text)
    for case in (*(row["case"]["name"] for row in written["cases"]), "too late", "merge", "ValueError: a < b"):
        assert case in text
    for known in ("2026-01-02", "abc1234", "a quick one", "9.9"):
        assert known in text
    labels = [attributes["id"] for _, attributes, _ in read.elements if "id" in attributes]
    assert len(set(labels)) == len(labels)
    assert {attributes["href"][1:] for tag, attributes, _ in read.elements if tag == "use"} <= set(labels)


def test_it_fetches_nothing(written):
    text = page(written)
    assert "://" not in text and "url(" not in text and "@import" not in text
    for tag, attributes, _ in Reader(text).elements:
        assert tag not in ("script", "link", "img", "iframe") and "src" not in attributes
        assert attributes.get("href", "#").startswith("#")


def test_its_numbers_are_the_records(written):
    read = Reader(page(written))
    line = read.line("3x3, 3 -> 4", "cupyconv, ms")
    shown = {name: number(line[name]) for name in ("cupyconv, ms", "numpy, ms", "torch, ms", "floor, ms", "cupyconv, MiB", "numpy, MiB")}  # fmt: skip
    assert shown == {
        "cupyconv, ms": 2.5, "numpy, ms": 12.5, "torch, ms": 2.0, "floor, ms": 1.25, "cupyconv, MiB": 3, "numpy, MiB": 10,
    }  # fmt: skip
    assert (line["method"], line["rate"], line["floor rate"], line["of floor"]) == (
        "gemm", "200.0 GFLOP/s", "400.0 GFLOP/s", "50%",
    )  # fmt: skip
    (ratios,) = [row for table in read.tables if "cupyconv, ms" in table[0] for row in table if row[0] == "3x3, 3 -> 4"]
    assert [cell for name, cell in zip(read.tables[1][0], ratios) if name == "ratio"] == ["0.20", "1.25"]
    means = read.line("convolutions (1)", "best peer")
    assert (means["numpy"], means["torch"], means["best peer"]) == ("0.20", "1.25", "1.25")
    assert read.line('merge <b> & "all"', "cupyconv, ms")["numpy, ms"] == "20.0?"  # unsteady
    assert read.line("nobody beside", "cupyconv, ms")["cupyconv, ms"] == "0.0070"
    assert read.line("ours failed", "cupyconv, ms")["method"] == "failed"
    assert "Faster than every peer on 0, slower than the fastest peer on 2." in "".join(read.text)


def test_every_case_of_a_real_record_has_its_times():
    """The page shows all times of the record behind the README's figures."""
    from tests.benchmarks.figures import RESULTS

    record = read_record(RESULTS / "numpy.json")
    read = Reader(page(record))
    for row in record["cases"]:
        line = read.line(row["case"]["name"], "cupyconv, ms")
        for name, way in row["ways"].items():
            if f"{name}, ms" in line:
                assert number(line[f"{name}, ms"]) == pytest.approx(way["median"] * 1e3, rel=0.01, abs=1e-4)
        assert number(line["cupyconv, ms"]) > 0


def test_a_marker_lies_where_its_ratio_says_and_a_loss_has_another_colour(written):
    strips = page(written).split('class="strip"')[1:3]
    convolution, merge = strips
    at = {
        peer: (kind, float(place))
        for peer, kind, place in re.findall(
            r'<title>(\w+): [\d.]+</title><use href="#shape\d" class="([\w ]+)" x="([\d.]+)%"', convolution
        )
    }
    one = float(re.search(r'x1="([\d.]+)%"[^>]*class="even"', convolution)[1])
    assert at["numpy"][0] == "won" and at["torch"][0] == "lost"
    assert at["numpy"][1] < one < at["torch"][1]
    # on a logarithmic axis, the distances of 0.2 and 1.25 from 1 are those of their logarithms
    assert (one - at["numpy"][1]) / (at["torch"][1] - one) == pytest.approx(np.log(5) / np.log(1.25), rel=0.01)
    assert 'class="lost unsteady"' in merge


def test_the_rooflines_points_lie_under_the_roofs_as_they_should(written):
    text = page(written)
    drawn = text[text.index('aria-label="roofline"') : text.index("Memory against batch size")]
    points = re.findall(r"<title>([^<]*)</title><use [^>]*x=\"([\d.]+)\" y=\"([\d.]+)\"", drawn)
    assert [label for label, *_ in points] == [
        "3x3, 3 -&gt; 4: 200.0 GFLOP/s", "merge &lt;b&gt; &amp; &quot;all&quot;: 0 GB/s", "nobody beside: 71.4 TFLOP/s",
    ]  # fmt: skip
    first, second, third = (float(y) for *_, y in points)
    slope, *tops = re.findall(r'points="([\d., ]+)" class="roof"', drawn)
    height = [float(top.split()[0].partition(",")[2]) for top in tops]
    assert third < height[0] < height[1] < second  # SVG's y axis points down
    assert first == pytest.approx(height[1], abs=0.2)  # 200 GFLOP/s is the roof of float64
    ridge = slope.split()[1]
    assert ridge == tops[0].split()[0]


def test_memory_is_shown_as_recorded_or_said_to_be_missing(written):
    read = Reader(page(written))
    assert read.line("cupyconv, measured, MiB", "N 4") == {
        "merge": "cupyconv, measured, MiB", "N 1": "1.00", "N 2": "1.00", "N 4": "0.00",
    }  # fmt: skip
    assert read.line("columns of all samples at once, MiB", "N 4")["N 4"] == "4.00"
    older = copy.deepcopy(written)
    del older["memory"]
    assert "This record has no memory measurements." in "".join(Reader(page(older)).text)


def test_a_record_of_nothing_is_a_page(written):
    empty = new_record({}, 60)
    Reader(page(empty))
    Reader(page(written | {"cases": written["cases"][3:]}))


# --- memory against batch size --------------------------------------------------------------------------------


def test_which_cases_grow():
    gradient = GradientCase(**asdict(SMALL[1]) | {"name": "gradient"})
    dull = [
        replace(SMALL[1], name="1x1", kernel=(1, 1)), replace(SMALL[1], name="depthwise", groups=5, out_channels=5),
        replace(SMALL[1], name="host", judged="host"), replace(SMALL[1], name="chain", then=((4, (1, 1), (), 1),)), gradient,
    ]  # fmt: skip
    assert memory.growing([*dull, *SMALL, replace(SMALL[1], name="second")]) == list(SMALL)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_memory_is_what_explain_states_at_most_and_columns_are_what_numpy_writes(case, monkeypatch):
    monkeypatch.setattr(memory, "BATCHES", (1, 4, 32))
    row = memory.over_batches(case, Runner(numpy_machine(), Ours(())), np.inf)
    assert row["batches"] == [1, 4, 32] and row["case"] == asdict(case)
    for batch, measured, planned, columns in zip(
        *(row[name] for name in ("batches", "measured", "planned", "columns"))
    ):
        xs, _ = replace(case, batch=batch).arrays()
        windows = np.prod(case.kernel) * np.prod(case.out_size) // np.prod(case.size[: len(case.kernel)])
        assert columns == windows * np.concatenate(xs, axis=1).nbytes
        assert 0 <= measured <= planned + (1 << 16)  # Python objects


def test_memory_stops_where_time_or_arrays_end(monkeypatch):
    runner = Runner(numpy_machine(), Ours(()))
    assert memory.over_batches(SMALL[0], runner, -np.inf)["batches"] == []
    monkeypatch.setattr(memory, "LARGEST", replace(SMALL[0], batch=4).minimal_bytes)
    assert memory.over_batches(SMALL[0], runner, np.inf)["batches"] == [1, 2, 4]


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_draws_it_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "numpy_cases", lambda: SMALL)
    monkeypatch.setattr(session, "LONGEST", 0)
    monkeypatch.setattr(memory, "BATCHES", (1, 2))
    first, again = tmp_path / "made" / "first", tmp_path / "again"
    arguments = ["--peers", "numpy", "--threads", "1", "--seconds", "600", "--only", "merge"]
    assert main(["bench", "--report", str(first), *arguments]) == 0
    assert f"web page: {first / 'index.html'}" in capsys.readouterr().out
    record = read_record(first / "results.json")
    assert [row["case"]["name"] for row in record["memory"]] == ["merge", "3x3 merged"]
    assert all(row["batches"] == [1, 2] for row in record["memory"])
    drawn = (first / "index.html").read_text("utf-8")
    assert number(Reader(drawn).line("merge", "cupyconv, ms")["cupyconv, ms"]) > 0
    assert main(["bench", "--report", str(again), "--from", str(first / "results.json")]) == 0
    assert (again / "index.html").read_text("utf-8") == drawn


def test_a_record_of_an_older_version_is_gone_on_with():
    older = new_record({}, 60)
    del older["memory"]
    assert resume(older)["memory"] == []


def test_what_cannot_be_drawn_is_told(tmp_path, capsys):
    file = tmp_path / "other.json"
    for text, why in (
        ("{", "Expecting"),
        ("[]", "is not a results file"),
        (json.dumps({"cases": []}), "is not a results file"),
    ):
        file.write_text(text)
        assert main(["bench", "--report", str(tmp_path), "--from", str(file)]) == 2
        assert why in capsys.readouterr().err
    assert main(["bench", "--report", str(tmp_path), "--from", str(tmp_path / "missing.json")]) == 2
    assert main(["bench", "--from", str(file)]) == 2
    assert "--report" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()


# --- progress -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress()
    progress.show(12, 55, 100, "3x3")
    progress.say("a block")
    progress.end()
    drawn = sys.stderr.getvalue()
    line = "12 of 55, 1 min 40 s left: 3x3"
    clean = "\r" + " " * len(line) + "\r"
    assert drawn == f"\r\r{line}{clean}\r\r{line}{clean}" and "\n" not in drawn
    assert capsys.readouterr().out == "a block\n"


def test_progress_is_nowhere_else(capsys):
    progress = Progress()
    progress.show(1, 2, 3, "3x3")
    progress.say("a block")
    progress.end()
    assert capsys.readouterr() == ("a block\n", "")


def test_a_run_shows_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(session, "LONGEST", 0)
    machine = numpy_machine()
    begin = {"cupyconv": lambda: Runner(machine, Ours(()))}
    assert session.Session(machine, SMALL[:2], begin, seconds=60).run() == 0
    shown = dict.fromkeys(re.findall(r"(\d of 2), (?:\d+ min )?\d+ s left: (merge|3x3)", sys.stderr.getvalue()))
    assert list(shown) == [("1 of 2", "merge"), ("2 of 2", "3x3")]


def test_a_duration_is_said_in_minutes_and_seconds():
    assert [duration(seconds) for seconds in (0.4, 59.4, 59.6, 100)] == ["0 s", "59 s", "1 min 0 s", "1 min 40 s"]
