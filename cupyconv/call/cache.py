"""Calls like one before skip its checks: every public function comes through `call`.

::

    arguments --> everything of them that the outcome depends on, as a key
                    known:      the prepared call runs on these arrays        (microseconds)
                    not known:  check, plan, prepare, run; then remember      (the one place for errors)

The key holds what a check or a plan may look at: which arguments are there, the owner, dtypes, shapes,
strides and alignment of the arrays, every other argument with its type (1, 1.0 and True are equal to Python
and not to a caller), and the options in force.  What it cannot hold, where `out` lies, is checked each time.
Only a call that came to its result is remembered; arguments of a kind not thought of here take the long way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from threading import Lock
from typing import Any, Protocol

import numpy as np

from cupyconv.call.dispatch import backend_of_class
from cupyconv.call.executable import PreparedCall
from cupyconv.call.options import current_settings

#: Executables kept: of more, the one that was used least recently is let go.
KEPT = 1024

#: By key, in the order of their last use.  Two threads that store one key store the same.
_executables: OrderedDict[Hashable, PreparedCall] = OrderedDict()
_LOCK = Lock()

#: Immutable, and the same where type and value are.  Not float: 0.0 equals -0.0.
_PLAIN = frozenset({type(None), bool, int, str, *(np.dtype(code).type for code in "bhilqBHILQ")})


class CheckedCall(Protocol):
    """What `prepare` makes of arguments."""

    arrays: dict[str, Any]

    def prepared(self) -> PreparedCall: ...


def call(prepare: Callable[..., CheckedCall], arrays: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The result of a public function for these arguments.

    Parameters
    ----------
    prepare : callable
        Checks the arguments, given by name, or raises.
    arrays : mapping
        The arguments that are arrays, in the order in which `prepare` lists them; one may be a sequence
        of arrays, and None is one that is absent.
    settings : mapping
        All other arguments.
    """
    given, counts = _flat(arrays.values())
    key = _key(prepare, given, counts, settings)
    known = _find(key) if key is not None else None
    if known is not None:
        return known.run_again(given)
    checked = prepare(**arrays, **settings)
    prepared = checked.prepared()
    result = prepared.run(tuple(checked.arrays.values()))
    if key is not None:
        assert all(a is b for a, b in zip(given, checked.arrays.values(), strict=True)), "arrays in another order"
        _keep(key, prepared)
    return result


def _find(key: Hashable) -> PreparedCall | None:
    """The executable of this key, which is now the most recently used."""
    with _LOCK:
        known = _executables.get(key)
        if known is not None:
            _executables.move_to_end(key)
        return known


def _keep(key: Hashable, executable: PreparedCall) -> None:
    with _LOCK:
        _executables[key] = executable
        while len(_executables) > KEPT:
            _executables.popitem(last=False)


def forget_calls() -> None:
    """Check every call anew."""
    with _LOCK:
        _executables.clear()


def _flat(arguments: Iterable[Any]) -> tuple[list[Any], tuple[int | None, ...]]:
    """All arrays in one list, and how many each argument holds: None for one that is absent, -1 for a bare one."""
    given: list[Any] = []
    counts: list[int | None] = []
    for argument in arguments:
        if argument is None:
            counts.append(None)
        elif type(argument) is list or type(argument) is tuple:
            given += argument
            counts.append(len(argument))
        else:
            given.append(argument)
            counts.append(-1)
    return given, tuple(counts)


def _key(
    prepare: Callable[..., CheckedCall], given: list[Any], counts: tuple[int | None, ...], settings: Mapping[str, Any]
) -> Hashable | None:
    """Everything the outcome depends on but addresses, or None where that cannot be said."""
    if not given:
        return None
    backend_of = backend_of_class(type(given[0]))
    if backend_of is None or len(set(map(type, given))) > 1:
        return None
    backend = backend_of(given[0])
    try:
        typed = _typed(tuple(settings.values()))
    except (_Unusual, RecursionError):  # a list that holds itself
        return None
    return backend, prepare, counts, backend.signature(given), typed, current_settings()


class _Unusual(Exception):
    """A value of which nobody knows whether an equal one is the same."""


def _typed(values: tuple[Any, ...]) -> Hashable:
    """Values beside their types, so that only the same are equal."""
    kinds = tuple(map(type, values))
    if _PLAIN.issuperset(kinds):
        return kinds, values
    return kinds, tuple(map(_one_typed, values))


def _one_typed(value: Any) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return repr(value)
    if kind is tuple or kind is list:
        return _typed(tuple(value))
    raise _Unusual
