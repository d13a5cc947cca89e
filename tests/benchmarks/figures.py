"""Write the figures and the status on GPUs into README and docs/, from the files in results/::

python -m cupyconv bench --json tests/benchmarks/results/numpy.json
python -m cupyconv bench --groups "filters,large kernels" --peers scipy,opencv --methods fft --json tests/benchmarks/results/filters.json
python -m cupyconv bench --groups "input gradients,weight gradients" --peers torch --methods winograd --json tests/benchmarks/results/gradients.json
python -m cupyconv bench --json tests/benchmarks/results/elsewhere-NAME.json    (on another processor)
python -m cupyconv bench --gpu --json tests/benchmarks/results/gpu-NAME.json
python -m tests.benchmarks.networks
python -m tests.gpu_report --out DIR, whose gpu-report.json becomes tests/benchmarks/results/gpu-report-NAME.json
python -m tests.benchmarks.figures
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
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
#: The peer whose memory use is shown.
PLAIN = "numpy"

#: Entries of a row's `ways` in which SciPy uses Fourier transforms.
SCIPY_TRANSFORMS = ("fftconvolve", "fftconvolve at once", "oaconvolve")

NO_GPU = "No GPU has been measured yet.\n"


def layers(record: dict[str, Any]) -> str:
    """Table of the ordinary layers: cupyconv's time, its ratio to the time of each peer, and memory use."""
    names = {case.name for case in ordinary_cases()}
    rows = [row for row in record["cases"] if row["case"]["name"] in names]
    peers = compared(rows)
    head = ["layer (float32 unless noted)", "cupyconv, ms", *map(_shown, peers), "cupyconv, MiB", f"{PLAIN}, MiB"]
    lines = [
        [row["case"]["name"], _milliseconds(row), *_cells(ratios(row), peers),
         *(f"{row['ways'][way]['beyond_result'] / 2**20:.1f}" for way in (OURS, PLAIN))]
        for row in rows
    ]  # fmt: skip
    return _table(head, lines)


def groups(record: dict[str, Any]) -> str:
    """Table of the geometric means of the ratios over all measured cases, one row per group."""
    peers = [*compared(record["cases"]), BEST]
    lines = [
        [f"{group} ({len(rows)})", *_cells(means(rows), peers), f"{max(ratios(row).get(BEST, 0) for row in rows):.2f}"]
        for group, rows in grouped(record["cases"]).items()
    ]
    return _table(["group (cases)", *map(_shown, peers), "worst ratio to best peer"], lines)


def every_case(record: dict[str, Any]) -> str:
    """One table per group with all its cases and the chosen method, the slowest relative to the best peer first."""
    tables = []
    for group, rows in grouped(record["cases"]).items():
        peers = [*compared(rows), BEST]
        slowest_first = sorted(rows, key=lambda row: -ratios(row).get(BEST, 0))
        lines = [
            [row["case"]["name"], row["chosen"], _milliseconds(row), *_cells(ratios(row), peers)]
            for row in slowest_first
        ]
        head = [f"{group}: {len(rows)} cases", "method", "cupyconv, ms", *map(_shown, peers)]
        tables.append(_table(head, lines))
    return "\n".join(tables)


def losses(record: dict[str, Any]) -> str:
    """Sentence that says on how many cases each peer was faster."""
    every = [(peer, ratio) for row in record["cases"] for peer, ratio in ratios(row).items() if peer != BEST]
    lost = Counter(peer for peer, ratio in every if ratio > 1)
    counts = (f"{_shown(peer)} on {lost[peer]} of {n}" for peer, n in Counter(p for p, _ in every).items())
    return f"Slower than {', '.join(counts)}."


def source(record: dict[str, Any]) -> str:
    """Sentence that says what the figures depend on: clock, machine, versions, date, load."""
    known = record["environment"]
    threads, load = known["blas_threads"], known["load_before"]
    busy = f" The machine was busy with other work (load {load})." if load != "unknown" and load > 0.5 else ""
    versions = "".join(f"; {name} {known[name]}" for name in PEERS if name != PLAIN and name in known)
    where = (
        f"{known['machine']}; BLAS {known['blas']} on {threads}; Python {known['python']}{versions}; {known['date']}."
    )
    return f"Times: {known['clock']}. {where}{busy}"


def _milliseconds(row: dict[str, Any]) -> str:
    """Milliseconds with one decimal; with three decimals below 1 ms."""
    milliseconds = row["ways"][OURS]["median"] * 1e3
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.3f}"


def _shown(way: str) -> str:
    return way.removeprefix(f"{OURS} ")


def _cells(of: dict[str, float], peers: list[str]) -> list[str]:
    """Ratios to these peers; ratios above 1 are bold."""
    return ["" if peer not in of else f"**{of[peer]:.2f}**" if of[peer] > 1 else f"{of[peer]:.2f}" for peer in peers]


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def figures() -> str:
    """README's figures: the means and the losses."""
    record = read_record(RESULTS / "numpy.json")
    return f"{groups(record)}\n{losses(record)} {source(record)}\n"


def numpy_page() -> str:
    """Content of docs/speed/numpy.md: README's figures, memory use, and every case."""
    record = read_record(RESULTS / "numpy.json")
    sections = (figures(), "## Ordinary layers, with memory\n", layers(record), "## Every case\n", every_case(record))
    return "\n".join(sections)


def page_of(name: str) -> str:
    """Content of a record's page: means, losses, and every case."""
    record = read_record(RESULTS / f"{name}.json")
    return f"{groups(record)}\n{losses(record)} {source(record)}\n\n## Every case\n\n{every_case(record)}"


def transforms_table(record: dict[str, Any]) -> str:
    """Table in docs/how-it-works/numpy.md: number of transforms and speed for 31x31 kernels on one image."""
    rows = [row for row in record["cases"] if row["case"]["kernel"] == [31, 31] and row["group"] == "large kernels"]
    lines = []
    for row in rows:
        case = row["case"]
        channels, outputs = sum(case["channels"]), case["out_channels"]
        theirs, ours = 3 * channels * outputs // case["groups"], channels + outputs
        fastest = 1 / max(ratio for peer, ratio in ratios(row).items() if peer in SCIPY_TRANSFORMS)
        name = case["name"].removeprefix("31x31").removesuffix(", 1024x1024").removeprefix(",").strip()
        lines.append([name, str(theirs), str(ours), f"{theirs / ours:.1f}", f"{fastest:.1f}"])
    return _table(["channels -> outputs", "transforms of SciPy", "ours", "times fewer", "times faster"], lines)


def machines(results: Path, kind: str) -> str:
    """One section per machine that has a record of this kind, ``KIND-NAME.json``."""
    records = [read_record(path) for path in sorted(results.glob(f"{kind}-*.json")) if "report" not in path.name]
    sections = (
        f"## {record['environment']['machine']}\n\n{groups(record)}\n{losses(record)} {source(record)}\n\n{every_case(record)}"
        for record in records
    )
    return "\n".join(sections)


def gpu_page(results: Path) -> str:
    """Content of docs/speed/gpu.md: one section per measured GPU."""
    return machines(results, "gpu") or NO_GPU


def networks_table(record: dict[str, Any]) -> str:
    """Table in docs/how-to/onnx.md: times of each network, and two ratios of `load`."""
    lines = [
        [name, *(f"{seconds[way] * 1e3:.0f} ms" for way in ("cupyconv", "by hand", "node by node", "onnxruntime")),
         f"{seconds['cupyconv'] / seconds['by hand']:.2f}", f"{seconds['cupyconv'] / seconds['onnxruntime']:.1f}"]
        for name, seconds in record["networks"].items()
    ]  # fmt: skip
    head = [
        "network, one image", "`load`", "its calls written by hand", "node by node, nothing fused", "ONNX Runtime",
        "`load` / by hand", "`load` / ONNX Runtime",
    ]  # fmt: skip
    known = record["environment"]
    where = f"{known['machine']}, Python {known['python']}, ONNX Runtime {known['onnxruntime']}, {known['date']}."
    return (
        f"{_table(head, lines)}\nEach time is the minimum of three medians, each measured in its own process. {where}\n"
    )


def block_table(record: dict[str, Any]) -> str:
    """Table in docs/how-to/skip-connections.md: memory of a dense block, concatenating and merged."""
    lines = [[f"{layers:.0f}", f"{copies} MB", f"{merged} MB"] for layers, copies, merged in record["block_memory"]]
    return _table(["layers", "concatenating", "merged"], lines)


def networks() -> dict[str, Any]:
    return json.loads((RESULTS / "networks.json").read_text("utf-8"))


#: Page -> its begin mark, its end mark, and the function that returns the text between them.
WRITTEN = {
    "README.md": (FIGURES_BEGIN, FIGURES_END, figures),
    "docs/speed/numpy.md": (FIGURES_BEGIN, FIGURES_END, numpy_page),
    "docs/speed/gradients.md": (FIGURES_BEGIN, FIGURES_END, lambda: page_of("gradients")),
    "docs/speed/filters.md": (FIGURES_BEGIN, FIGURES_END, lambda: page_of("filters")),
    "docs/how-it-works/numpy.md": (
        FIGURES_BEGIN,
        FIGURES_END,
        lambda: transforms_table(read_record(RESULTS / "filters.json")),
    ),
    "docs/speed/elsewhere.md": (FIGURES_BEGIN, FIGURES_END, lambda: machines(RESULTS, "elsewhere")),
    "docs/speed/gpu.md": (FIGURES_BEGIN, FIGURES_END, lambda: gpu_page(RESULTS)),
    "docs/how-to/onnx.md": (FIGURES_BEGIN, FIGURES_END, lambda: networks_table(networks())),
    "docs/how-to/skip-connections.md": (FIGURES_BEGIN, FIGURES_END, lambda: block_table(networks())),
    "docs/reference/status.md": (STATUS_BEGIN, STATUS_END, lambda: status(RESULTS)),
}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield the path of each page with marks, its current text, and its new text."""
    for name, (begin, end, write) in WRITTEN.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        first, last = between(text, begin, end)
        yield path, text, text[:first] + write() + text[last:]


def between(text: str, begin: str, end: str) -> tuple[int, int]:
    """Return where the part of a text between two marks begins and ends."""
    return text.index("\n", text.index(begin)) + 1, text.index(end)


def main() -> int:
    for path, _, written in pages():
        path.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
