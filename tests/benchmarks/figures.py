"""The README's figures and its status on GPUs, from the results files beside this one::

python -m cupyconv bench --no-torch --json tests/benchmarks/results/numpy.json
python -m tests.benchmarks.gradients --json tests/benchmarks/results/gradients-numpy.json
python -m tests.gpu_report --out DIR, whose gpu-report.json becomes tests/benchmarks/results/gpu-report-NAME.json
python -m tests.benchmarks.figures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cupyconv.bench.record import OURS, read_record
from tests.gpu_report.status import STATUS_BEGIN, STATUS_END, status

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
FIGURES_BEGIN, FIGURES_END = "<!-- figures:", "<!-- end of figures -->"
PEER = "numpy"
#: What chains are compared with too: rows of their own.
CALLS = "conv calls"


def markdown(record: dict[str, Any]) -> str:
    """The README's table of one record."""
    rows = [
        (row["case"]["name"] + said, row["ways"][OURS], row["ways"][peer])
        for row in record["cases"]
        for peer, said in ((PEER, ""), (CALLS, ", against calls of `conv`"))
        if peer in row["ways"]
    ]
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
            "",
        ]
    )


def beside_torch(record: dict[str, Any]) -> str:
    """The README's sentences on one record of gradients."""
    known, ratios = record["environment"], record["means"]["BLAS"]
    torch = {name: ratios[f"{name} / torch's"] for name in ("forward", "input gradient", "weight gradient")}
    forward = {name: ratios[f"{name} / forward"] for name in ("input gradient", "weight gradient")}
    worst, layer = max(
        (row["settings"]["BLAS"]["ratios"][f"{name} / torch's"]["ratio"], f"{name} of {row['case']['name']}")
        for row in record["cases"]
        for name in torch
    )
    every = " and ".join(f"{value:.2f} (the {name})" for name, value in forward.items())
    times = ", ".join(f"{value:.2f} (the {name})" for name, value in torch.items())
    return (
        f"Gradients take {every} times as long as the forward pass. Beside PyTorch {known['torch']} with the same"
        f" {known['threads']} threads, the library takes {times} times as long; each is the geometric mean over"
        f" {len(record['cases'])} layers, and above 1 PyTorch is faster, at most {worst:.1f} times (the {layer})."
        f" {known['machine']}; {known['date']}.\n"
    )


def figures() -> str:
    """All that stands between the README's marks."""
    return markdown(read_record(RESULTS / "numpy.json")) + beside_torch(read_record(RESULTS / "gradients-numpy.json"))


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
