"""Promises of the documentation that no other test file covers, one test per sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv.numpy.convolution import ConvRun
from cupyconv.numpy.threads import BLAS
from cupyconv.problem import caches
from cupyconv.problem.arrays import Operand
from cupyconv.problem.geometry import Windows

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 8, 40, 40)).astype(np.float32)
WEIGHT = RNG.standard_normal((8, 8, 5, 5)).astype(np.float32)
GRAD = RNG.standard_normal((16, 8, 36, 36)).astype(np.float32)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_that_ends_while_it_runs(interruption, threads, monkeypatch):
    """An interrupted call leaves `out` half written and its arguments unchanged, and the next call is right."""
    expected, inputs = cupyconv.conv(X, WEIGHT, activation="relu"), (X.copy(), WEIGHT.copy())
    out, store, lock, calls = np.full_like(expected, 7), ConvRun.store, threading.Lock(), []

    def interrupted(self: ConvRun, block: Any, sums: np.ndarray) -> None:
        with lock:
            calls.append(block)
            if len(calls) > 1:
                raise interruption
        store(self, block, sums)

    with monkeypatch.context() as patched, cupyconv.options(threads=threads, workspace_limit=1 << 20):
        patched.setattr(ConvRun, "store", interrupted)
        with pytest.raises(interruption):
            cupyconv.conv(X, WEIGHT, activation="relu", out=out)
    assert (out == 7).any() and (out != 7).any()
    np.testing.assert_array_equal(X, inputs[0])
    np.testing.assert_array_equal(WEIGHT, inputs[1])
    np.testing.assert_array_equal(cupyconv.conv(X, WEIGHT, activation="relu"), expected)


CALLS: dict[str, Callable[[], np.ndarray]] = {
    "conv": lambda: cupyconv.conv(X, WEIGHT),
    "transposed": lambda: cupyconv.conv_transpose(X, WEIGHT, stride=2),
    "weight gradient": lambda: cupyconv.conv_grad_weight(GRAD, X, (5, 5)),
    "lstm": lambda: cupyconv.lstm(X[:, :, 0], np.tile(WEIGHT[0, :4, 0], (8, 8)), WEIGHT[:, :, 0, 0].repeat(4, 0))[0],
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_call_gives_the_same_bits(name, threads):
    with cupyconv.options(threads=threads):
        first = CALLS[name]()
        for _ in range(3):
            cupyconv.clear_caches()
            np.testing.assert_array_equal(CALLS[name]().view(np.uint32), first.view(np.uint32))
    np.testing.assert_allclose(first, CALLS[name](), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(748, 256, 2, 4), (7168, 245, 1, 1), (1544, 64, 9, 13), (840, 688, 1, 3)])
def test_a_lone_product_has_the_same_bits_whatever_ran_before(shape):
    """BLAS splits a product differently for another number of threads, so this number must not depend on timing."""
    channels, outputs, *size = shape
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(s, np.float32) for s in ((1, channels, *size), (outputs, channels, 1, 1)))
    wide, kernels = np.ones((2, 32, 56, 56), np.float32), np.ones((32, 32, 3, 3), np.float32)

    def lone() -> np.ndarray:
        return cupyconv.conv(x, weight).view(np.uint32)

    time.sleep(0.05)
    first = lone()
    for _ in range(3):
        cupyconv.conv(wide, kernels)  # on all threads
        np.testing.assert_array_equal(lone(), first)


def test_a_call_that_blas_divides_beside_calls_that_hold_it():
    """A call that BLAS splits may change in bits, not in values; concurrent calls keep theirs, and BLAS its threads."""
    rng, done, others = np.random.default_rng(0), threading.Event(), []
    x, weights = rng.standard_normal((3, 8, 512), np.float32), rng.standard_normal((2, 2048, 512), np.float32) / 20
    wide, kernels = np.ones((2, 32, 56, 56), np.float32), rng.standard_normal((32, 32, 3, 3), np.float32)
    before, alone, expected = BLAS.threads, cupyconv.lstm(x, *weights)[0], cupyconv.conv(wide, kernels)

    def compute() -> None:
        while not done.is_set():
            others.append(np.array_equal(cupyconv.conv(wide, kernels), expected))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(20):
            np.testing.assert_allclose(cupyconv.lstm(x, *weights)[0], alone, rtol=1e-4, atol=1e-5)
            with cupyconv.options(threads=1):
                np.testing.assert_allclose(cupyconv.conv(wide, kernels), expected, rtol=1e-4, atol=1e-3)
    finally:
        done.set()
        thread.join()
    assert others and all(others) and BLAS.threads == before


def test_explain_is_a_guard_against_shapes_from_strangers():
    """Explaining a call that would need petabytes allocates nothing."""
    x = np.broadcast_to(np.float32(0), (1, 1000, 10**6, 10**6))
    plan = cupyconv.explain(cupyconv.conv, x, np.zeros((1000, 1000, 3, 3), np.float32), padding=1)
    assert plan.flops == 2 * 1000 * 1000 * 9 * 10**12
    assert "(1, 1000, 1000000, 1000000)" in plan.result and plan.workspace_bytes <= 16 << 20


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def forked_while_another_thread_holds(locks: Iterable[Any], child: Callable[[], Any]) -> int:
    """Return the exit status of a child that runs `child` within twenty seconds, while a thread holds the locks."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            taken.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(20)
    with warnings.catch_warnings(action="ignore"):
        process = os.fork()
    if process == 0:
        signal.alarm(20)
        child()
        os._exit(0)
    done.set()
    holder.join()
    return os.waitpid(process, 0)[1]


@needs_fork
def test_a_child_of_a_fork_while_another_thread_keeps_something():
    """The child does not wait for a lock whose holder exists only in the parent."""
    layer = cupyconv.ConvLayer(WEIGHT[..., :3, :3], padding=1).packed()
    forms = caches.forms_of(layer.weight)

    def child() -> None:
        cupyconv.conv(np.ones((1, 1, 9)), np.ones((1, 1, 3)))
        forms.keep("form", lambda: 1)

    assert forked_while_another_thread_holds((caches._lock, forms._lock), child) == 0


def test_memory_is_freed_without_waiting():
    """Without the GIL, a child of a fork frees arrays before its locks are replaced; it once waited there for ever."""
    before, counted = caches.spent(), threading.Event()
    with caches._lock:  # as a thread of the parent may
        freeing = threading.Thread(target=lambda: (caches.release(0), counted.set()))
        freeing.start()
        assert counted.wait(20)
    freeing.join()
    assert caches.reserve(1000) and caches.spent() >= before + 1000
    held = caches.spent()
    caches.release(1000)
    assert caches.spent() == held - 1000


@needs_fork
def test_a_child_of_a_fork_while_another_thread_works_out_a_property():
    """Python 3.11 locks each cached property.  Children do not wait for a parent's thread; one of 200 once hung."""
    properties = [*caches._cached_properties()]
    assert {vars(Windows)["span"], vars(Operand)["pixels"]} <= {*properties}
    locks = [getattr(cached, "lock", contextlib.nullcontext()) for cached in properties]
    call = partial(cupyconv.conv, np.ones((1, 1, 9)), np.ones((1, 1, 3)), stride=2)
    assert forked_while_another_thread_holds(locks, call) == 0


#: A script whose child processes compute what the parent's threads compute at that moment.
FORKS = """
import os, threading, warnings
import numpy as np
import cupyconv

x, w = np.ones((4, 32, 40, 40), np.float32), np.ones((32, 32, 3, 3), np.float32)
expected, done = cupyconv.conv(x, w), threading.Event()

def compute():
    while not done.is_set():
        cupyconv.conv(x, w)

threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
warnings.simplefilter("ignore")
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(cupyconv.conv(x, w), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
done.set()
"""


@needs_fork
@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="without the GIL a child waits for a dict that a thread had",
)
def test_a_child_of_a_fork_while_other_threads_compute():
    """With one thread BLAS has no locks; with several, OpenBLAS's own fork handler hangs, even for `a @ a`."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=100, env=environment)
