"""The demo's jobs and ten ordinary layers under pytest-benchmark::

    pytest tests/benchmarks --benchmark-only --benchmark-group-by=param:layer

Each layer appears twice, as `cupyconv` and as `peer` (concatenate + one whole im2col + matmul).  Results are
held to float64 before the clock runs.  ``extra_info`` has GB/s, GFLOP/s, the floor and the workspace.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pytest_benchmark")

from tests.benchmarks.compare import peak_bytes
from tests.benchmarks.conftest import timing_asked_for
from tests.benchmarks.layers import JOBS, LAYERS, Layer

ORDINARY = [pytest.param(layer, id=layer.name) for layer in (*JOBS[2:], *LAYERS)]
LARGE = [pytest.param(layer, id=layer.name) for layer in JOBS[:2]]


@pytest.mark.parametrize("layer", ORDINARY)
@pytest.mark.parametrize("side", ["cupyconv", "peer"])
def test_layer(benchmark: Any, layer: Layer, side: str) -> None:
    measure(benchmark, layer, side)


@pytest.mark.parametrize("layer", LARGE)
@pytest.mark.parametrize("side", ["cupyconv", "peer"])
def test_job_at_its_original_size(request: pytest.FixtureRequest, benchmark: Any, layer: Layer, side: str) -> None:
    if not timing_asked_for(request.config):
        pytest.skip("1.5 GB of arrays: runs under --benchmark-only")
    measure(benchmark, layer, side)


def test_the_library_needs_less_memory() -> None:
    """A promise that, unlike the times, does not depend on the machine."""
    for layer in (JOBS[2], *LAYERS):
        xs, weight = layer.arrays()
        peer = peak_bytes(lambda: layer.peer(xs, weight))  # noqa: B023 - called at once
        if peer > 1 << 20:  # a lone 1x1 convolution takes nothing on either side
            assert peak_bytes(lambda: layer.ours(xs, weight)) < peer, layer.name  # noqa: B023


def measure(benchmark: Any, layer: Layer, side: str) -> None:
    """Check one side of a layer, then time it."""
    xs, weight = layer.arrays()
    call = layer.ours if side == "cupyconv" else layer.peer
    layer.check(call(xs, weight), xs, weight)
    benchmark(call, xs, weight)
    if benchmark.stats is None:
        return
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "GFLOP/s": layer.flops / seconds / 1e9,
        "GB/s": layer.minimal_bytes / seconds / 1e9,
        "floor_bytes": layer.minimal_bytes,
        "floor_flop": layer.flops,
        "peak_workspace_bytes": peak_bytes(lambda: call(xs, weight)),
    }
