"""The charts of the page, as SVG: ratios on one axis, the roofline, memory against batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from typing import Any

from cupyconv.bench.markup import Html, element, join
from cupyconv.bench.record import OURS
from cupyconv.bench.report import BEST, rate, ratios

#: Markers around the origin, about 10 wide, in the order of the peers.
SHAPES = (
    "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0 -5 0Z",
    "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "M0 -6L6 0L0 6L-6 0Z",
    "M0 -5.5L5.5 4.5H-5.5Z",
    "M0 5.5L5.5 -4.5H-5.5Z",
    "M-2 -6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z",
    "M-6 -2.5H6V2.5H-6Z",
    "M-2.5 -6H2.5V6H-2.5Z",
)


def shapes() -> Html:
    """Return the definitions that all markers of the page refer to."""
    drawn = [element("path", d=path, id=f"shape{number}") for number, path in enumerate(SHAPES)]
    return element("svg", element("defs", drawn), width=0, height=0, class_="defs", aria_hidden="true")


def marker(peer: int, *, lost: bool = False, unsteady: bool = False, **place: object) -> Html:
    kind = "lost" if lost else "won"
    return element("use", href=f"#shape{peer % len(SHAPES)}", class_=f"{kind} unsteady" if unsteady else kind, **place)


# --- ratios ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RatioAxis:
    """A logarithmic axis over all ratios of a record; positions are in percent of its width."""

    low: int
    high: int

    @classmethod
    def over(cls, known: Iterable[float]) -> RatioAxis:
        """Return an axis between whole powers of two that includes 1."""
        values = [1.0, *known]
        return cls(min(-1, floor(log2(min(values)))), max(1, ceil(log2(max(values)))))

    def place(self, ratio: float) -> str:
        share = (log2(ratio) - self.low) / (self.high - self.low)
        return f"{3 + 94 * share:.2f}%"

    def ticks(self) -> Iterator[tuple[str, str]]:
        """Yield positions and labels of at most seven ticks; 1 is one of them."""
        every = ceil((self.high - self.low) / 6)
        for power in range(self.low, self.high + 1):
            if power % every == 0:
                yield self.place(2.0**power), str(2**power) if power >= 0 else f"1/{2**-power}"


def ratio_chart(rows: Sequence[Mapping[str, Any]], peers: Sequence[str], axis: RatioAxis) -> Html:
    """Draw a line per case with a marker per peer: cupyconv is faster left of 1."""
    ticks = [element("text", text, x=place, y=12, text_anchor="middle") for place, text in axis.ticks()]
    head = element("div", element("span"), element("svg", ticks, class_="axis", height=16))
    lines = [
        element("div", element("span", row["case"]["name"]), _strip(row, peers, axis))
        for row in rows
        if OURS in row["ways"]
    ]
    return element("div", head, lines, class_="ratios")


def _strip(row: Mapping[str, Any], peers: Sequence[str], axis: RatioAxis) -> Html:
    grid = [
        element("line", x1=place, x2=place, y1=0, y2=22, class_="even" if text == "1" else "grid")
        for place, text in axis.ticks()
    ]
    known, ways = ratios(row), row["ways"]
    marks = [
        element(
            "g",
            element("title", f"{peer}: {known[peer]:.2f}"),
            marker(
                number,
                lost=known[peer] > 1,
                unsteady=not all(ways[way].get("steady", True) for way in (OURS, peer)),
                x=axis.place(known[peer]),
                y=11,
            ),
        )
        for number, peer in enumerate(peers)
        if peer in known
    ]
    said = ", ".join(f"{peer} {known[peer]:.2f}" for peer in peers if peer in known)
    return element("svg", grid, marks, class_="strip", height=22, role="img", aria_label=said or "no peer")


def legend(peers: Sequence[str]) -> Html:
    """Return the legend of shapes and colors."""
    keys = [_key(peer.removeprefix(f"{OURS} "), marker(number, x=8, y=8)) for number, peer in enumerate(peers)]
    keys.append(_key("cupyconv is slower", marker(0, lost=True, x=8, y=8)))
    keys.append(_key("hollow: the machine was busy", marker(0, unsteady=True, x=8, y=8)))
    return element("p", keys, class_="legend")


def _key(text: str, drawn: Html) -> Html:
    return element("span", element("svg", drawn, width=16, height=16, aria_hidden="true"), text)


# --- charts with two logarithmic axes -------------------------------------------------------------------------

WIDTH, HEIGHT = 560, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46


@dataclass(frozen=True)
class Plane:
    """Two logarithmic axes over the data."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def over(cls, xs: Iterable[float], ys: Iterable[float]) -> Plane:
        return cls(_range(xs), _range(ys))

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = _share(x, self.x), _share(y, self.y)
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1
        )

    def axes(
        self, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str], x_title: str, y_title: str
    ) -> list[Html]:
        """Draw grid lines, their labels, and the titles of the axes."""
        drawn = []
        for value, text in x_ticks.items():
            x, low = self.at(value, self.y[0])
            drawn.append(element("line", x1=x, x2=x, y1=TOP, y2=low, class_="grid"))
            drawn.append(element("text", text, x=x, y=low + 17, text_anchor="middle"))
        for value, text in y_ticks.items():
            left, y = self.at(self.x[0], value)
            drawn.append(element("line", x1=left, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
            drawn.append(element("text", text, x=left - 6, y=y + 4, text_anchor="end"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        drawn.append(element("text", x_title, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle"))
        turned = f"translate(14 {middle:.0f}) rotate(-90)"
        drawn.append(element("text", y_title, transform=turned, text_anchor="middle"))
        return drawn

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> Html:
        placed = " ".join(f"{x},{y}" for x, y in (self.at(*point) for point in points))
        return element("polyline", points=placed, class_=kind)


def _range(values: Iterable[float]) -> tuple[float, float]:
    known = list(values)
    low, high = min(known), max(known)
    return low / 1.4, high * 1.4


def _share(value: float, within: tuple[float, float]) -> float:
    low, high = within
    return (log10(value) - log10(low)) / (log10(high) - log10(low))


def _picture(label: str, *drawn: Iterable[Html]) -> Html:
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="plane", role="img", aria_label=label)


def _decades(within: tuple[float, float], unit: float = 1.0, base: int = 10) -> dict[float, str]:
    """Return powers of the base in this unit; over few decades also their multiples by 2 and 5."""
    low, high = (log10(value / unit) for value in within)
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(floor(low), ceil(high) + 1)
    known = [step * 10.0**power for power in powers for step in steps]
    return {value * unit: f"{value:,.10g}" for value in known if low <= log10(value) <= high}


# --- roofline -------------------------------------------------------------------------------------------------


def roofline(rows: Sequence[Mapping[str, Any]], floors: Mapping[str, Any]) -> Html:
    """Draw operations per second against operations per byte, below the rates of a copy and a GEMM of the same run."""
    bandwidth, products = floors["bandwidth"], floors["products"]
    points = [(row, row["floor"]["flops"] / row["floor"]["bytes"], _speed(row)) for row in rows if OURS in row["ways"]]
    ridges = {precision: peak / bandwidth for precision, peak in products.items()}
    plane = Plane.over([*(x for _, x, _ in points), *ridges.values()], [*(y for *_, y in points), *products.values()])
    unit, name = (1e12, "TFLOP/s") if max(products.values()) >= 1e13 else (1e9, "GFLOP/s")
    axes = plane.axes(_decades(plane.x), _decades(plane.y, unit), "operations per byte (each array counted once)", name)
    low = max(plane.x[0], plane.y[0] / bandwidth)
    lines = [plane.line([(low, low * bandwidth), (max(ridges.values()), max(products.values()))], "roof")]
    named = []
    for precision, peak in products.items():
        lines.append(plane.line([(ridges[precision], peak), (plane.x[1], peak)], "roof"))
        x, y = plane.at(plane.x[1], peak)
        named.append(element("text", f"{precision} product", x=x - 4, y=y - 6, text_anchor="end"))
    x, y = plane.at(low, low * bandwidth)
    named.append(element("text", f"copy, {bandwidth / 1e9:,.0f} GB/s", x=x + 34, y=y - 10))
    marks = []
    for row, x, y in points:
        across, down = plane.at(x, y)
        label = f"{row['case']['name']}: {rate(row['floor'], row['ways'][OURS]['median'])}"
        lost = ratios(row).get(BEST, 0) > 1
        marks.append(element("g", element("title", label), marker(0, lost=lost, x=across, y=down)))
    return _picture("roofline", axes, lines, marks, named)


def _speed(row: Mapping[str, Any]) -> float:
    return row["floor"]["flops"] / row["ways"][OURS]["median"]


# --- memory ---------------------------------------------------------------------------------------------------

#: Fields of a memory record, with the kind of the line and its label.
SERIES = {
    "columns": ("lost", "columns of all samples at once"),
    "planned": ("won dashed", "cupyconv, as explain states"),
    "measured": ("won", "cupyconv, measured"),
}
#: Smaller byte counts are drawn as this one.
LEAST = 1 << 12


def memory_chart(row: Mapping[str, Any]) -> Html:
    """Draw bytes in addition to the result against the number of samples."""
    batches = row["batches"]
    known = {name: [max(LEAST, value) for value in row[name]] for name in SERIES}
    plane = Plane.over(batches, [value for values in known.values() for value in values])
    axes = plane.axes({batch: str(batch) for batch in batches}, _decades(plane.y, 2.0**20), "samples", "MiB")
    lines = [plane.line(zip(batches, known[name]), kind) for name, (kind, _) in SERIES.items()]
    marks = []
    for name, (kind, said) in SERIES.items():
        if "dashed" in kind:
            continue
        for batch, value, exact in zip(batches, known[name], row[name]):
            x, y = plane.at(batch, value)
            label = f"{said}, {batch} samples: {exact / 2**20:,.2f} MiB"
            marks.append(element("g", element("title", label), marker(0, lost=kind == "lost", x=x, y=y)))
    return _picture(f"memory of {row['case']['name']}", axes, lines, marks)


def memory_legend() -> Html:
    """Return the legend of the lines."""
    keys = [
        _key(said, element("line", x1=0, x2=16, y1=8, y2=8, class_=f"stroke {kind}")) for kind, said in SERIES.values()
    ]
    return element("p", join(keys), class_="legend")
