"""Docstrings as Markdown, for the pages of the reference: read by mkdocstrings.

Our docstrings are NumPy's sections, written for `help`.  mkdocstrings can read them, but gives every name of ``x, weight,
bias`` the type of the first.  So they are turned into Markdown here::

    Parameters                    **Parameters**
    ----------
    x, weight : array             `x, weight` : array
        Text.                     :   Text.

A table ruled with ``=`` becomes one of Markdown, and what is indented after ``::`` a block of code.  The parameters
`unnamed` and `foreign`, which answer what other libraries' users write, are none of ours.
"""

import re
from inspect import cleandoc
from textwrap import dedent, indent
from typing import Any

from griffe import Extension, Function, Object

#: A section: its title, underlined.
_TITLE = re.compile(r"^([A-Z][\w ]+)\n-{3,}\n", re.MULTILINE)
#: Sections of entries, each a line with what is indented under it.
_ENTRIES = ("Parameters", "Returns", "Raises", "Attributes", "See Also")
_TABLE = re.compile(r"^=+ +=+.*\n(?:.*\n)*?=+ +=+.*(?:\n(?:.+\n)*?=+ +=+.*)?$", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_LITERAL = re.compile(r"::\n\n((?: {4}.*\n|\n)+)")


class Docstrings(Extension):
    """Applied to everything that is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        for name in ("unnamed", "foreign"):
            if name in func.parameters:
                del func.parameters[name]


def as_markdown(text: str) -> str:
    """A docstring's text as a page shows it."""
    first, *sections = _TITLE.split(cleandoc(text))
    parts = [_prose(first)]
    for title, body in zip(sections[::2], sections[1::2]):
        parts.append(f"**{title}**\n\n{_entries(title, body) if title in _ENTRIES else _prose(body)}")
    return "\n\n".join(part.strip() for part in parts)


def _entries(title: str, body: str) -> str:
    """A definition list: a line that is not indented, and what is indented under it."""
    found = []
    for entry in re.split(r"\n(?=\S)", body.strip()):
        term, _, text = entry.partition("\n")
        names, colon, kind = term.partition(" : ")
        if colon or title != "Returns":  # what is returned may have no name
            names = f"`{names}`"
        text = indent(_prose(dedent(text)), "    ").strip()
        found.append(f"{names}{colon}{kind}\n\n:   {text}" if text else f"{names}{colon}{kind}")
    return "\n\n".join(found)


def _prose(text: str) -> str:
    text = _LITERAL.sub(lambda found: f":\n\n{_block('python', dedent(found[1]).strip())}\n\n", text + "\n")
    text = _TABLE.sub(lambda found: _table(found[0]), text)
    return _EXAMPLE.sub(lambda found: _block("pycon", found[0]), text)


def _table(text: str) -> str:
    """Rows of cells, which go on in the next line where it has no first cell."""
    rule, *lines, _ = text.splitlines()
    starts = [column.start() for column in re.finditer("=+", rule)]
    head, rows = [""] * len(starts), []
    for line in lines:
        if set(line) <= {"=", " "}:  # what is above was the head
            head, rows = rows[0], []
            continue
        cells = [line[first:last].strip() for first, last in zip(starts, [*starts[1:], None])]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{before} {cell}".strip() for before, cell in zip(rows[-1], cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(starts), *rows))


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
