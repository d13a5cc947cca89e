"""Implicit GEMM: the plan of method "implicit_gemm" on CUDA, a product whose columns are never stored.

::

    (channels_last)  inputs -> workspace, so that their channels are copied 16 bytes at a time, where that takes less;
                     some samples at a time where there is no room for all, which all but pack_weight is then done for
    (pack_weight)    weight -> workspace, in the order in which the product reads it, where it does not lie so already
    implicit_gemm    one tile of the result a block of threads; bias, residual, activation on the way out
    (epilogue)       only where several blocks share a tile's sum: adds their parts and finishes them

The phases of a transposed convolution (``polyphase.py``) are one grid, several of which a launch does: blocks of one phase
and of the next follow each other, and what they store into the same lines meets in the L2 cache.

Every arithmetic the dtype has on the GPU, every way to read the inputs and every tile is drafted; the cost model picks.
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

#: Slabs of the sum in flight (STAGES of kernels/implicit_gemm.cu).
STAGES = 3
#: Rows and columns of a tile -> threads that work on it.
TILES = {(128, 128): 256, (64, 64): 128}
#: Tiles that ask L2 for fewer bytes an operation; for 16-byte copies, beside which registers hold so many sums.
WIDE_TILES = {(128, 256): 256, (64, 256): 128}
#: Rows and columns of a tile that pass through shared memory together on their way to the result.
WARP_ROWS, PART_COLUMNS = {(128, 128): 64, (64, 64): 32, (128, 256): 64, (64, 256): 64}, 128
#: Channels of a K-chunk (kernels/reduction.cuh) where threads run along pixels.
PIXEL_K_CHUNK = 4
#: K-slabs that a share of a split sum has at the least: fewer would not fill the pipeline.
SMALLEST_SHARE = 4
#: Real products that a product of two numbers takes (kernels/complex_tile.cuh).  A warp that has 32 x 32 sums issues 507
#: instructions for a K-slab of 16-byte copies, 72 of them products; with four real products for a complex one 491 and 96.  A
#: product of TF32 takes an A100 8 clocks and an H200, at the rate that mma.sync reaches, about 6.4: 576 against 768 clocks, and
#: 507 against 614.
#:
#: There are no three for complex128: a slab's products are summed apart, so that operands that overflow as they are added could
#: be seen, and a warp of 32 x 32 sums has no registers for that.  Written out for a tile of 64 x 64 and counted in SASS, even
#: without such a check: three products take 254 registers and spill 16 bytes on sm_80 (48 mma.m8n8k4 a slab), 255 and 236
#: bytes on sm_90 (24 mma.m16n8k4), and 77 additions of doubles besides; four take 206 registers (64) and 216 (32), no spills.
#: On an H200 that is 24 x 17 + 77 x 2 = 562 clocks against 32 x 17 = 544; on an A100, with half as many units for doubles,
#: 48 x 16 + 77 x 4 = 1,076 against 64 x 16 = 1,024.
REAL_PRODUCTS = {"complex64": 3}
#: Bits for the indices of an output pixel side by side (TilePixel of kernels/gather.cuh).
PLACE_BITS = 32
#: Bits for the taps of a pixel's window, of each axis by itself (TapCursor of kernels/gather.cuh).
TAP_BITS = 31


def tiles(dtype: str, arithmetic: str, gather: str, has_prologue: bool = False) -> tuple[tuple[int, int], ...]:
    """With a prologue there is one tile, and so for numbers of 8 bytes but doubles on tensor cores.

    A warp's part of 64 x 64 sums is for sums of 4 bytes that are not summed apart first: others do not fit the registers.
    """
    if has_prologue or (ITEMSIZE[dtype] == 8 and arithmetic != "MMA"):
        return ((64, 64),)
    is_wide = gather != "ALONG_PIXELS" and arithmetic in ("MMA", "TF32") and ITEMSIZE[dtype] < 8
    return (*TILES, *WIDE_TILES) if is_wide else tuple(TILES)


def draft_implicit_gemm(problem: ConvProblem) -> Draft:
    """The cheapest plan of method "implicit_gemm", or raise `NotApplicable`."""
    geometry = problem.geometry
    return draft_phases(problem, Phases((Phase(problem.weight, geometry.out_size, geometry.kernel, geometry.before),)))


def draft_phases(problem: ConvProblem, phases: Phases) -> Draft:
    """The same for several convolutions in one grid.

    They are the problem's but for what a phase has of its own; its kernel and padding have room for those of all.
    """
    gpu, geometry, dtype = problem.gpu, problem.geometry, problem.x_dtype
    if is_complex(problem.out.dtype) and (dtype not in REAL_PRODUCTS or not problem.is_one_kind):
        raise NotApplicable(f"no kernel for products of {dtype} and {problem.weight_dtype}")
    if len(problem.xs) > MAX_SOURCES:
        raise NotApplicable(f"{len(problem.xs)} inputs; a kernel's parameters hold {MAX_SOURCES}")
    between_taps = [step if taps > 1 else 1 for step, taps in zip(geometry.dilation, geometry.kernel)]
    steps = [x.strides[axis] * step for x in problem.xs for axis, step in enumerate((1, *between_taps), 1)]
    extents = [sum(sizes) for sizes in zip(geometry.size, geometry.before, geometry.after)]
    sizes = (*extents, geometry.batch, geometry.in_channels * geometry.taps, geometry.group_outputs * SLAB_BYTES)
    if max(*sizes, *map(abs, steps)) > INT32 // 8:
        raise NotApplicable("sizes and strides within an image, K, and a K-slab of the weight are int32 there")
    if sum(_index_bits(phases)) > PLACE_BITS:
        raise NotApplicable(f"its kernel keeps the indices of an output pixel in {PLACE_BITS} bits")
    choices = arithmetics(dtype, gpu, problem.allow_tf32)
    if not choices:
        raise NotApplicable(f"{gpu.arch} has no matrix instructions for {dtype}")
    drafts = []
    for arithmetic in choices:
        for way in _ways(problem, arithmetic):
            for tile in tiles(dtype, arithmetic, way.gather, bool(way.problem.prologue)):
                if shared_bytes(tile, arithmetic, accumulator(dtype)) <= gpu.shared_bytes:
                    with suppress(NotApplicable) if way.samples else nullcontext():
                        drafts.append(_draft_of(way, phases, arithmetic, tile))
    needed = [sum(buffer.space for buffer in draft.workspace if not buffer.of) for draft in drafts]
    fitting = [draft for draft, nbytes in zip(drafts, needed) if nbytes <= problem.limit]
    if not fitting:
        smallest = min(needed)
        raise NotApplicable(f"its packed weight takes {smallest:,} bytes of workspace, the limit is {problem.limit:,}")
    return cheapest(fitting, gpu)


@dataclass(frozen=True)
class Way:
    """How the inputs are read: as the problem has them, in this direction, after these steps; moved so many samples at a time."""

    problem: ConvProblem
    gather: str
    notes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    samples: int = 0


def _ways(problem: ConvProblem, arithmetic: str) -> list[Way]:
    """Where the inputs lie; and moved first, where that makes chunks of what would be gathered by elements."""
    chunked = arithmetic != "FMA"
    gather, notes = _gather(problem, chunked)
    ways = [Way(problem, gather, notes)]
    if chunked and gather == "ALONG_PIXELS":
        with suppress(NotApplicable):
            one = channels_last(_samples(problem, 0, 1))
            most = problem.limit // 2 // one.buffer.nbytes  # the rest is for the weight, and for sums
            if problem.geometry.batch * one.buffer.nbytes < problem.limit:
                ways.append(_moved(problem))
            elif most:
                ways.append(Way(problem, "ALONG_CHANNELS", samples=even_part(problem.geometry.batch, most)))
    return ways


def _moved(problem: ConvProblem) -> Way:
    moved = channels_last(problem)
    return Way(moved.problem, "ALONG_CHANNELS", (), (moved.launch,), (moved.buffer,))


def _samples(problem: ConvProblem, first: int, count: int) -> ConvProblem:
    """The problem for some of the samples."""
    images = {name: getattr(problem, name) for name in ("out", "residual", "pre")}
    return replace(
        problem,
        geometry=replace(problem.geometry, batch=count),
        xs=tuple(x.samples(first, count) for x in problem.xs),
        **{name: image and image.samples(first, count) for name, image in images.items()},
    )


def _draft_of(way: Way, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> Draft:
    """The draft of a way; some samples at a time where it says so, by a weight that is packed once."""
    if not way.samples:
        return _draft(way, phases, arithmetic, tile)

    def draft_of(first: int, count: int) -> Draft:
        return _draft(_moved(_samples(way.problem, first, count)), phases, arithmetic, tile)

    def is_pack(step: Step) -> bool:
        return isinstance(step, KernelLaunch) and step.kernel.name == "pack_weight"

    def steps_of(draft: Draft) -> list[Step]:
        return [step for step in draft.steps if not is_pack(step)]

    whole, rest = divmod(way.problem.geometry.batch, way.samples)
    drafts = [draft_of(0, way.samples), *([draft_of(whole * way.samples, rest)] if rest else ())]
    steps = [step for step in drafts[0].steps if is_pack(step)]
    steps += in_rounds(whole, lambda chunk: steps_of(draft_of(chunk * way.samples, way.samples)))
    steps += [step for draft in drafts[1:] for step in steps_of(draft)]
    workspace: dict[str, Buffer] = {}
    for buffer in (buffer for draft in drafts for buffer in draft.workspace):
        workspace[buffer.name] = max(buffer, workspace.get(buffer.name, buffer), key=lambda each: each.nbytes)
    reason = f"{drafts[0].reason}, {counted(way.samples, 'sample')} at a time"
    return replace(drafts[0], steps=tuple(steps), workspace=tuple(workspace.values()), reason=reason)


class _Tiles:
    """The tiles of a way's result, and the slabs of their sums: what the kernel is compiled and launched for."""

    def __init__(self, way: Way, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> None:
        self.problem, self.gather, self.arithmetic, self.tile = way.problem, way.gather, arithmetic, tile
        geometry, self.itemsize, (tile_m, tile_n) = way.problem.geometry, ITEMSIZE[way.problem.x_dtype], tile
        self.threads = (TILES | WIDE_TILES)[tile]
        self.shared_bytes = shared_bytes(tile, arithmetic, accumulator(way.problem.x_dtype))
        k_chunk = VECTOR_BYTES // self.itemsize if way.gather == "ALONG_CHANNELS" else PIXEL_K_CHUNK
        self.cut = Reduction.of(geometry, phases, k_chunk, SLAB_BYTES // self.itemsize)
        #: Of all phases, along rows; of each phase, along columns.
        self.rows = -(-geometry.group_outputs // tile_m) * geometry.groups
        self.columns = [-(-geometry.batch * phase.pixels // tile_n) for phase in phases.each]
        #: Blocks of a grid that has as many tiles for each phase.
        self.blocks = self.rows * max(self.columns) * len(self.columns)

    def priced(self, launch: KernelLaunch, slabs_per_split: int) -> KernelLaunch:
        """The launch with what it asks L2 for, and with what its arithmetic takes."""
        problem, (tile_m, tile_n), gpu = self.problem, self.tile, self.problem.gpu
        rate = cost.product_rate(self.arithmetic, problem.x_dtype, gpu) * cost.IMPLICIT_GEMM[self.tile]
        if gpu.shared_bytes + RESERVED_SHARED < 2 * (self.shared_bytes + RESERVED_SHARED):
            rate *= self.threads / BUSY_THREADS  # one block to a multiprocessor
        # Of a block, on the average of the phases.
        all_slabs = sum(map(mul, self.columns, self.cut.slabs))
        slabs = slabs_per_split * all_slabs / (sum(self.columns) * max(self.cut.slabs))
        operations = 2 * REAL_PRODUCTS.get(problem.x_dtype, 1) * tile_m * tile_n * slabs * self.cut.slab
        # Taps of a row read what the one before has left in L1.
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
        """Lines that go to and from shared memory for a K-slab of a block.

        Each warp reads the edges of its part, and the tile's are written; what a warp gathers by elements takes a line to
        store, and to load those where they lie.
        """
        tile_m, tile_n = self.tile
        parts, warps = weight_parts(self.arithmetic, tile_m), self.threads // WARP
        edges = warps * WARP_ROWS[self.tile] * parts + tile_m * tile_n // WARP_ROWS[self.tile]
        lines = (edges + tile_m * parts) * SLAB_BYTES // cost.SHARED_LINE
        if self.gather != "ALONG_PIXELS":
            return lines + tile_n * SLAB_BYTES // cost.SHARED_LINE
        touched = max(cost.lines_of(x, self.problem.geometry.stride[2]) for x in self.problem.xs)
        return lines + tile_n * (SLAB_BYTES // self.itemsize) // WARP * (1 + touched)


def _draft(way: Way, phases: Phases, arithmetic: str, tile: tuple[int, int]) -> Draft:
    problem, geometry, dtype = way.problem, way.problem.geometry, way.problem.x_dtype
    tiled = _Tiles(way, phases, arithmetic, tile)
    tile_m, tile_n = tile
    if tiled.blocks > GRID_X:
        raise NotApplicable(f"{tiled.blocks:,} tiles are more than a grid has blocks")
    weight = weight_in_slabs(problem, phases, tiled.cut, arithmetic, tile_m)
    workspace = [*way.workspace, *weight.workspace]

    sums = replace(problem.out.in_c_order(accumulator(dtype)), name="sums", offset=0)
    taken = sum(buffer.space for buffer in workspace if not buffer.of)
    affordable = Buffer.parts_in(problem.limit - taken, sums.nbytes)
    at_once, most_slabs = problem.gpu.multiprocessors * (BUSY_THREADS // tiled.threads), max(tiled.cut.slabs)
    shares = max(1, min(at_once // tiled.blocks, most_slabs // SMALLEST_SHARE, affordable))
    slabs_per_split = -(-most_slabs // shares)
    splits = -(-most_slabs // slabs_per_split)
    out, plane = problem.out, 0
    epilogue = epilogue_params(problem.bias, problem.residual, problem.activation, pre=problem.pre)
    written = [each for each in (out, problem.residual, problem.pre) if each]  # and read
    if splits > 1:
        out, plane, written = sums, prod(sums.shape), [sums] * splits
        epilogue = epilogue_params(None, None)
        workspace.append(Buffer("sums", splits * sums.nbytes))

    macros = dict(DTYPE=dtype, ARITHMETIC=arithmetic, TILE_M=tile_m, TILE_N=tile_n, GATHER=way.gather)
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
    steps = [*way.steps, *weight.steps, tiled.priced(launch, slabs_per_split)]
    if splits > 1:
        in_c_order = (out.shape[1] * out.pixels, out.pixels, 1)
        steps.append(finish(problem, Sums(Address("sums"), out.dtype, in_c_order, planes=splits, plane=plane)))
    words = f"{WORDS.get(dtype, WORDS[arithmetic])}, tiles of {tile_m} x {tile_n}"
    words += f", each sum in {splits} parts" if splits > 1 else ""
    words += ", the inputs moved first" if way.steps else ""
    return Draft("implicit_gemm", tuple(steps), tuple(workspace), reason=words, notes=way.notes)


def _words(phases: Phases) -> str:
    return "convolution" if len(phases.each) == 1 else f"{len(phases.each)} convolutions side by side"


def _flops(problem: ConvProblem, phases: Phases) -> int:
    geometry = problem.geometry
    products = sum(phase.pixels * phase.taps for phase in phases.each)
    products *= geometry.batch * geometry.out_channels * geometry.group_channels
    return products * product_flops(problem.x_dtype, problem.weight_dtype)


def _apart(out: Operand, apart: Triple) -> Operand:
    """The result as a phase sees it: its elements as neighbours."""
    return replace(out, strides=(*out.strides[:2], *map(mul, apart, out.strides[2:])))


def _steps_params(geometry: ConvGeometry, phases: Phases) -> tuple[Any, ...]:
    """The C++ struct Steps."""
    mode = PADDING_MODES.index(geometry.padding_mode)
    has_too_many = any(sum(phase.kernel) > TAP_BITS for phase in phases.each)
    return geometry.size, geometry.stride, geometry.dilation, mode, int(mode != 0 or has_too_many)


def _phase_params(phase: Phase, first_slab: int, out: Operand) -> tuple[Any, ...]:
    """The C++ struct Phase."""
    first_element = sum(map(mul, phase.first, out.strides[2:]))
    return first_element, phase.out_size, phase.kernel, phase.before, first_slab


def shared_bytes(tile: tuple[int, int], arithmetic: str, sums: str) -> int:
    """`Shared` of kernels/implicit_gemm.cu: a packed pixel for each column, and stages or a part of an epilogue tile in the same place."""
    tile_m, tile_n = tile
    stages = STAGES * (tile_m * weight_parts(arithmetic, tile_m) + tile_n) * SLAB_BYTES
    part = WARP_ROWS[tile] * (min(tile_n, PART_COLUMNS) + 8) * ITEMSIZE[sums]
    return tile_n * 8 + max(stages, tile_n * 16 + part)


def _index_bits(phases: Phases) -> tuple[int, ...]:
    """Bits of the largest index of a phase's output pixel along each axis."""
    return tuple((max(sizes) - 1).bit_length() for sizes in zip(*(phase.out_size for phase in phases.each)))


def _place_bits(phases: Phases) -> tuple[int, int]:
    """The C++ struct PlaceBits."""
    _, height, width = _index_bits(phases)
    return height + width, width


def _gather(problem: ConvProblem, chunked: bool) -> tuple[str, tuple[str, ...]]:
    """What neighbouring threads gather: a direction of kernels/gather.cuh; notes where channels-last inputs miss that.

    An arithmetic that reads its tiles along K wants them in chunks of 16 bytes, all aligned.
    """
    xs = problem.xs
    if problem.geometry.is_pointwise and not problem.prologue and vector_width(xs, xs[0].pixels) > 1:
        return "PIXEL_CHUNKS", ()
    if not all(x.stride_c == 1 for x in xs) or all(x.pixel_stride == 1 for x in xs):
        return "ALONG_PIXELS", ()
    if problem.prologue:
        return "ALONG_PIXELS", ("channels-last inputs with a prologue: gathered by elements, pixel by pixel",)
    chunk = VECTOR_BYTES // ITEMSIZE[problem.x_dtype]
    if not chunked:
        return "ALONG_CHANNELS", ()
    for x in xs:
        if x.alignment < VECTOR_BYTES or any(x.strides[axis] % chunk for axis in (0, 2, 3, 4)):
            return "ALONG_PIXELS", (
                f"{x.name}: channels-last, but not every pixel is {VECTOR_BYTES}-byte aligned: gathered by elements",
            )
    if not runs_are_chunks(problem.geometry, chunk):
        return "ALONG_PIXELS", (f"channels of an input or a group are no multiple of {chunk}: gathered by elements",)
    return "ALONG_CHANNELS", ()
