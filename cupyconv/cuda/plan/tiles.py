"""Tiles and their transforms, shared by convolutions and weight gradients of method "fft" on CUDA.

A unit is one tile of one sample, with all channels.  Along an axis with one tap, tiles are one pixel long, and only the
other axes are transformed.

Spectra have one of two orders.  With contiguous frequencies, a kernel multiplies them one by one; this suits few
channels.  With contiguous channels (interleaved), each frequency has a matrix product, and one cuBLAS call computes up
to 65,535 of them.  cuFFT reads and writes both orders, so that nothing is transposed.

Merged inputs are cut into tiles and transformed one after the other, in the same memory.
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
from cupyconv.problem.transforms import ERRORS, Shared, does_not_fit, share_problem, share_sizes, transformed_axes

#: Threads per block of these kernels, and channels per thread if the threads of a warp share channels.
BLOCK, CHANNELS = 256, 8
#: Neighbouring threads on neighbouring channels if channels are contiguous in tiles but not in the image: enough to
#: write a whole sector.  If channels are contiguous in the image too, it is a whole warp.
SIDE_BY_SIDE = 8
#: Shortest tile; factor between the lengths of successive candidates, which begin with the kernel.
SHORTEST, LONGER = 16, 1.8
#: Maximum elements of all tiles of a step: the kernels and cuFFT count them in 32 bits.
MAX_ELEMENTS = 2**31 - 1
#: Maximum GEMM calls for the products of all frequencies; for more groups, a kernel multiplies one by one.
MAX_CALLS = 64
#: Maximum number of shares of a problem: each has its own launches, which a plan lists.
MAX_SHARES = 64
#: Orders of spectra: whether they are interleaved.
ORDERS = (False, True)
#: Maximum multiply-adds of a convolution whose sums are computed again if they are not finite; this many take about a
#: second.
MAX_PRODUCTS = 1 << 40


@dataclass(frozen=True)
class Tiling:
    """One division of a problem into tiles, with one order of its spectra."""

    problem: Shared
    #: Pixels of the convolution's result that belong to one tile.
    block: Triple
    #: Whether channels are contiguous, and each frequency has a matrix product.
    interleaved: bool

    @property
    def seconds(self) -> float:
        """The estimated time."""
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
        how = "one matrix product per frequency" if self.interleaved else "products of spectra"
        again = self.again if self.computes_again else self.not_again
        notes = (
            f"non-finite results {again}",
            "cuFFT's work area is an estimate until the first run; the stream keeps it",
        )
        reason = f"{how}; {counted(self.units, 'tile')} of {shown}{chunks}; {ERRORS}"
        return Draft("fft", tuple(steps), self.workspace(part), reason, notes, cost.TRANSFORMS_DOUBT)

    # To be overridden for each kind of problem.

    #: The treatment of results that are not finite: if they are computed again, and if they are not.
    again = "are recomputed from their windows"
    not_again = "are not recomputed and fill their whole tile"

    def first_steps(self) -> list[Step]:
        """Return the steps before the first chunk."""
        return []

    @abstractmethod
    def steps(self, first: int, units: int) -> list[Step]:
        """Return the steps for the chunk of `units` units that starts at `first`."""

    def last_steps(self) -> list[Step]:
        """Return the steps after the last chunk."""
        return []

    @abstractmethod
    def buffers(self, units: int) -> tuple[Buffer, ...]:
        """Return the workspace, except for cuFFT's, for chunks of `units` units; the first buffer holds tiles."""

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
        """The number of tiles along each axis of a sample."""
        depth, height, width = (-(-n // part) for n, part in zip(self.problem.geometry.out_size, self.block))
        return depth, height, width

    @property
    def units(self) -> int:
        return self.problem.geometry.batch * prod(self.tiles)

    @cached_property
    def dtype(self) -> str:
        """The dtype of tiles and sums."""
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
        """Bytes of one tile of one channel."""
        return self.elements * ITEMSIZE[self.dtype]

    @cached_property
    def spectrum_bytes(self) -> int:
        """Bytes of the spectrum of one tile of one channel."""
        return self.frequencies * ITEMSIZE[self.spectrum_dtype]

    @cached_property
    def kernels(self) -> int:
        """The number of pairs of output and channel with a kernel."""
        return self.problem.geometry.out_channels * self.problem.geometry.group_channels

    @cached_property
    def parts(self) -> list[range]:
        """The channels of each input, counted over all inputs."""
        offsets = self.problem.geometry.channel_offsets
        return [range(begin, begin + x.shape[1]) for x, begin in zip(self.problem.xs, offsets)]

    @cached_property
    def widest(self) -> int:
        """The largest number of channels of an input."""
        return max(map(len, self.parts))

    def workspace(self, units: int) -> tuple[Buffer, ...]:
        """Return all workspace, including cuFFT's own work area, which stays allocated for the stream."""
        own = self.buffers(units)
        return *own, Buffer("cuFFT's own", self.work_bytes(own[0].nbytes // self.image_bytes), is_kept=True)

    def work_bytes(self, batch: int) -> int:
        """Return the memory that cuFFT is expected to need for `batch` transforms."""
        return ceil(self.problem.gpu.transform_area * batch * self.spectrum_bytes)

    @cached_property
    def most_units(self) -> int:
        """The units of the largest chunk that fits the workspace limit; 0 if none fits."""
        geometry, limit = self.problem.geometry, self.problem.limit
        channels = max(self.widest, geometry.out_channels)
        if self.kernels * self.elements > MAX_ELEMENTS:
            return 0
        most = min(self.units, MAX_DIMENSION, MAX_ELEMENTS // (channels * self.elements))
        sizes = range(1, most + 1)
        return bisect_right(sizes, limit, key=lambda units: sum(buffer.space for buffer in self.workspace(units)))

    @property
    def chunk(self) -> int:
        """The units per chunk."""
        return even_part(self.units, self.most_units)

    @cached_property
    def computes_again(self) -> bool:
        """Whether results that are not finite are computed again by the definition."""
        return self.problem.geometry.products <= MAX_PRODUCTS and len(self.problem.xs) <= MAX_SOURCES

    @cached_property
    def has_matrices(self) -> bool:
        """Whether the products are matrix products that a few cuBLAS calls compute for all frequencies."""
        geometry = self.problem.geometry
        largest = max(geometry.in_channels, geometry.out_channels)
        if geometry.group_channels * geometry.group_outputs == 1:
            return False
        return geometry.groups * -(-self.frequencies // MAX_BATCH) <= MAX_CALLS and largest <= MAX_DIMENSION

    # Steps.

    def transform(self, source: str, target: str, batch: int, *, inverse: bool = False, purpose: str = "") -> Transform:
        size = tuple(self.tile[axis] for axis in transformed_axes(self.problem.geometry))
        places = Address(source), Address(target)
        nbytes = self.work_bytes(batch)
        return Transform(size, batch, *places, self.dtype, inverse, self.interleaved, purpose, nbytes)

    def strides(self, units: int, channels: int, elements: int) -> tuple[int, int, int]:
        """Return the strides along units, channels, and elements or frequencies."""
        return (channels, 1, units * channels) if self.interleaved else (channels * elements, elements, 1)

    def lanes(self, array: Operand) -> int:
        """Return how many neighbouring threads compute neighbouring channels."""
        most = WARP if is_along_channels(array) else SIDE_BY_SIDE
        return min(most, 1 << (array.shape[1] - 1).bit_length()) if self.interleaved else 1

    def cut_inputs(self, first: int, units: int) -> Iterator[tuple[range, list[Step]]]:
        """Yield, for each input, its channels and the steps that compute the spectra of its tiles."""
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
        """Return the launch that cuts an image into tiles; each has `read` elements per axis, or all, then zeros."""
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
        """Return the launch with the time to find its positions, once per thread, and to loop over the channels."""
        gpu = self.problem.gpu
        operations = places * (cost.TILE_PLACE * -(-channels // CHANNELS) + 4 * channels)
        return replace(launch, arithmetic_seconds=2 * operations / gpu.fp32)

    def multiplied(self, launch: KernelLaunch, products: int) -> KernelLaunch:
        """Return the launch with the time of its complex products, whose factors are read from L2."""
        gpu, flops = self.problem.gpu, 8 * products
        loads = 2 * products * ITEMSIZE[self.spectrum_dtype] / (gpu.bandwidth * cost.L2_SPEED)
        return replace(launch, flops=flops, arithmetic_seconds=max(flops / cost.core_rate(self.dtype, gpu), loads))

    def groups_of(self, part: range) -> Iterator[tuple[int, int, int]]:
        """Yield each group with some of the channels in `part`, and the range of these, counted over all groups."""
        channels = self.problem.geometry.group_channels
        for group in range(part.start // channels, -(-part.stop // channels)):
            yield group, max(part.start, group * channels), min(part.stop, (group + 1) * channels)

    def matrix_product(
        self, m: int, n: int, k: int, a: Spectra, b: Spectra, c: Spectra, beta: int, first: int
    ) -> GemmCall:
        """Return the call for C = A B, or C += A B, of up to `MAX_BATCH` frequencies from `first` on."""
        item, dtype = ITEMSIZE[self.spectrum_dtype], self.spectrum_dtype

        def matrix(at: Spectra) -> Matrix:
            place = Address(at.buffer, (first * at.size + at.offset) * item)
            return Matrix(place, at.ld, at.size, at.transposed, at.conjugated)

        compute = compute_type(dtype, self.problem.allow_tf32)
        batch = min(MAX_BATCH, self.frequencies - first)
        return GemmCall(m, n, k, matrix(a), matrix(b), matrix(c), batch, dtype, dtype, compute, beta, "products")


class Spectra(NamedTuple):
    """One matrix per frequency, which is a part of the `size` elements that each frequency has in `buffer`."""

    buffer: str
    offset: int
    ld: int
    size: int
    transposed: bool = False
    conjugated: bool = False


def grid_of(places: int, channels: int, lanes: int) -> tuple[Triple, int]:
    """Return a grid with places along x, one thread per lane, and runs of channels along y; and the block size."""
    return (min(-(-places * lanes // BLOCK), GRID_X), min(-(-channels // (lanes * CHANNELS)), GRID_Y), 1), BLOCK


# --- the choice of tiles --------------------------------------------------------------------------------------------


def draft_tiled(problem: Shared, kind: type[Tiling]) -> Draft:
    """Draft the fastest tiles and order of spectra by the cost model, or raise `NotApplicable` if none fits."""
    if refusal := problem.fft_refusal:
        raise NotApplicable(refusal)
    if not problem.gpu.has_transforms:
        raise NotApplicable("CuPy does not find cuFFT: install cupy-cuda13x[ctk] or nvidia-cufft")
    if problem.method == "auto":
        _refuse_at_once(problem)
    best = min(_tilings(problem, kind), key=lambda found: found.seconds, default=None)
    if best is None:
        raise does_not_fit(problem.limit)
    return best.tiling.draft() if best.shares == 1 else _in_shares(problem, best.tiling)


class _Found(NamedTuple):
    """A tiling of a whole problem, or of the first of several shares, and the estimated time of all shares."""

    tiling: Tiling
    shares: int
    seconds: float


def _tilings(problem: Shared, kind: type[Tiling]) -> Iterator[_Found]:
    """Yield the tilings that fit the workspace limit, each with as few shares as possible."""
    geometry = problem.geometry
    for block, order in product(block_extents(geometry), ORDERS):
        for groups, outputs in share_sizes(geometry):
            shares = -(-geometry.groups // groups) * -(-geometry.group_outputs // outputs)
            if shares > MAX_SHARES:
                break
            share, _ = share_problem(problem, range(groups), range(outputs))
            tiling = kind(share, block, order)
            if order and not tiling.has_matrices:
                break
            if tiling.most_units:
                yield _Found(tiling, shares, shares * tiling.seconds)
                break


def _in_shares(problem: Shared, first: Tiling) -> Draft:
    """Draft the shares of a problem one after the other, all with the tiling of the first."""
    geometry, groups, outputs = problem.geometry, first.problem.geometry.groups, first.problem.geometry.group_outputs

    def of_all(room: int) -> Draft:
        drafts = []
        for own_groups in ranges_of(geometry.groups, groups):
            for own_outputs in ranges_of(geometry.group_outputs, outputs):
                share, _ = share_problem(problem, own_groups, own_outputs)
                tiling = replace(first, problem=replace(share, workspace_limit=room))
                if not tiling.most_units:
                    raise does_not_fit(problem.limit)
                drafts.append(tiling.draft())
        reason = f"{len(drafts)} shares of {groups * outputs} output channels; {drafts[0].reason}"
        return in_sequence("fft", drafts, reason)

    return within(problem.limit, of_all)


def _refuse_at_once(problem: Shared) -> None:
    """Raise `NotApplicable` if a rough estimate shows that another method is faster; this rules out most problems."""
    geometry, gpu, dtype = problem.geometry, problem.gpu, problem.out.dtype
    filled = min(1.0, geometry.group_outputs / cost.GEMM_TILE)
    products = gpu.gemm_rate(dtype, compute_type(dtype, problem.allow_tf32)) * filled
    others = problem.flops / max(products, cost.core_rate(dtype, gpu) * cost.GENERAL)
    pixels = geometry.batch * geometry.out_channels * geometry.pixels
    images = (bytes_of(problem.xs) + pixels * ITEMSIZE[problem.out.dtype]) / gpu.bandwidth
    # Lower bound: into tiles, through the products, out of the tiles, and two transforms along each axis.
    least = images * (4 + 2 * len(transformed_axes(geometry)) / cost.TRANSFORM) + 7 * gpu.launch_seconds
    if others < cost.TRANSFORMS_DOUBT * least:
        raise NotApplicable(f"{cost.by_model(least)} or more; chosen only if much faster than other methods")


def block_extents(windows: Windows) -> Iterator[Triple]:
    """Yield candidates for the pixels per tile, the fewest first: all axes exceed the kernel by the same factor."""
    along, longer, before = transformed_axes(windows), 1.0, (0, 0, 0)
    whole = tuple(extent if axis in along else 1 for axis, extent in enumerate(windows.out_size))
    while before != whole:
        longer *= LONGER
        extents = [1, 1, 1]
        lengths = {axis: max(SHORTEST, int(windows.span[axis] * longer)) for axis in along}
        if prod(lengths.values()) > MAX_ELEMENTS:
            return
        for axis, length in lengths.items():
            most = (fast_length(length) - windows.span[axis]) // windows.stride[axis] + 1
            extents[axis] = even_part(windows.out_size[axis], most)
        if tuple(extents) != before:
            before = (extents[0], extents[1], extents[2])
            yield before


def fast_length(least: int, multiple: int = 1) -> int:
    """Return the next length with fast cuFFT kernels: a product of 2, 3, 5 and 7, divisible by `multiple` (1 or 2)."""
    lengths = _fast_lengths()
    return multiple * lengths[bisect_left(lengths, -(-least // multiple))]


@lru_cache(maxsize=1)
def _fast_lengths() -> list[int]:
    """Return all fast lengths up to `MAX_ELEMENTS` + 1, sorted."""
    lengths = [1]
    for factor in (2, 3, 5, 7):
        for length in lengths:  # the loop also visits what it appends
            if length * factor <= MAX_ELEMENTS + 1:
                lengths.append(length * factor)
    return sorted(lengths)
