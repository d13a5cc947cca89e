"""Dask's workers as the threads of our calls: how many there are, who watches them, and calls that take as many.

A task is one of the workers: its call on NumPy has one thread, and BLAS too.  A call in the place of all tasks has
as many threads as there are workers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import dask
import dask.local
import dask.threaded
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.system import CPU_COUNT

import cupyconv
from cupyconv.call.options import Settings
from cupyconv.numpy.threads import BLAS

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class SchedulerHere:
    """A scheduler of Dask whose workers are threads of this process."""

    workers: int
    get: Callable[..., Any]
    keywords: dict[str, Any]

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees tasks: a progress bar, or a profiler."""
        return bool(Callback.active) or not {"num_workers", "pool"}.issuperset(self.keywords)

    def run(self, tasks: dict[Any, Any]) -> None:
        """Run tasks that nobody asks for results."""
        self.get(tasks, [*tasks], **self.keywords)


def scheduler_here(collection: Any, how: dict[str, Any]) -> SchedulerHere | None:
    """What computes a collection, as the keywords of `compute` say; None where its workers are elsewhere, or Dask refuses them."""
    keywords = {key: value for key, value in how.items() if key not in ("scheduler", "optimize_graph", "traverse")}
    if "get" in keywords:
        return None
    get = get_scheduler(scheduler=how.get("scheduler"), collections=[collection])
    if get is dask.local.get_sync:
        return SchedulerHere(1, get, keywords)
    workers = _threads(how) if get is dask.threaded.get else None
    return None if workers is None else SchedulerHere(workers, get, keywords)


def _threads(how: dict[str, Any]) -> int | None:
    """How many threads Dask has; None where it has processes in their place, or no such number."""
    pool = how.get("pool") or dask.config.get("pool", None)
    if pool is None:
        workers = how.get("num_workers") or dask.config.get("num_workers", None) or CPU_COUNT
        return workers if workers > 0 else None
    # Pools show nobody how many workers they have, but Dask reads them so too.
    if isinstance(pool, ThreadPoolExecutor):
        return pool._max_workers
    return vars(pool)["_processes"] if isinstance(pool, ThreadPool) else None


def in_threads_of(workers: int, settings: Settings, call: Callable[[], _Result]) -> _Result:
    """What a call on NumPy returns in so many threads; the settings may say more of each worker."""
    if workers == 1 and settings.threads is None:
        return BLAS.hold_while(partial(_in_this_thread, settings._replace(threads=1), call))
    is_default = settings.threads is None and workers == BLAS.threads
    threads = None if is_default else workers * (settings.threads or 1)
    with cupyconv.options(**settings._replace(threads=threads)._asdict()):
        return call()


def _in_this_thread(settings: Settings, call: Callable[[], _Result]) -> _Result:
    BLAS.hold_thread()
    with cupyconv.options(**settings._asdict()):
        return call()
