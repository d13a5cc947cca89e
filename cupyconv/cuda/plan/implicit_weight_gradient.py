"""The gradient of a weight by method "implicit_gemm": a GEMM over pixels whose columns are never stored.

::

    (channels_last)            inputs, gradient -> workspace, each only if its pixels cannot be copied in whole chunks
                               of channels
    implicit_weight_gradient   one tile of the gradient over a part of the pixels per thread block
    (epilogue)                 adds the parts in order and rounds; skipped if a single part is the result

The planner drafts every arithmetic that the GPU has for the dtype, both tiles, and a few numbers of parts.  The cost
model picks one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import WORDS, arithmetics
from cupyconv.cuda.plan.channels_last import MovedImage, moved_image
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
from cupyconv.cuda.plan.packed_weight import SLAB_BYTES, runs_are_chunks
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, collapsed_stride
from cupyconv.problem.geometry import ConvGeometry
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, KernelLaunch, Step, counted
from cupyconv.problem.problems import NO_PROLOGUE, NotApplicable, WeightGradientProblem

#: Rows and columns of a tile -> threads per block, and the pipeline's stages, of kernels/implicit_weight_gradient.cu.
TILES = {(64, 128): 128, (128, 128): 256}
STAGES = 4
DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Numbers of rounds of blocks per multiprocessor for which a sum may be cut.
ROUNDS = (1, 2, 4)
#: Minimum number of K-slabs per part of the sum: fewer would not fill the pipeline.
SMALLEST_SHARE = 2 * STAGES


def draft_implicit(problem: WeightGradientProblem) -> Draft:
    """Return the cheapest draft, or raise `NotApplicable`."""
    gpu, dtype = problem.gpu, problem.out.dtype
    if dtype not in DTYPES:
        raise NotApplicable(f"no kernel for {dtype}")
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; the kernel supports at most {MAX_SOURCES}")
    choices = arithmetics(dtype, gpu, problem.allow_tf32)
    if not choices:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    copied, moves = _in_chunks(problem)
    _check_sizes(copied)
    candidates = [
        candidate for candidate in product(choices, TILES, ROUNDS) if shared_bytes(candidate[1]) <= gpu.shared_bytes
    ]
    drafts = [_draft(copied, moves, *candidate) for candidate in candidates]
    needed = [sum(buffer.space for buffer in draft.workspace) for draft in drafts]
    fitting = [draft for draft, nbytes in zip(drafts, needed) if nbytes <= problem.limit]
    if not fitting:
        smallest = min(needed)
        raise NotApplicable(f"its sums need {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    return cheapest(fitting, gpu)


def _in_chunks(problem: WeightGradientProblem) -> tuple[WeightGradientProblem, list[MovedImage]]:
    """Return the problem with images whose pixels are whole chunks of channels, and the images that are moved first.

    Without groups, a moved image is padded by channels of zeros, which the geometry counts too.
    """
    geometry, chunk, moves = problem.geometry, VECTOR_BYTES // ITEMSIZE[problem.out.dtype], []
    if geometry.groups > 1 and (geometry.group_channels % chunk or geometry.group_outputs % chunk):
        raise NotApplicable(f"channels or outputs of a group are not a multiple of {chunk}")
    if problem.prologue or not runs_are_chunks(geometry, chunk) or not all(map(_is_copied, problem.xs)):
        moved = moved_image("moved_x", problem.xs, problem.limit, problem.gpu, problem.prologue)
        x = moved.with_zeros
        geometry = replace(geometry, channels=x.shape[1:2])
        problem = _after(problem, moved, geometry, xs=(x,), prologue=NO_PROLOGUE)
        moves.append(moved)
    if geometry.out_channels % chunk or not _is_copied(problem.grad) or _row_stride(problem.grad) is None:
        moved = moved_image("moved_grad", (problem.grad,), problem.limit, problem.gpu)
        grad = moved.with_zeros
        geometry = replace(geometry, out_channels=grad.shape[1])
        problem = _after(problem, moved, geometry, grad=grad)
        moves.append(moved)
    return problem, moves


def _is_copied(image: Operand) -> bool:
    """Return whether every chunk of a pixel's channels can be copied as 16 aligned bytes."""
    chunk, aligned = VECTOR_BYTES // image.itemsize, image.alignment >= VECTOR_BYTES
    return aligned and image.stride_c == 1 and not any(image.strides[i] % chunk for i in (0, 2, 3, 4))


def _after(
    problem: WeightGradientProblem, moved: MovedImage, geometry: ConvGeometry, **images: Any
) -> WeightGradientProblem:
    """Return the problem after a launch has moved some of its images."""
    return replace(problem, geometry=geometry, workspace_limit=problem.limit - moved.buffer.space, **images)


def _check_sizes(problem: WeightGradientProblem) -> None:
    """Raise `NotApplicable` if a number exceeds what the kernel can count."""
    geometry = problem.geometry
    steps = [abs(x.strides[axis]) for x in problem.xs for axis in (2, 3, 4)]
    extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
    numbers = (geometry.batch * geometry.pixels, geometry.reduction, geometry.group_outputs, *extents, *steps)
    if max(numbers) > INT32 // 8:
        raise NotApplicable("pixels, or sizes or strides within an image, exceed the kernel's int32 indices")


def _draft(
    problem: WeightGradientProblem, moves: list[MovedImage], arithmetic: str, tile: tuple[int, int], rounds: int
) -> Draft:
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
    if out.pixel_stride is not None:  # in the order of the sums, so that the epilogue's reads are contiguous
        result, strides = _by_taps(out, out.pixel_stride), (geometry.reduction, geometry.group_channels, 1)
    in_place = (
        parts == 1
        and out.dtype == dtype
        and plane == prod(out.shape)
        and collapsed_stride(result.shape, result.strides) == 1
    )
    sums = Address(out.name, out.offset) if in_place else Address("sums")
    blocks = tiles * parts
    operations = 2 * tile_m * tile_n * slabs_per_part * slab  # per block
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
        flops=problem.flops // plane * prod(out.shape),  # without products of padding
        l2_bytes=l2_bytes,
        arithmetic_seconds=max(
            cost.seconds_in_rounds(blocks, operations, rate, gpu), l2_bytes / (gpu.bandwidth * cost.L2_SPEED)
        ),
    )
    steps: list[Step] = [*(moved.launch for moved in moves), products]
    workspace = [moved.buffer for moved in moves]
    if not in_place:
        buffer = Buffer("sums", parts * plane * ITEMSIZE[dtype])
        finish = finish_weight(result, Sums(sums, dtype, strides, planes=parts, plane=plane))
        steps.append(replace(finish, bytes_moved=out.nbytes + buffer.nbytes))  # includes the sums of padding
        workspace.append(buffer)
    description = f"{WORDS[arithmetic]}, tiles of {tile_m} x {tile_n}, sum in {counted(parts, 'part')}"
    description += ", inputs first copied to channels-last" if moves else ""
    return Draft("implicit_gemm", tuple(steps), tuple(workspace), description)


def _parts(blocks: int, tiles: int, slabs: int) -> int:
    """Return the number of parts that gives this many blocks, each part long enough to fill the pipeline."""
    return min(blocks // tiles, slabs // SMALLEST_SHARE, GRID_Y)


def _row_stride(grad: Operand) -> int | None:
    """Return the stride of grad's pixels if those of all samples form one row with a single stride, else None."""
    if grad.shape[0] * grad.pixels == 1:
        return 0
    return collapsed_stride((grad.shape[0], *grad.shape[2:]), (grad.stride_n, *grad.strides[2:]))


def _by_taps(out: Operand, stride: int) -> Operand:
    """View the result with its taps, `stride` elements apart, as channels, and its channels as pixels."""
    shape = (out.shape[0], out.pixels, 1, 1, out.shape[1])
    return out.view(shape, (out.stride_n, stride, 0, 0, out.stride_c), 0)


def shared_bytes(tile: tuple[int, int]) -> int:
    """Return the bytes of all stages of kernels/implicit_weight_gradient.cu."""
    return STAGES * sum(tile) * SLAB_BYTES
