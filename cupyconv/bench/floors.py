"""The floor of a case: no way can be faster than its bytes at the rate of a copy, nor its arithmetic at that of a GEMM.

Both rates are measured in the same run, by the same clock: a copy of an array much larger than any cache (read and
written bytes counted), and the fastest square product that any library at hand makes in that precision.  A transform
that saves arithmetic (Winograd) can pass a floor of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case
from cupyconv.bench.machines import Machine
from cupyconv.bench.recurrent_layers import AnyCase
from cupyconv.bench.torch_peers import Torch
from cupyconv.demo.libraries import Call
from cupyconv.problem.arrays import ITEMSIZE

SAMPLES = 5


@dataclass
class Rates:
    """Bytes and operations a second; products by precision, measured when first asked for."""

    bandwidth: float
    products: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)

    def floor(self, case: AnyCase) -> dict[str, Any]:
        """For a record: the larger of the two times, and what it is of."""
        by_bytes = case.minimal_bytes / self.bandwidth
        by_flops = case.flops / self.products[case.precision]
        bound = "memory" if by_bytes >= by_flops else "arithmetic"
        return dict(seconds=max(by_bytes, by_flops), bound=bound, bytes=case.minimal_bytes, flops=case.flops)


def copy_rate(machine: Machine) -> float:
    """Bytes a second, read and written, of the fastest copy."""
    source, target = (machine.xp.zeros(machine.copy_bytes, np.uint8) for _ in range(2))
    call = partial(machine.xp.copyto, target, source)
    return 2 * machine.copy_bytes / _fastest(machine, call)


def product_rate(machine: Machine, case: AnyCase, torch: Torch | None) -> tuple[float, str, dict[str, Exception]]:
    """Operations a second of the fastest product in the case's precision, who made it, and who failed."""
    rows = machine.gemm_rows(ITEMSIZE[case.dtype])
    square = Case("square", 1, (rows,), (rows,), rows, (1,), dtype=case.dtype, tf32=case.tf32)
    (x,), (weight,) = square.arrays(machine.fill)
    matrix = weight[:, :, 0]
    ways: dict[str, Callable[[], Call]] = {"cupyconv": lambda: partial(square.ours, [x], [weight], "gemm")}
    if case.has_plain_product:
        ways["matmul"] = lambda: partial(machine.xp.matmul, matrix, x[0])
    if torch is not None:
        ways["torch"] = lambda: torch.product(matrix, x[0])
    seconds: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, prepare in ways.items():
        try:
            seconds[name] = _fastest(machine, prepare())
        except Exception as error:
            failed[name] = error
    if not seconds:
        raise RuntimeError("no library makes a product: " + "; ".join(f"{n}: {e}" for n, e in failed.items()))
    best = min(seconds, key=lambda name: seconds[name])
    return square.flops / seconds[best], best, failed


def _fastest(machine: Machine, call: Call) -> float:
    machine.clock.sample(call, 0.0)
    host = machine.clock.sample(call, 0.0).host
    return min(machine.clock.sample(call, host).device for _ in range(SAMPLES))
