"""`python -m cupyconv bench`, all of it but the GPU: cases, checks, rounds, peers, records, the page.

The whole command runs on NumPy and on the host device with small cases and a clock that tells what it is told.
torch, where it is installed, is asked for its mathematics.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import reference as oracle
import reference_recurrent
from targets import gpu_target, host_device_target
from tolerance import assert_close

import cupyconv
from cupyconv import bench
from cupyconv.__main__ import main
from cupyconv.bench import clock, floors, machines, record, session, tables
from cupyconv.bench.array_peers import ArrayLibrary, concatenate_im2col_matmul
from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase, repeat_normals
from cupyconv.bench.clock import Sample, Timing
from cupyconv.bench.own_ways import TRANSFORMS, Ours
from cupyconv.bench.peers import NotInstalled, Participant, Way
from cupyconv.bench.processes import ProcessRunner, Raised
from cupyconv.bench.record import OURS
from cupyconv.bench.recurrent_layers import RecurrentCase, loop_in_python
from cupyconv.bench.reference import WrongResult, allowed_error, error, in_float64
from cupyconv.bench.report import block, summary
from cupyconv.bench.runner import PEERS, Runner, SharedArrays
from cupyconv.bench.session import Session
from cupyconv.bench.torch_peers import Torch
from cupyconv.cuda.run.kernel_sources import kernel_directory
from cupyconv.demo.libraries import numpy_library
from cupyconv.problem.arrays import ITEMSIZE, dtype_from_name
from cupyconv.problem.problems import METHODS
from tests import nvrtc

#: Every kind of case in little: ranks, merges, groups, strides, dilation, lopsided padding, layouts, dtypes.
SMALL = (
    Case("merge", 3, (2, 1, 3), (50,), 4, (1,), loop=True),
    Case("merge of planes, channels-last", 2, (2, 3), (5, 6), 4, (1, 1), channels_last=True),
    Case("unaligned merge", 2, (2, 2), (33,), 3, (1,), misaligned=True),
    Case("3x3", 2, (5,), (7, 8), 4, (3, 3), padding=((1, 1), (1, 1)), loop=True),
    Case("3x3 merged, channels-last", 2, (2, 3), (7, 6), 4, (3, 3), padding=((1, 1), (1, 1)), channels_last=True),
    Case("7x7 stride 2", 1, (3,), (14, 15), 4, (7, 7), stride=2, padding=((3, 3), (3, 3))),
    Case("even kernel, lopsided", 1, (3,), (6, 7), 2, (4, 2), padding=((1, 2), (0, 1))),
    Case("depthwise", 2, (6,), (5, 5), 6, (3, 3), padding=((1, 1), (1, 1)), groups=6),
    Case("groups", 2, (6,), (5, 5), 9, (3, 3), groups=3),
    Case("1-D dilated, causal", 2, (4,), (20,), 4, (3,), padding=((8, 0),), dilation=4),
    Case("3-D", 1, (3,), (5, 6, 4), 2, (3, 3, 3), padding=((1, 1),) * 3),
    Case("TF32", 2, (5,), (7, 8), 4, (3, 3), tf32=True),
    *(Case(f"3x3 {dtype}", 2, (4,), (6, 6), 3, (3, 3), padding=((1, 1),) * 2, dtype=dtype) for dtype in ITEMSIZE),
    Case("chain", 2, (4,), (7, 8), 6, (3, 3), padding=((1, 1), (1, 1)), then=((6, (3, 2), ((0, 0), (1, 0)), 3), (2, (1, 1), (), 1))),
)  # fmt: skip

RECURRENT = tuple(
    RecurrentCase(f"{cell} {dtype}", cell, 6, 3, 5, 7, dtype=dtype)
    for cell in ("lstm", "gru")
    for dtype in ("float32", "float16", "bfloat16", "float64")
)

#: Both gradients of the small cases that have them, and single steps.
GRADIENTS = tuple(
    GradientCase(**asdict(case) | {"name": f"{of} gradient of {case.name}"}, of=of)
    for case in SMALL
    if not (case.then or case.tf32 or case.channels_last or case.misaligned or case.dtype not in ("float32", "float64"))
    for of in ("input", "weight")
)
STEPS = tuple(RecurrentCase(f"{cell} step", cell, 1, 3, 5, 7, single=True) for cell in ("lstm", "gru"))
FILTERS = (
    Case("filter", 1, (1,), (9, 11), 1, (3, 5), padding=((1, 1), (2, 2)), dtype="float64"),
    Case("filter of the inside", 1, (1,), (9, 11), 1, (2, 5)),
    Case("filter of taps", 1, (1,), (30,), 1, (5,), padding=((2, 2),)),
    Case("causal filter", 1, (1,), (30,), 1, (5,), padding=((4, 0),), dtype="float64"),
)
LARGE_KERNELS = (
    LargeKernelCase("large, alone", 1, (1,), (20, 17), 1, (7, 5), padding=((3, 3), (2, 2))),
    LargeKernelCase("large, merged", 1, (1, 2), (20, 17), 2, (7, 5), padding=((3, 3), (2, 2))),
    LargeKernelCase("large in groups", 1, (4,), (40,), 6, (9,), padding=((4, 4),), groups=2),
)

every_recurrent_case = pytest.mark.parametrize("case", RECURRENT, ids=str)
every_small_case = pytest.mark.parametrize("case", SMALL, ids=str)


class ToldClock:
    """Runs a call and tells a time that was said before: 1 s, unless `seconds` has one for the call."""

    rounds = (2, 3)
    warm_up = 3
    hopeless = 1e9
    method = "as told"

    def __init__(self, seconds=lambda call: 1.0):
        self.seconds, self.dead = seconds, False

    def sample(self, call, host):
        call()
        return Sample(self.seconds(call), 0.5)

    def row(self, call, count):
        return None

    def synchronise(self):
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered")


def numpy_machine(**changes):
    small = dict(clock=ToldClock(), copy_bytes=1 << 10, gemm_rows=lambda itemsize: 8)
    return replace(machines.numpy_machine(), **(small | changes))


@pytest.fixture
def host_machine():
    """The CUDA backend on the host device, as `cuda_machine` describes a GPU."""
    target = host_device_target()
    library = replace(numpy_library(), name="host device", to_host=target.to_host)
    return numpy_machine(
        library=library, arch="sm_90", fill=lambda *what: target.to_device(repeat_normals(*what)),
        gemm_rows=lambda itemsize: 16,
    )  # fmt: skip


@pytest.fixture
def torch():
    return Torch(pytest.importorskip("torch"), np)


# --- cases and their check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*SMALL, *LARGE_KERNELS], ids=str)
def test_the_reference_is_the_oracles(case):
    xs, weights = case.arrays()
    expected = xs
    for layer, weight in zip(case.layers, weights):
        settings = dict(stride=layer.stride, padding=list(layer.pairs), dilation=layer.dilation, groups=layer.groups)
        expected = oracle.conv(expected, weight, **settings)
    np.testing.assert_allclose(in_float64(np, case, xs, weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_a_gradient_is_the_adjoint_of_the_oracles_convolution(case):
    """For a random direction: what the result gains along it is what the gradient says."""
    xs, weights = case.arrays()
    layer = Case(**{name: value for name, value in asdict(case).items() if name != "of"})
    inputs, (weight,) = layer.arrays()
    gradient = in_float64(np, case, xs, weights)
    steps = [np.random.default_rng(1).standard_normal(a.shape).astype(a.dtype) for a in (*inputs, weight)]
    of_input = case.of == "input"
    settings = dict(stride=layer.stride, padding=list(layer.pairs), dilation=layer.dilation, groups=layer.groups)
    gain = oracle.conv(steps[:-1] if of_input else inputs, weight if of_input else steps[-1], **settings)
    along = np.concatenate(steps[:-1], axis=1) if of_input else steps[-1]
    np.testing.assert_allclose((gain * oracle.wide(xs[0])).sum(), (gradient * oracle.wide(along)).sum(), rtol=1e-10)
    assert error(np, case, case.ours(xs, weights), gradient) <= allowed_error(case)
    with pytest.raises(WrongResult):
        error(np, case, 2 * case.ours(xs, weights), gradient)


@every_small_case
def test_the_librarys_call_and_the_numpy_peer_are_right(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    if not case.then:
        assert_close(case.ours(xs, weights), expected, case.dtype, case.terms)
    assert error(np, case, case.ours(xs, weights), expected) <= allowed_error(case)
    peer = concatenate_im2col_matmul(np, case, xs, weights)
    wide = case.dtype not in ("float16", "bfloat16")  # whose sums NumPy keeps in themselves
    assert error(np, case, peer, expected) >= 0 if wide else np.allclose(peer.astype(float), expected, atol=0.5)


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_step_goes_on_from_its_state(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    states = dict(zip(("h0", "c0"), (oracle.wide(state)[np.newaxis] for state in xs[1:])))
    naive = reference_recurrent.recurrent(case.cell, *map(oracle.wide, (xs[0], *weights)), **states).y[0]
    np.testing.assert_allclose(expected, naive, rtol=1e-12, atol=1e-12)
    error(np, case, case.ours(xs, weights), expected)
    with pytest.raises(WrongResult):
        error(np, case, case.ours([xs[0], xs[1] * np.float32(0.5), *xs[2:]], weights), expected)


@every_recurrent_case
def test_a_recurrent_layer_is_the_oracles(case):
    xs, weights = case.arrays()
    expected = in_float64(np, case, xs, weights)
    naive = reference_recurrent.recurrent(case.cell, *map(oracle.wide, (*xs, *weights))).y
    np.testing.assert_allclose(expected, naive, rtol=1e-12, atol=1e-12)
    error(np, case, case.ours(xs, weights), expected)
    if np.dtype(dtype_from_name(case.dtype)).itemsize > 2:  # whose states NumPy keeps in themselves
        error(np, case, loop_in_python(np, case, xs, weights), expected)
    with pytest.raises(WrongResult, match="error"):
        error(np, case, case.ours(xs, [weights[0] + weights[0], *weights[1:]]), expected)


@pytest.mark.parametrize("case", RECURRENT[::2], ids=str)
def test_torchs_layer_is_a_peer(torch, case):
    xs, weights = case.arrays()
    (way,) = torch.ways(case, xs, weights)
    with torch.during(case):
        error(np, case, way.as_array(way.prepare()()), in_float64(np, case, xs, weights), transform=True)


@pytest.mark.parametrize("case", [*tables.recurrent_cases(gpu=False), *RECURRENT, *STEPS], ids=str)
def test_flops_and_bytes_of_a_recurrent_layer_are_planning_s(case):
    function, arguments, keywords = case.call(*case.arrays(lambda dtype, first, n: np.ones(n, dtype_from_name(dtype))))
    plan = cupyconv.explain(function, *arguments, **keywords)
    assert (case.flops, case.minimal_bytes) == (plan.flops, plan.minimal_bytes)


def test_recurrent_layers_are_in_both_tables():
    assert {*tables.recurrent_cases(gpu=False)} <= {*tables.numpy_cases()}
    assert {*tables.recurrent_cases(gpu=True)} <= {*tables.gpu_cases()}
    for gpu in (False, True):
        cases = tables.recurrent_cases(gpu=gpu)
        assert len({case.name for case in cases}) == len(cases) and {case.cell for case in cases} == {"lstm", "gru"}
    assert {(case.dtype, case.tf32) for case in cases} == {("float32", False), ("float32", True), ("float16", False)}


def test_the_command_measures_recurrent_layers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "numpy_cases", lambda: RECURRENT)
    monkeypatch.setattr(session, "LONGEST", 0)
    file = tmp_path / "numpy.json"
    assert main(["bench", "--json", str(file), "--peers", "numpy", "--seconds", "60", "--only", "gru float32"]) == 0
    printed = capsys.readouterr().out
    (row,) = record.read_record(file)["cases"]
    assert row["ways"].keys() == {"cupyconv", "numpy"} and row["rejected"].keys() == {"persistent"}
    for word in ("gru float32: floor", "cupyconv: step", "recurrent: cupyconv's time over each peer's"):
        assert word in printed


def test_flops_and_bytes_are_planning_s():
    for case in (*SMALL, *GRADIENTS):
        function, arguments, keywords = case.call(*case.arrays())
        plan = cupyconv.explain(function, *arguments, **keywords, on="sm_90")
        assert (case.flops, case.minimal_bytes) == (plan.flops, plan.minimal_bytes), case.name


def test_layouts_are_what_their_names_say():
    (x, *_), _ = Case("x", 2, (3,), (4, 5), 1, (1, 1), channels_last=True).arrays()
    assert x.shape == (2, 3, 4, 5) and x.strides == (240, 4, 60, 12)
    (x, *_), _ = Case("x", 1, (8,), (16,), 1, (1,), misaligned=True).arrays()
    assert x.flags.c_contiguous and x.ctypes.data % 16 == 4


def rounded_to_tf32(array):
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def test_the_check_sees_what_it_should():
    case = Case("3x3", 4, (64,), (16, 16), 32, (3, 3), padding=((1, 1), (1, 1)))
    xs, (weight,) = case.arrays()
    expected, right = in_float64(np, case, xs, [weight]), case.ours(xs, [weight])
    assert error(np, case, right, expected) < allowed_error(case)
    reduced = case.ours([rounded_to_tf32(x) for x in xs], [rounded_to_tf32(weight)])
    without_a_tap = weight.copy()
    without_a_tap[5, :, 2, 2] = 0
    one_wrong, not_a_number = right.copy(), right.copy()
    one_wrong[1, 2, 3, 4] += 0.05
    not_a_number[0, 0, 0, 0] = np.nan
    missing = case.ours(xs, [without_a_tap])
    for wrong in (reduced, missing, one_wrong, not_a_number, right.astype(np.float64), right[:1]):
        with pytest.raises(WrongResult):
            error(np, case, wrong, expected, transform=True)
    assert error(np, replace(case, tf32=True), reduced, expected) > allowed_error(case)


CONVOLUTIONS_ON_GPU = [case for case in tables.gpu_cases() if isinstance(case, Case)]

# --- tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cases", [tables.numpy_cases(), tables.gpu_cases()], ids=["numpy", "gpu"])
def test_names_are_their_own(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)


def test_the_processors_table_has_what_it_is_judged_by():
    cases = tables.numpy_cases()
    assert {case.group for case in cases} == {
        "convolutions", "input gradients", "weight gradients", "recurrent", "merge", "chains", "filters", "large kernels",
        "small calls",
    }  # fmt: skip
    layers = [case for case in cases if case.group == "convolutions"]
    assert {case.kernel for case in layers} >= {(1, 1), (3, 3), (1, 7), (5, 5), (7, 7), (11, 11), (3, 3, 3), (9,)}
    for of in ("input", "weight"):
        assert {case.stride for case in cases if case.group == f"{of} gradients"} == {1, 2, 4}
    assert {case.groups for case in layers} >= {16, 32, 96, 120} and "float64" in {case.dtype for case in layers}
    assert {case.single for case in cases if isinstance(case, RecurrentCase)} == {True, False}


def test_the_gpu_s_table_has_what_was_promised():
    cases = CONVOLUTIONS_ON_GPU
    assert {case.dtype for case in cases} == set(ITEMSIZE)
    resnet = [case for case in cases if case.name.startswith("ResNet-50") and not case.channels_last]
    assert len(resnet) == 23 * 2 * 4 and {case.batch for case in resnet} == {8, 32}
    first = Case("", 32, (3,), (224, 224), 64, (7, 7), stride=2, padding=((3, 3), (3, 3)))
    assert first.out_size == (112, 112)
    assert {case.size for case in resnet if case.kernel == (3, 3)} == {(s, s) for s in (56, 28, 14, 7)}
    for wanted in ("channels_last", "misaligned", "loop", "compiled", "tf32"):
        assert any(getattr(case, wanted) for case in cases), wanted
    assert {len(case.size) for case in cases} == {1, 2, 3}
    assert any(case.judged == "host" for case in cases)
    merges = [case for case in cases if case.pointwise and len(case.channels) > 1]
    assert {min(max(case.channels), case.out_channels) >= 128 for case in merges} == {True, False}


@pytest.mark.parametrize("case", [c for c in CONVOLUTIONS_ON_GPU if c.dtype in ("float32", "complex64")], ids=str)
def test_every_case_of_the_gpu_s_table_can_be_planned(case):
    function, arguments, keywords = case.call(*case.arrays(lambda dtype, first, n: np.empty(n, dtype)))
    plan = cupyconv.explain(function, *arguments, **keywords, on="sm_90")
    last = case.layers[-1]
    assert str((last.batch, last.out_channels, *last.out_size)) in plan.result


# --- clocks ---------------------------------------------------------------------------------------------------


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
    assert 0 < sample.device == sample.host and len(calls) > 2  # a turn is many short calls, as many as a machine can


def test_a_long_call_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(clock, "LONG", 0)
    monkeypatch.setattr(clock, "TURN", 0)
    clock.HostClock().sample(lambda: calls.append(0), 0)
    assert len(calls) == 1


class LoggedCuda:
    """The part of CuPy that a `CudaClock` uses, which writes down what is enqueued."""

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
    """Empty the cache, keep the GPU busy while the host enqueues, and only the call between the events."""
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


# --- peers ----------------------------------------------------------------------------------------------------


def array_ways(on_gpu, case, arrays):
    return ArrayLibrary(numpy_machine(arch="sm_90" if on_gpu else None)).ways(case, *arrays)


def test_which_array_peers_there_are():
    def names(on_gpu, **changes):
        case = replace(SMALL[0], **changes)
        return [way.name for way in array_ways(on_gpu, case, case.arrays())]

    assert names(False) == ["numpy", "loop over samples"]
    assert names(True) == ["cupy", "loop over samples"]
    assert names(True, loop=False, tf32=True) == names(True, loop=False, dtype="bfloat16") == []
    assert array_ways(True, SMALL[7], SMALL[7].arrays()) == []


@pytest.mark.parametrize("case", [case for case in SMALL if case.loop], ids=str)
def test_the_loop_over_samples_is_right(case):
    xs, weights = case.arrays()
    (loop,) = (way for way in array_ways(True, case, (xs, weights)) if way.name.startswith("loop"))
    call = loop.prepare()
    call()[...] = 0
    error(np, case, call(), in_float64(np, case, xs, weights))


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_computes_the_same(name):
    peer = installed_peer(name)
    ways = 0
    for case in (*SMALL, *GRADIENTS, *RECURRENT, *STEPS, *FILTERS, *LARGE_KERNELS):
        if name == "numpy" and case.dtype in ("float16", "bfloat16"):
            continue  # whose sums NumPy keeps in themselves
        xs, weights = case.arrays()
        with peer.during(case):
            for way in peer.ways(case, xs, weights):
                result, ways = way.as_array(way.prepare()()), ways + 1
                try:
                    error(np, case, result, in_float64(np, case, xs, weights), transform=way.transform)
                except WrongResult as wrong:
                    raise AssertionError(f"{way.name}, {case}: {wrong}") from wrong
    assert ways


def installed_peer(name):
    try:
        return PEERS[name](numpy_machine(), 1)
    except NotInstalled as missing:
        pytest.skip(f"could not import {missing}")


@pytest.mark.parametrize(
    ("name", "case", "count"),
    [
        ("numpy", GRADIENTS[0], 1), ("numpy", STEPS[0], 1), ("torch", GRADIENTS[0], 1), ("torch", GRADIENTS[7], 2),
        ("torch", STEPS[0], 1), ("onnxruntime", SMALL[3], 1), ("onnxruntime", GRADIENTS[6], 1),
        ("onnxruntime", GRADIENTS[7], 0), ("onnxruntime", STEPS[0], 1), ("jax", GRADIENTS[0], 1), ("jax", STEPS[0], 1),
        ("scipy", FILTERS[0], 2), ("scipy", FILTERS[1], 1), ("scipy", FILTERS[2], 2), ("scipy", FILTERS[3], 1),
        ("scipy", SMALL[3], 0), ("opencv", FILTERS[0], 1), ("opencv", FILTERS[2], 0),
        ("scipy", LARGE_KERNELS[0], 2), ("scipy", LARGE_KERNELS[1], 3), ("scipy", LARGE_KERNELS[2], 3),
        ("opencv", LARGE_KERNELS[0], 1), ("opencv", LARGE_KERNELS[1], 0), ("numpy", LARGE_KERNELS[0], 0),
    ],
)  # fmt: skip
def test_which_ways_a_peer_has(name, case, count):
    assert len(installed_peer(name).ways(case, *case.arrays())) == count, case.name


@every_small_case
def test_torch_has_both_formats(torch, case):
    ways = torch.ways(case, *case.arrays())
    assert [way.name for way in ways] == ["torch"] + ["torch channels-last"] * (len(case.size) > 1)


def test_torch_sees_the_very_memory(torch):
    for dtype in ITEMSIZE:
        array = np.zeros((2, 3, 4), dtype_from_name(dtype)).transpose(0, 2, 1)
        tensor = torch.tensor(array)
        assert tensor.data_ptr() == array.ctypes.data and str(tensor.dtype) == f"torch.{dtype}"
        back = torch.array(tensor)
        assert back.ctypes.data == array.ctypes.data and back.dtype == array.dtype and back.strides == array.strides


def test_torch_gets_the_formats_it_is_named_after(torch):
    case = replace(SMALL[3], channels_last=True)
    xs, weights = case.arrays()
    ways = {way.name: way.prepare() for way in torch.ways(case, xs, weights)}
    for name, contiguous in (("torch", False), ("torch channels-last", True)):
        inputs, kernels = ways[name].args[1:]
        library = pytest.importorskip("torch")
        for tensor in (*inputs, *kernels):
            assert tensor.is_contiguous(memory_format=library.channels_last) is contiguous, name


def test_the_flags_are_the_case_s_and_are_put_back(torch):
    library = pytest.importorskip("torch")
    before = library.backends.cudnn.allow_tf32, library.backends.cudnn.benchmark
    for tf32 in (True, False):
        with torch.flags(replace(SMALL[3], tf32=tf32)) as flags:
            assert flags["cudnn.allow_tf32"] is flags["matmul.allow_tf32"] is tf32
            assert library.backends.cudnn.benchmark and library.backends.cudnn.allow_tf32 is tf32
            assert flags["cudnn.benchmark"] and not flags["matmul.allow_fp16_reduced_precision_reduction"]
    assert (library.backends.cudnn.allow_tf32, library.backends.cudnn.benchmark) == before


def test_torch_compile_is_offered_where_the_case_asks(torch):
    case = replace(SMALL[0], compiled=True)
    ways = torch.ways(case, *case.arrays())
    assert ways[-1].name == "torch.compile" and ways[-1].patience > 0
    assert "torch.compile" not in [way.name for way in torch.ways(SMALL[0], *SMALL[0].arrays())]


def test_another_stream_is_refused():
    class Streams:
        class cuda:
            @staticmethod
            def current_stream():
                return SimpleNamespace(cuda_stream=7)

    torch = Torch(Streams, np)
    torch.check_stream(7)
    torch.check_stream(None)
    with pytest.raises(RuntimeError, match="0x7"):
        torch.check_stream(0)


# --- a whole run ----------------------------------------------------------------------------------------------


def here(machine, *participants, arrays=None):
    """The library and other participants in this process, begun like a GPU's."""
    arrays = SharedArrays(machine)
    made = {OURS: Ours, "numpy": partial(ArrayLibrary, machine)} | dict(participants)
    return {name: lambda make=make: Runner(machine, make(), arrays) for name, make in made.items()}


def run(machine, cases, path=None, *, participants=(), **how):
    whole = Session(machine, cases, here(machine, *participants), **({"seconds": 1000, "path": path} | how))
    return whole.run(), whole.record


def test_the_command_on_numpy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "numpy_cases", lambda: SMALL)
    monkeypatch.setattr(session, "LONGEST", 0)
    file = tmp_path / "numpy.json"
    arguments = ["--peers", "numpy,scipy", "--threads", "1", "--seconds", "60", "--only", "float32"]
    assert main(["bench", "--json", str(file), *arguments]) == 0
    printed = capsys.readouterr().out
    written = record.read_record(file)
    (row,) = written["cases"]
    assert row["case"]["name"] == "3x3 float32" and row["ways"].keys() >= {"cupyconv", "cupyconv direct", "numpy"}
    assert row["group"] == "convolutions" and row["chosen"] == "gemm" and {"gemm", "direct"} <= row["methods"].keys()
    assert written["running"] is None and not written["errors"] and not list(tmp_path.glob("*.part"))
    known = written["environment"]
    assert known["numpy"] == np.__version__ and "torch" not in known and known["blas_threads"] == "1 thread"
    assert written["floors"]["products"]["float32"] > 0 and written["floors"]["by"]["float32"] in ("cupyconv", "numpy")
    for word in ("3x3 float32: floor", "cupyconv: gemm", "convolutions: cupyconv's time", "nothing failed"):
        assert word in printed


def test_every_small_case_on_numpy():
    cases = [c for c in (*SMALL, *GRADIENTS, *STEPS) if c.dtype not in ("float16", "bfloat16")]
    status, written = run(numpy_machine(), cases)
    assert status == 0, written["errors"]
    for row in written["cases"]:
        way = row["ways"]["numpy"]
        assert way["ratio"] == 1 and way["rounds"] >= 2 and way["error"] < 1e-3 and way["beyond_result"] is not None
    assert {row["group"] for row in written["cases"]} == {
        "merge", "convolutions", "chains", "input gradients", "weight gradients", "recurrent",
    }  # fmt: skip


def test_every_method_is_timed_on_the_host_device(host_machine):
    cases = [c for c in SMALL if c.name in ("merge", "3x3", "depthwise", "3x3 merged, channels-last", "TF32")]
    status, written = run(host_machine, cases)
    assert status == 0, written["errors"]
    for row in written["cases"]:
        others = set(row["methods"]) - {row["chosen"]}
        assert {name for name in row["ways"] if name.startswith("cupyconv ")} == {f"cupyconv {m}" for m in others}
        assert set(row["methods"]) | set(row["rejected"]) == set(METHODS)
    kernels = {row["case"]["name"]: row["methods"]["direct"]["kernels"] for row in written["cases"]}
    assert kernels["merge"] == ["merge"] and kernels["3x3"] == ["direct"] and kernels["depthwise"] == ["depthwise"]
    assert "loop over samples" in written["cases"][0]["ways"]


def test_what_the_choice_is_held_to():
    """A chain to its layers in separate calls; a transform to exact arithmetic, which is timed where it was chosen."""
    wide = Case("wide", 2, (64,), (30, 30), 64, (3, 3), padding=((1, 1),) * 2)
    for case in (SMALL[-1], wide):
        xs, weights = case.arrays()
        ways = {way.name: way for way in Ours().ways(case, xs, weights)}
        chosen = Ours().notes(case, xs, weights)["chosen"]
        assert ("cupyconv exact" in ways) is (chosen in TRANSFORMS)
        assert ("cupyconv layer by layer" in ways) is bool(case.then)
        for way in ways.values():
            result = way.as_array(way.prepare()())
            error(np, case, result, in_float64(np, case, xs, weights), transform=way.transform)
            method = chosen if way.name == "cupyconv" else way.name.removeprefix("cupyconv ")
            assert way.transform is (method in TRANSFORMS)


def test_only_the_methods_asked_for_are_timed():
    case = SMALL[3]
    names = [way.name for way in Ours(("gemm",)).ways(case, *case.arrays())]
    assert "cupyconv direct" not in names
    assert "cupyconv direct" in [way.name for way in Ours().ways(case, *case.arrays())]


def test_torch_takes_part(torch):
    library = pytest.importorskip("torch")
    status, written = run(numpy_machine(), SMALL[3:6], participants=[("torch", lambda: torch)])
    assert status == 0, written["errors"]
    assert all({"torch", "torch channels-last"} <= row["ways"].keys() for row in written["cases"])
    assert written["cases"][0]["flags"]["cudnn.allow_tf32"] is False
    assert written["environment"]["torch"] == library.__version__
    assert all(row["ways"]["torch"]["beyond_result"] is None for row in written["cases"])


def test_who_is_broken_is_told_and_left_out_and_who_is_missing_is_named():
    def broken():
        raise OSError("libcudnn.so.9: cannot open shared object file")

    def missing():
        raise NotInstalled("jax")

    status, written = run(numpy_machine(), SMALL[:1], participants=[("torch", broken), ("jax", missing)])
    assert status == 1 and written["errors"] == [
        {"case": "environment", "way": "torch", "error": "OSError: libcudnn.so.9: cannot open shared object file"}
    ]
    assert "numpy" in written["cases"][0]["ways"] and "torch" not in written["environment"]
    assert written["environment"]["jax"] == "not installed"


class Made(Participant):
    """Ways by their names."""

    def __init__(self, **ways):
        self._ways = ways

    def ways(self, case, xs, weights):
        return [Way(name, partial(make, case, xs, weights)) for name, make in self._ways.items()]


def test_a_way_that_needs_patience_waits_for_a_longer_run():
    class Slow(Made):
        def ways(self, case, xs, weights):
            return [replace(way, patience=60.0) for way in super().ways(case, xs, weights)]

    made = Slow(slow=lambda case, xs, weights: partial(case.ours, xs, weights))
    for seconds, there in ((1000, True), (30, False)):
        _, written = run(numpy_machine(), SMALL[:1], participants=[("made", lambda: made)], seconds=seconds)
        assert ("slow" in written["cases"][0]["ways"]) is there


def test_a_case_that_was_begun_is_measured_though_time_is_up():
    class Late(Made):
        def ways(self, case, xs, weights):
            time.sleep(0.3)
            return super().ways(case, xs, weights)

    made = Late(late=lambda case, xs, weights: partial(case.ours, xs, weights))
    _, written = run(numpy_machine(), SMALL[:2], participants=[("made", lambda: made)], seconds=0.2)
    assert "late" in written["cases"][0]["ways"] and written["skipped"] == [SMALL[1].name]


def test_what_fails_is_told_and_the_rest_is_measured(capsys):
    def ours(factor):
        return lambda case, xs, weights: lambda: case.ours(xs, weights) * np.float32(factor)

    made = Made(broken=lambda *_: 1 / 0, wrong=ours(1.01), right=ours(1))
    status, written = run(numpy_machine(), SMALL[:2], participants=[("made", lambda: made)])
    assert status == 1
    assert [row["ways"].keys() & {"broken", "wrong", "right"} for row in written["cases"]] == [{"right"}] * 2
    assert [(e["case"], e["way"]) for e in written["errors"]] == [
        (case.name, way) for case in SMALL[:2] for way in ("broken", "wrong")
    ]
    printed = capsys.readouterr().out
    assert "FAILED  merge, broken: ZeroDivisionError" in printed and "4 failed:" in printed
    assert re.search(r"merge, wrong: WrongResult: error .*, allowed", printed)


def test_a_case_that_cannot_be_set_up_does_not_end_the_run(monkeypatch):
    monkeypatch.setattr(
        session, "in_float64", lambda xp, case, *_: 1 / 0 if case is SMALL[0] else in_float64(xp, case, *_)
    )
    status, written = run(numpy_machine(), SMALL[:2])
    assert status == 1 and written["errors"][0]["way"] == ""
    assert [row["case"]["name"] for row in written["cases"]] == [SMALL[1].name]


def test_a_peer_that_cannot_begin_a_case_is_told_and_the_rest_is_measured():
    class Refusing(Made):
        def ways(self, case, xs, weights):
            raise RuntimeError("no such layer")

    status, written = run(numpy_machine(), SMALL[:1], participants=[("refusing", Refusing)])
    assert status == 1 and "numpy" in written["cases"][0]["ways"]
    assert written["errors"] == [{"case": "merge", "way": "refusing", "error": "RuntimeError: no such layer"}]


def test_when_time_is_up_the_rest_is_named(capsys):
    status, written = run(numpy_machine(), SMALL[:3], seconds=0)
    assert status == 0 and written["cases"] == [] and written["skipped"] == [case.name for case in SMALL[:3]]
    assert "3 cases were not measured" in capsys.readouterr().out


def test_a_run_goes_on_where_one_ended(tmp_path):
    file = tmp_path / "results.json"
    run(numpy_machine(), SMALL[:1], file)
    ended = record.read_record(file)
    ended["running"], ended["used"] = SMALL[1].name, 40.0
    record.write_record(ended, file)
    whole = Session(numpy_machine(), SMALL[:3], here(numpy_machine()), seconds=1000, path=file)
    assert whole.run(resume=True) == 1  # the case during which the process ended
    assert [row["case"]["name"] for row in whole.record["cases"]] == [SMALL[0].name, SMALL[2].name]
    assert whole.record["errors"] == [
        {"case": SMALL[1].name, "way": "", "error": "the process ended while this case was measured"}
    ]
    assert whole.record["used"] > 40
    assert record.read_record(file) == json.loads(json.dumps(whole.record))


def test_resuming_on_another_machine_is_told(tmp_path):
    file = tmp_path / "results.json"
    run(numpy_machine(), SMALL[:1], file)
    another = numpy_machine(properties={"gpu": "another"})
    whole = Session(another, SMALL[:1], here(another), seconds=1000, path=file)
    assert whole.run(resume=True) == 1
    assert "differs in gpu" in whole.record["errors"][0]["error"]


def test_a_lost_device_begins_a_new_process(tmp_path, capsys):
    class Watching(session.Watch):
        restarted = armed = 0

        def rearm(self):
            self.armed += 1

        def disarm(self):
            self.armed = 0

        def restart(self):
            self.restarted += 1

    told = ToldClock()
    watch, file = Watching(), tmp_path / "results.json"

    def fill(dtype, first, elements):
        told.dead = True
        raise RuntimeError("an illegal memory access was encountered")

    status, _ = run(numpy_machine(clock=told, fill=fill), SMALL[:2], file, watch=watch)
    assert status == 1 and watch.restarted == 1
    assert record.read_record(file)["skipped"] == [SMALL[1].name]
    assert "no longer works" in capsys.readouterr().out


def test_the_watch_ends_a_process_that_hangs():
    """Armed for a moment in a process of its own."""
    import subprocess
    import sys

    code = (
        "import time; from cupyconv.bench.session import Watch; w = Watch(); w.STALL_SECONDS = 0.2; w.rearm();"
        "w.disarm(); time.sleep(0.4); print('alive', flush=True); w.rearm(); time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and done.stdout == "alive\n" and "Timeout" in done.stderr


def test_bad_arguments_are_told(capsys):
    assert main(["bench", "--resume"]) == 2
    assert main(["bench", "--only", "no such case"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "--methods", "direct,magic"])
    assert "magic" in capsys.readouterr().err
    for wrong in (["--threads", "0"], ["--threads", "two"]):
        with pytest.raises(SystemExit):
            main(["bench", *wrong])
    assert main(["bench", "--gpu", "--threads", "2"]) == 2
    capsys.readouterr()
    assert main(["bench", "--peers", "numpy,abacus"]) == 2
    assert "no peer is called abacus; there are numpy, torch" in capsys.readouterr().err
    assert main(["bench", "--groups", "magic"]) == 2
    assert "no group is called magic; there are" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_measure(capsys, monkeypatch):
    monkeypatch.setattr(bench, "cupy_with_gpu", lambda: (None, "no NVIDIA driver was found"))
    assert main(["bench", "--gpu"]) == 2
    assert "no NVIDIA driver was found" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what torch warns of is no failure of ours
def test_the_command_on_a_gpu(tmp_path, monkeypatch):
    gpu_target(for_timing=True)
    monkeypatch.setattr(session.Watch, "restart", lambda self: None)  # it would replace the process that runs the tests
    file = tmp_path / "gpu.json"
    assert main(["bench", "--gpu", "--seconds", "60", "--only", "host: 3x3, 8", "--json", str(file)]) == 0
    row = record.read_record(file)["cases"][0]
    assert row["ways"]["cupyconv"]["host_median"] > 0 and row["ways"]["cupyconv"]["row"] > 0


# --- floors and the page --------------------------------------------------------------------------------------


def test_the_floor_is_the_larger_time():
    case = Case("3x3", 1, (64,), (32, 32), 64, (3, 3))
    quick = floors.Rates(bandwidth=1e9, products={"float32": 1e30})
    work = {"bytes": case.minimal_bytes, "flops": case.flops}
    assert quick.floor(case) == {"seconds": case.minimal_bytes / 1e9, "bound": "memory", **work}
    slow = floors.Rates(bandwidth=1e30, products={"float32": 1e9, "TF32": 1e10})
    assert slow.floor(case) == {"seconds": case.flops / 1e9, "bound": "arithmetic", **work}
    assert slow.floor(replace(case, tf32=True))["seconds"] == case.flops / 1e10


def test_the_floor_of_the_original_merge_is_the_known_one():
    """384 MB in float32; 89 µs is what an H200 needs to copy as much."""
    merge = next(case for case in tables.gpu_cases() if case.name == "merge 5 x (4, 4, 10^6) -> 4, float32")
    assert merge.minimal_bytes == pytest.approx(384e6, rel=1e-5)
    assert floors.Rates(4.3e12, {"float32": 5e13}).floor(merge)["seconds"] == pytest.approx(89e-6, rel=0.01)


def test_the_fastest_product_sets_the_rate():
    machine = numpy_machine(clock=ToldClock(lambda call: 1.0 if getattr(call, "func", None) is np.matmul else 2.0))
    _, written = run(machine, SMALL[3:4])
    assert written["floors"]["by"] == {"float32": "numpy"} and written["floors"]["products"] == {"float32": 2 * 8**3}
    ours, numpy = (Runner(machine, made) for made in (Ours(), ArrayLibrary(machine)))
    assert ours.product_rate(SMALL[11]) == 8**3 and numpy.product_rate(SMALL[11]) is None  # NumPy and CuPy have no TF32


def way(median, **more):
    known = {"median": median, "min": median, "quartiles": [median, median], "row": median, "rounds": 5}
    return known | {"host_median": 1e-6} | more


def a_row(name="a case", group="convolutions", **ways):
    floor = {"seconds": 5e-5, "bound": "memory", "bytes": 10**8, "flops": 1}
    case = Case(name, 1, (1,), (8,), 1, (1,)).__dict__
    known = {"case": case, "group": group, "on_gpu": True, "chosen": "gemm", "methods": {}, "rejected": {}}
    return known | {"floor": floor, "ways": ways}


def page_of(*rows):
    return summary(record.new_record({}, 480) | {"cases": list(rows)})


def cells(page, label):
    """What stands in the first line with this label, word by word."""
    (line, *_) = (line for line in page.splitlines() if line.strip().startswith(label))
    return line.split()


def test_losses_launch_bound_calls_and_bad_choices_are_on_the_page():
    row = a_row(
        **{"cupyconv": way(1e-4, host_median=2e-4), "cupyconv direct": way(8e-5, ratio=1.25)},
        torch=way(5e-5, ratio=2.0),
    )
    printed = block(row)
    assert "cupyconv: gemm" in printed and "1,000 GB/s" in printed and "50%" in printed
    assert "launch-bound" in printed.splitlines()[1] and "launch-bound" not in printed.splitlines()[3]
    assert printed.splitlines()[3].endswith("2.00  faster than cupyconv")
    page = page_of(row)
    assert cells(page, "a case") == ["a", "case", "100.0", "µs", "gemm", "2.00", "2.00"]
    assert "on 0 of the 1 cases" in page
    assert "a case  gemm            direct            1.25   direct 80.0, gemm 100.0" in page


def test_the_page_has_every_ratio_and_the_means_of_each_group():
    page = page_of(
        a_row("one", cupyconv=way(1.0), torch=way(1.0, ratio=0.5), jax=way(1.0, ratio=4.0)),
        a_row("two", cupyconv=way(1.0), torch=way(1.0, ratio=2.0)),
        a_row("other", "merge", cupyconv=way(1.0), torch=way(1.0, ratio=3.0)),
        a_row("broken", torch=way(1.0)),
    )
    assert cells(page, "torch") == ["torch", "jax", "best", "peer"]
    assert cells(page, "one")[-3:] == ["0.50", "4.00", "4.00"] and cells(page, "two")[-2:] == ["2.00", "2.00"]
    assert cells(page, "geometric mean")[-3:] == ["1.00", "4.00", "2.83"] and "3.00" in page.partition("merge:")[2]
    assert [cells(page, label)[1:] for label in ("faster", "slower", "slowest")] == [
        ["1", "0", "0"], ["1", "1", "2"], ["2.00", "4.00", "4.00"],
    ]  # fmt: skip
    assert "exact" not in page and "failed" in cells(page, "broken")


def test_what_is_unsteady_is_marked():
    page = page_of(
        a_row("one", cupyconv=way(1.0), torch=way(1.0, ratio=0.5, steady=False), jax=way(1.0, ratio=4.0)),
        a_row("two", cupyconv=way(1.0, steady=False), torch=way(1.0, ratio=2.0)),
    )
    assert cells(page, "one")[-3:] == ["0.50?", "4.00", "4.00"] and cells(page, "two")[-2] == "2.00?"
    assert "? the machine was busy" in page and "unsteady" in block(a_row(cupyconv=way(1.0, steady=False)))


def test_exact_arithmetic_has_a_mean_of_its_own_and_is_no_method():
    """Of the second case the choice is exact itself."""
    page = page_of(
        a_row("one", **{"cupyconv": way(1.0), "cupyconv exact": way(4.0, ratio=0.25)}, torch=way(2.0, ratio=0.5)),
        a_row("two", cupyconv=way(1.0), torch=way(2.0, ratio=0.5)),
    )
    assert cells(page, "geometric mean  ")[-2:] == ["0.50", "0.50"]
    assert cells(page, "geometric mean, exact")[-2:] == ["1.00", "1.00"]
    assert "method=" not in page


def test_a_chain_that_loses_to_separate_calls_is_a_bad_choice():
    page = page_of(a_row("chain", **{"cupyconv": way(3.0), "cupyconv layer by layer": way(2.0, ratio=1.5)}))
    chosen = next(
        line.split() for line in page.partition("method=")[2].splitlines() if line.strip().startswith("chain")
    )
    assert "on 0 of the 1 cases" in page and chosen[1:6] == ["gemm", "layer", "by", "layer", "1.50"]
    assert (
        cells(page, "layer by layer")[-2:] == ["best", "peer"] and cells(page, "chain")[-1] == "1.50"
    )  # it is no peer


# --- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Begins a process that has modules of this test's instead of libraries; it is ended."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    runners = []

    def begin(name, threads=1, **modules):
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
        runners.append(ProcessRunner(name, threads))
        return runners[-1]

    yield begin
    for runner in runners:
        runner.close()


def test_another_process_does_what_this_one_would(begun):
    case, there, arrays = SMALL[3], begun("numpy"), SMALL[3].arrays()
    local = Runner(numpy_machine(), ArrayLibrary(numpy_machine()))
    assert there.properties() == local.properties() and there.set_up(case) == local.set_up(case)
    error(np, case, there.result("numpy"), in_float64(np, case, *arrays))
    assert 0 < there.sample("numpy", 0.0).device < 1 and there.row("numpy", 5) is None
    assert there.peak_bytes("numpy") > case.result_bytes and there.product_rate(case) > 0 and there.copy_rate() > 0
    there.clear()
    with pytest.raises(Raised, match="KeyError"):
        there.sample("numpy", 0.0)


def test_the_number_of_threads_is_set_before_a_library_is_imported(begun):
    stand_in = (
        "import os; print('chatter'); set = []; setNumThreads = set.append\n"
        "__version__ = [os.environ['OMP_NUM_THREADS'], os.environ['PJRT_NPROC'], set]"
    )
    assert begun("opencv", threads=3, cv2=stand_in).properties() == {"opencv": ["3", "3", [3]]}


def test_what_another_process_lacks_or_raises_is_told(begun):
    missing = begun("opencv", cv2="raise ModuleNotFoundError('no cv2', name='cv2')")
    with pytest.raises(NotInstalled, match=r"^cv2$"):
        missing.properties()
    broken = begun("jax", jax="raise OSError('libcudart.so: cannot open shared object file')")
    with pytest.raises(Raised, match=r"^OSError: libcudart"):
        broken.properties()


def test_a_process_that_ends_is_told_and_begun_anew(begun):
    dying = (
        "import os; __version__ = '1'; BORDER_CONSTANT = 0\nsetNumThreads = id\nfilter2D = lambda *a, **k: os._exit(3)"
    )
    runner = begun("opencv", cv2=dying)
    for _ in range(2):
        offers, _ = runner.set_up(FILTERS[0])
        with pytest.raises(Raised, match="ended with status 3"):
            runner.result(offers[0].name)
        runner.clear()
