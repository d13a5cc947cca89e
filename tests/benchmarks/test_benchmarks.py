"""Cases of ``python -m cupyconv bench`` under pytest-benchmark::

    pytest tests/benchmarks --benchmark-only --benchmark-group-by=param:case
    CUPYCONV_REQUIRE_GPU=1 pytest tests/benchmarks -m gpu --benchmark-only --benchmark-group-by=param:case

Each NumPy case appears twice, as `cupyconv` and as its peer (concatenate + one whole im2col + matmul).  A GPU case
appears as `cupyconv`, and as torch if that is installed.  Results are compared with float64 before the clock runs.
``extra_info`` has GB/s, GFLOP/s, the floor and, on NumPy, the workspace.  Times on a GPU include the wait for the
result, with warm caches.  For the GPU's own time, empty caches and ratios, run the command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pytest_benchmark")

from targets import gpu_target

from cupyconv.bench.array_peers import concatenate_im2col_matmul
from cupyconv.bench.cases import Case
from cupyconv.bench.machines import cuda_machine, numpy_machine
from cupyconv.bench.reference import error, in_float64
from cupyconv.bench.tables import JOBS, LAYERS, gpu_cases
from cupyconv.bench.torch_peers import Torch
from tests.benchmarks.conftest import timing_asked_for

ORDINARY = [pytest.param(case, id=case.name) for case in (*JOBS[2:], *LAYERS)]
LARGE = [pytest.param(case, id=case.name) for case in JOBS[:2]]

#: A few cases from the GPU's table: a merge, a skip connection, a 3x3 layer in two precisions, depthwise.
ON_GPU = [
    pytest.param(case, id=case.name)
    for case in gpu_cases()
    if case.name
    in (
        "merge 5 x (4, 4, 10^6) -> 4, float32",
        "U-Net skip 3x3, 64+64 -> 64, 256x256, N 4, float16",
        "ResNet-50 3x3, 256 -> 256, 14x14, N 32, float32",
        "ResNet-50 3x3, 256 -> 256, 14x14, N 32, float16",
        "3x3 depthwise 144, 56x56, N 32, float32",
    )
]


@pytest.mark.parametrize("case", ORDINARY)
@pytest.mark.parametrize("side", ["cupyconv", "peer"])
def test_layer(request: pytest.FixtureRequest, nightly: bool, benchmark: Any, case: Case, side: str) -> None:
    if not (nightly or timing_asked_for(request.config)):
        case = replace(case, batch=2, size=tuple(min(extent, 40) for extent in case.size))
    measure_on_numpy(benchmark, case, side)


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("side", ["cupyconv", "peer"])
def test_job_at_its_original_size(request: pytest.FixtureRequest, benchmark: Any, case: Case, side: str) -> None:
    if not timing_asked_for(request.config):
        pytest.skip("1.5 GB of arrays: runs under --benchmark-only")
    measure_on_numpy(benchmark, case, side)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's warnings are not failures of this library
@pytest.mark.parametrize("case", ON_GPU)
@pytest.mark.parametrize("side", ["cupyconv", "torch", "torch channels-last"])
def test_case_on_a_gpu(benchmark: Any, case: Case, side: str) -> None:
    machine = cuda_machine(gpu_target(for_timing=True).xp)
    xs, weights = case.arrays(machine.fill)
    call: Callable[[], Any] = partial(case.ours, xs, weights)
    if side == "cupyconv":
        measure(benchmark, machine, case, call, call(), xs, weights)
        return
    torch = Torch(pytest.importorskip("torch"), machine.xp)
    with torch.during(case):
        torch.check_stream(machine.stream())
        way = {way.name: way for way in torch.ways(case, xs, weights)}.get(side)
        if way is None:
            pytest.skip("one memory format for one spatial axis")
        call = way.prepare()
        measure(benchmark, machine, case, call, way.as_array(call()), xs, weights, transform=True)


def test_every_case_chosen_for_a_gpu_exists() -> None:
    assert len(ON_GPU) == 5


def test_the_library_needs_less_memory() -> None:
    """The library uses less memory than its peer, which, unlike the times, does not depend on the machine."""
    for case in (JOBS[2], *LAYERS):
        ours, peer = (beyond_result(case, side) for side in ("cupyconv", "peer"))
        if peer > 1 << 20:  # a single 1x1 convolution needs no memory on either side
            assert ours < peer, case.name


def side_of(case: Case, side: str, xs: list[Any], weights: list[Any]) -> Callable[[], Any]:
    if side == "cupyconv":
        return partial(case.ours, xs, weights)
    return partial(concatenate_im2col_matmul, np, case, xs, weights)


def beyond_result(case: Case, side: str) -> int:
    call = side_of(case, side, *case.arrays())
    return max(0, numpy_machine().library.peak_bytes(call) - case.result_bytes)


def measure_on_numpy(benchmark: Any, case: Case, side: str) -> None:
    xs, weights = case.arrays()
    call = side_of(case, side, xs, weights)
    measure(benchmark, numpy_machine(), case, call, call(), xs, weights)
    if benchmark.stats is not None:
        benchmark.extra_info["peak_workspace_bytes"] = beyond_result(case, side)


def measure(
    benchmark: Any, machine: Any, case: Case, call: Callable[[], Any], result: Any, xs: Any, weights: Any, **how: Any
) -> None:
    """Check one side of a case, then time it, including the wait for its end."""
    error(machine.xp, case, result, in_float64(machine.xp, case, xs, weights), **how)

    def to_its_end() -> None:
        call()
        machine.clock.synchronise()

    benchmark(to_its_end)
    if benchmark.stats is None:
        return
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "GFLOP/s": case.flops / seconds / 1e9,
        "GB/s": case.minimal_bytes / seconds / 1e9,
        "floor_bytes": case.minimal_bytes,
        "floor_flop": case.flops,
    }
