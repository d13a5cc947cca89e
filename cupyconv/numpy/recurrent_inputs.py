"""The inputs of a recurrent layer go through their weight ahead of the steps that need them, in another thread.

::

    caller     copies the state's weight    steps of chunk 0    steps of chunk 1     ...
    worker       . inputs of chunk 0    inputs of chunk 1    inputs of chunk 2    ...

Steps are many short calls, one after the other: two threads that both make such calls wait for the interpreter most of the
time.  The inputs' products are long calls, which need it seldom.  Whoever is first takes the next chunk: where no thread
comes to help, or it is slow, the caller does all by itself.  The numbers are the same.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from queue import SimpleQueue

from cupyconv.numpy.threads import in_threads
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.recurrence import RecurrentProblem

#: Seconds of a multiply-add of a product; of all that is done with an element of the gates; and of a step besides.
MULTIPLY_ADD, ELEMENT, STEP = 13.5e-12, 1.2e-9, 3e-6
#: What a step takes longer where another thread makes steps too, of other samples; the least of these that a part may have,
#: as fewer take as long; and what it takes to wake a thread, and to wait for it.
BESIDE_STEPS, LEAST_SAMPLES, WAKE = 40e-6, 4, 500e-6
#: What steps take longer while another thread works out inputs ahead; seconds of a chunk of these, and for how many chunks
#: there is memory.
AHEAD, AHEAD_SECONDS, AHEAD_CHUNKS = 1.2, 200e-6, 4


def division(problem: RecurrentProblem, copies_x: bool) -> tuple[int, int]:
    """Threads that take directions and parts of the samples; and of how many chunks another one works out the inputs ahead.

    As many as the caller has named, and otherwise what takes least.
    """
    geometry, threads = problem.geometry, problem.host.threads
    if threads == 1:
        return 1, 0
    steps, inputs = _seconds(problem)
    is_named = not problem.host.most
    parts = threads if is_named else min(threads, geometry.directions * max(1, geometry.batch // LEAST_SAMPLES))
    alone, apart = steps + inputs, (steps + inputs) / parts + geometry.steps * BESIDE_STEPS + WAKE
    least = apart if is_named else min(alone, apart)
    can_be_ahead = geometry.directions == 1 < geometry.batch and not copies_x and inputs >= AHEAD_CHUNKS * AHEAD_SECONDS
    if can_be_ahead and AHEAD * max(steps, inputs) + WAKE < least:
        return 1, AHEAD_CHUNKS
    return (parts if least == apart else 1), 0


def _seconds(problem: RecurrentProblem) -> tuple[float, float]:
    """What all steps take, on one thread, and the products of their inputs."""
    geometry = problem.geometry
    rows = geometry.steps * geometry.directions * geometry.gates * geometry.hidden
    product = rows * max(geometry.batch, LEAST_SAMPLES) * MULTIPLY_ADD * ITEMSIZE[accumulator(problem.dtype)] / 4
    steps = product * geometry.hidden + rows * geometry.batch * ELEMENT + geometry.steps * geometry.directions * STEP
    return steps, product * geometry.inputs


def chunk_ahead(problem: RecurrentProblem) -> int:
    """The steps of a chunk whose inputs are a long call."""
    return int(AHEAD_SECONDS * problem.geometry.steps / _seconds(problem)[1])


class InputsAhead:
    """The inputs of so many chunks, in order: `project` works them out by number, in one of at least two `buffers`."""

    def __init__(self, chunks: int, buffers: int, project: Callable[[int], None]) -> None:
        self._chunks, self._project = chunks, project
        self._next, self._lock = 0, allocate_lock()
        #: Something for each buffer that nobody needs any more; and for each chunk that the other thread has taken, in order,
        #: whether its inputs are there.
        self._free: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[bool] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(None)

    def run(self, prepare: Callable[[], None], advance: Callable[[int], None]) -> None:
        """Let `advance` work out the steps of each chunk, by number, when its inputs are there; `prepare` comes first."""
        in_threads(2, lambda work: work(), (lambda: self._steps(prepare, advance), self._inputs))

    def _steps(self, prepare: Callable[[], None], advance: Callable[[int], None]) -> None:
        try:
            prepare()
            for number in range(self._chunks):
                if self._takes(number):
                    self._project(number)
                elif not self._done.get():
                    return  # the other thread raises what went wrong
                advance(number)
                self._free.put(None)
        finally:
            self._end()

    def _takes(self, number: int) -> bool:
        """Whether nobody has taken this chunk; then all buffers are free, but for one that the other thread may be about to use."""
        with self._lock:
            if self._next != number:
                return False
            self._next += 1
            self._free.get()
            return True

    def _inputs(self) -> None:
        """Take chunks until none is left."""
        try:
            while True:
                self._free.get()
                with self._lock:
                    number = self._next
                    if number == self._chunks:
                        return
                    self._next += 1
                self._project(number)
                self._done.put(True)
        finally:
            self._end()

    def _end(self) -> None:
        """Nobody takes chunks any more, or waits: a signal may have ended this thread wherever it was."""
        with self._lock:
            self._next = self._chunks
        self._free.put(None)
        self._done.put(False)
