"""The README's figures and its status on GPUs, from the results files beside this one::

python -m cupyconv bench --json tests/benchmarks/results/numpy.json
python -m tests.gpu_report --out DIR, whose gpu-report.json becomes tests/benchmarks/results/gpu-report-NAME.json
python -m tests.benchmarks.figures
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from cupyconv.bench.record import OURS, read_record
from cupyconv.bench.report import BEST, compared, grouped, means, ratios
from cupyconv.bench.runner import PEERS
from cupyconv.bench.tables import ordinary_cases
from tests.gpu_report.status import STATUS_BEGIN, STATUS_END, status

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
FIGURES_BEGIN, FIGURES_END = "<!-- figures:", "<!-- end of figures -->"
#: The peer whose memory is shown.
PLAIN = "numpy"


def layers(record: dict[str, Any]) -> str:
    """The README's table of the ordinary layers: our time, over that of each peer, and memory."""
    names = {case.name for case in ordinary_cases()}
    rows = [row for row in record["cases"] if row["case"]["name"] in names]
    peers = compared(rows)
    head = ["layer (float32 unless named)", "cupyconv, ms", *map(_shown, peers), "cupyconv, MiB", f"{PLAIN}, MiB"]
    lines = [
        [row["case"]["name"], f"{row['ways'][OURS]['median'] * 1e3:.1f}", *_cells(ratios(row), peers),
         *(f"{row['ways'][way]['beyond_result'] / 2**20:.1f}" for way in (OURS, PLAIN))]
        for row in rows
    ]  # fmt: skip
    return _table(head, lines)


def groups(record: dict[str, Any]) -> str:
    """The README's table of geometric means over everything that was measured."""
    peers = [*compared(record["cases"]), BEST]
    lines = [
        [f"{group} ({len(rows)})", *_cells(means(rows), peers), f"{max(ratios(row).get(BEST, 0) for row in rows):.2f}"]
        for group, rows in grouped(record["cases"]).items()
    ]
    return _table(["group (cases)", *map(_shown, peers), "slowest beside the best"], lines)


def source(record: dict[str, Any]) -> str:
    """Losses, and what the figures depend on."""
    rows, known = record["cases"], record["environment"]
    every = [(peer, ratio) for row in rows for peer, ratio in ratios(row).items() if peer != BEST]
    lost = Counter(peer for peer, ratio in every if ratio > 1)
    counts = ", ".join(f"{_shown(peer)} on {lost[peer]} of {n}" for peer, n in Counter(p for p, _ in every).items())
    threads, load = known["blas_threads"], known["load_before"]
    busy = f" The machine was busy with other work (load {load})." if load != "unknown" and load > 0.5 else ""
    versions = "".join(f"; {name} {known[name]}" for name in PEERS if name != PLAIN and name in known)
    where = (
        f"{known['machine']}; BLAS {known['blas']} on {threads}; Python {known['python']}{versions}; {known['date']}."
    )
    return f"Slower than {counts}. Times: {known['clock']}. {where}{busy}\n"


def _shown(way: str) -> str:
    return way.removeprefix(f"{OURS} ")


def _cells(of: dict[str, float], peers: list[str]) -> list[str]:
    """Ratios, with those above 1 in bold."""
    return ["" if peer not in of else f"**{of[peer]:.2f}**" if of[peer] > 1 else f"{of[peer]:.2f}" for peer in peers]


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def figures() -> str:
    """All that stands between the README's marks."""
    record = read_record(RESULTS / "numpy.json")
    return f"{layers(record)}\n{groups(record)}\n{source(record)}"


def between(text: str, begin: str, end: str) -> tuple[int, int]:
    """Where in a text that stands which two marks enclose."""
    return text.index("\n", text.index(begin)) + 1, text.index(end)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for begin, end, written in ((FIGURES_BEGIN, FIGURES_END, figures()), (STATUS_BEGIN, STATUS_END, status(RESULTS))):
        first, last = between(text, begin, end)
        text = text[:first] + written + text[last:]
    readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
