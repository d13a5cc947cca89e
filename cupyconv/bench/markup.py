"""HTML and SVG from elements: every element is closed, and text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: Elements without content.
VOID = frozenset(("meta", "line", "circle", "path", "use", "polyline"))


class Html(str):
    """Text that is HTML already and is not escaped."""

    __slots__ = ()


Child = str | Iterable[str]


def element(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return one element.  `class_` is the attribute class, `stroke_width` is stroke-width, None omits an attribute."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        assert not children, name
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Concatenate elements and texts."""
    return Html("".join(_one(child) if isinstance(child, str) else join(*child) for child in children))


def _one(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, marks: str = "") -> Html:
    """Return a table that scrolls sideways.  Cells that begin with `<t` stay as is; the first cell names its row."""
    lines = [
        element(
            "tr", (cell if cell.startswith("<t") else element("td" if n else "th", cell) for n, cell in enumerate(row))
        )
        for row in rows
    ]
    top = element("tr", (element("th", cell) for cell in head))
    return element(
        "div", element("table", element("thead", top), element("tbody", lines)), class_=f"wide {marks}".strip()
    )
