"""Both sides of every shape in turns, as a table of medians and a JSON file::

    python -m tests.benchmarks.compare [--rounds 9] [--only TEXT] [--json FILE] [--readme README.md]

The two sides take turns within every round, each first in every other one, so that what else the machine does
meets both.  The ratio is the median of the rounds' own ratios; above 1 the library is faster than its peer
(``layers.py``).  Results are checked before anything is timed.  Run it on a quiet machine: a product on all cores
waits for the slowest of them, so that one busy core costs each call a time slice; the load is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURES_BEGIN, FIGURES_END = "<!-- figures:", "<!-- end of figures -->"

sys.path.insert(0, str(HERE.parent))  # tolerance.py

import numpy as np  # noqa: E402

import cupyconv  # noqa: E402
from cupyconv.demo.libraries import numpy_library  # noqa: E402
from tests.benchmarks.layers import JOBS, LAYERS, Layer  # noqa: E402


def peak_bytes(call: Callable[[], np.ndarray]) -> int:
    """Most bytes that a call had allocated at a time, beyond its result."""
    tracemalloc.start()
    try:
        result = call()
        return max(0, tracemalloc.get_traced_memory()[1] - result.nbytes)
    finally:
        tracemalloc.stop()


def measure(layer: Layer, rounds: int) -> dict[str, Any]:
    """One row: medians in seconds, bytes beyond the result, rates."""
    xs, weight = layer.arrays()
    sides = {"ours": lambda: layer.ours(xs, weight), "peer": lambda: layer.peer(xs, weight)}
    for call in sides.values():
        layer.check(call(), xs, weight)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            begin = time.perf_counter()
            sides[side]()
            times[side].append(time.perf_counter() - begin)
    ours, peer = (statistics.median(times[side]) for side in ("ours", "peer"))
    ratios = [b / a for a, b in zip(times["ours"], times["peer"])]
    return {
        "layer": layer.name,
        "seconds": ours,
        "peer_seconds": peer,
        "ratio": statistics.median(ratios),
        "quartiles_of_ratio": statistics.quantiles(ratios)[::2],
        "workspace_bytes": peak_bytes(sides["ours"]),
        "peer_workspace_bytes": peak_bytes(sides["peer"]),
        "gflop_per_second": layer.flops / ours / 1e9,
        "gbyte_per_second": layer.minimal_bytes / ours / 1e9,
    }


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cupyconv": cupyconv.__version__,
        "machine": numpy_library().description,
        "blas": f"{blas['name']} {blas['version']}",
        "blas_threads": _blas_threads(),
        "python": sys.version.split()[0],
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else "unknown",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="TEXT", help="layers whose name contains it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="put the table between the figures' marks")
    given = parser.parse_args(arguments)
    described = environment()
    print("\n".join(f"{name:<14}{value}" for name, value in described.items()) + "\n")
    print(f"{'layer':<42}{'ours ms':>10}{'peer ms':>10}{'ratio':>7}{'quartiles':>13}{'MiB':>8}{'peer MiB':>10}")
    rows = []
    for layer in (*JOBS, *LAYERS):
        if given.only in layer.name:
            rows.append(measure(layer, given.rounds))
            print(_line(rows[-1]), flush=True)
    losses = [row["layer"] for row in rows if row["ratio"] < 1]
    print(f"\nslower than the peer on {len(losses)} of {len(rows)}" + "".join(f"\n    {name}" for name in losses))
    record = {**described, "rounds": given.rounds, "layers": rows}
    if given.json:
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    if given.readme:
        text = given.readme.read_text(encoding="utf-8")
        begin, end = text.index("\n", text.index(FIGURES_BEGIN)) + 1, text.index(FIGURES_END)
        given.readme.write_text(text[:begin] + markdown(record) + text[end:], encoding="utf-8")
    return 0


def markdown(record: dict[str, Any]) -> str:
    """The README's table of one record."""
    rows = [
        f"| {row['layer']} | {row['seconds'] * 1e3:.1f} | {row['peer_seconds'] * 1e3:.1f} |"
        f" {'' if row['ratio'] >= 1 else '**'}{row['ratio']:.2f}{'' if row['ratio'] >= 1 else '** (slower)'} |"
        f" {row['workspace_bytes'] / 2**20:.1f} | {row['peer_workspace_bytes'] / 2**20:.1f} |"
        for row in record["layers"]
    ]
    losses = sum(row["ratio"] < 1 for row in record["layers"])
    threads, load = record["blas_threads"], record["load_before"]
    busy = f" The machine was busy with other work (load {load})." if load != "unknown" and load > 0.5 else ""
    where = (
        f"{record['machine']}; BLAS {record['blas']} on {threads}; Python {record['python']}; {record['date']}.{busy}"
    )
    return "\n".join(
        [
            "| layer (float32 unless named) | cupyconv, ms | peer, ms | ratio | cupyconv, MiB | peer, MiB |",
            "|---|--:|--:|--:|--:|--:|",
            *rows,
            "",
            f"Slower than the peer on {losses} of {len(rows)}. {where}",
            "",
        ]
    )


def _line(row: dict[str, Any]) -> str:
    low, high = row["quartiles_of_ratio"]
    memory = "".join(
        f"{row[name] / 2**20:>{width}.1f}" for name, width in (("workspace_bytes", 8), ("peer_workspace_bytes", 10))
    )
    return (
        f"{row['layer']:<42}{row['seconds'] * 1e3:>10.1f}{row['peer_seconds'] * 1e3:>10.1f}{row['ratio']:>7.2f}"
        f"{f'{low:.2f} - {high:.2f}':>13}{memory}"
    )


def _blas_threads() -> str:
    limits = [os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")]
    limit = next(filter(None, limits), None)
    return "all cores" if limit is None else f"{limit} thread{'s' * (limit != '1')}"


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
