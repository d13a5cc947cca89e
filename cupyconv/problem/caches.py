"""Caches and reusable memory that persist from call to call.  All share one budget of bytes.

::

    checked and planned calls        regions that blocks read       scratch memory of threads
    (call/operation.py)              (numpy/windows.py)             (numpy/backend.py)
          |  by key                        |  by key                      |  while its thread lives
          +--------------------------------+------------------------------+---->  BUDGET, together

When the budget is spent, the least recently used entry is released.  A large entry is not cached at all.

Outside this budget, forms of an array are cached if its owner declares that its elements do not change: a weight in the
order in which a kernel reads it, or transformed.  They live as long as the array.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")

#: Maximum number of cached forms per array.  No form is evicted, because another stream or a CUDA graph may read it.
MAX_FORMS = 16
#: Maximum bytes of everything together, and of one entry.
BUDGET = 64 << 20
LARGEST = BUDGET // 16

_USES = count()
_caches: list[Cache[Any]] = []
#: Functions that release memory outside the caches, and functions to call after them.
_clearers: list[Callable[[], None]] = []
_after_clearing: list[Callable[[], None]] = []
#: Bytes of everything that is cached, the reserved memory among them, and the lock that protects both.  The lock is
#: reentrant, because releasing one entry may release another.
_spent = 0
_reserved = 0
_lock = RLock()
#: Bytes of reserved memory that was freed, but is still counted.
_released: deque[int] = deque()


class Cache(Generic[ValueT]):
    """Values by key, with at most `most` entries."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, _Entry[ValueT]] = {}
        _caches.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> ValueT | None:
        """Return the value of a key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.last_use = next(_USES)
        return entry.value

    def keep(self, key: Hashable, value: ValueT, shared: Iterable[object] = (), at_most: int | None = None) -> None:
        """Cache a value, unless it is large; bytes that it shares with other entries are not counted.

        Counting the bytes of a value can take as long as computing it; `at_most` is a known upper bound to use instead.
        """
        nbytes = held_bytes((key, value), shared) if at_most is None else at_most
        if nbytes > LARGEST:
            return
        with _lock:
            _count_released()
            self._evict(key)
            _evict_for(nbytes)
            if len(self._entries) >= self.most:  # evict several: finding the oldest costs as much as finding some
                for _, known in sorted(self._uses())[: 1 + self.most // 8]:
                    self._evict(known)
            entry = _Entry(value, nbytes)
            # A call that runs in the middle of this one, such as a finalizer, may have cached the same key.
            if self._entries.setdefault(key, entry) is entry:
                _spend(nbytes)

    def clear(self) -> None:
        """Release all entries."""
        with _lock:
            for key in list(self._entries):
                self._evict(key)

    def oldest(self) -> Iterator[tuple[int, Hashable]]:
        """Yield the time and key of the least recently used entry; nothing if the cache is empty."""
        if uses := self._uses():
            yield min(uses)

    def _uses(self) -> list[tuple[int, Hashable]]:
        """Last use and key of each entry; the times are distinct.

        This is a list because a call in the middle of this one may add or release entries.
        """
        return [(entry.last_use, key) for key, entry in list(self._entries.items())]

    def _evict(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            _spend(-entry.nbytes)


class _Entry(Generic[ValueT]):
    __slots__ = ("last_use", "nbytes", "value")

    def __init__(self, value: ValueT, nbytes: int) -> None:
        self.value, self.nbytes, self.last_use = value, nbytes, next(_USES)


class Forms:
    """Derived forms of one array by key, as long as the array lives."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = RLock()

    def get(self, key: Hashable) -> Any:
        """Return a form; None if it was not made."""
        return self._made.get(key)

    def keep(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT | None:
        """Return a form and make it if needed, in one thread while others wait; None if there are too many forms."""
        with self._lock:
            if key not in self._made and len(self._made) < MAX_FORMS:
                self._made[key] = make()
            return self._made.get(key)


#: Forms by the identity of their array.
_forms: dict[int, Forms] = {}


def keeping_forms(array: Any) -> Any:
    """Return a view of the array, whose elements must not change, for which derived forms are cached.

    The result is a new view because a form may reference the array itself, which would then live forever.  Other views
    of the array have no cached forms.
    """
    view = array[...]
    _forms[id(view)] = Forms()
    weakref.finalize(view, _forms.pop, id(view), None).atexit = False
    return view


def forms_of(array: Any) -> Forms | None:
    """Return the cached forms of an array; None if its elements may change."""
    return _forms.get(id(array))


def reserve(nbytes: int) -> bool:
    """Count memory against the budget if it fits, and return whether it does; `release` undoes this.

    The memory lives as long as its thread.  The caches keep space for one entry of the largest size.  Otherwise each
    call would evict what the previous call cached.
    """
    global _reserved
    with _lock:
        _count_released()
        if _reserved + nbytes > BUDGET - LARGEST or not _evict_for(nbytes):
            return False
        _reserved += nbytes
        _spend(nbytes)
        return True


def release(nbytes: int) -> None:
    """Undo `reserve`, when bytes are next counted.

    This waits for no lock, because memory may be freed at any moment: in the child of a fork even before `_lock`, which
    a thread of the parent may hold, is replaced.
    """
    _released.append(nbytes)


def _count_released() -> None:
    """Count the memory that was freed; the caller holds the lock."""
    global _reserved
    while _released:
        nbytes = _released.popleft()
        _reserved -= nbytes
        _spend(-nbytes)


def on_clear(give_back: Callable[[], None]) -> None:
    """Register a function that `clear` calls to release more memory."""
    _clearers.append(give_back)


def after_clearing(function: Callable[[], None]) -> None:
    """Register a function that `clear` calls after everything was released."""
    _after_clearing.append(function)


def clear() -> None:
    """Release everything that is cached."""
    for cache in _caches:
        cache.clear()
    for function in (*_clearers, *_after_clearing):
        function()


def spent() -> int:
    """Bytes that are cached."""
    if _released:
        with _lock:
            _count_released()
    return _spent


def held_bytes(value: object, shared: Iterable[object] = ()) -> int:
    """Bytes of an object and of all that it references, except `shared`; counting stops above `LARGEST`."""
    seen, level, nbytes = {id(item) for item in shared}, [value], 0
    while level and nbytes <= LARGEST:
        asked: list[Any] = []
        following: list[Any] = []
        for item in level:
            if id(item) in seen or isinstance(item, (type, ModuleType, CodeType, BuiltinFunctionType)):
                continue
            seen.add(id(item))
            nbytes += sys.getsizeof(item)
            if isinstance(item, FunctionType):  # without the module that it belongs to
                following.append(item.__closure__)
            else:
                asked.append(item)
                following.append(getattr(item, "base", None))  # the garbage collector does not see an array's base
        # All items in one call: in Python without a global lock, each call stops all threads.
        level = following + gc.get_referents(*asked)
    return nbytes


def _evict_for(nbytes: int) -> bool:
    """Evict least recently used entries until `nbytes` are available; return whether they are."""
    while _spent + nbytes > BUDGET:
        oldest = min(
            ((*found, cache) for cache in _caches for found in cache.oldest()), default=None, key=lambda e: e[0]
        )
        if oldest is None:
            return False
        _, key, cache = oldest
        cache._evict(key)
    return True


def _spend(nbytes: int) -> None:
    global _spent
    _spent += nbytes


def _begin_process() -> None:
    """Replace all locks in the child of a fork: threads that held them do not exist there."""
    global _lock
    _lock = RLock()
    for forms in _forms.values():
        forms._lock = RLock()
    if sys.version_info < (3, 12):  # there each cached property has one lock per class, held during the computation
        for cached in _cached_properties():
            cached.lock = RLock()  # type: ignore[attr-defined]


def _cached_properties() -> Iterator[cached_property[Any]]:
    """All cached properties of the classes in this package."""
    package = __name__.partition(".")[0] + "."
    for module in [module for name, module in sys.modules.items() if name.startswith(package)]:
        for kind in list(vars(module).values()):
            if isinstance(kind, type):
                yield from (value for value in vars(kind).values() if isinstance(value, cached_property))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)
