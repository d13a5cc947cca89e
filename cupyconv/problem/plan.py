"""The plan: what will run, as data.

A `Plan` is a small program over named buffers.  Planning writes it, a backend executes it, and `explain` prints it.  On
CUDA its steps contain only ints and strings: kernel launches, matrix products and Fourier transforms.  On NumPy a step
is an object of the backend that holds such ints and can run itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import log2, prod
from typing import Any, Protocol

from cupyconv.problem.arrays import ITEMSIZE, is_complex

#: Maximum number of inputs in a kernel's parameter table (MAX_SOURCES of kernels/image.cuh).
MAX_SOURCES = 60
#: Maximum number of convolutions per grid (MAX_PHASES of kernels/reduction.cuh).
MAX_PHASES = 8
#: Maximum number of inputs of the fused merge, which needs fewer parameters per input (MAX_MERGED of kernels/merge.cu).
MAX_MERGED = 120
#: Maximum number of inputs of a kernel that holds the parameters of two convolutions (MAX_PAIR_SOURCES of
#: kernels/conv_pair.cu).
MAX_PAIR_SOURCES = 32
#: Maximum number of consecutive similar steps that are all printed.
_LISTED = 4


@dataclass(frozen=True)
class Address:
    """A position in a named buffer: an argument (``"x[0]"``, ``"weight"``, ``"out"``) or workspace."""

    buffer: str
    offset: int = 0  # bytes

    def __str__(self) -> str:
        return self.buffer + (f"+{self.offset:,}B" if self.offset else "")


@dataclass(frozen=True)
class Buffer:
    """A workspace buffer of a plan; it lives until the last step is enqueued.

    A buffer that `is_kept` is counted, not allocated.  It belongs to a library, or it is a form of the argument `of`,
    which the launch `made_by` computes once.  Such a form outlives the call and does not count against the workspace
    limit.
    """

    name: str
    nbytes: int
    is_kept: bool = False
    of: str = ""
    made_by: KernelLaunch | None = None

    @property
    def space(self) -> int:
        """Bytes up to where the next buffer may start."""
        return -(-self.nbytes // Plan.ALIGNMENT) * Plan.ALIGNMENT

    @staticmethod
    def parts_in(room: int, nbytes: int) -> int:
        """The number of parts of `nbytes` bytes in the largest buffer whose `space` is at most `room`."""
        return room // Plan.ALIGNMENT * Plan.ALIGNMENT // nbytes


@dataclass(frozen=True)
class Conversion:
    """An argument whose dtype differs from that of the computation; it is converted before the first step."""

    buffer: str
    source: str
    target: str
    nbytes: int

    def __str__(self) -> str:
        return f"convert  {self.buffer}: {self.source} -> {self.target} ({_bytes(self.nbytes)})"


class Step(Protocol):
    """One operation of a backend: a launch or a GEMM call on CUDA, a loop on NumPy."""

    @property
    def flops(self) -> int: ...

    @property
    def bytes_moved(self) -> int: ...

    @property
    def shape_of_work(self) -> object:
        """A key: consecutive steps with equal keys are printed together."""


@dataclass(frozen=True)
class Kernel:
    """One compiled variant: ``kernels/<name>.cu`` specialized by ``-D`` macros, with entry point `name`."""

    name: str
    macros: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(value for _, value in self.macros)}>"


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch.  `params` fills the kernel's one parameter struct, field by field.

    `arithmetic_seconds` is the time of its arithmetic on the planned GPU, by the cost model.  `l2_bytes` are the bytes
    that its blocks request from the L2 cache for their tiles, or 0 if planning does not count them.  The blocks of a
    `cooperative` launch are all resident on the GPU at once, so they may wait for each other.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    params: tuple[tuple[str, Any], ...]
    shared_bytes: int = 0
    purpose: str = ""
    bytes_moved: int = 0
    flops: int = 0
    arithmetic_seconds: float = 0.0
    l2_bytes: float = 0.0
    cooperative: bool = False

    def __str__(self) -> str:
        return (
            f"kernel   {self.kernel}  grid {self.grid}  block ({self.block}, 1, 1)"
            f"  shared {self.shared_bytes:,} B  moves {_bytes(self.bytes_moved)}"
            f"{'  cooperative' * self.cooperative}  {self.purpose}"
        ).rstrip()

    @property
    def blocks(self) -> int:
        return prod(self.grid)

    @property
    def shape_of_work(self) -> object:
        """A key: consecutive launches with equal keys are printed together."""
        return self.kernel, self.purpose


@dataclass(frozen=True)
class LaunchLoop:
    """Launches repeated `times` times; their parameter `counter` begins with `first` and grows by one per round."""

    launches: tuple[KernelLaunch, ...]
    times: int
    counter: str
    first: int = 0

    def __str__(self) -> str:
        rounds = range(self.first, self.first + self.times)
        lines = "\n".join(f"  {launch}" for launch in self.launches)
        return f"loop     {self.times} x, {self.counter} = {rounds[0]} ... {rounds[-1]}\n{lines}"

    @property
    def shape_of_work(self) -> object:
        return self.counter, tuple(launch.shape_of_work for launch in self.launches)

    @property
    def bytes_moved(self) -> int:
        return self.times * sum(launch.bytes_moved for launch in self.launches)

    @property
    def flops(self) -> int:
        return self.times * sum(launch.flops for launch in self.launches)


@dataclass(frozen=True)
class Rounds:
    """Steps repeated `times` times, once per chunk of the work.

    `first` holds the steps of the first round, `second` those of the second.  The differences between them (where they
    read and write, and at which pixel they begin) repeat with the same increment from each round to the next.
    """

    first: tuple[Step, ...]
    second: tuple[Step, ...]
    times: int

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in _listed(self.first))
        return f"rounds   {self.times:,} x, one per chunk\n{lines}"

    @property
    def shape_of_work(self) -> object:
        return self.times, tuple(step.shape_of_work for step in self.first)

    @property
    def bytes_moved(self) -> int:
        return self.times * sum(step.bytes_moved for step in self.first)

    @property
    def flops(self) -> int:
        return self.times * sum(step.flops for step in self.first)

    def round(self, number: int) -> tuple[Step, ...]:
        """The steps of round `number`."""
        steps = going_on(self.first, self.second, number)
        assert steps is not None, "rounds are alike"
        return steps


def going_on(first: Any, second: Any, number: int) -> Any:
    """Extrapolate `first` and `second` to the value `number` rounds after the first.

    Returns None if the two differ in more than positions.
    """
    if first is second:
        return first
    if type(first) is not type(second):
        return None
    if isinstance(first, Address):
        offset = first.offset + number * (second.offset - first.offset)
        return Address(first.buffer, offset) if first.buffer == second.buffer else None
    if isinstance(first, int) and not isinstance(first, bool):
        return first + number * (second - first)
    if isinstance(first, tuple):
        parts = tuple(a if a is b else going_on(a, b, number) for a, b in zip(first, second))
        alike = len(first) == len(second) and all(p is not None or a is None for p, a in zip(parts, first))
        return parts if alike else None
    moving = _MOVING.get(type(first))
    if moving is None:
        return first if first == second else None
    changed = {name: going_on(getattr(first, name), getattr(second, name), number) for name in moving}
    if None in changed.values():
        return None
    same = replace(second, **{name: getattr(first, name) for name in moving})
    return replace(first, **changed) if first == same else None


@dataclass(frozen=True)
class Matrix:
    """One operand of a batched GEMM, row-major: `rows x columns` with leading dimension `ld`.

    If `transposed`, ``columns x rows`` is stored instead.  Strides are in elements.
    """

    at: Address
    ld: int
    stride: int
    transposed: bool = False
    conjugated: bool = False  # only with `transposed`: cuBLAS has no conjugation without transposition

    def __str__(self) -> str:
        mark = "ᴴ" if self.conjugated else "ᵀ" if self.transposed else ""
        return f"{self.at}{mark} ld {self.ld} stride {self.stride}"


@dataclass(frozen=True)
class GemmCall:
    """``C[i] = alpha * A[i] @ B[i] + beta * C[i]`` for `batch` matrices in one cuBLAS call, row-major.

    ::

             n              k              n
          m [ C ]   =    m [ A ]   x    k [ B ]      A.stride = 0 where the weight is shared
    """

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    c: Matrix
    batch: int
    dtype: str  # dtype of A and B
    c_dtype: str
    compute: str  # "float32", "tf32" or "float64"
    beta: int = 0
    purpose: str = ""
    alpha: int = 1

    def __str__(self) -> str:
        return (
            f"gemm     m {self.m}  n {self.n}  k {self.k}  batch {self.batch}  {self.dtype} -> {self.c_dtype}"
            f" ({self.compute} compute, {f'alpha {self.alpha}, ' if self.alpha != 1 else ''}beta {self.beta})  {self.purpose}\n"
            f"           A {self.a}\n           B {self.b}\n           C {self.c}"
        )

    @property
    def shape_of_work(self) -> object:
        return self.dtype, self.c_dtype, self.compute, self.beta, self.purpose

    @property
    def flops(self) -> int:
        return self.batch * self.m * self.n * self.k * (8 if is_complex(self.dtype) else 2)

    @property
    def bytes_moved(self) -> int:
        """A matrix that the batch shares counts once; C is also read if the product is accumulated into it."""
        batch = [1 if matrix.stride == 0 else self.batch for matrix in (self.a, self.b)]
        read = (batch[0] * self.m * self.k + batch[1] * self.k * self.n) * ITEMSIZE[self.dtype]
        return read + self.batch * self.m * self.n * ITEMSIZE[self.c_dtype] * (1 + self.beta)


@dataclass(frozen=True)
class Transform:
    """`batch` fast Fourier transforms along one to three axes, in one cuFFT call.  Neither direction is normalized.

    Real images have half the frequencies along the last axis.  On both sides, element i of image b is stored at b *
    (elements of an image) + i.  If the images are `interleaved`, it is stored at i * batch + b.  The transform may
    overwrite its source.  `work_bytes` is the work area counted for cuFFT: an estimate, until a device has turned out
    to need more.
    """

    size: tuple[int, ...]
    batch: int
    source: Address
    target: Address
    dtype: str  # dtype of the images
    inverse: bool = False  # from spectra to images
    interleaved: bool = False
    purpose: str = ""
    work_bytes: int = 0

    def __str__(self) -> str:
        image, spectrum = self.dtype, "complex128" if self.dtype in ("float64", "complex128") else "complex64"
        dtypes = f"{spectrum} -> {image}, inverse" if self.inverse else f"{image} -> {spectrum}"
        return (
            f"fft      {' x '.join(map(str, self.size))}  batch {self.batch}  {dtypes}{', interleaved' * self.interleaved}"
            f"  {self.purpose}\n           {self.source} -> {self.target}"
        )

    @property
    def frequencies(self) -> tuple[int, ...]:
        """The sizes of a spectrum."""
        return self.size if is_complex(self.dtype) else (*self.size[:-1], self.size[-1] // 2 + 1)

    @property
    def shape_of_work(self) -> object:
        return self.dtype, self.inverse, self.interleaved, self.purpose

    @property
    def flops(self) -> int:
        """By the usual count: 5 n log2(n) for complex numbers, half of that for real numbers."""
        n = prod(self.size)
        return int(self.batch * n * log2(n) * (5 if is_complex(self.dtype) else 2.5))

    @property
    def bytes_moved(self) -> int:
        """Images and spectra, once per axis."""
        item = ITEMSIZE[self.dtype]
        spectrum = prod(self.frequencies) * (item if is_complex(self.dtype) else 2 * item)
        return len(self.size) * self.batch * (prod(self.size) * item + spectrum)


#: The fields of each type that may change from round to round, at any depth.
_MOVING = {
    KernelLaunch: ("params",),
    LaunchLoop: ("launches", "first"),
    GemmCall: ("a", "b", "c"),
    Transform: ("source", "target"),
    Matrix: ("at",),
    Rounds: ("first", "second"),
}


def every_step(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield each step; of rounds, the steps of the first round."""
    for step in steps:
        yield from every_step(step.first) if isinstance(step, Rounds) else (step,)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a call: what would run, and why.

    Printing a plan gives a page for people; its fields are for programs.  The lines of the page:

    =============  =====================================================================================================
    (the first)    the problem: channels, kernel, samples, spatial size, padding
    result         dtype, shape, and memory order (C order, or channels-last)
    method         the chosen method, the processor, and the time that the cost model estimates
    work           floating-point operations, bytes moved, and what limits the speed: memory, arithmetic, or launch
                   overhead
    workspace      temporary memory, by buffer
    steps          what runs, in order: ``kernel`` with its grid, block and shared memory; ``gemm`` (a matrix product)
                   with its sizes; ``fft`` (transforms, by cuFFT); ``rounds`` of these for chunks that fit the
                   workspace; ``loop`` over blocks of work on NumPy; ``convert`` (a copy in another dtype)
    not ...        why another method was not chosen: it does not apply, or its estimated time
    note           what makes this call slower, or its dtype wider, than necessary
    =============  =====================================================================================================

    Attributes
    ----------
    method : str
        ``"direct"``, ``"gemm"``, ``"implicit_gemm"``, ``"winograd"`` or ``"fft"``; for a chain ``"fused"`` or
        ``"unfused"``; for recurrent layers ``"step"`` or ``"persistent"``; otherwise the function's name: ``"im2col"``,
        ``"max_pool"`` ...
    backend : str
        ``"numpy"`` or ``"cuda"``.
    device : str
        The processor of the plan, in words.
    steps : tuple
        The steps in order: launches, GEMM calls and transforms on CUDA, loops on NumPy.
    workspace_bytes : int
        Bytes allocated in addition to the result.
    flops, bytes_moved : int
        Floating-point operations, and bytes that the steps read and write.
    bound : str
        What limits the speed: ``"memory"``, ``"arithmetic"`` or ``"launch"``.
    reason, price : str
        How the method computes the result, and its estimated time by the cost model, in words.
    rejected : tuple of (method, reason)
        The methods that were not chosen.

    Examples
    --------
    >>> import numpy as np, cupyconv
    >>> x, w = np.ones((1, 3, 8, 8)), np.ones((4, 3, 3, 3))
    >>> plan = cupyconv.explain(cupyconv.conv, x, w)
    >>> plan.method, plan.backend, plan.flops
    ('gemm', 'numpy', 7776)
    """

    method: str
    backend: str
    device: str
    problem: str
    result: str
    steps: tuple[Step, ...]
    flops: int
    bytes_moved: int
    minimal_bytes: int
    bound: str
    rejected: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    price: str = ""
    notes: tuple[str, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    workspace_bytes: int = field(init=False)

    #: Alignment in bytes of every workspace buffer.
    ALIGNMENT = 256

    def __post_init__(self) -> None:
        used = sum(buffer.space for buffer in self.workspace)
        object.__setattr__(self, "workspace_bytes", used + sum(c.nbytes for c in self.conversions))

    @property
    def how(self) -> str:
        """The reason and the estimated time, as the page shows them."""
        return "; ".join(filter(None, (self.reason, self.price)))

    def __str__(self) -> str:
        lines = [
            f"{self.problem}",
            f"  result    {self.result}",
            f"  method    {self.method} on {self.backend} ({self.device})" + (f": {self.how}" if self.how else ""),
            f"  work      {self.flops:,} FLOP, {_bytes(self.bytes_moved)} moved"
            f" (minimum {_bytes(self.minimal_bytes)}); bound by {self.bound}",
            f"  workspace {_bytes(self.workspace_bytes)}"
            + "".join(f"; {b.name} {_bytes(b.nbytes)}{', cached' * bool(b.of)}" for b in self.workspace),
            "  steps",
        ]
        lines += [f"    {conversion}" for conversion in self.conversions]
        lines += [f"    {line}" for line in _listed(self.steps)]
        if not self.steps:
            lines.append("    (nothing to run: the result is empty)")
        lines += [f"  not {method}: {reason}" for method, reason in self.rejected]
        lines += [f"  note      {note}" for note in self.notes]
        return "\n".join(lines)


def _listed(steps: tuple[Step, ...]) -> list[str]:
    """Format steps as lines; steps that differ only in addresses and sizes, and rounds of them, appear once."""
    runs = [list(alike) for _, alike in groupby(steps, key=lambda step: step.shape_of_work)]
    known: dict[object, int] = {}
    kinds = [known.setdefault((run[0].shape_of_work, len(run)), len(known)) for run in runs]
    lines: list[str] = []
    at = 0
    while at < len(runs):
        period, rounds = _rounds(kinds, at)
        for run in runs[at : at + period]:
            shown = run if len(run) <= _LISTED else run[:1]
            lines += [line for step in shown for line in str(step).split("\n")]
            if len(run) > len(shown):
                lines.append(f"... and {len(run) - len(shown)} more like it")
        if rounds > 1:
            each = sum(map(len, runs[at : at + period]))
            lines.append(
                f"... repeated for {counted(rounds - 1, 'more chunk')} ({counted((rounds - 1) * each, 'step')})"
            )
        at += period * rounds
    return lines


def _rounds(kinds: list[int], at: int) -> tuple[int, int]:
    """Find equal rounds that begin at this position: (length of one, count), or (1, 1) if there are none."""
    for period in range(1, (len(kinds) - at) // 2 + 1):
        if kinds[at] == kinds[at + period]:
            one, rounds = kinds[at : at + period], 1
            while kinds[at + rounds * period : at + (rounds + 1) * period] == one:
                rounds += 1
            if rounds > 1:
                return period, rounds
    return 1, 1


def counted(number: int, thing: str) -> str:
    """A number of things in words; the plural of `thing` ends in "s"."""
    return f"{number:,} {thing}" + "s" * (number != 1)


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
