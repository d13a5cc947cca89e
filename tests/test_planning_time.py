"""Planning takes at most 50 ms, whatever the sizes: no loop in it is as long as an image, a limit or a kernel."""

from __future__ import annotations

import contextlib
import gc
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lru_caches import clear_lru_caches
from numpy.lib.stride_tricks import as_strided

import cupyconv
from cupyconv import ConvLayer
from cupyconv.call import operation
from cupyconv.call.dispatch import planner
from cupyconv.call.explain import checked_call
from cupyconv.numpy import chain_tiles
from cupyconv.numpy.chain_tiles import tiles, tiles_to_plan
from cupyconv.problem.problems import NotApplicable

#: Whether Python is 3.13 without the GIL.  There, `functools.cached_property` takes 8 us to find that an object does not
#: have a value yet, 20 times as long as in 3.14: ``dict.get`` of a key that is missing among an object's attributes.
IS_SLOW = sys.version_info[:2] == (3, 13) and bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
#: Processor seconds that a plan may take, and those of an ordinary plan.  Slower machines get proportionally more.
MOST, ORDINARY = 0.1 if IS_SLOW else 0.05, 0.002


def huge(*shape: int) -> np.ndarray:
    """Return a C-ordered array of which only the first element is in memory; planning reads none."""
    strides, step = [], 4
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return as_strided(np.zeros(1, np.float32), shape, strides[::-1])


def layers(*shapes: tuple[int, ...], **settings: Any) -> list[ConvLayer]:
    return [ConvLayer(huge(*shape), **settings) for shape in shapes]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "long": (cupyconv.conv, (huge(1, 4, 2**40), huge(4, 4, 3)), {"padding": 1}),
    "long and prime": (cupyconv.conv, (huge(1, 4, 2**31 - 1), huge(4, 4, 3)), {}),
    "wide": (cupyconv.conv, (huge(1, 64, 2**20, 2**20), huge(64, 64, 3, 3)), {"padding": 1}),
    "many samples": (cupyconv.conv, (huge(2**40, 3, 8, 8), huge(4, 3, 3, 3)), {"padding": 1}),
    "many taps": (cupyconv.conv, (huge(1, 1, 2**30), huge(1, 1, 10**9)), {"padding": 9, "padding_mode": "reflect"}),
    "many taps and zeros": (cupyconv.conv, (huge(1, 1, 2**30), huge(1, 1, 10**9)), {"padding": 9}),
    "many taps of groups": (
        cupyconv.conv_grad_weight,
        (huge(1, 4, 2**30 - 10**9 + 1), huge(1, 4, 2**30), 10**9),
        {"groups": 2},
    ),
    "many groups": (cupyconv.conv, (huge(1, 10**6, 64, 64), huge(10**6, 1, 3, 3)), {"groups": 10**6}),
    "many channels": (cupyconv.conv, (huge(1, 10**9, 8, 8), huge(8, 10**9, 3, 3)), {}),
    "far taps": (cupyconv.conv, (huge(1, 4, 2**31), huge(4, 4, 2)), {"dilation": 2**30}),
    "much padding": (cupyconv.conv, (huge(1, 4, 100), huge(4, 4, 3)), {"padding": 2**30, "padding_mode": "wrap"}),
    "merge": (cupyconv.linmerge, ([huge(4, 4, 2**40)] * 5, huge(4, 20)), {}),
    "input gradient": (
        cupyconv.conv_grad_input,
        (huge(1, 4, 2**20), huge(4, 4, 10**6), (1, 4, 2**20 * 10**6)),
        {"stride": 10**6},
    ),
    "weight gradient": (cupyconv.conv_grad_weight, (huge(1, 1, 2001, 2001), huge(1, 1, 3000, 3000), (1000, 1000)), {}),
    "weight gradient, many samples": (
        cupyconv.conv_grad_weight,
        (huge(2**40, 8, 6, 6), huge(2**40, 8, 8, 8), (3, 3)),
        {},
    ),
    "transposed, many phases": (
        cupyconv.conv_transpose,
        (huge(1, 4, 2**20, 2**19), huge(4, 4, 3, 3)),
        {"stride": 1000},
    ),
    "transposed, many samples": (cupyconv.conv_transpose, (huge(2**33, 64, 2, 2), huge(64, 64, 3, 3)), {}),
    "transposed, many groups": (
        cupyconv.conv_transpose,
        (huge(5, 10**6, 60, 60), huge(10**6, 4, 7, 7)),
        {"groups": 10**5},
    ),
    "transposed, strided, far taps": (
        cupyconv.conv_transpose,
        (huge(4, 12, 115, 116, 12), huge(12, 61, 8, 8, 16)),
        {"stride": (4, 2, 2)},
    ),
    "transposed, strided, depthwise": (
        cupyconv.conv_transpose,
        (huge(1, 2432, 420702), huge(2432, 1, 16)),
        {"stride": 16, "groups": 2432},
    ),
    "transposed, many groups, strided": (
        cupyconv.conv_transpose,
        (huge(10**6, 1000, 1, 373), huge(1000, 3, 5, 257)),
        {"groups": 1000, "stride": (9, 2)},
    ),
    "transposed, many groups, transforms": (
        cupyconv.conv_transpose,
        (huge(35, 128, 1774, 37), huge(128, 12, 16, 8)),
        {"groups": 64, "stride": (2, 8)},
    ),
    "transposed, a long row of taps": (cupyconv.conv_transpose, (huge(1, 4, 10, 10**6 + 5), huge(4, 64, 7, 10**6)), {}),
    "groups, a long row of taps": (
        cupyconv.conv,
        (huge(1, 1000, 18, 10**6 + 3), huge(1000, 1, 2, 10**6)),
        {"groups": 1000, "stride": (3, 1000)},
    ),
    "weight gradient, a long row": (cupyconv.conv_grad_weight, (huge(1, 1, 10**9 - 2), huge(1, 1, 10**9), 3), {}),
    "weight gradient, many taps": (
        cupyconv.conv_grad_weight,
        (huge(10**6, 1000, 6), huge(10**6, 4, 2 * 10**6 + 2), 10**6),
        {"padding": 1, "dilation": 2},
    ),
    "im2col": (cupyconv.im2col, (huge(1, 4, 3000, 3000), (1000, 1000)), {}),
    "col2im": (cupyconv.col2im, (huge(1, 10**6, 2001**2), (3000, 3000), (1000, 1000)), {}),
    "max_pool": (cupyconv.max_pool, (huge(1, 64, 10**5, 10**5), 10**5), {}),
    "rnn": (cupyconv.rnn, (huge(2**40, 4, 8), huge(16, 8), huge(16, 16)), {}),
    "lstm": (cupyconv.lstm, (huge(100, 2**30, 8), huge(64, 8), huge(64, 16)), {}),
    "gru": (cupyconv.gru, (huge(100, 7, 2**20), huge(3 * 2**20, 2**20), huge(3 * 2**20, 2**20)), {}),
    "chain": (cupyconv.conv_chain, (huge(1, 64, 2800, 2800), layers(*[(64, 64, 3, 3)] * 2, padding=1)), {}),
    "chain, long": (cupyconv.conv_chain, (huge(1, 8, 2**40), layers(*[(8, 8, 9)] * 3, padding=4)), {}),
    "chain, many samples": (cupyconv.conv_chain, (huge(2**40, 8, 16, 16), layers(*[(8, 8, 3, 3)] * 3, padding=1)), {}),
    "chain, wide": (
        cupyconv.conv_chain,
        (
            huge(672, 110, 67157),
            [
                ConvLayer(huge(110, 1, 31), padding=30, dilation=2, stride=2, groups=110),
                ConvLayer(huge(110, 1, 1804), padding=3608, dilation=4, groups=110),
            ],
        ),
        {},
    ),
    "chain, far taps": (
        cupyconv.conv_chain,
        (huge(1, 8, 10**6, 64), layers(*[(8, 8, 3, 3)] * 3, padding=(10**4, 1), dilation=(10**4, 1))),
        {},
    ),
}

#: These calls, and a chain whose bands all touch an end of the image.
ON_NUMPY = CALLS | {
    "chain, short bands": (
        cupyconv.conv_chain,
        (
            huge(15, 29, 715, 17, 26),
            [
                ConvLayer(huge(13, 29, 3, 1, 9), padding=(911, 0, 4), dilation=(911, 2, 1)),
                ConvLayer(huge(18, 13, 9, 9, 3), padding=(4, 8, 1), dilation=(1, 2, 1)),
            ],
        ),
        {},
    )
}


def seconds_to_plan(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], on: str | None = None, **settings: Any
) -> float:
    """Return a first call's processor time, the best of three; for a refusal, the time until planning refuses."""
    function, arguments, named = call
    times = []
    gc.collect()
    gc.disable()  # a collection takes as long as all objects of the test run need
    try:
        with cupyconv.options(**settings):
            for _ in range(3):
                clear_lru_caches()
                start = time.process_time()
                try:
                    planned(function, *arguments, on=on, **named)
                except ValueError as refusal:
                    assert on or "workspace" in str(refusal) or "take" in str(refusal), refusal
                times.append(time.process_time() - start)
                if times[-1] < MOST / 2:
                    break
    finally:
        gc.enable()
    return min(times)


def planned(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Make one plan, or raise its refusal."""
    call = checked_call(function, *arguments, **named)
    planner(call.arguments.backend, call.problem.machine)(call.problem)


@pytest.mark.parametrize("on", [None, "sm_90"])
@pytest.mark.parametrize("limit", [0, 1000])
@pytest.mark.parametrize("name", CALLS)
def test_planning_is_asked_a_few_times_for_a_limit_that_is_enough(name, limit, on, monkeypatch):
    function, arguments, named = CALLS[name]
    asked = []

    def counted(*of):
        plan = planner(*of)
        return lambda problem: asked.append(problem.limit) or plan(problem)

    monkeypatch.setattr(operation, "planner", counted)
    with cupyconv.options(workspace_limit=limit), contextlib.suppress(ValueError):
        cupyconv.explain(function, *arguments, on=on, **named)
    assert 1 <= len(asked) <= 11, asked


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
@pytest.mark.parametrize("name", ON_NUMPY)
def test_explain_does_not_grow_with_the_numbers(name, limit):
    """If a call is refused, `explain` plans again and again for the limit that is enough."""
    function, arguments, named = ON_NUMPY[name]
    gc.collect()
    gc.disable()
    try:
        clear_lru_caches()
        start = time.process_time()
        with cupyconv.options(workspace_limit=limit), contextlib.suppress(ValueError):
            cupyconv.explain(function, *arguments, **named)
        taken = time.process_time() - start
    finally:
        gc.enable()
    assert taken < 6 * MOST * slowness()


def slowness(on: str | None = None) -> float:
    """Return how slow this machine is at this moment, from the time of an ordinary plan."""
    ordinary = cupyconv.conv_chain, (huge(1, 8, 64, 64), layers((8, 8, 3, 3), (8, 8, 3, 3))), {"fuse": False}
    return max(1.0, seconds_to_plan(ordinary, on) / ORDINARY)


@pytest.mark.parametrize("threads", [1, 10**4])
@pytest.mark.parametrize("limit", [None, 1000, 10_000, 100_000, 10**12])
@pytest.mark.parametrize("name", ON_NUMPY)
def test_planning_does_not_grow_with_the_numbers(name, limit, threads):
    taken = seconds_to_plan(
        ON_NUMPY[name], workspace_limit=limit, threads=threads
    )  # not in the assertion, whose calls pytest shows
    assert taken < MOST * slowness()


@pytest.mark.parametrize("limit", [None, 100_000, 10**12])
@pytest.mark.parametrize("name", CALLS)
def test_planning_for_a_gpu_does_not_grow_with_the_numbers(name, limit):
    """Planning once listed every chunk's launches, which took 38 s and gigabytes."""
    taken = seconds_to_plan(CALLS[name], "sm_90", workspace_limit=limit)
    assert taken < MOST * slowness()


@given(
    st.lists(st.tuples(*(st.integers(1, 4),) * 2, st.integers(0, 9), st.integers(1, 3)), min_size=2, max_size=3),
    st.integers(1, 80),
    st.integers(1, 5),
    st.tuples(st.integers(0, 60), st.integers(1, 60)),
)
def test_the_tiles_that_are_planned_have_what_all_tiles_have(each, size, step, band):
    """Planned tiles have all geometries, the most rows in memory, and the cached rows of all tiles."""
    x = np.ones((1, 1, size), np.float32)
    chain = [
        ConvLayer(np.ones((1, 1, kernel), np.float32), stride=stride, padding=padding, dilation=dilation)
        for kernel, stride, padding, dilation in each
    ]
    try:
        geometries = [layer.geometry for layer in checked_call(cupyconv.conv_chain, x, chain).problem.layers]
    except ValueError:
        assume(False)
    rows = range(geometries[-1].out_size[2])[band[0] : band[0] + band[1]]
    assume(rows)
    before = chain_tiles._PLANNED_TILES
    chain_tiles._PLANNED_TILES = 3
    try:
        planned = list(tiles_to_plan(geometries, 2, 1, rows, step))
    except NotApplicable:
        return
    finally:
        chain_tiles._PLANNED_TILES = before
    every = list(tiles(geometries, 2, 1, rows, step))
    for tile in planned:
        assert tile in every
    for i in range(len(geometries)):
        assert {tile[i].geometry for tile in planned} >= {tile[i].geometry for tile in every if tile[i].outputs}
        assert max(len(tile[i].reads) for tile in planned) == max(len(tile[i].reads) for tile in every)
    assert chain_tiles.kept_rows(planned) == chain_tiles.kept_rows(every)
