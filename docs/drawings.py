"""Give every drawing of the pages its colours, those of stylesheets/drawings.css::

    python docs/drawings.py

A drawing is a picture that also a code host or a file viewer shows, in light and in dark.  So it carries them itself.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def styled(drawing: str) -> str:
    """The drawing with the style as it is now."""
    style = (DOCS / "stylesheets/drawings.css").read_text("utf-8")
    bare = re.sub(r"<style>.*?</style>\n", "", drawing, flags=re.DOTALL)
    return bare.replace("\n", f"\n<style>\n{style}</style>\n", 1)


def drawings() -> list[Path]:
    return sorted(DOCS.rglob("drawings/*.svg"))


if __name__ == "__main__":
    for path in drawings():
        path.write_text(styled(path.read_text("utf-8")), encoding="utf-8")
