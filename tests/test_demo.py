"""`python -m cupyconv`: the demo at a hundredth of its size, its exit status, and `info`."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from targets import gpu_target

import cupyconv
from cupyconv import configuration, demo
from cupyconv.__main__ import main
from cupyconv.cuda.run.kernel_sources import kernel_directory
from cupyconv.demo import libraries, merge, photograph
from cupyconv.demo.page import WIDTH, Page
from tests import nvrtc

ROOT = Path(__file__).resolve().parents[1]


def test_demo_passes_and_writes_the_picture(tmp_path, capsys):
    assert main(["demo", "--small", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    picture = tmp_path / photograph.PICTURE
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed.replace("\n", "")
    assert re.search(r"all \d+ checks passed", printed)
    assert "linmerge(fields, weight)" in printed
    assert "implicit_gemm<float32" in printed  # a plan for a GPU
    too_wide = [line for line in printed.splitlines() if len(line) > WIDTH and str(tmp_path) not in line]
    assert not too_wide


def test_two_libraries_are_compared_row_by_row(tmp_path, capsys):
    """The page is the one that a GPU prints, with NumPy in place of CuPy."""
    numpy = libraries.numpy_library()
    assert demo.run_demo(small=True, directory=tmp_path, libraries=[numpy, replace(numpy, name="other")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"NumPy .* other .* difference", printed)
    assert "no CuPy columns" not in printed


def test_a_wrong_result_fails_the_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge, "linmerge", lambda fields, weight: cupyconv.linmerge(fields, weight) * 1.001)
    monkeypatch.setattr(merge, "explain", lambda *_, **__: "")
    assert demo.run_demo(small=True, directory=tmp_path, libraries=[libraries.numpy_library()]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_part_that_breaks_fails_the_demo_and_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge, "linmerge", lambda *_: 1 / 0)
    assert demo.run_demo(small=True, directory=tmp_path, libraries=[libraries.numpy_library()]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  ZeroDivisionError" in printed
    assert (tmp_path / photograph.PICTURE).exists()


def test_a_picture_that_cannot_be_written_fails_nothing(tmp_path, capsys):
    file = tmp_path / "not a folder"
    file.write_text("")
    assert main(["demo", "--small", "--output", str(file)]) == 0
    assert "picture not written: Not a directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error, said",
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (OSError("encoder error"), "encoder error"),
    ],
    ids=str,
)
def test_a_folder_that_nobody_may_write_to_fails_nothing(error, said, tmp_path, capsys, monkeypatch):
    """The page shows the system's message.  The error is simulated, since a folder's mode does not stop root."""
    opened = open

    def refuse(file, mode="r", *rest, **settings):
        if Path(str(file)).parent == tmp_path and set(mode) & set("wax+"):
            raise error
        return opened(file, mode, *rest, **settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.open", refuse)
    assert main(["demo", "--small"]) == 0
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"picture not written: {said}" in " ".join(printed.split()) and "checks passed" in printed
    assert not any(tmp_path.iterdir())


def test_without_matplotlib_the_picture_is_skipped_and_nothing_fails(capsys, monkeypatch):
    monkeypatch.setattr(photograph, "photograph", lambda: None)
    page = Page()
    photograph.run(page, [libraries.numpy_library()], small=True, directory=None)
    assert not page.failures
    assert "needs matplotlib" in capsys.readouterr().out


def test_scarce_memory_reduces_the_merge_and_none_refuses_it(capsys):
    page = Page()
    scarce = replace(libraries.numpy_library(), free_bytes=lambda: 20 << 20)
    fits = merge._affordable(page, [scarce], 10**6, 8)
    assert 0 < fits < 10**6 and fits % 1000 == 0
    assert "instead of 1,000,000" in capsys.readouterr().out
    assert merge._affordable(page, [replace(scarce, free_bytes=lambda: 1000)], 10**6, 8) is None
    assert page.failures


def test_free_memory_is_a_plausible_number():
    free = libraries.host_free_bytes()
    assert free is None or 2**20 < free < 2**50


def test_progress_goes_to_a_terminal_only(capsys, monkeypatch):
    page = Page()
    assert list(page.progress(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(page.progress(range(3), "counting")) == [0, 1, 2]
    assert "counting" in capsys.readouterr().err


def test_a_nan_is_a_failure():
    page = Page()
    page.check("not a number", float("nan"), 1.0)
    assert page.failures


@pytest.mark.gpu
def test_demo_on_a_gpu(tmp_path, capsys):
    gpu_target()
    assert main(["demo", "--small", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed and "one block" in printed


def test_info_has_an_entry_for_everything(capsys):
    assert main(["info"]) == 0
    labels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    for label in (
        "cupyconv",
        "Python",
        "NumPy",
        "SciPy",
        "CuPy",
        "NVIDIA driver",
        "backends",
        "kernels",
        "kernel cache",
    ):
        assert label in labels


def test_a_package_in_an_archive_says_that_it_has_no_kernels(tmp_path):
    shutil.copytree(ROOT / "cupyconv", tmp_path / "tree" / "cupyconv", ignore=shutil.ignore_patterns("__pycache__"))
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path / "tree")
    command = [sys.executable, "-c", "import cupyconv; cupyconv.show_config()"]
    environment = {**os.environ, "PYTHONPATH": archive}
    page = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "kernels        not found: the CUDA sources of cupyconv are neither in" in page


def test_two_cupy_packages_are_a_warning(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda: _packages("cupy-cuda12x", "cupy-cuda13x", "numpy"))
    page = configuration.configuration_page()
    assert "WARNING: 2 CuPy packages" in page
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in " ".join(page.split())


@pytest.mark.parametrize(("cuda", "package"), [(13010, "cupy-cuda13x[ctk]"), (12040, "cupy-cuda12x[ctk]")])
def test_a_driver_without_cupy_gives_the_install_line(monkeypatch, cuda, package):
    monkeypatch.setattr("importlib.metadata.distributions", lambda: _packages("numpy"))
    monkeypatch.setattr(configuration, "driver_cuda_version", lambda: cuda)
    cupy, state = configuration.cupy_with_gpu()
    assert cupy is None
    assert package in state
    assert package in configuration.configuration_page()


def test_a_cupy_that_does_not_import_is_reported(monkeypatch):
    def broken(name):
        raise ImportError("libcublas.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr("importlib.metadata.distributions", lambda: _packages("cupy-cuda13x"))
    monkeypatch.setattr(configuration, "driver_cuda_version", lambda: 13000)
    monkeypatch.setattr(configuration, "import_module", broken)
    cupy, state = configuration.cupy_with_gpu()
    assert cupy is None
    assert state == "CuPy cannot use a GPU: ImportError: libcublas.so.13: cannot open shared object file"


def test_gabor_filters_see_no_even_brightness():
    bank = photograph.gabor_bank(7.0)
    assert bank.shape == (12, 1, 15, 15)
    assert np.abs(bank.sum(axis=(1, 2, 3))).max() < 1e-6


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_the_original_kernel_compiles(dtype):
    nvrtc.require()
    source = (kernel_directory() / "demo" / "one_block_merge.cu").read_text(encoding="utf-8")
    assert nvrtc.compile_source(source, (f"-DDTYPE={dtype}", *nvrtc.CHECK_OPTIONS), 90).spills == 0


def _packages(*names):
    return [SimpleNamespace(metadata={"Name": name}, version="14.0") for name in names]
