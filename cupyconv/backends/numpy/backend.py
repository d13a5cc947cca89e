"""NumPy's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from cupyconv.backends.numpy.columns import col2im, im2col
from cupyconv.backends.numpy.convolution import BlockedConvolution
from cupyconv.dtypes import dtype_from_name
from cupyconv.geometry import Windows
from cupyconv.machine import HostModel
from cupyconv.plan import BlockLoop, Plan


class NumpyBackend:
    """Arrays of NumPy on the host."""

    name = "numpy"

    def machine(self, threads: int | None) -> HostModel:
        """The processor plans are made for."""
        return HostModel(threads or 1)

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the backend's device is the current one."""
        return nullcontext()

    def address(self, array: Any) -> int:
        """The address of the array's first element."""
        return array.__array_interface__["data"][0]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array."""
        return np.empty(shape, dtype)

    def contiguous(self, array: Any) -> Any:
        """A C-ordered copy."""
        return np.array(array, order="C")

    def run(self, plan: Plan, arrays: Mapping[str, Any]) -> None:
        """Execute a plan; `arrays` holds its arguments and result by name."""
        with np.errstate(all="ignore"):
            self._run(plan, arrays)

    def _run(self, plan: Plan, arrays: Mapping[str, Any]) -> None:
        for loop in plan.steps:
            assert isinstance(loop, BlockLoop)
            inputs = [arrays[name] for name in loop.inputs]
            if loop.body == "im2col":
                im2col(loop.geometry, [_five_axes(x) for x in inputs], _by_tap(arrays["out"], loop.geometry))
            elif loop.body == "col2im":
                sums_dtype = dtype_from_name(loop.dtype)
                col2im(loop.geometry, _by_tap(inputs[0], loop.geometry), _five_axes(arrays["out"]), sums_dtype)
            else:
                residual = arrays.get("residual")
                BlockedConvolution(
                    loop, [_five_axes(x) for x in inputs], arrays["weight"], arrays.get("bias"),
                    None if residual is None else _five_axes(residual), _five_axes(arrays["out"]),
                ).run()  # fmt: skip


def _five_axes(image: np.ndarray) -> np.ndarray:
    """A view (n, c, d, h, w): axes of length 1 in front of the spatial ones."""
    return image.reshape(*image.shape[:2], *(1,) * (5 - image.ndim), *image.shape[2:])


def _by_tap(columns: np.ndarray, windows: Windows) -> np.ndarray:
    """A view (N, C, taps, depth, height, width) of columns (N, C * taps, pixels)."""
    return columns.reshape(columns.shape[0], windows.in_channels, windows.taps, *windows.out_size)
