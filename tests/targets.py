"""Devices for a test's arrays: NumPy, the host device, or a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupyconv.call.dispatch import register_backend
from cupyconv.cuda.run import CudaBackend
from tests import fake_gpu, host_device


@dataclass(frozen=True)
class Target:
    """An array library on a device."""

    name: str
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    xp: ModuleType
    device: Any = None

    def __str__(self) -> str:
        return self.name


def numpy_target() -> Target:
    return Target("numpy", np.array, np.asarray, np)


@lru_cache(maxsize=1)
def _host_device() -> host_device.HostDevice:
    """Return one device for all tests, which share its compiled kernels and its log."""
    device = host_device.HostDevice()
    backend = CudaBackend(device)
    register_backend(host_device.HostArray, lambda array: backend)
    return device


def host_device_target() -> Target:
    reason = host_device.unavailable()
    if reason is not None:
        _missing(reason, "CUPYCONV_REQUIRE_HOST_DEVICE")
    device = _host_device()
    return Target("host_device", device.asarray, lambda array: array.get(), np, device)


def gpu_target(*, for_timing: bool = False) -> Target:
    reason = _no_gpu()
    if reason is not None:
        _missing(reason, "CUPYCONV_REQUIRE_GPU")
    if for_timing and fake_gpu.is_installed():
        pytest.skip("there is no time on emulated GPUs")
    import cupy

    return Target("gpu", cupy.asarray, cupy.asnumpy, cupy)


def no_gpu_because(reason: str) -> None:
    """Skip the tests that need a GPU, for this reason."""
    global _refused
    _refused = reason


_refused: str | None = None


@lru_cache(maxsize=1)
def _no_gpu() -> str | None:
    """Return why there is no GPU to test on, or None."""
    if _refused is not None:
        return _refused
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "CuPy finds no GPU"


def _missing(reason: str, required_by: str) -> None:
    if os.environ.get(required_by) == "1":
        pytest.fail(f"{reason}, and {required_by}=1 asks for it", pytrace=False)
    pytest.skip(reason)


TARGETS = [
    pytest.param(numpy_target, id="numpy"),
    pytest.param(host_device_target, id="host_device", marks=pytest.mark.host_device),
    pytest.param(gpu_target, id="gpu", marks=pytest.mark.gpu),
]

__all__ = ["TARGETS", "Target", "gpu_target", "host_device_target", "numpy_target"]
