"""Fixtures for every test: the `target` that arrays are stored on, and options of a run.

A target is one array library on one device: NumPy, the CUDA backend on the host device, and CuPy on a GPU.  The same
test body runs on all three.  If a target is missing, its tests skip with the reason.  The variables
``CUPYCONV_REQUIRE_HOST_DEVICE=1``, ``CUPYCONV_REQUIRE_NVRTC=1`` and ``CUPYCONV_REQUIRE_GPU=1`` turn such a skip into a
failure.

By default a run covers every pair of values of a large grid (`grids.py`).  ``--fast`` omits the kernels and most random
examples.  ``--nightly`` runs every combination, every kernel variant and thousands of random examples.  ``--fake-gpu``
runs the GPU tests with the real CuPy on emulated GPUs (`tests/fake_gpu`).

Python's and NumPy's versions and the counts of a run are appended to the file in ``CUPYCONV_RUNS``, for the table of
`.ci/nightly`.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grids import grid_parameters
from hypothesis import HealthCheck, settings
from targets import TARGETS, Target, no_gpu_because

from tests import fake_gpu

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=100, print_blob=True, derandomize=True,
)  # fmt: skip
settings.register_profile("fast", settings.get_profile("default"), max_examples=20)
settings.register_profile("explore", settings.get_profile("default"), derandomize=False, max_examples=6000)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cupyconv")
    group.addoption(
        "--fast", action="store_true",
        help="without kernels and with few random examples: -m 'not host_device and not nvrtc' --hypothesis-profile=fast",
    )  # fmt: skip
    group.addoption(
        "--nightly", action="store_true",
        help="every combination of large grids, every kernel variant, full sizes, and --hypothesis-profile=explore",
    )  # fmt: skip
    group.addoption(
        "--fake-gpu", action="store_true",
        help="the tests of a GPU, with the real CuPy on emulated ones (tests/fake_gpu): -m 'gpu or fake_gpu'",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        # Workers use all cores already; BLAS threads would spend a third of the time waiting for one another.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    fast, nightly = config.getoption("--fast"), config.getoption("--nightly")
    if fast and nightly:
        raise pytest.UsageError("--fast and --nightly are opposites")
    if (fast or nightly) and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("fast" if fast else "explore")
    if config.getoption("--fake-gpu"):
        reason = fake_gpu.unavailable()
        if reason is None:
            fake_gpu.install()
        else:
            no_gpu_because(reason)
        config.option.markexpr = config.option.markexpr or "gpu or fake_gpu"
    if fast:
        without_kernels = "not host_device and not nvrtc"
        asked_for = config.option.markexpr
        config.option.markexpr = f"({asked_for}) and {without_kernels}" if asked_for else without_kernels


# Removed from the environment, because a pytest process started by a test is not a run of its own.
RUNS = os.environ.pop("CUPYCONV_RUNS", None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if RUNS is not None:
        passed, failed, errors, skipped = (
            len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")
        )
        threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
        python = f"{platform.python_version()}{threads}"
        with Path(RUNS).open("a", encoding="utf-8") as rows:
            print(python, np.__version__, passed, failed + errors, skipped, file=rows)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for grid in metafunc.definition.iter_markers("grid"):
        axes = {name: values for name, values in grid.kwargs.items() if name != "together"}
        full = metafunc.config.getoption("--nightly")
        parameters = grid_parameters(axes, full=full, together=grid.kwargs.get("together", 2))
        metafunc.parametrize(tuple(axes), parameters)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of the host device alone in the same way as tests of all targets."""
    if {"cuda_target", "host_machine"} & {*getattr(item, "fixturenames", ())}:
        item.add_marker("host_device")


@pytest.fixture(scope="session")
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether to run everything, regardless of the time."""
    return bool(request.config.getoption("--nightly"))


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """Return each target in turn."""
    return request.param()


@pytest.fixture(params=TARGETS[1:])
def cuda(request: pytest.FixtureRequest) -> Target:
    """Return the CUDA backend on the host device, and on a GPU if there is one."""
    return request.param()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear cached plans, so that they are made under the test's changes and do not outlive them."""
    from cupyconv.call.operation import forget_calls

    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def cuda_target() -> Target:
    """Return the CUDA backend on the host device, with a log of the enqueued work."""
    from targets import host_device_target

    return host_device_target()


@pytest.fixture
def small_buffers(monkeypatch):
    """Limit NumPy's buffers for operands with different strides to 16 elements each, instead of 8192.

    A call then runs in the caller's context, which has this setting, and not in a context that was created before.
    """
    from cupyconv.numpy import threads
    from cupyconv.numpy.backend import NumpyBackend

    def within(backend, run, arrays):
        with backend.current():
            return run(arrays)

    monkeypatch.setattr(NumpyBackend, "within", within)

    class Worker(threads._Worker):
        def _run(self):
            np.setbufsize(16)
            super()._run()

    monkeypatch.setattr(threads, "_Worker", Worker)
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    before = np.setbufsize(16)
    assert threads.BLAS.threads  # its library is only looked up once
    yield
    np.setbufsize(before)


@pytest.fixture
def gathered(monkeypatch):
    """Gather transposed convolutions on NumPy if possible; adding products costs less for small arrays."""
    from cupyconv.call.operation import forget_calls
    from cupyconv.numpy import transposed

    monkeypatch.setattr(transposed, "seconds_of", lambda steps: 0.0)
    forget_calls()
    yield
    forget_calls()
