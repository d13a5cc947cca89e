"""A run through a table of cases within a budget of seconds: failures do not end it, and no result is lost."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupyconv.bench.cases import Case
from cupyconv.bench.clock import let_threads_rest, measure, ratio
from cupyconv.bench.floors import Rates
from cupyconv.bench.machines import Machine, environment
from cupyconv.bench.memory import over_batches
from cupyconv.bench.peers import NotInstalled
from cupyconv.bench.progress import Progress
from cupyconv.bench.record import OURS, add_error, is_done, is_ours, new_record, read_record, resume, write_record
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.reference import error, in_float64
from cupyconv.bench.report import COLUMNS, block, heading, summary
from cupyconv.bench.runner import AnyRunner, Offer, SharedArrays

#: Seconds of timing per case: upper limit of its share of the budget, and lower limit.
LONGEST, SHORTEST = 5.0, 0.05
#: Share of the budget for memory at several batch sizes.
SHARE_OF_MEMORY = 0.1


class Watch:
    """Ends a process that no longer advances, and starts a new one if the GPU's context is lost.

    A fault in a kernel ends a CUDA context permanently, so that only a new process can measure the remaining cases.  A
    kernel that never ends can only be ended with its process; ``--resume`` then continues after it.
    """

    STALL_SECONDS = 150.0

    def rearm(self) -> None:
        faulthandler.dump_traceback_later(self.STALL_SECONDS, exit=True)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def restart(self) -> None:
        """Replace this process by one that resumes."""
        arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "cupyconv", *arguments, "--resume"])


class Session:
    """One run: the machine, the cases, a runner per participant, and the record that the run fills.

    `begin` has the constructors of the runners, the library's first.  Memory at several batch sizes is measured for the
    `growing` cases.
    """

    def __init__(
        self,
        machine: Machine,
        cases: Sequence[AnyCase],
        begin: Mapping[str, Callable[[], AnyRunner]],
        *,
        seconds: float,
        threads: int | None = None,
        arrays: SharedArrays | None = None,
        path: Path | None = None,
        watch: Watch | None = None,
        growing: Sequence[Case] = (),
    ) -> None:
        self._begin = time.perf_counter()
        self.machine, self.cases, self.path, self.watch = machine, cases, path, watch
        self.growing, self.progress = growing, Progress()
        self.seconds, self.arrays = seconds, arrays or SharedArrays(machine)
        self.record = new_record({**environment(machine, threads), "arch": machine.arch}, seconds)
        self.runners = self._usable(begin)
        self.rates: Rates | None = None

    def _usable(self, begin: Mapping[str, Callable[[], AnyRunner]]) -> dict[str, AnyRunner]:
        """Return the runners, and record their versions, which libraries are not installed, and failures."""
        begun: dict[str, AnyRunner | Exception] = {}
        for name, make in begin.items():  # processes start in parallel
            try:
                begun[name] = make()
            except Exception as failure:
                begun[name] = failure
        usable: dict[str, AnyRunner] = {}
        for name, runner in begun.items():
            try:
                if isinstance(runner, Exception):
                    raise runner
                self.record["environment"] |= runner.properties()
            except NotInstalled as missing:
                self.record["environment"][name] = (
                    f"{missing} is not installed" if str(missing) != name else "not installed"
                )
            except Exception as failure:
                print(f"FAILED  {add_error(self.record, 'environment', name, failure)}", flush=True)
            else:
                usable[name] = runner
        return usable

    @property
    def used(self) -> float:
        return time.perf_counter() - self._begin

    def run(self, *, resume: bool = False) -> int:
        """Measure the cases that are not yet measured; the exit status is 0 if nothing failed."""
        if resume:
            self._resume()
        print(f"{heading(self.record['environment'])}\n{COLUMNS}", flush=True)
        self._memory()
        open_cases = [case for case in self.cases if not is_done(self.record, case.name)]
        begun = self.used
        for number, case in enumerate(open_cases):
            if self.used >= self.seconds:
                self.record["skipped"] = [case.name for case in open_cases[number:]]
                break
            left = self.seconds - self.used
            if number:
                left = min(left, (self.used - begun) / number * (len(open_cases) - number))
            self.progress.show(number + 1, len(open_cases), left, case.name)
            self._one(case, share=(self.seconds - self.used) / (len(open_cases) - number))
            if not self._alive():
                self._go_on_elsewhere(open_cases[number + 1 :])
                break
        self.progress.end()
        self._save(running=None)
        for runner in self.runners.values():
            runner.close()
        if self.watch:
            self.watch.disarm()
        print(f"\n{'=' * 100}\n{summary(self.record)}", flush=True)
        return 1 if self.record["errors"] else 0

    def _memory(self) -> None:
        """Measure memory at several batch sizes, for the cases that have no such record yet."""
        known = {row["case"]["name"] for row in self.record["memory"]}
        todo = [case for case in self.growing if case.name not in known] if OURS in self.runners else []
        for number, case in enumerate(todo):
            left = SHARE_OF_MEMORY * self.seconds / len(todo)
            self.progress.show(number + 1, len(todo), left * (len(todo) - number), f"memory of {case.name}")
            if self.watch:
                self.watch.rearm()
            try:
                row = over_batches(case, self.runners[OURS], time.perf_counter() + left)
                self.record["memory"].append(row)
            except Exception as failure:
                self._fail(case, "memory at several batch sizes", failure)

    def _one(self, case: AnyCase, share: float) -> None:
        if self.watch:
            self.watch.rearm()
        self._save(running=case.name)
        try:
            row = self._measure(case, until=time.perf_counter() + share)
        except Exception as failure:  # reported in the output, in the file and in the exit status
            self._fail(case, "", failure)
        else:
            self.record["cases"].append(row)
            self.progress.say(block(row))
        finally:
            self._save(running=None)

    def _measure(self, case: AnyCase, until: float) -> dict[str, Any]:
        floor = self._rates(case).floor(case)
        try:
            expected = in_float64(self.machine.xp, case, *self.arrays.of(case))
            offers, notes = self._offers(case)
            ways, errors_of = self._checked(case, offers, expected)
            del expected
            let_threads_rest()
            left = max(SHORTEST, min(LONGEST, until - time.perf_counter()))
            timings, failed = measure(
                ways, self.machine.clock,
                lambda way, host: ways[way].sample(way, host), lambda way, count: ways[way].row(way, count),
                left, judged=OURS, may_drop=is_ours,
            )  # fmt: skip
            for name, failure in failed.items():
                self._fail(case, name, failure)
            measured = {name: timing.summary() for name, timing in timings.items()}
            for offer in (offer for offer, _ in offers if offer.name in timings):
                row = measured[offer.name]
                if OURS in timings and offer.name != OURS:
                    row |= ratio(timings[OURS], timings[offer.name], case.judged)
                row["error"] = errors_of[offer.name]
                row["beyond_result"] = self._beyond_result(case, offer, ways[offer.name])
        finally:
            self._clear()
        known = {"case": asdict(case), "group": case.group, "on_gpu": self.machine.arch is not None, "floor": floor}
        return {**known, **notes, "ways": measured}

    def _offers(self, case: AnyCase) -> tuple[list[tuple[Offer, AnyRunner]], dict[str, Any]]:
        """Return the implementations of all participants and their notes.  A failing participant is reported."""
        offers: list[tuple[Offer, AnyRunner]] = []
        notes: dict[str, Any] = {}
        for name, runner in self.runners.items():
            try:
                offered, noted = runner.set_up(case)
            except Exception as failure:
                if name == OURS:
                    raise
                self._fail(case, name, failure)
                continue
            left = max(0.0, self.seconds - self.used)
            offers += [(offer, runner) for offer in offered if offer.patience <= left]
            notes |= noted
        return offers, notes

    def _checked(
        self, case: AnyCase, offers: Sequence[tuple[Offer, AnyRunner]], expected: Any
    ) -> tuple[dict[str, AnyRunner], dict[str, float]]:
        """Return implementations with correct results, their runners and errors; others are reported, not timed."""
        ways: dict[str, AnyRunner] = {}
        errors_of: dict[str, float] = {}
        for offer, runner in offers:
            try:
                result = runner.result(offer.name)
                errors_of[offer.name] = error(self.machine.xp, case, result, expected, transform=offer.transform)
                ways[offer.name] = runner
            except Exception as failure:
                self._fail(case, offer.name, failure)
        return ways, errors_of

    def _beyond_result(self, case: AnyCase, offer: Offer, runner: AnyRunner) -> int | None:
        """Return the peak bytes that a call allocates in addition to its result, or None if they are not counted."""
        if offer.allocates:
            return None
        try:
            return max(0, runner.peak_bytes(offer.name) - case.result_bytes)
        except Exception as failure:  # reported; the times remain in the record
            self._fail(case, f"{offer.name}, counting memory", failure)
            return None

    def _rates(self, case: AnyCase) -> Rates:
        """Return the rates that this case's floor needs, each measured once."""
        if self.rates is None:
            self.rates = Rates(self.runners[OURS].copy_rate())
        name = case.precision
        if name not in self.rates.products:
            rates: dict[str, float] = {}
            for participant, runner in self.runners.items():
                try:
                    rate = runner.product_rate(case)
                except Exception as failure:
                    add_error(self.record, f"floor, {name}", participant, failure)
                else:
                    rates |= {} if rate is None else {participant: rate}
            by = max(rates, key=lambda participant: rates[participant])
            self.rates.products[name], self.rates.by[name] = rates[by], by
            self.progress.say(f"floor: {name} products at {rates[by] / 1e12:.2f} TFLOP/s ({by})")
        self.record["floors"] = asdict(self.rates)
        return self.rates

    def _clear(self) -> None:
        """Release the case's memory.  `_alive` detects a device that cannot."""
        self.arrays.of.cache_clear()
        for runner in self.runners.values():
            with suppress(Exception):
                runner.clear()

    def _alive(self) -> bool:
        """Return whether the device still works, which a fault in a kernel ends; release its unused memory."""
        try:
            self.machine.clock.synchronise()
            self.machine.release()
        except Exception as failure:
            self.progress.say(f"    the device no longer works: {failure}")
            return False
        return True

    def _go_on_elsewhere(self, rest: Sequence[AnyCase]) -> None:
        self.record["skipped"] = [case.name for case in rest]
        self._save(running=None)
        if self.watch and self.path and rest:
            self.progress.end()
            print("    continuing in a new process", flush=True)
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
            add_error(self.record, "environment", "resume", f"the environment differs in {', '.join(sorted(changed))}")
        if floors := self.record["floors"]:
            self.rates = Rates(**floors)

    def _fail(self, case: AnyCase, way: str, failure: Exception) -> None:
        self.progress.say(f"    FAILED  {add_error(self.record, case.name, way, failure)}")

    def _save(self, running: str | None) -> None:
        self.record["running"], self.record["used"] = running, self.used
        write_record(self.record, self.path)
