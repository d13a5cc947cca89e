"""Small changes to a module, each of which some test should notice: ``python -m tests.mutation MODULE ...``

::

    python -m tests.mutation cupyconv/cuda/plan/pool.py cupyconv/problem/padding.py
    python -m tests.mutation cupyconv/cuda/plan --sample 1000 --seed 1
    python -m tests.mutation cupyconv/cuda/plan --survivors

A mutant is the module with one change: a comparison, a sign, a number, a condition, a result, a statement that is left
out.  Tests that run the changed line try it until one fails, those first that killed another of its module, then the
quickest; where none does the mutant survives, and it is printed: a test is missing, or the change changes nothing.

What makes thousands affordable: pytest collects the tests once.  Each mutant is a fork of that process, in which the one
function that differs has its code replaced, wherever it was imported to.  Which tests run which lines is measured once for
each file of tests (with `coverage`, to be installed beside the rest) and kept in ``.mutation/``, as is what became of each
mutant: a command that was stopped goes on where it was.  ``--seconds`` bounds the tests of one mutant; what survives may
be tried again with more, and with other files of tests.

What survives and should: a bound that no value meets (``> 1`` and ``> 2`` where a number is never 2, or the larger and
the smaller of equal ones); what a shortcut saves, where the long way gives the same; a size up to which something is
kept, planned together or tried; prices of `cost`, which are measurements: tests hold their signs, that they grow as what
they price does, and which method is cheapest where it is clear, not their digits; words of a message beyond those that
name the argument and its values.  Any other survivor is a missing test, or a line that does nothing.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".mutation"
#: What a compiled function has among its flags, and the body of a class or a module has not.
OPTIMIZED = 0x1
KILLED, SURVIVED, TIMED_OUT, NOT_RUN = "killed", "survived", "timed out", "not run by any test"

# --- changes ----------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Of the node with this number, in the order of `ast.walk`."""

    node: int
    kind: str
    line: int

    def apply(self, tree: ast.Module) -> None:
        node: Any = list(ast.walk(tree))[self.node]
        if self.kind == "comparison":
            node.ops[0] = COMPARISONS[type(node.ops[0])]()
        elif self.kind == "operator":
            node.op = OPERATORS[type(node.op)]()
        elif self.kind in ("one more", "one less"):
            node.value += 1 if self.kind == "one more" else -1
        elif self.kind == "half as much again":
            node.value *= 1.5
        elif self.kind == "and, or":
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif self.kind == "condition":
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        elif self.kind == "None":
            node.value = ast.copy_location(ast.Constant(None), node.value)
        else:
            replace_statement(tree, node)
        ast.fix_missing_locations(tree)


def replace_statement(tree: ast.Module, statement: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, None)
            if isinstance(body, list) and statement in body:
                body[body.index(statement)] = ast.copy_location(ast.Pass(), statement)


def changes(tree: ast.Module) -> Iterator[Change]:
    """All of a module: of what its functions do, and of numbers that it names."""
    order = {id(node): number for number, node in enumerate(ast.walk(tree))}
    for node in mutable(tree):
        for kind in kinds(node):
            yield Change(order[id(node)], kind, node.lineno)


def mutable(tree: ast.Module) -> Iterator[Any]:
    """The nodes of functions' bodies, and of what a module's names are set to: not annotations, defaults, assertions."""
    waiting: list[ast.AST] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            waiting.append(statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            waiting.append(statement.value)
        else:
            waiting += functions(statement)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Assert, ast.JoinedStr)):
            continue
        if isinstance(node, ast.FunctionDef):
            waiting += node.body
            continue
        if isinstance(node, ast.AnnAssign):
            waiting += [] if node.value is None else [node.value]
        else:
            waiting += ast.iter_child_nodes(node)
        if hasattr(node, "lineno"):
            yield node


def functions(statement: ast.AST) -> list[ast.AST]:
    if isinstance(statement, ast.FunctionDef):
        return [statement]
    return [one for inner in statement.body for one in functions(inner)] if isinstance(statement, ast.ClassDef) else []


def kinds(node: Any) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        yield "comparison"
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield "operator"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more"
        if node.value > 0:
            yield "one less"
    elif isinstance(node, ast.Constant) and type(node.value) is float and node.value:
        yield "half as much again"
    elif isinstance(node, ast.BoolOp):
        yield "and, or"
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition"
    if isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "None"
    if isinstance(node, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "left out"


# --- a mutant in place of its module ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    module: str
    path: str
    change: Change

    @property
    def name(self) -> str:
        return f"{self.path}:{self.change.line} {self.change.kind} #{self.change.node}"

    def shown(self) -> str:
        """The changed line, before and after."""
        source = (ROOT / self.path).read_text()
        tree, changed = ast.parse(source), ast.parse(source)
        self.change.apply(changed)
        before, after = ast.unparse(tree).splitlines(), ast.unparse(changed).splitlines()
        differing = [(one.strip(), other.strip()) for one, other in zip(before, after) if one != other]
        old, new = differing[0] if differing else ("", "")
        return f"{self.path}:{self.change.line}: {self.change.kind}\n  - {old}\n  + {new}"

    def install(self) -> None:
        """The changed code in the functions that are there, and changed numbers wherever their names were imported."""
        source = (ROOT / self.path).read_text()
        tree = ast.parse(source)
        self.change.apply(tree)
        module = sys.modules[self.module]
        changed = compile(tree, str(module.__file__), "exec")
        old = compile(ast.parse(source), str(module.__file__), "exec")
        codes = {place(code): code for code in outermost(changed)}
        differing = {place(code) for code in outermost(old) if codes[place(code)] != code}
        for function in functions_of_package().get(str(module.__file__), []):
            if place(function.__code__) in differing:
                function.__code__ = codes[place(function.__code__)]
        if not differing:
            self._install_names(module, changed)

    def _install_names(self, module: ModuleType, changed: CodeType) -> None:
        fresh = {"__name__": module.__name__, "__file__": module.__file__, "__package__": module.__package__}
        exec(changed, fresh)
        before = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, tuple, dict))}
        differing = {name: fresh[name] for name, value in before.items() if fresh.get(name) != value}
        here = [one for one in sys.modules.values() if str(getattr(one, "__file__", "")).startswith(str(ROOT))]
        for other in here:  # tests import names too
            for name, value in differing.items():
                if vars(other).get(name) is before[name]:
                    setattr(other, name, value)


def place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def outermost(code: CodeType) -> Iterator[CodeType]:
    """Of a module or class, its functions, without those within them."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & OPTIMIZED:
                yield inner
            else:
                yield from outermost(inner)


@cache
def functions_of_package() -> dict[str, list[FunctionType]]:
    """All functions there are, by their file: looked for once, for it takes longer than most tests."""
    found: dict[str, list[FunctionType]] = {}
    for one in gc.get_objects():
        if isinstance(one, FunctionType):
            found.setdefault(one.__code__.co_filename, []).append(one)
    return found


@cache
def caches_of_package() -> list[Any]:
    return [
        one
        for one in gc.get_objects()
        if type(one).__name__ == "_lru_cache_wrapper" and str(one.__module__).startswith("cupyconv")
    ]


def forget() -> None:
    """What functions keep of earlier calls, so that it is computed again."""
    from cupyconv.configuration import clear_caches

    clear_caches()
    for one in caches_of_package():
        one.cache_clear()


# --- tests, collected once ----------------------------------------------------------------------------------------

#: Of each line, `path:line`, the tests that run it, with their seconds.
Covering = dict[str, list[tuple[float, str]]]


class Loop:
    """Takes the place of pytest's own loop over the tests it has collected."""

    def __init__(self, mutants: list[Mutant], seconds: float, results: Path) -> None:
        self.mutants, self.seconds, self.results = mutants, seconds, results
        #: Of each module, the tests that killed a mutant of it: the next one's are most likely among them.
        self.killers: dict[str, set[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        covering = lines_of_tests(items)
        done = outcomes(self.results)
        functions_of_package(), caches_of_package()
        gc.freeze()  # or each fork would copy all of memory when it collects garbage
        with self.results.open("a") as file:
            for mutant in self.mutants:
                if mutant.name in done:
                    continue
                killers = self.killers.setdefault(mutant.path, set())
                wanted = sorted(tests_of(mutant, covering), key=lambda one: (one[1] not in killers, *one))
                state, test = tried(mutant, [items[name] for name in within(wanted, self.seconds)], self.seconds)
                file.write(json.dumps({"name": mutant.name, "state": state, "test": test}) + "\n")
                file.flush()
                if state == KILLED:
                    killers.add(test)
                else:
                    print(f"{state}: {mutant.shown()}", flush=True)
        return True


def tests_of(mutant: Mutant, covering: Covering) -> list[tuple[float, str]]:
    """Those that run the changed line, or of what a module sets when it is imported, any of its lines."""
    line = f"{mutant.path}:{mutant.change.line}"
    if line in covering:
        return sorted(set(covering[line]))
    if in_function(mutant):
        return []
    return sorted({test for key, tests in covering.items() if key.startswith(mutant.path + ":") for test in tests})


def in_function(mutant: Mutant) -> bool:
    tree = ast.parse((ROOT / mutant.path).read_text())
    bodies = [function for statement in tree.body for function in functions(statement)]
    return any(body.lineno <= mutant.change.line <= (body.end_lineno or 0) for body in bodies)  # type: ignore[attr-defined]


def within(tests: list[tuple[float, str]], seconds: float) -> list[str]:
    """The quickest, as many as end in that time; one at least."""
    chosen, spent = [], 0.0
    for duration, name in tests:
        spent += duration
        if chosen and spent > seconds:
            break
        chosen.append(name)
    return chosen


def tried(mutant: Mutant, items: list[pytest.Item], seconds: float) -> tuple[str, str]:
    """What becomes of a mutant, and the test that killed it."""
    if not items:
        return NOT_RUN, ""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        allowed = int(3 * seconds) + 10  # of its own time: a busy machine makes no difference
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, allowed + 5))
        os.close(reading)
        state = b"error"
        try:
            state = run_mutant(mutant, items)
        except BaseException as error:
            state = f"error {error!r}".encode()
        finally:
            os.write(writing, state)
            os._exit(0)
    os.close(writing)
    end, answer, status = time.monotonic() + 20 * seconds + 60, b"", None
    while status is None and time.monotonic() < end:
        pid, ended = os.waitpid(child, os.WNOHANG)
        status = ended if pid else None
        time.sleep(0.002)
    if status is None:  # it waits for something that never comes
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        answer = TIMED_OUT.encode()
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        answer = TIMED_OUT.encode()
    else:
        answer = os.read(reading, 4096)
    os.close(reading)
    if answer.decode() in (SURVIVED, TIMED_OUT):
        return answer.decode(), ""
    return KILLED, answer.decode() or "crash"  # what crashes the process is noticed


def run_mutant(mutant: Mutant, items: list[pytest.Item]) -> bytes:
    from _pytest.runner import runtestprotocol

    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    mutant.install()
    forget()
    for item, following in zip(items, [*items[1:], None]):
        for report in runtestprotocol(item, nextitem=following, log=False):
            if report.failed:
                return item.nodeid.encode()[:4000]
    return SURVIVED.encode()


# --- which tests run which lines ----------------------------------------------------------------------------------


class Measure:
    """Runs what is collected of one file, each test under coverage by its own name."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in self.files:
            items = [item for item in session.items if item.path == path]
            if os.fork() == 0:
                measure(path, items)
                os._exit(0)
            os.wait()
            print(f"{path.name}: {len(items)} tests measured", flush=True)
        return True


def measure(path: Path, items: list[pytest.Item]) -> None:
    import coverage
    from _pytest.runner import runtestprotocol

    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    measured = coverage.Coverage(data_file=None, source=[str(ROOT / "cupyconv")], config_file=False)
    seconds: dict[str, float] = {}
    measured.start()
    for item, following in zip(items, [*items[1:], None]):
        forget()
        measured.switch_context(item.nodeid)
        begin = time.monotonic()
        reports = runtestprotocol(item, nextitem=following, log=False)
        if all(
            report.passed for report in reports
        ):  # one that fails or is skipped without a mutant says nothing of one
            seconds[item.nodeid] = time.monotonic() - begin
    measured.switch_context("")
    measured.stop()
    data, lines = measured.get_data(), {}
    for file in data.measured_files():
        for line, names in data.contexts_by_lineno(file).items():
            lines[f"{Path(file).relative_to(ROOT)}:{line}"] = [name for name in names if name in seconds]
    kept_lines(path).write_bytes(pickle.dumps((seconds, lines)))


def kept_lines(path: Path) -> Path:
    return KEPT / f"{path.name}.{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.lines"


def lines_of_tests(known: Iterable[str]) -> Covering:
    known, covering = set(known), {}
    for file in KEPT.glob("*.lines"):
        seconds, lines = pickle.loads(file.read_bytes())
        for line, names in lines.items():
            covering.setdefault(line, []).extend((seconds[name], name) for name in names if name in known)
    return covering


def outcomes(results: Path) -> dict[str, str]:
    if not results.exists():
        return {}
    rows = [json.loads(row) for row in results.read_text().splitlines()]
    return {row["name"]: row["state"] for row in rows}


# --- the command --------------------------------------------------------------------------------------------------


def collected(plugin: object, files: list[Path]) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a fork has no other threads
    # A marker of an earlier session is no harm; a cache of hypothesis or of pytest would be written by every mutant.
    arguments = ["-q", "-p", "no:cacheprovider", "--hypothesis-profile=fast"]
    pytest.main([*arguments, *map(str, files)], plugins=[plugin])


def all_mutants(paths: list[str]) -> list[Mutant]:
    mutants = []
    for path in paths:
        files = sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]
        for file in files:
            relative = file.relative_to(ROOT)
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            mutants += [Mutant(module, str(relative), change) for change in changes(ast.parse(file.read_text()))]
    return mutants


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="files or folders of the package")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of tests (all of them)")
    parser.add_argument("--sample", type=int, help="so many mutants of all, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--seconds", type=float, default=6.0, help="tests of one mutant end in about that time")
    parser.add_argument("--measure", action="store_true", help="measure only which tests run which lines")
    parser.add_argument("--survivors", action="store_true", help="try those again that survived, whatever it takes")
    given = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    folders = [ROOT / path for path in given.tests]
    files = [file for path in folders for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    if missing := [file for file in files if not kept_lines(file).exists()]:
        collected(Measure(missing), missing)
    if given.measure:
        return
    mutants = all_mutants(given.modules)
    everything = len(mutants)
    random.Random(given.seed).shuffle(mutants)
    mutants = mutants[: given.sample]
    results = KEPT / "results.jsonl"
    if given.survivors:
        known = outcomes(results)
        mutants = [mutant for mutant in mutants if known.get(mutant.name, KILLED) != KILLED]
        results = KEPT / "survivors.jsonl"
    collected(Loop(mutants, given.seconds, results), files)
    states = [outcomes(results).get(mutant.name, "") for mutant in mutants]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (KILLED, SURVIVED, TIMED_OUT, NOT_RUN))
    print(f"{len(mutants)} of {everything} mutants: {counts}")


if __name__ == "__main__":
    main()
