"""Every example runs unchanged and passes its own check; examples that train do so only with correct gradients."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from targets import gpu_target

from tests import fake_gpu

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LEARNING = ["denoise", "forecast_co2", "train_digits"]
WITH_A_TEST = [*LEARNING, "densenet_block", "larger_than_memory"]
PNG = b"\x89PNG"


def run(name: str, directory: Path, *arguments: str) -> str:
    """Return the output of a script, which must end without error or warning; it writes its files to `directory`."""
    runner = ["-m", "tests.fake_gpu"] if fake_gpu.is_installed() else []
    command = [sys.executable, "-W", "error", *runner, str(ROOT / "examples" / f"{name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False, timeout=300, env=environment, cwd=directory
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_each_device(test):
    """Parametrize `test(device=…)` with the arguments for NumPy, and for a GPU if there is one."""
    return pytest.mark.parametrize(
        "device", [(), pytest.param(("--cupy",), marks=pytest.mark.gpu)], ids=["numpy", "gpu"]
    )(test)


@pytest.fixture(autouse=True)
def gpu_for_those_on_one(request):
    if request.node.get_closest_marker("gpu"):
        gpu_target()


def needs_statsmodels() -> None:
    pytest.importorskip("statsmodels", reason="statsmodels is not installed: free-threaded Pythons have no wheel")


def test_there_are_examples():
    names = [example.stem for example in EXAMPLES]
    assert names == [
        "batchnorm_folding",
        "denoise",
        "densenet_block",
        "edges",
        "filters",
        "forecast_co2",
        "larger_than_memory",
        "merge_fields",
        "onnx_nodes",
        "train_digits",
    ]


@on_each_device
@pytest.mark.parametrize("name", [example.stem for example in EXAMPLES if example.stem not in WITH_A_TEST])
def test_example(name: str, device: tuple[str, ...], tmp_path: Path):
    assert run(name, tmp_path, *device).strip()


@pytest.mark.parametrize("name", [example.stem for example in EXAMPLES])
def test_help_computes_nothing(name: str, monkeypatch, capsys):
    """Printing the help computes nothing.  It runs in this process, which has imported what the examples need."""
    if name == "forecast_co2":
        needs_statsmodels()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    assert "--cupy" in printed


@on_each_device
def test_memory_of_a_dense_block_is_linear_in_its_depth(device: tuple[str, ...], tmp_path: Path, monkeypatch):
    """Doubling the layers less than doubles the memory, while with concatenation it at least triples."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # products are small: on a busy machine, threads would only wait
    printed = run("densenet_block", tmp_path, *device, "--output", "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)
    rows = re.findall(r"^ *(\d+) +([\d.]+) MB(?: x [\d.]+)? +([\d.]+) MB", printed, re.MULTILINE)
    layers, concatenating, merged = zip(*(map(float, row) for row in rows))
    assert layers == (4, 8, 16, 32)
    assert concatenating[3] > 3 * concatenating[2]
    assert list(merged) == sorted(merged), "what a first call imports was counted"
    assert merged[3] < 2 * merged[2] < 4 * merged[1]
    assert merged[3] < concatenating[3] / 4
    (difference,) = re.findall(r"largest relative difference of a result: (\S+)", printed)
    assert float(difference) < 1e-4


def test_a_volume_is_larger_than_a_workers_memory(tmp_path: Path):
    """From Zarr to Zarr; a worker that exceeds its memory limit is ended, and the run fails with it."""
    for needed in ("distributed", "zarr"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    with socket.socket() as another_dashboard:
        with contextlib.suppress(OSError):  # the port is in use already
            another_dashboard.bind(("", 8787))
            another_dashboard.listen()
        printed = run("larger_than_memory", tmp_path, "--size", "416", "--memory", "256", "--workers", "1")
    assert "100% Completed" in printed
    (volume,) = map(int, re.findall(r"volume (\d+) MiB", printed))
    ((peak, limit),) = re.findall(r"peak memory of a worker (\d+) MiB, limit (\d+)", printed)
    assert int(peak) < int(limit) < volume


@on_each_device
def test_edges_are_drawn(device: tuple[str, ...], tmp_path: Path):
    run("edges", tmp_path, *device, "--output", "edges.png")
    assert (tmp_path / "edges.png").read_bytes().startswith(PNG)


@on_each_device
def test_digits_are_learned(device: tuple[str, ...], tmp_path: Path):
    """Training reaches 98 % in five epochs.

    Weight gradients that are zero, negated or transposed, and skips whose gradient is omitted, were tried: none reaches
    80 %.
    """
    printed = run("train_digits", tmp_path, *device, "--epochs", "5")
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the test digits correct", printed)]
    assert len(shares) == 5
    assert shares[-1] >= 94
    assert (tmp_path / "digits.png").read_bytes().startswith(PNG)


@on_each_device
def test_the_forecast_is_better_than_last_year_and_growth(device: tuple[str, ...], tmp_path: Path):
    """The error is 0.718, that of last year's values and growth is 0.753.

    Gradients of the convolutions, or of the GRU's input, that are zero or negated were tried: none gets below 0.77.
    """
    needs_statsmodels()
    printed = run("forecast_co2", tmp_path, *device)
    errors = {name.strip(): float(error) for name, error in re.findall(r"^  (\D+)([\d.]+)$", printed, re.MULTILINE)}
    assert set(errors) == {"a year ago", "a year ago, and growth", "least squares", "convolutions and GRU"}
    assert errors["convolutions and GRU"] < errors["a year ago, and growth"] < errors["a year ago"]
    assert (tmp_path / "co2.png").read_bytes().startswith(PNG)


def decibels(printed: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+) +([\d.]+) dB", printed)}


@on_each_device
def test_the_denoiser_is_better_than_a_median_filter(device: tuple[str, ...], tmp_path: Path):
    found = decibels(run("denoise", tmp_path, *device))
    assert found["noisy"] == pytest.approx(20, abs=0.1)  # from a standard deviation of 0.1
    assert found["median"] > found["noisy"]
    assert found["denoised"] > found["median"] + 4
    assert (tmp_path / "denoise.png").read_bytes().startswith(PNG)
    assert (ROOT / "examples" / "denoise_weights.npz").stat().st_size < 100_000


@on_each_device
def test_a_denoiser_learns(device: tuple[str, ...], tmp_path: Path):
    """In eighty steps from new weights, the loss falls, and the weights that are written reduce noise."""
    weights = tmp_path / "weights.npz"
    printed = run("denoise", tmp_path, *device, "--train", "--steps", "80", "--weights", str(weights))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 10  # each is the mean of eight steps
    assert losses[-1] < 0.75 * losses[0]
    found = decibels(printed)
    assert found["denoised"] > found["noisy"] + 1


@pytest.mark.parametrize("name, channels", [("denoise", 3), ("train_digits", 1)])
def test_reverse_pass_by_finite_differences(name: str, channels: int):
    """The gradient of sum(y * grad) is right for each weight and bias along a random direction, in float64."""
    example = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)
    random = np.random.default_rng(0)
    layers = [[random.normal(0, 0.3, array.shape) for array in layer] for layer in example["new_layers"](random)]
    x = random.normal(size=(2, channels, 8, 8))
    y, reverse = example["network"](layers, x)
    grad, step = random.normal(size=y.shape), 1e-6
    for layer, grads in zip(layers, reverse(grad), strict=True):
        for k, (array, found) in enumerate(zip(layer, grads, strict=True)):
            assert found.shape == array.shape
            direction = random.normal(size=array.shape)
            values = []
            for sign in (1, -1):
                layer[k] = array + sign * step * direction
                values.append(np.sum(example["network"](layers, x)[0] * grad))
            layer[k] = array
            expected = (values[0] - values[1]) / (2 * step)
            assert np.sum(found * direction) == pytest.approx(expected, rel=1e-5)
