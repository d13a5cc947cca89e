"""NumPy's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from cupyconv.backends.numpy.chain import ChainConvolution
from cupyconv.backends.numpy.columns import col2im, im2col
from cupyconv.backends.numpy.convolution import ConvolutionLoop
from cupyconv.backends.numpy.epilogue_grad import epilogue_grad
from cupyconv.backends.numpy.pooling import pooling_loop
from cupyconv.backends.numpy.transposed import TransposedConvolution
from cupyconv.backends.numpy.weight_gradient import WeightGradient
from cupyconv.backends.numpy.windows import five_axes
from cupyconv.dtypes import dtype_from_name
from cupyconv.geometry import Windows
from cupyconv.machine import HostModel
from cupyconv.plan import (
    BlockLoop,
    ChainLoop,
    ElementwiseLoop,
    Plan,
    PoolingLoop,
    Step,
    TransposedLoop,
    WeightGradientLoop,
)

_NOTHING_TO_DO = nullcontext()


class NumpyBackend:
    """Arrays of NumPy on the host."""

    name = "numpy"

    def machine(self, threads: int | None) -> HostModel:
        """The processor plans are made for."""
        return HostModel(threads or 1)

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the backend's device is the current one."""
        return _NOTHING_TO_DO

    def address(self, array: Any) -> int:
        """The address of the array's first element."""
        return array.ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array."""
        return np.empty(shape, dtype)

    def converted(self, array: Any, dtype: np.dtype) -> Any:
        """A C-ordered copy in `dtype`: of the real parts where that is real."""
        with np.errstate(all="ignore"):
            return np.array(array if dtype.kind == "c" else array.real, dtype, order="C")

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """What a plan depends on of arrays of this class; none depends on an address."""
        return tuple([(a.dtype, a.shape, a.strides) for a in arrays])

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name."""
        runs = [_prepared(step) for step in plan.steps]

        def run(arrays: Mapping[str, Any]) -> None:
            with np.errstate(all="ignore"):
                for run_loop in runs:
                    run_loop(arrays)

        return run


def _prepared(step: Step) -> Callable[[Mapping[str, Any]], None]:
    """What runs a step."""
    if isinstance(step, ElementwiseLoop):
        return partial(epilogue_grad, step)
    if isinstance(step, PoolingLoop):
        return pooling_loop(step)
    if isinstance(step, ChainLoop):
        return ChainConvolution(step).run
    assert isinstance(step, BlockLoop)
    if step.body == "im2col":
        return partial(_im2col, step)
    if step.body == "col2im":
        return partial(_col2im, step)
    if isinstance(step, TransposedLoop):
        return TransposedConvolution(step).run
    if isinstance(step, WeightGradientLoop):
        return WeightGradient(step).run
    return ConvolutionLoop(step).run


def _im2col(loop: BlockLoop, arrays: Mapping[str, Any]) -> None:
    xs = [five_axes(arrays[name]) for name in loop.inputs]
    im2col(loop.geometry, xs, _by_tap(arrays["out"], loop.geometry))


def _col2im(loop: BlockLoop, arrays: Mapping[str, Any]) -> None:
    columns = _by_tap(arrays[loop.inputs[0]], loop.geometry)
    col2im(loop.geometry, columns, five_axes(arrays["out"]), dtype_from_name(loop.dtype))


def _by_tap(columns: np.ndarray, windows: Windows) -> np.ndarray:
    """A view (N, C, taps, depth, height, width) of columns (N, C * taps, pixels)."""
    return columns.reshape(columns.shape[0], windows.in_channels, windows.taps, *windows.out_size)
