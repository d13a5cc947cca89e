"""Repeated calls with the same settings and the same weight: checked and planned once per layout.

::

    conv(x, weight, ...)        arguments --> key --> executable        the key has everything the outcome depends on
    call(x=x)                   layouts of x, options --> executable    everything else is fixed at construction

A model has one `RepeatedCall` per layer.  The settings and arrays given at construction must not change: derived forms
of the weight are cached too, outside all budgets.  The address of `out` is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from cupyconv.call.arguments import named_inputs
from cupyconv.call.dispatch import backend_of_class
from cupyconv.call.operation import CheckedCall, Executable, flat, operation_of
from cupyconv.call.options import current_settings
from cupyconv.problem.caches import keeping_forms
from cupyconv.problem.problems import ConvProblem

#: Maximum number of cached executables of one layer, for different image sizes or options.
KEPT = 16


class RepeatedCall:
    """A call of `function` with some arguments fixed; the other arguments, which are arrays, are given in each call.

    Parameters
    ----------
    function : callable
        A public function.
    fixed : mapping
        Fixed arguments by name.
    """

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any]) -> None:
        operation = operation_of(function)
        assert operation is not None
        self._operation = operation
        parameters = signature(function).parameters.values()
        self._arguments = {one.name: None if one.default is one.empty else one.default for one in parameters} | dict(
            fixed
        )
        self._has_weight = "weight" in fixed
        if self._has_weight:
            self._arguments["weight"] = keeping_forms(fixed["weight"])
        #: Executables by layouts and options, each with a list that has, for each array of the call, its position among
        #: the given arrays, or the fixed array itself.
        self._executables: dict[Hashable, tuple[Executable, list[Any]]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The fixed arguments by the function's names; an argument given per call has its default, or None."""
        return dict(self._arguments)

    def __call__(self, **given: Any) -> Any:
        """Return the result with these arrays."""
        arrays, form, array_class = flat(tuple(given.values()))
        backend_of, key = None if array_class is None else backend_of_class(array_class), None
        if backend_of is not None:
            key = tuple(given), form, backend_of(arrays[0]).signature(arrays), current_settings()
        known = self._executables.get(key)
        if known is None:
            known = self._prepared(given)
            if key is not None:
                if len(self._executables) >= KEPT:
                    self._executables = {}
                self._executables[key] = known
        executable, order = known
        return executable.run([arrays[one] if type(one) is int else one for one in order])

    def checked(self, on: str | None = None, **given: Any) -> CheckedCall:
        """Return the checked call with these arrays; `on` names a GPU that need not be present.  Nothing is run."""
        call = self._operation.checked({**self._arguments, **given}, on)
        problem = call.problem
        if self._has_weight and isinstance(problem, ConvProblem):
            call.problem = replace(problem, weight_is_constant=True)
        return call

    def _prepared(self, given: Mapping[str, Any]) -> tuple[Executable, list[Any]]:
        call = self.checked(**given)
        names = [one for name, value in given.items() if value is not None for one in named_inputs(name, value)]
        return Executable(call), [names.index(name) if name in names else array for name, array in call.arrays.items()]
