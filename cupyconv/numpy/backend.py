"""NumPy's side of the backend interface: allocate, describe, plan, run.

This module also defines the base class of all steps, and the scratch memory that steps write in addition to results.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, ContextVar
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from cupyconv.problem import passes, problems, recurrence
from cupyconv.problem.caches import on_clear, release, reserve
from cupyconv.problem.plan import Plan, Step
from cupyconv.problem.problems import HostModel, Problem

if TYPE_CHECKING:
    from cupyconv.numpy.threads import Blas

ProblemT = TypeVar("ProblemT", bound=Problem)
Views = TypeVar("Views")

#: Cautious operations and bytes per second of a core, and seconds of work for which another thread is worth waking.
_FLOPS, _BYTES = 5e10, 5e9
_WORTH_WAKING = 150e-6
#: The same for a recurrent layer, whose planner finds out how another thread can help.
_WORTH_SHARING_STEPS = 2e-3
#: Largest number of threads that plans are made for, even if more are requested.
MAX_THREADS = 64
#: Number of cached contexts: as many as threads that are likely to call at the same time.
_IDLE_CONTEXTS = 64
#: Largest number of buffers, and of blocks' views of them, that a context or thread caches.  They need ten to
#: fifty kilobytes each, outside the budget, and are enough for more layers than most networks have.
_CACHED_VIEWS = 128
#: Calls per turn of a loop over small blocks whose calls are not counted.
TURN_CALLS = 13
_layout_of = attrgetter("dtype", "shape", "strides")


@dataclass(frozen=True)
class NumpyStep:
    """A loop that solves a problem; a subclass holds the chosen sizes, prints itself and runs itself."""

    problem: Problem

    @property
    def bytes_moved(self) -> int:
        return self.problem.minimal_bytes

    @property
    def flops(self) -> int:
        return self.problem.flops

    @property
    def seconds(self) -> float:
        """Estimated time by the model of `cost`; 0 if there is nothing to choose."""
        return 0.0

    @property
    def turns(self) -> int:
        """Number of turns of the loop; 0 if there is no loop to report."""
        return 0

    @property
    def calls(self) -> float:
        """NumPy calls that Python makes one after another, or Python code that takes as long."""
        return self.turns * TURN_CALLS

    @property
    def cached_bytes(self) -> int:
        """Bytes that are cached between runs, of arrays that are made from constant arguments."""
        return 0

    @property
    def shape_of_work(self) -> object:
        return self

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that runs the step; the setup that all runs share happens here."""
        return self.run

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the results; arguments and results are given by name."""
        raise NotImplementedError


def seconds_of(steps: Iterable[Step]) -> float:
    """Estimated time of this backend's steps, one after another."""
    return sum(step.seconds for step in cast("Iterable[NumpyStep]", steps))


# --- scratch memory -------------------------------------------------------------------------------------------


#: Bytes of a cache line, which is as long as the longest vector.
LINE = 64
#: Rows that are a multiple of this many cache lines apart share few sets of the innermost cache, which has 64.
FEW_PLACES = 16


def whole_lines(elements: int, itemsize: int) -> int:
    """Return the number of elements in the fewest whole cache lines that hold `elements` elements."""
    line = LINE // itemsize
    return -(-elements // line) * line


def lines_apart(elements: int, itemsize: int) -> int:
    """Like `whole_lines`, for adjacent rows: one line more if the same part of many rows would share few sets."""
    line = LINE // itemsize
    lines = -(-elements // line)
    return (lines + (lines % FEW_PLACES == 0)) * line


def aligned_bytes(nbytes: int) -> np.ndarray:
    """Return memory that starts at a cache line: products without packing read it in half as many loads."""
    memory = np.empty(nbytes + LINE, np.uint8)
    first = -memory.__array_interface__["data"][0] % LINE
    return memory[first : first + nbytes]


def product_of(terms: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], object]:
    """Return ``product(a, b, out)`` of matrices, each of whose sums has this number of terms.

    The method `dot` takes half the time of `np.matmul`.  With a factor of one element, it would skip products with zero,
    also of NaN and infinities.
    """
    return np.multiply if terms == 1 else np.ndarray.dot


class _Buffers(dict[Any, Any]):
    """Buffers that one call at a time writes, by name, and views of them; a class, to allow weak references."""

    def give_back(self, name: str) -> None:
        """Release the buffer of that name, if there is one, and all views, since any may be of this buffer."""
        for key in self.copy():  # a copy: another thread may release all meanwhile
            if type(key) is not str:
                self.pop(key, None)
        self.pop(name, None)


class Scratch:
    """Uninitialised arrays of one run by name, separate for each thread; one overwrites the previous one of its name.

    If there is a single round, nothing is cached: its arrays are newly allocated.
    """

    def __init__(self, dtype: np.dtype, rounds: int) -> None:
        self.dtype = dtype
        #: By thread.  A `threading.local` would wait for the collection of cycles on a Python without the GIL.
        self._of_thread: dict[int, _Buffers] | None = {} if rounds > 1 else None

    @property
    def _buffers(self) -> _Buffers | None:
        """This thread's cached buffers; None if nothing is cached."""
        if self._of_thread is None:
            return None
        thread = get_ident()
        buffers = self._of_thread.get(thread)
        if buffers is None:
            buffers = self._of_thread[thread] = _Buffers()
        return buffers

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype | None = None) -> np.ndarray:
        """Return this thread's C-contiguous array of that name; `dtype` overrides that of the scratch memory."""
        dtype = dtype or self.dtype
        nbytes = prod(shape) * dtype.itemsize
        buffers = self._buffers
        buffer = None if buffers is None else buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = None
            if buffers is not None:
                buffers.give_back(name)  # before another one is allocated
            buffer = aligned_bytes(nbytes)
            if buffers is not None and self._may_keep(buffer):
                buffers[name] = buffer
        return np.ndarray(shape, dtype, buffer)

    def _may_keep(self, buffer: np.ndarray) -> bool:
        return True

    def views(self, of: Any, size: Hashable, names: Sequence[str], make: Callable[[], Views]) -> Views:
        """Return what `make` returns for an object and a block, cached while this thread's arrays of these names stay.

        Making a dozen views takes Python as long as the product of a small block takes BLAS.
        """
        buffers, key = self._buffers, (id(of), size)
        kept = None if buffers is None else buffers.get(key)
        if kept is None or kept[0] is not of:
            kept = of, make()
            if buffers is not None and all(name in buffers for name in names):
                if len(buffers) >= _CACHED_VIEWS:
                    buffers.give_back("")
                buffers[key] = kept
        views: Views = kept[1]
        return views


class CachedScratch(Scratch):
    """Uninitialised arrays that are cached between calls, as far as the budget of all caches allows.

    A call on NumPy has a context that no other call uses (`NumpyBackend.within`), even if a signal handler makes it
    within another call.  A worker has its own context too.  Arrays belong to a context.
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
        """Release the buffers of all contexts; a running call holds its arrays as long as it needs them."""
        for reference in self._all.valuerefs():  # a list: other threads may run on
            if (buffers := reference()) is not None:
                buffers.clear()


@cache
def cached_scratch(dtype: np.dtype) -> CachedScratch:
    """Return the memory that is cached between calls."""
    return CachedScratch(dtype)


# --- the backend ----------------------------------------------------------------------------------------------


class NumpyBackend:
    """NumPy arrays on the host."""

    name = "numpy"

    def __init__(self) -> None:
        #: BLAS, whose number of threads is the default; None until a problem is large enough for several.
        self._blas: Blas | None = None
        #: Contexts with silenced NumPy warnings that no call is using.
        self._silent: deque[Context] = deque(maxlen=_IDLE_CONTEXTS)

    def machine(self, threads: int | None) -> HostModel:
        """Return the processor that plans are made for."""
        return HostModel(min(threads or 0, MAX_THREADS))

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which plans run: NumPy's floating-point warnings are silenced."""
        return np.errstate(all="ignore")

    def within(self, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Any:
        """Return what a function returns for these arrays in the `current` context.

        Entering a context that was set up before takes a fifth of the time.
        """
        try:
            silent = self._silent.pop()
        except IndexError:  # the first call, a concurrent one, or one within another
            silent = Context()
            silent.run(np.seterr, all="ignore")
        try:
            return silent.run(function, arrays)
        finally:
            self._silent.append(silent)

    def address(self, array: Any) -> int:
        """Return the address of the array's first element."""
        return array.ctypes.data

    def are_apart(self, arrays: Sequence[Any], outs: Sequence[int]) -> bool:
        """Whether the arrays at the places `outs` are writeable, own their memory, and share it with no other array."""
        for place in outs:
            out = arrays[place]
            flags, times = out.flags, 0
            if out.base is not None or not (flags.owndata and flags.writeable):
                return False
            for array in arrays:
                base = array.base
                if base is None:
                    times += array is out
                elif base is out or type(base) is not np.ndarray or not base.flags.owndata:  # the owner is unknown
                    return False
            if times > 1:
                return False
        return True

    def plain(self, array: Any) -> Any:
        """Return the array; a subclass, whose arithmetic may differ, is viewed as a plain NumPy array."""
        return array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an uninitialised C-contiguous array."""
        return np.empty(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        """Return an array in host memory as one of this backend."""
        return array

    def converted(self, array: Any, dtype: np.dtype) -> Any:
        """Return a C-contiguous copy in `dtype`; of the real parts if `dtype` is real."""
        with np.errstate(all="ignore"):
            return np.array(array if dtype.kind == "c" else array.real, dtype, order="C")

    def own_copy(self, array: Any) -> Any:
        """Return a C-contiguous, read-only copy."""
        copy = np.array(array, order="C")
        copy.flags.writeable = False
        return copy

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """Return what a plan depends on: the threads of BLAS and the arrays' layouts, but no address."""
        return self._blas and self._blas.threads, *map(_layout_of, arrays)

    def plan(self, problem: Problem) -> Plan:
        """Plan a problem; raise ValueError if a named method does not apply."""
        if problem.host.threads > 1:
            self._look_for_blas()  # BLAS may have fewer: the plan depends on it, and `signature` does from now on
        return _plan(problem if problem.host.threads else self._with_threads(problem))

    def _with_threads(self, problem: ProblemT) -> ProblemT:
        """Return the problem with as many threads as are worth waking; each layer of a chain has its own number."""
        if isinstance(problem, problems.ChainProblem):
            problem = replace(problem, layers=tuple(map(self._with_threads, problem.layers)))
        threads = self._threads_for(problem)
        return replace(problem, machine=HostModel(threads, most=threads))

    def _threads_for(self, problem: Problem) -> int:
        """Return the number of threads that are worth waking, at most that of NumPy's BLAS."""
        seconds = max(problem.flops / _FLOPS, problem.minimal_bytes / _BYTES)
        if isinstance(problem, recurrence.RecurrentProblem):
            worth_waking = int(seconds / _WORTH_SHARING_STEPS) and MAX_THREADS
        else:
            worth_waking = int(seconds / problem.turns / _WORTH_WAKING)
        if worth_waking <= 1:
            return 1
        return min(worth_waking, self._look_for_blas().threads)

    def _look_for_blas(self) -> Blas:
        if self._blas is None:
            from cupyconv.numpy.threads import BLAS  # searches for BLAS libraries: not for small problems

            self._blas = BLAS
        return self._blas

    def prepare(self, plan: Plan) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that runs the plan on arguments and results by name, in the `current` context."""
        runs = [step.executable() for step in cast("tuple[NumpyStep, ...]", plan.steps)]
        if len(runs) == 1:
            return runs[0]

        def run(arrays: Mapping[str, Any]) -> None:
            for run_loop in runs:
                run_loop(arrays)

        return run


def _plan(problem: Problem) -> Plan:
    # Imported on first use: most programs have few kinds of problems.
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
