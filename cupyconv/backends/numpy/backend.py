"""NumPy's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from cupyconv.machine import HostModel
from cupyconv.plan import Plan, Step

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

    def from_host(self, array: np.ndarray) -> Any:
        """An array in the host's memory as one of this backend's."""
        return array

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
    """What runs a step.  Its module is imported with the first of its kind: few programs need them all."""
    from cupyconv.loops import (
        BlockLoop,
        ChainLoop,
        ElementwiseLoop,
        GatheredLoop,
        PoolingLoop,
        RecurrentGradientLoop,
        RecurrentLoop,
        TransposedLoop,
        WeightGradientLoop,
    )

    match step:
        case ElementwiseLoop(body="epilogue_grad"):
            from cupyconv.backends.numpy.epilogue_grad import epilogue_grad

            return partial(epilogue_grad, step)
        case ElementwiseLoop():
            from cupyconv.backends.numpy.prologue_grad import prologue_grad

            return partial(prologue_grad, step)
        case PoolingLoop():
            from cupyconv.backends.numpy.pooling import pooling_loop

            return pooling_loop(step)
        case ChainLoop():
            from cupyconv.backends.numpy.chain import ChainConvolution

            return ChainConvolution(step).run
        case RecurrentLoop():
            from cupyconv.backends.numpy.recurrent import RecurrentLayer

            return RecurrentLayer(step).run
        case RecurrentGradientLoop():
            from cupyconv.backends.numpy.recurrent_gradient import RecurrentGradient

            return RecurrentGradient(step).run
        case BlockLoop(body="im2col"):
            from cupyconv.backends.numpy.columns import im2col

            return partial(im2col, step)
        case BlockLoop(body="col2im"):
            from cupyconv.backends.numpy.columns import col2im

            return partial(col2im, step)
        case GatheredLoop():
            from cupyconv.backends.numpy.gathered import GatheredConvolution

            return GatheredConvolution(step).run
        case TransposedLoop():
            from cupyconv.backends.numpy.transposed import TransposedConvolution

            return TransposedConvolution(step).run
        case WeightGradientLoop():
            from cupyconv.backends.numpy.weight_gradient import WeightGradient

            return WeightGradient(step).run
    from cupyconv.backends.numpy.convolution import ConvolutionLoop

    assert isinstance(step, BlockLoop)
    return ConvolutionLoop(step).run
