"""Back through an epilogue, block by block: the activation's derivative and each channel's sum, while in cache."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from cupyconv.numpy.activations import derivative
from cupyconv.numpy.loops import ElementwiseLoop
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import dtype_from_name


def epilogue_grad(loop: ElementwiseLoop, arrays: Mapping[str, Any]) -> None:
    """Write ``out`` and ``sums``, whichever are there, for ``grad`` and, with an activation, ``saved``."""
    grad = five_axes(arrays["grad"])
    saved, out = (five_axes(arrays[name]) if name in arrays else None for name in ("saved", "out"))
    sums, dtype = arrays.get("sums"), dtype_from_name(loop.dtype)

    def finish(at: tuple[slice, ...]) -> np.ndarray | None:
        """One block; its channels' sums where they are wanted."""
        with np.errstate(all="ignore"):  # of the thread
            place = out[at] if out is not None and out.dtype == dtype else None
            block = _back_through(grad[at], None if saved is None else saved[at], loop, dtype, place)
            if out is not None and place is None:
                out[at] = block
            return None if sums is None else channel_sums(block)

    blocks = blocks_of(loop, grad.shape)
    if sums is not None:
        sums[...] = 0
    with ThreadPoolExecutor(loop.threads) as pool:
        for at, part in zip(blocks, (map if loop.threads == 1 else pool.map)(finish, blocks)):
            if sums is not None:
                sums[at[1]] += part  # in the order of the blocks, whichever thread was first


def blocks_of(loop: ElementwiseLoop, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The blocks of images of this shape, in order."""
    return [
        tuple(slice(first, first + part) for first, part in zip(corner, loop.block))
        for corner in product(*(range(0, extent, part) for extent, part in zip(shape, loop.block)))
    ]


def _back_through(
    grad: np.ndarray, saved: np.ndarray | None, loop: ElementwiseLoop, dtype: np.dtype, place: np.ndarray | None
) -> np.ndarray:
    """``grad * f'(saved)``, in `place` if there is one; the gradient as it is without an activation."""
    if saved is None:
        return grad.astype(dtype, copy=False)
    slope = derivative(saved.astype(dtype, copy=False), loop.activation)
    return np.multiply(grad.astype(dtype, copy=False), slope, out=place)


def channel_sums(block: np.ndarray) -> np.ndarray:
    """The sum of each channel of (n, c, d, h, w), as products with ones: BLAS reads a matrix faster than NumPy adds it."""
    samples, channels = block.shape[:2]
    if channels > 1 and block.strides[1] == block.itemsize:
        rows = np.moveaxis(block, 1, -1).reshape(-1, channels)
        return np.ones(len(rows), block.dtype) @ rows
    planes = block.reshape(samples, channels, -1)
    return (planes @ np.ones(planes.shape[-1], block.dtype)).sum(axis=0)
