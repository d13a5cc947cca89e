"""What a docstring needs to become a page: read by mkdocstrings, which knows NumPy's sections and Markdown.

Our docstrings are written for `help`.  Three things of theirs are not Markdown: a table ruled with ``=``, a ``::`` before
an indented block, and the parameter `foreign`, which answers the keywords of other libraries and is none of ours.
"""

import re
from typing import Any

from griffe import Extension, Function, Object

#: A table from its first ruled line to its last.
_TABLE = re.compile(r"^( *)=+ +=+.*\n(?:.*\n)*?(?:\1=+ +=+ *\n(?:.*\n)*?)?\1=+ +=+ *$", re.MULTILINE)


class Docstrings(Extension):
    """Applied to everything that is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        if "foreign" in func.parameters:
            del func.parameters["foreign"]


def as_markdown(text: str) -> str:
    """Tables stay as they are, in a block of their own; `::` announces a block by being indented."""
    text = _TABLE.sub(_block, text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _block(table: re.Match[str]) -> str:
    indent = table[1]
    return f"{indent}```text\n{table[0]}\n{indent}```"
