"""Two convolutions in one kernel, with the image between them in shared memory.

A block computes one tile of the result, and all pixels of the middle image that the windows of this tile read.

::

    recomputation   pixels of the middle image computed by all tiles over its size: ((T + k - 1) / T)^2
    saved           the middle image is neither written to nor read from global memory
    shared memory   both weights, the tile of the middle image and the tile of x.  The input tile of a dense layer has
                    all channels; that of a depthwise layer has one chunk of channels at a time

The planner drafts every shape of tile that fits.  The cost model picks one, and decides between one kernel and two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import arithmetics
from cupyconv.cuda.plan.draft import Draft, cheapest
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    INT32,
    VECTOR_BYTES,
    bytes_of,
    epilogue_params,
    image,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.occupancy import registers, resident_blocks
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry, Triple
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_PAIR_SOURCES, KernelLaunch
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Threads per block; maximum pixels of its tile of the result, and of the middle image.
THREADS = 256
PIXELS, MIDDLE_PIXELS = 256, 384
#: Bytes of one pixel's channels in a tile, and pitch of the pixels (WindowTile of kernels/window_tile.cuh).
CHUNK_BYTES, PITCH_BYTES = 64, 80
#: Bytes of sums per pixel that a block computes at a time (OUTPUTS of kernels/conv_pair.cu).
OUTPUTS_BYTES = 128
#: Bytes of shared memory for the tables; rows of sums that the epilogue finishes at a time, and their pitch.
TABLES = 8240
PART, EPILOGUE_PITCH = 16, PIXELS + 8
#: Oldest architecture that has the instructions for a dtype.
FIRST_PAIR = {"float16": 75, "bfloat16": 80, "float32": 75, "float64": 75}
#: Bytes of a memory sector, the unit of a read.
SECTOR_BYTES = 32
#: An axis is cut into any number of parts below this one, or into a power of two from it on.
SMALL_CUTS = 8


def draft_pair(first: ConvProblem, second: ConvProblem) -> Draft:
    """Draft one launch that computes both layers, or raise `NotApplicable` with the reason.

    ``second.xs`` is ``(first.out,)`` except for the dtype, which is that of the arithmetic of `second`.  This image has
    no memory.  All dtypes are converted already, and inputs without channels are removed.  The reason of the draft
    states the facts behind the decision: tile, shared memory, registers, occupancy, recomputation.
    """
    return cheapest(drafts_of(first, second), first.gpu)


def drafts_of(first: ConvProblem, second: ConvProblem) -> list[Draft]:
    """Return one draft for every tile that fits, at least one, or raise `NotApplicable`."""
    gpu = first.gpu
    _check(first, second, gpu)
    kinds = layer_kind(first.geometry), layer_kind(second.geometry)
    for arithmetic in pair_arithmetics(second.out.dtype, kinds, gpu, first.allow_tf32):
        drafts = [
            draft
            for tile, rows in product(_tiles(second.geometry.out_size), _rows(second))
            if (draft := _draft(first, second, tile, rows, arithmetic, gpu))
        ]
        if drafts:  # drafting all tiles for slower products too would take twice as long
            return drafts
    raise NotApplicable(
        f"both weights and the smallest tiles exceed the {gpu.shared_bytes:,} bytes of shared memory per block"
    )


def layer_kind(geometry: ConvGeometry) -> str:
    """Return the kind that conv_pair.cu is compiled for, DENSE or DEPTHWISE, or an empty string for neither."""
    if geometry.groups == 1:
        return "DENSE"
    return "DEPTHWISE" if geometry.group_channels == geometry.group_outputs == 1 else ""


def pair_arithmetics(dtype: str, kinds: tuple[str, str], gpu: GpuModel, allow_tf32: bool) -> tuple[str, ...]:
    """Return the arithmetics for dense layers, the fastest first, named as in kernels/tensor_core.cuh."""
    if ITEMSIZE[dtype] == 2:
        return ("MMA",)
    if dtype == "float64" or "DENSE" not in kinds:
        return ("FMA",)
    choices = arithmetics(dtype, gpu, allow_tf32)
    return tuple(sorted(choices, key=lambda arithmetic: -cost.product_rate(arithmetic, dtype, gpu)))


def _check(first: ConvProblem, second: ConvProblem, gpu: GpuModel) -> None:
    dtype = second.out.dtype
    if first.out.dtype != second.x_dtype:
        raise NotApplicable(
            f"the intermediate image is {first.out.dtype}, but the second layer computes in {second.x_dtype}"
        )
    if first.out.nbytes == 0 or 0 in (first.geometry.reduction, second.geometry.reduction):
        raise NotApplicable("there is nothing to sum over")
    for which, layer in (("first", first), ("second", second)):
        if not layer_kind(layer.geometry):
            raise NotApplicable(f"the {which} layer has groups of more than one channel or output")
        if {layer.x_dtype, layer.weight_dtype, layer.out.dtype} != {dtype}:
            raise NotApplicable("the layers compute in different dtypes")
        if layer.pre is not None or layer.prologue:
            raise NotApplicable(f"the {which} layer has a prologue or stores its pre-activation")
    if is_complex(dtype):
        raise NotApplicable("no kernel for complex products")
    if gpu.capability < FIRST_PAIR[dtype]:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    if first.residual is not None:
        raise NotApplicable("the first layer has a residual, which would be read again for every recomputed pixel")
    if second.geometry.padding_mode != "constant":
        raise NotApplicable(f"the second layer has padding_mode={second.geometry.padding_mode!r}, not 'constant'")
    if len(first.xs) > MAX_PAIR_SOURCES:
        raise NotApplicable(f"{len(first.xs)} inputs; the kernel supports at most {MAX_PAIR_SOURCES}")
    for geometry in (first.geometry, second.geometry):
        extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
        if max(*extents, *geometry.stride, *geometry.span, geometry.in_channels, geometry.out_channels) > INT32 // 1024:
            raise NotApplicable("sizes within an image exceed the kernel's int32 indices")


def _tiles(size: Triple) -> Iterator[Triple]:
    """Yield all tile shapes of at most `PIXELS` pixels that cut the axes evenly."""
    for width, depth in product(_cuts(size[2]), _cuts(size[0])):
        heights = [height for height in _cuts(size[1]) if depth * height * width <= PIXELS]
        yield from ((depth, height, width) for height in heights)


def _cuts(extent: int) -> tuple[int, ...]:
    """Return the lengths of the parts that an axis may be cut into, the longest first."""
    parts = [*range(1, SMALL_CUTS), *(1 << i for i in range(3, extent.bit_length() + 1))]
    return tuple(dict.fromkeys(-(-extent // count) for count in parts if -(-extent // count) <= PIXELS))


def _rows(second: ConvProblem) -> Iterator[int]:
    """Yield the outputs per block to try: all, and for a dense second layer also a half, a quarter, and so on."""
    outputs = OUTPUTS_BYTES // ITEMSIZE[accumulator(second.out.dtype)]
    tiles = -(-second.geometry.out_channels // outputs)
    most = 0 if layer_kind(second.geometry) == "DEPTHWISE" else (tiles - 1).bit_length()
    yield from dict.fromkeys(-(-tiles // (1 << i)) * outputs for i in range(most + 1))


def _draft(
    first: ConvProblem, second: ConvProblem, tile: Triple, rows: int, arithmetic: str, gpu: GpuModel
) -> Draft | None:
    """Draft the pair with this tile shape and `rows` outputs per block, or return None if they are too large."""
    dtype, itemsize = second.out.dtype, second.out.itemsize
    kinds = layer_kind(first.geometry), layer_kind(second.geometry)
    middle_tile = _reached(second.geometry, tile)
    x_tile = _reached(first.geometry, middle_tile)
    middle_pixels, x_pixels = prod(middle_tile), prod(x_tile)
    if middle_pixels > MIDDLE_PIXELS:
        return None
    chunk = CHUNK_BYTES // itemsize
    outputs = OUTPUTS_BYTES // ITEMSIZE[accumulator(dtype)]
    x_chunks = sum(-(-channels // chunk) for channels in first.geometry.channels)
    middle_chunks = -(-first.geometry.out_channels // chunk) if kinds[0] == "DENSE" else x_chunks
    taps = first.geometry.taps, second.geometry.taps
    chunks, pixels = (x_chunks, middle_chunks), (x_pixels, middle_pixels)
    shared = shared_bytes(dtype, arithmetic, kinds, taps, chunks, rows // outputs, pixels)
    kernel = variant("conv_pair", DTYPE=dtype, ARITHMETIC=arithmetic, FIRST=kinds[0], SECOND=kinds[1])
    resident = resident_blocks(kernel, THREADS, shared, gpu)
    if resident == 0:
        return None

    tiles = tuple(-(-size // part) for size, part in zip(second.geometry.out_size, tile))
    blocks = second.geometry.batch * prod(tiles)
    columns = -(-second.geometry.out_channels // rows) if kinds[1] == "DENSE" else 1
    if columns > GRID_Y:
        return None
    at_a_time = max(1, gpu.multiprocessors * resident // columns)
    launch = KernelLaunch(
        kernel,
        (min(blocks, at_a_time, GRID_X), columns, 1),
        THREADS,
        (
            ("sources", sources_params(first.xs)[0]),
            ("first", _layer_params(first)),
            ("second", _layer_params(second)),
            ("out", image(second.out)),
            ("tile_count", blocks),
            ("tiles", tiles),
            ("source_count", len(first.xs)),
            ("middle", first.geometry.out_channels),
            ("outputs", second.geometry.out_channels),
            ("outputs_per_block", rows),
            ("tile", (tile,)),
            ("middle_tile", (middle_tile,)),
            ("x_tile", (x_tile,)),
            ("x_vectorized", int(_is_vectorized(first.xs))),
            ("x_chunks", x_chunks),
            ("middle_chunks", middle_chunks),
        ),
        shared_bytes=shared,
        purpose="convolution, bias, activation, convolution, bias, residual, activation",
        bytes_moved=bytes_of(first.xs) + first.weight.nbytes + second.minimal_bytes - first.out.nbytes,
        flops=first.flops * blocks * middle_pixels // (first.geometry.batch * first.geometry.pixels) + second.flops,
    )
    # Each block reads its weights once, and x for every tile; one block writes a tile of y.
    weights = launch.blocks * first.weight.nbytes + launch.grid[0] * second.weight.nbytes
    launch = replace(launch, l2_bytes=weights + blocks * columns * x_pixels * first.geometry.in_channels * itemsize)
    shapes = tile, middle_tile, x_tile
    seconds = _seconds(first, second, launch, shapes, arithmetic, alone=resident == 1)
    launch = replace(launch, arithmetic_seconds=seconds)
    again = blocks * middle_pixels * columns / (first.geometry.batch * first.geometry.pixels)
    description = (
        f"tiles of {_shape(tile)}, {_shape(middle_tile)} between the layers; the first layer is computed {again:.2f} times;"
        f" {2 * first.out.nbytes:,} fewer bytes moved; {shared:,} bytes of shared memory and {registers(kernel, gpu)} registers"
        f" per thread allow {resident} block{'s' * (resident > 1)} of {THREADS} threads per multiprocessor"
    )
    return Draft("fused", (launch,), reason=description)


def _seconds(
    first: ConvProblem,
    second: ConvProblem,
    launch: KernelLaunch,
    shapes: tuple[Triple, Triple, Triple],
    arithmetic: str,
    *,
    alone: bool,
) -> float:
    """Return the estimated time of whole rounds of whole tiles, including repeated and wasted work.

    `shapes` are the tiles of the result, the middle image and x.  A block loads and computes alternately.  Other blocks
    of the multiprocessor fill the gaps, unless it is `alone` there.
    """
    gpu, dtype, itemsize = first.gpu, second.out.dtype, second.out.itemsize
    tile, middle_tile, x_tile = shapes
    cores, dense = cost.core_rate(dtype, gpu), cost.product_rate(arithmetic, dtype, gpu)
    # Granularity of channels, outputs and pixels.
    k_step, rows, group = (16 // itemsize, 64 // itemsize, 64) if arithmetic == "FMA" else (32 // itemsize, 16, 128)
    blocks, columns, _ = launch.grid
    tiles = second.geometry.batch * prod(-(-size // part) for size, part in zip(second.geometry.out_size, tile))
    channels = sum(_whole(count, k_step) for count in first.geometry.channels)
    middle = first.geometry.out_channels
    per_tile = columns * prod(x_tile) * channels * 2 * cost.PAIR_X_LOAD / gpu.fp32
    weights = 0
    for layer, pixels, its_outputs, its_channels in (
        (first, prod(middle_tile), columns * _whole(middle, rows), channels),
        (second, prod(tile), _whole(second.geometry.out_channels, rows), _whole(middle, k_step)),
    ):
        taps, kind = layer.geometry.taps, layer_kind(layer.geometry)
        if kind == "DENSE":
            products = _whole(pixels, group) * its_outputs * its_channels * taps
            per_tile += 2 * products / (dense * cost.PAIR[kind])
            weights += its_outputs * its_channels * taps
        else:
            per_tile += 2 * pixels * its_outputs * taps / (cores * cost.PAIR["DEPTHWISE"])
            weights += its_outputs * taps
    rounds = -(-tiles // blocks)
    fullest = -(-blocks * columns // gpu.multiprocessors)  # blocks of the fullest multiprocessor
    busy = fullest * gpu.multiprocessors / (blocks * columns)
    seconds = busy * blocks * (rounds * per_tile + weights * 2 * cost.PAIR_WEIGHT_LOAD / gpu.fp32)
    read = columns * channels * (_whole(x_tile[2] * itemsize, SECTOR_BYTES) * prod(x_tile[:2])) * tiles
    loading = max(launch.bytes_moved / gpu.bandwidth, read / (gpu.bandwidth * cost.L2_SPEED))
    return seconds + loading if alone else max(seconds, loading)


def _whole(count: int, piece: int) -> int:
    """Return `count` rounded up to a multiple of `piece`."""
    return -(-count // piece) * piece


def _reached(geometry: ConvGeometry, tile: Triple) -> Triple:
    """Return the size of the region that the windows of a tile read."""
    depth, height, width = (
        (extent - 1) * stride + span for extent, stride, span in zip(tile, geometry.stride, geometry.span)
    )
    return depth, height, width


def shared_bytes(
    dtype: str,
    arithmetic: str,
    kinds: tuple[str, str],
    taps: tuple[int, int],
    chunks: tuple[int, int],
    output_tiles: int,
    pixels: tuple[int, int],
) -> int:
    """Return the size of `SharedLayout` in kernels/conv_pair.cu; taps per layer; chunks and pixels of x and middle."""
    (first, second), (x_chunks, middle_chunks), (x_pixels, middle_pixels) = kinds, chunks, pixels
    chunk, sums = CHUNK_BYTES // ITEMSIZE[dtype], ITEMSIZE[accumulator(dtype)]
    first_weight = taps[0] * tap_bytes(dtype, arithmetic, first, chunk) * middle_chunks
    second_weight = taps[1] * tap_bytes(dtype, arithmetic, second, OUTPUTS_BYTES // sums) * middle_chunks
    middle, x, finished = middle_pixels * PITCH_BYTES, x_pixels * PITCH_BYTES, 0
    if first == "DENSE":
        first_weight, x = first_weight * x_chunks, x * x_chunks
    if second == "DENSE":
        second_weight, middle = second_weight * output_tiles, middle * middle_chunks
        finished = PART * EPILOGUE_PITCH * sums
    return TABLES + first_weight + second_weight + middle + max(x + 8 * x_pixels, finished)


def tap_bytes(dtype: str, arithmetic: str, kind: str, rows: int) -> int:
    """Return the bytes of the weight of one tap and one chunk of channels in shared memory."""
    if kind == "DEPTHWISE":
        return CHUNK_BYTES // ITEMSIZE[dtype] * ITEMSIZE[accumulator(dtype)]
    return rows * (CHUNK_BYTES if arithmetic == "FMA" else PITCH_BYTES)


def _layer_params(layer: ConvProblem) -> tuple[object, ...]:
    residual, activation = layer.residual, layer.activation
    return windows_params(layer.geometry), image(layer.weight), epilogue_params(layer.bias, residual, activation)


def _is_vectorized(xs: Iterable[Operand]) -> bool:
    """Return whether 16 bytes of channels can be loaded at once from every pixel of every input."""
    return all(
        x.stride_c == 1
        and x.alignment % VECTOR_BYTES == 0
        and all(x.strides[axis] * x.itemsize % VECTOR_BYTES == 0 for axis in (0, 2, 3, 4))
        for x in xs
    )


def _shape(tile: Triple) -> str:
    return " x ".join(str(extent) for extent in tile[next((i for i in range(2) if tile[i] > 1), 2) :])
