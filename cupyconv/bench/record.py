"""A results file: everything that was measured and what it depends on, whole after every case.

::

    {"environment": {...}, "seconds": budget, "used": seconds so far, "running": the case under way, or null,
     "floors": {"bandwidth": bytes/s, "products": {precision: flop/s}, "by": {precision: who was fastest}},
     "cases": [{"case": {...}, "group": name, "floor": {...}, "chosen": method, "methods": {method: {...}}, "rejected": {method: reason},
                "flags": {...}, "ways": {"cupyconv": {"median": s, ...}, "cupyconv gemm": {...}, "torch": {...}}}],
     "memory": [{"case": {...}, "batches": [N, ...], "measured": [bytes, ...], "planned": [...], "columns": [...]}],
     "errors": [{"case": name, "way": name, "error": text}], "skipped": [names]}

Times are seconds.  ``ways`` has the library's choice as ``cupyconv``, its other ways by their names, and the peers; the
``ratio`` of each is the library's time over its own, the median of the rounds' ratios: below 1 the library is faster.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OURS = "cupyconv"
#: Of the library's ways: exact arithmetic where the choice transforms, and a chain as separate calls.
EXACT = "exact"
LAYER_BY_LAYER = "layer by layer"


def new_record(environment: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A record of nothing yet."""
    return {
        "environment": environment,
        "seconds": seconds,
        "used": 0.0,
        "running": None,
        "floors": {},
        "cases": [],
        "memory": [],
        "errors": [],
        "skipped": [],
    }


def write_record(record: dict[str, Any], path: Path | None) -> None:
    """Replace the file at once, so that whoever stops the run finds the last whole one."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read_record(path: Path) -> dict[str, Any]:
    """What an earlier run wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def resume(record: dict[str, Any]) -> dict[str, Any]:
    """A record to go on with: the case during which its process ended has failed, what was skipped is open again."""
    if record["running"] is not None:
        add_error(record, record["running"], "", "the process ended while this case was measured")
    record["running"], record["skipped"] = None, []
    record.setdefault("memory", [])
    return record


def is_done(record: dict[str, Any], name: str) -> bool:
    """Whether a case was measured, or ended the process that measured it."""
    failed_whole = {entry["case"] for entry in record["errors"] if not entry["way"]}
    return name in failed_whole or any(row["case"]["name"] == name for row in record["cases"])


def is_ours(way: str) -> bool:
    """Whether a way is the library's, not a peer."""
    return way.partition(" ")[0] == OURS


def add_error(record: dict[str, Any], case: str, way: str, error: str | Exception) -> str:
    """Note a failure; a way of ``""`` is the case itself.  Gives the line that tells of it."""
    if isinstance(error, Exception):
        error = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    record["errors"].append({"case": case, "way": way, "error": error})
    return error_line(record["errors"][-1])


def error_line(entry: dict[str, str]) -> str:
    """The line that tells of a failure."""
    return f"{entry['case']}{', ' + entry['way'] if entry['way'] else ''}: {entry['error']}"
