"""An ordinary run executes every benchmark once on small images, checked and untimed, so that none breaks unnoticed.

``--benchmark-only`` times the benchmarks.  Only then do the jobs of the demo's size run.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Any:
    """Return pytest-benchmark's fixture, which times nothing unless ``--benchmark-only`` is given."""
    if not timing_asked_for(request.config):
        benchmark.disabled = True
    return benchmark


def timing_asked_for(config: pytest.Config) -> bool:
    return bool(config.getoption("benchmark_only", False))
