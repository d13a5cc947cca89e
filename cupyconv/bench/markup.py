"""HTML and SVG by elements: what is opened is closed, and text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

#: Elements that have nothing in them.
VOID = frozenset(("meta", "line", "circle", "path", "use", "polyline"))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str]


def element(name: str, /, *children: Child, **attributes: object) -> Html:
    """One element; `class_` is the attribute class, `stroke_width` is stroke-width, and None leaves one out."""
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
    """Elements and texts one after the other."""
    return Html("".join(_one(child) if isinstance(child, str) else join(*child) for child in children))


def _one(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, marks: str = "") -> Html:
    """A table that scrolls sideways; a cell that begins with `<td` stands as it is, a row's first cell names the row."""
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
