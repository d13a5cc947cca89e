"""The README's figures, from the results files beside this one::

python -m cupyconv bench --no-torch --json tests/benchmarks/results/numpy.json
python -m tests.benchmarks.figures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cupyconv.bench.record import OURS, read_record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
FIGURES_BEGIN, FIGURES_END = "<!-- figures:", "<!-- end of figures -->"
PEER = "numpy"


def markdown(record: dict[str, Any]) -> str:
    """The README's table of one record."""
    rows = [(row["case"]["name"], row["ways"][OURS], row["ways"][PEER]) for row in record["cases"]]
    lines = [
        f"| {name} | {ours['median'] * 1e3:.1f} | {peer['median'] * 1e3:.1f} |"
        f" {'' if peer['ratio'] >= 1 else '**'}{peer['ratio']:.2f}{'' if peer['ratio'] >= 1 else '** (slower)'} |"
        f" {ours['beyond_result'] / 2**20:.1f} | {peer['beyond_result'] / 2**20:.1f} |"
        for name, ours, peer in rows
    ]
    losses = sum(peer["ratio"] < 1 for _, _, peer in rows)
    known = record["environment"]
    threads, load = known["blas_threads"], known["load_before"]
    busy = f" The machine was busy with other work (load {load})." if load != "unknown" and load > 0.5 else ""
    where = f"{known['machine']}; BLAS {known['blas']} on {threads}; Python {known['python']}; {known['date']}.{busy}"
    return "\n".join(
        [
            "| layer (float32 unless named) | cupyconv, ms | peer, ms | ratio | cupyconv, MiB | peer, MiB |",
            "|---|--:|--:|--:|--:|--:|",
            *lines,
            "",
            f"Slower than the peer on {losses} of {len(rows)}. {where}",
            "",
        ]
    )


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    begin, end = text.index("\n", text.index(FIGURES_BEGIN)) + 1, text.index(FIGURES_END)
    readme.write_text(text[:begin] + markdown(read_record(RESULTS / "numpy.json")) + text[end:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
