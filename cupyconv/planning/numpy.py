"""The choice of a method on NumPy, and of the blocks it works in.

A block is a run of samples or of pixels whose columns, products and epilogue stay in cache.  The sizes
below were measured on a machine with 2 MiB of L2 cache a core (``tests/benchmarks``): a product wants
as many columns as the cache holds; what is bound by memory wants its block to stay in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.machine import HostModel
from cupyconv.operands import Operand, c_strides
from cupyconv.plan import BlockLoop, Buffer, Plan
from cupyconv.planning.request import (
    METHODS,
    ConvRequest,
    NotApplicable,
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
#: Outputs from which a 1x1 product is bound by arithmetic: each element read is used that often.
PRODUCT_OUTPUTS = 32
#: Operations a byte beyond which a few cores are busier than their memory.
BALANCE = 8

Block = tuple[int, int, int, int]


def plan_conv(request: ConvRequest) -> Plan:
    """The plan for ``request.method``; ValueError where a named method does not apply."""
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
    view = (
        geometry.is_pointwise
        and len(request.xs) == 1
        and geometry.pixels >= LONE_PIXELS
        and request.xs[0].dtype == accumulator(request.x_dtype)
        and is_complex(request.x_dtype) == is_complex(request.weight_dtype)
        and _is_matrix(request.xs[0])
    )
    column_bytes = 0 if view else geometry.in_channels * geometry.taps * _item(request.x_dtype)
    by_memory = geometry.is_pointwise and geometry.group_outputs < PRODUCT_OUTPUTS
    target = MEMORY_BLOCK if by_memory else PRODUCT_BLOCK
    block = _cut(request, column_bytes, target, SMALLEST_BLOCK, 1 if view else geometry.batch)
    words = "products of the input where it lies" if view else "columns and products"
    if request.method == "gemm":
        why = "method='gemm' was asked for"
    else:
        why = "slower: a pass over the sums for every tap"
    return _plan(request, "gemm", "view" if view else "columns", block, column_bytes, words, ("direct", why))


def _direct(request: ConvRequest) -> Plan:
    geometry = request.geometry
    scaled = geometry.is_depthwise and is_complex(request.x_dtype) == is_complex(request.weight_dtype)
    tap_bytes = 0 if scaled else geometry.in_channels * _item(request.x_dtype)
    tap_bytes += _sum_bytes(request, in_place=False)  # one tap's products beside the sums
    block = _cut(request, tap_bytes, MEMORY_BLOCK, 1, geometry.batch)
    if request.method == "direct":
        why = "method='direct' was asked for"
    elif geometry.is_depthwise:
        why = "slower: with one channel a group, each product is a vector by a matrix"
    else:
        why = "columns do not fit the workspace limit"
    words = "tap by tap, no columns"
    return _plan(request, "direct", "scaled taps" if scaled else "taps", block, tap_bytes, words, ("gemm", why))


def _plan(
    request: ConvRequest, method: str, body: str, block: Block, block_bytes: int, words: str, rejected: tuple[str, str]
) -> Plan:
    geometry, machine = request.geometry, request.machine
    assert isinstance(machine, HostModel)
    axes = (geometry.batch, *geometry.out_size)
    empty = 0 in axes or geometry.out_channels == 0
    blocks = 0 if empty else prod(-(-extent // part) for extent, part in zip(axes, block))
    threads = max(1, min(machine.threads, blocks))
    in_place = body in ("columns", "view") and block[0] == 1 and _sums_fit_result(request)
    sizes = {
        "weight": _weight_copy(request),
        "blocks": threads * prod(block) * (block_bytes + _sum_bytes(request, in_place)),
    }
    loop = BlockLoop(
        body=body, inputs=tuple(x.name for x in request.xs), block=block, blocks=blocks, threads=threads,
        geometry=geometry, dtype=accumulator(request.out.dtype), activation=request.activation, in_place=in_place,
        bytes_moved=request.minimal_bytes, flops=request.flops,
    )  # fmt: skip
    return Plan(
        method=method, backend="numpy", device=str(machine), problem=str(geometry), result=describe_result(request),
        steps=() if empty else (loop,), flops=request.flops, bytes_moved=request.minimal_bytes,
        minimal_bytes=request.minimal_bytes, rejected=(rejected,), reason=words, notes=request.notes,
        bound="memory" if request.flops < BALANCE * request.minimal_bytes else "arithmetic",
        workspace=() if empty else tuple(Buffer(name, nbytes) for name, nbytes in sizes.items() if nbytes),
    )  # fmt: skip


def _cut(request: ConvRequest, columns: int, target: int, smallest: int, most_samples: int) -> Block:
    """A block of at most `target` bytes at `columns` bytes a pixel, and within the workspace limit.

    With no columns, it is the sums that are to stay in cache.
    """
    geometry = request.geometry
    sums = _sum_bytes(request, in_place=False)
    threads = request.machine.threads if isinstance(request.machine, HostModel) else 1
    room = (request.limit - _weight_copy(request) - 2 * Plan.ALIGNMENT) // threads // (columns + sums or 1)
    if room < min(smallest, geometry.pixels):
        least = _weight_copy(request) + 2 * Plan.ALIGNMENT + threads * smallest * (columns + sums)
        raise NotApplicable(f"the smallest block needs {least:,} bytes of workspace, the limit is {request.limit:,}")
    pixels = max(smallest, min(room, target // (columns or sums or 1)))
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


def _sum_bytes(request: ConvRequest, in_place: bool) -> int:
    """Bytes a pixel of a block's sums, unless they are the result, and of the temporary an activation takes."""
    arrays = 2 if not in_place else int(bool(request.activation))
    return arrays * request.geometry.out_channels * _item(request.out.dtype)


def _sums_fit_result(request: ConvRequest) -> bool:
    """Whether products can be written where the result lies.  A residual may lie there too: it is read later."""
    return (
        request.out.dtype == accumulator(request.out.dtype)
        and request.residual is None
        and is_complex(request.x_dtype) == is_complex(request.weight_dtype)
        and request.out.pixel_stride == 1
        and _is_matrix(request.out)
    )


def _is_matrix(image: Operand) -> bool:
    """Whether a sample is a matrix that BLAS takes as it lies, channel by channel or pixel by pixel."""
    pixel_stride, channels = image.pixel_stride, image.shape[1]
    if pixel_stride is None:
        return False
    by_channel = pixel_stride == 1 and (channels == 1 or image.stride_c >= image.pixels)
    return by_channel or (image.stride_c == 1 and pixel_stride >= channels)


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
    return (
        prod(weight.shape)
        * ITEMSIZE[accumulator(real_part(request.weight_dtype))]
        * (1 + is_complex(request.weight_dtype))
    )
