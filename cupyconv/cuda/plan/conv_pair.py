"""Two convolutions in one kernel, the image between them in shared memory.

A block of threads makes a tile of the result, and of the image between what the tile's windows reach:

::

    recomputation   pixels of the image between that all tiles make, over those that it has: ((T + k - 1) / T)^2
    saved           the image between is neither written nor read
    shared memory   both weights, the middle tile and that of x: all channels of what a dense layer reads, of what
                    a depthwise layer reads a chunk at a time

Every shape of tile that fits is drafted; the cost model picks, and picks between this and two kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    PACKET_BYTES,
    epilogue_params,
    image,
    sources_params,
    windows_params,
)
from cupyconv.cuda.plan.occupancy import registers, resident_blocks
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry, Triple
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_PAIR_SOURCES, Kernel, KernelLaunch
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Threads of a block; pixels of its tile of the result, and of the image between, at the most.
THREADS = 256
PIXELS, MIDDLE_PIXELS = 256, 384
#: Bytes of a pixel's channels in a tile, and from one pixel to the next (WindowTile of kernels/window_tile.cuh).
CHUNK_BYTES, PITCH_BYTES = 64, 80
#: Bytes of sums that a block has of a pixel at a time (OUTPUTS of kernels/conv_pair.cu).
OUTPUTS_BYTES = 128
#: Bytes of shared memory that hold the tables; rows and pitch in which sums leave.
TABLES = 8240
PART, LEAVING_PITCH = 16, PIXELS + 8
#: Oldest architecture that has the instructions for a dtype.
FIRST_PAIR = {"float16": 75, "bfloat16": 80, "float32": 75, "float64": 75}
#: Indices within an image are int32 in the kernel.
INT32 = 2**31 - 1
#: Ways to cut an axis that are tried: into so many parts at the most, by powers of two beyond.
SMALL_CUTS = 8


def draft_pair(first: ConvProblem, second: ConvProblem) -> Draft:
    """One launch that does both layers, or `NotApplicable` with the reason.

    ``second.xs`` is ``(first.out,)`` but for its dtype, which is that of `second`'s arithmetic; this image has
    no memory.  All dtypes are converted, inputs of no channels left out, and no result is empty.  The draft's
    reason states what the decision rests on: tile, shared memory, registers, occupancy, recomputation.
    """
    return min(drafts_of(first, second), key=lambda draft: draft.cost(first.gpu).seconds)


def drafts_of(first: ConvProblem, second: ConvProblem) -> list[Draft]:
    """One for every tile that fits, at least one; or `NotApplicable`."""
    gpu = first.gpu
    _check(first, second, gpu)
    drafts = [
        draft
        for tile, rows in product(_tiles(second.geometry.out_size), _rows(second))
        if (draft := _draft(first, second, tile, rows, gpu))
    ]
    if not drafts:
        raise NotApplicable(
            f"both weights and the smallest tiles take more than the {gpu.shared_bytes:,} bytes of shared memory of a block"
        )
    return drafts


def layer_kind(geometry: ConvGeometry) -> str | None:
    """What conv_pair.cu is compiled for: DENSE, DEPTHWISE, or nothing."""
    if geometry.groups == 1:
        return "DENSE"
    return "DEPTHWISE" if geometry.group_channels == geometry.group_outputs == 1 else None


def _check(first: ConvProblem, second: ConvProblem, gpu: GpuModel) -> None:
    dtype = second.out.dtype
    for which, layer in (("first", first), ("second", second)):
        if layer_kind(layer.geometry) is None:
            raise NotApplicable(f"the {which} layer has groups of more than one channel or output")
        if {layer.x_dtype, layer.weight_dtype, layer.out.dtype} != {dtype}:
            raise NotApplicable("the layers compute in different dtypes")
        if layer.pre is not None or layer.prologue:
            raise NotApplicable(f"the {which} layer has a prologue, or keeps its pre-activation")
    if is_complex(dtype):
        raise NotApplicable("no kernel for complex products")
    if gpu.capability < FIRST_PAIR[dtype]:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    if first.residual is not None:
        raise NotApplicable(
            "the first layer has a residual, which would be read for every pixel that is computed twice"
        )
    if second.geometry.padding_mode != "constant":
        raise NotApplicable(f"the second layer is padded by {second.geometry.padding_mode!r}")
    if len(first.xs) > MAX_PAIR_SOURCES:
        raise NotApplicable(f"{len(first.xs)} inputs; the kernel's parameters hold {MAX_PAIR_SOURCES}")
    for geometry in (first.geometry, second.geometry):
        extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
        if max(*extents, *geometry.stride, *geometry.span, geometry.in_channels, geometry.out_channels) > INT32 // 1024:
            raise NotApplicable("sizes within an image are int32 there")


def _tiles(size: Triple) -> Iterator[Triple]:
    """Shapes of at most `PIXELS` pixels: axes cut evenly, and of one width the highest and half of that."""
    for width, depth in product(_cuts(size[2]), _cuts(size[0])):
        heights = [height for height in _cuts(size[1]) if depth * height * width <= PIXELS]
        yield from ((depth, height, width) for height in heights)


def _cuts(extent: int) -> tuple[int, ...]:
    """Lengths of the parts that an axis may be cut into, the longest first."""
    parts = [*range(1, SMALL_CUTS), *(1 << i for i in range(3, extent.bit_length() + 1))]
    return tuple(dict.fromkeys(-(-extent // count) for count in parts if -(-extent // count) <= PIXELS))


def _rows(second: ConvProblem) -> Iterator[int]:
    """Outputs that a block may take: all, or where blocks share a tile's outputs half of them and so on."""
    outputs = OUTPUTS_BYTES // ITEMSIZE[accumulator(second.out.dtype)]
    tiles = -(-second.geometry.out_channels // outputs)
    shares = (
        [1] if layer_kind(second.geometry) == "DEPTHWISE" else [1 << i for i in range((tiles - 1).bit_length() + 1)]
    )
    yield from dict.fromkeys(-(-tiles // share) * outputs for share in shares)


def _draft(first: ConvProblem, second: ConvProblem, tile: Triple, rows: int, gpu: GpuModel) -> Draft | None:
    """The pair in tiles of this shape, so many outputs a block, or None where they are too large."""
    dtype, itemsize = second.out.dtype, second.out.itemsize
    kinds = layer_kind(first.geometry), layer_kind(second.geometry)
    assert kinds[0] is not None and kinds[1] is not None
    middle_tile = _reached(second.geometry, tile)
    x_tile = _reached(first.geometry, middle_tile)
    middle_pixels, x_pixels = prod(middle_tile), prod(x_tile)
    if middle_pixels > MIDDLE_PIXELS:
        return None
    chunk = CHUNK_BYTES // itemsize
    outputs = OUTPUTS_BYTES // ITEMSIZE[accumulator(dtype)]
    dense_first, dense_second = kinds[0] == "DENSE", kinds[1] == "DENSE"
    x_chunks = sum(-(-channels // chunk) for channels in first.geometry.channels)
    middle_chunks = -(-first.geometry.out_channels // chunk) if dense_first else x_chunks
    first_plane = first.geometry.taps * tap_bytes(dtype, kinds[0], chunk)
    second_plane = second.geometry.taps * tap_bytes(dtype, kinds[1], outputs)

    second_at = TABLES + first_plane * middle_chunks * (x_chunks if dense_first else 1)
    middle_at = second_at + second_plane * middle_chunks * (rows // outputs if dense_second else 1)
    x_at = middle_at + middle_pixels * PITCH_BYTES * (middle_chunks if dense_second else 1)
    place_at = x_at + x_pixels * PITCH_BYTES * (x_chunks if dense_first else 1)
    leaving = PART * LEAVING_PITCH * ITEMSIZE[accumulator(dtype)] if dense_second else 0
    shared = max(place_at + 8 * x_pixels, x_at + leaving)
    kernel = Kernel("conv_pair", (("DTYPE", dtype), ("FIRST", kinds[0]), ("SECOND", kinds[1])))
    resident = resident_blocks(kernel, THREADS, shared, gpu)
    if resident == 0:
        return None

    tiles = tuple(-(-size // part) for size, part in zip(second.geometry.out_size, tile))
    blocks = second.geometry.batch * prod(tiles)
    columns = -(-second.geometry.out_channels // rows) if dense_second else 1
    if columns > GRID_Y:
        return None
    at_a_time = max(1, gpu.multiprocessors * resident // columns)
    launch = KernelLaunch(
        kernel,
        (min(blocks, at_a_time, GRID_X), columns, 1),
        THREADS,
        (
            ("sources", sources_params(first.geometry, first.xs)[0]),
            ("first", _layer_params(first)),
            ("second", _layer_params(second)),
            ("out", image(second.out)),
            ("blocks", blocks),
            ("tiles", tiles),
            ("source_count", len(first.xs)),
            ("middle", first.geometry.out_channels),
            ("outputs", second.geometry.out_channels),
            ("outputs_a_block", rows),
            ("tile", (tile,)),
            ("middle_tile", (middle_tile,)),
            ("x_tile", (x_tile,)),
            ("x_packed", int(_is_packed(first.xs))),
            ("second_at", second_at),
            ("middle_at", middle_at),
            ("x_at", x_at),
            ("place_at", place_at),
            ("x_chunks", x_chunks),
            ("middle_chunks", middle_chunks),
            ("first_plane", first_plane),
            ("second_plane", second_plane),
        ),
        shared_bytes=shared,
        purpose="convolution, bias, activation, convolution, bias, residual, activation",
        bytes_moved=sum(x.nbytes for x in first.xs) + first.weight.nbytes + second.minimal_bytes - first.out.nbytes,
        flops=first.flops * blocks * middle_pixels // (first.geometry.batch * first.geometry.pixels) + second.flops,
    )
    again = blocks * middle_pixels * columns / (first.geometry.batch * first.geometry.pixels)
    words = (
        f"tiles of {_shape(tile)}, of {_shape(middle_tile)} between the layers: the first is computed {again:.2f} times,"
        f" {2 * first.out.nbytes:,} bytes less are moved; {shared:,} bytes of shared memory and {registers(kernel)} registers"
        f" a thread leave room for {resident} block{'s' * (resident > 1)} of {THREADS} threads on a multiprocessor"
    )
    return Draft("fused", (launch,), reason=words)


def _reached(geometry: ConvGeometry, tile: Triple) -> Triple:
    """Extent of all windows of a tile."""
    depth, height, width = (
        (extent - 1) * stride + span for extent, stride, span in zip(tile, geometry.stride, geometry.span)
    )
    return depth, height, width


def tap_bytes(dtype: str, kind: str, rows: int) -> int:
    """A tap's weight of one chunk of channels in shared memory."""
    itemsize = ITEMSIZE[dtype]
    chunk = CHUNK_BYTES // itemsize
    if kind == "DEPTHWISE":
        return chunk * ITEMSIZE[accumulator(dtype)]
    return rows * PITCH_BYTES if itemsize == 2 else rows * chunk * itemsize


def _layer_params(layer: ConvProblem) -> tuple[object, ...]:
    residual, activation = layer.residual, layer.activation
    return windows_params(layer.geometry), image(layer.weight), epilogue_params(layer.bias, residual, activation)


def _is_packed(xs: Iterable[Operand]) -> bool:
    """Whether 16 bytes of channels may be loaded at once, from every pixel of every input."""
    return all(
        x.stride_c == 1
        and x.alignment % PACKET_BYTES == 0
        and all(x.strides[axis] * x.itemsize % PACKET_BYTES == 0 for axis in (0, 2, 3, 4))
        for x in xs
    )


def _shape(tile: Triple) -> str:
    return " x ".join(str(extent) for extent in tile[next((i for i in range(2) if tile[i] > 1), 2) :])
