"""The gradient of a weight: for every block of pixels, the gradient that arrives times what the windows read.

::

    dW [g, O_g, K_g]   +=   grad [g, O_g, pixels]   x   columns [g, K_g, pixels]'

Each thread adds up a run of consecutive blocks, and the threads' sums are added in order: the same bits for the
same number of threads.  A complex input enters conjugated: grad conj(x) = conj(conj(grad) x), so that
what is conjugated is a copy of `grad` and the sums.  Where one factor alone is complex, its real and imaginary
parts are multiplied apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from cupyconv.numpy.blocks import (
    Block,
    Inputs,
    are_kept,
    columns_of,
    cut_into_blocks,
    parts_of,
    read_regions,
    shared_columns,
)
from cupyconv.numpy.loops import WeightGradientLoop
from cupyconv.numpy.prologue import transform_of
from cupyconv.numpy.scratch import Scratch
from cupyconv.numpy.windows import five_axes
from cupyconv.problem.arrays import dtype_from_name, is_complex, real_part
from cupyconv.problem.geometry import ConvGeometry

#: Outputs below which a product is taken transposed, where that makes it taller than wide: BLAS is faster at it.
_MANY_OUTPUTS = 128


class WeightGradient:
    """What all runs of a plan's step have in common."""

    def __init__(self, loop: WeightGradientLoop) -> None:
        geometry = loop.geometry
        assert isinstance(geometry, ConvGeometry)
        self.plan, self.geometry = loop, geometry
        self.conjugates = is_complex(loop.x_dtype)
        self.splits_x = self.conjugates and not is_complex(loop.weight_dtype)
        self.splits_grad = is_complex(loop.weight_dtype) and not self.conjugates
        self.sums_dtype = dtype_from_name(loop.dtype)
        #: Of the factors of a product, parts where one is taken apart.
        self.x_dtype = dtype_from_name(real_part(loop.x_dtype) if self.splits_x else loop.x_dtype)
        self.grad_dtype = dtype_from_name(real_part(loop.weight_dtype) if self.splits_grad else loop.weight_dtype)
        self.body = {
            "columns": _Run.columns_and_product, "shared columns": _Run.product_of_shared_columns,
            "view": _Run.product_of_views,
            "taps": _Run.product_a_tap, "multiplied taps": _Run.multiplied_taps,
        }[loop.body]  # fmt: skip
        self.shares_columns = loop.body in ("shared columns", "multiplied taps")
        self._kept = tuple(cut_into_blocks(loop, self.x_dtype.itemsize)) if are_kept(loop) else None

    def run(self, arrays: Mapping[str, Any]) -> None:
        """Compute the gradient; arguments and result are given by name."""
        run, threads = _Run(self, arrays), self.plan.threads
        blocks = iter(cut_into_blocks(self.plan, self.x_dtype.itemsize) if self._kept is None else self._kept)
        if threads == 1:
            run.finish([run.sum_over(blocks, run.new_sums(0))])
            return
        share = -(-self.plan.blocks // threads)
        shares = [list(islice(blocks, share)) for _ in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            run.finish(list(pool.map(run.sum_in_thread, shares, map(run.new_sums, range(threads)))))


class _Run:
    """One run: its arrays, brought to five axes, and what its blocks share."""

    def __init__(self, loop: WeightGradient, arrays: Mapping[str, Any]) -> None:
        self.loop, self.plan, self.geometry = loop, loop.plan, loop.geometry
        plan, geometry = loop.plan, loop.geometry
        inputs = [
            (five_axes(arrays[name]), slice(first, first + channels))
            for name, first, channels in zip(plan.inputs, geometry.channel_offsets, geometry.channels)
        ]
        #: The factors, or their real and imaginary parts.
        self.xs: Sequence[Inputs] = (
            [[(part(x), channels) for x, channels in inputs] for part in (_real, _imaginary)]
            if loop.splits_x
            else [inputs]
        )
        grad = five_axes(arrays["grad"])
        self.grads = [_real(grad), _imaginary(grad)] if loop.splits_grad else [grad]
        self._rows = slice(plan.first_row, plan.first_row + plan.rows)
        out = arrays["out"]
        #: (groups, outputs of a group, channels of a group, *kernel): these outputs of the result.
        self._out = out.reshape(geometry.groups, geometry.group_outputs, *out.shape[1:])[:, self._rows]
        self._transform = transform_of(plan.prologue, arrays, loop.x_dtype)
        self._scratch = Scratch(loop.x_dtype, plan.rounds)
        self._grad_scratch = [Scratch(loop.grad_dtype, plan.rounds) for _ in self.grads]
        self._product_scratch = Scratch(np.result_type(loop.x_dtype, loop.grad_dtype), plan.rounds)

    # Sums, (groups, rows, K_g).

    def new_sums(self, thread: int) -> np.ndarray:
        """Where a thread keeps its sums, uninitialised."""
        shape = self.geometry.groups, self.plan.rows, self.geometry.reduction
        if thread == 0 and self.plan.in_place:
            return self._out.reshape(shape)
        return np.empty(shape, self.loop.sums_dtype)

    def sum_over(self, blocks: Iterable[Block], sums: np.ndarray) -> np.ndarray:
        """Add up these blocks."""
        parts = [sums.real, sums.imag] if len(self.xs) + len(self.grads) > 2 else [sums]
        is_first = True
        for block in blocks:
            grads = [self._grad(block, i) for i in range(len(self.grads))]
            for i, inputs in enumerate(self.xs):
                # One of the factors at most has two parts.
                targets = parts[i : i + len(grads)]
                self.loop.body(self, block, inputs, grads, targets, is_first)
            is_first = False
        if is_first:
            sums.fill(0)
        return sums

    def sum_in_thread(self, blocks: Iterable[Block], sums: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # of the thread
            return self.sum_over(blocks, sums)

    def finish(self, sums: list[np.ndarray]) -> None:
        """Add the threads' sums in order and store them."""
        total = sums[0]
        for others in sums[1:]:
            total += others
        if self.loop.conjugates:
            np.conjugate(total, out=total)
        if not self.plan.in_place:
            self._out[...] = total.reshape(self._out.shape)

    # Five ways to the sums of a block.

    def columns_and_product(
        self, block: Block, inputs: Inputs, grads: list[np.ndarray], sums: list[np.ndarray], is_first: bool
    ) -> None:
        geometry = self.geometry
        columns = columns_of(inputs, block, self._scratch, self._transform)
        columns = columns.reshape(geometry.groups, geometry.reduction, block.area)
        for grad, target in zip(grads, sums):
            self._add_product(grad, columns, target, is_first)

    def product_of_shared_columns(
        self, block: Block, inputs: Inputs, grads: list[np.ndarray], sums: list[np.ndarray], is_first: bool
    ) -> None:
        axis = self.geometry.outermost
        for groups, columns in self._shared_columns(block, inputs):
            for taps, views in columns:
                matrices = views.swapaxes(0, 1).reshape(views.shape[1], groups.stop - groups.start, -1, block.area)
                for t, matrix in zip(range(self.geometry.taps)[taps], matrices):
                    for grad, target in zip(grads, sums):
                        by_tap = target.reshape(*target.shape[:2], self.geometry.group_channels, *self.geometry.kernel)
                        self._add_product(grad[groups], matrix, _at(by_tap[groups], 3 + axis, t), is_first)

    def product_of_views(
        self, block: Block, inputs: Inputs, grads: list[np.ndarray], sums: list[np.ndarray], is_first: bool
    ) -> None:
        for x, channels in inputs:
            view = block.of(x)[0]
            if len(inputs) == 1:
                view, channels = view.reshape(self.geometry.groups, -1, block.area), slice(None)
            else:
                view = view.reshape(1, -1, block.area)
            for grad, target in zip(grads, sums):
                self._add_product(grad, view, target[:, :, channels], is_first)

    def product_a_tap(
        self, block: Block, inputs: Inputs, grads: list[np.ndarray], sums: list[np.ndarray], is_first: bool
    ) -> None:
        """A product for each tap: no columns but one tap's."""
        geometry = self.geometry
        columns = self._scratch.array("columns", (geometry.in_channels, *block.size))
        for t, regions in enumerate(block.taps):
            read_regions(inputs, regions, block, columns, self._transform)
            matrices = columns.reshape(geometry.groups, geometry.group_channels, block.area)
            for grad, target in zip(grads, sums):
                self._add_product(grad, matrices, target[:, :, t :: geometry.taps], is_first)

    def multiplied_taps(
        self, block: Block, inputs: Inputs, grads: list[np.ndarray], sums: list[np.ndarray], is_first: bool
    ) -> None:
        """Depthwise: what each tap reads, times the gradient, summed: the product of two vectors."""
        outer = self.geometry.kernel[self.geometry.outermost]
        for groups, columns in self._shared_columns(block, inputs):
            for taps, views in columns:
                for grad, target in zip(grads, sums):
                    row, column = grad[groups, :, None, None, None], views[:, None, ..., None]
                    product = np.matmul(row, column)[..., 0, 0]
                    place = target.reshape(*target.shape[:2], outer, -1)[groups, :, taps]
                    if is_first:
                        place[...] = product
                    else:
                        place += product

    def _shared_columns(self, block: Block, inputs: Inputs) -> Iterator[tuple[slice, list[tuple[slice, np.ndarray]]]]:
        """For some groups at a time, so that they stay in cache, the columns that taps share."""
        per_group = self.geometry.group_channels
        for groups in parts_of(self.geometry.groups, self.plan.part):
            channels = slice(groups.start * per_group, groups.stop * per_group)
            yield groups, shared_columns(inputs, block, channels, self._scratch, self._transform)

    def _grad(self, block: Block, part: int) -> np.ndarray:
        """These outputs of the block's gradient: (groups, rows, pixels)."""
        geometry = self.geometry
        grad = block.of(self.grads[part]).swapaxes(0, 1)
        before = block.size[:1]  # axes that the pixels' order would have to be changed for
        if self.loop.shares_columns:  # (o, outermost axis of the kernel, n, other axes)
            grad = np.moveaxis(grad, 2 + geometry.outermost, 1)
            before = block.size[: 1 + geometry.outermost]
        if not (self.plan.grad_in_place and prod(before) == 1):
            copy = self._grad_scratch[part].array("grad", grad.shape)
            if self.loop.conjugates:
                np.conjugate(grad, out=copy)
            else:
                copy[...] = grad
            grad = copy
        return grad.reshape(geometry.groups, geometry.group_outputs, block.area)[:, self._rows]

    def _add_product(self, grad: np.ndarray, columns: np.ndarray, sums: np.ndarray, is_first: bool) -> None:
        """sums (+)= grad columns', a piece of the outputs at a time; `sums` may have the rows' axes apart."""
        transposed = columns.swapaxes(1, 2)
        swaps = self.geometry.group_outputs < min(_MANY_OUTPUTS, columns.shape[1])
        for first in range(0, sums.shape[1], self.plan.piece):
            piece = slice(first, first + self.plan.piece)
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


def _at(array: np.ndarray, axis: int, place: int) -> np.ndarray:
    """A view at a place along one axis."""
    index: list[Any] = [slice(None)] * axis
    return array[(*index, place)]


def _real(x: np.ndarray) -> np.ndarray:
    return x.real


def _imaginary(x: np.ndarray) -> np.ndarray:
    """The imaginary parts; of a real array zeros that take no memory."""
    return x.imag if x.dtype.kind == "c" else np.broadcast_to(x.dtype.type(0), x.shape)
