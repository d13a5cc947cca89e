"""Small changes to a module, each of which some test should detect: ``python -m tests.mutation MODULE ...``

::

    python -m tests.mutation cupyconv/cuda/plan/pool.py cupyconv/problem/padding.py
    python -m tests.mutation cupyconv/cuda/plan --sample 1000 --seed 1
    python -m tests.mutation cupyconv/cuda/plan --survivors
    python -m tests.mutation cupyconv/cuda/plan/tiles.py --kinds operator condition

A mutant is the module with one change: of a comparison, a sign, a number, a condition or a result, or a statement left
out.  The tests that run the changed line run until one fails.  Tests that killed most of the module's mutants in the
least time run first, then the fastest tests.  If no test fails, the mutant survives and is printed: a test is missing,
or the change has no effect.

Thousands of mutants are affordable because pytest collects the tests once.  Each mutant is a fork of that process, in
which the code of the changed function is replaced, wherever it was imported to.  Which tests run which lines is
measured once per test file (by `sys.monitoring`, from Python 3.12 on) and cached in ``.mutation/``, as is the outcome
of each mutant: a command that was stopped continues where it was.  ``--seconds`` bounds the tests of one mutant.  With
half a second a planning module takes minutes; survivors are tried again with more seconds and with other test files.

Some mutants are expected to survive:

- a bound that no value meets (``> 1`` and ``> 2`` if a number is never 2, or the larger and the smaller of equal ones);
- the condition of a shortcut, if the long path gives the same result;
- a size up to which something is cached, planned together or tried;
- constants of `cost`, which are measurements.  Tests check their signs, that they grow with what they estimate, and
  which method is cheapest in clear cases, but not their digits;
- words of a message other than those that name the argument and its values;
- a grid of another size, and blocks of other sizes, if the kernel loops until all is done.  Tests check that there are
  enough threads and not far too many;
- a stride along an axis of one element, and a name or a place that only completes an object;
- on a GPU, the number of parts of a sum, because any number gives the sum;
- a limit of 32 bits that only arrays beyond any memory reach;
- the number of blocks that a kernel is compiled for, its registers, its shared memory, and a number that the kernel
  states too, which tests of compiled kernels check;
- an exception of a method that every subclass overrides;
- None for False or for an empty string, if only the truth value is used;
- the origin and the direction of numbers of which only differences count;
- which of several equal values is read, such as the batch of a chain's first or last layer;
- the placeholder if there is nothing to divide by;
- an estimate of memory with a margin, as for index arrays.  Tests check that at least a third of it is used;
- a slice that ends beyond its axis, or beyond what is read of it;
- another negative extent of a shape, because any negative extent stands for the rest;
- mutants that need more than half a second.  In chunks of a transposed convolution and of a recurrent layer, tests that
  run kernels for seconds killed most survivors.

Any other survivor is a missing test, or a line that does nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import json
import os
import pickle
import pkgutil
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

import cupyconv

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".mutation"
#: Flag of a compiled function that the body of a class or a module does not have.
OPTIMIZED = 0x1
KILLED, SURVIVED, TIMED_OUT, NOT_RUN = "killed", "survived", "timed out", "not run by any test"
#: Each test of the mutant takes far longer than allowed.
LEFT = "left for more seconds"

# --- changes ----------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
KINDS = (
    "comparison", "operator", "one more", "one less", "half as much again", "and, or", "condition", "None", "left out",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A change to one node of a statement of the module; `node` is its number in the order of `ast.walk`."""

    statement: int
    node: int
    kind: str
    line: int
    #: First line of the node's own statement: an expression of many lines is recorded as run there.
    first_line: int

    def both(self, tree: ast.Module) -> tuple[ast.stmt, ast.stmt]:
        """Return the module's statement without and with the change; for a class, only the method that it changes."""
        whole = tree.body[self.statement]
        node: Any = nodes_of(whole)[self.node]
        old, copies = alone(whole, node), {}
        statement, node = copy.deepcopy(old, copies), copies[id(node)]
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
            replace_statement(statement, node)
        return old, ast.fix_missing_locations(statement)


@cache
def nodes_of(statement: ast.stmt) -> list[ast.AST]:
    return list(ast.walk(statement))


def alone(statement: ast.stmt, node: Any) -> ast.stmt:
    """Return the statement; a class without its other methods, which would compile longer than most tests run."""
    if isinstance(statement, ast.ClassDef):
        around = [each for each in statement.body if each.lineno <= node.lineno <= (each.end_lineno or 0)]
        statement = copy.copy(statement)
        statement.body = [alone(each, node) for each in around]
    return statement


def replace_statement(tree: ast.stmt, statement: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, None)
            if isinstance(body, list) and statement in body:
                body[body.index(statement)] = ast.copy_location(ast.Pass(), statement)


def changes(tree: ast.Module) -> Iterator[Change]:
    """Yield all changes of a module: to the bodies of its functions, and to numbers that it names."""
    for number, statement in enumerate(tree.body):
        order = {id(node): place for place, node in enumerate(ast.walk(statement))}
        for node, first_line in mutable(statement):
            for kind in kinds(node):
                yield Change(number, order[id(node)], kind, node.lineno, first_line)


def mutable(statement: ast.stmt) -> Iterator[tuple[Any, int]]:
    """Yield the nodes of function bodies and of values of a module's names, but not annotations, defaults, assertions.

    Each node comes with the first line of its statement.
    """
    waiting: list[tuple[ast.AST, int]] = []
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        waiting.append((statement.value, statement.lineno))
    else:
        waiting += [(function, 0) for function in functions(statement)]
    while waiting:
        node, line = waiting.pop()
        if isinstance(node, (ast.Assert, ast.JoinedStr)):
            continue
        if isinstance(node, ast.FunctionDef):
            waiting += [(inner, line) for inner in node.body]
            continue
        line = node.lineno if isinstance(node, ast.stmt) else line
        if isinstance(node, ast.AnnAssign):
            waiting += [] if node.value is None else [(node.value, line)]
        else:
            waiting += [(inner, line) for inner in ast.iter_child_nodes(node)]
        if hasattr(node, "lineno"):
            yield node, line


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

    @property
    def places(self) -> tuple[object, object]:
        """Keys under which similar mutants are counted: the module, and the function or class."""
        return self.path, (self.path, self.change.statement)

    def shown(self) -> str:
        """Return the changed line, before and after."""
        before, after = (ast.unparse(statement).splitlines() for statement in self.change.both(parsed(self.path)))
        differing = [(one.strip(), other.strip()) for one, other in zip(before, after) if one != other]
        old, new = differing[0] if differing else ("", "")
        return f"{self.path}:{self.change.line}: {self.change.kind}\n  - {old}\n  + {new}"

    def install(self) -> None:
        """Put the changed code into the existing functions, and changed numbers wherever their names were imported."""
        tree, module = parsed(self.path), sys.modules[self.module]
        old, changed = self.change.both(tree)
        for one, other in zip(functions(old), functions(changed)):
            keep_class(one, other)
        codes, before = (
            {place(code): code for code in outermost(compile(ast.Module([each], []), str(module.__file__), "exec"))}
            for each in (changed, old)
        )
        differing = {key for key, code in before.items() if codes[key] != code}
        for function in functions_of_package().get(str(module.__file__), []):
            if place(function.__code__) in differing:
                function.__code__ = codes[place(function.__code__)]
        if not functions(old):
            body = [changed if each is old else each for each in tree.body]
            self._install_names(module, compile(ast.Module(body, []), str(module.__file__), "exec"))

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


def keep_class(before: Any, after: Any) -> None:
    """Name the class in a method whose `super()` the change may have removed, or Python rejects its code."""
    if any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(before)):
        after.body += ast.parse("if False:\n    __class__").body  # compiled to nothing


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def outermost(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module or class, without nested functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & OPTIMIZED:
                yield inner
            else:
                yield from outermost(inner)


def with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from with_inner(inner)


@cache
def functions_of_package() -> dict[str, list[FunctionType]]:
    """Return all existing functions by file; cached, because the search takes longer than most tests.

    This includes modules that the package imports only on demand.
    """
    for one in pkgutil.walk_packages(cupyconv.__path__, "cupyconv."):
        with suppress(ModuleNotFoundError):  # a library that is not installed
            importlib.import_module(one.name)
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
    """Clear what functions cache from earlier calls, so that it is computed again."""
    from cupyconv.configuration import clear_caches

    clear_caches()
    for one in caches_of_package():
        one.cache_clear()


# --- tests, collected once ----------------------------------------------------------------------------------------

#: Line, as `path:line` -> the seconds and names of the tests that run it.
Covering = dict[str, list[tuple[float, str]]]


class Loop:
    """Replaces pytest's own loop over the collected tests."""

    def __init__(self, mutants: list[Mutant], seconds: float, results: Path) -> None:
        self.mutants, self.seconds, self.results = mutants, seconds, results
        #: Module, or function or class -> how many of its mutants each test has met, and killed.  A test that killed
        #: many is most likely to kill the next one.
        self.met: dict[object, Counter[str]] = {}
        self.kills: dict[object, Counter[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        covering = lines_of_tests(items)
        done = outcomes(self.results)
        killers = {row["name"]: row["test"] for row in rows_of(self.results) if row["state"] == KILLED}
        for mutant in self.mutants:
            if mutant.name in killers:
                self._count(mutant, [killers[mutant.name]], killers[mutant.name])
        functions_of_package(), caches_of_package()
        gc.freeze()  # or each fork would copy all memory when it collects garbage
        with self.results.open("a") as file:
            for mutant in self.mutants:
                if mutant.name in done:
                    continue
                wanted = self._ordered(mutant, tests_of(mutant, covering))
                names, needed = within(wanted, self.seconds)
                state, test = tried(mutant, [items[name] for name in names], needed)
                if state == NOT_RUN and wanted:
                    state = LEFT
                file.write(json.dumps({"name": mutant.name, "state": state, "test": test}) + "\n")
                file.flush()
                self._count(mutant, names[: names.index(test) + 1] if test in names else names, test)
                if state != KILLED:
                    print(f"{state}: {mutant.shown()}", flush=True)
        return True

    def _ordered(self, mutant: Mutant, tests: list[tuple[float, str]]) -> list[tuple[float, str]]:
        """Sort the tests by their seconds per kill, as far as these are known."""
        of_places = [(self.met.get(key, Counter()), self.kills.get(key, Counter())) for key in mutant.places]

        def seconds_a_kill(test: tuple[float, str]) -> tuple[float, str]:
            seconds, name = test
            met, kills = (sum(counts[name] for counts in each) for each in zip(*of_places))
            return seconds * (met + 1) / (kills + 0.1), name

        return sorted(tests, key=seconds_a_kill)

    def _count(self, mutant: Mutant, met: list[str], killer: str) -> None:
        for key in mutant.places:
            self.met.setdefault(key, Counter()).update(met)
            self.kills.setdefault(key, Counter()).update([killer])


def tests_of(mutant: Mutant, covering: Covering) -> list[tuple[float, str]]:
    """Return the tests that run the changed line; for a value set at import, those that run any line of the module."""
    change = mutant.change
    for line in (change.line, change.first_line):
        if tests := covering.get(f"{mutant.path}:{line}"):
            return sorted(set(tests))
    if functions(parsed(mutant.path).body[change.statement]):
        return []
    return sorted({test for key, tests in covering.items() if key.startswith(mutant.path + ":") for test in tests})


def within(tests: list[tuple[float, str]], seconds: float) -> tuple[list[str], float]:
    """Return the first tests that fit in this time (at least one, if it fits in ten times that), and their time."""
    chosen, spent = [], 0.0
    for duration, name in tests:
        if spent + duration > (seconds if chosen else 10 * seconds):
            continue
        spent += duration
        chosen.append(name)
    return chosen, spent


def tried(mutant: Mutant, items: list[pytest.Item], seconds: float) -> tuple[str, str]:
    """Return the outcome of a mutant, and the test that killed it."""
    if not items:
        return NOT_RUN, ""
    reading, writing = os.pipe()
    child = os.fork()
    allowed = int(3 * seconds) + 3  # CPU time, so that a busy machine makes no difference
    if child == 0:
        os.setpgid(0, 0)
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
    # The child may wait forever.  Polls are counted, not seconds, so that it makes no difference if the machine stops
    # this process too for minutes.
    looks, answer, status = 10_000 * allowed, b"", None
    while status is None and looks:
        pid, ended = os.waitpid(child, os.WNOHANG)
        status, looks = ended if pid else None, looks - 1
        time.sleep(0.002)
    if status is None:
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
    return KILLED, answer.decode() or "crash"  # a crash of the process is detected


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
    """Measures the collected tests file by file, each test by itself."""

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
    from _pytest.runner import runtestprotocol

    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    seconds: dict[str, float] = {}
    lines: dict[str, list[str]] = {}
    here: set[tuple[str, int]] = set()
    within_package, monitoring = str(ROOT / "cupyconv"), sys.monitoring

    def reached(code: CodeType, line: int) -> Any:
        here.add((code.co_filename, line))
        return monitoring.DISABLE  # until the next test

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutation")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, reached)
    for functions_of_file in functions_of_package().values():  # only of the package, to save time
        for code in (code for function in functions_of_file for code in with_inner(function.__code__)):
            if code.co_filename.startswith(within_package):
                monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
    for item, following in zip(items, [*items[1:], None]):
        forget()
        here.clear()
        monitoring.restart_events()
        begin = time.process_time()
        reports = runtestprotocol(item, nextitem=following, log=False)
        if all(report.passed for report in reports):  # a failing or skipped test says nothing about a mutant
            seconds[item.nodeid] = time.process_time() - begin
            for file, line in here.copy():  # a copy, because a worker may still run
                lines.setdefault(f"{Path(file).relative_to(ROOT)}:{line}", []).append(item.nodeid)
    kept_lines(path).write_bytes(pickle.dumps((seconds, lines)))


def kept_lines(path: Path) -> Path:
    return KEPT / f"{path.name}.{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.lines"


def lines_of_tests(known: Iterable[str]) -> Covering:
    """Return line -> tests, from measurements of the current files: older ones would name the same tests again."""
    known, covering = set(known), {}
    for path in sorted({ROOT / name.partition("::")[0] for name in known}):
        if not kept_lines(path).exists():
            continue
        seconds, lines = pickle.loads(kept_lines(path).read_bytes())
        for line, names in lines.items():
            covering.setdefault(line, []).extend((seconds[name], name) for name in names if name in known)
    return covering


def outcomes(results: Path) -> dict[str, str]:
    return {row["name"]: row["state"] for row in rows_of(results)}


def rows_of(results: Path) -> list[dict[str, str]]:
    return [json.loads(row) for row in results.read_text().splitlines()] if results.exists() else []


# --- the command --------------------------------------------------------------------------------------------------


def collected(plugin: object, files: list[Path]) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a fork has no other threads
    # A marker of an earlier session does no harm; every mutant would write a cache of hypothesis or of pytest.
    # The report of a failed test takes ten times as long as most tests.
    arguments = ["-q", "-p", "no:cacheprovider", "--tb=no", "--assert=plain", "--hypothesis-profile=fast"]
    pytest.main([*arguments, *map(str, files)], plugins=[plugin])


def all_mutants(paths: list[str]) -> list[Mutant]:
    mutants = []
    for path in paths:
        files = sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]
        for file in files:
            relative = file.relative_to(ROOT)
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            mutants += [Mutant(module, str(relative), change) for change in changes(parsed(str(relative)))]
    return mutants


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="files or folders of the package")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of tests (all of them)")
    parser.add_argument("--sample", type=int, help="so many mutants of all, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="only changes of these kinds (all)")
    parser.add_argument("--seconds", type=float, default=6.0, help="tests of one mutant end in about that time")
    parser.add_argument("--measure", action="store_true", help="measure only which tests run which lines")
    parser.add_argument("--survivors", action="store_true", help="try those again that survived, whatever it takes")
    return parser.parse_args(arguments)


def sampled(mutants: list[Mutant], given: argparse.Namespace) -> tuple[list[Mutant], int]:
    """Return the sample of mutants of the given kinds, in random order, and the number of mutants of these kinds."""
    of_kinds = [one for one in mutants if one.change.kind in given.kinds]
    random.Random(given.seed).shuffle(of_kinds)
    return of_kinds[: given.sample], len(of_kinds)


def main() -> None:
    given = options(None)
    if sys.version_info < (3, 12):
        sys.exit("which tests run which lines is measured by sys.monitoring, which Python has from 3.12 on")
    KEPT.mkdir(exist_ok=True)
    folders = [ROOT / path for path in given.tests]
    files = [file for path in folders for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    if missing := [file for file in files if not kept_lines(file).exists()]:
        collected(Measure(missing), missing)
    if given.measure:
        return
    mutants, everything = sampled(all_mutants(given.modules), given)
    results = KEPT / "results.jsonl"
    if given.survivors:
        known = outcomes(results)
        mutants = [mutant for mutant in mutants if known.get(mutant.name, KILLED) != KILLED]
        results = KEPT / "survivors.jsonl"
    collected(Loop(mutants, given.seconds, results), files)
    states = [outcomes(results).get(mutant.name, "") for mutant in mutants]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (KILLED, SURVIVED, TIMED_OUT, LEFT, NOT_RUN))
    print(f"{len(mutants)} of {everything} mutants: {counts}")


if __name__ == "__main__":
    main()
