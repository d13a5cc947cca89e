"""The cost model of NumPy's loops: estimated times are sums of constants times amounts of work, none of them negative.

The constants are measurements, which no test repeats.  But an estimate must not divide by a product's time or subtract
a pass, and with more samples, channels or outputs there is no less work of any kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from random import Random
from typing import Any

import pytest
import test_conv_chain as chains
from hypothesis import given
from hypothesis import strategies as st
from lru_caches import clear_lru_caches
from plans import array
from strategies import share_of_examples
from test_every_numpy_plan import (
    ANY,
    LARGE,
    Call,
    by_implementation,
    implementations_for,
    large,
    loops_of,
    planned,
    problem_of,
    seconds,
)

import cupyconv.numpy
from cupyconv.call.explain import checked_call
from cupyconv.numpy import cost
from cupyconv.numpy.block_loops import BlockLoop
from cupyconv.numpy.chain import LayersLoop, _unfused
from cupyconv.numpy.chain_fused import plan_fused
from cupyconv.problem.problems import HostModel

#: Constants of modules below this are seconds; larger ones are ratios and sizes.
SECONDS = 0.01


def scaled(value: Any, by: float) -> Any:
    """Return the value with all seconds in it multiplied by a factor."""
    if type(value) is float:
        return value * by if 0 < value < SECONDS else value
    if type(value) is tuple:
        return tuple(scaled(each, by) for each in value)
    return {key: scaled(each, by) for key, each in value.items()} if type(value) is dict else value


#: Names of all constants of `cost` that are seconds.
PRICES = [
    name
    for name, value in vars(cost).items()
    if name.isupper() and name[0] != "_" and type(value) in (float, tuple, dict) and scaled(value, 2.0) != value
]


@pytest.fixture
def prices(monkeypatch):
    """Return a function that multiplies all constants, or one constant of `cost` alone, by a factor."""
    modules = [import_module(each.name) for each in iter_modules(cupyconv.numpy.__path__, "cupyconv.numpy.")]
    known = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if (name in PRICES or module is not cost) and name.isupper()
        if name[0] != "_" and type(value) in (float, tuple, dict) and scaled(value, 2.0) != value
    ]

    def put(by: float, alone: str = "") -> None:
        for module, name, value in known:
            if not alone or (module, name) == (cost, alone):
                monkeypatch.setattr(module, name, scaled(value, by))
        clear_lru_caches()

    yield put
    monkeypatch.undo()
    put(1.0)


@pytest.mark.parametrize("name", ANY)
@share_of_examples(1)
@given(seed=st.integers(0, 10**9))
def test_where_everything_takes_twice_as_long_a_plan_does_and_is_the_same(name, prices, seed):
    """The plan stays the same, also with several loops or threads, because only seconds are added to seconds."""
    problem, _ = problem_of(name, Random(seed))
    plan = planned(problem)
    alone = plan and seconds(plan)
    prices(2.0)
    twice = planned(problem)
    together = twice and seconds(twice)
    prices(1.0)
    assert (plan and plan.steps) == (twice and twice.steps)
    assert plan is None or together == 2 * alone


def both_implementations(of: str, threads: int) -> tuple[list[Any], list[float]]:
    """Return the loops that run a chain by tiles and layer by layer, and the seconds of both."""
    x, layers = chains.LARGE[of]
    problem: Any = checked_call(cupyconv.conv_chain, x, layers, fuse=True).problem
    machine = HostModel(threads, most=threads)
    problem = replace(problem, machine=machine, layers=tuple(replace(each, machine=machine) for each in problem.layers))
    fused, (plan, seconds, _) = plan_fused(problem), _unfused(problem)
    (step,) = plan.steps
    assert isinstance(step, LayersLoop)
    return [fused.loop, *(each.steps for plans in step.plans for each in plans)], [fused.seconds, seconds]


@pytest.mark.parametrize("of", chains.LARGE)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_is_cut_alike_and_takes_twice_as_long(of, threads, prices):
    loops, alone = both_implementations(of, threads)
    prices(2.0)
    assert both_implementations(of, threads) == (loops, [2 * each for each in alone])


@pytest.mark.parametrize("of", ["wide between", "strides"])
def test_no_price_makes_a_chain_take_less(of, prices):
    _, (tiles, apart) = both_implementations(of, 2)
    for price in PRICES:
        prices(1.01, price)
        _, dearer = both_implementations(of, 2)
        prices(1.0, price)
        assert dearer[0] >= tiles and dearer[1] >= apart


#: Calls of `LARGE` whose work grows along each axis; the factor of growth; how much less or more of any kind of work
#: there may be then, because blocks are cut differently, and products cover more or fewer taps.
GROWING = "plain", "strides", "a border", "groups", "depthwise", "many samples", "one tap", "complex"
TIMES, LEAST, MOST = 4, 0.1, 16.0
#: Work that a larger problem may not need: copies of a factor that is then read in place, a product with a vector, or
#: multiply-adds of a whole product, if its parts are priced by their steps.
#: `PRODUCT` counts products, whose number depends only on how they are cut.
SPARED = "COPY", "RUN", "ADD", "PACK", "BY_VECTOR", "MULTIPLY_ADD"


def larger(of: str, axis: str) -> Call:
    """Return the call with more samples, channels, outputs or rows; a depthwise call gets more groups."""
    (samples, channels, *size), (outputs, own, *kernel), settings = LARGE[of]
    groups, more = settings.get("groups", 1), dict(settings)
    if axis == "rows":
        size[0] *= TIMES
    elif axis == "samples":
        samples *= TIMES
    elif axis == "outputs":
        outputs *= TIMES
    elif own == 1:
        channels, outputs, more["groups"] = TIMES * channels, TIMES * outputs, TIMES * groups
    elif axis == "channels":
        channels, own = TIMES * channels, TIMES * own
    return (samples, channels, *size), (outputs, own, *kernel), more


def loops_by_implementation(name: str, call: Call) -> dict[str, list[BlockLoop]]:
    """Return the loops of each implementation on one thread, for arrays that are never read."""
    problem: Any = large(name, call, array).problem
    problem = replace(problem, machine=HostModel(1), workspace_limit=64 << 20)
    plans = {
        implementation.__name__: by_implementation(problem, implementation)
        for implementation in implementations_for(name, problem)
    }
    return {implementation: [*loops_of(plan)] for implementation, plan in plans.items() if plan}


def work(loops: Iterable[BlockLoop]) -> float:
    return sum(loop.work for loop in loops)


@pytest.mark.parametrize("of", GROWING)
@pytest.mark.parametrize("name", ANY)
def test_of_more_work_there_is_more_of_everything(name, of, prices):
    """Doubling a constant shows how much of its work there is: never less than 0, nor much less in larger calls."""
    calls = {axis: larger(of, axis) for axis in ("nothing", "samples", "channels", "outputs", "rows")}
    by_implementation = {axis: loops_by_implementation(name, call) for axis, call in calls.items()}
    amounts: dict[tuple[str, str], dict[str, float]] = {}
    before = {
        (axis, implementation): work(loops)
        for axis, implementations in by_implementation.items()
        for implementation, loops in implementations.items()
    }
    for price in PRICES:
        prices(2.0, price)
        for (axis, implementation), alone in before.items():
            amount = work(by_implementation[axis][implementation]) - alone
            assert amount > -1e-9 * alone, (implementation, axis, price)
            amounts.setdefault((implementation, price), {})[axis] = max(0.0, amount)
        prices(1.0, price)
    for (implementation, price), amount in amounts.items():
        if (one := amount["nothing"]) and price != "PRODUCT":
            for axis, several in amount.items():
                assert LEAST * one <= several <= MOST * one or (price in SPARED and not several), (
                    implementation,
                    price,
                    axis,
                )
