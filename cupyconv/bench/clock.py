"""Timing: one call with empty caches, calls in a row, and rounds in which all implementations of a job take turns.

On a GPU, a sample enqueues on the current stream::

    write more than the L2 cache holds | spin while the host enqueues | event | the call | event

The spinning kernel (``kernels/bench/delay.cu``) lets the host run ahead.  The time between the events is therefore the
GPU's time and not the interpreter's, which the host's clock measures and which is reported separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np

from cupyconv.cuda.run.kernel_sources import kernel_directory
from cupyconv.demo.libraries import Call

#: If the median exceeds the minimum by this factor, the measurement was disturbed.
UNSTEADY = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sample:
    """Seconds of one call: on the device, and on the host until it returns."""

    device: float
    host: float


class Clock(Protocol):
    """The machine-dependent part of a measurement."""

    #: Minimum and maximum number of rounds, and the number of samples before them that do not count.
    rounds: tuple[int, int]
    warm_up: int
    #: An implementation is hopeless if it was twice found slower than the judged one by this factor.
    hopeless: float
    #: A description of how a sample is taken.
    method: str

    def sample(self, call: Call, host: float) -> Sample:
        """Time one call; `host` is the approximate time that the host needs to enqueue it."""
        ...

    def row(self, call: Call, count: int) -> float | None:
        """Return seconds per call of `count` calls enqueued in a row, or None if this is the same as a sample."""
        ...

    def synchronise(self) -> None: ...


@dataclass
class Timing:
    """The samples of one implementation, and their summary."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    row: float | None = None

    def add(self, sample: Sample) -> None:
        self.device.append(sample.device)
        self.host.append(sample.host)

    @property
    def is_steady(self) -> bool:
        """Whether nothing else used the processor in half of the rounds."""
        return statistics.median(self.device) <= UNSTEADY * min(self.device)

    def summary(self) -> dict[str, Any]:
        """Return the summary for a record, in seconds."""
        return {
            "median": statistics.median(self.device),
            "min": min(self.device),
            "quartiles": _quartiles(self.device),
            "host_median": statistics.median(self.host),
            "row": self.row,
            "rounds": len(self.device),
            "steady": self.is_steady,
        }


def measure(
    names: Collection[str],
    clock: Clock,
    sample: Callable[[str, float], Sample],
    row: Callable[[str, int], float | None],
    seconds: float,
    judged: str = "",
    may_drop: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Warm up, then run as many rounds as fit into `seconds`.  An implementation that raises drops out and is reported.

    Rounds continue while an implementation is unsteady.  Hopeless implementations that `may_drop` allows to drop take
    no turns.  `sample` and `row` time the implementation with a given name, in this process or in another one.
    """
    timings = {name: Timing() for name in names}
    failed: dict[str, Exception] = {}

    def attempt(name: str, measuring: Callable[[], _T]) -> _T | None:
        if name not in failed:
            try:
                return measuring()
            except Exception as error:
                failed[name] = error
        return None

    begin = time.perf_counter()
    warm: dict[str, Sample] = {}
    for name in names:
        samples = [attempt(name, lambda name=name: sample(name, 0.0)) for _ in range(clock.warm_up)]  # type: ignore[misc]
        known = [one for one in samples if one is not None]
        if name not in failed:
            warm[name] = Sample(min(one.device for one in known), statistics.median(one.host for one in known))
    a_round = (time.perf_counter() - begin) / clock.warm_up
    slowest = clock.hopeless * warm[judged].device if judged in warm else float("inf")

    def turn(name: str) -> Sample | None:
        return attempt(name, lambda: sample(name, warm[name].host))

    in_turns = sorted(warm)
    for name in [name for name in in_turns if may_drop(name) and warm[name].device > slowest]:
        again = turn(name)  # the first sample may have been disturbed
        if again is not None and again.device > slowest:
            timings[name].add(again)
            in_turns.remove(name)
    least, most = clock.rounds
    for number in range(most):
        time_is_up = time.perf_counter() - begin + a_round > seconds
        if number >= least and time_is_up and all(timings[name].is_steady for name in in_turns if name not in failed):
            break
        for name in reversed(in_turns) if number % 2 else in_turns:
            if (taken := turn(name)) is not None:
                timings[name].add(taken)
    for name in warm:
        if name not in failed:
            longest = max(statistics.median(timings[name].device), warm[name].host)
            count = max(5, min(50, int(0.01 / max(longest, 1e-9))))
            timings[name].row = attempt(name, lambda name=name, count=count: row(name, count))  # type: ignore[misc]
    return {name: timing for name, timing in timings.items() if name not in failed}, failed


def ratio(ours: Timing, other: Timing, judged: str) -> dict[str, Any]:
    """Return our time divided by the other's: the median and the quartiles of the ratios per round."""
    mine, theirs = (getattr(timing, judged) for timing in (ours, other))
    if len(mine) != len(theirs):  # one of them was measured only during warm-up
        mine, theirs = [statistics.median(mine)], [statistics.median(theirs)]
    ratios = [a / b for a, b in zip(mine, theirs) if b > 0]
    return {"ratio": statistics.median(ratios), "quartiles_of_ratio": _quartiles(ratios)} if ratios else {}


#: Seconds of a turn, in which a call is repeated; the fewest calls; seconds above which a call runs once per turn.
TURN, CALLS, LONG = 0.08, 3, 0.25
#: Seconds to wait at most for pool threads that spin after a call, and between checks of them.  The latter is many
#: times the 4 ms between two ticks of an operating system kernel, with which it counts a thread's time.
SPINNING, LOOK = 0.5, 0.02


class HostClock:
    """The processor's clock, for calls that follow similar ones: caches and threads are in a steady state.

    After its turn, a process waits until its threads are idle: BLAS workers spin for a tenth of a second after a
    product, on the cores that the next library's call needs.
    """

    rounds = (3, 15)
    warm_up = 1
    hopeless = 4.0
    method = "wall clock, median over the calls of a turn; one process per library, the processes take turns"

    def sample(self, call: Call, host: float) -> Sample:
        begin = time.perf_counter()
        call()
        now = time.perf_counter()
        times = [now - begin] if now - begin > LONG else []
        end = now + TURN
        while now < end or len(times) < (1 if times and times[0] > LONG else CALLS):
            begin = time.perf_counter()
            call()
            now = time.perf_counter()
            times.append(now - begin)
        let_threads_rest()
        seconds = statistics.median(times)
        return Sample(seconds, seconds)

    def row(self, call: Call, count: int) -> float | None:
        return None

    def synchronise(self) -> None:
        pass


def let_threads_rest() -> None:
    """Wait until this process uses almost no processor time."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < SPINNING:
        busy, looked = time.process_time(), time.perf_counter()
        time.sleep(LOOK)
        if time.process_time() - busy < (time.perf_counter() - looked) / 4:
            return


class CudaClock:
    """CUDA events on CuPy's current stream."""

    rounds = (5, 25)
    warm_up = 3
    hopeless = float("inf")
    #: Seconds of spinning in addition to the time the host needs to enqueue the call.
    MARGIN = 20e-6
    LONGEST_DELAY = 20e-3

    def __init__(self, cupy: ModuleType, l2_bytes: int) -> None:
        self._cupy = cupy
        source = (kernel_directory() / "bench" / "delay.cu").read_text(encoding="utf-8")
        self._delay = cupy.RawModule(code=source, backend="nvrtc").get_function("delay")
        self._flush = cupy.empty(max(64 << 20, 2 * l2_bytes), np.uint8)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self.method = (
            f"CUDA events around one call; before it, {self._flush.nbytes >> 20} MiB are written to flush the L2 cache, and"
            " a kernel spins while the host enqueues"
        )

    def sample(self, call: Call, host: float) -> Sample:
        self._flush.data.memset_async(0, self._flush.nbytes)
        nanoseconds = int(min(self.LONGEST_DELAY, 1.5 * host + self.MARGIN) * 1e9)
        self._delay((1,), (1,), (np.int64(nanoseconds),))
        self._start.record()
        begin = time.perf_counter()
        call()
        host = time.perf_counter() - begin
        self._stop.record()
        return Sample(self._elapsed(), host)

    def row(self, call: Call, count: int) -> float | None:
        self.synchronise()
        self._start.record()
        for _ in range(count):
            call()
        self._stop.record()
        return self._elapsed() / count

    def synchronise(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def _elapsed(self) -> float:
        self._stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(self._start, self._stop) / 1e3


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values)[::2] if len(values) > 1 else [values[0], values[0]]
