"""How the bench measures times: the order of turns, when it ends, and what a sample is."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from bench_cases import ToldClock

from cupyconv.bench import clock
from cupyconv.bench.clock import Sample, Timing
from cupyconv.cuda.run.kernel_sources import kernel_directory
from tests import nvrtc


def measured(calls, told, seconds, judged="", may_drop=lambda name: True):
    return clock.measure(
        calls,
        told,
        lambda name, host: told.sample(calls[name], host),
        lambda name, count: None,
        seconds,
        judged,
        may_drop,
    )


def test_ways_take_turns_and_one_that_fails_drops_out():
    order = []

    def way(name):
        order.append(name)
        if name == "bad" and order.count("bad") > ToldClock.warm_up:
            raise RuntimeError("no more")

    timings, failed = measured({name: partial(way, name) for name in ("a", "b", "bad")}, ToldClock(), 10)
    assert order[3 * ToldClock.warm_up :] == ["a", "b", "bad", "b", "a", "a", "b"]
    assert timings.keys() == {"a", "b"} and len(timings["a"].device) == 3
    assert list(failed) == ["bad"] and "no more" in str(failed["bad"])


def test_a_peer_always_has_its_turns_and_rounds_go_on_while_one_is_unsteady():
    class Told(ToldClock):
        rounds, warm_up, hopeless = (2, 6), 1, 4.0

        def sample(self, call, host):
            seconds = call()
            return Sample(seconds, seconds)

    times = {"ours": [1.0] * 9, "peer": [9.0, 1.0, 9.0, 9.0, 1.0, 1.0, 1.0]}
    calls = {name: partial(values.pop, 0) for name, values in times.items()}
    timings, _ = measured(calls, Told(), 0, judged="ours", may_drop=lambda name: name != "peer")
    assert timings["peer"].device == [1.0, 9.0, 9.0, 1.0, 1.0] and len(timings["ours"].device) == 5
    assert timings["peer"].summary()["steady"] and not Timing([9.0, 9.0, 1.0], [1.0]).summary()["steady"]


def test_no_time_left_means_the_fewest_rounds():
    timings, _ = measured({"a": lambda: None}, ToldClock(), 0)
    assert len(timings["a"].device) == ToldClock.rounds[0]


def test_ratios_are_of_the_rounds():
    ours, other = Timing([1, 2, 4], [1, 1, 1]), Timing([2, 6, 4], [5, 5, 5])
    assert clock.ratio(ours, other, "device")["ratio"] == 0.5
    assert clock.ratio(ours, other, "host")["ratio"] == 0.2
    assert clock.ratio(ours, Timing([8], [1]), "device") == {"ratio": 0.25, "quartiles_of_ratio": [0.25, 0.25]}


def test_a_hopeless_way_has_no_turns_and_a_bad_moment_is_forgiven():
    times = {"ours": [1.0] * 9, "slow": [9.0] * 9, "unlucky": [9.0] + [2.0] * 9}

    def call(name):
        called.append(name)
        return times[name].pop(0)

    class Told(ToldClock):
        warm_up, hopeless = 1, 4.0

        def sample(self, call, host):
            seconds = call()
            return Sample(seconds, seconds)

    called = []
    timings, failed = measured({name: partial(call, name) for name in times}, Told(), 10, judged="ours")
    assert not failed and called[:5] == ["ours", "slow", "unlucky", "slow", "unlucky"]
    assert {name: timing.device for name, timing in timings.items()} == {
        "ours": [1.0] * 3, "slow": [9.0], "unlucky": [2.0] * 3,
    }  # fmt: skip


def test_the_wall_clock_counts_seconds():
    calls = []
    sample = clock.HostClock().sample(lambda: calls.append(sum(range(20000))), 0)
    assert 0 < sample.device == sample.host and len(calls) > 2  # a turn is as many short calls as the machine can make


def test_a_long_call_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(clock, "LONG", 0)
    monkeypatch.setattr(clock, "TURN", 0)
    clock.HostClock().sample(lambda: calls.append(0), 0)
    assert len(calls) == 1


class LoggedCuda:
    """The part of CuPy that a `CudaClock` uses; it logs what is enqueued."""

    def __init__(self):
        self.log = []
        log, self.cuda = self.log, SimpleNamespace()

        class Event:
            def record(self):
                log.append(self)

            def synchronize(self):
                log.append("wait")

        stream = SimpleNamespace(synchronize=lambda: log.append("synchronize"))
        self.cuda.Event, self.cuda.get_current_stream = Event, lambda: stream
        self.cuda.get_elapsed_time = lambda start, stop: 250.0  # milliseconds

    def RawModule(self, *, code, backend):
        assert 'extern "C" __global__ void delay(long long' in code
        return SimpleNamespace(get_function=lambda name: lambda grid, block, args: self.log.append((name, *args)))

    def empty(self, size, dtype):
        data = SimpleNamespace(memset_async=lambda value, size: self.log.append(("write", size)))
        return SimpleNamespace(data=data, nbytes=size)


def test_what_a_sample_on_a_gpu_enqueues():
    """A sample empties the cache, keeps the GPU busy while the host enqueues, and times only the call."""
    cupy = LoggedCuda()
    cuda = clock.CudaClock(cupy, l2_bytes=50 << 20)
    sample = cuda.sample(lambda: cupy.log.append("call"), host=1e-3)
    write, delay, start, call, stop, wait = cupy.log
    assert write == ("write", 100 << 20) and delay == ("delay", 1_520_000) and delay[1].dtype == np.int64
    assert call == "call" and wait == "wait" and type(start) is type(stop) and start is not stop
    assert sample.device == 0.25 and sample.host < 0.1
    cupy.log.clear()
    assert cuda.row(lambda: cupy.log.append("call"), 5) == 0.05
    assert cupy.log == ["synchronize", start, *["call"] * 5, stop, "wait"]


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", [75, 90, 120])
def test_the_delay_compiles(architecture):
    nvrtc.require()
    source = (kernel_directory() / "bench" / "delay.cu").read_text(encoding="utf-8")
    assert nvrtc.compile_source(source, nvrtc.CHECK_OPTIONS, architecture).spills == 0
