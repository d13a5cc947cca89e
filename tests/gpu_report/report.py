"""A report: the results of all parts in one self-contained file, and as text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from cupyconv.bench.record import OURS

#: Maximum number of failures that are printed; the file has all.
SHOWN = 40


def report_of(lines: Sequence[Mapping[str, Any]], record: Mapping[str, Any] | None, target: str) -> dict[str, Any]:
    """Return the report of the lines so far and of the bench's record, at any time of the run.

    ::

        {"target": "gpu" or "host_device", "environment": {...},
         "parts": {name: {"skipped": reason or "", "seconds": s, "counts": {"passed": n, ...}, "failures": [{"name", "message"}]}},
         "smoke": [{"kernel", "dtype", "outcome", "error", "allowed", "seconds", "message"}],
         "bench": [{"case", "dtype", "tf32", "floor": s, "chosen": method, "kernels": [names], "ways": {name: s}}]}
    """
    parts = [name for name in dict.fromkeys(line["part"] for line in lines) if name != "environment"]
    environment = next((line["values"] for line in lines if "values" in line), {})
    return {
        "target": target,
        "environment": environment,
        "parts": {name: _part([line for line in lines if line["part"] == name]) for name in ("environment", *parts)},
        "smoke": [
            {
                key: line[key]
                for key in ("kernel", "dtype", "outcome", "error", "allowed", "seconds", "message")
                if key in line
            }
            for line in lines
            if line["part"] == "smoke" and "kernel" in line
        ],
        "bench": [_measured(row) for row in record["cases"]] if record else [],
    }


def _part(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ended = [line for line in lines if "outcome" in line]
    expected = sum({line.get("share"): line["expected"] for line in lines if "expected" in line}.values())
    counts = Counter(line["outcome"] for line in ended)
    counts["not run"] = max(0, expected - len(ended))
    return {
        "skipped": next((line["skipped"] for line in lines if "skipped" in line), ""),
        "seconds": next((line["part_seconds"] for line in lines if "part_seconds" in line), None),
        "counts": {outcome: count for outcome, count in sorted(counts.items()) if count},
        "failures": [
            {"name": line["name"], "message": line["message"]} for line in ended if line["outcome"] == "failed"
        ],
    }


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    case, chosen = row["case"], row["methods"][row["chosen"]]
    return {
        "case": case["name"],
        "dtype": case["dtype"],
        "tf32": case["tf32"],
        "floor": row["floor"]["seconds"],
        "chosen": row["chosen"],
        "kernels": chosen["kernels"],
        "ways": {name: way["median"] for name, way in row["ways"].items()},
    }


def is_whole(report: Mapping[str, Any]) -> bool:
    """Whether nothing failed, and no result that a part expected is missing."""
    return not any(
        part["counts"].get(outcome) for part in report["parts"].values() for outcome in ("failed", "not run")
    )


def in_words(report: Mapping[str, Any]) -> str:
    """Return the text that is printed at the end."""
    lines = [f"{name:<18}{value}" for name, value in report["environment"].items()]
    lines.append("")
    for name, part in report["parts"].items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in part["counts"].items())
        seconds = "" if part["seconds"] is None else f"  ({part['seconds']:.0f} s)"
        lines.append(
            f"{name:<12}{'skipped: ' + part['skipped'] if part['skipped'] else counts or 'nothing was run'}{seconds}"
        )
    failures = [(name, entry) for name, part in report["parts"].items() for entry in part["failures"]]
    if failures:
        lines += ["", f"{len(failures)} failed:"]
        lines += [
            f"  {name}: {entry['name']}\n      {_telling_line(entry['message'])}" for name, entry in failures[:SHOWN]
        ]
        lines += [f"  ... and {len(failures) - SHOWN} more"] if len(failures) > SHOWN else []
    if (share := share_of_floor(report["bench"])) is not None:
        lines += ["", f"the choice reaches {share:.0%} of its floor, by the median of {len(report['bench'])} cases"]
    return "\n".join(lines)


def share_of_floor(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median over the cases of floor / time of the library's choice; None if none was measured."""
    shares = [row["floor"] / row["ways"][OURS] for row in rows if OURS in row["ways"]]
    return median(shares) if shares else None


#: Lines of a message that state the error: pytest's, Python's when it aborts, ours when a process has ended.
TELLING = re.compile(r"^E .*|Timeout \(.*|Fatal Python error.*|^the process ended.*", re.MULTILINE)


def _telling_line(message: str) -> str:
    """Return the last match of `TELLING` in a message, or its last line if there is none."""
    return (TELLING.findall(message) or message.splitlines() or ["no message"])[-1][:200]


def as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"
