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
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from cupyconv.numpy.windows import Block, Blocks, BlockSize, Images, Scratch, five_axes, in_threads, largest_block
from cupyconv.problem.activations import Activation
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, c_strides, dtype_from_name, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry, Windows
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import (
    NO_PROLOGUE,
    ConvProblem,
    HostModel,
    NotApplicable,
    ProductsProblemT,
    Prologue,
    TransposedProblem,
    WeightGradientProblem,
    without_empty_inputs,
)

#: Bytes of columns a block aims at where products dominate, and where memory does.
PRODUCT_BLOCK = 8 << 20
MEMORY_BLOCK = 512 << 10
#: Pixels below which a block of columns is not cut: the products would be vectors.
SMALLEST_BLOCK = 32
#: Pixels from which one sample fills a product; smaller images share one, through columns.
LONE_PIXELS = 256

#: Why the method is a GPU's.
NO_IMPLICIT_GEMM = "BLAS reads matrices, so columns are written, block by block (method 'gemm')"
#: Why columns and products are not taken: of a depthwise convolution, and where they were tried first.
THIN_PRODUCTS = "slower: with one channel per group, each product is a vector by a matrix"
NO_ROOM_FOR_COLUMNS = "columns do not fit the workspace limit"

Rejected = tuple[tuple[str, str], ...]

# --- the choice -----------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """What ``method=`` may name: ways to run it, of which the first that applies and fits is taken; and when it is chosen.

    A module stands for its ``WAYS``, and is imported when it is first asked for them.
    """

    ways: str | tuple[type[BlockLoop], ...]
    slower: str  # why another method is taken
    no_room: str = ""  # the same where this one was tried first and did not fit
    suits: Callable[[ConvGeometry], bool] = lambda _: True


def is_not_depthwise(geometry: ConvGeometry) -> bool:
    """Whether products are more than vectors by matrices."""
    return not geometry.is_depthwise


#: Every method of a convolution.  "auto" takes the first that suits the problem and fits, else the first that fits.
METHODS = {
    "gemm": Method("cupyconv.numpy.gemm", THIN_PRODUCTS, NO_ROOM_FOR_COLUMNS, is_not_depthwise),
    "direct": Method("cupyconv.numpy.direct", "slower: a pass over the sums for every tap"),
}


def plan_conv(problem: ConvProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    return choose(without_empty_inputs(problem), METHODS)


def choose(problem: ProductsProblemT, methods: Mapping[str, Method]) -> Plan:
    """The plan of the method that was named, or of the best one; ValueError where none applies."""
    named = problem.method
    if named == "implicit_gemm":
        raise ValueError(f"method 'implicit_gemm' does not apply: {NO_IMPLICIT_GEMM}")
    by_merit = sorted(methods, key=lambda name: not methods[name].suits(problem.geometry))
    refusals: dict[str, str] = {}
    for name in by_merit if named == "auto" else [named]:
        why_not = {other: method.slower for other, method in methods.items() if other != name}
        why_not |= {other: methods[other].no_room or why_not[other] for other in refusals}
        if named != "auto":
            why_not = dict.fromkeys(why_not, f"method={named!r} was asked for")
        try:
            return _with_room(
                problem, name, methods[name].ways, (*why_not.items(), ("implicit_gemm", NO_IMPLICIT_GEMM))
            )
        except NotApplicable as refusal:
            refusals[name] = str(refusal)
    if named != "auto":
        raise ValueError(f"method {named!r} does not apply: {refusals[named]}")
    raise ValueError(f"no method applies: {'; '.join(f'{name}: {why}' for name, why in refusals.items())}")


def _with_room(
    problem: ProductsProblemT, method: str, ways: str | tuple[type[BlockLoop], ...], rejected: Rejected
) -> Plan:
    """The plan; where the workspace limit has no room for the blocks of all threads, for half as many, and so on."""
    known: tuple[type[BlockLoop], ...] = import_module(ways).WAYS if isinstance(ways, str) else ways
    refusal = NotApplicable("there is no way to do it")
    while True:
        for way in known:
            if way.applies(problem):
                try:
                    return way.plan(problem, method, rejected)
                except NotApplicable as reason:
                    refusal = reason
        if problem.host.threads <= 1:
            raise refusal
        problem = replace(problem, machine=HostModel(problem.host.threads // 2))


# --- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockLoop:
    """A loop over blocks of a convolution, each finished while in cache; a subclass is a way to run a method.

    `block` cuts the result's (sample, depth, height, width) axes: whole inner axes, part of one, single
    steps of the outer ones, so that a block is one run of samples or of pixels.
    """

    name: ClassVar[str]
    #: What is done, where `reason` does not say more.
    words: ClassVar[str]

    inputs: tuple[str, ...]
    block: BlockSize
    blocks: int
    threads: int
    geometry: ConvGeometry
    dtype: str  # of the sums
    x_dtype: str  # of images and weight in products
    weight_dtype: str
    in_place: bool  # the sums are the result itself
    bytes_moved: int
    flops: int
    prologue: Prologue = NO_PROLOGUE

    @classmethod
    @abstractmethod
    def applies(cls, problem: Any) -> bool:
        """Whether this is a way to do it."""

    @classmethod
    @abstractmethod
    def plan(cls, problem: Any, method: str, rejected: Rejected) -> Plan:
        """The plan; NotApplicable where its smallest block does not fit the workspace limit."""

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        """What is done, in words."""
        return cls.words

    @property
    def channel_slices(self) -> tuple[slice, ...]:
        """The channels of the concatenation that each input is."""
        starts = zip(self.geometry.channel_offsets, self.geometry.channels)
        return tuple(slice(first, first + count) for first, count in starts)

    @property
    def rounds(self) -> int:
        """Times that scratch memory is filled."""
        return self.blocks

    def __str__(self) -> str:
        block = " x ".join(map(str, self.block))
        prologue = f" of {self.prologue}" if self.prologue else ""
        sums = "the result" if self.in_place else self.dtype
        return (
            f"loop     {self.name}{prologue}, sums in {sums}: {self.blocks} block(s) of {block} (n, d, h, w)"
            f" on {self.threads} thread(s)"
        )

    @property
    def shape_of_work(self) -> object:
        return self


@dataclass(frozen=True, kw_only=True)
class ConvLoop(BlockLoop):
    """A convolution block by block; a subclass is a way to a block's sums.

    A new one defines `name`, `words`, `applies`, and what stands here above "What all have in common"; its module lists
    it in ``WAYS`` and has an entry in `METHODS`.
    """

    #: Pixels below which a block is not cut.
    smallest: ClassVar[int] = SMALLEST_BLOCK

    activation: Activation

    @classmethod
    @abstractmethod
    def aim(cls, problem: ConvProblem) -> tuple[int, int]:
        """Pixels that a block should have, and the most samples."""

    @classmethod
    def sums_are_result(cls, problem: ConvProblem, block: BlockSize) -> bool:
        """Whether the sums of a block are computed where the result lies."""
        return result_takes_sums(problem)

    @classmethod
    def weight_bytes(cls, problem: ConvProblem) -> int:
        """Bytes of the weight as `arranged` makes it of a C-ordered one in the dtype of products; 0 for a view."""
        return 0

    @property
    @abstractmethod
    def workspace(self) -> int:
        """Bytes for one block."""

    def arranged(self, weight: np.ndarray) -> np.ndarray:
        """The weight, (groups, outputs per group, K_g), as `sums` takes it."""
        return weight

    @abstractmethod
    def sums(self, run: Run, block: Block) -> np.ndarray:
        """A block's sums (groups, outputs per group, samples, depth, height, width)."""

    # What all have in common.

    @property
    def sums_bytes(self) -> int:
        """Bytes of a block's sums, unless they are the result, and of the temporary an activation takes."""
        return prod(self.block) * sums_per_pixel(self.geometry, self.dtype, self.in_place, self.activation)

    @property
    def tile_bytes(self) -> int:
        """Bytes of what a block's columns are copied from."""
        return 0

    @classmethod
    def of(cls, problem: ConvProblem, block: BlockSize, **own: Any) -> Self:
        """The loop over blocks of this size."""
        geometry = problem.geometry
        axes = (geometry.batch, *geometry.out_size)
        is_empty = 0 in axes or geometry.out_channels == 0
        blocks = 0 if is_empty else prod(-(-extent // part) for extent, part in zip(axes, block))
        return cls(
            inputs=tuple(x.name for x in problem.xs), block=block, blocks=blocks,
            threads=max(1, min(problem.host.threads, blocks)), geometry=geometry, dtype=accumulator(problem.out.dtype),
            x_dtype=accumulator(problem.x_dtype), weight_dtype=accumulator(problem.weight_dtype),
            activation=problem.activation, in_place=cls.sums_are_result(problem, block), prologue=problem.prologue,
            bytes_moved=problem.minimal_bytes, flops=problem.flops, **own,
        )  # fmt: skip

    @classmethod
    def fitted(cls, problem: ConvProblem) -> Self:
        """The loop over blocks of about the size aimed at, or the largest that keep within the workspace limit."""
        threads, weight = problem.host.threads, weight_copy(problem)
        fixed = weight + cls.weight_bytes(problem) + 2 * Plan.ALIGNMENT

        def needed(block: BlockSize) -> int:
            return fixed + threads * cls.of(problem, block).workspace

        pixels, most_samples = cls.aim(problem)
        limit = problem.limit_with(weight)
        return cls.of(problem, largest_block(problem.geometry, needed, limit, pixels, cls.smallest, most_samples))

    @classmethod
    def plan(cls, problem: ConvProblem, method: str, rejected: Rejected) -> Plan:
        loop = cls.fitted(problem)
        weight = weight_copy(problem) + cls.weight_bytes(problem)
        return plan_of(
            problem, (loop,) if loop.blocks else (), {"weight": weight, "blocks": loop.threads * loop.workspace},
            method=method, problem=str(problem.geometry), result=problem.result, rejected=rejected,
            reason=cls.reason(problem.geometry),
        )  # fmt: skip

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """What runs the loop on arguments and result by name."""
        return Convolution(self).run


def plan_of(
    computed: ConvProblem | TransposedProblem | WeightGradientProblem,
    steps: Sequence[BlockLoop],
    sizes: Mapping[str, int],
    **words: Any,
) -> Plan:
    """The plan of these steps, each of which goes through all arrays, with workspace of these sizes."""
    nbytes = computed.minimal_bytes
    return Plan(
        backend="numpy", device=str(computed.machine), steps=tuple(steps), flops=computed.flops, minimal_bytes=nbytes,
        bytes_moved=nbytes * max(1, len(steps)), notes=computed.notes, bound=computed.host.bound(computed.flops, nbytes),
        workspace=tuple(Buffer(name, size) for name, size in sizes.items() if size and steps), **words,
    )  # fmt: skip


def temporaries(geometry: Windows, prologue: Prologue) -> int:
    """The number of temporary copies of what is read: one where borders are gathered, one more for a prologue's activation."""
    return (geometry.padding_mode != "constant") + bool(prologue.activation)


def sums_per_pixel(geometry: ConvGeometry, dtype: str, in_place: bool = False, activation: object = None) -> int:
    """Bytes of a pixel's sums, twice unless they are the result, and of the temporary an activation takes."""
    arrays = int(bool(activation)) if in_place else 2
    return arrays * geometry.out_channels * ITEMSIZE[accumulator(dtype)]


def is_one_kind(problem: ConvProblem) -> bool:
    """Whether both factors are real, or both complex."""
    return is_complex(problem.x_dtype) == is_complex(problem.weight_dtype)


def result_takes_sums(problem: ConvProblem) -> bool:
    """Whether products can be written where the result lies.  A residual may lie there too: it is read later."""
    return (
        problem.out.dtype == accumulator(problem.out.dtype)
        and problem.residual is None
        and is_one_kind(problem)
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


def weight_copy(problem: ConvProblem) -> int:
    """Bytes of the weight where it must be copied: another dtype, another order, or parts taken apart."""
    weight = problem.weight
    as_it_lies = (
        weight.dtype == accumulator(problem.weight_dtype)
        and weight.strides == c_strides(weight.shape)
        and not (is_complex(problem.weight_dtype) and not is_complex(problem.x_dtype))
    )
    return 0 if as_it_lies else copy_bytes(weight, problem.weight_dtype)


def copy_bytes(weight: Operand, dtype: str) -> int:
    """Bytes of a copy of the weight in the dtype that products of `dtype` compute in."""
    return prod(weight.shape) * ITEMSIZE[accumulator(real_part(dtype))] * (1 + is_complex(dtype))


# --- runs -----------------------------------------------------------------------------------------------------


class Convolution:
    """What all runs of a loop have in common."""

    def __init__(self, loop: ConvLoop) -> None:
        geometry = loop.geometry
        self.loop, self.geometry = loop, geometry
        self.sums_dtype = dtype_from_name(loop.dtype)
        self.x_dtype, self.weight_dtype = dtype_from_name(loop.x_dtype), dtype_from_name(loop.weight_dtype)
        #: Where one factor alone is complex, its parts are taken as twice as many real pixels or outputs.
        self.parts_as_pixels = is_complex(loop.x_dtype) and not is_complex(loop.weight_dtype)
        self.parts_as_outputs = is_complex(loop.weight_dtype) and not is_complex(loop.x_dtype)
        self.channels = loop.channel_slices
        self.matrix_shape = geometry.groups, geometry.group_outputs, geometry.reduction
        self.has_epilogue = not loop.in_place or bool(loop.activation)
        self.blocks = Blocks(geometry, loop.block, self.x_dtype.itemsize)
        #: Where scratch memory is filled once nothing is kept in it, so it serves all runs.
        self.scratch = Scratch(self.x_dtype, 1) if loop.rounds <= 1 else None
        self.activate: Callable[[np.ndarray], None] | None = None
        self.transform_of: Callable[[Mapping[str, Any]], Any] | None = None
        # These two are imported for those that have them.
        if loop.activation:
            from cupyconv.numpy.activations import activate

            self.activate = partial(activate, activation=loop.activation)
        if loop.prologue:
            from cupyconv.numpy.prologue import transform_of

            self.transform_of = partial(transform_of, loop.prologue, dtype=self.x_dtype)

    def run(self, arrays: Mapping[str, Any], scratch: Scratch | None = None) -> None:
        """Compute the result; arguments and result are given by name, and memory that other loops use too."""
        scratch = scratch or self.scratch or Scratch(self.x_dtype, self.loop.rounds)
        for _ in in_threads(self.loop.threads, Run(self, arrays, scratch).finish, self.blocks):
            pass


class Run:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, convolution: Convolution, arrays: Mapping[str, Any], scratch: Scratch) -> None:
        self.convolution, self.geometry, loop = convolution, convolution.geometry, convolution.loop
        inputs = [(five_axes(arrays[name]), channels) for name, channels in zip(loop.inputs, convolution.channels)]
        transform = convolution.transform_of(arrays) if convolution.transform_of else None
        self.images = Images(inputs, scratch, transform)
        self.products = convolution.scratch or Scratch(convolution.sums_dtype, loop.rounds)
        self.out = five_axes(arrays["out"])
        self.pre = five_axes(arrays["pre"]) if "pre" in arrays else None
        self.residual = five_axes(arrays["residual"]) if "residual" in arrays else None
        self.bias = None
        if "bias" in arrays:
            bias = arrays["bias"].astype(self.out.dtype, copy=False).astype(convolution.sums_dtype, copy=False)
            self.bias = bias[:, None, None, None]
        matrix = arrays["weight"].reshape(convolution.matrix_shape)
        if matrix.dtype != convolution.weight_dtype:
            matrix = matrix.astype(convolution.weight_dtype)
        self.weight = loop.arranged(matrix)
        self._products_are_result = not convolution.has_epilogue and self.bias is None and self.residual is None

    def finish(self, block: Block) -> None:
        """Compute a block of the result."""
        sums = self.convolution.loop.sums(self, block)
        if not self._products_are_result:
            self.store(block, sums)

    def store(self, block: Block, sums: np.ndarray) -> None:
        """The epilogue of a block's sums."""
        sums = sums.reshape(self.geometry.out_channels, *block.size).swapaxes(0, 1)
        if self.bias is not None:
            sums += self.bias
        if self.residual is not None:
            residual = block.of(self.residual)
            # Rounded to the result's dtype first, as an argument of that dtype would have been.
            sums += residual if residual.dtype == self.out.dtype else residual.astype(self.out.dtype)
        if self.pre is not None:
            block.of(self.pre)[...] = sums
        if self.convolution.activate:
            self.convolution.activate(sums)
        if not self.convolution.loop.in_place:
            block.of(self.out)[...] = sums
