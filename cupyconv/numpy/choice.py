"""The choice: of all methods, and of the ways to run each, the one that takes least by the model of `cost`.

::

    methods   "winograd"   "fft"   "gemm"                     "direct"       of a convolution; other problems, other tables
    ways      Winograd     Fft     View  MecRows  Columns     TapByTap       each a loop over blocks that fit the limit
                  |         |        |      |        |            |
    seconds       +---------+--------+------+--------+------------+---->     the least of them, as a plan

What cannot take less than the best so far is not fitted to the limit, and its module is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep, seconds_of
from cupyconv.numpy.block_loops import BlockLoop
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import METHODS as PUBLIC_METHODS
from cupyconv.problem.problems import NO_SUCH_METHOD, NotApplicable, ProductsProblem, ProductsProblemT

#: Multiply-adds below which transforms are not taken unasked.
FEW_PRODUCTS = 1_000_000
#: Bytes of the workspace limit below which a thread has no share worth planning for.
LEAST_SHARE = 4 << 10
#: How much longer a loop may take on half of its threads than the best does, where it is cut anew for these.
FEWER_THREADS = 1.25
#: Seconds of a loop that are worth a note.
LONG_LOOP = 0.5

#: Why a method is a GPU's, or a convolution's only.
ELSEWHERE = {
    "implicit_gemm": "it is CUDA's: BLAS reads matrices, so on NumPy columns are written, block by block (method 'gemm')",
    "winograd": "it is for what is gathered as a convolution; this is scattered",
}


class Method(NamedTuple):
    """What ``method=`` may name: ways to run it, of which the one that takes least is taken.

    A module stands for its ``WAYS``, and is imported when it is first asked for them: where a few operations tell why the
    method cannot do a problem, or that it takes so long at the least, it is not.
    """

    ways: str | tuple[type[BlockLoop], ...]
    refusal: Callable[[Any], str] = lambda _: ""
    at_least: Callable[[Any], float] = lambda _: 0.0
    unasked: Callable[[Any], str] = lambda _: ""  # why it is taken only where it is named


def winograd_refusal(problem: ProductsProblem) -> str:
    """Why Winograd's method cannot do a problem."""
    geometry = problem.geometry
    if not problem.allow_winograd:
        return "options(allow_winograd=False) forbids it"
    if not problem.x_dtype == problem.factor_dtype == problem.dtype == "float32":
        return "it is for float32: in other dtypes its rounding errors or its products cost too much"
    if geometry.stride != (1, 1, 1) or geometry.taps == 1 or max(geometry.kernel) > cost.MOST_TAPS:
        return f"it is for stride 1, and kernels of 2 to {cost.MOST_TAPS} taps along some axes and 1 along the others"
    return ""


def fft_unasked(problem: ProductsProblem) -> str:
    """Why transforms are taken only where they are asked for: a short call has no time to win for its larger errors, and few
    outputs read what the transforms would read.
    """
    geometry = problem.geometry
    if geometry.products < FEW_PRODUCTS:
        return f"larger rounding errors: below {FEW_PRODUCTS:,} products it is taken where it is named"
    if geometry.pixels < cost.SHORTEST:
        return f"larger rounding errors: of fewer than {cost.SHORTEST} pixels it is taken where it is named"
    return ""


#: Methods that all kinds of problems have; their modules are the kinds'.
WINOGRAD = Method("cupyconv.numpy.winograd", winograd_refusal, cost.least_winograd)
FFT = Method("cupyconv.numpy.fft", attrgetter("fft_refusal"), cost.least_fft, fft_unasked)


def choose(problem: ProductsProblemT, methods: Mapping[str, Method]) -> Plan:
    """The plan of the method that was named, or of the one that takes least; ValueError where none applies."""
    named = problem.method
    elsewhere = {name: ELSEWHERE.get(name, NO_SUCH_METHOD) for name in PUBLIC_METHODS if name not in methods}
    if named in elsewhere:
        raise ValueError(f"method {named!r} does not apply: {elsewhere[named]}")
    to_try, why_not = [named], {name: f"method={named!r} was asked for" for name in methods if name != named}
    least = dict.fromkeys(methods, 0.0)
    if named == "auto":
        why_not = {
            name: why for name, method in methods.items() if (why := method.refusal(problem) or method.unasked(problem))
        }
        least = {name: method.at_least(problem) for name, method in methods.items() if name not in why_not}
        to_try = sorted(least, key=lambda name: least[name])
    best: Draft | None = None
    for name in to_try:
        if best and least[name] >= best.seconds:
            why_not[name] = f"more than {cost.by_model(least[name])}"
            continue
        try:
            draft = _with_room(problem, name, methods[name].ways, best.seconds if best else inf)
        except NotApplicable as refusal:
            why_not[name] = str(refusal)
            continue
        best, other = (draft, best) if best is None or draft.seconds < best.seconds else (best, draft)
        if other:
            why_not[other.method] = cost.by_model(other.seconds)
    if best is None:
        if named != "auto":
            raise ValueError(f"method {named!r} does not apply: {why_not[named]}")
        raise ValueError(f"no method applies: {'; '.join(f'{name}: {why_not[name]}' for name in methods)}")
    others = {name: why_not[name] for name in methods if name != best.method} | elsewhere
    return best.plan(tuple(others.items()))


class Draft(NamedTuple):
    """A way to run a method: its loops, their workspace, and what they take by the model."""

    problem: ProductsProblem
    method: str
    way: type[BlockLoop]
    loops: Sequence[BlockLoop]
    sizes: Mapping[str, int]
    seconds: float

    def plan(self, rejected: tuple[tuple[str, str], ...]) -> Plan:
        problem, loops = self.problem, tuple(self.loops)
        return problem.planned(
            loops,
            self.sizes,
            method=self.method,
            rejected=rejected,
            reason=self.way.reason(problem.geometry),
            price=cost.by_model(self.seconds),
            bytes_moved=max(problem.minimal_bytes, sum(loop.bytes_moved for loop in loops)),
            notes=problem.notes + long_loop(loops),
        )


def _with_room(problem: ProductsProblemT, method: str, ways: str | tuple[type[BlockLoop], ...], other: float) -> Draft:
    """The way that takes least; for half as many threads, and so on, where the limit has no room for the blocks of all, and
    as long as that may take less; `other` is what another method takes.
    """
    known: tuple[type[BlockLoop], ...] = import_module(ways).WAYS if isinstance(ways, str) else ways
    to_try = sorted((way for way in known if way.applies(problem)), key=attrgetter("turn_calls"))
    refusals: list[tuple[float, str]] = []  # in words: an error has its frame, which would have the error
    best: Draft | None = None
    while True:
        host = problem.host
        fewer = max(1, min(host.threads // 2, problem.limit // LEAST_SHARE))
        on_fewer = {}
        for way in to_try:
            if best is None or way.turn_calls * cost.CALL < best.seconds:
                try:
                    loops, sizes = way.loops(problem)
                except NotApplicable as reason:
                    refusals.append((reason.needed, str(reason)))
                    if host.most:
                        on_fewer[way] = 0.0  # its blocks may have room then
                    continue
                seconds = seconds_of(loops)
                if host.most:
                    on_fewer[way] = sum(loop.work for loop in loops) / fewer
                if best is None or seconds < best.seconds:
                    best = Draft(problem, method, way, loops, sizes, seconds)
        if best is not None:
            # Blocks for fewer threads are larger ones: they take fewer calls, and work that is less by as little as is known.
            least = FEWER_THREADS * min(best.seconds, other)
            to_try = [way for way in to_try if on_fewer.get(way, inf) < least]
        if best is not None and (host.threads <= 1 or not to_try):
            return best
        if host.threads <= 1:
            raise NotApplicable.of_the_least(refusals or [(inf, "there is no way to do it")])
        problem = replace(problem, machine=replace(host, threads=fewer))


def by_another(problem: ProductsProblem, plan: Plan, steps: Sequence[NumpyStep], **rest: Any) -> Plan:
    """The plan of a problem that another one solves, whose plan this is, by these steps."""
    known: dict[str, Any] = dict(
        method=plan.method,
        device=plan.device,
        bound=plan.bound,
        rejected=plan.rejected,
        price=cost.by_model(seconds_of(steps)),
        bytes_moved=problem.minimal_bytes,
        notes=problem.notes + long_loop(steps),
    )
    return problem.planned(steps, **known | rest)


def long_loop(steps: Sequence[NumpyStep]) -> tuple[str, ...]:
    """A note where the calls of the loops themselves take long, whatever they do."""
    turns, seconds = sum(step.turns for step in steps), sum(step.calls for step in steps) * cost.CALL
    return (f"a loop in Python of {turns:,} turns: about {seconds:,.1f} s",) if seconds >= LONG_LOOP else ()
