"""Dask's workers as the threads of library calls: their number, whether callbacks watch them, and calls that use them.

A task runs in one worker: its call on NumPy uses one thread, and so does BLAS.  A call in place of all tasks uses as
many threads as there are workers.
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
    """A Dask scheduler whose workers are threads of this process."""

    workers: int
    get: Callable[..., Any]
    keywords: dict[str, Any]

    @property
    def is_watched(self) -> bool:
        """Whether something observes tasks, such as a progress bar or a profiler."""
        return bool(Callback.active) or not {"num_workers", "pool"}.issuperset(self.keywords)

    def run(self, tasks: dict[Any, Any]) -> None:
        """Run the tasks and discard their results."""
        self.get(tasks, [*tasks], **self.keywords)


def scheduler_here(collection: Any, how: dict[str, Any]) -> SchedulerHere | None:
    """Return the scheduler for these `compute` keywords, or None if its workers are elsewhere or Dask refuses them."""
    keywords = {key: value for key, value in how.items() if key not in ("scheduler", "optimize_graph", "traverse")}
    if "get" in keywords:
        return None
    get = get_scheduler(scheduler=how.get("scheduler"), collections=[collection])
    if get is dask.local.get_sync:
        return SchedulerHere(1, get, keywords)
    workers = _threads(how) if get is dask.threaded.get else None
    return None if workers is None else SchedulerHere(workers, get, keywords)


def _threads(how: dict[str, Any]) -> int | None:
    """Return how many threads Dask uses, or None if it uses processes or the number is invalid."""
    pool = how.get("pool") or dask.config.get("pool", None)
    if pool is None:
        workers = how.get("num_workers") or dask.config.get("num_workers", None) or CPU_COUNT
        return workers if workers > 0 else None
    # Thread pools have no public attribute for their number of workers.  Dask reads it the same way.
    if isinstance(pool, ThreadPoolExecutor):
        return pool._max_workers
    return vars(pool)["_processes"] if isinstance(pool, ThreadPool) else None


def in_threads_of(workers: int, settings: Settings, call: Callable[[], _Result]) -> _Result:
    """Return the result of a NumPy call in this many threads.  `settings.threads` sets the threads per worker."""
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
