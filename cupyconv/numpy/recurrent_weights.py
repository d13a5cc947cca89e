"""Weights of a recurrent layer as its steps multiply them: in place, or copied to the layout that BLAS reads fastest.

A copy includes slopes, biases, and the halves of a doubled lstm, which would otherwise be passes over all gates.
`recurrent_cells` explains these terms.  A copy saves time if many steps use the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
from numpy import multiply

from cupyconv.numpy.backend import aligned_bytes, product_of
from cupyconv.numpy.cost import SMALL_PRODUCT
from cupyconv.problem.activations import Activation
from cupyconv.problem.recurrence import RecurrentGeometry

#: Rows of a weight that are multiplied at a time, if BLAS would pack both factors of the whole product in each step.
_BLOCKS = (64, 48, 32)
#: Largest product without blocks, as a fraction of the largest that BLAS does not pack; close to that, products are
#: slower.
_IN_ONE = 0.6
#: Steps from which a copy of the weight in blocks takes less time than it saves.
_MANY_STEPS = 8
#: Elements of a weight below which an aligned copy, made some rows at a time, takes longer than it saves.
_FEW_ELEMENTS = 16_000
#: Rows of a weight that are copied at a time, so that columns are read and written in cache.
_ROWS_COPIED = 64
#: The order in which a doubled lstm stores its gates.
DOUBLED = (2, 1, 0, 3)


def slopes(geometry: RecurrentGeometry, direction: int, doubled: bool = False) -> list[float]:
    """The factor of each gate before its activation, in the order of a `doubled` lstm or in the usual one."""
    each = [0.5 if activation.name == "sigmoid" else 1.0 for activation in activations_of_gates(geometry, direction)]
    return [each[gate] for gate in DOUBLED] if doubled else each


def activations_of_gates(geometry: RecurrentGeometry, direction: int) -> list[Activation]:
    """The activation of each gate."""
    f, *others = geometry.activations[direction]
    return {"rnn": [f], "lstm": [f, f, *others[:1], f], "gru": [f, f, *others]}[geometry.cell]


def is_doubled(geometry: RecurrentGeometry, direction: int, peephole: bool, folded: bool) -> bool:
    """Whether an lstm stores doubled values of its gates i, f, o and its h, which folded weights compensate."""
    names = [activation.name for activation in geometry.activations[direction]]
    return folded and geometry.cell == "lstm" and not peephole and names == ["sigmoid", "tanh", "tanh"]


def block_of_rows(rows: int, columns: int, geometry: RecurrentGeometry, samples: int) -> int:
    """Rows per block of a weight that is copied in blocks, so that each product is small; 0 if it has no blocks."""
    if samples == 1 or geometry.steps < _MANY_STEPS or rows * columns * samples <= _IN_ONE * SMALL_PRODUCT:
        return 0
    small = [block for block in _BLOCKS if block * columns * samples <= SMALL_PRODUCT]
    return min(small, key=lambda block: in_blocks(rows, block), default=0)


def in_blocks(rows: int, block: int) -> int:
    """Rows of all blocks together; the last block may have excess rows, which are not used."""
    return -(-rows // block) * block if block else rows


def copied_for_blas(
    parts: Sequence[np.ndarray], slope: np.ndarray | None, block: int, order: Sequence[int] = (0,), halved: int = 0
) -> np.ndarray:
    """Copy a weight of these parts, side by side, in column-major order, and multiply each row by its slope.

    The shape is ``(rows, columns)``, or ``(blocks, rows per block, columns)`` if the weight is multiplied in blocks.
    BLAS reads a weight with this layout in half the time if it begins at a cache line.  A small weight gains little,
    and is copied at once without this alignment.

    The rows of gates are stored in this `order`, in which slopes are given.  The first `halved` columns are also
    multiplied by a half.
    """
    rows, columns, dtype = len(parts[0]), sum(part.shape[1] for part in parts), parts[0].dtype
    of_gate = rows // len(order)
    if rows * columns < _FEW_ELEMENTS and not block:
        joined = np.concatenate(parts, 1)
        if len(order) > 1:
            joined = joined.reshape(len(order), of_gate, columns).take(order, 0).reshape(rows, columns)
        turned = np.empty((columns, rows), dtype)
        if slope is None:
            turned[...] = joined.T
        else:
            multiply(joined.T, slope.T, turned)
        if halved:
            multiply(turned[:halved], np.array(0.5, dtype), turned[:halved])
        return turned.T
    own = block or rows  # no gaps between columns: the method `dot` would copy a matrix with gaps in each call
    memory = _at_cache_line((in_blocks(rows, own) // own, columns, own), dtype)
    run = block or _ROWS_COPIED
    for begin, end in pairwise(sorted({*range(0, rows, run), *range(0, rows, of_gate), rows})):
        copy = memory[begin // own, :, begin % own : begin % own + end - begin]
        column, source = 0, order[begin // of_gate] * of_gate + begin % of_gate
        for part in parts:
            copy[column : column + part.shape[1]] = part[source : source + end - begin].T
            column += part.shape[1]
    memory[-1, :, rows - (len(memory) - 1) * own :] = 0  # BLAS reads these rows beyond the weight too
    if slope is not None:
        if rows < len(memory) * own:
            slope = np.concatenate((slope, np.ones((len(memory) * own - rows, 1), dtype)))
        slope = slope.reshape(-1, 1, own)
        multiply(memory[:, halved:], slope, memory[:, halved:])
        if halved:
            multiply(memory[:, :halved], slope * dtype.type(0.5), memory[:, :halved])
    return memory.swapaxes(1, 2) if block else memory[0].T


def _at_cache_line(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialized memory that begins at a cache line."""
    return np.ndarray(shape, dtype, aligned_bytes(prod(shape) * dtype.itemsize))


#: A product with a weight, called with the other factor and the output array.
Product = Callable[[np.ndarray, np.ndarray], object]


def multiplied_by(weight: np.ndarray) -> Product:
    """Return ``product(factor, out)`` of a weight; if it is in blocks, `out` is (blocks, rows per block, N)."""
    return partial(np.matmul if weight.ndim > 2 else product_of(weight.shape[1]), weight)


def _no_copy() -> None:
    """Do nothing, for a weight that is multiplied in place."""


class Weights:
    """Weights and biases that one direction of a call multiplies and adds, in the dtype of the computation.

    If `slope` (G * H, 1) is given, the weights are *folded*: they are copied with the slopes, and the biases that are
    added with the state become one more column of `weight_hh`.  If they are `joined`, the columns of weight_ih come
    before that column, and no bias is left to add.  `block` and `input_block` are the rows per block of weight_hh and
    weight_ih, see `block_of_rows`.  The weights of a `doubled` lstm have its order of gates, and halved columns of h.
    """

    def __init__(
        self,
        geometry: RecurrentGeometry,
        weight_ih: np.ndarray,
        weight_hh: np.ndarray,
        bias_ih: np.ndarray | None = None,
        bias_hh: np.ndarray | None = None,
        peephole: np.ndarray | None = None,
        *,
        slope: np.ndarray | None = None,
        doubled: bool = False,
        joined: bool = False,
        block: int = 0,
        input_block: int = 0,
    ) -> None:
        rows, hidden = weight_hh.shape
        is_gru = geometry.cell == "gru"
        resets_product = is_gru and geometry.linear_before_reset
        both = bias_hh if bias_ih is None else bias_ih if bias_hh is None else bias_ih + bias_hh
        with_state = [weight_hh, weight_ih] if joined else [weight_hh]
        #: The bias that is added with the inputs, to the rows from `biased` on; and the bias of the product that a
        #: gru's reset gate multiplies.
        self.input_bias, self.biased, self.candidate_bias = both, 0, None
        if both is not None and (slope is not None or resets_product):
            first = 2 * hidden if is_gru else rows  # first row of the candidate, which may have two biases
            of_inputs, of_state = (bias_ih, bias_hh) if resets_product else (both, None)
            column = both.copy()
            if slope is None:
                column[first:] = 0 if of_inputs is None else of_inputs[first:]
                self.input_bias = column
                self.candidate_bias = None if of_state is None else of_state[first:, None]
            else:
                column[first:] = 0 if of_state is None else of_state[first:]
                with_state.append(column[:, None])
                self.input_bias = None
                if of_inputs is not None and first < rows:
                    self.input_bias, self.biased = of_inputs[first:] * slope[first:, 0], first
        order, halved = (DOUBLED, hidden) if doubled else ((0,), 0)
        #: The input weight, (G * H, I) or in blocks; not used if the weights are joined.
        self.weight_ih = weight_ih
        #: Functions that copy either weight; each must be called once before the weight is multiplied.  It then drops
        #: the reference to itself, which forms a cycle with this object: memory that waits for the collection of cycles
        #: cannot be reused by the next call.
        self.copy_input: Callable[[], None] = _no_copy
        self.copy_state: Callable[[], None] = _no_copy
        if input_block or (slope is not None and not joined):
            self.copy_input = partial(self._copy_input, slope, input_block, order)
        self.peephole = peephole
        if peephole is not None:
            self.peephole = peephole.reshape(3, hidden, 1) * (1 if slope is None else slope[0])
        #: ``recurrent(h, out)`` is the product with the state; ``candidate(h, out)`` is the candidate's product in a
        #: gru that resets the state.
        self.recurrent = self.candidate = multiplied_by(weight_hh)
        apart = 2 * hidden if is_gru and not resets_product else rows  # first row of the candidate, if it waits for r
        if block or slope is not None:
            self.copy_state = partial(self._copy_state, with_state, weight_hh, apart, slope, block, order, halved)
        elif apart < rows:
            self.recurrent, self.candidate = multiplied_by(weight_hh[:apart]), multiplied_by(weight_hh[apart:])

    def _copy_input(self, slope: np.ndarray | None, block: int, order: Sequence[int]) -> None:
        self.copy_input = _no_copy
        self.weight_ih = copied_for_blas([self.weight_ih], slope, block, order)

    def _copy_state(
        self,
        with_state: Sequence[np.ndarray],
        weight_hh: np.ndarray,
        apart: int,
        slope: np.ndarray | None,
        block: int,
        order: Sequence[int],
        halved: int,
    ) -> None:
        self.copy_state = _no_copy
        of_gates, own = [part[:apart] for part in with_state], None if slope is None else slope[:apart]
        self.recurrent = multiplied_by(copied_for_blas(of_gates, own, block, order, halved))
        if apart < len(weight_hh):
            own = None if slope is None else slope[apart:]
            self.candidate = multiplied_by(copied_for_blas([weight_hh[apart:]], own, block))
