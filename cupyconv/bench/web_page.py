"""A record as one page for a browser: without downloads or scripts, for light and dark mode, and for phones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cupyconv.bench.charts import SERIES, RatioAxis, legend, memory_chart, memory_legend, ratio_chart, roofline, shapes
from cupyconv.bench.markup import Html, element, join, table
from cupyconv.bench.record import OURS, error_line
from cupyconv.bench.report import BEST, compared, grouped, means, rate, ratios

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --pale: #5b6675; --paper: #ffffff; --card: #f4f6f9; --rule: #d9dfe7;
  --won: #1f6fb8; --lost: #c4480c; --even: #6c7683; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --pale: #9aa6b5; --paper: #12161c; --card: #1b212a;
  --rule: #323b47; --won: #62aef2; --lost: #ff9350; --even: #a3aebb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .4rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.pale, figcaption { color: var(--pale); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; color: var(--pale); max-width: none; }
.legend span { display: inline-flex; align-items: center; gap: .35rem; }
.defs { position: absolute; }
.won { fill: var(--won); stroke: var(--won); }
.lost { fill: var(--lost); stroke: var(--lost); }
use.unsteady { fill: var(--paper); stroke-width: 1.5; }
use { fill-opacity: .85; }
.ratios > div { display: grid; grid-template-columns: minmax(0, 23rem) 1fr; column-gap: 1rem; align-items: center; }
.ratios > div:nth-child(even) { background: var(--card); }
.ratios span { padding-left: .4rem; line-height: 1.25; }
.ratios svg { width: 100%; display: block; overflow: visible; }
svg text { fill: var(--pale); font: 12px system-ui, sans-serif; }
svg.plane text { font-size: 14px; stroke: var(--paper); stroke-width: 3; paint-order: stroke; }
.grid { stroke: var(--rule); }
.even { stroke: var(--even); stroke-width: 1.5; }
.plane { width: 100%; height: auto; display: block; }
polyline, .stroke { fill: none; stroke-width: 2; }
polyline.won, polyline.lost { fill: none; }
polyline.roof { stroke: var(--even); stroke-width: 1.5; }
.dashed { stroke-dasharray: 5 4; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.5rem; }
figure { margin: .8rem 0; }
figure.roofline { max-width: 46rem; }
figcaption { font-weight: 600; }
.wide { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
thead th { color: var(--pale); font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tbody th { font-weight: 400; white-space: normal; min-width: 15rem; max-width: 20rem; }
td.slower { color: var(--lost); font-weight: 600; }
.about td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--pale); margin-top: .5rem; }
.about tbody th { min-width: 9rem; }
@media (max-width: 44rem) {
  .ratios > div { grid-template-columns: 1fr; padding: .2rem 0; }
  .ratios span { font-size: .85rem; }
  th, td { padding: .2rem .45rem; }
  tbody th { min-width: 7rem; max-width: 8rem; font-size: .8rem; }
  .about th { min-width: 6rem; }
}
"""


def write_page(record: Mapping[str, Any], directory: Path) -> Path:
    """Write `index.html` into a directory, which is created."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "index.html"
    path.write_text(page(record), encoding="utf-8")
    return path


def page(record: Mapping[str, Any]) -> str:
    """Return the whole document."""
    known = record["environment"]
    title = f"cupyconv bench, {known.get('machine', 'unknown machine')}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    body = element("body", shapes(), element("main", *_sections(record)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(record: Mapping[str, Any]) -> Iterator[Html]:
    rows = record["cases"]
    yield _summary(record)
    if rows:
        yield from _ratios(rows)
        yield from _roofline(rows, record["floors"])
    yield from _memory(record.get("memory", []))
    yield from _left_out(record)
    yield element("h2", "Environment of the measurements")
    lines = [(name, str(value)) for name, value in record["environment"].items()]
    yield table(("", ""), lines, marks="about")


def _summary(record: Mapping[str, Any]) -> Html:
    rows, known = record["cases"], record["environment"]
    against = [ratio[BEST] for ratio in map(ratios, rows) if BEST in ratio]
    told = [f"{len(rows)} cases. "]
    if against:
        won = sum(ratio <= 1 for ratio in against)
        told.append(f"Faster than every peer on {won}, slower than the fastest peer on {len(against) - won}. ")
    told.append("Every timed result was first checked against a computation in float64.")
    where = [str(known[name]) for name in ("machine", "blas_threads", "date") if name in known]
    if "commit" in known:
        where.append(f"commit {known['commit']}")
    return join(
        element("h1", "cupyconv compared with its peers"),
        element("p", " · ".join(where), class_="pale"),
        element("p", told),
    )


# --- ratios ---------------------------------------------------------------------------------------------------


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    peers = compared(rows)
    axis = RatioAxis.over(ratio for row in rows for ratio in ratios(row).values())
    yield element("h2", "Ratio to each peer")
    yield element(
        "p",
        "cupyconv's time with its chosen method, divided by the peer's time. Left of the line at 1, cupyconv is faster. "
        "The means are geometric.",
    )
    columns = [*peers, BEST]
    yield table(
        ["group (cases)", *map(_shown, columns), "worst ratio to best peer"],
        [_means(group, members, columns) for group, members in grouped(rows).items()],
    )
    yield legend(peers)
    for group, members in grouped(rows).items():
        yield element("h3", group)
        yield ratio_chart(members, peers, axis)
        yield element(
            "details",
            element("summary", f"{group}: times, rates and memory"),
            _times(members, compared(members)),
            open="open",
        )


def _means(group: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[Html]:
    known = means(rows)
    slowest = max((ratios(row).get(BEST, 0.0) for row in rows), default=0.0)
    name = element("th", f"{group} ({len(rows)})")
    return [name, *(_ratio(known.get(peer)) for peer in columns), _ratio(slowest or None)]


def _ratio(value: float | None) -> Html:
    if value is None:
        return element("td")
    return element("td", f"{value:.2f}", class_="slower" if value > 1 else None)


def _times(rows: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Html:
    """Show, per case, our time, rate and share of the floor, then each peer's time, ratio to ours, and memory."""
    counted = [way for way in (OURS, *peers) if any(_memory_of(row, way) is not None for row in rows)]
    head = ["case", "method", "cupyconv, ms", "rate", "floor, ms", "floor rate", "of floor"]
    for peer in peers:
        head += [f"{_shown(peer)}, ms", "ratio"]
    head += [f"{_shown(way)}, MiB" for way in counted]
    return table(head, [_line(row, peers, counted) for row in rows])


def _line(row: Mapping[str, Any], peers: Sequence[str], counted: Sequence[str]) -> list[str]:
    ways, floor, known = row["ways"], row["floor"], ratios(row)
    cells = [row["case"]["name"]]
    if OURS in ways:
        seconds = ways[OURS]["median"]
        cells += [row["chosen"], milliseconds(seconds) + _doubt(ways[OURS]), rate(floor, seconds)]
        reached = f"{floor['seconds'] / seconds:.0%}"
    else:
        cells += ["failed", "", ""]
        reached = ""
    cells += [milliseconds(floor["seconds"]), rate(floor, floor["seconds"]), reached]
    for peer in peers:
        cells.append(milliseconds(ways[peer]["median"]) + _doubt(ways[peer]) if peer in ways else "")
        cells.append(_ratio(known.get(peer)))
    for way in counted:
        count = _memory_of(row, way)
        cells.append("" if count is None else mebibytes(count))
    return cells


def _memory_of(row: Mapping[str, Any], way: str) -> int | None:
    return row["ways"].get(way, {}).get("beyond_result")


def _doubt(way: Mapping[str, Any]) -> str:
    return "" if way.get("steady", True) else "?"


def _shown(way: str) -> str:
    return way.removeprefix(f"{OURS} ")


# --- roofline and memory --------------------------------------------------------------------------------------


def _roofline(rows: Sequence[Mapping[str, Any]], floors: Mapping[str, Any]) -> Iterator[Html]:
    yield element("h2", "Roofline")
    measured = [f"{floors['bandwidth'] / 1e9:,.1f} GB/s by a copy"]
    measured += [
        f"{_flops(peak)} by {floors['by'][name]}'s matrix product in {name}"
        for name, peak in floors["products"].items()
    ]
    yield element(
        "p",
        f"The roof is the performance that this machine reached in the same run: {'; '.join(measured)}. "
        "Each point is one case. Operations are counted by the definition, bytes as if every array were read or written "
        "once. Transforms (Winograd, FFT) save operations and can exceed the roof.",
    )
    lost = "orange: a peer is faster"
    yield element("figure", roofline(rows, floors), element("p", lost, class_="pale"), class_="roofline")


def _flops(value: float) -> str:
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"


def _memory(grown: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    rows = [row for row in grown if row["batches"]]
    yield element("h2", "Memory against batch size")
    if not rows:
        yield element("p", "This record has no memory measurements.", class_="pale")
        return
    yield element(
        "p",
        "Peak memory of one call in addition to its result. A matrix product without blocking needs the columns of all "
        "samples at once; for a merge, these are the concatenation.",
    )
    yield memory_legend()
    charts = [element("figure", element("figcaption", row["case"]["name"]), memory_chart(row)) for row in rows]
    yield element("div", charts, class_="charts")
    for row in rows:
        head = [row["case"]["name"], *(f"N {batch}" for batch in row["batches"])]
        yield table(head, [[f"{said}, MiB", *map(mebibytes, row[name])] for name, (_, said) in SERIES.items()])


def _left_out(record: Mapping[str, Any]) -> Iterator[Html]:
    errors, skipped = record["errors"], record["skipped"]
    if errors:
        yield element("h2", f"{len(errors)} failed")
        yield element("ul", [element("li", error_line(entry)) for entry in errors])
    if skipped:
        yield element("h2", f"{len(skipped)} cases were not measured")
        yield element("p", f"{record['used']:.0f} of {record['seconds']:.0f} s were used.")
        yield element("ul", [element("li", name) for name in skipped])


# --- numbers --------------------------------------------------------------------------------------------------


def three_digits(value: float) -> str:
    """Format a number with at least three significant digits and no exponent."""
    places = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:,.{places}f}"


def milliseconds(seconds: float) -> str:
    return three_digits(seconds * 1e3)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.2f}"
