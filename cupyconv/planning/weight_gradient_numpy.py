"""The gradient of a weight on NumPy: the forward pass's blocks, multiplied by the gradient that arrives.

::

    dW [g, O_g, K_g]   +=   grad [g, O_g, pixels]   x   columns [g, K_g, pixels]'      for every block of pixels

Sums are kept for a range of outputs at a time, so that they keep within the workspace limit; nearly always
that is all of them, and where the result is in C order they are the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cupyconv.activations import IDENTITY
from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.loops import WeightGradientLoop
from cupyconv.machine import HostModel
from cupyconv.operands import c_strides
from cupyconv.plan import Buffer, Plan
from cupyconv.planning.even_parts import even_part
from cupyconv.planning.numpy import (
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
from cupyconv.planning.request import WeightGradientRequest, without_empty_inputs

#: Bytes of products a block adds to the sums at a time: they stay in cache until they are added.
PRODUCT_PIECE = 4 << 20


def plan_weight_gradient(request: WeightGradientRequest) -> Plan:
    """The plan for ``request.method``; ValueError where a named method does not apply."""
    assert not (request.prologue and _splits_x(request)), "a prologue is of complex numbers, not of their parts"
    request = without_empty_inputs(request)
    preferred, other = ("direct", "gemm") if request.geometry.is_depthwise else ("gemm", "direct")
    return choose(request, {"gemm": _gemm, "direct": _direct}, preferred, other)


def _gemm(request: WeightGradientRequest) -> Plan:
    geometry, xs = request.geometry, request.xs
    view = (
        geometry.is_pointwise
        and not request.prologue
        and geometry.pixels >= LONE_PIXELS
        and (len(xs) == 1 or geometry.groups == 1)
        and all(x.dtype == accumulator(request.x_dtype) and is_matrix(x) for x in xs)
        and not _splits_x(request)
    )
    why = "method='gemm' was asked for" if request.method == "gemm" else "slower: a product for every tap"
    if view:
        words = "products of the inputs where they lie"
        return _plan(request, "gemm", _Body("view", 0), 1, words, ("direct", why))
    columns = geometry.in_channels * geometry.taps * _x_item(request)
    if taps_share(geometry, _x_item(request)):
        outer = geometry.kernel[geometry.outermost]
        body = _Body("shared columns", columns // outer // geometry.groups, shares=True)
        words = f"columns that {outer} taps share, and products"
        return _plan(request, "gemm", body, _samples_of_a_block(request), words, ("direct", why))
    body = _Body("columns", columns, tile=geometry.taps > 1)
    return _plan(request, "gemm", body, geometry.batch, "columns and products", ("direct", why))


def _direct(request: WeightGradientRequest) -> Plan:
    geometry = request.geometry
    if request.method == "direct":
        why = "method='direct' was asked for"
    elif geometry.is_depthwise:
        why = "slower: with one channel a group, each product is a vector by a matrix"
    else:
        why = "columns do not fit the workspace limit"
    if geometry.is_depthwise:
        taps = geometry.kernel[geometry.outermost]
        words = f"columns that {taps} taps share, multiplied" if taps > 1 else "each element multiplied"
        body = _Body("multiplied taps", geometry.taps // taps * _x_item(request), shares=True)
        return _plan(request, "direct", body, _samples_of_a_block(request), words, ("gemm", why))
    body = _Body("taps", geometry.in_channels * _x_item(request))
    return _plan(request, "direct", body, geometry.batch, "tap by tap, no columns", ("gemm", why))


def _samples_of_a_block(request: WeightGradientRequest) -> int:
    """One where products in groups can read its gradient where it lies: copying that takes as long as they do."""
    geometry = request.geometry
    lone = geometry.groups > 1 and geometry.pixels >= LONE_PIXELS and _grad_is_factor(request)
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

    def workspace(self, request: WeightGradientRequest, block: Block, grad_in_place: bool) -> int:
        """Bytes for one block: columns, the tile they are taken from, gathered borders, and its part of `grad`."""
        geometry, item = request.geometry, _x_item(request)
        if self.shares:
            part = shared_part(geometry, block, item, request.prologue)
            nbytes = part * shared_bytes(geometry, block, item, request.prologue)
            grad_in_place = grad_in_place and is_in_order(geometry, block)
        else:
            pixels = tile_pixels(geometry, block) if self.tile else prod(block[1:])
            read = block[0] * pixels * geometry.in_channels * item
            nbytes = prod(block) * self.per_pixel + read * (self.tile + temporaries(geometry, request.prologue))
        if not grad_in_place or block[0] > 1:
            nbytes += prod(block) * geometry.out_channels * ITEMSIZE[accumulator(request.grad_dtype)]
        return nbytes


def _plan(
    request: WeightGradientRequest, method: str, body: _Body, most_samples: int, words: str, rejected: tuple[str, str]
) -> Plan:
    geometry, machine = request.geometry, request.machine
    assert isinstance(machine, HostModel)
    in_place = _sums_are_result(request)
    grad_in_place = _grad_is_factor(request)
    row = geometry.groups * geometry.reduction * ITEMSIZE[accumulator(request.out.dtype)]  # one output a group
    private = machine.threads - in_place  # sums beside the result
    rows = geometry.group_outputs
    if private:
        rows = even_part(rows, request.limit // 2 // (private * row or 1))
    piece = even_part(rows, min(PRODUCT_PIECE, request.limit // 4 // machine.threads) // (row or 1))
    fixed = private * rows * row + machine.threads * piece * row + 4 * Plan.ALIGNMENT

    def needed(block: Block) -> int:
        return fixed + machine.threads * body.workspace(request, block, grad_in_place)

    target = PRODUCT_BLOCK // (body.per_pixel or geometry.in_channels * _x_item(request) or 1)
    if body.shares and geometry.groups > 1:  # a copy of the gradient is of all groups
        target = min(target, PRODUCT_BLOCK // (geometry.out_channels * ITEMSIZE[accumulator(request.grad_dtype)]))
    axes = (geometry.batch, *geometry.out_size)
    if body.name == "view" and grad_in_place:
        target = geometry.pixels
    block = largest_block(geometry, needed, request.limit, target, SMALLEST_BLOCK, most_samples)
    blocks = 0 if 0 in axes else prod(-(-extent // part) for extent, part in zip(axes, block))
    threads = max(1, min(machine.threads, blocks))
    steps = tuple(
        WeightGradientLoop(
            body=body.name, inputs=tuple(x.name for x in request.xs), block=block, blocks=blocks, threads=threads,
            geometry=geometry, dtype=accumulator(request.out.dtype), x_dtype=accumulator(request.x_dtype),
            weight_dtype=accumulator(request.grad_dtype), activation=IDENTITY, in_place=in_place,
            bytes_moved=request.minimal_bytes, flops=request.flops * min(rows, geometry.group_outputs - first) // geometry.group_outputs,
            first_row=first, rows=min(rows, geometry.group_outputs - first), piece=piece, grad_in_place=grad_in_place,
            part=shared_part(geometry, block, _x_item(request), request.prologue) if body.shares else 0, prologue=request.prologue,
        )
        for first in range(0, geometry.group_outputs, rows or 1)
        if request.out.nbytes
    )  # fmt: skip
    sizes = {
        "sums": (threads - in_place) * rows * row,
        "products": threads * piece * row if blocks > 1 or not in_place else 0,
        "blocks": threads * body.workspace(request, block, grad_in_place) if blocks else 0,
    }
    kernel = geometry.spatial(geometry.kernel)
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=f"weight gradient of {geometry}",
        result=f"{request.out.dtype} {(geometry.out_channels, geometry.group_channels, *kernel)}",
        steps=steps, flops=request.flops, bytes_moved=request.minimal_bytes * max(1, len(steps)),
        minimal_bytes=request.minimal_bytes, rejected=(rejected, ("implicit_gemm", NO_IMPLICIT_GEMM)), reason=words,
        notes=request.notes, bound="memory" if request.flops < BALANCE * request.minimal_bytes else "arithmetic",
        workspace=tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes and steps),
    )  # fmt: skip


def _sums_are_result(request: WeightGradientRequest) -> bool:
    """Whether the sums can be kept where the result lies."""
    out = request.out
    return out.dtype == accumulator(out.dtype) and out.strides == c_strides(out.shape) and bool(out.nbytes)


def _grad_is_factor(request: WeightGradientRequest) -> bool:
    """Whether a sample of `grad` is a matrix that a product takes as it lies, in the dtype and kind it computes in."""
    grad = request.grad
    return grad.dtype == accumulator(request.grad_dtype) and is_matrix(grad) and not is_complex(request.grad_dtype)


def _splits_x(request: WeightGradientRequest) -> bool:
    """Whether the inputs' real and imaginary parts are read apart: beside a real gradient, half a complex product."""
    return is_complex(request.x_dtype) and not is_complex(request.grad_dtype)


def _x_item(request: WeightGradientRequest) -> int:
    dtype = accumulator(request.x_dtype)
    return ITEMSIZE[real_part(dtype) if _splits_x(request) else dtype]
