"""The printed page: a block per case, and at the end all ratios, won and lost, the choices, and the failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, fsum, log
from typing import Any

from cupyconv.bench.choice import SHARE, WITHIN, recorded, worst_first
from cupyconv.bench.record import EXACT, LAYER_BY_LAYER, OURS, error_line, is_ours

#: Number of list entries at the end; the results file has all.
SHOWN = 40


def heading(environment: Mapping[str, Any]) -> str:
    """Return what the figures depend on."""
    return "\n".join(f"{name:<18}{value}" for name, value in environment.items()) + "\n"


#: Heading of the columns of `block`; times are in microseconds.
COLUMNS = (
    f"{'':<26}{'median µs':>12}{'min µs':>12}{'spread':>8}{'rate':>16}{'of floor':>9}{'host µs':>10}{'row µs':>10}{'ratio':>8}\n"
    "    spread: interquartile range; host: time until the call returned; row: one of many calls enqueued together;\n"
    "    ratio: cupyconv's time with its chosen method, divided by this time; below 1 cupyconv is faster\n"
)


def block(row: Mapping[str, Any]) -> str:
    """Return the text of one case: a line for its floor and a line per implementation."""
    case, floor = row["case"], row["floor"]
    judged = "; ratios compare host times" if case["judged"] == "host" and row["on_gpu"] else ""
    first = f"{case['name']}: floor {_micro(floor['seconds'])} µs, bound by {floor['bound']}{judged}"
    return "\n".join([first, *(_line(row, name, way) for name, way in row["ways"].items())])


def _line(row: Mapping[str, Any], name: str, way: Mapping[str, Any]) -> str:
    median, (low, high) = way["median"], way["quartiles"]
    on_gpu = row["on_gpu"]
    label = f"{name}: {row['chosen']}" if name == OURS else name
    notes = "" if way.get("steady", True) else "  unsteady"
    if way.get("ratio", 1) > 1:
        notes += "  faster than cupyconv"
    if on_gpu and way["host_median"] > median:
        notes += "  launch-bound: the host takes longer than the GPU"
    return (
        f"    {label:<22}{_micro(median):>12}{_micro(way['min']):>12}{(high - low) / median:>8.0%}"
        f"{rate(row['floor'], median):>16}{row['floor']['seconds'] / median:>9.0%}"
        f"{_micro(way['host_median']) if on_gpu else '':>10}{_micro(way['row']) if way['row'] else '':>10}"
        f"{format(way['ratio'], '.2f') if 'ratio' in way else '':>8}{notes}"
    ).rstrip()


def rate(floor: Mapping[str, Any], seconds: float) -> str:
    """Return what a time means: bytes per second if memory is the floor, else operations per second."""
    if floor["bound"] == "memory":
        return f"{floor['bytes'] / seconds / 1e9:,.0f} GB/s"
    rate = floor["flops"] / seconds
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def summary(record: Mapping[str, Any]) -> str:
    """Return the end of the page."""
    parts = [against_peers(record["cases"]), _choices(record)]
    if record["skipped"]:
        parts.append(
            f"{len(record['skipped'])} cases were not measured: {record['used']:.0f} of {record['seconds']:.0f} s were used"
        )
        parts.append(_some(record["skipped"]))
    if record["errors"]:
        parts += [f"{len(record['errors'])} failed:", _some([error_line(entry) for entry in record["errors"]])]
    else:
        parts.append("nothing failed; every timed result was first checked against float64")
    return "\n".join(part for part in parts if part)


# --- against the peers ----------------------------------------------------------------------------------------

#: The column of the fastest peer of each case, and the implementation that chains are compared with besides peers.
BEST, SEPARATE = "best peer", f"{OURS} {LAYER_BY_LAYER}"
#: Labels of table rows.
MEAN, MEAN_OF_EXACT = "geometric mean", "geometric mean, exact arithmetic only"


def compared(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what the library is compared with: the peers, and for a chain its layers in separate calls."""
    names = dict.fromkeys(name for row in rows for name in row["ways"])
    return [name for name in names if not is_ours(name) or name == SEPARATE]


def ratios(row: Mapping[str, Any], way: str = OURS) -> dict[str, float]:
    """Return our time divided by each peer's and by the fastest one's; `way` selects exact arithmetic if present."""
    ways = row["ways"]
    if OURS not in ways:
        return {}
    slower = 1.0
    if way != OURS and way in ways:
        slower = ways[way]["median"] / ways[OURS]["median"]
    known = {name: slower * ways[name]["ratio"] for name in compared([row]) if "ratio" in ways[name]}
    peers = [ratio for name, ratio in known.items() if not is_ours(name)]
    return known | ({BEST: max(peers)} if peers else {})


def means(rows: Sequence[Mapping[str, Any]], way: str = OURS) -> dict[str, float]:
    """Return the geometric mean of the ratios to each peer, over the cases that the peer has."""
    by_peer: dict[str, list[float]] = {}
    for row in rows:
        for peer, ratio in ratios(row, way).items():
            by_peer.setdefault(peer, []).append(ratio)
    return {peer: exp(fsum(map(log, values)) / len(values)) for peer, values in by_peer.items()}


def grouped(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each group of cases."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def against_peers(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table per group."""
    tables = [_table(group, members) for group, members in grouped(rows).items() if any(map(ratios, members))]
    return "\n".join(tables)


def _table(group: str, rows: Sequence[Mapping[str, Any]]) -> str:
    peers = [*compared(rows), BEST]
    shown = [peer.removeprefix(f"{OURS} ").replace("channels-last", "ch.-last") for peer in peers]
    widths = [max(7, len(name)) + 2 for name in shown]
    exact = any(f"{OURS} {EXACT}" in row["ways"] for row in rows)
    first = max(len(MEAN_OF_EXACT if exact else MEAN), *(len(row["case"]["name"]) for row in rows)) + 2

    def line(label: str, ours: str, values: Iterable[str]) -> str:
        return f"    {label:<{first}}{ours:<24}" + "".join(f"{v:>{w}}" for v, w in zip(values, widths))

    def numbers(of: Mapping[str, float], ways: Mapping[str, Any] = {}) -> list[str]:
        unsteady = {name for name, way in ways.items() if not way.get("steady", True)}
        marks = {peer: "?" if {peer, OURS} & unsteady else "" for peer in peers}
        return [f"{of[peer]:.2f}{marks[peer]}" if peer in of else "" for peer in peers]

    lines = [f"\n{group}: cupyconv's time divided by each peer's; below 1 cupyconv is faster", line("", "", shown)]
    for row in rows:
        ours = row["ways"].get(OURS)
        label = f"{_micro(ours['median'])} µs {row['chosen']}" if ours else "failed"
        lines.append(line(row["case"]["name"], label, numbers(ratios(row), row["ways"])))
    known = [ratios(row) for row in rows]
    lines.append(line(MEAN, f"{len(rows)} cases", numbers(means(rows))))
    if exact:
        lines.append(line(MEAN_OF_EXACT, "", numbers(means(rows, f"{OURS} {EXACT}"))))
    having = [[ratio[peer] for ratio in known if peer in ratio] for peer in peers]
    lines.append(line("faster", "", [str(sum(ratio <= 1 for ratio in of)) for of in having]))
    lines.append(line("slower", "", [str(sum(ratio > 1 for ratio in of)) for of in having]))
    lines.append(line("slowest", "", [f"{max(of):.2f}" if of else "" for of in having]))
    if any("?" in line for line in lines):
        lines.append("    ? the machine was busy: the median is above twice the minimum; measure again")
    return "\n".join(line.rstrip() for line in lines)


# --- the choice -----------------------------------------------------------------------------------------------


def _choices(record: Mapping[str, Any]) -> str:
    choices = worst_first(recorded(record))
    if not choices:
        return ""
    good = sum(choice.is_good for choice in choices)
    first = max(len(choice.case) for choice in choices) + 2
    lines = [
        f"    {choice.case:<{first}}{choice.chosen:<16}{choice.best:<16}{choice.loss:>6.2f}   "
        + ", ".join(f"{method} {_micro(seconds)}" for method, seconds in sorted(choice.seconds.items()))
        for choice in choices
    ]
    return "\n".join(
        [
            f'\nmethod="auto" was within {WITHIN - 1:.0%} of the best method on {good} of the {len(choices)} cases that have'
            f" more than one ({good / len(choices):.0%}; goal {SHARE:.0%})",
            f"    {'':<{first}}{'chosen':<16}{'best':<16}{'loss':>6}   µs of each method",
            *lines,
            "",
        ]
    )


def _some(lines: list[str]) -> str:
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(f"    {line}" for line in [*lines[:SHOWN], *more])


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
