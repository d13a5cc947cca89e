"""Time: one call with empty caches, calls in a row, and rounds in which every way to do a job has its turn.

On a GPU a sample is, enqueued on the current stream::

    write more than the L2 cache holds | spin while the host enqueues | event | the call | event

The spinning kernel (``kernels/bench/delay.cu``) lets the host run ahead, so that what is between the events is the
GPU's time and not the interpreter's; that time is read from the host's clock and reported beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cupyconv.cuda.run.kernel_sources import kernel_directory
from cupyconv.demo.libraries import Call

WARM_UP = 3


@dataclass(frozen=True)
class Sample:
    """Seconds of one call: on the device, and until it returned on the host."""

    device: float
    host: float


class Clock(Protocol):
    """What measuring needs of a machine."""

    #: Rounds: never fewer, never more.
    rounds: tuple[int, int]
    #: How a sample is taken, in words.
    method: str

    def sample(self, call: Call, host: float) -> Sample:
        """One call; `host` is about how long the host takes to enqueue it."""
        ...

    def row(self, call: Call, count: int) -> float | None:
        """Seconds a call of `count` enqueued one after the other; None where that is no other thing."""
        ...

    def synchronise(self) -> None: ...


@dataclass
class Timing:
    """The samples of one way, and what they come to."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    row: float | None = None

    def add(self, sample: Sample) -> None:
        self.device.append(sample.device)
        self.host.append(sample.host)

    def summary(self) -> dict[str, Any]:
        """For a record: seconds."""
        return {
            "median": statistics.median(self.device),
            "min": min(self.device),
            "quartiles": _quartiles(self.device),
            "host_median": statistics.median(self.host),
            "row": self.row,
            "rounds": len(self.device),
        }


def measure(ways: Mapping[str, Call], clock: Clock, seconds: float) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Warm up, then as many rounds as `seconds` allow; a way that raises drops out and is reported."""
    timings = {name: Timing() for name in ways}
    failed: dict[str, Exception] = {}
    expected_host: dict[str, float] = {}
    begin = time.perf_counter()
    for name, call in ways.items():
        try:
            warm = [clock.sample(call, host=0.0) for _ in range(WARM_UP)]
            expected_host[name] = statistics.median(sample.host for sample in warm)
            clock.synchronise()
        except Exception as error:
            failed[name] = error
    a_round = (time.perf_counter() - begin) / WARM_UP
    least, most = clock.rounds
    count = max(least, min(most, int(seconds / a_round) if a_round > 0 else most))
    for number in range(count):
        if number >= least and time.perf_counter() - begin > seconds:
            break
        for name in sorted(ways, reverse=bool(number % 2)):
            if name in failed:
                continue
            try:
                timings[name].add(clock.sample(ways[name], expected_host[name]))
            except Exception as error:
                failed[name] = error
    for name in ways:
        if name in failed:
            continue
        try:
            longest = max(statistics.median(timings[name].device), expected_host[name])
            timings[name].row = clock.row(ways[name], max(5, min(50, int(0.01 / max(longest, 1e-9)))))
        except Exception as error:
            failed[name] = error
    return {name: timing for name, timing in timings.items() if name not in failed}, failed


def ratio(ours: Timing, other: Timing, judged: str) -> dict[str, Any]:
    """How many times longer the other takes: the median, and the quartiles, of the rounds' own ratios."""
    mine, theirs = (getattr(timing, judged) for timing in (ours, other))
    ratios = [b / a for a, b in zip(mine, theirs) if a > 0]
    return {"ratio": statistics.median(ratios), "quartiles_of_ratio": _quartiles(ratios)} if ratios else {}


#: Seconds that threads of a pool may go on spinning after a call, at the most, and how often they are looked at: many
#: times the 4 ms between two ticks of a kernel, as it counts the time of a running thread.
SPINNING, LOOK = 0.5, 0.02


class HostClock:
    """A processor's own clock, of a call that follows one like itself: caches and threads are as in steady use.

    Before the two, whatever the last way's threads still do comes to its end: a BLAS's workers spin for a
    tenth of a second after a product, on the cores that another library's call would have.
    """

    rounds = (5, 15)
    method = "wall clock, after an idle moment and a call like it"

    def sample(self, call: Call, host: float) -> Sample:
        _let_threads_rest()
        call()
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        return Sample(seconds, seconds)

    def row(self, call: Call, count: int) -> float | None:
        return None

    def synchronise(self) -> None:
        pass


def _let_threads_rest() -> None:
    """Wait until this process takes no processor time, or nearly none."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < SPINNING:
        busy, looked = time.process_time(), time.perf_counter()
        time.sleep(LOOK)
        if time.process_time() - busy < (time.perf_counter() - looked) / 4:
            return


class CudaClock:
    """CUDA events on CuPy's current stream."""

    rounds = (5, 25)
    #: Beside the time the host needs to enqueue the call.
    MARGIN = 20e-6
    LONGEST_DELAY = 20e-3

    def __init__(self, cupy: ModuleType, l2_bytes: int) -> None:
        self._cupy = cupy
        source = (kernel_directory() / "bench" / "delay.cu").read_text(encoding="utf-8")
        self._delay = cupy.RawModule(code=source, backend="nvrtc").get_function("delay")
        self._flush = cupy.empty(max(64 << 20, 2 * l2_bytes), np.uint8)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()
        self.method = (
            f"CUDA events around one call, after {self._flush.nbytes >> 20} MiB were written to empty the L2 cache and a"
            " kernel has spun while the host enqueued"
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
