"""NumPy's side of the backend interface: allocate, describe, plan, run.

And what every step of its plans is, and the memory that steps write beside results.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from cupyconv.problem import passes, problems, recurrence
from cupyconv.problem.kept import on_clear, release, reserve
from cupyconv.problem.plan import Plan, Step
from cupyconv.problem.problems import HostModel, Problem

if TYPE_CHECKING:
    from cupyconv.numpy.threads import Blas

ProblemT = TypeVar("ProblemT", bound=Problem)
Views = TypeVar("Views")

#: What a core does in a second, cautiously, and the seconds of work for which another thread is worth waking.
_FLOPS, _BYTES = 5e10, 5e9
_WORTH_WAKING = 150e-6
#: The same of a recurrent layer, whose planner finds out what another thread can do.
_WORTH_SHARING_STEPS = 2e-3
#: Threads that plans are made for at most, however many are asked for.
MOST_THREADS = 64
#: Contexts that are kept: as many as threads that are likely to call at the same time.
_IDLE_CONTEXTS = 64
#: Buffers of a context or a thread, and blocks' views of these, that are kept at the most: some kilobytes each, of more layers
#: than most networks have.
_KEPT_VIEWS = 128
#: Calls of a turn of a loop over small blocks whose calls are not counted.
TURN_CALLS = 13
_layout_of = attrgetter("dtype", "shape", "strides")


@dataclass(frozen=True)
class NumpyStep:
    """A loop that solves a problem; a subclass has the sizes that were decided, prints itself and runs itself."""

    problem: Problem

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes

    @property
    def flops(self) -> int:
        return self.problem.flops

    @property
    def seconds(self) -> float:
        """What it takes by the model of `cost`; 0 where there is nothing to choose."""
        return 0.0

    @property
    def turns(self) -> int:
        """How often something is computed in turn; 0 where there is no loop to tell of."""
        return 0

    @property
    def calls(self) -> float:
        """Calls of NumPy, or what of Python takes as long, of which Python makes one after the other."""
        return self.turns * TURN_CALLS

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay from run to run, of what is made of arguments that never change."""
        return 0

    @property
    def shape_of_work(self) -> object:
        return self

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """What runs the step; here is where it sets up what all runs share."""
        return self.run

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        raise NotImplementedError


def seconds_of(steps: Iterable[Step]) -> float:
    """What steps of this backend take by the model of `cost`, one after the other."""
    return sum(step.seconds for step in cast("Iterable[NumpyStep]", steps))


# --- memory that steps write ----------------------------------------------------------------------------------


#: Bytes of a cache line, which is as long as the longest vector.
LINE = 64
#: Cache lines from row to row whose multiples bring rows to a few places of the innermost cache, of which it has 64.
FEW_PLACES = 16


def whole_lines(elements: int, itemsize: int) -> int:
    """As many whole cache lines as have room for elements of so many bytes, in elements."""
    line = LINE // itemsize
    return -(-elements // line) * line


def lines_apart(elements: int, itemsize: int) -> int:
    """The same for rows that follow each other: one more where the same part of many would share few places in the cache."""
    line = LINE // itemsize
    lines = -(-elements // line)
    return (lines + (lines % FEW_PLACES == 0)) * line


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Memory that begins where a cache line does: products that are not packed read it in half as many loads."""
    memory = np.empty(nbytes + LINE, np.uint8)
    first = -memory.__array_interface__["data"][0] % LINE
    return memory[first : first + nbytes]


class _Buffers(dict[Any, Any]):
    """What one call at a time writes, by name, and views of it; a class, so that it can be referred to weakly."""

    def give_back(self, name: str) -> None:
        """The buffer of that name, if there is one, and all views: one may be of it."""
        for key in self.copy():  # at once: another thread may give all back meanwhile
            if type(key) is not str:
                self.pop(key, None)
        self.pop(name, None)


class Scratch:
    """Uninitialised arrays by name, each thread its own; one that is asked for again overwrites the one before it.

    Of a single round nothing is kept: its arrays are fresh.
    """

    def __init__(self, dtype: np.dtype, rounds: int) -> None:
        self.dtype = dtype
        self._of_thread = threading.local() if rounds > 1 else None

    @property
    def _buffers(self) -> _Buffers | None:
        """Those that are kept, this thread's."""
        if self._of_thread is None:
            return None
        buffers: _Buffers | None = getattr(self._of_thread, "buffers", None)
        if buffers is None:
            buffers = self._of_thread.buffers = _Buffers()
        return buffers

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype | None = None) -> np.ndarray:
        """This thread's array of that name, in C order; of another dtype than the scratch memory's where one is given."""
        dtype = dtype or self.dtype
        nbytes = prod(shape) * dtype.itemsize
        buffers = self._buffers
        buffer = None if buffers is None else buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = None
            if buffers is not None:
                buffers.give_back(name)  # before another is had
            buffer = aligned_bytes(nbytes)
            if buffers is not None and self._may_keep(buffer):
                buffers[name] = buffer
        return np.ndarray(shape, dtype, buffer)

    def _may_keep(self, buffer: np.ndarray) -> bool:
        return True

    def views(self, of: Any, size: Hashable, names: Sequence[str], make: Callable[[], Views]) -> Views:
        """What is made of this thread's arrays of these names, for an object and a block: once, while these stay.

        To make a dozen views takes Python as long as a product of a small block takes BLAS.
        """
        buffers, key = self._buffers, (id(of), size)
        kept = None if buffers is None else buffers.get(key)
        if kept is None or kept[0] is not of:
            kept = of, make()
            if buffers is not None and all(name in buffers for name in names):
                if len(buffers) >= _KEPT_VIEWS:
                    buffers.give_back("")
                buffers[key] = kept
        views: Views = kept[1]
        return views


class KeptScratch(Scratch):
    """Uninitialised arrays that are kept from call to call, as far as the budget of all that is kept allows.

    A call on NumPy has a context that no other call is in (`NumpyBackend.within`), also one that a signal's handler makes in
    the midst of another; and so has a worker.  Arrays are a context's.
    """

    def __init__(self, dtype: np.dtype) -> None:
        super().__init__(dtype, rounds=1)
        self._of_context: ContextVar[_Buffers] = ContextVar(f"kept {dtype}")
        self._all: weakref.WeakValueDictionary[int, _Buffers] = weakref.WeakValueDictionary()
        on_clear(self._give_back)

    @property
    def _buffers(self) -> _Buffers:
        buffers = self._of_context.get(None)
        if buffers is None:
            buffers = _Buffers()
            self._all[id(buffers)] = buffers
            self._of_context.set(buffers)
        return buffers

    def _may_keep(self, buffer: np.ndarray) -> bool:
        owner: Any = buffer.base
        if not reserve(owner.nbytes):
            return False
        weakref.finalize(owner, release, owner.nbytes).atexit = False
        return True

    def _give_back(self) -> None:
        """Those of all contexts; a call under way has its arrays as long as it needs them."""
        for reference in self._all.valuerefs():  # a list, that other threads may go on
            if (buffers := reference()) is not None:
                buffers.clear()


@cache
def kept_scratch(dtype: np.dtype) -> KeptScratch:
    """Memory that stays from call to call."""
    return KeptScratch(dtype)


# --- the backend ----------------------------------------------------------------------------------------------


class NumpyBackend:
    """Arrays of NumPy on the host."""

    name = "numpy"

    def __init__(self) -> None:
        #: Whose number of threads is the default; None until a problem is large enough for more than one.
        self._blas: Blas | None = None
        #: Contexts in which NumPy's warnings are silenced, that no call is in.
        self._silent: deque[Context] = deque(maxlen=_IDLE_CONTEXTS)

    def machine(self, threads: int | None) -> HostModel:
        """The processor plans are made for."""
        return HostModel(min(threads or 0, MOST_THREADS))

    def current(self) -> AbstractContextManager[Any]:
        """A context in which plans run: NumPy's floating-point warnings are silenced."""
        return np.errstate(all="ignore")

    def within(self, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Any:
        """What a function returns for these arrays in the `current` context.

        To enter a context that was set up before takes a fifth of the time.
        """
        try:
            silent = self._silent.pop()
        except IndexError:  # the first call, one beside another, or one within another
            silent = Context()
            silent.run(np.seterr, all="ignore")
        try:
            return silent.run(function, arrays)
        finally:
            self._silent.append(silent)

    def address(self, array: Any) -> int:
        """The address of the array's first element."""
        return array.ctypes.data

    def are_apart(self, arrays: Sequence[Any], outs: Sequence[int]) -> bool:
        """Whether those at the places `outs` may be written, own their memory, and no other array lies in it."""
        for place in outs:
            out = arrays[place]
            flags, times = out.flags, 0
            if out.base is not None or not (flags.owndata and flags.writeable):
                return False
            for array in arrays:
                base = array.base
                if base is None:
                    times += array is out
                elif base is out or type(base) is not np.ndarray or not base.flags.owndata:  # who knows whose it is
                    return False
            if times > 1:
                return False
        return True

    def plain(self, array: Any) -> Any:
        """The array; of a subclass, whose arithmetic may be another, its elements as an array of NumPy's own."""
        return array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An uninitialised C-ordered array."""
        return np.empty(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        """An array in the host's memory as one of this backend's."""
        return array

    def converted(self, array: Any, dtype: np.dtype) -> Any:
        """A C-ordered copy in `dtype`: of the real parts where that is real."""
        with np.errstate(all="ignore"):
            return np.array(array if dtype.kind == "c" else array.real, dtype, order="C")

    def own_copy(self, array: Any) -> Any:
        """A C-ordered copy that nobody can change."""
        copy = np.array(array, order="C")
        copy.flags.writeable = False
        return copy

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """What a plan depends on of arrays of this class; none depends on an address."""
        return self._blas and self._blas.threads, *map(_layout_of, arrays)

    def plan(self, problem: Problem) -> Plan:
        """How a problem runs here; ValueError where a named method does not apply."""
        if problem.host.threads > 1:
            self._look_for_blas()  # which may have fewer: a plan depends on it, and so does `signature` from now on
        return _plan(problem if problem.host.threads else self._with_threads(problem))

    def _with_threads(self, problem: ProblemT) -> ProblemT:
        """The problem for as many threads as are worth waking; the layers of a chain each for their own."""
        if isinstance(problem, problems.ChainProblem):
            problem = replace(problem, layers=tuple(map(self._with_threads, problem.layers)))
        threads = self._threads_for(problem)
        return replace(problem, machine=HostModel(threads, most=threads))

    def _threads_for(self, problem: Problem) -> int:
        """As many threads as NumPy's BLAS would use, or as may be worth waking."""
        seconds = max(problem.flops / _FLOPS, problem.minimal_bytes / _BYTES)
        if isinstance(problem, recurrence.RecurrentProblem):
            worth_waking = int(seconds / _WORTH_SHARING_STEPS) and MOST_THREADS
        else:
            worth_waking = int(seconds / problem.turns / _WORTH_WAKING)
        if worth_waking <= 1:
            return 1
        return min(worth_waking, self._look_for_blas().threads)

    def _look_for_blas(self) -> Blas:
        if self._blas is None:
            from cupyconv.numpy.threads import BLAS  # its libraries are looked for: not for small problems

            self._blas = BLAS
        return self._blas

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """A function that executes the plan on arguments and result by name, in the `current` context."""
        runs = [step.executable() for step in cast("tuple[NumpyStep, ...]", plan.steps)]
        if len(runs) == 1:
            return runs[0]

        def run(arrays: Mapping[str, Any]) -> None:
            for run_loop in runs:
                run_loop(arrays)

        return run


def _plan(problem: Problem) -> Plan:
    # Imported when first asked for: most programs have a few kinds of problem.
    match problem:
        case problems.ConvProblem():
            from cupyconv.numpy.convolution import plan_conv

            return plan_conv(problem)
        case problems.ChainProblem():
            from cupyconv.numpy.chain import plan_chain

            return plan_chain(problem)
        case problems.TransposedProblem():
            from cupyconv.numpy.transposed import plan_transposed

            return plan_transposed(problem)
        case problems.WeightGradientProblem():
            from cupyconv.numpy.weight_gradient import plan_weight_gradient

            return plan_weight_gradient(problem)
        case recurrence.RecurrentProblem():
            from cupyconv.numpy.recurrent import plan_recurrent

            return plan_recurrent(problem)
        case recurrence.RecurrentGradientProblem():
            from cupyconv.numpy.recurrent_gradient import plan_recurrent_gradient

            return plan_recurrent_gradient(problem)
        case passes.Im2colProblem():
            from cupyconv.numpy.columns import plan_im2col

            return plan_im2col(problem)
        case passes.Col2imProblem():
            from cupyconv.numpy.columns import plan_col2im

            return plan_col2im(problem)
        case passes.EpilogueGradProblem():
            from cupyconv.numpy.epilogue_grad import plan_epilogue_grad

            return plan_epilogue_grad(problem)
        case passes.PrologueGradProblem():
            from cupyconv.numpy.prologue_grad import plan_prologue_grad

            return plan_prologue_grad(problem)
        case passes.PoolingProblem():
            from cupyconv.numpy.pooling import plan_pooling

            return plan_pooling(problem)
    raise AssertionError(problem)
