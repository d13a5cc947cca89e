"""Backward pass through a prologue, block by block: recomputed transformed values, their derivative, and two sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate, derivative
from cupyconv.numpy.epilogue_grad import At, ElementwiseStep, channel_sums, plan_in_blocks
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.activations import derivative_from_result
from cupyconv.problem.arrays import dtype_from_name
from cupyconv.problem.passes import PrologueGradProblem
from cupyconv.problem.plan import Plan


def plan_prologue_grad(problem: PrologueGradProblem) -> Plan:
    """Plan one pass over the gradient and the input."""
    return plan_in_blocks(problem, PrologueGrad)


@dataclass(frozen=True)
class PrologueGrad(ElementwiseStep):
    """Compute ``out`` and ``sums`` (of scale and of shift, by channel) from ``grad`` and ``x``."""

    #: x, the transformed values, their derivative, its temporary, the products.
    TEMPORARIES = 6
    SUMS = (2,)

    problem: PrologueGradProblem

    def finisher(self, arrays: Mapping[str, Any]) -> Callable[[At], np.ndarray | None]:
        grad, x = five_axes(arrays["grad"]), five_axes(arrays["x"])
        out = five_axes(arrays["out"]) if "out" in arrays else None
        activation = self.problem.prologue.activation
        wanted, dtype = "sums" in arrays, dtype_from_name(self.dtype)
        scale, shift = (
            arrays[name].astype(dtype, copy=False)[:, None, None, None] if name in arrays else None
            for name in ("scale", "shift")
        )

        def finish(at: At) -> np.ndarray | None:
            values, du = x[at].astype(dtype, copy=False), grad[at].astype(dtype, copy=False)
            if activation:
                u = values.copy() if scale is None else values * scale[at[1]]
                if shift is not None:
                    u += shift[at[1]]
                if derivative_from_result(activation):
                    activate(u, activation)
                du = du * derivative(u, activation)
            if out is not None:
                out[at] = du if scale is None else du * scale[at[1]].conj()
            return np.stack([channel_sums(du * values.conj()), channel_sums(du)], axis=1) if wanted else None

        return finish
