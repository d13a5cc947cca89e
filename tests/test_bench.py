"""`python -m cupyconv bench` as a whole: its runs, their failures, how they resume; and the processes of its peers.

The whole command runs on NumPy and on the host device with small cases and a clock that reports given times.  If torch
is installed, its results are checked.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from bench_cases import FILTERS, GRADIENTS, SMALL, STEPS, ToldClock, numpy_machine, on_the_host_device
from targets import gpu_target

from cupyconv import bench
from cupyconv.__main__ import main
from cupyconv.bench import record, session
from cupyconv.bench.array_peers import ArrayLibrary
from cupyconv.bench.cases import Case
from cupyconv.bench.own_ways import TRANSFORMS, Ours
from cupyconv.bench.peers import NotInstalled, Participant, Way
from cupyconv.bench.processes import ProcessRunner, Raised
from cupyconv.bench.record import OURS
from cupyconv.bench.reference import error, in_float64
from cupyconv.bench.runner import Runner, SharedArrays
from cupyconv.bench.session import Session
from cupyconv.bench.torch_peers import Torch
from cupyconv.problem.problems import METHODS


@pytest.fixture
def host_machine():
    return on_the_host_device()


@pytest.fixture
def torch():
    return Torch(pytest.importorskip("torch"), np)


def here(machine, *participants, arrays=None):
    """Return the library and other participants in this process, started like those of a GPU."""
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
    """A chain is compared with separate calls of its layers, a chosen transform with exact arithmetic."""
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
    """A participant with the given ways."""

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


def test_a_case_that_was_begun_is_measured_though_time_is_up(monkeypatch):
    late = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr(session, "time", clock)

    class Late(Made):
        def ways(self, case, xs, weights):
            late[0] += 1000
            return super().ways(case, xs, weights)

    made = Late(late=lambda case, xs, weights: partial(case.ours, xs, weights))
    _, written = run(numpy_machine(), SMALL[:2], participants=[("made", lambda: made)], seconds=999)
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
    """A process of its own is ended after a short limit, but not while the watch is disarmed."""
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
    assert "unknown peers: abacus; known are numpy, torch" in capsys.readouterr().err
    assert main(["bench", "--groups", "magic"]) == 2
    assert "unknown groups: magic; known are" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_measure(capsys, monkeypatch):
    monkeypatch.setattr(bench, "cupy_with_gpu", lambda: (None, "no NVIDIA driver was found"))
    assert main(["bench", "--gpu"]) == 2
    assert "no NVIDIA driver was found" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's warnings are not failures of this library
def test_the_command_on_a_gpu(tmp_path, monkeypatch):
    gpu_target(for_timing=True)
    monkeypatch.setattr(session.Watch, "restart", lambda self: None)  # it would replace the process that runs the tests
    file = tmp_path / "gpu.json"
    assert main(["bench", "--gpu", "--seconds", "60", "--only", "host: 3x3, 8", "--json", str(file)]) == 0
    row = record.read_record(file)["cases"][0]
    assert row["ways"]["cupyconv"]["host_median"] > 0 and row["ways"]["cupyconv"]["row"] > 0


def test_the_fastest_product_sets_the_rate():
    machine = numpy_machine(clock=ToldClock(lambda call: 1.0 if getattr(call, "func", None) is np.matmul else 2.0))
    _, written = run(machine, SMALL[3:4])
    assert written["floors"]["by"] == {"float32": "numpy"} and written["floors"]["products"] == {"float32": 2 * 8**3}
    ours, numpy = (Runner(machine, made) for made in (Ours(), ArrayLibrary(machine)))
    assert ours.product_rate(SMALL[11]) == 8**3 and numpy.product_rate(SMALL[11]) is None  # NumPy and CuPy have no TF32


# --- processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Yield a function that starts a process with modules of this test instead of libraries; end the processes."""
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
