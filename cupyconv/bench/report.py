"""What is printed: a block a case, and at the end losses, choices, failures and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyconv.bench.choice import SHARE, WITHIN, Choice, bad_choices, recorded
from cupyconv.bench.record import OURS, error_line, is_ours

#: Entries of a list at the end; the results file has all.
SHOWN = 40


def heading(environment: Mapping[str, Any]) -> str:
    """What the figures depend on."""
    return "\n".join(f"{name:<18}{value}" for name, value in environment.items()) + "\n"


#: Over the columns of `block`; times in microseconds.
COLUMNS = (
    f"{'':<26}{'median µs':>12}{'min µs':>12}{'spread':>8}{'rate':>16}{'of floor':>9}{'host µs':>10}{'row µs':>10}{'ratio':>8}\n"
    "    spread: between the quartiles; host: until the call returned; row: one of many enqueued at once;\n"
    "    ratio: how many times longer than cupyconv, whose choice of method is named\n"
)


def block(row: Mapping[str, Any]) -> str:
    """One case: a line for its floor, one for each way."""
    case, floor = row["case"], row["floor"]
    judged = "; ratios are of host times" if case["judged"] == "host" else ""
    first = f"{case['name']}: floor {_micro(floor['seconds'])} µs, by {floor['bound']}{judged}"
    return "\n".join([first, *(_line(row, name, way) for name, way in row["ways"].items())])


def _line(row: Mapping[str, Any], name: str, way: Mapping[str, Any]) -> str:
    median, (low, high) = way["median"], way["quartiles"]
    on_gpu = row["on_gpu"]
    label = f"{name}: {row['chosen']}" if name == OURS else name
    notes = ""
    if way.get("ratio", 1) < 1:
        notes += "  faster than cupyconv"
    if on_gpu and way["host_median"] > median:
        notes += "  launch-bound: the host takes longer than the GPU"
    return (
        f"    {label:<22}{_micro(median):>12}{_micro(way['min']):>12}{(high - low) / median:>8.0%}"
        f"{_rate(row['floor'], median):>16}{row['floor']['seconds'] / median:>9.0%}"
        f"{_micro(way['host_median']) if on_gpu else '':>10}{_micro(way['row']) if way['row'] else '':>10}"
        f"{format(way['ratio'], '.2f') if 'ratio' in way else '':>8}{notes}"
    ).rstrip()


def _rate(floor: Mapping[str, Any], seconds: float) -> str:
    if floor["bound"] == "memory":
        return f"{floor['bytes'] / seconds / 1e9:,.0f} GB/s"
    rate = floor["flops"] / seconds
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def summary(record: Mapping[str, Any]) -> str:
    """The end of the page."""
    parts = [_against_peers(record), _choices(recorded(record))]
    if record["skipped"]:
        parts.append(
            f"{len(record['skipped'])} cases were not measured: {record['used']:.0f} of {record['seconds']:.0f} s were used"
        )
        parts.append(_some(record["skipped"]))
    if record["errors"]:
        parts += [f"{len(record['errors'])} failed:", _some([error_line(entry) for entry in record["errors"]])]
    else:
        parts.append("nothing failed; every result that was timed was first held to float64")
    return "\n".join(part for part in parts if part)


def _against_peers(record: Mapping[str, Any]) -> str:
    lines = []
    peers = dict.fromkeys(name for row in record["cases"] for name in row["ways"] if not is_ours(name))
    for peer in peers:
        ratios = {row["case"]["name"]: row["ways"][peer].get("ratio") for row in record["cases"] if peer in row["ways"]}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        lost = sorted((ratio, name) for name, ratio in known.items() if ratio < 1)
        lines.append(f"against {peer}: faster on {len(known) - len(lost)}, slower on {len(lost)} of {len(known)} cases")
        if lost:
            lines.append(_some([f"{ratio:.2f}  {name}" for ratio, name in lost]))
    return "\n".join(lines)


def _choices(choices: list[Choice]) -> str:
    if not choices:
        return ""
    bad = bad_choices(choices)
    good = len(choices) - len(bad)
    text = (
        f'method="auto" was within {WITHIN - 1:.0%} of the best method on {good} of the {len(choices)} cases that have more'
        f" than one ({good / len(choices):.0%}; wanted {SHARE:.0%})"
    )
    return "\n".join([text, _some([str(choice) for choice in bad])]) if bad else text


def _some(lines: list[str]) -> str:
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(f"    {line}" for line in [*lines[:SHOWN], *more])


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
