"""One function per kernel: from a problem to the launch that does it.

The values of a launch's `params` follow the C++ structs of ``kernels/*.cuh`` field by field: a struct
is a tuple, a pointer an `Address` or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from cupyconv.activations import IDENTITY, Activation
from cupyconv.dtypes import ITEMSIZE, accumulator, is_complex, real_part
from cupyconv.geometry import ConvGeometry, Triple, Windows
from cupyconv.operands import Operand
from cupyconv.padding import PADDING_MODES
from cupyconv.plan import MAX_SOURCES, Address, Kernel, KernelLaunch

#: Static limit on shared memory that needs no opt-in on any GPU.
SHARED_BYTES = 48 << 10
#: Limits of a grid along x and y; the kernels loop beyond them.
GRID_X, GRID_Y = 2**31 - 1, 65535

PACKET_BYTES = 16
#: Outputs a thread of direct.cu and of merge.cu may keep.
DIRECT_TILE = 4
MERGE_TILES = (1, 2, 4, 8, 16)
DEPTHWISE_PIXELS = 4


def merge_tile(geometry: ConvGeometry, dtype: str) -> int | None:
    """Outputs a thread of the fused merge computes, or None where its weights do not fit.

    At most 64 sums of 32 bits a thread: 16 outputs, or 8 where a packet holds eight pixels.
    """
    largest = 8 if ITEMSIZE[dtype] == 2 else 16
    weight_bytes = max(1, geometry.in_channels) * ITEMSIZE[accumulator(dtype)]
    fitting = [t for t in MERGE_TILES if t <= largest and t * weight_bytes <= SHARED_BYTES]
    enough = [t for t in fitting if t >= geometry.out_channels]
    return enough[0] if enough else fitting[-1] if fitting else None


def merge_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...]
) -> KernelLaunch:
    """The fused merge; the caller has checked that every image has unit pixel stride."""
    tile = merge_tile(geometry, out.dtype)
    assert tile is not None
    width = packet_width((*xs, out), geometry.pixels)
    tiles = -(-geometry.out_channels // tile)
    return KernelLaunch(
        Kernel("merge", (("DTYPE", out.dtype), ("TILE", str(tile)), ("WIDTH", str(width)))),
        *_grid_and_block(geometry.batch, geometry.pixels, width, tiles, 256),
        (
            ("sources", _sources(geometry, xs)),
            ("weight", Address(weight.name)),
            ("weight_stride_o", weight.stride_n),
            ("weight_stride_c", weight.stride_c),
            ("out", image(out)),
            ("epilogue", epilogue),
            ("batch", geometry.batch),
            ("pixels", geometry.pixels),
            ("in_channels", geometry.in_channels),
            ("out_channels", geometry.out_channels),
        ),
        shared_bytes=tile * geometry.in_channels * ITEMSIZE[accumulator(out.dtype)],
        purpose="merge, bias, residual, activation",
        bytes_moved=_read_once(xs) * -(-geometry.out_channels // tile) + weight.nbytes + out.nbytes,
        flops=2 * geometry.products,
    )


def direct_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...]
) -> KernelLaunch:
    """Direct convolution, for everything."""
    dtypes = (("X_DTYPE", xs[0].dtype), ("W_DTYPE", weight.dtype), ("Y_DTYPE", out.dtype))
    tiles = geometry.groups * -(-geometry.group_outputs // DIRECT_TILE)
    return KernelLaunch(
        Kernel("direct", (*dtypes, ("TILE", str(DIRECT_TILE)))),
        *_grid_and_block(geometry.batch, geometry.pixels, 1, tiles, 128),
        _convolution_params(geometry, xs, weight, out, epilogue),
        purpose="convolution, bias, residual, activation",
        bytes_moved=_read_once(xs) + weight.nbytes + out.nbytes,
        flops=2 * geometry.products * (1, 2, 4)[is_complex(xs[0].dtype) + is_complex(weight.dtype)],
    )


def depthwise_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...]
) -> KernelLaunch:
    """One kernel per channel, any multiplier."""
    pixels = DEPTHWISE_PIXELS
    return KernelLaunch(
        Kernel("depthwise", (("DTYPE", out.dtype), ("PIXELS", str(pixels)))),
        *_grid_and_block(geometry.batch, geometry.pixels, pixels, geometry.out_channels, 128),
        _convolution_params(geometry, xs, weight, out, epilogue),
        shared_bytes=geometry.taps * ITEMSIZE[accumulator(out.dtype)],
        purpose="convolution, bias, residual, activation",
        bytes_moved=_read_once(xs) + weight.nbytes + out.nbytes,
        flops=2 * geometry.products,
    )


def im2col_launches(
    windows: Windows,
    xs: Sequence[Operand],
    columns: Operand,
    *,
    at: Address,
    first_sample: int = 0,
    samples: int | None = None,
    first_pixel: int = 0,
    pixels: int | None = None,
    purpose: str = "columns",
) -> list[KernelLaunch]:
    """Columns of a chunk of samples and pixels: one launch for every `MAX_SOURCES` inputs."""
    samples = windows.batch if samples is None else samples
    pixels = windows.pixels if pixels is None else pixels
    itemsize = columns.itemsize
    aligned = replace(columns, alignment=columns.alignment if at.offset % PACKET_BYTES == 0 else 1)
    width = packet_width((aligned,), PACKET_BYTES // itemsize)  # the kernel stores a row's tail by itself
    launches = []
    for begin in range(0, len(xs), MAX_SOURCES):
        part = slice(begin, begin + MAX_SOURCES)
        group = replace(windows, channels=windows.channels[part])
        rows = group.in_channels * windows.taps
        row_offset = sum(windows.channels[:begin]) * windows.taps * columns.stride_c * itemsize
        launches.append(
            KernelLaunch(
                Kernel("im2col", (("DTYPE", f"bits{8 * itemsize}"), ("WIDTH", str(width)))),
                *_grid_and_block(samples, pixels, width, rows, 256),
                (
                    ("sources", _sources(group, xs[part], first_sample)),
                    ("windows", _windows(windows)),
                    ("columns", Address(at.buffer, at.offset + row_offset)),
                    ("stride_n", columns.stride_n),
                    ("stride_row", columns.stride_c),
                    ("stride_pixel", columns.strides[4]),
                    ("batch", samples),
                    ("first_pixel", first_pixel),
                    ("pixels", pixels),
                    ("channels", group.in_channels),
                ),
                purpose=purpose,
                bytes_moved=samples
                * group.in_channels
                * itemsize
                * (windows.taps * pixels + -(-prod(windows.size) * pixels // windows.pixels)),
            )
        )
    return launches


def col2im_launch(windows: Windows, columns: Operand, out: Operand) -> KernelLaunch:
    """The sum of column entries back into an image."""
    elements = prod(windows.size)
    return KernelLaunch(
        Kernel("col2im", (("DTYPE", out.dtype),)),
        *_grid_and_block(windows.batch, elements, 1, windows.in_channels, 256),
        (
            ("columns", image(columns)),
            ("windows", _windows(windows)),
            ("out", image(out)),
            ("batch", windows.batch),
            ("channels", windows.in_channels),
        ),
        purpose="sum of columns",
        bytes_moved=columns.nbytes + out.nbytes,
        flops=windows.batch * windows.in_channels * windows.taps * windows.pixels,
    )


def epilogue_launch(
    geometry: ConvGeometry,
    out: Operand,
    *,
    sums: Address | None,
    sums_dtype: str = "",
    sums_strides: tuple[int, int, int] = (0, 0, 0),
    imaginary: int = 0,
    bias: Operand | None,
    residual: Operand | None,
    activation: Activation,
    first_sample: int = 0,
    samples: int | None = None,
    first_pixel: int = 0,
    pixels: int | None = None,
) -> KernelLaunch:
    """Bias, residual and activation over a chunk of the result; without `sums`, over zeros."""
    samples = geometry.batch if samples is None else samples
    pixels = geometry.pixels if pixels is None else pixels
    images = [out] + ([residual] if residual else [])
    size, collapsed = collapse(images, geometry.out_size)
    # Both ends of the chunk must be whole packets: a power of two divides a | b where it divides both.
    width = packet_width((collapsed[0],), pixels | first_pixel) if size[:2] == (1, 1) else 1
    sums_dtype = sums_dtype if sums else accumulator(out.dtype)
    does = ["bias"] * bool(bias) + ["residual"] * bool(residual) + [activation.name] * bool(activation)
    return KernelLaunch(
        Kernel("epilogue", (("SUM_DTYPE", sums_dtype), ("Y_DTYPE", out.dtype), ("WIDTH", str(width)))),
        *_grid_and_block(samples, pixels, width, geometry.out_channels, 256),
        (
            ("sums", sums),
            ("sums_stride_n", sums_strides[0]),
            ("sums_stride_o", sums_strides[1]),
            ("sums_stride_p", sums_strides[2]),
            ("imaginary", imaginary),
            ("out", image(collapsed[0], first_sample)),
            ("epilogue", epilogue_params(bias, collapsed[1] if residual else None, activation, first_sample)),
            ("size", size),
            ("batch", samples),
            ("first_pixel", first_pixel),
            ("pixels", pixels),
            ("channels", geometry.out_channels),
        ),
        purpose=", ".join(does) or ("store" if sums else "zeros"),
        bytes_moved=samples
        * pixels
        * geometry.out_channels
        * (out.itemsize * (1 + bool(residual)) + bool(sums) * ITEMSIZE[sums_dtype] * (1 + bool(imaginary))),
    )


def epilogue_params(
    bias: Operand | None, residual: Operand | None, activation: Activation = IDENTITY, first_sample: int = 0
) -> tuple[Any, ...]:
    """The C++ struct Epilogue."""
    return (
        Address(bias.name) if bias else None,
        image(residual, first_sample) if residual else (None, 0, 0, (0, 0, 0)),
        activation.alpha,
        activation.beta,
        activation.code,
    )


def image(operand: Operand, first_sample: int = 0) -> tuple[Any, ...]:
    """The C++ struct Image, from a sample on."""
    offset = operand.offset + first_sample * operand.stride_n * operand.itemsize
    return Address(operand.name, offset), operand.stride_n, operand.stride_c, operand.strides[2:]


def collapse(images: Sequence[Operand], size: Triple) -> tuple[Triple, list[Operand]]:
    """The images with their spatial axes as one, where every one of them allows it; else as they are."""
    flat = []
    for operand in images:
        stride = operand.pixel_stride
        if stride is None:
            return size, list(images)
        shape, strides = (*operand.shape[:2], 1, 1, operand.pixels), (*operand.strides[:2], 0, 0, stride)
        flat.append(replace(operand, shape=shape, strides=strides))
    return (1, 1, prod(size)), flat


def packet_width(images: Sequence[Operand], pixels: int) -> int:
    """Neighbouring pixels that one 16-byte access may move in all of the images: 16 bytes of them, or 1.

    Needs unit pixel stride, aligned rows and a whole number of packets a row.
    """
    width = PACKET_BYTES // images[0].itemsize
    aligned = all(
        op.pixel_stride == 1
        and op.alignment % PACKET_BYTES == 0
        and op.stride_n % width == 0
        and op.stride_c % width == 0
        for op in images
    )
    return width if aligned and pixels % width == 0 else 1


def _convolution_params(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...]
) -> tuple[tuple[str, Any], ...]:
    return (
        ("sources", _sources(geometry, xs)),
        ("windows", _windows(geometry)),
        ("weight", image(weight)),
        ("out", image(out)),
        ("epilogue", epilogue),
        ("batch", geometry.batch),
        ("groups", geometry.groups),
        ("group_channels", geometry.group_channels),
        ("group_outputs", geometry.group_outputs),
    )


def _read_once(images: Sequence[Operand]) -> int:
    return sum(operand.nbytes for operand in images)


def _sources(windows: Windows, xs: Sequence[Operand], first_sample: int = 0) -> tuple[Any, ...]:
    table = tuple(
        (image(x, first_sample), first, channels)
        for x, first, channels in zip(xs, windows.channel_offsets, windows.channels)
    )
    return table, len(table)


def _windows(windows: Windows) -> tuple[Any, ...]:
    return (
        windows.size,
        windows.out_size,
        windows.kernel,
        windows.stride,
        windows.before,
        windows.dilation,
        PADDING_MODES.index(windows.padding_mode),
    )


def _grid_and_block(samples: int, pixels: int, width: int, rows: int, largest: int) -> tuple[Triple, int]:
    """Shares of `width` pixels of all samples along x, rows along y; whole warps, no more than there are shares."""
    shares = samples * -(-pixels // width)
    block = min(largest, max(32, -(-shares // 32) * 32))
    return (min(-(-shares // block), GRID_X), min(rows, GRID_Y), 1), block


def component(operand: Operand, which: int) -> Operand:
    """The real (0) or imaginary (1) parts of a complex operand, as a real one."""
    dtype = real_part(operand.dtype)
    strides = tuple(2 * stride for stride in operand.strides)
    return replace(operand, dtype=dtype, strides=strides, alignment=ITEMSIZE[dtype], offset=which * ITEMSIZE[dtype])
