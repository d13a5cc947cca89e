"""The mutation tool: which changes it makes, how they are selected, and how it installs one.

The results of mutants are not tested here.
"""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mutation
import pytest

#: Folder of the tool.
HERE = Path(__file__).parent

SOURCE = '''
LIMIT = 3
SHARE = 0.5


def function(count: int, default: int = 7) -> int:
    """Words with a number, 5, that nobody changes."""
    assert count != 12
    if count < LIMIT and default:
        count += default * 2
    elif count:
        print(f"{count + 1}")
    return count if default else -1


class Pair:
    size: int = 4

    def double(self) -> int:
        return 2 * self.size


class Triple(Pair):
    def double(self) -> int:
        return super().double() + self.size
'''


#: The line of `SOURCE` that needs its class.
SUPER = "return super().double() + self.size"


@pytest.fixture
def mutants(tmp_path, monkeypatch) -> list[mutation.Mutant]:
    """Return all mutants of a module that consists of `SOURCE`."""
    (tmp_path / "module.py").write_text(SOURCE)
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    mutation.parsed.cache_clear()
    return mutation.all_mutants(["module.py"])


def changed(mutant: mutation.Mutant) -> tuple[str, str]:
    """Return the changed line, before and after the change."""
    before, after = (
        ast.unparse(statement).splitlines() for statement in mutant.change.both(mutation.parsed(mutant.path))
    )
    (lines,) = [pair for pair in zip(before, after) if pair[0] != pair[1]]
    return lines[0].strip(), lines[1].strip()


def test_each_change_is_of_one_line_and_of_its_kind(mutants):
    found = {(mutant.change.kind, *changed(mutant)) for mutant in mutants if mutant.change.kind != "left out"}
    assert {
        ("one more", "LIMIT = 3", "LIMIT = 4"),
        ("one less", "LIMIT = 3", "LIMIT = 2"),
        ("half as much again", "SHARE = 0.5", "SHARE = 0.75"),
        ("and, or", "if count < LIMIT and default:", "if count < LIMIT or default:"),
        ("comparison", "if count < LIMIT and default:", "if count <= LIMIT and default:"),
        ("condition", "if count < LIMIT and default:", "if not (count < LIMIT and default):"),
        ("condition", "return count if default else -1", "return count if not default else -1"),
        ("operator", "count += default * 2", "count -= default * 2"),
        ("operator", "count += default * 2", "count += default // 2"),
        ("operator", "return 2 * self.size", "return 2 // self.size"),
        ("None", "return 2 * self.size", "return None"),
    } <= found
    assert {mutant.change.kind for mutant in mutants} == set(mutation.KINDS)
    text = "".join(line for _, *lines in found for line in lines)
    assert "12" not in text and "Words" not in text and "1}" not in text, "assertions, docstrings, messages stay"


def test_kinds_are_those_asked_for_and_no_others(mutants):
    conditions = [mutant.name for mutant in mutants if mutant.change.kind == "condition"]
    alone, count = mutation.sampled(mutants, mutation.options(["module.py", "--kinds", "condition"]))
    assert sorted(mutant.name for mutant in alone) == sorted(conditions) and count == len(conditions) == 3
    two, _ = mutation.sampled(mutants, mutation.options(["module.py", "--kinds", "condition", "operator"]))
    assert {mutant.change.kind for mutant in two} == {"condition", "operator"}
    every, count = mutation.sampled(mutants, mutation.options(["module.py"]))
    assert {*every} == {*mutants} and count == len(mutants)
    with pytest.raises(SystemExit):
        mutation.options(["module.py", "--kinds", "conditions"])


def test_a_method_without_its_super_takes_the_place_of_the_one_with_it(mutants, monkeypatch):
    """A mutant that drops `super()` is installed; once this failed, and the error was counted as a failing test."""
    module = ModuleType("module")
    module.__file__ = str(mutation.ROOT / "module.py")
    monkeypatch.setitem(sys.modules, "module", module)
    exec(compile(SOURCE, module.__file__, "exec"), vars(module))
    whole = module.Triple.double
    monkeypatch.setattr(mutation, "functions_of_package", lambda: {module.__file__: [whole]})
    (without,) = [mutant for mutant in mutants if changed(mutant) == (SUPER, "return None")]
    assert module.Triple().double() == 12
    without.install()
    assert module.Triple().double() is None and module.Triple.double is whole and module.Pair().double() == 8


def test_a_sample_is_of_the_kinds_asked_for(mutants):
    asked = ["module.py", "--kinds", "operator", "--sample", "2"]
    first, count = mutation.sampled(mutants, mutation.options(asked))
    again, _ = mutation.sampled(mutants, mutation.options(asked))
    assert first == again and len(first) == 2 < count
    assert {mutant.change.kind for mutant in first} == {"operator"}
    assert (
        len({tuple(mutation.sampled(mutants, mutation.options([*asked, "--seed", str(n)]))[0]) for n in range(9)}) > 1
    )


def test_lines_are_those_of_the_tests_as_they_are(tmp_path, monkeypatch):
    """Times of older texts do not count: a test that was listed twice once ran a second time without arguments."""
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "KEPT", tmp_path)
    tests = tmp_path / "test_it.py"
    for text, seconds in (("first", 1.0), ("second", 2.0)):
        tests.write_text(text)
        measured = {"test_it.py::test": seconds}, {"module.py:3": ["test_it.py::test", "test_it.py::test_of_others"]}
        mutation.kept_lines(tests).write_bytes(pickle.dumps(measured))
    assert mutation.lines_of_tests(["test_it.py::test"]) == {"module.py:3": [(2.0, "test_it.py::test")]}
    tests.write_text("third")
    assert mutation.lines_of_tests(["test_it.py::test"]) == {}


def test_modules_that_are_imported_when_first_asked_for_are_looked_at_too():
    """Functions of lazily imported modules are found; once they were not, and no test ran such a module's mutants."""
    script = """
import os, mutation
names = {os.path.basename(file) for file in mutation.functions_of_package()}
print({"columns.py", "toeplitz_rows.py", "recurrent_gradient.py"} - names)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=HERE)
    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there it measures")
def test_a_python_that_cannot_measure_is_told_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mutation", "cupyconv"])
    with pytest.raises(SystemExit, match=r"from 3\.12 on"):
        mutation.main()
