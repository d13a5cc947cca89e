"""In an ordinary run every benchmark's body runs once on small images, checked and untimed, so that none of them rots.

``--benchmark-only`` times them; the jobs of the demo's size run only then.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Any:
    """pytest-benchmark's fixture, which times nothing unless it was asked to."""
    if not timing_asked_for(request.config):
        benchmark.disabled = True
    return benchmark


def timing_asked_for(config: pytest.Config) -> bool:
    return bool(config.getoption("benchmark_only", False))
