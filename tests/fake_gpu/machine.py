"""The state and behavior of the emulated GPUs: memory, streams, events, graphs, and errors with CUDA's numbers.

Enqueued work stays in its stream until something waits for it, as if a GPU were infinitely slow.  Reading a result
without waiting returns 0xff, and a result that needs a missing order between streams is wrong every time.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np

#: Content of memory before it is written, and after it is freed.
UNWRITTEN, FREED = 0xFF, 0xEE
#: Alignment of device memory, and of the blocks in CuPy's pool.
ALIGNMENT = 512

# CUDA's error numbers, which are the same in the runtime and the driver.
INVALID_VALUE, OUT_OF_MEMORY, INVALID_IMAGE, INVALID_DEVICE, INVALID_HANDLE, NOT_FOUND, NOT_READY = (
    1,
    2,
    200,
    101,
    400,
    500,
    600,
)
OUT_OF_RESOURCES, LAUNCH_FAILURE, TOO_MANY_COOPERATIVE_BLOCKS, NOT_SUPPORTED = 701, 719, 720, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901

#: cudaStreamLegacy and cudaStreamPerThread; stream 0 is the former.
LEGACY, PER_THREAD = 1, 2


class CudaError(Exception):
    """An error that a CUDA function returns."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(f"CUDA error {code}: {why}")
        self.code = code


@dataclass(frozen=True)
class GpuSpec:
    """The properties of a GPU, in bytes unless named otherwise."""

    name: str
    capability: int
    multiprocessors: int
    memory: int
    shared_per_block: int  # maximum, for a function that opts in
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    registers: int = 65536  # per multiprocessor
    shared_unasked: int = 48 << 10
    threads_per_block: int = 1024


#: A large GPU and, as the second device, a small one.  The small one has little memory, and so few multiprocessors that
#: blocks which wait for each other are not all resident.
GPUS = (
    GpuSpec("emulated sm_90", 90, 132, 4 << 30, 227 << 10, 228 << 10, 2048, 32),
    GpuSpec("emulated sm_86", 86, 4, 256 << 20, 99 << 10, 100 << 10, 1536, 16),
)

Work = Callable[[], None]
_Thing = TypeVar("_Thing")


@dataclass(eq=False)
class Stream:
    """Work in order.  An `ordered` stream and the legacy default stream wait for each other."""

    gpu: int
    ordered: bool = True
    queue: deque[tuple[int, Work]] = field(default_factory=deque)
    last: int = 0  # ticket of the last enqueued work
    capture: Graph | None = None


@dataclass(eq=False)
class Graph:
    """Captured work, in the order of capture."""

    work: list[Work] = field(default_factory=list)
    is_valid: bool = True


@dataclass(eq=False)
class Event:
    """A position in a stream, done when all work before it is done."""

    stream: Stream | None = None
    ticket: int = 0
    graph: Graph | None = None


@dataclass(frozen=True)
class Launch:
    """A kernel launch, as requested."""

    name: str
    gpu: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    cooperative: bool
    stream: Stream = field(repr=False)


class Machine:
    """All emulated GPUs of the process, and the objects that CuPy holds: handles are numbers of objects."""

    def __init__(self, gpus: tuple[GpuSpec, ...] = GPUS) -> None:
        self.gpus = gpus
        self.lock = threading.RLock()
        self.launches: list[Launch] = []  # may be cleared at any time
        self.allocations, self.work_enqueued = Failing(), Failing()
        self._local = threading.local()
        self._tickets = count(1)
        self._objects: dict[int, object] = {}
        self._numbers = count(0x1000, 16)
        self._legacy = [Stream(gpu) for gpu in range(len(gpus))]
        self._streams: list[Stream] = [*self._legacy]
        self._starts: list[int] = []
        self._allocations: dict[int, tuple[np.ndarray, int, int]] = {}  # memory, bytes, GPU
        self._pinned: dict[int, np.ndarray] = {}
        self._failure: int = 0

    # ---- handles --------------------------------------------------------------------------------------------------

    def handle(self, thing: object) -> int:
        number = next(self._numbers)
        self._objects[number] = thing
        return number

    def find(self, handle: int | None, kind: type[_Thing]) -> _Thing:
        thing = self._objects.get(handle or 0)
        if not isinstance(thing, kind):
            raise CudaError(INVALID_HANDLE, f"{handle} is no {kind.__name__}")
        return thing

    def forget(self, handle: int | None, kind: type) -> None:
        self.find(handle, kind)
        del self._objects[handle or 0]

    @property
    def gpu(self) -> int:
        """The calling thread's current device."""
        return getattr(self._local, "gpu", 0)

    @gpu.setter
    def gpu(self, number: int) -> None:
        if not 0 <= number < len(self.gpus):
            raise CudaError(INVALID_DEVICE)
        self._local.gpu = number

    @property
    def spec(self) -> GpuSpec:
        return self.gpus[self.gpu]

    # ---- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate memory on the current device, filled with 0xff, and return its address."""
        if self.allocations.next_one():
            raise CudaError(OUT_OF_MEMORY, "as a test asked for")
        if nbytes > self.free_bytes:
            raise CudaError(OUT_OF_MEMORY)
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = memory.ctypes.data + -memory.ctypes.data % ALIGNMENT
        ctypes.memset(start, UNWRITTEN, nbytes)
        insort(self._starts, start)
        self._allocations[start] = memory, nbytes, self.gpu
        return start

    def release(self, start: int) -> None:
        if start not in self._allocations:
            raise CudaError(INVALID_VALUE, "freed twice, or never allocated")
        memory, *_ = self._allocations.pop(start)
        del self._starts[bisect_right(self._starts, start) - 1]
        memory[:] = FREED

    def allocation(self, start: int, end: int) -> tuple[np.ndarray, int]:
        """Return the device memory that contains the bytes [start, end), and its first address."""
        first, _, nbytes = self._found(start)
        if end > first + nbytes:
            raise IndexError(f"the {end - start} bytes at {start:#x} do not lie in one allocation")
        memory = self._allocations[first][0]
        offset = first - memory.ctypes.data
        return memory[offset : offset + nbytes], first

    def owner(self, address: int) -> int | None:
        """Return the device of this memory, or None for host memory."""
        try:
            return self._found(address)[1]
        except IndexError:
            return None

    @property
    def free_bytes(self) -> int:
        """Free bytes of the current device."""
        return self.spec.memory - sum(nbytes for _, nbytes, gpu in self._allocations.values() if gpu == self.gpu)

    def pin(self, nbytes: int) -> int:
        """Allocate pinned host memory and return its address."""
        memory = np.full(max(1, nbytes), UNWRITTEN, np.uint8)
        self._pinned[memory.ctypes.data] = memory
        return memory.ctypes.data

    def unpin(self, start: int) -> None:
        self._pinned.pop(start)

    def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy.  Pageable host memory is read immediately; a copy to it waits until it is done."""
        if self.owner(source) is None and not self._is_pinned(source):
            held = ctypes.string_at(source, nbytes)
            self.enqueue(stream, lambda: ctypes.memmove(to, held, nbytes))
        else:
            self.enqueue(stream, lambda: ctypes.memmove(to, source, nbytes))
        if self.owner(to) is None and not self._is_pinned(to):
            self.wait(stream)

    def _is_pinned(self, address: int) -> bool:
        return any(start <= address < start + len(memory) for start, memory in self._pinned.items())

    def _found(self, address: int) -> tuple[int, int, int]:
        """Return first address, device and bytes of the allocation that contains an address."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            first = self._starts[place]
            _, nbytes, gpu = self._allocations[first]
            if address < first + max(1, nbytes):
                return first, gpu, nbytes
        raise IndexError(f"{address:#x} is not memory of a device")

    # ---- streams --------------------------------------------------------------------------------------------------

    def new_stream(self, ordered: bool) -> int:
        stream = Stream(self.gpu, ordered)
        self._streams.append(stream)
        return self.handle(stream)

    def end_stream(self, handle: int) -> None:
        stream = self.stream(handle)
        self.wait(stream)
        self._streams.remove(stream)
        self.forget(handle, Stream)

    def stream(self, handle: int | None) -> Stream:
        """Return the stream of a handle; default streams belong to the current device, or to the calling thread too."""
        if handle in (None, 0, LEGACY):
            return self._legacy[self.gpu]
        if handle == PER_THREAD:
            mine: dict[int, Stream] = self._local.__dict__.setdefault("streams", {})
            if self.gpu not in mine:
                mine[self.gpu] = Stream(self.gpu)
                self._streams.append(mine[self.gpu])
            return mine[self.gpu]
        return self.find(handle, Stream)

    def enqueue(self, stream: Stream, work: Work) -> None:
        if stream.capture is not None:
            stream.capture.work.append(work)
            return
        legacy = self._legacy[stream.gpu]
        if stream is legacy:
            others = [s for s in self._streams if s.ordered and s.gpu == stream.gpu and s is not legacy]
        else:
            others = [legacy] if stream.ordered else []
        for other in others:
            if other.queue:
                self._append(stream, self._waiting(other, other.last))
        self._append(stream, work)

    def wait(self, stream: Stream, ticket: int | None = None) -> None:
        """Run the work of a stream, up to a ticket."""
        if stream.capture is not None:
            stream.capture.is_valid = False
            raise CudaError(CAPTURE_UNSUPPORTED, "a stream that captures was waited for")
        while stream.queue and (ticket is None or stream.queue[0][0] <= ticket):
            self._run_next(stream)
        self.report()

    def wait_for_all(self, gpu: int | None = None) -> None:
        for stream in [s for s in self._streams if gpu is None or s.gpu == gpu]:
            self.wait(stream)

    def is_done(self, stream: Stream) -> bool:
        """Return whether a stream has no work left; each query lets it do one more piece of work."""
        if stream.queue:
            self._run_next(stream)
        return not stream.queue

    def report(self) -> None:
        """Raise the error of earlier work; a context that has failed once keeps failing."""
        if self._failure:
            raise CudaError(self._failure, "of earlier work")

    def _append(self, stream: Stream, work: Work) -> None:
        stream.last = next(self._tickets)
        stream.queue.append((stream.last, work))

    def _waiting(self, stream: Stream, ticket: int) -> Work:
        return lambda: self.wait(stream, ticket)

    def _run_next(self, stream: Stream) -> None:
        _, work = stream.queue.popleft()
        try:
            work()
        except CudaError as error:
            self._failure = self._failure or error.code

    # ---- events, graphs -------------------------------------------------------------------------------------------

    def record(self, event: Event, stream: Stream) -> None:
        event.stream, event.ticket, event.graph = stream, stream.last, stream.capture

    def has_come(self, event: Event) -> bool:
        stream = event.stream
        if stream is None or not stream.queue:
            return True
        if stream.queue[0][0] <= event.ticket:
            self._run_next(stream)
        return not stream.queue or stream.queue[0][0] > event.ticket

    def wait_in_stream(self, stream: Stream, event: Event) -> None:
        if event.graph is not None:
            stream.capture = event.graph  # the stream joins the capture
        elif event.stream is not None:
            self.enqueue(stream, self._waiting(event.stream, event.ticket))

    def begin_capture(self, stream: Stream) -> None:
        if stream is self._legacy[stream.gpu] or stream.capture is not None:
            raise CudaError(CAPTURE_UNSUPPORTED, "the legacy stream, or one that captures already")
        stream.capture = Graph()

    def end_capture(self, stream: Stream) -> int:
        graph = stream.capture
        if graph is None:
            raise CudaError(INVALID_VALUE, "nothing is captured")
        for other in self._streams:
            if other.capture is graph:
                other.capture = None
        if not graph.is_valid:
            raise CudaError(CAPTURE_INVALIDATED)
        return self.handle(graph)

    def refuse_in_capture(self) -> None:
        """Refuse allocations and device synchronization while any stream captures."""
        for stream in self._streams:
            if stream.capture is not None:
                stream.capture.is_valid = False
                raise CudaError(CAPTURE_UNSUPPORTED)

    # ---- for tests ------------------------------------------------------------------------------------------------

    @contextmanager
    def failing_allocations(self, number: int, times: int = 1) -> Iterator[Callable[[], int]]:
        """Let `times` allocations of device memory fail from this number on, or none if it is negative.

        Yields a function that counts them.
        """
        with self.allocations.failing(number, times) as count:
            yield count

    @contextmanager
    def failing_launches(self, number: int, times: int = 1) -> Iterator[Callable[[], int]]:
        """Do the same for kernel launches and cuBLAS products."""
        with self.work_enqueued.failing(number, times) as count:
            yield count


@dataclass
class Failing:
    """Counts requests to a GPU, and selects those that fail although nothing is wrong."""

    asked: int = 0
    numbers: range = range(0)

    def next_one(self) -> bool:
        """Return whether the current request fails."""
        self.asked += 1
        return self.asked - 1 in self.numbers

    @contextmanager
    def failing(self, number: int, times: int) -> Iterator[Callable[[], int]]:
        begin = self.asked
        self.numbers = range(begin + number, begin + number + times) if number >= 0 else range(0)
        try:
            yield lambda: self.asked - begin
        finally:
            self.numbers = range(0)


#: The machine that CuPy uses.
MACHINE = Machine()
