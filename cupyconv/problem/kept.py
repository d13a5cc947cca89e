"""What is kept from call to call: caches, and memory that serves again.  All share one budget of bytes.

::

    calls that were checked          what blocks read               scratch memory of threads
    (call/operation.py)              (numpy/windows.py)             (numpy/backend.py)
          |  by key                        |  by key                      |  while its thread lives
          +--------------------------------+------------------------------+---->  BUDGET, together

Where it is spent, what was used least recently is let go.  What is large by itself is not kept at all.

Beside that, and as long as an array lives whose owner has said that its elements stay as they are, there are the forms
that methods have given it: a weight as a kernel reads it, or transformed.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")

#: Forms of an array that are kept, at the most.  None is let go for another: work in another stream, or a graph, may read it.
MOST_FORMS = 16
#: Bytes of everything together, and of one thing.
BUDGET = 64 << 20
LARGEST = BUDGET // 16

_USES = count()
_caches: list[Cache[Any]] = []
#: Functions that give back what is kept outside of caches, and what is to be done after them.
_clearers: list[Callable[[], None]] = []
_after_clearing: list[Callable[[], None]] = []
#: Bytes of what is kept, those of memory among them, and who may change that; entered again where letting go of one thing lets
#: go of another.
_spent = 0
_reserved = 0
_lock = RLock()


class Cache(Generic[ValueT]):
    """Values by key, at most so many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, _Entry[ValueT]] = {}
        _caches.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> ValueT | None:
        """The value of a key; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.last_use = next(_USES)
        return entry.value

    def keep(self, key: Hashable, value: ValueT, shared: Iterable[object] = (), at_most: int | None = None) -> None:
        """Keep a value, unless it is large; what it shares with others is not counted.

        To count its bytes takes as long as much of what is kept took to compute: `at_most` is a bound that is known.
        """
        nbytes = held_bytes((key, value), shared) if at_most is None else at_most
        if nbytes > LARGEST:
            return
        with _lock:
            self._let_go(key)
            _make_room(nbytes)
            if len(self._entries) >= self.most:  # several at once: to find the oldest takes as long as to find some
                for _, known in sorted(self._uses())[: 1 + self.most // 8]:
                    self._let_go(known)
            entry = _Entry(value, nbytes)
            # A call in the midst of this one may have kept the same meanwhile.
            if self._entries.setdefault(key, entry) is entry:
                _spend(nbytes)

    def clear(self) -> None:
        """Keep nothing any more."""
        with _lock:
            for key in list(self._entries):
                self._let_go(key)

    def oldest(self) -> Iterator[tuple[int, Hashable]]:
        """What was used least recently, and when; nothing of an empty cache."""
        if uses := self._uses():
            yield min(uses)

    def _uses(self) -> list[tuple[int, Hashable]]:
        """When each was used, no two at once; a list, because a call in the midst of this one may keep more or let go of some."""
        return [(entry.last_use, key) for key, entry in list(self._entries.items())]

    def _let_go(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            _spend(-entry.nbytes)


class _Entry(Generic[ValueT]):
    __slots__ = ("last_use", "nbytes", "value")

    def __init__(self, value: ValueT, nbytes: int) -> None:
        self.value, self.nbytes, self.last_use = value, nbytes, next(_USES)


class Forms:
    """What methods have made of one array, by key: as long as it lives."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = RLock()

    def get(self, key: Hashable) -> Any:
        """What was made; None where nothing was."""
        return self._made.get(key)

    def keep(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT | None:
        """What was made, or is now, by one thread while others wait; None where no more is kept."""
        with self._lock:
            if key not in self._made and len(self._made) < MOST_FORMS:
                self._made[key] = make()
            return self._made.get(key)


#: By the identity of the array.
_forms: dict[int, Forms] = {}


def keeping_forms(array: Any) -> Any:
    """The array, whose elements stay as they are, as a view with which what methods make of it is kept.

    A view, because a form may hold the array itself, which would live forever then; of other views nothing is kept.
    """
    view = array[...]
    _forms[id(view)] = Forms()
    weakref.finalize(view, _forms.pop, id(view), None).atexit = False
    return view


def forms_of(array: Any) -> Forms | None:
    """What is kept of an array; None of one whose elements may change."""
    return _forms.get(id(array))


def reserve(nbytes: int) -> bool:
    """Count memory as kept, where it is within the budget; `release` counts it no more.

    Memory lives as long as its thread.  Caches have room for one large thing beside it: else each call would let go of what
    was kept of the one before.
    """
    global _reserved
    with _lock:
        if _reserved + nbytes > BUDGET - LARGEST or not _make_room(nbytes):
            return False
        _reserved += nbytes
        _spend(nbytes)
        return True


def release(nbytes: int) -> None:
    """The opposite of `reserve`."""
    global _reserved
    with _lock:
        _reserved -= nbytes
        _spend(-nbytes)


def on_clear(give_back: Callable[[], None]) -> None:
    """Call this function too where all is to be given back."""
    _clearers.append(give_back)


def after_clearing(function: Callable[[], None]) -> None:
    """Call this function when all has been given back."""
    _after_clearing.append(function)


def clear() -> None:
    """Keep nothing any more."""
    for cache in _caches:
        cache.clear()
    for function in (*_clearers, *_after_clearing):
        function()


def spent() -> int:
    """Bytes that are kept."""
    return _spent


def held_bytes(value: object, shared: Iterable[object] = ()) -> int:
    """Bytes of an object and of all that it holds, but for what is `shared`; more than `LARGEST` are not counted up."""
    seen, level, nbytes = {id(item) for item in shared}, [value], 0
    while level and nbytes <= LARGEST:
        asked: list[Any] = []
        following: list[Any] = []
        for item in level:
            if id(item) in seen or isinstance(item, (type, ModuleType, CodeType, BuiltinFunctionType)):
                continue
            seen.add(id(item))
            nbytes += sys.getsizeof(item)
            if isinstance(item, FunctionType):  # not the module that it belongs to
                following.append(item.__closure__)
            else:
                asked.append(item)
                following.append(getattr(item, "base", None))  # an array does not tell Python what it is a view of
        # Many at once: where Python has no global lock, all threads stop for each time that it is asked.
        level = following + gc.get_referents(*asked)
    return nbytes


def _make_room(nbytes: int) -> bool:
    """Let go of what was used least recently until so many bytes are left; whether they are."""
    while _spent + nbytes > BUDGET:
        oldest = min(
            ((*found, cache) for cache in _caches for found in cache.oldest()), default=None, key=lambda e: e[0]
        )
        if oldest is None:
            return False
        _, key, cache = oldest
        cache._let_go(key)
    return True


def _spend(nbytes: int) -> None:
    global _spent
    _spent += nbytes


def _begin_process() -> None:
    """In a child of a fork the threads that may have held locks are not there."""
    global _lock
    _lock = RLock()
    for forms in _forms.values():
        forms._lock = RLock()
    if sys.version_info < (3, 12):  # there each has one for all objects of a class, held while the value is worked out
        for cached in _cached_properties():
            cached.lock = RLock()  # type: ignore[attr-defined]


def _cached_properties() -> Iterator[cached_property[Any]]:
    """Those of all our classes."""
    package = __name__.partition(".")[0] + "."
    for module in [module for name, module in sys.modules.items() if name.startswith(package)]:
        for kind in list(vars(module).values()):
            if isinstance(kind, type):
                yield from (value for value in vars(kind).values() if isinstance(value, cached_property))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)
