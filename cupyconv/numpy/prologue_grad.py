"""Back through a prologue, block by block: what was transformed is transformed again, its derivative, and two sums."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cupyconv.numpy.activations import activate, derivative
from cupyconv.numpy.epilogue_grad import blocks_of, channel_sums
from cupyconv.numpy.loops import ElementwiseLoop
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.activations import derivative_from_result
from cupyconv.problem.arrays import dtype_from_name


def prologue_grad(loop: ElementwiseLoop, arrays: Mapping[str, Any]) -> None:
    """Write ``out`` and ``sums`` (of scale and of shift, by channel), whichever are there, for ``grad`` and ``x``."""
    grad, x = five_axes(arrays["grad"]), five_axes(arrays["x"])
    out = five_axes(arrays["out"]) if "out" in arrays else None
    dtype = dtype_from_name(loop.dtype)
    sums = arrays["sums"].reshape(-1, 2) if "sums" in arrays else None
    scale, shift = (
        arrays[name].astype(dtype, copy=False)[:, None, None, None] if name in arrays else None
        for name in ("scale", "shift")
    )

    def finish(at: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """One block; its channels' sums where they are wanted."""
        with np.errstate(all="ignore"):  # of the thread
            values, du = x[at].astype(dtype, copy=False), grad[at].astype(dtype, copy=False)
            if loop.activation:
                u = values.copy() if scale is None else values * scale[at[1]]
                if shift is not None:
                    u += shift[at[1]]
                if derivative_from_result(loop.activation):
                    activate(u, loop.activation)
                du = du * derivative(u, loop.activation)
            if out is not None:
                out[at] = du if scale is None else du * scale[at[1]].conj()
            return None if sums is None else (channel_sums(du * values.conj()), channel_sums(du))

    blocks = blocks_of(loop, grad.shape)
    if sums is not None:
        sums[...] = 0
    with ThreadPoolExecutor(loop.threads) as pool:
        for at, parts in zip(blocks, (map if loop.threads == 1 else pool.map)(finish, blocks)):
            if sums is not None and parts is not None:
                for column, part in zip(sums.T, parts):
                    column[at[1]] += part  # in the order of the blocks, whichever thread was first
