"""What every test may use: the `target` arrays live on, and how runs are kept honest.

A target is one array library on one device: NumPy, the CUDA backend on the host device, and CuPy on a
GPU.  The same test body runs on all three.  Where a target is missing its tests skip, with the reason;
``CUPYCONV_REQUIRE_HOST_DEVICE=1``, ``CUPYCONV_REQUIRE_NVRTC=1`` and ``CUPYCONV_REQUIRE_GPU=1`` turn such a
skip into a failure.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from targets import TARGETS, Target

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=300, print_blob=True, derandomize=True,
)  # fmt: skip
settings.register_profile("explore", settings.get_profile("default"), derandomize=False, max_examples=6000)
settings.load_profile("default")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """Each target in turn."""
    return request.param()


@pytest.fixture
def cuda_target() -> Target:
    """The CUDA backend on the host device, with a log of what was enqueued."""
    from targets import host_device_target

    return host_device_target()
