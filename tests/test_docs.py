"""The pages of docs/: examples print what they show, each function is there, nothing comes from other hosts."""

from __future__ import annotations

import doctest
import importlib.util
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from targets import gpu_target

import cupyconv

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

#: A block of code: its indentation, its language, its text.
_BLOCK = re.compile(r"^( *)```(python|pycon)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples(page: str) -> list[tuple[str, str, int]]:
    """Return the blocks of a page: language, text, and the line where the text begins."""
    text = (DOCS / page).read_text("utf-8")
    return [
        (found[2], re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE), text[: found.start(3)].count("\n"))
        for found in _BLOCK.finditer(text)
    ]


def needed(page: str) -> list[str]:
    """Return what a page's examples need, from its first lines: ``needs: [torch]``; ``gpu`` is a GPU with CuPy."""
    first = re.match(r"---\n(.*?)---\n", (DOCS / page).read_text("utf-8"), re.DOTALL)
    line = re.search(r"^needs: \[(.*)\]$", first[1], re.MULTILINE) if first else None
    return line[1].split(", ") if line else []


def run_page(page: str) -> dict[str, Any]:
    """Run a page's examples one after another, as a reader would type them; return the names that they define."""
    for module in needed(page):
        if module == "gpu":
            gpu_target()
            continue
        pytest.importorskip(module, reason=f"{module} is not installed", exc_type=ImportError)
    namespace: dict[str, Any] = {}
    np.random.seed(0)
    runner, told = doctest.DocTestRunner(optionflags=_OPTIONS), []
    for language, text, line in examples(page):
        if language == "python":
            exec(compile("\n" * line + text, page, "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(text, namespace, page, page, line)
        test.globs = namespace  # not a copy: the next block continues
        runner.run(test, out=told.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
    return namespace


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.gpu] * ("gpu" in needed(page))) for page in PAGES if examples(page)]
)
def test_the_examples_of_a_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_a_wrong_example_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "DOCS", tmp_path)
    (tmp_path / "wrong.md").write_text("    ```pycon\n    >>> 1 + 1\n    3\n    ```\n", "utf-8")
    assert [example[:2] for example in examples("wrong.md")] == [("pycon", ">>> 1 + 1\n3\n")]
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run_page("wrong.md")


def test_most_pages_have_examples():
    """Tutorials and how-to pages have examples; the reference shows those of docstrings, speed pages show tables."""
    taught = [page for page in PAGES if page.startswith(("tutorial/", "how-to/")) and not page.endswith("to/index.md")]
    assert [page for page in taught if not examples(page)] == []


# --- what they promise ----------------------------------------------------------------------------------------


def test_the_training_step_lowers_the_loss():
    namespace = run_page("tutorial/gradients.md")
    x, w1, b1, w2, target = (namespace[name] for name in ("x", "w1", "b1", "w2", "target"))
    after = cupyconv.conv(cupyconv.conv(x, w1, b1, padding="same", activation="relu"), w2, padding="same")
    assert np.mean((after - target) ** 2) < 0.97 * namespace["loss"]


def test_every_recipe_gives_what_it_says():
    namespace = run_page("how-to/recipes.md")
    assert abs(namespace["normalised"].mean((0, 2, 3))).max() < 1e-5
    np.testing.assert_allclose(namespace["probabilities"].sum(1), 1, rtol=1e-5)
    assert namespace["upsampled"].shape == (2, 8, 32, 32)
    assert namespace["deformed"].shape == (2, 4, 16, 16)
    q = namespace["q"].astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(q, (3, 3), axis=(2, 3))
    kernel = namespace["filters"][0].astype(np.int32)
    assert np.array_equal(namespace["sums"][:, 0], np.einsum("nchwij,cij->nhw", windows, kernel))
    whole = cupyconv.conv(namespace["volume"], namespace["cubes"], padding=1)
    assert np.array_equal(namespace["filtered"], whole)
    stream = cupyconv.conv(np.ones((2, 8, 300), np.float32), namespace["taps"], padding="causal")
    assert np.array_equal(namespace["y"], stream[:, :, 200:])


def test_every_public_name_has_its_place_in_the_reference():
    reference = "".join((DOCS / page).read_text("utf-8") for page in PAGES if page.startswith("reference/"))
    shown = re.findall(r"^::: cupyconv\.(\w+)$", reference, re.MULTILINE)
    assert sorted(shown) == sorted(name for name in cupyconv.__all__ if name != "__version__")
    table = (DOCS / "reference/index.md").read_text("utf-8")
    for name in set(shown) - {"Plan"}:
        assert f"`{name}" in table, name


# --- the site -------------------------------------------------------------------------------------------------


def test_pictures_are_small_and_shown():
    text = "".join((DOCS / page).read_text("utf-8") for page in PAGES) + (ROOT / "README.md").read_text("utf-8")
    pictures = [*(DOCS / "pictures").iterdir(), *DOCS.rglob("drawings/*.svg")]
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 150_000, picture.name
        assert picture.name in text, picture.name


def test_drawings_carry_the_style_that_they_share():
    """Each drawing is complete by itself, so that a code host shows it as well as the site."""
    styled = runpy.run_path(str(DOCS / "drawings.py"))["styled"]
    for path in DOCS.rglob("drawings/*.svg"):
        drawing = path.read_text("utf-8")
        assert drawing == styled(drawing), f"python docs/drawings.py: {path.name}"
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("width") and root.get("height")


def test_what_pages_show_stands_in_them():
    """Only the changelog page is assembled by the site; a picture has its own line, as in plain Markdown."""
    for page in PAGES:
        text = (DOCS / page).read_text("utf-8")
        assert "--8<--" not in text or page == "reference/changelog.md", page
        for line in re.findall(r"^.*!\[.*$", text, re.MULTILINE):
            assert f"\n\n{line}\n\n" in text and line.startswith("!["), line


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads for a page, but not the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "use"):
            self.addresses += [found[name] or "" for name in ("src", "srcset", "href") if found.get(name)]
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.addresses.append(found.get("href") or "")


def loaded(html: str) -> list[str]:
    parser = Loaded()
    parser.feed(html)
    return [*parser.addresses, *re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", html)]


def is_elsewhere(address: str) -> bool:
    return re.match(r"(\w+:)?//", address) is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site from these files; a warning is an error."""
    for module in ("material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip("mkdocs is not installed: the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site):
    assert {page.removesuffix(".md") for page in PAGES} <= {
        path.relative_to(site).as_posix().removesuffix(".html") for path in site.rglob("*.html")
    }
    assert not list(site.rglob("*.py"))


def test_nothing_is_loaded_from_other_hosts(site):
    assert loaded('<script src="https://cdn.example/a.js"></script><style>url(//b.example/c)</style>') == [
        "https://cdn.example/a.js",
        "//b.example/c",
    ]
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert [address for address in loaded(path.read_text("utf-8")) if is_elsewhere(address)] == [], path.name


def test_the_reference_shows_docstrings_as_they_are_meant(site):
    """Entries appear under their names, and tables as tables; no signature shows `**foreign`."""
    pages = {path.stem: path.read_text("utf-8") for path in (site / "reference").glob("*.html")}
    assert (
        'id="cupyconv.conv"' in pages["convolution"] and "<dt><code>weight</code> : array</dt>" in pages["convolution"]
    )
    assert "<dt><code>*args, **kwargs</code></dt>" in pages["gradients"]
    assert "<td><code>avg_pool</code></td>\n<td>nothing</td>" in pages["gradients"]
    assert '<span class="gp">&gt;&gt;&gt; </span>' in pages["pooling"]
    for name, page in pages.items():
        assert ">foreign<" not in page, name
        prose = re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
        assert not re.search(r"=====|-----|&gt;&gt;&gt;|``|::$", prose, re.MULTILINE), name
