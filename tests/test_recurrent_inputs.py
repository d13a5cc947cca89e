"""Inputs of recurrent layers that another thread computes ahead: values, bits, and errors in either thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import cupyconv
from cupyconv.numpy import recurrent_inputs, threads
from cupyconv.numpy.recurrent_inputs import InputsAhead
from tests.recurrent_cases import FUNCTIONS, RecurrentCase


@pytest.fixture
def many_small_chunks(monkeypatch) -> Iterator[None]:
    """Let inputs seem to take long, so that small layers use another thread: seven chunks, two for each buffer."""
    monkeypatch.setattr(recurrent_inputs, "WAKE", -1.0)
    monkeypatch.setattr(recurrent_inputs, "BESIDE_STEPS", 1.0)
    monkeypatch.setattr(recurrent_inputs, "AHEAD_SECONDS", 0.0)
    monkeypatch.setattr(recurrent_inputs, "AHEAD_CHUNKS", 3)
    cupyconv.clear_caches()
    yield
    cupyconv.clear_caches()


def bits(result: tuple[np.ndarray | None, ...]) -> tuple[bytes, ...]:
    return tuple(one.tobytes() for one in result if one is not None)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("direction", "lengths"), [("forward", None), ("reverse", (7, 0, 3)), ("forward", (5, 1, 0))])
@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_inputs_ahead(many_small_chunks, cell, direction, lengths, dtype, monkeypatch):
    """The bits are the same every time, also if no thread helps."""
    case = RecurrentCase(
        cell=cell, direction=direction, steps=7, batch=3, inputs=5, hidden=4, dtype=dtype, lengths=lengths,
        optional=("bias_ih", "bias_hh", "h0"),
    )  # fmt: skip
    arrays = case.arrays()
    with cupyconv.options(threads=2):
        plan = cupyconv.explain(FUNCTIONS[cell], **arrays, lengths=lengths, **case.settings)
        results = [case.call(arrays) for _ in range(20)]
        monkeypatch.setattr(threads._pool, "help_with", lambda job, workers: None)
        results.append(case.call(arrays))
    step = plan.steps[0]
    # float16 is copied to be multiplied, one chunk after another in the same memory.
    assert (step.ahead, step.threads, step.chunk) == ((3, 1, 1) if dtype == "float32" else (0, 2, 7))
    assert ("next inputs in another thread" in str(plan)) == (dtype == "float32")
    assert len({bits(result) for result in results}) == 1
    expected = case.expected(arrays)
    for actual, wanted in zip(results[0], (expected.y, expected.h, expected.c)):
        if actual is not None:
            case.assert_close(actual, wanted, expected.largest)


def test_inputs_ahead_fit_the_limit():
    """With a limit that has no space for buffers, inputs are not computed ahead, and the values are the same."""
    x, weight_ih, weight_hh = (
        np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(0.1)
        for shape in ((100, 8, 512), (1024, 512), (1024, 256))
    )
    found = []
    for limit in (16 << 20, 1 << 17):
        with cupyconv.options(threads=2, workspace_limit=limit):
            plan = cupyconv.explain(cupyconv.lstm, x, weight_ih, weight_hh)
            assert plan.workspace_bytes <= limit and bool(plan.steps[0].ahead) == (limit > 1 << 20)
            found.append(cupyconv.lstm(x, weight_ih, weight_hh)[0])
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("slow", ["nobody", "inputs", "steps"])
def test_each_chunk_is_projected_once_before_its_steps(slow, buffers):
    """Whichever thread is slow, each chunk goes once to a buffer whose steps are done."""
    rng = np.random.default_rng(0)
    projected: list[int] = []
    advanced: list[int] = []

    def project(number: int) -> None:
        if slow == "inputs":
            time.sleep(rng.random() * 1e-3)
        assert number < len(advanced) + buffers
        projected.append(number)

    def advance(number: int) -> None:
        if slow == "steps":
            time.sleep(rng.random() * 1e-3)
        assert number in projected and number == len(advanced)
        advanced.append(number)

    InputsAhead(25, buffers, project).run(lambda: None, advance)
    assert sorted(projected) == advanced == [*range(25)]


@pytest.mark.parametrize("where", ["prepare", "project 0", "project 3", "project 9", "advance 0", "advance 4"])
def test_errors_end_both_threads(where):
    """An error in either thread is raised, and no thread waits for it."""

    def fail(place: str) -> None:
        if place == where:
            raise MemoryError(place)

    for _ in range(20):
        inputs = InputsAhead(10, 3, lambda number: fail(f"project {number}"))
        with pytest.raises(MemoryError, match=where):
            inputs.run(lambda: fail("prepare"), lambda number: fail(f"advance {number}"))


@pytest.mark.parametrize("number", [1, 2])
def test_an_interruption_ends_both_threads(number, monkeypatch):
    """A signal handler may raise in the caller's thread after this has taken a chunk and before it works on it."""
    interrupted, begun, advanced = [0], threading.Event(), [0]

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if threading.current_thread() is caller:
                interrupted[0] += 1
                if interrupted[0] == number:
                    raise KeyboardInterrupt

    def advance(_: int) -> None:
        advanced[0] += 1
        while interrupted[0] < number:  # two chunks have buffers in addition to the first
            time.sleep(1e-4)

    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            inputs.run(begun.set, advance)
        ended.set()

    def help_with(job: threads._Job, workers: int) -> None:
        ask(job, workers)
        assert begun.wait(10), "the worker makes the steps, the caller works out the inputs"

    ended, ask = threading.Event(), threads._pool.help_with
    monkeypatch.setattr(threads._pool, "help_with", help_with)
    monkeypatch.setattr(recurrent_inputs, "allocate_lock", Lock)
    inputs = InputsAhead(20, 3, lambda number: None)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert ended.wait(10), "both wait for each other"
    assert advanced[0] < 20


def test_the_caller_waits_for_nobody_who_has_not_begun(monkeypatch):
    """A worker that comes late finds nothing to do."""
    late = threading.Event()
    work = InputsAhead._inputs

    def inputs_of_late(self: InputsAhead) -> None:
        if threading.current_thread() is not threading.main_thread():
            late.wait(10)
        work(self)

    monkeypatch.setattr(InputsAhead, "_inputs", inputs_of_late)
    advanced: list[int] = []

    def advance(number: int) -> None:
        advanced.append(number)
        if number == 4:
            late.set()

    InputsAhead(5, 2, lambda number: None).run(lambda: None, advance)
    assert advanced == [*range(5)]
