"""One function per kernel: from a problem to the launch that does it.

The values of a launch's `params` follow the C++ structs of ``kernels/*.cuh`` field by field: a struct
is a tuple, a pointer an `Address` or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from cupyconv.problem.activations import IDENTITY, Activation
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, product_flops, real_part
from cupyconv.problem.geometry import ConvGeometry, Triple, Windows
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import MAX_SOURCES, Address, Kernel, KernelLaunch
from cupyconv.problem.problems import NO_PROLOGUE, Prologue

#: Static limit on shared memory that needs no opt-in on any GPU.
SHARED_BYTES = 48 << 10
#: Limits of a grid along x and y; the kernels loop beyond them.
GRID_X, GRID_Y = 2**31 - 1, 65535

PACKET_BYTES = 16
#: Outputs a thread of direct.cu and of merge.cu may keep.  Fewer than four outputs are no faster: memory is the bound.
DIRECT_TILE = 4
MERGE_TILES = (4, 8, 16, 32)
#: The one tile of merge.cu with a prologue.
PROLOGUE_MERGE_TILE = 8
#: Channels that merge.cu loads before it uses the first; threads of its block.
MERGE_DEPTH = 4
MERGE_BLOCK = 128
#: Neighbouring threads of im2col.cu that share pixels where channels lie side by side.
IM2COL_LANES = 4
#: Square kernels, with their stride along h, that depthwise.cu is compiled for, alone and with a prologue; (0, 0) is
#: any other.
DEPTHWISE_KERNELS = ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1))
PROLOGUE_DEPTHWISE_KERNELS = ((3, 1), (3, 2))
#: The same for groups of more than one channel.
GROUPED_DEPTHWISE_KERNELS = ((3, 1), (3, 2))
ANY_KERNEL = (0, 0)
#: Bytes of a plane, and pixels, that depthwise.cu counts in 32 bits.
PLANE_EXTENT = 2**30
WARP = 32
#: Outputs a block of weight_gradient.cu may take, where a group has one and where it has more; its rows and threads.
WEIGHT_GRADIENT_OUTPUTS = (1, 4)
WEIGHT_GRADIENT_ROWS, WEIGHT_GRADIENT_BLOCK = 4, 128


@dataclass(frozen=True)
class Chunk:
    """Samples, and of each of them pixels: the part of a problem that one round of steps does."""

    first_sample: int
    samples: int
    first_pixel: int
    pixels: int


@dataclass(frozen=True)
class Sums:
    """Sums that an epilogue finishes, with their strides along samples, outputs and pixels.

    Imaginary parts may lie `imaginary` elements behind the real ones; a sum may come in `planes` parts, `plane`
    elements apart.
    """

    at: Address
    dtype: str
    strides: tuple[int, int, int]
    imaginary: int = 0
    planes: int = 1
    plane: int = 0


def merge_tile(geometry: ConvGeometry, dtype: str, prologue: Prologue = NO_PROLOGUE) -> int | None:
    """Outputs a thread of the fused merge computes, or None where its weights do not fit.

    The fewest tiles, since each reads every input, then the smallest.  At most 128 words of sums a thread: 32
    outputs, or 8 where a packet holds eight pixels, since those are widened too.
    """
    largest = 8 if ITEMSIZE[dtype] == 2 else 32
    tiles = (PROLOGUE_MERGE_TILE,) if prologue else MERGE_TILES
    fitting = [t for t in tiles if t <= largest and _merge_shared_bytes(geometry, dtype, t, prologue) <= SHARED_BYTES]
    return min(fitting, key=lambda tile: (-(-geometry.out_channels // tile), tile), default=None)


def _merge_shared_bytes(geometry: ConvGeometry, dtype: str, tile: int, prologue: Prologue) -> int:
    """The weights of a tile, whole rounds of channels, its biases, and a prologue's scales and shifts."""
    depth = -(-geometry.in_channels // MERGE_DEPTH) * MERGE_DEPTH
    factors = 2 * geometry.in_channels * bool(prologue)
    return (tile * (depth + 1) + factors) * ITEMSIZE[accumulator(dtype)]


def merge_launch(
    geometry: ConvGeometry,
    xs: Sequence[Operand],
    weight: Operand,
    out: Operand,
    residual: Operand | None,
    epilogue: tuple[Any, ...],
    prologue: Prologue,
) -> KernelLaunch:
    """The fused merge; the caller has checked that images and result have unit pixel stride."""
    tile = merge_tile(geometry, out.dtype, prologue)
    assert tile is not None
    packet = packet_width((*xs, out, *([residual] if residual else [])), geometry.pixels)
    tiles = -(-geometry.out_channels // tile)
    width = PACKET_BYTES // out.itemsize
    threads = geometry.pixels // width if packet > 1 else -(-geometry.pixels // (width * WARP)) * WARP
    blocks = tiles * -(-geometry.batch * threads // MERGE_BLOCK)
    assert blocks <= GRID_X, "a result of that many blocks of sums fits no memory"
    return KernelLaunch(
        with_prologue("merge", (("DTYPE", out.dtype), ("TILE", str(tile)), ("PACKET", str(packet))), prologue),
        (blocks, 1, 1),
        MERGE_BLOCK,
        (
            ("sources", tuple((Address(x.name, x.offset), x.stride_n, x.stride_c, x.shape[1]) for x in xs)),
            ("weight", Address(weight.name, weight.offset)),
            ("weight_stride_o", weight.stride_n),
            ("weight_stride_c", weight.stride_c),
            ("out", image(out)),
            ("epilogue", epilogue),
            ("prologue", prologue_params(prologue)),
            ("batch", geometry.batch),
            ("pixels", geometry.pixels),
            ("in_channels", geometry.in_channels),
            ("out_channels", geometry.out_channels),
        ),
        shared_bytes=_merge_shared_bytes(geometry, out.dtype, tile, prologue),
        purpose=f"merge{of_prologue(prologue)}, bias, residual, activation",
        bytes_moved=_read_once(xs) * tiles + weight.nbytes + out.nbytes,
        flops=2 * geometry.products,
    )


def _convolution_params(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...],
    prologue: Prologue,
) -> tuple[tuple[str, Any], ...]:  # fmt: skip
    """What the parameters of direct.cu and depthwise.cu begin with."""
    return (
        ("sources", sources_params(geometry, xs)),
        ("windows", windows_params(geometry)),
        ("weight", image(weight)),
        ("out", image(out)),
        ("epilogue", epilogue),
        ("prologue", prologue_params(prologue)),
        ("batch", geometry.batch),
    )


def direct_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...],
    prologue: Prologue,
) -> KernelLaunch:  # fmt: skip
    """Direct convolution, for everything."""
    dtypes = (("X_DTYPE", xs[0].dtype), ("W_DTYPE", weight.dtype), ("Y_DTYPE", out.dtype))
    tiles = geometry.groups * -(-geometry.group_outputs // DIRECT_TILE)
    return KernelLaunch(
        with_prologue("direct", (*dtypes, ("TILE", str(DIRECT_TILE))), prologue),
        *grid_and_block(geometry.batch, geometry.pixels, 1, tiles, 128),
        (
            *_convolution_params(geometry, xs, weight, out, epilogue, prologue),
            ("groups", geometry.groups),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
        ),
        purpose=f"convolution{of_prologue(prologue)}, bias, residual, activation",
        bytes_moved=_read_once(xs) + weight.nbytes + out.nbytes,
        flops=geometry.products * product_flops(xs[0].dtype, weight.dtype),
    )


def depthwise_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, out: Operand, epilogue: tuple[Any, ...],
    prologue: Prologue,
) -> KernelLaunch:  # fmt: skip
    """One kernel per channel, any multiplier; or `is_grouped_depthwise`."""
    kernel, stride = depthwise_kernel(geometry, xs, weight, prologue)
    rows = {0: 1, 1: 8, 2: 4}[stride]  # pixels a thread
    depth, height, width = geometry.out_size
    strips = geometry.batch * depth * -(-height // rows) * width
    lanes = channel_lanes(out)
    (blocks, _, _), block = grid_and_block(strips, lanes, 1, 1, 128)
    macros = (("DTYPE", out.dtype), ("KERNEL", str(kernel)), ("STRIDE", str(stride)))
    grouped = (("GROUPED", "1"),) if geometry.group_channels > 1 else ()
    return KernelLaunch(
        with_prologue("depthwise", macros + grouped, prologue),
        (blocks, min(-(-geometry.out_channels // lanes), GRID_Y), 1),
        block,
        (
            *_convolution_params(geometry, xs, weight, out, epilogue, prologue),
            ("outputs", geometry.out_channels),
            ("group_outputs", geometry.group_outputs),
            ("group_channels", geometry.group_channels),
            ("channel_lanes", lanes),
        ),
        purpose=f"convolution{of_prologue(prologue)}, bias, residual, activation",
        bytes_moved=_read_once(xs) + weight.nbytes + out.nbytes,
        flops=2 * geometry.products,
    )


def is_grouped_depthwise(geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, prologue: Prologue) -> bool:
    """Whether depthwise.cu takes groups of several channels, channel by channel: quicker than the general kernel."""
    several = geometry.groups > 1 and geometry.group_channels > 1 and not prologue
    return several and depthwise_kernel(geometry, xs, weight, prologue) != ANY_KERNEL


def depthwise_kernel(
    geometry: ConvGeometry, xs: Sequence[Operand], weight: Operand, prologue: Prologue
) -> tuple[int, int]:
    """The kernel and stride to compile for: a listed one, if 32 bits hold all that the kernel counts with them."""
    depth, height, width = geometry.kernel
    kernels = PROLOGUE_DEPTHWISE_KERNELS if prologue else DEPTHWISE_KERNELS
    if geometry.group_channels > 1:
        kernels = GROUPED_DEPTHWISE_KERNELS
    listed = depth == 1 and height == width and (height, geometry.stride[1]) in kernels
    images = (*xs, replace(weight, strides=tuple(map(abs, weight.strides))))
    counts = [
        *map(sum, zip(geometry.size, geometry.before, geometry.after)), geometry.batch * geometry.pixels,
        *(op.itemsize * sum((n - 1) * step for n, step in zip(op.shape[2:], op.strides[2:])) for op in images),
    ]  # fmt: skip
    forward = all(min(x.strides[2:]) >= 0 for x in xs)
    if listed and geometry.dilation[1:] == (1, 1) and forward and max(counts) < PLANE_EXTENT:
        return height, geometry.stride[1]
    return ANY_KERNEL


def channel_lanes(out: Operand) -> int:
    """How many neighbouring threads take neighbouring channels of a result, the others its pixels: a power of two."""
    return min(WARP, 1 << (out.shape[1] - 1).bit_length()) if is_along_channels(out) else 1


def is_along_channels(out: Operand) -> bool:
    """Whether neighbours in memory are channels of a pixel rather than pixels of a channel."""
    return out.stride_c == 1 and out.shape[1] > 1 and (out.pixels == 1 or out.pixel_stride != 1)


def weight_gradient_launch(
    geometry: ConvGeometry, xs: Sequence[Operand], grad: Operand, out_dtype: str, sums: Address, parts: int,
    prologue: Prologue,
) -> KernelLaunch:  # fmt: skip
    """Parts of a weight's gradient, each over its share of all samples' pixels."""
    outputs = weight_gradient_tile(geometry, prologue)
    tiles_m, tiles_n = -(-geometry.group_outputs // outputs), -(-geometry.reduction // WEIGHT_GRADIENT_ROWS)
    dtypes = (("X_DTYPE", xs[0].dtype), ("G_DTYPE", grad.dtype), ("Y_DTYPE", out_dtype))
    plane = geometry.out_channels * geometry.reduction
    return KernelLaunch(
        with_prologue("weight_gradient", (*dtypes, ("OUTPUTS", str(outputs))), prologue),
        (parts, min(geometry.groups * tiles_m * tiles_n, GRID_Y), 1),
        WEIGHT_GRADIENT_BLOCK,
        (
            ("sources", sources_params(geometry, xs)),
            ("windows", windows_params(geometry)),
            ("prologue", prologue_params(prologue)),
            ("grad", image(grad)),
            ("sums", sums),
            ("plane", plane),
            ("batch", geometry.batch),
            ("a_part", -(-geometry.batch * geometry.pixels // parts)),
            ("groups", geometry.groups),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
        ),
        purpose="products summed in parts" if parts > 1 else "products summed",
        bytes_moved=_read_once(xs) * tiles_m + grad.nbytes * tiles_n + parts * plane * ITEMSIZE[accumulator(out_dtype)],
        flops=geometry.products * product_flops(xs[0].dtype, grad.dtype),
    )


def weight_gradient_tile(geometry: ConvGeometry, prologue: Prologue) -> int:
    """Outputs of a group that a block of weight_gradient.cu takes; with a prologue there is one number."""
    return WEIGHT_GRADIENT_OUTPUTS[geometry.group_outputs > 1 or bool(prologue)]


def im2col_launches(
    windows: Windows,
    xs: Sequence[Operand],
    columns: Operand,
    *,
    chunk: Chunk | None = None,
    purpose: str = "columns",
    prologue: Prologue = NO_PROLOGUE,
) -> list[KernelLaunch]:
    """Columns of a chunk, or of everything: one launch for every `MAX_SOURCES` inputs."""
    chunk = chunk or Chunk(0, windows.batch, 0, windows.pixels)
    samples, pixels, itemsize = chunk.samples, chunk.pixels, columns.itemsize
    aligned = replace(columns, alignment=columns.alignment if columns.offset % PACKET_BYTES == 0 else 1)
    width = packet_width((aligned,), PACKET_BYTES // itemsize)  # the kernel stores a row's tail by itself
    launches = []
    for begin in range(0, len(xs), MAX_SOURCES):
        part = slice(begin, begin + MAX_SOURCES)
        group = replace(windows, channels=windows.channels[part])
        squares = sum(-(-channels // width) for channels in group.channels)
        lanes = min(IM2COL_LANES, 1 << (squares - 1).bit_length()) if is_along_channels(xs[begin]) else 1
        shares = samples * -(-pixels // width)
        block = min(256, -(-shares * lanes // WARP) * WARP)
        rows = -(-squares // lanes) * windows.taps
        row_offset = sum(windows.channels[:begin]) * windows.taps * columns.stride_c * itemsize
        launches.append(
            KernelLaunch(
                with_prologue(
                    "im2col",
                    (("DTYPE", columns.dtype if prologue else f"bits{8 * itemsize}"), ("WIDTH", str(width))),
                    prologue,
                ),
                (min(-(-shares * lanes // block), GRID_X), min(rows, GRID_Y), 1),
                block,
                (
                    ("sources", sources_params(group, xs[part], chunk.first_sample)),
                    ("windows", windows_params(windows)),
                    ("prologue", prologue_params(prologue, sum(windows.channels[:begin]))),
                    ("columns", Address(columns.name, columns.offset + row_offset)),
                    ("stride_n", columns.stride_n),
                    ("stride_row", columns.stride_c),
                    ("stride_pixel", columns.strides[4]),
                    ("batch", samples),
                    ("first_pixel", chunk.first_pixel),
                    ("pixels", pixels),
                    ("squares", squares),
                    ("channel_lanes", lanes),
                ),
                purpose=purpose + of_prologue(prologue),
                bytes_moved=samples
                * group.in_channels
                * itemsize
                * (windows.taps * pixels + -(-prod(windows.size) * pixels // windows.pixels)),
            )
        )
    return launches


def col2im_launch(
    windows: Windows,
    columns: Operand,
    out: Operand,
    *,
    imaginary: int = 0,
    conjugated: bool = False,
    bias: Operand | None = None,
    activation: Activation = IDENTITY,
    purpose: str = "sum of columns",
) -> KernelLaunch:
    """The sum of column entries back into an image, of the samples and channels that it has."""
    samples, channels = out.shape[:2]
    elements = prod(windows.size)
    return KernelLaunch(
        Kernel("col2im", (("SUM_DTYPE", columns.dtype), ("Y_DTYPE", out.dtype), _folds(windows))),
        *grid_and_block(samples, elements, 1, channels, 256),
        (
            ("columns", image(columns)),
            ("windows", windows_params(windows)),
            ("adjoint", adjoint_params(windows)),
            ("out", image(out)),
            ("epilogue", epilogue_params(bias, None, activation)),
            ("batch", samples),
            ("imaginary", imaginary),
            ("channels", channels),
            ("conjugated", int(conjugated)),
        ),
        purpose=purpose,
        bytes_moved=samples * channels * windows.taps * windows.pixels * columns.itemsize * (1 + bool(imaginary))
        + out.nbytes,
        flops=samples * channels * windows.taps * windows.pixels,
    )


def transposed_launch(
    geometry: ConvGeometry,
    xs: Sequence[Operand],
    weight: Operand,
    out: Operand,
    *,
    first: int,
    conjugated: bool,
    epilogue: tuple[Any, ...],
) -> KernelLaunch:
    """Direct transposed convolution into one result, whose channels are those from `first` on."""
    channels = out.shape[1]
    groups = (first + channels - 1) // geometry.group_channels - first // geometry.group_channels + 1
    offsets = [sum(x.shape[1] for x in xs[:i]) for i in range(len(xs))]
    dtypes = (("X_DTYPE", xs[0].dtype), ("W_DTYPE", weight.dtype), ("Y_DTYPE", out.dtype))
    products = geometry.products * channels // geometry.in_channels
    return KernelLaunch(
        Kernel("transposed", (*dtypes, ("TILE", str(DIRECT_TILE)), _folds(geometry))),
        *grid_and_block(
            geometry.batch, prod(geometry.size), 1, groups * -(-geometry.group_channels // DIRECT_TILE), 128
        ),
        (
            ("sources", (tuple((image(x), at, x.shape[1]) for x, at in zip(xs, offsets)), len(xs))),
            ("windows", windows_params(geometry)),
            ("adjoint", adjoint_params(geometry)),
            ("weight", image(weight)),
            ("out", image(out)),
            ("epilogue", epilogue),
            ("batch", geometry.batch),
            ("groups", geometry.groups),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
            ("first", first),
            ("channels", channels),
            ("conjugated", int(conjugated)),
        ),
        purpose="transposed convolution, bias, activation",
        bytes_moved=_read_once(xs) + weight.nbytes + out.nbytes,
        flops=products * product_flops(xs[0].dtype, weight.dtype),
    )


def epilogue_launch(
    out: Operand,
    sums: Sums | None = None,
    *,
    bias: Operand | None = None,
    residual: Operand | None = None,
    activation: Activation = IDENTITY,
    pre: Operand | None = None,
    chunk: Chunk | None = None,
) -> KernelLaunch:
    """Bias, residual and activation over a chunk of the result, or all of it; without `sums`, over zeros."""
    chunk = chunk or Chunk(0, out.shape[0], 0, out.pixels)
    samples, channels, pixels = chunk.samples, out.shape[1], chunk.pixels
    size, (flat, *others) = collapse([out] + ([residual] if residual else []))
    whole = size[:2] == (1, 1)
    along_channels = is_along_channels(flat)
    neighbours = 1 if along_channels else 4  # their axis
    full = PACKET_BYTES // out.itemsize
    # Both ends of the chunk must be whole packets: a power of two divides a | b where it divides both.
    extent = channels if along_channels else pixels | chunk.first_pixel
    fits = extent % full == 0 and (along_channels or whole) and _is_packed(flat, neighbours, full)
    width = full if fits else 1
    strides, imaginary, planes, plane = (
        (sums.strides, sums.imaginary, sums.planes, sums.plane) if sums else ((0, 0, 0), 0, 0, 0)
    )
    sums_dtype = sums.dtype if sums else accumulator(out.dtype)
    sums_packed = False
    if sums:
        steps = (strides[0], strides[1], 0, 0, strides[2])
        alignment = min(out.alignment if sums.at.buffer == out.name else PACKET_BYTES, PACKET_BYTES)
        placed = Operand(sums.at.buffer, sums_dtype, flat.shape, steps, alignment, sums.at.offset)
        piece = min(width, PACKET_BYTES // ITEMSIZE[sums_dtype])
        sums_packed = _is_packed(placed, neighbours, width) and (imaginary | plane) % piece == 0
    bias_packed = along_channels and bias is not None and bias.alignment % (width * out.itemsize) == 0
    residual_packed = bool(others) and _is_packed(others[0], neighbours, width)
    does = ["bias"] * bool(bias) + ["residual"] * bool(residual) + [activation.name] * bool(activation)
    nbytes = out.itemsize * (1 + bool(residual) + bool(pre)) + ITEMSIZE[sums_dtype] * planes * (1 + bool(imaginary))
    if along_channels:
        grid, block = grid_and_block(samples * pixels, channels, width, 1, 256)
    else:
        grid, block = grid_and_block(samples, pixels, width, channels, 256)
    return KernelLaunch(
        Kernel("epilogue", (("SUM_DTYPE", sums_dtype), ("Y_DTYPE", out.dtype), ("WIDTH", str(width)))),
        grid,
        block,
        (
            ("sums", sums.at if sums else None),
            ("sums_stride_n", strides[0]),
            ("sums_stride_o", strides[1]),
            ("sums_stride_p", strides[2]),
            ("imaginary", imaginary),
            ("plane", plane),
            ("out", image(flat, chunk.first_sample)),
            ("epilogue", epilogue_params(bias, others[0] if others else None, activation, chunk.first_sample, pre)),
            ("size", size),
            ("batch", samples),
            ("first_pixel", chunk.first_pixel),
            ("pixels", pixels),
            ("channels", channels),
            ("planes", planes),
            ("along_channels", int(along_channels)),
            ("sums_packed", int(sums_packed)),
            ("bias_packed", int(bias_packed)),
            ("residual_packed", int(residual_packed)),
        ),
        purpose=", ".join(does) or ("store" if sums else "zeros"),
        bytes_moved=samples * pixels * channels * nbytes,
    )


def activation_launch(pre: Operand, out: Operand, activation: Activation) -> KernelLaunch:
    """The result from a pre-activation that is kept: a pass of its own."""
    launch = epilogue_launch(out, residual=pre, activation=activation)
    return replace(launch, purpose=f"{activation} of the pre-activation, which is kept")


def _is_packed(operand: Operand, axis: int, width: int) -> bool:
    """Whether `width` neighbours along an axis lie side by side, on the boundaries that wide accesses need."""
    piece = min(width, PACKET_BYTES // operand.itemsize)
    extents = enumerate(zip(operand.shape, operand.strides))
    others = (stride for i, (extent, stride) in extents if i != axis and extent > 1)
    aligned = operand.alignment % (piece * operand.itemsize) == 0 and operand.offset % (piece * operand.itemsize) == 0
    return width > 1 and operand.strides[axis] == 1 and aligned and all(stride % piece == 0 for stride in others)


def epilogue_params(
    bias: Operand | None, residual: Operand | None, activation: Activation = IDENTITY, first_sample: int = 0,
    pre: Operand | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The C++ struct Epilogue; `pre` is laid out as the result is."""
    low, high = activation.bounds or (activation.alpha, activation.beta)
    return (
        Address(bias.name, bias.offset) if bias else None,
        image(residual, first_sample) if residual else (None, 0, 0, (0, 0, 0)),
        image(pre, first_sample)[0] if pre else None,
        low,
        high,
        activation.code,
    )


def prologue_params(prologue: Prologue, first_channel: int = 0) -> tuple[Any, ...]:
    """The C++ struct Prologue, from a channel on."""
    vectors = [
        (Address(v.name, v.offset + first_channel * v.stride_c * v.itemsize), v.stride_c) if v else (None, 0)
        for v in (prologue.scale, prologue.shift)
    ]
    addresses, steps = zip(*vectors)
    activation = prologue.activation
    low, high = activation.bounds or (activation.alpha, activation.beta)
    return (*addresses, *steps, low, high, activation.code)


def of_prologue(prologue: Prologue) -> str:
    """What a launch works on where that is not the inputs as they lie, in words."""
    return f" of {prologue}" if prologue else ""


def with_prologue(name: str, macros: tuple[tuple[str, str], ...], prologue: Prologue) -> Kernel:
    """The variant that transforms its inputs, or the one that has no code for that."""
    return Kernel(name, (*macros, ("PROLOGUE", "1")) if prologue else macros)


def image(operand: Operand, first_sample: int = 0) -> tuple[Any, ...]:
    """The C++ struct Image, from a sample on."""
    offset = operand.offset + first_sample * operand.stride_n * operand.itemsize
    return Address(operand.name, offset), operand.stride_n, operand.stride_c, operand.strides[2:]


def collapse(images: Sequence[Operand]) -> tuple[Triple, list[Operand]]:
    """Images of one size with their spatial axes as one, where every one of them allows it, else as they are; the size."""
    depth, height, width = images[0].shape[2:]
    flat = []
    for operand in images:
        stride = operand.pixel_stride
        if stride is None:
            return (depth, height, width), list(images)
        shape, strides = (*operand.shape[:2], 1, 1, operand.pixels), (*operand.strides[:2], 0, 0, stride)
        flat.append(replace(operand, shape=shape, strides=strides))
    return (1, 1, depth * height * width), flat


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


def _read_once(images: Sequence[Operand]) -> int:
    return sum(operand.nbytes for operand in images)


def sources_params(windows: Windows, xs: Sequence[Operand], first_sample: int = 0) -> tuple[Any, ...]:
    table = tuple(
        (image(x, first_sample), first, channels)
        for x, first, channels in zip(xs, windows.channel_offsets, windows.channels)
    )
    return table, len(table)


def windows_params(windows: Windows) -> tuple[Any, ...]:
    return (
        windows.size,
        windows.out_size,
        windows.kernel,
        windows.stride,
        windows.before,
        windows.dilation,
        PADDING_MODES.index(windows.padding_mode),
    )


def adjoint_params(windows: Windows) -> tuple[Any, ...]:
    """The C++ struct Adjoint."""
    common = [gcd(s, d) for s, d in zip(windows.stride, windows.dilation)]
    return (
        tuple(
            (p - 1) * s + span - b
            for p, s, span, b in zip(windows.out_size, windows.stride, windows.span, windows.before)
        ),
        tuple(s // g for s, g in zip(windows.stride, common)),
        tuple(d // g for d, g in zip(windows.dilation, common)),
    )


def _folds(windows: Windows) -> tuple[str, str]:
    """The macro that says whether padded elements are copies of others."""
    return "FOLDS", str(int(windows.padding_mode != "constant"))


def grid_and_block(samples: int, pixels: int, width: int, rows: int, largest: int) -> tuple[Triple, int]:
    """Shares of `width` pixels of all samples along x, rows along y; whole warps, no more than there are shares."""
    shares = samples * -(-pixels // width)
    block = min(largest, max(32, -(-shares // 32) * 32))
    return (min(-(-shares // block), GRID_X), min(rows, GRID_Y), 1), block


def component(operand: Operand, which: int) -> Operand:
    """The real (0) or imaginary (1) parts of a complex operand, as a real one."""
    dtype = real_part(operand.dtype)
    strides = tuple(2 * stride for stride in operand.strides)
    return replace(
        operand,
        dtype=dtype,
        strides=strides,
        alignment=ITEMSIZE[dtype],
        offset=operand.offset + which * ITEMSIZE[dtype],
    )
