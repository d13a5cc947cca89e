"""The choice of a method and of its implementation: those with the least estimated time by the model of `cost`.

::

    methods           "winograd"   "fft"   "gemm"                     "direct"       of a convolution
    implementations   Winograd     Fft     View  MecRows  Columns     TapByTap       loops over blocks within the limit
                         |          |       |      |        |            |
    seconds              +----------+-------+------+--------+------------+---->      the least becomes the plan

Other problems have their own tables.  A method that cannot beat the best so far is not planned or imported.
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

#: Multiply-adds below which Fourier transforms are used only if the caller names them.
FEW_PRODUCTS = 1_000_000
#: Smallest share of the workspace limit, in bytes, for which a thread is planned.
MIN_THREAD_SHARE = 4 << 10
#: A loop is cut again for half of its threads if its work on these takes up to this many times the best estimated time.
FEWER_THREADS = 1.25
#: Seconds of a loop's Python calls from which a plan has a note.
LONG_LOOP = 0.5

#: Why a method exists only on a GPU, or only for a convolution.
ELSEWHERE = {
    "implicit_gemm": "not supported on NumPy; BLAS reads matrices, so method 'gemm' writes columns block by block",
    "winograd": "only for results computed as a convolution of x; here, products are added to the result",
}


class Method(NamedTuple):
    """A method that ``method=`` may name: its implementations, of which the one with the least estimated time is used.

    A module's name in `implementations` stands for its ``IMPLEMENTATIONS``.  The module is imported when these are first
    needed.  It is not imported if a few operations show that the method cannot solve a problem, or that its lower bound
    is too high.
    """

    implementations: str | tuple[type[BlockLoop], ...]
    refusal: Callable[[Any], str] = lambda _: ""
    lower_bound: Callable[[Any], float] = lambda _: 0.0
    only_if_named: Callable[[Any], str] = lambda _: ""  # why it is used only if named


def winograd_refusal(problem: ProductsProblem) -> str:
    """Return why Winograd's method cannot solve a problem; empty if it can."""
    geometry = problem.geometry
    if not problem.allow_winograd:
        return "forbidden by options(allow_winograd=False)"
    if not problem.x_dtype == problem.factor_dtype == problem.dtype == "float32":
        return "only for float32; in other dtypes, its rounding errors are too large or its products too slow"
    if geometry.stride != (1, 1, 1) or geometry.taps == 1 or max(geometry.kernel) > cost.MAX_TAPS:
        return f"only for stride 1, and kernels of 2 to {cost.MAX_TAPS} taps along some axes and 1 along the others"
    return ""


def fft_only_if_named(problem: ProductsProblem) -> str:
    """Return why transforms are used only if named; empty if they are chosen freely.

    A short call gains too little time to justify the larger errors.  With few outputs, products read no more than
    transforms would.
    """
    geometry = problem.geometry
    if geometry.products < FEW_PRODUCTS:
        return f"larger rounding errors; with fewer than {FEW_PRODUCTS:,} multiply-adds, used only if method='fft'"
    if geometry.pixels < cost.SHORTEST:
        return f"larger rounding errors; with fewer than {cost.SHORTEST} pixels, used only if method='fft'"
    return ""


#: Methods that several kinds of problems have.  Kinds other than a convolution may replace `implementations`.
WINOGRAD = Method("cupyconv.numpy.winograd", winograd_refusal, cost.least_winograd)
FFT = Method("cupyconv.numpy.fft", attrgetter("fft_refusal"), cost.least_fft, fft_only_if_named)


def choose(problem: ProductsProblemT, methods: Mapping[str, Method]) -> Plan:
    """Plan the named method, or the one with the least estimated time; raise ValueError if none applies."""
    named = problem.method
    elsewhere = {name: ELSEWHERE.get(name, NO_SUCH_METHOD) for name in PUBLIC_METHODS if name not in methods}
    if named in elsewhere:
        raise ValueError(f"method {named!r} does not apply: {elsewhere[named]}")
    to_try, why_not = [named], {name: f"method={named!r} was asked for" for name in methods if name != named}
    least = dict.fromkeys(methods, 0.0)
    if named == "auto":
        why_not = {
            name: why
            for name, method in methods.items()
            if (why := method.refusal(problem) or method.only_if_named(problem))
        }
        least = {name: method.lower_bound(problem) for name, method in methods.items() if name not in why_not}
        to_try = sorted(least, key=lambda name: least[name])
    best: Draft | None = None
    for name in to_try:
        if best and least[name] >= best.seconds:
            why_not[name] = f"{cost.by_model(least[name])} or more"
            continue
        try:
            draft = _within_limit(problem, name, methods[name].implementations, best.seconds if best else inf)
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
    """An implementation of a method: its loops, their workspace, and their estimated time."""

    problem: ProductsProblem
    method: str
    implementation: type[BlockLoop]
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
            reason=self.implementation.reason(problem.geometry),
            price=cost.by_model(self.seconds),
            bytes_moved=max(problem.minimal_bytes, sum(loop.bytes_moved for loop in loops)),
            notes=problem.notes + long_loop(loops),
        )


def _within_limit(
    problem: ProductsProblemT, method: str, implementations: str | tuple[type[BlockLoop], ...], other: float
) -> Draft:
    """Return the draft with the least estimated time; `other` is the time of another method.

    If the limit has no space for the blocks of all threads, half as many are tried, and so on while that may be faster.
    """
    known: tuple[type[BlockLoop], ...] = (
        import_module(implementations).IMPLEMENTATIONS if isinstance(implementations, str) else implementations
    )
    to_try = sorted(
        (implementation for implementation in known if implementation.applies(problem)),
        key=lambda implementation: implementation.least_calls(problem),
    )
    refusals: list[tuple[float, str]] = []  # strings: an exception and its frame would refer to each other
    best: Draft | None = None
    while True:
        host = problem.host
        fewer = max(1, min(host.threads // 2, problem.limit // MIN_THREAD_SHARE))
        on_fewer = {}
        for implementation in to_try:
            if best is None or implementation.least_calls(problem) * cost.CALL < best.seconds:
                try:
                    loops, sizes = implementation.loops(problem)
                except NotApplicable as reason:
                    refusals.append((reason.needed, str(reason)))
                    if host.most:
                        on_fewer[implementation] = 0.0  # its blocks may fit then
                    continue
                seconds = seconds_of(loops)
                if host.most:
                    on_fewer[implementation] = sum(loop.work for loop in loops) / fewer
                if best is None or seconds < best.seconds:
                    best = Draft(problem, method, implementation, loops, sizes, seconds)
        if best is not None:
            # Fewer threads have larger blocks: fewer calls, and somewhat less work, though it is not known how much.
            least = FEWER_THREADS * min(best.seconds, other)
            to_try = [implementation for implementation in to_try if on_fewer.get(implementation, inf) < least]
        if best is not None and (host.threads <= 1 or not to_try):
            return best
        if host.threads <= 1:
            raise NotApplicable.of_the_least(refusals or [(inf, "no implementation applies")])
        problem = replace(problem, machine=replace(host, threads=fewer))


def by_another(problem: ProductsProblem, plan: Plan, steps: Sequence[NumpyStep], **rest: Any) -> Plan:
    """Plan `problem` with `steps` that solve another problem, whose plan is `plan`."""
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
    """Return a note if the loops' Python calls alone take long, whatever they compute."""
    turns, seconds = sum(step.turns for step in steps), sum(step.calls for step in steps) * cost.CALL
    return (f"a Python loop of {turns:,} iterations: about {seconds:,.1f} s",) if seconds >= LONG_LOOP else ()
