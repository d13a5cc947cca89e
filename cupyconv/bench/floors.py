"""The floor of a case: the longer of the time to copy its bytes and the time of its arithmetic in a GEMM.

Both rates are measured in the same run with the same clock.  One is a copy of an array much larger than any cache,
counting read and written bytes.  The other is the fastest square product of any participant in that precision.  A
transform that saves arithmetic (Winograd) can be faster than a floor of arithmetic.
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
    """Bytes and operations per second; products by precision, measured on first use."""

    bandwidth: float
    products: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)

    def floor(self, case: AnyCase) -> dict[str, Any]:
        """Return, for a record, the larger of the two times and which bound it is."""
        by_bytes = case.minimal_bytes / self.bandwidth
        by_flops = case.flops / self.products[case.precision]
        bound = "memory" if by_bytes >= by_flops else "arithmetic"
        return dict(seconds=max(by_bytes, by_flops), bound=bound, bytes=case.minimal_bytes, flops=case.flops)


def copy_rate(machine: Machine) -> float:
    """Return bytes per second, read and written, of the fastest copy."""
    source, target = (machine.xp.zeros(machine.copy_bytes, np.uint8) for _ in range(2))
    return 2 * machine.copy_bytes / fastest(machine, partial(machine.xp.copyto, target, source))


def square_product(machine: Machine, case: AnyCase) -> Case:
    """Return, as a case, a product of two square matrices in the case's precision."""
    rows = machine.gemm_rows(ITEMSIZE[case.dtype])
    return Case("square", 1, (rows,), (rows,), rows, (1,), dtype=case.dtype, tf32=case.tf32)


def fastest(machine: Machine, call: Call) -> float:
    """Return the seconds of the fastest of a few calls."""
    machine.clock.sample(call, 0.0)
    host = machine.clock.sample(call, 0.0).host
    return min(machine.clock.sample(call, host).device for _ in range(SAMPLES))
