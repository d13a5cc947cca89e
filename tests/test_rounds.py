"""Chunks of GPU work as one step with a count: the steps that it stands for, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from rounds import each_step

import cupyconv
from cupyconv import ConvLayer
from cupyconv.cuda.plan import draft
from cupyconv.problem.plan import Address, GemmCall, Matrix, Rounds, going_on


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.broadcast_to(dtype(1), shape).copy()


def a_chain(x: Any, *weights: Any, **settings: Any) -> Any:
    return cupyconv.conv_chain, (x, [ConvLayer(weight, padding=1) for weight in weights]), settings


def _case(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return function, arguments, settings


#: The call, and workspace limits that split it in many ways.
CASES = {
    "pixels": (_case(cupyconv.conv, ones(3, 2, 70, 61), ones(3, 2, 3, 3), method="gemm"), (120_000, 160_000)),
    "samples": (_case(cupyconv.conv, ones(23, 2, 12, 9), ones(3, 2, 3, 3), padding=1, method="gemm"), (9_000, 40_000)),
    "an epilogue": (
        _case(cupyconv.conv, ones(23, 2, 12, 9), ones(3, 2, 3, 3), ones(3), activation="relu", method="gemm"),
        (9_000, 40_000),
    ),
    "channels-last": (
        _case(cupyconv.conv, ones(3, 70, 61, 2).transpose(0, 3, 1, 2), ones(4, 2, 3, 3), method="gemm"),
        (120_000,),
    ),
    "unaligned": (_case(cupyconv.conv, ones(23, 3, 5, 5), ones(3, 3, 3, 3), padding=1, method="gemm"), (4_000,)),
    "16 bits": (
        _case(cupyconv.conv, ones(23, 2, 12, 9, dtype=np.float16), ones(3, 2, 3, 3, dtype=np.float16), method="gemm"),
        (9_000,),
    ),
    "a complex weight": (
        _case(cupyconv.conv, ones(23, 2, 12, 9), ones(3, 2, 3, 3, dtype=np.complex64), method="gemm"),
        (12_000,),
    ),
    "groups": (_case(cupyconv.conv, ones(4, 24, 6, 6), ones(24, 2, 3, 3), groups=12, method="gemm"), (None, 30_000)),
    "weight gradient": (
        _case(cupyconv.conv_grad_weight, ones(23, 3, 10, 7), ones(23, 2, 12, 9), (3, 3), method="gemm"),
        (9_000, 30_000),
    ),
    "weight gradient, pixels": (
        _case(cupyconv.conv_grad_weight, ones(3, 3, 70, 61), ones(3, 2, 72, 63), (3, 3), method="gemm"),
        (30_000,),
    ),
    "weight gradient, groups": (
        _case(cupyconv.conv_grad_weight, ones(64, 8, 32, 32), ones(64, 8, 34, 34), (3, 3), groups=4, method="gemm"),
        (None,),
    ),
    "input gradient": (
        _case(cupyconv.conv_grad_input, ones(23, 3, 10, 7), ones(3, 2, 3, 3), (23, 2, 12, 9), method="gemm"),
        (9_000, 3_000),
    ),
    "transposed, groups": (
        _case(cupyconv.conv_transpose, ones(13, 24, 4, 4), ones(24, 2, 3, 3), groups=12, method="gemm"),
        (30_000, 3_000),
    ),
    "transposed, complex": (
        _case(
            cupyconv.conv_transpose,
            ones(13, 4, 5, 4, dtype=np.complex64),
            ones(4, 9, 3, 3, dtype=np.complex64),
            method="gemm",
        ),
        (3_000,),
    ),
    "chain": (a_chain(ones(23, 2, 12, 9), ones(4, 2, 3, 3), ones(3, 4, 3, 3), fuse=False), (10_000,)),
    "rnn": (_case(cupyconv.rnn, ones(40, 4, 8), ones(8, 8), ones(8, 8), method="step"), (6_000,)),
    "lstm": (
        _case(cupyconv.lstm, ones(40, 4, 8), *[ones(2, 32, 8)] * 2, direction="bidirectional", method="step"),
        (8_000,),
    ),
}

EVERY = [(name, limit) for name, (_, limits) in CASES.items() for limit in limits]


@pytest.mark.parametrize("name, limit", EVERY)
def test_rounds_are_the_steps_that_they_stand_for(name, limit, monkeypatch):
    (function, arguments, settings), _ = CASES[name]
    with cupyconv.options(workspace_limit=limit):
        monkeypatch.setattr(draft, "LISTED", 10**9)
        listed = cupyconv.explain(function, *arguments, on="sm_90", **settings)
        assert not any(isinstance(step, Rounds) for step in listed.steps)
        monkeypatch.setattr(draft, "LISTED", 2)
        plan = cupyconv.explain(function, *arguments, on="sm_90", **settings)
    assert len(listed.steps) > len(plan.steps) and any(isinstance(step, Rounds) for step in plan.steps)
    assert tuple(each_step(plan.steps)) == listed.steps
    assert plan.workspace_bytes == listed.workspace_bytes and plan.bytes_moved == listed.bytes_moved
    assert sum(step.flops for step in plan.steps) == sum(step.flops for step in listed.steps)


@pytest.mark.parametrize("name, limit", EVERY)
def test_rounds_compute_what_their_steps_would(name, limit, cuda_target, monkeypatch):
    (function, arguments, settings), _ = CASES[name]
    rng = np.random.default_rng(0)

    def moved(value: Any) -> Any:
        if isinstance(value, ConvLayer):
            return ConvLayer(moved(value.weight), padding=1)
        if isinstance(value, list):
            return list(map(moved, value))
        if not isinstance(value, np.ndarray):
            return value
        numbers = np.empty_like(value)
        numbers[...] = rng.integers(-1, 2, value.shape)
        return cuda_target.to_device(numbers)

    moved_arguments = list(map(moved, arguments))
    results = []
    with cupyconv.options(workspace_limit=limit):
        for listed in (10**9, 2):
            monkeypatch.setattr(draft, "LISTED", listed)
            cupyconv.clear_caches()
            for _ in range(2):  # the second call uses what the first prepared
                results.append(function(*moved_arguments, **settings))
    cupyconv.clear_caches()
    first, *others = [result[0] if isinstance(result, tuple) else result for result in results]
    expected = cuda_target.to_host(first)
    for other in others:
        np.testing.assert_array_equal(cuda_target.to_host(other), expected)
    if function is cupyconv.conv:
        on_numpy = function(*map(cuda_target.to_host, moved_arguments), **settings)
        np.testing.assert_array_equal(expected, on_numpy)


def test_what_goes_on():
    first = GemmCall(1, 2, 3, *(Matrix(Address(name, 16), 3, 0) for name in "abc"), 4, "float32", "float32", "float32")
    second = GemmCall(1, 2, 3, *(Matrix(Address(name, 48), 3, 0) for name in "abc"), 4, "float32", "float32", "float32")
    assert going_on(first, second, 3).b.at == Address("b", 16 + 3 * 32)
    unlike = partial(going_on, first)
    assert unlike(GemmCall(1, 2, 4, first.a, first.b, first.c, 4, "float32", "float32", "float32"), 3) is None
    assert unlike(GemmCall(1, 2, 3, first.b, first.b, first.c, 4, "float32", "float32", "float32"), 3) is None
    assert going_on((first, first), (first,), 1) is None


def test_chunks_that_are_not_alike_are_listed_up_to_a_number():
    def steps_of(number: int) -> tuple[Any, ...]:
        call = GemmCall(1, 2, 3, *(Matrix(Address(name), 3, 0) for name in "abc"), 4, "float32", "float32", "float32")
        return (call,) * (1 + number % 2)

    assert len(draft.in_rounds(20, steps_of)) == 30
    with pytest.raises(ValueError, match="chunks that all differ"):
        draft.in_rounds(10**9, steps_of)


def test_chunks_without_steps_are_none():
    assert draft.in_rounds(20, lambda chunk: []) == []
