"""The one way in: what becomes of an operation's arguments until they run.

::

    conv(x, weight, stride=2, ...)
      arguments --> arrays and settings, apart --> everything the outcome depends on, as a key
        known:      its executable runs on these arrays                          (microseconds)
        not known:  check --> problem --> plan --> executable, which runs and is remembered

The key holds what a check or a plan may look at: which arguments are there, the owner, dtypes, shapes,
strides and alignment of the arrays, every other argument with its type (1, 1.0 and True are equal to Python
and not to a caller), and the options in force.  What it cannot hold, where `out` lies, is checked each time.
Only a call that came to its result is remembered, and only arguments of the types below: others are checked each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
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
from cupyconv.problem.kept import Cache
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import Problem, UnlikeItsModel

#: Executables kept: of more, the one that was used least recently is let go.
KEPT = 1024
#: A limit that no call meets, and the smallest one that an error names; up to how many times the least that is.
UNLIMITED, LEAST_WORKSPACE, NEAR = 1 << 62, 64, 1.25

#: By key.  Two threads that store one key store executables that do the same.
_executables: Cache[Executable] = Cache(KEPT)

#: What takes the arrays from all arguments, and their one class, by the types of all arguments: none is a list or a tuple.
_plain_forms: dict[tuple[type, ...], tuple[Callable[[tuple[Any, ...]], Sequence[Any]], type]] = {}

#: The same where one argument is a list or a tuple: what takes the arrays before it, its place, and what takes those after it.
_forms_with_one: dict[tuple[type, ...], tuple[Any, int, Any, type]] = {}

#: The operations of public functions.
_OPERATIONS: dict[Callable[..., Any], Operation] = {}

#: Immutable, and the same where type and value are.  Not float: 0.0 equals -0.0.
_PLAIN = frozenset({type(None), bool, int, str, *(np.dtype(code).type for code in "bhilqBHILQ")})
#: Of these, equal values are the same whatever their types are.
_NAMES = frozenset({type(None), str})


class Operation:
    """What can be called: which of its arguments are arrays, and what checks them.

    Parameters
    ----------
    function : callable or None
        The public function, by which `explain` finds the operation; an operation within others has none.
    check : callable
        ``check(arrays, on=None, **settings) -> CheckedCall``, or an error for arguments that do not fit.  `arrays` are
        by name, None where absent; one may be a sequence of arrays.  Only where it is called for a gradient it gets
        ``saving=True``: the results are then a list, with what the gradient needs at its end.
    arrays : sequence of str
        The names of the arguments that are arrays, in the order in which the checked call has them.
    settings : sequence of str, optional
        The names of all others; by default those of the function.
    unpack : callable, optional
        Maps the function's arguments to those named in `arrays` and `settings`.  It may change the dict that it gets.
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
        #: Settings that cannot change, and the same with their types.
        self._last: tuple[tuple[Any, ...], Hashable] = (), None

    def __call__(self, arguments: dict[str, Any], *, saving: bool = False) -> Any:
        """The result for all arguments of the function by name: its own ``locals()``, for instance."""
        if arguments.get("foreign") or arguments.get("unnamed"):
            self._refuse_more(arguments)
        if self._unpack is not None:
            try:
                arguments = self._unpack(arguments)
            except (TypeError, ValueError):
                self._refuse_missing(arguments)  # without this error, which would show what stands for it
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
        """The call that these arguments make; nothing is run."""
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
        """Everything the outcome depends on but addresses, or None where that cannot be said."""
        backend_of = None if array_class is None else backend_of_class(array_class)
        if backend_of is None:
            return None
        backend = backend_of(given[0])
        last, typed = self._last
        # The very same objects as before, which cannot have changed: most calls have their defaults.
        if len(last) != len(settings) or not all(map(is_, settings, last)):
            try:
                typed = _typed(settings)
            except (_Unusual, RecursionError):  # a list that holds itself
                return None
            if _cannot_change(settings):
                self._last = settings, typed
        return self, saving, backend, form, backend.signature(given), typed, current_settings()


def operation_of(function: Any) -> Operation | None:
    """The operation of a public function; None for anything else."""
    return next((operation for known, operation in _OPERATIONS.items() if known is function), None)


def known_functions() -> list[str]:
    """The names of all functions that are operations."""
    return [function.__name__ for function in _OPERATIONS]


def refusal(name: str, known: Sequence[str], function: Any, namesake: str) -> str:
    """Why `name`, that takes a function and its arguments, does not take this one.

    `namesake` is what to say of another framework's function that has the name of one of the `known`.
    """
    message = f"{name} takes one of {', '.join(known)}, and then its arguments, given "
    if not callable(function):
        given = repr(function) if function is None or isinstance(function, str) else type(function).__name__
        return f"{message}{given}: write {name}(conv, x, weight), without calling conv"
    own = getattr(function, "__name__", repr(function))
    return f"{message}{own!r}" + (namesake.format(own) if own in known else "")


def bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    known = signature(function)
    try:
        arguments = known.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [keyword for keyword in kwargs if keyword not in known.parameters]
        said = str(error)
        if unknown:  # it may be what is missing
            said = f"got an unexpected keyword argument {unknown[0]!r}: {ours_for(unknown[0], known.parameters)}"
        elif said == "too many positional arguments":
            raise TypeError(too_many_arguments(function.__name__, known.parameters, len(args))) from None
        raise TypeError(f"{function.__name__}: {said}") from None
    arguments.apply_defaults()
    return dict(arguments.arguments)


def forget_calls() -> None:
    """Forget all executables, so that every call is checked anew (for tests)."""
    _executables.clear()


def flat(arguments: tuple[Any, ...]) -> tuple[Sequence[Any], Hashable, type | None]:
    """All arrays one after the other; which arguments there are: the type of each, and how many arrays it holds; and the one
    class of all arrays, or None.
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
    """What takes those at these places from a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class _Unusual(Exception):
    """A value of which nobody knows whether an equal one is the same."""


def _typed(values: tuple[Any, ...]) -> Hashable:
    """Values beside their types: only equal values of equal types are equal."""
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

    ``plan()`` is all that `explain` needs; an `Executable` of it runs, this time and again.

    `images` names the arrays that have the axes of an image; `results` are what comes back, one array or, where
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
        """The arguments by name, as the caller gave them, absent ones left out."""
        return self.arguments.arrays

    def plan(self) -> Plan:
        plan = planner(self.arguments.backend, self.problem.machine)
        try:
            return _with_note_on_limit(plan(self.problem), self.problem.limit)
        except ValueError as refusal:
            enough = _enough_workspace(plan, self.problem)
            if enough is None:
                raise
            words = f"{refusal}; for the whole call a workspace_limit of {enough:,} bytes is enough"
        raise ValueError(words)

    def run(self) -> Any:
        """Allocate, execute and return the result; nothing is remembered."""
        return Executable(self).run(tuple(self.arrays.values()))


def _with_note_on_limit(plan: Plan, limit: int) -> Plan:
    """The plan, which says so where it takes more than it was allowed; forms that are kept are beside the limit."""
    buffers = sum(buffer.nbytes for buffer in plan.workspace if not buffer.of)
    needed = buffers + sum(conversion.nbytes for conversion in plan.conversions)
    if needed <= limit:
        return plan
    note = (
        f"{needed:,} bytes of workspace are beyond the limit of {limit:,}: what the call cannot do without comes on top"
    )
    return replace(plan, notes=(*plan.notes, note))


def _enough_workspace(plan: Callable[[Problem], Plan], problem: Problem) -> int | None:
    """A limit under which a refused problem has a plan, near the least; None where no limit is the reason.

    A method knows what it lacks itself, not what the rest of the call has of the limit: so planning is asked.
    """

    def is_enough(limit: int) -> bool:
        try:
            plan(replace(problem, workspace_limit=limit))
        except ValueError:
            return False
        return True

    refused, enough = max(LEAST_WORKSPACE, problem.limit), UNLIMITED
    if not is_enough(enough):
        return None
    while enough > NEAR * refused:
        middle = isqrt(refused * enough)  # they may be far apart: halfway in their digits
        refused, enough = (refused, middle) if is_enough(middle) else (middle, enough)
    return enough


class Executable:
    """A checked call without its arrays, ready to run: what calls of one kind, on arrays laid out alike, share.

    What a run still does is find memory for the results and hand the arrays, in the order of the checked call, to the
    backend.
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
        #: Arrays of a subclass, which may index and compute otherwise: the backend gets plain ones.
        self._subclassed = tuple(name for name, array in arrays.items() if self._backend.plain(array) is not array)
        #: Arrays of which the backend gets a view with the axes it knows.
        self._viewed = () if axes.are_the_backends else tuple(call.images & {*arrays, *returned})
        given = [name for name in returned if name in arrays]
        self._out_memory = OutMemory(arrays, given, call.results[0].may_alias) if given else None
        self._places_of_outs = [place for place, name in enumerate(arrays) if name in given]
        #: Results that are computed in memory beside the caller's, see `Axes.view`.
        self._beside = tuple(
            name
            for name in given
            if name in self._viewed and axes.needs_copy(tuple(arrays[name].shape), tuple(arrays[name].strides))
        )

    @property
    def shared(self) -> tuple[object, ...]:
        """What executables hold in common."""
        return self._backend, *vars(self._backend).values()

    def run_again(self, arrays: Sequence[Any]) -> Any:
        """Run for other arrays, after the one check that their layouts do not answer."""
        if self._out_memory is not None and not self._backend.are_apart(arrays, self._places_of_outs):
            self._out_memory.check(arrays, self._backend)
        return self.run(arrays)

    def _prepare(self, plan: Plan) -> None:
        """Make the plan what a run executes, or another where the device has not what it asks for."""
        try:
            self._execute = self._backend.prepare(plan)
            self.plan = plan
        except UnlikeItsModel:
            self._prepare(self._plan_for_what_it_is())

    def run(self, arrays: Sequence[Any]) -> Any:
        """Execute the plan; smaller chunks are tried before a failed allocation is reported."""
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
            # Frames, its own and those of what it came from, hold what this attempt had, which the next one may need.
            failed = error.with_traceback(None)
            failed.__cause__ = failed.__context__ = None
        except UnlikeItsModel:
            self._prepare(self._plan_for_what_it_is())
            return self._run(arrays)
        if failed is not None and not self._succeeds_with_less(named, dict(zip(self._names, arrays))):
            try:
                raise failed
            finally:
                del failed  # it has this frame, which would have it, and with it all arrays of the call
        for name in self._beside:
            out = returned[self._returned.index(name)] if self._listed else returned
            self._backend.plain(out)[...] = self._axes.give_back(named[name], tuple(out.shape)[-self._axes.spatial :])
        return returned

    def _succeeds_with_less(self, views: Mapping[str, Any], arrays: Mapping[str, Any]) -> bool:
        """Run plans of less and less workspace; whether there was one that could have it."""
        # A result that is the residual may hold sums already: done again, they would be added twice.
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
        """A plan with half the workspace that could not be had, or None where there is none."""
        if not plan.workspace:
            return None
        try:
            smaller = self._backend.plan(replace(self._problem, workspace_limit=plan.workspace_bytes // 2))
        except ValueError:
            return None
        return smaller if smaller.workspace_bytes < plan.workspace_bytes else None

    def _plan_for_what_it_is(self) -> Plan:
        """The plan for what the device says of itself since it refused one; ValueError where its method was named."""
        self._problem = replace(self._problem, machine=self._backend.machine(None))
        return self._backend.plan(self._problem)

    def _view(self, name: str, array: Any) -> Any:
        def copy(image: Any) -> Any:
            if name in self._beside:
                return self._backend.empty(tuple(image.shape), image.dtype)
            return self._backend.converted(image, image.dtype)

        return self._axes.view(array, copy)
