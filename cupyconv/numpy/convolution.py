"""Convolution on NumPy: the methods, the choice among them, and what they share.

A block is a run of samples or of pixels whose columns, products and epilogue stay in cache.  A method says which
problems it is for, how large a block should be, what memory a block takes, and how its sums are computed.  The loop
over blocks, the epilogue and the store are the same for all:

::

    x_0, x_1, ...   --method-->   sums             --epilogue-->   block of y
    any strides,                  [g, O_g, pixels]                 any strides,
    any dtype                     dtype of the sums                rounded once

Blocks are disjoint, so threads may take them in any order and every bit stays the same.

The sizes of blocks were measured on machines with 1 and 2 MiB of L2 cache per core (``tests/benchmarks``): a product
wants as many columns as the cache holds; what is bound by memory wants its block to stay in L2.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from math import inf, prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import NumpyStep
from cupyconv.numpy.windows import (
    Block,
    Blocks,
    BlockSize,
    Images,
    Scratch,
    block_words,
    box_within,
    columns_shape,
    five_axes,
    largest_block,
    share_of_pixels,
    tile_shape,
    tile_size,
    with_taps,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, dtype_from_name, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import METHODS as PUBLIC_METHODS
from cupyconv.problem.problems import (
    NO_SUCH_METHOD,
    ConvProblem,
    NotApplicable,
    ProductsProblem,
    ProductsProblemT,
    Prologue,
    TransposedProblem,
    WeightGradientProblem,
    without_empty_inputs,
)

if TYPE_CHECKING:
    from cupyconv.numpy.prologue import Transform

#: Bytes of columns a block aims at where products dominate, where they are copied and read at once, and where memory does.
PRODUCT_BLOCK = 8 << 20
CACHE_BLOCK = 1 << 20
MEMORY_BLOCK = 512 << 10
#: Elements from a matrix's first to its last: beyond, OpenBLAS's kernels for small products count wrong and crash.
BLAS_REACH = 1 << 31
#: Bytes of one tap's columns below which a product takes several taps: NumPy's calls would take longer than it.
SHORT_CALL = 256 << 10
#: Index arrays that there are at once of a border: the elements read, and those it takes to work them out.  An index has 8 bytes.
INDEX_ARRAYS, INDEX_BYTES = 4, 8
#: Multiply-adds below which transforms are not taken unasked.
FEW_PRODUCTS = 1_000_000
#: Bytes of the workspace limit below which a thread has no share worth planning for.
LEAST_SHARE = 4 << 10
#: How much longer a loop may take on half of its threads than the best does, where it is cut anew for these.
FEWER_THREADS = 1.25
#: What a turn of a loop takes at the least.
TURN_SECONDS = 10e-6
#: Pixels below which a block of columns is not cut: the products would be vectors.
SMALLEST_BLOCK = 32
#: Pixels from which one sample fills a product; smaller images share one, through columns.
LONE_PIXELS = 256

#: Why a method is a GPU's, or a convolution's only.
ELSEWHERE = {
    "implicit_gemm": "BLAS reads matrices, so columns are written, block by block (method 'gemm')",
    "winograd": "it is for what is gathered as a convolution; this is scattered",
}
# --- the choice -----------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """What ``method=`` may name: ways to run it, of which the one that takes least is taken.

    A module stands for its ``WAYS``, and is imported when it is first asked for them: where a few operations tell why the
    method cannot do a problem, or that it takes so long at the least, it is not.
    """

    ways: str | tuple[type[BlockLoop], ...]
    refusal: Callable[[Any], str] = lambda _: ""
    at_least: Callable[[Any], float] = lambda _: 0.0
    unasked: Callable[[Any], str] = lambda _: ""  # why it is taken only where it is named


def winograd_refusal(problem: ProductsProblem) -> str:
    """Why Winograd's method cannot do a problem."""
    geometry = problem.geometry
    if not problem.allow_winograd:
        return "options(allow_winograd=False) forbids it"
    if not problem.x_dtype == problem.factor_dtype == problem.dtype == "float32":
        return "it is for float32: in other dtypes its rounding errors or its products cost too much"
    if geometry.stride != (1, 1, 1) or not {3} <= {*geometry.kernel} <= {1, 3}:
        return "it is for stride 1, and kernels of 3 taps along some axes and 1 along the others"
    return ""


def fft_unasked(problem: ProductsProblem) -> str:
    """Why transforms are taken only where they are asked for: a short call has no time to win for its larger errors."""
    few = problem.geometry.products < FEW_PRODUCTS
    return f"larger rounding errors: below {FEW_PRODUCTS:,} products it is taken where it is named" if few else ""


#: Methods that all kinds of problems have; their modules are the kinds'.
WINOGRAD = Method("cupyconv.numpy.winograd", winograd_refusal, cost.least_winograd)
FFT = Method("cupyconv.numpy.fft", attrgetter("fft_refusal"), cost.least_fft, fft_unasked)
#: Every method of a convolution; a depthwise one has its own (`depthwise`).
METHODS = {
    "winograd": WINOGRAD,
    "fft": FFT,
    "gemm": Method("cupyconv.numpy.gemm"),
    "direct": Method("cupyconv.numpy.direct", at_least=cost.least_direct),
}
#: The same of several inputs.
MERGING = METHODS | {"gemm": Method("cupyconv.numpy.merged")}
#: Those that are other ones for several groups.
GROUPED = {"gemm": Method("cupyconv.numpy.long_rows")}


def plan_conv(problem: ConvProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    problem = without_empty_inputs(problem)
    if problem.geometry.is_depthwise:
        from cupyconv.numpy.depthwise import DEPTHWISE  # imported by those that are

        return choose(problem, DEPTHWISE)
    if problem.geometry.groups > 1:
        return choose(problem, METHODS | GROUPED)
    return choose(problem, METHODS if len(problem.xs) == 1 else MERGING)


def choose(problem: ProductsProblemT, methods: Mapping[str, Method]) -> Plan:
    """The plan of the method that was named, or of the one that takes least; ValueError where none applies."""
    named = problem.method
    elsewhere = {name: ELSEWHERE.get(name, NO_SUCH_METHOD) for name in PUBLIC_METHODS if name not in methods}
    if named in elsewhere:
        raise ValueError(f"method {named!r} does not apply: {elsewhere[named]}")
    to_try, why_not = [named], {name: f"method={named!r} was asked for" for name in methods if name != named}
    least = dict.fromkeys(methods, 0.0)
    if named == "auto":
        why_not = {
            name: why for name, method in methods.items() if (why := method.refusal(problem) or method.unasked(problem))
        }
        least = {name: method.at_least(problem) for name, method in methods.items() if name not in why_not}
        to_try = sorted(least, key=lambda name: least[name])
    best: Draft | None = None
    for name in to_try:
        if best and least[name] >= best.seconds:
            why_not[name] = f"more than {cost.by_model(least[name])}"
            continue
        try:
            draft = _with_room(problem, name, methods[name].ways, best.seconds if best else inf)
        except NotApplicable as refusal:
            why_not[name] = str(refusal)
            continue
        best, other = (draft, best) if best is None or draft.seconds < best.seconds else (best, draft)
        if other:
            why_not[other.method] = cost.by_model(other.seconds)
    if best is None:
        if named != "auto":
            raise ValueError(f"method {named!r} does not apply: {why_not[named]}")
        raise ValueError(f"no method applies: {'; '.join(f'{name}: {why_not[name]}' for name in methods)}")
    others = {name: why_not[name] for name in methods if name != best.method} | elsewhere
    return best.plan(tuple(others.items()))


class Draft(NamedTuple):
    """A way to run a method: its loops, their workspace, and what they take by the model."""

    problem: ProductsProblem
    method: str
    way: type[BlockLoop]
    loops: Sequence[BlockLoop]
    sizes: Mapping[str, int]
    seconds: float

    def plan(self, rejected: tuple[tuple[str, str], ...]) -> Plan:
        problem = self.problem
        return problem.planned(
            self.loops,
            self.sizes,
            method=self.method,
            rejected=rejected,
            reason=self.way.reason(problem.geometry),
            price=cost.by_model(self.seconds),
            bytes_moved=problem.minimal_bytes * max(1, len(self.loops)),
            notes=problem.notes + long_loop(sum(loop.turns for loop in self.loops)),
        )


def _with_room(problem: ProductsProblemT, method: str, ways: str | tuple[type[BlockLoop], ...], other: float) -> Draft:
    """The way that takes least; for half as many threads, and so on, where the limit has no room for the blocks of all, and
    as long as that may take less; `other` is what another method takes.
    """
    known: tuple[type[BlockLoop], ...] = import_module(ways).WAYS if isinstance(ways, str) else ways
    to_try = sorted((way for way in known if way.applies(problem)), key=attrgetter("turn_calls"))
    refusal = NotApplicable("there is no way to do it")
    best: Draft | None = None
    while True:
        host = problem.host
        fewer = max(1, min(host.threads // 2, problem.limit // LEAST_SHARE))
        on_fewer = {}
        for way in to_try:
            if best is None or way.turn_calls * cost.CALL < best.seconds:
                try:
                    loops, sizes = way.loops(problem)
                except NotApplicable as reason:
                    refusal = reason
                    continue
                seconds = sum(loop.seconds for loop in loops)
                if host.most:
                    on_fewer[way] = sum(loop.seconds_on(fewer) for loop in loops)
                if best is None or seconds < best.seconds:
                    best = Draft(problem, method, way, loops, sizes, seconds)
        if best is not None:
            # Blocks for fewer threads are other ones, and take less than these do on as many; by how little is known.
            least = FEWER_THREADS * min(best.seconds, other)
            to_try = [way for way in to_try if on_fewer.get(way, inf) < least]
        if best is not None and (host.threads <= 1 or not to_try):
            return best
        if host.threads <= 1:
            raise refusal
        problem = replace(problem, machine=replace(host, threads=fewer))


def long_loop(turns: float) -> tuple[str, ...]:
    """A note where the loop itself takes long, whatever its turns do."""
    seconds = turns * TURN_SECONDS
    return (f"a loop in Python of {turns:,} turns: {seconds:,.0f} s or more",) if seconds >= 1 else ()


# --- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLoop(NumpyStep):
    """A loop over blocks of a problem, each finished while in cache; a subclass is a way to run a method."""

    name: ClassVar[str]
    #: What is done; "{taps}" stands for those along the kernel's outermost axis.
    words: ClassVar[str]

    problem: ProductsProblem
    block: BlockSize

    @classmethod
    @abstractmethod
    def applies(cls, problem: Any) -> bool:
        """Whether this is a way to do it."""

    @classmethod
    @abstractmethod
    def loops(cls, problem: Any) -> tuple[Sequence[Self], Mapping[str, int]]:
        """What runs, and bytes of workspace by name; NotApplicable where the smallest block does not fit the limit."""

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        """What is done, in words."""
        return cls.words.format(taps=geometry.kernel[geometry.outermost])

    @property
    @abstractmethod
    def blocks(self) -> int:
        """How many there are."""

    @property
    def turns(self) -> int:
        """How often something is computed in turn."""
        return self.blocks

    @property
    @abstractmethod
    def work(self) -> float:
        """Seconds of one thread for all blocks, in the loops of NumPy and of BLAS: by the model of `cost`, as all here."""

    #: Calls of NumPy for a turn, or what of Python takes as long.
    turn_calls: ClassVar[float] = 10

    @property
    def calls(self) -> float:
        """All calls, of which Python makes one after the other."""
        return self.turns * self.turn_calls

    @property
    def shares(self) -> int:
        """Parts that threads take one after the other."""
        return self.blocks

    @cached_property
    def seconds(self) -> float:
        return self.seconds_on(self.threads)

    def seconds_on(self, threads: int) -> float:
        """What it takes where so many threads take its blocks."""
        return cost.shared(*self._price, self.shares, threads)

    @cached_property
    def _price(self) -> tuple[float, float]:
        """Seconds of one thread, and calls."""
        return self.work + self.fresh_work, self.calls

    @property
    def fresh_work(self) -> float:
        """What the first touch of all threads' workspace takes, which a call has from the system anew."""
        return cost.touched(self.threads * self.workspace)

    @property
    @abstractmethod
    def workspace(self) -> int:
        """Bytes for one block."""

    @cached_property
    def threads(self) -> int:
        return max(1, min(self.problem.host.threads, self.blocks))

    @cached_property
    def holds_blas(self) -> bool:
        """Whether products have one thread of BLAS, as the loop has: not where the caller asked for that.

        BLAS's threads look for work for a while after a product, on the processors that ours need.
        """
        return self.threads == 1 <= self.problem.host.most and self.largest_product > cost.SMALL_PRODUCT

    @property
    def largest_product(self) -> int:
        """Multiply-adds of a matrix product, at most."""
        return self.geometry.products

    @cached_property
    def geometry(self) -> ConvGeometry:
        return self.problem.geometry

    @cached_property
    def sums_dtype(self) -> np.dtype:
        return dtype_from_name(accumulator(self.problem.dtype))

    @cached_property
    def x_dtype(self) -> np.dtype:
        """The dtype of images in products."""
        return dtype_from_name(accumulator(self.problem.x_dtype))

    @cached_property
    def factor_dtype(self) -> np.dtype:
        """The dtype of what images are multiplied with."""
        return dtype_from_name(accumulator(self.problem.factor_dtype))


class PixelLoop(BlockLoop):
    """A loop over blocks of samples and pixels.

    `block` cuts the (sample, depth, height, width) axes of the convolution's result: whole inner axes, part of one, single
    steps of the outer ones, so that a block is one run of samples or of pixels.
    """

    #: Pixels below which a block is not cut.
    smallest: ClassVar[int] = SMALLEST_BLOCK

    problem: ConvProblem | WeightGradientProblem

    @classmethod
    @abstractmethod
    def aim(cls, problem: Any) -> tuple[int, int]:
        """Pixels that a block should have, and the most samples."""

    @cached_property
    @abstractmethod
    def in_place(self) -> bool:
        """Whether the sums are computed where the result lies."""

    @property
    def index_bytes(self) -> int:
        """Bytes of the index arrays by which a block reads the borders of a padding mode, and of what makes one."""
        if self.geometry.padding_mode == "constant":
            return 0
        return INDEX_ARRAYS * INDEX_BYTES * max(tile_size(self.geometry, self.block[1:]))

    @cached_property
    def part(self) -> int:
        """Groups that are computed at a time, so that they stay in cache."""
        return self.geometry.groups

    @classmethod
    def sharers(cls, problem: Any) -> int:
        """Threads that pixels are divided among."""
        return int(problem.host.threads)

    @classmethod
    def fitted(cls, problem: Any, fixed: int, limit: int) -> Self:
        """Blocks of about the size aimed at, or the largest that keep within the limit beside `fixed` bytes."""

        def needed(block: BlockSize) -> int:
            loop = cls(problem, block)
            return fixed + problem.host.threads * (loop.workspace + loop.index_bytes)

        pixels, most_samples = cls.aim(problem)
        pixels = share_of_pixels(problem.geometry, cls.sharers(problem), pixels)
        return cls(problem, largest_block(problem.geometry, needed, limit, pixels, cls.smallest, most_samples))

    @cached_property
    def inputs(self) -> list[tuple[str, slice]]:
        """The name of each input, and its channels of their concatenation."""
        geometry = self.geometry
        starts = zip(self.problem.xs, geometry.channel_offsets, geometry.channels)
        return [(x.name, slice(first, first + count)) for x, first, count in starts]

    @cached_property
    def blocks(self) -> int:
        axes = (self.geometry.batch, *self.geometry.out_size)
        is_empty = 0 in axes or self.geometry.out_channels == 0
        return 0 if is_empty else prod(-(-extent // part) for extent, part in zip(axes, self.block))

    @cached_property
    def rounds(self) -> int:
        """Times that scratch memory is filled."""
        return self.blocks * -(-self.geometry.groups // self.part)

    @property
    def turns(self) -> int:
        return self.rounds

    @property
    def tile_work(self) -> float:
        """What it takes to read all tiles; none is copied where no border is read."""
        geometry, x = self.geometry, self.problem.xs[0] if self.problem.xs else None
        if not any(geometry.before + geometry.after) and x is not None and x.dtype == self.x_dtype.name:
            return 0.0
        shape = tile_shape(geometry, geometry.in_channels, self.block)
        return cost.copied(self.blocks * prod(shape), shape[4], self.problem.x_dtype)

    def columns_work(self, elements: float) -> float:
        """What it takes to write so many elements of columns."""
        return cost.copied(elements, self.block[3], self.problem.x_dtype, self.geometry.stride[2] > 1)

    @cached_property
    def each_block(self) -> Blocks:
        return Blocks(self.geometry, self.block, self.x_dtype.itemsize)

    @cached_property
    def transform_of(self) -> Callable[[Mapping[str, Any]], Transform] | None:
        if not self.problem.prologue:
            return None
        from cupyconv.numpy.prologue import transform_of  # imported for those that have one

        return partial(transform_of, self.problem.prologue, dtype=self.x_dtype)

    def images(self, arrays: Mapping[str, Any], scratch: Scratch) -> Images:
        """The inputs of a run."""
        transform = self.transform_of(arrays) if self.transform_of else None
        return Images([(five_axes(arrays[name]), channels) for name, channels in self.inputs], scratch, transform)

    def __str__(self) -> str:
        prologue = f" of {self.problem.prologue}" if self.problem.prologue else ""
        sums = "the result" if self.in_place else self.sums_dtype
        blocks = block_words(self.blocks, self.block, "n, d, h, w", self.threads)
        return f"loop     {self.name}{prologue}, sums in {sums}: {blocks}"


class ConvLoop(PixelLoop):
    """A convolution block by block; a subclass is a way to a block's sums.

    A new one defines `name`, `words`, `applies`, `aim`, `workspace`, and what stands here above "What all have in common";
    its module lists it in ``WAYS`` and has an entry in `METHODS`.
    """

    #: Bytes that each thread needs: with less, its calls are so short that threads wait for each other's.
    thread_bytes: ClassVar[int] = 0

    problem: ConvProblem

    @cached_property
    def in_place(self) -> bool:
        return result_takes_sums(self.problem)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        """Bytes of the weight as `arranged` makes it of a C-ordered one in the dtype of products; 0 for a view."""
        return 0

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """The weight, (groups, outputs per group, K_g), as `sums` takes it."""
        return weight

    @abstractmethod
    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """A block's sums (groups, outputs per group, samples, depth, height, width), of any shape where they are the result."""

    # What all have in common.

    @property
    def store_work(self) -> float:
        """What the epilogue takes: passes over the sums."""
        problem = self.problem
        passes = (not self.in_place) + sum(map(bool, (problem.bias, problem.residual, problem.pre, problem.activation)))
        return passes * cost.added(prod(problem.out.shape), problem.out.dtype)

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums, unless they are the result, and of the temporary an activation takes."""
        arrays = int(bool(self.problem.activation)) if self.in_place else 2
        return arrays * prod(self.block) * sums_per_pixel(self.problem)

    @property
    def tile_bytes(self) -> int:
        """Bytes of what a block's columns are copied from."""
        return 0

    @classmethod
    def loops(cls, problem: ConvProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if cls.thread_bytes and problem.host.threads * cls.thread_bytes > problem.limit:
            problem = replace(problem, machine=replace(problem.host, threads=max(1, problem.limit // cls.thread_bytes)))
        copied = weight_copy(problem)
        weight = copied + cls.weight_bytes(problem)
        loop = cls.fitted(problem, weight + 2 * Plan.ALIGNMENT, problem.limit_with(copied))
        blocks = loop.threads * (loop.workspace + loop.index_bytes)
        return [loop] if loop.blocks else [], {"weight": weight, "blocks": blocks}

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        return self.geometry.groups, self.geometry.group_outputs, self.geometry.reduction

    @cached_property
    def products_are_result(self) -> bool:
        """Whether there is nothing to do to the sums, but for what arrays are given."""
        return self.in_place and not self.problem.activation

    @cached_property
    def fresh(self) -> Scratch | None:
        """Scratch memory that serves all runs: where it is filled once, nothing is kept in it."""
        return Scratch(self.x_dtype, 1) if self.rounds <= 1 else None

    @cached_property
    def activate(self) -> Callable[[np.ndarray], None] | None:
        if not self.problem.activation:
            return None
        from cupyconv.numpy.activations import activate

        return partial(activate, activation=self.problem.activation)

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None) -> None:
        """Compute the result; arguments and result are given by name, and memory that other loops use too."""
        scratch = scratch or self.fresh or Scratch(self.x_dtype, self.rounds)
        finish = ConvRun(self, arrays, scratch).finish
        if self.threads > 1 or self.holds_blas:
            from cupyconv.numpy.threads import in_threads

            in_threads(self.threads, finish, self.each_block, self.holds_blas)
            return
        for block in self.each_block:
            finish(block)


def temporaries(geometry: Windows, prologue: Prologue) -> int:
    """The number of temporary copies of what is read: one where borders are gathered, one more for a prologue's activation."""
    return (geometry.padding_mode != "constant") + bool(prologue.activation)


def sums_per_pixel(problem: ConvProblem) -> int:
    """Bytes of a pixel's sums."""
    return problem.geometry.out_channels * ITEMSIZE[accumulator(problem.dtype)]


def one_tap_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Bytes of what one tap reads for a block."""
    geometry = problem.geometry
    return geometry.in_channels * prod(block) * item * (1 + temporaries(geometry, problem.prologue))


def taps_at_a_time(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """The most taps whose columns, and what they are copied from, take no more than a short call's."""
    geometry, most = problem.geometry, min(SHORT_CALL, problem.limit // 8)
    taps = geometry.taps
    while taps > 1 and box_bytes(problem, block, item, taps) > most:
        taps = min(taps - 1, taps // 2)
    return max(1, taps)


def box_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int, taps: int) -> int:
    """Bytes of the columns of at most so many taps of a block, and of that part of the weight."""
    if taps == 1:
        return one_tap_bytes(problem, block, item)
    box, geometry = box_within(problem.geometry.kernel, taps), problem.geometry
    weight = geometry.out_channels * geometry.group_channels * prod(box) * ITEMSIZE[accumulator(problem.dtype)]
    return columns_bytes(problem, block, item, with_taps(geometry, tuple(map(range, box)))) + weight


def columns_bytes(
    problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int, geometry: ConvGeometry | None = None
) -> int:
    """Bytes of a block's columns, and of the tile that they are copied from; of a geometry in place of the problem's."""
    geometry = geometry or problem.geometry
    columns, has_tile = prod(columns_shape(geometry, block)), geometry.taps > 1
    read = prod(tile_shape(geometry, geometry.in_channels, block)) if has_tile else columns
    return (columns + read * (has_tile + temporaries(geometry, problem.prologue))) * item


def inputs_are_columns(problem: ConvProblem | WeightGradientProblem) -> bool:
    """Whether products read the inputs where they lie: a kernel of one tap, and pixels or channels side by side."""
    geometry = problem.geometry
    return (
        geometry.is_pointwise
        and geometry.pixels >= LONE_PIXELS
        and not problem.prologue
        and all(x.dtype == accumulator(problem.x_dtype) and is_matrix(x) for x in problem.xs)
    )


def result_takes_sums(problem: ConvProblem) -> bool:
    """Whether products can be written where the result lies.  A residual may lie there too: it is read later."""
    return (
        problem.out.dtype == accumulator(problem.out.dtype)
        and problem.residual is None
        and problem.is_one_kind
        and problem.out.pixel_stride == 1
        and is_matrix(problem.out)
    )


def is_matrix(image: Operand) -> bool:
    """Whether a sample is a matrix that BLAS takes as it lies, channel by channel or pixel by pixel."""
    pixel_stride, channels = image.pixel_stride, image.shape[1]
    if pixel_stride is None:
        return False
    if pixel_stride == 1 and (channels == 1 or image.stride_c >= image.pixels):
        return channels == 1 or channels * image.stride_c < BLAS_REACH
    reached = min(image.pixels, PRODUCT_BLOCK // image.itemsize) * pixel_stride
    return image.stride_c == 1 and pixel_stride >= channels and reached < BLAS_REACH


def weight_copy(problem: ConvProblem | TransposedProblem) -> int:
    """Bytes of the weight where it must be copied: another dtype, another order, or parts taken apart."""
    weight = problem.weight
    as_it_lies = (
        weight.dtype == accumulator(problem.weight_dtype)
        and weight.strides == c_strides(weight.shape)
        and not problem.factor_alone_is_complex
    )
    return 0 if as_it_lies else copy_bytes(weight, problem.weight_dtype)


def copy_bytes(weight: Operand, dtype: str) -> int:
    """Bytes of a copy of the weight in the dtype that products of `dtype` compute in."""
    return prod(weight.shape) * ITEMSIZE[accumulator(real_part(dtype))] * (1 + is_complex(dtype))


# --- runs -----------------------------------------------------------------------------------------------------


class ConvRun:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, loop: ConvLoop, arrays: Mapping[str, Any], scratch: Scratch) -> None:
        self.loop, self.geometry = loop, loop.geometry
        self.images = loop.images(arrays, scratch)
        self.products = loop.fresh or Scratch(loop.sums_dtype, loop.rounds)
        self.out = five_axes(arrays["out"])
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        self.residual = five_axes(arrays["residual"]) if "residual" in arrays else None
        self.bias = None
        if "bias" in arrays:
            bias = arrays["bias"]
            if not bias.dtype == self.out.dtype == loop.sums_dtype:
                bias = bias.astype(self.out.dtype).astype(loop.sums_dtype)
            self.bias = bias[:, None, None, None]
        matrix = arrays["weight"].reshape(loop.weight_shape)
        if matrix.dtype != loop.factor_dtype:
            matrix = matrix.astype(loop.factor_dtype)
        self.weight = loop.arranged(matrix)
        self.products_are_result = loop.products_are_result and self.bias is None and self.residual is None

    def finish(self, block: Block) -> None:
        """Compute a block of the result."""
        sums = self.loop.sums(self, block)
        if not self.products_are_result:
            self.store(block, sums)

    def store(self, block: Block, sums: np.ndarray) -> None:
        """The epilogue of a block's sums."""
        sums = sums.reshape(block.outputs.stop - block.outputs.start, *block.size).swapaxes(0, 1)
        if self.bias is not None:
            sums += self.bias[block.outputs]
        if self.residual is not None:
            residual = block.of(self.residual)
            # Rounded to the result's dtype first, as an argument of that dtype would have been.
            sums += residual if residual.dtype == self.out.dtype else residual.astype(self.out.dtype)
        if self.pre is not None:
            block.of(self.pre)[...] = sums
        if self.loop.activate:
            self.loop.activate(sums)
        if not self.loop.in_place:
            block.of(self.out)[...] = sums
