"""What is kept from call to call: caches, and memory that serves again.  All share one budget of bytes.

::

    calls that were checked          what blocks read               scratch memory of threads
    (call/operation.py)              (numpy/windows.py)             (numpy/windows.py)
          |  by key                        |  by key                      |  while its thread lives
          +--------------------------------+------------------------------+---->  BUDGET, together

Where it is spent, what was used least recently is let go.  What is large by itself is not kept at all.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

ValueT = TypeVar("ValueT")

#: Bytes of everything together, and of one thing.
BUDGET = 64 << 20
LARGEST = BUDGET // 16

_USES = count()
_caches: list[Cache[Any]] = []
#: Functions that give back what is kept outside of caches.
_clearers: list[Callable[[], None]] = []
#: Bytes of what is kept, and who may change that; entered again where letting go of one thing lets go of another.
_spent = 0
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
                by_use = sorted(self._entries, key=lambda known: self._entries[known].last_use)
                for known in by_use[: 1 + self.most // 8]:
                    self._let_go(known)
            self._entries[key] = _Entry(value, nbytes)
            _spend(nbytes)

    def clear(self) -> None:
        """Keep nothing any more."""
        with _lock:
            for key in list(self._entries):
                self._let_go(key)

    def oldest(self) -> Iterator[tuple[int, Hashable]]:
        """What was used least recently, and when; nothing of an empty cache."""
        if self._entries:
            key = min(self._entries, key=lambda known: self._entries[known].last_use)
            yield self._entries[key].last_use, key

    def _let_go(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            _spend(-entry.nbytes)


class _Entry(Generic[ValueT]):
    __slots__ = ("last_use", "nbytes", "value")

    def __init__(self, value: ValueT, nbytes: int) -> None:
        self.value, self.nbytes, self.last_use = value, nbytes, next(_USES)


def reserve(nbytes: int) -> bool:
    """Count memory as kept, where it is within the budget; `release` counts it no more."""
    with _lock:
        if not _make_room(nbytes):
            return False
        _spend(nbytes)
        return True


def release(nbytes: int) -> None:
    """The opposite of `reserve`."""
    with _lock:
        _spend(-nbytes)


def on_clear(give_back: Callable[[], None]) -> None:
    """Call this function too where all is to be given back."""
    _clearers.append(give_back)


def clear() -> None:
    """Keep nothing any more."""
    for cache in _caches:
        cache.clear()
    for give_back in _clearers:
        give_back()


def spent() -> int:
    """Bytes that are kept."""
    return _spent


def held_bytes(value: object, shared: Iterable[object] = ()) -> int:
    """Bytes of an object and of all that it holds, but for what is `shared`; more than `LARGEST` are not counted up."""
    seen, waiting, nbytes = {id(item) for item in shared}, [value], 0
    while waiting and nbytes <= LARGEST:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, CodeType, BuiltinFunctionType)):
            continue
        seen.add(id(item))
        nbytes += sys.getsizeof(item)
        if isinstance(item, FunctionType):  # not the module that it belongs to
            waiting.append(item.__closure__)
        else:
            waiting += gc.get_referents(item)
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
    """In a child of a fork the thread that may have held the lock is not there."""
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)
