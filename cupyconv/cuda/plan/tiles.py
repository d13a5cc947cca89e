"""Tiles and their transforms: what convolutions and weight gradients by method "fft" have in common on CUDA.

A unit is one tile of one sample, of all channels.  Along an axis of one tap tiles are one pixel long, so that the
transforms are of the others.

Two orders of spectra.  Frequencies side by side: a kernel multiplies them one by one, which is for few channels.
Interleaved, channels side by side: each frequency has a matrix product, and cuBLAS does 65,535 of them in one call.
cuFFT reads and writes both, so nothing is transposed.

Merged inputs are cut and transformed one after the other, in the same memory.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, prod
from typing import Any, NamedTuple

from cupyconv.cuda.plan import cost
from cupyconv.cuda.plan.draft import Draft, in_rounds, in_sequence, within
from cupyconv.cuda.plan.launches import (
    GRID_X,
    GRID_Y,
    WARP,
    bytes_of,
    image,
    is_along_channels,
    prologue_params,
    prologue_words,
    variant,
)
from cupyconv.cuda.plan.matrices import MAX_BATCH, MAX_DIMENSION, compute_type
from cupyconv.problem.arrays import ITEMSIZE, Operand, accumulator
from cupyconv.problem.geometry import Triple, Windows, even_part, ranges_of
from cupyconv.problem.padding import PADDING_MODES
from cupyconv.problem.plan import MAX_SOURCES, Address, Buffer, GemmCall, KernelLaunch, Matrix, Step, Transform, counted
from cupyconv.problem.problems import NO_PROLOGUE, NotApplicable, Prologue
from cupyconv.problem.transforms import ERRORS, Shared, no_room, share_problem, share_sizes, transformed_axes

#: Threads of a block of these kernels, and channels of a thread where a warp's share them.
BLOCK, CHANNELS = 256, 8
#: Neighbouring threads on neighbouring channels, where these lie side by side in tiles: all of a warp where they do so in
#: the image too, else as many as write a whole sector.
SIDE_BY_SIDE = 8
#: Shortest tile, and how much longer each that is looked at is than the one before, beginning with the kernel.
SHORTEST, LONGER = 16, 1.8
#: Elements of one step's tiles, which the kernels and cuFFT count in 32 bits.
MOST_ELEMENTS = 2**31 - 1
#: Matrix products of the frequencies: more groups are multiplied one by one.
MOST_CALLS = 64
#: Shares of a problem, each with launches of its own, which a plan lists.
MOST_SHARES = 64
#: Orders of spectra: whether they are interleaved.
ORDERS = (False, True)
#: Multiply-adds of a convolution whose sums are computed again where they are not finite: as many take about a second.
MOST_PRODUCTS = 1 << 40


@dataclass(frozen=True)
class Tiling:
    """One way to cut a problem, and one order of its spectra."""

    problem: Shared
    #: Pixels of the convolution's result that belong to one tile.
    block: Triple
    #: Whether channels lie side by side, and each frequency has a matrix product.
    interleaved: bool

    @property
    def seconds(self) -> float:
        """What it takes by the model."""
        gpu, part = self.problem.gpu, self.chunk
        once = Draft("fft", (*self.first_steps(), *self.last_steps())).cost(gpu).seconds
        return once + Draft("fft", tuple(self.steps(0, part))).cost(gpu).seconds * self.units / part

    def draft(self) -> Draft:
        geometry, part = self.problem.geometry, self.chunk
        whole, rest = divmod(self.units, part)
        steps = [
            *self.first_steps(),
            *in_rounds(whole, lambda chunk: self.steps(chunk * part, part)),
            *(self.steps(whole * part, rest) if rest else ()),
            *self.last_steps(),
        ]
        chunks = f", {whole + bool(rest):,} chunks of {part:,}" if whole + bool(rest) > 1 else ""
        shown = " x ".join(str(self.tile[axis]) for axis in transformed_axes(geometry))
        how = "a matrix product for each frequency" if self.interleaved else "products of spectra"
        again = self.again if self.computes_again else self.not_again
        notes = f"what is not finite {again}", "cuFFT's own memory, an estimate until it has run, stays with the stream"
        reason = f"{how}; {counted(self.units, 'tile')} of {shown}{chunks}; {ERRORS}"
        return Draft("fft", tuple(steps), self.workspace(part), reason, notes, cost.TRANSFORMS_DOUBT)

    # What a problem has of its own.

    #: What happens to results that are not finite: where they are computed again, and where not.
    again = "is computed again from its window"
    not_again = "is left so, as is all of its tile"

    def first_steps(self) -> list[Step]:
        """What is done before the first chunk."""
        return []

    @abstractmethod
    def steps(self, first: int, units: int) -> list[Step]:
        """What is done for the chunk of `units` units from `first` on."""

    def last_steps(self) -> list[Step]:
        """What is done after the last chunk."""
        return []

    @abstractmethod
    def buffers(self, units: int) -> tuple[Buffer, ...]:
        """Workspace beside cuFFT's for chunks of `units` units; the first holds tiles."""

    # Sizes.

    @cached_property
    def tile(self) -> Triple:
        """The size of a tile."""
        geometry = self.problem.geometry
        along = transformed_axes(geometry)
        read = [(n - 1) * stride + span for n, stride, span in zip(self.block, geometry.stride, geometry.span)]
        lengths = [
            fast_length(extent, 2 if axis == along[-1] else 1) if axis in along else extent
            for axis, extent in enumerate(read)
        ]
        return lengths[0], lengths[1], lengths[2]

    @cached_property
    def tiles(self) -> Triple:
        """How many there are along each axis of a sample."""
        depth, height, width = (-(-n // part) for n, part in zip(self.problem.geometry.out_size, self.block))
        return depth, height, width

    @property
    def units(self) -> int:
        return self.problem.geometry.batch * prod(self.tiles)

    @cached_property
    def dtype(self) -> str:
        """Of tiles and of sums."""
        return accumulator(self.problem.out.dtype)

    @cached_property
    def spectrum_dtype(self) -> str:
        return {"float32": "complex64", "float64": "complex128"}.get(self.dtype, self.dtype)

    @cached_property
    def elements(self) -> int:
        return prod(self.tile)

    @cached_property
    def frequencies(self) -> int:
        size = tuple(self.tile[axis] for axis in transformed_axes(self.problem.geometry))
        return prod(Transform(size, 1, Address(""), Address(""), self.dtype).frequencies)

    @cached_property
    def image_bytes(self) -> int:
        """Of one tile of one channel."""
        return self.elements * ITEMSIZE[self.dtype]

    @cached_property
    def spectrum_bytes(self) -> int:
        """Of one tile of one channel."""
        return self.frequencies * ITEMSIZE[self.spectrum_dtype]

    @cached_property
    def kernels(self) -> int:
        """Pairs of an output and a channel that have a kernel."""
        return self.problem.geometry.out_channels * self.problem.geometry.group_channels

    @cached_property
    def parts(self) -> list[range]:
        """The channels of each input, counted through all of them."""
        offsets = self.problem.geometry.channel_offsets
        return [range(begin, begin + x.shape[1]) for x, begin in zip(self.problem.xs, offsets)]

    @cached_property
    def widest(self) -> int:
        """Channels of the input that has the most."""
        return max(map(len, self.parts))

    def workspace(self, units: int) -> tuple[Buffer, ...]:
        """All of it: cuFFT works in memory of its own, which stays with the stream."""
        own = self.buffers(units)
        return *own, Buffer("cuFFT's own", self.work_bytes(own[0].nbytes // self.image_bytes), is_kept=True)

    def work_bytes(self, batch: int) -> int:
        """Memory that cuFFT is expected to need for so many transforms."""
        return ceil(self.problem.gpu.transform_area * batch * self.spectrum_bytes)

    @cached_property
    def most_units(self) -> int:
        """Units of the largest chunk that there is room for; 0 where there is none."""
        geometry, limit = self.problem.geometry, self.problem.limit
        channels = max(self.widest, geometry.out_channels)
        if self.kernels * self.elements > MOST_ELEMENTS:
            return 0
        most = min(self.units, MAX_DIMENSION, MOST_ELEMENTS // (channels * self.elements))
        sizes = range(1, most + 1)
        return bisect_right(sizes, limit, key=lambda units: sum(buffer.space for buffer in self.workspace(units)))

    @property
    def chunk(self) -> int:
        """Units of a chunk."""
        return even_part(self.units, self.most_units)

    @cached_property
    def computes_again(self) -> bool:
        """Whether what is not finite is computed as it is defined."""
        return self.problem.geometry.products <= MOST_PRODUCTS and len(self.problem.xs) <= MAX_SOURCES

    @cached_property
    def has_matrices(self) -> bool:
        """Whether products are of matrices, and cuBLAS can be told of those of all frequencies in a few calls."""
        geometry = self.problem.geometry
        largest = max(geometry.in_channels, geometry.out_channels)
        if geometry.group_channels * geometry.group_outputs == 1:
            return False
        return geometry.groups * -(-self.frequencies // MAX_BATCH) <= MOST_CALLS and largest <= MAX_DIMENSION

    # Steps.

    def transform(self, source: str, target: str, batch: int, *, inverse: bool = False, purpose: str = "") -> Transform:
        size = tuple(self.tile[axis] for axis in transformed_axes(self.problem.geometry))
        places = Address(source), Address(target)
        nbytes = self.work_bytes(batch)
        return Transform(size, batch, *places, self.dtype, inverse, self.interleaved, purpose, nbytes)

    def strides(self, units: int, channels: int, elements: int) -> tuple[int, int, int]:
        """From one unit, one channel and one element, or frequency, to the next."""
        return (channels, 1, units * channels) if self.interleaved else (channels * elements, elements, 1)

    def lanes(self, array: Operand) -> int:
        """Neighbouring threads that take neighbouring channels."""
        most = WARP if is_along_channels(array) else SIDE_BY_SIDE
        return min(most, 1 << (array.shape[1] - 1).bit_length()) if self.interleaved else 1

    def cut_inputs(self, first: int, units: int) -> Iterator[tuple[range, list[Step]]]:
        """Of each input in turn, its channels and the steps that leave the spectra of its tiles."""
        geometry = self.problem.geometry
        step = tuple(pixels * stride for pixels, stride in zip(self.block, geometry.stride))
        mode = PADDING_MODES.index(geometry.padding_mode)
        windows = geometry.size, self.tiles, self.tile, step, geometry.before, (1, 1, 1), mode
        for x, part in zip(self.problem.xs, self.parts):
            cut = self.cut(x, windows, first, units, prologue=self.problem.prologue, first_channel=part.start)
            purpose = "spectra of the tiles"
            yield part, [cut, self.transform("tiles", "spectra", units * len(part), purpose=purpose)]

    def cut(
        self,
        x: Operand,
        windows: tuple[Any, ...],
        first: int,
        units: int,
        *,
        read: Triple | None = None,
        scale: float = 1.0,
        prologue: Prologue = NO_PROLOGUE,
        first_channel: int = 0,
        purpose: str = "tiles",
    ) -> KernelLaunch:
        """Tiles of an image in workspace; of each `read` elements along each axis, or all, and behind them zeros."""
        channels = x.shape[1]
        strides, lanes = self.strides(units, channels, self.elements), self.lanes(x)
        launch = KernelLaunch(
            variant("tiles", prologue, DTYPE=x.dtype, TILE_DTYPE=self.dtype),
            *grid_of(units * self.elements, channels, lanes),
            (
                ("x", image(x)),
                ("windows", windows),
                ("prologue", prologue_params(prologue, first_channel)),
                ("tiles", Address("tiles")),
                *zip(("stride_u", "stride_c", "stride_t"), strides),
                ("first_unit", first),
                ("scale", scale),
                ("read", read or self.tile),
                ("units", units),
                ("channels", channels),
                ("channel_lanes", lanes),
            ),
            purpose=purpose + prologue_words(prologue),
            bytes_moved=units * channels * self.elements * (x.itemsize + ITEMSIZE[self.dtype]),
        )
        return self.placed(launch, units * self.elements, channels)

    def placed(self, launch: KernelLaunch, places: int, channels: int) -> KernelLaunch:
        """The launch with what it takes to find its places, once for the channels of a thread, and to go through these."""
        gpu = self.problem.gpu
        operations = places * (cost.TILE_PLACE * -(-channels // CHANNELS) + 4 * channels)
        return replace(launch, arithmetic_seconds=2 * operations / gpu.fp32)

    def multiplied(self, launch: KernelLaunch, products: int) -> KernelLaunch:
        """The launch with what these complex products take, whose factors come from L2."""
        gpu, flops = self.problem.gpu, 8 * products
        loads = 2 * products * ITEMSIZE[self.spectrum_dtype] / (gpu.bandwidth * cost.L2_SPEED)
        return replace(launch, flops=flops, arithmetic_seconds=max(flops / cost.core_rate(self.dtype, gpu), loads))

    def groups_of(self, part: range) -> Iterator[tuple[int, int, int]]:
        """The groups that have some of these channels, and from where to where these are: all are counted through all groups."""
        channels = self.problem.geometry.group_channels
        for group in range(part.start // channels, -(-part.stop // channels)):
            yield group, max(part.start, group * channels), min(part.stop, (group + 1) * channels)

    def matrix_product(
        self, m: int, n: int, k: int, a: Spectra, b: Spectra, c: Spectra, beta: int, first: int
    ) -> GemmCall:
        """C = A B, or C + A B, of `MAX_BATCH` frequencies from `first` on."""
        item, dtype = ITEMSIZE[self.spectrum_dtype], self.spectrum_dtype

        def matrix(at: Spectra) -> Matrix:
            place = Address(at.buffer, (first * at.size + at.offset) * item)
            return Matrix(place, at.ld, at.size, at.transposed, at.conjugated)

        compute = compute_type(dtype, self.problem.allow_tf32)
        batch = min(MAX_BATCH, self.frequencies - first)
        return GemmCall(m, n, k, matrix(a), matrix(b), matrix(c), batch, dtype, dtype, compute, beta, "products")


class Spectra(NamedTuple):
    """A matrix of each frequency: a part of the elements in `buffer` that a frequency has, `size` of them."""

    buffer: str
    offset: int
    ld: int
    size: int
    transposed: bool = False
    conjugated: bool = False


def grid_of(places: int, channels: int, lanes: int) -> tuple[Triple, int]:
    """Places, with a thread for each lane, along x; runs of channels along y."""
    return (min(-(-places * lanes // BLOCK), GRID_X), min(-(-channels // (lanes * CHANNELS)), GRID_Y), 1), BLOCK


# --- the choice of tiles --------------------------------------------------------------------------------------------


def draft_tiled(problem: Shared, kind: type[Tiling]) -> Draft:
    """The tiles and the order of spectra that take the least by the model; NotApplicable where there is no room for any."""
    if refusal := problem.fft_refusal:
        raise NotApplicable(refusal)
    if not problem.gpu.has_transforms:
        raise NotApplicable("CuPy finds no cuFFT: install cupy-cuda13x[ctk], or nvidia-cufft")
    if problem.method == "auto":
        _refuse_at_once(problem)
    best = min(_tilings(problem, kind), key=lambda found: found.seconds, default=None)
    if best is None:
        raise no_room(problem.limit)
    return best.tiling.draft() if best.shares == 1 else _in_shares(problem, best.tiling)


class _Found(NamedTuple):
    """A tiling of a whole problem, or of the first of several shares, and what all of them take by the model."""

    tiling: Tiling
    shares: int
    seconds: float


def _tilings(problem: Shared, kind: type[Tiling]) -> Iterator[_Found]:
    """Those that there is room for, in as few shares as that takes."""
    geometry = problem.geometry
    for block, order in product(block_extents(geometry), ORDERS):
        for groups, outputs in share_sizes(geometry):
            shares = -(-geometry.groups // groups) * -(-geometry.group_outputs // outputs)
            if shares > MOST_SHARES:
                break
            share, _ = share_problem(problem, range(groups), range(outputs))
            tiling = kind(share, block, order)
            if order and not tiling.has_matrices:
                break
            if tiling.most_units:
                yield _Found(tiling, shares, shares * tiling.seconds)
                break


def _in_shares(problem: Shared, first: Tiling) -> Draft:
    """Shares of a problem one after the other, tiled as the first of them is."""
    geometry, groups, outputs = problem.geometry, first.problem.geometry.groups, first.problem.geometry.group_outputs

    def of_all(room: int) -> Draft:
        drafts = []
        for own_groups in ranges_of(geometry.groups, groups):
            for own_outputs in ranges_of(geometry.group_outputs, outputs):
                share, _ = share_problem(problem, own_groups, own_outputs)
                tiling = replace(first, problem=replace(share, workspace_limit=room))
                if not tiling.most_units:
                    raise no_room(problem.limit)
                drafts.append(tiling.draft())
        reason = f"{len(drafts)} shares of {groups * outputs} outputs; {drafts[0].reason}"
        return in_sequence("fft", drafts, reason)

    return within(problem.limit, of_all)


def _refuse_at_once(problem: Shared) -> None:
    """Most problems are told by a few operations: another method takes less than transforms take at the least."""
    geometry, gpu, dtype = problem.geometry, problem.gpu, problem.out.dtype
    filled = min(1.0, geometry.group_outputs / cost.GEMM_TILE)
    products = gpu.gemm_rate(dtype, compute_type(dtype, problem.allow_tf32)) * filled
    others = problem.flops / max(products, cost.core_rate(dtype, gpu) * cost.GENERAL)
    pixels = geometry.batch * geometry.out_channels * geometry.pixels
    images = (bytes_of(problem.xs) + pixels * ITEMSIZE[problem.out.dtype]) / gpu.bandwidth
    # Into tiles, through the products, out of tiles, there and back along each axis.
    least = images * (4 + 2 * len(transformed_axes(geometry)) / cost.TRANSFORM) + 7 * gpu.launch_seconds
    if others < cost.TRANSFORMS_DOUBT * least:
        raise NotApplicable(f"transforms take {cost.by_model(least)} at the least, and are taken where they win by far")


def block_extents(windows: Windows) -> Iterator[Triple]:
    """Pixels of the result that come from one tile, the fewest first: all axes as much longer than the kernel."""
    along, longer, before = transformed_axes(windows), 1.0, (0, 0, 0)
    whole = tuple(extent if axis in along else 1 for axis, extent in enumerate(windows.out_size))
    while before != whole:
        longer *= LONGER
        extents = [1, 1, 1]
        lengths = {axis: max(SHORTEST, int(windows.span[axis] * longer)) for axis in along}
        if prod(lengths.values()) > MOST_ELEMENTS:
            return
        for axis, length in lengths.items():
            most = (fast_length(length) - windows.span[axis]) // windows.stride[axis] + 1
            extents[axis] = even_part(windows.out_size[axis], most)
        if tuple(extents) != before:
            before = (extents[0], extents[1], extents[2])
            yield before


def fast_length(least: int, multiple: int = 1) -> int:
    """The next length that cuFFT has quick kernels for: a product of 2, 3, 5 and 7; a multiple of 1 or 2."""
    lengths = _fast_lengths()
    return multiple * lengths[bisect_left(lengths, -(-least // multiple))]


@lru_cache(maxsize=1)
def _fast_lengths() -> list[int]:
    """All up to `MOST_ELEMENTS`, and one more."""
    lengths = [1]
    for factor in (2, 3, 5, 7):
        for length in lengths:  # which grows meanwhile
            if length * factor <= MOST_ELEMENTS + 1:
                lengths.append(length * factor)
    return sorted(lengths)
