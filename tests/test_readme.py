"""README and docstrings show what happens: code blocks, commands, figures, examples.  Other pages: `test_docs.py`."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

import cupyconv
from cupyconv.bench.record import read_record, write_record
from cupyconv.configuration import show_config
from tests.benchmarks.figures import (
    NO_GPU,
    RESULTS,
    WRITTEN,
    every_case,
    gpu_page,
    groups,
    layers,
    losses,
    pages,
    source,
)
from tests.gpu_report.status import NEVER, status

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

DOCUMENTED = {getattr(cupyconv, name) for name in cupyconv.__all__ if not name.startswith("__")} | {show_config}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_blocks_run(capsys):
    """The blocks run one after another, as a reader would type them."""
    namespace: dict[str, object] = {}
    assert len(blocks(README, "python")) == 3
    np.random.seed(0)
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "method" in capsys.readouterr().out  # explain's page
    y, x, features, weight = (namespace[name] for name in ("y", "x", "features", "weight"))
    after = cupyconv.conv([x, features], weight, padding="same", activation="relu")
    assert np.mean(after**2) < np.mean(y**2)  # the gradient points downward


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).is_file(), target


def test_the_two_commands_are_there_and_ci_runs_the_second():
    demo, test = blocks(README, "sh")
    assert demo.strip() == (
        "python3 -m venv .venv && .venv/bin/pip install '.[demo]' && .venv/bin/python -m cupyconv demo"
    )
    assert test.strip() == "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest -n auto"
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any(
        re.fullmatch(r'"\$python" -m venv \.venv && \.venv/bin/pip install .*\'\.\[test\]\'', line) for line in script
    )
    assert ".venv/bin/pytest -n auto" in script


def test_every_extra_named_exists():
    import tomllib

    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    named = {extra for group in re.findall(r"\.\[([a-z0-9,]+)\]", README + CONTRIBUTING) for extra in group.split(",")}
    assert named <= extras
    assert {"demo", "test", "cuda12", "cuda13"} <= named


def test_every_path_that_contributing_names_exists():
    tree = CONTRIBUTING.partition("## How a call travels")[2]
    for name in set(re.findall(r"[\w/]+/(?=\s|`|,)|[\w/]+\.py", tree)):
        assert any(
            (base / name).exists() for base in (ROOT, ROOT / "cupyconv", ROOT / "cupyconv/cuda/run", ROOT / "tests")
        ), name


@pytest.mark.parametrize("page", WRITTEN)
def test_the_figures_are_the_records(page):
    """The figures equal the records; if not, run `python -m tests.benchmarks.figures`."""
    ((found, written),) = [(text, written) for path, text, written in pages() if path == ROOT / page]
    assert found == written


def test_the_figures_show_every_peer_and_losses_in_bold():
    def row(name, group, **of):
        implementations = {peer: {"ratio": ratio, "beyond_result": 1 << 20} for peer, ratio in of.items()}
        return {
            "case": {"name": name},
            "group": group,
            "chosen": "gemm",
            "ways": {"cupyconv": {"median": 2e-3, "beyond_result": 0}, **implementations},
        }

    known = dict(machine="m", blas="b", blas_threads="2 threads", load_before=2.0, python="3", date="d", clock="c")
    record = {
        "environment": known | {"torch": "2.15", "jax": "not installed"},
        "cases": [
            row("3x3, 64 -> 64, 56x56", "convolutions", numpy=0.5, torch=2.0),
            row("1x1, 256 -> 64, 56x56", "convolutions", numpy=0.5, torch=0.5),
            row("a small one", "small calls", numpy=1.5),
        ],
    }
    assert layers(record).splitlines()[2:] == [
        "| 3x3, 64 -> 64, 56x56 | 2.0 | 0.50 | **2.00** | 0.0 | 1.0 |",
        "| 1x1, 256 -> 64, 56x56 | 2.0 | 0.50 | 0.50 | 0.0 | 1.0 |",
    ]
    assert groups(record).splitlines()[2:] == [
        "| convolutions (2) | 0.50 | 1.00 | 1.00 | 2.00 |",
        "| small calls (1) | **1.50** |  | **1.50** | 1.50 |",
    ]
    assert every_case(record).splitlines()[2:4] == [
        "| 3x3, 64 -> 64, 56x56 | gemm | 2.0 | 0.50 | **2.00** | **2.00** |",
        "| 1x1, 256 -> 64, 56x56 | gemm | 2.0 | 0.50 | 0.50 | 0.50 |",
    ]
    assert losses(record) == "Slower than numpy on 1 of 3, torch on 1 of 2."
    told = source(record)
    assert told.startswith("Times: c. m; BLAS b on 2 threads;")
    assert "; torch 2.15; jax not installed; d. The machine was busy" in told


def test_a_gpu_that_was_measured_has_a_section(tmp_path):
    assert gpu_page(tmp_path) == NO_GPU
    write_record(read_record(RESULTS / "numpy.json"), tmp_path / "gpu-h200.json")
    page = gpu_page(tmp_path)
    assert page.startswith("## NumPy 2.") and "| merge (2) |" in page and "Slower than numpy on" in page


def test_what_is_said_of_gpus_is_what_the_reports_say():
    never = status(RESULTS) == NEVER and gpu_page(RESULTS) == NO_GPU
    assert ("has not run on one yet" in README) == ("| the CUDA backend on a GPU | never |" in README) == never
    assert ("No GPU is measured yet." in README) == never
    assert ("has not run on a GPU yet" in (ROOT / "docs/index.md").read_text("utf-8")) == never


@pytest.mark.parametrize("documented", sorted(DOCUMENTED, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_docstring_example(documented):
    examples = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs={})
    assert any(example.examples for example in examples), "no example in the docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    for example in examples:
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
