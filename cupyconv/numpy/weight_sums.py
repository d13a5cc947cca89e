"""Sums of a weight gradient: a loop over blocks of pixels whose products are accumulated.

Sums are stored for a range of outputs at a time, so that they fit in the workspace limit.  Nearly always the range is
all outputs.  If the result is in C order, it holds the sums itself.  On one thread, if the sums of one output exceed
half the limit, the bytes beyond that half are allocated on top of the limit.

Each thread accumulates a run of consecutive blocks, and the threads' sums are added in order.  The result is therefore
bitwise the same for the same number of threads.  A complex input enters conjugated: grad conj(x) = conj(conj(grad) x),
so a copy of `grad` and the sums are conjugated.  If only one factor is complex, its real and imaginary parts are
multiplied separately.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from cupyconv.numpy import cost
from cupyconv.numpy.backend import Scratch, Views, cached_scratch
from cupyconv.numpy.block_loops import PixelLoop
from cupyconv.numpy.convolution import MEMORY_BLOCK, PRODUCT_BLOCK, is_matrix
from cupyconv.numpy.shared_columns import is_in_order
from cupyconv.numpy.threads import in_threads
from cupyconv.numpy.windows import Block, BlockSize, Images, five_axes, parts_of
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, dtype_from_name, is_complex, real_part
from cupyconv.problem.caches import BUDGET, spent
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Plan
from cupyconv.problem.problems import WeightGradientProblem

#: Bytes of products that a block adds to the sums at a time; they stay in cache until they are added.
PRODUCT_PIECE = 4 << 20
#: Outputs below which a float32 product is computed transposed, if that makes it taller than wide.  BLAS then takes as
#: little as half the time; in float64 it takes no less.
_MANY_OUTPUTS = 128

#: Most and fewest pixels of a run, and the most elements of a product that is computed in runs of pixels.  BLAS does
#: not pack the operands of such a run.
RUN, MIN_RUN, FEW_ELEMENTS = 1024, 128, 960
#: Elements of a result up to which NumPy holds the GIL during a product.
HELD = 500

#: Bytes that a part of the groups copies and computes for a block.  It is larger than elsewhere, so that each of the few
#: calls is long.
CHANNELS_BLOCK = 4 * MEMORY_BLOCK

#: Most bytes of scratch memory of a run that are reused from call to call.
CACHED_BLOCKS = BUDGET // 4

#: Gradients (groups, rows, pixels), or real and imaginary parts of one, each with the sums of its products.
Pairs = Sequence[tuple[np.ndarray, np.ndarray]]

# --- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightGradientLoop(PixelLoop):
    """A loop over blocks of the output gradient, each added to the weight gradient; subclasses are the implementations.

    The sums are those of `rows` outputs of every group, from `first_row` on.  A product has at most `piece` of these
    outputs.
    """

    #: Whether a block's pixels are in the order of MEC columns.
    shares_columns: ClassVar[bool] = False
    #: Whether a block's gradient is read along its own axes, (groups, rows, samples, d, h, w), not as matrices.  A box
    #: of pixels need not be contiguous.
    reads_boxes: ClassVar[bool] = False
    #: Whether products are added to the sums without rearranging, so that the first may be written directly to the
    #: sums.
    products_are_summed: ClassVar[bool] = True

    problem: WeightGradientProblem
    first_row: int = 0
    rows: int = 0
    piece: int = 0

    @classmethod
    def aim(cls, problem: WeightGradientProblem) -> tuple[int, int]:
        return PRODUCT_BLOCK // (problem.geometry.in_channels * x_item(problem) or 1), problem.geometry.batch

    @property
    @abstractmethod
    def columns_bytes(self) -> int:
        """Bytes that are copied from the inputs for a block."""

    @abstractmethod
    def add(self, run: WeightRun, block: Block, images: Images, pairs: Pairs, is_first: bool) -> None:
        """Add a block's products to the sums (groups, rows, K_g); the first block writes them."""

    # Common to all subclasses.

    @cached_property
    def in_place(self) -> bool:
        return sums_are_result(self.problem)

    @property
    @abstractmethod
    def products_work(self) -> float:
        """Estimated time of columns and products for all outputs, in seconds."""

    @cached_property
    def work(self) -> float:
        geometry, problem = self.geometry, self.problem
        copied = 0 if self.is_factor(self.block) else prod(problem.grad.shape)
        work = self.products_work + cost.copied(copied, self.block[3], problem.grad_dtype)
        return work * (self.rows or geometry.group_outputs) / (geometry.group_outputs or 1)

    def product_work(self, columns: float, run: float | None = None) -> float:
        """Estimated time of one product per block, with `columns` columns per group, and of adding it to the sums.

        The sums are contiguous in runs of `run` elements.
        """
        geometry = self.geometry
        sizes = geometry.group_outputs, prod(self.block), columns
        products = self.blocks * geometry.groups * cost.product(*sizes, self.problem)
        return products + cost.summed(self.blocks * geometry.out_channels * columns, run or columns, self.problem.dtype)

    @property
    def flops(self) -> int:
        return self.problem.flops * self.rows // self.geometry.group_outputs

    def __str__(self) -> str:
        split = f", outputs {self.first_row} to {self.first_row + self.rows} of each group" if self.first_row else ""
        return super().__str__() + split

    @classmethod
    def loops(cls, problem: WeightGradientProblem) -> tuple[Sequence[Self], Mapping[str, int]]:
        geometry, threads, in_place = problem.geometry, problem.host.threads, sums_are_result(problem)
        # Sums of one output per group.
        row = geometry.groups * geometry.reduction * ITEMSIZE[accumulator(problem.dtype)]
        private = threads - in_place  # arrays of sums in addition to the result
        rows = geometry.group_outputs
        if private:
            rows = even_part(rows, problem.limit // 2 // (private * row or 1))
        product = cls.product_bytes(problem)
        piece = even_part(rows, min(PRODUCT_PIECE, problem.limit // 4 // threads) // (product or 1))
        fixed = private * rows * row + threads * piece * product + 4 * Plan.ALIGNMENT
        limit = problem.limit if threads > 1 else problem.limit_with(private * rows * row)
        loop = cls.fitted(problem, fixed, limit)
        firsts = range(0, geometry.group_outputs if problem.out.nbytes else 0, rows or 1)
        first_loop = replace(loop, rows=rows, piece=piece)
        loops = [first_loop._from_row(first) for first in firsts]
        turns = turns_product(geometry.group_outputs, geometry.reduction, loop.x_dtype)
        is_sum = cls.products_are_summed and loop.blocks == 1 and in_place and not turns
        sizes = {
            "sums": (loop.threads - in_place) * rows * row,
            "products": 0 if is_sum else loop.threads * piece * product,
            "blocks": loop.threads * (loop.workspace + loop.index_bytes) if loop.blocks else 0,
        }
        return loops, sizes

    def _from_row(self, first: int) -> Self:
        """Return the loop for the outputs from `first` on; it shares the estimates, as there may be thousands of loops."""
        left = self.geometry.group_outputs - first
        if left < self.rows:
            return replace(self, first_row=first, rows=left)
        _ = self.seconds, self.work  # computed before they are copied
        other = copy(self)
        object.__setattr__(other, "first_row", first)
        return other

    @cached_property
    def _memory_bytes(self) -> int:
        """Bytes that a run writes in addition to the result."""
        sums = (self.threads - self.in_place) * self.geometry.groups * self.rows * self.geometry.reduction
        products = self.threads * self.piece * self.product_bytes(self.problem)
        return sums * self.sums_dtype.itemsize + products + self.threads * self.workspace

    def memory(self, dtype: np.dtype) -> Scratch:
        """Scratch memory of a run."""
        return memory_of_run(dtype, self._memory_bytes, self.rounds)

    @property
    def product_memory(self) -> Scratch:
        """Scratch memory for a run's products."""
        return self.memory(np.result_type(self.x_dtype, self.factor_dtype))

    @classmethod
    def product_bytes(cls, problem: WeightGradientProblem) -> int:
        """Bytes of a product of one output per group, in addition to `columns_bytes`."""
        geometry = problem.geometry
        return geometry.groups * geometry.reduction * ITEMSIZE[accumulator(problem.dtype)]

    @cached_property
    def grad_in_place(self) -> bool:
        return grad_is_factor(self.problem)

    def is_factor(self, block: BlockSize) -> bool:
        """Whether a block's gradient is read in place.

        Products read a run of one sample's pixels, in the order of the columns.
        """
        if self.reads_boxes:
            return self.grad_in_place
        if self.shares_columns:
            return is_in_order(self.geometry, block) and self.grad_in_place
        (samples, depth, height, width), (_, rows, row) = block, self.geometry.out_size
        is_run = (height == rows or depth == 1) and (width == row or depth * height == 1)
        return samples == 1 and is_run and self.grad_in_place

    @property
    def workspace(self) -> int:
        """Bytes for one block: copies of the inputs, the copy of its part of `grad`, and products of runs."""
        grad = prod(self.block) * self.geometry.out_channels * ITEMSIZE[accumulator(self.problem.grad_dtype)]
        return self.columns_bytes + self.runs_bytes + (0 if self.is_factor(self.block) else grad)

    @property
    def runs_bytes(self) -> int:
        """Most bytes of products of runs of pixels, and of their sum; only `add_product` computes these."""
        pixels, outputs = prod(self.block), self.rows or self.geometry.group_outputs
        if pixels < 2 * MIN_RUN or outputs > FEW_ELEMENTS:
            return 0
        return self.geometry.groups * max(pixels + FEW_ELEMENTS, 4 * FEW_ELEMENTS) * self.sums_dtype.itemsize

    @cached_property
    def x_dtype(self) -> np.dtype:
        dtype = accumulator(self.problem.x_dtype)
        return dtype_from_name(real_part(dtype) if self.problem.x_alone_is_complex else dtype)

    @cached_property
    def factor_dtype(self) -> np.dtype:
        dtype = accumulator(self.problem.grad_dtype)
        return dtype_from_name(real_part(dtype) if self.problem.factor_alone_is_complex else dtype)

    def run(self, arrays: Mapping[str, Any]) -> None:
        run, threads = WeightRun(self, arrays), self.threads
        share = -(-self.blocks // threads)
        shares = [(self.each_block.some(thread * share, share), thread) for thread in range(threads)]
        run.finish(in_threads(threads, run.sum_over, shares, self.holds_blas))


class GroupsGradientLoop(WeightGradientLoop):
    """A loop that adds the products of some groups at a time, whose copies stay in cache, without `add_product`."""

    runs_bytes = 0
    #: Bytes of the copies and products of the groups that are computed together.
    groups_bytes: ClassVar[int] = CHANNELS_BLOCK

    @cached_property
    def part(self) -> int:
        room = min(self.groups_bytes, self.problem.limit // (4 * self.problem.host.threads))
        return even_part(self.geometry.groups, room // (self.group_bytes or 1))

    @property
    def columns_bytes(self) -> int:
        return self.part * self.group_bytes

    @property
    @abstractmethod
    def group_bytes(self) -> int:
        """Bytes that a block copies and computes per group."""


def memory_of_run(dtype: np.dtype, nbytes: int, rounds: int) -> Scratch:
    """Scratch memory of a run that writes `nbytes` bytes, `rounds` times; reused from call to call unless it is large.

    Recently written memory is in cache, and to get a new page from the system takes longer than to fill it.  Gradients
    of several dtypes and implementations could fill the budget.  So they leave a part of it to others, and then keep
    their memory for one call only.
    """
    is_kept = nbytes <= CACHED_BLOCKS and spent() + nbytes <= BUDGET - CACHED_BLOCKS
    return cached_scratch(dtype) if is_kept else Scratch(dtype, rounds)


def blas_divides(problem: WeightGradientProblem) -> bool:
    """Whether BLAS divides products among its own threads, because the caller asked for one thread of this library."""
    return problem.host.threads == 1 and not problem.host.most


def sums_are_result(problem: WeightGradientProblem) -> bool:
    """Whether the result can hold the sums."""
    out = problem.out
    return out.dtype == accumulator(out.dtype) and out.strides == c_strides(out.shape) and bool(out.nbytes)


def grad_is_factor(problem: WeightGradientProblem) -> bool:
    """Whether a sample of `grad` is a real matrix that a product reads in place, in the dtype that it computes in."""
    grad = problem.grad
    return grad.dtype == accumulator(problem.grad_dtype) and is_matrix(grad) and not is_complex(problem.grad_dtype)


def x_item(problem: WeightGradientProblem) -> int:
    """Bytes of an input element in products; with a real gradient, the parts of a complex input are read separately."""
    dtype = accumulator(problem.x_dtype)
    return ITEMSIZE[real_part(dtype) if problem.x_alone_is_complex else dtype]


# --- runs -----------------------------------------------------------------------------------------------------


class WeightRun:
    """One run: its arrays, viewed with five axes, and the state that its blocks share."""

    def __init__(self, loop: WeightGradientLoop, arrays: Mapping[str, Any]) -> None:
        self.loop, self.geometry, geometry, problem = loop, loop.geometry, loop.geometry, loop.problem
        self._conjugates = is_complex(problem.x_dtype)
        images = loop.images(arrays, loop.memory(loop.x_dtype))
        self.images = [images]
        if problem.x_alone_is_complex:
            parts = zip(*([(part, channels) for part in _parts(x)] for x, channels in images.inputs))
            self.images = [Images(inputs, images.scratch, None) for inputs in parts]
        grad, out = five_axes(arrays["grad"]), arrays["out"]
        self.grads = _parts(grad) if problem.factor_alone_is_complex else [grad]
        self._rows = slice(loop.first_row, loop.first_row + loop.rows)
        #: (groups, outputs per group, channels of a group, *kernel)
        by_group = out.reshape(geometry.groups, geometry.group_outputs, geometry.group_channels, *out.shape[2:])
        self._out = by_group[:, self._rows]
        self._grad_scratch, self._product_scratch = loop.memory(loop.factor_dtype), loop.product_memory
        # The calling thread owns all threads' sums: when they are added, the workers may already serve another caller.
        own = loop.threads - loop.in_place, geometry.groups, loop.rows, geometry.reduction
        self._sums = [self._out.reshape(own[1:])] if loop.in_place else []
        if own[0]:
            self._sums.extend(loop.memory(loop.sums_dtype).array("sums", own))

    def sum_over(self, share: tuple[Iterable[Block], int]) -> np.ndarray:
        """Return the sums (groups, rows, K_g) of a thread's share of the blocks."""
        blocks, thread = share
        sums = self._sums[thread]
        # At most one of the factors has two parts.
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

    def finish(self, sums: list[np.ndarray]) -> None:
        """Add the threads' sums in order, and store the total."""
        total = sums[0]
        for others in sums[1:]:
            total += others
        if self._conjugates:
            np.conjugate(total, out=total)
        if not self.loop.in_place:
            self._out[...] = total.reshape(self._out.shape)

    def _grad(self, block: Block, part: int) -> np.ndarray:
        """The loop's outputs of a block's gradient: (groups, rows, pixels), or with a box's axes instead of pixels."""
        geometry = self.geometry
        grad = block.of(self.grads[part]).swapaxes(0, 1)
        if self.loop.shares_columns:  # (o, outermost axis of the kernel, n, other axes)
            grad = np.moveaxis(grad, 2 + geometry.outermost, 1)
        if not self.loop.is_factor(block.size):
            copy = self._grad_scratch.array(f"factor {part}", grad.shape)
            if self._conjugates:
                np.conjugate(grad, out=copy)
            else:
                copy[...] = grad
            grad = copy
        pixels = block.size if self.loop.reads_boxes else [block.area]
        return grad.reshape(geometry.groups, geometry.group_outputs, *pixels)[:, self._rows]

    def scratch(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """This thread's scratch array for products."""
        return self._product_scratch.array(name, shape)

    def views(self, of: Any, size: Hashable, names: Sequence[str], make: Callable[[], Views]) -> Views:
        """Return views of this thread's scratch arrays for products, cached as long as these (see `Scratch.views`)."""
        return self._product_scratch.views(of, size, names, make)

    def add_product(self, grad: np.ndarray, columns: np.ndarray, sums: np.ndarray, is_first: bool) -> None:
        """sums (+)= grad columns', a piece of the outputs at a time; a row of `sums` may have several axes."""
        if run := pixels_of_run(sums.shape[1], *columns.shape[1:]):
            self._add_runs(grad, columns, sums, is_first, run)
            return
        transposed = columns.swapaxes(1, 2)
        swaps = turns_product(self.geometry.group_outputs, columns.shape[1], columns.dtype)
        for piece in parts_of(sums.shape[1], self.loop.piece):
            target = sums[:, piece]
            if is_first and not swaps and target.ndim == 3 and target.strides[-1] == target.itemsize:
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

    def _add_runs(self, grad: np.ndarray, columns: np.ndarray, sums: np.ndarray, is_first: bool, run: int) -> None:
        """`add_product` for few sums: products of runs of pixels, and their sum."""
        whole = columns.shape[2] - columns.shape[2] % run
        rows, others = (m[..., :whole].reshape(*m.shape[:2], -1, run).swapaxes(1, 2) for m in (columns, grad))
        products = self._product_scratch.array("runs", (*rows.shape[:3], others.shape[2]))
        np.matmul(rows, others.swapaxes(2, 3), out=products)
        total = self._product_scratch.array("sum of runs", (len(products), *products.shape[:1:-1]))
        np.einsum("grxo->gox", products, out=total)
        if whole < columns.shape[2]:
            total += grad[..., whole:] @ columns[..., whole:].swapaxes(1, 2)
        if is_first:
            sums[...] = total.reshape(sums.shape)
        else:
            sums += total.reshape(sums.shape)


def turns_product(outputs: int, columns: int, dtype: np.dtype) -> bool:
    """Whether a product of `outputs` x `columns` elements is computed transposed."""
    return dtype == np.float32 and outputs < min(_MANY_OUTPUTS, columns)


def pixels_of_run(outputs: int, columns: int, pixels: int) -> int:
    """Pixels of each run that a product of `outputs` x `columns` elements is cut into, or 0 if it is not cut.

    BLAS does not pack the operands of a run.  All runs together have so many elements that NumPy releases the GIL.
    """
    elements = outputs * columns
    if not 0 < elements <= FEW_ELEMENTS:
        return 0
    run = min(RUN, pixels // (1 + HELD // elements))
    return run if run >= MIN_RUN and pixels >= 2 * run else 0


def _parts(x: np.ndarray) -> list[np.ndarray]:
    """Real and imaginary parts; the imaginary part of a real array is a broadcast zero, which needs no memory."""
    return [x.real, x.imag if x.dtype.kind == "c" else np.broadcast_to(x.dtype.type(0), x.shape)]
