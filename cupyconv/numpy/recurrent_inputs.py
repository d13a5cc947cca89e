"""Another thread multiplies the inputs of a recurrent layer by their weight, ahead of the steps that need them.

::

    caller     copies the state's weight    steps of chunk 0    steps of chunk 1     ...
    worker       . inputs of chunk 0    inputs of chunk 1    inputs of chunk 2    ...

Steps are many short calls, one after the other.  Two threads that both make such calls wait for the interpreter most of
the time.  The inputs' products are long calls, which seldom need the interpreter.  Whichever thread is first takes the
next chunk.  If no thread helps, or if it is slow, the calling thread does all the work.  The results are the same.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from queue import SimpleQueue

from cupyconv.numpy.threads import in_threads
from cupyconv.problem.arrays import ITEMSIZE, accumulator
from cupyconv.problem.recurrence import RecurrentProblem

#: Seconds of a multiply-add of a product; of all work on one element of the gates; and of the fixed overhead of a step.
MULTIPLY_ADD, ELEMENT, STEP = 13.5e-12, 1.2e-9, 3e-6
#: Seconds that a step takes longer while another thread computes steps of other samples; the fewest samples of a part,
#: since fewer take as long; and the seconds to wake a thread and wait for it.
BESIDE_STEPS, MIN_SAMPLES, WAKE = 40e-6, 4, 500e-6
#: Factor by which steps take longer while another thread multiplies inputs ahead; seconds of a chunk of these inputs;
#: and the number of chunks that memory holds.
AHEAD, AHEAD_SECONDS, AHEAD_CHUNKS = 1.2, 200e-6, 4


def division(problem: RecurrentProblem, copies_x: bool) -> tuple[int, int]:
    """Threads that share directions and parts of the samples; and chunks whose inputs another thread multiplies ahead.

    If the caller has named a number of threads, directions and samples are divided among all of them.  Otherwise they
    are divided if that takes less estimated time than one thread.  Multiplying ahead is chosen if it takes even less.
    """
    geometry, threads = problem.geometry, problem.host.threads
    if threads == 1:
        return 1, 0
    steps, inputs = _seconds(problem)
    is_named = not problem.host.most
    parts = threads if is_named else min(threads, geometry.directions * max(1, geometry.batch // MIN_SAMPLES))
    alone, apart = steps + inputs, (steps + inputs) / parts + geometry.steps * BESIDE_STEPS + WAKE
    least = apart if is_named else min(alone, apart)
    can_be_ahead = geometry.directions == 1 < geometry.batch and not copies_x and inputs >= AHEAD_CHUNKS * AHEAD_SECONDS
    if can_be_ahead and AHEAD * max(steps, inputs) + WAKE < least:
        return 1, AHEAD_CHUNKS
    return (parts if least == apart else 1), 0


def _seconds(problem: RecurrentProblem) -> tuple[float, float]:
    """Estimated seconds of all steps on one thread, and of the products of their inputs."""
    geometry = problem.geometry
    rows = geometry.steps * geometry.directions * geometry.gates * geometry.hidden
    product = rows * max(geometry.batch, MIN_SAMPLES) * MULTIPLY_ADD * ITEMSIZE[accumulator(problem.dtype)] / 4
    steps = product * geometry.hidden + rows * geometry.batch * ELEMENT + geometry.steps * geometry.directions * STEP
    return steps, product * geometry.inputs


def chunk_ahead(problem: RecurrentProblem) -> int:
    """Number of steps in a chunk whose inputs take one long call."""
    return int(AHEAD_SECONDS * problem.geometry.steps / _seconds(problem)[1])


class InputsAhead:
    """The inputs of `chunks` chunks, in order; `project` multiplies one chunk, given by number, in one of the buffers.

    There must be at least two `buffers`.
    """

    def __init__(self, chunks: int, buffers: int, project: Callable[[int], None]) -> None:
        self._chunks, self._project = chunks, project
        self._next, self._lock = 0, allocate_lock()
        #: `_free` holds one item per free buffer.  `_done` holds, for each chunk that the other thread has taken, in
        #: order, whether its inputs are ready.
        self._free: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[bool] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(None)

    def run(self, prepare: Callable[[], None], advance: Callable[[int], None]) -> None:
        """Call `prepare`, then `advance` with the number of each chunk when its inputs are ready."""
        in_threads(2, lambda work: work(), (lambda: self._steps(prepare, advance), self._inputs))

    def _steps(self, prepare: Callable[[], None], advance: Callable[[int], None]) -> None:
        try:
            prepare()
            for number in range(self._chunks):
                if self._takes(number):
                    self._project(number)
                elif not self._done.get():
                    return  # the other thread raises the exception
                advance(number)
                self._free.put(None)
        finally:
            self._end()

    def _takes(self, number: int) -> bool:
        """Take this chunk and return True, unless the other thread has taken it.

        If it is still there, all buffers are free, except one that the other thread may be about to use.
        """
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
        """Mark all chunks as taken and wake the other thread; a signal may have ended this thread at any point."""
        with self._lock:
            self._next = self._chunks
        self._free.put(None)
        self._done.put(False)
