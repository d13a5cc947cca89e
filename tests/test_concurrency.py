"""Calls from many threads return the same bits, and leave nothing behind in the process."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv.cuda.run.parameters import PackedParameters

THREADS = 8


def problems(target: Any) -> list[Callable[[], Any]]:
    """Return calls of every kind, with data whose sums depend on the order of additions."""
    rng = np.random.default_rng(0)

    def array(*shape: int, dtype: str = "float32") -> Any:
        return target.to_device((rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype))

    x, weight = array(3, 6, 14, 13), array(8, 6, 3, 3)
    merged, merge_weight = [array(2, c, 50) for c in (3, 1, 4)], array(5, 8)
    depthwise, wide = array(6, 1, 3, 3), array(8, 6, 3, 3, dtype="float64")
    columns = array(2, 27, 64)
    return [
        lambda: cupyconv.conv(x, weight, padding="same", activation="silu"),
        lambda: cupyconv.conv(x, weight, method="direct", stride=2),
        lambda: cupyconv.conv(x, weight, method="gemm", padding=2, padding_mode="reflect"),
        lambda: cupyconv.conv(x, depthwise, groups=6, activation="gelu"),
        lambda: cupyconv.conv(x, wide),
        lambda: cupyconv.linmerge(merged, merge_weight, activation="tanh"),
        lambda: cupyconv.im2col(x, (3, 3)),
        lambda: cupyconv.col2im(columns, (10, 10), 3),
    ]


def at_once(functions: list[Callable[[], Any]]) -> list[Any]:
    """Call each function in its own thread, all at the same time, and return the results."""
    barrier = threading.Barrier(len(functions))

    def call(function: Callable[[], Any]) -> Any:
        barrier.wait(30)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions))


def bits(target: Any, array: Any) -> bytes:
    return np.ascontiguousarray(target.to_host(array)).tobytes()


@pytest.mark.parametrize("number", range(8))
def test_the_same_bits_every_time(target, number):
    """Results do not depend on the order of threads and blocks, which the host device changes at every launch."""
    problem = problems(target)[number]
    assert len({bits(target, problem()) for _ in range(4)}) == 1


def test_the_same_bits_from_many_threads(target):
    functions = problems(target)
    alone = [bits(target, function()) for function in functions]
    for _ in range(3):
        together = at_once(functions * 2)
        assert [bits(target, y) for y in together] == alone * 2


def test_the_same_bits_from_blocks_on_threads():
    """Results do not depend on the order of blocks if several callers use several threads each."""
    x, weight = (np.random.default_rng(0).standard_normal(s) for s in ((8, 8, 48, 48), (8, 8, 3, 3)))

    def call() -> np.ndarray:
        with cupyconv.options(threads=4, workspace_limit=1 << 20):
            plan = cupyconv.explain(cupyconv.conv, x, weight)
            assert plan.steps[0].threads == 4 and plan.steps[0].blocks > 4
            return cupyconv.conv(x, weight, activation="tanh")

    results = [call(), *at_once([call] * THREADS)]
    assert len({y.tobytes() for y in results}) == 1


@pytest.mark.parametrize("method, size", [("gemm", 40), ("direct", 40), ("gemm", 24)])
def test_the_same_gradients_from_blocks_on_threads(method, size):
    """Weight gradients are right if threads help other callers: partial sums stay with one caller until added."""
    images = np.random.default_rng(0).standard_normal((THREADS, 2, 4, 8, size, size))

    def call_with(number: int) -> Callable[[], bytes]:
        def call() -> bytes:
            with cupyconv.options(threads=4, workspace_limit=1 << 21):
                grad, x = images[number]
                return b"".join(
                    cupyconv.conv_grad_weight(grad, x, 5, stride=1, padding=2, method=method).tobytes()
                    for _ in range(10)
                )

        return call

    calls = [call_with(number) for number in range(THREADS)]
    assert at_once(calls) == [call() for call in calls]


def test_parameters_of_two_calls_of_one_plan_are_apart():
    """Two calls of a plan have separate parameters: one may be in flight while the other fills in its addresses."""
    plan = cupyconv.explain(cupyconv.linmerge, np.ones((1, 2, 64)), np.ones((3, 2)), on="sm_90")
    names = ("xs", "weight", "out")
    packed = PackedParameters(plan.steps[0], {name: i for i, name in enumerate(names)}, lambda params: params)
    first = packed.bind([1 << 40] * 3)
    before = first.params.tobytes()
    second = packed.bind([2 << 40] * 3)
    assert second.params.tobytes() != before == first.params.tobytes()
    packed.give_back(first)
    assert packed.bind([1 << 40] * 3) is first and first.params.tobytes() == before


def test_settings_of_one_thread_are_not_anothers():
    x, weight = np.ones((2, 4, 40, 40)), np.ones((4, 4, 3, 3))

    def with_limit(limit: int) -> Callable[[], bool]:
        def call() -> bool:
            for _ in range(50):
                with cupyconv.options(workspace_limit=limit):
                    if cupyconv.explain(cupyconv.conv, x, weight).workspace_bytes > limit:
                        return False
            return True

        return call

    assert all(at_once([with_limit(limit) for limit in (50_000, 100_000, 200_000, 400_000)]))


# --- state after calls ----------------------------------------------------------------------------------------


def test_arrays_are_not_kept_alive(cuda_target):
    """No cache holds a reference to an argument, a result or workspace."""
    device = cuda_target.device
    before = device.allocated_bytes
    x, weight = cuda_target.to_device(np.ones((2, 4, 30, 30))), cuda_target.to_device(np.ones((4, 4, 3, 3)))
    for method in ("direct", "gemm"):
        cupyconv.conv(x, weight, method=method)
    assert device.allocated_bytes == before + x.nbytes + weight.nbytes
    del x, weight
    assert device.allocated_bytes == before


def test_nothing_of_the_process_is_changed(target):
    environment, errors, filters = dict(os.environ), np.geterr(), list(warnings.filters)
    threads = threading.enumerate()
    for problem in problems(target):
        problem()
    with cupyconv.options(threads=3):
        cupyconv.conv(*(target.to_device(np.ones(s)) for s in ((8, 8, 32, 32), (8, 8, 3, 3))))
    with pytest.raises(ValueError):
        cupyconv.conv(*(target.to_device(np.ones(s)) for s in ((1, 1, 2), (1, 1, 3))))
    assert dict(os.environ) == environment and np.geterr() == errors and warnings.filters == filters
    assert {thread.name for thread in threading.enumerate() if thread not in threads} <= {"cupyconv"}


@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floating_point_warnings_are_silenced(dtype, threads):
    """Overflow, infinity minus infinity and overflowing casts do not warn, even if the caller wants errors raised."""
    huge = np.finfo(dtype).max
    x = np.full((4, 2, 64, 64), huge, dtype)
    x[0, 0, :4] = np.inf
    weight = np.ones((2, 2, 3, 3), dtype)
    weight[1, 1] = -1
    arguments = dict(bias=np.full(2, 1e300), residual=np.full((4, 2, 64, 64), 1e300), padding=1)
    with warnings.catch_warnings(), np.errstate(all="raise"), cupyconv.options(threads=threads):
        warnings.simplefilter("error")
        for activation in (None, "silu", "mish", "gelu", "gelu_tanh", "softplus", "elu"):
            for method in ("direct", "gemm"):
                y = cupyconv.conv(x, weight, **arguments, activation=activation, method=method)
        assert not np.isfinite(y).all()
        cupyconv.col2im(np.full((1, 9, 16), huge, dtype), (6, 6), 3)


# --- calls within a call --------------------------------------------------------------------------------------

WITHIN = {
    "conv": lambda x, weight: cupyconv.conv(x, weight, padding=1),
    "depthwise": lambda x, weight: cupyconv.conv(x, weight[:, :1], groups=16, padding=1),
    "transposed": lambda x, weight: cupyconv.conv_transpose(x, weight, stride=2),
    "weight gradient": lambda x, weight: cupyconv.conv_grad_weight(x[:, :3], x, (3, 3), padding=1),
    "pooling": lambda x, weight: cupyconv.max_pool(x, 3),
}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("threads", [1, None])
@pytest.mark.parametrize("name", WITHIN)
def test_a_signals_handler_may_call_in_the_midst_of_a_call(name, threads):
    """A handler's call works; it once waited forever for the interrupted call's lock, or overwrote its columns."""
    compute, generator = WITHIN[name], np.random.default_rng(0)
    x, weight = (generator.integers(-3, 4, shape).astype(np.float32) for shape in ((1, 16, 48, 48), (16, 16, 3, 3)))
    with cupyconv.options(threads=threads):
        expected, within = compute(x, weight), compute(x[:, :, ::2], weight)
        outcomes: list[bool] = []
        is_within = False

        def handler(*_: object) -> None:
            nonlocal is_within
            if not is_within:
                is_within = True
                outcomes.append(np.array_equal(compute(x[:, :, ::2], weight), within))
                is_within = False

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
            while len(outcomes) < 100:
                assert np.array_equal(compute(x, weight), expected)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert all(outcomes)
