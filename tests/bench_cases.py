"""Shared by the tests of `python -m cupyconv bench`: small cases, a clock that reports given times, machines."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from targets import host_device_target

from cupyconv.bench import machines
from cupyconv.bench.cases import Case, GradientCase, LargeKernelCase, repeat_normals
from cupyconv.bench.clock import Sample
from cupyconv.bench.recurrent_layers import RecurrentCase
from cupyconv.demo.libraries import numpy_library
from cupyconv.problem.arrays import ITEMSIZE

#: Small cases of every kind: ranks, merges, groups, strides, dilation, asymmetric padding, layouts, dtypes.
SMALL = (
    Case("merge", 3, (2, 1, 3), (50,), 4, (1,), loop=True),
    Case("merge of planes, channels-last", 2, (2, 3), (5, 6), 4, (1, 1), channels_last=True),
    Case("unaligned merge", 2, (2, 2), (33,), 3, (1,), misaligned=True),
    Case("3x3", 2, (5,), (7, 8), 4, (3, 3), padding=((1, 1), (1, 1)), loop=True),
    Case("3x3 merged, channels-last", 2, (2, 3), (7, 6), 4, (3, 3), padding=((1, 1), (1, 1)), channels_last=True),
    Case("7x7 stride 2", 1, (3,), (14, 15), 4, (7, 7), stride=2, padding=((3, 3), (3, 3))),
    Case("even kernel, lopsided", 1, (3,), (6, 7), 2, (4, 2), padding=((1, 2), (0, 1))),
    Case("depthwise", 2, (6,), (5, 5), 6, (3, 3), padding=((1, 1), (1, 1)), groups=6),
    Case("groups", 2, (6,), (5, 5), 9, (3, 3), groups=3),
    Case("1-D dilated, causal", 2, (4,), (20,), 4, (3,), padding=((8, 0),), dilation=4),
    Case("3-D", 1, (3,), (5, 6, 4), 2, (3, 3, 3), padding=((1, 1),) * 3),
    Case("TF32", 2, (5,), (7, 8), 4, (3, 3), tf32=True),
    *(Case(f"3x3 {dtype}", 2, (4,), (6, 6), 3, (3, 3), padding=((1, 1),) * 2, dtype=dtype) for dtype in ITEMSIZE),
    Case("chain", 2, (4,), (7, 8), 6, (3, 3), padding=((1, 1), (1, 1)), then=((6, (3, 2), ((0, 0), (1, 0)), 3), (2, (1, 1), (), 1))),
)  # fmt: skip

RECURRENT = tuple(
    RecurrentCase(f"{cell} {dtype}", cell, 6, 3, 5, 7, dtype=dtype)
    for cell in ("lstm", "gru")
    for dtype in ("float32", "float16", "bfloat16", "float64")
)

#: Both gradients of the small cases that have gradients.
GRADIENTS = tuple(
    GradientCase(**asdict(case) | {"name": f"{of} gradient of {case.name}"}, of=of)
    for case in SMALL
    if not (case.then or case.tf32 or case.channels_last or case.misaligned or case.dtype not in ("float32", "float64"))
    for of in ("input", "weight")
)
#: Single steps of recurrent layers.
STEPS = tuple(RecurrentCase(f"{cell} step", cell, 1, 3, 5, 7, single=True) for cell in ("lstm", "gru"))
FILTERS = (
    Case("filter", 1, (1,), (9, 11), 1, (3, 5), padding=((1, 1), (2, 2)), dtype="float64"),
    Case("filter of the inside", 1, (1,), (9, 11), 1, (2, 5)),
    Case("filter of taps", 1, (1,), (30,), 1, (5,), padding=((2, 2),)),
    Case("causal filter", 1, (1,), (30,), 1, (5,), padding=((4, 0),), dtype="float64"),
)
LARGE_KERNELS = (
    LargeKernelCase("large, alone", 1, (1,), (20, 17), 1, (7, 5), padding=((3, 3), (2, 2))),
    LargeKernelCase("large, merged", 1, (1, 2), (20, 17), 2, (7, 5), padding=((3, 3), (2, 2))),
    LargeKernelCase("large in groups", 1, (4,), (40,), 6, (9,), padding=((4, 4),), groups=2),
)

every_recurrent_case = pytest.mark.parametrize("case", RECURRENT, ids=str)
every_small_case = pytest.mark.parametrize("case", SMALL, ids=str)


class ToldClock:
    """Runs a call and reports a given time: 1 s, or what `seconds` returns for the call."""

    rounds = (2, 3)
    warm_up = 3
    hopeless = 1e9
    method = "as told"

    def __init__(self, seconds=lambda call: 1.0):
        self.seconds, self.dead = seconds, False

    def sample(self, call, host):
        call()
        return Sample(self.seconds(call), 0.5)

    def row(self, call, count):
        return None

    def synchronise(self):
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered")


def numpy_machine(**changes):
    small = dict(clock=ToldClock(), copy_bytes=1 << 10, gemm_rows=lambda itemsize: 8)
    return replace(machines.numpy_machine(), **(small | changes))


def on_the_host_device():
    """The CUDA backend on the host device, described as `cuda_machine` describes a GPU."""
    target = host_device_target()
    library = replace(numpy_library(), name="host device", to_host=target.to_host)
    return numpy_machine(
        library=library, arch="sm_90", fill=lambda *what: target.to_device(repeat_normals(*what)),
        gemm_rows=lambda itemsize: 16,
    )  # fmt: skip
