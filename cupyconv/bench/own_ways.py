"""The library's implementations: the choice of ``method="auto"``, all other methods, and what it is compared with.

======================================  ==================================================================
``cupyconv``                            the call as a user writes it
``cupyconv gemm``, ...                  the call with each other method that applies
``cupyconv exact``                      without Winograd or Fourier transforms, if one was chosen
``cupyconv layer by layer``             a chain as one call of `conv` per layer
======================================  ==================================================================
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from cupyconv.bench.cases import Case
from cupyconv.bench.peers import Participant, Way
from cupyconv.bench.record import EXACT, LAYER_BY_LAYER, OURS
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.call.explain import explain
from cupyconv.call.options import options
from cupyconv.demo.libraries import Call
from cupyconv.problem.plan import KernelLaunch, LaunchLoop, Plan, Rounds, Step

#: The methods that transform their data, and the options that disable them.
TRANSFORMS = ("winograd", "fft")
FORBIDDEN = {"allow_winograd": False, "allow_fft": False}


class Ours(Participant):
    """This library, with `methods` and with its own choice."""

    def __init__(self, methods: tuple[str, ...] | None = None) -> None:
        self._methods = methods

    def ways(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> list[Way]:
        def way(name: str, method: str, runs: str, **settings: Any) -> Way:
            call = partial(case.bound, xs, weights, method, **settings)
            return Way(name, call, case.compared, transform=runs in TRANSFORMS)

        plans, _ = self._plans(case, xs, weights)
        chosen = plans["auto"].method
        ways = [way(OURS, "auto", chosen)]
        ways += [way(f"{OURS} {method}", method, method) for method in plans if method not in ("auto", chosen)]
        if chosen in TRANSFORMS:
            ways.append(way(f"{OURS} {EXACT}", "auto", EXACT, **FORBIDDEN))
        if isinstance(case, Case) and case.then and not case.tf32:
            ways.append(Way(f"{OURS} {LAYER_BY_LAYER}", lambda: partial(case.layer_by_layer, xs, weights)))
        return ways

    def notes(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> dict[str, Any]:
        plans, rejected = self._plans(case, xs, weights)
        methods = {plan.method: _described(plan) for plan in plans.values()}
        return {"chosen": plans["auto"].method, "methods": methods, "rejected": rejected}

    def product(self, square: Case, x: Any, weight: Any) -> Call:
        return square.bound([x], [weight], "gemm")

    def _plans(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> tuple[dict[str, Plan], dict[str, str]]:
        """Return the plans of ``auto`` and of each named method that applies, and why the others do not apply."""
        function, arguments, keywords = case.call(xs, weights)
        plans: dict[str, Plan] = {}
        rejected: dict[str, str] = {}
        with options(allow_tf32=True) if case.tf32 else nullcontext():
            plans["auto"] = explain(function, *arguments, **keywords)
            for method in case.methods:
                if self._methods is not None and method not in self._methods:
                    continue
                try:
                    plans[method] = explain(function, *arguments, **keywords, **case.named(method))
                except ValueError as refusal:
                    rejected[method] = str(refusal)
        return plans, rejected


def _described(plan: Plan) -> dict[str, Any]:
    launches = [launch for step in plan.steps for launch in _launches(step)]
    return {
        "reason": plan.how,
        "steps": len(plan.steps),
        "kernel_launches": len(launches),
        "kernels": sorted({launch.kernel.name for launch in launches}),
        "workspace_bytes": plan.workspace_bytes,
        "bytes_moved": plan.bytes_moved,
        "bound": plan.bound,
    }


def _launches(step: Step) -> list[KernelLaunch]:
    """Return the launches of a step, repeated as often as they run."""
    if isinstance(step, LaunchLoop):
        return [*step.launches] * step.times
    if isinstance(step, Rounds):
        return [launch for each in step.first for launch in _launches(each)] * step.times
    return [step] if isinstance(step, KernelLaunch) else []
