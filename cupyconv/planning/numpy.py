"""The choice of a method on NumPy, and of the blocks it works in.

A block is a run of samples or of pixels whose columns, products and epilogue stay in cache.  The sizes
below were measured on a machine with 2 MiB of L2 cache a core (``tests/benchmarks``): a product wants
as many columns as the cache holds; what is bound by memory wants its block to stay in L2.
"""

from __future__ import annotations

from math import prod
from typing import Callable

from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.machine import HostModel
from cupyconv.operands import c_strides
from cupyconv.plan import BlockLoop, Buffer, Plan
from cupyconv.planning.request import (
    METHODS,
    ConvRequest,
    NotApplicable,
    check_method,
    describe_result,
    without_empty_inputs,
)

#: Bytes of columns a block aims at where products dominate, and where memory does.
PRODUCT_BLOCK = 4 << 20
MEMORY_BLOCK = 512 << 10
#: Pixels below which a block of columns is not cut: the products would be vectors.
SMALLEST_BLOCK = 32
#: Pixels from which one sample fills a product; smaller images share one, through columns.
LONE_PIXELS = 256

Block = tuple[int, int, int, int]


def plan_conv(request: ConvRequest) -> Plan:
    """The plan for ``request.method``; ValueError where a named method does not apply."""
    check_method(request.method)
    request = without_empty_inputs(request)
    plans: dict[str, Callable[[], Plan]] = {"gemm": lambda: _gemm(request), "direct": lambda: _direct(request)}
    preferred = "direct" if request.geometry.is_depthwise else "gemm"
    if request.method != "auto":
        try:
            return plans[request.method]()
        except NotApplicable as reason:
            raise ValueError(f"method {request.method!r} does not apply: {reason}") from None
    try:
        return plans[preferred]()
    except NotApplicable as reason:
        refused = str(reason)
    other = next(method for method in METHODS if method != preferred)
    try:
        return plans[other]()
    except NotApplicable as reason:
        raise ValueError(f"no method applies: {preferred}: {refused}; {other}: {reason}") from None


def _gemm(request: ConvRequest) -> Plan:
    geometry = request.geometry
    in_place = (
        geometry.is_pointwise
        and len(request.xs) == 1
        and geometry.pixels >= LONE_PIXELS
        and request.xs[0].dtype == accumulator(request.x_dtype)
        and is_complex(request.x_dtype) == is_complex(request.weight_dtype)
        and request.xs[0].pixel_stride is not None
    )
    column_bytes = 0 if in_place else geometry.in_channels * geometry.taps * _item(request.x_dtype)
    target = MEMORY_BLOCK if geometry.is_pointwise else PRODUCT_BLOCK
    block = _cut(request, column_bytes, target, SMALLEST_BLOCK, 1 if in_place else geometry.batch)
    body = "products of the input in place" if in_place else "columns and products"
    why = "depthwise: a product for each channel would be a vector's" if geometry.is_depthwise else "slower: a product a tap"
    if request.method == "gemm" and geometry.is_depthwise:
        why = "method='gemm' was asked for"
    return _plan(request, "gemm", "views" if in_place else "columns", block, column_bytes, body, (("direct", why),))


def _direct(request: ConvRequest) -> Plan:
    geometry = request.geometry
    tap_bytes = geometry.in_channels * _item(request.x_dtype) + _sum_bytes(request)
    block = _cut(request, tap_bytes, MEMORY_BLOCK, 1, geometry.batch)
    if geometry.is_depthwise:
        reason = ("gemm", "depthwise: each product would be a vector by a matrix")
    else:
        reason = ("gemm", "columns do not fit the workspace limit" if request.method == "auto" else "method='direct' was asked for")
    return _plan(request, "direct", "taps", block, tap_bytes, "tap by tap, no columns", (reason,))


def _plan(
    request: ConvRequest, method: str, body: str, block: Block, block_bytes: int, words: str,
    rejected: tuple[tuple[str, str], ...],
) -> Plan:  # fmt: skip
    geometry, machine = request.geometry, request.machine
    assert isinstance(machine, HostModel)
    axes = (geometry.batch, *geometry.out_size)
    empty = 0 in axes or geometry.out_channels == 0
    blocks = 0 if empty else prod(-(-extent // part) for extent, part in zip(axes, block))
    threads = max(1, min(machine.threads, blocks))
    workspace = tuple(
        Buffer(name, nbytes)
        for name, nbytes in (
            ("weight", _weight_copy(request)),
            ("blocks", threads * prod(block) * (block_bytes + _sum_bytes(request))),
        )
        if nbytes and not empty
    )
    steps = () if empty else (
        BlockLoop(
            body, tuple(x.name for x in request.xs), block, blocks, threads, geometry, accumulator(request.out.dtype), request.activation,
            request.minimal_bytes, request.flops,
        ),
    )  # fmt: skip
    intensity = request.flops / max(1, request.minimal_bytes)
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=str(geometry), result=describe_result(request),
        steps=steps, flops=request.flops, bytes_moved=request.minimal_bytes, minimal_bytes=request.minimal_bytes,
        bound="memory" if intensity < 8 else "arithmetic", rejected=rejected, reason=words,
        notes=request.notes, workspace=workspace,
    )  # fmt: skip


def _cut(request: ConvRequest, columns: int, target: int, smallest: int, most_samples: int) -> Block:
    """A block of at most `target` bytes at `columns` bytes a pixel, and within the workspace limit."""
    geometry = request.geometry
    per_pixel = columns + _sum_bytes(request)
    threads = request.machine.threads if isinstance(request.machine, HostModel) else 1
    room = (request.limit - _weight_copy(request) - 2 * Plan.ALIGNMENT) // threads // max(1, per_pixel)
    if room < min(smallest, geometry.pixels):
        raise NotApplicable(
            f"the smallest block needs {_weight_copy(request) + threads * smallest * per_pixel:,} bytes of workspace,"
            f" the limit is {request.limit:,}"
        )
    pixels = max(smallest, min(room, target // max(1, columns or per_pixel)))
    depth, height, width = geometry.out_size
    if pixels >= geometry.pixels:
        samples = min(most_samples, max(1, pixels // max(1, geometry.pixels)))
        return (max(1, _even(geometry.batch, samples)), max(1, depth), max(1, height), max(1, width))
    if pixels >= height * width:
        return (1, _even(depth, pixels // (height * width)), height, width)
    if pixels >= width:
        return (1, 1, _even(height, pixels // width), width)
    return (1, 1, 1, _even(width, pixels))


def _even(extent: int, part: int) -> int:
    """The part that cuts `extent` into as few pieces as `part` does, of equal size."""
    return -(-extent // -(-extent // part)) if extent else 1


def _item(dtype: str) -> int:
    return ITEMSIZE[accumulator(dtype)]


def _sum_bytes(request: ConvRequest) -> int:
    """Bytes a pixel of a block's sums, and of one more such array where a step needs a temporary."""
    return 2 * request.geometry.out_channels * _item(request.out.dtype)


def _weight_copy(request: ConvRequest) -> int:
    """Bytes of the weight where it must be copied: another dtype, another order, or parts taken apart."""
    weight, geometry = request.weight, request.geometry
    in_place = (
        weight.dtype == accumulator(request.weight_dtype)
        and weight.strides == c_strides(weight.shape)
        and not (is_complex(request.weight_dtype) and not is_complex(request.x_dtype))
    )
    if in_place and not geometry.is_depthwise:
        return 0
    return prod(weight.shape) * ITEMSIZE[accumulator(real_part(request.weight_dtype))] * (
        1 + is_complex(request.weight_dtype)
    )
