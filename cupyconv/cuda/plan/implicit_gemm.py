"""Plan method "implicit_gemm" on CUDA: a GEMM whose columns are never stored in global memory.

::

    (channels_last)  inputs -> workspace with contiguous channels, which are copied 16 bytes at a time; only if that is
                     faster by the cost model.  If the workspace limit is too small for the whole batch, all steps but
                     pack_weight run for a few samples at a time
    (pack_weight)    weight -> workspace, in the order in which the GEMM reads it; skipped if the weight has that order
    implicit_gemm    one tile of the result per thread block; bias, residual and activation are fused in its epilogue
    (epilogue)       only if several blocks share a tile's sum: adds their partial sums and finishes the result

One launch computes several phases of a transposed convolution (``polyphase.py``) in one grid.  Blocks of consecutive
phases are neighbours in the grid, so that their stores to the same lines merge in the L2 cache.

The planner drafts all arithmetics for the dtype, ways to read the inputs, and tiles; the cost model picks one draft.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.arithmetic import WORDS, arithmetics
from cupyconv.cuda.plan.channels_last import channels_last
from cupyconv.cuda.plan.draft import Draft, cheapest, in_rounds
from cupyconv.cuda.plan.epilogue import Sums, finish
from cupyconv.cuda.plan.launches import (
    GRID_X,
    INT32,
    VECTOR_BYTES,
    WARP,
    bytes_of,
    epilogue_params,
    groups_params,
    image,
    prologue_params,
    prologue_words,
    sources_params,
    variant,
    vector_width,
)
from cupyconv.cuda.plan.occupancy import BUSY_THREADS, RESERVED_SHARED
from cupyconv.cuda.plan.packed_weight import (
    SLAB_BYTES,
    Phase,
    Phases,
    Reduction,
    runs_are_chunks,
    weight_in_slabs,
    weight_parts,
)
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator, is_complex, product_flops
from cupyconv.problem.geometry import ConvGeometry, Triple, even_part
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, KernelLaunch, Step, counted
from cupyconv.problem.problems import ConvProblem, NotApplicable

#: K-slabs in flight: stages of the pipeline (STAGES of kernels/implicit_gemm.cu).
STAGES = 3
#: Rows and columns of a tile -> threads per block.
TILES = {(128, 128): 256, (64, 64): 128}
#: Tiles that read fewer bytes per operation from L2.  Only 16-byte copies leave enough registers for this many sums.
WIDE_TILES = {(128, 256): 256, (64, 256): 128}
#: Rows (by tile) and columns of the part of a tile that the epilogue moves through shared memory at a time.
WARP_ROWS, PART_COLUMNS = {(128, 128): 64, (64, 64): 32, (128, 256): 64, (64, 256): 64}, 128
#: Channels per K-chunk (kernels/reduction.cuh) if neighbouring threads read neighbouring pixels.
PIXEL_K_CHUNK = 4
#: Minimum number of K-slabs per share of a split sum: fewer would not fill the pipeline.
SMALLEST_SHARE = 4
#: Real products per complex product (kernels/complex_tile.cuh).  With three, a warp with 32 x 32 sums issues 507
#: instructions for a K-slab of 16-byte copies, 72 of which are products; with four, it issues 491, 96 of which are
#: products.  A TF32 product takes 8 clocks on an A100 and, at the rate that mma.sync reaches, about 6.4 on an H200.  So
#: a slab takes 576 clocks instead of 768 on an A100, and 507 (bound by issued instructions) instead of 614 on an H200.
#:
#: There is no variant with three products for complex128.  It would have to accumulate each slab's products separately,
#: to detect operands that overflow when they are added, and a warp with 32 x 32 sums has too few registers for that.
#: Figures from SASS for a 64 x 64 tile, even without such a check: three products need 254 registers and spill 16 bytes
#: on sm_80 (48 mma.m8n8k4 per slab), and need 255 and spill 236 bytes on sm_90 (24 mma.m16n8k4), plus 77 additions of
#: doubles.  Four products need 206 registers on sm_80 (64 mma) and 216 on sm_90 (32 mma), without spills.  On an H200
#: that is 24 x 17 + 77 x 2 = 562 clocks for three and 32 x 17 = 544 for four.  On an A100, which has half as many units
#: for doubles, it is 48 x 16 + 77 x 4 = 1,076 for three and 64 x 16 = 1,024 for four.
REAL_PRODUCTS = {"complex64": 3}
#: Bits of the word that packs the three indices of an output pixel (TilePixel of kernels/gather.cuh).
PLACE_BITS = 32
#: Bits for the taps of a pixel's window: one bit per kernel index along each axis (TapCursor of kernels/gather.cuh).
TAP_BITS = 31


def tiles(dtype: str, arithmetic: str, gather: str, has_prologue: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the tiles that the kernel has for a dtype, an arithmetic and a gather direction.

    Only the 64 x 64 tile exists with a prologue, and for 8-byte numbers other than doubles on tensor cores.  Wide tiles
    have 64 x 64 sums per warp.  These fit the registers only if they have 4 bytes and no slab needs separate sums.
    """
    if has_prologue or (ITEMSIZE[dtype] == 8 and arithmetic != "MMA"):
        return ((64, 64),)
    is_wide = gather != "ALONG_PIXELS" and arithmetic in ("MMA", "TF32") and ITEMSIZE[dtype] < 8
    return (*TILES, *WIDE_TILES) if is_wide else tuple(TILES)


def draft_implicit_gemm(problem: ConvProblem) -> Draft:
    """Return the cheapest draft of method "implicit_gemm", or raise `NotApplicable`."""
    geometry = problem.geometry
    return draft_phases(problem, Phases((Phase(problem.weight, geometry.out_size, geometry.kernel, geometry.before),)))


def draft_phases(problem: ConvProblem, phases: Phases) -> Draft:
    """Return the cheapest draft that computes several convolutions in one grid, or raise `NotApplicable`.

    Each `Phase` has its own weight, sizes and padding; `problem` holds everything else.  The kernel size and padding of
    `problem` are the maximum over all phases.
    """
    gpu, geometry, dtype = problem.gpu, problem.geometry, problem.x_dtype
    if is_complex(problem.out.dtype) and (dtype not in REAL_PRODUCTS or not problem.is_one_kind):
        raise NotApplicable(f"no kernel for products of {dtype} and {problem.weight_dtype}")
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; the kernel supports at most {MAX_SOURCES}")
    between_taps = [step if taps > 1 else 1 for step, taps in zip(geometry.dilation, geometry.kernel)]
    steps = [x.strides[axis] * step for x in problem.xs for axis, step in enumerate((1, *between_taps), 1)]
    extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
    sizes = (*extents, geometry.batch, geometry.in_channels * geometry.taps, geometry.group_outputs * SLAB_BYTES)
    if max(*sizes, *map(abs, steps)) > INT32 // 8:
        raise NotApplicable(
            "sizes or strides within an image, K, or a K-slab of the weight exceed the kernel's int32 indices"
        )
    if sum(_index_bits(phases)) > PLACE_BITS:
        raise NotApplicable(f"the indices of an output pixel exceed the kernel's {PLACE_BITS} bits")
    choices = arithmetics(dtype, gpu, problem.allow_tf32)
    if not choices:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    drafts = []
    for arithmetic in choices:
        for gathering in _gatherings(problem, arithmetic):
            for tile in tiles(dtype, arithmetic, gathering.gather, bool(gathering.problem.prologue)):
                if shared_bytes(tile, arithmetic, accumulator(dtype)) <= gpu.shared_bytes:
                    with suppress(NotApplicable) if gathering.samples else nullcontext():
                        drafts.append(_draft_of(gathering, phases, arithmetic, tile))
    needed = [sum(buffer.space for buffer in draft.workspace if not buffer.of) for draft in drafts]
    fitting = [draft for draft, nbytes in zip(drafts, needed) if nbytes <= problem.limit]
    if not fitting:
        smallest = min(needed)
        raise NotApplicable(f"its packed weight needs {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    return cheapest(fitting, gpu)


@dataclass(frozen=True)
class Gathering:
    """A way to read the inputs; if `samples` is not 0, `_draft_of` adds steps that move that many at a time."""

    problem: ConvProblem
    gather: str
    notes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    samples: int = 0


def _gatherings(problem: ConvProblem, arithmetic: str) -> list[Gathering]:
    """Return the ways to read the inputs: in place, and also moved first if that replaces a gather by elements."""
    chunked = arithmetic != "FMA"
    gather, notes = _gather(problem, chunked)
    gatherings = [Gathering(problem, gather, notes)]
    if chunked and gather == "ALONG_PIXELS":
        with suppress(NotApplicable):
            one = channels_last(_samples(problem, 0, 1))
            most = problem.limit // 2 // one.buffer.nbytes  # the other half is for weight and sums
            if problem.geometry.batch * one.buffer.nbytes < problem.limit:
                gatherings.append(_moved(problem))
            elif most:
                gatherings.append(Gathering(problem, "ALONG_CHANNELS", samples=even_part(problem.geometry.batch, most)))
    return gatherings


def _moved(problem: ConvProblem) -> Gathering:
    moved = channels_last(problem)
    return Gathering(moved.problem, "ALONG_CHANNELS", (), (moved.launch,), (moved.buffer,))


def _samples(problem: ConvProblem, first: int, count: int) -> ConvProblem:
    """Return the problem for `count` samples, starting at `first`."""
    images = {name: getattr(problem, name) for name in ("out", "residual", "pre")}
    return replace(
        problem,
        geometry=replace(problem.geometry, batch=count),
        xs=tuple(x.samples(first, count) for x in problem.xs),
        **{name: image and image.samples(first, count) for name, image in images.items()},
    )


def _draft_of(gathering: Gathering, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> Draft:
    """Draft one way to read the inputs; if it moves some samples at a time, the weight is still packed only once."""
    if not gathering.samples:
        return _draft(gathering, phases, arithmetic, tile)

    def draft_of(first: int, count: int) -> Draft:
        return _draft(_moved(_samples(gathering.problem, first, count)), phases, arithmetic, tile)

    def is_pack(step: Step) -> bool:
        return isinstance(step, KernelLaunch) and step.kernel.name == "pack_weight"

    def steps_of(draft: Draft) -> list[Step]:
        return [step for step in draft.steps if not is_pack(step)]

    whole, rest = divmod(gathering.problem.geometry.batch, gathering.samples)
    drafts = [draft_of(0, gathering.samples), *([draft_of(whole * gathering.samples, rest)] if rest else ())]
    steps = [step for step in drafts[0].steps if is_pack(step)]
    steps += in_rounds(whole, lambda chunk: steps_of(draft_of(chunk * gathering.samples, gathering.samples)))
    steps += [step for draft in drafts[1:] for step in steps_of(draft)]
    workspace: dict[str, Buffer] = {}
    for buffer in (buffer for draft in drafts for buffer in draft.workspace):
        workspace[buffer.name] = max(buffer, workspace.get(buffer.name, buffer), key=lambda each: each.nbytes)
    reason = f"{drafts[0].reason}, {counted(gathering.samples, 'sample')} at a time"
    return replace(drafts[0], steps=tuple(steps), workspace=tuple(workspace.values()), reason=reason)


class _Tiles:
    """The tiles of the result and the K-slabs of their sums, which set the kernel's macros and grid."""

    def __init__(self, gathering: Gathering, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> None:
        self.problem, self.gather, self.arithmetic, self.tile = gathering.problem, gathering.gather, arithmetic, tile
        geometry, self.itemsize, (tile_m, tile_n) = (
            gathering.problem.geometry,
            ITEMSIZE[gathering.problem.x_dtype],
            tile,
        )
        self.threads = (TILES | WIDE_TILES)[tile]
        self.shared_bytes = shared_bytes(tile, arithmetic, accumulator(gathering.problem.x_dtype))
        k_chunk = VECTOR_BYTES // self.itemsize if gathering.gather == "ALONG_CHANNELS" else PIXEL_K_CHUNK
        self.cut = Reduction.of(geometry, phases, k_chunk, SLAB_BYTES // self.itemsize)
        #: Tiles along the rows, the same for all phases; tiles along the columns, per phase.
        self.rows = -(-geometry.group_outputs // tile_m) * geometry.groups
        self.columns = [-(-geometry.batch * phase.pixels // tile_n) for phase in phases.each]
        #: Blocks of the grid, which has equally many tiles for every phase.
        self.blocks = self.rows * max(self.columns) * len(self.columns)

    def priced(self, launch: KernelLaunch, slabs_per_split: int) -> KernelLaunch:
        """Return the launch with its estimated L2 bytes and arithmetic time."""
        problem, (tile_m, tile_n), gpu = self.problem, self.tile, self.problem.gpu
        rate = cost.product_rate(self.arithmetic, problem.x_dtype, gpu) * cost.IMPLICIT_GEMM[self.tile]
        if gpu.shared_bytes + RESERVED_SHARED < 2 * (self.shared_bytes + RESERVED_SHARED):
            rate *= self.threads / BUSY_THREADS  # only one block fits a multiprocessor
        # Slabs per block, averaged over the phases.
        all_slabs = sum(map(mul, self.columns, self.cut.slabs))
        slabs = slabs_per_split * all_slabs / (sum(self.columns) * max(self.cut.slabs))
        operations = 2 * REAL_PRODUCTS.get(problem.x_dtype, 1) * tile_m * tile_n * slabs * self.cut.slab
        # A tap reads again what the tap before it in the kernel row has left in L1.
        columns = tile_n / problem.geometry.kernel[2]
        l2_bytes = slabs * SLAB_BYTES * (tile_m * weight_parts(self.arithmetic, tile_m) + columns)
        issued = slabs * self.threads / WARP * cost.ISSUED[self.arithmetic, self.itemsize, self.gather][self.tile]
        shared_lines = slabs * self._shared_lines()
        blocks = self.rows * sum(self.columns) * launch.grid[1]
        seconds = cost.seconds_in_rounds(
            blocks, operations, rate, gpu, l2_bytes=l2_bytes, issued=issued, shared_lines=shared_lines
        )
        return replace(launch, l2_bytes=blocks * l2_bytes, arithmetic_seconds=seconds)

    def _shared_lines(self) -> int:
        """Lines that a block reads from and writes to shared memory or L1 per K-slab.

        Each warp reads the two edges of its part, and the block writes the two edges of the tile.  If a warp gathers by
        elements, it stores one line and loads every line that its elements touch.
        """
        tile_m, tile_n = self.tile
        parts, warps = weight_parts(self.arithmetic, tile_m), self.threads // WARP
        edges = warps * WARP_ROWS[self.tile] * parts + tile_m * tile_n // WARP_ROWS[self.tile]
        lines = (edges + tile_m * parts) * SLAB_BYTES // cost.SHARED_LINE
        if self.gather != "ALONG_PIXELS":
            return lines + tile_n * SLAB_BYTES // cost.SHARED_LINE
        touched = max(cost.lines_of(x, self.problem.geometry.stride[2]) for x in self.problem.xs)
        return lines + tile_n * (SLAB_BYTES // self.itemsize) // WARP * (1 + touched)


def _draft(gathering: Gathering, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> Draft:
    problem, geometry, dtype = gathering.problem, gathering.problem.geometry, gathering.problem.x_dtype
    tiled = _Tiles(gathering, phases, arithmetic, tile)
    tile_m, tile_n = tile
    if tiled.blocks > GRID_X:
        raise NotApplicable(f"{tiled.blocks:,} tiles exceed the largest grid")
    weight = weight_in_slabs(problem, phases, tiled.cut, arithmetic, tile_m)
    workspace = [*gathering.workspace, *weight.workspace]

    sums = replace(problem.out.in_c_order(accumulator(dtype)), name="sums", offset=0)
    taken = sum(buffer.space for buffer in workspace if not buffer.of)
    affordable = Buffer.parts_in(problem.limit - taken, sums.nbytes)
    at_once, most_slabs = problem.gpu.multiprocessors * (BUSY_THREADS // tiled.threads), max(tiled.cut.slabs)
    shares = max(1, min(at_once // tiled.blocks, most_slabs // SMALLEST_SHARE, affordable))
    slabs_per_split = -(-most_slabs // shares)
    splits = -(-most_slabs // slabs_per_split)
    out, plane = problem.out, 0
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    written = [each for each in (out, problem.residual, problem.pre) if each]  # the residual is read
    if splits > 1:
        out, plane, written = sums, prod(sums.shape), [sums] * splits
        epilogue = epilogue_params(None, None)
        workspace.append(Buffer("sums", splits * sums.nbytes))

    macros = dict(DTYPE=dtype, ARITHMETIC=arithmetic, TILE_M=tile_m, TILE_N=tile_n, GATHER=gathering.gather)
    launch = KernelLaunch(
        variant("implicit_gemm", problem.prologue, **macros),
        (tiled.blocks, splits, 1),
        tiled.threads,
        (
            ("sources", sources_params(problem.xs)),
            ("steps", _steps_params(geometry, phases)),
            ("weight", weight.params),
            ("out", image(_apart(out, phases.apart))),
            ("plane", plane),
            ("epilogue", epilogue),
            ("prologue", prologue_params(problem.prologue)),
            ("batch", geometry.batch),
            ("place_bits", _place_bits(phases)),
            *groups_params(geometry),
            ("tiles_m", tiled.rows // geometry.groups),
            ("keeps_sums", int(splits > 1 or out.dtype != dtype)),
            ("slabs_per_split", slabs_per_split),
            ("phases", len(phases.each)),
            ("phase", tuple(_phase_params(*each, out) for each in zip(phases.each, tiled.cut.first_slabs))),
        ),
        shared_bytes=tiled.shared_bytes,
        purpose=_words(phases) + prologue_words(problem.prologue) + ", bias, residual, activation" * (splits == 1),
        bytes_moved=bytes_of(problem.xs) + weight.nbytes + bytes_of(written),
        flops=_flops(problem, phases),
    )
    steps = [*gathering.steps, *weight.steps, tiled.priced(launch, slabs_per_split)]
    if splits > 1:
        in_c_order = (out.shape[1] * out.pixels, out.pixels, 1)
        steps.append(finish(problem, Sums(Address("sums"), out.dtype, in_c_order, planes=splits, plane=plane)))
    description = f"{WORDS.get(dtype, WORDS[arithmetic])}, tiles of {tile_m} x {tile_n}"
    description += f", each sum in {splits} parts" if splits > 1 else ""
    description += ", inputs first copied to channels-last" if gathering.steps else ""
    return Draft("implicit_gemm", tuple(steps), tuple(workspace), reason=description, notes=gathering.notes)


def _words(phases: Phases) -> str:
    return "convolution" if len(phases.each) == 1 else f"{len(phases.each)} convolutions in one grid"


def _flops(problem: ConvProblem, phases: Phases) -> int:
    geometry = problem.geometry
    products = sum(phase.pixels * phase.taps for phase in phases.each)
    products *= geometry.batch * geometry.out_channels * geometry.group_channels
    return products * product_flops(problem.x_dtype, problem.weight_dtype)


def _apart(out: Operand, apart: Triple) -> Operand:
    """Return the result as one phase sees it: the elements of that phase are neighbours."""
    return replace(out, strides=(*out.strides[:2], *map(mul, apart, out.strides[2:])))


def _steps_params(geometry: ConvGeometry, phases: Phases) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Steps."""
    mode = PADDING_MODES.index(geometry.padding_mode)
    has_too_many = any(sum(phase.kernel) > TAP_BITS for phase in phases.each)
    return geometry.size, geometry.stride, geometry.dilation, mode, int(mode != 0 or has_too_many)


def _phase_params(phase: Phase, first_slab: int, out: Operand) -> tuple[Any, ...]:
    """Return the fields of the C++ struct Phase."""
    first_element = sum(map(mul, phase.first, out.strides[2:]))
    return first_element, phase.out_size, phase.kernel, phase.before, first_slab


def shared_bytes(tile: tuple[int, int], arithmetic: str, sums: str) -> int:
    """Size of `Shared` of kernels/implicit_gemm.cu: a packed pixel per column, then stages or an epilogue's part."""
    tile_m, tile_n = tile
    stages = STAGES * (tile_m * weight_parts(arithmetic, tile_m) + tile_n) * SLAB_BYTES
    part = WARP_ROWS[tile] * (min(tile_n, PART_COLUMNS) + 8) * ITEMSIZE[sums]
    return tile_n * 8 + max(stages, tile_n * 16 + part)


def _index_bits(phases: Phases) -> tuple[int, ...]:
    """Return the bits of the largest output index along each axis, over all phases."""
    return tuple((max(sizes) - 1).bit_length() for sizes in zip(*(phase.out_size for phase in phases.each)))


def _place_bits(phases: Phases) -> tuple[int, int]:
    """Return the fields of the C++ struct PlaceBits."""
    _, height, width = _index_bits(phases)
    return height + width, width


def _gather(problem: ConvProblem, chunked: bool) -> tuple[str, tuple[str, ...]]:
    """Return what neighbouring threads gather, a direction of kernels/gather.cuh, and notes for `explain`.

    A note says why channels-last inputs are gathered by elements.  A `chunked` arithmetic reads its tiles along K and
    needs them in aligned chunks of 16 bytes.
    """
    xs = problem.xs
    if problem.geometry.is_pointwise and not problem.prologue and vector_width(xs, xs[0].pixels) > 1:
        return "PIXEL_CHUNKS", ()
    if not all(x.stride_c == 1 for x in xs) or all(x.pixel_stride == 1 for x in xs):
        return "ALONG_PIXELS", ()
    if problem.prologue:
        return "ALONG_PIXELS", ("channels-last inputs with a prologue: gathered element by element along pixels",)
    chunk = VECTOR_BYTES // ITEMSIZE[problem.x_dtype]
    if not chunked:
        return "ALONG_CHANNELS", ()
    for x in xs:
        if x.alignment < VECTOR_BYTES or any(x.strides[axis] % chunk for axis in (0, 2, 3, 4)):
            return "ALONG_PIXELS", (
                f"{x.name}: channels-last, but not every pixel is {VECTOR_BYTES}-byte aligned:"
                " gathered element by element",
            )
    if not runs_are_chunks(problem.geometry, chunk):
        return "ALONG_PIXELS", (
            f"channels of an input or a group are not a multiple of {chunk}: gathered element by element",
        )
    return "ALONG_CHANNELS", ()
