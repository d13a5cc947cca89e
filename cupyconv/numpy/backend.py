"""NumPy's side of the backend interface: allocate, describe, run a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, cast

import numpy as np

from cupyconv.numpy.step import NumpyStep
from cupyconv.problem import passes, problems, recurrence
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import HostModel, Problem

_NOTHING_TO_DO = nullcontext()

#: What plans each kind of problem, imported when first asked for: most programs have a few kinds.
_PLANNERS: dict[type[Problem], str] = {
    problems.ConvProblem: "convolution.plan_conv",
    problems.ChainProblem: "chain.plan_chain",
    problems.TransposedProblem: "transposed.plan_transposed",
    problems.WeightGradientProblem: "weight_gradient.plan_weight_gradient",
    recurrence.RecurrentProblem: "recurrent.plan_recurrent",
    recurrence.RecurrentGradientProblem: "recurrent_gradient.plan_recurrent_gradient",
    passes.Im2colProblem: "columns.plan_im2col",
    passes.Col2imProblem: "columns.plan_col2im",
    passes.EpilogueGradProblem: "epilogue_grad.plan_epilogue_grad",
    passes.PrologueGradProblem: "prologue_grad.plan_prologue_grad",
    passes.PoolingProblem: "pooling.plan_pooling",
    passes.PoolingGradientProblem: "pooling.plan_pooling",
}


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
        module, planner = _PLANNERS[type(problem)].split(".")
        plan: Plan = getattr(import_module(f"cupyconv.numpy.{module}"), planner)(problem)
        return plan

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name."""
        runs = [step.executable() for step in cast("tuple[NumpyStep, ...]", plan.steps)]

        def run(arrays: Mapping[str, Any]) -> None:
            with np.errstate(all="ignore"):
                for run_loop in runs:
                    run_loop(arrays)

        return run
