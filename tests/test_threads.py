"""Threads of the NumPy backend: their number, what they leave behind, and BLAS's thread count, which is restored."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from math import prod
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupyconv
from cupyconv.numpy import threads, winograd
from cupyconv.numpy.gemm import multiply
from cupyconv.numpy.threads import BLAS, in_threads

RNG = np.random.default_rng(0)
#: A problem large enough for many threads, and one small enough for one.
LARGE = RNG.standard_normal((8, 16, 64, 64)), RNG.standard_normal((32, 16, 3, 3))
SMALL = RNG.standard_normal((1, 4, 8, 8)), RNG.standard_normal((4, 4, 3, 3))

OF_A_NEW_PROCESS: dict[str, Any] = dict(
    cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=True
)


@pytest.fixture(autouse=True)
def four_threads_of_blas():
    """Set four BLAS threads, whatever the machine and the test run use; a test must restore this number."""
    with threadpool_limits(4, "blas"):
        if BLAS.threads != 4:
            pytest.skip("NumPy's BLAS has no number of threads to set")
        yield
        assert BLAS.threads == 4


def planned(*arrays: Any, **settings: Any) -> int:
    with cupyconv.options(**settings):
        return cupyconv.explain(cupyconv.conv, *arrays).steps[0].threads


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cupyconv"]


# --- how many -------------------------------------------------------------------------------------------------


def test_by_default_as_many_as_blas_uses():
    assert planned(*LARGE) == 4
    with threadpool_limits(3, "blas"):
        assert planned(*LARGE) == 3
        with threadpool_limits(1, "blas"):
            assert planned(*LARGE) == 1
    assert planned(*LARGE, threads=2) == 2


@pytest.mark.parametrize("kernel", [(1, 1), (1, 3)])
def test_a_lone_product_is_divided_by_whoever_has_the_threads(kernel):
    """BLAS divides a single product if it has as many threads as requested; otherwise some would be idle."""
    x, weight = np.ones((1, 64, 40, 40), np.float32), np.ones((128, 64, *kernel), np.float32)
    for blas, ours in ((4, 1), (2, 1), (1, 2)):
        with threadpool_limits(blas, "blas"):
            assert planned(x, weight, threads=2, allow_winograd=False) == ours
            with cupyconv.options(threads=2, allow_winograd=False):
                y = cupyconv.conv(x, weight)
        assert (y == 64 * prod(kernel)).all()


def test_the_price_says_how_many():
    """The estimated time chooses among the threads that are available by default, but keeps a requested number."""
    x, weight = np.ones((1, 96, 24, 24), np.float32), np.ones((64, 96, 3, 3), np.float32)
    grad = cupyconv.conv(x, weight, stride=2, padding=1)

    def step(**settings: Any) -> Any:
        with cupyconv.options(**settings):
            return cupyconv.explain(cupyconv.conv_grad_weight, grad, x, (3, 3), stride=2, padding=1).steps[0]

    with threadpool_limits(2, "blas"):
        by_price, two, one = step(), step(threads=2), step(threads=1)
    assert (by_price.threads, two.threads, one.threads) == (1, 2, 1)
    assert by_price.seconds == one.seconds < two.seconds
    assert planned(*LARGE) == 4


def test_blas_divides_only_what_a_caller_gives_it():
    """BLAS's threads look for more work for a while after each product, on processors that our threads need."""

    def holds(channels: int, extent: int, **settings: Any) -> bool:
        x = np.ones((1, channels, extent, extent), np.float32)
        weight = np.ones((64, channels, 1, 1), np.float32)
        with cupyconv.options(**settings):
            return cupyconv.explain(cupyconv.conv, x, weight).steps[0].holds_blas

    assert holds(64, 20)
    assert not holds(8, 8)  # never divided
    assert not holds(64, 20, threads=1)  # as documented


def test_a_recurrent_layer_is_divided_where_steps_are_large_and_samples_many():
    def step(cell_inputs: int, hidden: int, batch: int, **settings: Any) -> Any:
        x = np.ones((8, batch, cell_inputs), np.float32)
        weights = (np.ones((4 * hidden, columns), np.float32) for columns in (cell_inputs, hidden))
        with threadpool_limits(2, "blas"), cupyconv.options(**settings):
            return cupyconv.explain(cupyconv.lstm, x, *weights).steps[0]

    assert step(512, 512, 32).threads == 2
    assert step(64, 64, 16).threads == 1  # steps too short
    few = step(512, 512, 4)  # too few samples: products of two of them take as long as of four
    assert few.threads == 1 and few.holds_blas
    assert not step(512, 512, 4, threads=1).holds_blas  # as documented
    assert not step(8, 16, 1).holds_blas  # never divided


def test_one_thread_out_of_several_is_one_of_blas_too(monkeypatch):
    seen = []
    x, weight = np.ones((2, 700, 18, 18), np.float32), np.ones((100, 700, 1, 1), np.float32)  # too large for parts
    with threadpool_limits(2, "blas"):
        step = cupyconv.explain(cupyconv.conv, x, weight, stride=2).steps[0]
        assert step.threads == 1 and step.holds_blas
        original = type(step).sums
        monkeypatch.setattr(type(step), "sums", lambda *block: (seen.append(numbers()), original(*block))[1])
        y = cupyconv.conv(x, weight, stride=2)
    assert seen and all(held == [1] for held in seen)
    assert (y == 700).all()


@pytest.mark.parametrize("groups, rows", [(1, 7), (2, 7), (5, 3), (1, 1)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("has_place", [False, True])
def test_rows_and_groups_of_a_product_are_shared(groups, rows, count, has_place):
    weight, columns = RNG.integers(-9, 9, (groups, rows, 11)) * 1.0, RNG.integers(-9, 9, (2, groups, 11, 13)) * 1.0
    place = np.empty((2, groups, rows, 13)) if has_place else None
    columns = columns if has_place else columns[0]
    sums = multiply(weight, columns, count, place)
    assert has_place == (sums is place)
    assert np.array_equal(sums, weight @ columns)


def test_a_long_lone_product_is_divided_by_ours():
    x = RNG.integers(-3, 3, (1, 512, 7, 7)).astype(np.float32)
    weight = RNG.integers(-3, 3, (512, 512, 3, 3)).astype(np.float32)
    with threadpool_limits(2, "blas"):
        step = cupyconv.explain(cupyconv.conv, x, weight, padding=1, method="gemm").steps[0]
        y = cupyconv.conv(x, weight, padding=1, method="gemm")
    assert step.rows_on == 2
    with cupyconv.options(threads=1):
        assert np.array_equal(y, cupyconv.conv(x, weight, padding=1, method="gemm"))


@pytest.mark.parametrize(
    "outputs, size, rows_on, blocks",
    [(80, (50, 50), 1, 2), (2048, (7, 9), 2, 1)],  # each thread packs the smaller of the two operands
)
def test_a_lone_product_is_divided_along_its_longer_side(outputs, size, rows_on, blocks):
    x = RNG.integers(-3, 3, (1, 160, *size)).astype(np.float32)
    weight = RNG.integers(-3, 3, (outputs, 160, 1, 1)).astype(np.float32)
    with threadpool_limits(2, "blas"):
        step = cupyconv.explain(cupyconv.conv, x, weight).steps[0]
        y = cupyconv.conv(x, weight)
    assert (step.rows_on, step.blocks) == (rows_on, blocks)
    assert np.array_equal(y[0], np.einsum("oc,chw->ohw", weight[..., 0, 0], x[0]))


def test_small_problems_stay_on_the_calling_thread():
    assert planned(*SMALL) == 1


def test_a_limit_set_between_calls_is_kept(monkeypatch):
    """A new limit applies, although a cached call was planned for another number of threads."""
    taken = []
    original = threads.in_threads
    monkeypatch.setattr(threads, "in_threads", lambda n, *others: (taken.append(n), original(n, *others))[1])
    for limit in (4, 2, 4, 1, 3):
        with threadpool_limits(limit, "blas"):
            cupyconv.conv(*LARGE)
    assert [n for n in taken if n > 1] == [4, 2, 4, 3]  # one thread is the caller


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"])
def test_the_environments_limit_is_kept(name):
    code = (
        "import numpy as np, cupyconv;"
        "plan = cupyconv.explain(cupyconv.conv, np.ones((8, 16, 64, 64)), np.ones((32, 16, 3, 3)));"
        "print(plan.steps[0].threads)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | {name: "1"}
    done = subprocess.run([sys.executable, "-c", code], **OF_A_NEW_PROCESS, env=environment)
    assert done.stdout.strip() == "1"


def test_blas_is_looked_for_when_a_problem_is_large():
    code = (
        "import sys, numpy as np, cupyconv\n"
        "for extent in (8, 200):\n"
        "    cupyconv.conv(np.ones((1, 8, extent, extent)), np.ones((8, 8, 3, 3)))\n"
        "    print('threadpoolctl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], **OF_A_NEW_PROCESS)
    assert done.stdout.split() == ["False", "True"]


def test_however_many_are_asked_for_few_are_started(monkeypatch):
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    before = len(our_threads())
    x, weight = np.ones((1, 2, 400, 400)), np.ones((2, 2, 3, 3))
    with cupyconv.options(threads=10**4):
        assert (cupyconv.conv(x, weight, method="direct") == 18).all()
    in_threads(10**4, lambda part: time.sleep(1e-4), range(2000))
    assert 0 < len(our_threads()) - before <= max(32, 2 * (os.cpu_count() or 1))


def test_where_no_thread_can_be_started_the_caller_does_it_all(monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert in_threads(4, lambda part: threading.get_ident(), range(8)) == [threading.get_ident()] * 8


# --- parts ----------------------------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_parts():
    def work(part: int) -> int:
        time.sleep(0.001 * (part % 3))
        return part

    assert in_threads(4, work, iter(range(40))) == list(range(40))


def test_threads_work_at_the_same_time():
    together = threading.Barrier(3, timeout=30)
    in_threads(3, lambda part: together.wait(), range(3))


def test_a_worker_serves_one_call_after_the_other():
    in_threads(4, lambda part: time.sleep(0.001), range(20))
    before = {*our_threads()}
    for _ in range(20):
        in_threads(4, lambda part: time.sleep(0.0005), range(8))
        time.sleep(0.002)
    assert {*our_threads()} == before


@pytest.mark.parametrize("failing", [0, 7, 39])
def test_what_a_part_raises_is_raised_and_nothing_works_on(failing):
    at_work: set[int] = set()

    def work(part: int) -> None:
        at_work.add(part)
        time.sleep(0.001)
        at_work.remove(part)
        if part == failing:
            raise MemoryError(f"part {part}")

    with pytest.raises(MemoryError, match=f"part {failing}"):
        in_threads(4, work, range(40))
    assert not at_work


def test_what_the_parts_raise_is_raised():
    def parts():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads(2, lambda part: part, parts())


def test_calls_within_parts_come_to_an_end():
    def outer(part: int) -> int:
        return sum(in_threads(8, lambda inner: inner * part, range(5)))

    assert in_threads(8, outer, range(100)) == [10 * part for part in range(100)]


def test_arrays_of_a_call_are_let_go():
    """A worker that waits holds nothing of the previous call."""

    def call() -> weakref.ref:
        array = np.ones(10)
        in_threads(4, lambda part: time.sleep(array[part] / 1000), range(8))
        return weakref.ref(array)

    array = call()
    end = time.monotonic() + 10
    while array() is not None and time.monotonic() < end:  # a worker may still be returning
        time.sleep(0.001)
    assert array() is None


@pytest.mark.parametrize("whose", ["caller", "worker"])
def test_arrays_of_a_call_that_failed_are_let_go(whose):
    """Arrays of a failed call are released at once: the next attempt, with smaller blocks, needs their memory."""

    def call() -> weakref.ref:
        array, caller, failed = np.ones(10), threading.current_thread(), threading.Event()

        def fail(part: int) -> None:
            if (threading.current_thread() is caller) == (whose == "caller"):
                failed.set()
                raise MemoryError(array[part])
            failed.wait(10)

        try:
            in_threads(4, fail, range(8))
        except MemoryError:
            return weakref.ref(array)

    gc.collect()
    gc.disable()
    try:
        array = call()
        end = time.monotonic() + 10
        while array() is not None and time.monotonic() < end:  # a worker may still be returning
            time.sleep(0.001)
        assert array() is None
    finally:
        gc.enable()


# --- BLAS -----------------------------------------------------------------------------------------------------


def test_without_the_gil_workers_free_what_they_made_when_memory_is_wanted(monkeypatch):
    """An object is freed only by its own thread then: before another attempt with less memory, and to clear caches."""
    woken: list[threads._Pool] = []
    monkeypatch.setattr(threads._Pool, "wake", lambda pool: woken.append(pool))

    def fail(part: int) -> None:
        raise MemoryError(part)

    for has_gil in (True, False):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda has_gil=has_gil: has_gil, raising=False)
        for number, wish in enumerate((lambda: in_threads(2, fail, range(4)), cupyconv.clear_caches), 1):
            with suppress(MemoryError):
                wish()
            assert len(woken) == (0 if has_gil else number)


def numbers() -> list[int]:
    return [ask() for ask, _ in BLAS._found()]


def test_the_transform_of_a_large_weight_holds_blas(monkeypatch):
    """The transform holds BLAS on one thread too: other numbers change bits, and BLAS's threads look for work."""
    seen, times_taps = [], winograd._times_taps

    def watched(*arrays):
        seen.extend(numbers())
        times_taps(*arrays)

    monkeypatch.setattr(winograd, "_times_taps", watched)
    x, weight = np.ones((1, 64, 4, 4, 4), np.float32), np.ones((64, 64, 3, 3, 3), np.float32)
    plan = cupyconv.explain(cupyconv.conv, x, weight, method="winograd")
    assert plan.steps[0].threads == 1
    cupyconv.conv(x, weight, method="winograd")
    assert seen and set(seen) == {1}


@pytest.mark.parametrize(
    "interface, layer, is_its_own",
    [("openblas", "pthreads", True), ("openblas", "openmp", False), ("mkl", "intel", False), ("blis", "openmp", False)],
)
def test_openblas_own_threads_are_set_in_openblas_itself(interface, layer, is_its_own):
    """threadpoolctl would set them for one thread of the process at a time."""
    functions = {f"scipy_openblas_{verb}_num_threads64_": verb for verb in ("get", "set")}
    library = SimpleNamespace(
        internal_api=interface, threading_layer=layer, dynlib=SimpleNamespace(**functions),
        get_num_threads="threadpoolctl's get", set_num_threads="threadpoolctl's set",
    )  # fmt: skip
    expected = ("get", "set") if is_its_own else (library.get_num_threads, library.set_num_threads)
    assert threads._controls(library) == expected


def test_blas_has_one_thread_meanwhile_and_its_own_after():
    assert in_threads(2, lambda part: numbers(), range(4)) == [[1]] * 4
    assert numbers() == [4]


def test_after_an_error_it_has_its_own():
    with pytest.raises(ZeroDivisionError):
        in_threads(2, lambda part: 1 // 0, range(4))
    assert numbers() == [4]


def test_nested_and_side_by_side_the_last_one_puts_it_back():
    first_in, first_out = threading.Event(), threading.Event()

    def within() -> None:
        assert numbers() == [1] and BLAS.threads == 4

    def first() -> None:
        first_in.set()
        second_in.wait(10)
        BLAS.hold_while(within)
        assert numbers() == [1]

    second_in = threading.Event()

    def second() -> None:
        second_in.set()
        first_out.wait(10)
        within()

    def first_and_out() -> None:
        BLAS.hold_while(first)
        first_out.set()

    def second_when_first_is_in() -> None:
        first_in.wait(10)
        BLAS.hold_while(second)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first_and_out), pool.submit(second_when_first_is_in)]:
            done.result(20)
    assert numbers() == [4]


def test_a_number_set_meanwhile_stays():
    BLAS.hold_while(lambda: threadpool_limits(3, "blas"))
    assert numbers() == [3]
    threadpool_limits(4, "blas")


def test_calls_of_many_threads_at_once():
    alone = cupyconv.conv(*LARGE).tobytes()
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: cupyconv.conv(*LARGE).tobytes(), range(24)))
    assert set(results) == {alone} and numbers() == [4]


def interrupted(number: int, function: Callable[[], object]) -> None:
    """Call it; raise at the `number`-th place in `threads` where Python lets a signal's handler raise."""
    places = count(1)

    def at(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename == threads.__file__ and next(places) == number:
            raise KeyboardInterrupt  # this also ends the profile

    sys.setprofile(at)
    try:
        function()
    finally:
        sys.setprofile(None)


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="as the promises say: a signal at the begin of `with lock:` leaves it locked"
)
@pytest.mark.parametrize("call", ["one thread", "two threads"])
def test_an_interruption_anywhere_leaves_nothing_as_it_was_within(call, monkeypatch):
    """BLAS has its threads again, nothing still computes, and the next call finds the requested worker again."""
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    begun: list[int] = []
    before = {*our_threads()}

    def work(part: int) -> None:
        begun.append(part)
        time.sleep(0.001)

    def in_one_or_two() -> None:
        in_threads(1 if call == "one thread" else 2, work, range(8), holds_blas=True)

    with ThreadPoolExecutor(1) as elsewhere:
        for number in count(1):
            begun.clear()
            try:
                interrupted(number, in_one_or_two)
                break
            except KeyboardInterrupt:
                parts = len(begun)
            assert numbers() == [4] and elsewhere.submit(lambda: BLAS.threads).result(10) == 4, number
            time.sleep(0.003)
            assert len(begun) == parts, "a worker still computes"
    assert number > 10 and len(begun) == 8
    end = time.monotonic() + 10
    while len(workers := {*our_threads()} - before) > 1 and time.monotonic() < end:
        time.sleep(0.001)  # a second worker that was started ends
    assert len(workers) == (call == "two threads")


# --- processes ------------------------------------------------------------------------------------------------


def in_a_child(function: Callable[[], bool]) -> bool:
    """Return whether the function returns True in a child that is forked here."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_threads_of_its_own():
    expected = cupyconv.conv(*LARGE).tobytes()

    def work() -> bool:
        started = len(our_threads())
        return started == 0 and cupyconv.conv(*LARGE).tobytes() == expected and len(our_threads()) > 0

    assert in_a_child(work)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_made_during_a_call_has_blas_as_it_was():
    def has_its_own() -> bool:
        return numbers() == [4] and in_threads(2, lambda part: numbers(), range(2)) == [[1], [1]]

    assert BLAS.hold_while(lambda: in_a_child(has_its_own))


def test_threads_that_help_inherit_nothing_that_is_kept():
    """From Python 3.14 on threads may inherit their starter's context, with the memory of the call in it: two threads
    once wrote to it at once, and a third of the results of four threads were wrong.
    """
    program = (
        "import contextvars, threading\n"
        "from cupyconv.numpy.threads import in_threads\n"
        "of_call, both = contextvars.ContextVar('of_call', default='own'), threading.Barrier(2)\n"
        "of_call.set('the call\\'s')\n"
        "def part(_):\n"
        "    both.wait(30)\n"
        "    return of_call.get()\n"
        "print(sorted(in_threads(2, part, range(2))))\n"
    )
    command = [sys.executable, "-X", "thread_inherit_context=1", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == str(["own", "the call's"]), done.stderr
