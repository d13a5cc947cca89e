"""What the documentation shows is what happens: code blocks, commands, figures, docstring examples."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

import cupyconv
from cupyconv.configuration import show_config
from tests.benchmarks.figures import FIGURES_BEGIN, FIGURES_END, RESULTS, between, figures, groups, layers, source
from tests.gpu_report.status import NEVER, STATUS_BEGIN, STATUS_END, status

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

DOCUMENTED = {getattr(cupyconv, name) for name in cupyconv.__all__ if not name.startswith("__")} | {show_config}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_blocks_run(capsys):
    """One after another, as a reader would type them."""
    namespace: dict[str, object] = {}
    assert len(blocks(README, "python")) == 4
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert "method" in capsys.readouterr().out  # explain's page


def test_the_training_step_lowers_the_loss():
    namespace: dict[str, object] = {}
    first, _, step, _ = blocks(README, "python")
    np.random.seed(0)
    exec(compile(first, "README.md", "exec"), namespace)
    exec(compile(step, "README.md", "exec"), namespace)
    x, w1, b1, w2 = (namespace[name] for name in ("x", "w1", "b1", "w2"))
    after = cupyconv.conv(cupyconv.conv(x, w1, b1, padding="same", activation="relu"), w2, padding="same")
    assert np.mean((after - namespace["target"]) ** 2) < 0.97 * namespace["loss"]


def test_every_recipe_gives_what_it_says():
    namespace: dict[str, object] = {"np": np, "cupyconv": cupyconv}
    exec(compile(blocks(README, "python")[-1], "README.md", "exec"), namespace)
    q = namespace["q"]
    assert abs(namespace["normalised"].mean((0, 2, 3))).max() < 1e-5
    np.testing.assert_allclose(namespace["probabilities"].sum(1), 1, rtol=1e-5)
    assert namespace["upsampled"].shape == (2, 8, 32, 32)
    assert namespace["deformed"].shape == (2, 4, 16, 16)
    windows = np.lib.stride_tricks.sliding_window_view(q.astype(np.int32), (3, 3), axis=(2, 3))
    assert np.array_equal(namespace["sums"][:, 0], windows.sum(axis=(1, 4, 5)))
    whole = cupyconv.conv(namespace["volume"], namespace["cubes"], padding=1)
    assert np.array_equal(namespace["filtered"], whole)
    stream = cupyconv.conv(np.ones((2, 8, 300), np.float32), namespace["taps"], padding="causal")
    assert np.array_equal(namespace["y"], stream[:, :, 200:])


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


def test_every_public_function_is_listed():
    table = README.partition("## Functions")[2].partition("## Not here")[0]
    for function in DOCUMENTED - {cupyconv.Plan}:
        assert f"`{function.__name__}" in table, function.__name__


def test_every_path_that_contributing_names_exists():
    tree = CONTRIBUTING.partition("## How a call travels")[2]
    for name in set(re.findall(r"[\w/]+/(?=\s|`|,)|[\w/]+\.py", tree)):
        assert any(
            (base / name).exists() for base in (ROOT, ROOT / "cupyconv", ROOT / "cupyconv/cuda/run", ROOT / "tests")
        ), name


def test_the_figures_are_the_records():
    first, last = between(README, FIGURES_BEGIN, FIGURES_END)
    assert README[first:last] == figures()


def test_the_figures_show_every_peer_and_losses_in_bold():
    def row(name, group, **of):
        ways = {peer: {"ratio": ratio, "beyond_result": 1 << 20} for peer, ratio in of.items()}
        return {
            "case": {"name": name},
            "group": group,
            "ways": {"cupyconv": {"median": 2e-3, "beyond_result": 0}, **ways},
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
    told = source(record)
    assert told.startswith("Slower than numpy on 1 of 3, torch on 1 of 2. Times: c. m; BLAS b on 2 threads;")
    assert "; torch 2.15; jax not installed; d. The machine was busy" in told


def test_the_status_on_gpus_is_the_reports():
    first, last = between(README, STATUS_BEGIN, STATUS_END)
    assert README[first:last] == status(RESULTS)
    assert ("has not run on one yet" in README) == (status(RESULTS) == NEVER)


@pytest.mark.parametrize("documented", sorted(DOCUMENTED, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_docstring_example(documented):
    examples = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs={})
    assert any(example.examples for example in examples), "no example in the docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    for example in examples:
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)
