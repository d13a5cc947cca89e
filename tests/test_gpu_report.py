"""`python -m tests.gpu_report` without a GPU: its table, its parts on the host device and NumPy, and how processes end.

So no typing error costs time on a GPU.  Every part's commands run here; a program stands in for NVIDIA's sanitizer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupyconv.problem.arrays import ITEMSIZE
from cupyconv.problem.plan import Kernel
from tests.gpu_report import __main__ as command
from tests.gpu_report import compilation, parts, smoke
from tests.gpu_report.calls import ALL, CALLS, EXCHANGING, GEMM, REAL
from tests.gpu_report.parts import Run, Skipped
from tests.gpu_report.processes import DEAD, ROOT, Job, last_words, read_lines, run_jobs, slice_of
from tests.gpu_report.report import in_words, is_whole, report_of
from tests.gpu_report.status import NEVER, status, table
from tests.variants import all_variants


@pytest.fixture
def run(tmp_path):
    """A run on a machine without a GPU, in an empty folder."""
    return Run(tmp_path, no_gpu="there is none")


def soon(seconds=60.0):
    return time.monotonic() + seconds


def outcomes(run, part):
    return {line["name"]: line["outcome"] for line in run.lines(part) if "outcome" in line}


# --- the table ------------------------------------------------------------------------------------------------


def test_every_kernel_is_in_the_table():
    assert set(CALLS) == {path.stem for path in (ROOT / "kernels").glob("*.cu")}
    assert set(EXCHANGING) < set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_every_dtype_of_its_kernel(name):
    macros = [dict(variant.macros) for variant in all_variants() if variant.name == name]
    compiled = {values.get("Y_DTYPE", values.get("DTYPE")) for values in macros} & ITEMSIZE.keys()
    assert set(CALLS[name].dtypes) == (compiled or set(REAL))  # pack_weight.cu knows only the number of bits of a dtype


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_its_kernel_and_is_right(cuda_target, name, nightly):
    for dtype in CALLS[name].dtypes if nightly else ("float32",):
        found = smoke.run_call(cuda_target, name, dtype)
        assert found["message"] == "" and found["error"] <= found["allowed"], dtype


def test_a_call_that_runs_another_kernel_or_is_wrong_fails(cuda_target, monkeypatch):
    right = CALLS["merge"]

    def message(points, **changes):  # each call has other sizes: a call like an earlier one prepares nothing
        shapes = ((2, 5, points), (2, 3, points), (7, 8))
        monkeypatch.setitem(CALLS, "merge", replace(right, shapes=shapes, **changes))
        return smoke.run_call(cuda_target, "merge", "float32")["message"]

    def times(factor):
        """Return a function that is wrong if a method is named; the reference names none."""
        return lambda *arrays, **how: right.function(*arrays, **how) * (factor if how else 1)

    assert message(50) == ""
    assert message(51, how=GEMM).startswith("merge did not run, but ")
    assert message(52, function=times(1 + 1e-4)).startswith("an error of 0.0001,")
    assert message(53, function=times(float("nan"))).startswith("an error of inf,")


# --- the command ----------------------------------------------------------------------------------------------


@pytest.mark.host_device
def test_the_command_runs_to_its_end_without_a_gpu(cuda_target, tmp_path):
    out = tmp_path / "report"
    arguments = ["--out", str(out), "--minutes", "1", "--kernel", "merge", "pool", "--commit", "abc"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUPYCONV_REQUIRE_GPU": "0"}
    line = [sys.executable, "-m", "tests.gpu_report", *arguments]
    result = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((out / "gpu-report.json").read_text("utf-8"))
    assert f"smoke       {len(REAL) * 2} passed" in result.stdout
    assert written["target"] == "host_device" and written["environment"]["python"]
    assert [name for name, part in written["parts"].items() if not part["skipped"]] == ["environment", "smoke"]
    assert set(written["parts"]) == {"environment", *parts.PARTS}
    assert {(line["kernel"], line["dtype"]) for line in written["smoke"]} == {
        (name, dtype) for name in ("merge", "pool") for dtype in REAL
    }
    again = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 2 and "has a report already" in again.stderr


def test_a_gpu_that_is_required_is_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUPYCONV_REQUIRE_GPU", "1")
    monkeypatch.setattr(command, "cupy_with_gpu", lambda: (None, "no NVIDIA driver was found"))
    assert command.main(["--out", str(tmp_path / "report")]) == 2
    assert "asks for a GPU" in capsys.readouterr().err


def test_a_part_that_fails_does_not_stop_the_next(run, monkeypatch, capsys):
    limits = {}

    def broken(run, until):
        limits["broken"] = until - time.monotonic()
        raise RuntimeError("a typo")

    def cannot(run, until):
        limits["cannot"] = until - time.monotonic()
        raise Skipped("there is no such program")

    monkeypatch.setattr(command, "PARTS", {"broken": (broken, 0.25), "cannot": (cannot, 0.25)})
    monkeypatch.setattr(command, "environment", lambda run, until: None)
    assert command.report(run, ["broken", "cannot"], soon(100)) == 1
    assert 49 < limits["broken"] <= 50 and 99 < limits["cannot"] <= 100  # the second gets the time that the first left
    printed = capsys.readouterr().out
    assert "RuntimeError: a typo" in printed and "skipped: there is no such program" in printed


# --- processes ------------------------------------------------------------------------------------------------


def python(code):
    return sys.executable, "-c", textwrap.dedent(code)


def test_jobs_end_when_their_time_is_over_with_all_they_started(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
        import pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path({str(pid)!r}).write_text(str(child.pid))
        print("begun")
        time.sleep(60)"""
    ended = []
    jobs = [
        Job("quick", python("print('done'); raise SystemExit(3)")),
        Job("slow", python(code)),
        Job("never", python("")),
    ]
    run_jobs(jobs, at_once=1, until=soon(4), log=tmp_path / "log", then=ended.append)
    assert [(each.job.name, each.status) for each in ended] == [("quick", 3), ("slow", None)]
    assert ended[0].output == "done\n" and "begun" in (tmp_path / "log").read_text()
    for _ in range(100):
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid.read_text()}/stat").read_text().split()[2] == "Z":
            return  # it has ended, and its status was not requested
        time.sleep(0.05)
    raise AssertionError("what the job started is still there")


def test_a_job_may_be_followed_by_another(tmp_path):
    begun = []

    def then(ended):
        begun.append((ended.job.name, ended.job.variables["N"]))
        return replace(ended.job, variables={"N": "2"}) if ended.job.variables["N"] == "1" else None

    job = Job("again", python("import os; raise SystemExit(int(os.environ['N']))"), {"N": "1"})
    run_jobs([job], at_once=2, until=soon(), log=tmp_path / "log", then=then)
    assert begun == [("again", "1"), ("again", "2")]


# --- the parts ------------------------------------------------------------------------------------------------


def test_of_a_crash_its_cause_is_kept_however_long_its_traceback():
    long = "  File somewhere, line 1 in deep\n" * 500
    assert last_words(f"...\nFatal Python error: Aborted\n\n{long}").startswith("Fatal Python error: Aborted\n")
    assert len(last_words(f"Fatal Python error: Aborted\n{long}")) == 4000
    assert last_words(f"{long}RuntimeError: out of memory\n").endswith("\nRuntimeError: out of memory\n")


@pytest.mark.host_device
def test_a_call_that_ends_the_process_is_a_failure_and_the_next_dtype_is_run(cuda_target, run, monkeypatch):
    module = parts._module

    def aborting(name, *arguments):
        if "float16" not in arguments:
            return module(name, *arguments)
        return python("import os; os.abort()")

    monkeypatch.setattr(parts, "_module", aborting)
    parts.smoke(replace(run, kernels=("pool",)), soon())
    expected = {f"pool {dtype}": "passed" for dtype in REAL} | {"pool float16": "failed"}
    assert outcomes(run, "smoke") == expected
    assert report_of(read_lines(run.results), None, "host_device")["parts"]["smoke"]["counts"] == {
        "failed": 1,
        "passed": 3,
    }


@pytest.mark.host_device
def test_dtypes_behind_one_that_took_the_gpu_are_run_by_another_process(cuda_target, run, monkeypatch):
    module = parts._module
    line = dict(part="smoke", name="pool float16", kernel="pool", dtype="float16", outcome="failed", message="lost")
    lost = f"import pathlib; pathlib.Path({str(run.results)!r}).open('a').write({json.dumps(line) + chr(10)!r}); exit({DEAD})"

    def losing(name, *arguments):
        return python(lost) if "float16" in arguments else module(name, *arguments)

    monkeypatch.setattr(parts, "_module", losing)
    parts.smoke(replace(run, kernels=("pool",)), soon())
    assert outcomes(run, "smoke") == {f"pool {dtype}": "passed" for dtype in REAL} | {"pool float16": "failed"}
    assert [line["message"] for line in run.lines("smoke") if line.get("outcome") == "failed"] == ["lost"]


SUITE = """
    import os, sys, types
    import pytest

    def test_passes(): pass
    def test_fails(): assert 1 + 1 == 3
    def test_skips(): pytest.skip("no such thing")
    def test_ends_the_process(): os.abort()
    def test_after_that(): pass
    def test_loses_the_gpu():
        def fail(): raise RuntimeError("an illegal memory access was encountered")
        runtime = types.SimpleNamespace(deviceSynchronize=fail)
        cuda = types.SimpleNamespace(runtime=runtime, is_available=lambda: True)
        sys.modules["cupy"] = types.SimpleNamespace(cuda=cuda)
        assert False
    def test_with_a_new_gpu(): assert "cupy" not in sys.modules
    @pytest.fixture
    def broken():
        yield
        raise RuntimeError("not given back")
    def test_teardown(broken): pass
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_every_test_is_run_whatever_another_does(run, tmp_path, processes):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_suite.py").write_text(textwrap.dedent(SUITE))
    (suite / "test_broken.py").write_text("import no_such_module")
    run = replace(run, processes=processes, tests=(str(suite),))
    parts.run_tests(run, soon())
    found = {name.partition("::")[2] or name: outcome for name, outcome in outcomes(run, "tests").items()}
    (collected,) = [name for name in found if "test_broken" in name]
    assert found == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_ends_the_process": "failed",
        "test_after_that": "passed", "test_loses_the_gpu": "failed", "test_with_a_new_gpu": "passed",
        "test_teardown": "failed", collected: "failed",
    }  # fmt: skip
    report = report_of(read_lines(run.results), None, "gpu")
    assert "not run" not in report["parts"]["tests"]["counts"]
    messages = {entry["name"].partition("::")[2]: entry["message"] for entry in report["parts"]["tests"]["failures"]}
    assert "Fatal Python error: Aborted" in messages["test_ends_the_process"]
    assert "assert (1 + 1) == 3" in messages["test_fails"]
    assert "Fatal Python error: Aborted" in in_words(report)


def test_a_share_whose_time_was_over_before_it_began_is_not_forgotten(run, tmp_path):
    parts.run_tests(replace(run, tests=(str(tmp_path),)), soon(0))
    report = report_of(read_lines(run.results), None, "gpu")
    assert report["parts"]["tests"]["counts"] == {"not run": run.processes} and not is_whole(report)


def test_what_was_not_reached_is_counted_once_for_each_share():
    lines = [
        {"part": "tests", "share": "0/2", "expected": 2}, {"part": "tests", "share": "1/2", "expected": 1},
        {"part": "tests", "share": "0/2", "begun": "a"}, {"part": "tests", "name": "a", "outcome": "passed"},
        {"part": "tests", "share": "0/2", "expected": 2},  # from a process that continues
        {"part": "tests", "share": "0/2", "begun": "b"},
    ]  # fmt: skip
    report = report_of(lines, None, "gpu")
    assert report["parts"]["tests"]["counts"] == {"not run": 2, "passed": 1} and not is_whole(report)


def test_variants_are_compiled_with_a_line_for_each(tmp_path):
    def load(launch):
        if launch.kernel.name == "merge":
            raise RuntimeError("it does not compile")

    device = SimpleNamespace(load=load)
    results = tmp_path / "results"
    kernels = [Kernel("direct", (("TILE", "4"),)), Kernel("merge", ())]
    assert compilation.compile_variants(device, kernels, results, "1/8") == 1
    expected, compiled, failed = read_lines(results)
    assert expected == {"part": "compile", "share": "1/8", "expected": 2}
    assert (compiled["name"], compiled["outcome"]) == ("direct TILE=4", "passed")
    assert (failed["name"], failed["outcome"], failed["message"]) == (
        "merge",
        "failed",
        "RuntimeError: it does not compile",
    )


def test_variants_are_dealt_out():
    every = compilation.planned_variants(90)
    shares = [every[slice_of(f"{number}/7")] for number in range(7)]
    assert sorted(map(repr, every)) == sorted(repr(variant) for share in shares for variant in share)
    assert len(every) > 300 and set(compilation.planned_variants(91)) == set(every)  # planned like the newest known one


@pytest.mark.host_device
def test_what_a_sanitizer_finds_is_a_failure(cuda_target, run, tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        "#!/bin/sh\ntool=$2\n"
        'while [ "$1" != "${1#--}" ]; do shift 2; done\n'
        '"$@" || exit $?\n'
        'if [ "$tool" = racecheck ]; then echo "a hazard"; exit 99; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = replace(run, kernels=("weight_gradient", "merge"))
    parts.run_sanitizers(run, soon())
    assert outcomes(run, "sanitizer") == {
        "memcheck weight_gradient": "passed", "racecheck weight_gradient": "failed", "synccheck weight_gradient": "passed"
    }  # fmt: skip
    (failure,) = report_of(read_lines(run.results), None, "gpu")["parts"]["sanitizer"]["failures"]
    assert "status 99" in failure["message"] and "a hazard" in failure["message"]


def test_a_sanitizer_that_is_not_there_is_a_reason(run, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "find_sanitizer", lambda: None)
    with pytest.raises(Skipped, match="neither on PATH"):
        parts.run_sanitizers(run, soon())


def test_a_sanitizer_is_found_in_cudas_folder(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert parts.find_sanitizer() == str(program)


def test_the_bench_is_run_and_its_record_is_reported(run, tmp_path):
    run = replace(run, cases="1x1, 512 -> 512")
    parts.run_bench(run, soon(60), "--peers", "numpy")
    assert outcomes(run, "bench") == {"1x1, 512 -> 512, 7x7, N 8": "passed"}
    report = command.write_report(run)
    (row,) = report["bench"]
    assert row["floor"] > 0 and row["ways"]["cupyconv"] > 0 and row["kernels"] == []


def test_a_bench_that_ends_early_is_resumed_once_for_a_case(run, tmp_path, monkeypatch):
    record = {"cases": [], "errors": [], "skipped": ["b"], "running": "a"}
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >> {tmp_path / 'calls'}\necho '{json.dumps(record)}' > {run.bench_record}\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    parts.run_bench(run, soon(), "--gpu")
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--gpu" in first and second == f"{first} --resume"
    assert outcomes(run, "bench") == {"a": "failed"}


def test_a_bench_that_cannot_begin_is_a_failure(run):
    parts.run_bench(replace(run, cases="no such case"), soon())
    assert outcomes(run, "bench") == {"bench": "failed"}


# --- the pages' table ---------------------------------------------------------------------------------------


def invented(tmp_path, **changes):
    """Write a report with invented results."""
    case = {"dtype": "float32", "tf32": False, "chosen": "direct", "case": "a"}
    report = {
        "target": "gpu",
        "environment": {"gpu": "A GPU", "driver": "1.2", "cupy": "14", "commit": "abc", "date": "2000-01-01"},
        "parts": {"tests": {"skipped": "", "seconds": 1, "counts": {"failed": 1, "passed": 1234}, "failures": []}},
        "smoke": [
            {"kernel": "merge", "dtype": "float32", "outcome": "passed"},
            {"kernel": "merge", "dtype": "float16", "outcome": "failed"},
        ],
        "bench": [
            {**case, "floor": 1.0, "kernels": ["merge"], "ways": {"cupyconv": 2.0, "cupyconv gemm": 9.0}},
            {**case, "floor": 1.0, "kernels": ["merge", "epilogue"], "ways": {"cupyconv": 1.25}},
            {**case, "floor": 1.0, "kernels": ["merge"], "ways": {"cupyconv": 1.0}},
            {**case, "floor": 1.0, "kernels": ["merge"], "ways": {"cupyconv": 100.0}, "tf32": True},
        ],
    } | changes
    (tmp_path / "gpu-report-invented.json").write_text(json.dumps(report))
    return report


def test_the_status_of_a_report(tmp_path):
    invented(tmp_path)
    text = status(tmp_path)
    assert "**A GPU**, driver 1.2, CuPy 14, commit abc, 2000-01-01." in text
    assert "1 failed, 1,234 passed" in text
    rows = {
        line.split("|")[1].strip(" `"): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()[2:]
        if line
    }
    assert rows["kernel"] == list(ALL) and set(CALLS) < rows.keys()
    assert dict(zip(ALL, rows["merge"])) == {
        "float16": "**failed**", "bfloat16": "**never**", "float32": "passed, 80%", "float64": "**never**",
        "complex64": "", "complex128": "",
    }  # fmt: skip
    assert dict(zip(ALL, rows["epilogue"]))["float32"] == "**never**, 80%"
    assert {len(row) for row in rows.values()} == {len(ALL)}


def test_without_a_report_the_status_is_never(tmp_path):
    assert status(tmp_path) == NEVER


def test_a_dry_run_is_no_status(tmp_path):
    with pytest.raises(ValueError, match="not made on a GPU"):
        table(invented(tmp_path, target="host_device"))
