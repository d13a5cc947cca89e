"""The gradient of a weight: for every block of pixels, the gradient that arrives times what the windows read.

::

    dW [g, O_g, K_g]   +=   grad [g, O_g, pixels]   x   columns [g, K_g, pixels]'

Sums are kept for a range of outputs at a time, so that they keep within the workspace limit; nearly always
that is all of them, and where the result is in C order they are the result.

Each thread adds up a run of consecutive blocks, and the threads' sums are added in order: the same bits for the
same number of threads.  A complex input enters conjugated: grad conj(x) = conj(conj(grad) x), so that
what is conjugated is a copy of `grad` and the sums.  Where one factor alone is complex, its real and imaginary
parts are multiplied apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, ClassVar

import numpy as np

from cupyconv.numpy.convolution import (
    LONE_PIXELS,
    NO_ROOM_FOR_COLUMNS,
    PRODUCT_BLOCK,
    SMALLEST_BLOCK,
    THIN_PRODUCTS,
    BlockLoop,
    Method,
    Rejected,
    choose,
    is_matrix,
    is_not_depthwise,
    plan_of,
    temporaries,
)
from cupyconv.numpy.mec import is_in_order, shared_bytes, shared_columns, shared_part, taps_share
from cupyconv.numpy.prologue import transform_of
from cupyconv.numpy.windows import (
    Block,
    Blocks,
    BlockSize,
    Images,
    Scratch,
    columns_shape,
    five_axes,
    in_threads,
    largest_block,
    parts_of,
    tile_shape,
)
from cupyconv.problem.dtypes import ITEMSIZE, accumulator, dtype_from_name, is_complex, real_part
from cupyconv.problem.even_parts import even_part
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.machine import HostModel
from cupyconv.problem.operands import c_strides
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import WeightGradientProblem, without_empty_inputs

#: Bytes of products a block adds to the sums at a time: they stay in cache until they are added.
PRODUCT_PIECE = 4 << 20
#: Outputs below which a product is taken transposed, where that makes it taller than wide: BLAS is faster at it.
_MANY_OUTPUTS = 128


def plan_weight_gradient(problem: WeightGradientProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    assert not (problem.prologue and _splits_x(problem)), "a prologue is of complex numbers, not of their parts"
    return choose(without_empty_inputs(problem), METHODS)


#: A gradient (groups, rows, pixels), or its real or imaginary parts, and the sums that its products belong to.
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]

# --- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WeightGradientLoop(BlockLoop):
    """A loop over blocks of the gradient that arrives, each added to the weight's; subclasses are the ways to do it.

    `weight_dtype` is that of the arriving gradient in products.  The sums are those of outputs ``first_row``
    ... of every group, `rows` of them, and a product has at most `piece` of these.
    """

    #: Whether a block's pixels are in the order of shared columns.
    shares_columns: ClassVar[bool] = False

    first_row: int
    rows: int
    piece: int
    grad_in_place: bool  # a block of one sample is a matrix that products read where it lies
    part: int = 0  # groups whose shared columns there are at a time

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        """Pixels that a block should have, and the most samples."""
        return PRODUCT_BLOCK // (problem.geometry.in_channels * _x_item(problem) or 1), problem.geometry.batch

    @classmethod
    @abstractmethod
    def columns_bytes(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        """Bytes of what is copied of the inputs for a block."""

    @abstractmethod
    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        """Add a block's products to the sums (groups, rows, K_g); the first block writes them."""

    # What all have in common.

    @property
    def rounds(self) -> int:
        return self.blocks * (-(-self.geometry.groups // self.part) if self.part else 1)

    def __str__(self) -> str:
        split = f", outputs {self.first_row} to {self.first_row + self.rows} of each group" if self.first_row else ""
        return super().__str__() + split

    @classmethod
    def plan(cls, problem: WeightGradientProblem, method: str, rejected: Rejected) -> Plan:
        geometry, machine = problem.geometry, problem.machine
        assert isinstance(machine, HostModel)
        in_place = _sums_are_result(problem)
        row = geometry.groups * geometry.reduction * ITEMSIZE[accumulator(problem.out.dtype)]  # one output per group
        private = machine.threads - in_place  # sums beside the result
        rows = geometry.group_outputs
        if private:
            rows = even_part(rows, problem.limit // 2 // (private * row or 1))
        piece = even_part(rows, min(PRODUCT_PIECE, problem.limit // 4 // machine.threads) // (row or 1))
        fixed = private * rows * row + machine.threads * piece * row + 4 * Plan.ALIGNMENT

        def needed(block: BlockSize) -> int:
            return fixed + machine.threads * cls._workspace(problem, block)

        pixels, most_samples = cls.aim(problem)
        block = largest_block(geometry, needed, problem.limit, pixels, SMALLEST_BLOCK, most_samples)
        axes = (geometry.batch, *geometry.out_size)
        blocks = 0 if 0 in axes else prod(-(-extent // part) for extent, part in zip(axes, block))
        threads = max(1, min(machine.threads, blocks))
        whole = cls(
            inputs=tuple(x.name for x in problem.xs), block=block, blocks=blocks, threads=threads, geometry=geometry,
            dtype=accumulator(problem.out.dtype), x_dtype=accumulator(problem.x_dtype),
            weight_dtype=accumulator(problem.grad_dtype), in_place=in_place, bytes_moved=problem.minimal_bytes,
            flops=problem.flops, first_row=0, rows=rows, piece=piece, grad_in_place=_grad_is_factor(problem),
            part=_part(problem, block) if cls.shares_columns else 0, prologue=problem.prologue,
        )  # fmt: skip
        steps = []
        for first in range(0, geometry.group_outputs if problem.out.nbytes else 0, rows or 1):
            own = min(rows, geometry.group_outputs - first)
            steps.append(replace(whole, first_row=first, rows=own, flops=problem.flops * own // geometry.group_outputs))
        sizes = {
            "sums": (threads - in_place) * rows * row,
            "products": threads * piece * row if blocks > 1 or not in_place else 0,
            "blocks": threads * cls._workspace(problem, block) if blocks else 0,
        }
        shape = (geometry.out_channels, geometry.group_channels, *geometry.spatial(geometry.kernel))
        return plan_of(
            problem, steps, sizes, method=method, problem=f"weight gradient of {geometry}",
            result=f"{problem.out.dtype} {shape}", rejected=rejected, reason=cls.reason(geometry),
        )  # fmt: skip

    @classmethod
    def _workspace(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        """Bytes for one block: what is copied of the inputs, and its part of `grad`."""
        in_order = is_in_order(problem.geometry, block) if cls.shares_columns else block[0] == 1
        grad = prod(block) * problem.geometry.out_channels * ITEMSIZE[accumulator(problem.grad_dtype)]
        return cls.columns_bytes(problem, block) + (0 if in_order and _grad_is_factor(problem) else grad)

    def executable(self) -> Callable[[Mapping[str, Any]], None]:
        """What runs the loop on arguments and result by name."""
        return WeightGradient(self).run


def _sums_are_result(problem: WeightGradientProblem) -> bool:
    """Whether the sums can be kept where the result lies."""
    out = problem.out
    return out.dtype == accumulator(out.dtype) and out.strides == c_strides(out.shape) and bool(out.nbytes)


def _grad_is_factor(problem: WeightGradientProblem) -> bool:
    """Whether a sample of `grad` is a matrix that a product takes as it lies, in the dtype and kind it computes in."""
    grad = problem.grad
    return grad.dtype == accumulator(problem.grad_dtype) and is_matrix(grad) and not is_complex(problem.grad_dtype)


def _splits_x(problem: WeightGradientProblem) -> bool:
    """Whether the inputs' real and imaginary parts are read apart: beside a real gradient, half a complex product."""
    return is_complex(problem.x_dtype) and not is_complex(problem.grad_dtype)


def _x_item(problem: WeightGradientProblem) -> int:
    dtype = accumulator(problem.x_dtype)
    return ITEMSIZE[real_part(dtype) if _splits_x(problem) else dtype]


def _part(problem: WeightGradientProblem, block: BlockSize) -> int:
    """Groups whose shared columns stay in cache together."""
    return shared_part(problem.geometry, block, _x_item(problem), problem.prologue)


# --- the ways -------------------------------------------------------------------------------------------------


class View(WeightGradientLoop):
    """The inputs are columns as they lie: a kernel of one tap, and pixels or channels side by side."""

    name = "view"
    words = "products of the inputs where they lie"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        geometry, xs = problem.geometry, problem.xs
        return (
            geometry.is_pointwise
            and not problem.prologue
            and geometry.pixels >= LONE_PIXELS
            and (len(xs) == 1 or geometry.groups == 1)
            and all(x.dtype == accumulator(problem.x_dtype) and is_matrix(x) for x in xs)
            and not _splits_x(problem)
        )

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        return problem.geometry.pixels if _grad_is_factor(problem) else super().aim(problem)[0], 1

    @classmethod
    def columns_bytes(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        return 0

    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        for x, channels in images.inputs:
            view = block.of(x)[0]
            if len(images.inputs) == 1:
                view, channels = view.reshape(self.geometry.groups, -1, block.area), slice(None)
            else:
                view = view.reshape(1, -1, block.area)
            for grad, sums in pairs:
                run.add_product(grad, view, sums[:, :, channels], is_first)


class _Sharing(WeightGradientLoop):
    """Columns that taps share, some groups at a time."""

    shares_columns = True

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        columns = geometry.group_channels * (geometry.taps // geometry.kernel[geometry.outermost]) * _x_item(problem)
        pixels = PRODUCT_BLOCK // (columns or 1)
        if geometry.groups > 1:  # a copy of the gradient is of all groups
            grad = geometry.out_channels * ITEMSIZE[accumulator(problem.grad_dtype)]
            pixels = min(pixels, PRODUCT_BLOCK // (grad or 1))
        # Products in groups can read one sample's gradient where it lies: copying that takes as long as they do.
        is_lone = geometry.groups > 1 and geometry.pixels >= LONE_PIXELS and _grad_is_factor(problem)
        return pixels, 1 if is_lone else geometry.batch

    @classmethod
    def columns_bytes(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        each = shared_bytes(problem.geometry, block, _x_item(problem), problem.prologue)
        return _part(problem, block) * each


class SharedColumns(_Sharing):
    """A product for each tap of the kernel's outermost axis."""

    name = "shared columns"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return taps_share(problem.geometry, _x_item(problem))

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        return f"columns that {geometry.kernel[geometry.outermost]} taps share, and products"

    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        # Sums with the axis that taps share in front of those of a tap's rows: (taps, groups, rows, c, other taps).
        by_tap = [
            np.moveaxis(
                sums.reshape(*sums.shape[:2], geometry.group_channels, *geometry.kernel), 3 + geometry.outermost, 0
            )
            for _, sums in pairs
        ]
        for groups, columns in shared_columns(images, block, self.part):
            for taps, views in columns:
                matrices = views.swapaxes(0, 1).reshape(views.shape[1], groups.stop - groups.start, -1, block.area)
                for t, matrix in zip(range(geometry.taps)[taps], matrices):
                    for (grad, _), sums in zip(pairs, by_tap):
                        run.add_product(grad[groups], matrix, sums[t, groups], is_first)


class MultipliedTaps(_Sharing):
    """Depthwise: what each tap reads, times the gradient, summed: the product of two vectors."""

    name = "multiplied taps"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return problem.geometry.is_depthwise

    @classmethod
    def reason(cls, geometry: ConvGeometry) -> str:
        taps = geometry.kernel[geometry.outermost]
        return f"columns that {taps} taps share, multiplied" if taps > 1 else "each element multiplied"

    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        outer = self.geometry.kernel[self.geometry.outermost]
        for groups, columns in shared_columns(images, block, self.part):
            for taps, views in columns:
                for grad, sums in pairs:
                    row, column = grad[groups, :, None, None, None], views[:, None, ..., None]
                    product = np.matmul(row, column)[..., 0, 0]
                    place = sums.reshape(*sums.shape[:2], outer, -1)[groups, :, taps]
                    if is_first:
                        place[...] = product
                    else:
                        place += product


class Columns(WeightGradientLoop):
    """All windows of a block are copied to columns."""

    name = "columns"
    words = "columns and products"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return not (View.applies(problem) or SharedColumns.applies(problem))

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        geometry = problem.geometry
        return PRODUCT_BLOCK // (geometry.in_channels * geometry.taps * _x_item(problem) or 1), geometry.batch

    @classmethod
    def columns_bytes(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        geometry = problem.geometry
        columns, has_tile = prod(columns_shape(geometry, block)), geometry.taps > 1
        read = prod(tile_shape(geometry, geometry.in_channels, block)) if has_tile else columns
        return (columns + read * (has_tile + temporaries(geometry, problem.prologue))) * _x_item(problem)

    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        columns = images.columns(block).reshape(self.geometry.groups, self.geometry.reduction, block.area)
        for grad, sums in pairs:
            run.add_product(grad, columns, sums, is_first)


class TapByTap(WeightGradientLoop):
    """A product for each tap: no columns but one tap's."""

    name = "taps"
    words = "tap by tap, no columns"

    @classmethod
    def applies(cls, problem: WeightGradientProblem) -> bool:
        return not problem.geometry.is_depthwise

    @classmethod
    def columns_bytes(cls, problem: WeightGradientProblem, block: BlockSize) -> int:
        columns = problem.geometry.in_channels * prod(block) * _x_item(problem)
        return columns * (1 + temporaries(problem.geometry, problem.prologue))

    def add(self, run: Run, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        geometry = self.geometry
        columns = images.scratch.array("columns", (geometry.in_channels, *block.size))
        for t, regions in enumerate(block.taps):
            images.read(regions, block, columns)
            matrices = columns.reshape(geometry.groups, geometry.group_channels, block.area)
            for grad, sums in pairs:
                run.add_product(grad, matrices, sums[:, :, t :: geometry.taps], is_first)


#: "auto" takes the first that suits the problem and fits, else the first that fits.
METHODS = {
    "gemm": Method((View, SharedColumns, Columns), THIN_PRODUCTS, NO_ROOM_FOR_COLUMNS, is_not_depthwise),
    "direct": Method((MultipliedTaps, TapByTap), "slower: a product for every tap"),
}

# --- runs -----------------------------------------------------------------------------------------------------


class WeightGradient:
    """What all runs of a loop have in common."""

    def __init__(self, loop: WeightGradientLoop) -> None:
        self.loop, self.geometry = loop, loop.geometry
        self.conjugates = is_complex(loop.x_dtype)
        self.splits_x = self.conjugates and not is_complex(loop.weight_dtype)
        self.splits_grad = is_complex(loop.weight_dtype) and not self.conjugates
        self.sums_dtype = dtype_from_name(loop.dtype)
        #: Of the factors of a product, parts where one is taken apart.
        self.x_dtype = dtype_from_name(real_part(loop.x_dtype) if self.splits_x else loop.x_dtype)
        self.grad_dtype = dtype_from_name(real_part(loop.weight_dtype) if self.splits_grad else loop.weight_dtype)
        self.blocks = Blocks(loop.geometry, loop.block, self.x_dtype.itemsize)

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the gradient; arguments and result are given by name."""
        run, threads, blocks = Run(self, arrays), self.loop.threads, iter(self.blocks)
        share = -(-self.loop.blocks // threads)
        shares = [(islice(blocks, share) if threads == 1 else list(islice(blocks, share)), t) for t in range(threads)]
        run.finish(in_threads(threads, run.sum_over, shares))


class Run:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, gradient: WeightGradient, arrays: Mapping[str, Any]) -> None:
        self.gradient, self.loop, self.geometry = gradient, gradient.loop, gradient.geometry
        loop, geometry = gradient.loop, gradient.geometry
        inputs = [
            (five_axes(arrays[name]), slice(first, first + channels))
            for name, first, channels in zip(loop.inputs, geometry.channel_offsets, geometry.channels)
        ]
        scratch, transform = (
            Scratch(gradient.x_dtype, loop.rounds),
            transform_of(loop.prologue, arrays, gradient.x_dtype),
        )
        #: The factors, or their real and imaginary parts.
        self.images = [
            Images([(part(x), own) for x, own in inputs], scratch, transform) for part in _parts(gradient.splits_x)
        ]
        self.grads = [part(five_axes(arrays["grad"])) for part in _parts(gradient.splits_grad)]
        self._rows = slice(loop.first_row, loop.first_row + loop.rows)
        out = arrays["out"]
        #: (groups, outputs per group, channels of a group, *kernel): these outputs of the result.
        self._out = out.reshape(geometry.groups, geometry.group_outputs, *out.shape[1:])[:, self._rows]
        self._grad_scratch = [Scratch(gradient.grad_dtype, loop.rounds) for _ in self.grads]
        self._product_scratch = Scratch(np.result_type(gradient.x_dtype, gradient.grad_dtype), loop.rounds)

    def sum_over(self, share: tuple[Iterable[Block], int]) -> np.ndarray:
        """The sums, (groups, rows, K_g), of a thread's share of the blocks."""
        blocks, thread = share
        sums = self._new_sums(thread)
        # One of the factors at most has two parts.
        parts = [sums.real, sums.imag] if len(self.images) + len(self.grads) > 2 else [sums]
        is_first = True
        for block in blocks:
            grads = [self._grad(block, i) for i in range(len(self.grads))]
            for i, images in enumerate(self.images):
                self.loop.add(self, block, images, list(zip(grads, parts[i:])), is_first)
            is_first = False
        if is_first:
            sums.fill(0)
        return sums

    def _new_sums(self, thread: int) -> np.ndarray:
        """Where a thread keeps its sums, uninitialised."""
        shape = self.geometry.groups, self.loop.rows, self.geometry.reduction
        if thread == 0 and self.loop.in_place:
            return self._out.reshape(shape)
        return np.empty(shape, self.gradient.sums_dtype)

    def finish(self, sums: list[np.ndarray]) -> None:
        """Add the threads' sums in order and store them."""
        total = sums[0]
        for others in sums[1:]:
            total += others
        if self.gradient.conjugates:
            np.conjugate(total, out=total)
        if not self.loop.in_place:
            self._out[...] = total.reshape(self._out.shape)

    def _grad(self, block: Block, part: int) -> np.ndarray:
        """These outputs of the block's gradient: (groups, rows, pixels)."""
        geometry = self.geometry
        grad = block.of(self.grads[part]).swapaxes(0, 1)
        in_order = block.size[0] == 1
        if self.loop.shares_columns:  # (o, outermost axis of the kernel, n, other axes)
            grad = np.moveaxis(grad, 2 + geometry.outermost, 1)
            in_order = is_in_order(geometry, block.size)
        if not (self.loop.grad_in_place and in_order):
            copy = self._grad_scratch[part].array("grad", grad.shape)
            if self.gradient.conjugates:
                np.conjugate(grad, out=copy)
            else:
                copy[...] = grad
            grad = copy
        return grad.reshape(geometry.groups, geometry.group_outputs, block.area)[:, self._rows]

    def add_product(self, grad: np.ndarray, columns: np.ndarray, sums: np.ndarray, is_first: bool) -> None:
        """sums (+)= grad columns', a piece of the outputs at a time; `sums` may have the rows' axes apart."""
        transposed = columns.swapaxes(1, 2)
        swaps = self.geometry.group_outputs < min(_MANY_OUTPUTS, columns.shape[1])
        for piece in parts_of(sums.shape[1], self.loop.piece):
            target = sums[:, piece]
            if is_first and target.ndim == 3 and target.strides[-1] == target.itemsize:
                np.matmul(grad[:, piece], transposed, out=target)
                continue
            shape = (*target.shape[:2], columns.shape[1])
            if swaps:
                product = self._product_scratch.array("product", (shape[0], shape[2], shape[1])).swapaxes(1, 2)
                np.matmul(columns, grad[:, piece].swapaxes(1, 2), out=product.swapaxes(1, 2))
            else:
                product = self._product_scratch.array("product", shape)
                np.matmul(grad[:, piece], transposed, out=product)
            if is_first:
                target[...] = product.reshape(target.shape)
            else:
                target += product.reshape(target.shape)


def _parts(is_split: bool) -> Sequence[Callable[[np.ndarray], np.ndarray]]:
    """What makes of an array the factors of products."""
    return (_real, _imaginary) if is_split else (lambda x: x,)


def _real(x: np.ndarray) -> np.ndarray:
    return x.real


def _imaginary(x: np.ndarray) -> np.ndarray:
    """The imaginary parts; of a real array zeros that take no memory."""
    return x.imag if x.dtype.kind == "c" else np.broadcast_to(x.dtype.type(0), x.shape)
