"""NumPy's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from cupyconv.problem import problems, recurrence
from cupyconv.problem.plan import Plan, Step
from cupyconv.problem.problems import HostModel, Problem

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

    def plan(self, problem: Problem) -> Plan:
        """How a problem runs here; ValueError where a named method does not apply."""
        return _plan(problem)

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name."""
        runs = [step.executable() if hasattr(step, "executable") else _prepared(step) for step in plan.steps]

        def run(arrays: Mapping[str, Any]) -> None:
            with np.errstate(all="ignore"):
                for run_loop in runs:
                    run_loop(arrays)

        return run


def _plan(problem: Problem) -> Plan:
    # Imported when first asked for: most programs have a few kinds of problem.
    match problem:
        case problems.ConvProblem():
            from cupyconv.numpy.convolution_plan import plan_conv

            return plan_conv(problem)
        case problems.ChainProblem():
            from cupyconv.numpy.chain_plan import plan_chain

            return plan_chain(problem)
        case problems.TransposedProblem():
            from cupyconv.numpy.transposed_plan import plan_transposed

            return plan_transposed(problem)
        case problems.WeightGradientProblem():
            from cupyconv.numpy.weight_gradient_plan import plan_weight_gradient

            return plan_weight_gradient(problem)
        case recurrence.RecurrentProblem():
            from cupyconv.numpy.recurrent_plan import plan_recurrent

            return plan_recurrent(problem)
        case recurrence.RecurrentGradientProblem():
            from cupyconv.numpy.recurrent_gradient_plan import plan_recurrent_gradient

            return plan_recurrent_gradient(problem)
        case problems.Im2colProblem():
            from cupyconv.planning.columns import plan_im2col

            return plan_im2col(problem)
        case problems.Col2imProblem():
            from cupyconv.planning.columns import plan_col2im

            return plan_col2im(problem)
        case problems.EpilogueGradProblem():
            from cupyconv.planning.epilogue_grad import plan_epilogue_grad

            return plan_epilogue_grad(problem)
        case problems.PrologueGradProblem():
            from cupyconv.planning.prologue_grad import plan_prologue_grad

            return plan_prologue_grad(problem)
        case problems.PoolingGradientProblem():
            from cupyconv.planning.pooling import plan_max_pool_gradient

            return plan_max_pool_gradient(problem)
        case problems.PoolingProblem():
            from cupyconv.planning.pooling import plan_max_pool

            return plan_max_pool(problem)
    raise AssertionError(problem)


def _prepared(step: Step) -> Callable[[Mapping[str, Any]], None]:
    """What runs a step.  Its module is imported with the first of its kind: few programs need them all."""
    from cupyconv.numpy.loops import (
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
            from cupyconv.numpy.epilogue_grad import epilogue_grad

            return partial(epilogue_grad, step)
        case ElementwiseLoop():
            from cupyconv.numpy.prologue_grad import prologue_grad

            return partial(prologue_grad, step)
        case PoolingLoop():
            from cupyconv.numpy.pooling import pooling_loop

            return pooling_loop(step)
        case ChainLoop():
            from cupyconv.numpy.chain import ChainConvolution

            return ChainConvolution(step).run
        case RecurrentLoop():
            from cupyconv.numpy.recurrent import RecurrentLayer

            return RecurrentLayer(step).run
        case RecurrentGradientLoop():
            from cupyconv.numpy.recurrent_gradient import RecurrentGradient

            return RecurrentGradient(step).run
        case BlockLoop(body="im2col"):
            from cupyconv.numpy.columns import im2col

            return partial(im2col, step)
        case BlockLoop(body="col2im"):
            from cupyconv.numpy.columns import col2im

            return partial(col2im, step)
        case GatheredLoop():
            from cupyconv.numpy.gathered import GatheredConvolution

            return GatheredConvolution(step).run
        case TransposedLoop():
            from cupyconv.numpy.transposed import TransposedConvolution

            return TransposedConvolution(step).run
        case WeightGradientLoop():
            from cupyconv.numpy.weight_gradient import WeightGradient

            return WeightGradient(step).run
    from cupyconv.numpy.convolution import ConvolutionLoop

    assert isinstance(step, BlockLoop)
    return ConvolutionLoop(step).run
