"""The choice of a method on NumPy, and of the blocks it works in.

A block is a run of samples or of pixels whose columns, products and epilogue stay in cache.  The sizes
below were measured on machines with 1 and 2 MiB of L2 cache a core (``tests/benchmarks``): a product wants
as many columns as the cache holds; what is bound by memory wants its block to stay in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

from cupyconv.numpy.loops import BlockLoop
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, Windows, even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import (
    NO_PROLOGUE,
    ConvProblem,
    HostModel,
    NotApplicable,
    ProductsProblemT,
    Prologue,
    without_empty_inputs,
)

#: Bytes of columns a block aims at where products dominate, and where memory does.
PRODUCT_BLOCK = 8 << 20
MEMORY_BLOCK = 512 << 10
#: Pixels below which a block of columns is not cut: the products would be vectors.
SMALLEST_BLOCK = 32
#: Pixels from which one sample fills a product; smaller images share one, through columns.
LONE_PIXELS = 256
#: Pixels for each output from which a copy of the weight takes much less than its products, and pixels of a row from
#: which columns of all taps are written as quickly as one tap's products are added to another's.
PIXELS_AN_OUTPUT, LONG_ROW = 8, 128
#: Rows of columns from which taps share them: with fewer, the products of one tap would be thin.  In groups they are
#: thin anyway, and writing columns takes longer.
LEAST_SHARED = 32
#: Outputs from which a 1x1 product is bound by arithmetic: each element read is used that often.
PRODUCT_OUTPUTS = 32
#: Operations a byte beyond which a few cores are busier than their memory.
BALANCE = 8

#: Why the method is a GPU's.
NO_IMPLICIT_GEMM = "BLAS reads matrices, so columns are written, block by block (method 'gemm')"

Block = tuple[int, int, int, int]


def plan_conv(problem: ConvProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    problem = without_empty_inputs(problem)
    preferred, other = ("direct", "gemm") if problem.geometry.is_depthwise else ("gemm", "direct")
    return choose(problem, {"gemm": _gemm, "direct": _direct}, preferred, other)


def choose(
    problem: ProductsProblemT, plans: Mapping[str, Callable[[ProductsProblemT], Plan]], preferred: str, other: str
) -> Plan:
    """The plan of a named method, or of `preferred` where it applies; ValueError where nothing does."""
    method = problem.method
    if method == "implicit_gemm":
        raise ValueError(f"method 'implicit_gemm' does not apply: {NO_IMPLICIT_GEMM}")
    if method != "auto":
        try:
            return _with_room(plans[method], problem)
        except NotApplicable as reason:
            raise ValueError(f"method {method!r} does not apply: {reason}") from None
    try:
        return _with_room(plans[preferred], problem)
    except NotApplicable as reason:
        refused = str(reason)
    try:
        return _with_room(plans[other], problem)
    except NotApplicable as reason:
        raise ValueError(f"no method applies: {preferred}: {refused}; {other}: {reason}") from None


def _with_room(plan: Callable[[ProductsProblemT], Plan], problem: ProductsProblemT) -> Plan:
    """The plan; where the workspace limit has no room for the blocks of all threads, for half as many, and so on."""
    while True:
        try:
            return plan(problem)
        except NotApplicable:
            assert isinstance(problem.machine, HostModel)
            if problem.machine.threads <= 1:
                raise
            problem = replace(problem, machine=HostModel(problem.machine.threads // 2))


def _gemm(problem: ConvProblem) -> Plan:
    geometry = problem.geometry
    in_place = _sums_fit_result(problem)
    view = (
        geometry.is_pointwise
        and len(problem.xs) == 1
        and not problem.prologue
        and geometry.pixels >= LONE_PIXELS
        and problem.xs[0].dtype == accumulator(problem.x_dtype)
        and _is_one_kind(problem)
        and is_matrix(problem.xs[0])
    )
    words = "products of the input where it lies" if view else "columns and products"
    why = "slower: a pass over the sums for every tap"
    rejected = ("direct", "method='gemm' was asked for" if problem.method == "gemm" else why)
    if view and in_place and not (problem.bias or problem.activation):
        axes = (geometry.batch, *geometry.out_size)  # one product does it all
        return _plan(problem, "gemm", _Body("view", 0), axes, words, rejected)
    if _shares_columns(problem):
        words = f"columns that {geometry.kernel[geometry.outermost]} taps share, and products"
        try:
            return _shared(problem, "gemm", "shared columns", words, rejected)
        except NotApplicable:
            pass  # one more copy of the weight passes the limit
    columns = 0 if view else geometry.in_channels * geometry.taps * _item(problem.x_dtype)
    body = _Body("view" if view else "columns", columns, tile=not view and geometry.taps > 1)
    by_memory = geometry.is_pointwise and geometry.group_outputs < PRODUCT_OUTPUTS
    target = (MEMORY_BLOCK if by_memory else PRODUCT_BLOCK) // (columns or _sum_bytes(problem, in_place=False) or 1)
    block = _cut(problem, body, target, SMALLEST_BLOCK, 1 if view else geometry.batch)
    return _plan(problem, "gemm", body, block, words, rejected)


def _direct(problem: ConvProblem) -> Plan:
    geometry = problem.geometry
    if problem.method == "direct":
        why = "method='direct' was asked for"
    elif geometry.is_depthwise:
        why = "slower: with one channel a group, each product is a vector by a matrix"
    else:
        why = "columns do not fit the workspace limit"
    if geometry.is_depthwise and _is_one_kind(problem) and geometry.stride == (1, 1, 1):
        return _runs(problem, ("gemm", why))
    if geometry.is_depthwise and _is_one_kind(problem):
        taps = geometry.kernel[geometry.outermost]
        words = f"columns that {taps} taps share, scaled" if taps > 1 else "each element scaled"
        return _shared(problem, "direct", "scaled taps", words, ("gemm", why))
    # Beside the sums: one tap's products and columns.
    per_pixel = _sum_bytes(problem, in_place=False) + geometry.in_channels * _item(problem.x_dtype)
    block = _cut(problem, _Body("taps", per_pixel), MEMORY_BLOCK // (per_pixel or 1), 1, geometry.batch)
    return _plan(problem, "direct", _Body("taps", per_pixel), block, "tap by tap, no columns", ("gemm", why))


def _shared(problem: ConvProblem, method: str, name: str, words: str, rejected: tuple[str, str]) -> Plan:
    """A plan of columns that the taps along an axis share, some groups at a time."""
    geometry = problem.geometry
    # Samples of a block come between rows and pixels: the result can take the sums of one only.
    lone = geometry.pixels >= LONE_PIXELS and _sums_fit_result(problem)
    a_group = geometry.group_channels * (geometry.taps // geometry.kernel[geometry.outermost]) * _item(problem.x_dtype)
    sums = geometry.out_channels * _item(problem.out.dtype)
    target = PRODUCT_BLOCK // (max(a_group, sums) or 1)
    body = _Body(name, 0)
    block = _cut(problem, body, target, SMALLEST_BLOCK, 1 if lone else geometry.batch)
    return _plan(problem, method, body, block, words, rejected)


def _runs(problem: ConvProblem, rejected: tuple[str, str]) -> Plan:
    """A plan of no columns: at stride 1 what a tap reads is one run of memory, borders between rows included."""
    geometry = problem.geometry
    body = _Body("scaled runs", 0)
    a_pixel = (1 + geometry.group_outputs) * _item(problem.x_dtype)
    most_samples = 1 if geometry.pixels >= LONE_PIXELS else geometry.batch
    block = _cut(problem, body, MEMORY_BLOCK // a_pixel, SMALLEST_BLOCK, most_samples)
    return _plan(problem, "direct", body, block, "each tap's run of elements scaled", rejected)


def _shares_columns(problem: ConvProblem) -> bool:
    """Whether columns that taps share, and a sum of products, take less than all columns and one product."""
    geometry = problem.geometry
    # The weight is copied, a matrix for each tap.
    worth_a_copy = geometry.batch * geometry.pixels >= PIXELS_AN_OUTPUT * geometry.group_outputs
    slow_columns = geometry.groups > 1 or geometry.out_size[2] < LONG_ROW
    return worth_a_copy and slow_columns and _is_one_kind(problem) and taps_share(geometry, _item(problem.x_dtype))


def taps_share(geometry: ConvGeometry, item: int) -> bool:
    """Whether taps along the kernel's outermost axis can share columns, and products of one tap are worth it."""
    taps = geometry.kernel[geometry.outermost]
    enough = geometry.groups > 1 or geometry.reduction >= LEAST_SHARED * taps
    return taps > 1 and enough and columns_leave_cache(geometry, item)


def columns_leave_cache(geometry: ConvGeometry, item: int) -> bool:
    """Whether writing the columns of all taps takes long: of few channels a group, longer than their products."""
    return geometry.batch * geometry.pixels * geometry.in_channels * geometry.taps * item > MEMORY_BLOCK


@dataclass(frozen=True)
class _Body:
    """A loop body and what it needs of memory: bytes a pixel of a block, and whether it copies a tile."""

    name: str
    per_pixel: int
    tile: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether some groups at a time go through it."""
        return self.name in ("shared columns", "scaled taps", "scaled runs")

    def part(self, problem: ConvProblem, block: Block) -> int:
        """Groups that stay in cache together."""
        if self.name != "scaled runs":
            return shared_part(problem.geometry, block, _item(problem.x_dtype), problem.prologue)
        return even_part(problem.geometry.groups, MEMORY_BLOCK // (self._run_bytes(problem, block) or 1))

    def _run_bytes(self, problem: ConvProblem, block: Block) -> int:
        """Of a group's tile, of the sums of its runs, and of what fills borders."""
        geometry = problem.geometry
        copies = 1 + geometry.group_outputs + temporaries(geometry, problem.prologue)
        return copies * block[0] * tile_pixels(geometry, block) * _item(problem.x_dtype)

    def workspace(self, problem: ConvProblem, block: Block) -> int:
        """Bytes for one block: columns or products, the tile they are taken from, sums, and gathered borders."""
        geometry = problem.geometry
        sums = prod(block) * _sum_bytes(problem, self.in_place(problem, block))
        if self.name == "scaled runs":
            return self.part(problem, block) * self._run_bytes(problem, block) + sums
        if self.in_parts:
            item, prologue = _item(problem.x_dtype), problem.prologue
            part = self.part(problem, block)
            columns = part * shared_bytes(geometry, block, item, prologue)
            products = part * geometry.group_outputs * prod(block) * _item(problem.out.dtype)
            return columns + products + sums
        read = block[0] * geometry.in_channels * prod(block[1:]) * _item(problem.x_dtype)
        nbytes = prod(block) * self.per_pixel + sums
        if self.tile:
            read = block[0] * geometry.in_channels * tile_pixels(geometry, block) * _item(problem.x_dtype)
            nbytes += read
        return nbytes + read * temporaries(geometry, problem.prologue)

    def in_place(self, problem: ConvProblem, block: Block) -> bool:
        """Whether the block's sums are the result itself."""
        lone = block[0] == 1 and (self.name == "columns" or (self.in_parts and is_in_order(problem.geometry, block)))
        return _sums_fit_result(problem) and (self.name in ("view", "scaled runs") or lone)


def _plan(problem: ConvProblem, method: str, body: _Body, block: Block, words: str, rejected: tuple[str, str]) -> Plan:
    geometry, machine = problem.geometry, problem.machine
    assert isinstance(machine, HostModel)
    axes = (geometry.batch, *geometry.out_size)
    empty = 0 in axes or geometry.out_channels == 0
    blocks = 0 if empty else prod(-(-extent // part) for extent, part in zip(axes, block))
    threads = max(1, min(machine.threads, blocks))
    weight = _weight_copy(problem) + _matrices_of_taps(problem, body)
    sizes = {"weight": weight, "blocks": threads * body.workspace(problem, block)}
    loop = BlockLoop(
        body=body.name, inputs=tuple(x.name for x in problem.xs), block=block, blocks=blocks, threads=threads,
        geometry=geometry, dtype=accumulator(problem.out.dtype),
        x_dtype=accumulator(problem.x_dtype), weight_dtype=accumulator(problem.weight_dtype), activation=problem.activation,
        in_place=body.in_place(problem, block), bytes_moved=problem.minimal_bytes, flops=problem.flops,
        part=body.part(problem, block) if body.in_parts else 0,
        prologue=problem.prologue,
    )  # fmt: skip
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=str(geometry), result=problem.result,
        steps=() if empty else (loop,), flops=problem.flops, bytes_moved=problem.minimal_bytes,
        minimal_bytes=problem.minimal_bytes, rejected=(rejected, ("implicit_gemm", NO_IMPLICIT_GEMM)), reason=words, notes=problem.notes,
        bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic",
        workspace=() if empty else tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip


def _cut(problem: ConvProblem, body: _Body, target: int, smallest: int, most_samples: int) -> Block:
    """A block of about `target` pixels, or the largest below it that keeps within the workspace limit."""
    threads = problem.machine.threads if isinstance(problem.machine, HostModel) else 1
    weight = _weight_copy(problem)
    fixed = weight + _matrices_of_taps(problem, body) + 2 * Plan.ALIGNMENT

    def needed(block: Block) -> int:
        return fixed + threads * body.workspace(problem, block)

    return largest_block(problem.geometry, needed, problem.limit_with(weight), target, smallest, most_samples)


def largest_block(
    geometry: ConvGeometry, needed: Callable[[Block], int], limit: int, target: int, smallest: int, most_samples: int
) -> Block:
    """A block of about `target` pixels, or the largest below it that needs no more than `limit` bytes."""
    smallest = max(1, min(smallest, geometry.pixels))
    pixels = max(smallest, target)
    while True:
        block = block_of_pixels(geometry, pixels, most_samples)
        nbytes = needed(block)
        if nbytes <= limit:
            return block
        if pixels == smallest:
            raise NotApplicable(f"the smallest block needs {nbytes:,} bytes of workspace, the limit is {limit:,}")
        pixels = max(smallest, min(pixels - 1, pixels * limit // nbytes))


def block_of_pixels(geometry: ConvGeometry, pixels: int, most_samples: int) -> Block:
    """At most that many pixels: whole samples, else part of one along the outermost axis that must be cut."""
    depth, height, width = geometry.out_size
    if pixels >= geometry.pixels:
        samples = min(most_samples, max(1, pixels // max(1, geometry.pixels)))
        return (even_part(geometry.batch, samples), max(1, depth), max(1, height), max(1, width))
    if pixels >= height * width:
        return (1, even_part(depth, pixels // (height * width)), height, width)
    if pixels >= width:
        return (1, 1, even_part(height, pixels // width), width)
    return (1, 1, 1, even_part(width, pixels))


def tile_pixels(geometry: Windows, block: Block) -> int:
    """Pixels of the part of a padded sample that all windows of a block lie in."""
    return prod((part - 1) * stride + span for part, stride, span in zip(block[1:], geometry.stride, geometry.span))


def temporaries(geometry: Windows, prologue: Prologue) -> int:
    """Copies of what is read: a border that a padding mode fills is gathered first, an activation takes one beside."""
    return (geometry.padding_mode != "constant") + bool(prologue.activation)


def shared_bytes(geometry: ConvGeometry, block: Block, item: int, prologue: Prologue = NO_PROLOGUE) -> int:
    """Bytes, for one group, of the columns that a block's taps share, and of the tile they are taken from."""
    axis, samples = geometry.outermost, block[0]
    taps, stride, gap, rows = (t[axis] for t in (geometry.kernel, geometry.stride, geometry.dilation, block[1:]))
    period = stride // gcd(stride, gap)
    each = [rows + (-(-(taps - first) // period) - 1) * (period * gap // stride) for first in range(min(period, taps))]
    columns = sum(each) * (prod(block) // rows) * (geometry.taps // taps)
    tile = samples * tile_pixels(geometry, block) * (1 + temporaries(geometry, prologue))
    return geometry.group_channels * (columns + tile) * item


def shared_part(geometry: ConvGeometry, block: Block, item: int, prologue: Prologue = NO_PROLOGUE) -> int:
    """Groups whose shared columns stay in cache together."""
    return even_part(geometry.groups, MEMORY_BLOCK // (shared_bytes(geometry, block, item, prologue) or 1))


def is_in_order(geometry: ConvGeometry, block: Block) -> bool:
    """Whether the pixels of shared columns, the outermost axis of the kernel before all others, are in their own order."""
    return prod(block[: 1 + geometry.outermost]) == 1


def _item(dtype: str) -> int:
    return ITEMSIZE[accumulator(dtype)]


def _is_one_kind(problem: ConvProblem) -> bool:
    """Whether both factors are real, or both complex."""
    return is_complex(problem.x_dtype) == is_complex(problem.weight_dtype)


def _sum_bytes(problem: ConvProblem, in_place: bool) -> int:
    """Bytes a pixel of a block's sums, unless they are the result, and of the temporary an activation takes."""
    arrays = 2 if not in_place else int(bool(problem.activation))
    return arrays * problem.geometry.out_channels * _item(problem.out.dtype)


def _sums_fit_result(problem: ConvProblem) -> bool:
    """Whether products can be written where the result lies.  A residual may lie there too: it is read later."""
    return (
        problem.out.dtype == accumulator(problem.out.dtype)
        and problem.residual is None
        and _is_one_kind(problem)
        and problem.out.pixel_stride == 1
        and is_matrix(problem.out)
    )


def is_matrix(image: Operand) -> bool:
    """Whether a sample is a matrix that BLAS takes as it lies, channel by channel or pixel by pixel."""
    pixel_stride, channels = image.pixel_stride, image.shape[1]
    if pixel_stride is None:
        return False
    by_channel = pixel_stride == 1 and (channels == 1 or image.stride_c >= image.pixels)
    return by_channel or (image.stride_c == 1 and pixel_stride >= channels)


def _weight_copy(problem: ConvProblem) -> int:
    """Bytes of the weight where it must be copied: another dtype, another order, or parts taken apart."""
    weight = problem.weight
    as_it_lies = (
        weight.dtype == accumulator(problem.weight_dtype)
        and weight.strides == c_strides(weight.shape)
        and not (is_complex(problem.weight_dtype) and not is_complex(problem.x_dtype))
    )
    return 0 if as_it_lies else _weight_bytes(problem)


def _matrices_of_taps(problem: ConvProblem, body: _Body) -> int:
    """Bytes of the weight's matrices, one for each tap, where taps share columns."""
    return _weight_bytes(problem) if body.name == "shared columns" else 0


def _weight_bytes(problem: ConvProblem) -> int:
    item = ITEMSIZE[accumulator(real_part(problem.weight_dtype))] * (1 + is_complex(problem.weight_dtype))
    return prod(problem.weight.shape) * item
