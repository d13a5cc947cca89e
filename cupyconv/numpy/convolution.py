"""Convolution on NumPy: its methods, and the code that all implementations share.

An implementation states which problems it supports, its block size and its memory per block, and computes a block's
sums.  The loop over blocks, the epilogue and the store are the same for all implementations:

::

    x_0, x_1, ...   --sums-->   sums             --epilogue-->   block of y
    any strides,                [g, O_g, pixels]                 any strides,
    any dtype                   dtype of the sums                rounded once

`plan_conv` chooses an implementation (see `choice`), a `ConvLoop`.  Its `ConvRun` computes one block after another.
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
from cupyconv.numpy.backend import Scratch, cached_scratch
from cupyconv.numpy.block_loops import PixelLoop
from cupyconv.numpy.choice import FFT, WINOGRAD, Method, choose, winograd_refusal
from cupyconv.numpy.windows import Block, BlockSize, columns_shape, five_axes, has_gathered, tile_shape
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.caches import forms_of
from cupyconv.problem.geometry import ConvGeometry, Windows, box_within
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import (
    ConvProblem,
    Prologue,
    TransposedProblem,
    WeightGradientProblem,
    without_empty_inputs,
)

#: Target bytes of a block's columns if products dominate, if the copied columns are read at once, if memory dominates.
PRODUCT_BLOCK = 8 << 20
CACHE_BLOCK = 1 << 20
MEMORY_BLOCK = 512 << 10
#: Elements from first to last of a matrix.  Beyond this, OpenBLAS's kernels for small products miscount and crash.
BLAS_REACH = 1 << 31
#: Bytes of one tap's columns below which a product covers several taps, or NumPy's calls would take longer than it.
SHORT_CALL = 256 << 10
#: Pixels from which one sample fills a product.  Smaller images share a product, through columns.
LONE_PIXELS = 256
#: Largest arranged weight, in bytes, that is cached between runs if the weight is constant.
CACHED_CONSTANT = 16 << 20
#: Bytes that a small convolution may cache between calls.  With more, its runner would be too large to cache.
CACHED_MEMORY = 2 << 20

#: All methods of a convolution.  Depthwise convolutions have their own table (see `depthwise`).
METHODS = {
    "winograd": WINOGRAD,
    "fft": FFT,
    "gemm": Method("cupyconv.numpy.gemm"),
    "direct": Method("cupyconv.numpy.direct", lower_bound=cost.least_direct),
}
#: The methods for several inputs.
MERGING = METHODS | {"gemm": Method("cupyconv.numpy.merged")}
#: Outputs so few that Winograd's transforms of the inputs take longer than the products that they save.
FEW_OUTPUTS = 4
#: Entries that replace those of `METHODS`: for several groups; for one group if Winograd saves few products or none, or
#: if there are few outputs.
GROUPED = {"gemm": Method("cupyconv.numpy.long_rows")}
SHIFTED = {"gemm": Method("cupyconv.numpy.shifts")}


def plan_conv(problem: ConvProblem) -> Plan:
    """Plan the convolution with ``problem.method``; raise ValueError if a named method does not apply."""
    problem = without_empty_inputs(problem)
    if problem.geometry.is_depthwise:
        from cupyconv.numpy.depthwise import DEPTHWISE  # imported only for depthwise convolutions

        return choose(problem, DEPTHWISE)
    geometry = problem.geometry
    if geometry.groups > 1:
        return choose(problem, METHODS | GROUPED)
    if len(problem.xs) > 1:
        return choose(problem, MERGING)
    saves_few = winograd_refusal(problem) or sum(taps > 1 for taps in geometry.kernel) == 1
    is_shifted = saves_few or geometry.out_channels <= FEW_OUTPUTS
    return choose(problem, METHODS | SHIFTED if is_shifted else METHODS)


def plan_like(plan: Plan, problem: ConvProblem) -> Plan:
    """Plan `problem` with the method and implementations of `plan`; choose again only if these do not apply."""
    implementations = tuple({type(step) for step in plan.steps if isinstance(step, ConvLoop)})
    try:
        return choose(replace(problem, method=plan.method), {plan.method: Method(implementations)})
    except ValueError:
        return plan_conv(problem)


# --- plans ----------------------------------------------------------------------------------------------------


class ConvLoop(PixelLoop):
    """A convolution block by block; a subclass is one implementation, which computes the sums of a block.

    A new one defines `name`, `description`, `applies`, `aim`, `workspace`, `sums`, and overrides what it needs of the
    members above the comment "Shared by all implementations".  Its module lists it in ``IMPLEMENTATIONS`` and has an
    entry in `METHODS`.
    """

    #: Workspace in bytes that each thread needs.  With less, calls are so short that threads wait for each other.
    thread_bytes: ClassVar[int] = 0
    #: Whether one thread arranges the weight when the first block asks for it.
    prepares_late: ClassVar[bool] = False

    problem: ConvProblem

    @cached_property
    def in_place(self) -> bool:
        return result_takes_sums(self.problem)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        """Bytes of the array that `arranged` makes from a C-contiguous weight in the compute dtype; 0 for a view."""
        return 0

    @cached_property
    def form(self) -> str:
        """A cache key that is equal for loops that arrange a weight in the same way."""
        return repr(self)

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight, (groups, outputs per group, K_g), in the layout that `sums` reads."""
        return weight

    @abstractmethod
    def sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """Compute a block's sums (groups, outputs per group, samples, d, h, w); any shape if they are the result."""

    # Shared by all implementations.

    def place_of_sums(self, run: ConvRun, block: Block) -> np.ndarray:
        """Return the array for a block's sums: a view of the result if they may be stored there, else a new array."""
        if self.in_place:
            return block.of(run.out).swapaxes(0, 1).reshape(block.sums_shape)
        return np.empty(block.sums_shape, self.sums_dtype)

    @property
    def store_work(self) -> float:
        """Estimated time of the epilogue: one pass over the sums for each of its operations."""
        problem = self.problem
        passes = (not self.in_place) + sum(map(bool, (problem.bias, problem.residual, problem.pre, problem.activation)))
        return passes * cost.added(prod(problem.out.shape), problem.out.dtype)

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums and of one temporary; if the sums are in place, only of an activation's temporary."""
        arrays = int(bool(self.problem.activation)) if self.in_place else 2
        return arrays * prod(self.block) * sums_per_pixel(self.problem)

    @property
    def extra_bytes(self) -> int:
        """Bytes in the scratch memory of `images` besides a block's largest array, such as the tile besides columns."""
        return 0

    @classmethod
    def loops(cls, problem: ConvProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        if cls.thread_bytes and problem.host.threads * cls.thread_bytes > problem.limit:
            problem = replace(problem, machine=replace(problem.host, threads=max(1, problem.limit // cls.thread_bytes)))
        copied = weight_copy(problem)
        weight = 0 if cached_weight_bytes(cls, problem) else copied + cls.weight_bytes(problem)
        loop = cls.fitted(problem, weight + 2 * Plan.ALIGNMENT, problem.limit_with(copied))
        blocks = loop.threads * (loop.workspace + loop.index_bytes)
        return [loop] if loop.blocks else [], {"weight": weight, "blocks": blocks}

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        return self.geometry.groups, self.geometry.group_outputs, self.geometry.reduction

    @cached_property
    def products_are_result(self) -> bool:
        """Whether the sums are the result, unless a run has a bias or a residual."""
        return self.in_place and not self.problem.activation

    fresh_work = 0.0  # memory is reused

    @property
    def memory(self) -> Scratch:  # not stored in the loop: a cache would count it as part of the loop
        """Scratch memory, reused because the first touch of a page takes longer than much of the work on it."""
        return cached_scratch(self.x_dtype)

    @cached_property
    def activate(self) -> Callable[[np.ndarray], None] | None:
        if not self.problem.activation:
            return None
        from cupyconv.numpy.activations import activate

        return partial(activate, activation=self.problem.activation)

    @property
    def cached_bytes(self) -> int:
        return cached_weight_bytes(type(self), self.problem)

    @property
    def cached_memory(self) -> int:
        """Bytes of memory that the function returned by `executable` keeps between calls."""
        return 0

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None, run_of: RunOf | None = None) -> None:
        """Compute the result.  `arrays` has arguments and results by name; other loops may use the same `scratch`."""
        scratch = scratch or self.memory
        finish = (run_of or ConvRun)(self, arrays, scratch).finish
        if self.threads > 1 or self.holds_blas:
            from cupyconv.numpy.threads import in_threads

            in_threads(self.threads, finish, self.each_block, self.holds_blas)
            return
        for block in self.each_block:
            finish(block)


def cached_weight_bytes(implementation: type[ConvLoop], problem: ConvProblem) -> int:
    """Bytes of the arrays that an implementation makes from a constant weight and caches; 0 if it caches none."""
    if not problem.weight_is_constant:
        return 0
    made = weight_copy(problem) + implementation.weight_bytes(problem)
    return made if made <= CACHED_CONSTANT else 0


# --- runs -----------------------------------------------------------------------------------------------------


class ConvRun:
    """One run of a loop: its arrays, viewed with five axes, and the state that all blocks share."""

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
        """Arrange the weight for all blocks, in one thread; if it `prepares_late`, other threads are awake by then."""
        with self._lock:
            if self._is_prepared:
                return
            kept = None
            if self.loop.cached_bytes and (forms := forms_of(self._weight)):
                kept = forms.keep(self.loop.form, partial(self._arranged, self._weight))
            self.weight = self._arranged(self._weight) if kept is None else kept
            self._is_prepared = True

    def _arranged(self, weight: np.ndarray) -> Any:
        # In C order, as its bytes are counted.  NumPy 2.1 passes no strided matrix to BLAS and is 40 times slower.
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
        """Apply the epilogue to a block's sums, and store the result."""
        sums = sums.reshape(block.outputs.stop - block.outputs.start, *block.size).swapaxes(0, 1)
        if self.bias is not None:
            sums += self.bias[block.outputs]
        if self.residual is not None:
            residual = block.of(self.residual)
            # The residual is first rounded to the result's dtype, as an argument of that dtype would be.
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


#: Type of a function that makes a run from a loop, its arrays and scratch memory.
RunOf = Callable[[ConvLoop, Mapping[str, Any], Scratch], ConvRun]


# --- operands that products read in place, and the sizes of copies --------------------------------------------


def temporaries(geometry: Windows, prologue: Prologue) -> int:
    """Return how many temporary copies of the elements read there are.

    One is for gathered borders, and one for a prologue that writes elements twice: NumPy copies rows with gaps.
    """
    return has_gathered(geometry) + bool(prologue.activation or (prologue.scale and prologue.shift))


def sums_per_pixel(problem: ConvProblem) -> int:
    """Bytes of the sums of one pixel."""
    return problem.geometry.out_channels * ITEMSIZE[accumulator(problem.dtype)]


def one_tap_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Bytes of the elements that one tap reads for a block, with temporary copies."""
    geometry = problem.geometry
    return geometry.in_channels * prod(block) * item * (1 + temporaries(geometry, problem.prologue))


def taps_at_a_time(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int) -> int:
    """Return how many taps a product covers: as many as `SHORT_CALL` bytes and an eighth of the limit allow."""
    geometry, most = problem.geometry, min(SHORT_CALL, problem.limit // 8)
    taps = geometry.taps
    # A box within `taps` taps has at least a quarter of them.  So a large `taps` is rejected without making the box.
    too_many = 4 * most // (geometry.in_channels * prod(block) * item or 1)
    while taps > 1 and (taps > too_many + 4 or box_bytes(problem, block, item, taps) > most):
        taps = min(taps - 1, taps // 2)
    return max(1, taps)


def box_bytes(problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int, taps: int) -> int:
    """Bytes of a block's columns for a box of at most `taps` taps, and of the weight for these taps."""
    if taps == 1:
        return one_tap_bytes(problem, block, item)
    box, geometry = box_within(problem.geometry.kernel, taps), problem.geometry
    weight = geometry.out_channels * geometry.group_channels * prod(box) * ITEMSIZE[accumulator(problem.dtype)]
    return columns_bytes(problem, block, item, geometry.with_taps(tuple(map(range, box)))) + weight


def columns_bytes(
    problem: ConvProblem | WeightGradientProblem, block: BlockSize, item: int, geometry: ConvGeometry | None = None
) -> int:
    """Bytes of a block's columns and of the tile that they are copied from; `geometry` overrides the problem's."""
    geometry = geometry or problem.geometry
    columns, has_tile = prod(columns_shape(geometry, block)), geometry.taps > 1
    read = prod(tile_shape(geometry, geometry.in_channels, block)) if has_tile else columns
    return (columns + read * (has_tile + temporaries(geometry, problem.prologue))) * item


def inputs_are_columns(problem: ConvProblem | WeightGradientProblem) -> bool:
    """Whether products read the inputs in place: the kernel has one tap, and pixels or channels are contiguous."""
    geometry = problem.geometry
    return (
        geometry.is_pointwise
        and (geometry.pixels >= LONE_PIXELS or geometry.batch == 1)
        and not problem.prologue
        and all(x.dtype == accumulator(problem.x_dtype) and is_matrix(x) for x in problem.xs)
    )


def result_takes_sums(problem: ConvProblem) -> bool:
    """Whether the result can take the products; not with a residual, which may share its memory and is read later."""
    return (
        problem.out.dtype == accumulator(problem.out.dtype)
        and problem.residual is None
        and problem.is_one_kind
        and problem.out.pixel_stride == 1
        and is_matrix(problem.out)
    )


def is_matrix(image: Operand) -> bool:
    """Whether BLAS can read a sample in place as a matrix, channel by channel or pixel by pixel."""
    pixel_stride, channels = image.pixel_stride, image.shape[1]
    if pixel_stride is None:
        return False
    if pixel_stride == 1 and (channels == 1 or image.stride_c >= image.pixels):
        return channels == 1 or channels * image.stride_c < BLAS_REACH
    reached = min(image.pixels, PRODUCT_BLOCK // image.itemsize) * pixel_stride
    return image.stride_c == 1 and pixel_stride >= channels and reached < BLAS_REACH


def weight_is_factor(problem: ConvProblem | TransposedProblem) -> bool:
    """Whether products read the weight in place: it is C-contiguous and has the compute dtype."""
    weight = problem.weight
    return weight.dtype == accumulator(problem.weight_dtype) and weight.strides == c_strides(weight.shape)


def weight_copy(problem: ConvProblem | TransposedProblem) -> int:
    """Bytes of copies of the weight: one if its dtype or order changes, and one if complex parts are separated."""
    copies = (not weight_is_factor(problem)) + problem.factor_alone_is_complex
    return copies * copy_bytes(problem.weight, problem.weight_dtype)


def copy_bytes(weight: Operand, dtype: str) -> int:
    """Bytes of a copy of the weight in the dtype that products of `dtype` compute in."""
    return prod(weight.shape) * ITEMSIZE[accumulator(real_part(dtype))] * (1 + is_complex(dtype))
