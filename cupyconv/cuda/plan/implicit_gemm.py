"""Implicit GEMM: the plan of method "implicit_gemm" on CUDA, a product whose columns are never stored.

::

    pack_weight      weight -> workspace, in the order in which the product reads it
    implicit_gemm    one tile of the result a block of threads; bias, residual, activation on the way out
    (epilogue)       only where several blocks share a tile's sum: adds their parts and finishes them

Every arithmetic the dtype has on the GPU and every tile is drafted; the cost model picks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from cupyconv.cuda.plan.draft import IMPLICIT_GEMM_BLOCK_BYTES as BLOCK_BYTES
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.launches import (
    GRID_X,
    PACKET_BYTES,
    Sums,
    epilogue_launch,
    epilogue_params,
    grid_and_block,
    image,
    of_prologue,
    prologue_params,
    sources_params,
    windows_params,
    with_prologue,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, Kernel, KernelLaunch, Step
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: Blocks of the sum in flight (STAGES of kernels/implicit_gemm.cu).
STAGES = 3
#: Rows and columns of a tile -> threads that work on it.
TILES = {128: 256, 64: 128}
#: Threads that keep a multiprocessor busy: two warps for each of its four schedulers, so that one's waits are the other's work.
BUSY_THREADS = 256
#: Channels of a granule (kernels/reduction.cuh) where threads run along pixels.
PIXEL_GRANULE = 4
#: Indices within an image are int32 in the kernel.
INT32 = 2**31 - 1
#: K-blocks that a share of a split sum has at the least: fewer would not fill the pipeline.
SMALLEST_SHARE = 4
#: Oldest architecture with matrix instructions for a dtype.
FIRST_MMA = {"float16": 75, "bfloat16": 80, "float32": 80, "float64": 80}


@dataclass(frozen=True)
class Reduction:
    """How K is cut up: the host's side of kernels/reduction.cuh.

    `blocks` and `channels` are those of the group that has the most, `channels` padded to granules.
    """

    granule: int
    block: int
    blocks: int
    channels: int


def reduction(geometry: ConvGeometry, granule: int, block: int) -> Reduction:
    blocks = channels = 0
    for runs in group_runs(geometry):
        padded = [-(-count // granule) * granule for _, count in runs]
        blocks = max(blocks, sum(-(-count * geometry.taps // block) for count in padded))
        channels = max(channels, sum(padded))
    return Reduction(granule, block, blocks, channels)


def group_runs(geometry: ConvGeometry) -> Iterable[list[tuple[int, int]]]:
    """For each group its runs: the first channel of an input that it reads, and how many.

    The first group stands for all where there is one input: they read as many channels, one after the other.
    """
    if len(geometry.channels) == 1:
        yield [(0, geometry.group_channels)]
        return
    for first in range(0, geometry.in_channels, geometry.group_channels):
        last = first + geometry.group_channels
        spans = [
            (max(first, begin) - begin, min(last, begin + channels) - max(first, begin))
            for begin, channels in zip(geometry.channel_offsets, geometry.channels)
        ]
        yield [span for span in spans if span[1] > 0]


def arithmetics(dtype: str, gpu: GpuModel, allow_tf32: bool) -> tuple[str, ...]:
    """What the products of a dtype may be computed with on a GPU; names as in kernels/warp_tile.cuh."""
    if dtype == "float32" and gpu.capability >= FIRST_MMA[dtype]:
        return ("TF32",) if allow_tf32 else ("FMA", "TF32X3")
    if dtype == "float64" and gpu.capability >= FIRST_MMA[dtype]:
        return ("FMA", "MMA")
    if dtype in ("float32", "float64"):
        return ("FMA",)
    return ("MMA",) if gpu.capability >= FIRST_MMA[dtype] else ()


def tiles(dtype: str, has_prologue: bool = False) -> tuple[int, ...]:
    """A tile of 128 x 128 doubles does not fit the registers; with a prologue there is one tile."""
    return (64,) if dtype == "float64" or has_prologue else tuple(TILES)


def draft_implicit_gemm(problem: ConvProblem) -> Draft:
    """The cheapest plan of method "implicit_gemm", or raise `NotApplicable`."""
    gpu, geometry, dtype = problem.gpu, problem.geometry, problem.x_dtype
    if is_complex(problem.out.dtype):
        raise NotApplicable("no kernel for complex products")
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    steps = [x.strides[axis] for x in problem.xs for axis in (1, 2, 3, 4)]
    extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
    sizes = (*extents, geometry.batch, geometry.in_channels * geometry.taps, geometry.group_outputs * BLOCK_BYTES)
    if max(*sizes, *map(abs, steps)) > INT32 // 8:
        raise NotApplicable("sizes and strides within an image, K, and a K-block of the weight are int32 there")
    choices = arithmetics(dtype, gpu, problem.allow_tf32)
    if not choices:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    drafts = [
        _draft(problem, arithmetic, tile) for arithmetic, tile in product(choices, tiles(dtype, bool(problem.prologue)))
    ]
    fitting = [draft for draft in drafts if sum(buffer.nbytes for buffer in draft.workspace) <= problem.limit]
    if not fitting:
        smallest = min(sum(buffer.nbytes for buffer in draft.workspace) for draft in drafts)
        raise NotApplicable(f"its packed weight takes {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    return min(fitting, key=lambda draft: draft.cost(gpu).seconds)


def _draft(problem: ConvProblem, arithmetic: str, tile: int) -> Draft:
    gpu, geometry, dtype = problem.gpu, problem.geometry, problem.x_dtype
    itemsize = ITEMSIZE[dtype]
    along_channels, notes = _along_channels(problem, chunked=arithmetic != "FMA")
    granule = PACKET_BYTES // itemsize if along_channels else PIXEL_GRANULE
    cut = reduction(geometry, granule, BLOCK_BYTES // itemsize)
    rows = -(-geometry.group_outputs // tile) * tile
    tiles_m = rows // tile
    blocks_xy = tiles_m * geometry.groups * -(-geometry.batch * geometry.pixels // tile)
    if blocks_xy > GRID_X:
        raise NotApplicable(f"{blocks_xy:,} tiles are more than a grid has blocks")
    packed = Buffer("packed_weight", geometry.groups * cut.blocks * rows * cut.block * itemsize)

    sums = replace(problem.out.in_c_order(accumulator(dtype)), name="sums", offset=0)
    affordable = (problem.limit - packed.nbytes) // sums.nbytes
    at_once = gpu.multiprocessors * (BUSY_THREADS // TILES[tile])
    shares = max(1, min(at_once // blocks_xy, cut.blocks // SMALLEST_SHARE, affordable))
    a_split = -(-cut.blocks // shares)
    splits = -(-cut.blocks // a_split)
    out, plane, workspace = problem.out, 0, [packed]
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    if splits > 1:
        out, plane = sums, prod(sums.shape)
        epilogue = epilogue_params(None, None)
        workspace.append(Buffer("sums", splits * sums.nbytes))

    gather = "ALONG_CHANNELS" if along_channels else "ALONG_PIXELS"
    steps: list[Step] = [
        _pack_weight_launch(geometry, problem.weight, packed, cut, rows, along_k=arithmetic != "FMA"),
        KernelLaunch(
            with_prologue(
                "implicit_gemm",
                (("DTYPE", dtype), ("ARITHMETIC", arithmetic), ("TILE", str(tile)), ("GATHER", gather)),
                problem.prologue,
            ),
            (blocks_xy, splits, 1),
            TILES[tile],
            (
                ("sources", sources_params(geometry, problem.xs)),
                ("windows", windows_params(geometry)),
                ("weight", Address(packed.name)),
                ("out", image(out)),
                ("plane", plane),
                ("epilogue", epilogue),
                ("prologue", prologue_params(problem.prologue)),
                ("pixels", geometry.batch * geometry.pixels),
                ("groups", geometry.groups),
                ("group_channels", geometry.group_channels),
                ("group_outputs", geometry.group_outputs),
                ("blocks", cut.blocks),
                ("rows", rows),
                ("tiles_m", tiles_m),
                ("keeps_sums", int(splits > 1 or out.dtype != dtype)),
                ("a_split", a_split),
            ),
            shared_bytes=shared_bytes(tile, accumulator(dtype)),
            purpose="convolution" + of_prologue(problem.prologue) + ", bias, residual, activation" * (splits == 1),
            bytes_moved=sum(x.nbytes for x in problem.xs) + packed.nbytes + splits * out.nbytes,
            flops=2 * geometry.products,
        ),
    ]
    if splits > 1:
        in_c_order = (out.shape[1] * out.pixels, out.pixels, 1)
        steps.append(
            epilogue_launch(
                problem.out, Sums(Address("sums"), out.dtype, in_c_order, planes=splits, plane=plane), bias=problem.bias,
                residual=problem.residual, activation=problem.activation, pre=problem.pre,
            )
        )  # fmt: skip
    words = f"{WORDS[arithmetic]}, tiles of {tile} x {tile}"
    words += f", each sum in {splits} parts" if splits > 1 else ""
    return Draft("implicit_gemm", tuple(steps), tuple(workspace), reason=words, notes=notes)


#: Arithmetic -> what `explain` calls it.
WORDS = {
    "FMA": "CUDA cores",
    "MMA": "tensor cores",
    "TF32": "tensor cores, TF32",
    "TF32X3": "tensor cores, each float32 product as three of TF32",
}


def shared_bytes(tile: int, sums: str) -> int:
    """`Shared` of kernels/implicit_gemm.cu: a corner a pixel, and stages or what leaves in the same place."""
    corners, stages = tile * 16, STAGES * 2 * tile * BLOCK_BYTES
    leaving = tile * 16 + tile // 2 * (tile + 8) * ITEMSIZE[sums]
    return corners + max(stages, leaving)


def _along_channels(problem: ConvProblem, chunked: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether threads gather along channels; notes where channels-last inputs miss that.

    An arithmetic that reads its tiles along K wants them in chunks of 16 bytes, all aligned.
    """
    xs = problem.xs
    if not all(x.stride_c == 1 for x in xs) or all(x.pixel_stride == 1 for x in xs):
        return False, ()
    if problem.prologue:
        return False, ("channels-last inputs with a prologue: gathered by elements, pixel by pixel",)
    chunk = PACKET_BYTES // ITEMSIZE[problem.x_dtype]
    if not chunked:
        return True, ()
    for x in xs:
        if x.alignment < PACKET_BYTES or any(x.strides[axis] % chunk for axis in (0, 2, 3, 4)):
            return False, (
                f"{x.name}: channels-last, but not every pixel is {PACKET_BYTES}-byte aligned: gathered by elements",
            )
    if any(first % chunk or count % chunk for runs in group_runs(problem.geometry) for first, count in runs):
        return False, (f"channels of an input or a group are no multiple of {chunk}: gathered by elements",)
    return True, ()


def _pack_weight_launch(
    geometry: ConvGeometry, weight: Operand, packed: Buffer, cut: Reduction, rows: int, *, along_k: bool
) -> KernelLaunch:
    return KernelLaunch(
        Kernel("pack_weight", (("DTYPE", f"bits{8 * weight.itemsize}"),)),
        *grid_and_block(1, rows * cut.channels, 1, geometry.groups, 256),
        (
            ("sources", _channels_only(geometry)),
            ("weight", image(weight)),
            ("packed", Address(packed.name)),
            ("stride_m", cut.block if along_k else 1),
            ("stride_k", 1 if along_k else rows),
            ("kernel", geometry.kernel),
            ("groups", geometry.groups),
            ("group_channels", geometry.group_channels),
            ("group_outputs", geometry.group_outputs),
            ("granule", cut.granule),
            ("block", cut.block),
            ("blocks", cut.blocks),
            ("rows", rows),
            ("channels", cut.channels),
        ),
        purpose="weight into K-blocks",
        bytes_moved=weight.nbytes + packed.nbytes,
    )


def _channels_only(geometry: ConvGeometry) -> tuple[Sequence[object], int]:
    """The table of inputs without addresses."""
    nowhere = (None, 0, 0, (0, 0, 0))
    table = [(nowhere, first, count) for first, count in zip(geometry.channel_offsets, geometry.channels)]
    return table, len(table)
