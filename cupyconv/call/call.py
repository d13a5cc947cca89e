"""A call that has been checked: arrays with one owner, a validated problem, a problem to planning.

What the functions that check arguments share, whatever the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.axes import Axes, byte_strides
from cupyconv.call.dispatch import Backend, backend_for, planner
from cupyconv.call.executable import PreparedCall, Result
from cupyconv.call.options import current_settings
from cupyconv.problem.activations import Activation, resolve_activation
from cupyconv.problem.arrays import Operand, check_dtype, dtype_name, overlaps_itself
from cupyconv.problem.machine import known_gpu
from cupyconv.problem.padding import per_axis
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Machine, Problem

Arrays = Mapping[str, Any]


@dataclass
class Call:
    """One call, checked and ready; nothing has been allocated or launched for it.

    ``plan()`` is all that `explain` needs; ``prepared()`` is what runs, this time and again.

    `arrays` are the arguments by name, as the caller gave them, absent ones left out; `results` are what
    comes back, one array or, where `listed`, a list.
    """

    backend: Backend
    problem: Problem
    arrays: dict[str, Any]
    images: frozenset[str]  # names of those with the axes of an image
    axes: Axes
    results: tuple[Result, ...]
    listed: bool = False

    def plan(self) -> Plan:
        return planner(self.backend, self.problem.machine)(self.problem)

    def prepared(self) -> PreparedCall:
        """What can be run, on these arrays and on others laid out alike."""
        return PreparedCall(
            self.backend, self.plan(), self._with_less_workspace, self.arrays, self.images, self.axes,
            self.results, self.listed,
        )  # fmt: skip

    def run(self) -> Any:
        """Allocate, execute and return the result."""
        return self.prepared().run(tuple(self.arrays.values()))

    @property
    def _with_less_workspace(self) -> Callable[[Plan], Plan | None]:
        """For a plan, one with half the workspace that could not be had, or None where there is none."""
        problem = self.problem  # not the call, which holds arrays
        planned = planner(self.backend, problem.machine)

        def plan_with_less(plan: Plan) -> Plan | None:
            if not plan.workspace:
                return None
            try:
                smaller = planned(replace(problem, workspace_limit=plan.workspace_bytes // 2))
            except ValueError:
                return None
            return smaller if smaller.workspace_bytes < plan.workspace_bytes else None

        return plan_with_less


def named_inputs(name: str, x: Any) -> dict[str, Any]:
    """One array, or a list or tuple of arrays that stand for their concatenation, by argument name."""
    if not isinstance(x, (list, tuple)):
        return {name: x}
    if not x:
        raise ValueError(f"{name} is an empty sequence, needed at least one array")
    return {f"{name}[{i}]": array for i, array in enumerate(x)}


def is_unbatched(images: Arrays, kernel_shape: Any) -> bool:
    """Whether N is missing, which only a kernel of as many entries as there are spatial axes can tell."""
    return isinstance(kernel_shape, (tuple, list)) and all(a.ndim == len(kernel_shape) + 1 for a in images.values())


def present(required: Arrays, **optional: Any) -> dict[str, Any]:
    """The arguments that are there, by name."""
    return {**required, **{name: array for name, array in optional.items() if array is not None}}


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def owner(arrays: Arrays) -> Backend:
    """The one backend of all arrays, whose dtypes are ones we compute with."""
    backend = backend_for(arrays)
    for name, array in arrays.items():
        check_dtype(name, array.dtype)
    return backend


def machine_for(backend: Backend, on: str | None) -> Machine:
    if on is None:
        return backend.machine(current_settings().threads)
    if backend.name != "numpy":
        raise TypeError(
            f"on={on!r} plans for a GPU that need not be there, from NumPy arrays; given {backend.name} arrays"
        )
    return known_gpu(on)


def check_out(arrays: Arrays, result: Result, backend: Backend) -> None:
    name, out = result.name, arrays[result.name]
    if tuple(out.shape) != result.shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, needed {result.shape}")
    if out.dtype != result.dtype:
        raise TypeError(f"{name} has dtype {out.dtype}, needed {result.dtype}")
    if overlaps_itself(out.shape, out.strides, out.dtype.itemsize):
        raise ValueError(f"{name} overlaps itself: shape {tuple(out.shape)}, strides {tuple(out.strides)}")
    OutMemory(arrays, [name], result.addend).check(tuple(arrays.values()), backend.address)


def copied(axes: Axes, arrays: Arrays) -> tuple[str, ...]:
    """Name the images that have to be copied whole to have no more than three spatial axes."""
    others = ("weight", "bias", "scale", "shift")
    images = {name: array for name, array in arrays.items() if name not in others}
    return tuple(
        f"{name}: its leading spatial axes have no one stride, so it is copied, beyond the workspace"
        for name, array in images.items()
        if axes.needs_copy(tuple(array.shape), tuple(array.strides))
    )


def activation_for(activation: Any, dtype: np.dtype) -> Activation:
    """The activation of a result of this dtype; of complex numbers there is none."""
    resolved = resolve_activation(activation)
    if resolved and dtype.kind == "c":
        raise TypeError(f"activation {resolved} is not defined for the complex result, {dtype.name}")
    return resolved


def sizes(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return per_axis(name, tuple(values), len(values), 0)


def widened(arrays: Arrays, dtype: np.dtype) -> tuple[str, ...]:
    """Name the argument that made the result wider than another argument is."""
    result, names = dtype_name(dtype), {name: dtype_name(array.dtype) for name, array in arrays.items()}
    wide = [name for name, kind in names.items() if kind == result]
    narrow = [f"{name} ({kind})" for name, kind in names.items() if kind != result]
    if not narrow:
        return ()
    cause = f"{wide[0]} ({result}) widens" if wide else "mixed precisions widen"
    return (f"{cause} the result to {result}; narrower: {', '.join(narrow)}",)


def describe(backend: Backend, axes: Axes, name: str, array: Any) -> Operand:
    """An array as planning sees it."""
    address = backend.address(array) if array.size else 0
    return axes.describe(name, dtype_name(array.dtype), tuple(array.shape), tuple(array.strides), address)


def describe_given(backend: Backend, axes: Axes, name: str, arrays: Arrays) -> Operand | None:
    """An optional argument as planning sees it."""
    return describe(backend, axes, name, arrays[name]) if name in arrays else None


def describe_result(backend: Backend, axes: Axes, arrays: Arrays, result: Result) -> Operand:
    """A result as planning sees it: the caller's array, which is checked, or the one that will be allocated."""
    if result.name in arrays:
        check_out(arrays, result, backend)
        return describe(backend, axes, result.name, arrays[result.name])
    shape, name = result.shape, dtype_name(result.dtype)
    strides = byte_strides(shape, name)
    if result.channels_last:
        channel = int(axes.batched)
        rest = byte_strides((*shape[:channel], *shape[channel + 1 :], shape[channel]), name)
        strides = (*rest[:channel], rest[-1], *rest[channel:-1])
    return axes.describe(result.name, name, shape, strides, 0)


def fitting(name: str, grad: Any, shape: tuple[int, ...], dtype: np.dtype, backend: Backend) -> Any:
    """The gradient of a result of this shape and dtype, in that dtype; another shape is refused."""
    if tuple(grad.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(grad.shape)}, needed {shape}, that of the result")
    if grad.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{name} is {grad.dtype.name}, the result is {dtype.name}: casting would drop imaginary parts")
    return in_dtype(grad, dtype, backend)


def in_dtype(array: Any, dtype: np.dtype, backend: Backend) -> Any:
    """The array, or a copy in another dtype: of the real parts where that is real."""
    if array.dtype == dtype:
        return array
    with backend.current():
        return backend.converted(array, dtype)
