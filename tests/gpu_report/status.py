"""The table of what has run on GPUs, from the reports in the folder of results.

`tests/benchmarks/figures.py` writes it into docs/reference/status.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyconv.bench.record import read_record
from tests.gpu_report.calls import ALL, CALLS
from tests.gpu_report.report import share_of_floor

STATUS_BEGIN, STATUS_END = "<!-- status on GPUs:", "<!-- end of status on GPUs -->"

NEVER = """\
**Not yet run on a GPU:** the CUDA backend (CuPy device, cuBLAS, cuFFT, kernels, `one_block_merge.cu` of the demo). Statements \
here about its results, speed and streams describe the design, not observations.
"""


def status(results: Path) -> str:
    """Return the text between the page's marks: one table per report in the folder."""
    reports = [read_record(path) for path in sorted(results.glob("gpu-report-*.json"))]
    return "\n".join(map(table, reports)) or NEVER


def table(report: Mapping[str, Any]) -> str:
    """Return the table of one GPU: its environment, the counts of its tests, and its kernels by dtype."""
    if report["target"] != "gpu":
        raise ValueError("this report was not made on a GPU")
    known = report["environment"]
    counts = report["parts"].get("tests", {}).get("counts", {})
    tests = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items()) or "not run"
    where = f"**{known['gpu']}**, driver {known['driver']}, CuPy {known['cupy']}, commit {known['commit']}, {known['date']}."
    return "\n".join(
        [
            f"{where} Tests marked `gpu`: {tests}. A kernel has passed if a small call gave NumPy's result. The percentage"
            " is the share of the floor that layers of `python -m cupyconv bench` with this kernel reach (median).",
            "",
            f"| kernel | {' | '.join(ALL)} |",
            f"|---|{'---|' * len(ALL)}",
            *(f"| `{kernel}` | {' | '.join(_cell(report, kernel, dtype) for dtype in ALL)} |" for kernel in CALLS),
            "",
        ]
    )


def _cell(report: Mapping[str, Any], kernel: str, dtype: str) -> str:
    if dtype not in CALLS[kernel].dtypes:
        return ""
    found = [line["outcome"] for line in report["smoke"] if (line["kernel"], line["dtype"]) == (kernel, dtype)]
    outcome = "passed" if found == ["passed"] else f"**{found[0]}**" if found else "**never**"
    share = share_of_floor(_measured(report["bench"], kernel, dtype))
    return outcome if share is None else f"{outcome}, {share:.0%}"


def _measured(rows: Sequence[Mapping[str, Any]], kernel: str, dtype: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["dtype"] == dtype and not row["tf32"] and kernel in row["kernels"]]
