"""Convolution on NumPy: its methods, and what all ways to run them have in common.

A way says which problems it is for, how large a block should be, what memory a block takes, and how its sums are computed.
The loop over blocks, the epilogue and the store are the same for all:

::

    x_0, x_1, ...   --a way-->   sums             --epilogue-->   block of y
    any strides,                 [g, O_g, pixels]                 any strides,
    any dtype                    dtype of the sums                rounded once

`plan_conv` chooses (`choice`); the plan has a `ConvLoop` (`block_loops`), whose `ConvRun` finishes one block after the other.
"""

from __future__ import annotations

from _thread import allocate_lock
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, kept_scratch
from cupyconv.numpy.block_loops import PixelLoop
from cupyconv.numpy.choice import FFT, WINOGRAD, Method, choose, winograd_refusal
from cupyconv.numpy.windows import Block, BlockSize, columns_shape, five_axes, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, Windows, box_within
from cupyconv.problem.kept import forms_of
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import (
    ConvProblem,
    Prologue,
    TransposedProblem,
    WeightGradientProblem,
    without_empty_inputs,
)

#: Bytes of columns a block aims at where products dominate, where they are copied and read at once, and where memory does.
PRODUCT_BLOCK = 8 << 20
CACHE_BLOCK = 1 << 20
MEMORY_BLOCK = 512 << 10
#: Elements from a matrix's first to its last: beyond, OpenBLAS's kernels for small products count wrong and crash.
BLAS_REACH = 1 << 31
#: Bytes of one tap's columns below which a product takes several taps: NumPy's calls would take longer than it.
SHORT_CALL = 256 << 10
#: Pixels from which one sample fills a product; smaller images share one, through columns.
LONE_PIXELS = 256
#: Bytes of what is made of a weight that never changes, up to which it is kept from run to run.
KEPT_CONSTANT = 16 << 20
#: Bytes that a small convolution may keep from call to call: with more, what runs it would be too large to be kept.
KEPT_MEMORY = 2 << 20

#: Every method of a convolution; a depthwise one has its own (`depthwise`).
METHODS = {
    "winograd": WINOGRAD,
    "fft": FFT,
    "gemm": Method("cupyconv.numpy.gemm"),
    "direct": Method("cupyconv.numpy.direct", at_least=cost.least_direct),
}
#: The same of several inputs.
MERGING = METHODS | {"gemm": Method("cupyconv.numpy.merged")}
#: Those that are other ones for several groups; and for one, where Winograd's method saves few products, or is none.
GROUPED = {"gemm": Method("cupyconv.numpy.long_rows")}
SHIFTED = {"gemm": Method("cupyconv.numpy.shifts")}


def plan_conv(problem: ConvProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    problem = without_empty_inputs(problem)
    if problem.geometry.is_depthwise:
        from cupyconv.numpy.depthwise import DEPTHWISE  # imported by those that are

        return choose(problem, DEPTHWISE)
    geometry = problem.geometry
    if geometry.groups > 1:
        return choose(problem, METHODS | GROUPED)
    if len(problem.xs) > 1:
        return choose(problem, MERGING)
    saves_few = winograd_refusal(problem) or sum(taps > 1 for taps in geometry.kernel) == 1
    return choose(problem, METHODS | SHIFTED if saves_few else METHODS)


def plan_like(plan: Plan, problem: ConvProblem) -> Plan:
    """The plan of a problem that is computed the way that one like it is, where that is possible: no choice is made again."""
    ways = tuple({type(step) for step in plan.steps if isinstance(step, ConvLoop)})
    try:
        return choose(replace(problem, method=plan.method), {plan.method: Method(ways)})
    except ValueError:
        return plan_conv(problem)


# --- plans ----------------------------------------------------------------------------------------------------


class ConvLoop(PixelLoop):
    """A convolution block by block; a subclass is a way to a block's sums.

    A new one defines `name`, `words`, `applies`, `aim`, `workspace`, and what stands here above "What all have in common";
    its module lists it in ``WAYS`` and has an entry in `METHODS`.
    """

    #: Bytes that each thread needs: with less, its calls are so short that threads wait for each other's.
    thread_bytes: ClassVar[int] = 0
    #: Whether the weight is arranged when the first block asks for it, in one thread.
    prepares_late: ClassVar[bool] = False

    problem: ConvProblem

    @cached_property
    def in_place(self) -> bool:
        return result_takes_sums(self.problem)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        """Bytes of the weight as `arranged` makes it of a C-ordered one in the dtype of products; 0 for a view."""
        return 0

    @cached_property
    def form(self) -> str:
        """Equal where loops `arrange` a weight alike."""
        return repr(self)

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """The weight, (groups, outputs per group, K_g), as `sums` takes it."""
        return weight

    @abstractmethod
    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """A block's sums (groups, outputs per group, samples, depth, height, width), of any shape where they are the result."""

    # What all have in common.

    def place_of_sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """Where a block's sums are written: in the result, if they may lie there, else in an array of their own."""
        if self.in_place:
            return block.of(run.out).swapaxes(0, 1).reshape(block.sums_shape)
        return np.empty(block.sums_shape, self.sums_dtype)

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
    def beside_bytes(self) -> int:
        """Bytes of what lies beside a block's largest array in the memory of `images`, as the tile beside its columns."""
        return 0

    @classmethod
    def loops(cls, problem: ConvProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if cls.thread_bytes and problem.host.threads * cls.thread_bytes > problem.limit:
            problem = replace(problem, machine=replace(problem.host, threads=max(1, problem.limit // cls.thread_bytes)))
        copied = weight_copy(problem)
        weight = 0 if kept_weight(cls, problem) else copied + cls.weight_bytes(problem)
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

    fresh_work = 0.0  # memory is kept

    @property
    def memory(self) -> Scratch:  # no part of the loop, which would count as kept with it
        """What runs write; kept, since the first touch of a page takes longer than much that is done with it."""
        return kept_scratch(self.x_dtype)

    @cached_property
    def activate(self) -> Callable[[np.ndarray], None] | None:
        if not self.problem.activation:
            return None
        from cupyconv.numpy.activations import activate

        return partial(activate, activation=self.problem.activation)

    @property
    def kept_bytes(self) -> int:
        return kept_weight(type(self), self.problem)

    @property
    def kept_memory(self) -> int:
        """Bytes of the memory that what `executable` gives keeps from call to call."""
        return 0

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        """Compute the result; arguments and result are given by name, and memory that other loops use too."""
        scratch = scratch or self.memory
        finish = (run_of or ConvRun)(self, arrays, scratch).finish
        if self.threads > 1 or self.holds_blas:
            from cupyconv.numpy.threads import in_threads

            in_threads(self.threads, finish, self.each_block, self.holds_blas)
            return
        for block in self.each_block:
            finish(block)


def kept_weight(way: type[ConvLoop], problem: ConvProblem) -> int:
    """Bytes of what a way makes of a weight that never changes, where that is kept."""
    if not problem.weight_is_constant:
        return 0
    made = weight_copy(problem) + way.weight_bytes(problem)
    return made if made <= KEPT_CONSTANT else 0


# --- runs -----------------------------------------------------------------------------------------------------


class ConvRun:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, loop: ConvLoop, arrays: Mapping[str, Any], scratch: Scratch) -> None:
        self.loop, self.geometry = loop, loop.geometry
        self.images = loop.images(arrays, scratch)
        self.products = loop.memory
        self.out = five_axes(arrays["out"])
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        self.residual = five_axes(arrays["residual"]) if "residual" in arrays else None
        self.bias = None
        if "bias" in arrays:
            bias = arrays["bias"]
            if not bias.dtype == self.out.dtype == loop.sums_dtype:
                bias = bias.astype(self.out.dtype).astype(loop.sums_dtype)
            self.bias = bias[:, None, None, None]
        self._weight, self._is_prepared, self._lock = arrays["weight"], False, allocate_lock()
        self.weight: Any = None
        if not loop.prepares_late:
            self.prepare()
        self.products_are_result = loop.products_are_result and self.bias is None and self.residual is None

    def prepare(self) -> None:
        """The weight, which all blocks share.  One thread does it; by then another has been woken."""
        with self._lock:
            if self._is_prepared:
                return
            kept = None
            if self.loop.kept_bytes and (forms := forms_of(self._weight)):
                kept = forms.keep(self.loop.form, partial(self._arranged, self._weight))
            self.weight = self._arranged(self._weight) if kept is None else kept
            self._is_prepared = True

    def _arranged(self, weight: np.ndarray) -> Any:
        # In C order, as it is counted: NumPy 2.1 gives BLAS no matrix whose elements are apart, and takes 40 times longer.
        matrix = weight.reshape(self.loop.weight_shape).astype(self.loop.factor_dtype, "C", copy=False)
        return self.loop.arranged(matrix)

    def finish(self, block: Block) -> None:
        """Compute a block of the result."""
        if not self._is_prepared:
            self.prepare()
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
            self.write(self.pre, block, sums)
        if self.loop.activate:
            self.loop.activate(sums)
        if not self.loop.in_place:
            self.write(self.out, block, sums)

    def write(self, image: np.ndarray, block: Block, sums: np.ndarray) -> None:
        """Write a block's sums (samples, outputs, depth, height, width) to an image of the result's size."""
        block.of(image)[...] = sums


#: What makes a run of a loop, its arrays, and memory.
RunOf = Callable[[ConvLoop, Mapping[str, Any], Scratch], ConvRun]


# --- what lies in memory as products take it, and what a copy takes -------------------------------------------


def temporaries(geometry: Windows, prologue: Prologue) -> int:
    """The number of temporary copies of what is read: one where borders are gathered, and one where a prologue does more to
    what it has written, which NumPy copies where rows have gaps.
    """
    return (geometry.padding_mode != "constant") + bool(prologue.activation or (prologue.scale and prologue.shift))


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
    # A box of at most so many taps has a quarter of them at the least: of many it need not be made to see that it is large.
    too_many = 4 * most // (geometry.in_channels * prod(block) * item or 1)
    while taps > 1 and (taps > too_many + 4 or box_bytes(problem, block, item, taps) > most):
        taps = min(taps - 1, taps // 2)
    return max(1, taps)


def box_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int, taps: int) -> int:
    """Bytes of the columns of at most so many taps of a block, and of that part of the weight."""
    if taps == 1:
        return one_tap_bytes(problem, block, item)
    box, geometry = box_within(problem.geometry.kernel, taps), problem.geometry
    weight = geometry.out_channels * geometry.group_channels * prod(box) * ITEMSIZE[accumulator(problem.dtype)]
    return columns_bytes(problem, block, item, geometry.with_taps(tuple(map(range, box)))) + weight


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
        and (geometry.pixels >= LONE_PIXELS or geometry.batch == 1)
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


def weight_is_factor(problem: ConvProblem | TransposedProblem) -> bool:
    """Whether products read the weight where it lies: in the dtype that they compute in, in C order."""
    weight = problem.weight
    return weight.dtype == accumulator(problem.weight_dtype) and weight.strides == c_strides(weight.shape)


def weight_copy(problem: ConvProblem | TransposedProblem) -> int:
    """Bytes of copies of the weight: one where it has another dtype or order, and one where parts are taken apart."""
    copies = (not weight_is_factor(problem)) + problem.factor_alone_is_complex
    return copies * copy_bytes(problem.weight, problem.weight_dtype)


def copy_bytes(weight: Operand, dtype: str) -> int:
    """Bytes of a copy of the weight in the dtype that products of `dtype` compute in."""
    return prod(weight.shape) * ITEMSIZE[accumulator(real_part(dtype))] * (1 + is_complex(dtype))
