"""The fused merge: a 1x1 convolution of many inputs, with weights in shared memory and every input read in place."""

from __future__ import annotations

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import FIRST_MMA
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import kept_apart
from cupyconv.cuda.plan.launches import (
    VECTOR_BYTES,
    WARP,
    address,
    bytes_of,
    collapse,
    epilogue_params,
    image,
    prologue_params,
    prologue_words,
    variant,
    vector_width,
)
from cupyconv.cuda.plan.occupancy import PIECE, REGISTERS, blocks_that_fit
from cupyconv.problem.arrays import ITEMSIZE, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.machine import GpuModel
from cupyconv.problem.plan import MAX_MERGED, Kernel, KernelLaunch
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, Prologue

#: Maximum shared memory that needs no opt-in on any GPU.
SHARED_BYTES = 48 << 10
#: Outputs per block of merge.cu, by bytes per element; tensor cores, used for 16-bit types, need at least eight.
TILES = {2: (8, 16, 32), 4: (4, 8, 16), 8: (4, 8, 16)}
#: The only tile with a prologue.
PROLOGUE_TILE = 8
#: Blocks that fit the registers of a multiprocessor, by bytes per element and tile.  Fewer fit for some tiles if rows
#: are not aligned, or with a prologue.
BLOCKS = {(2, 8): 7, (2, 16): 5, (2, 32): 4, (4, 4): 7, (4, 8): 5, (4, 16): 4, (8, 4): 6, (8, 8): 4, (8, 16): 3}
UNALIGNED_BLOCKS = {(2, 8): 6, (2, 32): 3, (8, 16): 2}
PROLOGUE_BLOCKS = {(2, 8): 5, (8, 8): 3}
#: Channels that a thread of merge.cu loads before it uses the first one; threads per block; threads that share pixels.
DEPTH, BLOCK = 4, 128
SHARING = {2: 4, 4: 1, 8: 1}
#: Padding elements between two rows of 16-bit weights, so that ldmatrix reads eight rows without bank conflicts.
MATRIX_GAP = 8


def draft_merge(problem: ConvProblem) -> Draft | None:
    """Draft the merge in one launch; return None if the problem is no merge, or is too large."""
    geometry, out, count = problem.geometry, problem.out, len(problem.xs)
    if not geometry.is_pointwise or geometry.groups > 1 or is_complex(out.dtype) or count > MAX_MERGED:
        return None
    size, images = collapse([*problem.xs, out, *([problem.residual] if problem.residual else [])])
    if size[:2] != (1, 1) or any(image.pixel_stride != 1 for image in images[: count + 1]):
        return None
    itemsize, gpu = out.itemsize, problem.gpu
    tile = merge_tile(geometry, out.dtype, problem.prologue)
    if tile is None or (itemsize == 2 and gpu.capability < FIRST_MMA[out.dtype]):
        return None
    result, activation, after = kept_apart(problem)
    epilogue = epilogue_params(problem.bias, images[-1] if problem.residual else None, activation)
    images = [*problem.xs, result, *images[count + 1 :]]
    vector = vector_width(images, geometry.pixels)
    kernel = merge_kernel(out.dtype, tile, vector, problem.prologue)
    shared_bytes = _shared_bytes(geometry, out.dtype, tile, problem.prologue)
    tiles = -(-geometry.out_channels // tile)
    width, lanes = VECTOR_BYTES // itemsize, WARP // SHARING[itemsize]
    shares = geometry.pixels // width if vector > 1 else -(-geometry.pixels // (width * lanes)) * lanes
    blocks = _blocks(geometry.batch * shares, BLOCK // SHARING[itemsize], tiles, kernel, shared_bytes, gpu)
    step_n, step_share = divmod(blocks * (BLOCK // SHARING[itemsize]), shares)
    launch = KernelLaunch(
        kernel,
        (blocks * tiles, 1, 1),
        BLOCK,
        (
            ("sources", tuple((address(x), x.stride_n, x.stride_c, x.shape[1]) for x in problem.xs)),
            ("weight", address(problem.weight)),
            ("weight_stride_o", problem.weight.stride_n),
            ("weight_stride_c", problem.weight.stride_c),
            ("out", image(result)),
            ("epilogue", epilogue),
            ("prologue", prologue_params(problem.prologue)),
            ("batch", geometry.batch),
            ("pixels", geometry.pixels),
            ("shares", shares),
            ("step_n", step_n),
            ("step_share", step_share),
            ("in_channels", geometry.in_channels),
            ("out_channels", geometry.out_channels),
        ),
        shared_bytes=shared_bytes,
        purpose=f"merge{prologue_words(problem.prologue)}, bias, residual, activation",
        bytes_moved=problem.minimal_bytes - out.nbytes * len(after) + bytes_of(problem.xs) * (tiles - 1),
        flops=problem.flops,
        l2_bytes=bytes_of(problem.xs) * tiles + blocks * problem.weight.nbytes,
    )
    arithmetic = cost.product_rate("MMA" if itemsize == 2 else "FMA", out.dtype, gpu)
    useful = geometry.in_channels * geometry.out_channels / (_depth(geometry, itemsize) * tile * tiles)
    launch = cost.priced(launch, arithmetic * cost.MERGE * useful, gpu)
    return Draft("direct", (launch, *after), reason="fused merge")


def merge_kernel(dtype: str, tile: int, vector: int, prologue: Prologue = NO_PROLOGUE) -> Kernel:
    """Return the variant of merge.cu; its macro BLOCKS is the number of blocks that share a multiprocessor."""
    key = ITEMSIZE[dtype], tile
    rooms = (BLOCKS, UNALIGNED_BLOCKS if vector == 1 else {}, PROLOGUE_BLOCKS if prologue else {})
    blocks = min(room[key] for room in rooms if key in room)
    return variant("merge", prologue, DTYPE=dtype, TILE=tile, VECTOR=vector, BLOCKS=blocks)


def _blocks(shares: int, per_block: int, tiles: int, kernel: Kernel, shared_bytes: int, gpu: GpuModel) -> int:
    """Return the blocks per tile of outputs: at most as many as the GPU holds together with the blocks of other tiles.

    Each block loops over the shares with a step of all blocks.  The number is the smallest with the same number of
    steps, so that no step is left to a few blocks.
    """
    registers = REGISTERS // (int(dict(kernel.macros)["BLOCKS"]) * BLOCK)
    room = gpu.multiprocessors * max(1, blocks_that_fit(registers // PIECE * PIECE, BLOCK, shared_bytes, gpu))
    needed = -(-shares // per_block)
    steps = -(-needed // max(1, room // tiles))
    return -(-needed // steps)


def merge_tile(geometry: ConvGeometry, dtype: str, prologue: Prologue = NO_PROLOGUE) -> int | None:
    """Return the outputs per block of the fused merge, or None if its weights do not fit shared memory.

    The choice has the fewest tiles, since each tile reads every input, and then the smallest tile.  A thread has at
    most 64 words of sums: with more, the compiler runs out of registers for three blocks per multiprocessor.
    """
    tiles = (PROLOGUE_TILE,) if prologue else TILES[ITEMSIZE[dtype]]
    fitting = [t for t in tiles if _shared_bytes(geometry, dtype, t, prologue) <= SHARED_BYTES]
    return min(fitting, key=lambda tile: (-(-geometry.out_channels // tile), tile), default=None)


def _depth(geometry: ConvGeometry, itemsize: int) -> int:
    """Return the number of channels, rounded up to whole slabs, which a warp loads at a time."""
    slab = DEPTH * SHARING[itemsize]
    return -(-geometry.in_channels // slab) * slab


def _shared_bytes(geometry: ConvGeometry, dtype: str, tile: int, prologue: Prologue) -> int:
    """Return the shared memory for the biases and weights of a tile, and the scales and shifts of a prologue."""
    itemsize, depth = ITEMSIZE[dtype], _depth(geometry, ITEMSIZE[dtype])
    weights = tile * (depth + MATRIX_GAP) * itemsize if itemsize == 2 else tile * depth * itemsize
    return weights + (tile + 2 * geometry.in_channels * bool(prologue)) * ITEMSIZE[accumulator(dtype)]
