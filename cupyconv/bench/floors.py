"""The floor of a case: no way can be faster than its bytes at the rate of a copy, nor its arithmetic at that of a GEMM.

Both rates are measured in the same run, by the same clock: a copy of an array much larger than any cache (read and
written bytes counted), and the fastest square product that any participant makes in that precision.  A transform
that saves arithmetic (Winograd) can pass a floor of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cupyconv.bench.cases import Case
from cupyconv.bench.machines import Machine
from cupyconv.bench.recurrent_layers import AnyCase
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
    return 2 * machine.copy_bytes / fastest(machine, partial(machine.xp.copyto, target, source))


def square_product(machine: Machine, case: AnyCase) -> Case:
    """A product of two square matrices in the case's precision, as a case."""
    rows = machine.gemm_rows(ITEMSIZE[case.dtype])
    return Case("square", 1, (rows,), (rows,), rows, (1,), dtype=case.dtype, tf32=case.tf32)


def fastest(machine: Machine, call: Call) -> float:
    """Seconds of the fastest of a few calls."""
    machine.clock.sample(call, 0.0)
    host = machine.clock.sample(call, 0.0).host
    return min(machine.clock.sample(call, host).device for _ in range(SAMPLES))
