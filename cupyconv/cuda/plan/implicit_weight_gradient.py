"""The gradient of a weight by method "implicit_gemm": a product over pixels whose columns are never stored.

::

    implicit_weight_gradient   a tile of the gradient, over a part of the pixels, a block of threads
    (epilogue)                 adds the parts in their order and rounds; not where one part is the result

Every arithmetic the dtype has on the GPU, both tiles and a few numbers of parts are drafted; the cost model picks.
"""

from __future__ import annotations

from itertools import product

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import WORDS, arithmetics
from cupyconv.cuda.plan.draft import Draft, cheapest
from cupyconv.cuda.plan.epilogue import Sums, finish_weight
from cupyconv.cuda.plan.launches import (
    GRID_Y,
    INT32,
    VECTOR_BYTES,
    address,
    bytes_of,
    groups_params,
    sources_params,
    variant,
    windows_params,
)
from cupyconv.cuda.plan.occupancy import BUSY_THREADS
from cupyconv.cuda.plan.packed_weight import SLAB_BYTES, group_runs
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, collapsed_stride
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, KernelLaunch, Step
from cupyconv.problem.problems import NotApplicable, WeightGradientProblem

#: Rows and columns of a tile -> threads that work on it, and K-slabs in flight, of kernels/implicit_weight_gradient.cu.
TILES = {(64, 128): 128, (128, 128): 256}
STAGES = 4
DTYPES = ("float16", "bfloat16", "float32")
#: Rounds of blocks, one after the other on the same multiprocessors, that a sum is cut for.
ROUNDS = (1, 2, 4)
#: K-slabs that a part of the sum has at the least: fewer would not fill the pipeline.
SMALLEST_SHARE = 2 * STAGES


def draft_implicit(problem: WeightGradientProblem) -> Draft:
    """The cheapest plan, or raise `NotApplicable`."""
    gpu, dtype = problem.gpu, problem.out.dtype
    _check(problem)
    choices = arithmetics(dtype, gpu, problem.allow_tf32)
    if not choices:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    ways = [way for way in product(choices, TILES, ROUNDS) if shared_bytes(way[1]) <= gpu.shared_bytes]
    drafts = [_draft(problem, *way) for way in ways]
    needed = [sum(buffer.space for buffer in draft.workspace) for draft in drafts]
    fitting = [draft for draft, nbytes in zip(drafts, needed) if nbytes <= problem.limit]
    if not fitting:
        smallest = min(needed)
        raise NotApplicable(f"its sums need {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    return cheapest(fitting, gpu)


def _check(problem: WeightGradientProblem) -> None:
    """NotApplicable where the kernel cannot copy both factors in whole chunks of channels."""
    geometry, xs, grad, dtype = problem.geometry, problem.xs, problem.grad, problem.out.dtype
    if dtype not in DTYPES:
        raise NotApplicable(f"no such kernel for {dtype}")
    if problem.prologue:
        raise NotApplicable("its kernel copies inputs as they are, without a prologue")
    if len(xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    chunk = VECTOR_BYTES // ITEMSIZE[dtype]
    counts = {number for runs in group_runs(geometry) for run in runs for number in run}
    if any(count % chunk for count in (*counts, geometry.group_outputs)):
        raise NotApplicable(f"channels or outputs of an input or a group are no multiple of {chunk}")
    for operand in (*xs, grad):
        if operand.shape[1] > 1 and operand.stride_c != 1:
            raise NotApplicable(
                f"{operand.name} is not channels-last, and pixels are copied with their channels side by side"
            )
        if operand.alignment < VECTOR_BYTES or any(operand.strides[axis] % chunk for axis in (0, 2, 3, 4)):
            raise NotApplicable(f"not every pixel of {operand.name} is {VECTOR_BYTES}-byte aligned")
    if _row_stride(grad) is None:
        raise NotApplicable("the pixels of grad, over all samples, have no one stride")
    steps = [abs(x.strides[axis]) for x in xs for axis in (2, 3, 4)]
    extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
    numbers = (geometry.batch * geometry.pixels, geometry.reduction, geometry.group_outputs, *extents, *steps)
    if max(numbers) > INT32 // 8:
        raise NotApplicable("pixels, sizes and strides within an image are int32 there")


def _draft(problem: WeightGradientProblem, arithmetic: str, tile: tuple[int, int], rounds: int) -> Draft:
    gpu, geometry, out = problem.gpu, problem.geometry, problem.out
    (tile_m, tile_n), threads, itemsize = tile, TILES[tile], ITEMSIZE[out.dtype]
    slab = SLAB_BYTES // itemsize
    tiles = geometry.groups * -(-geometry.group_outputs // tile_m) * -(-geometry.reduction // tile_n)
    pixels = geometry.batch * geometry.pixels
    slabs = -(-pixels // slab)
    dtype = accumulator(out.dtype)
    plane = geometry.out_channels * geometry.reduction
    at_once = gpu.multiprocessors * (BUSY_THREADS // threads)
    affordable = Buffer.parts_in(problem.limit, plane * ITEMSIZE[dtype])
    slabs_per_part = -(-slabs // max(1, min(_parts(rounds * at_once, tiles, slabs), affordable)))
    parts = -(-slabs // slabs_per_part)

    result, strides = out, (geometry.reduction, 1, geometry.group_channels)
    if out.pixel_stride is not None:  # in the order of the sums, so that the epilogue reads neighbours together
        result, strides = _by_taps(out, out.pixel_stride), (geometry.reduction, geometry.group_channels, 1)
    in_place = (
        parts == 1 and out.dtype == dtype and result is not out and collapsed_stride(result.shape, result.strides) == 1
    )
    sums = Address(out.name, out.offset) if in_place else Address("sums")
    blocks = tiles * parts
    operations = 2 * tile_m * tile_n * slabs_per_part * slab  # of a block
    l2_bytes = blocks * slabs_per_part * SLAB_BYTES * (tile_m + tile_n)
    rate = cost.product_rate(arithmetic, out.dtype, gpu) * cost.IMPLICIT_WEIGHT_GRADIENT[tile]
    products = KernelLaunch(
        variant("implicit_weight_gradient", DTYPE=out.dtype, ARITHMETIC=arithmetic, TILE_M=tile_m, TILE_N=tile_n),
        (tiles, parts, 1),
        threads,
        (
            ("sources", sources_params(problem.xs)),
            ("windows", windows_params(geometry)),
            ("grad", address(problem.grad)),
            ("pixel_stride", _row_stride(problem.grad)),
            ("sums", sums),
            ("plane", plane),
            ("pixels", pixels),
            ("pixels_per_part", slabs_per_part * slab),
            *groups_params(geometry),
        ),
        shared_bytes=shared_bytes(tile),
        purpose="products summed in parts" if parts > 1 else "products summed",
        bytes_moved=bytes_of(problem.xs) + problem.grad.nbytes + parts * plane * ITEMSIZE[dtype],
        flops=problem.flops,
        l2_bytes=l2_bytes,
        arithmetic_seconds=max(
            cost.seconds_in_rounds(blocks, operations, rate, gpu), l2_bytes / (gpu.bandwidth * cost.L2_SPEED)
        ),
    )
    steps: list[Step] = [products]
    workspace: tuple[Buffer, ...] = ()
    if not in_place:
        steps.append(finish_weight(result, Sums(sums, dtype, strides, planes=parts, plane=plane)))
        workspace = (Buffer("sums", parts * plane * ITEMSIZE[dtype]),)
    words = f"{WORDS[arithmetic]}, tiles of {tile_m} x {tile_n}, {parts} part(s) of the sum"
    return Draft("implicit_gemm", tuple(steps), workspace, words)


def _parts(blocks: int, tiles: int, slabs: int) -> int:
    """Parts of the sum that make so many blocks, none shorter than fills the pipeline."""
    return min(blocks // tiles, slabs // SMALLEST_SHARE, GRID_Y)


def _row_stride(grad: Operand) -> int | None:
    """From one pixel of grad to the next, those of all samples in one row; None where no single stride does it."""
    if grad.shape[0] * grad.pixels == 1:
        return 0
    return collapsed_stride((grad.shape[0], *grad.shape[2:]), (grad.stride_n, *grad.strides[2:]))


def _by_taps(out: Operand, stride: int) -> Operand:
    """The result with its taps, `stride` apart, as channels, and its channels as pixels."""
    shape = (out.shape[0], out.pixels, 1, 1, out.shape[1])
    return out.view(shape, (out.stride_n, stride, 0, 0, out.stride_c), 0)


def shared_bytes(tile: tuple[int, int]) -> int:
    """The stages of kernels/implicit_weight_gradient.cu."""
    return STAGES * sum(tile) * SLAB_BYTES
