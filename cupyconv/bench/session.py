"""A run through a table of cases within a budget of seconds: nothing that fails ends it, and nothing is lost."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from cupyconv.bench.clock import measure, ratio
from cupyconv.bench.floors import Rates, copy_rate, product_rate
from cupyconv.bench.machines import Machine, environment
from cupyconv.bench.peers import Way, array_peers
from cupyconv.bench.record import OURS, add_error, is_done, new_record, read_record, resume, write_record
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.reference import error, in_float64
from cupyconv.bench.report import COLUMNS, block, heading, summary
from cupyconv.bench.torch_peers import Torch
from cupyconv.call.explain import explain
from cupyconv.call.options import options
from cupyconv.demo.libraries import Call
from cupyconv.problem.plan import KernelLaunch, LaunchLoop, Plan, Step

#: The most of a case's share of the budget, and its fewest seconds of timing.
LONGEST, SHORTEST = 2.0, 0.05
#: Seconds that must be left for torch.compile, which may take twenty.
FOR_COMPILING = 60.0


class Watch:
    """Ends a process that no longer advances, and begins a new one where the GPU's context is lost.

    A fault in a kernel ends a CUDA context for good: what is left can be measured by a new process only.  One that
    never ends can only be ended with its process; ``--resume`` then goes on behind it.
    """

    STALL_SECONDS = 150.0

    def rearm(self) -> None:
        faulthandler.dump_traceback_later(self.STALL_SECONDS, exit=True)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def restart(self) -> None:
        """Become a process that resumes."""
        arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "cupyconv", *arguments, "--resume"])


class Session:
    """One run: machine, cases and peers, and the record that it fills."""

    def __init__(
        self,
        machine: Machine,
        cases: Sequence[AnyCase],
        *,
        seconds: float,
        methods: tuple[str, ...] | None = None,
        torch: Callable[[], ModuleType | None] = lambda: None,
        path: Path | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._begin = time.perf_counter()
        self.machine, self.cases, self.path, self.watch = machine, cases, path, watch
        self.seconds, self.methods = seconds, methods
        self.record = new_record({**environment(machine), "arch": machine.arch, "torch": "not measured"}, seconds)
        self.torch = self._usable(torch)
        self.rates: Rates | None = None

    def _usable(self, find: Callable[[], ModuleType | None]) -> Torch | None:
        """torch as a peer, its versions noted and its flags tried; one that is broken is reported, and left out."""
        try:
            found = find()
            if found is None:
                return None
            torch = Torch(found, self.machine.xp)
            self.record["environment"] |= torch.properties()
            for case in self.cases:
                with torch.flags(case):
                    torch.check_stream(self.machine.stream())
        except Exception as failure:
            print(f"FAILED  {add_error(self.record, 'environment', 'torch', failure)}", flush=True)
            return None
        return torch

    @property
    def used(self) -> float:
        return time.perf_counter() - self._begin

    def run(self, *, resume: bool = False) -> int:
        """Measure what is not yet measured; the exit status is 0 where nothing failed."""
        if resume:
            self._resume()
        print(f"{heading(self.record['environment'])}\n{COLUMNS}", flush=True)
        open_cases = [case for case in self.cases if not is_done(self.record, case.name)]
        for number, case in enumerate(open_cases):
            if self.used >= self.seconds:
                self.record["skipped"] = [case.name for case in open_cases[number:]]
                break
            self._one(case, share=(self.seconds - self.used) / (len(open_cases) - number))
            if not self._alive():
                self._go_on_elsewhere(open_cases[number + 1 :])
                break
        self._save(running=None)
        if self.watch:
            self.watch.disarm()
        print(f"\n{'=' * 100}\n{summary(self.record)}", flush=True)
        return 1 if self.record["errors"] else 0

    def _one(self, case: AnyCase, share: float) -> None:
        if self.watch:
            self.watch.rearm()
        self._save(running=case.name)
        try:
            row = self._measure(case, until=time.perf_counter() + share)
        except Exception as failure:  # reported below, in the file and in the exit status; the next case is measured
            self._fail(case, "", failure)
        else:
            self.record["cases"].append(row)
            print(block(row), flush=True)
        finally:
            self._save(running=None)

    def _measure(self, case: AnyCase, until: float) -> dict[str, Any]:
        machine, torch = self.machine, self.torch
        set_flags: AbstractContextManager[dict[str, bool]] = torch.flags(case) if torch else nullcontext({})
        with set_flags as flags:
            floor = self._rates(case).floor(case)
            xs, weights = case.arrays(machine.fill)
            expected = in_float64(machine.xp, case, xs, weights)
            plans, rejected = self._plans(case, xs, weights)
            ways = self._ways(case, xs, weights, plans)
            calls, errors_of = self._checked(case, ways, expected)
            del expected
            left = max(SHORTEST, min(LONGEST, until - time.perf_counter()))
            timings, failed = measure(calls, machine.clock, left)
            for name, failure in failed.items():
                self._fail(case, name, failure)
            measured = {name: timing.summary() for name, timing in timings.items()}
            for way in (way for way in ways if way.name in timings):
                row = measured[way.name]
                if OURS in timings and way.name != OURS:
                    row |= ratio(timings[OURS], timings[way.name], case.judged)
                row["error"] = errors_of[way.name]
                row["beyond_result"] = self._beyond_result(case, way, calls[way.name])
        return {
            "case": asdict(case),
            "on_gpu": machine.arch is not None,
            "floor": floor,
            "chosen": plans["auto"].method,
            "methods": {plan.method: _described(plan) for plan in plans.values()},
            "rejected": rejected,
            "flags": flags,
            "ways": measured,
        }

    def _plans(self, case: AnyCase, xs: list[Any], weights: list[Any]) -> tuple[dict[str, Plan], dict[str, str]]:
        """The plan of ``auto`` and of each named method that applies; why the others do not."""
        function, arguments, keywords = case.call(xs, weights)
        plans: dict[str, Plan] = {}
        rejected: dict[str, str] = {}
        with options(allow_tf32=True) if case.tf32 else nullcontext():
            plans["auto"] = explain(function, *arguments, **keywords)
            for method in case.methods:
                if self.methods is not None and method not in self.methods:
                    continue
                try:
                    plans[method] = explain(function, *arguments, **keywords, **case.named(method))
                except ValueError as refusal:
                    rejected[method] = str(refusal)
        return plans, rejected

    def _ways(self, case: AnyCase, xs: list[Any], weights: list[Any], plans: dict[str, Plan]) -> list[Way]:
        """The library's choice, its other methods, and the peers."""
        ways = [Way(OURS, lambda: partial(case.ours, xs, weights))]
        for method in plans:
            if method not in ("auto", plans["auto"].method):
                ways.append(Way(f"{OURS} {method}", partial(partial, case.ours, xs, weights, method)))
        ways += array_peers(self.machine.xp, self.machine.arch is not None, case, xs, weights)
        if self.torch is not None:
            ways += self.torch.ways(case, xs, weights, compiled=self.seconds - self.used > FOR_COMPILING)
        return ways

    def _checked(self, case: AnyCase, ways: list[Way], expected: Any) -> tuple[dict[str, Call], dict[str, float]]:
        """The calls whose results are right, and their errors; the others are reported and not timed."""
        calls: dict[str, Call] = {}
        errors_of: dict[str, float] = {}
        for way in ways:
            try:
                call = way.prepare()
                result = way.as_array(call()) if way.as_array else call()
                transform = way.as_array is not None
                errors_of[way.name] = error(self.machine.xp, case, result, expected, transform=transform)
                calls[way.name] = call
            except Exception as failure:
                self._fail(case, way.name, failure)
        return calls, errors_of

    def _beyond_result(self, case: AnyCase, way: Way, call: Call) -> int | None:
        """Most bytes that a call had allocated at a time, beyond its result; None where nobody counts."""
        if way.as_array is not None:
            return None
        try:
            return max(0, self.machine.library.peak_bytes(call) - case.result_bytes)
        except Exception as failure:  # reported, and the times are kept
            self._fail(case, f"{way.name}, counting memory", failure)
            return None

    def _rates(self, case: AnyCase) -> Rates:
        """The rates that this case's floor needs, each measured once."""
        if self.rates is None:
            self.rates = Rates(copy_rate(self.machine))
        name = case.precision
        if name not in self.rates.products:
            rate, by, failed = product_rate(self.machine, case, self.torch)
            self.rates.products[name], self.rates.by[name] = rate, by
            for library, failure in failed.items():
                add_error(self.record, f"floor, {name}", library, failure)
            print(f"floor: {name} products at {rate / 1e12:.2f} TFLOP/s ({by})", flush=True)
        self.record["floors"] = asdict(self.rates)
        return self.rates

    def _alive(self) -> bool:
        """Give back the last case's memory; whether the device still works, as it does not after a fault in a kernel."""
        try:
            self.machine.clock.synchronise()
            self.machine.release()
            if self.torch:
                self.torch.release()
        except Exception as failure:
            print(f"    the device no longer works: {failure}", flush=True)
            return False
        return True

    def _go_on_elsewhere(self, rest: Sequence[AnyCase]) -> None:
        self.record["skipped"] = [case.name for case in rest]
        self._save(running=None)
        if self.watch and self.path and rest:
            print("    going on in a new process", flush=True)
            self.watch.restart()

    def _resume(self) -> None:
        assert self.path is not None
        if not self.path.exists():
            return
        current, errors = self.record["environment"], self.record["errors"]
        self.record = resume(read_record(self.path))
        self.record["errors"] += [entry for entry in errors if entry not in self.record["errors"]]
        self._begin -= self.record["used"]
        self.record["seconds"] = self.seconds
        changed = {key for key, value in current.items() if self.record["environment"].get(key) != value}
        if changed - {"load_before", "date"}:
            add_error(self.record, "environment", "resume", f"differs in {', '.join(sorted(changed))}")
        if floors := self.record["floors"]:
            self.rates = Rates(**floors)

    def _fail(self, case: AnyCase, way: str, failure: Exception) -> None:
        print(f"    FAILED  {add_error(self.record, case.name, way, failure)}", flush=True)

    def _save(self, running: str | None) -> None:
        self.record["running"], self.record["used"] = running, self.used
        write_record(self.record, self.path)


def _described(plan: Plan) -> dict[str, Any]:
    launches = [launch for step in plan.steps for launch in _launches(step)]
    return {
        "reason": plan.reason,
        "steps": len(plan.steps),
        "kernel_launches": len(launches),
        "kernels": sorted({launch.kernel.name for launch in launches}),
        "workspace_bytes": plan.workspace_bytes,
        "bytes_moved": plan.bytes_moved,
        "bound": plan.bound,
    }


def _launches(step: Step) -> list[KernelLaunch]:
    """What a step launches, repeated as often as it is."""
    if isinstance(step, LaunchLoop):
        return [*step.launches] * step.times
    return [step] if isinstance(step, KernelLaunch) else []
