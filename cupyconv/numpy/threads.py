"""Work that several threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def in_threads(threads: int, work: Callable[[Item], Outcome], items: Iterable[Item]) -> Iterator[Outcome]:
    """What `work` returns for each item, in the order of the items; nothing runs before the first is asked for.

    NumPy's floating-point warnings are silenced in the threads that are started here.
    """
    if threads == 1:
        yield from map(work, items)
        return

    def silenced(item: Item) -> Outcome:
        with np.errstate(all="ignore"):
            return work(item)

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(silenced, items)
