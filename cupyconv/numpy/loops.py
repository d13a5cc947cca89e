"""The NumPy backend's steps, as data: loops over parts of what is computed, each finished while it is in cache.

Planning decides how large a part is; what a loop's body does is the backend's, by its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyconv.problem.activations import Activation
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.problems import NO_PROLOGUE, Prologue
from cupyconv.problem.recurrence import RecurrentGeometry


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
    part: int = field(default=0, kw_only=True)  # groups whose shared columns, channels whose sums, there are at a time
    prologue: Prologue = field(default=NO_PROLOGUE, kw_only=True)

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
    what is read of x.  The weight is that of these channels, has `taps` of each axis, in the order in which they meet x,
    and outputs and channels of each group exchanged.
    """

    output: str
    first_channel: int  # of the concatenated results
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
    copied: tuple[str, ...]  # roles of factors that lie in memory as BLAS does not take them
    bias_column: bool  # whether biases are a column of the input's weight
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
