"""The fused merge: a 1x1 convolution of many inputs whose weights lie in shared memory, and each input is read where it is."""

from __future__ import annotations

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.draft import Draft
from cupyconv.cuda.plan.epilogue import kept_apart
from cupyconv.cuda.plan.launches import (
    GRID_X,
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
from cupyconv.problem.arrays import ITEMSIZE, accumulator, is_complex
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import MAX_MERGED, KernelLaunch
from cupyconv.problem.problems import NO_PROLOGUE, ConvProblem, NotApplicable, Prologue

#: Limit on shared memory that needs no opt-in on any GPU.
SHARED_BYTES = 48 << 10
#: Outputs per thread of merge.cu.  Fewer than four are no faster: memory is the bound.
TILES = (4, 8, 16, 32)
#: The one tile with a prologue.
PROLOGUE_TILE = 8
#: Channels that merge.cu loads before it uses the first; threads of its block.
DEPTH, BLOCK = 4, 128


def draft_merge(problem: ConvProblem) -> Draft | None:
    """The merge in one launch; None where the problem is no merge, or too large a one."""
    geometry, out, count = problem.geometry, problem.out, len(problem.xs)
    if not geometry.is_pointwise or geometry.groups > 1 or is_complex(out.dtype) or count > MAX_MERGED:
        return None
    size, images = collapse([*problem.xs, out, *([problem.residual] if problem.residual else [])])
    if size[:2] != (1, 1) or any(image.pixel_stride != 1 for image in images[: count + 1]):
        return None
    tile = merge_tile(geometry, out.dtype, problem.prologue)
    if tile is None:
        return None
    result, activation, after = kept_apart(problem)
    epilogue = epilogue_params(problem.bias, images[-1] if problem.residual else None, activation)
    images = [*problem.xs, result, *images[count + 1 :]]
    vector = vector_width(images, geometry.pixels)
    tiles = -(-geometry.out_channels // tile)
    width = VECTOR_BYTES // out.itemsize
    threads = geometry.pixels // width if vector > 1 else -(-geometry.pixels // (width * WARP)) * WARP
    blocks = tiles * -(-geometry.batch * threads // BLOCK)
    if blocks > GRID_X:
        raise NotApplicable(f"{blocks:,} blocks; a grid has {GRID_X:,}")
    launch = KernelLaunch(
        variant("merge", problem.prologue, DTYPE=out.dtype, TILE=tile, VECTOR=vector),
        (blocks, 1, 1),
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
            ("in_channels", geometry.in_channels),
            ("out_channels", geometry.out_channels),
        ),
        shared_bytes=_shared_bytes(geometry, out.dtype, tile, problem.prologue),
        purpose=f"merge{prologue_words(problem.prologue)}, bias, residual, activation",
        bytes_moved=bytes_of(problem.xs) * tiles + problem.weight.nbytes + out.nbytes,
        flops=problem.flops,
    )
    launch = cost.priced(launch, cost.core_rate(out.dtype, problem.gpu) * cost.MERGE, problem.gpu)
    return Draft("direct", (launch, *after), reason="fused merge")


def merge_tile(geometry: ConvGeometry, dtype: str, prologue: Prologue = NO_PROLOGUE) -> int | None:
    """Outputs per thread of the fused merge, or None where its weights do not fit.

    The fewest tiles, since each reads every input, then the smallest.  At most 128 words of sums per thread: 32
    outputs, or 8 where a vector holds eight pixels, since those are widened too.  Of float64 64 words: with more,
    compilers of CUDA 12.9 and 13.0 run out of registers.
    """
    largest = {2: 8, 4: 32, 8: 16}[ITEMSIZE[dtype]]
    tiles = (PROLOGUE_TILE,) if prologue else TILES
    fitting = [t for t in tiles if t <= largest and _shared_bytes(geometry, dtype, t, prologue) <= SHARED_BYTES]
    return min(fitting, key=lambda tile: (-(-geometry.out_channels // tile), tile), default=None)


def _shared_bytes(geometry: ConvGeometry, dtype: str, tile: int, prologue: Prologue) -> int:
    """The weights of a tile, whole rounds of channels, its biases, and a prologue's scales and shifts."""
    depth = -(-geometry.in_channels // DEPTH) * DEPTH
    factors = 2 * geometry.in_channels * bool(prologue)
    return (tile * (depth + 1) + factors) * ITEMSIZE[accumulator(dtype)]
