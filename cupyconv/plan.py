"""The decision: what will run, as data.

A `Plan` is a small program over named buffers, made of ints and strings only.  Planning writes it,
a backend executes it, `explain` prints it; none of them needs the other two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cupyconv.activations import Activation
from cupyconv.dtypes import ITEMSIZE, is_complex
from cupyconv.geometry import ConvGeometry, Windows
from cupyconv.prologue import NONE, Prologue
from cupyconv.recurrence import RecurrentGeometry

#: Inputs that fit into the table of a kernel's parameters (MAX_SOURCES of kernels/image.cuh).
MAX_SOURCES = 64
#: The same of the fused merge, which needs less of each (MAX_MERGED of kernels/merge.cu).
MAX_MERGED = 120
#: The same of two convolutions in one kernel, whose parameters are those of both (MAX_PAIR_SOURCES of kernels/conv_pair.cu).
MAX_PAIR_SOURCES = 32


@dataclass(frozen=True)
class Address:
    """A place in a named buffer: an argument (``"x[0]"``, ``"weight"``, ``"out"``) or workspace."""

    buffer: str
    offset: int = 0  # bytes

    def __str__(self) -> str:
        return self.buffer + (f"+{self.offset:,}B" if self.offset else "")


@dataclass(frozen=True)
class Buffer:
    """Workspace the plan asks for; lives until its last step has been enqueued."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Conversion:
    """An argument whose dtype is not the one computed with: converted before the first step."""

    buffer: str
    source: str
    target: str
    nbytes: int

    def __str__(self) -> str:
        return f"convert  {self.buffer}: {self.source} -> {self.target} ({_bytes(self.nbytes)})"


@dataclass(frozen=True)
class Kernel:
    """One compiled variant: ``kernels/<name>.cu`` specialised by ``-D`` macros, entry point `name`."""

    name: str
    macros: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(value for _, value in self.macros)}>"


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch.  `params` fills the kernel's one parameter struct, field by field.

    The blocks of a `cooperative` launch are all on the GPU at once, so that they may wait for each other.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    params: tuple[tuple[str, Any], ...]
    shared_bytes: int = 0
    purpose: str = ""
    bytes_moved: int = 0
    flops: int = 0
    cooperative: bool = False

    def __str__(self) -> str:
        return (
            f"kernel   {self.kernel}  grid {self.grid}  block ({self.block}, 1, 1)"
            f"  shared {self.shared_bytes:,} B  moves {_bytes(self.bytes_moved)}"
            f"{'  cooperative' * self.cooperative}  {self.purpose}"
        ).rstrip()

    @property
    def shape_of_work(self) -> object:
        """What must agree for two launches to print as one line."""
        return self.kernel, self.purpose


@dataclass(frozen=True)
class LaunchLoop:
    """Launches made `times` times in turn; their parameter `counter` is `first` in the first round, then one more."""

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
class Matrix:
    """One operand of a batched GEMM, row-major: `rows x columns` lies in memory with leading
    dimension `ld`, or transposed (``columns x rows``) where `transposed`.  Element strides."""

    at: Address
    ld: int
    stride: int
    transposed: bool = False
    conjugated: bool = False  # only where transposed: cuBLAS has no other

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
    dtype: str  # of A and B
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
        """A matrix shared by the batch counts once; C is read too where it is added to."""
        batch = [1 if matrix.stride == 0 else self.batch for matrix in (self.a, self.b)]
        read = (batch[0] * self.m * self.k + batch[1] * self.k * self.n) * ITEMSIZE[self.dtype]
        return read + self.batch * self.m * self.n * ITEMSIZE[self.c_dtype] * (1 + self.beta)


@dataclass(frozen=True)
class BlockLoop:
    """The NumPy backend's one step: a loop over blocks of the result, each finished while in cache.

    `block` cuts the result's (sample, depth, height, width) axes: whole inner axes, part of one, single
    steps of the outer ones, so that a block is one run of samples or of pixels.
    """

    body: str  # a loop body of backends/numpy
    inputs: tuple[str, ...]
    block: tuple[int, int, int, int]
    blocks: int
    threads: int
    geometry: Windows
    dtype: str  # of the sums
    x_dtype: str  # of images and weight in products
    weight_dtype: str
    activation: Activation
    in_place: bool  # the sums are the result itself
    bytes_moved: int
    flops: int
    part: int = field(default=0, kw_only=True)  # groups whose shared columns there are at a time; 0: other bodies
    prologue: Prologue = field(default=NONE, kw_only=True)

    @property
    def rounds(self) -> int:
        """Times that scratch memory is filled: by every block, and every part of one."""
        if not self.part:
            return self.blocks
        assert isinstance(self.geometry, ConvGeometry)
        return self.blocks * -(-self.geometry.groups // self.part)

    def __str__(self) -> str:
        block = " x ".join(map(str, self.block))
        return (
            f"loop     {self.body}{f' of {self.prologue}' if self.prologue else ''}, sums in {'the result' if self.in_place else self.dtype}: {self.blocks} block(s) of {block} (n, d, h, w)"
            f" on {self.threads} thread(s)"
        )

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True)
class ElementwiseLoop:
    """The NumPy backend's pass over images that are alike, in blocks that stay in cache.

    `block` cuts the axes (n, c, d, h, w) of all of them.
    """

    body: str  # a loop body of backends/numpy
    block: tuple[int, int, int, int, int]
    blocks: int
    threads: int
    dtype: str  # computed in
    activation: Activation
    bytes_moved: int
    flops: int

    def __str__(self) -> str:
        block = " x ".join(map(str, self.block))
        return f"loop     {self.body} in {self.dtype}: {self.blocks} block(s) of {block} (n, c, d, h, w) on {self.threads} thread(s)"

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True)
class PoolingLoop:
    """The NumPy backend's step for pooling one input: a loop over blocks of what is written.

    `block` cuts the (sample, channel, depth, height, width) axes: whole axes that lie innermost in memory, part
    of one, single steps of the outer ones.
    """

    body: str  # a class of backends/numpy/pooling.py, in words
    inputs: tuple[str, ...]
    result: str
    block: tuple[int, int, int, int, int]
    blocks: int
    threads: int
    geometry: Windows
    dtype: str  # compared and added in
    bytes_moved: int
    flops: int

    def __str__(self) -> str:
        block = " x ".join(map(str, self.block))
        return (
            f"loop     {self.body} in {self.dtype}, {' and '.join(self.inputs)} -> {self.result}:"
            f" {self.blocks} block(s) of {block} (n, c, d, h, w) on {self.threads} thread(s)"
        )

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True)
class WeightGradientLoop(BlockLoop):
    """A loop over blocks of the gradient that arrives, each added to the weight's gradient.

    `weight_dtype` is that of the arriving gradient in products.  The sums are those of outputs ``first_row``
    ... of every group, `rows` of them, and a product has at most `piece` of these.
    """

    first_row: int
    rows: int
    piece: int
    grad_in_place: bool  # a block of one sample is a matrix that products read where it lies

    def __str__(self) -> str:
        split = f", outputs {self.first_row} to {self.first_row + self.rows} of each group" if self.first_row else ""
        return super().__str__() + split


@dataclass(frozen=True)
class TransposedLoop(BlockLoop):
    """A loop over samples and channels of the results of a transposed convolution, in `blocks` blocks.

    `block` is samples, and the pixels of x that a product is over: within a block, run after run of pixels
    is added to the sums that its windows reach.  `channels` is a number of whole groups, or part of one.
    """

    outputs: tuple[str, ...]
    channels: int
    conjugate: bool
    flat: bool  # each tap adds one run of memory, from rows of x as long as those of the padded result

    @property
    def channel_ranges(self) -> list[range]:
        """The channels of each block, counted through all outputs."""
        geometry, part = self.geometry, max(1, self.channels)
        assert isinstance(geometry, ConvGeometry)
        whole = geometry.in_channels if part >= geometry.group_channels else geometry.group_channels
        return [
            range(first + begin, first + min(begin + part, whole))
            for first in range(0, geometry.in_channels, max(1, whole))
            for begin in range(0, whole, part)
        ]

    def __str__(self) -> str:
        samples, *run = self.block
        return (
            f"loop     {self.body}{', flat' * self.flat}, sums in {'the results' if self.in_place else self.dtype}: {self.blocks} block(s) of {samples}"
            f" samples x {self.channels} channels, runs of {' x '.join(map(str, run))} (d, h, w), on {self.threads} thread(s)"
        )


@dataclass(frozen=True)
class ChainLoop:
    """The NumPy backend's step for a chain: runs of rows, each through all layers one after the other.

    `tile` is samples, and rows of the last layer's result along `axis`.  The rows are cut into `bands` first,
    which know nothing of each other.  Of the other layers' results `held` rows are in memory at a time.  `loops` has, for each layer, one loop for every geometry that its part of
    a tile may have: at the edges of the image a part has padding, and the last one may have fewer rows.
    """

    inputs: tuple[str, ...]
    layers: tuple[ConvGeometry, ...]
    dtypes: tuple[str, ...]  # of the layers' results
    axis: int
    tile: tuple[int, int]
    held: tuple[int, ...]
    bands: int
    threads: int
    loops: tuple[tuple[BlockLoop, ...], ...]
    bytes_moved: int
    flops: int

    @property
    def sample_ranges(self) -> list[range]:
        """The samples of each tile."""
        batch, part = self.layers[-1].batch, self.tile[0]
        return [range(first, min(first + part, batch)) for first in range(0, batch, part)]

    @property
    def row_ranges(self) -> list[range]:
        """The rows of each band."""
        rows = self.layers[-1].out_size[self.axis]
        part = -(-rows // self.bands)
        return [range(first, min(first + part, rows)) for first in range(0, rows, part)]

    def __str__(self) -> str:
        samples, rows = self.tile
        tiles = len(self.sample_ranges) * sum(-(-len(band) // rows) for band in self.row_ranges)
        lines = [
            f"loop     {len(self.layers)} layers, tile by tile: {tiles} tile(s) of {samples} samples x {rows} rows (axis {'dhw'[self.axis]})"
            f" in {self.bands} band(s) on {self.threads} thread(s)"
        ]
        lines += [
            f"  layer {i}: {max(loops, key=lambda loop: loop.flops)}" for i, loops in enumerate(self.loops) if loops
        ]
        return "\n".join(lines)

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True)
class GatheredLoop(BlockLoop):
    """A part of a transposed convolution's result as the convolution that it is, of `geometry`.

    Along each axis the part is every ``written[1]``-th element from ``written[0]`` on, and `read` begins and ends
    what is read of x.  The weight has `taps` of each axis, in the order in which they meet x, and
    outputs and channels of each group exchanged.
    """

    output: str
    conjugate: bool
    taps: tuple[range, ...]
    read: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        taps, steps = (
            " x ".join(map(str, along)) for along in (map(len, self.taps), (step for _, step in self.written))
        )
        every = f", every {steps}" if max(step for _, step in self.written) > 1 else ""
        return f"{super().__str__()}, gathered from {taps} taps{every}"


@dataclass(frozen=True)
class RecurrentLoop:
    """The NumPy backend's step for a recurrent layer: a loop over steps, for each direction and part of the samples.

    The inputs of `samples` in `chunk` steps go through the input's weight in one product; then, step by step, the state goes
    through its own, and all gates are worked out where that product lies.
    """

    geometry: RecurrentGeometry
    buffers: tuple[tuple[str, str], ...]  # of each argument and result, by role
    dtype: str  # computed in
    samples: int
    chunk: int
    threads: int
    copied: tuple[str, ...]  # roles of factors that lie in memory as BLAS does not take them, or not quickly
    bytes_moved: int
    flops: int

    def __str__(self) -> str:
        geometry = self.geometry
        parts, chunks = -(-geometry.batch // self.samples), -(-geometry.steps // self.chunk)
        each = (
            f"{self.chunk * min(self.samples, geometry.batch)} x {geometry.inputs} x {geometry.gates * geometry.hidden}"
        )
        products = 2 if geometry.cell == "gru" and not geometry.linear_before_reset else 1
        return (
            f"loop     {geometry.cell} in {self.dtype}, {geometry.directions} direction(s) of {parts} part(s) of {self.samples} samples"
            f" and {chunks} chunk(s) of {self.chunk} steps on {self.threads} thread(s):"
            f" one input product {each}, then a step {products} product(s) of the state and all gates"
            + (f"; {', '.join(self.copied)} copied" if self.copied else "")
        )

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True)
class RecurrentGradientLoop:
    """The NumPy backend's step for a recurrent layer's gradients: back through time, direction after direction.

    The gates' gradients of `run` steps and `samples` samples are in memory at once.  What they are multiplied with is
    worked out for all of these before, products with the weights and x are made of all of them after, added to those
    of other runs `block` rows at a time.
    """

    geometry: RecurrentGeometry
    run: int
    samples: int
    block: int
    dtype: str  # computed in
    bytes_moved: int
    flops: int

    def __str__(self) -> str:
        geometry = self.geometry
        runs = -(-geometry.steps // max(1, self.run))
        return (
            f"loop     back through {geometry.cell} in {self.dtype}, {geometry.directions} direction(s) of {runs} run(s)"
            f" of {self.run} steps x {self.samples} samples: derivatives, then each step's product, then products of all"
        )

    @property
    def shape_of_work(self) -> object:
        return self


Step = (
    KernelLaunch
    | LaunchLoop
    | GemmCall
    | BlockLoop
    | ElementwiseLoop
    | PoolingLoop
    | ChainLoop
    | RecurrentLoop
    | RecurrentGradientLoop
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call would run, and why.

    Printing a plan gives a page for people; its fields are for programs.

    Attributes
    ----------
    method : str
        ``"direct"``, ``"gemm"`` or ``"implicit_gemm"``; of columns ``"im2col"`` or ``"col2im"``;
        of a chain ``"fused"`` or ``"unfused"``.
    backend : str
        ``"numpy"`` or ``"cuda"``.
    device : str
        The processor planned for, in words.
    steps : tuple
        Launches and GEMM calls, in order.
    workspace_bytes : int
        Bytes allocated beyond the result.
    flops, bytes_moved : int
        Floating-point operations, and bytes the steps read and write.
    bound : str
        What limits it: ``"memory"``, ``"arithmetic"`` or ``"launch"``.
    rejected : tuple of (method, reason)
        The methods not taken.

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
    notes: tuple[str, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    workspace_bytes: int = field(init=False)

    #: Every workspace buffer starts on this boundary.
    ALIGNMENT = 256

    def __post_init__(self) -> None:
        used = sum(-(-b.nbytes // self.ALIGNMENT) * self.ALIGNMENT for b in self.workspace)
        object.__setattr__(self, "workspace_bytes", used + sum(c.nbytes for c in self.conversions))

    def __str__(self) -> str:
        lines = [
            f"{self.problem}",
            f"  result    {self.result}",
            f"  method    {self.method} on {self.backend} ({self.device})"
            + (f": {self.reason}" if self.reason else ""),
            f"  work      {self.flops:,} FLOP, {_bytes(self.bytes_moved)} moved"
            f" (at the least {_bytes(self.minimal_bytes)}); bound by {self.bound}",
            f"  workspace {_bytes(self.workspace_bytes)}"
            + "".join(f"; {b.name} {_bytes(b.nbytes)}" for b in self.workspace),
            "  steps",
        ]
        lines += [f"    {conversion}" for conversion in self.conversions]
        first, period, rounds = _rounds(self.steps)
        lines += [f"    {line}" for step in self.steps[: first + period] for line in str(step).split("\n")]
        if rounds > 1:
            lines.append(f"    ... and so on for {rounds - 1} more chunks, {(rounds - 1) * period} steps")
        if not self.steps:
            lines.append("    (nothing to run: the result is empty)")
        lines += [f"  not {method}: {reason}" for method, reason in self.rejected]
        lines += [f"  note      {note}" for note in self.notes]
        return "\n".join(lines)


def _rounds(steps: tuple[Step, ...]) -> tuple[int, int, int]:
    """Steps as a preamble and rounds that differ only in addresses and sizes: (preamble, steps a round, rounds)."""
    kinds = [step.shape_of_work for step in steps]
    for first in range(min(4, len(steps))):
        rest = kinds[first:]
        for period in range(1, len(rest) // 2 + 1):
            if len(rest) % period == 0 and rest == rest[:period] * (len(rest) // period):
                return first, period, len(rest) // period
    return 0, len(steps), 1


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
