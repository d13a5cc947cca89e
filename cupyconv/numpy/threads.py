"""Threads: disjoint parts of a call, on workers that wait between calls, while NumPy's BLAS is held at one thread.

A BLAS that divides each product waits for its slowest thread at each product; on a busy machine, this is most of the
time.  Its threads also keep looking for work for 30 ms after a product, on cores that our threads need.  The next call
then took up to twice as long.  Here a call is divided once, into more parts than threads, and each free thread takes
the next part::

    caller    part 0   part 2   part 5   part 6         (takes parts too, and returns when all are done)
    worker    . part 1   part 3     part 4   waits      (woken by the call; from the pool, which is made once)

The plan decides the number of threads.  The result of a part must not depend on which thread computes it, or when.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from _thread import RLock, allocate_lock
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context
from copy import copy
from functools import partial
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

from cupyconv.problem.caches import after_clearing

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")

#: Largest number of workers, however many threads are requested: more workers than cores only take turns.
_MAX_WORKERS = max(32, 2 * (os.cpu_count() or 1))

# --- parts ----------------------------------------------------------------------------------------------------


def in_threads(
    threads: int, work: Callable[[_Part], _Result], parts: Iterable[_Part], holds_blas: bool = False
) -> list[_Result]:
    """Return what `work` returns for each part, in the order of the parts.

    The caller is one of the threads.  There are fewer helpers if no more threads can be started.  An exception of a
    part is raised here, after all threads have stopped working.  Parts that have not begun by then are skipped.

    If the caller is the only thread, its products use the threads of BLAS, unless it `holds_blas`.
    """
    if threads > 1:
        job = _Job(work, parts)
        BLAS.hold_while(partial(job.run, threads - 1))
        return job.given_up()
    if holds_blas:
        return BLAS.hold_while(lambda: list(map(work, parts)))
    return list(map(work, parts))


class _Job(Generic[_Part, _Result]):
    """The parts of one call, and the threads that take them."""

    def __init__(self, work: Callable[[_Part], _Result], parts: Iterable[_Part]) -> None:
        self._work, self._parts = work, enumerate(parts)
        self.results: dict[int, _Result] = {}
        self.error: BaseException | None = None
        self._lock = allocate_lock()
        self._helpers, self._closed = 0, False
        self._all_left = allocate_lock()
        self._all_left.acquire()

    def run(self, helpers: int) -> None:
        """Let up to `helpers` workers help; none of them works any more when this returns or raises.

        An interruption may come within `close`, too.  The second call then completes it, as in `hold_while`.
        """
        try:
            _pool.help_with(self, helpers)
            self.take_parts()
        finally:
            try:
                self.close()
            except BaseException:
                self.close()
                raise

    def take_parts(self) -> None:
        """Compute one part after another until none is left, or one has failed."""
        try:
            while (taken := self._take()) is not None:
                number, part = taken
                self.results[number] = self._work(part)
        except BaseException as error:
            self.error = self.error or error

    def _take(self) -> tuple[int, _Part] | None:
        with self._lock:
            return None if self.error is not None else next(self._parts, None)

    @property
    def is_over(self) -> bool:
        return self._closed and not self._helpers

    def help(self, worker: _Worker) -> None:
        """Take parts in a thread other than the caller's; do nothing if the caller has already gone on."""
        with self._lock:
            if self._closed:
                return
            self._helpers += 1
        worker.hold_blas()
        self.take_parts()
        worker.job = None
        with self._lock:
            self._helpers -= 1
            if self._closed and not self._helpers:
                self._all_left.release()

    def given_up(self) -> list[_Result]:
        """Return the results, or raise the error; a worker that releases the job late holds no object of the caller."""
        results, error = self.results, self.error
        del self._work, self._parts, self.results, self.error
        if isinstance(error, MemoryError):
            # Raise a copy, made by this thread.  The frames of the original hold a worker's arrays, and the next
            # attempt, with smaller blocks, needs their memory.
            error = copy(error)
            _let_workers_free()
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, which refers to it and to all arrays of the call
        return [results[i] for i in range(len(results))]

    def close(self) -> None:
        """Wait for the workers that still help; workers that have not begun by now are not waited for.

        All are idle before the caller goes on.  So its next call finds the same workers, with their cached memory.
        """
        with self._lock:
            self._closed = True
        while self._helpers:
            try:
                self._all_left.acquire()
            except BaseException as interruption:  # Ctrl-C: the arrays are in use until all helpers have left
                self.error = interruption


# --- the pool -------------------------------------------------------------------------------------------------


class _Pool:
    """Workers that wait for jobs; they are started when first needed, and never end.

    A worker that a job has taken is free again when the job is over.  So an interruption at any point loses no worker.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._workers: list[_Worker] = []

    def help_with(self, job: _Job[Any, Any], workers: int) -> None:
        """Let up to `workers` workers help with a job."""
        elsewhere = _other_processors()
        for _ in range(min(workers, _MAX_WORKERS)):
            worker = self._given_to(job)
            if worker is None:
                return
            try:
                worker.start()
            except RuntimeError:  # no thread can be started: there are too many, or Python is about to end
                return
            worker.move_to(elsewhere)
            worker.jobs.put(job)

    def wake(self) -> None:
        """Let all waiting workers run for a moment.

        Without the GIL, an object is freed only by the thread that made it, even if another thread held the last
        reference.
        """
        woken: SimpleQueue[None] = SimpleQueue()
        waiting = [worker for worker in list(self._workers) if worker.is_free and worker.is_started]
        for worker in waiting:
            worker.jobs.put(woken)
        with suppress(Empty):  # from a worker that another call has taken meanwhile
            for _ in waiting:
                woken.get(timeout=1)

    def _given_to(self, job: _Job[Any, Any]) -> _Worker | None:
        """Return a free worker, which belongs to this job from now on; None if there is none."""
        with self._lock:
            worker = next((worker for worker in self._workers if worker.is_free), None)
            if worker is None:
                if len(self._workers) >= _MAX_WORKERS:
                    return None
                worker = _Worker()
                self._workers.append(worker)
            worker.job = ref(job)
            return worker


class _Worker:
    """A thread that does one job after another, and waits if there is none."""

    def __init__(self) -> None:
        #: Jobs to help with, or queues to tell that the worker is awake.
        self.jobs: SimpleQueue[_Job[Any, Any] | SimpleQueue[None]] = SimpleQueue()
        #: The job that has taken this worker; a weak reference, because a job holds the caller's arrays.
        self.job: ref[_Job[Any, Any]] | None = None
        self._thread: threading.Thread | None = None
        self._is_served = allocate_lock()
        self._processors: set[int] = set()
        self._holds_blas = False

    @property
    def is_free(self) -> bool:
        held = self.job  # read once: the worker may reset it meanwhile
        job = None if held is None else held()
        return job is None or job.is_over

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the worker's thread, if it has none."""
        if not self.is_started:
            # In its own context: since Python 3.14, a thread may inherit its starter's, with what is cached in it.
            thread = threading.Thread(target=Context().run, args=(self._run,), name="cupyconv", daemon=True)
            thread.start()
            self._thread = self._thread or thread

    def move_to(self, processors: set[int]) -> None:
        """Let the worker be woken on one of these processors, if any are given."""
        native_id = None if self._thread is None else self._thread.native_id
        if processors and processors != self._processors and native_id is not None:
            os.sched_setaffinity(native_id, processors)
            self._processors = processors

    def hold_blas(self) -> None:
        """Called by the worker's thread while BLAS is held: some libraries have a separate number for each thread."""
        if not self._holds_blas:
            BLAS.hold_thread()
            self._holds_blas = True

    def _run(self) -> None:
        if not self._is_served.acquire(blocking=False):
            return  # started twice: the first start was interrupted before it was recorded
        self._thread = threading.current_thread()
        with np.errstate(all="ignore"):
            while True:
                job = self.jobs.get()
                if isinstance(job, _Job):
                    job.help(self)
                else:
                    job.put(None)
                del job  # the job holds the caller's arrays


# --- processors -----------------------------------------------------------------------------------------------


def _other_processors() -> set[int]:
    """Return the processors that this thread may run on, except its current one; empty if unknown.

    Linux often wakes a thread on the processor of the thread that wakes it.  There it waits until the other thread
    waits, for up to 50 ms, as if there were only one thread.
    """
    if _processor is None:
        return set()
    return os.sched_getaffinity(0) - {_processor()}


#: Returns the number of the processor that the calling thread runs on.
_processor: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _processor = getattr(ctypes.CDLL(None), "sched_getcpu", None)


# --- BLAS -----------------------------------------------------------------------------------------------------


class Blas:
    """The number of threads that NumPy's BLAS uses; held at one while this library uses its own threads.

    It is a setting of the process (environment, affinity, threadpoolctl), and is restored afterwards.  The library is
    searched for on first use.  A BLAS whose number cannot be read counts as one thread, and keeps its number.

    A signal handler may call any method within another one.  It gets the lock again, and finds a state that it may
    change.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._controls: list[_Controls] | None = None
        self._before: list[int] = []  # numbers before the hold, while held
        self._holders: set[object] = set()

    @property
    def threads(self) -> int:
        """Number of threads that BLAS would use now if it were not held."""
        with self._lock:
            found = self._controls or self._found()
            if len(found) == 1 and not self._before:  # the usual case, and read in each call
                return found[0][0]() or 1
            return min(self._before or self._numbers(), default=1)

    def hold_while(self, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns; until the last holder is done, all products of the process have one thread."""
        holder = object()
        try:
            self._hold(holder)
            return work()
        finally:
            try:
                self._release(holder)
            except BaseException:
                self._release(holder)
                raise

    def _hold(self, holder: object) -> None:
        with self._lock:
            self._holders.add(holder)
            if not self._before:
                numbers = self._numbers()
                self._before = self._before or numbers
                self._set([1] * len(numbers))

    def _release(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._put_back()

    def hold_thread(self) -> None:
        """Called in another thread while BLAS is held: some libraries have a separate number for each thread."""
        self._set([1] * len(self._found()))

    def begin_process(self) -> None:
        """Reset the state in a child of a fork, where nobody holds BLAS."""
        self._lock, self._holders = RLock(), set()
        self._put_back()

    def _put_back(self) -> None:
        # If another number was set meanwhile, that number is now wanted and stays.
        self._set([before if now == 1 else now for before, now in zip(self._before, self._numbers())])
        self._before = []

    def _numbers(self) -> list[int]:
        return [ask() or 1 for ask, _ in self._found()]

    def _set(self, numbers: list[int]) -> None:
        for (_, tell), number in zip(self._found(), numbers):
            tell(number)

    def _found(self) -> list[_Controls]:
        if self._controls is None:
            from threadpoolctl import ThreadpoolController  # imported only for large problems

            with warnings.catch_warnings(action="ignore"):  # about OpenMP libraries that others have loaded
                found = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
            beside = str(Path(np.__file__).parent)  # NumPy's wheels bring their own BLAS
            own = [library for library in found if library.filepath.startswith(beside)]
            self._controls = [_controls(library) for library in own or found]
        return self._controls


#: Functions that return and set a library's number of threads.
_Controls = tuple[Callable[[], int | None], Callable[[int], Any]]


def _controls(library: Any) -> _Controls:
    """Return the controls of a library; those of OpenBLAS's own threads are taken from the library itself.

    threadpoolctl obeys one thread of the process at a time, as if it owned the number.  Here the number is held for
    all.
    """
    if library.internal_api == "openblas" and library.threading_layer != "openmp":
        for prefix, suffix in product(("", "scipy_"), ("", "64_", "_64")):
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library.dynlib, name) for name in names):
                ask, tell = (getattr(library.dynlib, name) for name in names)
                return ask, tell
    return library.get_num_threads, library.set_num_threads


BLAS = Blas()
_pool = _Pool()


def _let_workers_free() -> None:
    """Without the GIL, let workers free the objects that they made and that nobody uses any more."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        _pool.wake()


def _begin_process() -> None:
    """Reset the state in a child of a fork, which has none of the threads."""
    global _pool
    _pool = _Pool()
    BLAS.begin_process()


after_clearing(_let_workers_free)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)
