"""A checked call without its arrays, ready to run: what calls of one kind, on arrays laid out alike, share.

The result's layout, the plan, and the plan as a backend has prepared it.  What a run still does is find
memory for the result and hand the arrays to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.axes import Axes
from cupyconv.call.dispatch import Backend
from cupyconv.problem.plan import Plan


class Result(NamedTuple):
    """An array that a call returns: ``out``, or ``out[0]``, ``out[1]`` ... of a list."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    channels_last: bool = False
    addend: str = "residual"  # the one argument that may lie where the result does


class PreparedCall:
    """What a run needs to know, worked out from one call; `arrays` are that call's, and none of them is kept.

    Parameters
    ----------
    plan : Plan
        What is run.
    with_less_workspace : callable
        Another plan for when memory has run out, or None where there is none.
    arrays : mapping
        Arguments by name, absent ones left out; later runs take theirs in this order.
    images : set of str
        Names of the arrays that have the axes of an image.
    results : sequence of Result
        What is allocated where it is not among the arrays, and returned.
    listed : bool
        Whether they are returned as a list.
    """

    def __init__(
        self, backend: Backend, plan: Plan, with_less_workspace: Callable[[Plan], Plan | None],
        arrays: Mapping[str, Any], images: frozenset[str], axes: Axes,
        results: Sequence[Result], listed: bool,
    ) -> None:  # fmt: skip
        self.plan = plan
        self._backend = backend
        self._with_less_workspace = with_less_workspace
        self._execute = backend.prepare(plan)
        self._names = tuple(arrays)
        self._axes = axes
        self._listed = listed
        self._results = tuple(
            (result.name, result.dtype, *_memory_of_result(result.shape, int(axes.batched), result.channels_last))
            for result in results
        )
        returned = [result.name for result in results]
        #: Of these the backend gets a view with the axes it knows.
        self._viewed = () if axes.are_the_backends else tuple(images & {*arrays, *returned})
        given = [name for name in returned if name in arrays]
        self._out_memory = OutMemory(arrays, given, results[0].addend) if given else None
        self._copied = tuple(
            name
            for name in given
            if name in self._viewed and axes.needs_copy(tuple(arrays[name].shape), tuple(arrays[name].strides))
        )

    def run_again(self, arrays: Sequence[Any]) -> Any:
        """Run for other arrays, after the one check that their layouts do not answer."""
        if self._out_memory is not None:
            self._out_memory.check(arrays, self._backend.address)
        return self.run(arrays)

    def run(self, arrays: Sequence[Any]) -> Any:
        """Execute the plan; smaller chunks are tried before a failed allocation is reported."""
        with self._backend.current():
            named = dict(zip(self._names, arrays))
            for name, dtype, memory_shape, order in self._results:
                if name not in named:
                    array = self._backend.empty(memory_shape, dtype)
                    named[name] = array if order is None else array.transpose(order)
            returned = [named[name] for name, *_ in self._results]
            for name in self._viewed:
                named[name] = self._view(name, named[name])
            try:
                self._execute(named)
            except MemoryError:
                if not self._succeeds_with_less(named, dict(zip(self._names, arrays))):
                    raise
            for (name, *_), out in zip(self._results, returned):
                if name in self._copied:  # computed beside it: see Axes.view
                    out[...] = self._axes.give_back(named[name], tuple(out.shape)[-self._axes.spatial :])
            return returned if self._listed else returned[0]

    def _succeeds_with_less(self, views: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
        """Run plans of less and less workspace; whether there was one that could have it."""
        # A result that is the residual may hold sums already: done again, they would be added twice.
        if self._out_memory is not None and self._out_memory.is_residual(arrays, self._backend.address):
            return False
        plan = self._with_less_workspace(self.plan)
        while plan is not None:
            try:
                self._backend.prepare(plan)(views)
                return True
            except MemoryError:
                plan = self._with_less_workspace(plan)
        return False

    def _view(self, name: str, array: Any) -> Any:
        def copy(image: Any) -> Any:
            if name in self._copied:
                return self._backend.empty(tuple(image.shape), image.dtype)
            return self._backend.converted(image, image.dtype)

        return self._axes.view(array, copy)


def _memory_of_result(
    shape: tuple[int, ...], channel: int, channels_last: bool
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape to allocate, C-ordered, and the axes that make the result of it; None where it is the result."""
    if not channels_last:
        return shape, None
    last = len(shape) - 1
    return (*shape[:channel], *shape[channel + 1 :], shape[channel]), (*range(channel), last, *range(channel, last))
