"""The entry point of all operations: from the arguments of a call to its execution.

::

    conv(x, weight, stride=2, ...)
      arguments --> arrays and settings, apart --> everything the outcome depends on, as a key
        known:      its executable runs on these arrays                          (microseconds)
        not known:  check --> problem --> plan --> executable, which runs and is remembered

The key holds everything that a check or a plan may depend on: which arguments are present; the owner, dtypes, shapes,
strides and alignment of the arrays; every other argument with its type (1, 1.0 and True are equal in Python but not to
a caller); and the options in force.  The address of `out` cannot be part of the key, so it is checked in every call.
Only successful calls are cached, and only if their arguments have the types listed below.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter, signature
from math import isqrt
from operator import is_, itemgetter
from typing import Any, NoReturn

import numpy as np

from cupyconv.call.aliasing import OutMemory
from cupyconv.call.arguments import Arguments, Axes, Result
from cupyconv.call.dispatch import backend_of_class, planner
from cupyconv.call.keywords import (
    MISSING,
    let_arguments_be_missing,
    missing_arguments,
    ours_for,
    positional,
    too_many_arguments,
    unknown_keyword,
)
from cupyconv.call.options import current_settings
from cupyconv.problem.caches import Cache
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Problem, UnlikeItsModel

#: Maximum number of cached executables; the least recently used one is evicted.
KEPT = 1024
#: A limit that no call reaches; the smallest limit that an error names; how much it may exceed the minimum, as a ratio.
UNLIMITED, MIN_WORKSPACE, NEAR = 1 << 62, 64, 1.25

#: Executables by key.  Two threads that store the same key store equivalent executables.
_executables: Cache[Executable] = Cache(KEPT)

#: By the types of all arguments, without lists and tuples: a function that selects the arrays, and their common class.
_plain_forms: dict[tuple[type, ...], tuple[Callable[[tuple[Any, ...]], Sequence[Any]], type]] = {}

#: The same with one list or tuple: a function that selects the arrays before it, its position, a function that selects
#: the arrays after it, and the common class.
_forms_with_one: dict[tuple[type, ...], tuple[Any, int, Any, type]] = {}

#: The operations of public functions.
_OPERATIONS: dict[Callable[..., Any], Operation] = {}

#: Immutable types; equal values of the same type are interchangeable.  Not float: 0.0 equals -0.0.
_PLAIN = frozenset({type(None), bool, int, str, *(np.dtype(code).type for code in "bhilqBHILQ")})
#: Types among them whose values never equal a value of another type.
_NAMES = frozenset({type(None), str})


class Operation:
    """A callable operation: which of its arguments are arrays, and the function that checks them.

    Parameters
    ----------
    function : callable or None
        The public function, by which `explain` finds the operation; None for an internal operation.
    check : callable
        ``check(arrays, on=None, **settings) -> CheckedCall``; raises an error for arguments that do not fit.  `arrays`
        are by name, None if absent; one may be a sequence of arrays.  Only a call for a gradient passes
        ``saving=True``: the results are then a list that ends with what the gradient needs.
    arrays : sequence of str
        The names of the arguments that are arrays, in the order in which the checked call has them.
    settings : sequence of str, optional
        The names of all other arguments; by default those of the function.
    unpack : callable, optional
        Maps the function's arguments to those named in `arrays` and `settings`.  It may change the dict that it
        receives.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        check: Callable[..., CheckedCall],
        arrays: Sequence[str],
        settings: Sequence[str] = (),
        unpack: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        if function is not None:
            _OPERATIONS[function] = self
            let_arguments_be_missing(function)
            settings = settings or [name for name in signature(function).parameters if name not in arrays]
        self._function = function
        self._check = check
        self._unpack = unpack
        self.arrays, self.settings = tuple(arrays), tuple(settings)
        self._arrays_of, self._settings_of = itemgetter(*arrays), itemgetter(*settings)
        #: The last immutable settings, and the same settings with their types.
        self._last: tuple[tuple[Any, ...], Hashable] = (), None

    def __call__(self, arguments: dict[str, Any], *, saving: bool = False) -> Any:
        """Return the result for all arguments of the function by name, for example its own ``locals()``."""
        if arguments.get("foreign") or arguments.get("unnamed"):
            self._refuse_more(arguments)
        if self._unpack is not None:
            try:
                arguments = self._unpack(arguments)
            except (TypeError, ValueError):
                self._refuse_missing(arguments)  # a missing argument may cause this error, which would show `MISSING`
                raise
        settings = self._settings_of(arguments)
        given, form, array_class = flat(self._arrays_of(arguments))
        key = self._key(given, form, array_class, settings, saving)
        known = _executables.get(key)
        if known is not None:
            return known.run_again(given)
        self._refuse_missing(arguments)
        checked = self._checked(arguments, **({"saving": True} if saving else {}))
        executable = Executable(checked)
        result = executable.run(tuple(checked.arrays.values()))
        if key is not None:
            assert all(a is b for a, b in zip(given, checked.arrays.values(), strict=True)), "arrays in another order"
            _executables.keep(key, executable, executable.shared)
        return result

    def _refuse_more(self, arguments: Mapping[str, Any]) -> NoReturn:
        assert self._function is not None
        name, parameters = self._function.__name__, signature(self._function).parameters
        if arguments["foreign"]:
            raise unknown_keyword(name, next(iter(arguments["foreign"])), parameters)
        raise TypeError(too_many_arguments(name, parameters, positional(parameters) + len(arguments["unnamed"])))

    def _refuse_missing(self, arguments: Mapping[str, Any]) -> None:
        missing = [name for name, value in arguments.items() if value is MISSING]
        if missing:
            assert self._function is not None
            raise missing_arguments(self._function.__name__, missing) from None

    def checked(self, arguments: dict[str, Any], on: str | None = None) -> CheckedCall:
        """Return the checked call with these arguments; nothing is run."""
        return self._checked(arguments if self._unpack is None else self._unpack(arguments), on=on)

    def _checked(self, arguments: Mapping[str, Any], **how: Any) -> CheckedCall:
        settings = {name: arguments[name] for name in self.settings}
        call = self._check({name: arguments[name] for name in self.arrays}, **settings, **how)
        for result in call.results:
            result.check_size()
        return call

    def _key(
        self, given: Sequence[Any], form: Hashable, array_class: type | None, settings: tuple[Any, ...], saving: bool
    ) -> Hashable | None:
        """Everything that the outcome depends on except addresses; None if this cannot be determined."""
        backend_of = None if array_class is None else backend_of_class(array_class)
        if backend_of is None:
            return None
        backend = backend_of(given[0])
        last, typed = self._last
        # Identical immutable objects need no second look: most calls use the defaults.
        if len(last) != len(settings) or not all(map(is_, settings, last)):
            try:
                typed = _typed(settings)
            except (_Unusual, RecursionError):  # RecursionError: a list that contains itself
                return None
            if _cannot_change(settings):
                self._last = settings, typed
        return self, saving, backend, form, backend.signature(given), typed, current_settings()


def operation_of(function: Any) -> Operation | None:
    """Return the operation of a public function; None for any other object."""
    return next((operation for known, operation in _OPERATIONS.items() if known is function), None)


def known_functions() -> list[str]:
    """The names of all functions that are operations."""
    return [function.__name__ for function in _OPERATIONS]


def refusal(name: str, known: Sequence[str], function: Any, namesake: str) -> str:
    """Why `name`, which takes a function and its arguments, does not accept this function.

    `namesake` is the hint for a function of another framework that has the name of one of the `known` functions.
    """
    message = f"the first argument of {name} must be one of {', '.join(known)}, given "
    if not callable(function):
        given = repr(function) if function is None or isinstance(function, str) else type(function).__name__
        return f"{message}{given}: write {name}(conv, x, weight), not {name}(conv(x, weight))"
    own = getattr(function, "__name__", repr(function))
    return f"{message}{own!r}" + (namesake.format(own) if own in known else "")


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, including defaults."""
    defaults, positional, required, named = _parameters(function)
    given = {**dict(zip(positional, args)), **kwargs}
    if len(given) == len(args) + len(kwargs) and required <= given.keys() <= named:
        return defaults | given
    # `bind` takes ten times as long, but finds the words for an error.
    known = signature(function)
    try:
        arguments = known.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [keyword for keyword in kwargs if keyword not in known.parameters]
        said = str(error)
        if unknown:  # it may be the missing argument under another name
            said = f"got an unexpected keyword argument {unknown[0]!r}: {ours_for(unknown[0], known.parameters)}"
        elif said == "too many positional arguments":
            raise TypeError(too_many_arguments(function.__name__, known.parameters, len(args))) from None
        raise TypeError(f"{function.__name__}: {said}") from None
    arguments.apply_defaults()
    return dict(arguments.arguments)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], list[str], set[str], set[str]]:
    """All parameters with their defaults; and the names of positional ones, of those without a default, and of all.

    The last three leave out those that collect other arguments.
    """
    known = signature(function).parameters.values()
    others: dict[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
    defaults = {one.name: others.get(one.kind, one.default) for one in known}
    positional = [one.name for one in known if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    required = {name for name, value in defaults.items() if value is Parameter.empty}
    return defaults, positional, required, {one.name for one in known if one.kind not in others}


def forget_calls() -> None:
    """Remove all cached executables, so that every call is checked again (for tests)."""
    _executables.clear()


def flat(arguments: tuple[Any, ...]) -> tuple[Sequence[Any], Hashable, type | None]:
    """Flatten the arguments that are arrays.

    Returns all arrays in one sequence; a hashable form with the type of each argument and the number of arrays in each
    sequence; and the common class of all arrays, or None.
    """
    kinds = tuple(map(type, arguments))
    known = _plain_forms.get(kinds)
    if known is not None:
        present, array_class = known
        return present(arguments), kinds, array_class
    with_one = _forms_with_one.get(kinds)
    if with_one is not None:
        before, place, after, array_class = with_one
        listed = arguments[place]
        if {*map(type, listed)} == {array_class}:
            return (*before(arguments), *listed, *after(arguments)), (kinds, len(listed)), array_class
    given: list[Any] = []
    counts: list[int] = []
    for kind, argument in zip(kinds, arguments):
        if kind is list or kind is tuple:
            given += argument
            counts.append(len(argument))
        elif argument is not None:
            given.append(argument)
    classes = set(map(type, given))
    one_class = classes.pop() if len(classes) == 1 else None
    form = (kinds, *counts) if counts else kinds
    if one_class is not None and backend_of_class(one_class) is not None and len(counts) < 2:
        places = [place for place, argument in enumerate(arguments) if argument is not None]
        if counts:
            at = next(place for place, kind in enumerate(kinds) if kind is list or kind is tuple)
            before, after = ([place for place in places if sign * (place - at) > 0] for sign in (-1, 1))
            _forms_with_one[kinds] = _taker(before), at, _taker(after), one_class
        else:
            _plain_forms[kinds] = _taker(places), one_class
    return given, form, one_class


def _taker(places: list[int]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """Return a function that selects the entries at these positions from a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class _Unusual(Exception):
    """A value for which it is unknown whether an equal value is interchangeable with it."""


def _typed(values: tuple[Any, ...]) -> Hashable:
    """Values together with their types: two results are equal only if both values and types are equal."""
    kinds = tuple(map(type, values))
    if _PLAIN.issuperset(kinds):
        return kinds, values
    return kinds, tuple([value if type(value) in _PLAIN else _one_typed(value) for value in values])


def _cannot_change(values: tuple[Any, ...]) -> bool:
    return all(_cannot_change(value) if type(value) is tuple else type(value) is not list for value in values)


def _one_typed(value: Any) -> Hashable:
    kind = type(value)
    if kind is float:
        return repr(value)
    if kind is tuple or kind is list:
        return value if kind is tuple and _NAMES.issuperset(map(type, value)) else _typed(tuple(value))
    raise _Unusual


@dataclass
class CheckedCall:
    """One call, checked and ready; nothing has been allocated or launched for it.

    `explain` needs only ``plan()``; an `Executable` of the call runs it, once or repeatedly.

    `images` names the arrays that have the axes of an image.  `results` are the return values: one array or, if
    `listed`, a list.
    """

    arguments: Arguments
    problem: Problem
    images: frozenset[str]
    axes: Axes
    results: tuple[Result, ...]
    listed: bool = False

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments by name, as the caller gave them, without absent ones."""
        return self.arguments.arrays

    def plan(self) -> Plan:
        plan = planner(self.arguments.backend, self.problem.machine)
        try:
            return _with_note_on_limit(plan(self.problem), self.problem.limit)
        except ValueError as refusal:
            enough = _enough_workspace(plan, self.problem)
            if enough is None:
                raise
            words = f"{refusal}; a workspace_limit of {enough:,} bytes is enough for the whole call"
        raise ValueError(words)

    def run(self) -> Any:
        """Allocate, execute and return the result; nothing is cached."""
        return Executable(self).run(tuple(self.arrays.values()))


def _with_note_on_limit(plan: Plan, limit: int) -> Plan:
    """The plan, with a note if it exceeds the workspace limit; cached forms do not count against the limit."""
    buffers = sum(buffer.nbytes for buffer in plan.workspace if not buffer.of)
    needed = buffers + sum(conversion.nbytes for conversion in plan.conversions)
    if needed <= limit:
        return plan
    note = f"{needed:,} bytes of workspace exceed the limit of {limit:,}: this method cannot run with less"
    return replace(plan, notes=(*plan.notes, note))


def _enough_workspace(plan: Callable[[Problem], Plan], problem: Problem) -> int | None:
    """A limit under which a refused problem has a plan, close to the minimum; None if the limit is not the reason.

    A method knows its own requirement, but not how much of the limit the rest of the call needs.  So this function
    searches with the planner itself.
    """

    def is_enough(limit: int) -> bool:
        try:
            plan(replace(problem, workspace_limit=limit))
        except ValueError:
            return False
        return True

    refused, enough = max(MIN_WORKSPACE, problem.limit), UNLIMITED
    if not is_enough(enough):
        return None
    while enough > NEAR * refused:
        middle = isqrt(refused * enough)  # the bounds may differ by orders of magnitude: bisect on a logarithmic scale
        refused, enough = (refused, middle) if is_enough(middle) else (middle, enough)
    return enough


class Executable:
    """A checked call without its arrays, ready to run: shared by all calls with the same settings and array layouts.

    A run only allocates the results and passes the arrays, in the order of the checked call, to the backend.
    """

    def __init__(self, call: CheckedCall) -> None:
        arrays, axes = call.arrays, call.axes
        self._problem = call.problem
        self._backend = call.arguments.backend
        self._prepare(call.plan())
        self._names = tuple(arrays)
        self._axes = axes
        self._listed = call.listed
        self._returned = returned = tuple(result.name for result in call.results)
        self._allocated = tuple(
            (result.name, result.dtype, *result.memory) for result in call.results if result.name not in arrays
        )
        #: Arrays of a subclass, which may index and compute differently: the backend receives plain arrays.
        self._subclassed = tuple(name for name, array in arrays.items() if self._backend.plain(array) is not array)
        #: Arrays for which the backend receives a view with its own axes.
        self._viewed = () if axes.are_the_backends else tuple(call.images & {*arrays, *returned})
        given = [name for name in returned if name in arrays]
        self._out_memory = OutMemory(arrays, given, call.results[0].may_alias) if given else None
        self._places_of_outs = [place for place, name in enumerate(arrays) if name in given]
        #: Results that are computed in separate memory and then copied to the caller's array, see `Axes.view`.
        self._beside = tuple(
            name
            for name in given
            if name in self._viewed and axes.needs_copy(tuple(arrays[name].shape), tuple(arrays[name].strides))
        )

    @property
    def shared(self) -> tuple[object, ...]:
        """Objects that executables share."""
        return self._backend, *vars(self._backend).values()

    def run_again(self, arrays: Sequence[Any]) -> Any:
        """Run with other arrays, after the only check that their layouts do not decide."""
        if self._out_memory is not None and not self._backend.are_apart(arrays, self._places_of_outs):
            self._out_memory.check(arrays, self._backend)
        return self.run(arrays)

    def _prepare(self, plan: Plan) -> None:
        """Prepare the plan for execution, or another plan if the device cannot run this one."""
        try:
            self._execute = self._backend.prepare(plan)
            self.plan = plan
        except UnlikeItsModel:
            self._prepare(self._plan_for_what_it_is())

    def run(self, arrays: Sequence[Any]) -> Any:
        """Execute the plan; if an allocation fails, try smaller chunks before reporting it."""
        return self._backend.within(self._run, arrays)

    def _run(self, arrays: Sequence[Any]) -> Any:
        named = dict(zip(self._names, arrays))
        for name, dtype, memory_shape, order in self._allocated:
            array = self._backend.empty(memory_shape, dtype)
            named[name] = array if order is None else array.transpose(order)
        returned: Any = [named[name] for name in self._returned] if self._listed else named[self._returned[0]]
        for name in self._subclassed:
            named[name] = self._backend.plain(named[name])
        for name in self._viewed:
            named[name] = self._view(name, named[name])
        failed: MemoryError | None = None
        try:
            self._execute(named)
        except MemoryError as error:
            # The frames of the error and of its causes hold the memory of this attempt, which the next one may need.
            failed = error.with_traceback(None)
            failed.__cause__ = failed.__context__ = None
        except UnlikeItsModel:
            self._prepare(self._plan_for_what_it_is())
            return self._run(arrays)
        if failed is not None and not self._succeeds_with_less(named, dict(zip(self._names, arrays))):
            try:
                raise failed
            finally:
                del failed  # breaks the reference cycle with this frame, which would hold all arrays of the call
        for name in self._beside:
            out = returned[self._returned.index(name)] if self._listed else returned
            self._backend.plain(out)[...] = self._axes.give_back(named[name], tuple(out.shape)[-self._axes.spatial :])
        return returned

    def _succeeds_with_less(self, views: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
        """Run plans with less and less workspace; return whether one of them succeeded."""
        # A result that is also the residual may already hold sums: a second attempt would add them again.
        if self._out_memory is not None and self._out_memory.is_residual(arrays, self._backend.address):
            return False
        plan = self._plan_with_less(self.plan)
        while plan is not None:
            try:
                self._backend.prepare(plan)(views)
                return True
            except MemoryError:
                plan = self._plan_with_less(plan)
        return False

    def _plan_with_less(self, plan: Plan) -> Plan | None:
        """A plan with half the workspace that could not be allocated, or None if there is none."""
        if not plan.workspace:
            return None
        try:
            smaller = self._backend.plan(replace(self._problem, workspace_limit=plan.workspace_bytes // 2))
        except ValueError:
            return None
        return smaller if smaller.workspace_bytes < plan.workspace_bytes else None

    def _plan_for_what_it_is(self) -> Plan:
        """The plan for the updated model of a device that refused a plan; raises ValueError if the method was named."""
        self._problem = replace(self._problem, machine=self._backend.machine(None))
        return self._backend.plan(self._problem)

    def _view(self, name: str, array: Any) -> Any:
        def copy(image: Any) -> Any:
            if name in self._beside:
                return self._backend.empty(tuple(image.shape), image.dtype)
            return self._backend.converted(image, image.dtype)

        return self._axes.view(array, copy)
