"""A results file: all measurements and what they depend on, written completely after every case.

::

    {"environment": {...}, "seconds": budget, "used": seconds so far, "running": the case under way, or null,
     "floors": {"bandwidth": bytes/s, "products": {precision: flop/s}, "by": {precision: who was fastest}},
     "cases": [{"case": {...}, "group": name, "floor": {...}, "chosen": method, "methods": {method: {...}}, "rejected": {method: reason},
                "flags": {...}, "ways": {"cupyconv": {"median": s, ...}, "cupyconv gemm": {...}, "torch": {...}}}],
     "memory": [{"case": {...}, "batches": [N, ...], "measured": [bytes, ...], "planned": [...], "columns": [...]}],
     "errors": [{"case": name, "way": name, "error": text}], "skipped": [names]}

Times are seconds.  In ``ways`` the library's choice is ``cupyconv``; its other implementations and the peers have their
own names.  The ``ratio`` of each is the library's time divided by its own, the median over rounds: below 1 the library
is faster.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OURS = "cupyconv"
#: Two of the library's implementations: exact arithmetic if the choice transforms, and a chain as separate calls.
EXACT = "exact"
LAYER_BY_LAYER = "layer by layer"


def new_record(environment: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return an empty record."""
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
    """Replace the file atomically, so that an interrupted run leaves the last complete one."""
    if path is None:
        return
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record that an earlier run wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def resume(record: dict[str, Any]) -> dict[str, Any]:
    """Prepare a record to be resumed: a case whose process ended has failed, and skipped cases are open again."""
    if record["running"] is not None:
        add_error(record, record["running"], "", "the process ended while this case was measured")
    record["running"], record["skipped"] = None, []
    record.setdefault("memory", [])
    return record


def is_done(record: dict[str, Any], name: str) -> bool:
    """Return whether a case was measured, or ended the process that measured it."""
    failed_whole = {entry["case"] for entry in record["errors"] if not entry["way"]}
    return name in failed_whole or any(row["case"]["name"] == name for row in record["cases"])


def is_ours(way: str) -> bool:
    """Return whether an implementation belongs to the library and not to a peer."""
    return way.partition(" ")[0] == OURS


def add_error(record: dict[str, Any], case: str, way: str, error: str | Exception) -> str:
    """Record a failure; ``""`` as `way` stands for the case itself.  Returns the line that reports it."""
    if isinstance(error, Exception):
        error = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    record["errors"].append({"case": case, "way": way, "error": error})
    return error_line(record["errors"][-1])


def error_line(entry: dict[str, str]) -> str:
    """Return the line that reports a failure."""
    return f"{entry['case']}{', ' + entry['way'] if entry['way'] else ''}: {entry['error']}"
