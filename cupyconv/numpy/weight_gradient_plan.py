"""The gradient of a weight on NumPy: the forward pass's blocks, multiplied by the gradient that arrives.

::

    dW [g, O_g, K_g]   +=   grad [g, O_g, pixels]   x   columns [g, K_g, pixels]'      for every block of pixels

Sums are kept for a range of outputs at a time, so that they keep within the workspace limit; nearly always
that is all of them, and where the result is in C order they are the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.numpy.convolution_plan import (
    BALANCE,
    LONE_PIXELS,
    NO_IMPLICIT_GEMM,
    PRODUCT_BLOCK,
    SMALLEST_BLOCK,
    Block,
    choose,
    is_in_order,
    is_matrix,
    largest_block,
    shared_bytes,
    shared_part,
    taps_share,
    temporaries,
    tile_pixels,
)
from cupyconv.numpy.loops import WeightGradientLoop
from cupyconv.problem.activations import IDENTITY
from cupyconv.problem.arrays import ITEMSIZE, accumulator, c_strides, is_complex, real_part
from cupyconv.problem.geometry import even_part
from cupyconv.problem.plan import Buffer, Plan
from cupyconv.problem.problems import HostModel, WeightGradientProblem, without_empty_inputs

#: Bytes of products a block adds to the sums at a time: they stay in cache until they are added.
PRODUCT_PIECE = 4 << 20


def plan_weight_gradient(problem: WeightGradientProblem) -> Plan:
    """The plan for ``problem.method``; ValueError where a named method does not apply."""
    assert not (problem.prologue and _splits_x(problem)), "a prologue is of complex numbers, not of their parts"
    problem = without_empty_inputs(problem)
    preferred, other = ("direct", "gemm") if problem.geometry.is_depthwise else ("gemm", "direct")
    return choose(problem, {"gemm": _gemm, "direct": _direct}, preferred, other)


def _gemm(problem: WeightGradientProblem) -> Plan:
    geometry, xs = problem.geometry, problem.xs
    view = (
        geometry.is_pointwise
        and not problem.prologue
        and geometry.pixels >= LONE_PIXELS
        and (len(xs) == 1 or geometry.groups == 1)
        and all(x.dtype == accumulator(problem.x_dtype) and is_matrix(x) for x in xs)
        and not _splits_x(problem)
    )
    why = "method='gemm' was asked for" if problem.method == "gemm" else "slower: a product for every tap"
    if view:
        words = "products of the inputs where they lie"
        return _plan(problem, "gemm", _Body("view", 0), 1, words, ("direct", why))
    columns = geometry.in_channels * geometry.taps * _x_item(problem)
    if taps_share(geometry, _x_item(problem)):
        outer = geometry.kernel[geometry.outermost]
        body = _Body("shared columns", columns // outer // geometry.groups, shares=True)
        words = f"columns that {outer} taps share, and products"
        return _plan(problem, "gemm", body, _samples_of_a_block(problem), words, ("direct", why))
    body = _Body("columns", columns, tile=geometry.taps > 1)
    return _plan(problem, "gemm", body, geometry.batch, "columns and products", ("direct", why))


def _direct(problem: WeightGradientProblem) -> Plan:
    geometry = problem.geometry
    if problem.method == "direct":
        why = "method='direct' was asked for"
    elif geometry.is_depthwise:
        why = "slower: with one channel a group, each product is a vector by a matrix"
    else:
        why = "columns do not fit the workspace limit"
    if geometry.is_depthwise:
        taps = geometry.kernel[geometry.outermost]
        words = f"columns that {taps} taps share, multiplied" if taps > 1 else "each element multiplied"
        body = _Body("multiplied taps", geometry.taps // taps * _x_item(problem), shares=True)
        return _plan(problem, "direct", body, _samples_of_a_block(problem), words, ("gemm", why))
    body = _Body("taps", geometry.in_channels * _x_item(problem))
    return _plan(problem, "direct", body, geometry.batch, "tap by tap, no columns", ("gemm", why))


def _samples_of_a_block(problem: WeightGradientProblem) -> int:
    """One where products in groups can read its gradient where it lies: copying that takes as long as they do."""
    geometry = problem.geometry
    lone = geometry.groups > 1 and geometry.pixels >= LONE_PIXELS and _grad_is_factor(problem)
    return 1 if lone else geometry.batch


@dataclass(frozen=True)
class _Body:
    """A loop body and what it needs of memory: bytes a pixel of a block, and whether it copies a tile.

    Where taps share columns, the bytes are those of a group.
    """

    name: str
    per_pixel: int
    tile: bool = False
    shares: bool = False

    def workspace(self, problem: WeightGradientProblem, block: Block, grad_in_place: bool) -> int:
        """Bytes for one block: columns, the tile they are taken from, gathered borders, and its part of `grad`."""
        geometry, item = problem.geometry, _x_item(problem)
        if self.shares:
            part = shared_part(geometry, block, item, problem.prologue)
            nbytes = part * shared_bytes(geometry, block, item, problem.prologue)
            grad_in_place = grad_in_place and is_in_order(geometry, block)
        else:
            pixels = tile_pixels(geometry, block) if self.tile else prod(block[1:])
            read = block[0] * pixels * geometry.in_channels * item
            nbytes = prod(block) * self.per_pixel + read * (self.tile + temporaries(geometry, problem.prologue))
        if not grad_in_place or block[0] > 1:
            nbytes += prod(block) * geometry.out_channels * ITEMSIZE[accumulator(problem.grad_dtype)]
        return nbytes


def _plan(
    problem: WeightGradientProblem, method: str, body: _Body, most_samples: int, words: str, rejected: tuple[str, str]
) -> Plan:
    geometry, machine = problem.geometry, problem.machine
    assert isinstance(machine, HostModel)
    in_place = _sums_are_result(problem)
    grad_in_place = _grad_is_factor(problem)
    row = geometry.groups * geometry.reduction * ITEMSIZE[accumulator(problem.out.dtype)]  # one output a group
    private = machine.threads - in_place  # sums beside the result
    rows = geometry.group_outputs
    if private:
        rows = even_part(rows, problem.limit // 2 // (private * row or 1))
    piece = even_part(rows, min(PRODUCT_PIECE, problem.limit // 4 // machine.threads) // (row or 1))
    fixed = private * rows * row + machine.threads * piece * row + 4 * Plan.ALIGNMENT

    def needed(block: Block) -> int:
        return fixed + machine.threads * body.workspace(problem, block, grad_in_place)

    target = PRODUCT_BLOCK // (body.per_pixel or geometry.in_channels * _x_item(problem) or 1)
    if body.shares and geometry.groups > 1:  # a copy of the gradient is of all groups
        target = min(target, PRODUCT_BLOCK // (geometry.out_channels * ITEMSIZE[accumulator(problem.grad_dtype)]))
    axes = (geometry.batch, *geometry.out_size)
    if body.name == "view" and grad_in_place:
        target = geometry.pixels
    block = largest_block(geometry, needed, problem.limit, target, SMALLEST_BLOCK, most_samples)
    blocks = 0 if 0 in axes else prod(-(-extent // part) for extent, part in zip(axes, block))
    threads = max(1, min(machine.threads, blocks))
    steps = tuple(
        WeightGradientLoop(
            body=body.name, inputs=tuple(x.name for x in problem.xs), block=block, blocks=blocks, threads=threads,
            geometry=geometry, dtype=accumulator(problem.out.dtype), x_dtype=accumulator(problem.x_dtype),
            weight_dtype=accumulator(problem.grad_dtype), activation=IDENTITY, in_place=in_place,
            bytes_moved=problem.minimal_bytes, flops=problem.flops * min(rows, geometry.group_outputs - first) // geometry.group_outputs,
            first_row=first, rows=min(rows, geometry.group_outputs - first), piece=piece, grad_in_place=grad_in_place,
            part=shared_part(geometry, block, _x_item(problem), problem.prologue) if body.shares else 0, prologue=problem.prologue,
        )
        for first in range(0, geometry.group_outputs, rows or 1)
        if problem.out.nbytes
    )  # fmt: skip
    sizes = {
        "sums": (threads - in_place) * rows * row,
        "products": threads * piece * row if blocks > 1 or not in_place else 0,
        "blocks": threads * body.workspace(problem, block, grad_in_place) if blocks else 0,
    }
    kernel = geometry.spatial(geometry.kernel)
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=f"weight gradient of {geometry}",
        result=f"{problem.out.dtype} {(geometry.out_channels, geometry.group_channels, *kernel)}",
        steps=steps, flops=problem.flops, bytes_moved=problem.minimal_bytes * max(1, len(steps)),
        minimal_bytes=problem.minimal_bytes, rejected=(rejected, ("implicit_gemm", NO_IMPLICIT_GEMM)), reason=words,
        notes=problem.notes, bound="memory" if problem.flops < BALANCE * problem.minimal_bytes else "arithmetic",
        workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes and steps),
    )  # fmt: skip


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
